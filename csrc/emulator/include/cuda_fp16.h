// __half and __half2, with the toolkit's names, rounding and sizes: IEEE binary16, conversions to nearest even,
// arithmetic in float rounded once.
#pragma once

#include <cuda_runtime.h>
#if defined(__F16C__)
#include <immintrin.h>
#endif

namespace flash_wmma::emulator {
EMULATOR_INLINE std::uint16_t half_bits(float x) {
#if defined(__F16C__)
    return static_cast<std::uint16_t>(_cvtss_sh(x, 0));
#else
    return bits<std::uint16_t>(static_cast<__fp16>(x));
#endif
}
EMULATOR_INLINE float half_value(std::uint16_t x) {
#if defined(__F16C__)
    return _cvtsh_ss(x);
#else
    return static_cast<float>(bits<__fp16>(x));
#endif
}
}  // namespace flash_wmma::emulator

struct alignas(2) __half {
    std::uint16_t raw;

    __half() = default;
    EMULATOR_INLINE __half(float x) : raw(::flash_wmma::emulator::half_bits(x)) {}
    EMULATOR_INLINE explicit __half(double x) : __half(static_cast<float>(x)) {}
    EMULATOR_INLINE explicit __half(int x) : __half(static_cast<float>(x)) {}
    EMULATOR_INLINE operator float() const { return ::flash_wmma::emulator::half_value(raw); }
};
// Moved as four bytes at once, as on the hardware.
struct alignas(4) __half2 {
    __half x, y;
};
using half = __half;
using half2 = __half2;

EMULATOR_INLINE __half __float2half(float x) { return __half(x); }
EMULATOR_INLINE __half __float2half_rn(float x) { return __half(x); }
EMULATOR_INLINE float __half2float(__half x) { return x; }
EMULATOR_INLINE __half __ushort_as_half(unsigned short x) { return ::flash_wmma::emulator::bits<__half>(x); }
EMULATOR_INLINE unsigned short __half_as_ushort(__half x) { return x.raw; }
EMULATOR_INLINE __half2 __floats2half2_rn(float x, float y) { return {__half(x), __half(y)}; }
EMULATOR_INLINE __half2 __float22half2_rn(float2 x) { return {__half(x.x), __half(x.y)}; }
EMULATOR_INLINE __half2 __float2half2_rn(float x) { return {__half(x), __half(x)}; }
EMULATOR_INLINE __half2 __halves2half2(__half x, __half y) { return {x, y}; }
EMULATOR_INLINE __half2 __half2half2(__half x) { return {x, x}; }
EMULATOR_INLINE float2 __half22float2(__half2 x) { return {x.x, x.y}; }
EMULATOR_INLINE __half __low2half(__half2 x) { return x.x; }
EMULATOR_INLINE __half __high2half(__half2 x) { return x.y; }
EMULATOR_INLINE float __low2float(__half2 x) { return x.x; }
EMULATOR_INLINE float __high2float(__half2 x) { return x.y; }

EMULATOR_INLINE __half __hadd(__half a, __half b) { return float(a) + float(b); }
EMULATOR_INLINE __half __hsub(__half a, __half b) { return float(a) - float(b); }
EMULATOR_INLINE __half __hmul(__half a, __half b) { return float(a) * float(b); }
EMULATOR_INLINE __half __hfma(__half a, __half b, __half c) { return fmaf(a, b, c); }
EMULATOR_INLINE __half __hmax(__half a, __half b) { return fmaxf(a, b); }
EMULATOR_INLINE __half __hmin(__half a, __half b) { return fminf(a, b); }
EMULATOR_INLINE __half2 __hadd2(__half2 a, __half2 b) { return {__hadd(a.x, b.x), __hadd(a.y, b.y)}; }
EMULATOR_INLINE __half2 __hsub2(__half2 a, __half2 b) { return {__hsub(a.x, b.x), __hsub(a.y, b.y)}; }
EMULATOR_INLINE __half2 __hmul2(__half2 a, __half2 b) { return {__hmul(a.x, b.x), __hmul(a.y, b.y)}; }
EMULATOR_INLINE __half2 __hfma2(__half2 a, __half2 b, __half2 c) {
    return {__hfma(a.x, b.x, c.x), __hfma(a.y, b.y, c.y)};
}
EMULATOR_INLINE __half2 __hmax2(__half2 a, __half2 b) { return {__hmax(a.x, b.x), __hmax(a.y, b.y)}; }
EMULATOR_INLINE __half2 h2exp2(__half2 x) { return {__half(exp2f(x.x)), __half(exp2f(x.y))}; }
EMULATOR_INLINE __half hexp2(__half x) { return exp2f(x); }
