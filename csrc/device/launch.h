// Launching a kernel, on CUDA. Kernel files include <launch.h>; the emulator has its own definition of the same
// interface, found first on its include path.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

#include "../attention.h"

namespace flash_wmma {

struct LaunchConfig {
    dim3 grid, block;
    int smem_bytes = 0;         ///< dynamic shared memory of a block
    int cluster = 1;            ///< blocks in a cluster, along x
    bool programmatic = false;  ///< may start before the stream's previous kernel has ended (it must wait for it)
};

inline void check_cuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // a launch error that is not sticky must not surface in somebody else's call
    throw std::runtime_error(std::string("flash_wmma: ") + what + ": " + cudaGetErrorString(error));
}

/// Launches `kernel(args...)` asynchronously. Throws std::runtime_error if the launch is refused.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Stream stream, Args&&... args) {
    constexpr int kSmemWithoutOptIn = 48 * 1024;
    const auto function = reinterpret_cast<const void*>(kernel);
    if (config.smem_bytes > kSmemWithoutOptIn)
        check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes),
                   "shared memory of a block");
    cudaLaunchAttribute attributes[2];
    unsigned count = 0;
    if (config.cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
    }
    if (config.programmatic) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    cudaLaunchConfig_t launch_config{};
    launch_config.gridDim = config.grid;
    launch_config.blockDim = config.block;
    launch_config.dynamicSmemBytes = static_cast<size_t>(config.smem_bytes);
    launch_config.stream = static_cast<cudaStream_t>(stream);
    launch_config.attrs = attributes;
    launch_config.numAttrs = count;
    check_cuda(cudaLaunchKernelEx(&launch_config, kernel, static_cast<Params>(std::forward<Args>(args))...), "launch");
}

}  // namespace flash_wmma
