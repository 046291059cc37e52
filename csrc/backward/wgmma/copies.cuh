// Copies of tiles to shared memory: what the warps that copy share (of the pass over own queries too, queries.cuh), and
// the one that copies Q and dO.
//
// Q and dO have few places, so the time from when a place is empty to when the next tile is there is on the way of the
// products. The warp has nothing else to do, and all that it needs of an item in registers: an access to local or
// shared memory waits behind the additions to dQ and all else in the queue of the SM's load and store unit
// (docs/tuning/hopper_backward.md).
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"
#include "device/constants.cuh"

namespace flash_wmma::backward::wgmma {

/// Where rows come: those that far ahead of the ones that are asked for; columns from `column` on.
template <class Rows>
struct RowsCopy {
    Rows& to;
    int ahead = 0, column = 0;

    __device__ __forceinline__ explicit RowsCopy(Rows& rows, int rows_ahead = 0, int first_column = 0)
        : to(rows), ahead(rows_ahead), column(first_column) {}
};

/// A warp that copies tiles of rows.
template <class Memory, Problems kProblems>
class CopyingWarp {
  protected:
    __device__ __forceinline__ CopyingWarp(const Problem& problem, Memory& shared, ptx::Barrier& patch)
        : problem_(problem), smem_(shared), patch_(patch), lane_(static_cast<int>(threadIdx.x) % 32) {}

    /// Panels of 64 columns, from `column` on.
    template <class Rows>
    __device__ __forceinline__ void load(Rows& rows, const TensorMap& map, ptx::Barrier* barrier, int column, int row,
                                         int head, int batch) const {
#pragma unroll
        for (int i = 0; i < panels<Rows>(); ++i)
            ptx::tensor_load(rows.panel[i], &map, barrier, {column + 64 * i, row, head, batch});
    }

    /// Where rows lie in their tensors: the first one.
    struct From {
        int row, head, batch;
    };

    /// Rows of K or V, of which `used` are in use, to one or more places that are full together, when they are empty.
    template <class... Copies>
    __device__ __forceinline__ void copy_keys(const TensorMap& map, Slot& slot, unsigned parity, int used,
                                              const From& from, const Copies&... copies) {
        const Sequences& sequences = problem_.forward.sequences;
        const bool cuts = kPacked && (sequences.cu_seqlens_k || sequences.seqused_k) &&
                          ((used - copies.ahead < rows_of(copies.to)) || ...);
        if (lane_ > 0 && !cuts) return;
        if (lane_ == 0) {  // the others learn at the patch that the place is empty
            ptx::barrier_wait(&slot.empty, parity ^ 1);
            ptx::Barrier* const barrier = cuts ? &patch_ : &slot.full;
            ptx::barrier_arrive_expect(barrier, (sizeof(copies.to) + ...));
            const int batch = batch_in_maps<kProblems>(sequences, from.batch);
            (load(copies.to, map, barrier, copies.column, from.row + copies.ahead, from.head, batch), ...);
        }
        if (!cuts) return;
        await_patch();
        (clear_behind(copies.to, max(used - copies.ahead, 0)), ...);
        tell_cleared(slot);
    }

    // Rows that are not the sequence's, or not in use, must not meet weights of 0: they may be infinite. Behind a
    // tensor's end the copy itself writes zeros, but behind a sequence's end it finds other rows.
    __device__ __forceinline__ void await_patch() {
        ptx::barrier_wait(&patch_, patch_parity_);
        patch_parity_ ^= 1;
    }
    template <class Rows>
    __device__ __forceinline__ void clear_behind(Rows& rows, int count) const {
        constexpr int kVectors = 64 / 8;  // of 16 bytes in a row of a panel
        constexpr int kAll = static_cast<int>(sizeof(rows.panel[0]) / sizeof(uint4));
#pragma unroll
        for (int i = 0; i < panels<Rows>(); ++i)
            for (int vector = count * kVectors + lane_; vector < kAll; vector += 32)
                reinterpret_cast<uint4*>(rows.panel[i])[vector] = uint4{};
    }
    /// Behind the clearing of rows that the copies of a place have brought: the place is full.
    __device__ __forceinline__ void tell_cleared(Slot& slot) const {
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&slot.full);
    }

    template <class Rows>
    __device__ __forceinline__ static constexpr int rows_of(const Rows&) {
        return static_cast<int>(sizeof(Rows::panel[0]) / sizeof(uint4)) / 8;  // 128 bytes of a panel each
    }
    template <class Rows>
    static constexpr int panels() {
        return sizeof(Rows::panel) / sizeof(Rows::panel[0]);
    }

    static constexpr bool kPacked = includes(kProblems, Problems::kPacked);

    const Problem& problem_;
    Memory& smem_;
    ptx::Barrier& patch_;
    const int lane_;
    unsigned patch_parity_ = 0;
};

/// The warp that copies Q and dO of the block's tiles, each as soon as its place is empty.
template <class Tile, Problems kProblems>
class QueryCopies : CopyingWarp<SharedMemory<Tile>, kProblems> {
    using Base = CopyingWarp<SharedMemory<Tile>, kProblems>;
    using Base::problem_, Base::smem_, Base::lane_, Base::kPacked;

  public:
    __device__ __forceinline__ QueryCopies(const Problem& problem, const Maps& maps, SharedMemory<Tile>& shared)
        : Base(problem, shared, shared.query_patch), maps_(maps) {}

    __device__ __forceinline__ void run() {
        if (lane_ == 0) ptx::prefetch(&maps_.q), ptx::prefetch(&maps_.dout);
        unsigned n = 0;
        each_item<Tile>(smem_, [&](const Item& item) {
            QueryPlace at{item.start_head, item.start};
            for (int left = item.tiles; left > 0; --left, ++n, at.template advance<Tile>(item))
                copy(n, item.sequence, at);
        });
    }

  private:
    __device__ __forceinline__ void copy(unsigned n, const Sequence& sequence, const QueryPlace& at) {
        const int existing = min(Tile::kQueries, sequence.seqlen_q - at.row);
        const bool cuts = kPacked && problem_.forward.sequences.cu_seqlens_q && existing < Tile::kQueries;
        if (lane_ > 0 && !cuts) return;
        const unsigned stage = n % Tile::kStages;
        Slot& slot = smem_.slot[stage];
        auto& q = smem_.q[stage];
        if (lane_ == 0) {  // the others learn at the patch that the places are empty
            const int row = sequence.first_q + at.row,
                      batch = batch_in_maps<kProblems>(problem_.forward.sequences, sequence.index);
            ptx::barrier_wait(&slot.empty, n / Tile::kStages % 2 ^ 1);
            ptx::Barrier* const barrier = cuts ? &this->patch_ : &slot.full;
            if (cuts || !Tile::kHalvesDout) ptx::barrier_arrive_expect(barrier, 2 * sizeof(q));
            else ptx::barrier_arrive_expect(barrier, sizeof(q));
            this->load(q, maps_.q, barrier, 0, row, at.head, batch);
#pragma unroll
            for (int i = 0; i < Tile::kDoutParts; ++i) {
                const auto at_dout = DoutPlace<Tile>::of(n, i);
                auto& dout = smem_.dout[at_dout.place];
                ptx::Barrier* dout_barrier = barrier;
                if constexpr (Tile::kHalvesDout) {
                    Slot& dout_slot = smem_.dout_slot[at_dout.place];
                    ptx::barrier_wait(&dout_slot.empty, at_dout.parity ^ 1);
                    if (!cuts) {
                        dout_barrier = &dout_slot.full;
                        ptx::barrier_arrive_expect(dout_barrier, sizeof(dout));
                    }
                }
                this->load(dout, maps_.dout, dout_barrier, 64 * Tile::kPanels / Tile::kDoutParts * i, row, at.head,
                           batch);
            }
            ptx::barrier_arrive(&smem_.under_way[n % Tile::kTileFacts]);
        }
        if (!cuts) return;
        this->await_patch();
        this->clear_behind(q, existing);
#pragma unroll
        for (int i = 0; i < Tile::kDoutParts; ++i)
            this->clear_behind(smem_.dout[DoutPlace<Tile>::of(n, i).place], existing);
        this->tell_cleared(slot);
        if constexpr (Tile::kHalvesDout)
#pragma unroll
            for (int i = 0; i < Tile::kDoutParts; ++i)
                this->tell_cleared(smem_.dout_slot[DoutPlace<Tile>::of(n, i).place]);
    }

    const Maps& maps_;
};

}  // namespace flash_wmma::backward::wgmma
