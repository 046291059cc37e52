// Online softmax of a 16-row tile with one maximum for all of its rows. The WMMA API hides which row an accumulator
// element belongs to; but if every row is rescaled by the same factor, the row does not matter: O *= factor runs over
// the opaque fragments, in registers, with no extra IO.
//
// One maximum alone would lose rows. P is half, whose least normal number is 2^-14: a row whose own maximum lies far
// below the tile's would have all its weights rounded to nothing. Two things keep every row exact:
//   * Weights carry a factor 2^kHeadroom (2^15; half reaches 2^16) that the division by the row sum takes out again. A
//     row up to kHeadroom below the tile's maximum M then has its largest weight in [1, 2^kHeadroom]: as precise as in
//     a softmax of its own.
//   * If a row lies deeper, every row takes its own maximum as reference until all are within reach of M again. While
//     the factors then differ between rows, O goes through shared memory; once the maxima have settled, all factors
//     are 1.
//
// From one reference to the next a row's factor is 2^(old - new). References rise, except from M to a row's own
// maximum, which was within reach of M: the factor is at most 2^kHeadroom, far below fp32's limit.
#pragma once

#include <cuda_fp16.h>
#include <mma.h>
#include <ptx.cuh>

#include <cmath>

#include "device/constants.cuh"

namespace flash_wmma {

/// 16x16 floats of S or O.
using Accumulator = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float>;

/// Softmax state of row lane / 2. Both lanes of a pair hold the same, except for the sums. Scores are in log2 units.
class SharedMaximum {
  public:
    static constexpr float kHeadroom = 15.f;

    /// Takes in the next scores, before any weight() of them; score_max is the maximum of the lane's part. Rescales O
    /// and the sums; `staging` is free shared memory for O, overwritten only if rows need factors of their own.
    template <int Fragments>
    __device__ __forceinline__ void advance(float score_max, Accumulator (&o)[Fragments],
                                            float (*staging)[16 * Fragments]) {
        score_max = fmaxf(score_max, __shfl_xor_sync(kWarpMask, score_max, 1));
        const bool had_key = row_max_ > -INFINITY;
        row_max_ = fmaxf(row_max_, score_max);  // fmaxf passes over NaN: such a row's weights are NaN, no other's

        float tile_max = row_max_;
#pragma unroll
        for (int pair = 2; pair < 32; pair *= 2) tile_max = fmaxf(tile_max, __shfl_xor_sync(kWarpMask, tile_max, pair));
        const bool within_reach = row_max_ == -INFINITY || row_max_ >= tile_max - kHeadroom;

        const float before = reference_;
        reference_ = __all_sync(kWarpMask, within_reach) ? tile_max : row_max_;
        if (reference_ == -INFINITY) reference_ = 0.f;  // no key yet: 2^(-inf - 0) is 0, 2^(-inf + inf) would be NaN

        // A row without a key so far has O = 0 and goes along with any factor.
        const float factor = had_key ? ptx::ex2(before - reference_) : 0.f;
        const unsigned rows_with_keys = __ballot_sync(kWarpMask, had_key);
        if (rows_with_keys == 0) return;
        const float shared_factor = __shfl_sync(kWarpMask, factor, __ffs(static_cast<int>(rows_with_keys)) - 1);
        sum_ *= factor;
        p_sum_ *= factor;
        if (__all_sync(kWarpMask, !had_key || factor == shared_factor)) scale_tile(o, shared_factor);
        else scale_rows(o, factor, staging);
    }

    /// The unnormalised attention weight of a score.
    __device__ __forceinline__ float weight(float score) const { return ptx::ex2((score - reference_) + kHeadroom); }

    /// Rounds one or two weights of the row to P and adds them to its sums.
    __device__ __forceinline__ half add(float weight) {
        const half p = __float2half_rn(weight);
        sum_ += weight;
        p_sum_ += __half2float(p);
        return p;
    }
    __device__ __forceinline__ __half2 add(float weight0, float weight1) {
        const __half2 p = __floats2half2_rn(weight0, weight1);
        const float2 rounded = __half22float2(p);
        sum_ += weight0 + weight1;
        p_sum_ += rounded.x + rounded.y;
        return p;
    }

    /// l, by which the row of O is to be divided: the sum of P as rounded, so that a row with one key has exactly its
    /// value. 0 if the row saw no key.
    __device__ float row_sum() const { return p_sum_ + __shfl_xor_sync(kWarpMask, p_sum_, 1); }

    /// Natural log of the row's sum of exponentials; -inf if the row saw no key.
    __device__ float lse() const {
        return kLn2 * (reference_ + (log2f(sum_ + __shfl_xor_sync(kWarpMask, sum_, 1)) - kHeadroom));
    }

  private:
    float row_max_ = -INFINITY;      // the row's own, so far
    float reference_ = 0.f;          // weight(reference) = 2^kHeadroom
    float sum_ = 0.f, p_sum_ = 0.f;  // the lane's part of the row's weights, before and after rounding to half

    template <int Fragments>
    __device__ __forceinline__ static void scale_tile(Accumulator (&o)[Fragments], float factor) {
#pragma unroll
        for (Accumulator& fragment : o)
#pragma unroll
            for (float& x : fragment.x) x *= factor;
    }

    /// The exact path: the lane pair scales its row of O in shared memory.
    template <int Fragments>
    __device__ __forceinline__ static void scale_rows(Accumulator (&o)[Fragments], float factor,
                                                      float (*staging)[16 * Fragments]) {
        namespace wmma = nvcuda::wmma;
        constexpr int kColumns = 16 * Fragments;
        __syncwarp();
#pragma unroll
        for (int n = 0; n < Fragments; ++n)
            wmma::store_matrix_sync(&staging[0][16 * n], o[n], kColumns, wmma::mem_row_major);
        __syncwarp();
        const int lane = static_cast<int>(threadIdx.x) % 32;
        float* half_row = &staging[lane / 2][lane % 2 * kColumns / 2];
        for (int c = 0; c < kColumns / 2; ++c) half_row[c] *= factor;
        __syncwarp();
#pragma unroll
        for (int n = 0; n < Fragments; ++n)
            wmma::load_matrix_sync(o[n], &staging[0][16 * n], kColumns, wmma::mem_row_major);
        __syncwarp();
    }
};

}  // namespace flash_wmma
