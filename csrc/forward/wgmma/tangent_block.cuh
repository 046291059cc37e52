// A block of the kernel for tangents (tangent.cuh): its tile shape and the map of its shared memory.
#pragma once

#include <ptx_sm90.cuh>

#include "device/pipeline.cuh"
#include "forward/wgmma/block.cuh"
#include "forward/wgmma/tangents.h"

namespace flash_wmma::wgmma_sm90 {

/// Shape of a block's work.
struct TangentTileShape {
    int d;  ///< the largest d and d_v that the instance holds
    int keys, stages;
    int consumers = 2;  ///< warpgroups of 64 rows each
    int q_stages = 1;
    Moves moves{};
};

/// The same with what follows from it, in the names of Tile. Scalar is half or bf16.
template <class Scalar, TangentTileShape kShape>
struct TangentTile {
    using T = Scalar;
    static constexpr int kD = kShape.d, kBc = kShape.keys, kConsumers = kShape.consumers;
    static constexpr int kStages = kShape.stages, kQStages = kShape.q_stages, kPlans = 4;
    static constexpr bool kSplits = false;
    static constexpr Moves kMoves = kShape.moves;
    static_assert(kMoves.q || kMoves.k);
    static constexpr int kWarpRows = 16, kGroupRows = 64, kGroupThreads = 128;
    static constexpr int kBr = kGroupRows * kConsumers, kThreads = kGroupThreads * (kConsumers + 1);
    static constexpr int kPanels = kD / 64;  // of 64 columns
    // Registers of a thread, in multiples of 8: the consumers take those that warpgroup 0 does not need
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8, kProducerRegisters = kD > 64 ? 24 : 40;
    static constexpr int kConsumerRegisters =
        (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
    static_assert(kD % 64 == 0 && kBc % 16 == 0);
};

/// Rows of a tensor, and of its tangent if it moves: panels of 64 columns with the 128-byte swizzle. They come
/// together.
template <class T, int kPanels, int kRows, bool kMove>
struct alignas(1024) RowsWithTangent {
    T panel[kPanels][kRows * 64], moved[kPanels][kRows * 64];
};
template <class T, int kPanels, int kRows>
struct alignas(1024) RowsWithTangent<T, kPanels, kRows, false> {
    T panel[kPanels][kRows * 64];
};

/// Map of a block's shared memory.
template <class Tile>
struct TangentMemory {
    template <int kRows, bool kMove>
    using RowsOf = RowsWithTangent<typename Tile::T, Tile::kPanels, kRows, kMove>;
    using QRows = RowsOf<Tile::kGroupRows, Tile::kMoves.q>;
    QRows q[Tile::kQStages][Tile::kConsumers];
    RowsOf<Tile::kBc, Tile::kMoves.k> k[Tile::kStages];
    RowsOf<Tile::kBc, Tile::kMoves.v> v[Tile::kStages];
    struct alignas(16) Votes {
        int of_warp[4];
    };
    Votes votes[Tile::kConsumers][2];
    PlanRing<Tile> plans;
    Slot q_slot[Tile::kQStages][Tile::kConsumers], k_slot[Tile::kStages], v_slot[Tile::kStages];
};

/// Where a tensor and its tangent lie, for the copy engine; a tensor that does not move has none.
struct MapPair {
    TensorMap rows, moved;
};
struct TangentMaps {
    MapPair q, k, v;
};

}  // namespace flash_wmma::wgmma_sm90
