// The statistics of bwd_sm80 and bwd_sm75 (attention.h): two passes over the scores on mma.sync and ldmatrix.
//
// Algorithm, with L the forward's log-sum-exp: own queries and streamed keys, or own keys and streamed queries of one
// query head; S = Q K^T, P = exp(x - L) of the scores x, and what weight_sums.cuh makes of both.
// Every number belongs to one block, which adds it up in one order: the result is the same in every run.
//
// Who owns what: a block has four warps, a warp kWarpRows own rows. These pass through the ring's memory and stay in
// registers; the streamed rows go through a ring of two tiles. Each warp sees all streamed rows, so nothing but these
// tiles is in shared memory. A lane keeps numbers of its rows, over its columns; the quad combines them at the end.
//
// Bound: at d = 64 products, exponentials and issue slots alike, above that the products. For 128 scores an SM of sm_80
// takes 8 cycles of products at d = 64, 16 at d = 128, and 8 of exponentials. It issues four instructions a cycle, so
// that an instruction a score is a cycle. In sm_80's code a score that is visible and not changed takes 7.9 of them for
// rows and 5.3 for columns at d = 64, 9.2 and 6.6 at d = 128, the products among them (columns: as counted before
// visible weights were added where they are made).
#pragma once

#include <launch.h>
#include <shared_memory.cuh>

#include <algorithm>

#include "backward/mma/products.cuh"
#include "device/statistics_item.cuh"
#include "device/statistics_shapes.h"
#include "device/weight_sums.cuh"
#include "shape_table.h"

namespace flash_wmma::backward {

template <class Tile>
struct StatisticsMemory {
    using OwnRows = SwizzledTile<typename Tile::T, Tile::kOwn, Tile::kD>;
    using StreamRows = SwizzledTile<typename Tile::T, Tile::kStream, Tile::kD>;

    union {
        StreamRows ring[Tile::kStages];
        OwnRows passing;  // on its way to registers
    };
    float minus_lse[Tile::kStages][Tile::kStream];  // of streamed queries
};

/// The factor from products to scores in log2 units, of the groups of a query and of a key.
__device__ __forceinline__ float score_factor(const ForwardParams& p, const Sequence& sequence, int head, int head_k,
                                              int query, int key) {
    const float factor = p.scale * kLog2e;
    if (!p.exponents.q) return factor;
    return factor * ptx::ex2(p.exponents.q[q_scale_index(p, sequence, head) + query / kScaleRows] +
                             p.exponents.k[k_scale_index(p, sequence, head_k) + key / kScaleRows]);
}

// spills: sm_80: the passes of d = 256 keep up to eleven words, the same in all tiles, in local memory.
template <class Tile, bool kOwnsKeys>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    statistics_mma(const __grid_constant__ Problem problem) {
    using T = typename Tile::T;
    constexpr int kWarpRows = Tile::kWarpRows, kStep = Tile::kStep, kStream = Tile::kStream;
    static_assert(Tile::kStreamWarps == 1 && Tile::kStages == 2 && Tile::kFirstInRegisters);
    static_assert(kScaleRows % kWarpRows == 0 && kStream <= Tile::kThreads);
    const ForwardParams& p = problem.forward;
    auto& smem = shared_memory<StatisticsMemory<Tile>>();
    const Thread<Tile> thread(static_cast<int>(threadIdx.x));

    const auto item = StatisticsItem<Tile, kOwnsKeys>::of(problem);
    if (item.tiles == 0) return;  // the ops have written what is told of nothing
    const Sequence& sequence = item.own.sequence;
    const auto mask = query_mask<true>(problem, sequence, item.head);

    const int rows = item.own_length() - item.own.first_row;
    const int own_row = item.own.first_row + thread.warp_row();
    const Rows &of_own = kOwnsKeys ? p.k : p.q, &of_stream = kOwnsKeys ? p.q : p.k;

    OwnOperand<Tile, true> own_rows;
    typename Tile::Machine::template Copy<Tile, Tile::kOwn> own_copy(
        row_of<const T>(of_own, sequence.index, item.own_head(), item.first_own() + item.own.first_row), of_own.row,
        p.head_dim);
    own_copy.start(smem.passing, of_own.row, rows);
    own_copy.finish(smem.passing);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    own_rows.load(smem.passing, thread);
    __syncthreads();  // the ring takes its place

    typename Tile::Machine::template Copy<Tile, kStream> copy(
        row_of<const T>(of_stream, sequence.index, item.streamed_head(), item.first_streamed() + item.last),
        of_stream.row, p.head_dim);
    [[maybe_unused]] float next_lse;
    const auto start = [&](int slot, int row) {  // the copies walk from the last tile to the first by themselves
        copy.start(smem.ring[slot], of_stream.row, item.streamed_length() - row);
        ptx::cp_async_commit();
        if constexpr (kOwnsKeys)
            if (threadIdx.x < kStream) next_lse = lse_of(p, sequence, item.head, row + static_cast<int>(threadIdx.x));
    };
    const auto finish = [&](int slot) {
        copy.finish(smem.ring[slot]);
        if constexpr (kOwnsKeys)
            if (threadIdx.x < kStream) smem.minus_lse[slot][threadIdx.x] = minus_lse_of(next_lse);
    };

    RowValues<kWarpRows> minus_lse;
    if constexpr (!kOwnsKeys)
        minus_lse.each(
            [&](int i, float& x) { x = minus_lse_of(lse_of(p, sequence, item.head, own_row + 8 * i + thread.row())); });
    WeightSums<kWarpRows, kOwnsKeys, /*kModified=*/true> sums(problem, sequence, item.head);
    start(0, item.last);
    finish(0);
    const int first = item.first();
    for (int slot = 0, row = item.last; row >= first; row -= kStream, slot ^= 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // this tile has landed, the one before has been used
        if (row > first) start(slot ^ 1, row - kStream);
        // A warp whose rows do not exist takes the last row's place: groups behind that row have no exponent, no extent
        const int exists = min(own_row, item.own_length() - 1);
        const float factor =
            score_factor(p, sequence, item.head, item.own.head_k, kOwnsKeys ? row : exists, kOwnsKeys ? exists : row);
#pragma unroll 1
        for (int step = 0; step < kStream; step += kStep) {
            const ScorePlace<Tile, kOwnsKeys> place{exists, row + step, thread};
            const auto lse = [&](int i, int column) {
                return kOwnsKeys ? smem.minus_lse[slot][step + thread.column() + column] : minus_lse[i];
            };
            Scores<Tile> s;
            s.clear();
            multiply_rows<Tile>(s, own_rows, smem.passing, smem.ring[slot], step, thread);
            sums.add(s, factor, lse, place, mask);
        }
        if (row > first) finish(slot ^ 1);
    }

    sums.store(own_row, rows - thread.warp_row(), thread);
}

template <class Tile, bool kOwnsKeys>
void launch_statistics_pass(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const dim3 grid = statistics_grid<Tile, kOwnsKeys>(p);
    if (grid.x > 0)
        launch(statistics_mma<Tile, kOwnsKeys>, {grid, dim3(Tile::kThreads), sizeof(StatisticsMemory<Tile>)}, stream,
               problem);
}

/// The shapes of a table of TileShapes, each for any problem, converted inputs too.
template <class Machine, class T, const auto& kRows>
std::vector<StatisticsShape> statistics_shapes() {
    return of_rows<kRows>([](auto i) {
        using Tile = backward::Tile<Machine, T, kRows[i]>;
        constexpr int kLeast = std::min(Machine::kSharedMemory, 99 * 1024);  // that a block has on any device
        static_assert(sizeof(StatisticsMemory<Tile>) <= kLeast);
        return StatisticsShape{Element<T>::kDType, Tile::kD, launch_statistics_pass<Tile, false>,
                               launch_statistics_pass<Tile, true>};
    });
}

}  // namespace flash_wmma::backward
