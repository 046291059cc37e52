// Boolean masks of wgmma_sm90: a grid of its own looks at a mask once, before the kernel (look_at_mask.cuh).
//
// Of every 16 rows and 64 keys, a warp's part of a tile, it packs what is seen into a word for each lane: the bits of
// the lane's scores in the order in which it has them. For every Q tile it lists the K tiles of which some row sees a
// key, with what each of the 64-row groups sees of them: nothing, a part, or all. So the kernel loads no tile that is
// hidden, and looks at the bits of those alone that are seen in part. The kernel counts in places of the list; `rank`
// takes a tile to its place.
//
// Only what differs is looked at: a mask that is broadcast over batch entries, heads or queries has one of each.
#pragma once

#include <launch.h>

#include <cstdint>

#include "attention.h"

namespace flash_wmma::wgmma_sm90 {

/// What the grid has found. A slice is the mask of a head of a batch entry.
struct MaskTiles {
    static constexpr int kKeys = 64, kGroupRows = 64, kWarpRows = 16;  // of a tile, of a group, of a warp
    static constexpr int kTileBits = 24, kMostGroups = 4;
    static constexpr unsigned kSomeSeen = 1, kSomeHidden = 2;  // by a group, of a tile

    unsigned* order;  ///< tiles + 1 words a Q tile: the visible tiles, upwards, then tile 0 once more, seen in part
    int* rank;        ///< tiles + 1 words a Q tile: how many visible tiles come before this one
    unsigned* bits;   ///< `lanes` words a tile of a warp's rows (bit()); a set bit is a visible key
    int tiles, rows;  ///< of a slice. rows is 1 if queries share a row
    int lanes;        ///< 32; 4 if queries share a row, since then all quads have the same bits
    int q_tiles;      ///< of a slice, of `br` rows
    int br;
    int batches, heads;  ///< that differ; 1: shared

    MaskTiles() = default;
    /// With their memory from `memory` on.
    MaskTiles(const ForwardParams& p, int rows_of_q_tile, void* memory)
        : tiles(static_cast<int>((p.seqlen_k + kKeys - 1) / kKeys)),
          rows(p.bias.query == 0 ? 1 : static_cast<int>(p.seqlen_q)),
          lanes(rows == 1 ? 4 : 32),
          q_tiles((rows + rows_of_q_tile - 1) / rows_of_q_tile),
          br(rows_of_q_tile),
          batches(p.bias.batch == 0 ? 1 : static_cast<int>(p.batch)),
          heads(p.bias.head == 0 ? 1 : static_cast<int>(p.heads_q)) {
        order = static_cast<unsigned*>(memory);
        rank = reinterpret_cast<int*>(order + lists() * (tiles + 1));
        bits = reinterpret_cast<unsigned*>(rank + lists() * (tiles + 1));
    }
    static bool wanted(const ForwardParams& p) { return p.bias.data && p.bias.dtype == DType::kBool; }
    std::int64_t bytes() const {
        return (2 * lists() * (tiles + 1) + runs() * tiles * lanes) * std::int64_t{sizeof(unsigned)};
    }
    std::int64_t lists() const { return std::int64_t{batches} * heads * q_tiles; }
    /// Runs of a warp's rows, of all slices and of one.
    std::int64_t runs() const { return std::int64_t{batches} * heads * slice_runs(); }
    __host__ __device__ __forceinline__ int slice_runs() const { return (rows + kWarpRows - 1) / kWarpRows; }

    /// The list of the Q tile that begins with row `row`, and the words of the run that does. Packed sequences may be
    /// longer than the mask: their later rows get its last ones'.
    __device__ __forceinline__ std::int64_t list(int batch, int head, int row) const {
        return (slice(batch, head) * q_tiles + min(row / br, q_tiles - 1)) * (tiles + 1);
    }
    __device__ __forceinline__ const unsigned* words(int batch, int head, int row) const {
        return bits + (slice(batch, head) * slice_runs() + min(row / kWarpRows, slice_runs() - 1)) * (tiles * lanes);
    }
    /// Of a lane's word, which bit is that of its row i and of `column` (device/register_tile.cuh).
    __device__ __forceinline__ static constexpr int bit(int i, int column) {
        return 16 * i + column / 8 * 2 + column % 2;
    }
    __device__ __forceinline__ std::int64_t slice(int batch, int head) const {
        return std::int64_t{batches == 1 ? 0 : batch} * heads + (heads == 1 ? 0 : head);
    }
    __device__ __forceinline__ static int tile(unsigned entry) {
        return static_cast<int>(entry & ((1u << kTileBits) - 1));
    }
    /// What a group of the Q tile sees of an entry's tile.
    __device__ __forceinline__ static unsigned seen(unsigned entry, int group) {
        return entry >> (kTileBits + 2 * group) & (kSomeSeen | kSomeHidden);
    }
};

}  // namespace flash_wmma::wgmma_sm90
