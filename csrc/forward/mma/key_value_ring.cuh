// The ring of K/V tiles in a block's shared memory: copies, waits, and where the tile that is worked on lies.
#pragma once

#include <ptx.cuh>

#include "forward/mma/block.cuh"

namespace flash_wmma::mma {

/// Goes from the last visible tile back to the first, and copies kAhead tiles ahead. With one stage whose copies are
/// asynchronous, K and V alternate: V comes while S is computed, the next K while O is.
template <class Tile>
class KeyValueRing {
  public:
    __device__ __forceinline__ KeyValueRing(Smem<Tile>& smem, const Work<Tile>& work, int key)
        : work_(work),
          smem_(smem),
          k_copy_(work.key_rows(work.p.k, key), work.p.k.row, work.p.head_dim),
          v_copy_(work.key_rows(work.p.v, key), work.p.v.row, work.p.head_dim_v) {}

    /// Starts the copies of the first tile, which may reach beyond the sequence's end.
    __device__ __forceinline__ void start(int key) {
        if (work_.tiles > 0) {
            k_copy_.start(smem_.ring[0].k, k_pitch(), work_.sequence.seqlen_k - key);
            v_copy_.start(smem_.ring[0].v, v_pitch(), work_.sequence.seqlen_k - key);
        }
    }
    /// Finishes them, and starts those of the tiles that copies run ahead.
    __device__ __forceinline__ void run_ahead() {
        if (work_.tiles > 0) finish(smem_.ring[0]);
#pragma unroll
        for (int i = 1; i < Tile::kAhead; ++i) {
            if (i < work_.tiles) {
                k_copy_.start(smem_.ring[i].k, k_pitch());
                v_copy_.start(smem_.ring[i].v, v_pitch());
            }
            ptx::cp_async_commit();
        }
    }

    __device__ __forceinline__ const KeyRows<Tile>& k() const { return smem_.ring[slot_].k; }
    __device__ __forceinline__ const KeyRows<Tile>& v() const { return smem_.ring[slot_].v; }

    /// Waits until the tile (if K and V alternate, its K) has landed; starts the next copy.
    __device__ __forceinline__ void begin_tile(int left) {
        ptx::cp_async_wait<Tile::kAhead - 1>();
        __syncthreads();  // the tile has landed, the one before has been used
        auto& target = smem_.ring[previous_];
        if constexpr (Tile::kAlternates) {
            if (left < work_.tiles) v_copy_.start(target.v, v_pitch());
        } else if (left > Tile::kAhead) {
            k_copy_.start(target.k, k_pitch());
            v_copy_.start(target.v, v_pitch());
        }
        ptx::cp_async_commit();
    }
    /// Between the two products. If K and V alternate: waits until V has landed, and starts the copy of the next K.
    __device__ __forceinline__ void between_products(int left) {
        if constexpr (Tile::kAlternates) {
            ptx::cp_async_wait<0>();
            __syncthreads();  // V has landed, K has been used
            if (left > Tile::kAhead) k_copy_.start(smem_.ring[previous_].k, k_pitch());
            ptx::cp_async_commit();
        }
    }
    /// The tile has been used: on to the one before it.
    __device__ __forceinline__ void end_tile(int left) {
        if constexpr (Tile::Machine::kThroughRegisters) {
            if constexpr (Tile::kStages == 1) __syncthreads();
            if (left > Tile::kAhead) finish(smem_.ring[previous_]);
        }
        previous_ = slot_;
        slot_ = slot_ + 1 == Tile::kStages ? 0 : slot_ + 1;
    }

  private:
    using Copy = typename Tile::Machine::template Copy<Tile, Tile::kBc>;

    __device__ __forceinline__ std::int64_t k_pitch() const { return work_.p.k.row; }
    __device__ __forceinline__ std::int64_t v_pitch() const { return work_.p.v.row; }
    template <class Stage>
    __device__ __forceinline__ void finish(Stage& stage) {
        k_copy_.finish(stage.k);
        v_copy_.finish(stage.v);
    }

    const Work<Tile>& work_;
    Smem<Tile>& smem_;
    int slot_ = 0, previous_ = Tile::kStages - 1;  // of this tile and of the one before
    Copy k_copy_, v_copy_;
};

}  // namespace flash_wmma::mma
