// wmma_v3: FlashAttention-2 forward, the portable WMMA API taken as far as it goes.
//
// Algorithm (FlashAttention-2, Algorithm 1): a block owns Br = warps * row_tiles * 16 query rows of one head and loops
// over K/V tiles of Bc keys:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
// What the WMMA API hides and this kernel needs is which row an accumulator element belongs to. A 16x16 tile whose
// entries are their own index, loaded as a fragment, tells each lane the row and column of each of its elements
// (layout_is_known). With that:
//   * the softmax is exact per row, in registers: a row's scores lie in the four lanes of a quad;
//   * P goes from one product to the next in registers: element i of an accumulator and element i of a matrix_a
//     fragment are the same place of the 16x16 tile (and for half, which holds every place twice, element i + 8).
// Hardware whose layout differs takes attend_opaque, which asks nothing of it.
//
// Lagged maximum: m need not be the true maximum, only close enough that P fits T. The first tile and masked tiles set
// m exactly; a plain tile uses the old m and the warp votes that no partial row sum passed Element<T>::kLargestSum.
// Only if the vote fails is the tile recomputed with the exact maximum, and O and l rescaled.
//
// Converted inputs (convert.h): K's and Q's exponents fold into the scale of S. O is kept in the unit 2^u of V's running
// exponent u (ValueUnit): a tile whose exponent lies a little below u has its weights scaled down by as much, and l takes
// that back; any other tile moves u, and O with it.
//
// Who owns what: warp w owns rows [w * kWarpRows, + kWarpRows) of the Q tile, their O (fragments), m and l. K and V
// tiles belong to the block, loaded with 16-byte asynchronous copies one tile ahead. Rows are padded by 16 bytes, so
// that the eight rows of a fragment load start in different banks.
//
// Bound: tensor cores and, at d = 64, the issue slots of the softmax between the two products.
#pragma once

#include <launch.h>
#include <mma.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include "../attention.h"
#include "../device/element.cuh"
#include "../device/mask.cuh"
#include "../device/score_mod.cuh"
#include "../device/tile.cuh"
#include "../device/value_unit.cuh"
#include "wmma_v3_instances.h"

namespace flash_wmma::wmma_v3 {

namespace wmma = nvcuda::wmma;

/// How P gets from QK^T to PV: in registers if the fragment layout is the known one, or always through shared memory.
enum class Handover { kRegisters, kShared };

/// Shape of a block's work. Scalar is half or bf16; HeadDim is the largest d (and d_v) that the instance holds.
template <class Scalar, int HeadDim, int Warps, int RowTiles, int KeyTile, bool QInRegisters, int BlocksPerSm,
          Handover Route = Handover::kRegisters, int Pad = 8>
struct Tile {
    using T = Scalar;
    static constexpr int kD = HeadDim, kWarps = Warps, kRowTiles = RowTiles, kBc = KeyTile;
    static constexpr bool kQInRegisters = QInRegisters;
    static constexpr int kBlocksPerSm = BlocksPerSm;  // resident blocks to keep registers for
    static constexpr Handover kHandover = Route;

    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles, kBr = kWarpRows * kWarps;
    static constexpr int kPitch = kD + Pad;                     // elements of T
    static constexpr int kOutColumns = kD % 64 == 0 ? 64 : 16;  // columns of O staged at a time
    static constexpr int kOutPitch = kOutColumns + 4;           // floats
    static_assert(kD % 16 == 0 && kBc % 16 == 0 && kScaleRows % kBc == 0 && kScaleRows % kWarpRows == 0);
};

/// Map of a block's shared memory.
template <class Tile>
struct SharedMemory {
    using T = typename Tile::T;

    using KeyRows = T[Tile::kBc][Tile::kPitch];

    struct Loop {  // a ring of two K tiles, and of two V tiles one behind
        KeyRows k[2], v[2];
    };
    struct Start {  // before the loop: Q on its way to registers, beside the first K tile
        KeyRows first_k;
        T q[Tile::kQInRegisters ? Tile::kBr : 1][Tile::kPitch];
        alignas(32) T index[16][16];  // entries are their own index, 16 * row + column
        alignas(32) float index_f32[16][16];
    };
    struct Opaque {  // attend_opaque: 16 keys at a time, scratch of each warp
        T k[16][Tile::kPitch], v[16][Tile::kPitch];
        struct Warp {
            alignas(32) float tile[16][20];  // S, or 16 columns of O
            alignas(32) T p[16][24];
        } warp[Tile::kWarps];
    };
    struct Finish {  // after the loop: O on its way out, scratch of each warp
        alignas(32) float o[16][Tile::kOutPitch];
    };

    union {
        alignas(128) Loop loop;
        Start start;
        Opaque opaque;
        Finish finish[Tile::kWarps];
    };
    T q_resident[Tile::kQInRegisters ? 1 : Tile::kBr][Tile::kPitch];
    float inverse_l[Tile::kBr];

    __device__ auto& q() {
        if constexpr (Tile::kQInRegisters) return start.q;
        else return q_resident;
    }
};

template <class Tile>
using AFragment = wmma::fragment<wmma::matrix_a, 16, 16, 16, typename Tile::T, wmma::row_major>;
template <class Tile>
using KFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, typename Tile::T, wmma::col_major>;
template <class Tile>
using VFragment = wmma::fragment<wmma::matrix_b, 16, 16, 16, typename Tile::T, wmma::row_major>;
using Accumulator = wmma::fragment<wmma::accumulator, 16, 16, 16, float>;

inline constexpr unsigned kWarpMask = 0xffffffffu;
inline constexpr float kLn2 = 0.69314718055994531f, kLog2e = 1.44269504088896341f;

/// The accumulator layout that the register route relies on: row and column, in the 16x16 tile, of element i of a lane.
__device__ constexpr int row_of_element(int lane, int i) { return lane / 4 + 8 * (i / 2 % 2); }
/// The e-th (0..3) element of a lane in its row h (0: lane / 4, 1: lane / 4 + 8).
__device__ constexpr int element_of_row(int h, int e) { return e % 2 + 2 * h + 4 * (e / 2); }
__device__ constexpr int column_of_element(int lane, int i) { return 2 * (lane % 4) + i % 2 + 8 * (i / 4); }

/// Starts copying rows [first, first + Rows) of a (rows, d) matrix to shared memory; rows and columns beyond are zeros.
template <class Tile, int Rows, class Target>
__device__ __forceinline__ void copy_tile_async(Target& target, const typename Tile::T* source, std::int64_t pitch,
                                                int first, int rows, int d) {
    constexpr int kVector = 8, kVectors = Tile::kD / kVector;  // 16 bytes of T; vectors a row
    constexpr int kRowsAtOnce = Tile::kThreads / kVectors;
    const int tid = static_cast<int>(threadIdx.x);
    const int first_row = tid / kVectors, column = tid % kVectors * kVector;
    if (Tile::kThreads % kVectors != 0 && first_row >= kRowsAtOnce) return;
    const typename Tile::T* from = source + (first + first_row) * pitch + column;
    const int bytes = column < d ? 16 : 0;
    const bool whole = first + Rows <= rows && (Tile::kD == d || Rows % kRowsAtOnce == 0);
#pragma unroll
    for (int row = first_row, i = 0; i < (Rows + kRowsAtOnce - 1) / kRowsAtOnce; ++i, row += kRowsAtOnce) {
        if (Rows % kRowsAtOnce == 0 || row < Rows) {
            const bool inside = bytes && (whole || first + row < rows);
            ptx::cp_async_16(&target[row][column], inside ? from : source, inside ? 16 : 0);
        }
        from += kRowsAtOnce * pitch;
    }
}

/// A fragment from shared memory. bf16's comes through half's, bit for bit: nvcc loads those by LDSM, but bf16's by plain
/// loads and transposes (layout_is_known checks that both have the same layout).
template <class Use, class Layout>
__device__ __forceinline__ void load_fragment(wmma::fragment<Use, 16, 16, 16, half, Layout>& fragment, const half* from,
                                              unsigned pitch) {
    wmma::load_matrix_sync(fragment, from, pitch);
}
template <class Use, class Layout>
__device__ __forceinline__ void load_fragment(wmma::fragment<Use, 16, 16, 16, bf16, Layout>& fragment, const bf16* from,
                                              unsigned pitch) {
    wmma::fragment<Use, 16, 16, 16, half, Layout> bits;
    wmma::load_matrix_sync(bits, reinterpret_cast<const half*>(from), pitch);
#pragma unroll
    for (int i = 0; i < fragment.num_elements; ++i) fragment.x[i] = __ushort_as_bfloat16(__half_as_ushort(bits.x[i]));
}

/// Whether load_fragment gives what load_matrix_sync gives, in this lane.
template <class Fragment, class T>
__device__ bool loads_alike(const T* tile) {
    if constexpr (std::is_same_v<T, half>) return true;
    Fragment ours, theirs;
    load_fragment(ours, tile, 16);
    wmma::load_matrix_sync(theirs, tile, 16);
    bool alike = true;
#pragma unroll
    for (int i = 0; i < Fragment::num_elements; ++i)
        alike &= static_cast<float>(ours.x[i]) == static_cast<float>(theirs.x[i]);
    return alike;
}

/// Whether the fragments of this hardware are laid out as row_of_element and column_of_element say, matrix_a's element i
/// (and i + 8, where it has 16) at the accumulator's place i. The same answer in every lane of the warp.
template <class Tile>
__device__ bool layout_is_known(const typename SharedMemory<Tile>::Start& start) {
    AFragment<Tile> a;
    Accumulator c;
    wmma::load_matrix_sync(a, &start.index[0][0], 16);
    wmma::load_matrix_sync(c, &start.index_f32[0][0], 16, wmma::mem_row_major);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    static_assert(Accumulator::num_elements == 8 && AFragment<Tile>::num_elements % 8 == 0);
    const auto* index = &start.index[0][0];
    bool known = loads_alike<AFragment<Tile>>(index) && loads_alike<KFragment<Tile>>(index) &&
                 loads_alike<VFragment<Tile>>(index);
#pragma unroll
    for (int i = 0; i < AFragment<Tile>::num_elements; ++i) {
        const auto place = static_cast<float>(16 * row_of_element(lane, i % 8) + column_of_element(lane, i % 8));
        known &= static_cast<float>(a.x[i]) == place && c.x[i % 8] == place;
    }
    return __all_sync(kWarpMask, known);
}

/// What a block works on: its sequence and Q tile, the keys it may see, and the scales of its scores.
template <class Tile, bool General>
struct Work {
    using T = typename Tile::T;
    const ForwardParams& p;
    Sequence sequence;
    QTile tile;
    BandMask mask;
    const T *k, *v;              // the sequence's row 0 of the head's K and V
    const float *k_exp, *v_exp;  // exponents of converted inputs, one per kScaleRows keys; null: none
    int first_key, last_key;     // visible to some row of the tile, first_key a multiple of Bc

    __device__ explicit Work(const ForwardParams& params)
        : Work(params, General ? assignment<Tile::kBr>(params) : dense_assignment<Tile::kBr>(params)) {}

    /// Whether the block has no rows, as some have among packed sequences.
    __device__ bool idle() const { return General && (tile.first_row < 0 || tile.first_row >= sequence.seqlen_q); }
    /// What the index functions of tile.cuh ask for: the sequence, or the batch entry where nothing is packed.
    __device__ auto place() const {
        if constexpr (General) return sequence;
        else return tile.batch;
    }

    /// Scale of the scores of Q's rows [row, row + kWarpRows), before K's exponent.
    __device__ float query_scale(int row) const {
        const float scale = p.scale * kLog2e;
        if (!p.exponents.q) return scale;
        return scale * exp2f(p.exponents.q[q_scale_index(p, place(), tile.head) + (tile.first_row + row) / kScaleRows]);
    }
    /// Scale of the scores against the K tile at `key`.
    __device__ float score_scale(float query_scale, int key) const {
        return k_exp && key <= last_key ? query_scale * ptx::ex2(k_exp[key / kScaleRows]) : query_scale;
    }

  private:
    __device__ Work(const ForwardParams& params, const Assignment& a)
        : p(params), sequence(a.sequence), tile(a.tile), mask(params.band, sequence.seqlen_q, sequence.seqlen_k) {
        k = row_of<const T>(p.k, tile.batch, tile.head_k, sequence.first_k);
        v = row_of<const T>(p.v, tile.batch, tile.head_k, sequence.first_k);
        const int last_row = min(tile.first_row + Tile::kBr, sequence.seqlen_q) - 1;
        first_key = mask.begin(tile.first_row) / Tile::kBc * Tile::kBc;
        last_key = mask.end(last_row) - 1;
        k_exp = p.exponents.k ? p.exponents.k + k_scale_index(p, place(), tile.head_k) : nullptr;
        v_exp = p.exponents.v ? p.exponents.v + k_scale_index(p, place(), tile.head_k) : nullptr;
    }
};

/// Q as the first product's operand: fragments in registers, or loaded from shared memory at each use.
template <class Tile>
struct QOperand {
    AFragment<Tile> fragments[Tile::kQInRegisters ? Tile::kRowTiles : 1][Tile::kQInRegisters ? Tile::kD / 16 : 1];
    const typename Tile::T* rows;

    __device__ void load(SharedMemory<Tile>& smem, int warp_row) {
        rows = &smem.q()[warp_row][0];
        if constexpr (Tile::kQInRegisters)
#pragma unroll
            for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
                for (int c = 0; c < Tile::kD / 16; ++c)
                    wmma::load_matrix_sync(fragments[r][c], rows + 16 * r * Tile::kPitch + 16 * c, Tile::kPitch);
    }
    template <bool LayoutKnown>
    __device__ __forceinline__ AFragment<Tile> fragment(int r, int c) const {
        if constexpr (Tile::kQInRegisters) return fragments[r][c];
        AFragment<Tile> q;
        const auto* from = rows + 16 * r * Tile::kPitch + 16 * c;
        if constexpr (LayoutKnown) load_fragment(q, from, Tile::kPitch);
        else wmma::load_matrix_sync(q, from, Tile::kPitch);
        return q;
    }
};

template <class Tile>
using OAccumulators = Accumulator[Tile::kRowTiles][Tile::kD / 16];

template <class Tile>
__device__ __forceinline__ void clear(OAccumulators<Tile>& o) {
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
        for (int c = 0; c < Tile::kD / 16; ++c) wmma::fill_fragment(o[r][c], 0.f);
}

/// Row's final 1/l, times O's unit, and LSE from its sum l and reference m (log2 units): 0 and -inf for a row that saw no key.
template <class Tile, bool General>
__device__ void finish_row(const Work<Tile, General>& work, SharedMemory<Tile>& smem, const ValueUnit& unit, int row,
                           float m, float l) {
    smem.inverse_l[row] = l == 0.f ? 0.f : exp2f(unit.exponent) / l;
    const auto [query, head] = work.tile.row(row);
    if (query < work.sequence.seqlen_q)
        work.p.lse[lse_index(work.p, work.place(), head, query)] = l == 0.f ? -INFINITY : (m + log2f(l)) * kLn2;
}

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

/// P from the accumulators of the first product to the operand of the second, in registers.
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

/// ScoreMod on S, where there is one: `scale` brings a product to log2 units.
template <class Tile, bool General>
__device__ __forceinline__ void modify(Accumulator (&s)[Tile::kRowTiles][Tile::kBc / 16],
                                       const Work<Tile, General>& work, float scale, int warp_row, int key) {
    if constexpr (General) {
        if (!ScoreMod<General>::active(work.p)) return;
        const ScoreMod<General> mod(work.p, work.sequence, work.tile);
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

/// P = exp2(S * factor + offset), in place; returns this lane's part of the row sum.
template <class Tile>
__device__ __forceinline__ float weights_of_row(Accumulator (&s)[Tile::kBc / 16], int h, float factor, float offset) {
    float sum = 0.f;
#pragma unroll
    for (int j = 0; j < Tile::kBc / 16; ++j)
#pragma unroll
        for (int e = 0; e < 4; ++e) {
            float& score = s[j].x[element_of_row(h, e)];
            score = ptx::ex2(fmaf(score, factor, offset));
            sum += score;
        }
    return sum;
}

/// The main loop where fragments are laid out as known: softmax and P in registers.
template <class Tile, bool General>
__device__ __forceinline__ void attend(const Work<Tile, General>& work, SharedMemory<Tile>& smem,
                                       const QOperand<Tile>& q, OAccumulators<Tile>& o, int warp_row) {
    constexpr int kBc = Tile::kBc, kRowTiles = Tile::kRowTiles;
    const ForwardParams& p = work.p;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int seqlen_q = work.sequence.seqlen_q, seqlen_k = work.sequence.seqlen_k;
    const float q_scale = work.query_scale(warp_row);

    // Keys that some row of the warp sees, and keys that all its rows see
    const int first_query = work.tile.row(warp_row).query;
    const int last_query = min(work.tile.row(warp_row + Tile::kWarpRows - 1).query, seqlen_q - 1);
    const int some_begin = work.mask.begin(first_query);
    const int some_end = first_query <= last_query ? work.mask.end(last_query) : 0;
    const int all_begin = work.mask.begin(last_query), all_end = work.mask.end(first_query);

    float m[kRowTiles][2], l[kRowTiles][2];  // of rows row_of_element(lane, 0) and + 8; l is this lane's part
#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) m[r][h] = -INFINITY, l[r][h] = 0.f;

    // The second product runs one tile behind the first, so that it overlaps with the next tile's softmax.
    ValueUnit unit(work.v_exp);
    Weights<Tile> weights;  // of the tile before `key`
    bool pending = false;   // whether they still wait for their product
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
        const float factor = ScoreMod<General>::active(p) ? 1.f : scale;  // from s to log2 units
        const bool visible = key < some_end && key + kBc > some_begin && key <= work.last_key;
        ValueUnit::Step value{0.f, 0.f};
        if (work.v_exp && visible) value = unit.step(work.v_exp[key / kScaleRows]);
        Accumulator s[kRowTiles][kBc / 16];

        // A tile that every row sees, after another: the old m serves if no weight overflows
        if (pending && key >= all_begin && key + kBc <= all_end && value.rescale == 0.f) {
            multiply_qk<Tile>(s, q, k);
            multiply_pv<Tile>(o, weights, v);
            modify(s, work, scale, warp_row, key);
            float sum[kRowTiles][2];
            bool fits = true;  // false for a NaN too
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    sum[r][h] = weights_of_row<Tile>(s[r], h, factor, value.weight - m[r][h]);
                    fits &= sum[r][h] <= Element<typename Tile::T>::kLargestSum;
                }
            hand_over<Tile>(weights, s);
            if (__all_sync(kWarpMask, fits)) {
#pragma unroll
                for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
                    for (int h = 0; h < 2; ++h) l[r][h] = fmaf(sum[r][h], ptx::ex2(-value.weight), l[r][h]);
                continue;
            }
        } else if (pending) {
            multiply_pv<Tile>(o, weights, v);
        }
        pending = visible;
        if (!visible) continue;

        // Any other tile: S masked and scaled, m exact, O and l rescaled to it
        multiply_qk<Tile>(s, q, k);
        modify(s, work, scale, warp_row, key);
#pragma unroll
        for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int query = work.tile.row(warp_row + 16 * r + row_of_element(lane, 2 * h)).query;
                const int begin = work.mask.begin(query) - key, end = work.mask.end(query) - key;
                float top = m[r][h];
#pragma unroll
                for (int j = 0; j < kBc / 16; ++j)
#pragma unroll
                    for (int e = 0; e < 4; ++e) {
                        const int i = element_of_row(h, e), column = 16 * j + column_of_element(lane, i);
                        float& score = s[r][j].x[i];
                        score = column >= begin && column < end ? score * factor : -INFINITY;
                        top = fmaxf(top, score);
                    }
                top = fmaxf(top, __shfl_xor_sync(kWarpMask, top, 1));
                top = fmaxf(top, __shfl_xor_sync(kWarpMask, top, 2));
                const float base = top == -INFINITY ? 0.f : top;  // no visible key yet
                const float rescale = ptx::ex2(m[r][h] - base), rescale_o = rescale * ptx::ex2(value.rescale);
                m[r][h] = top;
                l[r][h] = fmaf(weights_of_row<Tile>(s[r], h, 1.f, value.weight - base), ptx::ex2(-value.weight),
                               l[r][h] * rescale);
#pragma unroll
                for (int c = 0; c < Tile::kD / 16; ++c)
#pragma unroll
                    for (int e = 0; e < 4; ++e) o[r][c].x[element_of_row(h, e)] *= rescale_o;
            }
        hand_over<Tile>(weights, s);
    }

#pragma unroll
    for (int r = 0; r < kRowTiles; ++r)
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            float total = l[r][h];
            total += __shfl_xor_sync(kWarpMask, total, 1);
            total += __shfl_xor_sync(kWarpMask, total, 2);
            if (lane % 4 == 0)
                finish_row(work, smem, unit, warp_row + 16 * r + row_of_element(lane, 2 * h), m[r][h], total);
        }
}

/// O / l, from fragments through shared memory to global memory in 16-byte pieces of whole rows.
template <class Tile, bool General>
__device__ __forceinline__ void store_o(const Work<Tile, General>& work, SharedMemory<Tile>& smem,
                                        OAccumulators<Tile>& o, int warp_row) {
    using T = typename Tile::T;
    constexpr int kColumns = Tile::kOutColumns, kVector = 8, kVectors = kColumns / kVector;
    const ForwardParams& p = work.p;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    auto& staged = smem.finish[threadIdx.x / 32].o;
#pragma unroll
    for (int r = 0; r < Tile::kRowTiles; ++r)
#pragma unroll
        for (int first = 0; first < Tile::kD; first += kColumns) {
            __syncwarp();
#pragma unroll
            for (int c = 0; c < kColumns / 16; ++c)
                wmma::store_matrix_sync(&staged[0][16 * c], o[r][first / 16 + c], Tile::kOutPitch, wmma::mem_row_major);
            __syncwarp();
            for (int i = lane; i < 16 * kVectors; i += 32) {
                const int row = i / kVectors, column = i % kVectors * kVector;
                const int tile_row = warp_row + 16 * r + row;
                const auto [query, head] = work.tile.row(tile_row);
                if (query >= work.sequence.seqlen_q || first + column >= p.head_dim_v) continue;
                const int out_row = work.sequence.first_q + query;
                const float inverse_l = smem.inverse_l[tile_row];
                float x[kVector];
#pragma unroll
                for (int e = 0; e < kVector; e += 4) {
                    const float4 four = *reinterpret_cast<const float4*>(&staged[row][column + e]);
                    x[e] = four.x * inverse_l, x[e + 1] = four.y * inverse_l;
                    x[e + 2] = four.z * inverse_l, x[e + 3] = four.w * inverse_l;
                }
                if (p.out_dtype == DType::kFloat32) {
                    auto* out =
                        reinterpret_cast<float4*>(row_of<float>(p.o, work.tile.batch, head, out_row) + first + column);
                    out[0] = make_float4(x[0], x[1], x[2], x[3]);
                    out[1] = make_float4(x[4], x[5], x[6], x[7]);
                } else {
                    union {
                        uint4 vector;
                        typename Element<T>::Pair pairs[4];
                    } out;
#pragma unroll
                    for (int e = 0; e < 4; ++e) out.pairs[e] = Element<T>::pair(x[2 * e], x[2 * e + 1]);
                    *reinterpret_cast<uint4*>(row_of<T>(p.o, work.tile.batch, head, out_row) + first + column) =
                        out.vector;
                }
            }
        }
}

/// The whole of a block's work for any fragment layout, once Q is in shared memory: S and P through shared memory, 16
/// keys at a time, a lane pair on each row. Not inlined, so that it costs the common route no registers.
// spills: sm_80 sm_90: as forward, whose registers bound it.
template <class Tile, bool General>
__device__ __noinline__ void attend_opaque(const ForwardParams& p) {
    using T = typename Tile::T;
    auto& smem = shared_memory<SharedMemory<Tile>>();
    const Work<Tile, General> work(p);
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
    QOperand<Tile> q;
    q.load(smem, warp_row);
    OAccumulators<Tile> o;
    clear<Tile>(o);
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 2, first_column = lane % 2 * 8;
    const int seqlen_k = work.sequence.seqlen_k;
    const float q_scale = work.query_scale(warp_row);
    auto& [k, v, warps] = smem.opaque;
    auto& scratch = warps[threadIdx.x / 32];

    ValueUnit unit(work.v_exp);
    float m[Tile::kRowTiles], l[Tile::kRowTiles];  // of row lane / 2; both lanes of the pair hold the whole sum
    for (int r = 0; r < Tile::kRowTiles; ++r) m[r] = -INFINITY, l[r] = 0.f;

    ptx::cp_async_wait<0>();  // the first tile, in the other route's place
    for (int key = work.first_key; key <= work.last_key; key += 16) {
        __syncthreads();
        copy_tile_async<Tile, 16>(k, work.k, p.k.row, key, seqlen_k, p.head_dim);
        copy_tile_async<Tile, 16>(v, work.v, p.v.row, key, seqlen_k, p.head_dim_v);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
        const float scale = work.score_scale(q_scale, key);
        const float factor = ScoreMod<General>::active(p) ? 1.f : scale;
        const ValueUnit::Step value = work.v_exp ? unit.step(work.v_exp[key / kScaleRows]) : ValueUnit::Step{0.f, 0.f};

#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) {
            Accumulator s;
            wmma::fill_fragment(s, 0.f);
#pragma unroll
            for (int c = 0; c < Tile::kD / 16; ++c) {
                KFragment<Tile> kt;
                wmma::load_matrix_sync(kt, &k[0][16 * c], Tile::kPitch);
                wmma::mma_sync(s, q.template fragment<false>(r, c), kt, s);
            }
            wmma::store_matrix_sync(&scratch.tile[0][0], s, 20, wmma::mem_row_major);
            __syncwarp();

            const int query = work.tile.row(warp_row + 16 * r + row).query;
            const int begin = work.mask.begin(query) - key, end = work.mask.end(query) - key;
            float score[8], top = m[r], sum = 0.f;
            for (int i = 0; i < 8; ++i) score[i] = scratch.tile[row][first_column + i];
            if constexpr (General)
                if (ScoreMod<General>::active(p)) {
                    const ScoreMod<General> mod(p, work.sequence, work.tile);
                    for (int i = 0; i < 8; i += 2)
                        mod.template apply<1, 1>([&](int, int, int e) -> float& { return score[i + e]; }, scale,
                                                 [&](int) { return query; }, key + first_column + i);
                }
            for (int i = 0; i < 8; ++i) {
                const int column = first_column + i;
                score[i] = column >= begin && column < end ? score[i] * factor : -INFINITY;
                top = fmaxf(top, score[i]);
            }
            top = fmaxf(top, __shfl_xor_sync(kWarpMask, top, 1));
            const float base = top == -INFINITY ? 0.f : top, rescale = ptx::ex2(m[r] - base);
            for (int i = 0; i < 8; ++i) {
                const float weight = ptx::ex2(score[i] + value.weight - base);
                scratch.p[row][first_column + i] = Element<T>::from(weight);
                sum += weight;
            }
            sum += __shfl_xor_sync(kWarpMask, sum, 1);
            m[r] = top;
            l[r] = l[r] * rescale + sum * ptx::ex2(-value.weight);
            const float rescale_o = rescale * ptx::ex2(value.rescale);
            __syncwarp();

            AFragment<Tile> weights;
            wmma::load_matrix_sync(weights, &scratch.p[0][0], 24);
#pragma unroll
            for (int c = 0; c < Tile::kD / 16; ++c) {
                wmma::store_matrix_sync(&scratch.tile[0][0], o[r][c], 20, wmma::mem_row_major);
                __syncwarp();
                for (int i = 0; i < 8; ++i) scratch.tile[row][first_column + i] *= rescale_o;
                __syncwarp();
                wmma::load_matrix_sync(o[r][c], &scratch.tile[0][0], 20, wmma::mem_row_major);
                VFragment<Tile> vt;
                wmma::load_matrix_sync(vt, &v[0][16 * c], Tile::kPitch);
                wmma::mma_sync(o[r][c], weights, vt, o[r][c]);
                __syncwarp();
            }
        }
    }
    for (int r = 0; r < Tile::kRowTiles; ++r)
        if (lane % 2 == 0) finish_row(work, smem, unit, warp_row + 16 * r + row, m[r], l[r]);
    __syncthreads();
    store_o(work, smem, o, warp_row);
}

/// General: also packed sequences and ScoreMods; without, all of a block's bounds are known to be the same in every thread.
// spills: sm_75 sm_80 sm_90: the tiles at the register limit (on sm_75 the general one of d = 256 alone) keep up to a
// dozen loop-invariant values (addresses, bounds) in local memory, written once a block and read a few times a tile; tiles
// that avoid it are slower (docs/tuning).
template <class Tile, bool General>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm) forward(const __grid_constant__ ForwardParams p) {
    using T = typename Tile::T;
    auto& smem = shared_memory<SharedMemory<Tile>>();
    const Work<Tile, General> work(p);
    if (work.idle()) return;
    const int tid = static_cast<int>(threadIdx.x), warp_row = tid / 32 * Tile::kWarpRows;
    const Sequence& sequence = work.sequence;

    // Q, then the first K tile, on their way; the index tile meanwhile
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
    if (Tile::kHandover == Handover::kShared || !layout_is_known<Tile>(smem.start)) {
        attend_opaque<Tile, General>(p);
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

template <class Tile, bool General>
void launch_tile(const ForwardParams& p, Stream stream) {
    const LaunchConfig config{assignment_grid(p, Tile::kBr), dim3(Tile::kThreads), sizeof(SharedMemory<Tile>)};
    launch(forward<Tile, General>, config, stream, p);
}

template <class Tile, bool General = false>
Shape shape(int min_arch, float blocks_per_sm) {
    return {{Element<typename Tile::T>::kDType, min_arch, Tile::kD, Tile::kBr, Tile::kBc, Tile::kWarps, /*stages=*/2,
             sizeof(SharedMemory<Tile>), reinterpret_cast<const void*>(forward<Tile, General>)},
            General,
            blocks_per_sm,
            launch_tile<Tile, General>};
}

// The shapes that ship: of those that benchmark/tiles.py compares, per head dim the fastest for many query tiles and the
// fastest for few. Arguments: d, warps, row tiles, Bc, Q in registers, blocks an SM to keep registers for; then the least
// architecture of the source, and the blocks an SM from which the shape pays.

/// At most 64 KiB of shared memory: for every architecture.
template <class T>
std::vector<Shape> common_shapes(int min_arch) {
    return {
        shape<Tile<T, 32, 4, 2, 64, true, 2>>(min_arch, 0.75f), shape<Tile<T, 32, 4, 1, 64, true, 2>>(min_arch, 0.f),
        shape<Tile<T, 64, 4, 1, 64, true, 2>>(min_arch, 0.f),   shape<Tile<T, 128, 4, 1, 32, true, 2>>(min_arch, 0.f),
        shape<Tile<T, 256, 2, 1, 16, false, 1>>(min_arch, 0.f),
    };
}

/// From sm_80 on: more registers and shared memory a block.
template <class T>
std::vector<Shape> wide_shapes() {
    return {
        shape<Tile<T, 64, 4, 2, 64, true, 2>>(80, 0.75f), shape<Tile<T, 96, 4, 2, 32, true, 1>>(80, 1.5f),
        shape<Tile<T, 96, 4, 1, 64, true, 2>>(80, 0.f),   shape<Tile<T, 128, 4, 2, 32, false, 1>>(80, 1.5f),
        shape<Tile<T, 192, 4, 1, 32, true, 1>>(80, 0.f),  shape<Tile<T, 256, 4, 1, 32, false, 1>>(80, 0.f),
    };
}

/// For packed sequences and ScoreMods, on every architecture: one per range of d, since `auto` prefers another kernel.
template <class T>
std::vector<Shape> general_shapes(int min_arch) {
    return {
        shape<Tile<T, 64, 4, 1, 64, true, 2>, true>(min_arch, 0.f),
        shape<Tile<T, 128, 4, 1, 32, true, 2>, true>(min_arch, 0.f),
        shape<Tile<T, 256, 2, 1, 16, false, 1>, true>(min_arch, 0.f),
    };
}

}  // namespace flash_wmma::wmma_v3
