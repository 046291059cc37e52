// Which part of the problem a block works on, and how a row of its Q tile maps to the tensors.
#pragma once

#include <launch.h>

#include "../attention.h"

namespace flash_wmma {

/// The Q tile of this block: rows [first_row, first_row + Br) of one query head.
struct QTile {
    int batch, head, head_k;
    int first_row;

    /// Query index and query head of row r of the tile. The one place that knows how heads share a tile.
    struct Row {
        int query, head;
    };
    __device__ Row row(int r) const { return {first_row + r, head}; }
};

/// Blocks are numbered tile-fastest, so that neighbours in time share a head's K and V in L2. Where the band's right
/// side is bounded (causal) the last tile, which has the most keys, goes first.
template <int Br>
__device__ QTile q_tile(const ForwardParams& p) {
    const unsigned tiles = static_cast<unsigned>((p.seqlen_q + Br - 1) / Br);
    const unsigned heads = static_cast<unsigned>(p.heads_q);
    const unsigned tile = blockIdx.x % tiles, slice = blockIdx.x / tiles;
    const unsigned head = slice % heads;
    const unsigned ordered = p.band.right < kUnbounded ? tiles - 1 - tile : tile;
    return {static_cast<int>(slice / heads), static_cast<int>(head),
            static_cast<int>(head / (heads / static_cast<unsigned>(p.heads_k))), static_cast<int>(ordered * Br)};
}

/// The grid for q_tile<br>. Throws std::runtime_error if the problem has more tiles than a grid holds.
inline dim3 q_tile_grid(const ForwardParams& p, int br) {
    const std::int64_t blocks = (p.seqlen_q + br - 1) / br * p.heads_q * p.batch;
    constexpr std::int64_t kMaxBlocks = 0x7fffffff;
    if (blocks > kMaxBlocks) throw std::runtime_error("flash_wmma: more than 2^31 - 1 query tiles");
    return dim3(static_cast<unsigned>(blocks));
}

/// Row `row` of head `head` of batch entry `batch`, as elements of type T.
template <class T>
__device__ __forceinline__ T* row_of(const Rows& rows, int batch, int head, int row) {
    return static_cast<T*>(rows.data) + batch * rows.batch + head * rows.head + row * rows.row;
}

/// Index of (batch, head, row) in a contiguous (B, Hq, Nq) tensor such as lse.
__device__ __forceinline__ std::int64_t lse_index(const ForwardParams& p, int batch, int head, int row) {
    return (batch * p.heads_q + head) * p.seqlen_q + row;
}

}  // namespace flash_wmma
