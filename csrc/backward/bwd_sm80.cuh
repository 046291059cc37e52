// The shapes of bwd_sm80: the kernel of mma.cuh on sm_80 and later.
#pragma once

#include "bwd_sm80_shapes.h"
#include "mma.cuh"

namespace flash_wmma::backward {

/// Arguments: d, own warps, stream warps, row tiles, rows of a streamed tile, step, stages, resident operands (1: the
/// second; 2: both), blocks an SM to keep registers for.
template <class T, int HeadDim, int OwnWarps, int StreamWarps, int RowTiles, int StreamTile, int Step, int Stages,
          int Resident, int BlocksPerSm>
using Sm80Tile =
    Tile<mma::Sm80, T, HeadDim, OwnWarps, StreamWarps, RowTiles, StreamTile, Step, Stages, Resident, BlocksPerSm>;

/// The fused pass. Up to d = 64 P and dS stay in registers and two blocks share an SM; above, eight warps exchange them.
template <class T, bool General>
std::vector<Shape> sm80_fused_shapes() {
    constexpr Pass kFused = Pass::kFused;
    return {
        shape<Sm80Tile<T, 32, 4, 1, 2, 64, 32, 2, 1, 2>, General, kFused>(80),
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 2, 1, 2>, General, kFused>(80),
        shape<Sm80Tile<T, 96, 4, 2, 2, 64, 32, 2, 0, 1>, General, kFused>(80),
        shape<Sm80Tile<T, 128, 4, 2, 2, 64, 32, 2, 0, 1>, General, kFused>(80),
        shape<Sm80Tile<T, 192, 2, 4, 2, 64, 16, 2, 0, 1>, General, kFused>(80),
        shape<Sm80Tile<T, 256, 2, 4, 2, 64, 16, 2, 0, 1>, General, kFused>(80),
    };
}
/// What is left for devices with less shared memory: 163 KiB (the first), 99 KiB.
template <class T>
std::vector<Shape> sm80_small_shapes() {
    constexpr Pass kFused = Pass::kFused;
    return {
        shape<Sm80Tile<T, 256, 2, 4, 2, 64, 16, 1, 0, 1>, true, kFused>(80),
        shape<Sm80Tile<T, 128, 2, 2, 2, 64, 32, 1, 0, 2>, true, kFused>(80),
        shape<Sm80Tile<T, 256, 2, 2, 1, 32, 16, 1, 0, 1>, true, kFused>(80),
    };
}
/// The deterministic passes. They fit 99 KiB.
template <class T>
std::vector<Shape> sm80_split_shapes() {
    constexpr Pass kKeys = Pass::kKeys, kQueries = Pass::kQueries;
    return {
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 2, 1, 2>, true, kKeys>(80),
        shape<Sm80Tile<T, 128, 2, 2, 2, 64, 32, 1, 0, 2>, true, kKeys>(80),
        shape<Sm80Tile<T, 256, 2, 2, 1, 32, 16, 1, 0, 1>, true, kKeys>(80),
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 2, 2, 2>, true, kQueries>(80),
        shape<Sm80Tile<T, 128, 4, 1, 2, 32, 16, 2, 0, 2>, true, kQueries>(80),
        shape<Sm80Tile<T, 256, 4, 1, 1, 32, 16, 1, 0, 1>, true, kQueries>(80),
    };
}

}  // namespace flash_wmma::backward
