// A warp's accumulators as one tile in registers, with what kernels do to it row by row and element by element.
//
// mma.sync, wgmma, and WMMA where its map is known, share one map. A tile consists of 16x8 blocks. Of each block lane l
// has rows l / 4 and l / 4 + 8, columns 2 (l % 4) and the next. So a lane has, of a tile, the rows l / 4 + 8 i and the
// columns 2 (l % 4) + 8 j + e (e = 0, 1): `i` counts the lane's rows from the tile's first, and `column` stands for
// 8 j + e.
#pragma once

#include "device/quad.cuh"

namespace flash_wmma {

/// A value for each of a lane's rows: m, l, sums, factors.
template <int Rows>
struct RowValues {
    static constexpr int kCount = Rows / 8;
    float of[kCount];

    __device__ __forceinline__ float& operator[](int i) { return of[i]; }
    __device__ __forceinline__ float operator[](int i) const { return of[i]; }

    /// f(i, value) for every row.
    template <class F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) f(i, of[i]);
    }
    template <class F>
    __device__ __forceinline__ void each(F f) const {
#pragma unroll
        for (int i = 0; i < kCount; ++i) f(i, of[i]);
    }
    /// Whether holds(value) is true for every row.
    template <class Holds>
    __device__ __forceinline__ bool all(Holds holds) const {
        bool all = true;
#pragma unroll
        for (const float x : of) all &= holds(x);
        return all;
    }
};

/// Rows x Columns accumulators: products write blocks, everything else goes by rows.
template <int Rows, int Columns>
struct RegisterTile {
    static constexpr int kRows = Rows / 8;  // of a lane
    float block[Rows / 16][Columns / 8][4];

    /// The first N columns.
    template <int N>
    __device__ __forceinline__ RegisterTile<Rows, N> first() const {
        RegisterTile<Rows, N> part;
#pragma unroll
        for (int i = 0; i < kRows; ++i) part.each_in_row(i, [&](float& x, int column) { x = at(i, column); });
        return part;
    }

    /// f(x, i, column) for every element, block by block.
    template <class F>
    __device__ __forceinline__ void each(F f) {
#pragma unroll
        for (int r = 0; r < Rows / 16; ++r)
#pragma unroll
            for (int j = 0; j < Columns / 8; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) f(block[r][j][e], 2 * r + e / 2, 8 * j + e % 2);
    }
    /// f(x, column) for every element of row i.
    template <class F>
    __device__ __forceinline__ void each_in_row(int i, F f) {
#pragma unroll
        for (int j = 0; j < Columns / 8; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) f(block[i / 2][j][i % 2 * 2 + e], 8 * j + e);
    }
    /// f(x, y, i, j) for every pair of neighbours, row by row.
    template <class F>
    __device__ __forceinline__ void each_pair(F f) const {
#pragma unroll
        for (int r = 0; r < Rows / 16; ++r)
#pragma unroll
            for (int j = 0; j < Columns / 8; ++j)
#pragma unroll
                for (int h = 0; h < 2; ++h) f(block[r][j][2 * h], block[r][j][2 * h + 1], 2 * r + h, j);
    }
    __device__ __forceinline__ float& at(int i, int column) { return block[i / 2][column / 8][i % 2 * 2 + column % 2]; }
    __device__ __forceinline__ float at(int i, int column) const {
        return block[i / 2][column / 8][i % 2 * 2 + column % 2];
    }

    /// The accumulators of a tile of 16 rows, as wgmma takes them.
    __device__ __forceinline__ float (&flat())
        [Rows * Columns / 32] { return reinterpret_cast<float (&)[Rows * Columns / 32]>(block); }

    __device__ __forceinline__ void clear() {
        each([](float& x, int, int) { x = 0.f; });
    }
    __device__ __forceinline__ void scale_row(int i, float factor) {
        each_in_row(i, [&](float& x, int) { x *= factor; });
    }

    /// Each row's maximum over the quad, of blocks 0, Step, 2 Step, ...
    template <int Step = 1>
    __device__ __forceinline__ RowValues<Rows> row_maximum() const {
        RowValues<Rows> top;
        top.each([&](int i, float& x) {
            x = -INFINITY;
#pragma unroll
            for (int j = 0; j < Columns / 8; j += Step)
                x = fmaxf(x, fmaxf(block[i / 2][j][i % 2 * 2], block[i / 2][j][i % 2 * 2 + 1]));
            x = over_quad(x, [](float y, float z) { return fmaxf(y, z); });
        });
        return top;
    }
};

}  // namespace flash_wmma
