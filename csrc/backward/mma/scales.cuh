// Exponents of converted inputs (attention.h, Exponents) on their way through backward's products.
//
// K, V, Q and dO are stored times 2^-e, with one e for each group of kScaleRows rows. Between a group i of queries and
// a group j of keys, with products of stored values:
//     S = 2^(q_i + k_j) Q K^T          dP - D = 2^(dout_i + v_j) dO V^T - D          stored dS = dS * 2^-e_ij.
// dS has to fit half: P is at most 1, |dP| at most the product of the norms of its rows, so that
//     e_ij = max(dout_norm_i + v_norm_j, log2 |D|_i) - 14        gives |stored dS| <= 2^15.
// The statistics' gradients add up to T = |dentropy| / e + |dcolumn_sum| to it. With max(|D|, T) for |D|, |stored dS|
// is at most 3 * 2^14. dV, dK and dQ are sums of tiles with the exponents dout_i, e_ij + q_i and e_ij + k_j; their
// accumulators' units follow these exponents.
#pragma once

#include "device/backward_rows.cuh"
#include "device/register_tile.cuh"
#include "device/shuffle.cuh"

namespace flash_wmma::backward {

/// Exponents of a group of keys: of k and v, and log2 of a bound of the norms of v's rows.
struct KeyScales {
    float k, v, v_norm;
};

/// The exponents of the group of row `row` of a sequence's head.
__device__ __forceinline__ QueryScales query_scales(const Problem& problem, const Sequence& s, int head, int row) {
    return problem.scales[q_scale_index(problem.forward, s, head) + row / kScaleRows];
}
__device__ __forceinline__ KeyScales key_scales(const Problem& problem, const Sequence& s, int head_k, int row) {
    const Exponents& e = problem.forward.exponents;
    const std::int64_t i = k_scale_index(problem.forward, s, head_k) + row / kScaleRows;
    return {e.k[i], e.v[i], problem.exponents.v_norm[i]};
}

/// e_ij, rounded up to an integer; at least -120, so that 2^-e_ij does not overflow (below that, |dS| <= 2^-105).
__device__ __forceinline__ float ds_exponent(const QueryScales& q, const KeyScales& k) {
    return fmaxf(ceilf(fmaxf(q.dout_norm + k.v_norm, q.delta)) - 14.f, -120.f);
}

/// Factors for a pair of groups: products to scores (log2 units), dP and D to the unit of stored dS.
struct PairScales {
    float score, dp = 1.f, delta = 1.f;

    __device__ explicit PairScales(float scale) : score(scale) {}
    __device__ PairScales(float scale, const QueryScales& q, const KeyScales& k) : score(scale * ptx::ex2(q.q + k.k)) {
        const float exponent = ds_exponent(q, k);
        dp = ptx::ex2(q.dout + k.v - exponent);
        delta = ptx::ex2(-exponent);
    }
    /// From dS as it is stored to dS.
    __device__ float ds() const { return 1.f / delta; }
};

/// The largest finite magnitude among a warp's accumulators.
template <int Rows, int Columns>
__device__ __forceinline__ float largest_of_warp(RegisterTile<Rows, Columns>& accumulators) {
    float largest = 0.f;
    accumulators.each([&](float x, int, int) {
        if (isfinite(x)) largest = fmaxf(largest, fabsf(x));
    });
#pragma unroll
    for (int lanes = 16; lanes; lanes /= 2) largest = fmaxf(largest, shuffle_xor(largest, lanes));
    return largest;
}

/// Accumulators times 2^exponent, in two steps so that neither factor overflows where their product does not.
template <int Rows, int Columns>
__device__ __forceinline__ void multiply_by_power(RegisterTile<Rows, Columns>& accumulators, float exponent) {
    if (exponent == 0.f) return;
    const float half = floorf(0.5f * exponent), first = ptx::ex2(half), second = ptx::ex2(exponent - half);
    accumulators.each([&](float& x, int, int) { x = x * first * second; });
}

/// The unit 2^exponent of a warp's accumulators, as it follows the exponents of the tiles added. It never falls so far
/// below the largest exponent that sums over 2^30 rows could overflow. A tile below that is added in a unit too large
/// for it, but is negligible beside the largest.
struct Unit {
    float exponent = 0.f, bound = -INFINITY;  // bound: no accumulator's exponent is larger

    /// Brings the accumulators to the unit for a tile of the exponent `e`, the same in the whole warp (-inf: zeros,
    /// whose exponent does not matter).
    template <int Rows, int Columns>
    __device__ __forceinline__ void follow(RegisterTile<Rows, Columns>& accumulators, float e) {
        constexpr float kRange = 64.f;
        if (e == -INFINITY || (e == exponent && e == bound)) return;
        // The accumulators may be far below their bound, or all zero (say, if a bias hides every key)
        if (e < bound - kRange) bound = exponent + ceilf(log2f(largest_of_warp(accumulators)));
        const float before = bound == -INFINITY ? e : exponent;
        bound = fmaxf(bound, e);
        exponent = fmaxf(e, bound - kRange);
        multiply_by_power(accumulators, before - exponent);
    }
};

}  // namespace flash_wmma::backward
