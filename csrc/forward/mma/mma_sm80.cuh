// The tile shapes of mma_sm80: the kernel of kernel.cuh on sm_80 and later (device/sm80.cuh).
#pragma once

#include "device/sm80.cuh"
#include "forward/mma/kernel.cuh"
#include "forward/mma/sm80_shapes.h"

namespace flash_wmma::mma {

/// The shapes for dense and packed problems, found by a sweep (benchmark/tiles.py, docs/tuning/mma.md): per head dim,
/// the fastest first, then shapes that fill the device with fewer rows or need less shared memory.
inline constexpr TableRow kSm80Rows[] = {
    {{.d = 32, .keys = 64, .stages = 3, .q_steps = 2, .blocks_per_sm = 4}},
    {{.d = 64, .row_tiles = 2, .keys = 64, .stages = 3, .q_steps = 4, .blocks_per_sm = 2}, {0.75f, 2}},
    {{.d = 64, .row_tiles = 2, .keys = 64, .stages = 2, .q_steps = 4, .blocks_per_sm = 2}, {0.75f, 2}},
    {{.d = 64, .keys = 64, .stages = 2, .q_steps = 4, .blocks_per_sm = 3}},
    {{.d = 96, .row_tiles = 2, .keys = 64, .stages = 2, .q_steps = 0, .blocks_per_sm = 2}, {0.75f, 2}},
    {{.d = 96, .keys = 64, .stages = 2, .q_steps = 6, .blocks_per_sm = 2}, {0.f, 2}},
    {{.d = 96, .keys = 32, .stages = 2, .q_steps = 6, .blocks_per_sm = 3}},
    {{.d = 128, .row_tiles = 2, .keys = 32, .stages = 3, .q_steps = 3, .blocks_per_sm = 2}, {0.75f, 2}},
    {{.d = 128, .keys = 64, .stages = 2, .q_steps = 8, .blocks_per_sm = 2}, {0.f, 2}},
    {{.d = 128, .keys = 32, .stages = 2, .q_steps = 8, .blocks_per_sm = 2}},
    {{.d = 192, .row_warps = 2, .dim_warps = 2, .row_tiles = 2, .keys = 64, .q_steps = 2, .blocks_per_sm = 2},
     {0.75f, 2}},
    {{.d = 192, .keys = 32, .stages = 2, .q_steps = 12, .blocks_per_sm = 2}},
    {{.d = 256, .row_warps = 2, .dim_warps = 2, .row_tiles = 2, .keys = 64, .q_steps = 0, .blocks_per_sm = 2},
     {0.75f, 2}},
    {{.d = 256, .keys = 32, .stages = 2, .q_steps = 6, .blocks_per_sm = 2}},
    {{.d = 512, .row_warps = 2, .dim_warps = 4, .row_tiles = 2, .keys = 64, .q_steps = 0, .blocks_per_sm = 1}, {0.75f}},
    {{.d = 512, .dim_warps = 2, .keys = 32, .q_steps = 0, .blocks_per_sm = 1}, {0.75f}},
    {{.d = 512, .row_warps = 2, .dim_warps = 2, .keys = 32, .q_steps = 0, .blocks_per_sm = 1}},
};

/// The shapes for any problem: fewer, because ScoreMods make their code long. At d = 192 and 256 one block an SM, with
/// two stages: two blocks were not timed with ScoreMods. No shape of d = 512 was timed.
inline constexpr TableRow kSm80GeneralRows[] = {
    {{.d = 32, .keys = 64, .stages = 3, .q_steps = 2, .blocks_per_sm = 4}},
    {{.d = 64, .row_tiles = 2, .keys = 64, .stages = 2, .q_steps = 4, .blocks_per_sm = 2}, {0.75f, 2}},
    {{.d = 64, .keys = 64, .stages = 2, .q_steps = 4, .blocks_per_sm = 3}},
    {{.d = 96, .row_tiles = 2, .keys = 64, .stages = 2, .q_steps = 0, .blocks_per_sm = 2}, {0.75f, 2}},
    {{.d = 96, .keys = 32, .stages = 2, .q_steps = 6, .blocks_per_sm = 3}},
    {{.d = 128, .row_tiles = 2, .keys = 32, .stages = 3, .q_steps = 3, .blocks_per_sm = 2}, {0.75f, 2}},
    {{.d = 128, .keys = 32, .stages = 2, .q_steps = 8, .blocks_per_sm = 2}},
    {{.d = 192, .dim_warps = 2, .row_tiles = 2, .keys = 64, .stages = 2, .q_steps = 2, .blocks_per_sm = 1}, {0.75f}},
    {{.d = 192, .keys = 32, .stages = 2, .q_steps = 12, .blocks_per_sm = 2}},
    {{.d = 256, .dim_warps = 2, .row_tiles = 2, .keys = 64, .stages = 2, .q_steps = 0, .blocks_per_sm = 1}, {0.75f}},
    {{.d = 256, .keys = 32, .stages = 2, .q_steps = 6, .blocks_per_sm = 2}},
    {{.d = 512, .dim_warps = 2, .keys = 32, .q_steps = 0, .blocks_per_sm = 1}, {0.75f}},
    {{.d = 512, .row_warps = 2, .dim_warps = 2, .keys = 32, .q_steps = 0, .blocks_per_sm = 1}},
};

/// The shapes for key/value caches. Where at most 16 rows share a key, as in a decode step, each warp has keys of its
/// own. Two warps have up to 32 rows, as with a few queries a sequence; more rows share a tile of 64. All keep 64 KiB
/// or more of copies under way on an SM with 227 KiB of shared memory, and a block fits in 99 KiB. The larger tiles of
/// d = 128 for more than 16 rows are for SMs that hold two such blocks.
inline constexpr Pays kFewRows{.rows = 16}, kSomeRows{.rows = 32};
inline constexpr Pays kHoldsTwo{.resident = 2}, kSomeRowsHoldsTwo{.resident = 2, .rows = 32};
inline constexpr TableRow kSm80CachedRows[] = {
    {{.d = 32, .row_warps = 1, .keys = 128, .stages = 4, .q_steps = 2, .blocks_per_sm = 3, .key_warps = 4}, kFewRows},
    {{.d = 32, .row_warps = 2, .keys = 64, .stages = 4, .q_steps = 2, .blocks_per_sm = 5}, kSomeRows},
    {{.d = 32, .keys = 64, .stages = 4, .q_steps = 2, .blocks_per_sm = 3}},
    {{.d = 64, .row_warps = 1, .keys = 128, .stages = 3, .q_steps = 4, .blocks_per_sm = 2, .key_warps = 4}, kFewRows},
    {{.d = 64, .row_warps = 2, .keys = 64, .stages = 4, .q_steps = 4, .blocks_per_sm = 3}, kSomeRows},
    {{.d = 64, .keys = 64, .stages = 4, .q_steps = 4, .blocks_per_sm = 2}},
    {{.d = 96, .row_warps = 1, .keys = 64, .stages = 3, .q_steps = 6, .blocks_per_sm = 2, .key_warps = 4}, kFewRows},
    {{.d = 96, .row_warps = 2, .keys = 64, .stages = 3, .q_steps = 6, .blocks_per_sm = 3}, kSomeRows},
    {{.d = 96, .keys = 64, .stages = 3, .q_steps = 6, .blocks_per_sm = 2}},
    {{.d = 128, .row_warps = 1, .keys = 64, .stages = 3, .q_steps = 8, .blocks_per_sm = 2, .key_warps = 4}, kFewRows},
    {{.d = 128, .row_warps = 2, .keys = 64, .stages = 3, .q_steps = 8, .blocks_per_sm = 2}, kSomeRowsHoldsTwo},
    {{.d = 128, .row_warps = 2, .keys = 32, .stages = 4, .q_steps = 8, .blocks_per_sm = 3}, kSomeRows},
    {{.d = 128, .keys = 64, .stages = 3, .q_steps = 8, .blocks_per_sm = 2}, kHoldsTwo},
    {{.d = 128, .keys = 32, .stages = 4, .q_steps = 8, .blocks_per_sm = 2}},
    {{.d = 192, .row_warps = 1, .keys = 64, .stages = 2, .q_steps = 12, .blocks_per_sm = 2, .key_warps = 4}, kFewRows},
    {{.d = 192, .row_warps = 2, .keys = 32, .stages = 3, .q_steps = 12, .blocks_per_sm = 2}, kSomeRows},
    {{.d = 192, .keys = 32, .stages = 3, .q_steps = 12, .blocks_per_sm = 2}},
    {{.d = 256, .row_warps = 1, .keys = 32, .stages = 2, .q_steps = 16, .blocks_per_sm = 3, .key_warps = 2}, kFewRows},
    {{.d = 256, .row_warps = 2, .keys = 32, .stages = 2, .q_steps = 6, .blocks_per_sm = 2}, kSomeRows},
    {{.d = 256, .keys = 32, .stages = 2, .q_steps = 6, .blocks_per_sm = 2}},
};

}  // namespace flash_wmma::mma
