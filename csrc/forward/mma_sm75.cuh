// mma_sm75: the kernel of mma.cuh on Turing, and by JIT on anything later. m16n8k8 of half. There is no asynchronous copy:
// a tile waits in registers, loaded 16 bytes at a time while the tile before is worked on, and is stored at its end.
#pragma once

#include "mma.cuh"

namespace flash_wmma::mma {

struct Sm75 {
    static constexpr bool kThroughRegisters = true;  // the way of a copy to shared memory

    /// D += A B: A 16x16, B 16x8, as two products along k.
    template <class T>
    __device__ __forceinline__ static void multiply(float (&d)[4], const std::uint32_t (&a)[4], std::uint32_t b0,
                                                    std::uint32_t b1) {
        static_assert(std::is_same_v<T, half>);
        const std::uint32_t first[2] = {a[0], a[1]}, second[2] = {a[2], a[3]};
        ptx::mma_m16n8k8(d, first, b0);
        ptx::mma_m16n8k8(d, second, b1);
    }

    /// A block's copies of Rows rows, zeros beyond `rows`, in two steps.
    template <class Tile, int Rows>
    struct Copy : CopyMap<Tile, Rows> {
        using Map = CopyMap<Tile, Rows>;

        int head_dim;
        uint4 vectors[Map::kCount];

        __device__ Copy(const typename Tile::T* source, std::int64_t pitch, int d)
            : Map(source, pitch, d), head_dim(d) {}

        template <class Target>
        __device__ __forceinline__ void start(Target&, std::int64_t pitch) {
            // Asked anew at each tile: a warp that holds whole rows of O has no register left for it at d = 256
            const int tid = static_cast<int>(threadIdx.x);
            const bool inside = Tile::kDimWarps == 1 ? ptx::opaque(tid) % Map::kVectors * 8 < head_dim : this->inside;
            this->for_each(pitch, [&](int i, int, int, const auto* from) {
                vectors[i] = inside ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            });
        }
        template <class Target>
        __device__ __forceinline__ void start(Target&, std::int64_t pitch, int rows) {
            this->for_each(pitch, [&](int i, int row, int, const auto* from) {
                vectors[i] = this->inside && row < rows ? *reinterpret_cast<const uint4*>(from) : uint4{0, 0, 0, 0};
            });
        }
        template <class Target>
        __device__ __forceinline__ void finish(Target& target) {
            CopyMap<Tile, Rows>(*this).for_each(0, [&](int i, int row, int column, const auto*) {
                *reinterpret_cast<uint4*>(target.at(row, column)) = vectors[i];
            });
        }
    };
};

}  // namespace flash_wmma::mma
