// The producer of bwd_sm90: the copies of items' keys, and what is to be known of their tiles of queries.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/copies.cuh"
#include "backward/wgmma/finish_beside.cuh"
#include "backward/wgmma/planner.cuh"
#include "backward/wgmma/prepare_beside.cuh"
#include "backward/wgmma/turns.cuh"
#include "device/constants.cuh"

namespace flash_wmma::backward::wgmma {

/// Whether rows are prepared, which a warp waits for if that is done beside products.
class Prepared {
  public:
    __device__ __forceinline__ explicit Prepared(const Problem& problem) : problem_(problem), all_(!problem.prepared) {}
    __device__ __forceinline__ bool all() const { return all_; }
    /// All rows of an item's heads.
    __device__ __forceinline__ void await_heads(const Item& item) {
        all_ = wgmma::await_heads(problem_, item.sequence.index, item.head, item.heads);
    }
    /// The rows of so many of an item's tiles, from tile number `first` on. Each lane waits for those of one.
    template <class Tile>
    __device__ __forceinline__ void await_tiles(const Item& item, int first, int count) {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        if (lane < min(count, item.tiles - first)) {
            const QueryPlace at = QueryPlace::of<Tile>(item, first + lane);
            const Sequence& of = item.sequence;
            await_rows(problem_, of.index, at.head, at.row, min(at.row + Tile::kQueries, of.seqlen_q));
        }
        all_ = share_prepared(problem_);
    }

  private:
    const Problem& problem_;
    bool all_;
};

/// One warp: copies K and V of each item, and L and D of its tiles, each as soon as its place is empty. Another one
/// copies Q and dO (copies.cuh).
template <class Tile, Problems kProblems, Pass kPass>
class Producer : CopyingWarp<SharedMemory<Tile>, kProblems> {
    using Base = CopyingWarp<SharedMemory<Tile>, kProblems>;
    using Base::problem_, Base::smem_, Base::lane_;
    using Plan = Planner<Tile, kProblems, kPass>;

  public:
    __device__ __forceinline__ Producer(const Problem& problem, const Maps& maps, SharedMemory<Tile>& shared)
        : Base(problem, shared, shared.key_patch), maps_(maps), prepared_(problem) {}

    __device__ __forceinline__ void run(int items, const Workers& workers) {
        if (lane_ == 0) ptx::prefetch(&maps_.k), ptx::prefetch(&maps_.v);
        if constexpr (plans_ahead<kPass>()) {
            each_item<Tile>(smem_, [&](const Item& item) { load_item(item); });
        } else {
            for (Plan plan(problem_, smem_, items, workers);; plan.take_next()) {
                const Item item = plan.say_item();
                if (item.tiles < 0) return;
                if (item.tiles > 0) load_item(item);
                if (kPass == Pass::kTurns && tiles_ > 0) await_copies(tiles_ - 1);
            }
        }
    }

  private:
    /// Issues an item's copies. If there is one place for V, L and D of the first tile do not wait for it. Where heads
    /// share keys, rows that are prepared meanwhile are awaited for some tiles at a time.
    __device__ __forceinline__ void load_item(const Item& item) {
        constexpr bool kValuesLate = Tile::kValueStages == 1 && first_tile_apart<Tile, kProblems>();
        const bool by_tiles = !Tile::kTwoRoles && !prepared_.all() && item.heads > 1;
        if (!by_tiles && !prepared_.all()) prepared_.await_heads(item);
        const RowsCopy own{smem_.k[keys_.stage]};
        Slot& slot = smem_.key_slot[keys_.stage];
        if constexpr (Tile::kPaired) {
            const int rank = static_cast<int>(ptx::cluster_rank()), ahead = rank > 0 ? -Tile::kKeys : Tile::kKeys;
            auto& peer = smem_.pair.k;
            load_keys(maps_.k, slot, keys_.parity, item, own, RowsCopy{peer, ahead, 64 * peer.kPanels * rank});
        } else {
            load_keys(maps_.k, slot, keys_.parity, item, own);
        }
        keys_.advance();
        if constexpr (!kValuesLate) load_values(item);
        constexpr int kAwaited = Tile::kTilesAtOnce < 8 ? Tile::kTilesAtOnce : 8;  // about a tile of each head
        const int at_once = by_tiles ? kAwaited : Tile::kTilesAtOnce;
        for (int first = 0; first < item.tiles; first += at_once) {
            if (by_tiles && !prepared_.all()) prepared_.template await_tiles<Tile>(item, first, kAwaited);
            load_facts(item, first, at_once, kValuesLate && first == 0);
        }
    }
    __device__ __forceinline__ void load_values(const Item& item) {
        load_keys(maps_.v, smem_.value_slot[values_.stage], values_.parity, item, RowsCopy{smem_.v[values_.stage]});
        values_.advance();
    }

    /// What is to be known of `at_once` tiles of queries, from the item's tile `first` on. Each lane finds it out of
    /// one tile: what the lanes then do tile by tile is on the way of the products, and needs few registers.
    ///
    /// The place of L and D is empty when the copies of the tile two before were asked for: the tile four before, which
    /// was there, has left Q's place to these. When this begins, copies of the tile three before the first were asked
    /// for, so that the tile five before is done, whose dQ is late by one more; or in a pair, where dO leaves early,
    /// the tile six before.
    __device__ __forceinline__ void load_facts(const Item& item, int first, int at_once, bool then_values) {
        const Sequence& sequence = item.sequence;
        const int count = min(at_once, item.tiles - first), own = min(lane_, count - 1);
        const QueryPlace at = QueryPlace::of<Tile>(item, first + own);
        const int group = static_cast<int>(first_group(problem_, sequence, at.head)) + at.row / kRowGroup;
        const int existing = min(Tile::kQueries, sequence.seqlen_q - at.row);
        const int rows = (existing + kRowGroup - 1) / kRowGroup * kRowGroup;
        const int before = __shfl_up_sync(kWarpMask, group, 1), last = __shfl_sync(kWarpMask, group, count - 1);
        if (lane_ < count) {
            TileFacts tile{group - (own == 0 ? group_before_ : before), at.row, existing, {}};
            constexpr int kShares = skips_hidden_tiles<Tile, kPass>() ? Tile::kConsumers : 1,
                          kKeys = Tile::kKeys / kShares;
#pragma unroll
            for (int i = 0; i < kShares; ++i) {
                const int first_key = item.first_key + kKeys * i;
                tile.seen[i] = seen(item, at, existing, first_key, first_key + kKeys - 1);
            }
            smem_.tile[(tiles_ + static_cast<unsigned>(own)) % Tile::kTilesTold] = tile;
        }
        group_before_ = last;
        const unsigned ends = __ballot_sync(kWarpMask, rows < Tile::kQueries);
        const void* const from = facts_from(sequence, at, group);
        const int takes_next = max(item.tiles - kTilesAhead, 0) - first;  // with which tile of these
#pragma unroll 1
        for (int i = 0; i < count; ++i, ++tiles_) {
            __syncwarp();  // no lane misses a phase
            if (tiles_ >= 2) await_copies(tiles_ - 2);
            const unsigned place = tiles_ % Tile::kTileFacts;
            QueryFacts<Tile>& facts = smem_.facts[place];
            if (ends >> i & 1) {
                clear_behind_last_group(facts, __shfl_sync(kWarpMask, rows, i));
                ptx::fence_proxy_async();  // the copy comes behind these writes, and products read them
                __syncwarp();
            }
            if (lane_ == i) {
                const auto bytes = static_cast<unsigned>(rows * facts_bytes(kFolds));
                ptx::Barrier* const full = &smem_.facts_full[place];
                ptx::barrier_arrive_expect(full, bytes);
                ptx::bulk_load(&facts, from, bytes, full);
            }
            if (then_values && i == 0) load_values(item);
            if (plans_ahead<kPass>() && lane_ == 0 && i == takes_next) ptx::barrier_arrive(&smem_.take_next);
        }
    }
    /// Waits until copies of a tile's Q and dO were asked for.
    __device__ __forceinline__ void await_copies(unsigned tile) {
        ptx::barrier_wait(&smem_.under_way[tile % Tile::kTileFacts], tile / Tile::kTileFacts % 2);
    }
    /// L and D of a tile.
    __device__ __forceinline__ const void* facts_from(const Sequence& sequence, const QueryPlace& at, int group) const {
        if constexpr (kFolds) return terms_of(problem_, sequence, at.head, at.row / kRowGroup);
        else return problem_.facts + std::int64_t{group} * (kRowGroup / 2);
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

    /// How much a tile's queries, of which so many exist, see of some of the item's keys.
    __device__ __forceinline__ Seen seen(const Item& item, const QueryPlace& at, int existing, int first_key,
                                         int last_key) const {
        const bool all = item.mask.all_visible(at.row, at.row + Tile::kQueries - 1, first_key, last_key);
        if constexpr (includes(kProblems, Problems::kModified))
            if (problem_.extents) return seen_by_ranges(item, at, existing, first_key, last_key, all);
        if (all) return Seen::kAll;
        const bool none = skips_hidden_tiles<Tile, kPass>() &&
                          !item.mask.some_visible(at.row, at.row + existing - 1, first_key, last_key);
        return none ? Seen::kNone : Seen::kSome;
    }
    /// With ranges. `all`: without them the queries see all keys.
    __device__ __forceinline__ Seen seen_by_ranges(const Item& item, const QueryPlace& at, int existing, int first_key,
                                                   int last_key, bool all) const {
        const RowGroupMask mask(problem_, item.sequence, at.head);
        bool none = true;
        for (int row = at.row; row < at.row + existing; row += kRowGroup) {
            all &= mask.all_visible(row, row + kRowGroup - 1, first_key, last_key);
            none &= !mask.some_visible(row, row + kRowGroup - 1, first_key, last_key);
        }
        return all ? Seen::kAll : none ? Seen::kNone : Seen::kSome;
    }

    /// K or V of an item, to one or two places that are full together.
    template <class... Copies>
    __device__ __forceinline__ void load_keys(const TensorMap& map, Slot& slot, unsigned parity, const Item& item,
                                              const Copies&... copies) {
        const KeyTile& keys = item.keys;
        this->copy_keys(map, slot, parity, item.sequence.seqlen_k - item.first_key, {keys.row, keys.head, keys.batch},
                        copies...);
    }

    static constexpr bool kFolds = folds_facts<Tile, kProblems>();

    const Maps& maps_;
    Prepared prepared_;
    RingPlace<Tile::kKeyStages> keys_;
    RingPlace<Tile::kValueStages> values_;
    unsigned tiles_ = 0;    // whose facts were asked for
    int group_before_ = 0;  // the group of rows of the facts before
};

// ---- Warpgroup 0 ----------------------------------------------------------------------------------------------------

/// How many warps of warpgroup 0 follow the plan: that of Q and dO, the producer if another one plans, two if blocks
/// take turns, one if items are counted.
template <class Tile, Pass kPass>
__device__ __forceinline__ unsigned plan_followers(const Problem& problem) {
    return kPass == Pass::kTurns ? 3 : 1 + plans_ahead<kPass>() + counts_items<Tile, kPass>(problem);
}

/// Prepares the barriers of what it copies, but for the slots.
template <class Tile>
__device__ __forceinline__ void prepare_copies(SharedMemory<Tile>& smem) {
    for (ptx::Barrier* const patch : {&smem.key_patch, &smem.query_patch}) ptx::barrier_init(patch, 1);
    for (auto& barrier : smem.facts_full) ptx::barrier_init(&barrier, 1);
    for (auto& barrier : smem.under_way) ptx::barrier_init(&barrier, 1);
    ptx::barrier_init(&smem.take_next, 1);
}

template <class Tile, Problems kProblems, Pass kPass>
__device__ __forceinline__ void serve(const Problem& problem, const Maps& maps, SharedMemory<Tile>& smem, int items,
                                      const Workers& workers) {
    if (threadIdx.x < 32) Producer<Tile, kProblems, kPass>(problem, maps, smem).run(items, workers);
    else if (threadIdx.x < 64) QueryCopies<Tile, kProblems>(problem, maps, smem).run();
    else if constexpr (kPass == Pass::kTurns) keep_turns(problem, smem);
    else if constexpr (plans_ahead<kPass>()) {
        if (threadIdx.x >= 96) Planner<Tile, kProblems, kPass>(problem, smem, items, workers).run();
        else if constexpr (can_count_items<Tile, kPass>())
            if (problem.added) count_items(problem, smem);
    }
}

}  // namespace flash_wmma::backward::wgmma
