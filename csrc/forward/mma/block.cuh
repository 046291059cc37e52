// A block of kernel.cuh: the shape of its work, the map of its shared memory, which thread owns what, what it works on.
#pragma once

#include <ptx.cuh>

#include <type_traits>

#include "attention.h"
#include "device/constants.cuh"
#include "device/element.cuh"
#include "device/grouped_tile.cuh"
#include "device/key_mask.cuh"
#include "device/key_parts.cuh"
#include "device/lagged_softmax.cuh"
#include "device/register_tile.cuh"
#include "device/swizzle.cuh"
#include "device/tile.cuh"

namespace flash_wmma::mma {

/// Shape of a block's work.
struct TileShape {
    int d;              ///< the largest d and d_v that the instance takes
    int row_warps = 4;  ///< groups of warps, each with rows of its own
    int dim_warps = 1;  ///< warps of a group: each has a part of its keys and of its columns
    int row_tiles = 1;  ///< of 16 rows each, of a warp
    int keys;           ///< of a K/V tile
    int stages = 1;     ///< K/V tiles in flight
    int q_steps;        ///< of the d / 16 steps along d, the first ones for which Q stays in registers
    int blocks_per_sm;  ///< resident blocks to keep registers for
    int key_warps = 1;  ///< warps with keys of their own and all rows: at the end they merge what they have
    int columns = 0;    ///< of O, of a block; 0: all. If d_v is larger, several blocks share the rows
};

/// The same with what follows from it. Scalar is half or bf16.
template <class Architecture, class Scalar, TileShape kShape>
struct Tile {
    using Machine = Architecture;
    using T = Scalar;
    static constexpr int kD = kShape.d, kRowWarps = kShape.row_warps, kDimWarps = kShape.dim_warps;
    static constexpr int kKeyWarps = kShape.key_warps, kGroupWarps = kRowWarps * kDimWarps;  // that share keys
    static constexpr int kRowTiles = kShape.row_tiles, kBc = kShape.keys, kStages = kShape.stages;
    static constexpr int kSteps = kD / 16, kQSteps = kShape.q_steps, kBlocksPerSm = kShape.blocks_per_sm;

    static constexpr int kWarps = kGroupWarps * kKeyWarps, kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles, kBr = kWarpRows * kRowWarps;
    static constexpr int kColumns = kShape.columns ? kShape.columns : kD, kColumnParts = (kD + kColumns - 1) / kColumns;
    static constexpr int kGroupKeys = kBc / kKeyWarps;  // keys of a tile that a group of warps has
    static constexpr int kWarpKeys = kGroupKeys / kDimWarps, kWarpColumns = kColumns / kDimWarps;
    static constexpr int kAhead = kStages > 1 ? kStages - 1 : 1;  // tiles that copies run ahead
    static constexpr bool kAlternates = kStages == 1 && !Machine::kThroughRegisters;
    static constexpr bool kQSharesRing = kQSteps == kSteps && Machine::kThroughRegisters;  // in shared memory
    static constexpr bool kQInLastStage = false;  // whether Q comes by way of the stage that is not yet in use
    static constexpr bool kCached = false;  // K and V lie in a key/value cache, and grouped heads share the Q tile
    static_assert(kQSteps <= kSteps);
    static_assert(kWarpColumns % 16 == 0 && kWarpKeys % 16 == 0 && kRowWarps <= 15);
    static_assert(kScaleRows % kGroupKeys == 0 && kScaleRows % kWarpRows == 0);
    static_assert(kKeyWarps == 1 || (kGroupWarps == 1 && kQSteps == kSteps && kD % (8 * kKeyWarps) == 0));
};

/// The same for a key/value cache.
template <class Architecture, class Scalar, TileShape kShape>
struct CachedTile : Tile<Architecture, Scalar, kShape> {
    static constexpr bool kCached = true;
    static constexpr bool kKeepsQ = CachedTile::kQSteps == CachedTile::kSteps;  // in registers
    static constexpr bool kQFitsStage = CachedTile::kStages > 1 && CachedTile::kBr <= CachedTile::kGroupKeys;
    static constexpr bool kQInLastStage = kKeepsQ && kQFitsStage && !CachedTile::kQSharesRing;
    static_assert(CachedTile::kKeyWarps == 1 || kQInLastStage || CachedTile::kQSharesRing);
    static_assert(CachedTile::kRowTiles == 1 && CachedTile::kColumns == CachedTile::kD);  // device/key_parts.cuh
};

/// Map of the shared memory of a group of warps: of a block, unless warps have keys of their own.
template <class Tile>
struct SharedTiles {
    using KeyRows = SwizzledTile<typename Tile::T, Tile::kGroupKeys, Tile::kD>;
    using ValueRows = SwizzledTile<typename Tile::T, Tile::kGroupKeys, Tile::kColumns>;
    using QRows = SwizzledTile<typename Tile::T, Tile::kWarpRows, Tile::kD>;  // of a row warp
    using WeightRows = SwizzledTile<typename Tile::T, Tile::kBr, Tile::kBc>;

    struct Stage {
        KeyRows k;
        ValueRows v;
    };
    struct Apart {
        Stage ring[Tile::kStages];
        QRows q[Tile::kRowWarps];
        __device__ __forceinline__ QRows& q_rows(int row_warp) { return q[row_warp]; }
    };
    struct Together {
        union {
            Stage ring[Tile::kStages];
            QRows q[Tile::kRowWarps];  // on its way to registers, before the first K/V tile comes
        };
        __device__ __forceinline__ QRows& q_rows(int row_warp) { return q[row_warp]; }
    };
    struct InLastStage {
        Stage ring[Tile::kStages];
        __device__ __forceinline__ QRows& q_rows(int row_warp) {
            return reinterpret_cast<QRows*>(&ring[Tile::kStages - 1].k)[row_warp];
        }
    };
    using QAndRing =
        std::conditional_t<Tile::kQSharesRing, Together, std::conditional_t<Tile::kQInLastStage, InLastStage, Apart>>;
};
template <class Tile>
struct SharedMemory : SharedTiles<Tile>, SharedTiles<Tile>::QAndRing {};

/// The same for warps that share rows, with the places for their exchange.
template <class Tile>
struct SharedMemoryWithExchange : SharedMemory<Tile> {
    typename SharedMemory<Tile>::WeightRows p;
    float row[Tile::kDimWarps][Tile::kBr];
    int fits[Tile::kRowWarps][Tile::kDimWarps];
};
template <class Tile>
using KeyRows = typename SharedTiles<Tile>::KeyRows;
template <class Tile>
using ValueRows = typename SharedTiles<Tile>::ValueRows;
template <class Tile>
using Smem = std::conditional_t<Tile::kDimWarps == 1, SharedMemory<Tile>, SharedMemoryWithExchange<Tile>>;

/// Map of a block's shared memory: of its groups, each of which leaves what it merges in its own place.
template <class Tile>
struct BlockSmem {
    union {
        Smem<Tile> tiles;
        float4 part[Tile::kKeyWarps > 1 ? PartRows<Tile::kD>::kSize : 1];
    } group[Tile::kKeyWarps];
};

/// Which of a block's rows, keys and columns are this thread's. Accumulators are 16x8 tiles: a lane has rows row() and
/// row() + 8, columns column() and column() + 1 of each (ptx.cuh).
template <class Tile>
struct Thread {
    int lane, row_warp, dim_warp, key_warp = 0;
    __device__ Thread() : Thread(static_cast<int>(threadIdx.x)) {}
    __device__ explicit Thread(int tid) {
        lane = tid % 32;
        row_warp = tid / 32 / Tile::kDimWarps;
        dim_warp = tid / 32 % Tile::kDimWarps;
        if constexpr (Tile::kKeyWarps > 1) row_warp = 0, key_warp = tid / 32;
    }
    __device__ int warp_row() const { return row_warp * Tile::kWarpRows; }
    /// The first of the group's keys, of the tile's; of the warp's, of the group's.
    __device__ int group_key() const { return key_warp * Tile::kGroupKeys; }
    __device__ int warp_key() const { return dim_warp * Tile::kWarpKeys; }
    __device__ int warp_column() const { return dim_warp * Tile::kWarpColumns; }
    __device__ int row() const { return lane / 4; }
    __device__ int column() const { return lane % 4 * 2; }
};

/// What a block works on: its sequence and Q tile, the keys it may see, and the scales of its scores.
template <class Tile>
struct Work {
    using Assigned = std::conditional_t<Tile::kCached, CachedAssignment, Assignment>;
    const ForwardParams& p;
    Sequence sequence;
    decltype(Assigned::tile) tile;
    int first_tile, tiles;  // K tiles from the first to the last with a key that some row of the Q tile sees

    template <class Mask>
    __device__ Work(const ForwardParams& params, const Assigned& a, const Mask& mask)
        : p(params), sequence(a.sequence), tile(a.tile) {
        const int last_row = min(tile.row(Tile::kBr - 1).query + 1, sequence.seqlen_q) - 1;
        const KeyExtent keys = mask.extent(tile.row(0).query, last_row);
        first_tile = keys.some_begin / Tile::kBc;
        tiles = tiles_of(keys);
    }

    /// The first of the block's columns of O, and how many columns there are from it on.
    __device__ static int first_column() {
        return Tile::kColumnParts == 1 ? 0 : static_cast<int>(blockIdx.y) * Tile::kColumns;
    }
    __device__ int columns() const { return p.head_dim_v - first_column(); }

    /// From the first to the last with a key that some row sees.
    __device__ static int tiles_of(const KeyExtent& keys) {
        return max(0, (keys.some_end + Tile::kBc - 1) / Tile::kBc - keys.some_begin / Tile::kBc);
    }

    /// Rows of the Q tile that exist, if grouped heads share it; of the last one more than it has.
    __device__ int rows() const { return tile.rows(sequence.seqlen_q); }

    /// Only `count` of the tiles, from tile `first` of these on.
    __device__ void keep(int first, int count) { first_tile += first, tiles = count; }

    /// The first key of the last tile.
    __device__ int last_key() const { return (first_tile + tiles - 1) * Tile::kBc; }

    /// Rows [first, ...) of this sequence in q, k or v.
    __device__ const typename Tile::T* q_rows(int first) const {
        return row_of<const typename Tile::T>(p.q, sequence.index, tile.head, sequence.first_q + first);
    }
    /// Row r of the Q tile in q.
    __device__ const typename Tile::T* q_row(int r) const {
        const auto [query, head] = tile.row(r);
        return row_of<const typename Tile::T>(p.q, sequence.index, head, sequence.first_q + query);
    }
    __device__ const typename Tile::T* key_rows(const Rows& rows, int first) const {
        return row_of<const typename Tile::T>(rows, sequence.index, tile.head_k, sequence.first_k + first);
    }

    /// Scale of the scores of Q's rows [row, row + kWarpRows), before K's exponent.
    __device__ float query_scale(int row) const {
        const float scale = p.scale * kLog2e;
        if (!p.exponents.q) return scale;
        return scale *
               exp2f(
                   p.exponents.q[q_scale_index(p, sequence, tile.row(row).head) + (tile.first_row + row) / kScaleRows]);
    }
    /// Exponent of the K or V tile at `key`.
    __device__ float exponent(const float* exponents, int key) const {
        return exponents[k_scale_index(p, sequence, tile.head_k) + key / kScaleRows];
    }
};

/// Waits for the warps that share these rows; afterwards they see each other's writes to shared memory.
template <class Tile>
__device__ __forceinline__ void meet(const Thread<Tile>& thread) {
    if constexpr (Tile::kDimWarps > 1) ptx::named_barrier_sync(1 + thread.row_warp, 32 * Tile::kDimWarps);
    else __syncwarp();
}
/// The same for a group of warps that share keys.
template <class Tile>
__device__ __forceinline__ void meet_group() {
    if constexpr (Tile::kKeyWarps > 1) __syncwarp();
    else __syncthreads();
}

/// Accumulators of the warp: S of its rows and keys, O of its rows and columns.
template <class Tile>
using Scores = RegisterTile<Tile::kWarpRows, Tile::kWarpKeys>;
template <class Tile>
using Output = RegisterTile<Tile::kWarpRows, Tile::kWarpColumns>;
template <class Tile>
using PerRow = RowValues<Tile::kWarpRows>;
template <class Tile>
using Softmax = LaggedSoftmax<Tile::kWarpRows>;

/// P as the second product's operand: in the warp's registers, unless warps share rows (then shared memory holds P).
template <class Tile>
using Weights = std::uint32_t[Tile::kRowTiles][Tile::kDimWarps == 1 ? Tile::kGroupKeys / 16 : 1][4];

}  // namespace flash_wmma::mma
