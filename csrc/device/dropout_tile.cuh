// Dropout in a warp's tiles: which of its weights are kept (dropout.h).
//
// In tiles whose rows are queries, a lane has the eight weights of each of its Philox calls, and the operand of O's
// product has them in the order of the numbers. In tiles whose rows are keys (backward), the lanes of two neighbouring
// keys share two calls, of an even query and the next: each makes one of them, and they exchange what they found.
#pragma once

#include <ptx.cuh>

#include "device/constants.cuh"
#include "device/dropout.cuh"

namespace flash_wmma {

/// The state, in registers of the warp where the machine has them: so are the keys of the rounds.
__device__ __forceinline__ DropoutState dropout_state(const Dropout& dropout) {
    DropoutState state(dropout);
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 800
    state.k0 = __reduce_or_sync(kWarpMask, state.k0);
    state.k1 = __reduce_or_sync(kWarpMask, state.k1);
#endif
    return state;
}

/// Drops weights of a warp's rows: its operand of O's product, from `query` and `key` on, multiples of 16.
template <int RowTiles, int KeyTiles>
__device__ __forceinline__ void drop(std::uint32_t (&weights)[RowTiles][KeyTiles][4], const Dropout& dropout,
                                     const DropoutMask& mask, int query, int key) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first_row = rows_before(dropout.origin) + query / 2 + lane / 4;
    const int first_column = columns_before(dropout.origin) + key / 4 + lane % 4;
    DropoutRow rows[RowTiles];
#pragma unroll
    for (int r = 0; r < RowTiles; ++r) rows[r] = mask.row(first_row + 8 * r);
#pragma unroll
    for (int j = 0; j < KeyTiles; ++j) {
        const DropoutColumn column = mask.column(first_column + 4 * j);
#pragma unroll
        for (int r = 0; r < RowTiles; ++r) {
            const DropoutNumbers numbers = mask.numbers(rows[r], column);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                weights[r][j][i] &= ptx::halves_below(numbers.words[i], dropout.limit) ^ dropout.turn;
        }
    }
}

/// The same of 16 rows.
template <int KeyTiles>
__device__ __forceinline__ void drop(std::uint32_t (&weights)[KeyTiles][4], const Dropout& dropout,
                                     const DropoutMask& mask, int query, int key) {
    drop(reinterpret_cast<std::uint32_t (&)[1][KeyTiles][4]>(weights), dropout, mask, query, key);
}

/// Which weights of a warp's accumulators are kept, a bit for each. kRowsAreKeys: rows are keys, columns queries;
/// otherwise the reverse.
template <bool kRowsAreKeys, int Rows, int Columns>
class KeptTile {
    static_assert(Columns % 16 == 0);
    static constexpr int kAcross = Columns / 16, kTiles = Rows / 16 * kAcross, kWords = (kTiles + 3) / 4;

  public:
    KeptTile() = default;
    /// From `query` and `key` on, multiples of 16.
    __device__ __forceinline__ KeptTile(const Dropout& dropout, const DropoutMask& mask, int query, int key) {
        const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 4, pair = lane % 4;
        const int first_row = rows_before(dropout.origin) + query / 2 + (kRowsAreKeys ? 2 * pair + row % 2 : row);
        const int first_column = columns_before(dropout.origin) + key / 4 + (kRowsAreKeys ? row / 2 : pair);
#pragma unroll
        for (std::uint32_t& word : words_) word = 0;
#pragma unroll
        for (int r = 0; r < Rows / 16; ++r)
#pragma unroll
            for (int j = 0; j < kAcross; ++j) {
                const int queries = kRowsAreKeys ? j : r, keys = kRowsAreKeys ? r : j;
                const DropoutNumbers numbers =
                    mask.numbers(mask.row(first_row + 8 * queries), mask.column(first_column + 4 * keys));
                const int tile = r * kAcross + j;
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    words_[tile / 4] |=
                        ptx::halves_below(numbers.words[i], dropout.limit) & (0x10001u << (tile % 4 * 4 + i));
            }
#pragma unroll
        for (std::uint32_t& word : words_) {
            // Here the lower half is of even keys, the upper half of odd ones. If rows are keys, this lane has one of
            // them, and its call was of one query; afterwards the lower half is of even queries.
            if constexpr (kRowsAreKeys) {
                const std::uint32_t other = __shfl_xor_sync(kWarpMask, word, 4);
                word = row % 2 ? word & 0xffff0000u | other >> 16 : word & 0xffff | other << 16;
            }
            word ^= dropout.turn;
        }
    }

    /// f(i, column, kept) for every weight: row i of this lane, at `column` (register_tile.cuh). Bit by bit, so that
    /// ptxas moves several bits to predicates at once (R2P).
    template <class F>
    __device__ __forceinline__ void each(F f) const {
#pragma unroll
        for (int w = 0; w < kWords; ++w)
#pragma unroll
            for (int e = 0; e < 2; ++e)
#pragma unroll
                for (int b = 0; b < 16; ++b) {
                    const int tile = 4 * w + b / 4, upper = b / 2 % 2, lower = b % 2;
                    if (tile >= kTiles) continue;
                    const int row_half = kRowsAreKeys ? upper : lower, column_half = kRowsAreKeys ? lower : upper;
                    f(tile / kAcross * 2 + row_half, tile % kAcross * 16 + column_half * 8 + e,
                      (words_[w] & 1u << (16 * e + b)) != 0);
                }
    }

  private:
    std::uint32_t words_[kWords];
};

}  // namespace flash_wmma
