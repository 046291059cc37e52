// The rows of queries around the products of bwd_sm90, in the same grid: L and D of each row and zeros in dQ's buffer,
// before the items that need them, and dQ from that buffer, behind the last of them.
//
// Rows are bound by HBM, items by the tensor cores, so some blocks bring rows while the others multiply. Groups of rows
// come from queues. First all blocks prepare the rows of the first items. Then the first few blocks prepare the others,
// and finish what can be finished; when there is nothing left to do for some time they take items too. A small grid
// behind this one finishes the rest. How a block brings rows: row_stages.cuh.
//
// Units: a key/value head with the query heads that read it, of one batch entry or, packed, of all sequences. An item
// waits until all groups of its unit are prepared; a group is finished when all items of its unit have added their dQ.
// Work::prepared and Work::added count both.
//
// No deadlock, however few blocks are resident: whoever has taken a group or an item is running. To prepare a group
// waits for nothing; an item waits for groups, and who waits for long has some prepared (Producer::await_rows); nobody
// waits for a group that can't be finished yet.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_grid.cuh>
#include <ptx_sm90.cuh>

#include "device/backward_rows.cuh"
#include "device/element.cuh"
#include "device/pipeline.cuh"
#include "device/quad.cuh"
#include "device/shuffle.cuh"

namespace flash_wmma::backward::wgmma {

/// What a grid does. The counters are 0 before it.
struct Work {
    unsigned items, groups;            // tiles of keys, and groups of rows of queries
    unsigned unit_items, unit_groups;  // those of a unit
    unsigned first_groups;             // that all blocks prepare first
    unsigned row_blocks;               // that bring rows before they take items
    unsigned *to_work_on, *to_begin, *to_prepare;  // the queues: how often blocks took some
    unsigned *prepared, *added;  // of each unit: groups that are prepared, items that have added their dQ
    unsigned* finished;          // of each row block: before which of its runs of groups it stopped
};

/// A group of rows by its number.
template <bool kPacked>
__device__ __forceinline__ RowGroup group_at(const ForwardParams& p, unsigned index) {
    const Sequences& s = p.sequences;
    if (kPacked && s.cu_seqlens_q) {
        const auto tiles = static_cast<unsigned>(packed_tiles(s.total_q, p.batch, kRowGroup));
        const PackedTile found =
            packed_tile(s.cu_seqlens_q, p.batch, s.total_q, kRowGroup, static_cast<int>(index % tiles));
        return {sequence(p, found.sequence), static_cast<int>(index / tiles), found.tile * kRowGroup};
    }
    const auto tiles = static_cast<unsigned>((p.seqlen_q + kRowGroup - 1) / kRowGroup);
    const unsigned slice = index / tiles, heads = static_cast<unsigned>(p.heads_q);
    return {{static_cast<int>(slice / heads), 0, 0, static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k)},
            static_cast<int>(slice % heads),
            static_cast<int>(index % tiles) * kRowGroup};
}

/// Of eight elements each.
template <class T>
__device__ __forceinline__ float product(const uint4& a, const uint4& b) {
    const std::uint32_t xs[] = {a.x, a.y, a.z, a.w}, ys[] = {b.x, b.y, b.z, b.w};
    float sum = 0.f;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float2 x = Element<T>::floats(xs[e]), y = Element<T>::floats(ys[e]);
        sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
    }
    return sum;
}

/// Of a lane's part of two accumulators, times `scale`: lane 0 of four has 8 columns of a row of the first, lane 1
/// those of the row 8 further on, lanes 2 and 3 the same of the second.
template <class T>
__device__ __forceinline__ uint4 transposed(const float4& x, const float4& y, float scale) {
    const std::uint32_t a = packed<T>(x.x * scale, x.y * scale), b = packed<T>(x.z * scale, x.w * scale),
                        c = packed<T>(y.x * scale, y.y * scale), d = packed<T>(y.z * scale, y.w * scale);
    const bool odd = threadIdx.x & 1, second = threadIdx.x & 2;
    const std::uint32_t ab = shuffle_xor(odd ? a : b, 1), cd = shuffle_xor(odd ? c : d, 1);
    const std::uint32_t own[] = {odd ? ab : a, odd ? b : ab, odd ? cd : c, odd ? d : cd};
    const std::uint32_t e = shuffle_xor(second ? own[0] : own[2], 2), f = shuffle_xor(second ? own[1] : own[3], 2);
    return second ? make_uint4(e, f, own[2], own[3]) : make_uint4(own[0], own[1], e, f);
}

/// The next number of a queue. Called by whole warps.
__device__ __forceinline__ unsigned taken(unsigned* queue) {
    return uniform(threadIdx.x % 32 == 0 ? atomicAdd(queue, 1u) : 0u);
}
/// Groups that a block takes at once: of the first ones, that all blocks prepare, and of the others.
inline constexpr unsigned kFirstTogether = 2, kTogether = 8;
struct Groups {
    unsigned first, end;
};
__device__ __forceinline__ Groups taken_to_begin(const Work& work) {
    const unsigned first = kFirstTogether * taken(work.to_begin);
    return {first, min(first + kFirstTogether, work.first_groups)};
}
__device__ __forceinline__ Groups taken_to_prepare(const Work& work) {
    const unsigned first = work.first_groups + kTogether * taken(work.to_prepare);
    return {first, min(first + kTogether, work.groups)};
}

/// One warp. kInFlight: loads of 16 bytes a lane that it has under way, at least 2.
template <class T, bool kPacked, int kInFlight>
class RowWorker {
  public:
    __device__ __forceinline__ RowWorker(const Problem& problem, const Work& work)
        : problem_(problem), work_(work), lane_(static_cast<int>(threadIdx.x) % 32) {}

    /// Prepares some groups, if there are any left.
    __device__ __forceinline__ void help() const {
        const Groups groups = taken_to_prepare(work_);
        for (unsigned i = groups.first; i < groups.end; ++i) prepare(i);
    }
    /// Finishes a group.
    __device__ __forceinline__ void finish(unsigned index) const {
        const RowGroup group = group_at<kPacked>(problem_.forward, index);
        if (group.first_row < 0) return;
#pragma unroll 1
        for (int first = 0; first < kRowGroup && group.first_row + first < group.sequence.seqlen_q; first += 16)
            finish_rows(group, index, first);
    }

  private:
    __device__ __forceinline__ void prepare(unsigned index) const {
        const RowGroup group = group_at<kPacked>(problem_.forward, index);
        if (group.first_row >= 0 && group.first_row < group.sequence.seqlen_q) {
            clear(index);
#pragma unroll 1
            for (int first = 0; first < kRowGroup; first += 32) prepare_rows(group, index, first);
        }
        __syncwarp();
        if (lane_ == 0) ptx::add_release(work_.prepared + index / work_.unit_groups, 1);
    }

    __device__ __forceinline__ void clear(unsigned index) const {
        const int head_dim = static_cast<int>(problem_.forward.head_dim);
        auto* to = reinterpret_cast<float4*>(problem_.dq_rows + std::int64_t{index} * kRowGroup * head_dim) + lane_;
#pragma unroll 4
        for (int left = kRowGroup * head_dim / 4; left > 0; left -= 32, to += 32) *to = make_float4(0.f, 0.f, 0.f, 0.f);
    }

    /// L and D of 32 rows: four at once, eight lanes each. A lane writes those of one row.
    __device__ __forceinline__ void prepare_rows(const RowGroup& group, unsigned index, int first) const {
        constexpr int kLanes = 8, kAtOnce = 32 / kLanes, kSteps = kInFlight / 2 < kLanes ? kInFlight / 2 : kLanes;
        const ForwardParams& p = problem_.forward;
        const int column = 8 * (lane_ % kLanes), columns = static_cast<int>(p.head_dim_v);
        const int end = group.sequence.seqlen_q;
        int row = group.first_row + first + lane_ / kLanes;
        const T* o = at<const T>(p.o, group, row) + column;
        const T* dout = at<const T>(problem_.dout, group, row) + column;
        float own = 0.f;
#pragma unroll 1
        for (int i = 0; i < kLanes; i += kSteps) {
            float sums[kSteps] = {};
#pragma unroll 1
            for (int c = column, offset = 0; c < columns; c += 8 * kLanes, offset += 8 * kLanes) {
                uint4 xs[kSteps] = {}, ys[kSteps] = {};
#pragma unroll
                for (int j = 0; j < kSteps; ++j) {
                    if (row + kAtOnce * j >= end) continue;
                    xs[j] = *reinterpret_cast<const uint4*>(o + offset + kAtOnce * j * p.o.row);
                    ys[j] = *reinterpret_cast<const uint4*>(dout + offset + kAtOnce * j * problem_.dout.row);
                }
#pragma unroll
                for (int j = 0; j < kSteps; ++j) sums[j] += product<T>(xs[j], ys[j]);
            }
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                const float sum = reduce_lanes(sums[j], [](float x, float y) { return x + y; }, kLanes);
                if (i + j == lane_ % kLanes) own = sum;
            }
            row += kAtOnce * kSteps, o += kAtOnce * kSteps * p.o.row, dout += kAtOnce * kSteps * problem_.dout.row;
        }
        row = first + kAtOnce * (lane_ % kLanes) + lane_ / kLanes;
        RowFacts facts;
        if (group.first_row + row < end)
            facts = {problem_, group.sequence, group.head, group.first_row + row, own};
        RowPair& pair = problem_.facts[(std::int64_t{index} * kRowGroup + row) / 2];
        pair.minus_lse[row % 2] = facts.minus_lse * kLog2e;
        pair.minus_delta[row % 2] = facts.minus_delta;
    }
    /// dQ of 16 rows, 16 columns a step. A lane reads two accumulators, 2 columns of 2 rows each, and writes 8 columns
    /// of a row.
    __device__ __forceinline__ void finish_rows(const RowGroup& group, unsigned index, int first) const {
        constexpr int kSteps = kInFlight / 2;
        const ForwardParams& p = problem_.forward;
        const float scale = p.scale * unscaled_factor(p);
        const int head_dim = static_cast<int>(p.head_dim), quarter = lane_ % 4;
        const float* from =
            problem_.dq_rows + (std::int64_t{index} * kRowGroup + first) * head_dim + 4 * lane_;
        const int query = group.first_row + first + lane_ / 4 + 8 * (quarter & 1);
        T* to = at<T>(problem_.dq, group, query) + 8 * (quarter >> 1);
        const bool exists = query < group.sequence.seqlen_q;
#pragma unroll 1
        for (int column = 0; column < head_dim; column += 16 * kSteps) {
            float4 xs[2 * kSteps] = {};
#pragma unroll
            for (int j = 0; j < 2 * kSteps; ++j)
                if (column + 8 * j < head_dim)
                    xs[j] = *reinterpret_cast<const float4*>(from + DqFragment::offset(0, column + 8 * j, 0));
#pragma unroll
            for (int j = 0; j < kSteps; ++j) {
                const uint4 eight = transposed<T>(xs[2 * j], xs[2 * j + 1], scale);
                if (exists && column + 16 * j + 8 * (quarter >> 1) < head_dim)
                    *reinterpret_cast<uint4*>(to + column + 16 * j) = eight;
            }
        }
    }
    /// Row `row` of a group's sequence in its head.
    template <class X>
    __device__ __forceinline__ static X* at(const Rows& rows, const RowGroup& group, int row) {
        return row_of<X>(rows, group.sequence.index, group.head, group.sequence.first_q + row);
    }

    const Problem& problem_;
    const Work& work_;
    const int lane_;
};

inline constexpr int kManyInFlight = 16, kFewInFlight = 2;  // of a warp with many registers, of one with few

/// A warp of warpgroup 0: prepares a group whenever the producer asks.
template <class T, bool kPacked, class Memory>
__device__ __forceinline__ void help(const Problem& problem, const Work& work, Memory& smem) {
    for (RingPlace<1> place;; place.advance()) {
        ptx::barrier_wait(&smem.help_slot.full, place.parity);
        if (smem.no_more_help) return;
        RowWorker<T, kPacked, kFewInFlight>(problem, work).help();
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&smem.help_slot.empty);
    }
}

/// The groups that row blocks finish: runs of kTogether, by turns.
__device__ __forceinline__ bool is_finished(const Work& work, unsigned index) {
    const unsigned run = index / kTogether;
    return work.row_blocks > 0 && run < work.finished[run % work.row_blocks];
}
/// Finishes the groups that no row block has finished, one a warp.
template <class T, bool kPacked>
__global__ void __launch_bounds__(kRowThreads)
    finish_rest(const __grid_constant__ Problem problem, const __grid_constant__ Work work) {
    const unsigned index = (blockIdx.x * kRowThreads + threadIdx.x) / 32;
    if (index < work.groups && !is_finished(work, index))
        RowWorker<T, kPacked, kManyInFlight>(problem, work).finish(index);
}

}  // namespace flash_wmma::backward::wgmma
