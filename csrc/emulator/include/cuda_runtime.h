// CUDA C++ for g++: qualifiers, vector types, built-in variables, warp and block functions, atomics, arithmetic. Kernel
// files find this header where nvcc finds the toolkit's. As with nvcc it is included before everything else.
//
// Bricks are functions that are not instrumented, called from kernel code that is. They are noinline, so that their
// return address is the place in the kernel; everything they call is inlined into them.
#pragma once

#include <math.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "emulator/runtime.h"

// __forceinline__ is no more than inline: always_inline compiles up to twice as long, and the code runs no faster.
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__  // empty, because the standard library writes __attribute__((__noinline__))
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __grid_constant__
#define __align__(bytes) alignas(bytes)
#define __shared__ _Pragma("GCC error \"no __shared__ in the emulator: take shared_memory<Struct>() instead\"")

#define EMULATOR_UNSEEN __attribute__((no_sanitize("thread"), no_sanitize_coverage))
#define EMULATOR_BRICK __attribute__((noinline, no_sanitize("thread"), no_sanitize_coverage))
#define EMULATOR_INLINE inline __attribute__((always_inline))

#ifdef FLASH_WMMA_CHECKED
// g++ expands memcpy, memmove and memset, or calls the library, where no instrumentation sees the accesses. Here few
// bytes become loads and stores, which are seen; more bytes go through the runtime. Defined as in the C library's
// fortified headers.
extern "C" {
void* flash_wmma_emulator_memmove(void* to, const void* from, std::size_t bytes);
void* flash_wmma_emulator_memset(void* to, int value, std::size_t bytes);
#define EMULATOR_BYTES extern inline __attribute__((always_inline, gnu_inline, artificial)) void*
EMULATOR_BYTES memcpy(void* __restrict to, const void* __restrict from, std::size_t bytes) noexcept {
    if (__builtin_constant_p(bytes) && bytes <= 16 && !(bytes & (bytes - 1))) return __builtin_memcpy(to, from, bytes);
    return flash_wmma_emulator_memmove(to, from, bytes);
}
EMULATOR_BYTES memmove(void* to, const void* from, std::size_t bytes) noexcept {
    if (__builtin_constant_p(bytes) && bytes <= 16 && !(bytes & (bytes - 1))) return __builtin_memmove(to, from, bytes);
    return flash_wmma_emulator_memmove(to, from, bytes);
}
EMULATOR_BYTES memset(void* to, int value, std::size_t bytes) noexcept {
    if (__builtin_constant_p(bytes) && bytes <= 8 && !(bytes & (bytes - 1))) return __builtin_memset(to, value, bytes);
    return flash_wmma_emulator_memset(to, value, bytes);
}
#undef EMULATOR_BYTES
}
#endif

// --- vector types ----------------------------------------------------------------------------------------------------
struct alignas(8) float2 {
    float x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) int2 {
    int x, y;
};
struct alignas(16) int4 {
    int x, y, z, w;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct uint3 {
    unsigned x, y, z;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
struct alignas(4) ushort2 {
    unsigned short x, y;
};
EMULATOR_INLINE float2 make_float2(float x, float y) { return {x, y}; }
EMULATOR_INLINE float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
EMULATOR_INLINE int2 make_int2(int x, int y) { return {x, y}; }
EMULATOR_INLINE int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
EMULATOR_INLINE uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
EMULATOR_INLINE uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

// --- built-in variables ----------------------------------------------------------------------------------------------
#define threadIdx (::flash_wmma::emulator::thread_index())
#define blockIdx (::flash_wmma::emulator::block_index())
#define blockDim (::flash_wmma::emulator::block_size())
#define gridDim (::flash_wmma::emulator::grid_size())
#define warpSize (::flash_wmma::emulator::warp_size())

namespace flash_wmma::emulator {

using Arguments = void* const*;

template <class T>
struct ShuffleArgument {
    T value, result;
    int source;  // lane
};
template <class T>
EMULATOR_UNSEEN void shuffle(Arguments arguments, LaneMask lanes) {
    for (LaneMask rest = lanes; rest; rest &= rest - 1) {
        auto& me = *static_cast<ShuffleArgument<T>*>(arguments[__builtin_ctzll(rest)]);
        if (lanes >> me.source & 1) me.result = static_cast<ShuffleArgument<T>*>(arguments[me.source])->value;
        else __builtin_memset(&me.result, 0xff, sizeof(T));  // a lane outside the mask: undefined, so NaN
    }
}
template <class T>
inline constexpr Collective kShuffle{"__shfl_sync", Instruction::kShuffle, sizeof(T) / 4 ? sizeof(T) / 4 : 1, 0, false,
                                     shuffle<T>};

struct VoteArgument {
    int predicate;
    LaneMask ballot;
};
EMULATOR_UNSEEN inline void vote(Arguments arguments, LaneMask lanes) {
    LaneMask ballot = 0;
    for (LaneMask rest = lanes; rest; rest &= rest - 1) {
        const int lane = __builtin_ctzll(rest);
        if (static_cast<VoteArgument*>(arguments[lane])->predicate) ballot |= LaneMask{1} << lane;
    }
    for (LaneMask rest = lanes; rest; rest &= rest - 1)
        static_cast<VoteArgument*>(arguments[__builtin_ctzll(rest)])->ballot = ballot;
}
inline constexpr Collective kVote{"__ballot_sync", Instruction::kVote, 1, 0, false, vote};

struct ReduceArgument {
    unsigned value, result;
};
EMULATOR_UNSEEN inline void reduce_or(Arguments arguments, LaneMask lanes) {
    unsigned result = 0;
    for (LaneMask rest = lanes; rest; rest &= rest - 1)
        result |= static_cast<ReduceArgument*>(arguments[__builtin_ctzll(rest)])->value;
    for (LaneMask rest = lanes; rest; rest &= rest - 1)
        static_cast<ReduceArgument*>(arguments[__builtin_ctzll(rest)])->result = result;
}
inline constexpr Collective kReduceOr{"__reduce_or_sync", Instruction::kVote, 1, 0, false, reduce_or};

EMULATOR_UNSEEN inline void nothing(Arguments, LaneMask) {}
inline constexpr Collective kSyncWarp{"__syncwarp", Instruction::kSyncWarp, 1, 0, true, nothing};

inline constexpr unsigned kFullWarp = 0xffffffffu;
/// The lanes of a mask argument; kFullWarp means all lanes, in a wavefront of 64 too.
EMULATOR_INLINE LaneMask lanes_of(unsigned mask) { return mask == kFullWarp ? ~LaneMask{0} : LaneMask{mask}; }

template <class T, class Source>
EMULATOR_INLINE T shuffle_from(unsigned mask, T value, int width, Site site, const void* pc, Source source_of) {
    const int lane = lane_index(), base = lane & ~(width - 1), source = source_of(lane, base);
    ShuffleArgument<T> argument{value, value, source >= base && source < base + width ? source : lane};
    collective(kShuffle<T>, lanes_of(mask), &argument, site, pc);
    return argument.result;
}
EMULATOR_INLINE LaneMask ballot(unsigned mask, int predicate, Site site, const void* pc) {
    VoteArgument argument{predicate, 0};
    collective(kVote, lanes_of(mask), &argument, site, pc);
    return argument.ballot;
}

}  // namespace flash_wmma::emulator

#define EMULATOR_SITE ::flash_wmma::emulator::Site site = ::flash_wmma::emulator::Site::here()
#define EMULATOR_PC __builtin_return_address(0)

// --- synchronisation -------------------------------------------------------------------------------------------------
EMULATOR_BRICK inline void __syncthreads(EMULATOR_SITE) {
    ::flash_wmma::emulator::barrier(0, 0, 0, true, "__syncthreads", site, EMULATOR_PC);
}
EMULATOR_BRICK inline int __syncthreads_count(int predicate, EMULATOR_SITE) {
    return ::flash_wmma::emulator::barrier(0, 0, predicate != 0, true, "__syncthreads_count", site, EMULATOR_PC);
}
EMULATOR_BRICK inline int __syncthreads_or(int predicate, EMULATOR_SITE) {
    return ::flash_wmma::emulator::barrier(0, 0, predicate != 0, true, "__syncthreads_or", site, EMULATOR_PC) != 0;
}
EMULATOR_BRICK inline int __syncthreads_and(int predicate, EMULATOR_SITE) {
    return ::flash_wmma::emulator::barrier(0, 0, predicate == 0, true, "__syncthreads_and", site, EMULATOR_PC) == 0;
}
EMULATOR_BRICK inline void __syncwarp(unsigned mask = 0xffffffffu, EMULATOR_SITE) {
    using namespace ::flash_wmma::emulator;
    collective(kSyncWarp, lanes_of(mask), nullptr, site, EMULATOR_PC);
}
// Order by fences, and by the atomics or flags used with them, is not modelled: see docs/emulator.md.
EMULATOR_INLINE void __threadfence() {}
EMULATOR_INLINE void __threadfence_block() {}

// --- shuffles and votes ----------------------------------------------------------------------------------------------
template <class T>
EMULATOR_BRICK T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, EMULATOR_SITE) {
    return ::flash_wmma::emulator::shuffle_from(
        mask, value, width, site, EMULATOR_PC,
        [=](int, int base) __attribute__((always_inline)) { return base + (source & (width - 1)); });
}
EMULATOR_BRICK inline unsigned __reduce_or_sync(unsigned mask, unsigned value, EMULATOR_SITE) {
    using namespace ::flash_wmma::emulator;
    ReduceArgument argument{value, value};
    collective(kReduceOr, lanes_of(mask), &argument, site, EMULATOR_PC);
    return argument.result;
}
template <class T>
EMULATOR_BRICK T __shfl_xor_sync(unsigned mask, T value, int lanes, int width = warpSize, EMULATOR_SITE) {
    return ::flash_wmma::emulator::shuffle_from(mask, value, width, site, EMULATOR_PC,
                                                [=](int lane, int)
                                                    __attribute__((always_inline)) { return lane ^ lanes; });
}
template <class T>
EMULATOR_BRICK T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = warpSize, EMULATOR_SITE) {
    return ::flash_wmma::emulator::shuffle_from(
        mask, value, width, site, EMULATOR_PC,
        [=](int lane, int) __attribute__((always_inline)) { return lane - static_cast<int>(by); });
}
template <class T>
EMULATOR_BRICK T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = warpSize, EMULATOR_SITE) {
    return ::flash_wmma::emulator::shuffle_from(
        mask, value, width, site, EMULATOR_PC,
        [=](int lane, int) __attribute__((always_inline)) { return lane + static_cast<int>(by); });
}
EMULATOR_BRICK inline unsigned __ballot_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return static_cast<unsigned>(::flash_wmma::emulator::ballot(mask, predicate, site, EMULATOR_PC));
}
EMULATOR_BRICK inline int __any_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return ::flash_wmma::emulator::ballot(mask, predicate, site, EMULATOR_PC) != 0;
}
EMULATOR_BRICK inline int __all_sync(unsigned mask, int predicate, EMULATOR_SITE) {
    return ::flash_wmma::emulator::ballot(mask, !predicate, site, EMULATOR_PC) == 0;
}

// --- atomics: other OS threads may run other blocks, so they are atomic here too -------------------------------------
namespace flash_wmma::emulator {
template <class T, class F>
EMULATOR_INLINE T update(T* p, F f, const void* pc) {
    atomic_access(p, sizeof(T), pc);
    T old, next;
    __atomic_load(p, &old, __ATOMIC_RELAXED);
    do next = f(old);
    while (!__atomic_compare_exchange(p, &old, &next, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
    return old;
}
template <class T>
struct NotDeduced {
    using Type = T;
};
template <class T>
using Value = typename NotDeduced<T>::Type;  // atomicAdd(&float, 1) takes its type from the pointer
}  // namespace flash_wmma::emulator

template <class T>
EMULATOR_BRICK T atomicAdd(T* p, ::flash_wmma::emulator::Value<T> value) {
    return ::flash_wmma::emulator::update(
        p, [=](T old) __attribute__((always_inline)) { return static_cast<T>(old + value); }, EMULATOR_PC);
}
template <class T>
EMULATOR_BRICK T atomicMax(T* p, ::flash_wmma::emulator::Value<T> value) {
    return ::flash_wmma::emulator::update(
        p, [=](T old) __attribute__((always_inline)) { return old > value ? old : value; }, EMULATOR_PC);
}
template <class T>
EMULATOR_BRICK T atomicMin(T* p, ::flash_wmma::emulator::Value<T> value) {
    return ::flash_wmma::emulator::update(
        p, [=](T old) __attribute__((always_inline)) { return old < value ? old : value; }, EMULATOR_PC);
}
template <class T>
EMULATOR_BRICK T atomicExch(T* p, ::flash_wmma::emulator::Value<T> value) {
    return ::flash_wmma::emulator::update(p, [=](T) __attribute__((always_inline)) { return value; }, EMULATOR_PC);
}
template <class T>
EMULATOR_BRICK T atomicCAS(T* p, ::flash_wmma::emulator::Value<T> expected, ::flash_wmma::emulator::Value<T> value) {
    return ::flash_wmma::emulator::update(
        p, [=](T old) __attribute__((always_inline)) { return old == expected ? value : old; }, EMULATOR_PC);
}

// --- arithmetic ------------------------------------------------------------------------------------------------------
using std::isfinite;
using std::isinf;
using std::isnan;
using std::max;
using std::min;

EMULATOR_INLINE float __expf(float x) { return expf(x); }
EMULATOR_INLINE float __logf(float x) { return logf(x); }
EMULATOR_INLINE float __log2f(float x) { return log2f(x); }
EMULATOR_INLINE float __fdividef(float a, float b) { return a / b; }
EMULATOR_INLINE float __frcp_rn(float x) { return 1.f / x; }
EMULATOR_INLINE float __fadd_rn(float a, float b) { return a + b; }
EMULATOR_INLINE float __fmul_rn(float a, float b) {
    float product = a * b;
    asm("" : "+m"(product));  // never part of an FMA
    return product;
}
EMULATOR_INLINE float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
EMULATOR_INLINE float rsqrtf(float x) { return 1.f / sqrtf(x); }

namespace flash_wmma::emulator {
template <class To, class From>
EMULATOR_INLINE To bits(const From& from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    __builtin_memcpy(&to, &from, sizeof to);
    return to;
}
}  // namespace flash_wmma::emulator
EMULATOR_INLINE int __float_as_int(float x) { return ::flash_wmma::emulator::bits<int>(x); }
EMULATOR_INLINE unsigned __float_as_uint(float x) { return ::flash_wmma::emulator::bits<unsigned>(x); }
EMULATOR_INLINE float __int_as_float(int x) { return ::flash_wmma::emulator::bits<float>(x); }
EMULATOR_INLINE float __uint_as_float(unsigned x) { return ::flash_wmma::emulator::bits<float>(x); }

EMULATOR_INLINE int __ffs(int x) { return __builtin_ffs(x); }
EMULATOR_INLINE int __popc(unsigned x) { return __builtin_popcount(x); }
EMULATOR_INLINE int __clz(int x) { return x ? __builtin_clz(static_cast<unsigned>(x)) : 32; }
EMULATOR_INLINE unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const std::uint64_t bytes = std::uint64_t{b} << 32 | a;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned choice = selector >> (4 * i) & 15;
        unsigned byte = static_cast<unsigned>(bytes >> (8 * (choice & 7))) & 0xff;
        if (choice & 8) byte = byte & 0x80 ? 0xff : 0;  // its sign, replicated
        result |= byte << (8 * i);
    }
    return result;
}
template <class T>
EMULATOR_INLINE T __ldg(const T* p) {
    return *p;
}
