// Products of a warpgroup's 64 rows with tiles of rows in shared memory, which all kernels of bwd_sm90 issue alike.
#pragma once

#include <ptx_sm90.cuh>

#include <cstdint>

#include "device/register_tile.cuh"

namespace flash_wmma::backward::wgmma {

/// Issues the 64 rows of `own` from `first_row` on times `streamed`, transposed: d of the columns, panels of 64.
template <class T, int kD, int kColumns, class OwnRows, class Rows>
__device__ __forceinline__ void issue_scores(RegisterTile<16, kColumns>& product, const OwnRows& own, int first_row,
                                             const Rows& streamed) {
#pragma unroll
    for (int i = 0; i < (kD + 63) / 64; ++i) {
        const ptx::SharedMatrix<ptx::Major::K> a(own.panel[i] + 64 * first_row), b(streamed.panel[i]);
#pragma unroll
        for (int step = 0; step < 4; ++step)
            if (64 * i + 16 * step < kD)
                ptx::wgmma<T, kColumns>(product.flat(), a + 32 * step, b + 32 * step, i + step > 0);
    }
    ptx::wgmma_commit();
}

/// Issues gradient += weights * rows, 16 rows for each step. `adds`: to what is there.
template <class T, int kD, int kSteps, class Rows>
__device__ __forceinline__ void issue_weighted(RegisterTile<16, kD>& gradient,
                                               const std::uint32_t (&weights)[kSteps][4], const Rows& rows, bool adds) {
    const ptx::SharedMatrix<ptx::Major::N> b(rows.panel, sizeof(rows.panel[0]));
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
        ptx::wgmma<T, kD>(gradient.flat(), weights[step], b + 16 * 128 * step, adds || step > 0);
}

}  // namespace flash_wmma::backward::wgmma
