// Counts tasks that are done, for the blocks that wait for them.
//
// A warp of warpgroup 0 does it, so that no consumer waits until its writes have reached global memory. The producer
// says which counters there will be, in the order in which the consumers are done: an item is done when its last dQ has
// been added, beside the first tile of the item behind it, if not before.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"

namespace flash_wmma::backward::wgmma {

template <class Tile>
__device__ __forceinline__ void keep_counts(SharedMemory<Tile>& smem) {
    if (threadIdx.x % 32 > 0) return;
    RingPlace<Tile::kReports> place;
    for (unsigned n = 0;; ++n, place.advance()) {
        Slot& known = smem.known_report[place.stage];
        ptx::barrier_wait(&known.full, place.parity);
        unsigned* const counter = smem.report[place.stage];
        ptx::barrier_arrive(&known.empty);
        if (!counter) return;
        Slot& done = smem.report_slot[n % 2];
        ptx::barrier_wait(&done.full, n / 2 % 2);
        ptx::barrier_arrive(&done.empty);
        ptx::add_release(counter, 1);
    }
}

/// Prepares the barriers. `consumers`: warps that report.
template <class Tile>
__device__ __forceinline__ void prepare_counts(SharedMemory<Tile>& smem, unsigned consumers) {
    prepare_slots(smem.known_report, 1, 1);
    prepare_slots(smem.report_slot, consumers, 1);
}

/// Warpgroup 0 beside the producer.
template <class Tile, Pass kPass>
__device__ __forceinline__ void assist(SharedMemory<Tile>& smem) {
    if (threadIdx.x / 32 == 3) keep_counts(smem);
    else if (kPass == Pass::kOrdered) keep_order(smem);
}

}  // namespace flash_wmma::backward::wgmma
