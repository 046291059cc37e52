// dQ of bwd_sm90's heads becomes dq head by head, on SMs that have no more items, while products of the last heads go
// on: a grid behind the products, whose blocks begin as SMs become free. With one grid after the other, the tensor
// cores would wait for the last items, and then for HBM.
//
// Algorithm: what finish does (device/backward_rows.cuh), of dense problems. The products count items, each for its
// head of keys, when all of its dQ has been added (count_items). Parts of 16 rows of dQ's buffer have an order, that of
// the heads. A block waits until all rows are prepared. Then it takes a part for each of its warps, waits until their
// heads have the counts of all items, and brings the parts to dq.
//
// Roles: a lane of the last warp for each of the others takes that warp's parts, waits for their heads, and asks for
// copies to shared memory, some parts ahead. Memory answers late while the products add to dQ, so much has to be under
// way.
//
// Bound: what is under way of an SM at a time, and at the end HBM.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <cstdint>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/prepare_beside.cuh"
#include "backward/wgmma/store_rows.cuh"
#include "device/backward_rows.cuh"
#include "device/constants.cuh"
#include "device/pipeline.cuh"
#include "device/register_tile.cuh"
#include "device/tile.cuh"

namespace flash_wmma::backward::wgmma {

/// Warps that bring parts to dq, and the threads of a block with the warp that takes them.
inline constexpr int kFinishers = 9, kFinishThreads = 32 * (kFinishers + 1);
/// Rows of a part: those of a warp's accumulators. The largest head dim.
inline constexpr int kFinishedRows = 16, kFinishedColumns = 128;
/// Parts of the rows of a head of keys; of all heads.
inline __host__ __device__ std::int64_t finished_parts_of_head(const ForwardParams& p) {
    return groups_of_head(p) * (kRowGroup / kFinishedRows) * (p.heads_q / p.heads_k);
}
inline __host__ __device__ std::int64_t finished_parts(const ForwardParams& p) {
    return finished_parts_of_head(p) * p.batch * p.heads_k;
}

/// What it reads and writes.
inline double finished_bytes(const ForwardParams& p) {
    return static_cast<double>(finished_parts(p)) * kFinishedRows * static_cast<double>(p.head_dim) * (4 + 2);
}

/// Where L and D lie in dq's memory: at its end (facts_in_dq). A region of dq is written when all heads are complete
/// whose L and D lie there. These are earlier heads, except in the last regions.
struct FactsInDq {
    std::int64_t begin = 0, of_head = 0;  // bytes before the first ones; of a query head's
    std::int64_t region = 0;              // bytes of a region of dq; 0: they do not lie in dq's memory
    int heads = 1;                        // query heads of a region

    static FactsInDq of(const BackwardParams& params, bool terms) {
        const ForwardParams& p = params.forward;
        const std::int64_t begin = facts_in_dq(params, DqBy::kHeads, terms);
        if (begin < 0) return {};
        const DqMemory dq(params);
        const std::int64_t all_heads = p.batch * p.heads_q;
        return {begin, (dq.bytes - begin) / all_heads, dq.bytes / dq.regions, static_cast<int>(all_heads / dq.regions)};
    }
    /// The query heads, of all, whose L and D lie in the region of one of them.
    struct Heads {
        unsigned first, end;
    };
    __device__ __forceinline__ Heads where(unsigned head) const {
        const std::int64_t from = head / static_cast<unsigned>(heads) * region - begin, to = from + region;
        if (region == 0 || to <= 0) return {0, 0};
        return {static_cast<unsigned>(max(from, std::int64_t{0}) / of_head),
                static_cast<unsigned>((to + of_head - 1) / of_head)};
    }
};

/// The products' part: counts the block's items in Problem::added, each when all of its dQ has been added: with the
/// first tile of the next one, or at the end. A whole warp, one lane of which works.
///
/// The place of an item with tiles in the plan is given back when the one before it is counted, that of an item without
/// tiles at once. So consumers come to what this lane waits for, whatever follows. Items with tiles have kAddedBarriers
/// barriers by turns. Consumers come to the next phase of a barrier only with an item that was published behind places
/// which this lane gave back after it had seen the phase before.
template <class Tile>
__device__ __forceinline__ void count_items(const Problem& problem, SharedMemory<Tile>& smem) {
    const auto count = [&](int head) { ptx::add_release(problem.added + head, 1); };
    if (threadIdx.x % 32 == 0) {
        unsigned items = 0;  // with tiles
        int head_before = 0;
        const auto count_before = [&] {
            if (items == 0) return;
            static_assert(Tile::kPlans <= kAddedBarriers && Tile::kD <= kFinishedColumns);
            const unsigned before = items - 1;
            ptx::barrier_wait(&smem.added[before % kAddedBarriers], before / kAddedBarriers % 2);
            count(head_before);
        };
        for (RingPlace<Tile::kPlans> plan;; plan.advance()) {
            Slot& slot = smem.plan_slot[plan.stage];
            ptx::barrier_wait(&slot.full, plan.parity);
            const Item& item = smem.plan[plan.stage];
            const int tiles = item.tiles;
            if (tiles < 0) break;
            const int head = item.sequence.index * static_cast<int>(problem.forward.heads_k) + item.keys.head;
            if (tiles > 0) {
                count_before();
                head_before = head, ++items;
            } else {
                count(head);
            }
            ptx::barrier_arrive(&slot.empty);
        }
        count_before();
    }
    __syncwarp();  // or the other lanes go on to wait for the grid of prepare, and the working one with them
}

/// Map of a block's shared memory. It leaves no room on an SM for one of the products' blocks.
struct FinishMemory {
    static constexpr int kStages = 3;  // parts of a warp that are taken
    struct alignas(128) Rows {
        float dq[kFinishedRows * kFinishedColumns];  // as in the buffer
    };
    Rows rows[kStages][kFinishers];
    unsigned part[kStages][kFinishers];
    Slot slot[kStages][kFinishers];
};

/// Takes parts of all heads, one for each of the other warps at a time, and asks for copies when their heads are
/// complete. `item_keys`: keys of an item. A whole warp.
__device__ __forceinline__ void take_parts(const Problem& problem, FinishMemory& smem, int item_keys,
                                           const FactsInDq& facts) {
    const ForwardParams& p = problem.forward;
    const auto lane = threadIdx.x % 32;
    const auto items = static_cast<unsigned>((p.seqlen_k + item_keys - 1) / item_keys);  // of a head
    const auto of_head = static_cast<unsigned>(finished_parts_of_head(p)),
               all = static_cast<unsigned>(finished_parts(p));
    const auto words = static_cast<unsigned>(kFinishedRows * p.head_dim);  // of a part
    const auto group = static_cast<unsigned>(p.heads_q / p.heads_k), of_query_head = of_head / group;
    const auto await = [&](unsigned head) {
        while (ptx::load_acquire(problem.added + head) != items) {
        }
    };
    await_all_rows(problem);  // also those that no item comes to: their dQ is cleared, and their L and D lie in dq
    unsigned first = 0, complete = 0;  // up to which head those were awaited whose facts lie in dq
    for (RingPlace<FinishMemory::kStages> place; first < all; place.advance()) {
        first = uniform(lane == 0 ? atomicAdd(&problem.queue->finished, unsigned{kFinishers}) : 0u);
        if (first < all) {  // all lanes together, since facts of many heads may lie in a region
            const unsigned last = min(first + kFinishers, all) - 1;
            const unsigned begin = facts.where(first / of_query_head).first / group,
                           end = (facts.where(last / of_query_head).end + group - 1) / group;
            for (unsigned head = max(complete, begin) + lane; head < end; head += 32) await(head);
            complete = max(complete, end);
            __syncwarp();  // what one lane knows of a head, all do
        }
        if (lane >= kFinishers) continue;
        const unsigned part = first + lane;
        if (part < all) await(part / of_head);
        Slot& slot = smem.slot[place.stage][lane];
        ptx::barrier_wait(&slot.empty, place.parity ^ 1);
        smem.part[place.stage][lane] = part;
        if (part < all) {
            ptx::fence_proxy_async_global();  // the copy reads what this lane knows was added
            ptx::barrier_arrive_expect(&slot.full, words * unsigned{sizeof(float)});
            ptx::bulk_load(smem.rows[place.stage][lane].dq, problem.dq_rows + std::int64_t{part} * words,
                           words * unsigned{sizeof(float)}, &slot.full);
        } else {
            ptx::barrier_arrive(&slot.full);
        }
    }
}

/// Brings part number `part` of all heads' rows to dq. A whole warp; T is the type of dq.
template <class T>
__device__ __forceinline__ void finish_part(const Problem& problem, unsigned part, const FinishMemory::Rows& rows) {
    const ForwardParams& p = problem.forward;
    constexpr int kColumns = 64;  // at a time
    constexpr unsigned kOfGroup = kRowGroup / kFinishedRows;
    const RowGroup group = row_group(p, part / kOfGroup);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int first = group.first_row + static_cast<int>(part % kOfGroup) * kFinishedRows;
    const int left = group.sequence.seqlen_q - first, head_dim = static_cast<int>(p.head_dim);
    T* const to = row_of<T>(problem.dq, group.sequence.index, group.head, first + lane / 4);
    const float factor = p.scale * unscaled_factor(p);
#pragma unroll 1
    for (int c = 0; c < head_dim; c += kColumns) {
        RegisterTile<16, kColumns> dq;
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {  // the last columns again, where there are no more
            const auto at = DqFragment::offset(0, min(c + 8 * j, head_dim - 8), head_dim);
            const float4 x = DqFragment::get(rows.dq + at, lane / 4, lane % 4);
            float (&four)[4] = dq.block[0][j];
            four[0] = x.x, four[1] = x.y, four[2] = x.z, four[3] = x.w;
        }
        store_rows(to + c, problem.dq.row, left - lane / 4, head_dim - c, dq, factor, lane);
    }
}

// The queue and the counts are there: the grid that made them was complete before the products began.
template <class T>
__global__ void __launch_bounds__(kFinishThreads, 1)
    finish_beside(const __grid_constant__ Problem problem, int item_keys, const __grid_constant__ FactsInDq facts) {
    auto& smem = shared_memory<FinishMemory>();
    const unsigned warp = threadIdx.x / 32;
    if (threadIdx.x == 0) {
        for (auto& slots : smem.slot) prepare_slots(slots, 1, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (warp == kFinishers) {
        take_parts(problem, smem, item_keys, facts);
    } else {
        const auto all = static_cast<unsigned>(finished_parts(problem.forward));
        for (RingPlace<FinishMemory::kStages> place;; place.advance()) {
            Slot& slot = smem.slot[place.stage][warp];
            ptx::barrier_wait(&slot.full, place.parity);
            const unsigned part = smem.part[place.stage][warp];
            if (part >= all) break;
            finish_part<T>(problem, part, smem.rows[place.stage][warp]);
            __syncwarp();
            if (threadIdx.x % 32 == 0) ptx::barrier_arrive(&slot.empty);
        }
    }
    ptx::wait_for_previous_grids();  // so that who waits for this grid waits for the products
}

}  // namespace flash_wmma::backward::wgmma
