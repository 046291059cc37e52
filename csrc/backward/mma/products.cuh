// The products of the kernels of kernel.cuh, two_roles.cuh and three_roles.cuh, as a warp computes them: operands from
// shared memory or registers, scores, gradients, dQ, and the gradients' way out.
#pragma once

#include <ptx.cuh>

#include "backward/mma/scales.cuh"
#include "backward/mma/tile.cuh"
#include "device/element.cuh"
#include "device/quad.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma::backward {

/// Reads 16x16 fragments of a swizzled tile. kA: A (16x16), stored row by row. kB: two B (16x8), stored with their
/// columns as rows. kBAcross: two B, stored row by row. kAAcross: A, stored with its columns as rows.
enum class Fragment { kA, kB, kAAcross, kBAcross };
template <Fragment kFragment, class Rows>
class Reader {
  public:
    /// (row, column): where this thread's warp begins.
    __device__ __forceinline__ Reader(int lane, int row, int column)
        : lane_(row + (kByRows ? lane % 16 : lane / 16 * 8 + lane % 8),
                column + (kByRows ? lane / 16 : lane / 8 % 2) * 8) {}
    /// The same Reader, computed again from one register; the warp must begin at a multiple of 64 columns.
    __device__ __forceinline__ Reader anew() const { return Reader(typename Rows::Lane(ptx::opaque(lane_.first()))); }
    /// The fragment at (row, column) from there, multiples of 16; the column is known at compile time.
    __device__ __forceinline__ void operator()(std::uint32_t (&fragment)[4], const Rows& rows, int row,
                                               int column) const {
        if constexpr (kFragment == Fragment::kA || kFragment == Fragment::kB)
            ptx::ldmatrix_x4(fragment, lane_.of(rows, row, column));
        else ptx::ldmatrix_x4_trans(fragment, lane_.of(rows, row, column));
    }

  private:
    static constexpr bool kByRows = kFragment == Fragment::kA || kFragment == Fragment::kBAcross;
    __device__ __forceinline__ explicit Reader(const typename Rows::Lane& lane) : lane_(lane) {}

    typename Rows::Lane lane_;
};

/// The warp's own rows as an operand: fragments in registers, or loaded from shared memory at each use.
template <class Tile, bool InRegisters>
struct OwnOperand {
    std::uint32_t fragments[InRegisters ? Tile::kRowTiles : 1][InRegisters ? Tile::kD / 16 : 1][4];

    template <class Rows>
    __device__ __forceinline__ void load(const Rows& rows, const Thread<Tile>& thread) {
        const Reader<Fragment::kA, Rows> read(thread.lane, thread.warp_row(), 0);
        if constexpr (InRegisters)
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
                for (int c = 0; c < Tile::kD / 16; ++c) read(fragments[r][c], rows, 16 * r, 16 * c);
    }
    template <class Rows>
    __device__ __forceinline__ void get(std::uint32_t (&a)[4], const Rows& rows, const Thread<Tile>& thread, int r,
                                        int c) const {
        if constexpr (InRegisters)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[r][c][i];
        else Reader<Fragment::kA, Rows>(thread.lane, thread.warp_row(), 0)(a, rows, 16 * r, 16 * c);
    }
};

/// Accumulators of the warp: S of its rows and a step of streamed rows, dP of a part of it; a gradient of its rows and
/// columns.
template <class Tile>
using Scores = RegisterTile<Tile::kWarpRows, Tile::kStep>;
template <class Tile>
using ScoresPart = RegisterTile<Tile::kWarpRows, Tile::kPart>;
template <class Tile>
using Gradient = RegisterTile<Tile::kWarpRows, Tile::kWarpColumns>;

/// D += A B for 16 columns.
template <class Tile>
__device__ __forceinline__ void multiply(float (&left)[4], float (&right)[4], const std::uint32_t (&a)[4],
                                         const std::uint32_t (&b)[4]) {
    Tile::Machine::template multiply<typename Tile::T>(left, a, b[0], b[1]);
    Tile::Machine::template multiply<typename Tile::T>(right, a, b[2], b[3]);
}

/// S += own rows times streamed rows [first, first + Columns), both along d.
template <class Tile, int Columns, bool InRegisters, class OwnRows, class StreamRows>
__device__ __forceinline__ void multiply_rows(RegisterTile<Tile::kWarpRows, Columns>& s,
                                              const OwnOperand<Tile, InRegisters>& own, const OwnRows& rows,
                                              const StreamRows& stream, int first, const Thread<Tile>& thread) {
    const Reader<Fragment::kB, StreamRows> read(thread.lane, 0, 0);
    // One or two tiles of S do not hide the latency of their products, so every other product goes to a second sum
    constexpr bool kTwoSums = Tile::kRowTiles * Columns / 8 <= 2;
    [[maybe_unused]] RegisterTile<Tile::kWarpRows, Columns> second;
    second.clear();
#pragma unroll
    for (int c = 0; c < Tile::kD / 16; ++c) {
        auto& sum = kTwoSums && c % 2 ? second : s;
        std::uint32_t a[Tile::kRowTiles][4];
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) own.get(a[r], rows, thread, r, c);
#pragma unroll
        for (int j = 0; j < Columns / 16; ++j) {
            std::uint32_t b[4];
            read(b, stream, first + 16 * j, 16 * c);
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r)
                multiply<Tile>(sum.block[r][2 * j], sum.block[r][2 * j + 1], a[r], b);
        }
    }
    if constexpr (kTwoSums) s.each([&](float& x, int i, int column) { x += second.at(i, column); });
}

/// Gradient += weights of the warp's rows and 16 streamed rows, times the warp's columns of those streamed rows; `read`
/// begins at these columns.
template <class Tile, class StreamRows>
__device__ __forceinline__ void multiply_weights(Gradient<Tile>& gradient,
                                                 const std::uint32_t (&weights)[Tile::kRowTiles][4],
                                                 const Reader<Fragment::kBAcross, StreamRows>& read,
                                                 const StreamRows& stream, int first) {
#pragma unroll
    for (int c = 0; c < Tile::kWarpColumns / 16; ++c) {
        std::uint32_t b[4];
        read(b, stream, first, 16 * c);
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r)
            multiply<Tile>(gradient.block[r][2 * c], gradient.block[r][2 * c + 1], weights[r], b);
    }
}

template <class Tile, class StreamRows>
__device__ __forceinline__ void multiply_weights(Gradient<Tile>& gradient,
                                                 const std::uint32_t (&weights)[Tile::kRowTiles][4],
                                                 const StreamRows& stream, int first, const Thread<Tile>& thread) {
    const Reader<Fragment::kBAcross, StreamRows> read(thread.lane, 0, thread.warp_column());
    multiply_weights<Tile>(gradient, weights, read, stream, first);
}

/// Elements as they are.
struct Whole {
    __device__ __forceinline__ float operator()(float x) const { return x; }
};

/// 16 columns of accumulators, from 8 * j on, as an operand with 16 columns: two 16x8 tiles are one, element for
/// element, of which `part` is taken.
template <class Tile, int Columns, class Part = Whole>
__device__ __forceinline__ void hand_over(std::uint32_t (&weights)[Tile::kRowTiles][4],
                                          const RegisterTile<Tile::kWarpRows, Columns>& s, int j, Part part = {}) {
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
        for (int i = 0; i < 4; ++i)
            weights[r][i] = packed<typename Tile::T>(part(s.block[r][j + i / 2][i % 2 * 2]),
                                                     part(s.block[r][j + i / 2][i % 2 * 2 + 1]));
}

/// Where a lane's accumulators of columns [first, first + 8) of the warp's rows go in shared memory. Those of row tile
/// r and its half h lie (16 * r + 8 * h) * kStream further, since rows 8 apart are swizzled alike. Computed at each
/// use, which takes fewer registers.
template <class Tile, class Weights>
__device__ __forceinline__ typename Tile::T* weights_at(Weights& weights, int first, const Thread<Tile>& thread) {
    return weights.at(ptx::opaque(thread.warp_row() + thread.row()), first) + thread.column();
}

/// Stores `part` of a step of weights to shared memory, for the other warps.
template <class Tile, int Columns, class Weights, class Part = Whole>
__device__ __forceinline__ void exchange(Weights& to, const RegisterTile<Tile::kWarpRows, Columns>& s, int first,
                                         const Thread<Tile>& thread, Part part = {}) {
#pragma unroll
    for (int j = 0; j < Columns / 8; ++j) {
        auto* const at = weights_at<Tile>(to, first + 8 * j, thread);
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                *reinterpret_cast<std::uint32_t*>(at + (16 * r + 8 * h) * Tile::kStream) =
                    packed<typename Tile::T>(part(s.block[r][j][2 * h]), part(s.block[r][j][2 * h + 1]));
    }
}

/// Turns dP of a step from `first` on into dS = P (dP - D). `pairs` has the step's facts; P is as another warp wrote
/// it.
template <class Tile, class Weights>
__device__ __forceinline__ void weigh(Scores<Tile>& s, Weights& p, const RowPair* pairs, int first,
                                      const Thread<Tile>& thread) {
#pragma unroll
    for (int j = 0; j < Tile::kStep / 8; ++j) {
        const float delta[2] = {pairs[4 * j].minus_delta[0], pairs[4 * j].minus_delta[1]};
        const auto* const at = weights_at<Tile>(p, first + 8 * j, thread);
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const float2 weight = Element<typename Tile::T>::floats(
                    *reinterpret_cast<const std::uint32_t*>(at + (16 * r + 8 * h) * Tile::kStream));
                float (&x)[4] = s.block[r][j];
                x[2 * h] = (x[2 * h] + delta[0]) * weight.x;
                x[2 * h + 1] = (x[2 * h + 1] + delta[1]) * weight.y;
            }
    }
}

/// No exponents: for inputs that were not converted.
struct AsStored {
    static constexpr bool kConverted = false;
};

/// Adds dQ of the streamed queries from all own keys to the buffer that begins with the tile's first row. A warp with
/// many columns takes them in two parts. Exponent: AsStored, or exponent_of(row) gives the exponent of products with
/// the group of own keys that begins at `row`.
template <class Tile, class Weights, class OwnRows, class Exponent = AsStored>
__device__ __forceinline__ void add_to_dq(float* dq_rows, int head_dim, const Weights& ds, const OwnRows& keys,
                                          const Thread<Tile>& thread, [[maybe_unused]] Exponent exponent_of = {}) {
    constexpr int kRowTiles = Tile::kQueryRows / 16;
    constexpr int kColumns = Tile::kQueryColumns <= 48 ? Tile::kQueryColumns : Tile::kQueryColumns / 2;
    static_assert(kColumns % 16 == 0);
    const int row = thread.warp % Tile::kQueryWarps * Tile::kQueryRows;
    const Reader<Fragment::kAAcross, Weights> read_ds(thread.lane, 0, row);
    int column = Tile::first_column() + thread.warp / Tile::kQueryWarps * Tile::kQueryColumns;
    const Reader<Fragment::kBAcross, OwnRows> read_keys(thread.lane, 0, column);
#pragma unroll
    for (int part = 0; part < Tile::kQueryColumns; part += kColumns, column += kColumns) {
        RegisterTile<Tile::kQueryRows, kColumns> dq;
        dq.clear();
        [[maybe_unused]] Unit unit;
#pragma unroll
        for (int k = 0; k < Tile::kOwn / 16; ++k) {
            if constexpr (Exponent::kConverted)
                if (16 * k % kScaleRows == 0) unit.follow(dq, exponent_of(16 * k));
            std::uint32_t a[kRowTiles][4];
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) read_ds(a[r], ds, 16 * k, 16 * r);
#pragma unroll
            for (int c = 0; c < kColumns / 16; ++c) {
                std::uint32_t b[4];
                read_keys(b, keys, 16 * k, part + 16 * c);
#pragma unroll
                for (int r = 0; r < kRowTiles; ++r) multiply<Tile>(dq.block[r][2 * c], dq.block[r][2 * c + 1], a[r], b);
            }
        }
        if constexpr (Exponent::kConverted) multiply_by_power(dq, unit.exponent);
        const bool all = column + kColumns <= head_dim;
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r) {
            float* to = dq_rows + DqFragment::offset(row + 16 * r, column, head_dim);
            if (all)
#pragma unroll
                for (int c = 0; c < kColumns / 8; ++c)
                    DqFragment::add(to + DqFragment::offset(0, 8 * c, head_dim), dq.block[r][c], thread.lane);
            else
#pragma unroll
                for (int c = 0; c < kColumns / 8; ++c)
                    if (column + 8 * c < head_dim)
                        DqFragment::add(to + DqFragment::offset(0, 8 * c, head_dim), dq.block[r][c], thread.lane);
        }
    }
}

/// Stores a gradient, times `factor`, to the rows [0, rows) of global memory. The warp may overwrite its part of
/// `staging`.
template <class Tile, class OwnRows>
__device__ __forceinline__ void store(typename Tile::T* out, std::int64_t pitch, int rows, int columns,
                                      const Gradient<Tile>& gradient, float factor, OwnRows& staging,
                                      const Thread<Tile>& thread) {
    using T = typename Tile::T;
    __syncwarp();
    gradient.each_pair([&](float x, float y, int i, int c) {
        auto* to = staging.at(thread.warp_row() + 8 * i + thread.row(), thread.warp_column() + 8 * c) + thread.column();
        *reinterpret_cast<std::uint32_t*>(to) = packed<T>(x * factor, y * factor);
    });
    __syncwarp();
    constexpr int kVectors = Tile::kWarpColumns / 8;
    for (int i = thread.lane; i < Tile::kWarpRows * kVectors; i += 32) {
        const int row = thread.warp_row() + i / kVectors, column = thread.warp_column() + i % kVectors * 8;
        if (row < rows && column < columns)
            *reinterpret_cast<uint4*>(out + row * pitch + column) =
                *reinterpret_cast<const uint4*>(staging.at(row, column));
    }
}

/// The same in a type other than the products', straight from the registers.
template <class Tile, class Out>
__device__ __forceinline__ void store_as(Out* out, std::int64_t pitch, int rows, int columns,
                                         const Gradient<Tile>& gradient, float factor, const Thread<Tile>& thread) {
    gradient.each_pair([&](float x, float y, int i, int c) {
        const int row = thread.warp_row() + 8 * i + thread.row(), column = thread.warp_column() + 8 * c;
        if (row < rows && column < columns)
            *reinterpret_cast<typename Element<Out>::Pair*>(out + row * pitch + column + thread.column()) =
                Element<Out>::pair(x * factor, y * factor);
    });
}

}  // namespace flash_wmma::backward
