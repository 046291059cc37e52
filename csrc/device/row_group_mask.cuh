// KeyMask for backward, which knows what each group of rows sees (backward_rows.cuh): a block that owns keys streams
// over the queries that see one of them, and key ranges alone do not say which these are.
#pragma once

#include <climits>

#include "device/backward_rows.cuh"
#include "device/key_mask.cuh"

namespace flash_wmma::backward {

/// Query rows [begin, end).
struct QueryRun {
    int begin, end;
};

class RowGroupMask : public RangedMask {
  public:
    __device__ RowGroupMask(const Problem& problem, const Sequence& sequence, int head)
        : RangedMask(problem.forward, sequence, head), problem_(problem) {}

    /// As of BandMask, but the rows are of one group, and with ranges the whole group counts.
    __device__ bool some_visible(int first_row, int last_row, int first_key, int last_key) const {
        if (!has_ranges()) return BandMask::some_visible(first_row, last_row, first_key, last_key);
        const KeyExtent& keys = extents_of(problem_, sequence_, head_)[first_row / kRowGroup];
        return keys.some_begin <= last_key && first_key < keys.some_end;
    }
    __device__ bool all_visible(int first_row, int last_row, int first_key, int last_key) const {
        if (!has_ranges()) return BandMask::all_visible(first_row, last_row, first_key, last_key);
        const KeyExtent& keys = extents_of(problem_, sequence_, head_)[first_row / kRowGroup];
        return keys.all_begin <= first_key && last_key < keys.all_end;
    }

    /// With ranges: from the first to the last group of rows that sees a key of [first_key, last_key], in any of the
    /// heads that read the keys, of which `head` is the first. Called by whole warps, whose lanes share the groups.
    __device__ QueryRun groups_that_see(int head, int first_key, int last_key) const {
        const int heads = static_cast<int>(problem_.forward.heads_q / problem_.forward.heads_k);
        const int groups = (sequence_.seqlen_q + kRowGroup - 1) / kRowGroup, lanes = warp_lanes();
        int begin = INT_MAX, end = 0;
        for (int h = 0; h < heads; ++h) {
            const KeyExtent* const extents = extents_of(problem_, sequence_, head + h);
            for (int group = static_cast<int>(threadIdx.x) % lanes; group < groups; group += lanes) {
                const KeyExtent keys = extents[group];
                if (keys.some_begin > last_key || first_key >= keys.some_end) continue;
                begin = min(begin, group * kRowGroup), end = max(end, (group + 1) * kRowGroup);
            }
        }
        begin = reduce_lanes(begin, [](int x, int y) { return min(x, y); }, lanes);
        end = reduce_lanes(end, [](int x, int y) { return max(x, y); }, lanes);
        return {begin, min(end, sequence_.seqlen_q)};
    }

  private:
    const Problem& problem_;
};

/// What an instance of a backward kernel hides keys by. Only one with `Ranged` takes key ranges.
template <bool Ranged>
using QueryMask = std::conditional_t<Ranged, RowGroupMask, BandMask>;

template <bool Ranged>
__device__ __forceinline__ QueryMask<Ranged> query_mask(const Problem& problem, const Sequence& sequence, int head) {
    if constexpr (Ranged) return {problem, sequence, head};
    else return {problem.forward.band, sequence.seqlen_q, sequence.seqlen_k};
}

/// From the first to the last query that sees a key of [first_key, last_key], in any of the heads that read the keys,
/// of which `head` is the first.
__device__ __forceinline__ QueryRun queries_that_see(const BandMask& mask, int, int first_key, int last_key,
                                                     int seqlen_q) {
    return {mask.first_query(first_key), min(seqlen_q - 1, mask.last_query(last_key)) + 1};
}
__device__ __forceinline__ QueryRun queries_that_see(const RowGroupMask& mask, int head, int first_key, int last_key,
                                                     int seqlen_q) {
    if (mask.has_ranges()) return mask.groups_that_see(head, first_key, last_key);
    return queries_that_see(static_cast<const BandMask&>(mask), head, first_key, last_key, seqlen_q);
}

}  // namespace flash_wmma::backward
