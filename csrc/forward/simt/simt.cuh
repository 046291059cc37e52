// The kernel of simt: FlashAttention-2 forward in fp32 on CUDA cores, register-tiled like a matrix product.
//
// Algorithm (FlashAttention-2, Algorithm 1): a block owns Br query rows of one head and loops over K/V tiles of Bc
// keys:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
// Products are fp32 FMAs, sums fp32, and m is every row's exact maximum: nothing is rounded to a shorter type.
//
// Who owns what: Q, K and V tiles belong to the block, in shared memory. A warp owns kWarpRows query rows; LaneGrid
// (simt_tile.cuh) divides them among its lanes. S, m, l and O are in registers. P goes through shared memory within the
// warp. If 64 KiB do not hold a tile of V (d = 512), several blocks share the rows: each computes S and owns its part
// of the columns of O.
//
// Bound: the issue of FFMA (an SM issues four warp instructions per cycle), followed closely by shared memory. A step
// of four columns of d takes kRows + kKeys 16-byte loads for 4 * kRows * kKeys FFMA: with 8 x 8, 16 loads for 256 FFMA.
// Four keys of P V take as many. For four warps these are 128 wavefronts, one per cycle, while each warp issues its 256
// FFMA.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include "attention.h"
#include "device/constants.cuh"
#include "device/dropout.cuh"
#include "device/key_mask.cuh"
#include "device/score_mod.cuh"
#include "device/shuffle.cuh"
#include "device/simt_tile.cuh"
#include "device/sink.cuh"
#include "device/tile.cuh"
#include "device/tiled_kernel.h"

namespace flash_wmma::simt {

template <TileShape kShape>
struct Tile : LaneGrid<kShape> {};

/// Map of a block's shared memory.
template <class Tile>
struct SharedMemory {
    struct alignas(16) Stage {
        PaddedRows<Tile, Tile::kBc> k;
        float v[Tile::kBc][Tile::kColumns];
    };
    alignas(16) PaddedRows<Tile, Tile::kBr> q;
    Stage ring[Tile::kStages];
    Weights<Tile> p[Tile::kWarps];
};

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, resident(Tile::kBlocksPerSm, Tile::kThreads))
    forward(const __grid_constant__ ForwardParams p) {
    constexpr int kBc = Tile::kBc, kRows = Tile::kRows, kKeys = Tile::kKeys;
    constexpr bool kDouble = Tile::kStages == 2;
    auto& smem = shared_memory<SharedMemory<Tile>>();
    const Thread<Tile> thread;
    const Assignment assigned = assignment<Tile::kBr>(p);
    const Sequence& sequence = assigned.sequence;
    const QTile& tile = assigned.tile;
    if (tile.first_row < 0 || tile.first_row >= sequence.seqlen_q) return;

    // The keys that some row of the tile sees, from a multiple of Bc on
    const auto mask = key_mask<true>(p, sequence, tile.head);
    const int last_row = min(tile.first_row + Tile::kBr, sequence.seqlen_q) - 1;
    const KeyExtent seen = mask.extent(tile.first_row, last_row);
    int key = seen.some_begin / kBc * kBc;
    const int end_key = seen.some_end;
    float m[kRows], l[kRows];  // l is this lane's part
    Output<Tile> o;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        m[i] = -INFINITY, l[i] = 0.f;
    }
    clear(o);
    Copy<Tile, kBc> k_copy(row_of<const float>(p.k, sequence.index, tile.head_k, sequence.first_k + key), p.k.row,
                           p.head_dim);
    const int first_column = Tile::first_column();
    Copy<Tile, kBc, Tile::kColumns> v_copy(
        row_of<const float>(p.v, sequence.index, tile.head_k, sequence.first_k + key) + first_column, p.v.row,
        p.head_dim_v - first_column);
    if (key < end_key) {
        Copy<Tile, Tile::kBr>(row_of<const float>(p.q, sequence.index, tile.head, sequence.first_q + tile.first_row),
                              p.q.row, p.head_dim)
            .next(smem.q, p.q.row, sequence.seqlen_q - tile.first_row);
        k_copy.next(smem.ring[0].k, p.k.row, sequence.seqlen_k - key);
        if constexpr (kDouble) v_copy.next(smem.ring[0].v, p.v.row, sequence.seqlen_k - key);
        ptx::cp_async_commit();
    }
    int slot = 0;
    for (; key < end_key; key += kBc) {
        ptx::cp_async_wait<0>();
        __syncthreads();  // K has landed (two stages: and V), the tile before has been used
        const bool more = key + kBc < end_key;
        if constexpr (kDouble) {
            if (more) {
                k_copy.next(smem.ring[slot ^ 1].k, p.k.row, sequence.seqlen_k - key - kBc);
                v_copy.next(smem.ring[slot ^ 1].v, p.v.row, sequence.seqlen_k - key - kBc);
            }
        } else {
            v_copy.next(smem.ring[0].v, p.v.row, sequence.seqlen_k - key);
        }
        ptx::cp_async_commit();

        Scores<Tile> s;
        multiply_rows<Tile>(s, smem.q, smem.ring[slot].k, p.head_dim, thread);

        // Products become scores in log2 units; those of keys that a row does not see become -inf
        const auto each = [&](auto f) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int n = 0; n < kKeys; ++n) f(i, n);
        };
        const auto score = [&](int i, int n) -> float& { return s[i][n]; };
        if (ScoreMod<true>::active(p)) {
            Scores<Tile> slopes;  // only backward reads them
            const auto slope = [&](int i, int n) -> float& { return slopes[i][n]; };
            const auto query_of = [&](int i, int) { return tile.row(thread.tile_row(i)).query; };
            const auto key_of = [&](int, int n) { return key + thread.key(n); };
            ScoreMod<true>(p, sequence, tile).apply_each(each, score, slope, p.scale * kLog2e, query_of, key_of);
        } else {
            each([&](int i, int n) { s[i][n] *= p.scale * kLog2e; });
        }
        if (key < seen.all_begin || key + kBc > seen.all_end) {
#pragma unroll
            for (int i = 0; i < kRows; ++i) {
                const int row = tile.row(thread.tile_row(i)).query;
                const int begin = mask.begin(row) - key, end = mask.end(row) - key;
#pragma unroll
                for (int n = 0; n < kKeys; ++n)
                    if (thread.key(n) < begin || thread.key(n) >= end) s[i][n] = -INFINITY;
            }
        }

        // m, P and l; O is rescaled if a maximum of the warp has risen
        float rescale[kRows];
        bool risen = false;
#pragma unroll
        for (int i = 0; i < kRows; ++i) {
            float top = s[i][0];
#pragma unroll
            for (int n = 1; n < kKeys; ++n) top = fmaxf(top, s[i][n]);
            const float before = m[i];
            m[i] = fmaxf(before, over_row<Tile>(top, [](float x, float y) { return fmaxf(x, y); }));
            risen |= m[i] != before;
            const float base = m[i] == -INFINITY ? 0.f : m[i];  // no visible key yet
            rescale[i] = ptx::ex2(before - base);
            float sum = 0.f;
#pragma unroll
            for (int n = 0; n < kKeys; ++n) {
                s[i][n] = ptx::ex2(s[i][n] - base);
                sum += s[i][n];
            }
            l[i] = fmaf(l[i], rescale[i], sum);
        }
        if (p.dropout.rng_state) {
            const DropoutMask kept(p.dropout, sequence.index, tile.head);
            each([&](int i, int n) {
                if (!keeps_weight(p.dropout, kept, tile.row(thread.tile_row(i)).query, key + thread.key(n)))
                    s[i][n] = 0.f;
            });
        }
        store_weights<Tile>(smem.p[threadIdx.x / 32], s, thread);
        if (any_lane(risen)) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (float4& x : o[i])
                    x = make_float4(x.x * rescale[i], x.y * rescale[i], x.z * rescale[i], x.w * rescale[i]);
        }

        if constexpr (kDouble) {
            sync_warp();
        } else {
            ptx::cp_async_wait<0>();
            __syncthreads();  // V has landed, K has been used
            if (more) k_copy.next(smem.ring[0].k, p.k.row, sequence.seqlen_k - key - kBc);
            ptx::cp_async_commit();
        }
        multiply_weights<Tile>(o, smem.p[threadIdx.x / 32], smem.ring[slot].v, 0, thread);
        if constexpr (kDouble) slot ^= 1;
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        float sum = over_row<Tile>(l[i], [](float x, float y) { return x + y; });
        const auto [query, head] = tile.row(thread.tile_row(i));
        if (query >= sequence.seqlen_q) continue;
        const bool none = sum == 0.f;  // the row saw no key
        float rescale = take_sink(p, head, m[i], sum);
        if (p.dropout.rng_state) rescale *= kept_scale(p.dropout);
        const float inverse = none ? 0.f : rescale * (1.f / sum);
        float* const out = row_of<float>(p.o, sequence.index, head, sequence.first_q + query) + first_column;
#pragma unroll
        for (int v = 0; v < Tile::kVectors; ++v) {
            const float4 x = o[i][v];
            if (thread.vector(v) < p.head_dim_v - first_column)
                *reinterpret_cast<float4*>(out + thread.vector(v)) =
                    make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
        }
        if (thread.column == 0 && first_column == 0)
            p.lse[lse_index(p, sequence, head, query)] = sum == 0.f ? -INFINITY : (m[i] + log2f(sum)) * kLn2;
    }
}

template <class Tile>
void launch_tile(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    dim3 grid = assignment_grid(p, Tile::kBr);
    grid.y = static_cast<unsigned>((p.head_dim_v + Tile::kColumns - 1) / Tile::kColumns);
    launch(forward<Tile>, {grid, dim3(Tile::kThreads), sizeof(SharedMemory<Tile>)}, stream, p);
}

template <class Tile>
Shape shape(Pays pays) {
    return {{DType::kFloat32, 75, Tile::kD, Tile::kBr, Tile::kBc, Tile::kWarps, Tile::kStages,
             sizeof(SharedMemory<Tile>), reinterpret_cast<const void*>(forward<Tile>)},
            Problems::kAny,
            pays,
            launch_tile<Tile>};
}

}  // namespace flash_wmma::simt
