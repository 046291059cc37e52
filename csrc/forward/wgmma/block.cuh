// A block of wgmma_sm90: its tile shape, its current work, and the map of its shared memory.
#pragma once

#include <ptx_sm90.cuh>

#include "attention.h"
#include "device/constants.cuh"
#include "device/key_mask.cuh"
#include "device/pipeline.cuh"
#include "device/row_statistics.cuh"
#include "device/tile.cuh"
#include "problems.h"

namespace flash_wmma::wgmma_sm90 {

/// Shape of a block's work.
struct TileShape {
    int d;                      ///< the largest d that the instance holds
    int d_v = d;                ///< the largest d_v
    int columns = d_v;          ///< of O, of a block. For those beyond them the grid is launched again
    int consumers;              ///< warpgroups of 64 rows each
    bool turns = false;         ///< consumers ask for products in turn
    int keys;                   ///< of a K/V tile
    int stages;                 ///< K tiles in flight, and V tiles
    int q_stages = 2;           ///< Q tiles in flight
    bool bias = false;          ///< a tile of the bias comes with each K tile
    bool product_sums = false;  ///< the second product sums the weights too: V's columns are followed by some of 1/4
};

/// The same with what follows from it. Scalar is half or bf16.
template <class Scalar, TileShape kShape>
struct Tile {
    using T = Scalar;
    static constexpr int kD = kShape.d, kDv = kShape.columns, kConsumers = kShape.consumers, kBc = kShape.keys;
    static constexpr int kLargestDv = kShape.d_v;
    static constexpr int kStages = kShape.stages, kQStages = kShape.q_stages;
    static constexpr bool kTurns = kShape.turns, kBias = kShape.bias, kProductSums = kShape.product_sums;
    static constexpr int kPlans = 4;  // items that are known ahead
    // Whether the first P V sets O. With two consumers it adds to zeros, which measured faster
    static constexpr bool kSetsO = kConsumers > 2;
    // Whether a block may take a part of an item; four consumers have no registers for it
    static constexpr bool kSplits = kConsumers < 4;
    static constexpr bool kSwapsOnce = kD == 64 && kConsumers > 2;  // as lanes store O; only where it is faster
    static constexpr int kColumns = kDv + (kProductSums ? 8 : 0);   // of the second product
    static constexpr int kWarpRows = 16, kGroupRows = 64, kGroupThreads = 128;
    static constexpr int kBr = kGroupRows * kConsumers, kThreads = kGroupThreads * (kConsumers + 1);
    static constexpr int kPanels = (kD + 63) / 64, kValuePanels = (kDv + 63) / 64;  // of 64 columns
    // Registers of a thread, in multiples of 8: the consumers take those that warpgroup 0 does not need
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8;
    static constexpr int kProducerRegisters = kConsumers > 2 ? 32 : kD > 192 ? 24 : 40;
    static constexpr int kConsumerRegisters =
        (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
    static_assert(kD % 32 == 0 && kDv % 32 == 0 && kBc % 16 == 0 && kConsumers <= 4 && (!kBias || kBc == 64));
    static_assert(!kProductSums || kDv == 64);  // else the panel of quarters would be the third of each tile of V
};

/// What instances for these problems do with scores, beside their scale. A softcap that comes with packed sequences or
/// with other changes is no change of its own: kModified.
template <Problems kProblems>
struct Changes {
    static constexpr bool kAll = includes(kProblems, Problems::kChanged);  // what is known at run time
    static constexpr bool kMasks = kAll || includes(kProblems, Problems::kMasked);
    static constexpr bool kSlopes = kAll || includes(kProblems, Problems::kSloped);
    static constexpr bool kRanges = kAll || includes(kProblems, Problems::kRanged);
    static constexpr bool kBiases = includes(kProblems, Problems::kBiased);  // from shared memory
    static constexpr bool kCaps = includes(kProblems, Problems::kCapped);    // a softcap alone
    static constexpr bool kAny = kMasks || kSlopes || kBiases || kCaps;      // not the band or ranges
    static constexpr bool kFromDiagonal = kSlopes && !kAll;                  // walks from the diagonal (FromDiagonal)
    /// Dropout; always, or if known at run time. The instances for softcaps have none.
    static constexpr bool kDrops = kAll || kProblems == Problems::kPackedDropped;
};

/// What an instance tells of a warp's rows.
template <class Tile, Problems kProblems>
using Told = RowStatistics<16, includes(kProblems, Problems::kMaxima), includes(kProblems, Problems::kEntropies),
                           !Tile::kProductSums>;
template <Problems kProblems>
inline constexpr bool kTells = includes(kProblems, Problems::kMaxima) || includes(kProblems, Problems::kEntropies);

/// Whether an instance merges what it computes with attention over other keys.
template <Problems kProblems>
inline constexpr bool kMerges = kProblems == Problems::kMerged;

/// Whether an instance's blocks may take parts. Those for other than plain problems, with statistics or without, merged
/// or not, take whole items.
template <class Tile, Problems kProblems>
inline constexpr bool kTakesParts =
    Tile::kSplits && (kProblems == Problems::kPlain || kTells<kProblems> || kMerges<kProblems>);

/// Whether O leaves through shared memory, from the place of its rows' Q (device/staged_rows.cuh): O fits there, and
/// the next rows have another place for their Q. Merged and converted results may be fp32, which the map of o is not
/// for. Four consumers with ALiBi measured slower so.
template <class Tile, Problems kProblems>
inline constexpr bool kStagesO =
    Tile::kQStages == 2 && Tile::kDv == Tile::kD && !kMerges<kProblems> && !includes(kProblems, Problems::kConverted) &&
    !(kProblems == Problems::kSloped && Tile::kConsumers == 4);

/// K tiles [first, end).
struct Range {
    int first, end;
};

/// What a block works on at a time: its sequence and Q tile, and the keys it may see. All members are words
/// (uniform()).
template <class Tile>
struct Work {
    Sequence sequence;
    QTile tile;
    BandMask mask;
    int odd;      // alternates from item to item of a block
    Range tiles;  // with a key that some row of the Q tile sees. Empty only if there is no more work

    /// First row of a consumer. Later rows may see more keys, so the consumers change places for every other item.
    __device__ __forceinline__ int first_row(int consumer) const {
        return tile.first_row + Tile::kGroupRows * (odd ? Tile::kConsumers - 1 - consumer : consumer);
    }
};

/// The same with each consumer's part of it.
template <class Tile>
struct Plan {
    Work<Tile> work;
    Range seen[Tile::kConsumers];  // of work.tiles, those with a key that some row of a consumer sees
    int part;                      // among all parts of split items; kWhole: none of them
};
inline constexpr int kWhole = -1;

/// A block's plans, in shared memory.
template <class Tile>
struct PlanRing {
    Plan<Tile> plan[Tile::kPlans];
    Slot slot[Tile::kPlans];
    ptx::Barrier near_end;  // of each item: the producer has asked for nearly all of its tiles

    /// One thread, before all others come. Each of `consumer_warps` reads a plan, and so does the producer.
    __device__ __forceinline__ void prepare(unsigned consumer_warps) {
        for (Slot& s : slot) ptx::barrier_init(&s.full, 1), ptx::barrier_init(&s.empty, consumer_warps + 1);
        ptx::barrier_init(&near_end, 1);
    }
};

/// Waits until all warps of the block have come: its barriers are prepared. Each role calls it in its own place.
template <class Tile>
__device__ __forceinline__ void await_prepared() {
    ptx::named_barrier_sync(0, Tile::kThreads);
}

/// Tiles of the bias, one for each K tile and consumer.
template <class Tile, bool = Tile::kBias>
struct BiasTiles {
    struct alignas(1024) Rows {
        typename Tile::T panel[Tile::kGroupRows * 64];
    };
    Rows bias[Tile::kStages][Tile::kConsumers];
};
template <class Tile>
struct BiasTiles<Tile, false> {};

/// Columns behind those of V, for the sums of the weights.
template <class Tile, bool = Tile::kProductSums>
struct Quarters {
    alignas(1024) typename Tile::T panel[Tile::kBc * 64];
};
template <class Tile>
struct Quarters<Tile, false> {};

/// Map of a block's shared memory.
template <class Tile>
struct SharedMemory : BiasTiles<Tile> {
    using T = typename Tile::T;
    struct alignas(1024) KeyRows {
        T panel[Tile::kPanels][Tile::kBc * 64];
    };
    struct alignas(1024) QRows {
        T panel[Tile::kPanels][Tile::kGroupRows * 64];
    };
    struct alignas(1024) ValueRows {
        T panel[Tile::kValuePanels][Tile::kBc * 64];
    };
    QRows q[Tile::kQStages][Tile::kConsumers];
    KeyRows k[Tile::kStages];
    ValueRows v[Tile::kStages];
    [[no_unique_address]] Quarters<Tile> quarters;  // behind all of V: from there distances are not negative
    PlanRing<Tile> plans;
    Slot q_slot[Tile::kQStages][Tile::kConsumers], k_slot[Tile::kStages], v_slot[Tile::kStages];
    ptx::Barrier patch;  // of a tile that the producer completes itself
};

/// Where q, k and v lie, for the copy engine, the bias, if its tiles come with K's, and o, if its rows are staged.
struct Maps {
    TensorMap q, k, v, bias, o;
};

}  // namespace flash_wmma::wgmma_sm90
