// Two blocks of a cluster that share an item (two_roles.cuh): each has half of its keys and all of its tiles of
// queries.
//
// Each sends dS of a tile to the other, by the copy engine, and computes half of the columns of the tile's dQ from dS
// and K of both. So a tile's additions to dQ's buffer are those of one block, for twice the keys. The first block takes
// items from the queue, and tells the second.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "device/pipeline.cuh"

namespace flash_wmma::backward::wgmma {

/// The number of the other block.
__device__ __forceinline__ unsigned peer_rank() { return ptx::cluster_rank() ^ 1; }

/// What a block of a pair has more in shared memory. Transposed: the type of a tile of dS.
template <class Tile, class Transposed>
struct PairMemory {
    static constexpr int kItems = 2;  // that the second block can be told of ahead
    struct alignas(1024) Keys {
        static constexpr int kPanels = Tile::kPanels / 2;  // of each block's columns of dQ
        typename Tile::T panel[kPanels][Tile::kKeys * 64];
    };
    Keys k;                              // of the other block's keys, the columns of this block's dQ
    Transposed ds[Tile::kDsStages];      // from the other block
    Slot ds_slot[Tile::kDsStages];       // full: it is here. empty: the other block has read what this one sent
    int4 told[kItems], telling[kItems];  // items, in x: copies are of 16 bytes
    Slot told_slot[kItems];              // as ds_slot
};

/// Prepares the barriers. `readers`: warps that read dS.
template <class Memory>
__device__ __forceinline__ void prepare_pair(Memory& memory, unsigned readers) {
    for (Slot& slot : memory.ds_slot) ptx::barrier_init(&slot.full, 1), ptx::barrier_init(&slot.empty, readers);
    for (Slot& slot : memory.told_slot) ptx::barrier_init(&slot.full, 1), ptx::barrier_init(&slot.empty, 1);
}

/// The items of a pair of blocks, in the order in which they were taken from the queue.
template <class Memory>
class PairedItems {
  public:
    __device__ __forceinline__ explicit PairedItems(Memory& memory) : memory_(memory) {}

    /// The next item's number. One thread of each block. take(): from the queue.
    template <class Take>
    __device__ __forceinline__ int next(Take take) {
        const unsigned place = count_ % Memory::kItems, parity = count_ / Memory::kItems % 2;
        Slot& slot = memory_.told_slot[place];
        auto &told = memory_.told[place], &telling = memory_.telling[place];
        const bool first = count_++ == 0;
        if (ptx::cluster_rank() == 0) {
            const int item = take();
            ptx::barrier_wait(&slot.empty, parity ^ 1);
            telling = make_int4(item, 0, 0, 0);
            ptx::fence_proxy_async();
            ptx::bulk_send(&told, &telling, sizeof(told), &slot.full, peer_rank());
            return item;
        }
        // An arrival at another block may overtake a load that was issued before it. So the number before, which has
        // been worked with, is given back here, and not where it was loaded
        if (!first) ptx::barrier_arrive_at(&memory_.told_slot[(place + Memory::kItems - 1) % Memory::kItems].empty, 0);
        ptx::barrier_arrive_expect(&slot.full, sizeof(told));
        ptx::barrier_wait(&slot.full, parity);
        return told.x;
    }

  private:
    Memory& memory_;
    unsigned count_ = 0;  // of the numbers so far
};

}  // namespace flash_wmma::backward::wgmma
