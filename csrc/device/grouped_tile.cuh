// A Q tile of grouped heads: the query heads that share a key/value head share the tile, so that K and V are read once
// for all of them. For key/value caches, where queries are few.
#pragma once

#include <launch.h>

#include "attention.h"
#include "cached_rows.h"
#include "device/divisor.h"
#include "device/programmatic.cuh"
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
    /// The same where a divisor's registers do not matter.
    __device__ QTile::Row row(int r, const Divisor& by_group) const {
        const int at = first_row + r;
        return {by_group.quotient(at), head_k * group + by_group.remainder(at)};
    }
    /// Rows that the tile and those behind it have, in a sequence of so many queries.
    __device__ int rows(int seqlen_q) const { return seqlen_q * group - first_row; }
};

/// A sequence of a cache, and its tile. As Assignment. If there is nothing to do, the tile begins at a negative row or
/// past the sequence's end.
struct CachedAssignment {
    Sequence sequence;
    GroupedTile tile;
};

/// What the tensors of lengths say of a sequence of a cache, whatever it is.
struct CachedEntries {
    int first_q, end_q;  ///< of packed queries
    int leftpad, used;

    __device__ bool operator==(const CachedEntries& x) const {
        return first_q == x.first_q && end_q == x.end_q && leftpad == x.leftpad && used == x.used;
    }
};

/// Of sequence `index`, read early. Index p.batch: as for cached_sequence.
__device__ inline CachedEntries cached_entries(const ForwardParams& p, int index) {
    const Sequences& s = p.sequences;
    const bool behind = index == p.batch;
    const auto read = [](const std::int32_t* from, int i, bool exists) { return exists ? read_early(from + i) : 0; };
    return {read(s.cu_seqlens_q, index, s.cu_seqlens_q), read(s.cu_seqlens_q, index + 1, s.cu_seqlens_q && !behind),
            read(s.leftpad, index, s.leftpad && !behind), read(s.seqused_k, index, !behind)};
}

/// Sequence `index` of a cache and its queries, dense or packed; first_k is the row of its key 0. Index p.batch stands
/// for the packed rows behind the last sequence, which see no key.
__device__ inline Sequence cached_sequence(const ForwardParams& p, int index, const CachedEntries& entries) {
    const Sequences& s = p.sequences;
    const bool behind = index == p.batch;
    Sequence found{behind ? index - 1 : index, 0, 0, static_cast<int>(p.seqlen_q), 0};
    if (s.cu_seqlens_q) {
        const int total = static_cast<int>(s.total_q);
        const auto row = [&](int i) { return max(0, min(i, total)); };
        found.first_q = row(entries.first_q);
        found.seqlen_q = max(0, (behind ? total : row(entries.end_q)) - found.first_q);
    }
    if (!behind) {
        const CachedRows rows(s, p.seqlen_k, index, entries.leftpad, entries.used);
        found.first_k = rows.first, found.seqlen_k = rows.count;
    }
    return found;
}
__device__ inline Sequence cached_sequence(const ForwardParams& p, int index) {
    return cached_sequence(p, index, cached_entries(p, index));
}

/// How many Q tiles a key/value head has: in a sequence, or of packed queries in all.
template <int Br>
__device__ unsigned cached_tiles(const ForwardParams& p, int group) {
    const Sequences& s = p.sequences;
    return static_cast<unsigned>(s.cu_seqlens_q ? packed_tiles(s.total_q * group, p.batch, Br)
                                                : (p.seqlen_q * group + Br - 1) / Br);
}

/// The assignment of a block, with dense or packed queries. `group`: query heads of a key/value head. Called by whole
/// warps.
template <int Br>
__device__ CachedAssignment cached_assignment(const ForwardParams& p, const Divisor& group,
                                              unsigned block = blockIdx.x) {
    const Sequences& s = p.sequences;
    const int heads_k = static_cast<int>(p.heads_k);
    const unsigned tiles = cached_tiles<Br>(p, group.divisor()), slice = block / tiles;
    int index = static_cast<int>(slice) / heads_k, head_k = static_cast<int>(slice) % heads_k;
    int tile = static_cast<int>(block % tiles);
    if (s.cu_seqlens_q) {
        const PackedTile place = packed_tile(s.cu_seqlens_q, p.batch, s.total_q, Br, tile, group.divisor());
        index = place.sequence, head_k = static_cast<int>(slice), tile = place.tile;
    }
    const Sequence found = cached_sequence(p, index);
    return {found, {found.index, head_k, group.divisor(), tile * Br}};
}

/// The block of which Q tile `tile` of sequence `index` (as for cached_sequence), whose first row is `first_q`, is the
/// assignment.
template <int Br>
__device__ unsigned cached_block(const ForwardParams& p, int group, int index, int first_q, int head_k, int tile) {
    int slice = index * static_cast<int>(p.heads_k) + head_k;
    if (p.sequences.cu_seqlens_q) slice = head_k, tile += first_q * group / Br + index;
    return static_cast<unsigned>(slice) * cached_tiles<Br>(p, group) + static_cast<unsigned>(tile);
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
