// The visible keys of each query row as one interval [begin, end): length, causal and window in one form.
#pragma once

#include "attention.h"

namespace flash_wmma {

/// The keys that a run of query rows sees, by first and last-plus-one.
struct KeyExtent {
    int some_begin, some_end;  ///< some row sees its first and its last key, no row one outside; begin >= end: no key
    int all_begin, all_end;    ///< every row sees each of them; begin >= end: none
};

/// A Band resolved for one pair of lengths. Lengths are at most kMaxSeqlen, so row + bound fits an int.
struct BandMask {
    int begin_shift, end_shift;  ///< row i sees [i + begin_shift, i + end_shift) within [0, seqlen_k)
    int seqlen_k;

    BandMask() = default;
    __host__ __device__ BandMask(const Band& band, std::int64_t seqlen_q, std::int64_t seqlen_k_)
        : seqlen_k(static_cast<int>(seqlen_k_)) {
        const std::int64_t offset = band.bottom_right ? seqlen_k_ - seqlen_q : 0;
        begin_shift = clamp(offset - band.left);
        end_shift = clamp(offset + band.right + 1);
    }

    __device__ int begin(int row) const { return max(0, row + begin_shift); }
    __device__ int end(int row) const { return min(seqlen_k, row + end_shift); }

    /// The keys that the rows [first, last] see, at least one row.
    __device__ KeyExtent extent(int first, int last) const {
        return {begin(first), end(last), begin(last), end(first)};
    }

    /// The first and the last row that see a key, not clipped at the last row that exists. No row: last < first.
    __device__ int first_query(int key) const { return max(-1, key - end_shift) + 1; }
    __device__ int last_query(int key) const { return key - begin_shift; }

    /// Some row of [first_row, last_row] sees some key of [first_key, last_key].
    __device__ bool some_visible(int first_row, int last_row, int first_key, int last_key) const {
        return begin(first_row) <= last_key && first_key < end(last_row);
    }
    /// Every row of [first_row, last_row] sees every key of [first_key, last_key].
    __device__ bool all_visible(int first_row, int last_row, int first_key, int last_key) const {
        return begin(last_row) <= first_key && last_key < end(first_row);
    }

  private:
    __host__ __device__ static int clamp(std::int64_t shift) {
        constexpr std::int64_t kLimit = kMaxSeqlen;
        return static_cast<int>(shift < -kLimit ? -kLimit : shift > kLimit ? kLimit : shift);
    }
};

}  // namespace flash_wmma
