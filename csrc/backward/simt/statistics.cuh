// The statistics of bwd_simt (attention.h): two passes over the scores in fp32 on CUDA cores, register-tiled like simt.
//
// Algorithm, with L the forward's log-sum-exp:
//     S = Q K^T;  x = the score of S;  ln P = x - L
//     own queries, streamed keys:   max_j x,  -sum_j P ln P,  sum_j P w_j
//     own keys, streamed queries:   sum_i P, of one query head after the other.
// Every number belongs to one block, which adds it up in one order: the result is the same in every run.
//
// Who owns what: as in bwd_simt.cuh. A lane keeps the numbers of its rows in registers; the lanes that share a row
// combine them at the end.
//
// Bound: shared memory, as simt's S: a 16-byte load serves 8 or 16 FMAs.
#pragma once

#include <shared_memory.cuh>

#include "backward/simt/rows.cuh"
#include "device/score_mod.cuh"

namespace flash_wmma::backward {

template <class Tile>
struct StatisticsMemory {
    alignas(16) simt::PaddedRows<Tile, Tile::kOwn> own;
    simt::PaddedRows<Tile, Tile::kStream> stream;
};

/// Combines the values of each own query and the lanes that share it, and stores them, unless `numbers` is null.
template <class Tile, class Combine>
__device__ __forceinline__ void store_for_queries(float* numbers, const ForwardParams& p, const OwnedTile& own,
                                                  const float (&values)[Tile::kRows], Combine combine,
                                                  const simt::Thread<Tile>& thread) {
    if (!numbers) return;
    const Sequence& s = own.sequence;
    numbers += s.index * p.lse_batch + own.head * p.lse_head + s.first_q + own.first_row;
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i) {
        const float all = simt::over_row<Tile>(values[i], combine);
        if (thread.column == 0 && own.first_row + thread.tile_row(i) < s.seqlen_q) numbers[thread.tile_row(i)] = all;
    }
}

template <class Tile, bool kOwnsKeys>
__global__ void __launch_bounds__(Tile::kThreads, resident(Tile::kBlocksPerSm, Tile::kThreads))
    statistics_simt(const __grid_constant__ Problem problem) {
    constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys;
    const ForwardParams& p = problem.forward;
    const Statistics& asked = problem.statistics;
    auto& smem = shared_memory<StatisticsMemory<Tile>>();
    const simt::Thread<Tile> thread;
    const OwnedTile own = kOwnsKeys ? owned_keys<Tile::kOwn, true>(p) : owned_queries<Tile::kOwn, true>(p);
    if (own.rows <= 0) return;
    const Sequence& sequence = own.sequence;
    auto mask = query_mask<true>(problem, sequence, own.head);
    const StreamedRows streamed = streamed_rows<Tile, kOwnsKeys>(p, own, mask);
    const int begin = streamed.begin, end = streamed.end, heads = streamed.heads, end_row = streamed.end_row;
    if (heads == 0) return;  // the ops have written what is told of nothing
    const int own_row = (kOwnsKeys ? sequence.first_k : sequence.first_q) + own.first_row;
    copy_rows<Tile>(smem.own, kOwnsKeys ? p.k : p.q, sequence, kOwnsKeys ? own.head_k : own.head, own_row,
                    end_row - own.first_row, p.head_dim);

    const bool modified = ScoreMod<true>::active(p);
    for (int h = 0; h < heads; ++h) {
        const int head = own.head + h;  // query head
        if constexpr (kOwnsKeys) mask.take(head);
        const std::int64_t first_number = sequence.index * p.lse_batch + head * p.lse_head + sequence.first_q;
        const float* const key_weights = asked.key_weights ? asked.key_weights + sequence.index * problem.key_batch +
                                                                 head * problem.key_head + sequence.first_k
                                                           : nullptr;
        const auto lse = [&](int query) { return query < sequence.seqlen_q ? p.lse[first_number + query] : -INFINITY; };
        float minus_lse[kOwnsKeys ? kKeys : kRows];  // of streamed or own queries
        if constexpr (!kOwnsKeys)
#pragma unroll
            for (int i = 0; i < kRows; ++i) minus_lse[i] = -lse(own.first_row + thread.tile_row(i));
        float maximum[kRows], entropy[kRows], sum[kRows];  // sum: of P, or of P w
#pragma unroll
        for (int i = 0; i < kRows; ++i) maximum[i] = -INFINITY, entropy[i] = sum[i] = 0.f;

        for (int row = begin / Tile::kStream * Tile::kStream; row < end; row += Tile::kStream) {
            const int left = (kOwnsKeys ? sequence.seqlen_q : sequence.seqlen_k) - row;
            __syncthreads();  // the tile before has been used
            copy_rows<Tile>(smem.stream, kOwnsKeys ? p.q : p.k, sequence, kOwnsKeys ? head : own.head_k,
                            (kOwnsKeys ? sequence.first_q : sequence.first_k) + row, left, p.head_dim);
            ptx::cp_async_commit();
            if constexpr (kOwnsKeys)
#pragma unroll
                for (int n = 0; n < kKeys; ++n) minus_lse[n] = -lse(row + thread.key(n));
            ptx::cp_async_wait<0>();
            __syncthreads();

            const auto query = [&](int i, int n) {
                return kOwnsKeys ? row + thread.key(n) : own.first_row + thread.tile_row(i);
            };
            const auto key = [&](int i, int n) {
                return kOwnsKeys ? own.first_row + thread.tile_row(i) : row + thread.key(n);
            };
            const auto each = [&](auto f) {
#pragma unroll
                for (int n = 0; n < kKeys; ++n)
#pragma unroll
                    for (int i = 0; i < kRows; ++i) f(i, n);
            };
            // The score x, in natural units
            simt::Scores<Tile> x, slopes;
            simt::multiply_rows<Tile>(x, smem.own, smem.stream, p.head_dim, thread);
            if (modified) {
                const ScoreMod<true> mod(p, sequence, QTile{sequence.index, head, own.head_k, 0});
                mod.apply_each(
                    each, [&](int i, int n) -> float& { return x[i][n]; },
                    [&](int i, int n) -> float& { return slopes[i][n]; }, p.scale* kLog2e, query, key);
                each([&](int i, int n) { x[i][n] *= kLn2; });
            } else {
                each([&](int i, int n) { x[i][n] *= p.scale; });
            }
            const int last_own = own.first_row + Tile::kOwn - 1, last_stream = row + Tile::kStream - 1;
            const bool all_visible = kOwnsKeys ? mask.all_visible(row, last_stream, own.first_row, last_own)
                                               : mask.all_visible(own.first_row, last_own, row, last_stream);
            each([&](int i, int n) {
                const int q = query(i, n), k = key(i, n);
                if (!all_visible && (k < mask.begin(q) || k >= mask.end(q))) return;
                const float of_row = minus_lse[kOwnsKeys ? n : i];
                const float log_weight = of_row == INFINITY ? -INFINITY : x[i][n] + of_row;
                const float weight = ptx::ex2(kLog2e * log_weight);
                if (kOwnsKeys) {
                    sum[i] += weight;
                    return;
                }
                maximum[i] = ptx::max_nan(x[i][n], maximum[i]);
                if (weight == 0.f) return;
                entropy[i] = fmaf(-weight, log_weight, entropy[i]);
                if (key_weights) sum[i] = fmaf(weight, key_weights[k], sum[i]);
            });
        }

        if constexpr (kOwnsKeys) {
            store_for_keys<Tile>(asked.column_sum, problem, own, head, sum, 1.f, thread);
        } else {
            const auto add = [](float a, float b) { return a + b; };
            const auto most = [](float a, float b) { return ptx::max_nan(a, b); };
            store_for_queries<Tile>(p.row_max, p, own, maximum, most, thread);
            store_for_queries<Tile>(p.entropy, p, own, entropy, add, thread);
            store_for_queries<Tile>(asked.row_sum, p, own, sum, add, thread);
        }
    }
}

/// The shapes: per head dim one, of at most 54 KiB of shared memory.
inline constexpr simt::TileShape kStatisticsRows[] = {
    {.d = 64, .lane_columns = 8, .keys = 32, .blocks_per_sm = 2},
    {.d = 128, .lane_columns = 8, .keys = 32, .blocks_per_sm = 2},
    {.d = 256, .warps = 2, .lane_columns = 8, .keys = 16, .blocks_per_sm = 2},
    {.d = 512, .warps = 1, .lane_columns = 8, .keys = 8, .blocks_per_sm = 2},
};

}  // namespace flash_wmma::backward
