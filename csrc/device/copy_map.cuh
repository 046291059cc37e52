// Which vectors of a tile a thread copies to shared memory, for the machines of mma.sync (sm75.cuh, sm80.cuh).
#pragma once

#include <cstdint>

#include "cached_rows.h"

namespace flash_wmma::mma {

/// How a block's threads share the copy of a tile of Rows rows: neighbouring threads copy neighbouring vectors of 8
/// elements. Walks from a last tile of rows back to the first.
template <class Tile, int Rows, int Columns = Tile::kD>
struct CopyMap {
    using Dense = CopyMap;
    static constexpr int kVectors = Columns / 8, kRowsAtOnce = Tile::kThreads / kVectors;
    static constexpr int kCount = (Rows + kRowsAtOnce - 1) / kRowsAtOnce;  // vectors of a thread

    const typename Tile::T* from;  // this thread's first vector of the next tile
    bool inside;                   // whether its column exists

    /// `columns`: how many there are.
    __device__ CopyMap(const typename Tile::T* source, std::int64_t pitch, int columns)
        : from(source + row() * pitch + column()), inside(column() < columns) {}

    /// Calls f(i, row, column, from) for this thread's vectors, and moves on to the tile before.
    template <class F>
    __device__ __forceinline__ void for_each(std::int64_t pitch, F f) {
        const typename Tile::T* vector = from;
        if (Tile::kThreads % kVectors == 0 || row() < kRowsAtOnce)
#pragma unroll
            for (int i = 0; i < kCount; ++i, vector += kRowsAtOnce * pitch)
                if (Rows % kRowsAtOnce == 0 || row() + i * kRowsAtOnce < Rows)
                    f(i, row() + i * kRowsAtOnce, column(), vector);
        from -= Rows * pitch;
    }

    __device__ static int row() { return static_cast<int>(threadIdx.x / kVectors); }
    __device__ static int column() { return static_cast<int>(threadIdx.x % kVectors * 8); }
};

/// The same for the rows of a key/value cache, each of which has its own place.
template <class Tile, int Rows, int Columns = Tile::kD>
struct CachedCopyMap : CopyMap<Tile, Rows, Columns> {
    using Base = CopyMap<Tile, Rows, Columns>;
    CachedRows cached;
    const flash_wmma::Rows& tensor;
    int key;  // the first of the next tile

    /// `head` is the first row of this head in the cache, whose rows are those of `t`.
    __device__ CachedCopyMap(const typename Tile::T* head, const CachedRows& rows, const flash_wmma::Rows& t, int first,
                             int columns)
        : Base(head, 0, columns), cached(rows), tensor(t), key(first) {}

    /// As CopyMap's. Rows behind the last one in use get the first vector, which is not read.
    template <class F>
    __device__ __forceinline__ void for_each(std::int64_t, F f) {
        if (Tile::kThreads % Base::kVectors == 0 || Base::row() < Base::kRowsAtOnce)
#pragma unroll
            for (int i = 0; i < Base::kCount; ++i) {
                const int row = Base::row() + i * Base::kRowsAtOnce;
                if (Rows % Base::kRowsAtOnce == 0 || row < Rows)
                    f(i, row, Base::column(),
                      this->from + (key + row < cached.count ? cached.offset(tensor, key + row) : 0));
            }
        key -= Rows;
    }
};

}  // namespace flash_wmma::mma
