#include "emulator/late_writes.h"

#include <algorithm>

#include "emulator/machine.h"

namespace flash_wmma::emulator {

LateWrites g_late_writes;

void LateWrites::add(void* to, const void* from, std::size_t bytes) {
    const auto copy = [&](const void* x) {
        return std::vector<char>(static_cast<const char*>(x), static_cast<const char*>(x) + bytes);
    };
    writes_.push_back({to, copy(to), copy(from)});
}

void LateWrites::withhold() {
    for (const Write& w : writes_) std::copy(w.before.begin(), w.before.end(), static_cast<char*>(w.to));
    withheld_ = !writes_.empty();
}

void LateWrites::land() {
    for (const Write& w : writes_) std::copy(w.after.begin(), w.after.end(), static_cast<char*>(w.to));
    withheld_ = false;
}

void wait_for_previous_grids() {
    if (!g_late_writes.withheld()) return;
    t_worker->read_async_copies();
    g_late_writes.land();
}

}  // namespace flash_wmma::emulator

extern "C" void flash_wmma_emulator_write_late(void* to, const void* from, std::size_t bytes) {
    flash_wmma::emulator::g_late_writes.add(to, from, bytes);
}
