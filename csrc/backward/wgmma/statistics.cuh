// The statistics of bwd_sm90 (attention.h): two passes over the scores by tensor copies (TMA) and wgmma.
//
// Algorithm, with L the forward's log-sum-exp: own queries and streamed keys, S = Q K^T, or own keys and streamed
// queries of one query head, S^T = K Q^T; then P = exp(x - L) of the scores x, and what weight_sums.cuh makes of both.
// Every number belongs to one block, which adds it up in one order: the result is the same in every run.
//
// Who owns what: a block has 128 own rows, 64 for each of two warpgroups, 16 for each of their warps. A warpgroup
// multiplies its rows with a streamed tile, both from shared memory, and adds up what it finds in registers
// (weight_sums.cuh). While one does so the products of the others can run: up to d = 128 two blocks share an SM. The
// streamed tiles go through a ring. A thread of the first warpgroup asks for their copies, and this warpgroup's threads
// bring -L of a tile's queries. A warp that only copies would leave the others 96 registers a thread instead of 128.
//
// Bound: for 128 scores an SM is busy with exponentials for 8 cycles and with products for 4 at d = 64, for 8 at d = 128,
// for 16 at d = 256. Maxima alone take no exponentials.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/products.cuh"
#include "device/pipeline.cuh"
#include "device/statistics_item.cuh"
#include "device/statistics_shapes.h"
#include "device/weight_sums.cuh"
#include "shape_table.h"

namespace flash_wmma::backward::wgmma {

/// Shape of a block's work.
struct StatisticsTileShape {
    int d;              ///< the largest that the instance holds
    int stages;         ///< streamed tiles in flight
    int blocks_per_sm;  ///< resident blocks to keep registers for
};

/// The same with what follows from it. Scalar is half or bf16.
template <class Scalar, StatisticsTileShape kShape>
struct StatisticsTile {
    using T = Scalar;
    static constexpr int kD = kShape.d, kStages = kShape.stages, kBlocksPerSm = kShape.blocks_per_sm;
    static constexpr int kWarpRows = 16, kGroupRows = 64, kGroupThreads = 128;
    static constexpr int kWarps = 8, kThreads = 32 * kWarps, kOwn = kWarpRows * kWarps;
    static constexpr int kStream = 128, kStep = kStream;  // a warp takes all of a tile at a time
    static constexpr int kPanels = kD / 64;               // of 64 columns
    static_assert(kD % 64 == 0 && kStream == kGroupThreads && kStream % kRowGroup == 0 && kRowGroup % kWarpRows == 0);

    /// A lane's place in a block of 16x8 accumulators.
    struct Place {
        int lane = static_cast<int>(threadIdx.x) % 32;
        __device__ __forceinline__ int row() const { return lane / 4; }
        __device__ __forceinline__ int column() const { return lane % 4 * 2; }
    };
};

/// Map of a block's shared memory: panels of 64 columns with the 128-byte swizzle.
template <class Tile>
struct StatisticsMemory {
    template <int kRows>
    struct alignas(1024) Rows {
        typename Tile::T panel[Tile::kPanels][kRows * 64];
    };
    Rows<Tile::kOwn> own;
    Rows<Tile::kStream> stream[Tile::kStages];
    // Of streamed queries. One place more: who has multiplied a tile, and gives its place back, may still read its L, but
    // no longer that of the tile before
    float minus_lse[Tile::kStages + 1][Tile::kStream];
    ptx::Barrier own_full;
    Slot slot[Tile::kStages];
};

/// Where the own and the streamed rows lie, for the copy engine.
struct StatisticsMaps {
    TensorMap own, stream;
};

/// Where scores of a tile of streamed rows lie.
template <class Tile, bool kOwnsKeys>
struct TilePlace : ScorePlace<Tile, kOwnsKeys> {
    bool whole;  // all streamed rows exist

    template <class Mask>
    __device__ __forceinline__ bool all_visible(const Mask& mask) const {
        if constexpr (kOwnsKeys) {
            bool all = whole;
#pragma unroll
            for (int i = 0; i < Tile::kStream; i += kRowGroup)  // a mask with ranges knows a group of queries at a time
                all = all && mask.all_visible(this->stream + i, this->stream + i + kRowGroup - 1, this->own,
                                              this->own + Tile::kWarpRows - 1);
            return all;
        } else {
            return ScorePlace<Tile, kOwnsKeys>::all_visible(mask);
        }
    }
};

/// The copies of a block's rows: the own ones, and a tile of streamed ones at each call.
template <class Tile, bool kOwnsKeys>
class StatisticsCopies {
    using Item = StatisticsItem<Tile, kOwnsKeys>;

  public:
    __device__ __forceinline__ StatisticsCopies(const Problem& problem, const StatisticsMaps& maps,
                                                StatisticsMemory<Tile>& shared, const Item& item)
        : problem_(problem),
          maps_(maps),
          smem_(shared),
          item_(item),
          batch_(batch_in_maps<Problems::kPacked>(problem, item.own.sequence.index)),
          row_(item.last) {
        if (threadIdx.x == 0)
            load(smem_.own, maps_.own, &smem_.own_full, item.first_own() + item.own.first_row, item.own_head());
        look_at_queries();
    }

    /// Asks for the next tile, if there is one. Called by every warp.
    __device__ __forceinline__ void next() {
        if (row_ < item_.first) return;
        Slot& slot = smem_.slot[at_.stage];
        if (threadIdx.x < (kOwnsKeys ? Tile::kGroupThreads : 32)) ptx::barrier_wait(&slot.empty, at_.parity ^ 1);
        if (threadIdx.x == 0)
            load(smem_.stream[at_.stage], maps_.stream, &slot.full, item_.first_streamed() + row_,
                 item_.streamed_head());
        if (kOwnsKeys && threadIdx.x < Tile::kGroupThreads) {
            smem_.minus_lse[lse_at_.stage][threadIdx.x] = next_lse_;
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&slot.full);
        }
        row_ -= Tile::kStream;
        look_at_queries();
        at_.advance();
        lse_at_.advance();
    }

    /// Arrivals that fill a place of the ring.
    static constexpr unsigned kArrivals = 1 + (kOwnsKeys ? Tile::kGroupThreads / 32 : 0);

  private:
    /// Loads -L of the next tile's queries.
    __device__ __forceinline__ void look_at_queries() {
        if (kOwnsKeys && threadIdx.x < Tile::kGroupThreads && row_ >= item_.first)
            next_lse_ =
                minus_lse_of(problem_.forward, item_.own.sequence, item_.head, row_ + static_cast<int>(threadIdx.x));
    }
    template <class Rows>
    __device__ __forceinline__ void load(Rows& rows, const TensorMap& map, ptx::Barrier* full, int row,
                                         int head) const {
        ptx::barrier_arrive_expect(full, sizeof(rows));
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i)
            ptx::tensor_load(rows.panel[i], &map, full, {64 * i, row, head, batch_});
    }

    const Problem& problem_;
    const StatisticsMaps& maps_;
    StatisticsMemory<Tile>& smem_;
    const Item& item_;
    const int batch_;
    int row_;  // first of the next tile
    RingPlace<Tile::kStages> at_;
    RingPlace<Tile::kStages + 1> lse_at_;
    float next_lse_ = 0.f;
};

// spills: sm_90a: up to ten words, the same in all tiles, which the loop reads mostly where there are key ranges or biases.
template <class Tile, bool kOwnsKeys>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    statistics(const __grid_constant__ Problem problem, const __grid_constant__ StatisticsMaps maps) {
    using Copies = StatisticsCopies<Tile, kOwnsKeys>;
    const ForwardParams& p = problem.forward;
    auto& smem = shared_memory<StatisticsMemory<Tile>>();
    const auto item = StatisticsItem<Tile, kOwnsKeys>::of(problem);
    if (item.last < item.first) return;  // the ops have written what is told of nothing
    if (threadIdx.x == 0) {
        ptx::barrier_init(&smem.own_full, 1);
        prepare_slots(smem.slot, Copies::kArrivals, Tile::kWarps);
        ptx::barrier_init_fence();
    }
    __syncthreads();

    Copies copies(problem, maps, smem, item);
#pragma unroll
    for (int i = 1; i < Tile::kStages; ++i) copies.next();

    const int warp = uniform(static_cast<int>(threadIdx.x) / 32);
    const typename Tile::Place lane;
    const Sequence& sequence = item.own.sequence;
    const int own_row = item.own.first_row + Tile::kWarpRows * warp;
    const int own_rows = item.own_length(), streamed_rows = item.streamed_length();
    RowValues<Tile::kWarpRows> minus_lse;
    if constexpr (!kOwnsKeys)
        minus_lse.each(
            [&](int i, float& x) { x = minus_lse_of(p, sequence, item.head, own_row + 8 * i + lane.row()); });
    const auto mask = query_mask<true>(problem, sequence, item.head);
    WeightSums<Tile::kWarpRows, kOwnsKeys> sums(problem, sequence, item.head);
    ptx::barrier_wait(&smem.own_full, 0);
    RingPlace<Tile::kStages> at;
    RingPlace<Tile::kStages + 1> lse_at;
    for (int row = item.last; row >= item.first; row -= Tile::kStream, at.advance(), lse_at.advance()) {
        copies.next();
        Slot& slot = smem.slot[at.stage];
        ptx::barrier_wait(&slot.full, at.parity);
        RegisterTile<Tile::kWarpRows, Tile::kStream> s;
        ptx::wgmma_fence();
        issue_scores<typename Tile::T, Tile::kD>(s, smem.own, Tile::kGroupRows * (warp / 4), smem.stream[at.stage]);
        ptx::wgmma_wait<0>();
        __syncwarp();
        if (lane.lane == 0) ptx::barrier_arrive(&slot.empty);
        // A warp whose rows do not exist takes the last row's place: groups behind that row have no extent
        const TilePlace<Tile, kOwnsKeys> place{{min(own_row, own_rows - 1), row, lane},
                                               row + Tile::kStream <= streamed_rows};
        if constexpr (kOwnsKeys) clear_behind(s, place, sequence.seqlen_q);
        const float* const lse = smem.minus_lse[lse_at.stage] + lane.column();
        sums.add(
            s, p.scale * kLog2e, [&](int i, int column) { return kOwnsKeys ? lse[column] : minus_lse[i]; }, place,
            mask);
    }
    sums.store(own_row, own_rows - own_row, lane);
}

template <class Tile, bool kOwnsKeys>
void launch_statistics_pass(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const dim3 grid = statistics_grid<Tile, kOwnsKeys>(p);
    if (grid.x == 0) return;
    const Sequences& s = p.sequences;
    const auto map = [&](bool keys, int rows) {
        const std::int64_t count =
            keys ? (s.cu_seqlens_k ? s.total_k : p.seqlen_k) : (s.cu_seqlens_q ? s.total_q : p.seqlen_q);
        return map_rows(p, keys ? p.k : p.q, p.head_dim, count, keys ? p.heads_k : p.heads_q, rows);
    };
    const StatisticsMaps maps{map(kOwnsKeys, Tile::kOwn), map(!kOwnsKeys, Tile::kStream)};
    launch(statistics<Tile, kOwnsKeys>, {grid, dim3(Tile::kThreads), sizeof(StatisticsMemory<Tile>)}, stream, problem,
           maps);
}

/// The shapes that ship, each for any problem.
inline constexpr StatisticsTileShape kStatisticsShapes[] = {
    {.d = 64, .stages = 3, .blocks_per_sm = 2},
    {.d = 128, .stages = 2, .blocks_per_sm = 2},
    {.d = 256, .stages = 2, .blocks_per_sm = 1},
};
template <class T>
std::vector<StatisticsShape> statistics_shapes() {
    return of_rows<kStatisticsShapes>([](auto i) {
        using Tile = StatisticsTile<T, kStatisticsShapes[i]>;
        static_assert(sizeof(StatisticsMemory<Tile>) <= (Tile::kBlocksPerSm > 1 ? 113 : 227) * 1024);
        return StatisticsShape{Element<T>::kDType, Tile::kD, launch_statistics_pass<Tile, false>,
                               launch_statistics_pass<Tile, true>};
    });
}

}  // namespace flash_wmma::backward::wgmma
