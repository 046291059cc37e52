// The order in which the tiles of a head are worked on where a band leaves them different work: the longest first, so
// that blocks finish together.
//
// How many keys a band shows a row grows from the first row on, stays the same for a while, and falls towards the last
// one: it stays the same where both bounds lie within the sequence, or neither. Of keys and the rows that see them
// likewise.
#pragma once

namespace flash_wmma {

/// Tiles of a head, of which [first, end) have the most work.
struct TileOrder {
    int tiles, first, end;

    TileOrder() = default;
    /// Of `count` rows or keys in tiles of `own`; `one` and `other`, in either order, are where the most work begins
    /// and ends.
    __host__ __device__ TileOrder(int count, int own, int one, int other) : tiles((count + own - 1) / own) {
        const int last = count - 1, low = one < other ? one : other, high = one < other ? other : one;
        first = (low < 0 ? 0 : low < last ? low : last) / own;
        end = (high < 0 ? 0 : high < last ? high : last) / own + 1;
    }

    /// How many tiles have the most work; how many have less.
    __host__ __device__ int longest() const { return end - first; }
    __host__ __device__ int shorter() const { return tiles - longest(); }
    /// The same with the tiles counted from the last one.
    __host__ __device__ TileOrder from_last() const {
        TileOrder order = *this;
        order.first = tiles - end, order.end = tiles - first;
        return order;
    }

    /// The tile at a place in the order: those with the most work, then those behind and before them by turns.
    __host__ __device__ int tile(int place) const {
        const int behind = tiles - end, pairs = behind < first ? behind : first;
        if (place < longest()) return first + place;
        const int at = place - longest();
        if (at < 2 * pairs) return at % 2 == 0 ? end + at / 2 : first - 1 - at / 2;
        return behind > first ? end + at - pairs : first - 1 - (at - pairs);
    }
};

}  // namespace flash_wmma
