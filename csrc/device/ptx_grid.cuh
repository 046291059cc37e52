// What warps need that wait for other blocks of their grid, beside the counters of ptx_sm90.cuh. sm_90.
#pragma once

#include <cstdint>

namespace flash_wmma::ptx {

/// Makes writes to global memory that are ordered before the fence, other blocks' too, visible to tensor copies that
/// this thread issues after it (fence.proxy.async).
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// Fetches `bytes` from `from` on to L2, both multiples of 16 (cp.async.bulk.prefetch).
__device__ __forceinline__ void prefetch_to_l2(const void* from, unsigned bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(from), "r"(bytes) : "memory");
}

/// Rests for about so many nanoseconds.
__device__ __forceinline__ void sleep(unsigned nanoseconds) {
    asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory");
}

}  // namespace flash_wmma::ptx
