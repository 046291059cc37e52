// The tile shapes of bwd_sm80's statistics: the kernel of statistics.cuh on sm_80 and later.
#pragma once

#include "backward/mma/sm80_shapes.h"
#include "backward/mma/statistics.cuh"
#include "device/sm80.cuh"

namespace flash_wmma::backward {

/// Two tiles of 16 rows a warp, so that a fragment of streamed rows serves four products, where registers hold the own
/// rows. 16 to 65 KiB of shared memory. None was timed.
inline constexpr TileShape kSm80Statistics[] = {
    {.d = 64, .own_warps = 4, .stream_rows = 64, .step = 32, .stages = 2, .in_registers = 2, .blocks_per_sm = 2},
    {.d = 128, .own_warps = 4, .stream_rows = 64, .step = 32, .stages = 2, .in_registers = 2, .blocks_per_sm = 2},
    {.d = 256, .own_warps = 4, .stream_rows = 64, .stages = 2, .in_registers = 2, .blocks_per_sm = 2},
    {.d = 512, .own_warps = 4, .row_tiles = 1, .stream_rows = 32, .stages = 2, .in_registers = 2, .blocks_per_sm = 2},
};

}  // namespace flash_wmma::backward
