// A block's shared memory, on CUDA: one struct per kernel, which is the documented map of it. Kernel files include
// <shared_memory.cuh>; the emulator has its own definition, which gives every resident block an arena of its own.
#pragma once

namespace flash_wmma {

/// The block's dynamic shared memory as a `Map`; the launch must ask for sizeof(Map) bytes. Uninitialised.
template <class Map>
__device__ __forceinline__ Map& shared_memory() {
    static_assert(alignof(Map) <= 1024, "the base of shared memory is 1024-byte aligned");
    extern __shared__ __align__(1024) unsigned char bytes[];
    return *reinterpret_cast<Map*>(bytes);
}

}  // namespace flash_wmma
