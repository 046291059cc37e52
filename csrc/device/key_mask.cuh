// The visible keys of each query row, band and key ranges together.
#pragma once

#include <ptx.cuh>

#include <climits>
#include <type_traits>

#include "attention.h"
#include "device/mask.cuh"
#include "device/shuffle.cuh"
#include "device/tile.cuh"

namespace flash_wmma {

/// The visible keys of the rows of one query head: what the band shows of each row's range.
struct RangedRows {
    BandMask band;
    const std::int32_t* ranges;  // of the sequence's row 0
    std::int64_t query, bound;   // strides
    int last_row;                // that exists: rows behind it have its range

    /// Row `row` sees the keys [begin, end) within [0, seqlen_k].
    __device__ int begin(int row) const { return max(band.begin(row), min(*range(row), band.seqlen_k)); }
    __device__ int end(int row) const { return max(0, min(band.end(row), range(row)[bound])); }
    /// Whether row `row` does not see that key. Reads both bounds, whatever the first says: a branch between the two
    /// would wait for each by itself.
    __device__ bool hides(int row, int key) const {
        const int first = begin(row), behind = end(row);
        return static_cast<bool>(static_cast<int>(key < first) | static_cast<int>(key >= behind));
    }

  private:
    __device__ const std::int32_t* range(int row) const { return ranges + min(row, last_row) * query; }
};

/// BandMask, and for each row of one query head its key range, if the params have ranges. Unlike a band's, the bounds
/// of a range need not grow with the row.
class RangedMask : public BandMask {
  public:
    __device__ RangedMask(const ForwardParams& params, const Sequence& sequence, int head)
        : BandMask(params.band, sequence.seqlen_q, sequence.seqlen_k), p_(params), sequence_(sequence), head_(head) {}

    /// From now on: the ranges of that query head.
    __device__ void take(int head) { head_ = head; }

    __device__ bool has_ranges() const { return p_.key_ranges.data != nullptr; }
    /// With ranges: the rows. Made anew at each use, so that addresses take no registers elsewhere.
    __device__ RangedRows rows() const {
        const KeyRanges& r = p_.key_ranges;
        const std::int32_t* const ranges =
            r.data + sequence_.index * r.batch + ptx::opaque(head_) * r.head + sequence_.first_q * r.query;
        return {*this, ranges, r.query, r.end, sequence_.seqlen_q - 1};
    }

    __device__ int begin(int row) const { return has_ranges() ? rows().begin(row) : BandMask::begin(row); }
    __device__ int end(int row) const { return has_ranges() ? rows().end(row) : BandMask::end(row); }

    /// The keys that the rows [first, last] see. Called by whole warps, whose lanes share the rows.
    __device__ KeyExtent extent(int first, int last) const {
        if (!has_ranges()) return BandMask::extent(first, last);
        const RangedRows each = rows();
        const int lanes = warp_lanes();
        KeyExtent own{INT_MAX / 2, 0, 0, INT_MAX / 2};
        for (int row = first + static_cast<int>(threadIdx.x) % lanes; row <= last; row += lanes) {
            const int from = each.begin(row), to = each.end(row);
            if (from < to) own.some_begin = min(own.some_begin, from), own.some_end = max(own.some_end, to);
            own.all_begin = max(own.all_begin, from), own.all_end = min(own.all_end, to);
        }
        const auto least = [](int x, int y) { return min(x, y); };
        const auto most = [](int x, int y) { return max(x, y); };
        return {reduce_lanes(own.some_begin, least, lanes), reduce_lanes(own.some_end, most, lanes),
                reduce_lanes(own.all_begin, most, lanes), reduce_lanes(own.all_end, least, lanes)};
    }

  protected:
    const ForwardParams& p_;
    Sequence sequence_;
    int head_;
};

/// What an instance of a kernel hides keys by. Only one with `Ranged` takes key ranges.
template <bool Ranged>
using KeyMask = std::conditional_t<Ranged, RangedMask, BandMask>;

template <bool Ranged>
__device__ __forceinline__ KeyMask<Ranged> key_mask(const ForwardParams& p, const Sequence& sequence, int head) {
    if constexpr (Ranged) return {p, sequence, head};
    else return {p.band, sequence.seqlen_q, sequence.seqlen_k};
}

}  // namespace flash_wmma
