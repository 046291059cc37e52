// What the kernels of bwd_simt.cuh and statistics.cuh share: a block's tile, the rows that it streams over, their
// copies to shared memory, and sums for each own key.
#pragma once

#include <algorithm>

#include "device/backward_rows.cuh"
#include "device/owned_tile.cuh"
#include "device/row_group_mask.cuh"
#include "device/simt_tile.cuh"

namespace flash_wmma::backward {

/// A block's work: simt's, with own rows as rows and streamed rows as keys.
template <simt::TileShape kShape>
struct SimtTile : simt::LaneGrid<kShape> {
    static constexpr int kOwn = SimtTile::kBr, kStream = SimtTile::kBc;
    static constexpr int kQueryRows = kStream >= 64 ? 8 : 4;  // of dQ, per thread, in four columns
    static_assert(kRowGroup % kStream == 0 && kRowGroup % kOwn == 0);
};

/// The streamed rows [begin, end) that see an own row, or that an own row sees, in each of `heads` query heads; own
/// rows end before end_row.
struct StreamedRows {
    int begin, end, heads, end_row;
};
template <class Tile, bool kOwnsKeys, class Mask>
__device__ __forceinline__ StreamedRows streamed_rows(const ForwardParams& p, const OwnedTile& own, const Mask& mask) {
    const Sequence& sequence = own.sequence;
    const int end_row = min(own.first_row + Tile::kOwn, kOwnsKeys ? sequence.seqlen_k : sequence.seqlen_q);
    int begin, end;
    if constexpr (kOwnsKeys) {
        const QueryRun queries = queries_that_see(mask, own.head, own.first_row, end_row - 1, sequence.seqlen_q);
        begin = queries.begin, end = queries.end;
    } else {
        const KeyExtent keys = mask.extent(own.first_row, end_row - 1);
        begin = keys.some_begin, end = keys.some_end;
    }
    const bool any = end_row > own.first_row && end > begin;
    return {begin, end, any ? kOwnsKeys ? static_cast<int>(p.heads_q / p.heads_k) : 1 : 0, end_row};
}

/// Copies the rows from `row` on, of which `count` exist, to shared memory.
template <class Tile, int Rows_, int Pitch>
__device__ __forceinline__ void copy_rows(float (&to)[Rows_][Pitch], const Rows& rows, const Sequence& s, int head,
                                          int row, int count, int columns) {
    simt::Copy<Tile, Rows_>(row_of<const float>(rows, s.index, head, row), rows.row, columns).next(to, rows.row, count);
}

/// Adds up `sums`, of each own key and the lanes that share it, and stores them, times `factor`, as the numbers of the
/// own keys for a query head.
template <class Tile>
__device__ __forceinline__ void store_for_keys(float* numbers, const Problem& problem, const OwnedTile& own, int head,
                                               const float (&sums)[Tile::kRows], float factor,
                                               const simt::Thread<Tile>& thread) {
    const Sequence& s = own.sequence;
    float* const to = numbers + s.index * problem.key_batch + head * problem.key_head + s.first_k + own.first_row;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        const float sum = simt::over_row<Tile>(sums[i], [](float x, float y) { return x + y; });
        if (thread.column == 0 && own.first_row + thread.tile_row(i) < s.seqlen_k)
            to[thread.tile_row(i)] = sum * factor;
    }
}

}  // namespace flash_wmma::backward
