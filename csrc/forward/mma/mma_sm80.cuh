// The shapes of mma_sm80: the kernel of kernel.cuh on sm_80 and later (device/sm80.cuh).
#pragma once

#include "device/sm80.cuh"
#include "forward/mma/kernel.cuh"
#include "forward/mma/sm80_shapes.h"

namespace flash_wmma::mma {

/// The shapes for dense and packed problems, found by a sweep (benchmark/tiles.py, docs/tuning/mma.md): per head dim,
/// the fastest first, then shapes that fill the device with fewer rows or need less shared memory. Arguments: d, row
/// warps, dim warps, row tiles, Bc, stages, steps of Q in registers, blocks an SM to keep registers for; then the
/// blocks an SM from which the shape pays, and how many blocks must be resident on an SM for that.
template <class T, Problems kProblems>
std::vector<Shape> sm80_shapes() {
    return {
        shape<Tile<Sm80, T, 32, 4, 1, 1, 64, 3, 2, 4>, kProblems>(80, 0.f, 1),
        shape<Tile<Sm80, T, 64, 4, 1, 2, 64, 3, 4, 2>, kProblems>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 64, 4, 1, 2, 64, 2, 4, 2>, kProblems>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 64, 4, 1, 1, 64, 2, 4, 3>, kProblems>(80, 0.f, 1),
        shape<Tile<Sm80, T, 96, 4, 1, 2, 64, 2, 0, 2>, kProblems>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 96, 4, 1, 1, 64, 2, 6, 2>, kProblems>(80, 0.f, 2),
        shape<Tile<Sm80, T, 96, 4, 1, 1, 32, 2, 6, 3>, kProblems>(80, 0.f, 1),
        shape<Tile<Sm80, T, 128, 4, 1, 2, 32, 3, 3, 2>, kProblems>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 128, 4, 1, 1, 64, 2, 8, 2>, kProblems>(80, 0.f, 2),
        shape<Tile<Sm80, T, 128, 4, 1, 1, 32, 2, 8, 2>, kProblems>(80, 0.f, 1),
        shape<Tile<Sm80, T, 192, 2, 2, 2, 64, 1, 2, 2>, kProblems>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 192, 4, 1, 1, 32, 2, 12, 2>, kProblems>(80, 0.f, 1),
        shape<Tile<Sm80, T, 256, 2, 2, 2, 64, 1, 0, 2>, kProblems>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 256, 4, 1, 1, 32, 2, 6, 2>, kProblems>(80, 0.f, 1),
    };
}

/// The shapes for any problem: fewer, because ScoreMods make their code long. At d = 192 and 256 one block an SM, with
/// two stages: two blocks were not timed with ScoreMods.
template <class T>
std::vector<Shape> sm80_general_shapes() {
    return {
        shape<Tile<Sm80, T, 32, 4, 1, 1, 64, 3, 2, 4>, kAny>(80, 0.f, 1),
        shape<Tile<Sm80, T, 64, 4, 1, 2, 64, 2, 4, 2>, kAny>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 64, 4, 1, 1, 64, 2, 4, 3>, kAny>(80, 0.f, 1),
        shape<Tile<Sm80, T, 96, 4, 1, 2, 64, 2, 0, 2>, kAny>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 96, 4, 1, 1, 32, 2, 6, 3>, kAny>(80, 0.f, 1),
        shape<Tile<Sm80, T, 128, 4, 1, 2, 32, 3, 3, 2>, kAny>(80, 0.75f, 2),
        shape<Tile<Sm80, T, 128, 4, 1, 1, 32, 2, 8, 2>, kAny>(80, 0.f, 1),
        shape<Tile<Sm80, T, 192, 4, 2, 2, 64, 2, 2, 1>, kAny>(80, 0.75f, 1),
        shape<Tile<Sm80, T, 192, 4, 1, 1, 32, 2, 12, 2>, kAny>(80, 0.f, 1),
        shape<Tile<Sm80, T, 256, 4, 2, 2, 64, 2, 0, 1>, kAny>(80, 0.75f, 1),
        shape<Tile<Sm80, T, 256, 4, 1, 1, 32, 2, 6, 2>, kAny>(80, 0.f, 1),
    };
}

}  // namespace flash_wmma::mma
