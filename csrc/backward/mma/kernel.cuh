// The kernel of bwd_sm80 and bwd_sm75: FlashAttention-2 backward on mma.sync and ldmatrix.
//
// Algorithm (FlashAttention-2, Algorithm 2), with L the forward's log-sum-exp and D = rowsum(O dO) - dL
// (device/backward_rows.cuh):
//     S = Q K^T;  P = exp2(S * scale - L);  dP = dO V^T;  dS = P (dP - D)
//     dV = P^T dO;  dK = scale * dS^T Q;  dQ = scale * dS K.
// A block owns the rows of a tile of one side and streams over the tiles of the other side that see it:
//     Pass::kFused    owns keys, streams queries (of all heads that share the keys): dK and dV stay in registers,
//                     dQ goes to an fp32 buffer by atomics. Five products, every tile of S once.
//     Pass::kKeys     the same without dQ, and
//     Pass::kQueries  owns queries, streams keys: dQ stays in registers. These two together compute seven products
//                     without atomics, so that every run has the same result.
// In any pass "first" is the operand of S (K of keys, Q of queries), "second" that of dP (V, dO), and the block
// computes S with its own rows as rows: S^T where it owns keys.
//
// Who owns what: own tiles stay in swizzled shared memory (`Resident` ones in registers), streamed tiles go through a
// ring of `stages`. Own warp w has rows [w * kWarpRows, + kWarpRows) of the own tile. With one stream warp it sees all
// streamed rows, so P and dS go from the accumulators of one product to the operand of the next without shared memory.
// Otherwise `stream_warps` warps share own rows: each computes S for its part of the streamed rows, P and dS are
// exchanged through shared memory (the warps meet at a named barrier), and each owns its part of the columns of the
// gradients. If a row of the gradients is too long for a block (d = 512), several blocks share the own rows: each of
// them computes S and dP, and owns its part of the columns of all gradients. dQ takes dS from shared memory in any
// case. The fused pass has one stage: dQ's products need no streamed tile and hide the next one's copy.
//
// Bound: tensor cores, and close to them shared memory: an ldmatrix.x4 takes an SM 4 cycles, an HMMA 1.5, so that every
// fragment must serve three HMMAs. With kWarpRows = 32, a fragment of streamed rows serves four. A tile of 64 queries
// and 128 keys at d = 64 is 1,920 cycles of HMMA and, as the emulator counts, about 2,350 of shared memory; no access
// has a bank conflict. Eight warps an SM, all that registers allow, do not hide every latency, so what is issued
// between the products counts too (docs/tuning/backward.md). The additions to dQ are 0.4 / Bc bytes a FLOP in L2, so Bc
// = 128 where it fits.
#pragma once

#include "backward/mma/products.cuh"
#include "backward/mma/slopes.cuh"
#include "backward/mma/streamed_tiles.cuh"
#include "backward_shapes.h"
#include "device/backward_scores.cuh"
#include "device/dropout_tile.cuh"
#include "device/score_mod.cuh"
#include "device/weight_terms.cuh"

namespace flash_wmma::backward {

/// Map of a block's shared memory.
template <class Tile, Pass kPass>
struct PassMemory : TileMemory<Tile> {
    using typename TileMemory<Tile>::Weights;
    static constexpr bool kExchangesP = Tile::kStreamWarps > 1 && kPass != Pass::kQueries;
    static constexpr bool kExchangesDs = Tile::kStreamWarps > 1 || kPass == Pass::kFused;

    std::conditional_t<kExchangesDs, Weights, Nothing> ds;
    std::conditional_t<kExchangesP, Weights, Nothing> p;
    RowPair facts[Tile::kStages][kPass == Pass::kQueries ? 1 : Tile::kStream / 2];  // of streamed queries
};

/// The same with room for the gradient of slopes.
template <class Tile, Pass kPass>
struct TermsMemory : PassMemory<Tile, kPass> {
    SlopesMemory<Tile> slopes;
};
template <class Tile, Problems kProblems, Pass kPass>
using SharedMemory = std::conditional_t<includes(kProblems, Problems::kTerms) && kPass != Pass::kQueries,
                                        TermsMemory<Tile, kPass>, PassMemory<Tile, kPass>>;

/// Exponents of dQ's products, for add_to_dq: -inf for keys that no row of the streamed tile of `stream` rows sees.
struct DqExponent {
    static constexpr bool kConverted = true;
    const Problem& problem;
    const OwnedTile& own;
    const QueryMask<true>& mask;
    const Cursor& at;
    int stream;

    __device__ float operator()(int row) const {
        const Sequence& s = own.sequence;
        const int first = own.first_row + row, last = min(first + kScaleRows, s.seqlen_k) - 1;
        if (first > last || !mask.some_visible(at.row, at.row + stream - 1, first, last)) return -INFINITY;
        const KeyScales keys = key_scales(problem, s, own.head_k, first);
        return ds_exponent(query_scales(problem, s, at.head, at.row), keys) + keys.k;
    }
};

/// Brings the units of a warp's gradients to those that a streamed tile asks for. Returns the tile's scales.
template <class Tile, bool kOwnsKeys>
__device__ __forceinline__ PairScales follow_units(Gradient<Tile>& d_first, Gradient<Tile>& d_second, Unit& first_unit,
                                                   Unit& second_unit, const Problem& problem, const OwnedTile& own,
                                                   const QueryMask<true>& mask, const Cursor& at,
                                                   const Thread<Tile>& thread) {
    const Sequence& sequence = own.sequence;
    const int own_base = own.first_row + thread.warp_row();
    const int own_last = min(own_base + Tile::kWarpRows, kOwnsKeys ? sequence.seqlen_k : sequence.seqlen_q) - 1;
    const int own_row = min(own_base, own_last);
    const QueryScales of_q = query_scales(problem, sequence, at.head, kOwnsKeys ? at.row : own_row);
    const KeyScales of_k = key_scales(problem, sequence, own.head_k, kOwnsKeys ? own_row : at.row);
    // A tile that none of the warp's rows sees does not change the units
    const int last = at.row + Tile::kStream - 1;
    if (kOwnsKeys ? mask.some_visible(at.row, last, own_row, own_last)
                  : mask.some_visible(own_row, own_last, at.row, last)) {
        const float exponent = ds_exponent(of_q, of_k) + (kOwnsKeys ? of_q.q : of_k.k);
        first_unit.follow(d_first, exponent);
        if constexpr (kOwnsKeys) second_unit.follow(d_second, of_q.dout);
    }
    return PairScales(problem.forward.scale * kLog2e, of_q, of_k);
}

/// Adds the terms of the statistics' gradients, times `unit`, to dP - D, of the columns from `column` on of P. A
/// dropped weight's P is negative, and so is what it multiplies.
template <class Tile, bool kOwnsKeys>
__device__ __forceinline__ void add_terms(ScoresPart<Tile>& ds, const Scores<Tile>& p, int column,
                                          const ScorePlace<Tile, kOwnsKeys>& place, const WeightTerms& terms,
                                          float unit) {
    ds.each([&](float& x, int i, int c) {
        const float weight = p.at(i, column + c);
        const float term = unit * terms(fabsf(weight), place.query(i, column + c), place.key(i, column + c));
        x += weight < 0.f ? -term : term;
    });
}

/// Adds dS, times `unit`, to the gradient of the bias. dS is that of the columns from `column` on of P.
template <class Tile>
__device__ __forceinline__ void add_to_dbias(const Problem& problem, const Sequence& sequence, int head,
                                             const Scores<Tile>& p, ScoresPart<Tile>& ds, int column,
                                             const ScorePlace<Tile, true>& place, float unit) {
    const BiasGradient& b = problem.dbias;
    float* dbias = b.data + sequence.index * b.batch + head * b.head;
    const int queries = min(sequence.seqlen_q, static_cast<int>(problem.forward.seqlen_q));
    const int keys = min(sequence.seqlen_k, static_cast<int>(problem.forward.seqlen_k));
    ds.each([&](float& x, int i, int c) {
        const std::int64_t q = place.query(i, column + c), k = place.key(i, column + c);
        // NaN != 0, so NaN is always added
        if (p.at(i, column + c) != 0.f && q < queries && k < keys)
            ptx::red_add(dbias + q * b.query + k * b.key, x * unit);
    });
}

/// dV += P^T dO and dK += dS^T Q (or dQ += dS K) of P and dS that the warps of own rows have exchanged.
template <class Tile, bool kOwnsKeys, class Map>
__device__ __forceinline__ void multiply_exchanged(Gradient<Tile>& d_first, Gradient<Tile>& d_second, const Map& smem,
                                                   const typename Map::Stage& tile) {
    // The place is computed again, so that these products' addresses take no registers during the others
    const Thread<Tile> thread(ptx::opaque(static_cast<int>(threadIdx.x)));
    const Reader<Fragment::kA, typename Map::Weights> read(thread.lane, thread.warp_row(), 0);
#pragma unroll
    for (int k = 0; k < Tile::kStream; k += 16) {
        std::uint32_t weights[Tile::kRowTiles][4];
        if constexpr (kOwnsKeys) {
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r) read(weights[r], smem.p, 16 * r, k);
            multiply_weights<Tile>(d_second, weights, tile.second, k, thread);
        }
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) read(weights[r], smem.ds, 16 * r, k);
        multiply_weights<Tile>(d_first, weights, tile.first, k, thread);
    }
}

/// Writes dK and dV, or dQ, times `factor`, as Out: through `staging` if that is the type of the products.
template <class Tile, bool kOwnsKeys, class Out, class OwnRows>
__device__ __forceinline__ void store_gradients(const Problem& problem, const OwnedTile& own,
                                                const Gradient<Tile>& d_first, const Gradient<Tile>& d_second,
                                                OwnRows& staging, const Thread<Tile>& thread, float factor) {
    const ForwardParams& p = problem.forward;
    const int head = kOwnsKeys ? own.head_k : own.head;
    const int row = (kOwnsKeys ? own.sequence.first_k : own.sequence.first_q) + own.first_row;
    const auto write = [&](const Rows& rows, int columns, const Gradient<Tile>& gradient, float scale) {
        Out* const out = row_of<Out>(rows, own.sequence.index, head, row);
        if constexpr (std::is_same_v<Out, typename Tile::T>)
            store<Tile>(out, rows.row, own.rows, columns, gradient, scale, staging, thread);
        else store_as<Tile>(out, rows.row, own.rows, columns, gradient, scale, thread);
    };
    write(kOwnsKeys ? problem.dk : problem.dq, p.head_dim, d_first, p.scale * factor);
    if constexpr (kOwnsKeys) write(problem.dv, p.head_dim_v, d_second, factor);
}

/// In plain problems the compiler knows that a block's bounds are the same in every thread, which saves registers.
/// Converted inputs (scales.cuh), and the gradients of statistics and of slopes, have instances of their own, so that
/// no other instance keeps exponents or sums in registers.
// spills: sm_75 sm_80 sm_90: tiles at the register limit keep loop-invariant values (bounds, addresses) in local
// memory, as a rule 10 to 50 loads a streamed tile, at d = 256 up to 115, against some thousand instructions.
template <class Tile, Problems kProblems, Pass kPass>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    backward(const __grid_constant__ Problem problem) {
    using T = typename Tile::T;
    using Map = SharedMemory<Tile, kProblems, kPass>;
    constexpr bool kOwnsKeys = kPass != Pass::kQueries, kThroughRegisters = Tile::Machine::kThroughRegisters;
    constexpr bool kGeneral = kProblems != Problems::kPlain, kConverted = includes(kProblems, Problems::kConverted);
    constexpr bool kTerms = includes(kProblems, Problems::kTerms);
    static_assert(!kConverted || (std::is_same_v<T, half> && kScaleRows % Tile::kWarpRows == 0 &&
                                  (kScaleRows % Tile::kOwn == 0 || Tile::kOwn % kScaleRows == 0)));
    constexpr int kRowTiles = Tile::kRowTiles, kStep = Tile::kStep, kStages = Tile::kStages;
    static_assert(kStages == 1 || !(kThroughRegisters || kPass == Pass::kFused));
    const ForwardParams& p = problem.forward;
    auto& smem = shared_memory<Map>();
    const Thread<Tile> thread(static_cast<int>(threadIdx.x));
    const OwnedTile own = kOwnsKeys ? owned_keys<Tile::kOwn, kGeneral>(p) : owned_queries<Tile::kOwn, kGeneral>(p);
    if (own.rows <= 0) return;
    const Sequence& sequence = own.sequence;
    auto mask = query_mask<kGeneral>(problem, sequence, own.head);

    StreamedRange range = streamed_range<Tile, kPass>(p, own, mask);
    Cursor& at = range.at;
    int& left = range.left;

    Gradient<Tile> d_first, d_second;  // dK and dV, or dQ alone
    d_first.clear();
    d_second.clear();
    [[maybe_unused]] Unit first_unit, second_unit;  // of d_first and d_second
    if (left > 0) {
        OwnOperand<Tile, Tile::kFirstInRegisters> own_first;
        OwnOperand<Tile, Tile::kSecondInRegisters> own_second;
        copy_own<Tile, kPass>(smem.first, smem.second(), problem, own);
        ptx::cp_async_commit();
        if constexpr (Tile::kSecondInRegisters) {
            ptx::cp_async_wait<0>();
            __syncthreads();
            own_first.load(smem.first, thread);
            own_second.load(smem.second(), thread);
            __syncthreads();  // the ring takes its place
        }
        RowValues<Tile::kWarpRows> minus_lse, minus_delta;  // of own queries
        if constexpr (!kOwnsKeys)
            minus_lse.each([&](int i, float& x) {
                const int row = own.first_row + thread.warp_row() + 8 * i + thread.row();
                const bool exists = row < sequence.seqlen_q;
                const RowPair& pair = facts_of(problem, sequence, own.head)[exists ? row / 2 : 0];
                x = exists ? pair.minus_lse[row % 2] : -INFINITY;
                minus_delta[i] = pair.minus_delta[row % 2];
            });

        StreamedTiles<Tile, kPass> stream(problem, own, at);
        stream.start(smem, 0);
        stream.finish(smem, 0);
        ptx::cp_async_commit();

        const float scale = p.scale * kLog2e;
        [[maybe_unused]] const bool drops = kGeneral && p.dropout.rng_state;
        [[maybe_unused]] DropoutState dropout;
        // Of own queries not in registers of the warp: of the tile for d = 64 ptxas (CUDA 13.0, sm_90) then made a loop
        // whose weights were those of another state
        if (drops) dropout = kOwnsKeys ? dropout_state(p.dropout) : DropoutState(p.dropout);
        [[maybe_unused]] std::conditional_t<kTerms, SlopesGradient<Tile>, Nothing> slopes_gradient;
        int slot = 0;
        for (; left > 0; --left, at.advance()) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // this tile has landed, the one before and its weights have been used
            if constexpr (kStages > 1) {
                if (left > 1) stream.start(smem, slot ^ 1);
                ptx::cp_async_commit();
            }
            auto& tile = smem.ring[slot];
            if constexpr (kGeneral && kOwnsKeys) mask.take(at.head);
            PairScales scales(scale);
            if constexpr (kConverted)
                scales = follow_units<Tile, kOwnsKeys>(d_first, d_second, first_unit, second_unit, problem, own, mask,
                                                       at, thread);
#pragma unroll 1
            for (int step = 0; step < Tile::kWarpStream; step += kStep) {
                const int first = thread.warp_stream() + step;  // of the tile's rows
                const ScorePlace<Tile, kOwnsKeys> place{own.first_row + thread.warp_row(), at.row + first, thread};
                const RowPair* pairs = &smem.facts[kOwnsKeys ? slot : 0][kOwnsKeys ? (first + thread.column()) / 2 : 0];

                // P
                Scores<Tile> s;
                s.clear();
                multiply_rows<Tile>(s, own_first, smem.first, tile.first, first, thread);
                float factor = scales.score;  // from s to log2 units
                [[maybe_unused]] Scores<Tile> slope;
                if constexpr (kGeneral)
                    if (ScoreMod<true>::active(p)) {
                        const ScoreMod<true> mod(p, sequence, QTile{sequence.index, at.head, own.head_k, 0});
                        mod.apply_each([&](auto f) { s.each([&](float&, int i, int column) { f(i, column); }); },
                                       [&](int i, int column) -> float& { return s.at(i, column); },
                                       [&](int i, int column) -> float& { return slope.at(i, column); }, scales.score,
                                       [&](int i, int column) { return place.query(i, column); },
                                       [&](int i, int column) { return place.key(i, column); });
                        factor = 1.f;
                    }
                const auto lse = [&](int i, int column) {
                    return kOwnsKeys ? pairs[column / 8 * 4].minus_lse[column % 2] : minus_lse[i];
                };
                weigh_scores(s, factor, lse, place, mask);

                if constexpr (kGeneral)
                    if (drops) {  // dropped weights are marked by their sign
                        const DropoutMask weights(dropout, p.dropout.origin, sequence.index, at.head);
                        KeptTile<kOwnsKeys, Tile::kWarpRows, kStep>(p.dropout, weights,
                                                                    kOwnsKeys ? place.stream : place.own,
                                                                    kOwnsKeys ? place.own : place.stream)
                            .each([&](int i, int column, bool kept) {
                                float& x = s.at(i, column);
                                x = kept ? x : -x;
                            });
                    }
                if constexpr (Map::kExchangesP) {
                    if (drops) exchange<Tile>(smem.p, s, first, thread, KeptPart{});
                    else exchange<Tile>(smem.p, s, first, thread);
                }

                // dS
                ScoresPart<Tile> ds;
#pragma unroll
                for (int part = 0; part < kStep / 8; part += Tile::kPart / 8) {
                    const auto minus_d = [&](int i, int column) {
                        return kOwnsKeys ? pairs[(part + column / 8) * 4].minus_delta[column % 2] : minus_delta[i];
                    };
                    ds.each([&](float& x, int i, int column) { x = kConverted ? 0.f : minus_d(i, column); });
                    multiply_rows<Tile>(ds, own_second, smem.second(), tile.second, first + 8 * part, thread);
                    if constexpr (kConverted)
                        ds.each([&](float& x, int i, int column) {
                            x = fmaf(x, scales.dp, minus_d(i, column) * scales.delta);
                        });
                    if constexpr (kGeneral)
                        if (drops)  // x is dP - D. The sign of a dropped weight's P goes to what it multiplies
                            ds.each([&](float& x, int i, int column) {
                                const float minus = minus_d(i, column) * (kConverted ? scales.delta : 1.f);
                                x = s.at(i, 8 * part + column) < 0.f ? -minus : x;
                            });
                    if constexpr (kTerms)
                        if (WeightTerms::any(problem))
                            add_terms(ds, s, 8 * part, place, WeightTerms(problem, sequence, at.head), scales.delta);
                    ds.each([&](float& x, int i, int column) { x *= s.at(i, 8 * part + column); });
                    if constexpr (kTerms && kOwnsKeys)
                        if (problem.dslopes)
                            slopes_gradient.add(sequence, s, ds, 8 * part, place, kConverted ? scales.ds() : 1.f);
                    if constexpr (kGeneral)
                        if (ScoreMod<true>::active(p)) {
                            if constexpr (kOwnsKeys)
                                if (problem.dbias.data && Tile::first_column() == 0)
                                    add_to_dbias(problem, sequence, at.head, s, ds, 8 * part, place,
                                                 scales.ds() * unscaled_factor(p));
                            if (p.softcap != 0.f)
                                ds.each([&](float& x, int i, int column) { x *= slope.at(i, 8 * part + column); });
                        }

                    if constexpr (Map::kExchangesDs) exchange<Tile>(smem.ds, ds, first + 8 * part, thread);
                    if constexpr (Tile::kStreamWarps == 1)
#pragma unroll
                        for (int k = 0; k < Tile::kPart; k += 16) {
                            const int row = step + 8 * part + k;
                            std::uint32_t weights[kRowTiles][4];
                            if constexpr (kOwnsKeys) {
                                if (drops) hand_over<Tile>(weights, s, part + k / 8, KeptPart{});
                                else hand_over<Tile>(weights, s, part + k / 8);
                                multiply_weights<Tile>(d_second, weights, tile.second, row, thread);
                            }
                            hand_over<Tile>(weights, ds, k / 8);
                            multiply_weights<Tile>(d_first, weights, tile.first, row, thread);
                        }
                }
            }
            if constexpr (kTerms && kOwnsKeys)
                if (problem.dslopes && at.ends_head()) slopes_gradient.collect(smem.slopes, thread);
            if constexpr (Tile::kStreamWarps > 1) {
                ptx::named_barrier_sync(1 + thread.own_warp, 32 * Tile::kStreamWarps);
                multiply_exchanged<Tile, kOwnsKeys>(d_first, d_second, smem, tile);
            }
            if constexpr (kTerms && kOwnsKeys)
                if (problem.dslopes && at.ends_head()) store_slopes(smem.slopes, problem, own, at.head, thread);

            if constexpr (kStages > 1) slot ^= 1;
            else {
                if constexpr (stream.kWaitsInRegisters)
                    if (left > 1) stream.start(smem, 0);
                __syncthreads();  // this tile has been used, dS is complete; dQ's products hide the next copy
                if constexpr (!stream.kWaitsInRegisters)
                    if (left > 1) {
                        stream.start(smem, 0);
                        stream.finish(smem, 0);
                    }
                ptx::cp_async_commit();
            }
            if constexpr (kPass == Pass::kFused) {
                const Thread<Tile> again(ptx::opaque(static_cast<int>(threadIdx.x)));
                float* dq_rows = dq_of(problem, sequence, at.head, at.row);
                if constexpr (kConverted)
                    add_to_dq<Tile>(dq_rows, p.head_dim, smem.ds, smem.first, again,
                                    DqExponent{problem, own, mask, at, Tile::kStream});
                else add_to_dq<Tile>(dq_rows, p.head_dim, smem.ds, smem.first, again);
            }
            if constexpr (kStages == 1 && stream.kWaitsInRegisters)
                if (left > 1) stream.finish(smem, 0);
        }
    }

    __syncthreads();  // own rows have been used; the gradients take their place on the way out
    const float last_factor = kGeneral ? unscaled_factor(p) : 1.f;
    if constexpr (kConverted) {
        multiply_by_power(d_first, first_unit.exponent);
        multiply_by_power(d_second, second_unit.exponent);
        if constexpr (Tile::Machine::kMultipliesBf16)
            store_gradients<Tile, kOwnsKeys, float>(problem, own, d_first, d_second, smem.first, thread, last_factor);
        else if (p.out_dtype == DType::kFloat32)
            store_gradients<Tile, kOwnsKeys, float>(problem, own, d_first, d_second, smem.first, thread, last_factor);
        else store_gradients<Tile, kOwnsKeys, bf16>(problem, own, d_first, d_second, smem.first, thread, last_factor);
    } else {
        store_gradients<Tile, kOwnsKeys, T>(problem, own, d_first, d_second, smem.first, thread, last_factor);
    }
}

}  // namespace flash_wmma::backward
