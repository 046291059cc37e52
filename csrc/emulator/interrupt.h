// Ctrl-C ends a launch.
#pragma once

#include <atomic>

namespace flash_wmma::emulator {

/// SIGINT came since the launch began. Lanes stop where they next meet the emulator.
extern std::atomic<bool> g_interrupted;
/// A block had a finding since the launch began: those that run beside it stop, since they may wait for it.
extern std::atomic<bool> g_abandoned;

/// While an InterruptWatch exists, SIGINT sets g_interrupted and then calls the previous handler (for example
/// Python's). A process without a handler ends as usual.
class InterruptWatch {
  public:
    InterruptWatch();
    ~InterruptWatch();
    InterruptWatch(const InterruptWatch&) = delete;
    InterruptWatch& operator=(const InterruptWatch&) = delete;

  private:
    bool watching_ = false;
};

}  // namespace flash_wmma::emulator
