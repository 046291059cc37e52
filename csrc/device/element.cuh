// The 16-bit element types of the tensor cores, and what differs between them.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "../attention.h"

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
    /// Both of a pair in a register.
    __device__ static float2 floats(std::uint32_t pair) {
        const Pair& x = *reinterpret_cast<const Pair*>(&pair);
        return make_float2(__low2float(x), __high2float(x));
    }
    /// Largest sum of attention weights that proves that no weight of it overflows T (65504 does not).
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

}  // namespace flash_wmma
