// The CPU kernel for every processor: 128-bit vectors in the compiler's own notation, which become SSE2 on x86-64 and
// NEON (with fused multiply-add) on aarch64.
#include "cpu/backward.inl"

namespace flash_wmma::cpu {
namespace {

inline float half_to_float(std::uint16_t half) {
    // The exponent is rebiased by a multiplication, which makes subnormals right as well.
    const std::uint32_t magnitude = (half & 0x7fffu) << 13;
    float x;
    __builtin_memcpy(&x, &magnitude, sizeof x);
    x *= 0x1p112f;
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    bits |= (half & 0x7c00u) == 0x7c00u ? 0x7f800000u | magnitude : 0u;
    bits |= (half & 0x8000u) << 16;
    __builtin_memcpy(&x, &bits, sizeof x);
    return x;
}

/// Round to nearest even.
inline std::uint16_t float_to_half(float x) {
    std::uint32_t bits;
    __builtin_memcpy(&bits, &x, sizeof bits);
    const std::uint32_t sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7fffffffu;
    std::uint32_t half;
    if (magnitude > 0x7f800000u) {
        half = 0x7e00u;
    } else if (magnitude >= 0x477ff000u) {  // 65520 and more round to infinity
        half = 0x7c00u;
    } else if (magnitude >= 0x38800000u) {
        half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
    } else {  // subnormal: the addition rounds at half's last bit, 2^-24
        float y;
        __builtin_memcpy(&y, &magnitude, sizeof y);
        y += 0.5f;
        __builtin_memcpy(&half, &y, sizeof half);
        half -= 0x3f000000u;
    }
    return static_cast<std::uint16_t>(sign | half);
}

struct Baseline {
    using Vec __attribute__((vector_size(16))) = float;
    using Int __attribute__((vector_size(16))) = std::int32_t;
    static constexpr int kLanes = 4;
    static constexpr auto& kExp2 = kExp2Nearest;
    static constexpr bool kPairs = false;
#ifdef __aarch64__
    static constexpr int kVectors = 3, kBlock = 8;  // 32 registers
#else
    static constexpr int kVectors = 2, kBlock = 4;  // 16 registers, and each multiplication needs one
#endif

    static Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
    /// Rows are whole vectors and 16-byte aligned, so no part of one is ever asked for.
    static Vec load_part(const float* p, int) { return load(p); }
    static Int load_int(const std::int32_t* p) { return *reinterpret_cast<const Int*>(p); }
    static void store(float* p, Vec x) { *reinterpret_cast<Vec*>(p) = x; }
    static Vec broadcast(float x) { return Vec{x, x, x, x}; }
    static Vec fma(Vec a, Vec b, Vec c) { return a * b + c; }
    static Vec max(Vec a, Vec b) { return a > b ? a : b; }

    /// The bits of 2^exponent, 0 for x <= -127; x may be NaN.
    static Int split(Vec x, Vec& fraction) {
        return split_by_rounding<Baseline>(x < broadcast(-127.f) ? broadcast(-127.f) : x, fraction);
    }
    static Vec scale(Vec p, Int exponent) { return p * reinterpret_cast<Vec>(exponent); }

    static void transpose(Vec (&x)[4]) {
        Vec y[4];
        for (int i = 0; i < 4; ++i) y[i] = Vec{x[0][i], x[1][i], x[2][i], x[3][i]};
        for (int i = 0; i < 4; ++i) x[i] = y[i];
    }

    static void half_to_float(const std::uint16_t* __restrict src, float* __restrict dst, int n) {
        for (int c = 0; c < n; ++c) dst[c] = cpu::half_to_float(src[c]);
    }
    static void float_to_half(const float* __restrict src, std::uint16_t* __restrict dst, int n) {
        for (int c = 0; c < n; ++c) dst[c] = cpu::float_to_half(src[c]);
    }
};

bool supported() { return true; }

constexpr IsaKernel kKernel = isa_kernel<Baseline>("baseline", 0, supported);
const IsaRegistration registration(kKernel);

}  // namespace
}  // namespace flash_wmma::cpu
