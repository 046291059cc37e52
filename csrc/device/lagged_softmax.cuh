// The online softmax of a warp's rows with a maximum that lags behind.
//
// The online softmax keeps for each row the maximum m of its scores so far and l, the sum of exp2(score - m). In exact
// arithmetic m cancels out of O / l, so m need not be the true maximum: it only has to be near enough that no weight
// overflows the type of P. Hence a kernel tries each tile that all its rows see with the m that it has. If no partial
// sum of weights passes Element<T>::kLargestSum, the tile is done: there was no maximum to reduce, and O kept its
// scale. Otherwise, and for the first tile and masked ones, the kernel takes the exact path: raise() every row to the
// tile's maximum, rescale O, and weigh the tile again.
//
// A kernel may try only while m is settled: set, and moderate. Below 2^24 the product of score and scale differs by
// less than 1 between rounded (as in m) and unrounded (inside an FMA). Beyond 2^24 every tile takes the exact path, and
// its products are rounded before m is subtracted.
#pragma once

#include <ptx.cuh>

#include "device/constants.cuh"
#include "device/element.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma {

template <int Rows>
struct LaggedSoftmax {
    RowValues<Rows> l, m;  ///< this lane's part of the sum; the maximum in log2 units (this order: faster code)
    bool settled = false;  ///< whether m is set, and moderate

    __device__ __forceinline__ LaggedSoftmax() {
        m.each([&](int i, float& x) { x = -INFINITY, l[i] = 0.f; });
    }

    /// The value to subtract from the scores of a row: its m, or 0 if the row saw no key.
    __device__ __forceinline__ static float base(float maximum) { return maximum == -INFINITY ? 0.f : maximum; }

    /// Takes in the maximum of a tile's scores in row i, and rescales l.
    struct Raised {
        float base;     ///< to subtract from the row's scores
        float rescale;  ///< to multiply the row of O by
    };
    __device__ __forceinline__ Raised raise(int i, float top) {
        const float before = m[i];
        m[i] = fmaxf(before, top);
        const float next = base(m[i]), rescale = ptx::ex2(before - next);
        l[i] *= rescale;
        return {next, rescale};
    }

    /// Adds the sums of a tile's weights to l.
    __device__ __forceinline__ void add(const RowValues<Rows>& sums) {
        l.each([&](int i, float& x) { x += sums[i]; });
    }

    /// Whether every m is moderate. -inf (no visible key yet) is, NaN is not. (m.all takes more instructions here.)
    __device__ __forceinline__ bool moderate() const {
        constexpr float kLimit = 1 << 24;
        bool all = true;
#pragma unroll
        for (const float x : m.of) all &= x == -INFINITY || fabsf(x) < kLimit;
        return all;
    }

    /// Whether this lane's sums of weights prove that none overflows T. NaN does not.
    template <class T>
    __device__ __forceinline__ static bool fits(const RowValues<Rows>& sums) {
        return sums.all([](float sum) { return sum <= Element<T>::kLargestSum; });
    }
};

/// Some of a row's weights with one more: their sum or, without `kSums`, the largest. Either is a bound of each.
template <bool kSums>
__device__ __forceinline__ float with_weight(float weights, float one_more) {
    return kSums ? weights + one_more : ptx::max_of_positive(weights, one_more);
}

/// P = exp2(S * factor + offset) in place; returns this lane's part of with_weight() over the rows.
template <bool kSums = true, int Rows, int Columns>
__device__ __forceinline__ RowValues<Rows> weigh(RegisterTile<Rows, Columns>& s, float factor,
                                                 const RowValues<Rows>& offset) {
    RowValues<Rows> sums;
    sums.each([&](int i, float& sum) {
        sum = 0.f;
        s.each_in_row(i, [&](float& x, int) {
            x = ptx::ex2(fmaf(x, factor, offset[i]));
            sum = with_weight<kSums>(sum, x);
        });
    });
    return sums;
}

}  // namespace flash_wmma
