// The rows of queries around the products of bwd_sm90, in the same grid: L and D of each row and zeros in dQ's buffer,
// before the items that need them, and dQ from that buffer, behind the last of them.
//
// Warps of warpgroup 0 that have nothing else to do bring rows while the consumers multiply. They take groups of rows
// from two queues, one to prepare and one to finish. Rows are bound by the latency of their loads, a few registers a
// lane: so whole groups are fetched to L2 ahead.
//
// Units: a key/value head with the query heads that read it, of one batch entry or, packed, of all sequences. An item
// waits until all groups of its unit are prepared; a group is finished when all items of its unit have added their dQ.
// Work::prepared and Work::added count both.
//
// No deadlock, however few blocks are resident: whoever takes a group or an item is running; to prepare a group waits
// for nothing, and a warp whose next group to finish has to wait goes on to prepare others.
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
    unsigned *to_work_on, *to_prepare, *to_finish;  // the queues of items and of groups: how many were taken
    unsigned *prepared, *added;        // of each unit: groups that are prepared, items that have added their dQ
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

/// One warp.
template <class T, bool kPacked>
class RowWorker {
  public:
    __device__ __forceinline__ RowWorker(const Problem& problem, const Work& work)
        : problem_(problem), work_(work), lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void run() const {
        unsigned prepare = taken(work_.to_prepare), finish = taken(work_.to_finish);
        for (;;) {
            const bool prepares = prepare < work_.groups;
            if (finish < work_.groups && (!prepares || is_added(finish))) {
                await_added(finish);
                finish_group(finish);
                finish = taken(work_.to_finish);
            } else if (prepares) {
                prepare_group(prepare);
                prepare = taken(work_.to_prepare);
            } else {
                return;
            }
        }
    }

  private:
    static constexpr unsigned kPause = 500;  // ns

    __device__ __forceinline__ unsigned taken(unsigned* queue) const {
        return uniform(lane_ == 0 ? atomicAdd(queue, 1u) : 0u);
    }
    /// Lane 0: items of a group's unit that have not added their dQ.
    __device__ __forceinline__ unsigned missing(unsigned index) const {
        return work_.unit_items - ptx::load_acquire(work_.added + index / work_.unit_groups);
    }
    __device__ __forceinline__ bool is_added(unsigned index) const {
        return uniform(lane_ == 0 ? missing(index) : 0u) == 0;
    }
    /// Waits until all items of a group's unit have added their dQ: all lanes see it.
    __device__ __forceinline__ void await_added(unsigned index) const {
        while (lane_ == 0 && missing(index) > 0) ptx::sleep(kPause);
        __syncwarp();
    }

    __device__ __forceinline__ void prepare_group(unsigned index) const {
        const RowGroup group = group_at<kPacked>(problem_.forward, index);
        if (group.first_row >= 0 && group.first_row < group.sequence.seqlen_q) {
            fetch(group);
            clear(index);
#pragma unroll 1
            for (int first = 0; first < kRowGroup; first += 32) prepare_rows(group, index, first);
        }
        __syncwarp();
        if (lane_ == 0) ptx::add_release(work_.prepared + index / work_.unit_groups, 1);
    }

    /// Brings o and dout of a group to L2.
    __device__ __forceinline__ void fetch(const RowGroup& group) const {
        const ForwardParams& p = problem_.forward;
        const auto bytes = static_cast<unsigned>(p.head_dim_v) * unsigned{sizeof(T)};
#pragma unroll
        for (int i = 0; i < kRowGroup; i += 32) {
            const int row = group.first_row + i + lane_;
            if (row >= group.sequence.seqlen_q) continue;
            ptx::prefetch_to_l2(at<const T>(p.o, group, row), bytes);
            ptx::prefetch_to_l2(at<const T>(problem_.dout, group, row), bytes);
        }
    }

    __device__ __forceinline__ void clear(unsigned index) const {
        const int head_dim = static_cast<int>(problem_.forward.head_dim);
        auto* to = reinterpret_cast<float4*>(problem_.dq_rows + std::int64_t{index} * kRowGroup * head_dim) + lane_;
#pragma unroll 4
        for (int left = kRowGroup * head_dim / 4; left > 0; left -= 32, to += 32) *to = make_float4(0.f, 0.f, 0.f, 0.f);
    }

    /// L and D of 32 rows: four at once, eight lanes each. A lane writes those of one row.
    __device__ __forceinline__ void prepare_rows(const RowGroup& group, unsigned index, int first) const {
        constexpr int kLanes = 8, kAtOnce = 32 / kLanes;
        const ForwardParams& p = problem_.forward;
        const int column = 8 * (lane_ % kLanes), columns = static_cast<int>(p.head_dim_v);
        const int end = group.sequence.seqlen_q;
        int row = group.first_row + first + lane_ / kLanes;
        const T* o = at<const T>(p.o, group, row) + column;
        const T* dout = at<const T>(problem_.dout, group, row) + column;
        float own = 0.f;
#pragma unroll 1
        for (int i = 0; i < kLanes; ++i) {
            float sum = 0.f;
#pragma unroll 1
            for (int c = column, offset = 0; c < columns && row < end; c += 8 * kLanes, offset += 8 * kLanes) {
                const uint4 of_o = *reinterpret_cast<const uint4*>(o + offset),
                            of_dout = *reinterpret_cast<const uint4*>(dout + offset);
                const std::uint32_t xs[] = {of_o.x, of_o.y, of_o.z, of_o.w},
                                    ys[] = {of_dout.x, of_dout.y, of_dout.z, of_dout.w};
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    const float2 x = Element<T>::floats(xs[e]), y = Element<T>::floats(ys[e]);
                    sum = fmaf(x.x, y.x, fmaf(x.y, y.y, sum));
                }
            }
            sum = reduce_lanes(sum, [](float x, float y) { return x + y; }, kLanes);
            if (i == lane_ % kLanes) own = sum;
            row += kAtOnce, o += kAtOnce * p.o.row, dout += kAtOnce * problem_.dout.row;
        }
        row = first + kAtOnce * (lane_ % kLanes) + lane_ / kLanes;
        RowFacts facts;
        if (group.first_row + row < end)
            facts = {problem_, group.sequence, group.head, group.first_row + row, own};
        RowPair& pair = problem_.facts[(std::int64_t{index} * kRowGroup + row) / 2];
        pair.minus_lse[row % 2] = facts.minus_lse * kLog2e;
        pair.minus_delta[row % 2] = facts.minus_delta;
    }

    __device__ __forceinline__ void finish_group(unsigned index) const {
        const RowGroup group = group_at<kPacked>(problem_.forward, index);
        if (group.first_row < 0) return;
#pragma unroll 1
        for (int first = 0; first < kRowGroup && group.first_row + first < group.sequence.seqlen_q; first += 16)
            finish_rows(group, index, first);
    }

    /// dQ of 16 rows, 16 columns at a time. A lane reads two accumulators, 2 columns of 2 rows each, and writes 8
    /// columns of a row: a transpose among four lanes is between.
    __device__ __forceinline__ void finish_rows(const RowGroup& group, unsigned index, int first) const {
        const ForwardParams& p = problem_.forward;
        const float scale = p.scale * unscaled_factor(p);
        const int head_dim = static_cast<int>(p.head_dim), quarter = lane_ % 4;
        const float* from =
            problem_.dq_rows + (std::int64_t{index} * kRowGroup + first) * head_dim + 4 * lane_;
        const int query = group.first_row + first + lane_ / 4 + 8 * (quarter & 1);
        T* to = at<T>(problem_.dq, group, query) + 8 * (quarter >> 1);
        const bool exists = query < group.sequence.seqlen_q;
#pragma unroll 1
        for (int column = 0; column < head_dim; column += 16, from += DqFragment::offset(0, 16, 0), to += 16) {
            const bool two = column + 8 < head_dim;
            const float4 x = *reinterpret_cast<const float4*>(from);
            float4 y = make_float4(0.f, 0.f, 0.f, 0.f);
            if (two) y = *reinterpret_cast<const float4*>(from + DqFragment::offset(0, 8, 0));
            const std::uint32_t a = packed<T>(x.x * scale, x.y * scale), b = packed<T>(x.z * scale, x.w * scale),
                                c = packed<T>(y.x * scale, y.y * scale), d = packed<T>(y.z * scale, y.w * scale);
            // Even lanes keep the upper rows, odd ones the lower ones; then half of the lanes keep the first 8 columns
            const bool odd = quarter & 1, second = quarter & 2;
            const std::uint32_t ac = shuffle_xor(odd ? a : b, 1), bd = shuffle_xor(odd ? c : d, 1);
            const std::uint32_t own[] = {odd ? ac : a, odd ? b : ac, odd ? bd : c, odd ? d : bd};
            const std::uint32_t e = shuffle_xor(second ? own[0] : own[2], 2), f = shuffle_xor(second ? own[1] : own[3], 2);
            const uint4 row = second ? make_uint4(e, f, own[2], own[3]) : make_uint4(own[0], own[1], e, f);
            if (exists && (two || !second)) *reinterpret_cast<uint4*>(to) = row;
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

}  // namespace flash_wmma::backward::wgmma
