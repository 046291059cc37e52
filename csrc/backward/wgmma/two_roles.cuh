// bwd_sm90 for d above 128, where dK and dV of 64 keys fit no warpgroup's registers together: two consumers with
// different products.
//
// As in bwd_sm90.cuh, blocks are persistent and take items from a queue, and warpgroup 0 has two warps that copy, one of
// which produces. An item is 64 keys; it is walked in tiles of 64 queries. Both consumers work on all 64 keys:
//     Scores: S^T = K Q^T;  P = exp2(S * scale - L);  dP^T = V dO^T;  dS = P (dP - D);  dK += dS^T Q;
//     Values: dV += P^T dO;  dQ += dS K.
//
// P^T and dS^T go from Scores to Values through a ring in shared memory, 64 x 64 each. dS^T is an operand of dK in the
// registers of Scores.
//
// dQ in parts of 64 columns, each with registers of its own: the additions of a part to the fp32 buffer
// (device/backward_rows.cuh) run beside the product of a later part. An addition reads its registers late, so a part's
// registers are written again only when those of another part are being added. The last part of a tile is added beside
// the first products of the next tile.
//
// Shared memory: K and V of one item, each copied when its readers are done with the item before. Tiles of Q and dO
// with their L and D, and P and dS, in rings of two.
//
// Bound: dQ's additions, 256 d bytes a tile at about 17.5 bytes a cycle and SM (docs/tuning/hopper_backward.md).
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

/// What a block of two roles has in shared memory. ds_slot counts for P and dS.
template <class Tile>
struct TwoRolesMemory : SharedMemory<Tile> {
    typename SharedMemory<Tile>::Transposed p[Tile::kDsStages];
};

/// The places of a tile and its item in the rings, in a uniform register: descriptors come from there.
struct Places {
    unsigned stage, parity;
    template <class Tile>
    __device__ __forceinline__ static Places of(unsigned tile) {
        static_assert(Tile::kStages == 2 && Tile::kDsStages == 2 && Tile::kKeyStages == 1 && Tile::kValueStages == 1);
        const unsigned places = in_uniform_register(tile % 4);
        return {places % 2, places / 2};
    }
};

/// Calls of both roles: each item with tiles, its tiles, and items that no query sees.
template <class Tile>
class TwoRolesWarp : protected ConsumerWarp<Tile> {
  protected:
    using Base = ConsumerWarp<Tile>;
    using Base::told, Base::tell;

    __device__ __forceinline__ TwoRolesWarp(const Problem& problem, TwoRolesMemory<Tile>& shared)
        : Base(problem, 0), smem_(shared) {}

    /// begin(work, item), with the item's number; on_tile(work, tile, last) for each tile; end(keys): dK or dV can be
    /// stored. unseen(keys): they are 0.
    template <class Begin, class OnTile, class End, class Unseen>
    __device__ __forceinline__ void each_item(Begin begin, OnTile on_tile, End end, Unseen unseen) {
        unsigned tile = 0, item = 0;  // how many there were; items: those with tiles
        Slot& key_slot = smem_.key_slot[0];
        for (RingPlace<Tile::kPlans> plan;; plan.advance()) {
            Slot& slot = smem_.plan_slot[plan.stage];
            ptx::barrier_wait(&slot.full, plan.parity);
            const Item& work = smem_.plan[plan.stage];
            const int tiles = told(work.tiles);
            if (tiles < 0) break;
            if (tiles > 0) {
                ptx::barrier_wait(&key_slot.full, item % 2);
                begin(work, item);
#pragma unroll 1
                for (int left = tiles; left > 0; --left, ++tile) on_tile(work, tile, left == 1);
                tell(key_slot.empty);
                end(told(work.keys));
                ++item;
            } else {
                unseen(told(work.keys));
            }
            tell(slot.empty);
        }
    }

    TwoRolesMemory<Tile>& smem_;
};

// ---- Scores ---------------------------------------------------------------------------------------------------------

template <class Tile, Problems kProblems, Pass kPass>
class ScoresConsumer : TwoRolesWarp<Tile> {
    using Asked = Asks<Tile, kProblems, kPass>;
    static constexpr bool kDrops = Asked::kDrops;
    using Base = TwoRolesWarp<Tile>;
    using Base::smem_, Base::problem_, Base::lane_, Base::tell;

  public:
    __device__ __forceinline__ ScoresConsumer(const Problem& problem, TwoRolesMemory<Tile>& shared)
        : Base(problem, shared), dropout_(problem.forward.dropout), changes_(problem), facts_(lane_) {}

    __device__ __forceinline__ void run() {
        this->each_item(
            [&](const Item& work, unsigned item) {
                ptx::barrier_wait(&smem_.value_slot[0].full, item % 2);
                dk_.clear();
                place_.begin(work);
            },
            [&](const Item& work, unsigned tile, bool last) { work_on_tile(work, tile, last); },
            [&](const KeyTile& keys) {
                const float factor = this->template unscaled<kDrops>();
                this->store(problem_.dk, keys, problem_.forward.head_dim, dk_, problem_.forward.scale * factor);
            },
            [&](const KeyTile& keys) { this->store_zeros(problem_.dk, keys, problem_.forward.head_dim); });
    }

  private:
    __device__ __forceinline__ void work_on_tile(const Item& work, unsigned tile, bool last) {
        const auto [stage, parity] = Places::of<Tile>(tile);
        Slot &slot = smem_.slot[stage], &ds_slot = smem_.ds_slot[stage];
        const auto &q = smem_.q[stage], &dout = smem_.dout[stage];
        ptx::barrier_wait(&slot.full, parity);
        ptx::wgmma_fence();
        const QueryFacts<Tile>& facts = smem_.facts[tile % Tile::kTileFacts];
        if (facts_.kFolded) await_facts(tile);
        facts_.begin_scores(s_, facts);
        this->multiply_rows(s_, smem_.k[0], q, facts_.kFolded);
        facts_.begin_dp(dp_, facts);
        this->multiply_rows(dp_, smem_.v[0], dout, facts_.kFolded);

        if (!facts_.kFolded) await_facts(tile);
        facts_.load_lse(facts);  // before the waits, beside the products
        const TileFacts& of_tile = smem_.tile[tile % Tile::kTilesTold];
        const QueryPlace at = place_.take(work);
        [[maybe_unused]] KeptTile<true, 16, Tile::kQueries> kept;
        if (dropout_.drops()) kept = dropout_.kept(work, at, this->warp_key());  // beside the products
        ptx::wgmma_wait<1>();
        const Seen seen = of_tile.seen;
        this->weigh(s_, facts_, changes_.apply(s_, this->scores_place(work, at)));
        facts_.load_delta(facts);
        if (seen != Seen::kAll && !changes_.hide(s_, this->scores_place(work, at)))
            this->hide(s_, work, of_tile.first_query);
        ptx::barrier_wait(&ds_slot.empty, parity ^ 1);
        if (!dropout_.drops()) {
            this->pack(weights_, s_);
            this->store_weights(smem_.p[stage], weights_);
        }
        ptx::wgmma_wait<0>();
        if (last) tell(smem_.value_slot[0].empty);
        if (dropout_.drops()) {  // dS needs the weights that P loses
            this->differentiate(dp_, s_, facts_, kept);
            this->pack(weights_, s_);
            this->store_weights(smem_.p[stage], weights_);
        } else {
            this->differentiate(dp_, s_, facts_);
        }
        changes_.follow_back(dp_, this->scores_place(work, at), seen);
        this->pack(weights_, dp_);
        this->store_weights(smem_.ds[stage], weights_);
        ptx::fence_proxy_async();
        tell(ds_slot.full);

        ptx::wgmma_fence();
        this->multiply_weights(dk_, weights_, q, Asked::leaves_out(seen));
        ptx::wgmma_wait<0>();
        tell(slot.empty);
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
    using Base::smem_, Base::problem_, Base::lane_, Base::warp_, Base::tell;
    using typename Base::T;

  public:
    __device__ __forceinline__ ValuesConsumer(const Problem& problem, TwoRolesMemory<Tile>& shared)
        : Base(problem, shared),
          late_(problem.dq_rows + 4 * lane_ +
                DqFragment::offset(16 * warp_, 0, static_cast<int>(problem.forward.head_dim))) {}

    __device__ __forceinline__ void run() {
        dq_[(kParts - 1) % kSets].clear();
        this->each_item(
            [&](const Item&, unsigned) { dv_.clear(); }, [&](const Item&, unsigned tile, bool) { work_on_tile(tile); },
            [&](const KeyTile& keys) {
                const float factor = this->template unscaled<kDrops>();
                this->store(problem_.dv, keys, problem_.forward.head_dim_v, dv_, factor);
            },
            [&](const KeyTile& keys) { this->store_zeros(problem_.dv, keys, problem_.forward.head_dim_v); });
        if (tiles_ == 0) return;
        bring_part<kParts - 1>(late_, tiles_ - 1);
        end_turn(tiles_ - 1);
    }

  private:
    static constexpr int kParts = Tile::kPanels, kSets = kParts % 2 ? 3 : 2;
    static_assert(kParts >= 3 && kParts % kSets == 0);

    /// dV and dQ of a tile, but for the additions of dQ's last part, and these of the tile before.
    __device__ __forceinline__ void work_on_tile(unsigned tile) {
        const auto [stage, parity] = Places::of<Tile>(tile);
        Slot &slot = smem_.slot[stage], &ds_slot = smem_.ds_slot[stage];
        const auto& ds = smem_.ds[stage];
        ptx::barrier_wait(&ds_slot.full, parity);
        ptx::barrier_wait(&slot.full, parity);
        float* const dq = late_ + dq_step(problem_, smem_.tile[tile % Tile::kTilesTold].groups);
        ptx::wgmma_fence();
        multiply_part<0>(ds);
        multiply_values(smem_.p[stage], smem_.dout[stage], unseen(tile));
        ptx::wgmma_wait<2>();  // of none: for ptxas
        if (tile > 0) {
            bring_part<kParts - 1>(late_, tile - 1);
            end_turn(tile - 1);
        }
        ptx::wgmma_fence();
        multiply_part<1>(ds);
        ptx::wgmma_wait<2>();
        begin_turn(tile);
        bring_part<0>(dq, tile);
        ptx::wgmma_wait<1>();
        tell(slot.empty);
        bring_parts<1>(ds, dq, tile);
        ptx::wgmma_wait<0>();
        tell(ds_slot.empty);
        late_ = dq;
        tiles_ = tile + 1;
    }

    /// The turn at dQ of a tile, if blocks take turns.
    __device__ __forceinline__ void begin_turn(unsigned tile) {
        if constexpr (kPass == Pass::kTurns) ptx::barrier_wait(&smem_.turn_slot[tile % 2].full, tile / 2 % 2);
    }
    __device__ __forceinline__ void end_turn(unsigned tile) {
        if constexpr (kPass == Pass::kTurns) tell(smem_.turn_slot[tile % 2].empty);
    }

    /// Brings the parts from kPart on, but for the last, to where they go, and issues each time the part that follows.
    template <int kPart, class Transposed>
    __device__ __forceinline__ void bring_parts(const Transposed& ds, float* dq, unsigned tile) {
        if constexpr (kPart + 1 < kParts) {
            ptx::wgmma_fence();
            multiply_part<kPart + 1>(ds);
            ptx::wgmma_wait<1>();
            bring_part<kPart>(dq, tile);
            bring_parts<kPart + 1>(ds, dq, tile);
        }
    }

    /// Whether the tile's queries see none of the item's keys.
    __device__ __forceinline__ bool unseen(unsigned tile) const {
        return Asked::leaves_out(smem_.tile[tile % Tile::kTilesTold].seen);
    }

    /// Issues dV += P^T dO. Unless `left_out`.
    template <class Transposed, class QueryRows>
    __device__ __forceinline__ void multiply_values(const Transposed& p, const QueryRows& dout, bool left_out) {
        const ptx::SharedMatrix<ptx::Major::K> a(p.panel[0]);
        const ptx::SharedMatrix<ptx::Major::N> b(dout.panel, sizeof(dout.panel[0]));
        if (!left_out)
#pragma unroll
            for (int step = 0; step < Tile::kQueries / 16; ++step)
                ptx::wgmma<T, Tile::kD>(dv_.flat(), a + 32 * step, b + 16 * 128 * step, true);
        ptx::wgmma_commit();
    }

    /// Issues a part of dQ = dS K.
    template <int kPart, class Transposed>
    __device__ __forceinline__ void multiply_part(const Transposed& ds) {
        const ptx::SharedMatrix<ptx::Major::N> a(ds.panel[0]), b(smem_.k[0].panel[kPart]);
#pragma unroll
        for (int step = 0; step < Tile::kKeys / 16; ++step)
            ptx::wgmma<T, 64>(dq_[kPart % kSets].flat(), a + 16 * 128 * step, b + 16 * 128 * step, step > 0);
        ptx::wgmma_commit();
    }

    /// Brings a part of dQ of a tile to where it goes: in turns 0 of an unseen tile. `to`: this lane's place in the buffer.
    template <int kPart>
    __device__ __forceinline__ void bring_part(float* to, unsigned tile) {
        auto& dq = dq_[kPart % kSets];
        if constexpr (kPass == Pass::kTurns) {
            if (unseen(tile)) dq.clear();
            this->bring(smem_.task[tile % Tile::kTilesTold], dq, 16 * warp_, 64 * kPart,
                        this->template unscaled<kDrops>());
        } else
            this->add(to + DqFragment::offset(0, 64 * kPart, 0), dq,
                      static_cast<int>(problem_.forward.head_dim) - 64 * kPart);
    }

    typename Base::Gradient dv_;
    RegisterTile<16, 64> dq_[kSets];
    float* late_;         // where the last part of the tile before is to be added
    unsigned tiles_ = 0;  // how many there were
};

// ---- Kernel ---------------------------------------------------------------------------------------------------------

// spills: sm_90a: warpgroup 0, with few registers, keeps parts of an item in local memory; Scores does so with a few
// words once an item at d = 256. The loops over tiles have none, but in general problems 85 loads and stores, in Scores.
// ptxas: C7519: it fences before dP's products where L and D are terms, and about products that general problems by turns
// may leave out.
template <class Tile, Problems kProblems, Pass kPass>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward_in_roles(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps, int items) {
    auto& smem = shared_memory<TwoRolesMemory<Tile>>();
    if (threadIdx.x == 0) {
        constexpr unsigned kWarps = 4;  // of a consumer; each arrives for itself
        prepare_slots(smem.plan_slot, 1, 2 * kWarps + plan_followers<kPass>());
        prepare_slots(smem.key_slot, 1, 2 * kWarps);
        prepare_slots(smem.value_slot, 1, kWarps);
        prepare_slots(smem.slot, 1, 2 * kWarps);
        prepare_slots(smem.ds_slot, kWarps, kWarps);
        prepare_copies(smem);
        prepare_turns(smem, kWarps);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    const int group = uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads);
    if (group == 0) {
        ptx::release_registers<Tile::kProducerRegisters>();
        serve<Tile, kProblems, kPass>(problem, maps, smem, items);
    } else {
        ptx::acquire_registers<Tile::kConsumerRegisters>();
        if (group == 1) ScoresConsumer<Tile, kProblems, kPass>(problem, smem).run();
        else ValuesConsumer<Tile, kProblems, kPass>(problem, smem).run();
    }
}

template <class Tile, Problems kProblems, Pass kPass>
Shape shape_in_roles() {
    return shape_of_tile<Tile, kProblems, kPass, TwoRolesMemory<Tile>, backward_in_roles<Tile, kProblems, kPass>>();
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
    {.d = 256, .queries = 64, .key_stages = 1, .value_stages = 1, .tiles_told = 8, .two_roles = true},
};
/// Of general problems.
inline constexpr TileShape kGeneralWideShapes[] = {kWideShapes[1]};
template <class T, Problems kProblems, Pass kPass, const auto& kRows = kWideShapes>
std::vector<Shape> wide_shapes() {
    return of_rows<kRows>([](auto i) { return shape_in_roles<Tile<T, kRows[i]>, kProblems, kPass>(); });
}

}  // namespace flash_wmma::backward::wgmma
