// The order of the additions to dQ, so that the same inputs give the same bits: deterministic=True.
//
// The items that see a tile of queries add their dQ of it one after the other, in the order in which blocks took them.
// A count in global memory for each tile of a query head says how many have. An item waits for items that were taken
// before it alone, so that some block can always go on.
//
// Roles: beside the producer, two warps of warpgroup 0. The producer says which turns there will be. `TurnWaiter` reads
// the count until it is the block's turn, and tells the consumers; when they have added, `TurnPasser` makes their
// additions visible to all blocks and counts. So no consumer waits for global memory, and the block may be late by a
// tile without making others wait.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"

namespace flash_wmma::backward::wgmma {

/// The turn of an item at a tile of queries: how many of the items that see the tile come before it. Those are the
/// items whose keys some of the tile's queries see: a run of the sequence's tiles of keys.
template <class Tile, Pass kPass>
__device__ __forceinline__ Turn turn_of(const Problem& problem, const Item& item, const QueryPlace& at) {
    const int last_query = min(at.row + Tile::kQueries, item.sequence.seqlen_q) - 1;
    const int own = item.first_key / Tile::kKeys;
    const int first = item.mask.begin(at.row) / Tile::kKeys, last = (item.mask.end(last_query) - 1) / Tile::kKeys;
    const std::int64_t group = q_scale_index(problem.forward, item.sequence, at.head) + at.row / kRowGroup;
    return {problem.turns + group,
            static_cast<unsigned>(runs_backwards<kPass>(problem.forward) ? last - own : own - first)};
}

/// Calls on_turn(n, turn) for turns 0, 1, ... as the producer says them. One warp; on_turn in lane 0 alone.
template <class Tile, class OnTurn>
__device__ __forceinline__ void each_turn(SharedMemory<Tile>& smem, OnTurn on_turn) {
    if (threadIdx.x % 32 > 0) return;
    RingPlace<Tile::kTileFacts> place;
    for (unsigned n = 0;; ++n, place.advance()) {
        Slot& slot = smem.known_turn[place.stage];
        ptx::barrier_wait(&slot.full, place.parity);
        const Turn turn = smem.turn[place.stage];
        ptx::barrier_arrive(&slot.empty);
        if (!turn.count) return;
        on_turn(n, turn);
    }
}

template <class Tile>
__device__ __forceinline__ void await_turns(SharedMemory<Tile>& smem) {
    each_turn(smem, [&](unsigned n, const Turn& turn) {
        while (ptx::load_acquire(turn.count) != turn.place) {
        }
        // Not turn_slot's empty: the consumers could go on by two turns before the passer has seen the end of this one,
        // which it would then never see
        ptx::barrier_wait(&smem.turn_seen[n % 2], n / 2 % 2 ^ 1);
        ptx::barrier_arrive(&smem.turn_slot[n % 2].full);
    });
}
template <class Tile>
__device__ __forceinline__ void pass_turns(SharedMemory<Tile>& smem) {
    each_turn(smem, [&](unsigned n, const Turn& turn) {
        ptx::barrier_wait(&smem.turn_slot[n % 2].empty, n / 2 % 2);
        ptx::barrier_arrive(&smem.turn_seen[n % 2]);
        ptx::add_release(turn.count, 1);
    });
}

/// A warp of warpgroup 0 beside the producer's.
template <class Tile>
__device__ __forceinline__ void keep_order(SharedMemory<Tile>& smem) {
    const auto warp = threadIdx.x / 32;
    if (warp == 1) await_turns(smem);
    if (warp == 2) pass_turns(smem);
}

/// Prepares the barriers. `adders`: warps that add.
template <class Tile>
__device__ __forceinline__ void prepare_order(SharedMemory<Tile>& smem, unsigned adders) {
    prepare_slots(smem.known_turn, 1, 2);
    prepare_slots(smem.turn_slot, 1, adders);
    for (auto& barrier : smem.turn_seen) ptx::barrier_init(&barrier, 1);
}

}  // namespace flash_wmma::backward::wgmma
