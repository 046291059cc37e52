// Launching a kernel, on CUDA. Kernel files include <launch.h>; the emulator has its own definition of the same
// interface, found first on its include path.
#pragma once

#include <cuda.h>
#include <cuda_runtime.h>

#include <cstdint>
#include <stdexcept>
#include <string>

#include "attention.h"

namespace flash_wmma {

struct LaunchConfig {
    dim3 grid, block;
    int smem_bytes = 0;         ///< dynamic shared memory of a block
    int cluster = 1;            ///< blocks in a cluster, along x
    bool programmatic = false;  ///< may start before the stream's previous kernel has ended (it waits where it must)
    bool cooperative = false;   ///< all blocks are at work at once, or the launch is refused
};

inline void check_cuda(cudaError_t error, const char* what) {
    if (error == cudaSuccess) return;
    cudaGetLastError();  // a launch error that is not sticky must not surface in somebody else's call
    throw std::runtime_error(std::string("flash_wmma: ") + what + ": " + cudaGetErrorString(error));
}

/// The second argument of __launch_bounds__ for `blocks` resident blocks of `threads` threads a multiprocessor.
constexpr int resident(int blocks, [[maybe_unused]] int threads) { return blocks; }

/// Launches `kernel(args...)` asynchronously. Throws std::runtime_error if the launch is refused.
template <class... Params, class... Args>
void launch(void (*kernel)(Params...), const LaunchConfig& config, Stream stream, Args&&... args) {
    constexpr int kSmemWithoutOptIn = 48 * 1024;
    const auto function = reinterpret_cast<const void*>(kernel);
    if (config.smem_bytes > kSmemWithoutOptIn)
        check_cuda(cudaFuncSetAttribute(function, cudaFuncAttributeMaxDynamicSharedMemorySize, config.smem_bytes),
                   "shared memory of a block");
    cudaLaunchAttribute attributes[3];
    unsigned count = 0;
    if (config.cluster > 1) {
        attributes[count].id = cudaLaunchAttributeClusterDimension;
        attributes[count++].val.clusterDim = {static_cast<unsigned>(config.cluster), 1, 1};
    }
    if (config.programmatic) {
        attributes[count].id = cudaLaunchAttributeProgrammaticStreamSerialization;
        attributes[count++].val.programmaticStreamSerializationAllowed = 1;
    }
    if (config.cooperative) {
        attributes[count].id = cudaLaunchAttributeCooperative;
        attributes[count++].val.cooperative = 1;
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

/// What a tensor copy (ptx_sm90.cuh) needs to know of a tensor. Kernels take it as `const __grid_constant__ TensorMap`.
using TensorMap = CUtensorMap;

/// The map of a 4-d tensor of half or bf16 for copies of boxes to panels of shared memory with the 128-byte swizzle.
/// Dimensions come innermost first. `sizes`, `box` and `strides` count elements; box[0] is 64, `strides` are those of
/// dimensions 1 to 3, multiples of 8. Throws std::runtime_error if the driver refuses.
inline TensorMap make_tensor_map(const void* data, DType type, const std::int64_t (&sizes)[4],
                                 const std::int64_t (&strides)[3], const int (&box)[4]) {
    using Encode = decltype(&cuTensorMapEncodeTiled);
    static const Encode encode = [] {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found{};
        const char* const name = "cuTensorMapEncodeTiled";
#if CUDART_VERSION >= 12050
        check_cuda(cudaGetDriverEntryPointByVersion(name, &function, 12000, cudaEnableDefault, &found), name);
#else
        check_cuda(cudaGetDriverEntryPoint(name, &function, cudaEnableDefault, &found), name);
#endif
        if (found != cudaDriverEntryPointSuccess) throw std::runtime_error("flash_wmma: the driver has no tensor maps");
        return reinterpret_cast<Encode>(function);
    }();
    // The driver needs a current context; cudaSetDevice gives this thread one
    static thread_local const bool bound = [] {
        int device = 0;
        check_cuda(cudaGetDevice(&device), "device");
        check_cuda(cudaSetDevice(device), "device");
        return true;
    }();
    static_cast<void>(bound);
    constexpr int kRank = 4;
    cuuint64_t global[kRank], bytes[kRank - 1];
    cuuint32_t tile[kRank], steps[kRank];
    for (int i = 0; i < kRank; ++i) {
        global[i] = static_cast<cuuint64_t>(sizes[i]);
        tile[i] = static_cast<cuuint32_t>(box[i]);
        steps[i] = 1;
        // A dimension of one element may have any stride, but the driver refuses invalid ones
        if (i > 0) bytes[i - 1] = sizes[i] == 1 ? 16 : 2 * static_cast<cuuint64_t>(strides[i - 1]);
    }
    TensorMap map;
    const CUresult result =
        encode(&map, type == DType::kFloat16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
               kRank, const_cast<void*>(data), global, bytes, tile, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
               CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    if (result != CUDA_SUCCESS)
        throw std::runtime_error("flash_wmma: the driver refuses a tensor map, error " + std::to_string(result));
    return map;
}

}  // namespace flash_wmma
