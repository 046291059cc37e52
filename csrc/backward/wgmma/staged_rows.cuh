// dK and dV of a warp's 16 keys, from accumulators through shared memory to global memory: the copy engine stores them
// while the warp goes on with the next item.
//
// A warp has two panels of 16 rows and 64 columns for them, which no other warp writes: one in the place of dS that the
// next item's first tile will need, which both consumers have read, and one more there, if a tile of dS has two panels,
// or else one of their own. So they go out by two panels at a time, dV before dK. Without dQ there is no
// dS, and its place is for these rows alone.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include <cstdint>

#include "device/element.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma::backward::wgmma {

/// A warp's 16 rows of the 64 columns from `first_column` on, times `factor`, to the rows from `first_row` on of a
/// panel with the 128-byte swizzle.
template <class T, int Columns>
__device__ __forceinline__ void stage_rows(T* panel, int first_row, const RegisterTile<16, Columns>& gradient,
                                           int first_column, float factor, int lane) {
    // Of this lane's row, hidden: or every address is kept through the loop over tiles
    const int at = ptx::opaque(64 * (first_row + lane % 16) + 8 * (lane / 16 ^ lane % 8));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const int column = first_column + 16 * step;
        if (column >= Columns) break;
        std::uint32_t words[4];
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            const int i = w % 2, c = column + 8 * (w / 2);
            words[w] = packed<T>(gradient.at(i, c) * factor, gradient.at(i, c + 1) * factor);
        }
        ptx::stmatrix_x4(panel + (at ^ 16 * step), words);
    }
}

}  // namespace flash_wmma::backward::wgmma
