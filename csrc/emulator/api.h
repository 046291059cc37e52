// What the library and Python ask of the emulator: configuration, the tensors of a launch, the profile.
#pragma once

#include <cstddef>
#include <cstdint>

namespace flash_wmma::emulator {

struct Config {
    int warp_size = 32;      ///< 32 or 64
    int threads = 1;         ///< OS threads that share the blocks of a launch
    bool checks = true;      ///< races, bounds, uninitialised reads (only in a checked build of the kernel)
    bool counters = false;   ///< requests, conflicts, sectors, instructions: see take_profile
    std::uint64_t seed = 0;  ///< order in which warps run; 0: by warp number
};

/// Memory that a launch may touch: one tensor argument.
struct Buffer {
    const char* name;
    const void* data;
    std::size_t bytes;
    bool writable;
};

}  // namespace flash_wmma::emulator

#pragma GCC visibility push(default)
extern "C" {
void flash_wmma_emulator_configure(const flash_wmma::emulator::Config* config);

/// The buffers of the following launches. None: bounds of global memory are not checked.
void flash_wmma_emulator_buffers(const flash_wmma::emulator::Buffer* buffers, std::size_t count);

/// What the grid before the next launch has yet to write, if that launch is programmatic: `bytes` bytes of `from` to
/// `to`. In each block, or cluster, they land when one of its lanes first waits for that grid. `from` is copied now.
void flash_wmma_emulator_write_late(void* to, const void* from, std::size_t bytes);

/// Counters of the launches since the last call, as JSON; valid until the next call. Lines are those of the source.
const char* flash_wmma_emulator_take_profile();
}
#pragma GCC visibility pop
