// wmma_v3: FlashAttention-2 forward, the portable WMMA API taken as far as it goes.
//
// Algorithm (FlashAttention-2, Algorithm 1): a block owns Br = warps * row_tiles * 16 query rows of one head and loops
// over K/V tiles of Bc keys:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
// The WMMA API hides which row an accumulator element belongs to, and this kernel needs to know. A 16x16 tile whose
// entries are their own index, loaded as a fragment, tells each lane the row and column of each of its elements
// (v3_fragments.cuh). With them:
//   * the softmax is exact per row, in registers: a row's scores lie in the four lanes of a quad;
//   * P goes from one product to the next in registers: element i of an accumulator and element i of a matrix_a
//     fragment are the same place of the 16x16 tile (and for half, which holds every place twice, element i + 8);
//   * a bias, ALiBi or a soft cap meets each score in its register (ScoreMod, in instances that take it), and dropout
//     each weight (KeptTile, in instances of its own).
// Hardware with another layout takes attend_opaque (v3_opaque.cuh), which works with any.
//
// Lagged maximum: m need not be the true maximum, only close enough that P fits T. The first tile and masked tiles set
// m exactly; a plain tile uses the old m and the warp votes that no partial row sum passed Element<T>::kLargestSum.
// Only if the vote fails is the tile recomputed with the exact maximum, and O and l rescaled.
//
// Converted inputs (convert.h): K's and Q's exponents fold into the scale of S. O is kept in the unit 2^u of V's
// running exponent u (ValueUnit). If a tile's exponent lies a little below u, its weights are scaled down by as much,
// and the sum for l is scaled back. Any other tile moves u, and O with it.
//
// Who owns what: warp w owns rows [w * kWarpRows, + kWarpRows) of the Q tile, their O (fragments), m and l. K and V
// tiles belong to the block, loaded with 16-byte asynchronous copies one tile ahead. Rows are padded by 16 bytes, so
// that the eight rows of a fragment load start in different banks.
//
// Bound: tensor cores and, at d = 64, the issue slots of the softmax between the two products.
#pragma once

#include <launch.h>

#include "device/lagged_softmax.cuh"
#include "forward/wmma/v3_block.cuh"
#include "forward/wmma/v3_opaque.cuh"
#include "forward/wmma/v3_shapes.h"

namespace flash_wmma::wmma_v3 {

/// S = Q K^T of a warp's rows against a K tile.
template <class Tile>
__device__ __forceinline__ void multiply_qk(Accumulator (&s)[Tile::kRowTiles][Tile::kBc / 16], const QOperand<Tile>& q,
                                            const typename Tile::T (&k)[Tile::kBc][Tile::kPitch]) {
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
        for (int j = 0; j < Tile::kBc / 16; ++j) wmma::fill_fragment(s[r][j], 0.f);
#pragma unroll(Tile::kQInRegisters ? Tile::kD / 16 : 4)
    for (int c = 0; c < Tile::kD / 16; ++c) {
        AFragment<Tile> qt[Tile::kRowTiles];
#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) qt[r] = q.template fragment<true>(r, c);
#pragma unroll
        for (int j = 0; j < Tile::kBc / 16; ++j) {
            KFragment<Tile> kt;
            load_fragment(kt, &k[16 * j][16 * c], Tile::kPitch);
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r) wmma::mma_sync(s[r][j], qt[r], kt, s[r][j]);
        }
    }
}

/// P of a warp's rows and one K tile, as the second product's operand.
template <class Tile>
using Weights = AFragment<Tile>[Tile::kRowTiles][Tile::kBc / 16];

/// Turns P from the accumulators of the first product into the operand of the second, in registers.
template <class Tile>
__device__ __forceinline__ void hand_over(Weights<Tile>& weights,
                                          const Accumulator (&p)[Tile::kRowTiles][Tile::kBc / 16]) {
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
        for (int j = 0; j < Tile::kBc / 16; ++j)
#pragma unroll
            for (int i = 0; i < 8; i += 2) {
                const auto pair = Element<typename Tile::T>::pair(p[r][j].x[i], p[r][j].x[i + 1]);
#pragma unroll
                for (int copy = i; copy < AFragment<Tile>::num_elements; copy += 8) {
                    weights[r][j].x[copy] = pair.x;
                    weights[r][j].x[copy + 1] = pair.y;
                }
            }
}

/// O += P V.
template <class Tile>
__device__ __forceinline__ void multiply_pv(OAccumulators<Tile>& o, const Weights<Tile>& weights,
                                            const typename Tile::T (&v)[Tile::kBc][Tile::kPitch]) {
#pragma unroll
    for (int j = 0; j < Tile::kBc / 16; ++j)
#pragma unroll
        for (int c = 0; c < Tile::kD / 16; ++c) {
            VFragment<Tile> vt;
            load_fragment(vt, &v[16 * j][16 * c], Tile::kPitch);
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r) wmma::mma_sync(o[r][c], weights[r][j], vt, o[r][c]);
        }
}

/// Applies the ScoreMod, if any, to S; `scale` brings a product to log2 units.
template <class Tile, Problems kProblems>
__device__ __forceinline__ void modify(Accumulator (&s)[Tile::kRowTiles][Tile::kBc / 16],
                                       const Work<Tile, kProblems>& work, float scale, int warp_row, int key) {
    constexpr bool kModified = includes(kProblems, Problems::kModified);
    if constexpr (kModified) {
        if (!ScoreMod<kModified>::active(work.p)) return;
        const ScoreMod<kModified> mod(work.p, work.sequence, work.tile);
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const auto at = [&](int i, int j, int e) -> float& {
            return s[i / 2][j / 2].x[element_of_row(i % 2, 2 * (j % 2) + e)];
        };
        const auto query = [&](int i) {
            return work.tile.row(warp_row + 16 * (i / 2) + row_of_element(lane, 2 * (i % 2))).query;
        };
        mod.template apply<2 * Tile::kRowTiles, Tile::kBc / 8>(at, scale, query, key + column_of_element(lane, 0));
    }
}

/// Below this, score * scale differs between rounded and unrounded (inside an FMA) by less than the rounding of P.
inline constexpr float kModerate = 1 << 13;

/// P = exp2(S * factor + offset), in place; returns this lane's part of the row sum.
template <class Tile>
__device__ __forceinline__ float weights_of_row(Accumulator (&s)[Tile::kBc / 16], int h, float factor, float offset) {
    float sum = 0.f;
    each_in_row(s, h, [&](float& x, int) {
        x = ptx::ex2(fmaf(x, factor, offset));
        sum += x;
    });
    return sum;
}

/// Drops weights that have been summed, in instances that take dropout.
template <class Tile, Problems kProblems>
__device__ __forceinline__ void drop_weights(Accumulator (&p)[Tile::kRowTiles][Tile::kBc / 16],
                                             const Work<Tile, kProblems>& work, const DropoutMask& mask, int warp_row,
                                             int key) {
    if constexpr (Work<Tile, kProblems>::kDrops)
        KeptTile<false, Tile::kWarpRows, Tile::kBc>(work.p.dropout, mask, work.tile.row(warp_row).query, key)
            .each([&](int i, int column, bool kept) {
                float& x = p[i / 2][column / 16].x[element_of_row(i % 2, column / 8 % 2 * 2 + column % 2)];
                x = kept ? x : 0.f;
            });
}

/// The main loop for the known fragment layout: softmax and P in registers.
template <class Tile, Problems kProblems>
__device__ __forceinline__ void attend(const Work<Tile, kProblems>& work, SharedMemory<Tile>& smem,
                                       const QOperand<Tile>& q, OAccumulators<Tile>& o, int warp_row) {
    constexpr int kBc = Tile::kBc, kRowTiles = Tile::kRowTiles;
    constexpr bool kModified = includes(kProblems, Problems::kModified);
    const ForwardParams& p = work.p;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int seqlen_q = work.sequence.seqlen_q, seqlen_k = work.sequence.seqlen_k;
    const float q_scale = work.query_scale(warp_row);

    // Keys that some row of the warp sees, and keys that all its rows see (VisibleTiles: more registers and moves)
    const int first_query = work.tile.row(warp_row).query;
    const int last_query = min(work.tile.row(warp_row + Tile::kWarpRows - 1).query, seqlen_q - 1);
    const KeyExtent keys = work.mask.extent(first_query, last_query);
    const int some_begin = keys.some_begin, some_end = first_query <= last_query ? keys.some_end : 0;
    const int all_begin = keys.all_begin, all_end = keys.all_end;

    LaggedSoftmax<Tile::kWarpRows> softmax;
    const DropoutMask dropout_mask = work.dropout_mask();

    // The second product runs one tile behind the first, so that it overlaps with the next tile's softmax.
    ValueUnit unit(work.v_exp);
    Weights<Tile> weights;  // of the tile before `key`
    bool pending = false;   // whether the weights still wait for their product
    int slot = 0;           // of the K ring; the previous V is in the other one
    for (int key = work.first_key; key < work.last_key + 1 + kBc; key += kBc, slot ^= 1) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // K of this tile and V of the previous have landed, the tiles before have been used
        const auto& k = smem.loop.k[slot];
        const auto& v = smem.loop.v[slot ^ 1];
        const int first = ptx::opaque(key);  // addresses are computed here, not kept in registers across the loop
        if (key + kBc <= work.last_key)
            copy_tile_async<Tile, kBc>(smem.loop.k[slot ^ 1], work.k, p.k.row, first + kBc, seqlen_k, p.head_dim);
        if (key <= work.last_key)
            copy_tile_async<Tile, kBc>(smem.loop.v[slot], work.v, p.v.row, first, seqlen_k, p.head_dim_v);
        ptx::cp_async_commit();

        const float scale = work.score_scale(q_scale, key);
        const float factor = ScoreMod<kModified>::active(p) ? 1.f : scale;  // from s to log2 units
        const bool visible = key < some_end && key + kBc > some_begin && key <= work.last_key;
        ValueUnit::Step value{0.f, 0.f};
        if (work.v_exp && visible) value = unit.step(work.v_exp[key / kScaleRows]);
        Accumulator s[kRowTiles][kBc / 16];

        // A tile that every row sees, after another: the old m serves if no weight overflows and scores are not large
        if (pending && key >= all_begin && key + kBc <= all_end && value.rescale == 0.f) {
            multiply_qk<Tile>(s, q, k);
            multiply_pv<Tile>(o, weights, v);
            modify(s, work, scale, warp_row, key);
            RowValues<Tile::kWarpRows> sums;
            bool moderate = true;
            sums.each([&](int i, float& sum) {
                sum = weights_of_row<Tile>(s[i / 2], i % 2, factor, value.weight - softmax.m[i]);
                moderate &= fabsf(softmax.m[i]) < kModerate;
            });
            drop_weights(s, work, dropout_mask, warp_row, key);
            hand_over<Tile>(weights, s);
            if (__all_sync(kWarpMask, moderate && softmax.template fits<typename Tile::T>(sums))) {
                softmax.l.each([&](int i, float& l) { l = fmaf(sums[i], ptx::ex2(-value.weight), l); });
                continue;
            }
        } else if (pending) {
            multiply_pv<Tile>(o, weights, v);
        }
        pending = visible;
        if (!visible) continue;

        // Any other tile: mask and scale S, make m exact, rescale O and l to it
        multiply_qk<Tile>(s, q, k);
        modify(s, work, scale, warp_row, key);
        softmax.l.each([&](int i, float& l) {
            const int r = i / 2, h = i % 2;
            const int query = work.tile.row(warp_row + 16 * r + row_of_element(lane, 2 * h)).query;
            const int begin = work.mask.begin(query) - key, end = work.mask.end(query) - key;
            float top = -INFINITY;
            each_in_row(s[r], h, [&](float& x, int element) {
                const int column = 16 * (element / 8) + column_of_element(lane, element % 8);
                x = column >= begin && column < end ? x * factor : -INFINITY;
                top = fmaxf(top, x);
            });
            const auto [base, rescale] = softmax.raise(i, over_quad(top, [](float x, float y) { return fmaxf(x, y); }));
            each_in_row(s[r], h, [&, base = base](float& x, int) { x -= base; });
            l = fmaf(weights_of_row<Tile>(s[r], h, 1.f, value.weight), ptx::ex2(-value.weight), l);
            const float rescale_o = rescale * ptx::ex2(value.rescale);
            each_in_row(o[r], h, [&](float& x, int) { x *= rescale_o; });
        });
        drop_weights(s, work, dropout_mask, warp_row, key);
        hand_over<Tile>(weights, s);
    }

    softmax.l.each([&](int i, float l) {
        const float total = over_quad(l, [](float x, float y) { return x + y; });
        if (lane % 4 == 0)
            finish_row(work, smem, unit, warp_row + 16 * (i / 2) + row_of_element(lane, 2 * (i % 2)), softmax.m[i],
                       total);
    });
}

// spills: sm_75 sm_80 sm_90: the tiles at the register limit (on sm_75 the general ones of d = 256 alone) keep up to a
// dozen loop-invariant values (addresses, bounds; with dropout on sm_75 three dozen) in local memory, written once a
// block and read a few times a tile; tiles that avoid it are slower (docs/tuning).
template <class Tile, Problems kProblems>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm) forward(const __grid_constant__ ForwardParams p) {
    using T = typename Tile::T;
    auto& smem = shared_memory<SharedMemory<Tile>>();
    const Work<Tile, kProblems> work(p);
    if (work.idle()) return;
    const int tid = static_cast<int>(threadIdx.x), warp_row = tid / 32 * Tile::kWarpRows;
    const Sequence& sequence = work.sequence;

    // Start the copies of Q and the first K tile; write the index tiles meanwhile
    const T* queries = row_of<const T>(p.q, work.tile.batch, work.tile.head, sequence.first_q);
    copy_tile_async<Tile, Tile::kBr>(smem.q(), queries, p.q.row, work.tile.first_row, sequence.seqlen_q, p.head_dim);
    ptx::cp_async_commit();
    copy_tile_async<Tile, Tile::kBc>(smem.loop.k[0], work.k, p.k.row, work.first_key, sequence.seqlen_k, p.head_dim);
    ptx::cp_async_commit();
    for (int i = tid; i < 256; i += Tile::kThreads) {
        smem.start.index[i / 16][i % 16] = Element<T>::from(static_cast<float>(i));
        smem.start.index_f32[i / 16][i % 16] = static_cast<float>(i);
    }
    ptx::cp_async_wait<1>();
    __syncthreads();
    if (Tile::kHandover == Handover::kShared || !layout_is_known<Tile>(smem.start.index[0], smem.start.index_f32[0])) {
        attend_opaque<Tile, kProblems>(p);
        return;
    }
    QOperand<Tile> q;
    q.load(smem, warp_row);
    OAccumulators<Tile> o;
    clear<Tile>(o);
    attend(work, smem, q, o, warp_row);

    ptx::cp_async_wait<0>();
    __syncthreads();  // K/V tiles have been used; O takes their place
    store_o(work, smem, o, warp_row);
}

template <class Tile, Problems kProblems>
void launch_tile(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    const LaunchConfig config{assignment_grid(p, Tile::kBr), dim3(Tile::kThreads), sizeof(SharedMemory<Tile>)};
    launch(forward<Tile, kProblems>, config, stream, p);
}

template <class Tile, Problems kProblems>
Shape shape(int min_arch, Pays pays = {}) {
    return {{Element<typename Tile::T>::kDType, min_arch, Tile::kD, Tile::kBr, Tile::kBc, Tile::kWarps, /*stages=*/2,
             sizeof(SharedMemory<Tile>), reinterpret_cast<const void*>(forward<Tile, kProblems>)},
            kProblems,
            pays,
            launch_tile<Tile, kProblems>};
}

using TableRow = flash_wmma::TableRow<TileShape>;
template <class T, Problems kProblems, const auto& kRows>
std::vector<Shape> shapes(int min_arch) {
    return of_rows<kRows>([&](auto i) { return shape<Tile<T, kRows[i].tile>, kProblems>(min_arch, kRows[i].pays); });
}

// The shapes that ship: per head dim, of those that benchmark/tiles.py compares, the fastest for many query tiles and
// the fastest for few.

/// At most 64 KiB of shared memory: for every architecture.
inline constexpr TableRow kCommonRows[] = {
    {{.d = 32, .row_tiles = 2, .keys = 64, .q_in_registers = true, .blocks_per_sm = 2}, {0.75f}},
    {{.d = 32, .keys = 64, .q_in_registers = true, .blocks_per_sm = 2}},
    {{.d = 64, .keys = 64, .q_in_registers = true, .blocks_per_sm = 2}},
    {{.d = 128, .keys = 32, .q_in_registers = true, .blocks_per_sm = 2}},
    {{.d = 256, .warps = 2, .keys = 16, .q_in_registers = false, .blocks_per_sm = 1}},
};

/// From sm_80 on: more registers and shared memory a block.
inline constexpr TableRow kWideRows[] = {
    {{.d = 64, .row_tiles = 2, .keys = 64, .q_in_registers = true, .blocks_per_sm = 2}, {0.75f}},
    {{.d = 96, .row_tiles = 2, .keys = 32, .q_in_registers = true, .blocks_per_sm = 1}, {1.5f}},
    {{.d = 96, .keys = 64, .q_in_registers = true, .blocks_per_sm = 2}},
    {{.d = 128, .row_tiles = 2, .keys = 32, .q_in_registers = false, .blocks_per_sm = 1}, {1.5f}},
    {{.d = 192, .keys = 32, .q_in_registers = true, .blocks_per_sm = 1}},
    {{.d = 256, .keys = 32, .q_in_registers = false, .blocks_per_sm = 1}},
};

/// For packed sequences, ScoreMods and dropout, on every architecture: one per range of d, since `auto` prefers another
/// kernel.
inline constexpr TableRow kGeneralRows[] = {
    {{.d = 64, .keys = 64, .q_in_registers = true, .blocks_per_sm = 2}},
    {{.d = 128, .keys = 32, .q_in_registers = true, .blocks_per_sm = 2}},
    {{.d = 256, .warps = 2, .keys = 16, .q_in_registers = false, .blocks_per_sm = 1}},
};

/// What the instances of kCommonRows and kWideRows take: every instance takes converted inputs.
inline constexpr Problems kPlain = Problems::kConverted;

}  // namespace flash_wmma::wmma_v3
