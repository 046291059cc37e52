// The kernel of mma_sm80 and mma_sm75: FlashAttention-2 forward on mma.sync and ldmatrix.
//
// Algorithm (FlashAttention-2, Algorithm 1): a block owns Br = row_warps * row_tiles * 16 query rows of one head and
// loops over K/V tiles of Bc keys, from the last visible one back to the first:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
// Backwards, because then the tile that is masked for causality or length is as a rule the first one, which needs the
// exact maximum in any case.
//
// Lagged maximum: m need not be the true maximum, only close enough that P fits T. The first tile and masked tiles set
// m exactly; a plain tile uses the old m and the warp votes that no partial row sum passed Element<T>::kLargestSum.
// Only if the vote fails is the tile recomputed with the exact maximum, and O and l rescaled. Beyond 2^24 m is always
// exact.
//
// Converted inputs (convert.h): K's and Q's exponents fold into the scale of S, V's into P and the unit of O
// (ValueUnit).
//
// Who owns what: K and V tiles belong to the block, a ring of `stages` pairs in swizzled shared memory. One pair is a
// ring as well where copies are asynchronous: V comes while S is computed, the next K while O is. Row warp w owns
// rows [w * kWarpRows, + kWarpRows) of the Q tile with their m and l; S, P and O are registers, and so is Q where they
// suffice. Where a row of O is too long for one warp (d > 128 on Turing), `dim_warps` warps share the rows: each
// computes S for its part of the keys, P goes to the others through shared memory, and each owns its part of the
// columns of O.
//
// block.cuh says what a block is, copies.cuh how its data come and go. What differs between architectures is a Machine
// (device/sm75.cuh, device/sm80.cuh): the product's instruction and the way a tile gets to shared memory.
//
// Bound: tensor cores; at d = 64 also the issue slots of the softmax between the two products; from d = 128 on also
// shared memory, whose every byte read feeds row_tiles * 16 rows.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include "device/lagged_softmax.cuh"
#include "device/score_mod.cuh"
#include "device/value_unit.cuh"
#include "forward/mma/block.cuh"
#include "forward/mma/copies.cuh"
#include "forward/mma/key_value_ring.cuh"
#include "forward/mma/problems.h"
#include "forward_shapes.h"

namespace flash_wmma::mma {

/// Q as the first product's operand: fragments in registers, or loaded from shared memory at each use.
template <class Tile>
struct QOperand {
    std::uint32_t fragments[Tile::kRowTiles][Tile::kQSteps > 0 ? Tile::kQSteps : 1][4];

    __device__ __forceinline__ void load(Smem<Tile>& smem, const Thread<Tile>& thread) {
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
            for (int c = 0; c < Tile::kQSteps; ++c) fetch(fragments[r][c], smem, thread, r, c);
    }
    __device__ __forceinline__ void get(std::uint32_t (&a)[4], Smem<Tile>& smem, const Thread<Tile>& thread, int r,
                                        int c) const {
        if (c < Tile::kQSteps)
#pragma unroll
            for (int i = 0; i < 4; ++i) a[i] = fragments[r][c][i];
        else fetch(a, smem, thread, r, c);
    }

  private:
    __device__ __forceinline__ static void fetch(std::uint32_t (&a)[4], Smem<Tile>& smem, const Thread<Tile>& thread,
                                                 int r, int c) {
        const typename SharedMemory<Tile>::QRows::Lane lane(thread.lane % 16, thread.lane / 16 * 8);
        ptx::ldmatrix_x4(a, lane.of(smem.q[thread.row_warp], 16 * r, 16 * c));
    }
};

/// S = Q K^T.
template <class Tile>
__device__ __forceinline__ void multiply_qk(Scores<Tile>& s, const QOperand<Tile>& q, Smem<Tile>& smem,
                                            const typename SharedMemory<Tile>::KeyRows& k, const Thread<Tile>& thread) {
    s.clear();
    // Of ldmatrix's four: the second along d of the first 8 keys. Otherwise the lanes are as for Q and V, with the same
    // offsets in the same registers.
    constexpr int kSecond = Tile::Machine::kPairsB ? 1 : 2;
    const int row = kSecond == 1 ? thread.lane / 16 * 8 + thread.lane % 8 : thread.lane % 16;
    const int column = kSecond == 1 ? thread.lane / 8 % 2 * 8 : thread.lane / 16 * 8;
    const typename SharedMemory<Tile>::KeyRows::Lane k_lane(thread.warp_key() + row, column);
#pragma unroll
    for (int c = 0; c < Tile::kD / 16; ++c) {
        std::uint32_t a[Tile::kRowTiles][4];
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) q.get(a[r], smem, thread, r, c);
#pragma unroll
        for (int j = 0; j < Tile::kWarpKeys / 16; ++j) {
            std::uint32_t b[4];  // 16 keys x 16 of d
            ptx::ldmatrix_x4(b, k_lane.of(k, 16 * j, 16 * c));
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r) {
                Tile::Machine::template multiply<typename Tile::T>(s.block[r][2 * j], a[r], b[0], b[kSecond]);
                Tile::Machine::template multiply<typename Tile::T>(s.block[r][2 * j + 1], a[r], b[3 - kSecond], b[3]);
            }
        }
    }
}

/// O += P V.
template <class Tile>
__device__ __forceinline__ void multiply_pv(Output<Tile>& o, const Weights<Tile>& weights, Smem<Tile>& smem,
                                            const typename SharedMemory<Tile>::KeyRows& v, const Thread<Tile>& thread) {
    const int row = thread.lane % 16, column = thread.lane / 16 * 8;
    const typename SharedMemory<Tile>::WeightRows::Lane p_lane(thread.warp_row() + row, column);
    const typename SharedMemory<Tile>::KeyRows::Lane v_lane(row, thread.warp_column() + column);
#pragma unroll
    for (int j = 0; j < Tile::kBc / 16; ++j) {
        std::uint32_t a[Tile::kRowTiles][4];
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) {
            if constexpr (Tile::kDimWarps == 1)
#pragma unroll
                for (int i = 0; i < 4; ++i) a[r][i] = weights[r][j][i];
            else ptx::ldmatrix_x4(a[r], p_lane.of(smem.p, 16 * r, 16 * j));
        }
#pragma unroll
        for (int c = 0; c < Tile::kWarpColumns / 16; ++c) {
            std::uint32_t b[4];  // 16 keys x 16 columns
            ptx::ldmatrix_x4_trans(b, v_lane.of(v, 16 * j, 16 * c));
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r) {
                Tile::Machine::template multiply<typename Tile::T>(o.block[r][2 * c], a[r], b[0], b[1]);
                Tile::Machine::template multiply<typename Tile::T>(o.block[r][2 * c + 1], a[r], b[2], b[3]);
            }
        }
    }
}

/// P from the accumulators of the first product to the operand of the second: an accumulator's 16x8 tile is half of a
/// 16x16 operand, element for element.
template <class Tile>
__device__ __forceinline__ void hand_over(Weights<Tile>& weights, const Scores<Tile>& p, Smem<Tile>& smem,
                                          const Thread<Tile>& thread) {
    p.each_pair([&](float x, float y, int i, int j) {
        const std::uint32_t pair = packed<typename Tile::T>(x, y);
        if constexpr (Tile::kDimWarps == 1) {
            weights[i / 2][j / 2][j % 2 * 2 + i % 2] = pair;
        } else {
            const int row = thread.warp_row() + 8 * i + thread.row();
            *reinterpret_cast<std::uint32_t*>(smem.p.at(row, thread.warp_key() + 8 * j) + thread.column()) = pair;
        }
    });
}

/// Whether it holds in every lane of the warps that share these rows, which meet.
template <class Tile>
__device__ __forceinline__ bool all_agree(bool holds, Smem<Tile>& smem, const Thread<Tile>& thread) {
    bool all = __all_sync(kWarpMask, holds);
    if constexpr (Tile::kDimWarps > 1) {
        auto& fits = smem.fits[thread.row_warp];
        if (thread.lane == 0) fits[thread.dim_warp] = all;
        meet(thread);
#pragma unroll
        for (const int other : fits) all &= other != 0;
    }
    return all;
}

/// Combines (maximum or sum) the values of each row over the lanes, and over the warps that share it, which meet.
template <class Tile, class Combine>
__device__ __forceinline__ void combine_rows(PerRow<Tile>& values, Smem<Tile>& smem, const Thread<Tile>& thread,
                                             Combine combine) {
    const auto row = [&](int i) { return thread.warp_row() + 8 * i + thread.row(); };
    values.each([&](int i, float& x) {
        x = over_quad(x, combine);
        if constexpr (Tile::kDimWarps > 1)
            if (thread.lane % 4 == 0) smem.row[thread.dim_warp][row(i)] = x;
    });
    if constexpr (Tile::kDimWarps > 1) {
        meet(thread);
        values.each([&](int i, float& x) {
            x = smem.row[0][row(i)];
#pragma unroll
            for (int w = 1; w < Tile::kDimWarps; ++w) x = combine(x, smem.row[w][row(i)]);
        });
    }
}

/// Scores of keys that a row does not see become -inf: those left of its first where `left`, right of its last where
/// `right`. The tile begins at `key`.
template <class Tile, Problems kProblems>
__device__ __forceinline__ void hide(Scores<Tile>& s, const Work<Tile>& work, int key, bool left, bool right) {
    // Asked anew where plain tiles have no registers left for what is needed here, or are faster without it
    const int tid = static_cast<int>(threadIdx.x);
    constexpr bool kAnew = kProblems == kAny || (kProblems == kDense && Tile::kD <= 64) ||
                           (Tile::Machine::kThroughRegisters && Tile::kDimWarps == 1);
    const Thread<Tile> thread(kAnew ? ptx::opaque(tid) : tid);
    const int first_key = key + thread.warp_key() + thread.column();
    const auto hide_where = [&](auto hidden) {
#pragma unroll
        for (int i = 0; i < s.kRows; ++i) {
            const auto hides = hidden(work.tile.row(thread.warp_row() + 8 * i + thread.row()).query);
            s.each_in_row(i, [&](float& x, int column) {
                if (hides(column)) x = -INFINITY;
            });
        }
    };
    if (left)
        hide_where([&](int query) {
            return [begin = work.mask.begin(query) - first_key](int offset) { return offset < begin; };
        });
    if (right)
        hide_where(
            [&](int query) { return [end = work.mask.end(query) - first_key](int offset) { return offset >= end; }; });
}

/// Each row's maximum of its scores in this tile. Warps that share rows meet.
template <class Tile>
__device__ __forceinline__ PerRow<Tile> row_maximum(const Scores<Tile>& s, Smem<Tile>& smem,
                                                    const Thread<Tile>& thread) {
    PerRow<Tile> top = s.row_maximum();
    combine_rows<Tile>(top, smem, thread, [](float x, float y) { return fmaxf(x, y); });
    return top;
}

/// S *= factor.
template <class Tile>
__device__ __forceinline__ void multiply_by(Scores<Tile>& s, float factor) {
    s.each([&](float& x, int, int) { x = __fmul_rn(x, factor); });
}

// spills: sm_80 sm_90: packed and general tiles at the register limit keep up to 36 loop-invariant values (bounds,
// addresses) in local memory, most of them for the exact path; tiles that avoid it are slower (docs/tuning/mma.md).
template <class Tile, Problems kProblems>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm) forward(const __grid_constant__ ForwardParams p) {
    constexpr int kBc = Tile::kBc;
    constexpr bool kPackedToo = kProblems != kDense, kModifies = kProblems == kAny;
    constexpr bool kMayScale = kModifies && std::is_same_v<typename Tile::T, half>;  // converted inputs
    auto& smem = shared_memory<Smem<Tile>>();
    const Thread<Tile> thread;
    const Assignment assigned = kPackedToo ? assignment<Tile::kBr>(p) : dense_assignment<Tile::kBr>(p);
    if (kPackedToo && (assigned.tile.first_row < 0 || assigned.tile.first_row >= assigned.sequence.seqlen_q)) return;
    const Work<Tile> work(p, assigned);
    const Sequence& sequence = work.sequence;

    int key = work.last_key();  // first of the tile that is worked on
    KeyValueRing<Tile> ring(smem, work, key);
    QOperand<Tile> q;
    ring.start(key);
    copy_q<Tile>(smem, work, thread);
    ptx::cp_async_commit();
    if constexpr (Tile::kQSharesRing) {
        meet(thread);
        q.load(smem, thread);
        __syncthreads();
    }
    ring.run_ahead();
    if constexpr (!Tile::kQSharesRing) {
        ptx::cp_async_wait<Tile::kAhead - 1>();
        meet(thread);
        q.load(smem, thread);
    }

    // Where tiles begin that have a key that some row of the warp sees, and those whose keys all its rows see
    const int first_query = work.tile.row(thread.warp_row()).query;
    const int last_query = min(work.tile.row(thread.warp_row() + Tile::kWarpRows - 1).query, sequence.seqlen_q - 1);
    const int some_begin = work.mask.begin(first_query) - kBc + 1;
    const int some_end = first_query <= last_query ? work.mask.end(last_query) : some_begin;
    const int all_begin = work.mask.begin(last_query), all_end = work.mask.end(first_query) - kBc + 1;

    const float q_scale = kMayScale ? work.query_scale(thread.warp_row()) : p.scale * kLog2e;
    ValueUnit unit(kMayScale && p.exponents.v);
    Output<Tile> o;
    LaggedSoftmax<Tile::kWarpRows> softmax;
    o.clear();

    for (int left = work.tiles; left > 0; ring.end_tile(left), --left, key -= kBc) {
        ring.begin_tile(left);
        const bool sees = key >= some_begin && key < some_end;
        ValueUnit::Step value{0.f, 0.f};
        Weights<Tile> weights;
        PerRow<Tile> sum;
        if (sees) {
            float factor = q_scale;  // from s to log2 units
            if constexpr (kMayScale)
                if (p.exponents.k) {
                    factor *= ptx::ex2(work.exponent(p.exponents.k, key));
                    value = unit.step(work.exponent(p.exponents.v, key));
                }
            const auto modify = [&, scale = factor](Scores<Tile>& s) {
                if constexpr (kModifies) {
                    if (!ScoreMod<kModifies>::active(p)) return;
                    // Asked anew which thread this is, so that nothing of this waits in registers through other tiles
                    const Thread<Tile> here(ptx::opaque(static_cast<int>(threadIdx.x)));
                    const ScoreMod<kModifies> mod(p, sequence, work.tile);
                    const auto at = [&](int i, int j, int e) -> float& { return s.at(i, j, e); };
                    const auto query = [&](int i) { return work.tile.row(here.warp_row() + 8 * i + here.row()).query; };
                    mod.template apply<Scores<Tile>::kRows, Tile::kWarpKeys / 8>(at, scale, query,
                                                                           key + here.warp_key() + here.column());
                }
            };
            if (ScoreMod<kModifies>::active(p)) factor = 1.f;

            Scores<Tile> s;
            PerRow<Tile> top, offset;
            // P and its sums. Lagged: with the old m, and false if a weight may have overflowed. Otherwise, and true: S
            // masked, m exact, O and l rescaled to it.
            const auto weigh_tile = [&](bool lagged) {
                if (lagged) offset.each([&](int i, float& x) { x = value.weight - softmax.m[i]; });
                multiply_qk<Tile>(s, q, smem, ring.k(), thread);
                modify(s);
                if (!lagged) {
                    const bool positive = factor > 0.f;
                    if (!positive) {
                        multiply_by<Tile>(s, factor);
                        factor = 1.f;
                    }
                    hide<Tile, kProblems>(s, work, key, key < all_begin, key >= all_end);
                    top = row_maximum<Tile>(s, smem, thread);
                    top.each([&](int i, float x) {
                        const auto [base, rescale] = softmax.raise(i, x * factor);
                        offset[i] = value.weight - base;
                        o.scale_row(i, rescale * ptx::ex2(value.rescale));
                    });
                    softmax.settled = __all_sync(kWarpMask, positive && softmax.moderate());
                    if (!softmax.settled) {  // products are rounded, as m is, before m is subtracted
                        multiply_by<Tile>(s, factor);
                        factor = 1.f;
                        offset.each([&](int i, float& x) {
                            x = value.weight;
                            s.each_in_row(i, [&](float& score, int) { score -= softmax.base(softmax.m[i]); });
                        });
                    }
                }
                sum = weigh(s, factor, offset);
                hand_over<Tile>(weights, s, smem, thread);
                if (!lagged) {
                    meet(thread);
                    return true;
                }
                return all_agree<Tile>(softmax.template fits<typename Tile::T>(sum), smem, thread);
            };
            // A tile that every row sees, not the first
            const bool may_lag = softmax.settled && key >= all_begin && key < all_end && value.rescale == 0.f;
            // ScoreMods make this code long: one copy where a few instructions more a tile do not matter
            if constexpr (kModifies && !Tile::Machine::kThroughRegisters) {
                for (bool lagged = may_lag; !weigh_tile(lagged);) lagged = false;
            } else {
                bool done = false;
                if (may_lag) done = weigh_tile(true);
                if (!done) weigh_tile(false);
            }
        }

        ring.between_products(left);
        if (sees) {
            softmax.l.each([&](int i, float& x) { x = kMayScale ? fmaf(sum[i], ptx::ex2(-value.weight), x) : x + sum[i]; });
            multiply_pv<Tile>(o, weights, smem, ring.v(), thread);
        }
    }

    combine_rows<Tile>(softmax.l, smem, thread, [](float x, float y) { return x + y; });
    PerRow<Tile> inverse_l;  // times O's unit; 0 for a row that saw no key
    softmax.l.each([&](int i, float sum) {
        const float lse = (softmax.m[i] + __log2f(sum)) * kLn2;  // without a key -inf + -inf
        inverse_l[i] = sum == 0.f ? 0.f : __fdividef(exp2f(unit.exponent), sum);
        const auto [query, head] = work.tile.row(thread.warp_row() + 8 * i + thread.row());
        if (thread.dim_warp == 0 && thread.lane % 4 == 0 && query < sequence.seqlen_q)
            p.lse[kPackedToo ? lse_index(p, sequence, head, query) : lse_index(p, sequence.index, head, query)] = lse;
    });
    using T = typename Tile::T;  // converted inputs: O is what they were
    if (!kMayScale || p.out_dtype == Element<T>::kDType) store_o<T>(work, o, inverse_l, thread);
    else if (Tile::Machine::kMultipliesBf16 || p.out_dtype == DType::kFloat32)
        store_o<float>(work, o, inverse_l, thread);
    else store_o<bf16>(work, o, inverse_l, thread);
}

template <class Tile, Problems kProblems>
void launch_tile(const ForwardParams& p, Stream stream) {
    const LaunchConfig config{assignment_grid(p, Tile::kBr), dim3(Tile::kThreads), sizeof(Smem<Tile>)};
    launch(forward<Tile, kProblems>, config, stream, p);
}

template <class Tile, Problems kProblems>
Shape shape(int min_arch, float blocks_per_sm, int resident) {
    return {{Element<typename Tile::T>::kDType, min_arch, Tile::kD, Tile::kBr, Tile::kBc, Tile::kWarps, Tile::kStages,
             sizeof(Smem<Tile>), reinterpret_cast<const void*>(forward<Tile, kProblems>)},
            kProblems,
            blocks_per_sm,
            resident,
            launch_tile<Tile, kProblems>};
}

}  // namespace flash_wmma::mma
