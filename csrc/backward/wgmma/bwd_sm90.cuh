// bwd_sm90: FlashAttention-2 backward on Hopper's own instructions: tensor copies (TMA), transaction barriers, wgmma.
//
// Algorithm: as in backward/mma/kernel.cuh, the fused pass. Blocks are persistent and take items from a queue. An item
// is 128 keys of a key/value head; the block streams over the tiles of queries that see them, of all query heads that
// share the keys:
//     S^T = K Q^T;  P = exp2(S * scale - L);  dP^T = V dO^T;  dS = P (dP - D)
//     dV += P^T dO;  dK += dS^T Q;  dQ += dS K.
//
// Roles: one warp of warpgroup 0 says what the next item is (planner.cuh; in some passes the producer does); the
// producer copies its K and V and what is to be known of its tiles of queries (producer.cuh); another copies Q and dO
// of these (copies.cuh); a fourth may count items whose dQ has been added (finish_beside.cuh). Each of two consumer
// warpgroups owns 64 keys, each of its warps 16 of them. S^T and dP^T have keys as rows, so that P and dS go from the
// accumulators to the first operand of dV and dK in registers. dS also goes to shared memory, for dQ. dK and dV leave
// through shared memory, while the next item begins (stage).
//
// dQ, one tile late: while a consumer works on a tile, it computes its part of dQ of the tile before, whose dS both
// consumers have stored in the meantime. So no consumer waits for the other as a rule, and dQ's additions run beside
// the products of dV and dK. The additions go from the accumulators, in the order of the registers, to the fp32 buffer
// (device/backward_rows.cuh).
//
// Shared memory: rings of K and V of items, of tiles of Q and dO, of L and D, of what else is to be known of these
// tiles (the mask, where dQ goes), of tiles of dS, and of items. Each place has a barrier that says it is full and one
// that says it is empty.
//
// The additions to dQ keep the load and store unit busy: what comes behind them waits, in every warp of the SM. So
// warpgroup 0 needs hardly any local memory for a tile. And L and D are not loaded, but terms of the products
// (query_facts.cuh); where they cannot be, L of the next tile is loaded before the additions, if there are registers
// for it. And dS is stored before the products that follow it, or their operands' reads slow it.
//
// Blocks may take turns at dQ: turns.cuh. d above 128: two_roles.cuh. Without dQ, which another pass computes
// (Pass::kKeys): two_passes.cuh; there a consumer skips tiles that see none of its keys. Items that several
// blocks share: parts.cuh. What changes or hides scores beyond a band, in instances of their own: score_changes.cuh.
// Rows that are prepared meanwhile, and heads that become dq: prepare_beside.cuh, finish_beside.cuh.
//
// Bound: tensor cores, shared memory and, at d = 64, dQ's additions (32 KB a tile, half of its time): docs/tuning.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/consumer.cuh"
#include "backward/wgmma/launch.cuh"
#include "backward/wgmma/producer.cuh"
#include "backward/wgmma/shapes.h"
#include "backward/wgmma/turns.cuh"
#include "device/staged_rows.cuh"

namespace flash_wmma::backward::wgmma {

// ---- Consumers ------------------------------------------------------------------------------------------------------

/// One warpgroup with its 64 keys.
template <class Tile, Problems kProblems, Pass kPass>
class Consumer : ConsumerWarp<Tile> {
    using Asked = Asks<Tile, kProblems, kPass>;
    static constexpr bool kDrops = Asked::kDrops, kFirstApart = first_tile_apart<Tile, kProblems>();
    static constexpr bool kComputesDq = kPass != Pass::kKeys, kSkips = skips_hidden_tiles<Tile, kPass>();
    using Base = ConsumerWarp<Tile>;
    using Base::problem_, Base::group_, Base::warp_, Base::lane_, Base::kQueries, Base::told, Base::tell;
    using typename Base::T;
    using Kept = KeptTile<true, 16, kQueries>;
    static_assert(!Tile::kStagesRows || kFirstApart);  // whose code waits for the stores
    static_assert(!kComputesDq || Tile::kSharesQueries ||
                  (Tile::kQueryPanels == 1 && Tile::kPanels == Tile::kConsumers));

  public:
    __device__ __forceinline__ Consumer(const Problem& problem, const Maps& maps, SharedMemory<Tile>& shared)
        : Base(problem, uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads - 1)),
          maps_(maps),
          smem_(shared),
          dropout_(problem.forward.dropout),
          changes_(problem),
          facts_(lane_),
          dq_place_(problem.dq_rows + 4 * lane_ +
                    DqFragment::offset(first_row() + 16 * warp_, first_column(),
                                       static_cast<int>(problem.forward.head_dim))) {}

    __device__ __forceinline__ void run() {
        if constexpr (kComputesDq) {
            // A tile before the first: its dS is 0 and its dQ goes nowhere, so that all tiles are treated alike
#pragma unroll
            for (auto& four : ds_)
#pragma unroll
                for (std::uint32_t& word : four) word = 0;
            store_ds(0);
        }
        unsigned tile = 0, late_item = 0, item = 0;  // how many there were; items: those with tiles
        for (RingPlace<Tile::kPlans> plan;; plan.advance()) {
            Slot& slot = smem_.plan_slot[plan.stage];
            ptx::barrier_wait(&slot.full, plan.parity);
            const Item& work = smem_.plan[plan.stage];
            const int tiles = told(work.tiles);
            if (tiles < 0) break;
            if (tiles > 0) {
                ptx::barrier_wait(&smem_.key_slot[item % Tile::kKeyStages].full, item / Tile::kKeyStages % 2);
                if constexpr (!kFirstApart) {
                    await_values(item);
                    dk_.clear();
                    dv_.clear();
                }
                place_.begin(work);
                unsigned places = places_of(tile, item, late_item);
                look_at(places % 64);
                int left = tiles;
                if constexpr (kComputesDq) {
                    if constexpr (kFirstApart) work_on_tile<true>(work, places, left-- == 1);
#pragma unroll 1
                    for (; left > 0; --left) work_on_tile<false>(work, places, left == 1);
                } else {
                    if constexpr (kFirstApart) add_tile<true>(work, places, left-- == 1);
#pragma unroll 1
                    for (; left > 0; --left) {
                        if (kSkips && next_is_hidden_) skip_tile(work, places, left == 1);
                        else add_tile<false>(work, places, left == 1);
                    }
                }
                tile += static_cast<unsigned>(tiles), late_item = item++;
                if (!takes_parts<Tile, kProblems, kPass>() || told(work.split) < 0 || join_parts(work))
                    store(told(work.keys), tile + 1);
            } else {
                store_zeros(told(work.keys));
            }
            tell(slot.empty);
        }
        if (item == 0) return;
        await_stores();
        if constexpr (kComputesDq) {
            await_ds(tile);
            ptx::wgmma_fence();
            multiply_dq(tile, late_item);
            ptx::wgmma_wait<0>();
            bring_late_dq(move_on({}), tile);
            tell_added(late_item);
        }
    }

  private:
    /// What is known of a tile whose P there is.
    struct Weighed {
        QueryPlace at;
        Seen seen;
        int late_rows = 0;  // of the tile before
        Kept kept;
    };

    /// The places of a tile in the rings, of its K and V, and of K for the late dQ. In a register of the warp:
    /// descriptors come from there.
    __device__ __forceinline__ static unsigned places_of(unsigned tile, unsigned item, unsigned late_item) {
        static_assert(kAddedBarriers == 4 && 64 % (2 * Tile::kDsStages) == 0 && 64 % (2 * Tile::kStages) == 0 &&
                      64 % Tile::kTilesTold == 0 && Tile::kKeyStages == 2 && 4 % (2 * Tile::kValueStages) == 0);
        return in_uniform_register(tile % 64 | item % 4 << 6 | late_item % 2 << 8);
    }

    /// Waits for a tile and issues its S.
    __device__ __forceinline__ void begin_tile(unsigned places) {
        const unsigned tile = places % 64, item = places >> 6 & 3;
        ptx::barrier_wait(&smem_.slot[tile % Tile::kStages].full, tile / Tile::kStages % 2);
        ptx::wgmma_fence();
        facts_.begin_scores(s_, facts_of(tile));
        this->multiply_rows(s_, smem_.k[item % Tile::kKeyStages], smem_.q[tile % Tile::kStages], facts_.kFolded);
    }

    /// P of a tile whose S was issued, and its dP. `last` of the item. kBegins: the item's first, whose V may not be
    /// there yet.
    template <bool kBegins>
    __device__ __forceinline__ Weighed weigh_tile(const Item& work, unsigned places, bool last) {
        const unsigned tile = places % 64, item = places >> 6 & 3;
        Weighed weighed;
        if constexpr (kBegins) await_values(item);
        facts_.begin_dp(dp_, facts_of(tile));
        this->multiply_rows(dp_, smem_.v[item % Tile::kValueStages], smem_.dout[tile % Tile::kStages], facts_.kFolded);

        const TileFacts& of_tile = smem_.tile[tile % Tile::kTilesTold];
        weighed.at = place_.take(work);
        if (dropout_.drops()) {  // beside the products: between waits, if only for what is there, ptxas leaves it there
            await_facts(tile);
            weighed.kept = dropout_.kept(work, weighed.at, this->warp_key());
            await_facts(tile);
        }
        ptx::wgmma_wait<1>();
        if (!Tile::kLooksAhead) facts_.load_lse(facts_of(tile));
        this->weigh(s_, facts_, changes_.apply(s_, this->scores_place(work, weighed.at)));
        if (Tile::kLooksAhead) facts_.load_delta(facts_of(tile));
        const Seen seen = weighed.seen = seen_of(of_tile);
        if constexpr (kComputesDq) weighed.late_rows = move_on(of_tile);
        if (seen != Seen::kAll && !changes_.hide(s_, this->scores_place(work, weighed.at)))
            this->hide(s_, work, of_tile.first_query);
        ptx::wgmma_wait<0>();
        if (!Tile::kLooksAhead) facts_.load_delta(facts_of(tile));
        if (last) {
            tell(smem_.value_slot[item % Tile::kValueStages].empty);
            if constexpr (!kComputesDq) tell(smem_.key_slot[item % Tile::kKeyStages].empty);
        }
        return weighed;
    }
    /// P and dS as operands.
    __device__ __forceinline__ void differentiate_tile(const Item& work, const Weighed& weighed) {
        if (dropout_.drops()) this->differentiate(dp_, s_, facts_, weighed.kept);
        else this->differentiate(dp_, s_, facts_);
        changes_.follow_back(dp_, this->scores_place(work, weighed.at), weighed.seen);
        this->pack(p_, s_);
        this->pack(ds_, dp_);
    }

    /// Everything for a tile but its dQ, and dQ of the tile before. `last` of the item. `places`
    /// become those of the item's next tile. kBegins: as of weigh_tile, and dK and dV are not added to anything.
    template <bool kBegins>
    __device__ __forceinline__ void work_on_tile(const Item& work, unsigned& places, bool last) {
        const unsigned tile = places % 64, item = places >> 6 & 3, late_item = places >> 8;
        begin_tile(places);
        const Weighed weighed = weigh_tile<kBegins>(work, places, last);
        differentiate_tile(work, weighed);

        if constexpr (kBegins) await_stores();
        if constexpr (Tile::kStoresFirst) store_ds(tile + 1);
        await_ds(tile);
        ptx::wgmma_fence();
        multiply_dq(tile, late_item);
        this->multiply_weights(dv_, p_, smem_.dout[tile % Tile::kStages], !kBegins);
        if constexpr (!Tile::kStoresFirst) store_ds(tile + 1);
        this->multiply_weights(dk_, ds_, smem_.q[tile % Tile::kStages], !kBegins);
        places = places_of(tile + 1, item, item);  // beside the products
        if (!last) look_at(places % 64);
        ptx::wgmma_wait<2>();
        tell(smem_.ds_slot[tile % Tile::kDsStages].empty);
        bring_late_dq(weighed.late_rows, tile);
        ptx::wgmma_wait<0>();
        tell(smem_.slot[tile % Tile::kStages].empty);
        if ((kBegins || !kFirstApart) && late_item != item % Tile::kKeyStages) {
            tell(smem_.key_slot[late_item].empty);
            tell_added(item + kAddedBarriers - 1);  // late_item's
        }
    }

    /// The same without dQ.
    template <bool kBegins>
    __device__ __forceinline__ void add_tile(const Item& work, unsigned& places, bool last) {
        const unsigned tile = places % 64, item = places >> 6 & 3;
        begin_tile(places);
        const Weighed weighed = weigh_tile<kBegins>(work, places, last);
        differentiate_tile(work, weighed);
        ptx::wgmma_fence();
        this->multiply_weights(dv_, p_, smem_.dout[tile % Tile::kStages], !kBegins);
        this->multiply_weights(dk_, ds_, smem_.q[tile % Tile::kStages], !kBegins);
        places = places_of(tile + 1, item, item);  // beside the products
        if (!last) look_at(places % 64);
        ptx::wgmma_wait<0>();
        tell(smem_.slot[tile % Tile::kStages].empty);
    }

    /// Skips a tile whose queries see none of the warpgroup's keys. `last` of the item.
    __device__ __forceinline__ void skip_tile(const Item& work, unsigned& places, bool last) {
        const unsigned tile = places % 64, item = places >> 6 & 3;
        Slot& slot = smem_.slot[tile % Tile::kStages];
        ptx::barrier_wait(&slot.full, tile / Tile::kStages % 2);
        tell(slot.empty);
        if (last) {
            tell(smem_.value_slot[item % Tile::kValueStages].empty);
            tell(smem_.key_slot[item % Tile::kKeyStages].empty);
        }
        place_.take(work);
        places = places_of(tile + 1, item, item);
        if (!last) look_at(places % 64);
    }
    /// How much a tile's queries see of the keys in question.
    __device__ __forceinline__ Seen seen_of(const TileFacts& tile) const { return tile.seen[kSkips ? group_ : 0]; }

    /// Loads L of a tile, where there are registers for it, before the additions to dQ, which keep loads waiting.
    __device__ __forceinline__ void look_at(unsigned tile) {
        await_facts(tile);
        if (Tile::kLooksAhead) facts_.load_lse(facts_of(tile));
        if constexpr (kSkips) {
            const Seen seen = seen_of(smem_.tile[tile % Tile::kTilesTold]);
            next_is_hidden_ = uniform(static_cast<int>(seen)) == static_cast<int>(Seen::kNone);
        }
    }
    __device__ __forceinline__ void await_values(unsigned item) {
        ptx::barrier_wait(&smem_.value_slot[item % Tile::kValueStages].full, item / Tile::kValueStages % 2);
    }
    __device__ __forceinline__ void await_facts(unsigned tile) {
        ptx::barrier_wait(&smem_.facts_full[tile % Tile::kTileFacts], tile / Tile::kTileFacts % 2);
    }
    __device__ __forceinline__ const QueryFacts<Tile>& facts_of(unsigned tile) const {
        return smem_.facts[tile % Tile::kTileFacts];
    }

    /// dS^T to shared memory. `n`: how many dS were stored before.
    __device__ __forceinline__ void store_ds(unsigned n) {
        Slot& slot = smem_.ds_slot[n % Tile::kDsStages];
        ptx::barrier_wait(&slot.empty, n / Tile::kDsStages % 2 ^ 1);
        this->store_weights(smem_.ds[n % Tile::kDsStages], ds_);
        ptx::fence_proxy_async();
        tell(slot.full);
    }
    /// Waits until both consumers have stored dS number n.
    __device__ __forceinline__ void await_ds(unsigned n) {
        ptx::barrier_wait(&smem_.ds_slot[n % Tile::kDsStages].full, n / Tile::kDsStages % 2);
    }

    /// Issues this warpgroup's part of dQ = dS K, of dS number n.
    __device__ __forceinline__ void multiply_dq(unsigned n, unsigned item) {
        const auto& ds = smem_.ds[n % Tile::kDsStages];
        const auto& k = smem_.k[item % Tile::kKeyStages];
        const ptx::SharedMatrix<ptx::Major::N> a(ds.panel[Tile::kSharesQueries ? group_ : 0]),
            b(k.panel[Tile::kSharesQueries ? 0 : group_], sizeof(k.panel[0]));
#pragma unroll
        for (int step = 0; step < Tile::kKeys / 16; ++step)
            ptx::wgmma<T, Tile::kDqColumns>(dq_.flat(), a + 16 * 128 * step, b + 16 * 128 * step, step > 0);
        ptx::wgmma_commit();
    }

    /// Moves on in dQ's buffer by a tile, to the one before this. How many of its rows exist.
    __device__ __forceinline__ int move_on(const TileFacts& tile) {
        const int rows = late_rows_;
        dq_place_ += dq_step(problem_, late_step_);
        late_step_ = tile.groups, late_rows_ = tile.rows;
        return rows;
    }
    __device__ __forceinline__ int first_row() const { return Tile::kSharesQueries ? 64 * group_ : 0; }
    __device__ __forceinline__ int first_column() const { return Tile::kSharesQueries ? 0 : 64 * group_; }

    /// Adds dQ of tile n - 1 to the buffer: in its turn, if blocks take turns. Before the first tile: no rows, and 0
    /// times K.
    __device__ __forceinline__ void bring_late_dq(int rows, unsigned n) {
        const auto add = [&] {
            const int columns = static_cast<int>(problem_.forward.head_dim) - first_column();
            if (rows > first_row() && columns > 0) this->add(dq_place_, dq_, columns);
        };
        if constexpr (kPass == Pass::kTurns) {
            if (rows == 0) return;
            Slot& slot = smem_.turns.slot[(n - 1) % 2];
            ptx::barrier_wait(&slot.full, (n - 1) / 2 % 2);
            add();
            tell(slot.empty);
        } else {
            add();
        }
    }

    /// Says that all of an item's dQ has been added, where items are counted.
    __device__ __forceinline__ void tell_added(unsigned item) const {
        if constexpr (can_count_items<Tile, kPass>())
            if (problem_.added) tell(smem_.added[item % kAddedBarriers]);
    }

    /// Of an item with parts: whether this is the last one, whose dK and dV are then those of all.
    __device__ __forceinline__ bool join_parts(const Item& work) {
        PartSums sums = PartSums::of<Tile>(problem_.parts, told(work.split), 4 * group_ + warp_, lane_);
        const bool ends = told(work.ends) != 0;
        if (ends) sums.take(dk_, dv_, problem_.parts.each - 1);
        else sums.add(dk_, dv_);
        return ends;
    }
    /// Writes dK and dV. `next`: which dS is stored next.
    __device__ __forceinline__ void store(const KeyTile& keys, [[maybe_unused]] unsigned next) const {
        const ForwardParams& p = problem_.forward;
        if constexpr (Tile::kStagesRows) {
            // The engine does not see where a packed sequence ends
            const bool whole = keys.rows >= this->warp_key() + Tile::kWarpKeys;
            if (!includes(kProblems, Problems::kPacked) || !p.sequences.cu_seqlens_k || whole) return stage(keys, next);
        }
        Base::store(problem_.dk, keys, p.head_dim, dk_, p.scale * this->template unscaled<kDrops>());
        Base::store(problem_.dv, keys, p.head_dim_v, dv_, this->template unscaled<kDrops>());
    }
    /// The same by the copy engine, by two panels at a time, dV before dK. One panel is the place of dS that the next
    /// item's first tile will need, which both consumers have read; the other one lies there too, if a tile of dS has
    /// two panels, or is for these rows alone. Without dQ there is no dS, and its place is for these rows.
    __device__ __forceinline__ void stage(const KeyTile& keys, unsigned next) const {
        const ForwardParams& p = problem_.forward;
        const int first = this->warp_key();
        T* panel[2];
        if constexpr (kComputesDq)
            ptx::barrier_wait(&smem_.ds_slot[next % Tile::kDsStages].empty, next / Tile::kDsStages % 2 ^ 1);
        auto& ds = smem_.ds[next % Tile::kDsStages];
        panel[0] = ds.panel[0];
        if constexpr (Tile::kQueryPanels > 1) panel[1] = ds.panel[1];
        else panel[1] = smem_.staged.panel;
        constexpr int kCount = 2 * Tile::kPanels;  // of dV, then of dK
#pragma unroll
        for (int i = 0; i < kCount; i += 2) {
            if (i > 0 || !kComputesDq) await_stores();
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const bool values = i + j < Tile::kPanels;
                const float factor = (values ? 1.f : p.scale) * this->template unscaled<kDrops>();
                stage_rows(panel[j], first, values ? dv_ : dk_, 64 * ((i + j) % Tile::kPanels), lane_,
                           [&](int, float x, float y) { return packed<T>(x * factor, y * factor); });
            }
            ptx::fence_proxy_async();
            __syncwarp();
            if (lane_ > 0 || first >= keys.rows) continue;
            const int batch = batch_in_maps<kProblems>(problem_.forward.sequences, keys.batch);
#pragma unroll
            for (int j = 0; j < 2; ++j) {
                const bool values = i + j < Tile::kPanels;
                const int column = 64 * ((i + j) % Tile::kPanels);
                if (column < (values ? p.head_dim_v : p.head_dim))
                    ptx::tensor_store(values ? &maps_.dv : &maps_.dk, panel[j] + 64 * first,
                                      {column, keys.row + first, keys.head, batch});
            }
            ptx::store_commit();
        }
    }
    /// Waits until what stage() wrote to shared memory has been read.
    __device__ __forceinline__ void await_stores() const {
        if constexpr (Tile::kStagesRows) {
            if (lane_ == 0) ptx::store_wait_read<0>();
            __syncwarp();
        }
    }
    /// The gradients of keys that no query sees.
    __device__ __forceinline__ void store_zeros(const KeyTile& keys) const {
        Base::store_zeros(problem_.dk, keys, problem_.forward.head_dim);
        Base::store_zeros(problem_.dv, keys, problem_.forward.head_dim_v);
    }

    const Maps& maps_;
    SharedMemory<Tile>& smem_;
    typename Base::Scores s_, dp_;   // scores, then P; dP, then dS
    typename Base::Weights p_, ds_;  // as operands
    typename Base::Gradient dk_, dv_;
    RegisterTile<16, Tile::kDqColumns> dq_;
    typename Asked::Place place_;
    typename Asked::Dropout dropout_;
    typename Asked::Changes changes_;
    typename Asked::Facts facts_;
    bool next_is_hidden_ = false;        // whether the warpgroup skips the next tile
    float* dq_place_;                    // this lane's place in dQ's buffer
    int late_step_ = 0, late_rows_ = 0;  // of the tile before
};

/// Prepares the barriers of a block. One thread.
template <class Tile, Pass kPass>
__device__ __forceinline__ void prepare_block(const Problem& problem, SharedMemory<Tile>& smem) {
    constexpr unsigned kWarps = 4 * Tile::kConsumers;  // each arrives for itself
    prepare_slots(smem.plan_slot, 1, kWarps + plan_followers<Tile, kPass>(problem));
    prepare_slots(smem.key_slot, 1, kWarps);
    prepare_slots(smem.value_slot, 1, kWarps);
    prepare_slots(smem.slot, 1, kWarps);
    prepare_slots(smem.ds_slot, kWarps, kWarps);
    prepare_copies(smem);
    if constexpr (can_count_items<Tile, kPass>())
        for (auto& barrier : smem.added) ptx::barrier_init(&barrier, kWarps);
    if constexpr (kPass == Pass::kTurns) prepare_turns(smem, kWarps);
}

// spills: sm_90a: warpgroup 0, with few registers, keeps parts of an item in local memory. The consumers' loop over
// tiles has no access to local memory in plain problems; an item's first tile and its end have some 30 there. With
// dropout the loop has up to 34, in general problems some 350, many of them where one feature is at work.
// ptxas: C7519: it fences before dP's products behind the wait for V, and before dK's behind the store of dS.
template <class Tile, Problems kProblems, Pass kPass>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps, int items) {
    auto& smem = shared_memory<SharedMemory<Tile>>();
    if (counts_items<Tile, kPass>(problem)) ptx::let_next_grid_start();
    if (threadIdx.x == 0) {
        prepare_block<Tile, kPass>(problem, smem);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads) == 0) {
        ptx::release_registers<Tile::kProducerRegisters>();
        serve<Tile, kProblems, kPass>(problem, maps, smem, items, Workers::all());
    } else {
        ptx::acquire_registers<Tile::kConsumerRegisters>();
        Consumer<Tile, kProblems, kPass>(problem, maps, smem).run();
    }
    if (problem.prepared) ptx::wait_for_previous_grids();  // so that who waits for this grid waits for prepare
}

template <class Tile, Problems kProblems, Pass kPass>
Shape shape() {
    return shape_of_tile<Tile, kProblems, kPass, backward<Tile, kProblems, kPass>>();
}

constexpr TileShape counting(TileShape shape) {
    shape.counts_items = true;
    return shape;
}
/// The shapes that ship (docs/tuning/hopper_backward.md).
inline constexpr TileShape kShapes[] = {
    {.d = 64, .queries = 128, .stores_first = true, .folds_facts = true, .stages_rows = true},
    counting(
        {.d = 96, .queries = 64, .value_stages = 1, .stores_first = true, .folds_facts = true, .stages_rows = true}),
    counting(
        {.d = 128, .queries = 64, .value_stages = 1, .stores_first = true, .folds_facts = true, .stages_rows = true}),
};
/// Of plain problems: with one more for few equal items. It has to come behind its like, and before the next d, since
/// the first one that fits is taken (choose_shape).
inline constexpr TileShape kPlainShapes[] = {kShapes[0], counting(kShapes[0]), kShapes[1], kShapes[2]};
constexpr TileShape in_ring(TileShape shape) {
    shape.ring = true;
    return shape;
}
/// Of blocks that take turns.
inline constexpr TileShape kRingShapes[] = {in_ring(kShapes[0]), in_ring(kShapes[1]), in_ring(kShapes[2])};
/// Of general problems.
inline constexpr TileShape kGeneralShapes[] = {
    {.d = 64, .queries = 128, .stores_first = true},
    {.d = 128, .queries = 64, .value_stages = 1, .ds_stages = 4, .tiles_told = 8, .counts_items = true},
};
template <class T, Problems kProblems, Pass kPass, const auto& kRows = kShapes>
std::vector<Shape> shapes() {
    return of_rows<kRows>([](auto i) { return shape<Tile<T, kRows[i]>, kProblems, kPass>(); });
}

}  // namespace flash_wmma::backward::wgmma
