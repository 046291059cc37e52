// What backward has for every query row in its workspace, and the small kernels around the products: `prepare` computes
// L and D of every row and clears dQ's buffer, `finish` brings that buffer to dQ, unless the kernel between them does
// both (DqBy), or grids of few blocks do so beside the products (backward/wgmma/prepare_beside.cuh, finish_beside.cuh).
// Bound: HBM.
//
// The rows of a head lie in groups of kRowGroup, the last one filled up with rows that take no part, so that tiles of
// queries need no test for the end. Packed sequences begin with a group of their own, numbered as in tile.cuh.
//
// If inputs are converted (convert.h), that happens first. `prepare` reads o in the caller's type, but dout as the
// products read it, so that the rows of dS sum to zero. `finish` writes the caller's type.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include <cmath>

#include "attention.h"
#include "backward_shapes.h"
#include "device/constants.cuh"
#include "device/convert.h"
#include "device/element.cuh"
#include "device/key_mask.cuh"
#include "device/shuffle.cuh"
#include "device/tile.cuh"
#include "dropout.h"

namespace flash_wmma::backward {

inline constexpr int kRowGroup = kScaleRows;

/// With dropout kernels compute dS times 1 - p, from P and dP whose weights are dropped but not scaled, and V's
/// gradient likewise: dQ, dK, dV and the bias's gradient are multiplied by this at the end.
__device__ __forceinline__ float unscaled_factor(const ForwardParams& p) {
    return p.dropout.rng_state ? kept_scale(p.dropout) : 1.f;
}

/// Of two adjacent query rows: -L in log2 units, and -D, where D = rowsum(O dO) - dL. A row that sees no key, or that
/// does not exist, has -inf and 0, so that its P is 0. With dropout D is that of dS times 1 - p (unscaled_factor).
struct alignas(16) RowPair {
    float minus_lse[2], minus_delta[2];
};

/// The same of eight adjacent rows as terms of products (backward/wgmma/query_facts.cuh): -L over terms_scale, and -D.
/// A row's first three elements add up to it, the others are 0. Nothing is infinite here: -inf is a number so large
/// that P is 0.
struct alignas(16) RowTerms {
    bf16 minus_lse[8][8], minus_delta[8][8];
};
__device__ __forceinline__ void write_term(bf16 (&to)[8], float x) {
    constexpr float kLargest = 3e38f;
    if (fabsf(x) > kLargest) x = copysignf(kLargest, x);
    union {
        bf16 parts[8];
        uint4 vector{};
    } term;
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        term.parts[i] = Element<bf16>::from(x);
        x -= __bfloat162float(term.parts[i]);
    }
    *reinterpret_cast<uint4*>(to) = term.vector;
}
__device__ __forceinline__ float read_term(const bf16 (&from)[8]) {
    const uint2 words = *reinterpret_cast<const uint2*>(from);
    const auto upper = [](std::uint32_t bits) { return __uint_as_float(bits & 0xffff0000u); };
    return upper(words.x << 16) + upper(words.x) + upper(words.y << 16);
}
/// `minus_lse` in natural units.
__device__ __forceinline__ void write_terms(RowTerms& eight, int row, float minus_lse, float minus_delta,
                                            float terms_scale) {
    write_term(eight.minus_lse[row], minus_lse / terms_scale);
    write_term(eight.minus_delta[row], minus_delta);
}
/// The scale, but not so near to 0 that L over it might not exist.
inline float terms_scale_of(const ForwardParams& p) {
    constexpr float kLeast = 1e-30f;
    return std::abs(p.scale) < kLeast ? std::copysign(kLeast, p.scale) : p.scale;
}

/// Of a group of rows of converted inputs: the exponents of q and dout, and bounds of log2 of the norms of dout's rows
/// and of log2 |D|, or of log2 of what the statistics' gradients add to dS, if that is larger (bound_terms).
struct alignas(16) QueryScales {
    float q, dout, dout_norm, delta;
};

/// Of a group of rows: how many tiles of keys took a number for their part of its dQ, and how many are done with it.
struct TurnCount {
    unsigned taken, done;
};

/// Which items of a kernel with a queue are worked on in parts (backward/wgmma/parts.cuh): those behind the first
/// `whole`, in `each` parts. prepare, or prepare_items, clears the sums and counts.
struct ItemParts {
    int whole = 0, each = 1;  // 1: none
    float* sums = nullptr;
    std::int64_t words = 0;  // of sums and counts, which follow each other
    unsigned* counts = nullptr;
};

/// Of items of a kernel whose blocks take them one after the other. prepare, or prepare_items, makes it.
struct Queue {
    unsigned taken;          // how many
    unsigned queries_taken;  // the same in a pass over own queries
    unsigned broken;         // how often packed lengths decrease: then some items are found twice and others never
    unsigned finished;       // how many parts of dQ's rows were taken, to bring them to dq (DqBy::kHeads)
};

/// How a kernel comes to dq.
enum class DqBy {
    kSums,    ///< additions to the buffer, which prepare clears and finish brings to dq
    kHeads,   ///< the same, but a head is brought to dq while others are added to (backward/wgmma/finish_beside.cuh)
    kTurns,   ///< the same buffer, which the kernel itself brings to dq (backward/wgmma/turns.cuh)
    kQueries  ///< without a buffer: a pass of its own
};

/// What the kernels are given: the params, and where in the workspace things are.
struct Problem : BackwardParams {
    RowPair* facts;                 // null if there are terms
    float* dq_rows;                 // DqFragments, only if dQ is accumulated
    QueryScales* scales = nullptr;  // one a group, only if inputs are converted
    Queue* queue = nullptr;         // only if blocks take items from a queue
    int multiprocessors = 0;        // of the device, if a kernel's blocks are persistent
    TurnCount* turns = nullptr;     // one a group, only if tiles of keys take turns at dQ
    DqBy dq_by = DqBy::kSums;
    RowTerms* terms = nullptr;  // the facts of kernels that take them so (terms_of)
    float terms_scale = 1.f;
    KeyExtent* extents = nullptr;  // of each group of rows; only with key ranges
    ItemParts parts{};
    int more_groups = 0;     // of rows that a head has in dQ's buffer beside its own, of other launches (SharedQueries)
    int ring_batches = 1;    // of a head's items, if their blocks take turns in a ring (backward/wgmma/order.cuh)
    int heads_together = 0;  // whose items come by turns, if blocks take turns under a causal mask
    // Only if products begin beside prepare (backward/wgmma/prepare_beside.cuh): how many parts of rows are prepared,
    // of all heads, and then of each stretch of rows (prepared_groups)
    unsigned* prepared = nullptr;
    // Only with DqBy::kHeads: how many items have added all of their dQ, of each head of keys; and how many blocks take
    // no more items behind one of that number or a later one
    unsigned* added = nullptr;
    int leaving_blocks = 0, leaving_item = 0;
};
/// The first group of rows of a sequence's head, in dQ's buffer and among the facts.
__device__ __forceinline__ std::int64_t first_group(const Problem& problem, const Sequence& sequence, int head) {
    const ForwardParams& p = problem.forward;
    return q_scale_index(p, sequence, head) + (std::int64_t{sequence.index} * p.heads_q + head) * problem.more_groups;
}

/// -L in natural units, and -D, of one query row (RowPair).
struct RowFacts {
    float minus_lse = -INFINITY, minus_delta = 0.f;
    bool sees_keys = false;

    RowFacts() = default;
    /// Of a row that exists, without O dO.
    __device__ __forceinline__ RowFacts(const Problem& problem, const Sequence& sequence, int head, int row) {
        const ForwardParams& p = problem.forward;
        const std::int64_t at = sequence.index * p.lse_batch + head * p.lse_head + sequence.first_q + row;
        sees_keys = p.lse[at] != -INFINITY;
        if (!sees_keys) return;
        minus_lse = -p.lse[at];
        if (problem.dlse) minus_delta = problem.dlse[at];
    }
    /// Of a row that exists, whose O dO adds up to `sum`.
    __device__ __forceinline__ RowFacts(const Problem& problem, const Sequence& sequence, int head, int row, float sum)
        : RowFacts(problem, sequence, head, row) {
        add(problem, sum);
    }
    /// O dO of the row.
    __device__ __forceinline__ void add(const Problem& problem, float sum) {
        if (!sees_keys) return;
        minus_delta -= sum;
        if (problem.forward.dropout.rng_state) minus_delta *= 1.f - problem.forward.dropout.probability;
    }
};

/// Stores the facts of a row, in the form that the problem has; `row`: its number among those of all groups.
__device__ __forceinline__ void store_facts(const Problem& problem, std::int64_t row, const RowFacts& facts) {
    if (problem.terms) {
        write_terms(problem.terms[row / 8], static_cast<int>(row % 8), facts.minus_lse, facts.minus_delta,
                    problem.terms_scale);
    } else {
        RowPair& pair = problem.facts[row / 2];
        pair.minus_lse[row % 2] = facts.minus_lse * kLog2e;
        pair.minus_delta[row % 2] = facts.minus_delta;
    }
}

/// Groups of rows of a head, where sequences are not packed.
inline __host__ __device__ std::int64_t groups_of_head(const ForwardParams& p) {
    return (p.seqlen_q + kRowGroup - 1) / kRowGroup;
}
/// Groups of rows of all heads.
inline std::int64_t row_groups(const ForwardParams& p) {
    const Sequences& s = p.sequences;
    return p.heads_q * (s.cu_seqlens_q ? packed_tiles(s.total_q, p.batch, kRowGroup) : groups_of_head(p) * p.batch);
}

/// Of rows that are prepared beside products: how many groups of a head make a stretch that has a count. All, unless
/// query heads share keys: there a block comes to the same rows of several heads before it comes to the next ones.
inline __host__ __device__ std::int64_t prepared_groups(const ForwardParams& p) {
    const std::int64_t of_head = groups_of_head(p);
    return p.heads_q == p.heads_k ? of_head : of_head % 2 ? 1 : 2;
}
/// Counts of Problem::prepared: of all heads, and of each stretch.
inline __host__ __device__ std::int64_t prepared_counts(const ForwardParams& p) {
    const std::int64_t of_head = groups_of_head(p);
    return of_head == 0 ? 1 : 1 + p.batch * p.heads_q * (of_head / prepared_groups(p));
}

/// Facts of rows 0 and 1 of a sequence's head.
__device__ __forceinline__ const RowPair* facts_of(const Problem& problem, const Sequence& sequence, int head) {
    return problem.facts + q_scale_index(problem.forward, sequence, head) * (kRowGroup / 2);
}
/// Terms of a group of rows of a sequence's head.
__device__ __forceinline__ RowTerms* terms_of(const Problem& problem, const Sequence& sequence, int head, int group) {
    constexpr int kOfGroup = kRowGroup / 8;
    return problem.terms + (first_group(problem, sequence, head) + group) * kOfGroup;
}
/// -L in log2 units and -D of a row that exists, pairs or terms.
struct OwnFacts {
    float minus_lse, minus_delta;

    __device__ __forceinline__ static OwnFacts of(const Problem& problem, const Sequence& sequence, int head, int row) {
        if (!problem.terms) {
            const RowPair& pair = facts_of(problem, sequence, head)[row / 2];
            return {pair.minus_lse[row % 2], pair.minus_delta[row % 2]};
        }
        const RowTerms& eight = terms_of(problem, sequence, head, row / kRowGroup)[row % kRowGroup / 8];
        return {read_term(eight.minus_lse[row % 8]) * (problem.terms_scale * kLog2e),
                read_term(eight.minus_delta[row % 8])};
    }
};
/// With key ranges: what the groups of rows of a sequence's head see.
__device__ __forceinline__ const KeyExtent* extents_of(const Problem& problem, const Sequence& sequence, int head) {
    return problem.extents + q_scale_index(problem.forward, sequence, head);
}
/// dQ's buffer from row `row`, a multiple of 16, of a sequence's head on.
__device__ __forceinline__ float* dq_of(const Problem& problem, const Sequence& sequence, int head, int row) {
    return problem.dq_rows +
           (q_scale_index(problem.forward, sequence, head) * kRowGroup + row) * problem.forward.head_dim;
}

/// Order of dQ's buffer: not rows but the 16x8 accumulators of a warp one after the other, so that one addition of a
/// warp goes to 512 adjacent bytes. Lane l has rows l / 4 and + 8, columns 2 (l % 4) and + 1 of each (ptx.cuh).
struct DqFragment {
    /// Where the accumulator at (row, column) is, relative to row 0.
    __device__ static std::int64_t offset(int row, int column, int head_dim) { return row * head_dim + column * 16; }

    __device__ __forceinline__ static void add(float* fragment, const float (&x)[4], int lane) {
        if constexpr (ptx::kVectorRed) ptx::red_add_4(fragment + 4 * lane, x);
        else
#pragma unroll
            for (int i = 0; i < 4; ++i) ptx::red_add(fragment + 32 * i + lane, x[i]);
    }
    /// Columns 2 pair and + 1 of row `row`, below 8, and of row + 8: 16 adjacent bytes where a lane adds them so.
    __device__ static float4 get(const float* fragment, int row, int pair) {
        const int lane = row * 4 + pair;
        if constexpr (ptx::kVectorRed) return *reinterpret_cast<const float4*>(fragment + 4 * lane);
        else return make_float4(fragment[lane], fragment[32 + lane], fragment[64 + lane], fragment[96 + lane]);
    }
};

/// A group of rows.
struct RowGroup {
    Sequence sequence;
    int head, first_row;  // not negative, and below seqlen_q, if the group is used
};
__device__ inline RowGroup row_group(const ForwardParams& p, unsigned index) {
    const Sequences& s = p.sequences;
    const auto heads = static_cast<unsigned>(p.heads_q);
    if (s.cu_seqlens_q) {
        const auto tiles = static_cast<unsigned>(packed_tiles(s.total_q, p.batch, kRowGroup));
        const PackedTile found =
            packed_tile(s.cu_seqlens_q, p.batch, s.total_q, kRowGroup, static_cast<int>(index % tiles));
        return {sequence(p, found.sequence), static_cast<int>(index / tiles), found.tile * kRowGroup};
    }
    const auto tiles = static_cast<unsigned>(groups_of_head(p));
    const unsigned slice = index / tiles;
    return {sequence(p, static_cast<int>(slice / heads)), static_cast<int>(slice % heads),
            static_cast<int>(index % tiles) * kRowGroup};
}

inline constexpr int kRowThreads = 256;

/// sum + x y. In one order for all kernels that prepare, so that D has the same bits whichever does.
__device__ __forceinline__ float add_products(float sum, const float (&x)[8], const float (&y)[8]) {
#pragma unroll
    for (int e = 0; e < 8; e += 2) sum = fmaf(x[e], y[e], fmaf(x[e + 1], y[e + 1], sum));
    return sum;
}

struct PrepareMemory {
    float sum[kRowGroup];  // of O dO of each row
    float4 warp_maximum[kRowThreads / 32 / 4];
};
struct TermsBoundMemory {
    float of_queries[kRowThreads / 32], of_keys[kRowThreads / 32];
};

/// Before a kernel that writes dq itself: dq of a group of rows that see no key is zero.
template <class T>
__device__ __forceinline__ void clear_unseen(const Problem& problem, const RowGroup& group) {
    const ForwardParams& p = problem.forward;
    const int tid = static_cast<int>(threadIdx.x);
    const int rows = min(kRowGroup, group.sequence.seqlen_q - group.first_row), vectors = p.head_dim / 8;
    if (group.first_row < 0 || rows <= 0) return;
    const BandMask mask(p.band, group.sequence.seqlen_q, group.sequence.seqlen_k);
    const KeyExtent keys = mask.extent(group.first_row, group.first_row + rows - 1);
    if (keys.some_begin < keys.some_end) return;
    for (int i = tid; i < rows * vectors; i += kRowThreads) {
        T* to = row_of<T>(problem.dq, group.sequence.index, group.head,
                          group.sequence.first_q + group.first_row + i / vectors);
#pragma unroll
        for (int v = 0; v < static_cast<int>(sizeof(T)) / 2; ++v)
            reinterpret_cast<uint4*>(to + i % vectors * 8)[v] = uint4{};
    }
}

/// Block `index` of the grid clears its share of what belongs to items in parts.
__device__ __forceinline__ void clear_parts(const Problem& problem, unsigned index) {
    for (std::int64_t i = std::int64_t{index} * kRowThreads + static_cast<int>(threadIdx.x); i < problem.parts.words;
         i += std::int64_t{gridDim.x} * kRowThreads)
        problem.parts.sums[i] = 0.f;
}
/// Of dense problems: makes the queue, clears the sums and counts of parts, and sets other counts to 0.
template <class Machine>
__global__ void __launch_bounds__(kRowThreads) prepare_items(const __grid_constant__ Problem problem) {
    const int tid = static_cast<int>(threadIdx.x);
    const ForwardParams& p = problem.forward;
    const auto clear = [&](unsigned* counts, std::int64_t count) {
        if (blockIdx.x == 0 && counts)
            for (std::int64_t i = tid; i < count; i += kRowThreads) counts[i] = 0;
    };
    if (blockIdx.x == 0 && tid == 0) *problem.queue = {};
    clear(problem.prepared, prepared_counts(p));
    clear(problem.added, p.batch * p.heads_k);
    clear_parts(problem, blockIdx.x);
}

// Blocks go from the last group of rows to the first: what prepare leaves in the L2 cache is what products begin with,
// and what products leave there is what finish begins with.
//
// prepare and finish are templates of the Machine too, so that they are compiled for the architectures of the kernel
// between them: the order of dQ's buffer depends on the architecture. T is the type of o and of the gradients.
template <class Machine, class T, bool Converted>
__global__ void __launch_bounds__(kRowThreads) prepare(const __grid_constant__ Problem problem) {
    using Dout = std::conditional_t<Converted, half, T>;
    const ForwardParams& p = problem.forward;
    const unsigned index = gridDim.x - 1 - blockIdx.x;
    const RowGroup group = row_group(p, index);
    const Sequence& sequence = group.sequence;
    const int tid = static_cast<int>(threadIdx.x);
    if (problem.queue && index == 0) {
        if (tid == 0) *problem.queue = {};
        __syncthreads();
        const Sequences& s = p.sequences;
        for (const std::int32_t* const ends : {s.cu_seqlens_q, s.cu_seqlens_k})
            for (std::int64_t i = tid; ends && i < p.batch; i += kRowThreads)
                if (ends[i] > ends[i + 1]) atomicAdd(&problem.queue->broken, 1u);
    }
    if (problem.turns && tid == 0) problem.turns[index] = {0, 0};
    constexpr int kLanes = 8, kRowsAtOnce = kRowThreads / kLanes;  // lanes of a row
    const bool exists = group.first_row >= 0 && group.first_row < sequence.seqlen_q && sequence.seqlen_k > 0;
    [[maybe_unused]] const float unit = Converted && exists ? ptx::ex2(problem.exponents.dout[index]) : 1.f;
    auto& smem = shared_memory<PrepareMemory>();
    const int rows = group.first_row < 0 ? 0 : sequence.seqlen_q - group.first_row;  // that exist
    const T* o = row_of<const T>(p.o, sequence.index, group.head, sequence.first_q + group.first_row);
    const Dout* dout = row_of<const Dout>(problem.dout, sequence.index, group.head, sequence.first_q + group.first_row);
    const int lane = tid % kLanes;
    for (int i = tid / kLanes; i < kRowGroup; i += kRowsAtOnce) {
        float sum = 0.f;
        if (i < rows)
            for (int c = 8 * lane; c < p.head_dim_v; c += 8 * kLanes) {
                float x[8], y[8];
                load_8(o + i * p.o.row + c, x);
                load_8(dout + i * problem.dout.row + c, y);
                if constexpr (Converted)
#pragma unroll
                    for (float& value : y) value *= unit;
                sum = add_products(sum, x, y);
            }
#pragma unroll
        for (int l = kLanes / 2; l; l /= 2) sum += shuffle_xor(sum, l);
        if (lane == 0) smem.sum[i] = sum;
    }
    // Behind the loads, which would otherwise wait for these writes
    if (problem.dq_by == DqBy::kTurns) clear_unseen<T>(problem, group);
    else if (problem.dq_rows) {
        auto* to = reinterpret_cast<float4*>(problem.dq_rows + std::int64_t{index} * kRowGroup * p.head_dim);
        for (int i = tid; i < kRowGroup * p.head_dim / 4; i += kRowThreads) to[i] = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    clear_parts(problem, index);
    __syncthreads();
    float largest = 0.f;  // the finite |D| of this thread's row
    if (tid < kRowGroup) {
        RowFacts facts;
        if (tid < rows) facts = {problem, sequence, group.head, group.first_row + tid, smem.sum[tid]};
        store_facts(problem, std::int64_t{index} * kRowGroup + tid, facts);
        if (Converted && isfinite(facts.minus_delta)) largest = fabsf(facts.minus_delta);
    }
    if constexpr (Converted) {
#pragma unroll
        for (int l = 16; l; l /= 2) largest = fmaxf(largest, shuffle_xor(largest, l));
        if (tid % 32 == 0) (&smem.warp_maximum[0].x)[tid / 32] = largest;
        __syncthreads();
        if (tid > 0 || !exists) return;
#pragma unroll
        for (const float4& four : smem.warp_maximum)
            largest = fmaxf(fmaxf(largest, fmaxf(four.x, four.y)), fmaxf(four.z, four.w));
        const std::int64_t at = index;
        problem.scales[at] = {p.exponents.q[at], problem.exponents.dout[at], problem.exponents.dout_norm[at],
                              log2f(largest)};
    }
}

/// Raises the bound of log2 |D| of a group to that of |dentropy| / e + |dcolumn_sum| of its queries and all keys: the
/// statistics' gradients add no more to dS, since -P ln P is at most 1 / e.
template <class Machine>
__global__ void __launch_bounds__(kRowThreads) bound_terms(const __grid_constant__ Problem problem) {
    constexpr float kLargestTerm = 0.3678795f;  // 1 / e, rounded up
    const ForwardParams& p = problem.forward;
    const RowGroup group = row_group(p, blockIdx.x);
    const Sequence& sequence = group.sequence;
    const int tid = static_cast<int>(threadIdx.x);
    if (group.first_row < 0 || group.first_row >= sequence.seqlen_q || sequence.seqlen_k <= 0) return;
    const auto largest = [&](const float* numbers, int begin, int end) {  // of those that are finite
        float found = 0.f;
        for (int i = begin + tid; numbers && i < end; i += kRowThreads)
            if (isfinite(numbers[i])) found = fmaxf(found, fabsf(numbers[i]));
        return found;
    };
    const std::int64_t head_q = sequence.index * p.lse_batch + group.head * p.lse_head + sequence.first_q;
    const std::int64_t head_k = sequence.index * problem.key_batch + group.head * problem.key_head + sequence.first_k;
    float of_queries = largest(problem.dentropy ? problem.dentropy + head_q : nullptr, group.first_row,
                               min(group.first_row + kRowGroup, sequence.seqlen_q));
    float of_keys = largest(problem.dcolumn_sum ? problem.dcolumn_sum + head_k : nullptr, 0, sequence.seqlen_k);
    auto& smem = shared_memory<TermsBoundMemory>();
#pragma unroll
    for (int l = 16; l; l /= 2) {
        of_queries = fmaxf(of_queries, shuffle_xor(of_queries, l));
        of_keys = fmaxf(of_keys, shuffle_xor(of_keys, l));
    }
    if (tid % 32 == 0) {
        smem.of_queries[tid / 32] = of_queries;
        smem.of_keys[tid / 32] = of_keys;
    }
    __syncthreads();
    if (tid > 0) return;
#pragma unroll
    for (int w = 1; w < kRowThreads / 32; ++w) {
        of_queries = fmaxf(of_queries, smem.of_queries[w]);
        of_keys = fmaxf(of_keys, smem.of_keys[w]);
    }
    float& delta = problem.scales[blockIdx.x].delta;
    delta = fmaxf(delta, log2f(fmaf(kLargestTerm, of_queries, of_keys)));
}

template <class Machine, class T>
__global__ void __launch_bounds__(kRowThreads) finish(const __grid_constant__ Problem problem) {
    const ForwardParams& p = problem.forward;
    const unsigned index = gridDim.x - 1 - blockIdx.x;
    const RowGroup group = row_group(p, index);
    const Sequence& sequence = group.sequence;
    if (group.first_row < 0) return;  // of no sequence
    const float* from = problem.dq_rows + std::int64_t{index} * kRowGroup * p.head_dim;
    const int vectors = p.head_dim / 8;
    const float scale = p.scale * unscaled_factor(p);
    // A thread brings 8 columns of two rows, so that it reads whole sectors of the buffer
    for (int i = static_cast<int>(threadIdx.x); i < kRowGroup / 2 * vectors; i += kRowThreads) {
        const int row = i / vectors / 8 * 16 + i / vectors % 8, column = i % vectors * 8;
        if (group.first_row + row >= sequence.seqlen_q) return;
        const float* fragment = from + DqFragment::offset(row / 16 * 16, column, p.head_dim);
        union {
            uint4 vectors[sizeof(T) / 2];
            typename Element<T>::Pair pairs[4];
        } out[2];
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            const float4 x = DqFragment::get(fragment, row % 16, e);
            out[0].pairs[e] = Element<T>::pair(x.x * scale, x.y * scale);
            out[1].pairs[e] = Element<T>::pair(x.z * scale, x.w * scale);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int query = group.first_row + row + 8 * half;
            if (query >= sequence.seqlen_q) break;
            T* to = row_of<T>(problem.dq, sequence.index, group.head, sequence.first_q + query);
#pragma unroll
            for (int v = 0; v < static_cast<int>(sizeof(T)) / 2; ++v)
                reinterpret_cast<uint4*>(to + column)[v] = out[half].vectors[v];
        }
    }
}

/// What the rows of each group see. A warp does it.
template <class Machine>
__global__ void __launch_bounds__(kRowThreads) find_extents(const __grid_constant__ Problem problem) {
    if (static_cast<int>(threadIdx.x) >= warp_lanes()) return;
    const RowGroup group = row_group(problem.forward, blockIdx.x);
    const int last = min(group.first_row + kRowGroup, group.sequence.seqlen_q) - 1;
    if (group.first_row < 0 || last < group.first_row) return;
    const KeyExtent keys = key_mask<true>(problem.forward, group.sequence, group.head).extent(group.first_row, last);
    if (threadIdx.x == 0) problem.extents[blockIdx.x] = keys;
}

/// Bytes of a row's facts.
constexpr std::int64_t facts_bytes(bool terms) {
    return terms ? std::int64_t{sizeof(RowTerms)} / 8 : std::int64_t{sizeof(RowPair)} / 2;
}
/// dq's memory: regions one behind the other, each with the rows of a head or of a batch entry.
struct DqMemory {
    std::int64_t bytes, regions;  // no regions: strides of another order

    explicit DqMemory(const BackwardParams& params) {
        const ForwardParams& p = params.forward;
        const Rows& dq = params.dq;
        const std::int64_t head = p.seqlen_q * p.head_dim, all = p.heads_q * head;
        const bool by_head = dq.row == p.head_dim && dq.head == head;
        bytes = p.batch * all * (p.out_dtype == DType::kFloat32 ? 4 : 2);
        regions = dq.batch != all ? 0 : by_head ? p.batch * p.heads_q : p.batch;
    }
};
/// Where the facts lie in dq's memory, if they fit. At its beginning if finish overwrites it after their last use. At
/// its end if heads become dq one after the other: those of most heads then lie where heads behind them come
/// (finish_beside.cuh), if there are enough regions. Negative: they have memory of their own.
inline std::int64_t facts_in_dq(const BackwardParams& params, DqBy by, bool terms) {
    constexpr std::int64_t kLeastRegions = 32;  // the last one has to wait for all heads
    const ForwardParams& p = params.forward;
    const bool sums = by == DqBy::kSums, heads = by == DqBy::kHeads;
    if (!(sums || heads) || p.sequences.cu_seqlens_q || params.shared.stage != BackwardStage::kAll) return -1;
    const DqMemory dq(params);
    const std::int64_t free = dq.bytes - row_groups(p) * kRowGroup * facts_bytes(terms);
    if (free < 0 || (heads && dq.regions < kLeastRegions)) return -1;
    return sums ? 0 : free;
}

/// Bytes of Problem::extents.
inline std::int64_t extents_bytes(const ForwardParams& p) {
    return p.key_ranges.data ? row_groups(p) * std::int64_t{sizeof(KeyExtent)} : 0;
}

/// Bytes of the workspace. It holds converted inputs, if there are any, then dQ's buffer, scales, extents and facts.
inline std::int64_t workspace_bytes(const BackwardParams& params, bool converted, DqBy by, bool terms = false) {
    const std::int64_t groups = row_groups(params.forward);
    const std::int64_t dq = by == DqBy::kQueries ? 0 : params.forward.head_dim * std::int64_t{sizeof(float)};
    const std::int64_t facts = facts_in_dq(params, by, terms) < 0 ? facts_bytes(terms) : 0;
    const std::int64_t bytes = groups * kRowGroup * (dq + facts) + extents_bytes(params.forward);
    return converted ? converted_bytes(params) + bytes + groups * std::int64_t{sizeof(QueryScales)} : bytes;
}
inline Problem problem_of(const BackwardParams& params, DqBy by, bool terms = false) {
    const std::int64_t groups = row_groups(params.forward);
    auto* dq_rows = static_cast<float*>(params.workspace);
    auto* scales = reinterpret_cast<QueryScales*>(
        dq_rows + (by == DqBy::kQueries ? 0 : groups * kRowGroup * params.forward.head_dim));
    auto* extents = reinterpret_cast<KeyExtent*>(scales + (params.exponents.dout ? groups : 0));
    const bool has_ranges = params.forward.key_ranges.data;
    void* facts = extents + (has_ranges ? groups : 0);
    if (const auto at = facts_in_dq(params, by, terms); at >= 0) facts = static_cast<char*>(params.dq.data) + at;
    Problem problem{params, terms ? nullptr : static_cast<RowPair*>(facts), by == DqBy::kQueries ? nullptr : dq_rows,
                    params.exponents.dout ? scales : nullptr};
    problem.dq_by = by;
    if (terms) problem.terms = static_cast<RowTerms*>(facts), problem.terms_scale = terms_scale_of(params.forward);
    if (has_ranges) problem.extents = extents;
    return problem;
}

/// Launches prepare or finish.
inline void launch_rows(void (*kernel)(Problem), const Problem& problem, Stream stream, int smem_bytes = 0) {
    const std::int64_t groups = row_groups(problem.forward);
    if (groups > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 groups of query rows");
    if (groups > 0)
        launch(kernel, {dim3(static_cast<unsigned>(groups)), dim3(kRowThreads), smem_bytes}, stream, problem);
}

/// Of kernels that compute dQ in a pass of its own if that is to be deterministic.
inline DqBy dq_by(const BackwardParams& p) { return p.deterministic ? DqBy::kQueries : DqBy::kSums; }

/// All launches of a backward of T; shape(pass) is the Shape that runs a pass. Converted: the products are of half.
template <class Machine, class T, bool Converted, class ShapeOf>
void launch_all(const BackwardParams& given, Stream stream, ShapeOf shape) {
    const BackwardParams params = Converted ? convert_to_half(given, stream) : given;
    const Problem problem = problem_of(params, dq_by(params));
    launch_rows(prepare<Machine, T, Converted>, problem, stream, int{sizeof(PrepareMemory)});
    if constexpr (Converted)
        if (problem.dentropy || problem.dcolumn_sum)
            launch_rows(bound_terms<Machine>, problem, stream, int{sizeof(TermsBoundMemory)});
    if (problem.extents) launch_rows(find_extents<Machine>, problem, stream);
    if (params.deterministic) {
        shape(Pass::kKeys).launch(problem, stream);
        shape(Pass::kQueries).launch(problem, stream);
    } else {
        shape(Pass::kFused).launch(problem, stream);
        launch_rows(finish<Machine, T>, problem, stream);
    }
}

}  // namespace flash_wmma::backward
