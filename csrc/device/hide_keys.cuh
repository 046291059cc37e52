// A mask of visible keys applied to a tile of scores in registers.
#pragma once

#include <cmath>

#include "device/key_mask.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma {

/// Scores of keys that a row does not see become -inf: those left of the row's first key if `left`, those right of its
/// last key if `right`. query(i) is the query of the lane's row i, `first_key` the key of the lane's first column.
template <int Rows, int Columns, class Mask, class Query>
__device__ __forceinline__ void hide_keys(RegisterTile<Rows, Columns>& s, const Mask& mask, Query query, int first_key,
                                          bool left, bool right) {
    const auto hide_where = [&](auto hidden) {
#pragma unroll
        for (int i = 0; i < s.kRows; ++i) {
            const auto hides = hidden(query(i));
            s.each_in_row(i, [&](float& x, int column) {
                if (hides(column)) x = -INFINITY;
            });
        }
    };
    if (left)
        hide_where([&](int q) { return [begin = mask.begin(q) - first_key](int column) { return column < begin; }; });
    if (right) hide_where([&](int q) { return [end = mask.end(q) - first_key](int column) { return column >= end; }; });
}

template <int Rows, int Columns, class Query>
__device__ __forceinline__ void hide_keys(RegisterTile<Rows, Columns>& s, const RangedMask& mask, Query query,
                                          int first_key, bool left, bool right) {
    if (mask.has_ranges()) hide_keys(s, mask.rows(), query, first_key, left, right);
    else hide_keys(s, static_cast<const BandMask&>(mask), query, first_key, left, right);
}

}  // namespace flash_wmma
