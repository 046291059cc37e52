// bwd_sm90's pass over own queries: dQ without additions, beside a pass that computes dK and dV (two_passes.cuh).
//
// Algorithm: as in backward/mma/kernel.cuh, Pass::kQueries. Blocks are persistent and take items from a queue. An item
// is 128 queries of a head; the block streams over the tiles of keys that they see, from the last to the first:
//     S = Q K^T;  P = exp2(S * scale - L);  dP = dO V^T;  dS = P (dP - D);  dQ += dS K.
//
// Roles: one warp of warpgroup 0 says what the next item is, and copies its K and V; another copies its Q and dO. Each
// of two consumer warpgroups owns 64 queries, each of its warps 16 of them, with their L and D in registers. S and dP
// have queries as rows, so that dS goes from the accumulators to the first operand of dQ in registers. S of the next
// tile is issued behind dQ of this one, so that the tensor cores have something to do while the warps compute. dQ
// leaves through shared memory, by the copy engine.
//
// Shared memory: rings of tiles of K and of V, one item's Q and dO, which come back as soon as a warpgroup has
// multiplied its last tile, and dQ on its way out.
//
// Bound: tensor cores. A tile of 128 queries and 128 keys is 1,536 cycles of theirs at d = 64 and 3,072 at d = 128, and
// 1,024 of exponentials.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/copies.cuh"
#include "backward/wgmma/prepare_beside.cuh"
#include "backward/wgmma/products.cuh"
#include "backward/wgmma/score_changes.cuh"
#include "backward/wgmma/shapes.h"
#include "backward/wgmma/store_rows.cuh"
#include "device/backward_scores.cuh"
#include "device/dropout_tile.cuh"
#include "device/nothing.cuh"
#include "device/pipeline.cuh"
#include "device/staged_rows.cuh"
#include "device/streamed_range.cuh"

namespace flash_wmma::backward::wgmma {

/// Shape of a block's work.
struct QueriesTileShape {
    int d;                ///< the largest d and d_v that the instance holds
    int keys = 128;       ///< of a streamed tile of K and V
    int stages = 2;       ///< tiles of K, and of V, in flight
    int barriers_at = 0;  ///< as of TileShape
};

/// The same with what follows from it. Scalar is half or bf16.
template <class Scalar, QueriesTileShape kShape>
struct QueriesTile {
    using T = Scalar;
    static constexpr int kD = kShape.d, kStages = kShape.stages, kBarriersAt = kShape.barriers_at;
    static constexpr int kPlans = 2;  // items that are known
    static constexpr int kWarpRows = 16, kGroupRows = 64, kGroupThreads = 128, kGroups = 2, kOwn = kGroupRows * kGroups;
    static constexpr int kStream = kShape.keys, kStep = kStream;  // a warp takes all of a tile at a time
    static constexpr int kThreads = kGroupThreads * (kGroups + 1);
    static constexpr int kProducerRegisters = 24, kConsumerRegisters = 240;
    static constexpr int kPanels = (kD + 63) / 64;  // of 64 columns
    static_assert(kD % 32 == 0 && kStream % kRowGroup == 0 && kRowGroup % kWarpRows == 0);

    /// A lane's place in a block of 16x8 accumulators.
    struct Place {
        int lane = static_cast<int>(threadIdx.x) % 32;
        __device__ __forceinline__ int row() const { return lane / 4; }
        __device__ __forceinline__ int column() const { return lane % 4 * 2; }
    };
};

/// 128 queries of a head and the tiles of keys that they see: the last one begins at `last`, and `tiles` lie side by
/// side. tiles = 0: they see no key; negative: there are no more items. Queries and keys count from the sequence's
/// first.
struct QueriesItem {
    Sequence sequence;
    int head, head_k;
    int first_row, rows;  // how many exist from it on; none if not positive
    int last, tiles;
};

/// Called by whole warps.
template <class Tile, Problems kProblems>
__device__ __forceinline__ QueriesItem queries_item(const Problem& problem, int index) {
    const ForwardParams& p = problem.forward;
    constexpr bool kPacked = includes(kProblems, Problems::kPacked);
    auto place = static_cast<unsigned>(index);
    if (!p.sequences.cu_seqlens_q && (p.band.left < kUnbounded || p.band.right < kUnbounded))
        place = mixed_queries<Tile::kOwn>(p, place, gridDim.x);
    const Assignment a = kPacked ? assignment<Tile::kOwn>(p, place) : dense_assignment<Tile::kOwn>(p, place);
    const int rows = a.tile.first_row < 0 ? 0 : a.sequence.seqlen_q - a.tile.first_row;
    const OwnedTile own{a.sequence, a.tile.head, a.tile.head_k, a.tile.first_row, rows};
    QueriesItem item{own.sequence, own.head, own.head_k, own.first_row, own.rows, 0, 0};
    if (rows <= 0) return item;
    const auto mask = query_mask<includes(kProblems, Problems::kModified)>(problem, own.sequence, own.head);
    const StreamedRange range = streamed_range<Tile, Pass::kQueries>(p, own, mask);
    item.last = range.at.last, item.tiles = range.left;
    return item;
}

/// What lies in a block's shared memory beside barriers: panels of 64 columns with the 128-byte swizzle.
template <class Tile>
struct QueriesTiles {
    template <int kRows>
    struct alignas(1024) Rows {
        typename Tile::T panel[Tile::kPanels][kRows * 64];
    };
    Rows<Tile::kGroupRows> q[Tile::kGroups], dout[Tile::kGroups];
    Rows<Tile::kStream> k[Tile::kStages], v[Tile::kStages];
    Rows<Tile::kOwn> dq;  // on its way out
    QueriesItem plan[Tile::kPlans];
};
/// Map of a block's shared memory.
template <class Tile>
struct QueriesMemory : QueriesTiles<Tile> {
    [[no_unique_address]] BeforeBarriers<QueriesTiles<Tile>, Tile::kBarriersAt> before_barriers;
    Slot plan_slot[Tile::kPlans];
    Slot own_slot[Tile::kGroups];  // Q and dO
    Slot key_slot[Tile::kStages], value_slot[Tile::kStages];
    ptx::Barrier key_patch;  // says that rows have come of which the warp that copied them clears some
};

/// Where the tensors lie, for the copy engine.
struct QueriesMaps {
    TensorMap q, k, v, dout;
    TensorMap dq;  // to store 16 rows
};

// ---- Warpgroup 0 ----------------------------------------------------------------------------------------------------

/// The warp that says what the block works on, and copies K and V.
template <class Tile, Problems kProblems>
class QueriesProducer : CopyingWarp<QueriesMemory<Tile>, kProblems> {
    using Base = CopyingWarp<QueriesMemory<Tile>, kProblems>;
    using Base::problem_, Base::smem_, Base::lane_;

  public:
    __device__ __forceinline__ QueriesProducer(const Problem& problem, const QueriesMaps& maps,
                                               QueriesMemory<Tile>& shared)
        : Base(problem, shared, shared.key_patch), maps_(maps) {}

    __device__ __forceinline__ void run(int items, const Workers& workers) {
        if (lane_ == 0) ptx::prefetch(&maps_.k), ptx::prefetch(&maps_.v);
        const int first = workers.index < 0 ? taken() + workers.count : workers.index;
        bool prepared = !problem_.prepared;
        for (int index = uniform(first); index < items;) {
            const QueriesItem item = queries_item<Tile, kProblems>(problem_, index);
            if (!prepared) prepared = await_heads(problem_, item.sequence.index, item.head, 1);
            publish(smem_, plan_, item);
            for (int n = 0; n < item.tiles; ++n) copy(item, item.last - n * Tile::kStream);
            index = uniform(taken()) + workers.count;
        }
        QueriesItem none{};
        none.tiles = -1;
        publish(smem_, plan_, none);
    }

  private:
    /// In lane 0, how many items were taken from the queue before this one.
    __device__ __forceinline__ int taken() {
        return lane_ > 0 ? 0 : static_cast<int>(atomicAdd(&problem_.queue->queries_taken, 1u));
    }
    __device__ __forceinline__ void copy(const QueriesItem& item, int row) {
        const Sequence& s = item.sequence;
        const typename Base::From from{s.first_k + row, item.head_k, s.index};
        const int used = s.seqlen_k - row;
        this->copy_keys(maps_.k, smem_.key_slot[at_.stage], at_.parity, used, from, RowsCopy{smem_.k[at_.stage]});
        this->copy_keys(maps_.v, smem_.value_slot[at_.stage], at_.parity, used, from, RowsCopy{smem_.v[at_.stage]});
        at_.advance();
    }

    const QueriesMaps& maps_;
    RingPlace<Tile::kPlans> plan_;
    RingPlace<Tile::kStages> at_;
};

/// The warp that copies Q and dO of each item. Rows behind a sequence's end are as good as any: nothing of them is
/// stored.
template <class Tile, Problems kProblems>
class OwnCopies : CopyingWarp<QueriesMemory<Tile>, kProblems> {
    using Base = CopyingWarp<QueriesMemory<Tile>, kProblems>;
    using Base::problem_, Base::smem_, Base::lane_;

  public:
    __device__ __forceinline__ OwnCopies(const Problem& problem, const QueriesMaps& maps, QueriesMemory<Tile>& shared)
        : Base(problem, shared, shared.key_patch), maps_(maps) {}

    __device__ __forceinline__ void run() {
        if (lane_ == 0) ptx::prefetch(&maps_.q), ptx::prefetch(&maps_.dout);
        unsigned n = 0;
        each_item<Tile>(smem_, [&](const QueriesItem& item) {
            if (lane_ == 0) copy(item, n);
            ++n;
        });
    }

  private:
    __device__ __forceinline__ void copy(const QueriesItem& item, unsigned n) {
        const int batch = batch_in_maps<kProblems>(problem_.forward.sequences, item.sequence.index);
#pragma unroll
        for (int group = 0; group < Tile::kGroups; ++group) {
            Slot& slot = smem_.own_slot[group];
            const int row = item.sequence.first_q + item.first_row + Tile::kGroupRows * group;
            ptx::barrier_wait(&slot.empty, n % 2 ^ 1);
            ptx::barrier_arrive_expect(&slot.full, sizeof(smem_.q[group]) + sizeof(smem_.dout[group]));
            this->load(smem_.q[group], maps_.q, &slot.full, 0, row, item.head, batch);
            this->load(smem_.dout[group], maps_.dout, &slot.full, 0, row, item.head, batch);
        }
    }

    const QueriesMaps& maps_;
};

// ---- Consumers ------------------------------------------------------------------------------------------------------

/// One warpgroup with its 64 queries.
template <class Tile, Problems kProblems>
class QueriesConsumer {
    using T = typename Tile::T;
    using Scores = RegisterTile<16, Tile::kStream>;
    static constexpr bool kChanges = includes(kProblems, Problems::kModified),
                          kDrops = includes(kProblems, Problems::kDropped);
    using Changes = std::conditional_t<kChanges, ScoreChanges<Tile::kStream, false>,
                                       NoChanges<Tile::kStream, false, /*kFolds=*/false>>;
    using Kept = KeptTile<false, 16, Tile::kStream>;

  public:
    __device__ __forceinline__ QueriesConsumer(const Problem& problem, const QueriesMaps& maps,
                                               QueriesMemory<Tile>& shared)
        : problem_(problem),
          maps_(maps),
          smem_(shared),
          group_(uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads - 1)),
          warp_row_(Tile::kGroupRows * group_ + Tile::kWarpRows * uniform(static_cast<int>(threadIdx.x) / 32 % 4)),
          changes_(problem) {
        if constexpr (kDrops)
            // Not in registers of the warp: ptxas has made a wrong loop of these (docs/tuning/dropout.md)
            if (drops()) dropout_ = DropoutState(dropout());
    }

    __device__ __forceinline__ void run() {
        unsigned items = 0;  // with tiles
        for (RingPlace<Tile::kPlans> plan;; plan.advance()) {
            Slot& slot = smem_.plan_slot[plan.stage];
            ptx::barrier_wait(&slot.full, plan.parity);
            QueriesItem item;
            if (place_.lane == 0) item = smem_.plan[plan.stage];
            item = uniform(item);
            tell(slot.empty);
            if (item.tiles < 0) break;
            if (item.tiles > 0) work_on(item, items++);
            else store_zeros(item);
        }
        await_stores();
    }

  private:
    __device__ __forceinline__ void work_on(const QueriesItem& item, unsigned n) {
        const int own = item.first_row + warp_row_;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = own + 8 * i + place_.row();
            facts_[i] = {-INFINITY, 0.f};
            if (row < item.sequence.seqlen_q) facts_[i] = OwnFacts::of(problem_, item.sequence, item.head, row);
        }
        ptx::barrier_wait(&smem_.own_slot[group_].full, n % 2);
        await_keys(tile_);
        dq_.clear();
        ptx::wgmma_fence();
        issue_scores<T, Tile::kD>(s_, smem_.q[group_], 0, smem_.k[in_uniform_register(tile_ % Tile::kStages)]);
        weigh(item, item.last, item.tiles == 1);
        // ptxas serializes products that are under way where a loop ends: here there are none
#pragma unroll 1
        for (int left = item.tiles - 1, row = item.last; left > 0; --left) {
            multiply</*kLast=*/false>(item, row);
            weigh(item, row -= Tile::kStream, left == 1);
        }
        multiply</*kLast=*/true>(item, item.last - (item.tiles - 1) * Tile::kStream);
        store(item);
    }

    /// P of a tile of keys, from key `row` on, whose S was issued, and dP. `last` of the item.
    __device__ __forceinline__ void weigh(const QueriesItem& item, int row, bool last) {
        const unsigned stage = in_uniform_register(tile_ % Tile::kStages);
        ptx::barrier_wait(&smem_.value_slot[stage].full, tile_ / Tile::kStages % 2);
        issue_scores<T, Tile::kD>(dp_, smem_.dout[group_], 0, smem_.v[stage]);
        ptx::wgmma_wait<1>();

        const int own = item.first_row + warp_row_;
        const float factor = changes_.apply(s_, place_of(item, row));
        // A warp whose rows do not exist takes the last row's place: groups behind that row have no extent
        const ScorePlace<Tile, false> place{min(own, item.sequence.seqlen_q - 1), row, place_};
        weigh_scores(
            s_, factor, [&](int i, int) { return facts_[i].minus_lse; }, place,
            query_mask<kChanges>(problem_, item.sequence, item.head));
        if constexpr (kDrops)
            if (drops())
                kept_ =
                    Kept(dropout(), DropoutMask(dropout_, dropout().origin, item.sequence.index, item.head), own, row);
        ptx::wgmma_wait<0>();
        tell(smem_.value_slot[stage].empty);
        if (last) tell(smem_.own_slot[group_].empty);
    }

    /// dS of the tile, and what it adds to dQ. Unless it is the item's last, issues S of the next.
    template <bool kLast>
    __device__ __forceinline__ void multiply(const QueriesItem& item, int row) {
        const unsigned tile = tile_++, stage = in_uniform_register(tile % Tile::kStages);
        if constexpr (kDrops)
            if (drops()) kept_.each([&](int i, int c, bool keeps) { dp_.at(i, c) = keeps ? dp_.at(i, c) : 0.f; });
        dp_.each([&](float& x, int i, int c) { x = s_.at(i, c) * (x + facts_[i].minus_delta); });
        changes_.follow_back(dp_, place_of(item, row), Seen::kSome);
        std::uint32_t ds[Tile::kStream / 16][4];
        dp_.each_pair([&](float x, float y, int i, int j) { ds[j / 2][j % 2 * 2 + i] = packed<T>(x, y); });
        ptx::wgmma_fence();
        issue_weighted<T, Tile::kD>(dq_, ds, smem_.k[stage], true);
        ptx::wgmma_commit();
        if constexpr (!kLast) {
            await_keys(tile + 1);
            issue_scores<T, Tile::kD>(s_, smem_.q[group_], 0, smem_.k[in_uniform_register((tile + 1) % Tile::kStages)]);
        }
        ptx::wgmma_wait<kLast ? 0 : 1>();
        tell(smem_.key_slot[stage].empty);
    }

    __device__ __forceinline__ ScoresPlace<false> place_of(const QueriesItem& item, int row) const {
        return {item.sequence, item.head, item.first_row + warp_row_ + place_.row(), row + place_.column()};
    }
    __device__ __forceinline__ const Dropout& dropout() const { return problem_.forward.dropout; }
    __device__ __forceinline__ bool drops() const { return kDrops && dropout().rng_state; }
    __device__ __forceinline__ void await_keys(unsigned tile) {
        ptx::barrier_wait(&smem_.key_slot[tile % Tile::kStages].full, tile / Tile::kStages % 2);
    }
    /// This warp's word to the others of the slot's barrier.
    __device__ __forceinline__ void tell(ptx::Barrier& barrier) const {
        __syncwarp();
        if (place_.lane == 0) ptx::barrier_arrive(&barrier);
    }

    /// Writes dQ of the warp's rows.
    __device__ __forceinline__ void store(const QueriesItem& item) const {
        const ForwardParams& p = problem_.forward;
        const int columns = static_cast<int>(p.head_dim), rows = item.rows - warp_row_;
        const int row = item.sequence.first_q + item.first_row + warp_row_;
        const float factor = p.scale * (kDrops ? unscaled_factor(p) : 1.f);
        if (includes(kProblems, Problems::kPacked) && p.sequences.cu_seqlens_q && rows < Tile::kWarpRows) {
            // The engine does not see where a packed sequence ends
            const std::int64_t pitch = problem_.dq.row;
            T* const to = row_of<T>(problem_.dq, item.sequence.index, item.head, row + place_.row());
            return store_rows(to, pitch, rows - place_.row(), columns, dq_, factor, place_.lane);
        }
        await_stores();
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i)
            stage_rows(smem_.dq.panel[i], warp_row_, dq_, 64 * i, place_.lane,
                       [&](int, float x, float y) { return packed<T>(x * factor, y * factor); });
        ptx::fence_proxy_async();
        __syncwarp();
        if (place_.lane > 0 || rows <= 0) return;
        const int batch = batch_in_maps<kProblems>(problem_.forward.sequences, item.sequence.index);
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i)
            if (64 * i < columns)
                ptx::tensor_store(&maps_.dq, smem_.dq.panel[i] + 64 * warp_row_, {64 * i, row, item.head, batch});
        ptx::store_commit();
    }
    /// Waits until what store() wrote to shared memory has been read.
    __device__ __forceinline__ void await_stores() const {
        if (place_.lane == 0) ptx::store_wait_read<0>();
        __syncwarp();
    }
    /// The gradients of queries that see no key.
    __device__ __forceinline__ void store_zeros(const QueriesItem& item) const {
        const int columns = static_cast<int>(problem_.forward.head_dim);
        for (int i = place_.lane; i < Tile::kWarpRows * columns / 8; i += 32) {
            const int row = warp_row_ + i / (columns / 8);
            if (row < item.rows)
                *reinterpret_cast<uint4*>(row_of<T>(problem_.dq, item.sequence.index, item.head,
                                                    item.sequence.first_q + item.first_row + row) +
                                          i % (columns / 8) * 8) = uint4{};
        }
    }

    const Problem& problem_;
    const QueriesMaps& maps_;
    QueriesMemory<Tile>& smem_;
    const int group_, warp_row_;  // 64 of the item's queries, the first of 16
    const typename Tile::Place place_;
    Changes changes_;
    [[no_unique_address]] std::conditional_t<kDrops, DropoutState, Nothing> dropout_;
    [[no_unique_address]] std::conditional_t<kDrops, Kept, Nothing> kept_;  // of the tile
    Scores s_, dp_;                                                         // scores, then P; dP, then dS
    RegisterTile<16, Tile::kD> dq_;
    OwnFacts facts_[2];  // of a lane's rows
    unsigned tile_ = 0;  // how many there were
};

/// Prepares the barriers of a block. One thread.
template <class Tile>
__device__ __forceinline__ void prepare_block(QueriesMemory<Tile>& smem) {
    constexpr unsigned kWarps = 4 * Tile::kGroups;  // each arrives for itself
    prepare_slots(smem.plan_slot, 1, kWarps + 1);
    prepare_slots(smem.own_slot, 1, 4);
    prepare_slots(smem.key_slot, 1, kWarps);
    prepare_slots(smem.value_slot, 1, kWarps);
    ptx::barrier_init(&smem.key_patch, 1);
}

/// Of warpgroup 0.
template <class Tile, Problems kProblems>
__device__ __forceinline__ void serve(const Problem& problem, const QueriesMaps& maps, QueriesMemory<Tile>& smem,
                                      int items, const Workers& workers) {
    if (threadIdx.x < 32) QueriesProducer<Tile, kProblems>(problem, maps, smem).run(items, workers);
    else if (threadIdx.x < 64) OwnCopies<Tile, kProblems>(problem, maps, smem).run();
}

template <class Tile>
QueriesMaps queries_maps(const Problem& problem) {
    const ForwardParams& p = problem.forward;
    const Sequences& s = p.sequences;
    const std::int64_t rows_q = s.cu_seqlens_q ? s.total_q : p.seqlen_q,
                       rows_k = s.cu_seqlens_k ? s.total_k : p.seqlen_k;
    return {map_rows(p, p.q, p.head_dim, rows_q, p.heads_q, Tile::kGroupRows),
            map_rows(p, p.k, p.head_dim, rows_k, p.heads_k, Tile::kStream),
            map_rows(p, p.v, p.head_dim_v, rows_k, p.heads_k, Tile::kStream),
            map_rows(p, problem.dout, p.head_dim_v, rows_q, p.heads_q, Tile::kGroupRows),
            map_rows(p, problem.dq, p.head_dim, rows_q, p.heads_q, Tile::kWarpRows)};
}

}  // namespace flash_wmma::backward::wgmma
