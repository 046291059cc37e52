// One block converts one tile of kScaleRows rows of q, k, v or dout: a pass for the largest finite magnitude, then,
// with the tile in registers and L1, a pass that scales and rounds. Bound: HBM, 6 bytes an element (bf16: 4).
//
// Two sources compile it: convert.cu as an ordinary grid for every architecture, convert_sm90.cu as one of a chain.
#pragma once

#include <launch.h>
#include <shared_memory.cuh>

#include <algorithm>
#include <iterator>

#include "cached_rows.h"
#include "device/convert.h"
#include "device/divisor.h"
#include "device/element.cuh"
#include "device/tile.cuh"

namespace flash_wmma::conversion {

constexpr int kThreads = 128;
constexpr int kVector = 8;  // elements a thread moves at once
constexpr int kKept = 4;    // vectors that a thread keeps between the passes; it reads what is behind them again

struct Operand {
    Rows in;
    half* out;         // contiguous (B, H, N, d), or (H, total, d) packed
    float* exponents;  // (B, H, ceil(N / kScaleRows)), or (H, packed_tiles(total, B, kScaleRows))
    float* norms;      // the same shape, bounds of rows' norms (attention.h, BackwardExponents); null: none
    const std::int32_t* cu_seqlens;  // null: not packed
    const std::int32_t* used;        // of packed keys: how many of each sequence; null: all
    std::int32_t* keys;              // of a cache: how many of each sequence, for the kernel; null: no cache
    std::int64_t heads, rows, tiles;
    Divisor by_heads, by_tiles, by_vectors;  // of a row
    int head_dim;
    float zero_exponent;  // of a tile without a finite nonzero value
};

struct Conversion {
    std::int64_t batch;
    Sequences sequences;
    Operand operand[4];
    std::int64_t first_block[5];  // operand i has the blocks [first_block[i], first_block[i + 1])
};

struct SharedMemory {
    float4 warp_maximum[kThreads / 32 / 4], warp_sum[kThreads / 32 / 4];
};

/// A grid by itself.
struct Alone {
    static constexpr bool kProgrammatic = false;
    __device__ static void begin() {}
};

/// Norms: also computes norms, for the operands that have a place for them. Cached: k and v may lie in a cache. Chain:
/// how the grid follows the one before.
template <class T, bool Norms, bool Cached, class Chain>
__global__ void __launch_bounds__(kThreads) convert(const __grid_constant__ Conversion c) {
    auto& smem = shared_memory<SharedMemory>();
    Chain::begin();
    int which = 0;
#pragma unroll
    for (int i = 1; i < 4; ++i) which += blockIdx.x >= c.first_block[i];
    const Operand& t = c.operand[which];
    const int block = static_cast<int>(blockIdx.x - c.first_block[which]);
    const std::int64_t tile = t.by_tiles.remainder(block), slice = t.by_tiles.quotient(block);
    const int batch = t.by_heads.quotient(static_cast<int>(slice)),
              head = t.by_heads.remainder(static_cast<int>(slice));
    std::int64_t first_row = tile * kScaleRows, end = t.rows;
    if (t.cu_seqlens) {  // tiles begin anew with each sequence
        const PackedTile found = packed_tile(t.cu_seqlens, c.batch, t.rows, kScaleRows, static_cast<int>(tile));
        if (found.sequence == c.batch || found.tile < 0) return;
        const std::int64_t begin = detail::first_row(t.cu_seqlens, found.sequence, t.rows);
        first_row = begin + found.tile * kScaleRows;
        end = detail::first_row(t.cu_seqlens, found.sequence + 1, t.rows);
        if (t.used) end = min(end, begin + t.used[found.sequence]);
        if (first_row >= end) return;
    }
    const int tid = static_cast<int>(threadIdx.x);
    const bool gathers = Cached && t.keys;
    if (gathers) {
        const int keys = CachedRows(c.sequences, t.rows, batch).count;
        if (tid == 0 && tile == 0 && head == 0) t.keys[batch] = keys;
        if (first_row >= keys) return;
        end = keys;
    }
    const int rows = static_cast<int>(min(static_cast<std::int64_t>(kScaleRows), end - first_row));
    const T* in = static_cast<const T*>(t.in.data) + head * t.in.head;
    if (!gathers) in += batch * t.in.batch + first_row * t.in.row;
    const auto row_in = [&](int row) {
        if (!gathers) return in + row * t.in.row;
        return in + CachedRows(c.sequences, t.rows, batch).offset(t.in, static_cast<int>(first_row) + row);
    };
    half* out = t.out + (slice * t.rows + first_row) * t.head_dim;
    const int count = rows * (t.head_dim / kVector);
    const auto load = [&](int i, float (&x)[kVector]) {
        load_8(row_in(t.by_vectors.quotient(i)) + t.by_vectors.remainder(i) * kVector, x);
    };

    float kept[kKept][kVector] = {};
#pragma unroll
    for (int n = 0; n < kKept; ++n)
        if (const int i = tid + n * kThreads; i < count) load(i, kept[n]);
    float largest = 0.f;
    const auto look_at = [&](const float (&x)[kVector]) {
#pragma unroll
        for (const float value : x)
            if (isfinite(value)) largest = fmaxf(largest, fabsf(value));
    };
#pragma unroll
    for (const auto& x : kept) look_at(x);
    for (int i = tid + kKept * kThreads; i < count; i += kThreads) {
        float x[kVector];
        load(i, x);
        look_at(x);
    }
#pragma unroll
    for (int lane = 16; lane; lane /= 2) largest = fmaxf(largest, __shfl_xor_sync(kWarpMask, largest, lane));
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
    [[maybe_unused]] float squares = 0.f;
    const auto store = [&](int i, const float (&x)[kVector]) {
        union {
            uint4 vector;
            __half2 pairs[kVector / 2];
        } rounded;
#pragma unroll
        for (int e = 0; e < kVector / 2; ++e)
            rounded.pairs[e] = __floats2half2_rn(x[2 * e] * scale, x[2 * e + 1] * scale);
        *reinterpret_cast<uint4*>(out + i * kVector) = rounded.vector;
        if constexpr (Norms)
#pragma unroll
            for (const float value : x)
                if (isfinite(value)) squares = fmaf(value * scale, value * scale, squares);
    };
#pragma unroll
    for (int n = 0; n < kKept; ++n)
        if (const int i = tid + n * kThreads; i < count) store(i, kept[n]);
    for (int i = tid + kKept * kThreads; i < count; i += kThreads) {
        float x[kVector];
        load(i, x);
        store(i, x);
    }
    if constexpr (Norms) {  // a row's norm exceeds neither the tile's nor sqrt(d) times the tile's largest value
        if (!t.norms) return;
#pragma unroll
        for (int lane = 16; lane; lane /= 2) squares += __shfl_xor_sync(kWarpMask, squares, lane);
        if (tid % 32 == 0) (&smem.warp_sum[0].x)[tid / 32] = squares;
        __syncthreads();
        if (tid > 0) return;
        squares = 0.f;
#pragma unroll
        for (const float4 four : smem.warp_sum) squares += four.x + four.y + four.z + four.w;
        squares = fminf(squares, static_cast<float>(t.head_dim) * (largest * scale) * (largest * scale));
        t.norms[slice * t.tiles + tile] = static_cast<float>(exponent) + 0.5f * log2f(squares);
    }
}

/// Launches the grid.
template <bool Norms, bool Cached, class Chain>
void launch_convert(DType dtype, const Conversion& conversion, Stream stream) {
    const std::int64_t blocks = conversion.first_block[4];
    if (blocks > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 tiles to convert");
    LaunchConfig config{dim3(static_cast<unsigned>(blocks)), dim3(kThreads), sizeof(SharedMemory)};
    config.programmatic = Chain::kProgrammatic;
    launch(dtype == DType::kBFloat16 ? convert<bf16, Norms, Cached, Chain> : convert<float, Norms, Cached, Chain>,
           config, stream, conversion);
}

/// The operands of a conversion laid out one after the other in the workspace, and the bytes they take.
class Layout {
  public:
    Conversion conversion{};
    std::int64_t bytes = 0;

    explicit Layout(const ForwardParams& p) : Layout(p, p.workspace) { add_inputs(0.f, INFINITY); }
    explicit Layout(const BackwardParams& p) : Layout(p.forward, p.workspace) {
        add_inputs(-INFINITY, -INFINITY);
        add(3, p.dout, true, p.forward.head_dim_v, -INFINITY);
        add_norms(2);
        add_norms(3);
    }

  private:
    Layout(const ForwardParams& p, void* workspace) : p_(p), base_(static_cast<char*>(workspace)) {
        conversion.batch = p.batch;
        conversion.sequences = p.sequences;
    }
    void add_inputs(float zero_exponent, float zero_exponent_v) {
        add(0, p_.q, true, p_.head_dim, zero_exponent);
        add(1, p_.k, false, p_.head_dim, zero_exponent);
        add(2, p_.v, false, p_.head_dim_v, zero_exponent_v);
    }
    void add(int i, const Rows& in, bool of_queries, int d, float zero_exponent) {
        const Sequences& s = p_.sequences;
        const std::int32_t* cu_seqlens = of_queries ? s.cu_seqlens_q : s.cu_seqlens_k;
        const std::int64_t heads = of_queries ? p_.heads_q : p_.heads_k, total = of_queries ? s.total_q : s.total_k;
        const std::int64_t batch = cu_seqlens ? 1 : p_.batch;
        const std::int64_t rows = cu_seqlens ? total : of_queries ? p_.seqlen_q : p_.seqlen_k;
        const std::int64_t tiles =
            cu_seqlens ? packed_tiles(total, p_.batch, kScaleRows) : (rows + kScaleRows - 1) / kScaleRows;
        conversion.operand[i] = {in,
                                 take<half>(batch * heads * rows * d),
                                 take<float>(batch * heads * tiles),
                                 nullptr,
                                 cu_seqlens,
                                 of_queries ? nullptr : s.seqused_k,
                                 s.page_size && !of_queries ? take<std::int32_t>(p_.batch) : nullptr,
                                 heads,
                                 rows,
                                 tiles,
                                 Divisor(heads),
                                 Divisor(std::max<std::int64_t>(tiles, 1)),
                                 Divisor(std::max(d / kVector, 1)),
                                 d,
                                 zero_exponent};
        std::fill(conversion.first_block + i + 1, std::end(conversion.first_block),
                  conversion.first_block[i] + batch * heads * tiles);
    }
    void add_norms(int i) {
        conversion.operand[i].norms = take<float>(conversion.first_block[i + 1] - conversion.first_block[i]);
    }
    /// `count` elements of the workspace, uninitialised.
    template <class T>
    T* take(std::int64_t count) {
        auto* taken = reinterpret_cast<T*>(base_ + bytes);
        bytes += (count * static_cast<std::int64_t>(sizeof(T)) + 255) / 256 * 256;
        return taken;
    }

    const ForwardParams& p_;
    char* base_;
};

/// Where the operand is once it is converted.
inline Rows converted_rows(const Operand& o) {
    const std::int64_t head = o.rows * o.head_dim;
    return {o.out, o.cu_seqlens ? 0 : o.heads * head, head, o.head_dim};
}

/// `p` with dtype, q, k, v and exponents replaced, and a cache by dense K and V.
inline ForwardParams converted_params(const Conversion& conversion, const ForwardParams& p) {
    const Operand &q = conversion.operand[0], &k = conversion.operand[1], &v = conversion.operand[2];
    ForwardParams converted = p;
    converted.dtype = DType::kFloat16;
    converted.q = converted_rows(q);
    converted.k = converted_rows(k);
    converted.v = converted_rows(v);
    converted.exponents = {q.exponents, k.exponents, v.exponents};
    if (k.keys) {  // its rows are together now: dense K and V, of which each sequence uses some keys
        const Sequences& s = p.sequences;
        converted.sequences = {};
        converted.sequences.cu_seqlens_q = s.cu_seqlens_q;
        converted.sequences.total_q = s.total_q;
        converted.sequences.seqused_k = k.keys;
    }
    return converted;
}

}  // namespace flash_wmma::conversion
