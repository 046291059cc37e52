// bwd_sm90 for d above 128, where dK and dV of 64 keys fit no warpgroup's registers together: two consumers with
// different products.
//
// As in bwd_sm90.cuh, blocks are persistent and take items from a queue, and warpgroup 0 has two warps that copy and
// one that plans, or two that keep turns. A block has 64 keys of an item; it walks the item in tiles of 64 queries.
// Both consumers work on all 64 keys:
//     Scores: S^T = K Q^T;  P = exp2(S * scale - L);  dP^T = V dO^T;  dS = P (dP - D);  dK += dS^T Q;
//     Values: dV += P^T dO;  dQ += dS K.
//
// P^T and dS^T go from Scores to Values through rings in shared memory, 64 x 64 each. dS^T is an operand of dK in the
// registers of Scores.
//
// The additions of dQ to the fp32 buffer (device/backward_rows.cuh) bind a block that works by itself: 256 d bytes a
// tile at about 17.5 bytes a cycle and SM. So where shared memory has room, two blocks share an item of 128 keys
// (pair.cuh): each has dS of both, and adds half of dQ's columns.
//
// dQ in parts of 64 columns, of which neighbouring ones have registers of their own: the additions of a part, which
// read their registers late, run beside the product of the next. The last part of a tile is added beside products of
// the next tile.
//
// Shared memory: K and V of one item, each copied when its readers are done with the item before. Tiles of Q and dO
// with their L and D, and P and dS, in rings of two. In a pair P and dS have one place, as have the other block's dS
// and half of the columns of its K; dO comes in halves of its columns, for which there are three places.
//
// Bound: dQ's additions, or in a pair the tensor cores (docs/tuning/hopper_backward.md).
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

namespace flash_wmma::backward::wgmma {

/// The places of a tile in the rings, in a uniform register: descriptors come from there.
template <class Tile>
struct Places {
    unsigned stage, parity;                  // of Q
    unsigned weights_stage, weights_parity;  // of P and dS
    DoutPlace<Tile> dout[Tile::kDoutParts];
    __device__ __forceinline__ static Places of(unsigned tile) {
        constexpr unsigned kRound = 12;  // after so many tiles all are as at the first
        static_assert(kRound % (2 * Tile::kStages) == 0 && kRound % (2 * Tile::kDsStages) == 0 &&
                      kRound * Tile::kDoutParts % (2 * Tile::kDoutPlaces) == 0);
        static_assert(Tile::kKeyStages == 1 && Tile::kValueStages == 1);
        const unsigned n = in_uniform_register(tile % kRound);
        Places places{n % Tile::kStages, n / Tile::kStages % 2, n % Tile::kDsStages, n / Tile::kDsStages % 2, {}};
#pragma unroll
        for (int i = 0; i < Tile::kDoutParts; ++i) places.dout[i] = DoutPlace<Tile>::of(n, i);
        return places;
    }
};

/// Calls of both roles: each item with tiles, its tiles, and items that no query sees.
template <class Tile>
class TwoRolesWarp : protected ConsumerWarp<Tile> {
  protected:
    using Base = ConsumerWarp<Tile>;
    using Base::lane_, Base::told, Base::tell;

    __device__ __forceinline__ TwoRolesWarp(const Problem& problem, SharedMemory<Tile>& shared)
        : Base(problem, 0), smem_(shared) {}

    /// on_item(work, item, first, end), with the item's number, its first tile's and that behind its last; it releases
    /// K last. unseen(keys): no query sees them.
    template <class OnItem, class Unseen>
    __device__ __forceinline__ void each_item(OnItem on_item, Unseen unseen) {
        unsigned tile = 0, item = 0;  // how many there were; items: those with tiles
        for (RingPlace<Tile::kPlans> plan;; plan.advance()) {
            Slot& slot = smem_.plan_slot[plan.stage];
            ptx::barrier_wait(&slot.full, plan.parity);
            const Item& work = smem_.plan[plan.stage];
            const int tiles = told(work.tiles);
            if (tiles < 0) break;
            if (tiles > 0) {
                ptx::barrier_wait(&smem_.key_slot[0].full, item % 2);
                on_item(work, item, tile, tile + static_cast<unsigned>(tiles));
                tile += static_cast<unsigned>(tiles), ++item;
            } else {
                unseen(told(work.keys));
            }
            tell(slot.empty);
        }
    }

    /// The slot of a part of a tile's dO.
    __device__ __forceinline__ Slot& dout_slot(const Places<Tile>& at, int part) const {
        if constexpr (Tile::kHalvesDout) return smem_.dout_slot[at.dout[part].place];
        else return smem_.slot[at.stage];
    }

    SharedMemory<Tile>& smem_;
};

// ---- Scores ---------------------------------------------------------------------------------------------------------

template <class Tile, Problems kProblems, Pass kPass>
class ScoresConsumer : TwoRolesWarp<Tile> {
    using Asked = Asks<Tile, kProblems, kPass>;
    static constexpr bool kDrops = Asked::kDrops;
    static constexpr int kDoutParts = Tile::kDoutParts;
    using Base = TwoRolesWarp<Tile>;
    using Base::smem_, Base::problem_, Base::lane_, Base::told, Base::tell;

  public:
    __device__ __forceinline__ ScoresConsumer(const Problem& problem, SharedMemory<Tile>& shared)
        : Base(problem, shared), dropout_(problem.forward.dropout), changes_(problem), facts_(lane_) {}

    __device__ __forceinline__ void run() {
        this->each_item(
            [&](const Item& work, unsigned item, unsigned first, unsigned end) {
                ptx::barrier_wait(&smem_.value_slot[0].full, item % 2);
                dk_.clear();
                place_.begin(work);
#pragma unroll 1
                for (unsigned tile = first; tile < end; ++tile) work_on_tile(work, tile, tile + 1 == end);
                tell(smem_.key_slot[0].empty);
                const float factor = problem_.forward.scale * this->template unscaled<kDrops>();
                this->store(problem_.dk, told(work.keys), problem_.forward.head_dim, dk_, factor);
            },
            [&](const KeyTile& keys) { this->store_zeros(problem_.dk, keys, problem_.forward.head_dim); });
    }

  private:
    __device__ __forceinline__ void work_on_tile(const Item& work, unsigned tile, bool last) {
        const auto places = Places<Tile>::of(tile);
        const unsigned stage = places.stage, parity = places.parity;
        Slot& slot = smem_.slot[stage];
        const auto& q = smem_.q[stage];
        ptx::barrier_wait(&slot.full, parity);
        ptx::wgmma_fence();
        const QueryFacts<Tile>& facts = smem_.facts[tile % Tile::kTileFacts];
        if (facts_.kFolded) await_facts(tile);
        facts_.begin_scores(s_, facts);
        this->multiply_rows(s_, smem_.k[0], q, facts_.kFolded);
        facts_.begin_dp(dp_, facts);
        multiply_dp<0>(places);
        if (!facts_.kFolded) await_facts(tile);
        facts_.load_lse(facts);  // before the waits, beside the products
        const TileFacts& of_tile = smem_.tile[tile % Tile::kTilesTold];
        const QueryPlace at = place_.take(work);
        [[maybe_unused]] KeptTile<true, 16, Tile::kQueries> kept;
        if (dropout_.drops()) kept = dropout_.kept(work, at, this->warp_key());  // beside the products
        ptx::wgmma_wait<1>();
        const Seen seen = of_tile.seen[0];
        this->weigh(s_, facts_, changes_.apply(s_, this->scores_place(work, at)));
        if constexpr (Tile::kHalvesDout) {  // of which the second comes late
            ptx::wgmma_fence();
            multiply_dp<1>(places);
        }
        facts_.load_delta(facts);
        if (seen != Seen::kAll && !changes_.hide(s_, this->scores_place(work, at)))
            this->hide(s_, work, of_tile.first_query);
        if (!dropout_.drops()) store_p(places);
        ptx::wgmma_wait<0>();
        if (last) tell(smem_.value_slot[0].empty);
        if constexpr (Tile::kHalvesDout)
#pragma unroll
            for (int i = 0; i < kDoutParts; ++i) tell(this->dout_slot(places, i).empty);
        if (dropout_.drops()) {  // dS needs the weights that P loses
            this->differentiate(dp_, s_, facts_, kept);
            store_p(places);
        } else {
            this->differentiate(dp_, s_, facts_);
        }
        changes_.follow_back(dp_, this->scores_place(work, at), seen);
        store_ds(places);

        ptx::wgmma_fence();
        this->multiply_weights(dk_, weights_, q, /*adds=*/true, Asked::leaves_out(seen));
        ptx::wgmma_wait<0>();
        tell(slot.empty);
    }
    /// Issues dP = V dO^T of a part of dO, when it is there.
    template <int kPart>
    __device__ __forceinline__ void multiply_dp(const Places<Tile>& at) {
        const auto& place = at.dout[kPart];
        if constexpr (Tile::kHalvesDout) ptx::barrier_wait(&this->dout_slot(at, kPart).full, place.parity);
        this->template multiply_rows<kDoutParts>(dp_, smem_.v[0], smem_.dout[place.place], facts_.kFolded || kPart > 0,
                                                 kPart);
    }
    __device__ __forceinline__ void store_p(const Places<Tile>& at) {
        const unsigned stage = at.weights_stage;
        Slot& slot = smem_.p_slot[stage];
        this->pack(weights_, s_);
        ptx::barrier_wait(&slot.empty, at.weights_parity ^ 1);
        this->store_weights(smem_.p[stage], weights_);
        ptx::fence_proxy_async();
        tell(slot.full);
    }
    /// dS to its place, which stays as it is until the other block of a pair has read it too.
    __device__ __forceinline__ void store_ds(const Places<Tile>& at) {
        const unsigned stage = at.weights_stage, parity = at.weights_parity;
        Slot& slot = smem_.ds_slot[stage];
        auto& ds = smem_.ds[stage];
        this->pack(weights_, dp_);
        ptx::barrier_wait(&slot.empty, parity ^ 1);
        if constexpr (Tile::kPaired) ptx::barrier_wait(&smem_.pair.ds_slot[stage].empty, parity ^ 1);
        this->store_weights(ds, weights_);
        ptx::fence_proxy_async();
        tell(slot.full);
        if constexpr (Tile::kPaired) {
            const int own = 64 * this->warp_key();  // this warp's rows
            if (lane_ == 0)
                ptx::bulk_send(smem_.pair.ds[stage].panel[0] + own, ds.panel[0] + own,
                               sizeof(ds) / (Tile::kKeys / Tile::kWarpKeys), &smem_.pair.ds_slot[stage].full,
                               peer_rank());
        }
    }
    __device__ __forceinline__ void await_facts(unsigned tile) {
        ptx::barrier_wait(&smem_.facts_full[tile % Tile::kTileFacts], tile / Tile::kTileFacts % 2);
    }

    typename Base::Scores s_, dp_;  // scores, then P; dP, then dS
    typename Base::Weights weights_;
    typename Base::Gradient dk_;
    typename Asked::Place place_;
    typename Asked::Dropout dropout_;
    typename Asked::Changes changes_;
    typename Asked::Facts facts_;
};

// ---- Values ---------------------------------------------------------------------------------------------------------

template <class Tile, Problems kProblems, Pass kPass>
class ValuesConsumer : TwoRolesWarp<Tile> {
    using Asked = Asks<Tile, kProblems, kPass>;
    static constexpr bool kDrops = Asked::kDrops;
    using Base = TwoRolesWarp<Tile>;
    using Base::smem_, Base::problem_, Base::lane_, Base::warp_, Base::told, Base::tell;
    using typename Base::T;

  public:
    __device__ __forceinline__ ValuesConsumer(const Problem& problem, SharedMemory<Tile>& shared)
        : Base(problem, shared),
          first_panel_(Tile::kPaired ? kParts * static_cast<int>(ptx::cluster_rank()) : 0),
          late_(problem.dq_rows + 4 * lane_ +
                DqFragment::offset(16 * warp_, 64 * first_panel_, static_cast<int>(problem.forward.head_dim))) {}

    __device__ __forceinline__ void run() {
        dq_[(kParts - 1) % kSets].clear();
        this->each_item(
            [&](const Item& work, unsigned, unsigned first, unsigned end) {
                for (auto& part : dv_) part.clear();
#pragma unroll 1
                for (unsigned tile = first; tile < end; ++tile) work_on_tile(tile);
                tell(smem_.key_slot[0].empty);
                const float factor = this->template unscaled<kDrops>();
#pragma unroll
                for (int i = 0; i < kDoutParts; ++i)
                    this->store(problem_.dv, told(work.keys), problem_.forward.head_dim_v, dv_[i], factor,
                                kDvColumns * i);
            },
            [&](const KeyTile& keys) { this->store_zeros(problem_.dv, keys, problem_.forward.head_dim_v); });
        bring_last_part(tiles_);
    }

  private:
    static constexpr int kParts = Tile::kPanels / Tile::kBlocks, kSets = kParts % 2 ? 3 : 2;  // of dQ's columns
    static_assert(kParts >= 2 && kParts % kSets == 0);
    static constexpr int kDoutParts = Tile::kDoutParts, kDvColumns = Tile::kD / kDoutParts;

    /// dV and dQ of a tile, but for the additions of dQ's last part, and these of the tile before.
    __device__ __forceinline__ void work_on_tile(unsigned tile) {
        const auto places = Places<Tile>::of(tile);
        const unsigned stage = places.weights_stage, parity = places.weights_parity;
        Slot &p_slot = smem_.p_slot[stage], &ds_slot = smem_.ds_slot[stage];
        const auto& ds = smem_.ds[stage];
        const auto& k = smem_.k[0];
        ptx::barrier_wait(&p_slot.full, parity);
        float* const dq = late_ + dq_step(problem_, smem_.tile[tile % Tile::kTilesTold].groups);
        multiply_values(places, unseen(tile));
        if constexpr (Tile::kPaired) {
            static_assert(kParts == 2 && Tile::kDoutParts == 2);
            // dO is awaited: words behind additions to dQ would come late
            ptx::wgmma_wait<1>();
            tell(this->dout_slot(places, 0).empty);
            ptx::wgmma_wait<0>();
            tell(this->dout_slot(places, 1).empty);
            tell(p_slot.empty);
            ptx::barrier_wait(&ds_slot.full, parity);
            ptx::wgmma_fence();
            multiply_part<0>(ds, k.panel[first_panel_]);
            bring_last_part(tile);
            ptx::wgmma_fence();
            multiply_part<1>(ds, k.panel[first_panel_ + 1]);
            add_keys_of_peer(stage, parity);
            ptx::wgmma_wait<1>();
            bring_part<0>(dq, tile);
        } else {
            ptx::wgmma_wait<1>();  // of none: for ptxas
            bring_last_part(tile);
            ptx::barrier_wait(&ds_slot.full, parity);
            ptx::wgmma_fence();
            multiply_part<0>(ds, k.panel[0]);
            ptx::wgmma_wait<1>();
            tell(this->dout_slot(places, 0).empty);
            tell(p_slot.empty);
            begin_turn(tile);
            bring_parts<0>(ds, dq, tile);
        }
        ptx::wgmma_wait<0>();
        tell(ds_slot.empty);
        if constexpr (Tile::kPaired)
            if (lane_ == 0) ptx::barrier_arrive_at(&smem_.pair.ds_slot[stage].empty, peer_rank());
        late_ = dq;
        tiles_ = tile + 1;
    }

    /// Issues dV += P^T dO, each part of it when that part of dO is there. Unless `left_out`.
    __device__ __forceinline__ void multiply_values(const Places<Tile>& places, bool left_out) {
        const ptx::SharedMatrix<ptx::Major::K> a(smem_.p[places.weights_stage].panel[0]);
#pragma unroll
        for (int i = 0; i < kDoutParts; ++i) {
            const auto& dout = smem_.dout[places.dout[i].place];
            const ptx::SharedMatrix<ptx::Major::N> b(dout.panel, sizeof(dout.panel[0]));
            ptx::barrier_wait(&this->dout_slot(places, i).full, places.dout[i].parity);
            if (i == 0) ptx::wgmma_fence();
            if (!left_out)
#pragma unroll
                for (int step = 0; step < Tile::kQueries / 16; ++step)
                    ptx::wgmma<T, kDvColumns>(dv_[i].flat(), a + 32 * step, b + 16 * 128 * step, true);
            ptx::wgmma_commit();
        }
    }

    /// Issues what the other block's keys add to dQ's parts, when its dS is there.
    __device__ __forceinline__ void add_keys_of_peer(unsigned stage, unsigned parity) {
        const auto& ds = smem_.pair.ds[stage];
        const auto& k = smem_.pair.k;
        ptx::Barrier* const full = &smem_.pair.ds_slot[stage].full;
        if (warp_ == 0 && lane_ == 0) ptx::barrier_arrive_expect(full, sizeof(ds));
        ptx::barrier_wait(full, parity);
        ptx::wgmma_fence();
        multiply_part<0>(ds, k.panel[0], true);
        multiply_part<1>(ds, k.panel[1], true);
    }
    /// Brings what is left of dQ of the tile before this one.
    __device__ __forceinline__ void bring_last_part(unsigned tile) {
        if (tile == 0) return;
        bring_part<kParts - 1>(late_, tile - 1);
        end_turn(tile - 1);
    }
    /// The turn at dQ of a tile, if blocks take turns.
    __device__ __forceinline__ void begin_turn(unsigned tile) {
        if constexpr (kPass == Pass::kTurns) ptx::barrier_wait(&smem_.turns.slot[tile % 2].full, tile / 2 % 2);
    }
    __device__ __forceinline__ void end_turn(unsigned tile) {
        if constexpr (kPass == Pass::kTurns) tell(smem_.turns.slot[tile % 2].empty);
    }

    /// Brings the parts from kPart on, but for the last, to where they go, and issues each time the part that follows.
    template <int kPart, class Transposed>
    __device__ __forceinline__ void bring_parts(const Transposed& ds, float* dq, unsigned tile) {
        if constexpr (kPart + 1 < kParts) {
            ptx::wgmma_fence();
            multiply_part<kPart + 1>(ds, smem_.k[0].panel[kPart + 1]);
            ptx::wgmma_wait<1>();
            bring_part<kPart>(dq, tile);
            bring_parts<kPart + 1>(ds, dq, tile);
        }
    }

    /// Whether the tile's queries see none of the item's keys.
    __device__ __forceinline__ bool unseen(unsigned tile) const {
        return Asked::leaves_out(smem_.tile[tile % Tile::kTilesTold].seen[0]);
    }

    /// Issues a part of dQ = dS K, or adds that of the other block's keys. k: the part's panel.
    template <int kPart, class Transposed>
    __device__ __forceinline__ void multiply_part(const Transposed& ds, const T* k, bool adds = false) {
        const ptx::SharedMatrix<ptx::Major::N> a(ds.panel[0]), b(k);
#pragma unroll
        for (int step = 0; step < Tile::kKeys / 16; ++step)
            ptx::wgmma<T, 64>(dq_[kPart % kSets].flat(), a + 16 * 128 * step, b + 16 * 128 * step, adds || step > 0);
        ptx::wgmma_commit();
    }

    /// Brings a part of dQ of a tile to where it goes: in turns 0 of an unseen tile. `to`: this lane's place in the
    /// buffer.
    template <int kPart>
    __device__ __forceinline__ void bring_part(float* to, unsigned tile) {
        auto& dq = dq_[kPart % kSets];
        if constexpr (kPass == Pass::kTurns) {
            if (unseen(tile)) dq.clear();
            this->bring(smem_.turns.task[tile % Tile::kTilesTold], dq, 16 * warp_, 64 * kPart,
                        this->template unscaled<kDrops>());
        } else
            this->add(to + DqFragment::offset(0, 64 * kPart, 0), dq,
                      static_cast<int>(problem_.forward.head_dim) - 64 * (first_panel_ + kPart));
    }

    const int first_panel_;  // of dQ's columns
    RegisterTile<16, kDvColumns> dv_[kDoutParts];
    RegisterTile<16, 64> dq_[kSets];
    float* late_;         // where the last part of the tile before is to be added
    unsigned tiles_ = 0;  // how many there were
};

// ---- Kernel ---------------------------------------------------------------------------------------------------------

// A call by turns has no pairs: an item's turns are those of one block.
//
// spills: sm_90a: warpgroup 0, with few registers, keeps parts of an item in local memory; Scores does so with a few
// words once an item at d = 256. The loops over tiles have none, but in general problems 78 loads and stores, in
// Scores.
// ptxas: C7519: it fences before dP's products where L and D are terms, and about products that general problems by
// turns may leave out.
template <class Tile, Problems kProblems, Pass kPass>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_in_roles(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps, int items) {
    static_assert(!(Tile::kPaired && kPass == Pass::kTurns));
    auto& smem = shared_memory<SharedMemory<Tile>>();
    if (threadIdx.x == 0) {
        constexpr unsigned kWarps = 4;  // of a consumer; each arrives for itself
        prepare_slots(smem.plan_slot, 1, 2 * kWarps + plan_followers<Tile, kPass>(problem));
        prepare_slots(smem.key_slot, 1, 2 * kWarps);
        prepare_slots(smem.value_slot, 1, kWarps);
        prepare_slots(smem.slot, 1, Tile::kHalvesDout ? kWarps : 2 * kWarps);
        prepare_slots(smem.p_slot, kWarps, kWarps);
        prepare_slots(smem.ds_slot, kWarps, kWarps);
        if constexpr (Tile::kHalvesDout) prepare_slots(smem.dout_slot, 1, 2 * kWarps);
        if constexpr (Tile::kPaired) prepare_pair(smem.pair, kWarps);
        prepare_copies(smem);
        prepare_turns(smem, kWarps);
        ptx::barrier_init_fence();
    }
    if constexpr (Tile::kPaired) ptx::cluster_sync();
    else __syncthreads();
    const int group = uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads);
    if (group == 0) {
        ptx::release_registers<Tile::kProducerRegisters>();
        serve<Tile, kProblems, kPass>(problem, maps, smem, items, Workers::all());
    } else {
        ptx::acquire_registers<Tile::kConsumerRegisters>();
        if (group == 1) ScoresConsumer<Tile, kProblems, kPass>(problem, smem).run();
        else ValuesConsumer<Tile, kProblems, kPass>(problem, smem).run();
    }
    if (problem.prepared) ptx::wait_for_previous_grids();  // so that who waits for this grid waits for prepare
    if constexpr (Tile::kPaired) {                         // a block stays until the other one sends nothing more
        __syncwarp();
        ptx::cluster_sync();
    }
}

template <class Tile, Problems kProblems, Pass kPass>
Shape shape_in_roles() {
    return shape_of_tile<Tile, kProblems, kPass, backward_in_roles<Tile, kProblems, kPass>>();
}

/// The shapes that ship (docs/tuning/hopper_backward.md).
inline constexpr TileShape kWideShapes[] = {
    {.d = 192,
     .queries = 64,
     .key_stages = 1,
     .value_stages = 1,
     .folds_facts = true,
     .tiles_told = 8,
     .two_roles = true},
    {.d = 256,
     .queries = 64,
     .key_stages = 1,
     .value_stages = 1,
     .ds_stages = 1,
     .folds_facts = true,
     .tiles_told = 8,
     .two_roles = true,
     .paired = true},
};
/// Of blocks that take turns.
inline constexpr TileShape kWideTurnShapes[] = {
    kWideShapes[0],
    {.d = 256, .queries = 64, .key_stages = 1, .value_stages = 1, .tiles_told = 8, .two_roles = true},
};
/// Of general problems, and those by turns.
inline constexpr TileShape kGeneralWideShapes[] = {kWideShapes[1]}, kGeneralWideTurnShapes[] = {kWideTurnShapes[1]};
template <class T, Problems kProblems, Pass kPass, const auto& kRows = kWideShapes>
std::vector<Shape> wide_shapes() {
    return of_rows<kRows>([](auto i) { return shape_in_roles<Tile<T, kRows[i]>, kProblems, kPass>(); });
}

}  // namespace flash_wmma::backward::wgmma
