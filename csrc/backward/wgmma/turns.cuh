// Turns at dQ of a tile of queries: several items, in several blocks, add to it.
//
// The first item that is done with its dQ of a tile stores it in the fp32 buffer, those that follow add to it there, and
// the last one adds what is there to its own in registers and writes dq. So nobody clears the buffer before, and
// nobody reads it after.
//
// Who comes first is not known before: an item takes a number for each of its tiles. Two counts in global memory for
// each tile of a query head say how many items took one, and how many are done. An item with number 0 waits for nobody,
// the last one waits until all others are done, and those between until one is. So an item waits for items alone that
// took their numbers before and have a block, each block takes its numbers in the order in which it adds, and some
// block can always go on.
//
// If the additions have an order, so that the same inputs give the same bits (deterministic=True), an item's number is
// its place among the items that see the tile, in the order in which blocks took them, and it waits until as many are done.
//
// Roles: beside the producer, two warps of warpgroup 0. The producer says which turns there will be. `await_turns`
// takes numbers, reads the counts until it is the block's turn, and tells the consumers what to do; when they have
// done it, `pass_turns` makes it visible to all blocks and counts. So no consumer waits for global memory, and the
// block may be late by a tile without making others wait.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"

namespace flash_wmma::backward::wgmma {

/// The turn of an item at a tile of queries. The items that see the tile are those whose keys some of its queries see:
/// a run of the sequence's tiles of keys.
template <class Tile, Pass kPass>
__device__ __forceinline__ Turn turn_of(const Problem& problem, const Item& item, const QueryPlace& at) {
    const Sequence& sequence = item.sequence;
    const int rows = min(Tile::kQueries, sequence.seqlen_q - at.row), own = item.first_key / Tile::kKeys;
    const int first = item.mask.begin(at.row) / Tile::kKeys,
              last = (item.mask.end(at.row + rows - 1) - 1) / Tile::kKeys;
    return {row_of<typename Tile::T>(problem.dq, sequence.index, at.head, sequence.first_q + at.row),
            static_cast<int>(q_scale_index(problem.forward, sequence, at.head)) + at.row / kRowGroup, rows,
            static_cast<unsigned>(runs_backwards<kPass>(problem.forward) ? last - own : own - first),
            static_cast<unsigned>(last - first)};
}

/// Calls on_turn(n, turn) for turns 1, 2, ... as the producer says them. One warp; on_turn in lane 0 alone.
template <class Tile, class OnTurn>
__device__ __forceinline__ void each_turn(SharedMemory<Tile>& smem, OnTurn on_turn) {
    RingPlace<Tile::kTileFacts> place;
    for (unsigned n = 1;; ++n, place.advance()) {
        Slot& slot = smem.known_turn[place.stage];
        ptx::barrier_wait(&slot.full, place.parity);
        const Turn turn = smem.turn[place.stage];
        ptx::barrier_arrive(&slot.empty);
        if (turn.rows == 0) return;
        on_turn(n, turn);
    }
}

/// Turn 0 is of no tile, since consumers are late by one.
template <class Tile, Pass kPass>
__device__ __forceinline__ void await_turns(const Problem& problem, SharedMemory<Tile>& smem) {
    smem.turn_now[0] = {};
    ptx::barrier_arrive(&smem.turn_slot[0].full);
    each_turn(smem, [&](unsigned n, Turn turn) {
        TurnCount& count = problem.turns[turn.group];
        if (kPass != Pass::kOrdered) turn.place = atomicAdd(&count.taken, 1u);
        const bool all = kPass == Pass::kOrdered || turn.place == turn.others;
        const unsigned awaited = all ? turn.place : min(turn.place, 1u);
        while (ptx::load_acquire(&count.done) < awaited) {
        }
        // Not turn_slot's empty: the consumers could go on by two turns before the passer has seen the end of this one,
        // which it would then never see
        ptx::barrier_wait(&smem.turn_seen[n % 2], n / 2 % 2 ^ 1);
        smem.turn_now[n % 2] = turn;
        ptx::barrier_arrive(&smem.turn_slot[n % 2].full);
    });
}
template <class Tile>
__device__ __forceinline__ void pass_turns(const Problem& problem, SharedMemory<Tile>& smem) {
    each_turn(smem, [&](unsigned n, const Turn& turn) {
        ptx::barrier_wait(&smem.turn_slot[n % 2].empty, n / 2 % 2);
        if (n == 1) ptx::barrier_arrive(&smem.turn_seen[0]);  // the end of turn 0 came before
        ptx::barrier_arrive(&smem.turn_seen[n % 2]);
        ptx::add_release(&problem.turns[turn.group].done, 1);
    });
}

/// A warp of warpgroup 0 beside the producer's.
template <class Tile, Pass kPass>
__device__ __forceinline__ void keep_turns(const Problem& problem, SharedMemory<Tile>& smem) {
    if (threadIdx.x == 32) await_turns<Tile, kPass>(problem, smem);
    if (threadIdx.x == 64) pass_turns(problem, smem);
}

/// Prepares the barriers. `adders`: warps that add.
template <class Tile>
__device__ __forceinline__ void prepare_turns(SharedMemory<Tile>& smem, unsigned adders) {
    prepare_slots(smem.known_turn, 1, 2);
    prepare_slots(smem.turn_slot, 1, adders);
    for (auto& barrier : smem.turn_seen) ptx::barrier_init(&barrier, 1);
}

}  // namespace flash_wmma::backward::wgmma
