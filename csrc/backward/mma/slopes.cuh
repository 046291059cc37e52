// The gradient of ALiBi's slopes for each own key and query head (BackwardParams::dslopes), for the kernel of
// kernel.cuh.
//
// A lane adds up what its scores give to its own rows. At the end of a head the quads combine their sums, and the warps
// that share own rows add theirs in the order of their numbers. So every number belongs to one block, and is the same
// in every run.
#pragma once

#include <cmath>

#include "backward/mma/products.cuh"
#include "device/backward_scores.cuh"
#include "device/owned_tile.cuh"

namespace flash_wmma::backward {

/// Each stream warp's sums for the block's own rows.
template <class Tile>
struct SlopesMemory {
    float sums[Tile::kStreamWarps][Tile::kOwn];
};

/// A lane's sums for its own rows, of one query head.
template <class Tile>
class SlopesGradient {
  public:
    __device__ SlopesGradient() { clear(); }

    /// Adds -dS * |i + Nk - Nq - j|, where dS is `unit` times ds, of the columns from `column` on of P. A weight of 0
    /// gives nothing, whatever stands beside it.
    __device__ __forceinline__ void add(const Sequence& sequence, const Scores<Tile>& p, ScoresPart<Tile>& ds,
                                        int column, const ScorePlace<Tile, true>& place, float unit) {
        const int offset = sequence.seqlen_k - sequence.seqlen_q;
        ds.each([&](float& x, int i, int c) {
            if (p.at(i, column + c) == 0.f) return;
            const int distance = place.query(i, column + c) + offset - place.key(i, column + c);
            sums_[i] = fmaf(-x * unit, fabsf(static_cast<float>(distance)), sums_[i]);
        });
    }

    /// Brings the warp's sums to shared memory and begins the next head's.
    __device__ __forceinline__ void collect(SlopesMemory<Tile>& to, const Thread<Tile>& thread) {
        sums_.each([&](int i, float x) {
            const float sum = over_quad(x, [](float y, float z) { return y + z; });
            if (thread.column() == 0) to.sums[thread.stream_warp][thread.warp_row() + 8 * i + thread.row()] = sum;
        });
        clear();
    }

  private:
    __device__ __forceinline__ void clear() {
        sums_.each([](int, float& x) { x = 0.f; });
    }

    RowValues<Tile::kWarpRows> sums_;
};

/// Stores what the warps of own rows have collected for a query head. Blocks that share own rows have the same: one of
/// them stores it.
template <class Tile>
__device__ __forceinline__ void store_slopes(const SlopesMemory<Tile>& from, const Problem& problem,
                                             const OwnedTile& own, int head, const Thread<Tile>& thread) {
    if (thread.stream_warp > 0 || Tile::first_column() > 0) return;
    if constexpr (Tile::kStreamWarps == 1) __syncwarp();
    const Sequence& sequence = own.sequence;
    float* const to = problem.dslopes + sequence.index * problem.key_batch + head * problem.key_head +
                      sequence.first_k + own.first_row;
    for (int row = thread.warp_row() + thread.lane; row < thread.warp_row() + Tile::kWarpRows; row += 32) {
        if (own.first_row + row >= sequence.seqlen_k) return;
        float sum = 0.f;
#pragma unroll
        for (int warp = 0; warp < Tile::kStreamWarps; ++warp) sum += from.sums[warp][row];
        to[row] = sum * unscaled_factor(problem.forward);
    }
}

}  // namespace flash_wmma::backward
