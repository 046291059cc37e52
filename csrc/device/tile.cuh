// Which part of the problem a block works on, and how a row of its Q tile maps to the tensors.
#pragma once

#include <launch.h>

#include "attention.h"
#include "device/shuffle.cuh"

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

/// Blocks are numbered tile-fastest, so that neighbours in time share a head's K and V in L2. If the band is bounded on
/// the right (causal), the last tile, which has the most keys, goes first.
template <int Br>
__device__ QTile q_tile(const ForwardParams& p, unsigned block = blockIdx.x) {
    const unsigned tiles = static_cast<unsigned>((p.seqlen_q + Br - 1) / Br);
    const unsigned heads = static_cast<unsigned>(p.heads_q);
    const unsigned tile = block % tiles, slice = block / tiles;
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

/// A sequence: its rows in the tensors and how many there are. Not packed: all rows of a batch entry.
struct Sequence {
    int index;             // in the batch
    int first_q, first_k;  // its first rows in the tensors
    int seqlen_q, seqlen_k;
};

namespace detail {

/// cu_seqlens[i], clamped to the tensor.
__device__ __forceinline__ int first_row(const std::int32_t* cu_seqlens, std::int64_t i, std::int64_t total) {
    return max(0, min(cu_seqlens[i], static_cast<int>(total)));
}

}  // namespace detail

/// Sequence `index`, clamped so that it stays inside the tensors whatever its entries are. A sequence that would end
/// before it begins is empty. Index p.batch stands for the rows behind the last sequence, which see no key.
__device__ inline Sequence sequence(const ForwardParams& p, int index) {
    const Sequences& s = p.sequences;
    const bool behind = index == p.batch;
    Sequence found{behind ? index - 1 : index, 0, 0, static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k)};
    if (s.cu_seqlens_q) {
        found.first_q = detail::first_row(s.cu_seqlens_q, index, s.total_q);
        const int end = behind ? static_cast<int>(s.total_q) : detail::first_row(s.cu_seqlens_q, index + 1, s.total_q);
        found.seqlen_q = max(0, end - found.first_q);
    }
    if (behind) {
        found.seqlen_k = 0;
    } else {
        if (s.cu_seqlens_k) {
            found.first_k = detail::first_row(s.cu_seqlens_k, index, s.total_k);
            found.seqlen_k = max(0, detail::first_row(s.cu_seqlens_k, index + 1, s.total_k) - found.first_k);
        }
        if (s.seqused_k) found.seqlen_k = max(0, min(s.seqused_k[index], found.seqlen_k));
    }
    return found;
}

/// The most tiles of `rows` rows that all packed sequences and the rows behind them have. Sequence b's tiles are
/// numbered from cu_seqlens[b] / rows + b on. This numbering leaves fewer than one number a sequence unused.
__host__ __device__ inline std::int64_t packed_tiles(std::int64_t total, std::int64_t batch, int rows) {
    return total / rows + batch + 1;
}

/// The first number of a sequence's tiles; total / rows + batch + 1 is that of what would follow the rows behind.
__device__ __forceinline__ int first_packed_tile(const std::int32_t* cu_seqlens, std::int64_t i, std::int64_t total,
                                                 int rows, int group = 1) {
    return static_cast<int>(detail::first_row(cu_seqlens, i, total) * group / rows + i);
}

/// The sequence (p.batch: the rows behind) with tile number `number` among packed tiles of `rows` rows, and its tile.
/// Called by whole warps.
/// With `group` each entry of cu_seqlens counts so many rows.
struct PackedTile {
    int sequence, tile;  // tile < 0 or past the sequence's end: a number that is not used
};
__device__ inline PackedTile packed_tile(const std::int32_t* cu_seqlens, std::int64_t batch, std::int64_t total,
                                         int rows, int number, int group = 1) {
    const int lane = static_cast<int>(threadIdx.x) % 32, sequences = static_cast<int>(batch);
    int found = 0;  // sequences 1, 2, ... that begin at or before the number
    for (int first = 1; first <= sequences; first += 32) {
        const int i = first + lane;
        const bool before = i <= sequences && first_packed_tile(cu_seqlens, i, total, rows, group) <= number;
        found += count_lanes(before);
    }
    return {found, number - first_packed_tile(cu_seqlens, found, total, rows, group)};
}

/// The sequence and the Q tile of this block. If there is nothing to do, the tile begins at a negative row or past
/// seqlen_q.
struct Assignment {
    Sequence sequence;
    QTile tile;
};

/// Without p.sequences. The compiler knows that the assignment is the same in every thread.
template <int Br>
__device__ Assignment dense_assignment(const ForwardParams& p, unsigned block = blockIdx.x) {
    const QTile tile = q_tile<Br>(p, block);
    return {{tile.batch, 0, 0, static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k)}, tile};
}

/// With p.sequences or without. Called by whole warps.
template <int Br>
__device__ Assignment assignment(const ForwardParams& p, unsigned block = blockIdx.x) {
    const Sequences& s = p.sequences;
    if (!s.cu_seqlens_q) {
        const QTile tile = q_tile<Br>(p, block);
        return {sequence(p, tile.batch), tile};
    }
    const auto tiles = static_cast<unsigned>(packed_tiles(s.total_q, p.batch, Br));
    const int head = static_cast<int>(block / tiles);
    const PackedTile found = packed_tile(s.cu_seqlens_q, p.batch, s.total_q, Br, static_cast<int>(block % tiles));
    const Sequence rows = sequence(p, found.sequence);
    const int count = (rows.seqlen_q + Br - 1) / Br;
    const bool longest_first = p.band.right < kUnbounded && found.tile >= 0 && found.tile < count;
    const int tile = longest_first ? count - 1 - found.tile : found.tile;
    return {rows, {rows.index, head, head / static_cast<int>(p.heads_q / p.heads_k), tile * Br}};
}

/// The grid for assignment<br>.
inline dim3 assignment_grid(const ForwardParams& p, int br) {
    if (!p.sequences.cu_seqlens_q) return q_tile_grid(p, br);
    const std::int64_t blocks = packed_tiles(p.sequences.total_q, p.batch, br) * p.heads_q;
    if (blocks > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 query tiles");
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
/// The same for row `row` of a sequence; packed, lse is (Hq, total_q).
__device__ __forceinline__ std::int64_t lse_index(const ForwardParams& p, const Sequence& sequence, int head, int row) {
    if (p.sequences.cu_seqlens_q) return head * p.sequences.total_q + sequence.first_q + row;
    return lse_index(p, sequence.index, head, row);
}

/// Index in Exponents::q (k and v) of the first group of kScaleRows rows of (batch, head).
__device__ __forceinline__ std::int64_t q_scale_index(const ForwardParams& p, int batch, int head) {
    return (batch * p.heads_q + head) * ((p.seqlen_q + kScaleRows - 1) / kScaleRows);
}
__device__ __forceinline__ std::int64_t k_scale_index(const ForwardParams& p, int batch, int head_k) {
    return (batch * p.heads_k + head_k) * ((p.seqlen_k + kScaleRows - 1) / kScaleRows);
}
/// The same of a sequence in one head.
__device__ __forceinline__ std::int64_t q_scale_index(const ForwardParams& p, const Sequence& sequence, int head) {
    const Sequences& s = p.sequences;
    if (s.cu_seqlens_q)
        return head * packed_tiles(s.total_q, p.batch, kScaleRows) + sequence.first_q / kScaleRows + sequence.index;
    return q_scale_index(p, sequence.index, head);
}
__device__ __forceinline__ std::int64_t k_scale_index(const ForwardParams& p, const Sequence& sequence, int head_k) {
    const Sequences& s = p.sequences;
    if (s.cu_seqlens_k)
        return head_k * packed_tiles(s.total_k, p.batch, kScaleRows) + sequence.first_k / kScaleRows + sequence.index;
    return k_scale_index(p, sequence.index, head_k);
}

}  // namespace flash_wmma
