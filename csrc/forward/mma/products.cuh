// The two products of kernel.cuh as a warp computes them, with Q, P, K and V as operands, and the exchanges of warps
// that share rows.
#pragma once

#include <ptx.cuh>

#include "device/quad.cuh"
#include "forward/mma/block.cuh"

namespace flash_wmma::mma {

/// Q as the first product's operand: fragments in registers, or loaded from shared memory at each use.
template <class Tile>
struct QOperand {
    std::uint32_t fragments[Tile::kRowTiles][Tile::kQSteps > 0 ? Tile::kQSteps : 1][4];

    __device__ __forceinline__ void load(Smem<Tile>& smem, const Thread<Tile>& thread) {
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
            for (int c = 0; c < Tile::kQSteps; ++c) fetch(fragments[r][c], smem, thread, r, c);
    }
    __device__ __forceinline__ void get(std::uint32_t (&a)[4], Smem<Tile>& smem, const Thread<Tile>& thread, int r,
                                        int c) const {
        if (c < Tile::kQSteps)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[r][c][i];
        else fetch(a, smem, thread, r, c);
    }

  private:
    __device__ __forceinline__ static void fetch(std::uint32_t (&a)[4], Smem<Tile>& smem, const Thread<Tile>& thread,
                                                 int r, int c) {
        const typename SharedMemory<Tile>::QRows::Lane lane(thread.lane % 16, thread.lane / 16 * 8);
        ptx::ldmatrix_x4(a, lane.of(smem.q_rows(thread.row_warp), 16 * r, 16 * c));
    }
};

/// S = Q K^T.
template <class Tile>
__device__ __forceinline__ void multiply_qk(Scores<Tile>& s, const QOperand<Tile>& q, Smem<Tile>& smem,
                                            const KeyRows<Tile>& k, const Thread<Tile>& thread) {
    s.clear();
    // Which of ldmatrix's four matrices is the second along d of the first 8 keys. If it is the third, lanes are as for
    // Q and V, with the same offsets in the same registers.
    constexpr int kSecond = Tile::Machine::kPairsB ? 1 : 2;
    const int row = kSecond == 1 ? thread.lane / 16 * 8 + thread.lane % 8 : thread.lane % 16;
    const int column = kSecond == 1 ? thread.lane / 8 % 2 * 8 : thread.lane / 16 * 8;
    const typename SharedMemory<Tile>::KeyRows::Lane k_lane(thread.warp_key() + row, column);
#pragma unroll
    for (int c = 0; c < Tile::kD / 16; ++c) {
        std::uint32_t a[Tile::kRowTiles][4];
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) q.get(a[r], smem, thread, r, c);
#pragma unroll
        for (int j = 0; j < Tile::kWarpKeys / 16; ++j) {
            std::uint32_t b[4];  // 16 keys x 16 of d
            ptx::ldmatrix_x4(b, k_lane.of(k, 16 * j, 16 * c));
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r) {
                Tile::Machine::template multiply<typename Tile::T>(s.block[r][2 * j], a[r], b[0], b[kSecond]);
                Tile::Machine::template multiply<typename Tile::T>(s.block[r][2 * j + 1], a[r], b[3 - kSecond], b[3]);
            }
        }
    }
}

/// O += P V.
template <class Tile>
__device__ __forceinline__ void multiply_pv(Output<Tile>& o, const Weights<Tile>& weights, Smem<Tile>& smem,
                                            const ValueRows<Tile>& v, const Thread<Tile>& thread) {
    const int row = thread.lane % 16, column = thread.lane / 16 * 8;
    const typename SharedMemory<Tile>::WeightRows::Lane p_lane(thread.warp_row() + row, column);
    const typename SharedMemory<Tile>::ValueRows::Lane v_lane(row, thread.warp_column() + column);
#pragma unroll
    for (int j = 0; j < Tile::kGroupKeys / 16; ++j) {
        std::uint32_t a[Tile::kRowTiles][4];
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) {
            if constexpr (Tile::kDimWarps == 1)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[r][i] = weights[r][j][i];
            else ptx::ldmatrix_x4(a[r], p_lane.of(smem.p, 16 * r, 16 * j));
        }
#pragma unroll
        for (int c = 0; c < Tile::kWarpColumns / 16; ++c) {
            std::uint32_t b[4];  // 16 keys x 16 columns
            ptx::ldmatrix_x4_trans(b, v_lane.of(v, 16 * j, 16 * c));
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r) {
                Tile::Machine::template multiply<typename Tile::T>(o.block[r][2 * c], a[r], b[0], b[1]);
                Tile::Machine::template multiply<typename Tile::T>(o.block[r][2 * c + 1], a[r], b[2], b[3]);
            }
        }
    }
}

/// Turns P from the accumulators of the first product into the operand of the second: an accumulator's 16x8 tile is
/// half of a 16x16 operand, element for element.
template <class Tile>
__device__ __forceinline__ void hand_over(Weights<Tile>& weights, const Scores<Tile>& p, Smem<Tile>& smem,
                                          const Thread<Tile>& thread) {
    p.each_pair([&](float x, float y, int i, int j) {
        const std::uint32_t pair = packed<typename Tile::T>(x, y);
        if constexpr (Tile::kDimWarps == 1) {
            weights[i / 2][j / 2][j % 2 * 2 + i % 2] = pair;
        } else {
            const int row = thread.warp_row() + 8 * i + thread.row();
            *reinterpret_cast<std::uint32_t*>(smem.p.at(row, thread.warp_key() + 8 * j) + thread.column()) = pair;
        }
    });
}

/// Whether `holds` is true in every lane of the warps that share these rows, which meet.
template <class Tile>
__device__ __forceinline__ bool all_agree(bool holds, Smem<Tile>& smem, const Thread<Tile>& thread) {
    bool all = __all_sync(kWarpMask, holds);
    if constexpr (Tile::kDimWarps > 1) {
        auto& fits = smem.fits[thread.row_warp];
        if (thread.lane == 0) fits[thread.dim_warp] = all;
        meet(thread);
#pragma unroll
        for (const int other : fits) all &= other != 0;
    }
    return all;
}

/// Combines (maximum or sum) the values of each row over the warps that share the rows, which meet.
template <class Tile, class Combine>
__device__ __forceinline__ void combine_warps(PerRow<Tile>& values, Smem<Tile>& smem, const Thread<Tile>& thread,
                                              Combine combine) {
    if constexpr (Tile::kDimWarps > 1) {
        const auto row = [&](int i) { return thread.warp_row() + 8 * i + thread.row(); };
        values.each([&](int i, float x) {
            if (thread.lane % 4 == 0) smem.row[thread.dim_warp][row(i)] = x;
        });
        meet(thread);
        values.each([&](int i, float& x) {
            x = smem.row[0][row(i)];
#pragma unroll
            for (int w = 1; w < Tile::kDimWarps; ++w) x = combine(x, smem.row[w][row(i)]);
        });
    }
}

}  // namespace flash_wmma::mma
