// CUDA's names for what HIP names differently, as far as the kernels, launch.h and runtime.cu use them. Takes the place
// of the toolkit's header, and like it is included before everything else.
#pragma once

#include <hip/hip_runtime.h>

#include <cstdint>

#define __grid_constant__  // a kernel's parameters lie in constant memory anyway

using cudaError_t = hipError_t;
inline constexpr hipError_t cudaSuccess = hipSuccess;

using cudaDeviceAttr = hipDeviceAttribute_t;
inline constexpr hipDeviceAttribute_t cudaDevAttrComputeCapabilityMajor = hipDeviceAttributeComputeCapabilityMajor,
                                      cudaDevAttrComputeCapabilityMinor = hipDeviceAttributeComputeCapabilityMinor,
                                      cudaDevAttrMultiProcessorCount = hipDeviceAttributeMultiprocessorCount,
                                      cudaDevAttrMaxSharedMemoryPerBlockOptin =
                                          hipDeviceAttributeMaxSharedMemoryPerBlock,  // there is no more to opt in to
    cudaDevAttrWarpSize = hipDeviceAttributeWarpSize,
                                      cudaDevAttrGlobalMemoryBusWidth = hipDeviceAttributeMemoryBusWidth;
inline hipError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device) {
    return hipDeviceGetAttribute(value, attribute, device);
}

using cudaFuncAttributes = hipFuncAttributes;
inline hipError_t cudaFuncGetAttributes(cudaFuncAttributes* attributes, const void* function) {
    return hipFuncGetAttributes(attributes, function);
}

#define CUDART_VERSION (1000 * HIP_VERSION_MAJOR + 10 * HIP_VERSION_MINOR)
