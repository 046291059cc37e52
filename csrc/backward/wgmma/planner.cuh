// Which items a block of bwd_sm90 works on, one after the other.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include <type_traits>

#include "backward/wgmma/block.cuh"
#include "device/nothing.cuh"
#include "device/pipeline.cuh"

namespace flash_wmma::backward::wgmma {

/// Whether a warp of its own says what the items are, and not the producer: only where dQ is added without turns. Two
/// passes, whose items no additions to dQ delay, took longer so (docs/tuning/hopper_backward.md). With turns an item is
/// taken late, when it can begin: behind a long one it would wait, and so would all that follow it.
template <Pass kPass>
constexpr bool plans_ahead() {
    return kPass == Pass::kFused;
}

/// How many tiles before an item's last one the next is then taken: to find out what it is takes as long as four behind
/// additions to dQ (docs/tuning/hopper_backward.md). Much earlier, a block might take one that others would begin
/// before.
inline constexpr int kTilesAhead = 8;

/// Takes items from the queue, and says what they are. A whole warp.
template <class Tile, Problems kProblems, Pass kPass>
class Planner {
  public:
    __device__ __forceinline__ Planner(const Problem& problem, SharedMemory<Tile>& shared, int items,
                                       const Workers& workers)
        : problem_(problem),
          smem_(shared),
          workers_(workers),
          lane_(static_cast<int>(threadIdx.x) % 32),
          items_(items),
          of_pair_(shared.pair) {
        // An item waits for those alone that were taken before, if there is an order, or parts: by blocks that are at
        // work. In a ring it waits for all of its batch (await_batch)
        const bool waits =
            in_order<kPass>(problem_) || (takes_parts<Tile, kProblems, kPass>() && problem_.parts.each > 1);
        // Not all blocks need be at work yet, in pairs, or beside prepare: then none has an item beforehand
        const bool takes_all = Tile::kPaired || waits || problem_.prepared;
        before_ = takes_all ? 0 : workers.count;
        index_ = uniform(takes_all || workers.index < 0 ? taken() + before_ : workers.index);
    }

    /// A warp of its own, ahead of the producer, which says when the next item is to be taken.
    __device__ __forceinline__ void run() {
        for (unsigned with_tiles = 0;;) {
            const int tiles = say_item().tiles;
            if (tiles < 0) return;
            if (tiles > 0) ptx::barrier_wait(&smem_.take_next, with_tiles++ % 2);
            take_next();
        }
    }

    /// Says the item that was taken last, or that there are no more.
    __device__ __forceinline__ Item say_item() {
        Item item{};
        if (index_ < items_) item = item_of<Tile, kProblems, kPass>(problem_, index_, workers_);
        else item.tiles = -1;
        publish(smem_, place_, item);
        return item;
    }
    __device__ __forceinline__ void take_next() {
        if constexpr (Tile::kRing)
            if (!StaircaseOrder::of<Tile::kKeys>(problem_).used()) await_batch();
        bool leaves = false;  // its SM to finish_beside
        if constexpr (can_count_items<Tile, kPass>())
            leaves = static_cast<int>(blockIdx.x) < problem_.leaving_blocks && index_ >= problem_.leaving_item;
        index_ = leaves ? items_ : uniform(taken() + before_);
    }

  private:
    /// In lane 0, how many items were taken from the queue before this one.
    __device__ __forceinline__ int taken() {
        if (lane_ > 0) return 0;
        const auto take = [&] { return static_cast<int>(atomicAdd(&problem_.queue->taken, 1u)); };
        if constexpr (Tile::kPaired) return of_pair_.next(take);
        else return take();
    }

    /// In a ring: waits until all items of the batch of the item are taken, each by a block of its own. Those of
    /// batches before were taken before, so that blocks are free for the rest.
    __device__ __forceinline__ void await_batch() const {
        const ForwardParams& p = problem_.forward;
        const int all = RingOrder::of<Tile::kKeys>(problem_).taken_with(index_, static_cast<int>(p.heads_k * p.batch));
        if (lane_ == 0)
            while (ptx::load_acquire(&problem_.queue->taken) < static_cast<unsigned>(all)) {
            }
    }

    const Problem& problem_;
    SharedMemory<Tile>& smem_;
    const Workers workers_;
    const int lane_, items_;
    int before_;  // items that no block takes from the queue
    int index_;   // of the item that was taken last
    std::conditional_t<Tile::kPaired, PairedItems<decltype(SharedMemory<Tile>::pair)>, Nothing> of_pair_;
    RingPlace<Tile::kPlans> place_;
};

}  // namespace flash_wmma::backward::wgmma
