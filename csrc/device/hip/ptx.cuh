// The instructions of csrc/device/ptx.cuh that the kernels without tensor cores use, under HIP: the same functions.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

extern "C" __device__ __attribute__((pure)) float __ocml_native_exp2_f32(float);  // of ROCm's device libraries

namespace flash_wmma::ptx {

/// 2^x; denormal inputs and results flush to zero (v_exp_f32).
__device__ __forceinline__ float ex2(float x) { return __ocml_native_exp2_f32(x); }

/// The larger of two; NaN if one is.
__device__ __forceinline__ float max_nan(float x, float y) { return x > y || x != x ? x : y; }

/// x, hidden from the compiler.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+v"(x));
    return x;
}

/// Whether red_add_4 is one instruction.
inline constexpr bool kVectorRed = false;

/// Adds x to the float at p in global memory, without an answer (global_atomic_add_f32).
__device__ __forceinline__ void red_add(float* p, float x) { unsafeAtomicAdd(p, x); }
__device__ __forceinline__ void red_add_4(float* p, const float (&x)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) red_add(p + i, x[i]);
}

/// There is no asynchronous copy: as on Turing, through registers, complete on return.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, int bytes) {
    *static_cast<uint4*>(shared) = bytes ? *static_cast<const uint4*>(global) : uint4{};
}
__device__ __forceinline__ void cp_async_commit() {}
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {}

}  // namespace flash_wmma::ptx
