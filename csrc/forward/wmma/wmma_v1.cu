// wmma_v1: FlashAttention-2 forward on tensor cores (nvcuda::wmma), the plain way: the honest starting point.
//
// Algorithm (FlashAttention-2, Algorithm 1): a block is one warp and owns 16 query rows of one head (Br = 16, d = 64).
// It loops over K/V tiles of Bc = 32 keys:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
// The WMMA API does not say which elements of S and O a lane holds, so every step that works on rows works in memory:
// the softmax in shared memory, the division by l in global memory. Only the rescaling of O stays in registers: the 16
// rows share one maximum and with it one factor (shared_maximum.cuh, which also says how rows far below it stay exact).
//
// float inputs are rounded to half on the way to shared memory, without a scale: values beyond half's range (65504)
// become infinite. `auto` never takes this kernel.
//
// Who owns what: the warp's fragments hold Q (for the whole loop), S and O. Lane l owns 16 neighbouring scores of row
// l / 2, that row's m and l, and at the end half of that row of O.
//
// Bound: shared memory, and left so on purpose:
//   * Rows of S are 32 banks long and a lane's half row 16: all lanes meet in banks 0 and 16, then 1 and 17, and so on.
//     Each of the softmax's passes over S takes 16 times as long. wmma_v2 removes these conflicts.
//   * In the last pass each lane divides 32 neighbouring floats in global memory: the addresses of a warp lie 32 floats
//     apart, so no two share a sector. In wmma_v2 lanes write neighbouring addresses.
//   * Nothing is loaded ahead of its use. wmma_v2 loads one tile ahead.
//   * Rows of K and V are 128 bytes apart, all 32 banks: the eight rows of a fragment load meet in four of them.
//     wmma_v3 removes these conflicts.
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
constexpr int kSteps = kD / 16;              // fragments along d
constexpr int kKeyGroups = kBc / 16;         // fragments along the keys
constexpr int kLaneScores = kBr * kBc / 32;  // 16, half a row
constexpr int kLaneOutputs = kBr * kD / 32;  // 32, half a row
constexpr int kBlocksPerSm = 5;              // as many as shared memory allows on sm_75

/// Map of the block's shared memory: 11,264 bytes, so that five blocks fit in the 64 KiB of an sm_75 multiprocessor.
struct SharedMemory {
    union {
        half k[kBc][kD];   // until S is computed
        float o[kBr][kD];  // then, if its rows need factors of their own, O
    };
    half v[kBc][kD];
    union {
        half q[kBr][kD];    // before the loop
        float s[kBr][kBc];  // S, then its exponentials
    };
    half p[kBr][kBc];
};

template <class T>
__global__ void __launch_bounds__(32, kBlocksPerSm) wmma_v1(const __grid_constant__ ForwardParams p) {
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

    HalfTile<T, kBr, kD> q;
    q.load(row_of<const T>(p.q, tile.batch, tile.head, tile.first_row), p.q.row, rows);
    q.store(smem.q);
    __syncwarp();
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> q_fragment[kSteps];
#pragma unroll
    for (int d = 0; d < kSteps; ++d) wmma::load_matrix_sync(q_fragment[d], &smem.q[0][16 * d], kD);
    __syncwarp();

    Accumulator o[kSteps];
#pragma unroll
    for (int d = 0; d < kSteps; ++d) wmma::fill_fragment(o[d], 0.f);
    SharedMaximum softmax;
    const float scale_log2 = p.scale * kLog2e;

    for (int key = first_key; key < end_key; key += kBc) {
        HalfTile<T, kBc, kD> k, v;
        k.load(row_of<const T>(p.k, tile.batch, tile.head_k, key), p.k.row, end_key - key);
        k.store(smem.k);
        v.load(row_of<const T>(p.v, tile.batch, tile.head_k, key), p.v.row, end_key - key);
        v.store(smem.v);
        __syncwarp();

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

        // The softmax of the lane's half row, in place: a pass for its maximum, one for the exponentials and one for
        // their sum and P. The barriers between them keep the compiler from carrying the half row over in registers.
        float* s_row = &smem.s[row][lane % 2 * kLaneScores];
        half* p_row = &smem.p[row][lane % 2 * kLaneScores];
        const bool all_visible = rows == kBr && mask.all_visible(tile.first_row, last_row, key, key + kBc - 1);
        const int begin = row_begin - key - lane % 2 * kLaneScores, end = row_end - key - lane % 2 * kLaneScores;
        const auto score = [&](int c) {
            return all_visible || (begin <= c && c < end) ? s_row[c] * scale_log2 : -INFINITY;
        };
        float score_max = -INFINITY;
        for (int c = 0; c < kLaneScores; ++c) score_max = fmaxf(score_max, score(c));
        softmax.advance(score_max, o, smem.o);
        __syncwarp();
        for (int c = 0; c < kLaneScores; ++c) s_row[c] = softmax.weight(score(c));
        __syncwarp();
        for (int c = 0; c < kLaneScores; ++c) p_row[c] = softmax.add(s_row[c]);
        __syncwarp();

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

    // O to global memory, unnormalised. There the lane pair divides its row by l.
    float* unnormalised = static_cast<float*>(p.workspace) + static_cast<std::int64_t>(blockIdx.x) * kBr * kD;
#pragma unroll
    for (int d = 0; d < kSteps; ++d) wmma::store_matrix_sync(&unnormalised[16 * d], o[d], kD, wmma::mem_row_major);
    __syncwarp();
    const float l = softmax.row_sum(), lse = softmax.lse();
    if (row >= rows) return;
    const int query = tile.first_row + row, column = lane % 2 * kLaneOutputs;
    T* out = row_of<T>(p.o, tile.batch, tile.head, query) + column;
    for (int c = 0; c < kLaneOutputs; ++c)
        out[c] = static_cast<T>(l == 0.f ? 0.f : unnormalised[row * kD + column + c] / l);
    if (lane % 2 == 0) p.lse[lse_index(p, tile.batch, tile.head, query)] = lse;
}

const Instance kInstances[] = {
    {DType::kFloat32, 75, kD, kBr, kBc, 1, 1, sizeof(SharedMemory), reinterpret_cast<const void*>(wmma_v1<float>)},
    {DType::kFloat16, 75, kD, kBr, kBc, 1, 1, sizeof(SharedMemory), reinterpret_cast<const void*>(wmma_v1<half>)},
};

const Instance& choose(const ForwardParams& p, const DeviceFacts&) { return kInstances[p.dtype == DType::kFloat16]; }

/// Unnormalised O, its rows padded to whole tiles.
std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    constexpr std::int64_t kTileBytes = sizeof(float) * kBr * kD;
    return p.batch * p.heads_q * ((p.seqlen_q + kBr - 1) / kBr) * kTileBytes;
}

void launch_wmma_v1(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    const LaunchConfig config{q_tile_grid(p, kBr), dim3(32), sizeof(SharedMemory)};
    launch(p.dtype == DType::kFloat16 ? wmma_v1<half> : wmma_v1<float>, config, stream, p);
}

const KernelInfo kInfo = {
    {.name = "wmma_v1",
     .summary = "WMMA, one warp a 16-row Q tile: softmax in shared memory, O divided in global memory",
     .min_arch = 75,
     .float32 = true,
     .float16 = true,
     .rounds_float32 = true,
     .min_head_dim = kD,
     .max_head_dim = kD,
     .features = kCausal | kWindow,
     .instances = {std::begin(kInstances), std::end(kInstances)}},
    choose,
    workspace_bytes,
    launch_wmma_v1,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma
