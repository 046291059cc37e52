// The exponents of converted inputs (attention.h, Exponents) on their way through the tiles of a consumer's rows.
#pragma once

#include <ptx.cuh>

#include "attention.h"
#include "device/tile.cuh"
#include "device/value_unit.cuh"

namespace flash_wmma::wgmma_sm90 {

/// A group's 64 rows share Q's exponent, and a run of kScaleRows keys those of K and V. Each run of a tile has a factor
/// of its own for its products. A tile of two runs has the larger one of V's exponents, and the weights of the other
/// run are multiplied by what lies between. If they lie far apart, the tile has that of its second run, and goes to
/// that of its first one: in the order of tiles, in which with a causal mask the rows that do not see the one yet see
/// the other. All values are the same in the whole warpgroup.
template <int kKeys>
class TileScales {
  public:
    __device__ __forceinline__ explicit TileScales(const ForwardParams& params) : p_(params) {}

    /// From now on: rows of that head, with `first_query` among them, which see the keys of `mask`. O is 0.
    template <class Mask>
    __device__ __forceinline__ void take(const Sequence& sequence, int head, int first_query, const Mask& mask) {
        const int head_k = head / static_cast<int>(p_.heads_q / p_.heads_k);
        q_exponent_ = p_.exponents.q[q_scale_index(p_, sequence, head) + first_query / kScaleRows];
        keys_ = k_scale_index(p_, sequence, head_k);
        if constexpr (kRuns == 2) {
            const int first = first_query / kScaleRows * kScaleRows, end = min(first + kScaleRows, sequence.seqlen_q);
            first_run_ = min(mask.begin(first), sequence.seqlen_k - 1) / kScaleRows;
            last_run_ = max(first_run_, (mask.end(end - 1) - 1) / kScaleRows);
        }
        unit_ = ValueUnit(true);
    }
    /// To the tile that begins with `key`.
    __device__ __forceinline__ void step(int key) {
        const int run = key / kScaleRows;
        float v = v_exponent(run);
        if constexpr (kRuns == 2) {
            const float second_v = v_exponent(run + 1);
            const bool zeros = v == INFINITY || second_v == INFINITY;
            v_apart_ = zeros ? 0.f : second_v - v;
            v = far() ? second_v : zeros ? fminf(v, second_v) : fmaxf(v, second_v);
        }
#pragma unroll
        for (int i = 0; i < kRuns; ++i) product_[i] = ptx::ex2(q_exponent_) * ptx::ex2(k_exponent(run + i));
        value_ = unit_.step(v);
    }
    /// Whether V's exponents of the tile's two runs lie so far apart that weights times what lies between would
    /// underflow.
    __device__ __forceinline__ bool far() const {
        constexpr float kMost = 4.f;
        return kRuns == 2 && fabsf(v_apart_) > kMost;
    }
    /// If so: from the second run of the tile that begins with `key` to the first.
    __device__ __forceinline__ ValueUnit::Step step_to_first(int key) {
        return unit_.step(v_exponent(key / kScaleRows));
    }

    /// What a product of one of the tile's runs is to be multiplied by.
    __device__ __forceinline__ float product(int run = 0) const { return product_[run]; }
    /// The weight() of one of two runs, unless V's exponents lie far apart.
    __device__ __forceinline__ float weight_of(int run) const { return value_.weight + lack_of(run, v_apart_); }
    /// Multiplies products by what they are to be multiplied by.
    template <class Scores>
    __device__ __forceinline__ void complete(Scores& s) const {
        s.each([&](float& x, int, int column) { x *= product_[column / kScaleRows % kRuns]; });
    }
    /// Multiplies those weights, which have been summed, whose run has the smaller one of V's exponents.
    template <class Scores>
    __device__ __forceinline__ void even_weights(Scores& s) const {
        const float by = ptx::ex2(-fabsf(v_apart_));
        if (v_apart_ > 0.f)
            s.each([&](float& x, int, int column) {
                if (column < kScaleRows) x *= by;
            });
        if (v_apart_ < 0.f)
            s.each([&](float& x, int, int column) {
                if (column >= kScaleRows) x *= by;
            });
    }

    /// P of the tile is 2^weight() times the weights, but of a plain tile of two runs 2^weight_of().
    __device__ __forceinline__ float weight() const { return value_.weight; }
    /// O is to be multiplied by 2^rescale() before the tile's P V is added.
    __device__ __forceinline__ float rescale() const { return value_.rescale; }
    /// What O is to be multiplied by at the end.
    __device__ __forceinline__ float unit() const { return ptx::ex2(unit_.exponent); }

  private:
    static constexpr int kRuns = (kKeys + kScaleRows - 1) / kScaleRows;
    static_assert(kRuns == 1 ? kScaleRows % kKeys == 0 : kKeys == 2 * kScaleRows);

    __device__ __forceinline__ float k_exponent(int run) const { return p_.exponents.k[place(run)]; }
    __device__ __forceinline__ float v_exponent(int run) const { return p_.exponents.v[place(run)]; }
    /// Of a run that none of the rows sees: that of the nearest one that some row sees, so that it changes nothing.
    __device__ __forceinline__ std::int64_t place(int run) const {
        if constexpr (kRuns == 2) run = min(max(run, first_run_), last_run_);
        return keys_ + run;
    }

    /// By how much a run's exponent is above the larger one. `apart`: the second's above the first's.
    __device__ __forceinline__ static float lack_of(int run, float apart) {
        return run == 0 ? -fmaxf(apart, 0.f) : fminf(apart, 0.f);
    }

    const ForwardParams& p_;
    std::int64_t keys_;
    int first_run_, last_run_;  // that the rows see
    float v_apart_;             // by how much the exponent of the second run's V is above the first one's
    float q_exponent_, product_[kRuns];
    ValueUnit unit_{true};
    ValueUnit::Step value_;
};

}  // namespace flash_wmma::wgmma_sm90
