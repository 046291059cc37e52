// How 16 rows of O, in the registers of a warp, and their LSE go to memory.
#pragma once

#include "device/element.cuh"
#include "device/quad.cuh"
#include "forward/wgmma/block.cuh"

namespace flash_wmma::wgmma_sm90 {

/// O / l of the columns from `column` on, in wgmma's layout, and, beside the first, the LSE; l is each lane's part. The
/// lanes that share a row swap words until each has 16 neighbouring bytes, or once, for 8.
template <class T, bool SwapsOnce, int Size>
__device__ __forceinline__ void store_rows(const ForwardParams& p, const Sequence& sequence, int head, int first_query,
                                           int column, const float (&o)[Size], const float (&m)[2], const float (&l)[2],
                                           int lane) {
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const float sum = over_quad(l[h], [](float x, float y) { return x + y; });
        const bool none = sum == 0.f;  // the row saw no key
        const float inverse = 1.f / sum;
        const int query = first_query + lane / 4 + 8 * h;
        const bool inside = query < sequence.seqlen_q;
        if (lane % 4 == 0 && inside && column == 0)
            p.lse[lse_index(p, sequence, head, query)] = none ? -INFINITY : (m[h] + log2f(sum)) * kLn2;
        T* const out = row_of<T>(p.o, sequence.index, head, sequence.first_q + query);
        constexpr int kWords = SwapsOnce ? 2 : 4;  // that a lane swaps
#pragma unroll
        for (int j = 0; j < Size / 4; j += kWords) {
            std::uint32_t words[kWords];
#pragma unroll
            for (int i = 0; i < kWords; ++i)
                words[i] = none ? 0 : packed<T>(o[4 * (j + i) + 2 * h] * inverse, o[4 * (j + i) + 2 * h + 1] * inverse);
            if constexpr (SwapsOnce) {
                pair_in_quad(words, lane % 4);
                const int col = column + 8 * (j + lane % 2) + lane % 4 / 2 * 4;
                if (inside && col < p.head_dim_v) *reinterpret_cast<uint2*>(out + col) = make_uint2(words[0], words[1]);
            } else {
                transpose_in_quad(words, lane % 4);
                const int col = column + 8 * (j + lane % 4);
                if (inside && col < p.head_dim_v)
                    *reinterpret_cast<uint4*>(out + col) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
}

}  // namespace flash_wmma::wgmma_sm90
