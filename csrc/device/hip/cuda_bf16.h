// __nv_bfloat16 and __nv_bfloat162 under HIP, whose own type has had several names: the upper half of a float, rounded
// to the nearest, ties to even.
#pragma once

#include <cuda_runtime.h>

struct __nv_bfloat16 {
    std::uint16_t raw;

    __nv_bfloat16() = default;
    __host__ __device__ explicit __nv_bfloat16(float x) {
        const std::uint32_t bits = __builtin_bit_cast(std::uint32_t, x);
        raw = x != x ? 0x7fff : static_cast<std::uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    }
    __host__ __device__ operator float() const { return __builtin_bit_cast(float, std::uint32_t{raw} << 16); }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

__host__ __device__ inline __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
__host__ __device__ inline float __bfloat162float(__nv_bfloat16 x) { return x; }
__host__ __device__ inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__nv_bfloat16(x), __nv_bfloat16(y)};
}
