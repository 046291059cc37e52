// One function per PTX instruction that CUDA C++ has no name for, on CUDA. Kernel files include <ptx.cuh>; the emulator
// has its own definition of each. Operands are pointers and values, never raw shared-memory addresses.
#pragma once

#include <cstdint>

namespace flash_wmma::ptx {

/// 2^x, relative error 2^-22; denormal inputs and results flush to zero (ex2.approx.ftz.f32).
__device__ __forceinline__ float ex2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/// x, but the compiler cannot know it: what is computed from it stays where it is written, off the common path.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

#if __CUDA_ARCH__ >= 800

/// Copies 16 bytes from global to shared memory without registers; lands at its cp_async_wait (cp.async.cg).
/// `bytes` is 16, or 0 to write zeros and read nothing.
__device__ __forceinline__ void cp_async_16(void* shared, const void* global, int bytes) {
    const auto address = static_cast<std::uint32_t>(__cvta_generic_to_shared(shared));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(address), "l"(global), "r"(bytes) : "memory");
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
__device__ __forceinline__ void cp_async_commit() {}
template <int Pending>
__device__ __forceinline__ void cp_async_wait() {}

#endif

}  // namespace flash_wmma::ptx
