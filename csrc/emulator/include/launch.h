// Launching a kernel, in the emulator: the same interface as csrc/device/launch.h. The launch is over when it returns.
#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "../../attention.h"

namespace flash_wmma {

struct LaunchConfig {
    dim3 grid, block;
    int smem_bytes = 0;
    int cluster = 1;
    bool programmatic = false;  ///< nothing to overlap with here
};

/// Runs kernel(args...) in every lane. Throws std::runtime_error with what the emulator finds.
template <class... Params, class... Args>
EMULATOR_UNSEEN void launch(void (*kernel)(Params...), const LaunchConfig& config, Stream, Args&&... args) {
    auto lane = [&]() EMULATOR_UNSEEN { kernel(static_cast<Params>(args)...); };
    emulator::launch({{config.grid.x, config.grid.y, config.grid.z},
                      {config.block.x, config.block.y, config.block.z},
                      static_cast<std::size_t>(config.smem_bytes),
                      config.cluster,
                      reinterpret_cast<const void*>(kernel),
                      [](void* arguments) EMULATOR_UNSEEN { (*static_cast<decltype(lane)*>(arguments))(); },
                      &lane});
}

}  // namespace flash_wmma
