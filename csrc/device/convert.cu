// One block converts one tile of kScaleRows rows of q, k or v: a pass for the largest finite magnitude, then, with the
// tile in L1, a pass that scales and rounds. Bound: HBM, 6 bytes an element (bf16: 4).
#include "convert.h"

#include <launch.h>
#include <shared_memory.cuh>

#include "element.cuh"
#include "tile.cuh"

namespace flash_wmma {
namespace {

constexpr int kThreads = 256;
constexpr int kVector = 8;  // elements a thread moves at once

struct Operand {
    Rows in;
    half* out;                       // contiguous (B, H, N, d), or (H, total, d) packed
    float* exponents;                // (B, H, ceil(N / kScaleRows)), or (H, packed_tiles(total, B, kScaleRows))
    const std::int32_t* cu_seqlens;  // null: not packed
    std::int64_t heads, rows, tiles;
    int head_dim;
    float zero_exponent;  // of a tile without a finite value but 0
};

struct Conversion {
    std::int64_t batch;
    Operand operand[3];
    std::int64_t first_block[4];  // operand i has the blocks [first_block[i], first_block[i + 1])
};

struct SharedMemory {
    float4 warp_maximum[kThreads / 32 / 4];
};

__device__ void load(const float* from, float (&x)[kVector]) {
    const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w, x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
}
__device__ void load(const bf16* from, float (&x)[kVector]) {
    const uint4 v = *reinterpret_cast<const uint4*>(from);
    const std::uint32_t pairs[] = {v.x, v.y, v.z, v.w};  // bf16 is the upper half of fp32
#pragma unroll
    for (int i = 0; i < kVector; ++i) x[i] = __uint_as_float(i % 2 ? pairs[i / 2] & 0xffff0000u : pairs[i / 2] << 16);
}

template <class T>
__global__ void __launch_bounds__(kThreads) convert(const __grid_constant__ Conversion c) {
    auto& smem = shared_memory<SharedMemory>();
    const int which = blockIdx.x >= c.first_block[2] ? 2 : blockIdx.x >= c.first_block[1] ? 1 : 0;
    const Operand& t = c.operand[which];
    const std::int64_t block = blockIdx.x - c.first_block[which], tile = block % t.tiles, slice = block / t.tiles;
    std::int64_t first_row = tile * kScaleRows, end = t.rows;
    if (t.cu_seqlens) {  // tiles begin anew with each sequence
        const PackedTile found = packed_tile(t.cu_seqlens, c.batch, t.rows, kScaleRows, static_cast<int>(tile));
        if (found.sequence == c.batch || found.tile < 0) return;
        first_row = detail::first_row(t.cu_seqlens, found.sequence, t.rows) + found.tile * kScaleRows;
        end = detail::first_row(t.cu_seqlens, found.sequence + 1, t.rows);
        if (first_row >= end) return;
    }
    const int rows = static_cast<int>(min(static_cast<std::int64_t>(kScaleRows), end - first_row));
    const T* in = static_cast<const T*>(t.in.data) + slice / t.heads * t.in.batch + slice % t.heads * t.in.head +
                  first_row * t.in.row;
    half* out = t.out + (slice * t.rows + first_row) * t.head_dim;
    const int vectors = t.head_dim / kVector, tid = static_cast<int>(threadIdx.x);

    float largest = 0.f;
    for (int i = tid; i < rows * vectors; i += kThreads) {
        float x[kVector];
        load(in + i / vectors * t.in.row + i % vectors * kVector, x);
#pragma unroll
        for (float value : x)
            if (isfinite(value)) largest = fmaxf(largest, fabsf(value));
    }
#pragma unroll
    for (int lane = 16; lane; lane /= 2) largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, lane));
    if (tid % 32 == 0) (&smem.warp_maximum[0].x)[tid / 32] = largest;
    __syncthreads();
#pragma unroll
    for (const float4 four : smem.warp_maximum)
        largest = fmaxf(fmaxf(largest, fmaxf(four.x, four.y)), fmaxf(four.z, four.w));

    // The largest value goes to [2^14, 2^15): 30 binades of full precision below it. The scale itself stays normal.
    const bool zero = largest == 0.f;
    const int exponent = zero ? 0 : max(ilogbf(largest) - 14, -126);
    const float scale = ldexpf(1.f, -exponent);
    if (tid == 0) t.exponents[slice * t.tiles + tile] = zero ? t.zero_exponent : static_cast<float>(exponent);
    for (int i = tid; i < rows * vectors; i += kThreads) {
        float x[kVector];
        load(in + i / vectors * t.in.row + i % vectors * kVector, x);
        union {
            uint4 vector;
            __half2 pairs[kVector / 2];
        } rounded;
#pragma unroll
        for (int e = 0; e < kVector / 2; ++e)
            rounded.pairs[e] = __floats2half2_rn(x[2 * e] * scale, x[2 * e + 1] * scale);
        *reinterpret_cast<uint4*>(out + i * kVector) = rounded.vector;
    }
}

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// The operands of a conversion laid out one after the other in the workspace, and the bytes they take.
struct Layout {
    Conversion conversion{};
    std::int64_t bytes = 0;

    explicit Layout(const ForwardParams& p) {
        const Sequences& s = p.sequences;
        conversion.batch = p.batch;
        add(0, p.q, p, p.heads_q, p.seqlen_q, s.cu_seqlens_q, s.total_q, p.head_dim);
        add(1, p.k, p, p.heads_k, p.seqlen_k, s.cu_seqlens_k, s.total_k, p.head_dim);
        add(2, p.v, p, p.heads_k, p.seqlen_k, s.cu_seqlens_k, s.total_k, p.head_dim_v);
    }

  private:
    void add(int i, const Rows& in, const ForwardParams& p, std::int64_t heads, std::int64_t seqlen,
             const std::int32_t* cu_seqlens, std::int64_t total, int d) {
        const std::int64_t batch = cu_seqlens ? 1 : p.batch, rows = cu_seqlens ? total : seqlen;
        const std::int64_t tiles =
            cu_seqlens ? packed_tiles(total, p.batch, kScaleRows) : (rows + kScaleRows - 1) / kScaleRows;
        auto* base = static_cast<char*>(p.workspace);
        Operand& operand = conversion.operand[i];
        operand = {in, nullptr, nullptr, cu_seqlens, heads, rows, tiles, d, i == 2 ? INFINITY : 0.f};
        operand.out = reinterpret_cast<half*>(base + bytes);
        bytes += aligned(batch * heads * rows * d * static_cast<std::int64_t>(sizeof(half)));
        operand.exponents = reinterpret_cast<float*>(base + bytes);
        bytes += aligned(batch * heads * tiles * static_cast<std::int64_t>(sizeof(float)));
        conversion.first_block[i + 1] = conversion.first_block[i] + batch * heads * tiles;
    }
};

}  // namespace

std::int64_t converted_bytes(const ForwardParams& params) { return Layout(params).bytes; }

ForwardParams convert_to_half(const ForwardParams& params, Stream stream) {
    const Conversion conversion = Layout(params).conversion;
    const std::int64_t blocks = conversion.first_block[3];
    if (blocks > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 tiles to convert");
    const LaunchConfig config{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), sizeof(SharedMemory)};
    launch(params.dtype == DType::kBFloat16 ? convert<bf16> : convert<float>, config, stream, conversion);

    ForwardParams p = params;
    p.dtype = DType::kFloat16;
    Rows* rows[] = {&p.q, &p.k, &p.v};
    const float** exponents[] = {&p.exponents.q, &p.exponents.k, &p.exponents.v};
    for (int i = 0; i < 3; ++i) {
        const Operand& o = conversion.operand[i];
        const std::int64_t head = o.rows * o.head_dim;
        *rows[i] = {o.out, o.cu_seqlens ? 0 : o.heads * head, head, o.head_dim};
        *exponents[i] = o.exponents;
    }
    return p;
}

}  // namespace flash_wmma
