// One function per PTX instruction that CUDA C++ has no name for, on CUDA. Kernel files include <ptx.cuh>; the emulator
// has its own definition of each. Operands are pointers and values, never raw shared-memory addresses.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>
#include <type_traits>

namespace flash_wmma::ptx {

/// 2^x, relative error 2^-22; denormal inputs and results flush to zero (ex2.approx.ftz.f32).
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// log2(x), error 2^-22.6 (relative, but absolute from 1/2 to 2); denormal inputs are taken as zero
/// (lg2.approx.ftz.f32).
__device__ __forceinline__ float lg2(float x) {
    float y;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
/// 1 / x to a last bit; denormal inputs are taken as zero, denormal results are zero (rcp.approx.ftz.f32).
__device__ __forceinline__ float rcp(float x) {
    float y;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// The larger of two; NaN if one is (max.NaN.f32, from sm_80 on).
__device__ __forceinline__ float max_nan(float x, float y) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    float larger;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
    return larger;
#else
    return x > y || x != x ? x : y;
#endif
}

/// The larger of two that are not negative, by their bits; NaN if one is a NaN without sign. In asm, or the compiler
/// keeps a float that goes through this in two registers (max.s32, of which two make one instruction from sm_90 on).
__device__ __forceinline__ float max_of_positive(float x, float y) {
    float larger;
    asm("{\n.reg .s32 x, y;\nmov.b32 x, %1;\nmov.b32 y, %2;\nmax.s32 x, x, y;\nmov.b32 %0, x;\n}"
        : "=f"(larger)
        : "f"(x), "f"(y));
    return larger;
}

/// 0xffff in each half of the result where that half of x, read as fp16, is below that of y; a NaN is not
/// (set.lt.u32.f16x2).
__device__ __forceinline__ std::uint32_t halves_below(std::uint32_t x, std::uint32_t y) {
    std::uint32_t below;
    asm("set.lt.u32.f16x2 %0, %1, %2;" : "=r"(below) : "r"(x), "r"(y));
    return below;
}

/// x, hidden from the compiler: computations from it stay where they are written, off the common path.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

/// The same of an address.
template <class T>
__device__ __forceinline__ T* opaque(T* p) {
    asm volatile("" : "+l"(p));
    return p;
}

/// D += A B for one 16x8 tile: A 16x8 (row), B 8x8 (column), of half; the tensor-core shape of Turing
/// (mma.sync.m16n8k8). With g = lane / 4 and t = lane % 4, a lane holds, in pairs along a row of A (along k):
///     a[i]: A[g + 8 i][2 t, 2 t + 1];   b: B[2 t, 2 t + 1][g];   d[i]: D[g + 8 (i / 2)][2 t + i % 2].
__device__ __forceinline__ void mma_m16n8k8(float (&d)[4], const std::uint32_t (&a)[2], std::uint32_t b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}

/// Loads four 8x8 matrices of 16-bit elements from shared memory; lane l gives the address of row l % 8 of matrix l /
/// 8, 16-byte aligned (ldmatrix.x4). Lane l gets, of matrix i in r[i], elements 2 (l % 4) and + 1 of row l / 4.
__device__ __forceinline__ void ldmatrix_x4(std::uint32_t (&r)[4], const void* shared_row) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
/// The same of the transposed matrices: lane l gets rows 2 (l % 4) and + 1 of column l / 4 (ldmatrix.x4.trans).
__device__ __forceinline__ void ldmatrix_x4_trans(std::uint32_t (&r)[4], const void* shared_row) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}
/// Two matrices; lanes 0 to 15 give the addresses (ldmatrix.x2 and ldmatrix.x2.trans).
__device__ __forceinline__ void ldmatrix_x2(std::uint32_t (&r)[2], const void* shared_row) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}
__device__ __forceinline__ void ldmatrix_x2_trans(std::uint32_t (&r)[2], const void* shared_row) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared_row));
    asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0, %1}, [%2];"
                 : "=r"(r[0]), "=r"(r[1])
                 : "r"(address)
                 : "memory");
}

/// Waits at named barrier `id` (1 to 15; 0 is that of __syncthreads, and of all threads) until `threads` threads, a
/// multiple of 32, have arrived, this one among them (bar.sync).
__device__ __forceinline__ void named_barrier_sync(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}
/// Arrives at the barrier without waiting (bar.arrive).
__device__ __forceinline__ void named_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

/// Brings the line of global memory that holds this address to the L2 cache.
__device__ __forceinline__ void prefetch_line(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(__cvta_generic_to_global(address)));
}

/// Whether red_add_4 is one instruction, and so wants the four floats of a thread side by side.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr bool kVectorRed = false;
#else
inline constexpr bool kVectorRed = true;
#endif

/// Adds x to the float at p in global memory, without an answer (red.global.add.f32).
__device__ __forceinline__ void red_add(float* p, float x) {
    asm volatile("red.global.add.f32 [%0], %1;" ::"l"(p), "f"(x) : "memory");
}
/// Adds four floats to those at p, 16-byte aligned, each atomically (sm_90: red.global.add.v4.f32).
__device__ __forceinline__ void red_add_4(float* p, const float (&x)[4]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3])
                 : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) red_add(p + i, x[i]);
#endif
}

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800  // kernels name these in the host's pass too

/// D += A B for one 16x8 tile: A 16x16 (row), B 16x8 (column), of half or bf16 (mma.sync.m16n8k16). Lanes as in
/// mma_m16n8k8; a[i] is at row g + 8 (i % 2), columns from 8 (i / 2) + 2 t; b[i] at rows from 8 i + 2 t.
template <class T>
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const std::uint32_t (&a)[4], const std::uint32_t (&b)[2]) {
    if constexpr (std::is_same_v<T, __half>)
        asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
    else
        asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
            "{%0, %1, %2, %3};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/// Copies 16 bytes from global to shared memory without registers; lands at its cp_async_wait (cp.async.cg).
/// `bytes` is 16, or 0 to write zeros and read nothing.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, int bytes) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
}

/// Whether the L2 cache gives up the lines of a copy before others (createpolicy).
using CachePolicy = std::uint64_t;
__device__ __forceinline__ CachePolicy cache_policy(bool gives_up_first) {
    CachePolicy first, normal;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(first));
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(normal));
    return gives_up_first ? first : normal;
}
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, int bytes, CachePolicy policy) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, %3;" ::"r"(address), "l"(global),
                 "r"(bytes), "l"(policy)
                 : "memory");
}

/// Closes the group of this thread's copies since the last commit (cp.async.commit_group).
__device__ __forceinline__ void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

/// Waits until at most `Pending` of this thread's newest groups are still under way (cp.async.wait_group).
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

#else

// Turing has no asynchronous copy: the same interface, through registers, complete on return.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, int bytes) {
    *static_cast<uint4*>(shared) = bytes ? *static_cast<const uint4*>(global) : uint4{};
}
using CachePolicy = std::uint64_t;
__device__ __forceinline__ CachePolicy cache_policy(bool) { return 0; }
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, int bytes, CachePolicy) {
    cp_async_16(shared, global, bytes);
}
__device__ __forceinline__ void cp_async_commit() {}
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {}

#endif

}  // namespace flash_wmma::ptx
