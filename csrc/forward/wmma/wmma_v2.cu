// wmma_v2: FlashAttention-2 forward on tensor cores (nvcuda::wmma), scores in registers, one maximum for a Q tile.
//
// Algorithm (FlashAttention-2, Algorithm 1): a block is one warp and owns 16 query rows of one head (Br = 16, d = 64).
// It loops over K/V tiles of Bc = 32 keys:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
// Unlike wmma_v1, it works around the WMMA API's opaque fragments:
//   * S makes one round trip through shared memory, after which lane l holds 16 scores of row l / 2 in registers.
//   * All 16 rows share one maximum, found by warp shuffles, so that one factor rescales O in its accumulator
//     fragments, in registers (shared_maximum.cuh, which also says how rows far below that maximum stay exact).
//   * The division by l is the last step: O passes through shared memory and lanes write neighbouring 16-byte pieces of
//     a row.
//
// Global memory is read 16 bytes per lane, one tile ahead: K and V are under way in registers while the tensor cores
// and the softmax work on the tile in shared memory. float inputs are rounded to half on the way, without a scale:
// values beyond half's range (65504) become infinite. `auto` never takes this kernel.
//
// Who owns what: the warp's fragments hold Q (for the whole loop), S and O. Lane l has m and l of row l / 2, and of
// that row's scores the columns score_column(0) ... score_column(3) and the three after each.
//
// Bound: shared memory. Rows of K and V are 128 bytes apart there, all 32 banks, so that the eight rows of a fragment
// load lie in the same four banks: each such load takes 8 times as long. Left so on purpose: wmma_v3 pads.
#include <cuda_fp16.h>
#include <launch.h>
#include <mma.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include <iterator>

#include "attention.h"
#include "device/constants.cuh"
#include "device/half_tile.cuh"
#include "device/mask.cuh"
#include "device/shared_maximum.cuh"
#include "device/tile.cuh"
#include "registry.h"

namespace flash_wmma {
namespace {

namespace wmma = nvcuda::wmma;

constexpr int kBr = 16, kBc = 32, kD = 64;
constexpr int kSteps = kD / 16;       // fragments along d
constexpr int kKeyGroups = kBc / 16;  // fragments along the keys
constexpr int kLaneScores = kBr * kBc / 32;
constexpr int kBlocksPerSm = 8;  // as many as registers allow

/// Map of the block's shared memory: 6,208 bytes, so that registers and not shared memory limit the blocks of an sm_75
/// multiprocessor (64 KiB).
struct SharedMemory {
    union {                // in turn, for each K/V tile:
        half k[kBc][kD];   //   K, until S is computed,
        half v[kBc][kD];   //   V, after the softmax,
        float o[kBr][kD];  //   and between them O, if its rows need factors of their own. O again at the end.
    };
    union {
        half q[kBr][kD];    // before the loop
        float s[kBr][kBc];  // until every lane has its scores,
        half p[kBr][kBc];   // then P
    };
    float row_sum[kBr];  // after the loop: l
};

template <class T>
__global__ void __launch_bounds__(32, kBlocksPerSm) wmma_v2(const __grid_constant__ ForwardParams p) {
    auto& smem = shared_memory<SharedMemory>();
    const int lane = static_cast<int>(threadIdx.x);
    const QTile tile = q_tile<kBr>(p);
    const int rows = min(kBr, static_cast<int>(p.seqlen_q) - tile.first_row);

    // The keys this tile needs, and those that the lane's own row sees: none if the row lies beyond Nq.
    const BandMask mask(p.band, p.seqlen_q, p.seqlen_k);
    const int last_row = tile.first_row + rows - 1;
    const int first_key = mask.begin(tile.first_row), end_key = mask.end(last_row);
    const int row = lane / 2;
    const int row_begin = mask.begin(tile.first_row + row);
    const int row_end = row < rows ? mask.end(tile.first_row + row) : 0;

    const T* k = row_of<const T>(p.k, tile.batch, tile.head_k, 0);
    const T* v = row_of<const T>(p.v, tile.batch, tile.head_k, 0);
    HalfTile<T, kBc, kD> next;  // the K or V tile under way

    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> q_fragment[kSteps];
    {
        HalfTile<T, kBr, kD> q;
        q.load(row_of<const T>(p.q, tile.batch, tile.head, tile.first_row), p.q.row, rows);
        next.load(k + first_key * p.k.row, p.k.row, end_key - first_key);
        q.store(smem.q);
    }
    __syncwarp();
#pragma unroll
    for (int d = 0; d < kSteps; ++d) wmma::load_matrix_sync(q_fragment[d], &smem.q[0][16 * d], kD);
    __syncwarp();

    Accumulator o[kSteps];
#pragma unroll
    for (int d = 0; d < kSteps; ++d) wmma::fill_fragment(o[d], 0.f);
    SharedMaximum softmax;
    const float scale_log2 = p.scale * kLog2e;

    for (int key = first_key; key < end_key; key += kBc) {
        next.store(smem.k);
        __syncwarp();
        next.load(v + key * p.v.row, p.v.row, end_key - key);

        // S = Q K^T
        Accumulator s[kKeyGroups];
#pragma unroll
        for (int n = 0; n < kKeyGroups; ++n) wmma::fill_fragment(s[n], 0.f);
#pragma unroll
        for (int d = 0; d < kSteps; ++d)
#pragma unroll
            for (int n = 0; n < kKeyGroups; ++n) {
                wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> k_fragment;
                wmma::load_matrix_sync(k_fragment, &smem.k[16 * n][16 * d], kD);
                wmma::mma_sync(s[n], q_fragment[d], k_fragment, s[n]);
            }
#pragma unroll
        for (int n = 0; n < kKeyGroups; ++n)
            wmma::store_matrix_sync(&smem.s[0][16 * n], s[n], kBc, wmma::mem_row_major);
        __syncwarp();

        // The lane's half row, four scores at a time, in an order in which neither these reads nor the writes of P
        // conflict with another row's in a bank.
        const auto score_column = [&](int i) { return lane % 2 * 16 + (i ^ (row + row / 4) % 4) * 4; };
        float score[kLaneScores];
#pragma unroll
        for (int i = 0; i < kLaneScores / 4; ++i) {
            const float4 four = *reinterpret_cast<const float4*>(&smem.s[row][score_column(i)]);
            score[4 * i] = four.x * scale_log2;
            score[4 * i + 1] = four.y * scale_log2;
            score[4 * i + 2] = four.z * scale_log2;
            score[4 * i + 3] = four.w * scale_log2;
        }
        __syncwarp();
        if (rows < kBr || !mask.all_visible(tile.first_row, last_row, key, key + kBc - 1)) {
#pragma unroll
            for (int i = 0; i < kLaneScores / 4; ++i) {
                const int begin = row_begin - key - score_column(i), end = row_end - key - score_column(i);
#pragma unroll
                for (int j = 0; j < 4; ++j)
                    if (j < begin || j >= end) score[4 * i + j] = -INFINITY;
            }
        }

        // m, O and l to the new reference; P to shared memory.
        float score_max = -INFINITY;
#pragma unroll
        for (int i = 0; i < kLaneScores; ++i) score_max = fmaxf(score_max, score[i]);
        softmax.advance(score_max, o, smem.o);
#pragma unroll
        for (int i = 0; i < kLaneScores; i += 4) {
            union {
                uint2 vector;
                __half2 pairs[2];
            } four;
            four.pairs[0] = softmax.add(softmax.weight(score[i]), softmax.weight(score[i + 1]));
            four.pairs[1] = softmax.add(softmax.weight(score[i + 2]), softmax.weight(score[i + 3]));
            *reinterpret_cast<uint2*>(&smem.p[row][score_column(i / 4)]) = four.vector;
        }
        next.store(smem.v);
        __syncwarp();
        next.load(k + (key + kBc) * p.k.row, p.k.row, end_key - key - kBc);

        // O += P V
#pragma unroll
        for (int n = 0; n < kKeyGroups; ++n) {
            wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> p_fragment;
            wmma::load_matrix_sync(p_fragment, &smem.p[0][16 * n], kBc);
#pragma unroll
            for (int d = 0; d < kSteps; ++d) {
                wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::row_major> v_fragment;
                wmma::load_matrix_sync(v_fragment, &smem.v[16 * n][16 * d], kD);
                wmma::mma_sync(o[d], p_fragment, v_fragment, o[d]);
            }
        }
        __syncwarp();
    }

    // O / l
    const float l = softmax.row_sum(), lse = softmax.lse();
    if (lane % 2 == 0) {
        smem.row_sum[row] = l;
        if (row < rows) p.lse[lse_index(p, tile.batch, tile.head, tile.first_row + row)] = lse;
    }
#pragma unroll
    for (int d = 0; d < kSteps; ++d) wmma::store_matrix_sync(&smem.o[0][16 * d], o[d], kD, wmma::mem_row_major);
    __syncwarp();
    T* out = row_of<T>(p.o, tile.batch, tile.head, tile.first_row);
    constexpr int kElements = 16 / static_cast<int>(sizeof(T));
#pragma unroll
    for (int i = lane * kElements; i < kBr * kD; i += 32 * kElements) {
        const int r = i / kD, column = i % kD;
        if (r >= rows) break;
        const float row_sum = smem.row_sum[r];
        alignas(16) T piece[kElements];
#pragma unroll
        for (int j = 0; j < kElements; ++j)
            piece[j] = static_cast<T>(row_sum == 0.f ? 0.f : smem.o[r][column + j] / row_sum);
        *reinterpret_cast<uint4*>(&out[r * p.o.row + column]) = *reinterpret_cast<const uint4*>(piece);
    }
}

const Instance kInstances[] = {
    {DType::kFloat32, 75, kD, kBr, kBc, 1, 2, sizeof(SharedMemory), reinterpret_cast<const void*>(wmma_v2<float>)},
    {DType::kFloat16, 75, kD, kBr, kBc, 1, 2, sizeof(SharedMemory), reinterpret_cast<const void*>(wmma_v2<half>)},
};

const Instance& choose(const ForwardParams& p, const DeviceFacts&) { return kInstances[p.dtype == DType::kFloat16]; }

void launch_wmma_v2(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    const LaunchConfig config{q_tile_grid(p, kBr), dim3(32), sizeof(SharedMemory)};
    launch(p.dtype == DType::kFloat16 ? wmma_v2<half> : wmma_v2<float>, config, stream, p);
}

const KernelInfo kInfo = {
    {.name = "wmma_v2",
     .summary = "WMMA, one warp a 16-row Q tile: scores in registers, one maximum a tile, O rescaled in its fragments",
     .min_arch = 75,
     .float32 = true,
     .float16 = true,
     .rounds_float32 = true,
     .min_head_dim = kD,
     .max_head_dim = kD,
     .features = kCausal | kWindow,
     .instances = {std::begin(kInstances), std::end(kInstances)}},
    choose,
    no_workspace,
    launch_wmma_v2,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma
