// Programmatic launches: a grid starts while the one before it still runs, and waits for it where it needs its results.
// For kernels that are compiled for several architectures: code for those before sm_90 does not know such launches.
//
// Every thread of a grid waits: whoever waits for that grid then knows that the ones before it are complete as well.
#pragma once

#include <ptx_sm90.cuh>

#include <cstdint>

#include "registry.h"

namespace flash_wmma {

/// What a launch may ask for, of a kernel of the source that includes this: the device runs its code for sm_90. Later
/// ones run what the driver makes of sm_80's PTX.
inline bool may_launch_programmatically(const DeviceFacts& device) {
#ifdef __CUDA_ARCH_LIST__
    constexpr int kCompiledFor[] = {__CUDA_ARCH_LIST__};
    bool compiled = false;
    for (const int arch : kCompiledFor) compiled |= arch == 900;
    return compiled && device.arch == 90;
#else
    return device.arch == 90;
#endif
}

/// Whether grids overlap in this code.
__device__ constexpr bool grids_overlap() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    return true;
#else
    return false;
#endif
}

/// Lets the next grid start once all blocks of this one have come here.
__device__ __forceinline__ void let_next_grid_start() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    ptx::let_next_grid_start();
#endif
}

/// Waits until the grids before are complete and their writes are visible.
__device__ __forceinline__ void wait_for_previous_grids() {
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
    ptx::wait_for_previous_grids();
#endif
}

/// Reads what a grid before may still write: from the L2 cache, so that no line stays in L1 that is stale afterwards.
__device__ __forceinline__ int read_early(const std::int32_t* from) {
    return *static_cast<const volatile std::int32_t*>(from);
}

}  // namespace flash_wmma
