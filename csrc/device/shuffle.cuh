// Exchanges between the lanes of a warp, whatever its size: 32 lanes on NVIDIA's GPUs, 32 or 64 on AMD's, whose
// shuffles take no mask and have no names that end in _sync. All lanes of the warp take part in each.
#pragma once

#include "device/constants.cuh"

namespace flash_wmma {

/// The lanes of the largest warp among the devices compiled for; the emulator (g++) has both sizes.
#ifdef __NVCC__
inline constexpr int kMostLanes = 32;
#else
inline constexpr int kMostLanes = 64;
#endif

/// Lanes of a warp (AMD: of a wavefront). Known to the compiler on NVIDIA's GPUs, so that loops over it are unrolled.
__device__ __forceinline__ int warp_lanes() {
#ifdef __CUDA_ARCH__
    return 32;
#else
    return warpSize;
#endif
}

/// The value of lane (own ^ lanes). `lanes` is less than the warp: a power of two pairs up lanes at that distance.
template <class T>
__device__ __forceinline__ T shuffle_xor(T value, int lanes) {
#ifdef __HIP_PLATFORM_AMD__
    return __shfl_xor(value, lanes);
#else
    return __shfl_xor_sync(kWarpMask, value, lanes);
#endif
}

/// The value of lane `source` of the own group of `width` neighbouring lanes, a power of two up to the warp.
template <class T>
__device__ __forceinline__ T shuffle(T value, int source, int width) {
#ifdef __HIP_PLATFORM_AMD__
    return __shfl(value, source, width);
#else
    return __shfl_sync(kWarpMask, value, source, width);
#endif
}

/// Whether `holds` is true in some lane of the warp.
__device__ __forceinline__ bool any_lane(bool holds) {
#ifdef __HIP_PLATFORM_AMD__
    return __any(holds);
#else
    return __any_sync(kWarpMask, holds);
#endif
}

/// In how many of the first 32 lanes of the warp `holds` is true.
__device__ __forceinline__ int count_lanes(bool holds) {
#ifdef __HIP_PLATFORM_AMD__
    return __popc(static_cast<unsigned>(__ballot(holds)));  // of a mask of 64 bits the lower half
#else
    return __popc(__ballot_sync(kWarpMask, holds));
#endif
}

/// Lanes see each other's writes to shared memory.
__device__ __forceinline__ void sync_warp() {
#ifdef __HIP_PLATFORM_AMD__
    __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "wavefront");
    __builtin_amdgcn_wave_barrier();
#else
    __syncwarp();
#endif
}

/// op over each group of `width` neighbouring lanes, a power of two up to the warp; every lane gets it. The order is
/// fixed, and the same for all lanes if op is commutative.
template <class T, class Op>
__device__ __forceinline__ T reduce_lanes(T value, Op op, int width) {
    for (int lanes = width / 2; lanes > 0; lanes /= 2) value = op(value, shuffle_xor(value, lanes));
    return value;
}

}  // namespace flash_wmma
