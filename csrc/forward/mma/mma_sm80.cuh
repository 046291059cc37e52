// mma_sm80: the kernel of mma.cuh on sm_80 and later. m16n8k16 of half or bf16; tiles come by 16-byte asynchronous
// copies.
#pragma once

#include "forward/mma/kernel.cuh"
#include "forward/mma/sm80_shapes.h"

namespace flash_wmma::mma {

struct Sm80 {
    static constexpr bool kThroughRegisters = false;  // the way of a copy to shared memory
    static constexpr bool kMultipliesBf16 = true;
    static constexpr bool kPairsB = true;  // a product takes B from two neighbouring registers

    /// D += A B: A 16x16, B 16x8.
    template <class T>
    __device__ __forceinline__ static void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
        const std::uint32_t b[2] = {b0, b1};
        ptx::mma_m16n8k16<T>(d, a, b);
    }

    /// A vector from global to shared memory, or zeros; it lands at the cp_async_wait of its group.
    __device__ __forceinline__ static void copy_16(void* to, const void* from, bool inside) {
        ptx::cp_async_16(to, from, inside ? 16 : 0);
    }

    /// A block's copies of tiles of Rows rows, zeros beyond `rows`.
    template <class Tile, int Rows>
    struct Copy : CopyMap<Tile, Rows> {
        using CopyMap<Tile, Rows>::CopyMap;

        template <class Target>
        __device__ __forceinline__ void start(Target& target, std::int64_t pitch) {
            this->for_each(pitch, [&](int, int row, int column, const auto* from) {
                copy_16(target.at(row, column), from, this->inside);
            });
        }
        template <class Target>
        __device__ __forceinline__ void start(Target& target, std::int64_t pitch, int rows) {
            this->for_each(pitch, [&](int, int row, int column, const auto* from) {
                copy_16(target.at(row, column), from, this->inside && row < rows);
            });
        }
        template <class Target>
        __device__ __forceinline__ void finish(Target&) {}
    };
};

/// The shapes for dense and packed problems, found by a sweep (benchmark/tiles.py, docs/tuning/mma.md): per head dim,
/// the fastest first, then what fills the device with fewer rows or fits less shared memory. Arguments: d, row warps,
/// dim warps, row tiles, Bc, stages, steps of Q in registers, blocks an SM to keep registers for; then the blocks an SM
/// from which the shape pays, and how many must be resident on an SM for it to.
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
