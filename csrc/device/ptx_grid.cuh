// What warps need that wait for other blocks of their grid, beside the counters of ptx_sm90.cuh. sm_90.
#pragma once

#include <cstdint>

namespace flash_wmma::ptx {

/// Makes writes to global memory that are ordered before the fence, other blocks' too, visible to tensor copies that
/// this thread issues after it (fence.proxy.async).
__device__ __forceinline__ void fence_proxy_async_global() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

/// Fetches the 128 bytes around `from` to L2.
__device__ __forceinline__ void prefetch_to_l2(const void* from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

/// Rests for about so many nanoseconds.
__device__ __forceinline__ void sleep(unsigned nanoseconds) {
    asm volatile("nanosleep.u32 %0;" ::"r"(nanoseconds) : "memory");
}

}  // namespace flash_wmma::ptx
