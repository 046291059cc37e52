// The kernel of bwd_simt: FlashAttention-2 backward in fp32 on CUDA cores, register-tiled like simt.
//
// Algorithm (FlashAttention-2, Algorithm 2), with L the forward's log-sum-exp and D = rowsum(O dO) - dL:
//     S = Q K^T;  P = exp2(S * scale - L);  dP = dO V^T;  dS = P (dP - D)
//     dV = P^T dO;  dK = scale * dS^T Q;  dQ = scale * dS K.
// A block owns the rows of a tile of one side and streams over the tiles of the other side, in one of three passes:
//     Pass::kFused    owns keys, streams queries: dK and dV stay in registers, dQ is added to global memory by atomics;
//     Pass::kKeys     like kFused, without dQ;
//     Pass::kQueries  owns queries, streams keys: dQ stays in registers.
// kKeys and kQueries together need no atomics: the result is the same in every run.
// In any pass "first" is the operand of S (K for keys, Q for queries), "second" that of dP (V for keys, dO for
// queries). The block computes S with its own rows as rows: S^T if it owns keys.
//
// Who owns what: a warp owns kLaneRows * kRows of the block's rows; its lanes form a grid as in simt.cuh. S, dP and the
// gradients of its rows are in registers. P and dS go through shared memory within the warp, one after the other in the
// same place. For dQ, dS is written a second time, by rows, and the threads of the block share the tile of dQ.
//
// Bound: shared memory. With four rows per lane a 16-byte load serves 11 FMAs; in simt's 8 x 8 it serves 16. Two
// gradients, S and dP leave no registers for more rows.
#pragma once

#include <shared_memory.cuh>

#include <algorithm>

#include "backward/simt/rows.cuh"
#include "device/dropout.cuh"
#include "device/nothing.cuh"
#include "device/score_mod.cuh"
#include "device/weight_terms.cuh"

namespace flash_wmma::backward {

/// Map of a block's shared memory.
template <class Tile, Pass kPass>
struct SimtMemory {
    struct Rows {
        alignas(16) float by_row[Tile::kOwn][Tile::kStream + 4];
    };
    alignas(16) simt::PaddedRows<Tile, Tile::kOwn> own_first, own_second;
    simt::PaddedRows<Tile, Tile::kStream> first, second;
    simt::Weights<Tile> weights[Tile::kWarps];  // P, then dS
    std::conditional_t<kPass == Pass::kFused, Rows, Nothing> ds;
};

/// Adds dQ of the streamed queries, from all own keys, to rows [0, rows) from `dq` on.
template <class Tile, class Memory>
__device__ __forceinline__ void add_to_dq(float* dq, std::int64_t pitch, int rows, int head_dim, float scale,
                                          const Memory& smem) {
    constexpr int kRowVectors = Tile::kColumns / 4, kRows = Tile::kQueryRows;
    for (int unit = static_cast<int>(threadIdx.x); unit < Tile::kStream / kRows * kRowVectors; unit += Tile::kThreads) {
        const int column = Tile::first_column() + unit % kRowVectors * 4, row = unit / kRowVectors * kRows;
        if (column >= head_dim || row >= rows) continue;
        float4 sum[kRows];
#pragma unroll
        for (float4& x : sum) x = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll 4
        for (int i = 0; i < Tile::kOwn; ++i) {
            const float4 key = simt::load_4(&smem.own_first[i][column]);
#pragma unroll
            for (int j = 0; j < kRows; j += 4) {
                const float4 ds = simt::load_4(&smem.ds.by_row[i][row + j]);
#pragma unroll
                for (int e = 0; e < 4; ++e) simt::add_product(sum[j + e], simt::element(ds, e), key);
            }
        }
#pragma unroll
        for (int j = 0; j < kRows; ++j)
            if (row + j < rows) {
                const float x[4] = {sum[j].x * scale, sum[j].y * scale, sum[j].z * scale, sum[j].w * scale};
                ptx::red_add_4(dq + (row + j) * pitch + column, x);
            }
    }
}

/// Writes a gradient, times `factor`, to the own rows [0, rows).
template <class Tile>
__device__ __forceinline__ void store(float* out, std::int64_t pitch, int rows, int columns,
                                      const simt::Output<Tile>& gradient, float factor,
                                      const simt::Thread<Tile>& thread) {
#pragma unroll
    for (int i = 0; i < Tile::kRows; ++i)
#pragma unroll
        for (int v = 0; v < Tile::kVectors; ++v) {
            const float4& x = gradient[i][v];
            const int column = Tile::first_column() + thread.vector(v);
            if (thread.tile_row(i) < rows && column < columns)
                *reinterpret_cast<float4*>(out + thread.tile_row(i) * pitch + column) =
                    make_float4(x.x * factor, x.y * factor, x.z * factor, x.w * factor);
        }
}

/// Writes P or dS to the warp's place in shared memory.
template <class Tile>
__device__ __forceinline__ void hand_over(simt::Weights<Tile>& to, const simt::Scores<Tile>& s,
                                          const simt::Thread<Tile>& thread) {
    sync_warp();  // what was there has been used
    simt::store_weights<Tile>(to, s, thread);
    sync_warp();
}

// spills: sm_75 sm_80 sm_90: the shape of d = 512 keeps two to twelve words, which are the same in all tiles, in local
// memory.
template <class Tile, Pass kPass>
__global__ void __launch_bounds__(Tile::kThreads, resident(Tile::kBlocksPerSm, Tile::kThreads))
    backward_simt(const __grid_constant__ Problem problem) {
    constexpr bool kOwnsKeys = kPass != Pass::kQueries;
    constexpr int kRows = Tile::kRows, kKeys = Tile::kKeys;
    const ForwardParams& p = problem.forward;
    auto& smem = shared_memory<SimtMemory<Tile, kPass>>();
    const simt::Thread<Tile> thread;
    const OwnedTile own = kOwnsKeys ? owned_keys<Tile::kOwn, true>(p) : owned_queries<Tile::kOwn, true>(p);
    if (own.rows <= 0) return;
    const Sequence& sequence = own.sequence;
    auto mask = query_mask<true>(problem, sequence, own.head);

    const auto [begin, end, heads, end_row] = streamed_rows<Tile, kOwnsKeys>(p, own, mask);

    simt::Output<Tile> d_first, d_second;  // dK and dV, or dQ alone
    simt::clear(d_first);
    simt::clear(d_second);
    const Rows &own_first = kOwnsKeys ? p.k : p.q, &own_second = kOwnsKeys ? p.v : problem.dout;
    const Rows &first_rows = kOwnsKeys ? p.q : p.k, &second_rows = kOwnsKeys ? problem.dout : p.v;
    const int own_head = kOwnsKeys ? own.head_k : own.head;
    const int own_row = (kOwnsKeys ? sequence.first_k : sequence.first_q) + own.first_row;
    if (heads > 0) {
        copy_rows<Tile>(smem.own_first, own_first, sequence, own_head, own_row, end_row - own.first_row, p.head_dim);
        copy_rows<Tile>(smem.own_second, own_second, sequence, own_head, own_row, end_row - own.first_row,
                        p.head_dim_v);
    }
    float own_lse[kRows], own_delta[kRows];  // minus L and minus D, of own queries
    if constexpr (!kOwnsKeys)
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            const int row = own.first_row + thread.tile_row(i);
            const bool exists = row < sequence.seqlen_q;
            const RowPair& pair = facts_of(problem, sequence, own.head)[exists ? row / 2 : 0];
            own_lse[i] = exists ? pair.minus_lse[row % 2] : -INFINITY;
            own_delta[i] = exists ? pair.minus_delta[row % 2] : 0.f;
        }

    const bool drops = p.dropout.rng_state;
    const float factor = unscaled_factor(p);
    for (int h = 0; h < heads; ++h) {
        [[maybe_unused]] float slopes_sum[kRows] = {};  // of own keys, of this head
        for (int row = begin / Tile::kStream * Tile::kStream; row < end; row += Tile::kStream) {
            const int head = own.head + h;  // query head
            const int left = (kOwnsKeys ? sequence.seqlen_q : sequence.seqlen_k) - row;
            if constexpr (kOwnsKeys) mask.take(head);
            __syncthreads();  // the tile before has been used
            const int stream_head = kOwnsKeys ? head : own.head_k;
            const int stream_row = (kOwnsKeys ? sequence.first_q : sequence.first_k) + row;
            copy_rows<Tile>(smem.first, first_rows, sequence, stream_head, stream_row, left, p.head_dim);
            copy_rows<Tile>(smem.second, second_rows, sequence, stream_head, stream_row, left, p.head_dim_v);
            ptx::cp_async_commit();
            const RowPair* const facts = kOwnsKeys ? facts_of(problem, sequence, head) + row / 2 : nullptr;
            const auto minus_lse = [&](int i, int n) {
                return kOwnsKeys ? facts[thread.key(n) / 2].minus_lse[thread.key(n) % 2] : own_lse[i];
            };
            const auto minus_delta = [&](int i, int n) {
                return kOwnsKeys ? facts[thread.key(n) / 2].minus_delta[thread.key(n) % 2] : own_delta[i];
            };
            ptx::cp_async_wait<0>();
            __syncthreads();

            // P
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
            simt::Scores<Tile> s, slopes, ds;
            simt::multiply_rows<Tile>(s, smem.own_first, smem.first, p.head_dim, thread);
            const bool modified = ScoreMod<true>::active(p);
            if (modified) {
                const ScoreMod<true> mod(p, sequence, QTile{sequence.index, head, own.head_k, 0});
                const auto score = [&](int i, int n) -> float& { return s[i][n]; };
                const auto slope = [&](int i, int n) -> float& { return slopes[i][n]; };
                mod.apply_each(each, score, slope, p.scale * kLog2e, query, key);
                each([&](int i, int n) { s[i][n] = ptx::ex2(fmaf(minus_lse(i, n), kLog2e, s[i][n])); });
            } else {  // the difference first: nothing is lost where both are large
                each([&](int i, int n) { s[i][n] = ptx::ex2(kLog2e * fmaf(s[i][n], p.scale, minus_lse(i, n))); });
            }
            const int last_own = own.first_row + Tile::kOwn - 1, last_stream = row + Tile::kStream - 1;
            if (!(kOwnsKeys ? mask.all_visible(row, last_stream, own.first_row, last_own)
                            : mask.all_visible(own.first_row, last_own, row, last_stream))) {
                if (mask.has_ranges()) {
                    const RangedRows rows = mask.rows();
                    each([&](int i, int n) {
                        if (rows.hides(query(i, n), key(i, n))) s[i][n] = 0.f;
                    });
                } else {
                    const BandMask& band = mask;
                    each([&](int i, int n) {
                        const int q = query(i, n), k = key(i, n);
                        if (k < band.begin(q) || k >= band.end(q)) s[i][n] = 0.f;
                    });
                }
            }

            // Dropped weights are marked by their sign
            if (drops) {
                const DropoutMask kept(p.dropout, sequence.index, head);
                each([&](int i, int n) {
                    if (!keeps_weight(p.dropout, kept, query(i, n), key(i, n))) s[i][n] = -s[i][n];
                });
            }

            // dV, dS
            auto& weights = smem.weights[threadIdx.x / 32];
            if constexpr (kOwnsKeys) {
                if (drops) {
                    simt::Scores<Tile> kept;
                    each([&](int i, int n) { kept[i][n] = KeptPart{}(s[i][n]); });
                    hand_over<Tile>(weights, kept, thread);
                } else {
                    hand_over<Tile>(weights, s, thread);
                }
                simt::multiply_weights<Tile>(d_second, weights, smem.second, Tile::first_column(), thread);
            }
            simt::multiply_rows<Tile>(ds, smem.own_second, smem.second, p.head_dim_v, thread);
            if (drops)
                each([&](int i, int n) {
                    if (s[i][n] < 0.f) ds[i][n] = 0.f;
                    s[i][n] = fabsf(s[i][n]);
                });
            if (WeightTerms::any(problem)) {
                const WeightTerms terms(problem, sequence, head);
                each([&](int i, int n) { ds[i][n] += terms(s[i][n], query(i, n), key(i, n)); });
            }
            each([&](int i, int n) { ds[i][n] = s[i][n] * (ds[i][n] + minus_delta(i, n)); });
            if (kOwnsKeys && problem.dslopes)
                each([&](int i, int n) {
                    if (s[i][n] == 0.f || query(i, n) >= sequence.seqlen_q) return;
                    const int distance = query(i, n) + sequence.seqlen_k - sequence.seqlen_q - key(i, n);
                    slopes_sum[i] = fmaf(-ds[i][n], fabsf(static_cast<float>(distance)), slopes_sum[i]);
                });
            if (modified) {
                if (const BiasGradient& b = problem.dbias; kOwnsKeys && b.data && Tile::first_column() == 0) {
                    float* const dbias = b.data + sequence.index * b.batch + head * b.head;
                    const int queries = min(sequence.seqlen_q, static_cast<int>(p.seqlen_q));
                    const int keys = min(sequence.seqlen_k, static_cast<int>(p.seqlen_k));
                    each([&](int i, int n) {
                        const std::int64_t q = query(i, n), k = key(i, n);
                        if (s[i][n] != 0.f && q < queries && k < keys)  // NaN is not 0, whatever its row
                            ptx::red_add(dbias + q * b.query + k * b.key, ds[i][n] * factor);
                    });
                }
                if (p.softcap != 0.f) each([&](int i, int n) { ds[i][n] *= slopes[i][n]; });
            }

            // dK or dQ of own rows, dQ of streamed ones
            hand_over<Tile>(weights, ds, thread);
            if constexpr (kPass == Pass::kFused)
                each([&](int i, int n) { smem.ds.by_row[thread.tile_row(i)][thread.key(n)] = ds[i][n]; });
            simt::multiply_weights<Tile>(d_first, weights, smem.first, Tile::first_column(), thread);
            if constexpr (kPass == Pass::kFused) {
                __syncthreads();  // dS of all own rows
                const Rows& dq = problem.dq;
                add_to_dq<Tile>(row_of<float>(dq, sequence.index, head, stream_row), dq.row, left, p.head_dim,
                                p.scale * factor, smem);
            }
        }
        if (kOwnsKeys && problem.dslopes && Tile::first_column() == 0)
            store_for_keys<Tile>(problem.dslopes, problem, own, own.head + h, slopes_sum, factor, thread);
    }

    const Rows& first_out = kOwnsKeys ? problem.dk : problem.dq;
    store<Tile>(row_of<float>(first_out, sequence.index, own_head, own_row), first_out.row, own.rows, p.head_dim,
                d_first, p.scale * factor, thread);
    if constexpr (kOwnsKeys)
        store<Tile>(row_of<float>(problem.dv, sequence.index, own_head, own_row), problem.dv.row, own.rows,
                    p.head_dim_v, d_second, factor, thread);
}

template <class Tile, Pass kPass>
void launch_simt_tile(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    dim3 grid = kPass == Pass::kQueries ? assignment_grid(p, Tile::kOwn) : owned_keys_grid(p, Tile::kOwn);
    if (grid.x == 0) return;
    grid.y = static_cast<unsigned>((std::max(p.head_dim, p.head_dim_v) + Tile::kColumns - 1) / Tile::kColumns);
    launch(backward_simt<Tile, kPass>, {grid, dim3(Tile::kThreads), sizeof(SimtMemory<Tile, kPass>)}, stream, problem);
}

template <class Tile, Pass kPass>
Shape simt_shape() {
    constexpr bool kQueries = kPass == Pass::kQueries;
    return {{DType::kFloat32, 75, Tile::kD, kQueries ? Tile::kOwn : Tile::kStream,
             kQueries ? Tile::kStream : Tile::kOwn, Tile::kWarps, 1, static_cast<int>(sizeof(SimtMemory<Tile, kPass>)),
             reinterpret_cast<const void*>(backward_simt<Tile, kPass>)},
            Problems::kGeneralTerms,
            kPass,
            launch_simt_tile<Tile, kPass>};
}

/// The shapes that ship: per head dim the fastest first, up to d = 256 the last one for 64 KiB of shared memory. That
/// of d = 512 takes 99 KiB; two blocks share its own rows, each with half of the columns of the gradients.
inline constexpr simt::TileShape kSimtRows[] = {
    {.d = 64, .lane_columns = 8, .keys = 32, .blocks_per_sm = 2},
    {.d = 64, .lane_columns = 8, .keys = 16, .blocks_per_sm = 2},
    {.d = 128, .lane_columns = 16, .keys = 32, .blocks_per_sm = 2},
    {.d = 128, .lane_columns = 16, .keys = 16, .blocks_per_sm = 2},
    {.d = 256, .warps = 1, .lane_columns = 16, .keys = 16, .blocks_per_sm = 2},
    {.d = 512, .warps = 1, .lane_columns = 16, .keys = 16, .blocks_per_sm = 1, .columns = 256},
};
template <Pass kPass>
std::vector<Shape> simt_shapes() {
    return of_rows<kSimtRows>([](auto i) { return simt_shape<SimtTile<kSimtRows[i]>, kPass>(); });
}

}  // namespace flash_wmma::backward
