// __nv_bfloat16 and __nv_bfloat162, with the toolkit's names, rounding and sizes: the upper half of a float,
// conversions to nearest even, arithmetic in float rounded once.
#pragma once

#include <cuda_runtime.h>

namespace flash_wmma::emulator {
EMULATOR_INLINE std::uint16_t bfloat16_bits(float x) {
    const auto word = bits<std::uint32_t>(x);
    if (x != x) return 0x7fff;
    return static_cast<std::uint16_t>((word + 0x7fff + (word >> 16 & 1)) >> 16);
}
}  // namespace flash_wmma::emulator

struct alignas(2) __nv_bfloat16 {
    std::uint16_t raw;

    __nv_bfloat16() = default;
    EMULATOR_INLINE __nv_bfloat16(float x) : raw(::flash_wmma::emulator::bfloat16_bits(x)) {}
    EMULATOR_INLINE explicit __nv_bfloat16(double x) : __nv_bfloat16(static_cast<float>(x)) {}
    EMULATOR_INLINE explicit __nv_bfloat16(int x) : __nv_bfloat16(static_cast<float>(x)) {}
    EMULATOR_INLINE operator float() const {
        return ::flash_wmma::emulator::bits<float>(static_cast<std::uint32_t>(raw) << 16);
    }
};
struct alignas(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};

EMULATOR_INLINE __nv_bfloat16 __float2bfloat16(float x) { return __nv_bfloat16(x); }
EMULATOR_INLINE __nv_bfloat16 __float2bfloat16_rn(float x) { return __nv_bfloat16(x); }
EMULATOR_INLINE float __bfloat162float(__nv_bfloat16 x) { return x; }
EMULATOR_INLINE __nv_bfloat16 __ushort_as_bfloat16(unsigned short x) {
    return ::flash_wmma::emulator::bits<__nv_bfloat16>(x);
}
EMULATOR_INLINE unsigned short __bfloat16_as_ushort(__nv_bfloat16 x) { return x.raw; }
EMULATOR_INLINE __nv_bfloat162 __floats2bfloat162_rn(float x, float y) { return {__nv_bfloat16(x), __nv_bfloat16(y)}; }
EMULATOR_INLINE __nv_bfloat162 __float22bfloat162_rn(float2 x) { return {__nv_bfloat16(x.x), __nv_bfloat16(x.y)}; }
EMULATOR_INLINE __nv_bfloat162 __halves2bfloat162(__nv_bfloat16 x, __nv_bfloat16 y) { return {x, y}; }
EMULATOR_INLINE float2 __bfloat1622float2(__nv_bfloat162 x) { return {x.x, x.y}; }
EMULATOR_INLINE __nv_bfloat16 __hadd(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) + float(b); }
EMULATOR_INLINE __nv_bfloat16 __hmul(__nv_bfloat16 a, __nv_bfloat16 b) { return float(a) * float(b); }
EMULATOR_INLINE __nv_bfloat16 __hfma(__nv_bfloat16 a, __nv_bfloat16 b, __nv_bfloat16 c) { return fmaf(a, b, c); }
