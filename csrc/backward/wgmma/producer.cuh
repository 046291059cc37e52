// The producer of bwd_sm90: which items a block works on, and the copies of their tiles.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"
#include "device/constants.cuh"

namespace flash_wmma::backward::wgmma {

/// One warp: says what the block works on, and copies K and V of each item, and its tiles of Q and dO, each as soon as
/// its place is empty. What is to be known of a tile comes before.
template <class Tile, Problems kProblems, Pass kPass>
class Producer {
  public:
    __device__ __forceinline__ Producer(const Problem& problem, const Maps& maps, SharedMemory<Tile>& shared)
        : problem_(problem), maps_(maps), smem_(shared), lane_(static_cast<int>(threadIdx.x)) {}

    __device__ __forceinline__ void run(int items) {
        // An item is taken late, when it can begin: behind a long one it would wait, and with it, if there is an order,
        // all that follow. And an item waits for those alone that were taken before.
        const bool ordered = in_order<kPass>(problem_);
        const int first = ordered ? taken() : static_cast<int>(blockIdx.x);
        const int before = ordered ? 0 : static_cast<int>(gridDim.x);  // items that no block takes from the queue
        for (int index = uniform(first); index < items;) {
            const Item item = item_of<Tile, kProblems, kPass>(problem_, index);
            publish(item);
            if (item.tiles > 0) load_item(item);
            const int next = taken() + before;
            index = uniform(next);
        }
        Item none{};
        none.tiles = -1;
        publish(none);
    }

  private:
    /// In lane 0, how many items were taken from the queue before this one.
    __device__ __forceinline__ int taken() const {
        return lane_ == 0 ? static_cast<int>(atomicAdd(&problem_.queue->taken, 1u)) : 0;
    }

    __device__ __forceinline__ void publish(const Item& item) {
        Slot& slot = smem_.plan_slot[plan_.stage];
        if (lane_ == 0) {
            ptx::barrier_wait(&slot.empty, plan_.parity ^ 1);
            smem_.plan[plan_.stage] = item;
            ptx::barrier_arrive(&slot.full);
        }
        plan_.advance();
    }

    /// Issues an item's copies. If there is one place for V, that of the first tile is empty before.
    __device__ __forceinline__ void load_item(const Item& item) {
        constexpr bool kValuesLate = Tile::kValueStages == 1 && first_tile_apart<Tile, kProblems, kPass>();
        load_keys(smem_.k[keys_.stage], maps_.k, smem_.key_slot[keys_.stage], keys_.parity, item);
        keys_.advance();
        if constexpr (!kValuesLate) load_values(item);
        QueryPlace at{item.start_head, item.start};
        for (int left = item.tiles; left > 0; --left, at.template advance<Tile>(item), place_.advance()) {
            load_facts(item, at);
            load_tile(item, at);
            if (kValuesLate && left == item.tiles) load_values(item);
        }
    }
    __device__ __forceinline__ void load_values(const Item& item) {
        load_keys(smem_.v[values_.stage], maps_.v, smem_.value_slot[values_.stage], values_.parity, item);
        values_.advance();
    }

    /// What is to be known of a tile of queries before its Q and dO are there. Its place is empty: the tile that was
    /// there has left Q's and dO's place to one whose copies were issued before.
    __device__ __forceinline__ void load_facts(const Item& item, const QueryPlace& at) {
        const Sequence& sequence = item.sequence;
        const int group = static_cast<int>(q_scale_index(problem_.forward, sequence, at.head)) + at.row / kRowGroup;
        const int existing = min(Tile::kQueries, sequence.seqlen_q - at.row);
        const int rows = (existing + kRowGroup - 1) / kRowGroup * kRowGroup;
        QueryFacts<Tile>& facts = smem_.facts[facts_];
        if (rows < Tile::kQueries) {
            __syncwarp();  // lane 0 knows that the place is empty
            clear_behind_last_group(facts, rows);
            ptx::fence_proxy_async();  // the next copy to this place comes behind these writes, and products read them
            __syncwarp();
        }
        if (lane_ == 0) {
            const int last_query = at.row + Tile::kQueries - 1, last_key = item.first_key + Tile::kKeys - 1;
            Seen seen = item.mask.all_visible(at.row, last_query, item.first_key, last_key) ? Seen::kAll : Seen::kSome;
            if constexpr (kRanged)
                if (problem_.extents) seen = seen_by_ranges(item, at, existing, last_key, seen);
            smem_.tile[facts_] = {group - group_before_, at.row, existing, seen};
            const auto bytes = static_cast<unsigned>(rows * facts_bytes(kFolds));
            ptx::Barrier* const full = &smem_.facts_full[facts_];
            ptx::barrier_arrive_expect(full, bytes);
            if constexpr (kFolds)
                ptx::bulk_load(facts.terms, terms_of(problem_, sequence, at.head) + at.row / 8, bytes, full);
            else ptx::bulk_load(facts.pairs, facts_of(problem_, sequence, at.head) + at.row / 2, bytes, full);
        }
        group_before_ = group;
        facts_ = (facts_ + 1) % Tile::kTileFacts;
    }

    /// Rows of a tile that are in no group: their P is 0.
    __device__ __forceinline__ void clear_behind_last_group(QueryFacts<Tile>& facts, int rows) const {
        if constexpr (kFolds)
            for (int row = rows + lane_; row < Tile::kQueries; row += 32)
                write_terms(facts.terms[row / 8], row % 8, -INFINITY, 0.f, problem_.terms_scale);
        else
            for (int i = rows / 2 + lane_; i < Tile::kQueries / 2; i += 32)
                facts.pairs[i] = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
    }

    /// With ranges. `by_band`: without them.
    __device__ __forceinline__ Seen seen_by_ranges(const Item& item, const QueryPlace& at, int existing, int last_key,
                                                   Seen by_band) const {
        const RowGroupMask mask(problem_, item.sequence, at.head);
        bool all = by_band == Seen::kAll, none = true;
        for (int row = at.row; row < at.row + existing; row += kRowGroup) {
            all &= mask.all_visible(row, row + kRowGroup - 1, item.first_key, last_key);
            none &= !mask.some_visible(row, row + kRowGroup - 1, item.first_key, last_key);
        }
        return all ? Seen::kAll : none ? Seen::kNone : Seen::kSome;
    }

    /// Q and dO of a tile of queries.
    __device__ __forceinline__ void load_tile(const Item& item, const QueryPlace& at) {
        const Sequence& sequence = item.sequence;
        const int existing = min(Tile::kQueries, sequence.seqlen_q - at.row);
        const bool cuts = kPacked && problem_.forward.sequences.cu_seqlens_q && existing < Tile::kQueries;
        if (lane_ > 0 && !cuts) return;
        Slot& slot = smem_.slot[place_.stage];
        auto &q = smem_.q[place_.stage], &dout = smem_.dout[place_.stage];
        ptx::barrier_wait(&slot.empty, place_.parity ^ 1);  // every lane for itself, if every lane writes there
        if (lane_ == 0) {
            ptx::Barrier* const barrier = cuts ? &smem_.patch : &slot.full;
            ptx::barrier_arrive_expect(barrier, 2 * sizeof(q));
            const int row = sequence.first_q + at.row, batch = batch_of(sequence);
            load(q, maps_.q, barrier, row, at.head, batch);
            load(dout, maps_.dout, barrier, row, at.head, batch);
        }
        if (!cuts) return;
        await_patch();
        clear_behind(q, existing);
        clear_behind(dout, existing);
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&slot.full);
    }

    /// K or V of an item.
    template <class Rows>
    __device__ __forceinline__ void load_keys(Rows& rows, const TensorMap& map, Slot& slot, unsigned parity,
                                              const Item& item) {
        const Sequences& sequences = problem_.forward.sequences;
        const int used = item.sequence.seqlen_k - item.first_key;
        const bool cuts = kPacked && (sequences.cu_seqlens_k || sequences.seqused_k) && used < Tile::kKeys;
        if (lane_ > 0 && !cuts) return;
        ptx::barrier_wait(&slot.empty, parity ^ 1);
        if (lane_ == 0) {
            ptx::Barrier* const barrier = cuts ? &smem_.patch : &slot.full;
            ptx::barrier_arrive_expect(barrier, sizeof(Rows));
            load(rows, map, barrier, item.keys.row, item.keys.head, batch_of(item.sequence));
        }
        if (!cuts) return;
        await_patch();
        clear_behind(rows, used);
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&slot.full);
    }

    template <class Rows>
    __device__ __forceinline__ void load(Rows& rows, const TensorMap& map, ptx::Barrier* barrier, int row, int head,
                                         int batch) const {
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i)
            ptx::tensor_load(rows.panel[i], &map, barrier, {64 * i, row, head, batch});
    }
    __device__ __forceinline__ int batch_of(const Sequence& sequence) const {
        return kPacked && problem_.forward.sequences.cu_seqlens_q ? 0 : sequence.index;
    }

    // Rows that are not the sequence's, or not in use, must not meet weights of 0: they may be infinite. Behind a
    // tensor's end the copy itself writes zeros, but behind a sequence's end it finds other rows.
    __device__ __forceinline__ void await_patch() {
        ptx::barrier_wait(&smem_.patch, patch_parity_);
        patch_parity_ ^= 1;
    }
    template <class Rows>
    __device__ __forceinline__ void clear_behind(Rows& rows, int count) const {
        constexpr int kVectors = 64 / 8;  // of 16 bytes in a row of a panel
        constexpr int kAll = static_cast<int>(sizeof(rows.panel[0]) / sizeof(uint4));
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i)
            for (int vector = count * kVectors + lane_; vector < kAll; vector += 32)
                reinterpret_cast<uint4*>(rows.panel[i])[vector] = uint4{};
    }

    static constexpr bool kPacked = includes(kProblems, Problems::kPacked),
                          kRanged = includes(kProblems, Problems::kModified), kFolds = folds_facts<Tile, kProblems>();

    const Problem& problem_;
    const Maps& maps_;
    SharedMemory<Tile>& smem_;
    const int lane_;
    RingPlace<Tile::kPlans> plan_;
    RingPlace<Tile::kKeyStages> keys_;
    RingPlace<Tile::kValueStages> values_;
    RingPlace<Tile::kStages> place_;
    int facts_ = 0, group_before_ = 0;  // place of the next facts; the group of rows of the facts before
    unsigned patch_parity_ = 0;
};

}  // namespace flash_wmma::backward::wgmma
