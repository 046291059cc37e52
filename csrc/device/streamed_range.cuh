// Which tiles of rows a block streams over that owns a tile of the other side.
#pragma once

#include "device/owned_tile.cuh"
#include "device/row_group_mask.cuh"

namespace flash_wmma::backward {

/// Walks over the streamed tiles, head by head, and in each head from the last tile to the first.
struct Cursor {
    int head;         // query head
    int row;          // first of the tile
    int first, last;  // rows at which the first and the last tile of a head begin
    int step;

    /// Whether the tile is a head's last one.
    __device__ bool ends_head() const { return row == first; }
    /// Moves to the next tile. Returns whether a new head begins.
    __device__ bool advance() {
        row -= step;
        if (row >= first) return false;
        row = last;
        ++head;
        return true;
    }
};

/// The streamed tiles that see an own row, or that an own row sees, and their number.
struct StreamedRange {
    Cursor at;
    int left;
};
template <class Tile, Pass kPass, class Mask>
__device__ StreamedRange streamed_range(const ForwardParams& p, const OwnedTile& own, const Mask& mask) {
    constexpr bool kOwnsKeys = kPass != Pass::kQueries;
    const Sequence& s = own.sequence;
    const int end_row = min(own.first_row + Tile::kOwn, kOwnsKeys ? s.seqlen_k : s.seqlen_q);
    int begin, end;
    if constexpr (kOwnsKeys) {
        const QueryRun queries = queries_that_see(mask, own.head, own.first_row, end_row - 1, s.seqlen_q);
        begin = queries.begin, end = queries.end;
    } else {
        const KeyExtent keys = mask.extent(own.first_row, end_row - 1);
        begin = keys.some_begin, end = keys.some_end;
    }
    const int first = begin / Tile::kStream * Tile::kStream, last = (end - 1) / Tile::kStream * Tile::kStream;
    const int heads = kOwnsKeys ? static_cast<int>(p.heads_q / p.heads_k) : 1;
    const bool any = end_row > own.first_row && end > begin;
    return {{own.head, last, first, last, Tile::kStream}, any ? heads * ((last - first) / Tile::kStream + 1) : 0};
}

}  // namespace flash_wmma::backward
