// Launching a kernel, in the emulator: the same interface as csrc/device/launch.h. launch() returns when the grid is
// done.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "attention.h"

namespace flash_wmma {

struct LaunchConfig {
    dim3 grid, block;
    int smem_bytes = 0;
    int cluster = 1;
    bool programmatic = false;  ///< may begin before the stream's previous kernel has ended (it waits where it must)
    bool cooperative = false;   ///< all blocks run together, as those of a cluster do
};

/// Runs kernel(args...) in every lane. Throws std::runtime_error with the emulator's finding, if there is one.
template <class... Params, class... Args>
EMULATOR_UNSEEN void launch(void (*kernel)(Params...), const LaunchConfig& config, Stream, Args&&... args) {
    auto lane = [&]() EMULATOR_UNSEEN { kernel(static_cast<Params>(args)...); };
    emulator::launch({{config.grid.x, config.grid.y, config.grid.z},
                      {config.block.x, config.block.y, config.block.z},
                      static_cast<std::size_t>(config.smem_bytes),
                      config.cooperative ? static_cast<int>(config.grid.x) : config.cluster,
                      config.programmatic,
                      reinterpret_cast<const void*>(kernel),
                      [](void* arguments) EMULATOR_UNSEEN { (*static_cast<decltype(lane)*>(arguments))(); },
                      &lane});
}

using TensorMap = emulator::TensorMap;

/// The same interface and the same refusals as csrc/device/launch.h.
inline TensorMap make_tensor_map(const void* data, DType, const std::int64_t (&sizes)[4],
                                 const std::int64_t (&strides)[3], const int (&box)[4]) {
    constexpr int kSwizzled = 8, kBytes = 2;
    TensorMap map{data, 4, kBytes, {}, {}, {}, kSwizzled};
    for (int i = 0; i < map.rank; ++i) {
        map.size[i] = sizes[i];
        map.stride[i] = i == 0 ? kBytes : sizes[i] == 1 ? 16 : kBytes * strides[i - 1];
        map.box[i] = box[i];
    }
    if (const char* why = emulator::refuse_tensor_map(map))
        throw std::runtime_error(std::string("flash_wmma: the driver refuses a tensor map: ") + why);
    return map;
}

}  // namespace flash_wmma
