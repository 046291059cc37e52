// The tile of rows that a block of a backward kernel owns, of one side: keys of a key/value head, or queries of a query
// head.
#pragma once

#include <launch.h>

#include "attention.h"
#include "device/tile.cuh"

namespace flash_wmma {

/// A tile of a sequence's rows from first_row on. The block writes those below first_row + rows; rows <= 0: none. If
/// not packed, they include keys that are not in use (behind sequence.seqlen_k).
struct OwnedTile {
    Sequence sequence;
    int head, head_k;  // owned keys: the first query head that reads them
    int first_row, rows;
};

template <int Own, bool Packed>
__device__ OwnedTile owned_queries(const ForwardParams& p, unsigned block_index = blockIdx.x) {
    const Assignment a = Packed ? assignment<Own>(p, block_index) : dense_assignment<Own>(p, block_index);
    const int rows = a.tile.first_row < 0 ? 0 : a.sequence.seqlen_q - a.tile.first_row;
    return {a.sequence, a.tile.head, a.tile.head_k, a.tile.first_row, rows};
}

/// Numbered tile-fastest, so that neighbours in time share a head's queries in L2. With a causal band the first tile
/// has the most queries and goes first.
template <int Own, bool Packed>
__device__ OwnedTile owned_keys(const ForwardParams& p, unsigned block_index = blockIdx.x) {
    const Sequences& s = p.sequences;
    const int group = static_cast<int>(p.heads_q / p.heads_k);
    if (Packed && s.cu_seqlens_k) {
        const auto tiles = static_cast<unsigned>(packed_tiles(s.total_k, p.batch, Own));
        const int head = static_cast<int>(block_index / tiles);
        const PackedTile found =
            packed_tile(s.cu_seqlens_k, p.batch, s.total_k, Own, static_cast<int>(block_index % tiles));
        const Sequence rows = sequence(p, found.sequence);
        const int first_row = found.tile * Own;
        return {rows, head * group, head, first_row, first_row < 0 ? 0 : rows.seqlen_k - first_row};
    }
    const auto tiles = static_cast<unsigned>((p.seqlen_k + Own - 1) / Own), heads = static_cast<unsigned>(p.heads_k);
    const int tile = static_cast<int>(block_index % tiles), slice = static_cast<int>(block_index / tiles);
    const int batch = slice / static_cast<int>(heads), head = slice % static_cast<int>(heads);
    const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
    Sequence rows{batch, 0, 0, seqlen_q, seqlen_k};
    if constexpr (Packed) rows = sequence(p, batch);
    return {rows, head * group, head, tile * Own, seqlen_k - tile * Own};
}

/// The grid for owned_keys<own>, of that many heads. Throws std::runtime_error if the problem has more tiles than a
/// grid holds.
inline dim3 owned_keys_grid(const ForwardParams& p, int own, std::int64_t heads) {
    const Sequences& s = p.sequences;
    const std::int64_t tiles =
        s.cu_seqlens_k ? packed_tiles(s.total_k, p.batch, own) : (p.seqlen_k + own - 1) / own * p.batch;
    if (tiles * heads > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 key tiles");
    return dim3(static_cast<unsigned>(tiles * heads));
}
inline dim3 owned_keys_grid(const ForwardParams& p, int own) { return owned_keys_grid(p, own, p.heads_k); }

}  // namespace flash_wmma
