// Turns at dQ of a tile of queries, to which several items add, in several blocks.
//
// The first item to be done with its dQ of a tile stores it in the fp32 buffer, those that follow add to it there, and
// the last one adds what is there to its own in registers and writes dq. So nobody clears the buffer before, and nobody
// reads it after: no pass over the rows but `prepare`'s for D.
//
// Who comes first is not known before: an item takes a number for each of its tiles. Two counts in global memory for
// each tile of a query head say how many items took one, and how many are done. An item with number 0 waits for nobody,
// the last one waits until all others are done, and those between until one is. So an item waits for items alone that
// took their numbers before and have a block, each block takes its numbers in the order in which it adds, and some
// block can always go on.
//
// If the additions have an order, so that the same inputs give the same bits (deterministic=True), an item's number is
// its place among the items that see the tile, in the order in which blocks took them, and it waits until as many are
// done. It waits for items that were taken before it alone. In long sequences all items then add to a cleared buffer.
// If packed lengths decrease, which callers must not ask for, some of them are never found, and nobody waits.
//
// Up to d = 128 the order is that in which items come to the tile, and all add to a cleared buffer. Under a causal mask
// it is that of StaircaseOrder (order.cuh), in which an item waits for those alone that were taken before it. Without a
// mask it is a ring's (RingOrder). There an item waits for others of its batch that were taken after it too. So all
// blocks have to be at work (a cooperative launch), and a block takes no second item of a batch (Planner::await_batch).
//
// Roles: two more warps of warpgroup 0 walk through the plan. `AwaitTurns` takes numbers, reads the
// counts until it is the block's turn, and tells the consumers what to do; when they have done it, `pass_turns` makes
// it visible to all blocks and counts. So no consumer waits for global memory, and the block may be late by a tile
// without making others wait. The producer has no part in it: what it does for a tile is on the way of the tile's
// copies.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"
#include "device/constants.cuh"

namespace flash_wmma::backward::wgmma {

/// An item's turn at dQ of a tile of queries.
struct Turn {
    int group;               // of rows, as in DqTask
    unsigned place, others;  // its number among the items that see the tile, and how many others do
};
/// The same with its place in the order of the items, if there is one. The items that see the tile are those whose keys
/// some of its queries see: a run of the sequence's tiles of keys.
template <class Tile>
__device__ __forceinline__ Turn turn_of(const Problem& problem, const Item& item, const QueryPlace& at) {
    const int group = static_cast<int>(q_scale_index(problem.forward, item.sequence, at.head)) + at.row / kRowGroup;
    const int own = item.first_key / Tile::kKeys;
    if (Tile::kRing && !StaircaseOrder::of<Tile::kKeys>(problem).used()) {
        const auto ring = RingOrder::of<Tile::kKeys>(problem);
        const int before = ring.before(own, at.row / Tile::kQueries, item.rows);
        return {group, static_cast<unsigned>(before), static_cast<unsigned>(ring.items - 1)};
    } else {
        const int last_query = min(at.row + Tile::kQueries, item.sequence.seqlen_q) - 1;
        const int first = item.mask.begin(at.row) / Tile::kKeys, last = (item.mask.end(last_query) - 1) / Tile::kKeys;
        const bool last_first = Tile::kRing ? item.step > 0 : runs_backwards<Tile, Pass::kTurns>(problem);
        return {group, static_cast<unsigned>(last_first ? last - own : own - first),
                static_cast<unsigned>(last - first)};
    }
}

/// A warp, each of whose lanes knows a tile: so counts of up to 32 tiles are read at once, most of them before their
/// turn.
template <class Tile>
class AwaitTurns {
  public:
    __device__ __forceinline__ AwaitTurns(const Problem& problem, SharedMemory<Tile>& shared)
        : problem_(problem),
          smem_(shared),
          lane_(static_cast<int>(threadIdx.x) % 32),
          writes_(problem.dq_by == DqBy::kTurns),
          broken_(problem.queue->broken > 0) {}

    __device__ __forceinline__ void run() {
        each_item<Tile>(smem_, [&](const Item& item) {
            for (int first = 0; first < item.tiles; first += Tile::kTilesAtOnce)
                await(item, first, min(Tile::kTilesAtOnce, item.tiles - first));
        });
    }

  private:
    __device__ __forceinline__ void await(const Item& item, int first, int count) {
        const int own = min(lane_, count - 1);
        const QueryPlace at = QueryPlace::of<Tile>(item, first + own);
        const Turn turn = turn_of<Tile>(problem_, item, at);
        TurnCount& counts = problem_.turns[turn.group];
        if (lane_ < count) {
            DqTask& task = smem_.turns.task[(tiles_ + static_cast<unsigned>(own)) % Tile::kTilesTold];
            task.dq =
                row_of<typename Tile::T>(problem_.dq, item.sequence.index, at.head, item.sequence.first_q + at.row);
            task.group = turn.group;
            task.rows = item.sequence.seqlen_q - at.row;
            if (problem_.deterministic) begin(task, turn.place, turn.others);
        }
        const unsigned awaited = broken_ ? 0 : turn.place;
        bool over = awaited == 0;  // in order: all turns before this lane's tile's
#pragma unroll 1
        for (int i = 0; i < count; ++i, ++tiles_) {
            __syncwarp();  // numbers are taken in the order of the tiles, and no lane misses a phase
            // Not turns.slot's empty: the consumers could go on by two turns before the passer has seen the end of this
            // one, which it would then never see
            ptx::barrier_wait(&smem_.turns.seen[tiles_ % 2], tiles_ / 2 % 2 ^ 1);
            if (!problem_.deterministic) {
                if (lane_ == i) take_number(counts, turn.others);
            } else if (!(__ballot_sync(kWarpMask, over) >> i & 1)) {  // this tile's lane waits, the others look once
                do over = over || ptx::load_acquire(&counts.done) >= awaited;
                while (!over && lane_ == i);
            }
            if (lane_ == i) ptx::barrier_arrive(&smem_.turns.slot[tiles_ % 2].full);
        }
    }
    /// Without an order: takes the number of this lane's tile, and waits until it is its turn.
    __device__ __forceinline__ void take_number(TurnCount& counts, unsigned others) {
        const unsigned place = atomicAdd(&counts.taken, 1u);
        begin(smem_.turns.task[tiles_ % Tile::kTilesTold], place, others);
        const unsigned awaited = broken_ ? 0 : place == others ? place : min(place, 1u);
        if (awaited > 0)
            while (ptx::load_acquire(&counts.done) < awaited) {
            }
    }
    __device__ __forceinline__ void begin(DqTask& task, unsigned place, unsigned others) const {
        task.first = writes_ && place == 0;
        task.finishes = writes_ && place == others;
    }

    const Problem& problem_;
    SharedMemory<Tile>& smem_;
    const int lane_;
    const bool writes_, broken_;
    unsigned tiles_ = 0;  // how many there were
};

/// A single lane.
template <class Tile>
__device__ __forceinline__ void pass_turns(const Problem& problem, SharedMemory<Tile>& smem) {
    const auto pass = [&](unsigned n) {
        Slot& slot = smem.turns.slot[n % 2];
        ptx::barrier_wait(&slot.full, n / 2 % 2);
        const int group = smem.turns.task[n % Tile::kTilesTold].group;
        ptx::barrier_wait(&slot.empty, n / 2 % 2);
        ptx::barrier_arrive(&smem.turns.seen[n % 2]);
        ptx::add_release(&problem.turns[group].done, 1);
    };
    // A turn ends beside the next tile, which may be the next item's: this one's place in the plan must not wait for it
    unsigned tiles = 0;
    each_item<Tile, false>(smem, [&](const Item& item) {
        for (int left = item.tiles; left > 0; --left, ++tiles)
            if (tiles > 0) pass(tiles - 1);
    });
    if (tiles > 0) pass(tiles - 1);
}

/// The last two warps of warpgroup 0.
template <class Tile>
__device__ __forceinline__ void keep_turns(const Problem& problem, SharedMemory<Tile>& smem) {
    if (64 <= threadIdx.x && threadIdx.x < 96) AwaitTurns<Tile>(problem, smem).run();
    if (threadIdx.x == 96) pass_turns(problem, smem);
}

/// Prepares the barriers. `adders`: warps that bring dQ to its place.
template <class Tile>
__device__ __forceinline__ void prepare_turns(SharedMemory<Tile>& smem, unsigned adders) {
    prepare_slots(smem.turns.slot, 1, adders);
    for (auto& barrier : smem.turns.seen) ptx::barrier_init(&barrier, 1);
}

}  // namespace flash_wmma::backward::wgmma
