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
//     Pass::kQueries  owns queries, streams keys: dQ stays in registers. Both together: seven products, no atomics,
//                     and so the same result in every run.
// In any pass "first" is the operand of S (K of keys, Q of queries), "second" that of dP (V, dO), and the block
// computes S with its own rows as rows: S^T where it owns keys.
//
// Who owns what: own tiles stay in swizzled shared memory (`Resident` ones in registers), streamed tiles go through a
// ring of `stages`. Own warp w has rows [w * kWarpRows, + kWarpRows) of the own tile. With one stream warp it sees all
// streamed rows, so P and dS go from the accumulators of one product to the operand of the next without shared memory.
// Otherwise `stream_warps` warps share own rows: each computes S for its part of the streamed rows, P and dS are
// exchanged through shared memory (they meet at a named barrier), and each owns its part of the columns of the
// gradients. dQ takes dS from shared memory in any case. The fused pass has one stage: dQ's products need no streamed
// tile and hide the next one's copy.
//
// Bound: tensor cores, and close to them shared memory: an ldmatrix.x4 takes an SM 4 cycles, an HMMA 1.5, so that every
// fragment must serve three of them. With kWarpRows = 32, one of streamed rows serves four. A tile of 64 queries and
// 128 keys at d = 64 is 1,920 cycles of HMMA and, as the emulator counts, about 2,350 of shared memory; no access has a
// bank conflict. Eight warps an SM, all that registers allow, do not hide every latency, so what is issued between the
// products counts too (docs/tuning/backward.md). The additions to dQ are 0.4 / Bc bytes a FLOP in L2, so Bc = 128 where
// it fits.
#pragma once

#include "backward/mma/products.cuh"
#include "backward/mma/scores.cuh"
#include "backward/mma/streamed_tiles.cuh"
#include "backward_shapes.h"
#include "device/score_mod.cuh"

namespace flash_wmma::backward {

/// Map of a block's shared memory.
template <class Tile, Pass kPass>
struct SharedMemory : TileMemory<Tile> {
    using typename TileMemory<Tile>::Weights;
    static constexpr bool kExchangesP = Tile::kStreamWarps > 1 && kPass != Pass::kQueries;
    static constexpr bool kExchangesDs = Tile::kStreamWarps > 1 || kPass == Pass::kFused;

    std::conditional_t<kExchangesDs, Weights, Nothing> ds;
    std::conditional_t<kExchangesP, Weights, Nothing> p;
    RowPair facts[Tile::kStages][kPass == Pass::kQueries ? 1 : Tile::kStream / 2];  // of streamed queries
};

/// Exponents of dQ's products, for add_to_dq: -inf for keys that no row of the streamed tile of `stream` rows sees.
struct DqExponent {
    static constexpr bool kConverted = true;
    const Problem& problem;
    const OwnedTile& own;
    const BandMask& mask;
    const Cursor& at;
    int stream;

    __device__ float operator()(int row) const {
        const Sequence& s = own.sequence;
        const int first = own.first_row + row, last = min(first + kScaleRows, s.seqlen_k) - 1;
        if (first > last || mask.first_query(first) >= at.row + stream || mask.last_query(last) < at.row)
            return -INFINITY;
        const KeyScales keys = key_scales(problem, s, own.head_k, first);
        return ds_exponent(query_scales(problem, s, at.head, at.row), keys) + keys.k;
    }
};

/// The gradients of a warp's own rows: dK and dV, or dQ alone. Converted: in units of their own (scales.cuh).
template <class Tile>
struct Gradients {
    Gradient<Tile> first, second;
    Unit first_unit, second_unit;
};

/// A warp's own rows as operands, and L and D of own queries.
template <class Tile>
struct OwnOperands {
    OwnOperand<Tile, Tile::kFirstInRegisters> first;
    OwnOperand<Tile, Tile::kSecondInRegisters> second;
    RowValues<Tile::kWarpRows> minus_lse, minus_delta;
};

/// A warp's work with one streamed tile after the other.
template <class Tile, Problems kProblems, Pass kPass>
class Warp {
  public:
    using Map = SharedMemory<Tile, kPass>;
    static constexpr bool kOwnsKeys = kPass != Pass::kQueries;
    static constexpr bool kGeneral = kProblems != Problems::kPlain, kConverted = kProblems == Problems::kConverted;

    __device__ __forceinline__ Warp(const Problem& problem, Map& smem, const OwnedTile& own, const BandMask& mask,
                                    const Thread<Tile>& thread, OwnOperands<Tile>& rows)
        : problem_(problem), p_(problem.forward), smem_(smem), own_(own), mask_(mask), thread_(thread), rows_(rows) {}

    /// The own rows to shared memory, and to registers where they stay there.
    __device__ __forceinline__ void load() {
        copy_own<Tile, kPass>(smem_.first, smem_.second(), problem_, own_);
        ptx::cp_async_commit();
        if constexpr (Tile::kSecondInRegisters) {
            ptx::cp_async_wait<0>();
            __syncthreads();
            rows_.first.load(smem_.first, thread_);
            rows_.second.load(smem_.second(), thread_);
            __syncthreads();  // the ring takes its place
        }
        if constexpr (!kOwnsKeys)
            rows_.minus_lse.each([&](int i, float& x) {
                const int row = own_.first_row + thread_.warp_row() + 8 * i + thread_.row();
                const bool exists = row < own_.sequence.seqlen_q;
                const RowPair& pair = facts_of(problem_, own_.sequence, own_.head)[exists ? row / 2 : 0];
                x = exists ? pair.minus_lse[row % 2] : -INFINITY;
                rows_.minus_delta[i] = pair.minus_delta[row % 2];
            });
    }

    /// The scales of the tile at the cursor. The units of the gradients follow them.
    __device__ __forceinline__ PairScales scales(const Cursor& at, Gradients<Tile>& d) const {
        PairScales scales(p_.scale * kLog2e);
        if constexpr (kConverted) {
            const Sequence& s = own_.sequence;
            const int own_base = own_.first_row + thread_.warp_row();
            const int own_last = min(own_base + Tile::kWarpRows, kOwnsKeys ? s.seqlen_k : s.seqlen_q) - 1;
            const int own_row = min(own_base, own_last);
            const QueryScales of_q = query_scales(problem_, s, at.head, kOwnsKeys ? at.row : own_row);
            const KeyScales of_k = key_scales(problem_, s, own_.head_k, kOwnsKeys ? own_row : at.row);
            scales = PairScales(p_.scale * kLog2e, of_q, of_k);
            // Accumulators take no notice of a tile that none of their rows sees
            const int begin = kOwnsKeys ? mask_.first_query(own_row) : mask_.begin(own_row);
            const int end = kOwnsKeys ? mask_.last_query(own_last) + 1 : mask_.end(own_last);
            if (begin < at.row + Tile::kStream && at.row < end) {
                const float exponent = ds_exponent(of_q, of_k) + (kOwnsKeys ? of_q.q : of_k.k);
                d.first_unit.follow(d.first, exponent);
                if constexpr (kOwnsKeys) d.second_unit.follow(d.second, of_q.dout);
            }
        }
        return scales;
    }

    /// P and dS of the tile at the cursor, and what they add to the gradients.
    __device__ __forceinline__ void add_tile(Gradients<Tile>& d, const Cursor& at, int slot, const PairScales& scales) {
#pragma unroll 1
        for (int step = 0; step < Tile::kWarpStream; step += Tile::kStep) add_step(d, at, slot, scales, step);
        if constexpr (Tile::kStreamWarps > 1) {
            ptx::named_barrier_sync(1 + thread_.own_warp, 32 * Tile::kStreamWarps);
            multiply_exchanged(d, smem_.ring[slot]);
        }
    }

    /// dQ of the tile at the cursor, which all own keys add to.
    __device__ __forceinline__ void add_to_dq(const Cursor& at) {
        // Computed again, so that the addresses of these products take no registers in the others
        const Thread<Tile> here(ptx::opaque(static_cast<int>(threadIdx.x)));
        float* dq_rows = dq_of(problem_, own_.sequence, at.head, at.row);
        if constexpr (kConverted)
            backward::add_to_dq<Tile>(dq_rows, p_.head_dim, smem_.ds, smem_.first, here,
                                      DqExponent{problem_, own_, mask_, at, Tile::kStream});
        else backward::add_to_dq<Tile>(dq_rows, p_.head_dim, smem_.ds, smem_.first, here);
    }

    /// The gradients to global memory, by the way of shared memory unless they were converted.
    __device__ __forceinline__ void store(Gradients<Tile>& d) {
        using T = typename Tile::T;
        if constexpr (kConverted) {
            multiply_by_power(d.first, d.first_unit.exponent);
            multiply_by_power(d.second, d.second_unit.exponent);
            if (Tile::Machine::kMultipliesBf16 || p_.out_dtype == DType::kFloat32)
                each_out<float>(d, [&](float* out, const auto&... facts) { store_as<Tile>(out, facts..., thread_); });
            else each_out<bf16>(d, [&](bf16* out, const auto&... facts) { store_as<Tile>(out, facts..., thread_); });
        } else {
            each_out<T>(
                d, [&](T* out, const auto&... facts) { backward::store<Tile>(out, facts..., smem_.first, thread_); });
        }
    }

  private:
    static constexpr int kRowTiles = Tile::kRowTiles, kStep = Tile::kStep;

    /// The tile's rows from `step` on of this warp's part.
    __device__ __forceinline__ void add_step(Gradients<Tile>& d, const Cursor& at, int slot, const PairScales& scales,
                                             int step) {
        auto& tile = smem_.ring[slot];
        const int first = thread_.warp_stream() + step;  // of the tile's rows
        const ScorePlace<Tile, kOwnsKeys> place{own_.first_row + thread_.warp_row(), at.row + first, thread_};
        const RowPair* pairs = &smem_.facts[kOwnsKeys ? slot : 0][kOwnsKeys ? (first + thread_.column()) / 2 : 0];

        // P
        Scores<Tile> s;
        s.clear();
        multiply_rows<Tile>(s, rows_.first, smem_.first, tile.first, first, thread_);
        [[maybe_unused]] Scores<Tile> slope;
        const float factor = modify(s, slope, at, scales.score, place);
        const auto lse = [&](int i, int column) {
            return kOwnsKeys ? pairs[column / 8 * 4].minus_lse[column % 2] : rows_.minus_lse[i];
        };
        weigh_scores(s, factor, lse, place, mask_);
        if constexpr (Map::kExchangesP) exchange<Tile>(smem_.p, s, first, thread_);

        // dS
        ScoresPart<Tile> ds;
#pragma unroll
        for (int part = 0; part < kStep / 8; part += Tile::kPart / 8) {
            const auto minus_d = [&](int i, int column) {
                return kOwnsKeys ? pairs[(part + column / 8) * 4].minus_delta[column % 2] : rows_.minus_delta[i];
            };
            ds.each([&](float& x, int i, int column) { x = kConverted ? 0.f : minus_d(i, column); });
            multiply_rows<Tile>(ds, rows_.second, smem_.second(), tile.second, first + 8 * part, thread_);
            if constexpr (kConverted)
                ds.each(
                    [&](float& x, int i, int column) { x = fmaf(x, scales.dp, minus_d(i, column) * scales.delta); });
            ds.each([&](float& x, int i, int column) { x *= s.at(i, 8 * part + column); });
            add_bias_gradient(ds, s, slope, at, scales, place, 8 * part);
            if constexpr (Map::kExchangesDs) exchange<Tile>(smem_.ds, ds, first + 8 * part, thread_);
            if constexpr (Tile::kStreamWarps == 1)
#pragma unroll
                for (int k = 0; k < Tile::kPart; k += 16) {
                    const int row = step + 8 * part + k;
                    std::uint32_t weights[kRowTiles][4];
                    if constexpr (kOwnsKeys) {
                        hand_over<Tile>(weights, s, part + k / 8);
                        multiply_weights<Tile>(d.second, weights, tile.second, row, thread_);
                    }
                    hand_over<Tile>(weights, ds, k / 8);
                    multiply_weights<Tile>(d.first, weights, tile.first, row, thread_);
                }
        }
    }

    /// ScoreMods on S, with their slopes. Returns what brings S to log2 units.
    __device__ __forceinline__ float modify(Scores<Tile>& s, [[maybe_unused]] Scores<Tile>& slope, const Cursor& at,
                                            float scale, const ScorePlace<Tile, kOwnsKeys>& place) const {
        if constexpr (kGeneral)
            if (ScoreMod<true>::active(p_)) {
                const ScoreMod<true> mod(p_, own_.sequence, QTile{own_.sequence.index, at.head, own_.head_k, 0});
                mod.apply_each([&](auto f) { s.each([&](float&, int i, int column) { f(i, column); }); },
                               [&](int i, int column) -> float& { return s.at(i, column); },
                               [&](int i, int column) -> float& { return slope.at(i, column); }, scale,
                               [&](int i, int column) { return place.query(i, column); },
                               [&](int i, int column) { return place.key(i, column); });
                return 1.f;
            }
        return scale;
    }

    /// dS of modified scores to the bias's gradient; with a softcap, dS becomes that of the products. `first`: the
    /// column of s and slope that ds begins at.
    __device__ __forceinline__ void add_bias_gradient(ScoresPart<Tile>& ds, const Scores<Tile>& s,
                                                      const Scores<Tile>& slope, const Cursor& at,
                                                      const PairScales& scales,
                                                      const ScorePlace<Tile, kOwnsKeys>& place, int first) const {
        if constexpr (kGeneral)
            if (ScoreMod<true>::active(p_)) {
                if (const BiasGradient& b = problem_.dbias; kOwnsKeys && b.data) {
                    float* dbias = b.data + own_.sequence.index * b.batch + at.head * b.head;
                    const int queries = min(own_.sequence.seqlen_q, static_cast<int>(p_.seqlen_q));
                    const int keys = min(own_.sequence.seqlen_k, static_cast<int>(p_.seqlen_k));
                    ds.each([&](float& x, int i, int column) {
                        const std::int64_t q = place.query(i, first + column), k = place.key(i, first + column);
                        // NaN is not 0, whatever its row
                        if (s.at(i, first + column) != 0.f && q < queries && k < keys)
                            ptx::red_add(dbias + q * b.query + k * b.key, x * scales.ds());
                    });
                }
                if (p_.softcap != 0.f) ds.each([&](float& x, int i, int column) { x *= slope.at(i, first + column); });
            }
    }

    /// The gradients' products where warps share own rows: P and dS of all of them, and a part of the columns.
    template <class Stage>
    __device__ __forceinline__ void multiply_exchanged(Gradients<Tile>& d, const Stage& tile) {
        // Computed again, so that the addresses of these products take no registers in the others
        const Thread<Tile> here(ptx::opaque(static_cast<int>(threadIdx.x)));
        const Reader<Fragment::kA, typename Map::Weights> read(here.lane, here.warp_row(), 0);
#pragma unroll
        for (int k = 0; k < Tile::kStream; k += 16) {
            std::uint32_t weights[kRowTiles][4];
            if constexpr (kOwnsKeys) {
#pragma unroll
                for (int r = 0; r < kRowTiles; ++r) read(weights[r], smem_.p, 16 * r, k);
                multiply_weights<Tile>(d.second, weights, tile.second, k, here);
            }
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) read(weights[r], smem_.ds, 16 * r, k);
            multiply_weights<Tile>(d.first, weights, tile.first, k, here);
        }
    }

    /// store(out, pitch, rows, columns, gradient, factor) for dK and dV, or for dQ.
    template <class Out, class Store>
    __device__ __forceinline__ void each_out(Gradients<Tile>& d, Store store) const {
        const Sequence& s = own_.sequence;
        const Rows& first = kOwnsKeys ? problem_.dk : problem_.dq;
        const int head = kOwnsKeys ? own_.head_k : own_.head;
        const int row = (kOwnsKeys ? s.first_k : s.first_q) + own_.first_row;
        store(row_of<Out>(first, s.index, head, row), first.row, own_.rows, p_.head_dim, d.first, p_.scale);
        if constexpr (kOwnsKeys) {
            const Rows& second = problem_.dv;
            store(row_of<Out>(second, s.index, head, row), second.row, own_.rows, p_.head_dim_v, d.second, 1.f);
        }
    }

    const Problem& problem_;
    const ForwardParams& p_;
    Map& smem_;
    const OwnedTile& own_;
    const BandMask& mask_;
    const Thread<Tile>& thread_;
    OwnOperands<Tile>& rows_;
};

/// Of plain problems all of a block's bounds are known to be the same in every thread, which saves registers. Converted
/// inputs (scales.cuh) have instances of their own, so that no other has registers for exponents.
// spills: sm_75 sm_80 sm_90: tiles at the register limit keep loop-invariant values (bounds, addresses) in local
// memory, as a rule 10 to 40 loads a streamed tile, at d = 256 up to 85, against some thousand instructions.
template <class Tile, Problems kProblems, Pass kPass>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    backward(const __grid_constant__ Problem problem) {
    using Warp = backward::Warp<Tile, kProblems, kPass>;
    constexpr bool kOwnsKeys = Warp::kOwnsKeys, kGeneral = Warp::kGeneral;
    static_assert(!Warp::kConverted || (std::is_same_v<typename Tile::T, half> && kScaleRows % Tile::kWarpRows == 0 &&
                                        (kScaleRows % Tile::kOwn == 0 || Tile::kOwn % kScaleRows == 0)));
    constexpr bool kOneStage = Tile::kStages == 1;
    static_assert(kOneStage || !(Tile::Machine::kThroughRegisters || kPass == Pass::kFused));
    const ForwardParams& p = problem.forward;
    auto& smem = shared_memory<SharedMemory<Tile, kPass>>();
    const Thread<Tile> thread(static_cast<int>(threadIdx.x));
    const OwnedTile own = kOwnsKeys ? owned_keys<Tile::kOwn, kGeneral>(p) : owned_queries<Tile::kOwn, kGeneral>(p);
    if (own.rows <= 0) return;
    const BandMask mask(p.band, own.sequence.seqlen_q, own.sequence.seqlen_k);
    StreamedRange range = streamed_range<Tile, kPass>(p, own, mask);
    Cursor& at = range.at;
    int& left = range.left;

    Gradients<Tile> d;
    d.first.clear();
    d.second.clear();
    OwnOperands<Tile> rows;
    Warp warp(problem, smem, own, mask, thread, rows);
    if (left > 0) {
        warp.load();
        StreamedTiles<Tile, kPass> stream(problem, own, at);
        stream.start(smem, 0);
        stream.finish(smem, 0);
        ptx::cp_async_commit();
        for (int slot = 0; left > 0; --left, at.advance()) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // this tile has landed, the one before and its weights have been used
            if constexpr (!kOneStage) {
                if (left > 1) stream.start(smem, slot ^ 1);
                ptx::cp_async_commit();
            }
            const PairScales scales = warp.scales(at, d);
            warp.add_tile(d, at, slot, scales);
            if constexpr (kOneStage) {
                if constexpr (stream.kWaitsInRegisters)
                    if (left > 1) stream.start(smem, 0);
                __syncthreads();  // this tile has been used, dS is complete; dQ's products hide the next copy
                if constexpr (!stream.kWaitsInRegisters)
                    if (left > 1) {
                        stream.start(smem, 0);
                        stream.finish(smem, 0);
                    }
                ptx::cp_async_commit();
            } else {
                slot ^= 1;
            }
            if constexpr (kPass == Pass::kFused) warp.add_to_dq(at);
            if constexpr (kOneStage && stream.kWaitsInRegisters)
                if (left > 1) stream.finish(smem, 0);
        }
    }
    __syncthreads();  // own rows have been used; the gradients take their place on the way out
    warp.store(d);
}

template <class Tile, Problems kProblems, Pass kPass>
void launch_tile(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const dim3 grid = kPass == Pass::kQueries ? assignment_grid(p, Tile::kOwn) : owned_keys_grid(p, Tile::kOwn);
    if (grid.x == 0) return;
    launch(backward<Tile, kProblems, kPass>, {grid, dim3(Tile::kThreads), sizeof(SharedMemory<Tile, kPass>)}, stream,
           problem);
}

template <class Tile, Problems kProblems, Pass kPass>
Shape shape(int min_arch, int resident = 1) {
    constexpr bool kQueries = kPass == Pass::kQueries;
    return {{Element<typename Tile::T>::kDType, min_arch, Tile::kD, kQueries ? Tile::kOwn : Tile::kStream,
             kQueries ? Tile::kStream : Tile::kOwn, Tile::kWarps, Tile::kStages,
             static_cast<int>(sizeof(SharedMemory<Tile, kPass>)),
             reinterpret_cast<const void*>(backward<Tile, kProblems, kPass>)},
            kProblems,
            kPass,
            launch_tile<Tile, kProblems, kPass>,
            resident};
}

}  // namespace flash_wmma::backward
