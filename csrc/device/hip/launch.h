// Launching a kernel, under HIP: the same interface as csrc/device/launch.h, without what AMD's GPUs lack (clusters,
// programmatic launches).
#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>

#include "attention.h"

namespace flash_wmma {

struct LaunchConfig {
    dim3 grid, block;
    int smem_bytes = 0;  ///< dynamic shared memory of a block
};

inline void check_cuda(hipError_t error, const char* what) {
    if (error == hipSuccess) return;
    static_cast<void>(hipGetLastError());  // as in launch.h
    throw std::runtime_error(std::string("flash_wmma: ") + what + ": " + hipGetErrorString(error));
}

/// The second argument of __launch_bounds__ for `blocks` resident blocks of `threads` threads a compute unit: the
/// wavefronts that each of its four SIMDs holds at once. A wavefront counts as 64 lanes, which gives the lowest bound.
constexpr int resident(int blocks, int threads) { return (blocks * threads + 4 * 64 - 1) / (4 * 64); }

/// Launches `kernel(args...)` asynchronously. Throws std::runtime_error if the launch is refused.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Stream stream, Args&&... args) {
    const auto start = [&](Params... values) {
        void* pointers[] = {&values...};
        return hipLaunchKernel(reinterpret_cast<const void*>(kernel), config.grid, config.block, pointers,
                               static_cast<std::size_t>(config.smem_bytes), static_cast<hipStream_t>(stream));
    };
    check_cuda(start(static_cast<Params>(std::forward<Args>(args))...), "launch");
}

}  // namespace flash_wmma
