// From S to P: what hides keys, for kernels whose warps own rows.
#pragma once

#include <ptx.cuh>

#include "device/key_mask.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma::backward {

/// Where scores of a warp lie: its kWarpRows own rows from `own` on, kStep streamed rows from `stream` on. Tile::Place:
/// a lane's place in the accumulators, row() and column().
template <class Tile, bool kOwnsKeys>
struct ScorePlace {
    int own, stream;
    const typename Tile::Place& thread;

    /// Of row i of this lane and `column` (register_tile.cuh).
    __device__ __forceinline__ int query(int i, int column) const {
        return kOwnsKeys ? stream + thread.column() + column : own + thread.row() + 8 * i;
    }
    __device__ __forceinline__ int key(int i, int column) const {
        return kOwnsKeys ? own + thread.row() + 8 * i : stream + thread.column() + column;
    }
    /// Whether every query sees every key.
    template <class Mask>
    __device__ __forceinline__ bool all_visible(const Mask& mask) const {
        const int last_own = own + Tile::kWarpRows - 1, last_stream = stream + Tile::kStep - 1;
        return kOwnsKeys ? mask.all_visible(stream, last_stream, own, last_own)
                         : mask.all_visible(own, last_own, stream, last_stream);
    }
};

/// Weights, or scores, of keys that a query does not see become `hidden`.
template <class Weights, class Place>
__device__ __forceinline__ void hide(Weights& p, const Place& place, const BandMask& mask, float hidden = 0.f) {
    p.each([&](float& x, int i, int column) {
        const int query = place.query(i, column), key = place.key(i, column);
        if (key < mask.begin(query) || key >= mask.end(query)) x = hidden;
    });
}
template <class Weights, class Place>
__device__ __forceinline__ void hide(Weights& p, const Place& place, const RangedMask& mask, float hidden = 0.f) {
    if (!mask.has_ranges()) return hide(p, place, static_cast<const BandMask&>(mask), hidden);
    const RangedRows rows = mask.rows();
    p.each([&](float& x, int i, int column) {
        if (rows.hides(place.query(i, column), place.key(i, column))) x = hidden;
    });
}

/// P = exp2(S * factor - L) in place, 0 for keys that a query does not see. minus_lse(i, column) is -L of the query.
template <int Rows, int Columns, class MinusLse, class Place, class Mask>
__device__ __forceinline__ void weigh_scores(RegisterTile<Rows, Columns>& s, float factor, MinusLse minus_lse,
                                             const Place& place, const Mask& mask) {
    s.each([&](float& x, int i, int column) { x = ptx::ex2(fmaf(x, factor, minus_lse(i, column))); });
    if (place.all_visible(mask)) return;
    hide(s, place, mask);
}

}  // namespace flash_wmma::backward
