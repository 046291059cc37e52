// The order in which blocks of bwd_sm90 take items.
#pragma once

#include <launch.h>

#include <cstdint>

#include "attention.h"
#include "device/backward_rows.cuh"
#include "device/mask.cuh"
#include "device/tile.cuh"
#include "device/tile_order.cuh"

namespace flash_wmma::backward::wgmma {

/// The order of items of kKeys keys if the additions have one: the items of kInterleavedHeads heads by turns. An item
/// follows the one before in its head at a distance of a tile or two, and blocks ask for items faster than that.
template <int kKeys, bool kPacked>
__device__ __forceinline__ unsigned interleaved(const ForwardParams& p, unsigned index) {
    constexpr unsigned kInterleavedHeads = 4;
    const bool packed = kPacked && p.sequences.cu_seqlens_k;
    const auto tiles = static_cast<unsigned>(packed ? packed_tiles(p.sequences.total_k, p.batch, kKeys)
                                                    : (p.seqlen_k + kKeys - 1) / kKeys);
    const auto heads = static_cast<unsigned>(packed ? p.heads_k : p.heads_k * p.batch);
    const unsigned first = index / (kInterleavedHeads * tiles) * kInterleavedHeads, at = index - first * tiles;
    const unsigned together = min(kInterleavedHeads, heads - first);
    return (first + at % together) * tiles + at / together;
}

/// The order of items whose blocks take turns in a ring (turns.cuh): without a band, so that all have all tiles of
/// queries. The items of a head come in batches: first the first batch of each head, then the second one of each. Those
/// of a batch are at work together. They begin at tiles that are as far from each other as can be, and all go round at
/// the same pace. A tile takes them in the order in which they come by: the one that began there or just before it
/// first, the one behind that next, and so on. So an item comes to a tile when the one before has long left it.
struct RingOrder {
    int items, batches;  // of a head

    template <int kKeys>
    __device__ __forceinline__ static RingOrder of(const Problem& problem) {
        return {static_cast<int>((problem.forward.seqlen_k + kKeys - 1) / kKeys), problem.ring_batches};
    }

    /// Items of a head, from `first` on.
    struct Batch {
        int first, count;
    };
    __device__ __forceinline__ Batch batch_of(int item) const {
        const int number = ((item + 1) * batches - 1) / items, first = number * items / batches;
        return {first, (number + 1) * items / batches - first};
    }

    /// Which of the items of `heads` comes as number `index`: of all heads, one head after the other.
    __device__ __forceinline__ int place(int index, int heads) const {
        const auto [first, count] = batch_of(index / heads);
        const int at = index - heads * first;
        return at / count * items + first + at % count;
    }
    /// How many items have been taken, of `heads`, when all of the batch of number `index` are.
    __device__ __forceinline__ int taken_with(int index, int heads) const {
        const auto [first, count] = batch_of(index / heads);
        return heads * first + ((index - heads * first) / count + 1) * count;
    }
    /// The tile, of so many, with which a head's item begins.
    __device__ __forceinline__ int first_tile(int item, int tiles) const {
        const auto [first, count] = batch_of(item);
        return (item - first) * tiles / count;
    }
    /// How many items of the head come to a tile before this one.
    __device__ __forceinline__ int before(int item, int tile, int tiles) const {
        const auto [first, count] = batch_of(item);
        const int begins = ((tile + 1) * count - 1) / tiles;  // the last one to begin there or before
        const int behind = begins - (item - first);
        return first + (behind < 0 ? behind + count : behind);
    }
};

/// The order of items whose blocks take turns under a causal mask. The items of some heads come by turns: in every
/// second group of heads from the last keys on, which the fewest queries see, in the others from the first keys on. The
/// former walk up from their first tile of queries, the latter down from the last. So the blocks of a group, which
/// begin together, are done one after the other, the last keys' first; those of the next group begin in that order, and
/// are done together. The item before it at a tile was taken before it, and is ahead of it by the tiles that an item's
/// keys fill: two at d = 128, one at d = 64.
struct StaircaseOrder {
    int items, together;  // of a head; how many heads come by turns

    template <int kKeys>
    __device__ __forceinline__ static StaircaseOrder of(const Problem& problem) {
        return {static_cast<int>((problem.forward.seqlen_k + kKeys - 1) / kKeys), problem.heads_together};
    }
    __device__ __forceinline__ bool used() const { return together > 0; }

    /// Which of the items of `heads` comes as number `index`: of all heads, one head after the other. Whether it walks
    /// down.
    struct Place {
        int item;
        bool down;
    };
    __device__ __forceinline__ Place place(int index, int heads) const {
        const int group = index / (items * together), first = group * together;
        const int at = index - first * items, here = min(together, heads - first), nth = at / here;
        const bool down = group % 2 > 0;
        return {(first + at % here) * items + (down ? nth : items - 1 - nth), down};
    }
};

// The orders of items of dense problems with a band, `tiles` of each head, the longest item of keys first. Heads come
// one after the other for the L2 cache; some come together, so that blocks finish together.

/// Of `mixed` heads from head `first` on: one item of each by turns.
__device__ __forceinline__ unsigned by_turns(unsigned index, unsigned first, unsigned mixed, unsigned tiles) {
    const unsigned at = index - first * tiles;
    return (first + at % mixed) * tiles + at / mixed;
}
/// How many heads have about `count` items.
__host__ __device__ inline unsigned heads_of_items(unsigned count, unsigned heads, unsigned tiles) {
    const unsigned of_items = (count + tiles - 1) / tiles;
    return of_items < heads ? of_items : heads;
}
/// At the end all heads of about the `last` items together.
__device__ __forceinline__ unsigned mixed_at_the_end(unsigned index, unsigned heads, unsigned tiles, unsigned last) {
    const unsigned mixed = heads_of_items(last, heads, tiles), first = heads - mixed;
    return index < first * tiles ? index : by_turns(index, first, mixed, tiles);
}
/// How many batches of about `together` items all items make.
__host__ __device__ inline unsigned batches_of_items(unsigned items, unsigned together) {
    const unsigned batches = (items + together * 3 / 5) / together;
    return batches > 0 ? batches : 1;
}
/// Batches of about `together` items, whose heads come together: as many in each, but for one. All blocks are then at
/// work on the same tiles of queries of a batch (Item).
__device__ __forceinline__ unsigned mixed_in_batches(unsigned index, unsigned heads, unsigned tiles,
                                                     unsigned together) {
    const std::uint64_t batches = batches_of_items(heads * tiles, together), batch = index / tiles * batches / heads;
    const auto begin = [&](std::uint64_t n) { return static_cast<unsigned>((n * heads + batches - 1) / batches); };
    const unsigned first = begin(batch);
    return by_turns(index, first, begin(batch + 1) - first, tiles);
}

/// The first key that the last query sees, and the last one that the first query sees, if they exist: those between
/// them, in either order, are seen by the most queries.
struct MostSeen {
    int of_last, of_first;

    __device__ __forceinline__ MostSeen(const BandMask& mask, int seqlen_q)
        : of_last(seqlen_q - 1 + mask.begin_shift), of_first(mask.end_shift - 1) {}
    /// Whether the band hides keys on the left of some query; on the right.
    __device__ __forceinline__ bool hides_left() const { return of_last > 0; }
    __device__ __forceinline__ bool hides_right(int seqlen_k) const { return of_first < seqlen_k - 1; }
};

/// For `blocks` that work on an item each: about two a block are mixed.
__host__ __device__ inline unsigned mixed_items(unsigned blocks) { return 2 * blocks; }

/// Of items of kKeys keys. Windows, where many items of a head are equally long and each has tiles of its own, in no
/// batches.
template <int kKeys>
__device__ __forceinline__ unsigned mixed_keys(const ForwardParams& p, unsigned index, unsigned blocks) {
    const int seqlen_k = static_cast<int>(p.seqlen_k);
    const MostSeen most(BandMask(p.band, p.seqlen_q, p.seqlen_k), static_cast<int>(p.seqlen_q));
    const TileOrder order(seqlen_k, kKeys, most.of_last, most.of_first);
    const bool window = most.hides_left() && most.hides_right(seqlen_k) && 4 * order.longest() >= order.tiles;
    const auto heads = static_cast<unsigned>(p.heads_k * p.batch), tiles = static_cast<unsigned>(order.tiles);
    const unsigned mixed = mixed_items(blocks);
    const unsigned at = p.heads_q > p.heads_k && !window ? mixed_in_batches(index, heads, tiles, mixed)
                                                         : mixed_at_the_end(index, heads, tiles, mixed);
    return at / tiles * tiles + static_cast<unsigned>(order.tile(static_cast<int>(at % tiles)));
}
/// Of items of kQueries queries, as many; a head's are in the order of q_tile.
template <int kQueries>
__device__ __forceinline__ unsigned mixed_queries(const ForwardParams& p, unsigned index, unsigned blocks) {
    return mixed_at_the_end(index, static_cast<unsigned>(p.heads_q * p.batch),
                            static_cast<unsigned>((p.seqlen_q + kQueries - 1) / kQueries), mixed_items(blocks));
}

/// How many heads have the first items of keys, one for each of `blocks`, where the band is bounded on one side, or on
/// none: then heads come one after the other.
inline unsigned heads_of_first_items(const ForwardParams& p, unsigned tiles, unsigned blocks) {
    const auto heads = static_cast<unsigned>(p.heads_k * p.batch);
    if (p.band.left >= kUnbounded && p.band.right >= kUnbounded) return heads_of_items(blocks, heads, tiles);
    const unsigned mixed = mixed_items(blocks);
    if (p.heads_q > p.heads_k) {
        const unsigned batches = batches_of_items(heads * tiles, mixed);
        return (heads + batches - 1) / batches;
    }
    const unsigned in_order = heads - heads_of_items(mixed, heads, tiles), first = heads_of_items(blocks, heads, tiles);
    return first <= in_order ? first : heads;
}

}  // namespace flash_wmma::backward::wgmma
