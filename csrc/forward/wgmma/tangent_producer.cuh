// The producer of the kernel for tangents (tangent.cuh).
#pragma once

#include <ptx_sm90.cuh>

#include "forward/wgmma/plan.cuh"
#include "forward/wgmma/tangent_block.cuh"

namespace flash_wmma::wgmma_sm90 {

/// One warp: fills the slots of the shared memory, in the order in which the consumers want them: K of a tile before V
/// of the one before it. A slot is full when the rows and their tangents have come.
template <class Tile>
class TangentProducer {
  public:
    __device__ __forceinline__ TangentProducer(const TangentMaps& maps, TangentMemory<Tile>& shared)
        : maps_(maps), smem_(shared), plans_(shared.plans), lane_(static_cast<int>(threadIdx.x)) {}

    __device__ __forceinline__ void run() {
        for (Item work = plans_.next(0).work; work.tiles.end > 0; work = plans_.next(0).work) {
            int tile = work.tiles.end - 1;
            load_k(work, tile);
            load_q(work);
            load_down_to(min(tile, work.tiles.first + Tile::kStages / 2), tile, work);
            if (lane_ == 0) ptx::barrier_arrive(&smem_.plans.near_end);
            load_down_to(work.tiles.first, tile, work);
            load_v(work, tile);
        }
    }

  private:
    using Item = Work<Tile>;

    /// Waits until `slot` is empty in this round of its ring, then issues the copies of the rows from `row` on.
    template <class Rows>
    __device__ __forceinline__ void load(Rows& rows, const MapPair& maps, Slot& slot, unsigned parity, int row,
                                         int head, int batch) const {
        if (lane_ != 0) return;
        ptx::barrier_wait(&slot.empty, parity ^ 1);
        ptx::barrier_arrive_expect(&slot.full, sizeof(Rows));
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i) {
            ptx::tensor_load(rows.panel[i], &maps.rows, &slot.full, {64 * i, row, head, batch});
            if constexpr (requires { rows.moved; })
                ptx::tensor_load(rows.moved[i], &maps.moved, &slot.full, {64 * i, row, head, batch});
        }
    }

    /// Loads K of the tiles from `tile` - 1 down to `last`, and V one tile behind, from `tile` down to `last` + 1.
    __device__ __forceinline__ void load_down_to(int last, int& tile, const Item& work) {
        for (; tile > last; --tile) {
            load_k(work, tile - 1);
            load_v(work, tile);
        }
    }
    __device__ __forceinline__ void load_q(const Item& work) {
#pragma unroll
        for (int c = 0; c < Tile::kConsumers; ++c)
            load(smem_.q[q_.stage][c], maps_.q, smem_.q_slot[q_.stage][c], q_.parity, work.first_row(c), work.tile.head,
                 work.sequence.index);
        q_.advance();
    }
    __device__ __forceinline__ void load_k(const Item& work, int tile) {
        load(smem_.k[k_.stage], maps_.k, smem_.k_slot[k_.stage], k_.parity, tile * Tile::kBc, work.tile.head_k,
             work.sequence.index);
        k_.advance();
    }
    __device__ __forceinline__ void load_v(const Item& work, int tile) {
        load(smem_.v[v_.stage], maps_.v, smem_.v_slot[v_.stage], v_.parity, tile * Tile::kBc, work.tile.head_k,
             work.sequence.index);
        v_.advance();
    }

    const TangentMaps& maps_;
    TangentMemory<Tile>& smem_;
    PlanReader<Tile> plans_;
    const int lane_;
    RingPlace<Tile::kStages> k_, v_;
    RingPlace<Tile::kQStages> q_;
};

}  // namespace flash_wmma::wgmma_sm90
