// What the gradients of the entropy and of the column sums add to the gradient of a weight, for backward kernels.
#pragma once

#include "attention.h"
#include "device/backward_rows.cuh"

namespace flash_wmma::backward {

/// -dentropy_i ln P + dcolumn_sum_j of one query head. With dropout times 1 - p, as kernels compute dS.
class WeightTerms {
  public:
    __device__ WeightTerms(const Problem& problem, const Sequence& sequence, int head) : seqlen_k_(sequence.seqlen_k) {
        const ForwardParams& p = problem.forward;
        if (problem.dentropy)
            dentropy_ = problem.dentropy + sequence.index * p.lse_batch + head * p.lse_head + sequence.first_q;
        if (problem.dcolumn_sum)
            dcolumn_sum_ =
                problem.dcolumn_sum + sequence.index * problem.key_batch + head * problem.key_head + sequence.first_k;
        seqlen_q_ = sequence.seqlen_q;
        factor_ = p.dropout.rng_state ? 1.f - p.dropout.probability : 1.f;
    }
    __device__ static bool any(const Problem& problem) { return problem.dentropy || problem.dcolumn_sum; }

    /// Of a weight that is not negative. A weight of 0 gets none: its key is hidden, or its part of dS is 0 anyway.
    __device__ __forceinline__ float operator()(float weight, int query, int key) const {
        if (weight == 0.f || query >= seqlen_q_ || key >= seqlen_k_) return 0.f;
        float sum = dentropy_ ? -dentropy_[query] * (kLn2 * log2f(weight)) : 0.f;
        if (dcolumn_sum_) sum += dcolumn_sum_[key];
        return sum * factor_;
    }

  private:
    const float *dentropy_ = nullptr, *dcolumn_sum_ = nullptr;
    int seqlen_q_, seqlen_k_;
    float factor_;
};

}  // namespace flash_wmma::backward
