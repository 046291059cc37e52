// The kernel of simt: FlashAttention-2 forward in fp32 on CUDA cores, register-tiled like a matrix product.
//
// Algorithm (FlashAttention-2, Algorithm 1): a block owns Br query rows of one head and loops over K/V tiles of Bc keys:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
// Products are fp32 FMAs, sums fp32, and m is every row's exact maximum: nothing is rounded to a shorter type.
//
// Who owns what: Q, K and V tiles belong to the block, in shared memory. A warp owns kLaneRows * kRows query rows, and its
// lanes are a grid of kLaneRows x kLaneColumns: lane (r, c) holds S of rows r + kLaneRows * i and keys c + kLaneColumns * n,
// and O of the same rows in vectors of four columns, c + kLaneColumns * v. P goes through shared memory within the warp.
//
// Bound: the issue of FFMA (an SM issues four warp instructions a cycle), next to it shared memory. A step of four columns
// of d takes kRows + kKeys 16-byte loads for 4 * kRows * kKeys FFMA: with 8 x 8, 16 loads for 256. Such a load takes
// four wavefronts, but two if lanes l and l ^ 1 or l and l ^ 2 read the same: so the lowest bit of a lane is a row, the
// next ones a column. Rows of K are padded so that the eight keys that are read at once lie in different banks.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include "../attention.h"
#include "../device/mask.cuh"
#include "../device/score_mod.cuh"
#include "../device/shuffle.cuh"
#include "../device/tile.cuh"
#include "simt_shapes.h"

namespace flash_wmma::simt {

/// Shape of a block's work. HeadDim is the largest d (and d_v) that the instance holds.
template <int HeadDim, int Warps, int LaneColumns, int Rows, int KeyTile, int Stages, int BlocksPerSm>
struct Tile {
    static constexpr int kD = HeadDim, kWarps = Warps, kBc = KeyTile, kStages = Stages, kBlocksPerSm = BlocksPerSm;
    static constexpr int kLaneColumns = LaneColumns, kLaneRows = 32 / LaneColumns;
    static constexpr int kRows = Rows, kKeys = kBc / kLaneColumns, kVectors = kD / 4 / kLaneColumns;  // of a lane
    static constexpr int kWarpRows = kLaneRows * kRows, kBr = kWarps * kWarpRows, kThreads = 32 * kWarps;
    static_assert(kBc % kLaneColumns == 0 && kD % (4 * kLaneColumns) == 0 && kLaneColumns >= 8);
};

/// Map of a block's shared memory.
template <class Tile>
struct SharedMemory {
    struct alignas(16) Stage {
        float k[Tile::kBc][Tile::kD + 4];
        float v[Tile::kBc][Tile::kD];
    };
    alignas(16) float q[Tile::kBr][Tile::kD + 4];
    Stage ring[Tile::kStages];
    float p[Tile::kBr][Tile::kBc + Tile::kLaneColumns];
};

/// Where this thread stands in its block.
template <class Tile>
struct Thread {
    int row, column, warp_row;  // of the lane in its warp's grid; the warp's first row
    __device__ Thread() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        row = lane % 2 + lane / (2 * Tile::kLaneColumns) * 2;
        column = lane / 2 % Tile::kLaneColumns;
        warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
    }
    __device__ int tile_row(int i) const { return warp_row + row + Tile::kLaneRows * i; }
    __device__ int key(int n) const { return column + Tile::kLaneColumns * n; }
    __device__ int vector(int v) const { return 4 * (column + Tile::kLaneColumns * v); }
};

/// A lane's scores and its part of O.
template <class Tile>
using Scores = float[Tile::kRows][Tile::kKeys];
template <class Tile>
using Output = float4[Tile::kRows][Tile::kVectors];

/// A block's copies of tiles of Rows rows to shared memory, from the first to the last, zeros where there is nothing. A thread
/// has the same column in all. They land at its next wait.
template <class Tile, int Rows>
class Copy {
  public:
    /// `from`: the first tile; `columns`: how many there are.
    __device__ Copy(const float* from, std::int64_t pitch, int columns)
        : from_(from + first_row() * pitch + column()), inside_(column() < columns) {}

    /// The next tile, of which `rows` rows exist.
    template <int Pitch>
    __device__ __forceinline__ void next(float (&to)[Rows][Pitch], std::int64_t pitch, int rows) {
        float* const target = &to[first_row()][column()];
        const float* from = from_;
        const auto each = [&](auto exists) {
#pragma unroll
            for (int i = 0; i < kCount; ++i, from += kRowsAtOnce * pitch)
                ptx::cp_async_16(target + i * kRowsAtOnce * Pitch, from, inside_ && exists(i) ? 16 : 0);
        };
        if (rows >= Rows) each([](int) { return true; });
        else each([row = rows - first_row()](int i) { return i * kRowsAtOnce < row; });
        from_ += Rows * pitch;
    }

  private:
    static constexpr int kRowVectors = Tile::kD / 4, kRowsAtOnce = Tile::kThreads / kRowVectors;
    static constexpr int kCount = Rows / kRowsAtOnce;
    static_assert(Tile::kThreads % kRowVectors == 0 && Rows % kRowsAtOnce == 0);
    __device__ static int first_row() { return static_cast<int>(threadIdx.x) / kRowVectors; }
    __device__ static int column() { return static_cast<int>(threadIdx.x) % kRowVectors * 4; }

    const float* from_;  // this thread's first vector of the next tile
    bool inside_;
};

__device__ __forceinline__ float4 load_4(const float* from) { return *reinterpret_cast<const float4*>(from); }

/// sum += x y along four columns.
__device__ __forceinline__ void add_product(float& sum, const float4& x, const float4& y) {
    sum = fmaf(x.x, y.x, sum);
    sum = fmaf(x.y, y.y, sum);
    sum = fmaf(x.z, y.z, sum);
    sum = fmaf(x.w, y.w, sum);
}
/// sum += x y, y four columns.
__device__ __forceinline__ void add_product(float4& sum, float x, const float4& y) {
    sum.x = fmaf(x, y.x, sum.x);
    sum.y = fmaf(x, y.y, sum.y);
    sum.z = fmaf(x, y.z, sum.z);
    sum.w = fmaf(x, y.w, sum.w);
}

/// S = Q K^T.
template <class Tile>
__device__ __forceinline__ void multiply_qk(Scores<Tile>& s, const SharedMemory<Tile>& smem, int slot, int head_dim,
                                            const Thread<Tile>& thread) {
    constexpr int kUnroll = 128 / (Tile::kRows * Tile::kKeys);
#pragma unroll
    for (auto& row : s)
#pragma unroll
        for (float& score : row) score = 0.f;
    const float* q_rows = &smem.q[thread.tile_row(0)][0];
    const float* k_rows = &smem.ring[slot].k[thread.key(0)][0];
#pragma unroll kUnroll
    for (int c = 0; c < head_dim; c += 4) {
        float4 q[Tile::kRows];
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i) q[i] = load_4(q_rows + Tile::kLaneRows * i * (Tile::kD + 4) + c);
#pragma unroll
        for (int n = 0; n < Tile::kKeys; ++n) {
            const float4 k = load_4(k_rows + Tile::kLaneColumns * n * (Tile::kD + 4) + c);
#pragma unroll
            for (int i = 0; i < Tile::kRows; ++i) add_product(s[i][n], q[i], k);
        }
    }
}

/// O += P V.
template <class Tile>
__device__ __forceinline__ void multiply_pv(Output<Tile>& o, const SharedMemory<Tile>& smem, int slot,
                                            const Thread<Tile>& thread) {
    constexpr int kUnroll = 32 / (Tile::kRows * Tile::kVectors);
    const float* p_rows = &smem.p[thread.tile_row(0)][0];
    const float* v_columns = &smem.ring[slot].v[0][thread.vector(0)];
#pragma unroll kUnroll
    for (int key = 0; key < Tile::kBc; key += 4) {
        float4 p[Tile::kRows];
#pragma unroll
        for (int i = 0; i < Tile::kRows; ++i)
            p[i] = load_4(p_rows + Tile::kLaneRows * i * (Tile::kBc + Tile::kLaneColumns) + key);
#pragma unroll
        for (int j = 0; j < 4; ++j)
#pragma unroll
            for (int v = 0; v < Tile::kVectors; ++v) {
                const float4 value = load_4(v_columns + (key + j) * Tile::kD + 4 * Tile::kLaneColumns * v);
#pragma unroll
                for (int i = 0; i < Tile::kRows; ++i)
                    add_product(o[i][v], j == 0 ? p[i].x : j == 1 ? p[i].y : j == 2 ? p[i].z : p[i].w, value);
            }
    }
}

/// `combine` over the lanes that share a row.
template <class Tile, class Combine>
__device__ __forceinline__ float over_row(float x, Combine combine) {
#pragma unroll
    for (int lanes = 2; lanes <= Tile::kLaneColumns; lanes *= 2) x = combine(x, shuffle_xor(x, lanes));
    return x;
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm) forward(const __grid_constant__ ForwardParams p) {
    constexpr int kBc = Tile::kBc, kRows = Tile::kRows, kKeys = Tile::kKeys;
    constexpr bool kDouble = Tile::kStages == 2;
    constexpr float kLog2e = 1.44269504088896341f, kLn2 = 0.69314718055994531f;
    auto& smem = shared_memory<SharedMemory<Tile>>();
    const Thread<Tile> thread;
    const Assignment assigned = assignment<Tile::kBr>(p);
    const Sequence& sequence = assigned.sequence;
    const QTile& tile = assigned.tile;
    if (tile.first_row < 0 || tile.first_row >= sequence.seqlen_q) return;

    // The keys that some row of the tile sees, from a multiple of Bc on
    const BandMask mask(p.band, sequence.seqlen_q, sequence.seqlen_k);
    const int last_row = min(tile.first_row + Tile::kBr, sequence.seqlen_q) - 1;
    const int end_key = mask.end(last_row);
    int key = mask.begin(tile.first_row) / kBc * kBc;
    float m[kRows], l[kRows];  // l is this lane's part
    Output<Tile> o;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        m[i] = -INFINITY, l[i] = 0.f;
#pragma unroll
        for (float4& vector : o[i]) vector = make_float4(0.f, 0.f, 0.f, 0.f);
    }
    Copy<Tile, kBc> k_copy(row_of<const float>(p.k, sequence.index, tile.head_k, sequence.first_k + key), p.k.row,
                           p.head_dim);
    Copy<Tile, kBc> v_copy(row_of<const float>(p.v, sequence.index, tile.head_k, sequence.first_k + key), p.v.row,
                           p.head_dim_v);
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
        multiply_qk<Tile>(s, smem, slot, p.head_dim, thread);

        // Products become scores in log2 units; those that a row does not see -inf
        const auto each = [&](auto f) {
#pragma unroll
            for (int i = 0; i < kRows; ++i)
#pragma unroll
                for (int n = 0; n < kKeys; ++n) f(i, n, 0);
        };
        const auto score = [&](int i, int n, int) -> float& { return s[i][n]; };
        if (ScoreMod<true>::active(p)) {
            Scores<Tile> slopes;  // which backward alone reads
            const auto slope = [&](int i, int n, int) -> float& { return slopes[i][n]; };
            const auto query_of = [&](int i, int, int) { return tile.row(thread.tile_row(i)).query; };
            const auto key_of = [&](int, int n, int) { return key + thread.key(n); };
            ScoreMod<true>(p, sequence, tile).apply_each(each, score, slope, p.scale * kLog2e, query_of, key_of);
        } else {
            each([&](int i, int n, int) { s[i][n] *= p.scale * kLog2e; });
        }
        if (!mask.all_visible(tile.first_row, last_row, key, key + kBc - 1)) {
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
                smem.p[thread.tile_row(i)][thread.key(n)] = s[i][n];
            }
            l[i] = fmaf(l[i], rescale[i], sum);
        }
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
        multiply_pv<Tile>(o, smem, slot, thread);
        if constexpr (kDouble) slot ^= 1;
    }

#pragma unroll
    for (int i = 0; i < kRows; ++i) {
        const float sum = over_row<Tile>(l[i], [](float x, float y) { return x + y; });
        const auto [query, head] = tile.row(thread.tile_row(i));
        if (query >= sequence.seqlen_q) continue;
        const float inverse = sum == 0.f ? 0.f : 1.f / sum;  // 0 for a row that saw no key
        float* const out = row_of<float>(p.o, sequence.index, head, sequence.first_q + query);
#pragma unroll
        for (int v = 0; v < Tile::kVectors; ++v) {
            const float4 x = o[i][v];
            if (thread.vector(v) < p.head_dim_v)
                *reinterpret_cast<float4*>(out + thread.vector(v)) =
                    make_float4(x.x * inverse, x.y * inverse, x.z * inverse, x.w * inverse);
        }
        if (thread.column == 0)
            p.lse[lse_index(p, sequence, head, query)] = sum == 0.f ? -INFINITY : (m[i] + log2f(sum)) * kLn2;
    }
}

template <class Tile>
void launch_tile(const ForwardParams& p, Stream stream) {
    const dim3 grid = assignment_grid(p, Tile::kBr);
    launch(forward<Tile>, {grid, dim3(Tile::kThreads), sizeof(SharedMemory<Tile>)}, stream, p);
}

/// See Shape.
template <class Tile>
Shape shape(float blocks_per_sm, int resident) {
    return {{DType::kFloat32, 75, Tile::kD, Tile::kBr, Tile::kBc, Tile::kWarps, Tile::kStages, sizeof(SharedMemory<Tile>),
             reinterpret_cast<const void*>(forward<Tile>)},
            blocks_per_sm,
            resident,
            launch_tile<Tile>};
}

}  // namespace flash_wmma::simt
