// Ctrl-C ends a launch.
#pragma once

#include <atomic>

namespace flash_wmma::emulator {

/// SIGINT came since the launch began. Lanes stop where they next meet the emulator.
extern std::atomic<bool> g_interrupted;

/// While there is one, SIGINT sets g_interrupted and then goes where it went before, to Python's handler say. A process
/// that has no handler is left to end as ever.
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
