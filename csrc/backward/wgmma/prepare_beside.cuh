// prepare beside the products of bwd_sm90. Few blocks, with an SM each, prepare one head after the other, or rows of
// some heads in the order in which products come to them (PrepareOrder). Blocks of the products begin on the other SMs
// at once: a block waits for the rows of its item (Prepared, producer.cuh). One grid after the other, prepare would
// leave the tensor cores idle, and products HBM. Where items are few, all SMs may prepare the heads of the first ones
// before, or the first rows of these, by a grid of the same kernel.
//
// Algorithm: what prepare does (device/backward_rows.cuh), of dense problems without conversion. A warp takes a part of
// some rows at a time, and waits for no other: it clears dQ's buffer, adds up O dO in the order of prepare, and stores
// L and D.
//
// Roles: the last warp counts parts of heads, or of stretches of their rows, when they are prepared. What it counts has
// to be written before: only this warp waits for that.
//
// Bound: what an SM reads and writes at a time, some 60 GB/s.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>
#include <cstdint>

#include "backward/wgmma/block.cuh"
#include "device/backward_rows.cuh"
#include "device/element.cuh"
#include "device/pipeline.cuh"
#include "device/shuffle.cuh"
#include "device/tile.cuh"

namespace flash_wmma::backward::wgmma {

/// Of a block. With their registers, none of the products' blocks finds room beside it on an SM, nor a second one of
/// these.
inline constexpr int kPrepareThreads = 1024;
/// Warps that prepare.
inline constexpr int kPreparers = kPrepareThreads / 32 - 1;

/// Rows of a part: 32, or 16 where these are long. An SM's parts, one of each warp, are ready at about the same time.
inline __host__ __device__ int rows_of_part(const ForwardParams& p) { return p.head_dim > 64 ? 16 : 32; }
/// Parts of a head's rows, those included that fill up its last group; of all heads.
inline __host__ __device__ std::int64_t parts_of_head(const ForwardParams& p) {
    return groups_of_head(p) * (kRowGroup / rows_of_part(p));
}
inline __host__ __device__ std::int64_t parts_of_all(const ForwardParams& p) {
    return parts_of_head(p) * p.batch * p.heads_q;
}
/// Parts of a stretch of rows that has a count.
inline __host__ __device__ unsigned parts_of_stretch(const ForwardParams& p) {
    return static_cast<unsigned>(prepared_groups(p) * (kRowGroup / rows_of_part(p)));
}
/// The blocks that prepare beside products, a sixth of the SMs; 0: each of their warps would have fewer than two parts,
/// or there are too many.
inline int prepare_blocks(const ForwardParams& p, const DeviceFacts& device) {
    constexpr int kShare = 6;
    const int blocks = std::max(device.sm_count / kShare, 1);
    const std::int64_t parts = parts_of_all(p);
    return 2 * kPreparers * blocks <= parts && parts <= 0x7fffffff ? blocks : 0;
}

/// What it reads and writes for so many parts, where it clears dQ's buffer.
inline double prepared_bytes(const ForwardParams& p, std::int64_t parts) {
    return static_cast<double>(parts * rows_of_part(p)) * (2. * 2 * p.head_dim_v + 4. * p.head_dim);
}

/// The order in which parts are prepared, that in which products come to their rows: one head after the other, or some
/// heads together, a stretch of rows of each and then the next, from the last rows or from the first ones.
struct PrepareOrder {
    unsigned heads = 1;  // query heads that come together
    bool last_first = false;

    /// Which part comes as number `index`.
    __device__ __forceinline__ unsigned part(const ForwardParams& p, unsigned index) const {
        if (heads == 1) return index;
        const auto of_head = static_cast<unsigned>(parts_of_head(p)), of_stretch = parts_of_stretch(p);
        const unsigned all = static_cast<unsigned>(p.batch * p.heads_q), stretches = of_head / of_stretch;
        const unsigned first = index / (heads * of_head) * heads, together = min(heads, all - first);
        const unsigned at = index - first * of_head, nth = at / (together * of_stretch);
        const unsigned within = at - nth * together * of_stretch;
        const unsigned stretch = last_first ? stretches - 1 - nth : nth;
        return (first + within / of_stretch) * of_head + stretch * of_stretch + within % of_stretch;
    }
};

/// The counts of a head's stretches, behind which come those of the next head.
__device__ __forceinline__ const unsigned* prepared_of(const Problem& problem, int batch, int head) {
    const ForwardParams& p = problem.forward;
    return problem.prepared + 1 + (batch * p.heads_q + head) * (parts_of_head(p) / parts_of_stretch(p));
}
/// Waits until a query head's rows are prepared, from row `first` to before row `end`. One lane.
__device__ __forceinline__ void await_rows(const Problem& problem, int batch, int head, int first, int end) {
    const ForwardParams& p = problem.forward;
    const auto parts = static_cast<unsigned>(parts_of_stretch(p));
    const int rows = static_cast<int>(parts) * rows_of_part(p);
    const unsigned* const counts = prepared_of(problem, batch, head);
    for (int i = first / rows; i * rows < end; ++i)
        while (ptx::load_acquire(counts + i) != parts) {
        }
}
/// Behind await_rows of some lanes. A thread that is ordered behind this warp may then read L and D of these rows, or
/// ask for copies of them, and add to their dQ. Returns whether all heads are prepared. A whole warp.
__device__ __forceinline__ bool share_prepared(const Problem& problem) {
    const auto all = static_cast<unsigned>(parts_of_all(problem.forward));
    const unsigned prepared = __shfl_sync(kWarpMask, ptx::load_acquire(problem.prepared), 0);  // the same for all lanes
    __syncwarp();  // what one lane knows of a head, all do
    ptx::fence_proxy_async_global();
    return prepared == all;
}
/// Both for all rows of the query heads `first` to `first + heads - 1` of a batch entry.
__device__ __forceinline__ bool await_heads(const Problem& problem, int batch, int first, int heads) {
    const ForwardParams& p = problem.forward;
    const unsigned parts = parts_of_stretch(p);
    const int of_head = static_cast<int>(parts_of_head(p) / parts);
    const unsigned* const counts = prepared_of(problem, batch, first);
    for (int i = static_cast<int>(threadIdx.x) % 32; i < heads * of_head; i += 32)
        while (ptx::load_acquire(counts + i) != parts) {
        }
    return share_prepared(problem);
}
/// Waits until all rows are prepared. One lane.
__device__ __forceinline__ void await_all_rows(const Problem& problem) {
    const auto all = static_cast<unsigned>(parts_of_all(problem.forward));
    while (ptx::load_acquire(problem.prepared) != all) {
    }
}

/// Part number `part` of all heads' rows. A whole warp; T is the type of o.
template <class T>
__device__ __forceinline__ void prepare_part(const Problem& problem, unsigned part) {
    const ForwardParams& p = problem.forward;
    const int all = rows_of_part(p), of_group = kRowGroup / all;
    const RowGroup group = row_group(p, part / static_cast<unsigned>(of_group));
    const Sequence& of = group.sequence;
    const int head = group.head, first = group.first_row + static_cast<int>(part) % of_group * all;
    const int rows = of.seqlen_q - first;                          // that exist
    constexpr int kLanes = 8, kAtOnce = 32 / kLanes, kUnroll = 4;  // lanes of a row, rows of a load, loads under way
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const T* const o = row_of<const T>(p.o, of.index, head, first);
    const T* const dout = row_of<const T>(problem.dout, of.index, head, first);
    const std::int64_t row = std::int64_t{part} * all;  // among those of all groups
    RowFacts facts;
    if (lane < rows) facts = {problem, of, head, first + lane};
    if (problem.dq_rows) {
        auto* const dq = reinterpret_cast<float4*>(problem.dq_rows + row * p.head_dim);
        for (int i = lane; i < all * p.head_dim / 4; i += 32) dq[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    float of_own = 0.f;  // O dO of row number `lane`
#pragma unroll 1
    for (int i = 0; i < min(rows, all); i += kAtOnce * kUnroll) {
        float sum[kUnroll] = {};
        for (int c = 8 * (lane % kLanes); c < p.head_dim_v; c += 8 * kLanes) {
            uint4 x[kUnroll], y[kUnroll];
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                const int row = min(i + kAtOnce * u + lane / kLanes, rows - 1);
                x[u] = *reinterpret_cast<const uint4*>(o + row * p.o.row + c);
                y[u] = *reinterpret_cast<const uint4*>(dout + row * problem.dout.row + c);
            }
#pragma unroll
            for (int u = 0; u < kUnroll; ++u) {
                float a[8], b[8];
                load_8(reinterpret_cast<const T*>(&x[u]), a);
                load_8(reinterpret_cast<const T*>(&y[u]), b);
                sum[u] = add_products(sum[u], a, b);
            }
        }
#pragma unroll
        for (int u = 0; u < kUnroll; ++u) {
#pragma unroll
            for (int l = kLanes / 2; l; l /= 2) sum[u] += shuffle_xor(sum[u], l);
            const float of_row = __shfl_sync(kWarpMask, sum[u], lane % kAtOnce * kLanes);
            if (lane / kAtOnce == i / kAtOnce + u) of_own = of_row;
        }
    }
    if (lane < rows) facts.add(problem, of_own);
    if (lane < all) store_facts(problem, row + lane, facts);
}

/// Of a block: who has prepared a part, of some rounds of parts.
struct PrepareBesideMemory {
    static constexpr int kRounds = 4;
    Slot slot[kRounds];  // full when all parts of a round are prepared, empty when they are counted
};

/// Prepares the parts that come as numbers `begin` to `end - 1`.
template <class T>
__global__ void __launch_bounds__(kPrepareThreads, 1)
    prepare_beside(const __grid_constant__ Problem problem, PrepareOrder order, unsigned begin, unsigned end) {
    // In this order: the products' grid begins when all blocks have come here, does not wait, and finds the queue, the
    // counts and the sums of parts that the grids before have made
    ptx::wait_for_previous_grids();
    ptx::let_next_grid_start();
    auto& smem = shared_memory<PrepareBesideMemory>();
    const unsigned warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        prepare_slots(smem.slot, kPreparers, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    const auto of_stretch = parts_of_stretch(problem.forward);
    RingPlace<PrepareBesideMemory::kRounds> round;
    for (unsigned first = begin + blockIdx.x; first < end; first += gridDim.x * kPreparers, round.advance()) {
        Slot& slot = smem.slot[round.stage];
        if (warp < kPreparers) {
            const unsigned part = first + gridDim.x * warp;
            if (part < end) prepare_part<T>(problem, order.part(problem.forward, part));
            __syncwarp();
            if (lane > 0) continue;
            ptx::barrier_wait(&slot.empty, round.parity ^ 1);
            ptx::barrier_arrive(&slot.full);
        } else {
            ptx::barrier_wait(&slot.full, round.parity);
            const unsigned part = first + gridDim.x * lane;  // of the warp of that number
            const bool prepared = lane < kPreparers && part < end;
            if (prepared) ptx::add_release(problem.prepared + 1 + order.part(problem.forward, part) / of_stretch, 1);
            const auto count = static_cast<unsigned>(__popc(__ballot_sync(kWarpMask, prepared)));
            if (lane > 0) continue;
            ptx::add_release(problem.prepared, count);
            ptx::barrier_arrive(&slot.empty);
        }
    }
}

}  // namespace flash_wmma::backward::wgmma
