// How 16 rows of O, in the registers of a warp, and their LSE go to memory.
#pragma once

#include <ptx.cuh>

#include <type_traits>

#include "device/element.cuh"
#include "device/lagged_softmax.cuh"
#include "device/quad.cuh"
#include "device/sink.cuh"
#include "device/staged_rows.cuh"
#include "forward/wgmma/block.cuh"

namespace flash_wmma::wgmma_sm90 {

/// Stores row i of O times `scale` and `factor`, or zeros if `none`: its columns from `column` on, of `columns` in all.
/// `out` is the row's first element. Lanes that share a row swap words until each has 16 neighbouring bytes, or once,
/// for 8; fp32: each has 8. Only lanes with `inside` write.
template <bool SwapsOnce, class T, int Columns>
__device__ __forceinline__ void store_row(T* out, int i, const RegisterTile<16, Columns>& o, float scale, float factor,
                                          bool none, bool inside, int column, int columns, int lane) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int j = 0; j < Columns / 8; ++j) {
            const int col = column + 8 * j + lane % 4 * 2;
            const float2 pair =
                none ? float2{} : make_float2(o.at(i, 8 * j) * scale * factor, o.at(i, 8 * j + 1) * scale * factor);
            if (inside && col < columns) *reinterpret_cast<float2*>(out + col) = pair;
        }
    } else {
        constexpr int kWords = SwapsOnce ? 2 : 4;  // that a lane swaps
        const float both = scale * factor;
#pragma unroll
        for (int j = 0; j < Columns / 8; j += kWords) {
            std::uint32_t words[kWords];
#pragma unroll
            for (int w = 0; w < kWords; ++w)
                words[w] = none ? 0 : packed<T>(o.at(i, 8 * (j + w)) * both, o.at(i, 8 * (j + w) + 1) * both);
            if constexpr (SwapsOnce) {
                pair_in_quad(words, lane % 4);
                const int col = column + 8 * (j + lane % 2) + lane % 4 / 2 * 4;
                if (inside && col < columns) *reinterpret_cast<uint2*>(out + col) = make_uint2(words[0], words[1]);
            } else {
                transpose_in_quad(words, lane % 4);
                const int col = column + 8 * (j + lane % 4);
                if (inside && col < columns)
                    *reinterpret_cast<uint4*>(out + col) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

/// Index of a row's LSE, whose rows may be some of a larger tensor's.
__device__ __forceinline__ std::int64_t merged_index(const ForwardParams& p, const Sequence& sequence, int head,
                                                     int row) {
    return sequence.index * p.lse_batch + head * p.lse_head + row;
}

/// Loads row i of O, of type T, to where arrange_row makes of it what a lane has of a row: 16 neighbouring bytes, or of
/// fp32 the two columns themselves. Zeros, unless the row is `inside`.
template <class T, int Columns>
__device__ __forceinline__ void load_row(const T* row, int i, RegisterTile<16, Columns>& o, bool inside, int columns,
                                         int lane) {
    if constexpr (std::is_same_v<T, float>) {
#pragma unroll
        for (int j = 0; j < Columns / 8; ++j) {
            const int col = 8 * j + lane % 4 * 2;
            const bool exists = inside && 8 * j < columns;
            const float2 pair = exists ? *reinterpret_cast<const float2*>(row + col) : float2{};
            o.at(i, 8 * j) = pair.x, o.at(i, 8 * j + 1) = pair.y;
        }
    } else {
#pragma unroll
        for (int j = 0; j < Columns / 8; j += 4) {
            const int col = 8 * (j + lane % 4);
            const float4 words = inside && col < columns ? *reinterpret_cast<const float4*>(row + col) : float4{};
            o.at(i, 8 * j) = words.x, o.at(i, 8 * (j + 1)) = words.y;
            o.at(i, 8 * (j + 2)) = words.z, o.at(i, 8 * (j + 3)) = words.w;
        }
    }
}
/// After load_row: the row times `factor`, or zeros if `none`.
template <class T, int Columns>
__device__ __forceinline__ void arrange_row(int i, RegisterTile<16, Columns>& o, float factor, bool none, int lane) {
#pragma unroll
    for (int j = 0; j < Columns / 8; j += 4) {
        std::uint32_t words[4];
        if constexpr (!std::is_same_v<T, float>) {
#pragma unroll
            for (int w = 0; w < 4; ++w) words[w] = __float_as_uint(o.at(i, 8 * (j + w)));
            transpose_in_quad(words, lane % 4);
        }
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            float &x = o.at(i, 8 * (j + w)), &y = o.at(i, 8 * (j + w) + 1);
            float2 pair = make_float2(x, y);
            if constexpr (!std::is_same_v<T, float>) pair = Element<T>::floats(words[w]);
            x = none ? 0.f : pair.x * factor, y = none ? 0.f : pair.y * factor;
        }
    }
}

/// What a row of O is multiplied by, and whether the row saw no key.
struct RowEnd {
    float factor;
    bool none;
};
/// The end of row i of a warp's rows, with the head's sink: stores its LSE if `stores_lse`.
template <bool kMerged>
__device__ __forceinline__ RowEnd end_row(const ForwardParams& p, const Sequence& sequence, int head, int first_query,
                                          int i, const LaggedSoftmax<16>& softmax, int lane, bool stores_lse) {
    float sum = over_quad(softmax.l[i], [](float x, float y) { return x + y; }), m = softmax.m[i];
    const bool none = sum == 0.f;
    const float rescale = take_sink(p, head, m, sum), inverse = rescale * ptx::rcp(sum);
    const int query = first_query + lane / 4 + 8 * i;
    if (lane % 4 == 0 && query < sequence.seqlen_q && stores_lse)
        p.lse[kMerged ? merged_index(p, sequence, head, query) : lse_index(p, sequence, head, query)] =
            sum == 0.f ? -INFINITY : (m + ptx::lg2(sum)) * kLn2;
    return {inverse, none};
}

/// Stores O / l of the columns from `column` on and, with column 0, the LSE, both with the head's sink. O is multiplied
/// by `factor`. kMerged: o may be of float32, and the LSE has any strides.
template <class T, bool SwapsOnce, bool kMerged = false, int Columns>
__device__ __forceinline__ void store_rows(const ForwardParams& p, const Sequence& sequence, int head, int first_query,
                                           int column, const RegisterTile<16, Columns>& o,
                                           const LaggedSoftmax<16>& softmax, int lane, float factor = 1.f) {
    softmax.l.each([&](int i, float) {
        const auto [inverse, none] =
            end_row<kMerged>(p, sequence, head, first_query, i, softmax, lane, /*stores_lse=*/column == 0);
        const int query = first_query + lane / 4 + 8 * i;
        const auto store = [&, inverse = inverse, none = none](auto* out) {
            const bool inside = query < sequence.seqlen_q;
            store_row<SwapsOnce>(out, i, o, inverse, factor, none, inside, column, p.head_dim_v, lane);
        };
        if constexpr (kMerged)
            if (p.out_dtype == DType::kFloat32) return store(row_of<float>(p.o, sequence.index, head, query));
        store(row_of<T>(p.o, sequence.index, head, sequence.first_q + query));
    });
}

/// The same of all columns, through the warp's 16 rows of the panels, from `first_row` on. The copy engine reads them
/// until lane 0 has waited for its stores. `map` has boxes of 16 rows; the engine does not see where a packed sequence
/// ends. Ends with lane 0 apart from the others.
template <class T, int Count, int Panels, int Columns>
__device__ __forceinline__ void stage_output(const ForwardParams& p, const TensorMap& map, T (&panel)[Panels][Count],
                                             int first_row, const Sequence& sequence, int head, int first_query,
                                             const RegisterTile<16, Columns>& o, const LaggedSoftmax<16>& softmax,
                                             int lane, float factor) {
    RowEnd end[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        end[i] = end_row<false>(p, sequence, head, first_query, i, softmax, lane, /*stores_lse=*/true);
        end[i].factor *= factor;
    }
    const int here = ptx::opaque(lane);  // or what comes from it is kept through the loop over tiles
#pragma unroll
    for (int j = 0; j < Panels; ++j)
        stage_rows(panel[j], first_row, o, 64 * j, here, [&](int i, float x, float y) {
            return end[i].none ? 0 : packed<T>(x * end[i].factor, y * end[i].factor);
        });
    ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0 && first_query < sequence.seqlen_q) {
        const int batch = batch_in_maps<Problems::kPacked>(p.sequences, sequence.index);
#pragma unroll
        for (int i = 0; i < Panels; ++i)
            if (64 * i < p.head_dim_v)
                ptx::tensor_store(&map, panel[i] + 64 * first_row,
                                  {64 * i, sequence.first_q + first_query, head, batch});
        ptx::store_commit();
    }
}

}  // namespace flash_wmma::wgmma_sm90
