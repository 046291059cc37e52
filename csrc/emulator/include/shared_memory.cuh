// A block's shared memory, in the emulator: the same interface as csrc/device/shared_memory.cuh; every resident block
// has an arena of its own.
#pragma once

#include <cuda_runtime.h>

namespace flash_wmma {

template <class Map>
EMULATOR_BRICK Map& shared_memory() {
    static_assert(alignof(Map) <= 1024, "the base of shared memory is 1024-byte aligned");
    return *static_cast<Map*>(emulator::shared_memory(sizeof(Map), EMULATOR_PC));
}

}  // namespace flash_wmma
