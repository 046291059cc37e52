// The 16-bit element types of the tensor cores and their differences; of float, the part that results need.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "attention.h"

namespace flash_wmma {

using half = __half;
using bf16 = __nv_bfloat16;

template <class T>
struct Element;

template <>
struct Element<half> {
    static constexpr DType kDType = DType::kFloat16;
    using Pair = __half2;
    __device__ static half from(float x) { return __float2half_rn(x); }
    __device__ static Pair pair(float a, float b) { return __floats2half2_rn(a, b); }
    /// Both elements of a pair in a register.
    __device__ static float2 floats(std::uint32_t pair) {
        const Pair& x = *reinterpret_cast<const Pair*>(&pair);
        return make_float2(__low2float(x), __high2float(x));
    }
    /// A sum of attention weights up to this proves that none of them overflows T (a sum of 65504 does not).
    static constexpr float kLargestSum = 60000.f;
};

template <>
struct Element<bf16> {
    static constexpr DType kDType = DType::kBFloat16;
    using Pair = __nv_bfloat162;
    __device__ static bf16 from(float x) { return __float2bfloat16_rn(x); }
    __device__ static Pair pair(float a, float b) { return __floats2bfloat162_rn(a, b); }
    __device__ static float2 floats(std::uint32_t pair) {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }
    static constexpr float kLargestSum = 60000.f;  // bf16 holds far more; O = P V stays far from fp32's limit
};

template <>
struct Element<float> {
    using Pair = float2;
    __device__ static Pair pair(float a, float b) { return make_float2(a, b); }
};

/// Eight elements from a 16-byte boundary on, as floats.
__device__ inline void load_8(const float* from, float (&x)[8]) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
template <class T>
__device__ __forceinline__ void load_8(const T* from, float (&x)[8]) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    const std::uint32_t pairs[] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float2 pair = Element<T>::floats(pairs[i]);
        x[2 * i] = pair.x;
        x[2 * i + 1] = pair.y;
    }
}

}  // namespace flash_wmma
