// What a block of a statistics kernel works on at a time (attention.h): a tile of own rows, and the tiles of rows that
// they see or that see them.
#pragma once

#include "device/owned_tile.cuh"
#include "device/row_group_mask.cuh"
#include "device/streamed_range.cuh"

namespace flash_wmma::backward {

/// Own queries of a head and streamed keys, or own keys and streamed queries of one query head that reads them.
template <class Tile, bool kOwnsKeys>
struct StatisticsItem {
    OwnedTile own;
    int head;   // query head
    int last;   // first row of the last streamed tile
    int tiles;  // how many are streamed, from the last one to the first; below 0: there are no more items

    /// The item of a number below statistics_grid's. Called by whole warps.
    __device__ __forceinline__ static StatisticsItem of(const Problem& problem, unsigned index = blockIdx.x) {
        const ForwardParams& p = problem.forward;
        // A tile of keys has an item for each query head that reads them
        const auto heads = static_cast<unsigned>(kOwnsKeys ? p.heads_q / p.heads_k : 1);
        const OwnedTile own =
            kOwnsKeys ? owned_keys<Tile::kOwn, true>(p, index / heads) : owned_queries<Tile::kOwn, true>(p, index);
        const int head = own.head + static_cast<int>(index % heads);
        if (own.rows <= 0) return {own, head, 0, 0};
        const auto mask = query_mask<true>(problem, own.sequence, own.head);
        // The same for each of the heads
        const auto range = streamed_range<Tile, kOwnsKeys ? Pass::kKeys : Pass::kQueries>(p, own, mask);
        if (range.left == 0) return {own, head, 0, 0};
        return {own, head, range.at.last, (range.at.last - range.at.first) / Tile::kStream + 1};
    }

    /// First row of the first streamed tile.
    __device__ __forceinline__ int first() const { return last - (tiles - 1) * Tile::kStream; }

    /// How many rows the sequence has of the own side, and of the streamed one.
    __device__ __forceinline__ int own_length() const {
        return kOwnsKeys ? own.sequence.seqlen_k : own.sequence.seqlen_q;
    }
    __device__ __forceinline__ int streamed_length() const {
        return kOwnsKeys ? own.sequence.seqlen_q : own.sequence.seqlen_k;
    }
    /// Where the rows lie in their tensors: the sequence's first one, and the head.
    __device__ __forceinline__ int first_own() const { return kOwnsKeys ? own.sequence.first_k : own.sequence.first_q; }
    __device__ __forceinline__ int first_streamed() const {
        return kOwnsKeys ? own.sequence.first_q : own.sequence.first_k;
    }
    __device__ __forceinline__ int own_head() const { return kOwnsKeys ? own.head_k : head; }
    __device__ __forceinline__ int streamed_head() const { return kOwnsKeys ? head : own.head_k; }
};

/// The items of a pass, as a grid with a block for each.
template <class Tile, bool kOwnsKeys>
dim3 statistics_grid(const ForwardParams& p) {
    return kOwnsKeys ? owned_keys_grid(p, Tile::kOwn, p.heads_q) : assignment_grid(p, Tile::kOwn);
}

}  // namespace flash_wmma::backward
