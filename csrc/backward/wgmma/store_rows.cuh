// Rows of a gradient, from accumulators to global memory.
#pragma once

#include <launch.h>

#include <cstdint>

#include "device/element.cuh"
#include "device/quad.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma::backward::wgmma {

/// Writes a warp's 16 rows times `factor`. `to`: this lane's first row, lane / 4; the next one is 8 * pitch further on.
/// Of the rows from `to` on, `left` exist, and of the columns `columns`, a multiple of 8. The lanes of a quad swap
/// words until each has 16 neighbouring bytes.
template <class T, int Columns>
__device__ __forceinline__ void store_rows(T* to, std::int64_t pitch, int left, int columns,
                                           const RegisterTile<16, Columns>& gradient, float factor, int lane) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < Columns / 8; j += 4) {
            std::uint32_t words[4];
#pragma unroll
            for (int w = 0; w < 4; ++w)
                words[w] = packed<T>(gradient.at(i, 8 * (j + w)) * factor, gradient.at(i, 8 * (j + w) + 1) * factor);
            transpose_in_quad(words, lane % 4);
            const int c = 8 * (j + lane % 4);
            if (8 * i < left && c < columns)
                *reinterpret_cast<uint4*>(to + 8 * i * pitch + c) = make_uint4(words[0], words[1], words[2], words[3]);
        }
    }
}

}  // namespace flash_wmma::backward::wgmma
