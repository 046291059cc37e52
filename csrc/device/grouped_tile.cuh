// A Q tile of grouped heads: the query heads that share a key/value head share the tile, so that K and V are read once
// for all of them. For key/value caches, where queries are few.
#pragma once

#include <launch.h>

#include "attention.h"
#include "cached_rows.h"
#include "device/tile.cuh"

namespace flash_wmma {

/// Rows [first_row, first_row + Br) of a key/value head's queries: row r of all is query r / group of its query head
/// r % group.
struct GroupedTile {
    int batch, head_k, group;
    int first_row;

    __device__ QTile::Row row(int r) const {
        const auto at = static_cast<unsigned>(first_row + r), heads = static_cast<unsigned>(group);
        return {static_cast<int>(at / heads), head_k * group + static_cast<int>(at % heads)};
    }
};

/// A sequence of a cache, and its tile. As Assignment. If there is nothing to do, the tile begins at a negative row or
/// past the sequence's end.
struct CachedAssignment {
    Sequence sequence;
    GroupedTile tile;
};

/// Sequence `index` of a cache and its queries, dense or packed. Index p.batch stands for the packed rows behind the
/// last sequence, which see no key.
__device__ inline Sequence cached_sequence(const ForwardParams& p, int index) {
    const Sequences& s = p.sequences;
    const bool behind = index == p.batch;
    Sequence found{behind ? index - 1 : index, 0, 0, static_cast<int>(p.seqlen_q), 0};
    if (s.cu_seqlens_q) {
        found.first_q = detail::first_row(s.cu_seqlens_q, index, s.total_q);
        const int end = behind ? static_cast<int>(s.total_q) : detail::first_row(s.cu_seqlens_q, index + 1, s.total_q);
        found.seqlen_q = max(0, end - found.first_q);
    }
    if (!behind) found.seqlen_k = CachedRows(s, p.seqlen_k, found.index).count;
    return found;
}

/// How many Q tiles a key/value head has: in a sequence, or of packed queries in all.
template <int Br>
__device__ unsigned cached_tiles(const ForwardParams& p) {
    const Sequences& s = p.sequences;
    const int group = static_cast<int>(p.heads_q) / static_cast<int>(p.heads_k);
    return static_cast<unsigned>(s.cu_seqlens_q ? packed_tiles(s.total_q * group, p.batch, Br)
                                                : (p.seqlen_q * group + Br - 1) / Br);
}

/// The assignment of a block, with dense or packed queries. Called by whole warps.
template <int Br>
__device__ CachedAssignment cached_assignment(const ForwardParams& p, unsigned block = blockIdx.x) {
    const Sequences& s = p.sequences;
    const int heads_k = static_cast<int>(p.heads_k), group = static_cast<int>(p.heads_q) / heads_k;
    const unsigned tiles = cached_tiles<Br>(p), slice = block / tiles;
    int index = static_cast<int>(slice) / heads_k, head_k = static_cast<int>(slice) % heads_k;
    int tile = static_cast<int>(block % tiles);
    if (s.cu_seqlens_q) {
        const PackedTile place = packed_tile(s.cu_seqlens_q, p.batch, s.total_q, Br, tile, group);
        index = place.sequence, head_k = static_cast<int>(slice), tile = place.tile;
    }
    const Sequence found = cached_sequence(p, index);
    return {found, {found.index, head_k, group, tile * Br}};
}

/// The block of which Q tile `tile` of sequence `index` (as for cached_sequence) is the assignment.
template <int Br>
__device__ unsigned cached_block(const ForwardParams& p, int index, int head_k, int tile) {
    const Sequences& s = p.sequences;
    const int heads_k = static_cast<int>(p.heads_k), group = static_cast<int>(p.heads_q) / heads_k;
    int slice = index * heads_k + head_k;
    if (s.cu_seqlens_q) {
        slice = head_k;
        tile += detail::first_row(s.cu_seqlens_q, index, s.total_q) * group / Br + index;
    }
    return static_cast<unsigned>(slice) * cached_tiles<Br>(p) + static_cast<unsigned>(tile);
}

/// The grid for cached_assignment<br>. Throws std::runtime_error if there are too many rows or tiles.
inline dim3 cached_assignment_grid(const ForwardParams& p, int br) {
    const Sequences& s = p.sequences;
    const std::int64_t rows = (s.cu_seqlens_q ? s.total_q : p.seqlen_q) * (p.heads_q / p.heads_k);
    const std::int64_t tiles = s.cu_seqlens_q ? packed_tiles(rows, p.batch, br) : (rows + br - 1) / br * p.batch;
    if (rows + br > 0x7fffffff || tiles * p.heads_k > 0x7fffffff)
        throw std::runtime_error("flash_wmma: more than 2^31 - 1 query rows of a key/value head, or query tiles");
    return dim3(static_cast<unsigned>(tiles * p.heads_k));
}

}  // namespace flash_wmma
