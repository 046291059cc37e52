// The producer of bwd_sm90: which items a block works on, and the copies of their tiles.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"
#include "device/constants.cuh"

namespace flash_wmma::backward::wgmma {

/// One warp: says what the block works on, and copies K and V of each item and its tiles of Q and dO with their facts,
/// each as soon as its place is empty.
template <class Tile>
class Producer {
  public:
    __device__ __forceinline__ Producer(const Problem& problem, const Maps& maps, SharedMemory<Tile>& shared)
        : problem_(problem), maps_(maps), smem_(shared), lane_(static_cast<int>(threadIdx.x)) {}

    __device__ __forceinline__ void run(int items) {
        for (int index = static_cast<int>(blockIdx.x); index < items;) {
            const Item item = item_of<Tile>(problem_.forward, index);
            publish(item);
            int next = 0;
            if (lane_ == 0) next = static_cast<int>(gridDim.x + atomicAdd(problem_.queue, 1u));
            if (item.tiles > 0) load_item(item);
            index = uniform(next);
        }
        Item none{};
        none.tiles = -1;
        publish(none);
    }

  private:
    __device__ __forceinline__ void publish(const Item& item) {
        Slot& slot = smem_.plan_slot[plan_.stage];
        if (lane_ == 0) {
            ptx::barrier_wait(&slot.empty, plan_.parity ^ 1);
            smem_.plan[plan_.stage] = item;
            ptx::barrier_arrive(&slot.full);
        }
        plan_.advance();
    }

    __device__ __forceinline__ void load_item(const Item& item) {
        if (lane_ == 0) {
            Slot& slot = smem_.key_slot[keys_.stage];
            ptx::barrier_wait(&slot.empty, keys_.parity ^ 1);
            ptx::barrier_arrive_expect(&slot.full, 2 * sizeof(smem_.k[0]));
            load(smem_.k[keys_.stage], maps_.k, &slot.full, item.keys.first_row, item.keys.head, item.keys.batch);
            load(smem_.v[keys_.stage], maps_.v, &slot.full, item.keys.first_row, item.keys.head, item.keys.batch);
        }
        keys_.advance();
        const int group_rows = (item.seqlen_q + kRowGroup - 1) / kRowGroup * kRowGroup;
        QueryPlace at{item.head, item.start};
        for (int left = item.tiles; left > 0; --left, at.advance(item, Tile::kQueries), place_.advance()) {
            if (lane_ > 0) continue;
            // All that can be known before the place is empty
            const int last_query = at.row + Tile::kQueries - 1, last_key = item.keys.first_row + Tile::kKeys - 1;
            smem_.tile[tile_facts_] = {dq_of(problem_, {item.keys.batch}, at.head, at.row), at.row,
                                       min(Tile::kQueries, item.seqlen_q - at.row),
                                       !item.mask.all_visible(at.row, last_query, item.keys.first_row, last_key)};
            tile_facts_ = (tile_facts_ + 1) % Tile::kTileFacts;
            const int rows = min(Tile::kQueries, group_rows - at.row);
            const RowPair* const from = facts_of(problem_, {item.keys.batch}, at.head) + at.row / 2;
            const unsigned bytes = static_cast<unsigned>(rows) * (sizeof(RowPair) / 2);

            Slot& slot = smem_.slot[place_.stage];
            RowPair* const facts = smem_.facts[place_.stage];
            ptx::barrier_wait(&slot.empty, place_.parity ^ 1);
            if (rows < Tile::kQueries) {  // behind the last group P is 0
                for (int i = rows / 2; i < Tile::kQueries / 2; ++i) facts[i] = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
                ptx::fence_proxy_async();  // the next copy to this place comes behind these writes
            }
            ptx::barrier_arrive_expect(&slot.full, 2 * sizeof(smem_.q[0]) + bytes);
            load(smem_.q[place_.stage], maps_.q, &slot.full, at.row, at.head, item.keys.batch);
            load(smem_.dout[place_.stage], maps_.dout, &slot.full, at.row, at.head, item.keys.batch);
            ptx::bulk_load(facts, from, bytes, &slot.full);
        }
    }

    template <class Rows>
    __device__ __forceinline__ void load(Rows& rows, const TensorMap& map, ptx::Barrier* barrier, int row, int head,
                                         int batch) const {
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i)
            ptx::tensor_load(rows.panel[i], &map, barrier, {64 * i, row, head, batch});
    }

    const Problem& problem_;
    const Maps& maps_;
    SharedMemory<Tile>& smem_;
    const int lane_;
    RingPlace<Tile::kPlans> plan_;
    RingPlace<Tile::kKeyStages> keys_;
    RingPlace<Tile::kStages> place_;
    int tile_facts_ = 0;
};

}  // namespace flash_wmma::backward::wgmma
