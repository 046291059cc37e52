// Dropout in a warp's accumulators: which of its weights are kept (dropout.h).
//
// In forward's tiles, whose rows are queries, a lane has the eight weights of one Philox call. In tiles whose rows are
// keys (backward), its eight weights belong to two calls, of which it uses a half each.
#pragma once

#include "device/dropout.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma {

/// f(x, kept) for every element x of a warp's tile, from `query` and `key` on, multiples of 16. kRowsAreKeys: rows are
/// keys, columns queries; otherwise the reverse.
template <bool kRowsAreKeys, int Rows, int Columns, class F>
__device__ __forceinline__ void each_kept(RegisterTile<Rows, Columns>& tile, const DropoutMask& mask, int query,
                                          int key, F f) {
    static_assert(Columns % 16 == 0);
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4, column = lane % 4 * 2;
#pragma unroll
    for (int r = 0; r < Rows / 16; ++r)
#pragma unroll
        for (int j = 0; j < Columns / 16; ++j) {
            auto& left = tile.block[r][2 * j];
            auto& right = tile.block[r][2 * j + 1];
            if constexpr (kRowsAreKeys) {
                const int first = key + 16 * r + row;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const int i = query + 16 * j + column + e;
                    const DropoutNumbers numbers = mask.numbers(i, first);
#pragma unroll
                    for (int h = 0; h < 2; ++h) {
                        f(left[2 * h + e], mask.keeps(numbers.at(0, h, row % 2)));
                        f(right[2 * h + e], mask.keeps(numbers.at(1, h, row % 2)));
                    }
                }
            } else {
                const int i = query + 16 * r + row, first = key + 16 * j + column;
                const DropoutNumbers numbers = mask.numbers(i, first);
#pragma unroll
                for (int h = 0; h < 2; ++h)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        f(left[2 * h + e], mask.keeps(numbers.at(h, 0, e)));
                        f(right[2 * h + e], mask.keeps(numbers.at(h, 1, e)));
                    }
            }
        }
}

}  // namespace flash_wmma
