// What both routes of wmma_v3 (wmma_v3.cuh, v3_opaque.cuh) share: the shape of a block's work, its shared memory, the
// loads of Q, K and V, and the stores of O and LSE.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include "attention.h"
#include "device/constants.cuh"
#include "device/dropout_tile.cuh"
#include "device/key_mask.cuh"
#include "device/score_mod.cuh"
#include "device/sink.cuh"
#include "device/tile.cuh"
#include "device/value_unit.cuh"
#include "forward/wmma/v3_fragments.cuh"
#include "problems.h"

namespace flash_wmma::wmma_v3 {

/// How P gets from QK^T to PV: in registers if the fragment layout is the known one, or always through shared memory.
enum class Handover { kRegisters, kShared };

/// Shape of a block's work.
struct TileShape {
    int d;                ///< the largest d and d_v that the instance holds
    int warps = 4;        //
    int row_tiles = 1;    ///< of 16 rows each, of a warp
    int keys;             ///< of a K/V tile
    bool q_in_registers;  //
    int blocks_per_sm;    ///< resident blocks to keep registers for
    Handover handover = Handover::kRegisters;
    int pad = 8;  ///< elements behind a row in shared memory
};

/// The same with what follows from it. Scalar is half or bf16.
template <class Scalar, TileShape kShape>
struct Tile {
    using T = Scalar;
    static constexpr int kD = kShape.d, kWarps = kShape.warps, kRowTiles = kShape.row_tiles, kBc = kShape.keys;
    static constexpr bool kQInRegisters = kShape.q_in_registers;
    static constexpr int kBlocksPerSm = kShape.blocks_per_sm;
    static constexpr Handover kHandover = kShape.handover;

    static constexpr int kThreads = 32 * kWarps;
    static constexpr int kWarpRows = 16 * kRowTiles, kBr = kWarpRows * kWarps;
    static constexpr int kPitch = kD + kShape.pad;              // elements of T
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

/// Starts copying rows [first, first + Rows) of a (rows, d) matrix to shared memory, with zeros beyond the matrix.
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

/// What a block works on: its sequence and Q tile, the keys it may see, and the scales of its scores.
template <class Tile, Problems kProblems>
struct Work {
    using T = typename Tile::T;
    static constexpr bool kPacked = includes(kProblems, Problems::kPacked);
    static constexpr bool kDrops = includes(kProblems, Problems::kDropped);  // these run problems with dropout alone
    const ForwardParams& p;
    Sequence sequence;
    QTile tile;
    KeyMask<includes(kProblems, Problems::kModified)> mask;
    const T *k, *v;              // the sequence's row 0 of the head's K and V
    const float *k_exp, *v_exp;  // exponents of converted inputs, one per kScaleRows keys; null: none
    int first_key, last_key;     // visible to some row of the tile, first_key a multiple of Bc

    __device__ explicit Work(const ForwardParams& params)
        : Work(params, kPacked ? assignment<Tile::kBr>(params) : dense_assignment<Tile::kBr>(params)) {}

    /// Whether the block has no rows, as some have among packed sequences.
    __device__ bool idle() const { return kPacked && (tile.first_row < 0 || tile.first_row >= sequence.seqlen_q); }
    /// What the index functions of tile.cuh take: the sequence, or the batch entry if nothing is packed.
    __device__ auto place() const {
        if constexpr (kPacked) return sequence;
        else return tile.batch;
    }

    /// Which weights of the head dropout keeps; without meaning unless kDrops.
    __device__ DropoutMask dropout_mask() const {
        if constexpr (kDrops) return {dropout_state(p.dropout), p.dropout.origin, sequence.index, tile.head};
        else return {};
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
        : p(params),
          sequence(a.sequence),
          tile(a.tile),
          mask(key_mask<includes(kProblems, Problems::kModified)>(params, sequence, tile.head)) {
        k = row_of<const T>(p.k, tile.batch, tile.head_k, sequence.first_k);
        v = row_of<const T>(p.v, tile.batch, tile.head_k, sequence.first_k);
        const int last_row = min(tile.first_row + Tile::kBr, sequence.seqlen_q) - 1;
        const KeyExtent keys = mask.extent(tile.first_row, last_row);
        first_key = keys.some_begin / Tile::kBc * Tile::kBc;
        last_key = keys.some_end - 1;
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

/// Stores a row's final 1/l, times O's unit and dropout's 1 / (1 - p), and LSE, from its sum l and reference m (log2
/// units): 0 and the sink (without sinks -inf) if the row saw no key.
template <class Tile, Problems kProblems>
__device__ void finish_row(const Work<Tile, kProblems>& work, SharedMemory<Tile>& smem, const ValueUnit& unit, int row,
                           float m, float l) {
    const auto [query, head] = work.tile.row(row);
    const bool none = l == 0.f;
    const float rescale = take_sink(work.p, head, m, l);
    const float kept = Work<Tile, kProblems>::kDrops ? kept_scale(work.p.dropout) : 1.f;
    smem.inverse_l[row] = none ? 0.f : rescale * kept * (exp2f(unit.exponent) / l);
    if (query < work.sequence.seqlen_q)
        work.p.lse[lse_index(work.p, work.place(), head, query)] = l == 0.f ? -INFINITY : (m + log2f(l)) * kLn2;
}

/// Stores O / l, from fragments through shared memory to global memory in 16-byte pieces of whole rows.
template <class Tile, Problems kProblems>
__device__ __forceinline__ void store_o(const Work<Tile, kProblems>& work, SharedMemory<Tile>& smem,
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

}  // namespace flash_wmma::wmma_v3
