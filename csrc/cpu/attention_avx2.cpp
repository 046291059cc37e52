// The CPU kernel for AVX2 with FMA and F16C.
// x86-64: avx2 fma f16c
#include <immintrin.h>

#include "cpu/backward.inl"

namespace flash_wmma::cpu {
namespace {

struct Avx2 {
    using Vec = __m256;
    using Int __attribute__((vector_size(32))) = std::int32_t;
    static constexpr int kLanes = 8, kVectors = 3, kBlock = 4;
    static constexpr auto& kExp2 = kExp2Nearest;
    static constexpr bool kPairs = false;

    static Vec load(const float* p) { return _mm256_load_ps(p); }
    /// Unaligned; rows are whole vectors, so no part of one is ever asked for.
    static Vec load_part(const float* p, int) { return _mm256_loadu_ps(p); }
    static Int load_int(const std::int32_t* p) {
        return reinterpret_cast<Int>(_mm256_load_ps(reinterpret_cast<const float*>(p)));
    }
    static void store(float* p, Vec x) { _mm256_store_ps(p, x); }
    static Vec broadcast(float x) { return _mm256_set1_ps(x); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm256_fmadd_ps(a, b, c); }
    static Vec max(Vec a, Vec b) { return _mm256_max_ps(a, b); }

    /// The bits of 2^exponent, 0 for x <= -127. (max keeps its second operand if that is NaN.)
    static Int split(Vec x, Vec& fraction) {
        return split_by_rounding<Avx2>(_mm256_max_ps(broadcast(-127.f), x), fraction);
    }
    static Vec scale(Vec p, Int exponent) { return p * reinterpret_cast<Vec>(exponent); }

    /// Pairs, quads, then 128-bit lanes.
    static void transpose(Vec (&x)[8]) {
        Vec y[8];
        for (int i = 0; i < 8; i += 2) {
            y[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
            y[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
        }
        for (int i = 0; i < 8; i += 4)
            for (int h = 0; h < 2; ++h) {
                x[i + 2 * h] = _mm256_shuffle_ps(y[i + h], y[i + h + 2], 0x44);
                x[i + 2 * h + 1] = _mm256_shuffle_ps(y[i + h], y[i + h + 2], 0xee);
            }
        for (int i = 0; i < 4; ++i) {
            y[i] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x20);
            y[i + 4] = _mm256_permute2f128_ps(x[i], x[i + 4], 0x31);
        }
        for (int i = 0; i < 8; ++i) x[i] = y[i];
    }

    static void half_to_float(const std::uint16_t* src, float* dst, int n) {
        for (int c = 0; c < n; c += 8)
            _mm256_storeu_ps(dst + c, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + c))));
    }
    static void float_to_half(const float* src, std::uint16_t* dst, int n) {
        for (int c = 0; c < n; c += 8)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + c),
                             _mm256_cvtps_ph(_mm256_loadu_ps(src + c), _MM_FROUND_TO_NEAREST_INT));
    }
};

/// Every processor with AVX2 and FMA has F16C, a name that not every compiler's built-in knows.
bool supported() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }

constexpr IsaKernel kKernel = isa_kernel<Avx2>("avx2", 1, supported);
const IsaRegistration registration(kKernel);

}  // namespace
}  // namespace flash_wmma::cpu
