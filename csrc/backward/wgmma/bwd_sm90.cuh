// bwd_sm90: FlashAttention-2 backward on Hopper's own instructions: tensor copies (TMA), transaction barriers, wgmma.
//
// Algorithm: as in backward/mma/kernel.cuh, the fused pass. Blocks are persistent and take items from a queue. An item
// is 128 keys of a key/value head; the block streams over the tiles of queries that see them, of all query heads that
// share the keys:
//     S^T = K Q^T;  P = exp2(S * scale - L);  dP^T = V dO^T;  dS = P (dP - D)
//     dV += P^T dO;  dK += dS^T Q;  dQ += dS K.
//
// Roles: one warp of warpgroup 0 produces: it says what the next item is and issues the copies of the tiles. Each of
// two consumer warpgroups owns 64 keys, each of its warps 16 of them. S^T and dP^T have keys as rows, so that P and dS go from the accumulators to the first
// operand of dV and dK in registers. dS also goes to shared memory, for dQ.
//
// dQ, one tile late: while a consumer works on a tile, it computes its part of dQ of the tile before, whose dS both
// consumers have stored in the meantime. So no consumer waits for the other as a rule, and dQ's additions run beside
// the products of dV and dK. The additions go from the accumulators, in the order of the registers, to the fp32 buffer
// (device/backward_rows.cuh).
//
// Shared memory: rings of K and V of items, of tiles of Q and dO with their L and D, of tiles of dS, and of items. Each
// place has a barrier that says it is full and one that says it is empty.
//
// Bound: tensor cores, shared memory and, at d = 64, dQ's additions (32 KB a tile, half of its time): docs/tuning.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/shapes.h"
#include "device/constants.cuh"
#include "device/element.cuh"
#include "device/quad.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma::backward::wgmma {

// ---- Producer -------------------------------------------------------------------------------------------------------

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
            load(smem_.k[keys_.stage], maps_.k, &slot.full, item.first_key, item.head_k, item.batch);
            load(smem_.v[keys_.stage], maps_.v, &slot.full, item.first_key, item.head_k, item.batch);
        }
        keys_.advance();
        const int group_rows = (item.seqlen_q + kRowGroup - 1) / kRowGroup * kRowGroup;
        QueryPlace at{item.head, item.start};
        for (int left = item.tiles; left > 0; --left, at.advance(item, Tile::kQueries), place_.advance()) {
            Slot& slot = smem_.slot[place_.stage];
            RowPair* const facts = smem_.facts[place_.stage];
            if (lane_ > 0) continue;
            ptx::barrier_wait(&slot.empty, place_.parity ^ 1);
            const int rows = min(Tile::kQueries, group_rows - at.row);
            if (rows < Tile::kQueries) {  // behind the last group P is 0
                for (int i = rows / 2; i < Tile::kQueries / 2; ++i) facts[i] = {{-INFINITY, -INFINITY}, {0.f, 0.f}};
                ptx::fence_proxy_async();  // the next copy to this place comes behind these writes
            }
            constexpr unsigned kRowBytes = sizeof(RowPair) / 2;
            const unsigned fact_bytes = static_cast<unsigned>(rows) * kRowBytes;
            ptx::barrier_arrive_expect(&slot.full, 2 * sizeof(smem_.q[0]) + fact_bytes);
            load(smem_.q[place_.stage], maps_.q, &slot.full, at.row, at.head, item.batch);
            load(smem_.dout[place_.stage], maps_.dout, &slot.full, at.row, at.head, item.batch);
            ptx::bulk_load(facts, facts_of(problem_, {item.batch}, at.head) + at.row / 2, fact_bytes, &slot.full);
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
};

// ---- Consumers ------------------------------------------------------------------------------------------------------

/// One warpgroup with its 64 keys.
template <class Tile>
class Consumer {
  public:
    __device__ __forceinline__ Consumer(const Problem& problem, SharedMemory<Tile>& shared)
        : problem_(problem),
          smem_(shared),
          group_(uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads - 1)),
          warp_(uniform(static_cast<int>(threadIdx.x) / 32 % 4)),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void run() {
        // A tile before the first: its dS is 0 and its dQ goes nowhere, so that all tiles are treated alike
#pragma unroll
        for (auto& four : ds_)
#pragma unroll
            for (std::uint32_t& word : four) word = 0;
        store_ds();
        late_dq_ = nullptr;
        RingPlace<Tile::kPlans> plan;
        Owned owned{};  // whose dK and dV are in registers
        RingPlace<Tile::kKeyStages> keys;
        int late_keys = 0;
        bool any = false;
        for (;; plan.advance()) {
            ptx::barrier_wait(&smem_.plan_slot[plan.stage].full, plan.parity);
            const Item item = smem_.plan[plan.stage];
            tell(smem_.plan_slot[plan.stage].empty);
            if (item.tiles < 0) break;
            if (item.tiles == 0) {
                store_zeros(item);
                continue;
            }
            ptx::barrier_wait(&smem_.key_slot[keys.stage].full, keys.parity);
            QueryPlace at{item.head, item.start};
            // The first tile's first products are under way while dK and dV of the item before are stored
            begin_tile(keys.stage);
            store(owned);
            dk_.clear();
            dv_.clear();
            finish_tile(item, at, late_keys);
            if (any) tell(smem_.key_slot[late_keys].empty);
#pragma unroll 1
            for (int left = item.tiles; left > 1; --left) {
                at.advance(item, kQueries);
                begin_tile(keys.stage);
                finish_tile(item, at, keys.stage);
            }
            any = true;
            late_keys = keys.stage;
            owned = {item.batch, item.head_k, item.first_key, item.keys};
            keys.advance();
        }
        if (!any) return;
        ptx::barrier_wait(&smem_.ds_slot[ds_place_.stage].full, ds_place_.parity);
        ptx::wgmma_fence();
        multiply_dq(ds_place_.stage, late_keys);
        ptx::wgmma_wait<0>();
        add_dq();
        store(owned);
    }

  private:
    using T = typename Tile::T;
    static constexpr int kQueries = Tile::kQueries;

    __device__ __forceinline__ int row() const { return lane_ / 4; }
    __device__ __forceinline__ int column() const { return lane_ % 4 * 2; }
    __device__ __forceinline__ int warp_key() const { return Tile::kGroupKeys * group_ + Tile::kWarpKeys * warp_; }

    /// This warp's word to the others of the slot's barrier.
    __device__ __forceinline__ void tell(ptx::Barrier& barrier) const {
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&barrier);
    }

    /// Issues S^T and dP^T of the next tile.
    __device__ __forceinline__ void begin_tile(int keys) {
        ptx::barrier_wait(&smem_.slot[place_.stage].full, place_.parity);
        ptx::wgmma_fence();
        multiply_rows(s_, smem_.k[keys], smem_.q[place_.stage]);
        multiply_rows(dp_, smem_.v[keys], smem_.dout[place_.stage]);
    }

    /// The rest of its work but for dQ, and dQ of the tile before, of K in place `late_keys`.
    __device__ __forceinline__ void finish_tile(const Item& item, const QueryPlace& at, int late_keys) {
        ptx::wgmma_wait<1>();
        weigh(item, at.row);
        ptx::wgmma_wait<0>();
        differentiate();
        const RingPlace<Tile::kDsStages> late = ds_place_;
        ds_place_.advance();
        store_ds();
        ptx::barrier_wait(&smem_.ds_slot[late.stage].full, late.parity);
        ptx::wgmma_fence();
        multiply_dq(late.stage, late_keys);
        multiply_weights(dv_, p_, smem_.dout[place_.stage]);
        multiply_weights(dk_, ds_, smem_.q[place_.stage]);
        ptx::wgmma_wait<2>();
        tell(smem_.ds_slot[late.stage].empty);
        add_dq();
        late_dq_ = dq_rows(item, at);
        ptx::wgmma_wait<0>();
        tell(smem_.slot[place_.stage].empty);
        place_.advance();
    }

    /// Issues own rows of `keys` times `queries`, transposed.
    template <class KeyRows, class QueryRows>
    __device__ __forceinline__ void multiply_rows(RegisterTile<16, kQueries>& product, const KeyRows& keys,
                                                  const QueryRows& queries) const {
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i) {
            const ptx::SharedMatrix<ptx::Major::K> a(keys.panel[i] + 64 * Tile::kGroupKeys * ptx::opaque(group_)),
                b(queries.panel[i]);
#pragma unroll
            for (int step = 0; step < 4; ++step)
                ptx::wgmma<T, kQueries>(product.flat(), a + 32 * step, b + 32 * step, i + step > 0);
        }
        ptx::wgmma_commit();
    }

    /// P of own keys in place of S; 0 where a query does not see a key.
    __device__ __forceinline__ void weigh(const Item& item, int first_query) {
        const float factor = problem_.forward.scale * kLog2e;
        const RowPair* facts = smem_.facts[place_.stage] + lane_ % 4;
        s_.each([&](float& x, int, int c) { x = ptx::ex2(fmaf(x, factor, facts[c / 8 * 4].minus_lse[c % 2])); });
        const int first_key = item.first_key + warp_key();
        if (item.mask.all_visible(first_query, first_query + kQueries - 1, first_key, first_key + Tile::kWarpKeys - 1))
            return;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = first_key + row() + 8 * i, base = first_query + column();
            const int first = item.mask.first_query(key) - base;
            const int last = key < item.mask.seqlen_k ? item.mask.last_query(key) - base : -1;
            s_.each_in_row(i, [&](float& x, int c) {
                if (c < first || c > last) x = 0.f;
            });
        }
    }

    /// P and dS as operands, from P and dP.
    __device__ __forceinline__ void differentiate() {
        const RowPair* facts = smem_.facts[place_.stage] + lane_ % 4;
        dp_.each([&](float& x, int i, int c) { x = s_.at(i, c) * (x + facts[c / 8 * 4].minus_delta[c % 2]); });
        s_.each_pair([&](float x, float y, int i, int j) { p_[j / 2][j % 2 * 2 + i] = packed<T>(x, y); });
        dp_.each_pair([&](float x, float y, int i, int j) { ds_[j / 2][j % 2 * 2 + i] = packed<T>(x, y); });
    }

    /// dS^T to shared memory, in the swizzle of its panels.
    __device__ __forceinline__ void store_ds() {
        Slot& slot = smem_.ds_slot[ds_place_.stage];
        ptx::barrier_wait(&slot.empty, ds_place_.parity ^ 1);
        auto& panels = smem_.ds[ds_place_.stage].panel;
        const int swizzle = ptx::opaque(row());  // hidden, or every address is kept through the loop
#pragma unroll
        for (int j = 0; j < kQueries / 8; ++j)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                T* const to = panels[j / 8] + 64 * (warp_key() + row() + 8 * i) + 8 * (j % 8 ^ swizzle) + column();
                *reinterpret_cast<std::uint32_t*>(to) = ds_[j / 2][j % 2 * 2 + i];
            }
        ptx::fence_proxy_async();
        tell(slot.full);
    }

    /// Issues dV += P^T dO or dK += dS^T Q.
    template <class QueryRows>
    __device__ __forceinline__ void multiply_weights(RegisterTile<16, Tile::kD>& gradient,
                                                     const std::uint32_t (&weights)[kQueries / 16][4],
                                                     const QueryRows& queries) const {
        const ptx::SharedMatrix<ptx::Major::N> b(queries.panel, sizeof(queries.panel[0]));
#pragma unroll
        for (int step = 0; step < kQueries / 16; ++step)
            ptx::wgmma<T, Tile::kD>(gradient.flat(), weights[step], b + 16 * 128 * step, true);
        ptx::wgmma_commit();
    }

    /// Issues this warpgroup's part of dQ = dS K.
    __device__ __forceinline__ void multiply_dq(int stage, int keys) {
        const auto& ds = smem_.ds[stage];
        const auto& k = smem_.k[keys];
        const int group = ptx::opaque(group_);
        const ptx::SharedMatrix<ptx::Major::N> a(ds.panel[Tile::kSharesQueries ? group : 0]),
            b(k.panel[Tile::kSharesQueries ? 0 : group], sizeof(k.panel[0]));
#pragma unroll
        for (int step = 0; step < Tile::kKeys / 16; ++step)
            ptx::wgmma<T, Tile::kDqColumns>(dq_.flat(), a + 16 * 128 * step, b + 16 * 128 * step, step > 0);
        ptx::wgmma_commit();
    }

    /// Where this lane's part of dQ of a tile goes; null behind the last row.
    __device__ __forceinline__ float* dq_rows(const Item& item, const QueryPlace& at) const {
        const int first_row = at.row + (Tile::kSharesQueries ? 64 * group_ : 0);
        const int column = Tile::kSharesQueries ? 0 : 64 * group_;
        if (first_row >= item.seqlen_q || column >= problem_.forward.head_dim) return nullptr;
        return dq_of(problem_, {item.batch}, at.head, first_row + 16 * warp_) +
               DqFragment::offset(0, column, problem_.forward.head_dim) + 4 * lane_;
    }
    /// Adds the late dQ to it.
    __device__ __forceinline__ void add_dq() const {
        if (!late_dq_) return;
        const int columns = problem_.forward.head_dim - (Tile::kSharesQueries ? 0 : 64 * group_);
        const auto add = [&](int j) { ptx::red_add_4(late_dq_ + DqFragment::offset(0, 8 * j, 0), dq_.block[0][j]); };
        if (columns >= Tile::kDqColumns) {
#pragma unroll
            for (int j = 0; j < Tile::kDqColumns / 8; ++j) add(j);
        } else {
#pragma unroll
            for (int j = 0; j < Tile::kDqColumns / 8; ++j)
                if (8 * j < columns) add(j);
        }
    }

    /// The keys of an item, as far as its gradients need it.
    struct Owned {
        int batch, head, first_key, keys;
    };
    /// Writes dK and dV.
    __device__ __forceinline__ void store(const Owned& owned) const {
        const ForwardParams& p = problem_.forward;
        const int key = warp_key() + row(), left = owned.keys - key;
        const Rows &dk = problem_.dk, &dv = problem_.dv;
        store_rows(row_of<T>(dk, owned.batch, owned.head, owned.first_key + key), dk.row, left, p.head_dim, dk_,
                   p.scale);
        store_rows(row_of<T>(dv, owned.batch, owned.head, owned.first_key + key), dv.row, left, p.head_dim_v, dv_, 1.f);
    }
    /// The rows of a gradient from this lane's row `to` on, of which `left` exist; the lanes of a quad swap words until
    /// each has 16 neighbouring bytes.
    __device__ __forceinline__ void store_rows(T* to, std::int64_t pitch, int left, int columns,
                                               const RegisterTile<16, Tile::kD>& gradient, float factor) const {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int j = 0; j < Tile::kD / 8; j += 4) {
                std::uint32_t words[4];
#pragma unroll
                for (int w = 0; w < 4; ++w)
                    words[w] =
                        packed<T>(gradient.at(i, 8 * (j + w)) * factor, gradient.at(i, 8 * (j + w) + 1) * factor);
                transpose_in_quad(words, lane_ % 4);
                const int c = 8 * (j + lane_ % 4);
                if (8 * i < left && c < columns)
                    *reinterpret_cast<uint4*>(to + 8 * i * pitch + c) =
                        make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
    /// The gradients of keys that no query sees.
    __device__ __forceinline__ void store_zeros(const Item& item) const {
        const auto clear = [&](const Rows& rows, int columns) {
            for (int i = lane_; i < Tile::kWarpKeys * columns / 8; i += 32) {
                const int key = warp_key() + i / (columns / 8);
                if (key < item.keys)
                    *reinterpret_cast<uint4*>(row_of<T>(rows, item.batch, item.head_k, item.first_key + key) +
                                              i % (columns / 8) * 8) = uint4{};
            }
        };
        clear(problem_.dk, problem_.forward.head_dim);
        clear(problem_.dv, problem_.forward.head_dim_v);
    }

    const Problem& problem_;
    SharedMemory<Tile>& smem_;
    const int group_, warp_, lane_;  // warpgroup among the consumers, warp in it
    RingPlace<Tile::kStages> place_;
    RingPlace<Tile::kDsStages> ds_place_;  // of the newest dS

    RegisterTile<16, kQueries> s_, dp_;  // scores, then P; dP, then dS: rows are keys
    std::uint32_t p_[kQueries / 16][4], ds_[kQueries / 16][4];
    RegisterTile<16, Tile::kD> dk_, dv_;
    RegisterTile<16, Tile::kDqColumns> dq_;
    float* late_dq_;  // where dq_ goes
};

// spills: sm_90a: warpgroup 0, with few registers, keeps parts of an item in local memory; the consumers have none.
// ptxas: C7517 C7519: it waits for the first products of an item before dK and dV of the item before are stored, and
// fences where the source does not need to: once an item, and beside the fences that are there.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    backward(const __grid_constant__ Problem problem, const __grid_constant__ Maps maps, int items) {
    auto& smem = shared_memory<SharedMemory<Tile>>();
    if (threadIdx.x == 0) {
        constexpr unsigned kWarps = 4 * Tile::kConsumers;  // each arrives for itself
        const auto prepare = [](auto& slots, unsigned fills) {
            for (Slot& slot : slots) ptx::barrier_init(&slot.full, fills), ptx::barrier_init(&slot.empty, kWarps);
        };
        prepare(smem.plan_slot, 1);
        prepare(smem.key_slot, 1);
        prepare(smem.slot, 1);
        prepare(smem.ds_slot, kWarps);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads) == 0) {
        ptx::release_registers<Tile::kProducerRegisters>();
        if (threadIdx.x < 32) Producer<Tile>(problem, maps, smem).run(items);
    } else {
        ptx::acquire_registers<Tile::kConsumerRegisters>();
        Consumer<Tile>(problem, smem).run();
    }
}

template <class Tile>
void launch_tile(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const unsigned items = owned_keys_grid(p, Tile::kKeys).x;
    if (items == 0) return;
    const Maps maps{map_rows(p, p.q, p.head_dim, p.seqlen_q, p.heads_q, Tile::kQueries),
                    map_rows(p, p.k, p.head_dim, p.seqlen_k, p.heads_k, Tile::kKeys),
                    map_rows(p, p.v, p.head_dim_v, p.seqlen_k, p.heads_k, Tile::kKeys),
                    map_rows(p, problem.dout, p.head_dim_v, p.seqlen_q, p.heads_q, Tile::kQueries)};
    const dim3 grid(std::min(items, static_cast<unsigned>(problem.multiprocessors)));
    launch(backward<Tile>, {grid, dim3(Tile::kThreads), sizeof(SharedMemory<Tile>)}, stream, problem, maps,
           static_cast<int>(items));
}

template <class Tile>
Shape shape() {
    return {{Element<typename Tile::T>::kDType, 90, Tile::kD, Tile::kQueries, Tile::kKeys, Tile::kThreads / 32,
             Tile::kStages, sizeof(SharedMemory<Tile>), reinterpret_cast<const void*>(backward<Tile>)},
            Problems::kPlain,
            Pass::kFused,
            launch_tile<Tile>};
}

/// The shapes that ship (docs/tuning/hopper_backward.md).
inline constexpr TileShape kShapes[] = {
    {.d = 64, .queries = 128},
    {.d = 128, .queries = 64},
};
template <class T>
std::vector<Shape> shapes() {
    return of_rows<kShapes>([](auto i) { return shape<Tile<T, kShapes[i]>>(); });
}

}  // namespace flash_wmma::backward::wgmma
