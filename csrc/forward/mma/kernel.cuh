// The kernel of mma_sm80 and mma_sm75: FlashAttention-2 forward on mma.sync and ldmatrix.
//
// Algorithm (FlashAttention-2, Algorithm 1): a block owns Br = row_warps * row_tiles * 16 query rows of one head and
// loops over K/V tiles of Bc keys, from the last visible one back to the first:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
// The loop runs backwards because the tile masked for causality or length is then as a rule the first one, which needs
// the exact maximum in any case.
//
// Lagged maximum: m need not be the true maximum, only close enough that P fits T. The first tile and masked tiles set
// m exactly; a plain tile uses the old m and the warp votes that no partial row sum passed Element<T>::kLargestSum.
// Only if the vote fails is the tile recomputed with the exact maximum, and O and l rescaled. Beyond 2^24 m is always
// exact.
//
// Converted inputs (convert.h): K's and Q's exponents fold into the scale of S, V's into P and the unit of O
// (ValueUnit).
//
// Who owns what: K and V tiles belong to the block, a ring of `stages` pairs in swizzled shared memory. With
// asynchronous copies a ring may have one pair: V comes while S is computed, the next K while O is. Row warp w owns
// rows [w * kWarpRows, + kWarpRows) of the Q tile with their m and l. S, P and O are in registers, and so is Q if they
// suffice. If a row of O is too long for one warp (d > 128 on Turing), `dim_warps` warps share the rows: each computes
// S for its part of the keys, P goes to the others through shared memory, and each owns its part of the columns of O.
// If V's tile or a row of O is too long for a block (d = 512), several blocks share the rows in the same way, except
// that each of them computes the whole of S.
//
// block.cuh says what a block is, copies.cuh and key_value_ring.cuh how its data come and go. A Machine holds the
// differences between architectures (device/sm75.cuh, device/sm80.cuh): the product's instruction and a tile's way to
// shared memory.
//
// Bound: tensor cores; at d = 64 also the issue slots of the softmax between the two products; from d = 128 on also
// shared memory, of which each byte read feeds row_tiles * 16 rows.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include "device/dropout_tile.cuh"
#include "device/hide_keys.cuh"
#include "device/score_mod.cuh"
#include "device/value_unit.cuh"
#include "device/visible_tiles.cuh"
#include "forward/mma/block.cuh"
#include "forward/mma/copies.cuh"
#include "forward/mma/key_value_ring.cuh"
#include "forward/mma/products.cuh"
#include "forward/mma/split.cuh"
#include "forward_shapes.h"

namespace flash_wmma::mma {

/// The tiles that the warp's rows see.
template <class Tile, class Mask>
__device__ __forceinline__ VisibleTiles<Tile::kGroupKeys> visible_tiles(const Work<Tile>& work, const Mask& mask,
                                                                        const Thread<Tile>& thread) {
    const int last_row = thread.warp_row() + Tile::kWarpRows - 1;
    return {mask, work.tile.row(thread.warp_row()).query,
            min(work.tile.row(last_row).query, work.sequence.seqlen_q - 1)};
}

/// Whether an instance takes key ranges. Rows of a grouped tile are of several heads, and a cache has no ranges.
template <class Tile, Problems kProblems>
inline constexpr bool kTakesRanges = includes(kProblems, Problems::kModified) && !Tile::kCached;

/// Whether an instance takes dropout. A cache has none.
template <class Tile, Problems kProblems>
inline constexpr bool kTakesDropout = includes(kProblems, Problems::kDropped) && !Tile::kCached;

/// Dropout of a warp's weights, which have been summed: of its operand of O's product, or, if P goes through shared
/// memory, of the accumulators before.
template <class Tile, Problems kProblems>
class Dropping {
    static constexpr bool kTakes = kTakesDropout<Tile, kProblems>;
    // In one basic block with the products, so that ptxas puts it between them
    static constexpr bool kAlways = !includes(kProblems, Problems::kModified);

  public:
    __device__ __forceinline__ explicit Dropping(const Work<Tile>& work) {
        if constexpr (kTakes) {
            const Dropout& dropout = work.p.dropout;
            drops_ = kAlways || dropout.rng_state;
            if (drops_) mask_ = {dropout_state(dropout), dropout.origin, work.sequence.index, work.tile.head};
        }
    }
    __device__ __forceinline__ void before_exchange(Scores<Tile>& s, const Work<Tile>& work, int key) const {
        if constexpr (kTakes && Tile::kDimWarps > 1) {
            if (!drops_) return;
            const Thread<Tile> here(ptx::opaque(static_cast<int>(threadIdx.x)));
            KeptTile<false, Tile::kWarpRows, Tile::kWarpKeys>(
                work.p.dropout, mask_, work.tile.row(here.warp_row()).query, key + here.warp_key())
                .each([&](int i, int column, bool kept) {
                    float& x = s.at(i, column);
                    x = kept ? x : 0.f;
                });
        }
    }
    __device__ __forceinline__ void before_product(Weights<Tile>& weights, const Work<Tile>& work, int key) const {
        if constexpr (kTakes && Tile::kDimWarps == 1) {
            if (!drops_) return;
            const Thread<Tile> here(ptx::opaque(static_cast<int>(threadIdx.x)));
            drop(weights, work.p.dropout, mask_, work.tile.row(here.warp_row()).query, key);
        }
    }

  private:
    bool drops_ = false;
    DropoutMask mask_;
};

/// A warp's first product and softmax, which make P of a tile in attempts (device/lagged_softmax.cuh). The kernel's
/// body decides between the attempts: a method that does so makes ptxas spend more moves (docs/tuning/structure.md).
template <class Tile, Problems kProblems>
struct Weigher {
    static constexpr bool kModifies = includes(kProblems, Problems::kModified);
    using Mod = ScoreMod<kModifies>;

    const Work<Tile>& work;
    const KeyMask<kTakesRanges<Tile, kProblems>>& mask;
    Smem<Tile>& smem;
    const Thread<Tile>& thread;
    const VisibleTiles<Tile::kGroupKeys>& visible;
    const QOperand<Tile>& q;
    const KeyRows<Tile>& k;
    const Dropping<Tile, kProblems>& dropping;
    const int key;      // the group's first of the tile
    const float scale;  // from a product to log2 units
    const ValueUnit::Step value;
    float factor = Mod::active(work.p) ? 1.f : scale;  // from a score to log2 units

    /// P and its sums, which the caller adds to l if this succeeds. Lagged: uses the old m; returns false if a
    /// weight may have overflowed. Otherwise: uses the exact maximum, updates m, l and O to it, and returns true.
    __device__ __forceinline__ bool weigh(bool lagged, Weights<Tile>& weights, PerRow<Tile>& sums,
                                          Softmax<Tile>& softmax, Output<Tile>& o) {
        Scores<Tile> s;
        PerRow<Tile> offset;
        if (lagged) offset.each([&](int i, float& x) { x = value.weight - softmax.m[i]; });
        multiply_qk<Tile>(s, q, smem, k, thread);
        modify(s);
        if (!lagged) settle(s, offset, softmax, o);
        sums = flash_wmma::weigh(s, factor, offset);
        dropping.before_exchange(s, work, key);
        hand_over<Tile>(weights, s, smem, thread);
        if (!lagged) {
            meet(thread);
            return true;
        }
        return all_agree<Tile>(softmax.template fits<typename Tile::T>(sums), smem, thread);
    }

    /// The exact path: masks S, makes m exact, and rescales O and l to it.
    __device__ __forceinline__ void settle(Scores<Tile>& s, PerRow<Tile>& offset, Softmax<Tile>& softmax,
                                           Output<Tile>& o) {
        const bool positive = factor > 0.f;
        if (!positive) round_products(s);
        hide(s, key < visible.all_begin, key >= visible.all_end);
        PerRow<Tile> top = s.row_maximum();
        combine_warps<Tile>(top, smem, thread, [](float x, float y) { return fmaxf(x, y); });
        top.each([&](int i, float x) {
            const auto [base, rescale] = softmax.raise(i, x * factor);
            offset[i] = value.weight - base;
            o.scale_row(i, rescale * ptx::ex2(value.rescale));
        });
        softmax.settled = __all_sync(kWarpMask, positive && softmax.moderate());
        if (!softmax.settled) {
            round_products(s);
            offset.each([&](int i, float& x) {
                x = value.weight;
                s.each_in_row(i, [&](float& score, int) { score -= softmax.base(softmax.m[i]); });
            });
        }
    }

    /// Rounds products to scores, as m is rounded.
    __device__ __forceinline__ void round_products(Scores<Tile>& s) {
        s.each([&](float& x, int, int) { x = __fmul_rn(x, factor); });
        factor = 1.f;
    }

    __device__ __forceinline__ void modify(Scores<Tile>& s) const {
        if constexpr (kModifies) {
            if (!Mod::active(work.p)) return;
            // Computes this thread's place again, so that it takes no registers in plain tiles
            const Thread<Tile> here(ptx::opaque(static_cast<int>(threadIdx.x)));
            if constexpr (Tile::kCached) {  // each row has a head of its own
#pragma unroll
                for (int i = 0; i < Scores<Tile>::kRows; ++i) {
                    const QTile::Row row = work.tile.row(here.warp_row() + 8 * i + here.row());
                    const Mod mod(work.p, work.sequence, {.batch = 0, .head = row.head, .head_k = 0, .first_row = 0});
                    const auto at = [&](int, int j, int e) -> float& { return s.at(i, 8 * j + e); };
                    mod.template apply<1, Tile::kWarpKeys / 8>(
                        at, scale, [&](int) { return row.query; }, key + here.warp_key() + here.column());
                }
            } else {
                const Mod mod(work.p, work.sequence, work.tile);
                const auto at = [&](int i, int j, int e) -> float& { return s.at(i, 8 * j + e); };
                const auto query = [&](int i) { return work.tile.row(here.warp_row() + 8 * i + here.row()).query; };
                mod.template apply<Scores<Tile>::kRows, Tile::kWarpKeys / 8>(at, scale, query,
                                                                             key + here.warp_key() + here.column());
            }
        }
    }

    /// Scores of keys that a row does not see become -inf: those left of its first key if `left`, right of its last key
    /// if `right`.
    __device__ __forceinline__ void hide(Scores<Tile>& s, bool left, bool right) const {
        // Computes this thread's place again if plain tiles have no registers left for it, or are faster that way
        constexpr bool kAnew = kModifies || (kProblems == Problems::kPlain && Tile::kD <= 64) ||
                               (Tile::Machine::kThroughRegisters && Tile::kDimWarps == 1);
        const int tid = static_cast<int>(threadIdx.x);
        const Thread<Tile> here(kAnew ? ptx::opaque(tid) : tid);
        hide_keys(
            s, mask, [&](int i) { return work.tile.row(here.warp_row() + 8 * i + here.row()).query; },
            key + here.warp_key() + here.column(), left, right);
    }
};

/// One item: a Q tile with the keys that `narrow` leaves of those it sees. wait(copies) comes before the first copy.
/// Then nothing is done unless goes_on(), which comes when the first copies are under way: it may need what is on its
/// way since wait(). finish(work, m, l, o, unit's exponent) takes what a warp has.
template <class Tile, Problems kProblems, class Narrow, class Wait, class GoesOn, class Finish>
__device__ __forceinline__ void attend(const ForwardParams& p, const typename Work<Tile>::Assigned& assigned,
                                       Smem<Tile>& smem, const Thread<Tile>& thread, Narrow narrow, Wait wait,
                                       GoesOn goes_on, Finish finish) {
    constexpr int kBc = Tile::kBc;
    constexpr bool kMayScale = includes(kProblems, Problems::kConverted);
    const auto mask = key_mask<kTakesRanges<Tile, kProblems>>(p, assigned.sequence, assigned.tile.row(0).head);
    Work<Tile> work(p, assigned, mask);
    narrow(work);

    int key = work.last_key() + thread.group_key();  // the group's first of the tile that is worked on
    KeyValueCopies<Tile> copies(work, key);
    KeyValueRing<Tile> ring(smem, work);
    QOperand<Tile> q;
    wait(copies);
    if (Tile::kQSharesRing && !goes_on()) return;
    copies.begin();
    ring.start(copies, key);
    copy_q<Tile>(smem, work, thread);
    ptx::cp_async_commit();
    if constexpr (Tile::kQSharesRing) {
        meet(thread);
        q.load(smem, thread);
        meet_group<Tile>();
    }
    ring.run_ahead(copies);
    if constexpr (!Tile::kQSharesRing) {
        if (!goes_on()) {
            ptx::cp_async_wait<0>();
            return;
        }
        ptx::cp_async_wait<Tile::kAhead - 1>();
        meet(thread);
        q.load(smem, thread);
    }

    const auto visible = visible_tiles(work, mask, thread);
    const Dropping<Tile, kProblems> dropping(work);
    const float q_scale = kMayScale ? work.query_scale(thread.warp_row()) : p.scale * kLog2e;
    ValueUnit unit(kMayScale && p.exponents.v);
    Output<Tile> o;
    Softmax<Tile> softmax;
    o.clear();

    for (int left = work.tiles; left > 0; ring.end_tile(copies, left), --left, key -= kBc) {
        ring.begin_tile(copies, left);
        const bool sees = visible.some(key);
        ValueUnit::Step value{0.f, 0.f};
        Weights<Tile> weights;
        PerRow<Tile> sums;
        if (sees) {                 // P = exp2(Q K^T - m)
            float scale = q_scale;  // from a product to log2 units
            if constexpr (kMayScale)
                if (p.exponents.k) {
                    scale *= ptx::ex2(work.exponent(p.exponents.k, key));
                    value = unit.step(work.exponent(p.exponents.v, key));
                }
            Weigher<Tile, kProblems> tile{work, mask, smem, thread, visible, q, ring.k(), dropping, key, scale, value};
            const auto attempt = [&](bool lagged) { return tile.weigh(lagged, weights, sums, softmax, o); };
            // A tile that every row sees, not the first
            const bool may_lag = softmax.settled && visible.all(key) && value.rescale == 0.f;
            // ScoreMods make this code long: one copy of it where a few more instructions a tile do not matter
            if constexpr (includes(kProblems, Problems::kModified) && !Tile::Machine::kThroughRegisters) {
                for (bool lagged = may_lag; !attempt(lagged);) lagged = false;
            } else {
                bool done = false;
                if (may_lag) done = attempt(true);
                if (!done) attempt(false);
            }
        }
        ring.between_products(copies, left);
        if (sees) {  // l += rowsum(P), O += P V
            softmax.l.each(
                [&](int i, float& x) { x = kMayScale ? fmaf(sums[i], ptx::ex2(-value.weight), x) : x + sums[i]; });
            dropping.before_product(weights, work, key);
            multiply_pv<Tile>(o, weights, smem, ring.v(), thread);
        }
    }

    const auto add = [](float x, float y) { return x + y; };
    softmax.l.each([&](int, float& l) { l = over_quad(l, add); });
    combine_warps<Tile>(softmax.l, smem, thread, add);
    finish(work, softmax, o, unit.exponent);
}

/// The work of this block.
template <class Tile, bool kPackedToo>
__device__ __forceinline__ auto assigned_to_block(const ForwardParams& p) {
    if constexpr (kPackedToo) return assignment<Tile::kBr>(p);
    else return dense_assignment<Tile::kBr>(p);
}

// spills: sm_75 sm_80 sm_90: packed and general tiles at the register limit keep up to 50 loop-invariant values
// (bounds, addresses) in local memory, most of them for the exact path; tiles that avoid it are slower
// (docs/tuning/mma.md). sm_75's tiles of d = 512 keep up to 80, some of them vectors on their way to shared memory.
template <class Tile, Problems kProblems>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm) forward(const __grid_constant__ ForwardParams p) {
    constexpr bool kPackedToo = includes(kProblems, Problems::kPacked);
    auto& smem = shared_memory<Smem<Tile>>();
    const Thread<Tile> thread;
    const auto assigned = assigned_to_block<Tile, kPackedToo>(p);
    if (kPackedToo && (assigned.tile.first_row < 0 || assigned.tile.first_row >= assigned.sequence.seqlen_q)) return;
    attend<Tile, kProblems>(
        p, assigned, smem, thread, [](Work<Tile>&) {}, [](const auto&) {}, [] { return true; },
        [&](const Work<Tile>& work, const Softmax<Tile>& softmax, const Output<Tile>& o, float exponent) {
            float factor = exp2f(exponent);
            if constexpr (kTakesDropout<Tile, kProblems>)
                if (p.dropout.rng_state) factor *= kept_scale(p.dropout);
            store_result<kProblems>(work, o, softmax.m, softmax.l, factor, thread.warp_row(), thread.warp_column(),
                                    thread.dim_warp == 0, thread);
        });
}

/// The same with a key/value cache: one run of K tiles after the other (split.cuh).
// spills: sm_75 sm_80 sm_90: the bounds of the next run, and as above.
template <class Tile, Problems kProblems>
__global__ void __maxnreg__(registers_beside_merge<Tile>())
    forward_cached(const __grid_constant__ ForwardParams p, const __grid_constant__ Split split) {
    constexpr int kColumns = Tile::kWarpColumns / Tile::kKeyWarps;  // of O, of a warp at the end
    auto& block = shared_memory<BlockSmem<Tile>>();
    const Thread<Tile> thread;
    const int column = thread.warp_column() + thread.key_warp * kColumns;
    let_next_grid_start();
    Walk<Tile> walk(p, split);
    while (walk.next()) {
        attend<Tile, kProblems>(
            p, walk.assigned(), block.group[thread.key_warp].tiles, thread,
            [&](Work<Tile>& work) { walk.narrow(work); },
            [&](const KeyValueCopies<Tile>& copies) {
                walk.wait([&] {
                    if constexpr (Tile::kKeyWarps > 1) copies.fetch_ahead();  // with more rows, blocks come too late
                });
            },
            [&] {
                const bool holds = walk.holds();
                if (holds && threadIdx.x == Tile::kThreads - 1) walk.leave_record();
                return holds;
            },
            [&](const Work<Tile>& work, const Softmax<Tile>& softmax, const Output<Tile>& o, float) {
                KeyPart<kColumns> all;
                if constexpr (Tile::kKeyWarps > 1) {
                    const auto given = [&](int i) { return PartRows<Tile::kD>(block.group[i].part, thread.lane); };
                    const KeyPart<Tile::kD> own{softmax.m, softmax.l, o};
                    __syncwarp();  // the warp's K/V tiles have been used; its part takes their place
                    own.give_o(given(thread.key_warp), 0);
                    own.give_facts(given(thread.key_warp));
                    __syncthreads();
                    all = merge_parts<kColumns>(0, Tile::kKeyWarps, 1, column / 8, given);
                } else {
                    all = {softmax.m, softmax.l, o};
                }
                const int row = thread.warp_row();
                const bool first = thread.dim_warp == 0 && thread.key_warp == 0;
                if (walk.place() == Walk<Tile>::kWhole) {
                    store_result<kProblems>(work, all.o, all.m, all.l, 1.f, row, column, first, thread);
                } else {
                    stored_part<Tile>(p, walk.place()).give(all, row, column, work.rows(), first, thread.lane);
                }
                if (walk.goes_on()) __syncthreads();  // shared memory is free for the next run
            });
    }
}

template <class Tile, Problems kProblems>
void launch_tile(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    if constexpr (Tile::kCached) {
        const Split split = split_of<Tile>(p, device);
        const dim3 grid =
            split.blocks ? dim3(static_cast<unsigned>(split.blocks)) : cached_assignment_grid(p, Tile::kBr);
        LaunchConfig config{grid, dim3(Tile::kThreads), sizeof(BlockSmem<Tile>)};
        config.programmatic = may_launch_programmatically(device);
        launch(forward_cached<Tile, kProblems>, config, stream, p, split);
        launch_merge<Tile>(p, device, split, stream);
    } else {
        dim3 grid = assignment_grid(p, Tile::kBr);
        grid.y = static_cast<unsigned>((p.head_dim_v + Tile::kColumns - 1) / Tile::kColumns);
        const LaunchConfig config{grid, dim3(Tile::kThreads), sizeof(Smem<Tile>)};
        launch(forward<Tile, kProblems>, config, stream, p);
    }
}

template <class Tile, Problems kProblems>
Shape shape(int min_arch, Pays pays) {
    constexpr int kBytes = sizeof(BlockSmem<Tile>);
    static_assert(kBytes <= Tile::Machine::kSharedMemory);
    Shape found{{Element<typename Tile::T>::kDType, min_arch, Tile::kD, Tile::kBr, Tile::kBc, Tile::kWarps,
                 Tile::kStages, kBytes, nullptr},
                kProblems,
                pays,
                launch_tile<Tile, kProblems>};
    if constexpr (Tile::kCached) {
        found.facts.function = reinterpret_cast<const void*>(forward_cached<Tile, kProblems>);
        found.workspace_bytes = split_bytes<Tile>;
    } else {
        found.facts.function = reinterpret_cast<const void*>(forward<Tile, kProblems>);
    }
    return found;
}

using TableRow = flash_wmma::TableRow<TileShape>;
template <class Machine, class T, Problems kProblems, const auto& kRows>
std::vector<Shape> shapes(int min_arch) {
    return of_rows<kRows>(
        [&](auto i) { return shape<Tile<Machine, T, kRows[i].tile>, kProblems>(min_arch, kRows[i].pays); });
}
/// The same for key/value caches, with any queries and ScoreMods.
template <class Machine, class T, const auto& kRows>
std::vector<Shape> cached_shapes(int min_arch) {
    return of_rows<kRows>([&](auto i) {
        return shape<CachedTile<Machine, T, kRows[i].tile>, Problems::kGeneralCached>(min_arch, kRows[i].pays);
    });
}

}  // namespace flash_wmma::mma
