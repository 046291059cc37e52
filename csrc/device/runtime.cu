// The CUDA runtime behind registry.h's DeviceRuntime: device facts (read once a device) and function facts.
#include <launch.h>

#include <array>
#include <mutex>

#include "registry.h"

namespace flash_wmma {
namespace {

int attribute(cudaDeviceAttr name, int device) {
    int value = 0;
    check_cuda(cudaDeviceGetAttribute(&value, name, device), "device attribute");
    return value;
}

DeviceFacts read_facts(int device) {
    DeviceFacts facts;
    facts.arch = 10 * attribute(cudaDevAttrComputeCapabilityMajor, device) +
                 attribute(cudaDevAttrComputeCapabilityMinor, device);
    facts.sm_count = attribute(cudaDevAttrMultiProcessorCount, device);
    facts.smem_optin = attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    facts.warp_size = attribute(cudaDevAttrWarpSize, device);
    facts.memory_bus = attribute(cudaDevAttrGlobalMemoryBusWidth, device);
    return facts;
}

DeviceFacts facts(int device) {
    constexpr int kMaxDevices = 64;
    static std::array<DeviceFacts, kMaxDevices> cache;
    static std::array<std::once_flag, kMaxDevices> once;
    if (device < 0 || device >= kMaxDevices) throw std::runtime_error("flash_wmma: device index out of range");
    const auto i = static_cast<std::size_t>(device);
    std::call_once(once[i], [&] { cache[i] = read_facts(device); });
    return cache[i];
}

FunctionFacts function_facts(const void* function) {
    cudaFuncAttributes a{};
    check_cuda(cudaFuncGetAttributes(&a, function), "function attributes");
    return {a.binaryVersion,
            a.ptxVersion,
            a.numRegs,
            static_cast<int>(a.localSizeBytes),
            static_cast<int>(a.sharedSizeBytes),
            a.maxThreadsPerBlock};
}

constexpr DeviceRuntime kRuntime{facts, function_facts, CUDART_VERSION, FLASH_WMMA_ARCHITECTURES};
const RuntimeRegistration kRegistration(kRuntime);

}  // namespace
}  // namespace flash_wmma
