// The tiles of keys that a run of query rows sees.
#pragma once

#include "device/key_mask.cuh"

namespace flash_wmma {

/// Which tiles, by their first keys, have a key that some row of [first_query, last_query] sees, and which only keys
/// that all of them see. No row (last < first): no tile.
template <int kKeys>
struct VisibleTiles {
    int some_begin, some_end, all_begin, all_end;

    // Not by extent(): it takes other instructions
    __device__ __forceinline__ VisibleTiles(const BandMask& mask, int first_query, int last_query) {
        some_begin = mask.begin(first_query) - kKeys + 1;
        some_end = first_query <= last_query ? mask.end(last_query) : some_begin;
        all_begin = mask.begin(last_query), all_end = mask.end(first_query) - kKeys + 1;
    }
    __device__ __forceinline__ VisibleTiles(const RangedMask& mask, int first_query, int last_query) {
        const KeyExtent keys = mask.extent(first_query, last_query);
        some_begin = keys.some_begin - kKeys + 1;
        some_end = first_query <= last_query ? keys.some_end : some_begin;
        all_begin = keys.all_begin, all_end = keys.all_end - kKeys + 1;
    }
    __device__ __forceinline__ bool some(int key) const { return key >= some_begin && key < some_end; }
    __device__ __forceinline__ bool all(int key) const { return key >= all_begin && key < all_end; }
};

}  // namespace flash_wmma
