// mma_sm80: the kernel of mma.cuh on sm_80 and later. m16n8k16 of half or bf16; tiles come by 16-byte asynchronous copies.
#pragma once

#include "mma.cuh"
#include "mma_sm80_shapes.h"

namespace flash_wmma::mma {

struct Sm80 {
    static constexpr bool kThroughRegisters = false;  // the way of a copy to shared memory

    /// D += A B: A 16x16, B 16x8.
    template <class T>
    __device__ __forceinline__ static void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
        const std::uint32_t b[2] = {b0, b1};
        ptx::mma_m16n8k16<T>(d, a, b);
    }

    /// A block's copies of Rows rows, zeros beyond `rows`; they land at the cp_async_wait of their group.
    template <class Tile, int Rows>
    struct Copy : CopyMap<Tile, Rows> {
        using CopyMap<Tile, Rows>::CopyMap;

        template <class Target>
        __device__ __forceinline__ void start(Target& target, std::int64_t pitch) {
            this->for_each(pitch, [&](int, int row, int column, const auto* from) {
                ptx::cp_async_16(target.at(row, column), from, this->inside ? 16 : 0);
            });
        }
        template <class Target>
        __device__ __forceinline__ void start(Target& target, std::int64_t pitch, int rows) {
            this->for_each(pitch, [&](int, int row, int column, const auto* from) {
                ptx::cp_async_16(target.at(row, column), from, this->inside && row < rows ? 16 : 0);
            });
        }
        template <class Target>
        __device__ __forceinline__ void finish(Target&) {}
    };
};

/// The shapes that ship, found by a sweep (docs/tuning/mma.md): per head dim, the larger tile before the one that fits
/// less shared memory or fills the device with fewer rows. Arguments: d, row warps, dim warps, row tiles, Bc, stages, Q in
/// registers, blocks an SM to keep registers for; then the blocks an SM from which the shape pays.
template <class T, bool General>
std::vector<Shape> sm80_shapes() {
    return {
        shape<Tile<Sm80, T, 32, 4, 1, 2, 64, 3, true, 2>, General>(80, 0.75f),
        shape<Tile<Sm80, T, 32, 4, 1, 1, 64, 2, true, 3>, General>(80, 0.f),
        shape<Tile<Sm80, T, 64, 4, 1, 2, 64, 3, true, 2>, General>(80, 0.75f),
        shape<Tile<Sm80, T, 64, 4, 1, 1, 64, 2, true, 3>, General>(80, 0.f),
        shape<Tile<Sm80, T, 96, 4, 1, 2, 64, 2, false, 2>, General>(80, 0.75f),
        shape<Tile<Sm80, T, 96, 4, 1, 1, 64, 2, true, 2>, General>(80, 0.f),
        shape<Tile<Sm80, T, 128, 4, 1, 2, 32, 3, false, 2>, General>(80, 0.75f),
        shape<Tile<Sm80, T, 128, 4, 1, 1, 64, 2, true, 2>, General>(80, 0.f),
        shape<Tile<Sm80, T, 192, 8, 1, 1, 64, 2, false, 1>, General>(80, 0.75f),
        shape<Tile<Sm80, T, 192, 4, 1, 1, 32, 2, false, 2>, General>(80, 0.f),
        shape<Tile<Sm80, T, 256, 4, 2, 2, 64, 2, false, 1>, General>(80, 0.75f),
        shape<Tile<Sm80, T, 256, 4, 1, 1, 32, 2, false, 2>, General>(80, 0.f),
    };
}

}  // namespace flash_wmma::mma
