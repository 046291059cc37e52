// The exponents of converted inputs (attention.h, Exponents) on their way through the tiles of a consumer's rows.
#pragma once

#include <ptx.cuh>

#include "attention.h"
#include "device/tile.cuh"
#include "device/value_unit.cuh"

namespace flash_wmma::wgmma_sm90 {

/// A group's 64 rows share Q's exponent, and a tile's keys share those of K and V. All values are the same in the whole
/// warpgroup.
class TileScales {
  public:
    __device__ __forceinline__ explicit TileScales(const ForwardParams& params) : p_(params) {}

    /// From now on: rows of that head, with `first_query` among them. O is 0.
    __device__ __forceinline__ void take(const Sequence& sequence, int head, int first_query) {
        const int head_k = head / static_cast<int>(p_.heads_q / p_.heads_k);
        q_exponent_ = p_.exponents.q[q_scale_index(p_, sequence, head) + first_query / kScaleRows];
        keys_ = k_scale_index(p_, sequence, head_k);
        unit_ = ValueUnit(true);
    }
    /// To the tile that begins with `key`.
    __device__ __forceinline__ void step(int key) {
        const std::int64_t at = keys_ + key / kScaleRows;
        product_ = ptx::ex2(q_exponent_) * ptx::ex2(p_.exponents.k[at]);
        value_ = unit_.step(p_.exponents.v[at]);
    }

    /// What a product of the tile is to be multiplied by.
    __device__ __forceinline__ float product() const { return product_; }
    /// P of the tile is 2^weight() times the weights.
    __device__ __forceinline__ float weight() const { return value_.weight; }
    /// O is to be multiplied by 2^rescale() before the tile's P V is added.
    __device__ __forceinline__ float rescale() const { return value_.rescale; }
    /// What O is to be multiplied by at the end.
    __device__ __forceinline__ float unit() const { return ptx::ex2(unit_.exponent); }

  private:
    const ForwardParams& p_;
    std::int64_t keys_;
    float q_exponent_, product_;
    ValueUnit unit_{true};
    ValueUnit::Step value_;
};

}  // namespace flash_wmma::wgmma_sm90
