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
// done. It waits for items that were taken before it alone. In long sequences all items then add to a cleared buffer. If
// packed lengths decrease, which callers must not ask for, some of them are never found, and nobody waits.
//
// Roles: beside the producer, two warps of warpgroup 0 walk through the plan. `await_turns` takes numbers, reads the
// counts until it is the block's turn, and tells the consumers what to do; when they have done it, `pass_turns` makes it
// visible to all blocks and counts. So no consumer waits for global memory, and the block may be late by a tile without
// making others wait. The producer has no part in it: what it does for a tile is on the way of the tile's copies.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"

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
    const int last_query = min(at.row + Tile::kQueries, item.sequence.seqlen_q) - 1;
    const int own = item.first_key / Tile::kKeys;
    const int first = item.mask.begin(at.row) / Tile::kKeys, last = (item.mask.end(last_query) - 1) / Tile::kKeys;
    return {static_cast<int>(q_scale_index(problem.forward, item.sequence, at.head)) + at.row / kRowGroup,
            static_cast<unsigned>(runs_backwards<Pass::kTurns>(problem) ? last - own : own - first),
            static_cast<unsigned>(last - first)};
}

/// Calls on_tile(n, item, at) for the block's tiles n = 0, 1, ... as the plan says them. A single lane.
template <class Tile, class OnTile>
__device__ __forceinline__ void each_tile(SharedMemory<Tile>& smem, OnTile on_tile) {
    unsigned n = 0;
    for (RingPlace<Tile::kPlans> plan;; plan.advance()) {
        Slot& slot = smem.plan_slot[plan.stage];
        ptx::barrier_wait(&slot.full, plan.parity);
        const Item& item = smem.plan[plan.stage];
        int left = item.tiles;
        if (left < 0) return;
        for (QueryPlace at{item.start_head, item.start}; left > 0; --left, ++n, at.template advance<Tile>(item))
            on_tile(n, item, at);
        ptx::barrier_arrive(&slot.empty);
    }
}

template <class Tile>
__device__ __forceinline__ void await_turns(const Problem& problem, SharedMemory<Tile>& smem) {
    const bool writes = problem.dq_by == DqBy::kTurns, broken = problem.queue->broken > 0;
    each_tile(smem, [&](unsigned n, const Item& item, const QueryPlace& at) {
        Turn turn = turn_of<Tile>(problem, item, at);
        TurnCount& count = problem.turns[turn.group];
        DqTask& task = smem.task[n % 2];
        // Not turn_slot's empty: the consumers could go on by two turns before the passer has seen the end of this one,
        // which it would then never see
        ptx::barrier_wait(&smem.turn_seen[n % 2], n / 2 % 2 ^ 1);
        task.dq = row_of<typename Tile::T>(problem.dq, item.sequence.index, at.head, item.sequence.first_q + at.row);
        task.group = turn.group;
        task.rows = item.sequence.seqlen_q - at.row;
        if (!problem.deterministic) turn.place = atomicAdd(&count.taken, 1u);
        const bool first = turn.place == 0, last = turn.place == turn.others;
        const unsigned awaited = broken ? 0 : problem.deterministic || last ? turn.place : min(turn.place, 1u);
        task.first = writes && first;
        task.finishes = writes && last;
        if (awaited > 0)
            while (ptx::load_acquire(&count.done) < awaited) {
            }
        ptx::barrier_arrive(&smem.turn_slot[n % 2].full);
    });
}
template <class Tile>
__device__ __forceinline__ void pass_turns(const Problem& problem, SharedMemory<Tile>& smem) {
    const auto pass = [&](unsigned n) {
        ptx::barrier_wait(&smem.turn_slot[n % 2].empty, n / 2 % 2);
        const int group = smem.task[n % 2].group;
        ptx::barrier_arrive(&smem.turn_seen[n % 2]);
        ptx::add_release(&problem.turns[group].done, 1);
    };
    // A turn ends beside the next tile, which may be the next item's: this one's place in the plan must not wait for it
    unsigned tiles = 0;
    each_tile(smem, [&](unsigned n, const Item&, const QueryPlace&) {
        if (n > 0) pass(n - 1);
        tiles = n + 1;
    });
    if (tiles > 0) pass(tiles - 1);
}

/// A warp of warpgroup 0 beside the producer's.
template <class Tile>
__device__ __forceinline__ void keep_turns(const Problem& problem, SharedMemory<Tile>& smem) {
    if (threadIdx.x == 32) await_turns(problem, smem);
    if (threadIdx.x == 64) pass_turns(problem, smem);
}

/// How many lanes of warpgroup 0 follow the plan.
template <Pass kPass>
constexpr unsigned turn_keepers() {
    return kPass == Pass::kTurns ? 2 : 0;
}

/// Prepares the barriers. `adders`: warps that bring dQ to its place.
template <class Tile>
__device__ __forceinline__ void prepare_turns(SharedMemory<Tile>& smem, unsigned adders) {
    prepare_slots(smem.turn_slot, 1, adders);
    for (auto& barrier : smem.turn_seen) ptx::barrier_init(&barrier, 1);
}

}  // namespace flash_wmma::backward::wgmma
