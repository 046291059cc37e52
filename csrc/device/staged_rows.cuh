// Rows on their way out: from a warp's accumulators through shared memory to global memory. The copy engine stores them
// while the warp goes on.
#pragma once

#include <ptx_sm90.cuh>

#include <cstdint>

#include "device/register_tile.cuh"

namespace flash_wmma {

/// Writes the 64 columns from `first_column` on of a warp's 16 rows to the rows from `first_row` on of a panel with the
/// 128-byte swizzle. pair(i, x, y): two neighbours of the lane's row i as elements.
template <class T, int Columns, class Pair>
__device__ __forceinline__ void stage_rows(T* panel, int first_row, const RegisterTile<16, Columns>& rows,
                                           int first_column, int lane, Pair pair) {
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
            words[w] = pair(i, rows.at(i, c), rows.at(i, c + 1));
        }
        ptx::stmatrix_x4(panel + (at ^ 16 * step), words);
    }
}

}  // namespace flash_wmma
