// The instructions of csrc/device/ptx.cuh, in the emulator: the same functions, with the lane layouts of the hardware.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace flash_wmma::emulator {

/// Element `i` of a register that holds two of type T.
template <class T>
EMULATOR_INLINE float element(std::uint32_t pair, int i) {
    return float(bits<T>(static_cast<std::uint16_t>(pair >> (16 * i))));
}

template <int K>
struct MmaArgument {
    float* d;
    const std::uint32_t *a, *b;
};
/// mma.sync.m16n8k8 and k16: lane l = 4 g + t holds the elements given in csrc/device/ptx.cuh.
template <class T, int K>
EMULATOR_UNSEEN void mma(Arguments arguments, LaneMask) {
    float a[16 * K], b[K * 8], d[16 * 8];
    for (int l = 0; l < 32; ++l) {
        const auto& x = *static_cast<MmaArgument<K>*>(arguments[l]);
        const int g = l / 4, t = l % 4;
        for (int e = 0; e < 2; ++e) {
            for (int i = 0; i < K / 4; ++i) a[(g + 8 * (i % 2)) * K + 8 * (i / 2) + 2 * t + e] = element<T>(x.a[i], e);
            for (int i = 0; i < K / 8; ++i) b[(8 * i + 2 * t + e) * 8 + g] = element<T>(x.b[i], e);
        }
        for (int i = 0; i < 4; ++i) d[(g + 8 * (i / 2)) * 8 + 2 * t + i % 2] = x.d[i];
    }
    multiply(d, a, b, K, 8);
    for (int l = 0; l < 32; ++l)
        for (int i = 0; i < 4; ++i)
            static_cast<MmaArgument<K>*>(arguments[l])->d[i] = d[(l / 4 + 8 * (i / 2)) * 8 + 2 * (l % 4) + i % 2];
}
template <class T, int K>
inline constexpr Collective kMma{K == 8 ? "mma.m16n8k8" : "mma.m16n8k16", Instruction::kMma, 1, 32, false, mma<T, K>};

struct LdmatrixArgument {
    std::uint32_t* r;
    const void* row;
};
template <int Matrices, bool Transposed>
EMULATOR_UNSEEN void ldmatrix(Arguments arguments, LaneMask) {
    const void* row[32];
    for (int l = 0; l < 32; ++l) {
        row[l] = static_cast<LdmatrixArgument*>(arguments[l])->row;
        if (l < 8 * Matrices && reinterpret_cast<std::uintptr_t>(row[l]) % 16)
            fail_collective("the address of a row is not 16-byte aligned", l);
    }
    warp_access(Access::kLdmatrix, row, (LaneMask{1} << (8 * Matrices)) - 1, 16);
    for (int l = 0; l < 32; ++l)
        for (int m = 0; m < Matrices; ++m) {
            const auto at = [&](int r, int c) __attribute__((always_inline)) {
                return static_cast<const std::uint16_t*>(row[8 * m + r])[c];
            };
            const int g = l / 4, t = l % 4;
            const std::uint32_t low = Transposed ? at(2 * t, g) : at(g, 2 * t);
            const std::uint32_t high = Transposed ? at(2 * t + 1, g) : at(g, 2 * t + 1);
            static_cast<LdmatrixArgument*>(arguments[l])->r[m] = low | high << 16;
        }
}
template <int Matrices, bool Transposed>
inline constexpr Collective kLdmatrix{"ldmatrix", Instruction::kLdmatrix, 0, 32, false, ldmatrix<Matrices, Transposed>};

}  // namespace flash_wmma::emulator

namespace flash_wmma::ptx {

using emulator::Site;

EMULATOR_INLINE float flushed(float x) { return fabsf(x) < 1.17549435e-38f ? copysignf(0.f, x) : x; }  // .ftz

EMULATOR_INLINE float ex2(float x) {
#ifdef FLASH_WMMA_CHECKED
    emulator::note(emulator::Instruction::kExponential);
#endif
    if (x != x) return emulator::bits<float>(0x7fffffff);  // the one NaN that the instruction gives
    return flushed(exp2f(x));
}

EMULATOR_INLINE float lg2(float x) { return log2f(flushed(x)); }
EMULATOR_INLINE float rcp(float x) { return flushed(1.f / flushed(x)); }

EMULATOR_INLINE float max_nan(float x, float y) { return x > y || x != x ? x : y; }
EMULATOR_INLINE float max_of_positive(float x, float y) {
    return __int_as_float(std::max(__float_as_int(x), __float_as_int(y)));
}

EMULATOR_INLINE std::uint32_t halves_below(std::uint32_t x, std::uint32_t y) {
    std::uint32_t below = 0;
    for (int i = 0; i < 2; ++i)
        if (emulator::element<__half>(x, i) < emulator::element<__half>(y, i)) below |= 0xffffu << (16 * i);
    return below;
}

EMULATOR_INLINE int opaque(int x) { return x; }
template <class T>
EMULATOR_INLINE T* opaque(T* p) {
    return p;
}

EMULATOR_BRICK inline void mma_m16n8k8(float (&d)[4], const std::uint32_t (&a)[2], std::uint32_t b, EMULATOR_SITE) {
    emulator::MmaArgument<8> argument{d, a, &b};
    emulator::collective(emulator::kMma<__half, 8>, ~emulator::LaneMask{0}, &argument, site, EMULATOR_PC);
}
template <class T>
EMULATOR_BRICK void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2],
                                 EMULATOR_SITE) {
    emulator::MmaArgument<16> argument{d, a, b};
    emulator::collective(emulator::kMma<T, 16>, ~emulator::LaneMask{0}, &argument, site, EMULATOR_PC);
}

EMULATOR_BRICK inline void ldmatrix_x4(std::uint32_t (&r)[4], const void* shared_row, EMULATOR_SITE) {
    emulator::LdmatrixArgument argument{r, shared_row};
    emulator::collective(emulator::kLdmatrix<4, false>, ~emulator::LaneMask{0}, &argument, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* shared_row, EMULATOR_SITE) {
    emulator::LdmatrixArgument argument{r, shared_row};
    emulator::collective(emulator::kLdmatrix<4, true>, ~emulator::LaneMask{0}, &argument, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void ldmatrix_x2(std::uint32_t (&r)[2], const void* shared_row, EMULATOR_SITE) {
    emulator::LdmatrixArgument argument{r, shared_row};
    emulator::collective(emulator::kLdmatrix<2, false>, ~emulator::LaneMask{0}, &argument, site, EMULATOR_PC);
}
EMULATOR_BRICK inline void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* shared_row, EMULATOR_SITE) {
    emulator::LdmatrixArgument argument{r, shared_row};
    emulator::collective(emulator::kLdmatrix<2, true>, ~emulator::LaneMask{0}, &argument, site, EMULATOR_PC);
}

EMULATOR_BRICK inline void named_barrier_sync(int id, int threads, EMULATOR_SITE) {
    emulator::barrier(id, threads, 0, true, "bar.sync", site, EMULATOR_PC);
}
EMULATOR_BRICK inline void named_barrier_arrive(int id, int threads, EMULATOR_SITE) {
    emulator::barrier(id, threads, 0, false, "bar.arrive", site, EMULATOR_PC);
}

EMULATOR_BRICK inline void prefetch_line(const void* address) { emulator::fetch_line(address, EMULATOR_PC); }

inline constexpr bool kVectorRed = true;
EMULATOR_BRICK inline void red_add(float* p, float x) {
    emulator::update(p, [=](float old) __attribute__((always_inline)) { return old + x; }, EMULATOR_PC);
}
EMULATOR_BRICK inline void red_add_4(float* p, const float (&x)[4]) {
    for (int i = 0; i < 4; ++i)
        emulator::update(p + i, [=](float old) __attribute__((always_inline)) { return old + x[i]; }, EMULATOR_PC);
}

EMULATOR_BRICK inline void cp_async_16(void* shared, const void* global, int bytes) {
    emulator::async_copy(shared, global, 16, bytes, EMULATOR_PC);
}
using CachePolicy = std::uint64_t;
EMULATOR_INLINE CachePolicy cache_policy(bool) { return 0; }
EMULATOR_BRICK inline void cp_async_16(void* shared, const void* global, int bytes, CachePolicy) {
    emulator::async_copy(shared, global, 16, bytes, EMULATOR_PC);
}
EMULATOR_BRICK inline void cp_async_commit() { emulator::async_commit(); }
template <int Pending>
EMULATOR_BRICK void cp_async_wait() {
    emulator::async_wait(Pending);
}

}  // namespace flash_wmma::ptx
