// Appends to a key/value cache: rotates the new keys (RoPE) and the queries that go with them, and writes keys and
// values to their places, in one launch.
//
// A block takes one token after the other: first the queries, which it rotates and writes to a tensor of their own,
// then the new keys and values. Its threads share the token's heads. A thread takes a unit of a row: 16 bytes, or,
// where a row is rotated, two times 16 bytes whose elements form pairs. Rows whose sizes or addresses are no multiples
// of 16 bytes have units of one element, or two.
//
// A thread finds the token's sequence and place by itself (places.h): neighbours read the same few numbers, and no
// barrier waits for them. A token without a place is left out, so that the host need not know the lengths.
//
// Bound: HBM, one read and one write of what is new; for a step of generation, the latency of a length, a page and an
// element, one after the other.
#include "cache/append.h"

#include <launch.h>

#include <algorithm>

#include "cache/places.h"
#include "device/values.cuh"

namespace flash_wmma {
namespace {

constexpr int kThreads = 256;  // of a block, at most

// ---- Rows -----------------------------------------------------------------------------------------------------------

/// Of a token or a place, of the first head.
template <class T, class Where>
__device__ T* row(const Rows& rows, const Where& where) {
    return static_cast<T*>(rows.data) + where.offset(rows);
}

/// kWidth elements: 16 bytes, or one.
template <class T, int kWidth>
struct Chunk {
    static_assert(kWidth == 1 || kWidth == Values<T>::kCount);
    using Raw = std::conditional_t<kWidth == 1, T, uint4>;

    __device__ static void copy(const T* from, T* to) {
        *reinterpret_cast<Raw*>(to) = *reinterpret_cast<const Raw*>(from);
    }
    __device__ static void load(const T* from, float (&x)[kWidth]) {
        if constexpr (kWidth == 1) x[0] = Values<T>::widen(*from);
        else Values<T>::unpack(*reinterpret_cast<const uint4*>(from), x);
    }
    __device__ static void store(T* to, const float (&x)[kWidth]) {
        if constexpr (kWidth == 1) *to = Values<T>::narrow(x[0]);
        else *reinterpret_cast<uint4*>(to) = Values<T>::pack(x);
    }
};

/// The row of the rotary tables for a token.
template <class T>
struct Turn {
    const T *cos = nullptr, *sin = nullptr;

    __device__ Turn(const Rotary& rotary, std::int64_t row) {
        if (rotary.half == 0) return;
        cos = static_cast<const T*>(rotary.cos) + row * rotary.cos_row;
        sin = static_cast<const T*>(rotary.sin) + row * rotary.sin_row;
    }

    /// The chunks at `a` and `b` rotated. `first`: of the elements of their pairs in the row of the tables.
    template <int kWidth>
    __device__ void pairs(const T* from, T* to, int a, int b, int first, bool interleaved) const {
        using Piece = Chunk<T, kWidth>;
        float x[2][kWidth], c[kWidth], s[kWidth];
        Piece::load(from + a, x[0]), Piece::load(from + b, x[1]);
        Piece::load(cos + first, c), Piece::load(sin + first, s);
#pragma unroll
        for (int i = 0; i < kWidth; ++i) {
            // Element 2 i of both chunks together, or element i of each
            float& left = interleaved ? x[2 * i / kWidth][2 * i % kWidth] : x[0][i];
            float& right = interleaved ? x[(2 * i + 1) / kWidth][(2 * i + 1) % kWidth] : x[1][i];
            const float l = left, r = right;
            left = l * c[i] - r * s[i], right = l * s[i] + r * c[i];
        }
        Piece::store(to + a, x[0]), Piece::store(to + b, x[1]);
    }
};

/// How a row of `columns` elements is cut into units; `half` pairs of them are rotated.
template <int kWidth>
struct Units {
    int turned, all;

    __device__ Units(int columns, int half) : turned(half / kWidth), all(turned + (columns - 2 * half) / kWidth) {}

    template <class T>
    __device__ void write(const T* from, T* to, int unit, const Turn<T>& turn, int half, bool interleaved) const {
        if (unit >= turned) {
            const int at = 2 * half + (unit - turned) * kWidth;
            Chunk<T, kWidth>::copy(from + at, to + at);
        } else if (interleaved) {
            turn.template pairs<kWidth>(from, to, 2 * unit * kWidth, (2 * unit + 1) * kWidth, unit * kWidth, true);
        } else {
            turn.template pairs<kWidth>(from, to, unit * kWidth, half + unit * kWidth, unit * kWidth, false);
        }
    }
};

/// Writes all heads of a token's row: from `from`, head stride from_head, to `to`.
template <int kWidth, class T>
__device__ void write_heads(const T* from, std::int64_t from_head, T* to, std::int64_t to_head, int heads, int columns,
                            const Turn<T>& turn, int half, bool interleaved) {
    const Units<kWidth> units(columns, half);
    for (int i = static_cast<int>(threadIdx.x); i < heads * units.all; i += static_cast<int>(blockDim.x)) {
        const int head = i / units.all;
        units.write(from + head * from_head, to + head * to_head, i - head * units.all, turn, half, interleaved);
    }
}

// ---- The kernel -----------------------------------------------------------------------------------------------------

template <class T, int kWidth>
__global__ void __launch_bounds__(kThreads) append(const AppendParams p) {
    const Rotary& rotary = p.rotary;
    for (std::int64_t b = blockIdx.x * blockDim.x + threadIdx.x; b < p.batch; b += gridDim.x * blockDim.x)
        p.seqlens[b] = new_length(p, static_cast<int>(b));
    for (std::int64_t i = blockIdx.x; i < p.queries.count + p.keys.count; i += gridDim.x) {
        if (i < p.queries.count) {
            const Token query = token_of(p.queries, i, p.batch);
            const Turn<T> turn(rotary, turn_of(rotary, query, rotary.queries_advance));
            write_heads<kWidth>(row<const T>(p.q, query), p.q.head, row<T>(p.rotated_q, query), p.rotated_q.head,
                                p.heads_q, p.head_dim, turn, rotary.half, rotary.interleaved);
            continue;
        }
        const Token key = token_of(p.keys, i - p.queries.count, p.batch);
        const Place place = place_of(p, key);
        if (!place.exists) continue;
        const Turn<T> turn(rotary, rotary.half ? turn_of(rotary, key, true) : 0);
        write_heads<kWidth>(row<const T>(p.k, key), p.k.head, row<T>(p.k_cache, place), p.k_cache.head, p.heads_k,
                            p.head_dim, turn, rotary.half, rotary.interleaved);
        write_heads<kWidth>(row<const T>(p.v, key), p.v.head, row<T>(p.v_cache, place), p.v_cache.head, p.heads_k,
                            p.head_dim_v, turn, 0, false);
    }
}

/// Whether all rows are made of whole vectors on 16-byte boundaries.
bool vectors(const AppendParams& p, int width, int element) {
    const auto fits = [&](const void* data, std::initializer_list<std::int64_t> distances) {
        return reinterpret_cast<std::uintptr_t>(data) % static_cast<unsigned>(width * element) == 0 &&
               std::all_of(distances.begin(), distances.end(), [&](std::int64_t n) { return n % width == 0; });
    };
    const auto rows_fit = [&](const Rows& r) { return fits(r.data, {r.batch, r.head, r.row}); };
    const Rotary& rotary = p.rotary;
    return fits(nullptr, {p.head_dim, p.head_dim_v, rotary.half}) && rows_fit(p.k) && rows_fit(p.v) &&
           rows_fit(p.k_cache) && rows_fit(p.v_cache) &&
           (!p.queries.count || (rows_fit(p.q) && rows_fit(p.rotated_q))) &&
           (!rotary.half || (fits(rotary.cos, {rotary.cos_row}) && fits(rotary.sin, {rotary.sin_row})));
}

template <class T>
void launch_append(const AppendParams& p, Stream stream) {
    constexpr int kWidth = Values<T>::kCount;
    constexpr std::int64_t kMostBlocks = 4096;
    const bool wide = vectors(p, kWidth, sizeof(T));
    const int heads = std::max(p.queries.count ? p.heads_q : 0, p.heads_k);
    const std::int64_t units = heads * (std::int64_t{std::max(p.head_dim, p.head_dim_v)} / (wide ? kWidth : 1));
    const std::int64_t tokens = p.queries.count + p.keys.count;
    constexpr std::int64_t kWarps = 64;  // threads of two warps, or of a wavefront of 64
    const auto threads =
        static_cast<unsigned>(std::clamp<std::int64_t>((units + kWarps - 1) / kWarps * kWarps, kWarps, kThreads));
    const auto blocks = static_cast<unsigned>(std::clamp<std::int64_t>(tokens, 1, kMostBlocks));
    launch(wide ? append<T, kWidth> : append<T, 1>, {dim3(blocks), dim3(threads)}, stream, p);
}

}  // namespace

void append_rows(const AppendParams& params, Stream stream) {
    switch (params.dtype) {
        case DType::kFloat32: return launch_append<float>(params, stream);
        case DType::kFloat16: return launch_append<half>(params, stream);
        default: return launch_append<bf16>(params, stream);
    }
}

}  // namespace flash_wmma
