// The shapes of bwd_sm80: the kernel of kernel.cuh on sm_80 and later.
#pragma once

#include "backward/mma/kernel.cuh"
#include "backward/mma/sm80_shapes.h"
#include "backward/mma/two_roles.cuh"
#include "device/sm80.cuh"

namespace flash_wmma::backward {

/// Arguments: d, own warps, stream warps, row tiles, rows of a streamed tile, step, stages, resident operands (1: the
/// second; 2: both), blocks an SM to keep registers for.
template <class T, int HeadDim, int OwnWarps, int StreamWarps, int RowTiles, int StreamTile, int Step, int Stages,
          int Resident, int BlocksPerSm>
using Sm80Tile =
    Tile<mma::Sm80, T, HeadDim, OwnWarps, StreamWarps, RowTiles, StreamTile, Step, Stages, Resident, BlocksPerSm>;

/// The kernel of two_roles.cuh. Arguments: d, own warps, row tiles; 64 streamed rows, 2 stages.
template <class T, int HeadDim, int OwnWarps, int RowTiles, Pass kPass>
Shape sm80_two_roles() {
    return two_roles_shape<Tile<mma::Sm80, T, HeadDim, OwnWarps, 2, RowTiles, 64, 32, 2, 0, 1, 2>, kPass>(80);
}

/// The fused pass of plain problems. Up to d = 64 P and dS stay in registers and two blocks share an SM; above, a block
/// takes 176 to 217 KiB of shared memory.
template <class T>
std::vector<Shape> sm80_plain_shapes() {
    constexpr Pass kFused = Pass::kFused;
    return {
        shape<Sm80Tile<T, 32, 4, 1, 2, 64, 32, 1, 1, 2>, Problems::kPlain, kFused>(80),
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 1, 1, 2>, Problems::kPlain, kFused>(80),
        sm80_two_roles<T, 96, 2, 4, kFused>(),
        sm80_two_roles<T, 128, 2, 4, kFused>(),
        sm80_two_roles<T, 192, 2, 2, kFused>(),
        sm80_two_roles<T, 256, 2, 2, kFused>(),
    };
}
/// The fused pass of any problem, and with less shared memory: 128 and 145 KiB at d = 128 and 256 (the first shape of
/// each), below 99 KiB otherwise.
template <class T>
std::vector<Shape> sm80_general_shapes() {
    constexpr Pass kFused = Pass::kFused;
    return {
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 1, 1, 2>, Problems::kGeneral, kFused>(80),
        shape<Sm80Tile<T, 128, 4, 2, 2, 64, 32, 1, 0, 1>, Problems::kGeneral, kFused>(80),
        shape<Sm80Tile<T, 128, 2, 2, 2, 64, 32, 1, 0, 2>, Problems::kGeneral, kFused>(80),
        shape<Sm80Tile<T, 256, 2, 4, 2, 64, 16, 1, 0, 1>, Problems::kGeneral, kFused>(80),
        shape<Sm80Tile<T, 256, 2, 2, 1, 32, 16, 1, 0, 1>, Problems::kGeneral, kFused>(80),
    };
}
/// The deterministic passes. At d = 256 plain problems have a shape of their own, which needs large shared memory; the
/// last shape of each pass fits 99 KiB.
template <class T>
std::vector<Shape> sm80_split_shapes() {
    constexpr Pass kKeys = Pass::kKeys, kQueries = Pass::kQueries;
    return {
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 2, 1, 2>, Problems::kGeneral, kKeys>(80),
        shape<Sm80Tile<T, 128, 2, 2, 2, 64, 32, 1, 0, 2>, Problems::kGeneral, kKeys>(80),
        sm80_two_roles<T, 256, 2, 2, kKeys>(),
        shape<Sm80Tile<T, 256, 2, 2, 1, 32, 16, 1, 0, 1>, Problems::kGeneral, kKeys>(80),
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 2, 2, 2>, Problems::kGeneral, kQueries>(80),
        shape<Sm80Tile<T, 128, 4, 1, 2, 32, 32, 2, 0, 2>, Problems::kGeneral, kQueries>(80),
        shape<Sm80Tile<T, 256, 4, 2, 2, 64, 32, 1, 0, 1>, Problems::kGeneral, kQueries>(80),
        shape<Sm80Tile<T, 256, 4, 1, 1, 32, 16, 1, 0, 1>, Problems::kGeneral, kQueries>(80),
    };
}

/// All passes of converted inputs.
template <class T>
std::vector<Shape> sm80_converted_shapes() {
    constexpr Problems kConverted = Problems::kConverted;
    constexpr Pass kFused = Pass::kFused, kKeys = Pass::kKeys, kQueries = Pass::kQueries;
    return {
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 1, 0, 2>, kConverted, kFused>(80),
        shape<Sm80Tile<T, 128, 4, 2, 2, 64, 32, 1, 0, 1>, kConverted, kFused>(80),
        shape<Sm80Tile<T, 128, 2, 2, 2, 64, 32, 1, 0, 2>, kConverted, kFused>(80),
        shape<Sm80Tile<T, 256, 2, 4, 2, 64, 16, 1, 0, 1>, kConverted, kFused>(80),
        shape<Sm80Tile<T, 256, 2, 2, 1, 32, 16, 1, 0, 1>, kConverted, kFused>(80),
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 2, 0, 2>, kConverted, kKeys>(80),
        shape<Sm80Tile<T, 128, 2, 2, 2, 64, 32, 1, 0, 2>, kConverted, kKeys>(80),
        shape<Sm80Tile<T, 256, 2, 2, 1, 32, 16, 1, 0, 1>, kConverted, kKeys>(80),
        shape<Sm80Tile<T, 64, 4, 1, 2, 64, 16, 2, 2, 2>, kConverted, kQueries>(80),
        shape<Sm80Tile<T, 128, 4, 1, 2, 32, 32, 2, 0, 2>, kConverted, kQueries>(80),
        shape<Sm80Tile<T, 256, 4, 2, 2, 64, 32, 1, 0, 1>, kConverted, kQueries>(80),
        shape<Sm80Tile<T, 256, 4, 1, 1, 32, 16, 1, 0, 1>, kConverted, kQueries>(80),
    };
}

}  // namespace flash_wmma::backward
