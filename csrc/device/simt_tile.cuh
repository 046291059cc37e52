// A block's tiles of fp32 matrices in shared memory, and its products on CUDA cores: each lane has a tile of the result
// in registers, and every 16-byte load from shared memory serves many FMAs. For simt and bwd_simt.
#pragma once

#include <launch.h>
#include <ptx.cuh>

#include <cstdint>

#include "device/shuffle.cuh"

namespace flash_wmma::simt {

/// Shape of a block's work.
struct TileShape {
    int d;              ///< the largest d and d_v that the instance takes
    int warps = 4;      //
    int lane_columns;   ///< of a warp's grid of lanes
    int rows = 4;       ///< of a lane
    int keys;           ///< of a tile (backward: streamed rows)
    int stages = 1;     ///< K/V tiles in flight
    int blocks_per_sm;  ///< resident blocks to keep registers for
    int columns = 0;    ///< of the results, of a block; 0: all. If d is larger, several blocks share the rows
};

/// Each warp owns kWarpRows rows of a block. Its lanes are a grid of kLaneRows x kLaneColumns. Lane (r, c) has the
/// groups of four rows r + kLaneRows * i. Of a product with kBc columns ("keys") it has the columns c + kLaneColumns *
/// n, of one with kColumns columns the vectors of four columns c + kLaneColumns * v.
///
/// The lowest bit of a lane selects a row, the next ones a column. A 16-byte load takes four wavefronts, but two if
/// lanes l and l ^ 1, or l and l ^ 2, read the same. In this order the former do for columns, the latter for rows.
template <TileShape kShape>
struct LaneGrid {
    static constexpr int kD = kShape.d, kWarps = kShape.warps, kBc = kShape.keys, kStages = kShape.stages;
    static constexpr int kLaneColumns = kShape.lane_columns, kLaneRows = 32 / kLaneColumns;
    static constexpr int kRows = kShape.rows, kKeys = kBc / kLaneColumns,
                         kColumns = kShape.columns ? kShape.columns : kD,
                         kVectors = kColumns / 4 / kLaneColumns;  // of a lane
    static constexpr int kBlocksPerSm = kShape.blocks_per_sm;
    static constexpr int kWarpRows = kLaneRows * kRows, kBr = kWarps * kWarpRows, kThreads = 32 * kWarps;
    static constexpr int kWeightPitch = kWarpRows + (kWarpRows % 16 == 0 ? 8 : 0);  // four in other banks: see Weights
    static_assert(kRows % 4 == 0 && kBc % kLaneColumns == 0 && kColumns % (4 * kLaneColumns) == 0 && kLaneColumns >= 8);

    /// The first of the block's columns of the results.
    __device__ static int first_column() { return kColumns < kD ? static_cast<int>(blockIdx.y) * kColumns : 0; }
};

/// Rows that lanes read one each at the same column: padded, so that eight of them lie in different banks.
template <class Tile, int Rows>
using PaddedRows = float[Rows][Tile::kD + 4];

/// Weights of a warp's rows, as an operand of multiply_weights: their columns one after the other.
template <class Tile>
using Weights = float[Tile::kBc][Tile::kWeightPitch];

/// Where this thread stands in its block.
template <class Tile>
struct Thread {
    int row, column, warp_row;  // of the lane in its warp's grid; the warp's first row
    __device__ Thread() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        row = lane % 2 + lane / (2 * Tile::kLaneColumns) * 2;
        column = lane / 2 % Tile::kLaneColumns;
        warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
    }
    __device__ int row_of_warp(int i) const { return 4 * (row + Tile::kLaneRows * (i / 4)) + i % 4; }
    __device__ int tile_row(int i) const { return warp_row + row_of_warp(i); }
    __device__ int key(int n) const { return column + Tile::kLaneColumns * n; }
    __device__ int vector(int v) const { return 4 * (column + Tile::kLaneColumns * v); }
};

/// `combine` over the lanes that share a row.
template <class Tile, class Combine>
__device__ __forceinline__ float over_row(float x, Combine combine) {
#pragma unroll
    for (int lanes = 2; lanes <= Tile::kLaneColumns; lanes *= 2) x = combine(x, shuffle_xor(x, lanes));
    return x;
}

/// A lane's scores and its part of O.
template <class Tile>
using Scores = float[Tile::kRows][Tile::kKeys];
template <class Tile>
using Output = float4[Tile::kRows][Tile::kVectors];

/// A block's copies of tiles of Rows rows to shared memory, from the first to the last, zeros where there is nothing. A
/// thread has the same columns in all tiles. Its copies land at its next wait.
template <class Tile, int Rows, int Columns = Tile::kD>
class Copy {
  public:
    /// `from`: the first tile; `columns`: how many there are.
    __device__ Copy(const float* from, std::int64_t pitch, int columns)
        : from_(from + first_row() * pitch + column()), columns_(columns - column()) {}

    /// The next tile, of which `rows` rows exist.
    template <int Pitch>
    __device__ __forceinline__ void next(float (&to)[Rows][Pitch], std::int64_t pitch, int rows) {
        float* const target = &to[first_row()][column()];
        const float* from = from_;
        const auto each = [&](auto exists) {
#pragma unroll
            for (int i = 0; i < kCount; ++i, from += kRowsAtOnce * pitch)
#pragma unroll
                for (int v = 0; v < kVectors; ++v)
                    ptx::cp_async_16(target + i * kRowsAtOnce * Pitch + 4 * kAcross * v, from + 4 * kAcross * v,
                                     4 * kAcross * v < columns_ && exists(i) ? 16 : 0);
        };
        if (rows >= Rows) each([](int) { return true; });
        else each([row = rows - first_row()](int i) { return i * kRowsAtOnce < row; });
        from_ += Rows * pitch;
    }

  private:
    // Threads of a row, and how many vectors of it each copies; rows that the block copies at once
    static constexpr int kAcross = Columns / 4 < Tile::kThreads ? Columns / 4 : Tile::kThreads;
    static constexpr int kVectors = Columns / 4 / kAcross, kRowsAtOnce = Tile::kThreads / kAcross;
    static constexpr int kCount = Rows / kRowsAtOnce;
    static_assert(Tile::kThreads % kAcross == 0 && Rows % kRowsAtOnce == 0);
    __device__ static int first_row() { return static_cast<int>(threadIdx.x) / kAcross; }
    __device__ static int column() { return static_cast<int>(threadIdx.x) % kAcross * 4; }

    const float* from_;  // this thread's first vector of the next tile
    int columns_;        // from there on
};

__device__ __forceinline__ float4 load_4(const float* from) { return *reinterpret_cast<const float4*>(from); }

__device__ __forceinline__ float element(const float4& x, int i) {
    return i == 0 ? x.x : i == 1 ? x.y : i == 2 ? x.z : x.w;
}

/// sum += x y along four columns.
__device__ __forceinline__ void add_product(float& sum, const float4& x, const float4& y) {
    sum = fmaf(x.x, y.x, sum);
    sum = fmaf(x.y, y.y, sum);
    sum = fmaf(x.z, y.z, sum);
    sum = fmaf(x.w, y.w, sum);
}
/// sum += x y, y four columns.
__device__ __forceinline__ void add_product(float4& sum, float x, const float4& y) {
    sum.x = fmaf(x, y.x, sum.x);
    sum.y = fmaf(x, y.y, sum.y);
    sum.z = fmaf(x, y.z, sum.z);
    sum.w = fmaf(x, y.w, sum.w);
}

template <class T, int Rows, int Columns>
__device__ __forceinline__ void clear(T (&x)[Rows][Columns]) {
#pragma unroll
    for (auto& row : x)
#pragma unroll
        for (T& element : row) element = {};
}

/// S = A B^T over `columns` columns: A are the block's rows, B kBc rows.
template <class Tile>
__device__ __forceinline__ void multiply_rows(Scores<Tile>& s, const PaddedRows<Tile, Tile::kBr>& a,
                                              const PaddedRows<Tile, Tile::kBc>& b, int columns,
                                              const Thread<Tile>& thread) {
    constexpr int kUnroll = Tile::kRows * Tile::kKeys <= 32 ? 4 : 128 / (Tile::kRows * Tile::kKeys);
    clear(s);
    const float *a_rows = &a[thread.tile_row(0)][0], *b_rows = &b[thread.key(0)][0];
#pragma unroll kUnroll
    for (int c = 0; c < columns; c += 4) {
        float4 x[Tile::kRows];
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i)
            x[i] = load_4(a_rows + (4 * Tile::kLaneRows * (i / 4) + i % 4) * (Tile::kD + 4) + c);
#pragma unroll
        for (int n = 0; n < Tile::kKeys; ++n) {
            const float4 y = load_4(b_rows + Tile::kLaneColumns * n * (Tile::kD + 4) + c);
#pragma unroll
            for (int i = 0; i < Tile::kRows; ++i) add_product(s[i][n], x[i], y);
        }
    }
}

/// O += W B: W are the warp's rows, B kBc rows; O's columns begin with B's column `first`.
template <class Tile, int Pitch>
__device__ __forceinline__ void multiply_weights(Output<Tile>& o, const Weights<Tile>& weights,
                                                 const float (&b)[Tile::kBc][Pitch], int first,
                                                 const Thread<Tile>& thread) {
    const float *column = &weights[0][thread.row_of_warp(0)], *b_row = &b[0][first + thread.vector(0)];
#pragma unroll 8
    for (int key = 0; key < Tile::kBc; ++key, column += Tile::kWeightPitch, b_row += Pitch) {
        float4 w[Tile::kRows / 4], x[Tile::kVectors];
#pragma unroll
        for (int i = 0; i < Tile::kRows / 4; ++i) w[i] = load_4(column + 4 * Tile::kLaneRows * i);
#pragma unroll
        for (int v = 0; v < Tile::kVectors; ++v) x[v] = load_4(b_row + 4 * Tile::kLaneColumns * v);
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
            for (int v = 0; v < Tile::kVectors; ++v) add_product(o[i][v], element(w[i / 4], i % 4), x[v]);
    }
}

/// Stores a lane's scores as weights of its warp. The warp must synchronise before it uses them.
template <class Tile>
__device__ __forceinline__ void store_weights(Weights<Tile>& to, const Scores<Tile>& s, const Thread<Tile>& thread) {
#pragma unroll
    for (int n = 0; n < Tile::kKeys; ++n)
#pragma unroll
        for (int i = 0; i < Tile::kRows; i += 4)
            *reinterpret_cast<float4*>(&to[thread.key(n)][thread.row_of_warp(i)]) =
                make_float4(s[i][n], s[i + 1][n], s[i + 2][n], s[i + 3][n]);
}

}  // namespace flash_wmma::simt
