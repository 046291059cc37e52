// The instructions of csrc/device/ptx_grid.cuh, in the emulator.
#pragma once

#include <launch.h>

#include <cstdint>

namespace flash_wmma::ptx {

EMULATOR_BRICK inline void fence_proxy_async_global() { emulator::fence_proxy_async_global(); }
EMULATOR_INLINE void prefetch_to_l2(const void*) {}
EMULATOR_INLINE void sleep(unsigned) {}

}  // namespace flash_wmma::ptx
