// Items of wgmma_sm90 that several blocks share: each block sees a part of the keys, and a second grid adds up the
// parts.
//
//     m = max m_i,   l = sum l_i 2^(m_i - m),   O = sum O_i 2^(m_i - m)         and, as ever, O / l and the LSE.
//
// A part is stored as the lanes of its warps hold it, for each warp's 16 rows: one vector of all 32 lanes after the
// other. In the second grid a warp has 16 rows and 32 columns.
//
// Bound: L2. Parts take at most two rounds of blocks' O, 36 MB on an H200.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>

#include "forward/wgmma/block.cuh"
#include "forward/wgmma/output.cuh"
#include "forward/wgmma/plan.cuh"

namespace flash_wmma::wgmma_sm90 {

/// Where a lane's words of a part lie, for the 16 rows of an item that begin with `row`.
template <class Tile, Problems kProblems>
struct PartRows {
    static constexpr int kVectors = Tile::kDv / 8;  // of O; behind them one of m and l, and one of statistics
    static constexpr int kAllVectors = kVectors + 1 + kTells<kProblems>;
    float4* first;

    __device__ __forceinline__ PartRows(const ForwardParams& p, int part, int row, int lane) {
        const int slice = part * (Tile::kBr / Tile::kWarpRows) + row / Tile::kWarpRows;
        // Ints hold the parts of two rounds of blocks. With a sum of 64 bits ptxas keeps the lane as two registers,
        // which consumers do not have
        first = static_cast<float4*>(p.workspace) + (slice * (kAllVectors * 32) + lane);
    }
    __device__ __forceinline__ float4& o(int i) const { return first[i * 32]; }
    __device__ __forceinline__ float4& facts() const { return first[kVectors * 32]; }
    __device__ __forceinline__ float4& statistics() const { return first[(kVectors + 1) * 32]; }
};

/// A warp stores its part of its rows.
template <class Tile, Problems kProblems>
__device__ __forceinline__ void give(const PartRows<Tile, kProblems>& to, const RegisterTile<16, Tile::kDv>& o,
                                     const LaggedSoftmax<16>& softmax, const Told<Tile, kProblems>& told) {
#pragma unroll
    for (int i = 0; i < to.kVectors; ++i)
        to.o(i) = make_float4(o.block[0][i][0], o.block[0][i][1], o.block[0][i][2], o.block[0][i][3]);
    to.facts() = make_float4(softmax.m[0], softmax.m[1], softmax.l[0], softmax.l[1]);
    if constexpr (kTells<kProblems>) to.statistics() = told.packed();
}

constexpr int kMergeWarps = 4, kMergeColumns = 32;  // of a block, of a warp

/// Blocks go over columns, then over rows of all split items.
template <class Tile, Problems kProblems>
__global__ void __launch_bounds__(32 * kMergeWarps)
    merge(const __grid_constant__ ForwardParams p, const __grid_constant__ Schedule schedule) {
    ptx::let_next_grid_start();
    ptx::wait_for_previous_grids();
    const Split& split = schedule.split;
    const int warp = uniform(static_cast<int>(blockIdx.x * kMergeWarps + threadIdx.x / 32));
    const int column = warp % (Tile::kDv / kMergeColumns) * kMergeColumns;
    const int slice = warp / (Tile::kDv / kMergeColumns) * Tile::kWarpRows;  // of the rows of all split items
    const int item = slice / Tile::kBr, row = slice % Tile::kBr;
    if (item >= split.items) return;
    const Assignment a = schedule.dense<Tile::kBr>(p, split.whole + item);
    const BandMask mask(p.band, a.sequence.seqlen_q, a.sequence.seqlen_k);
    const Range tiles = visible_tiles<Tile>(a.sequence, mask, a.tile.first_row, Tile::kBr);
    const int lane = static_cast<int>(threadIdx.x) % 32, first_part = item * split.parts,
              parts = schedule.parts_of(tiles);
    if (parts == 1 || a.tile.first_row + row >= a.sequence.seqlen_q) return;  // the block itself stored it; or no rows

    using Part = PartRows<Tile, kProblems>;
    constexpr int kVectors = kMergeColumns / 8;
    LaggedSoftmax<16> softmax;
    [[maybe_unused]] Told<Tile, kProblems> told;
    auto &m = softmax.m, &l = softmax.l;
    RegisterTile<16, kMergeColumns> o;
    o.clear();
    for (int i = 0; i < parts; ++i) {
        const float4 facts = Part(p, first_part + i, row, lane).facts();
        m[0] = fmaxf(m[0], facts.x), m[1] = fmaxf(m[1], facts.y);
    }
    for (int i = 0; i < parts; ++i) {
        const Part part(p, first_part + i, row, lane);
        const float4 facts = part.facts();
        const float part_m[2] = {facts.x, facts.y}, part_l[2] = {facts.z, facts.w};
        if constexpr (kTells<kProblems>) told.add(part.statistics(), part_m, part_l, m);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            if (part_m[h] == -INFINITY) {  // no visible key: O may be 0 * NaN of v. If all scores are NaN, l is NaN
                l[h] += part_l[h];
                continue;
            }
            const float weight = ptx::ex2(part_m[h] - m[h]);
            l[h] = fmaf(part_l[h], weight, l[h]);
#pragma unroll
            for (int j = 0; j < kVectors; ++j) {
                const float4& x = part.o(column / 8 + j);
                o.at(h, 8 * j) = fmaf(h ? x.z : x.x, weight, o.at(h, 8 * j));
                o.at(h, 8 * j + 1) = fmaf(h ? x.w : x.y, weight, o.at(h, 8 * j + 1));
            }
        }
    }
    store_rows<typename Tile::T, false, kMerges<kProblems>>(p, a.sequence, a.tile.head, a.tile.first_row + row, column,
                                                            o, softmax, lane);
    if (column == 0) told.store(p, a.sequence, a.tile.head, a.tile.first_row + row, softmax, lane);
}

template <class Tile, Problems kProblems>
void launch_merge(const ForwardParams& p, const Schedule& schedule, Stream stream) {
    const std::int64_t warps =
        std::int64_t{schedule.split.items} * (Tile::kBr / Tile::kWarpRows) * (Tile::kDv / kMergeColumns);
    LaunchConfig config{dim3(static_cast<unsigned>((warps + kMergeWarps - 1) / kMergeWarps)), dim3(32 * kMergeWarps)};
    config.programmatic = true;
    launch(merge<Tile, kProblems>, config, stream, p, schedule);
}

}  // namespace flash_wmma::wgmma_sm90
