// What the blocks of wgmma_sm90 work on, and in which order: the schedule, the planner that follows it, and the reader
// by which other warps get the planner's plans.
#pragma once

#include <algorithm>
#include <climits>
#include <numeric>

#include "device/divisor.h"
#include "device/soft_cap.cuh"
#include "forward/wgmma/block.cuh"
#include "forward/wgmma/items.h"

namespace flash_wmma::wgmma_sm90 {

/// The order of the work. Blocks get items in rounds of one each, or take them from a queue.
struct Schedule {
    int items;               // each part of a split item counts as one
    int dealt;               // the first of them, which come head by head for the L2 cache; mixed ones follow
    Divisor tiles;           // of a head
    Divisor period;          // heads after which a head's tiles would come to the same blocks again
    Divisor heads;           // of a batch entry
    Divisor group;           // of heads that share keys
    int seqlen_q, seqlen_k;  // of dense problems, and their band: as the params', but in few words side by side
    BandMask band;
    Queue* queue;  // of the items after each block's first one; null: rounds
    Split split;
    bool shares_bias;  // batch entries do: a head's items of all entries come together, for the L2 cache
    TileOrder order;   // of a head's tiles, counted from its last one
    MaskTiles mask;    // of a boolean mask
    SoftCap soft_cap;  // of an instance for softcaps alone

    /// This block's items one after the other; -1: no more.
    class Walk {
      public:
        __device__ __forceinline__ explicit Walk(const Schedule& schedule)
            : items_(schedule.items), dealt_(schedule.dealt), queue_(schedule.queue) {}
        /// For one warp. Calls `await` before it takes an item from the queue, since an item taken early is kept from
        /// other blocks. In rounds, the longest mixed items come first, and their rounds go back and forth: a block
        /// with a longer item in one round has a shorter one in the next.
        template <class Await>
        __device__ __forceinline__ int next(Await await) {
            const int blocks = static_cast<int>(gridDim.x), block = static_cast<int>(blockIdx.x);
            if (queue_ && first_ > 0) {
                await();
                if (threadIdx.x % 32 == 0) first_ = blocks + static_cast<int>(atomicAdd(queue_, 1u));
                first_ = __shfl_sync(kWarpMask, first_, 0);
                odd_ = !odd_;
                return first_ < items_ ? first_ : -1;
            }
            while (first_ < items_) {
                const int item = first_ + (odd_ && first_ >= dealt_ ? blocks - 1 - block : block);
                first_ += blocks;
                odd_ = !odd_;
                if (item < items_) return item;
            }
            return -1;
        }
        /// Of the item given last: alternates from item to item.
        __device__ __forceinline__ bool odd() const { return !odd_; }

      private:
        int items_, dealt_;
        Queue* queue_;
        int first_ = 0;
        bool odd_ = false;
    };

    /// Which part `item` is. Sets `item` to the number of the item it is a part of, as if all were whole.
    __device__ __forceinline__ int part(int& item) const {
        const int part = item - split.whole;
        if (part < 0) return kWhole;
        item = split.whole + part / split.parts;
        return part;
    }
    /// Whether it is the first of its item.
    __device__ __forceinline__ bool is_first(int part) const { return part % split.parts == 0; }
    /// How many parts an item with `tiles` is split into: no more than it has tiles, so some blocks may get none.
    __device__ __forceinline__ int parts_of(const Range& tiles) const {
        return min(split.parts, tiles.end - tiles.first);
    }

    /// Heads are those of all batch entries. After each period, tile numbers of a head shift by one. So over as many
    /// heads as there are blocks each block gets every tile once, whatever a tile costs.
    template <int Br, Problems kProblems = Problems::kPlain>
    __device__ __forceinline__ Assignment dense(const ForwardParams& p, int item) const {
        int slice = tiles.quotient(item), place = tiles.remainder(item - slice * order.tiles + period.quotient(slice));
        if (item >= dealt) {
            const int first = tiles.quotient(dealt), count = static_cast<int>(p.batch * p.heads_q) - first,
                      mixed = item - dealt;
            slice = first + mixed % count, place = mixed / count;
        }
        int batch = heads.quotient(slice), head = heads.remainder(slice);
        if (Changes<kProblems>::kAny && shares_bias)
            batch = slice % static_cast<int>(p.batch), head = slice / static_cast<int>(p.batch);
        return {{batch, 0, 0, seqlen_q, seqlen_k},
                {batch, head, group.quotient(head), (order.tiles - 1 - order.tile(place)) * Br}};
    }
};

/// K tiles with a key that some of `count` rows from `row` on sees; `row` may lie beyond the sequence's end. If there
/// is none: one tile, which is masked.
template <class Tile>
__device__ __forceinline__ Range visible_tiles(const Sequence& sequence, const BandMask& mask, int row, int count) {
    const int last_row = min(row + count, sequence.seqlen_q) - 1;
    const int last_tile = (sequence.seqlen_k - 1) / Tile::kBc;
    const int first = min(mask.begin(row) / Tile::kBc, last_tile);
    const int end = row <= last_row ? (mask.end(last_row) + Tile::kBc - 1) / Tile::kBc : 0;
    return {first, max(end, first + 1)};
}

/// The keys that some of each consumer's rows see, by key ranges. Consumers are numbered in the order of their rows.
template <class Tile>
class RangedKeys {
  public:
    /// Of the Q tile from `first_row` on. Called by whole warps. A lane asks for the ranges of all its rows before it
    /// waits for one: an item of few keys takes hardly longer than a latency of memory for each consumer.
    __device__ __forceinline__ RangedKeys(const RangedRows& rows, int first_row) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
        for (int c = 0; c < Tile::kConsumers; ++c) {
            begin_[c] = INT_MAX / 2, end_[c] = 0;
#pragma unroll
            for (int i = lane; i < Tile::kGroupRows; i += 32) {
                const int row = first_row + Tile::kGroupRows * c + i, from = rows.begin(row), to = rows.end(row);
                const bool sees = row <= rows.last_row && from < to;
                begin_[c] = min(begin_[c], sees ? from : INT_MAX / 2), end_[c] = max(end_[c], sees ? to : 0);
            }
        }
#pragma unroll
        for (int c = 0; c < Tile::kConsumers; ++c) {
            begin_[c] = reduce_lanes(begin_[c], [](int x, int y) { return min(x, y); }, 32);
            end_[c] = reduce_lanes(end_[c], [](int x, int y) { return max(x, y); }, 32);
        }
    }
    /// K tiles with a key that consumer c sees or, if c is the number of consumers, one of them. If there is none: one
    /// tile, which is masked.
    __device__ __forceinline__ Range tiles(int c, int seqlen_k) const {
        int begin = INT_MAX / 2, end = 0;
#pragma unroll
        for (int i = 0; i < Tile::kConsumers; ++i)
            if (i == c || c >= Tile::kConsumers) begin = min(begin, begin_[i]), end = max(end, end_[i]);
        const int first = min(begin, seqlen_k - 1) / Tile::kBc;
        return {first, max((end + Tile::kBc - 1) / Tile::kBc, first + 1)};
    }

  private:
    int begin_[Tile::kConsumers], end_[Tile::kConsumers];
};

/// Where the tiles of an item lie in the list of those that a boolean mask shows.
struct TileList {
    const unsigned* entries;  // null: there is no mask, and a tile's place is its number
    const int* rank;
    int tiles;

    TileList() = default;
    __device__ __forceinline__ TileList(const MaskTiles& mask, int batch, int head, int row)
        : entries(nullptr), rank(nullptr), tiles(mask.tiles) {
        if (!mask.order) return;
        const std::int64_t list = mask.list(batch, head, row);
        entries = mask.order + list, rank = mask.rank + list;
    }
    /// The places of visible tiles among these; of none of them: a place of a tile whose keys are all hidden.
    __device__ __forceinline__ Range places(Range range) const {
        if (!entries) return range;
        const int first = rank[min(range.first, tiles)], end = rank[min(range.end, tiles)];
        return first < end ? Range{first, end} : Range{rank[tiles], rank[tiles] + 1};
    }
    /// The tile at a place, with what groups of rows see of it.
    __device__ __forceinline__ unsigned at(int place) const {
        return entries ? entries[place] : static_cast<unsigned>(place);
    }
};

/// The order of an item's K tiles with ALiBi, if its rows see all keys: from the diagonal of its last row to the first
/// tile, then from the diagonal to the last. So a row's scores fall from tile to tile, by what ALiBi subtracts, except
/// on the few tiles before its own diagonal; backwards from the last tile they would rise, and the old maximum would
/// not serve. Places count down, as keys do in all other orders.
class FromDiagonal {
  public:
    FromDiagonal() = default;
    /// `last_row`: of the item, whose tiles of `keys` keys are `tiles`.
    __device__ __forceinline__ FromDiagonal(const ForwardParams& p, const Sequence& sequence, int last_row, int keys,
                                            Range tiles)
        : sum_((tiles.first + tiles.end - 1) * keys) {
        const bool all = p.band.left >= kUnbounded && p.band.right >= kUnbounded;
        const int diagonal = min(last_row, sequence.seqlen_q - 1) + sequence.seqlen_k - sequence.seqlen_q;
        const int start = min(max(diagonal, 0) / keys, tiles.end - 1);
        behind_ = all ? (tiles.end - 1 - start) * keys : 0;
        turn_ = tiles.first * keys + behind_;
    }
    /// The first key of the tile at a place, which is the first key of a tile too.
    __device__ __forceinline__ int key(int place) const { return goes_back(place) ? place - behind_ : sum_ - place; }
    /// Whether the place comes before the turn.
    __device__ __forceinline__ bool goes_back(int place) const { return place >= turn_; }

  private:
    int sum_, behind_, turn_;  // behind_: of tiles right of the diagonal; turn_: the last place left of it
};

/// Work item `item` of packed sequences. These come one after the other, so that heads, which lie side by side in
/// memory, are read together; of a sequence some heads at a time, enough for two items a block, whose keys the L2 cache
/// holds; of these the longest tiles first. Called by whole warps.
template <int Br>
__device__ __forceinline__ Assignment packed_assignment(const ForwardParams& p, const Schedule& schedule, int item) {
    const Sequences& s = p.sequences;
    const int heads = static_cast<int>(p.heads_q), batch = static_cast<int>(p.batch),
              number = schedule.heads.quotient(item);
    const PackedTile found = packed_tile(s.cu_seqlens_q, batch, s.total_q, Br, number);
    const int first = number - found.tile,
              end = found.sequence < batch ? first_packed_tile(s.cu_seqlens_q, found.sequence + 1, s.total_q, Br)
                                           : static_cast<int>(packed_tiles(s.total_q, batch, Br));
    const int tiles = max(1, end - first), at = item - first * heads;
    const int some = max(1, min(heads, 2 * static_cast<int>(gridDim.x) / tiles)), head = at / (some * tiles) * some;
    const int together = min(some, heads - head), place = at - head * tiles;
    const Sequence rows = sequence(p, found.sequence);
    // Numbers before the first sequence, or bounds that do not grow
    if (at < 0 || together <= 0) return {rows, {rows.index, 0, 0, /*first_row=*/-1}};
    const int count = (rows.seqlen_q + Br - 1) / Br, own = head + place % together;
    int tile = place / together;
    if (p.band.right < kUnbounded && tile < count) tile = count - 1 - tile;
    return {rows, {rows.index, own, schedule.group.quotient(own), tile * Br}};
}

/// Work item `item` of the grid.
template <class Tile, Problems kProblems>
__device__ __forceinline__ Assignment assignment(const ForwardParams& p, const Schedule& schedule, int item) {
    constexpr bool kPacked = includes(kProblems, Problems::kPacked);
    if (kPacked && p.sequences.cu_seqlens_q) return packed_assignment<Tile::kBr>(p, schedule, item);
    Assignment found = schedule.dense<Tile::kBr, kProblems>(p, item);
    if (kPacked) found.sequence = sequence(p, found.tile.batch);
    return found;
}

/// The order of a problem. If the work per tile varies, some heads are mixed. With a queue: the last heads,
/// about two items a block, so that blocks finish together. Without: the heads left over, too few for every block to
/// get each tile once.
inline Schedule make_schedule(const ForwardParams& p, const DeviceFacts& device, const Shape& shape) {
    const int br = shape.facts.br, items = static_cast<int>(assignment_grid(p, br).x);
    const bool shares_bias = p.bias.data && p.bias.batch == 0 && p.bias.head != 0;
    const MaskTiles mask = MaskTiles::wanted(p) ? mask_tiles(p, br) : MaskTiles{};
    const SoftCap soft_cap = p.softcap == 0.f ? SoftCap{} : SoftCap(p);
    const TileOrder order = order_of(p, br).from_last();
    const Divisor each_head(p.heads_q), group(p.heads_q / p.heads_k);
    const int seqlen_q = static_cast<int>(p.seqlen_q), seqlen_k = static_cast<int>(p.seqlen_k);
    const BandMask band(p.band, p.seqlen_q, p.seqlen_k);
    Queue* const queue = has_queue(p, device, br) ? static_cast<Queue*>(p.workspace) : nullptr;
    if (p.sequences.cu_seqlens_q)
        return {items, 0,     Divisor(1),    Divisor(1), each_head, group, seqlen_q, seqlen_k,
                band,  queue, {items, 0, 1}, false,      order,     mask,  soft_cap};
    const Split split = split_of(p, device, shape);
    const int blocks = std::min(items, multiprocessors(device));
    const int heads = static_cast<int>(p.batch * p.heads_q), tiles = items / heads;
    const int period = blocks / std::gcd(blocks, tiles), last = std::min(heads, (2 * blocks + tiles - 1) / tiles);
    const int mixed = queue ? last : is_uneven(p, br) ? heads % blocks : 0;
    return {split.whole + split.items * split.parts,
            tiles * (heads - mixed),
            Divisor(tiles),
            Divisor(period),
            each_head,
            group,
            seqlen_q,
            seqlen_k,
            band,
            queue,
            split,
            shares_bias,
            order,
            mask,
            soft_cap};
}

/// A warp's way through the plans.
template <class Tile>
class PlanReader {
  public:
    struct View {
        Work<Tile> work;
        Range seen;  // by a consumer
        int part;    // valid in lane 0: only instances that take parts broadcast it
    };

    __device__ __forceinline__ explicit PlanReader(PlanRing<Tile>& ring) : ring_(ring) {}

    __device__ __forceinline__ View next(int consumer) {
        Slot& slot = ring_.slot[place_.stage];
        const Plan<Tile>& plan = ring_.plan[place_.stage];
        ptx::barrier_wait(&slot.full, place_.parity);
        View view{};
        if (threadIdx.x % 32 == 0) {
            view = {plan.work, plan.seen[consumer], plan.part};
            ptx::barrier_arrive(&slot.empty);
        }
        place_.advance();
        return {uniform(view.work), uniform(view.seen), view.part};
    }

  private:
    PlanRing<Tile>& ring_;
    RingPlace<Tile::kPlans> place_;
};

/// One warp: publishes what the block works on, one item after the other, ahead of all other warps.
template <class Tile, Problems kProblems>
class Planner {
  public:
    __device__ __forceinline__ Planner(const ForwardParams& params, PlanRing<Tile>& ring)
        : p_(params), ring_(ring), lane_(static_cast<int>(threadIdx.x) % 32) {}

    /// Waits for the grids before, which may still write what plans come from: the bounds of sequences, ranges, a mask,
    /// the queue. The first plan of a problem without them does not wait.
    __device__ __forceinline__ void run(const Schedule& schedule) {
        if constexpr (kPacked || kMasks || kRanges) ptx::wait_for_previous_grids();
        Schedule::Walk walk(schedule);
        int item;
        bool works = true;  // whether the block works on the item: among packed tiles are some that do not exist
        do {
            item = walk.next([&] {
                if (!works) return;
                ptx::barrier_wait(&ring_.near_end, item_parity_);
                item_parity_ ^= 1;
            });
            int whole = max(item, 0);
            const int part = kTakesParts<Tile, kProblems> ? schedule.part(whole) : kWhole;
            const Assignment a = assignment<Tile, kProblems>(p_, schedule, whole);
            works = !kPacked || (a.tile.first_row >= 0 && a.tile.first_row < a.sequence.seqlen_q);
            if (works || item < 0) publish(schedule, a, part, walk.odd(), item < 0);
            ptx::wait_for_previous_grids();
        } while (item >= 0);
    }

  private:
    static constexpr bool kPacked = includes(kProblems, Problems::kPacked);
    static constexpr bool kMasks = Changes<kProblems>::kMasks, kRanges = Changes<kProblems>::kRanges;

    __device__ __forceinline__ void publish(const Schedule& schedule, const Assignment& a, int part, bool odd,
                                            bool none) {
        const auto mask = [&] {
            if constexpr (kPacked || kRanges) return key_mask<kRanges>(p_, a.sequence, a.tile.head);
            else return schedule.band;
        }();
        TileList list;
        if constexpr (kMasks) list = {schedule.mask, a.sequence.index, a.tile.head, a.tile.first_row};
        const auto seen = [&](int row, int count) {
            const Range range = visible_tiles<Tile>(a.sequence, mask, row, count);
            if constexpr (kMasks) return list.places(range);
            else return range;
        };
        // Lane c < kConsumers finds what that consumer's rows see, the next one what all of them see
        const Work<Tile> rows{a.sequence, a.tile, mask, odd, {}};
        const auto seen_by = [&](int c) {
            const bool all = c == Tile::kConsumers;
            return seen(all ? a.tile.first_row : rows.first_row(c), all ? Tile::kBr : Tile::kGroupRows);
        };
        const int consumer = min(lane_, Tile::kConsumers);
        const auto found_in = [&] {
            if constexpr (kRanges)
                if (mask.has_ranges()) {
                    const bool all = consumer == Tile::kConsumers;
                    const int group = all ? consumer : (rows.first_row(consumer) - a.tile.first_row) / Tile::kGroupRows;
                    const Range range =
                        RangedKeys<Tile>(mask.rows(), a.tile.first_row).tiles(group, a.sequence.seqlen_k);
                    return kMasks ? list.places(range) : range;
                }
            return seen_by(consumer);
        };
        Range found = none ? Range{0, 0} : found_in();  // without items there may be no row to ask for
        const auto of_lane = [](const Range& range, int lane) {
            return Range{__shfl_sync(kWarpMask, range.first, lane), __shfl_sync(kWarpMask, range.end, lane)};
        };
        Range tiles = of_lane(found, Tile::kConsumers);
        if (!none && part != kWhole) {
            const int index = part % schedule.split.parts, parts = schedule.parts_of(tiles);
            if (index >= parts) return;
            if (parts == 1) part = kWhole;
            const int count = tiles.end - tiles.first, each = count / parts, longer = count % parts;
            tiles.first += index * each + min(index, longer);
            tiles.end = tiles.first + each + (index < longer ? 1 : 0);
        }
        if (!prepared_) await_prepared<Tile>(), prepared_ = true;
        Slot& slot = ring_.slot[place_.stage];
        Plan<Tile>& plan = ring_.plan[place_.stage];
        ptx::barrier_wait(&slot.empty, place_.parity ^ 1);
        const int first = min(max(found.first, tiles.first), tiles.end - 1);
        found = none ? tiles : Range{first, min(max(found.end, first + 1), tiles.end)};
        Range own[Tile::kConsumers];
#pragma unroll
        for (int c = 0; c < Tile::kConsumers; ++c) own[c] = of_lane(found, c);
        if (lane_ == 0) {
            plan.work = {a.sequence, a.tile, mask, odd, tiles};
            plan.part = part;
#pragma unroll
            for (int c = 0; c < Tile::kConsumers; ++c) plan.seen[c] = own[c];
            ptx::barrier_arrive(&slot.full);
        }
        place_.advance();
    }

    const ForwardParams& p_;
    PlanRing<Tile>& ring_;
    const int lane_;
    RingPlace<Tile::kPlans> place_;
    unsigned item_parity_ = 0;
    bool prepared_ = false;  // whether the block is
};

}  // namespace flash_wmma::wgmma_sm90
