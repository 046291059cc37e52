#include "emulator/interrupt.h"

#include <csignal>

namespace flash_wmma::emulator {

std::atomic<bool> g_interrupted;
std::atomic<bool> g_abandoned;

namespace {

struct sigaction g_before;

void on_interrupt(int signal, siginfo_t* info, void* context) {
    g_interrupted.store(true, std::memory_order_relaxed);
    if (g_before.sa_flags & SA_SIGINFO) g_before.sa_sigaction(signal, info, context);
    else g_before.sa_handler(signal);
}

bool is_ours(const struct sigaction& action) {
    return (action.sa_flags & SA_SIGINFO) && action.sa_sigaction == on_interrupt;
}

}  // namespace

InterruptWatch::InterruptWatch() {
    struct sigaction before;
    if (sigaction(SIGINT, nullptr, &before) != 0 || is_ours(before)) return;
    g_interrupted = false;
    if (!(before.sa_flags & SA_SIGINFO) && (before.sa_handler == SIG_DFL || before.sa_handler == SIG_IGN)) return;
    g_before = before;
    struct sigaction action = before;
    action.sa_flags |= SA_SIGINFO;
    action.sa_sigaction = on_interrupt;
    watching_ = sigaction(SIGINT, &action, nullptr) == 0;
}

InterruptWatch::~InterruptWatch() {
    struct sigaction now;
    if (watching_ && sigaction(SIGINT, nullptr, &now) == 0 && is_ours(now)) sigaction(SIGINT, &g_before, nullptr);
}

}  // namespace flash_wmma::emulator
