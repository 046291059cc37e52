// AVX-512 (F, BW, DQ, VL) as attention.inl asks for it.
//
// GCC 12's AVX-512 header trips its own warnings wherever an intrinsic is inlined (GCC bug 105593).
#pragma once

#ifndef __clang__
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#pragma GCC diagnostic ignored "-Wuninitialized"
#endif

#include <immintrin.h>

#include "cpu/backward.inl"

namespace flash_wmma::cpu {
namespace {

struct Avx512 {
    using Vec = __m512;
    using Int __attribute__((vector_size(64))) = std::int32_t;
    static constexpr int kLanes = 16, kVectors = 3, kBlock = 8;
    static constexpr auto& kExp2 = kExp2Floor;
    static constexpr bool kPairs = false;

    static Vec load(const float* p) { return _mm512_load_ps(p); }
    /// The first n elements, unaligned; zeros after them.
    static Vec load_part(const float* p, int n) { return _mm512_maskz_loadu_ps(n < 16 ? 0xff : 0xffff, p); }
    static Int load_int(const std::int32_t* p) { return reinterpret_cast<Int>(_mm512_load_si512(p)); }
    static void store(float* p, Vec x) { _mm512_store_ps(p, x); }
    static Vec broadcast(float x) { return _mm512_set1_ps(x); }
    static Vec fma(Vec a, Vec b, Vec c) { return _mm512_fmadd_ps(a, b, c); }
    static Vec max(Vec a, Vec b) { return _mm512_max_ps(a, b); }

    /// x = floor(x) + fraction; scale takes the floor itself. The fraction of -inf is 0.
    static Vec split(Vec x, Vec& fraction) {
        fraction = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
        return x;
    }
    static Vec scale(Vec p, Vec x) {
        const __mmask16 normal = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-126.f), _CMP_NLT_UQ);
        return _mm512_maskz_scalef_ps(normal, p, x);
    }

    /// Pairs, quads, then 128-bit lanes.
    static void transpose(Vec (&x)[16]) {
        Vec y[16];
        for (int i = 0; i < 16; i += 2) {
            y[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
            y[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
        }
        for (int i = 0; i < 16; i += 4)
            for (int h = 0; h < 2; ++h) {
                const __m512d a = _mm512_castps_pd(y[i + h]), b = _mm512_castps_pd(y[i + h + 2]);
                x[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
                x[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
            }
        for (int h = 0; h < 16; h += 8)
            for (int i = 0; i < 4; ++i) {
                y[h + i] = _mm512_shuffle_f32x4(x[h + i], x[h + i + 4], 0x88);
                y[h + i + 4] = _mm512_shuffle_f32x4(x[h + i], x[h + i + 4], 0xdd);
            }
        for (int i = 0; i < 8; ++i) {
            x[i] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0x88);
            x[i + 8] = _mm512_shuffle_f32x4(y[i], y[i + 8], 0xdd);
        }
    }

    static void half_to_float(const std::uint16_t* src, float* dst, int n) {
        int c = 0;
        for (; c + 16 <= n; c += 16)
            _mm512_storeu_ps(dst + c, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(src + c))));
        if (c < n)
            _mm256_storeu_ps(dst + c, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(src + c))));
    }
    static void float_to_half(const float* src, std::uint16_t* dst, int n) {
        int c = 0;
        for (; c + 16 <= n; c += 16)
            _mm256_storeu_si256(reinterpret_cast<__m256i*>(dst + c),
                                _mm512_cvtps_ph(_mm512_loadu_ps(src + c), _MM_FROUND_TO_NEAREST_INT));
        if (c < n)
            _mm_storeu_si128(reinterpret_cast<__m128i*>(dst + c),
                             _mm256_cvtps_ph(_mm256_loadu_ps(src + c), _MM_FROUND_TO_NEAREST_INT));
    }
};

inline bool has_avx512() {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("fma");
}

}  // namespace
}  // namespace flash_wmma::cpu
