// wgmma_sm90: FlashAttention-2 forward on Hopper's own instructions: tensor copies (TMA), transaction barriers, wgmma.
//
// Algorithm: as in forward/mma/kernel.cuh. A block owns Br = 64 * consumers query rows of one head and loops over K/V
// tiles of Bc keys, from the last visible one back to the first:
//     S = Q K^T;  P = exp2(S * scale - m);  l += rowsum(P);  O += P V            and at the end O / l.
//
// Roles: warpgroup 0 plans and produces, one warp each. The planner says what the block works on, ahead of all others;
// the producer issues the copies of the tiles. Each consumer warpgroup owns 64 query rows, each of its warps 16 of them
// with their m and l. S, P and O are in registers, some of which warpgroup 0 gives up (setmaxnreg).
//
// Pipeline: a consumer issues S of the next tile before P V of this one, so that the tensor cores work while it makes P
// of the next. The same holds across Q tiles: blocks are persistent, and the last P V of one Q tile is issued beside
// the first S of the next, which is under way while O is stored: where two Q tiles have a place, by the copy engine,
// from the place of the rows' own Q. No index arithmetic comes between: the plan is ready.
// Consumers may be as far apart as the ring is long; two consumers at d = 64 take turns at issuing (named barriers).
//
// Lagged maximum (forward/mma/kernel.cuh): a plain tile uses the old m; each warp votes that no partial row sum passed
// Element<T>::kLargestSum or, where the second product sums the weights (TileShape), no weight. A warp whose vote fails
// computes its scores of that tile again, by mma.sync and on its own, since wgmma takes four warps. The first m of rows
// whose first tile is plain is the largest of a quarter of its keys, with a softcap of their products, where these are
// small.
//
// Shared memory: Q, K and V tiles as panels of 64 columns with the 128-byte swizzle, a ring of `stages` K and V tiles
// and a ring of plans. Each place has a barrier that says it is full and one that says it is empty.
//
// Converted inputs (device/convert.h): exponents fold into scales as in forward/mma/kernel.cuh (tile_scales.cuh). V of
// more columns than a block's registers hold of O: the grid is launched again for the next ones, with all scores.
//
// Merged with attention over other keys: a Q tile begins with their O, m and l (take_others).
//
// block.cuh says what a block is, plan.cuh what it works on and in which order. Items that would leave SMs idle are
// split over the keys, and a second grid adds up the parts (split.cuh).
//
// Bound: at d = 64 products and exponentials, either of which would take the whole time alone; from d = 128 on the
// tensor cores and their power.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>
#include <type_traits>

#include "device/dropout_tile.cuh"
#include "device/element.cuh"
#include "device/hide_keys.cuh"
#include "device/lagged_softmax.cuh"
#include "device/nothing.cuh"
#include "device/quad.cuh"
#include "device/score_mod.cuh"
#include "device/visible_tiles.cuh"
#include "forward/wgmma/block.cuh"
#include "forward/wgmma/output.cuh"
#include "forward/wgmma/plan.cuh"
#include "forward/wgmma/scores.cuh"
#include "forward/wgmma/shapes.h"
#include "forward/wgmma/split.cuh"
#include "forward/wgmma/tile_scales.cuh"

namespace flash_wmma::wgmma_sm90 {

// ---- Producer -------------------------------------------------------------------------------------------------------

/// One warp: fills the slots of the shared memory, in the order in which the consumers want them.
template <class Tile, Problems kProblems>
class Producer {
  public:
    __device__ __forceinline__ Producer(const ForwardParams& params, const Maps& tensor_maps, const Schedule& schedule,
                                        SharedMemory<Tile>& shared)
        : p_(params),
          maps_(tensor_maps),
          schedule_(schedule),
          smem_(shared),
          plans_(shared.plans),
          lane_(static_cast<int>(threadIdx.x)) {}

    __device__ __forceinline__ void run() {
        for (Item work = plans_.next(0).work; work.tiles.end > 0; work = plans_.next(0).work) {
            if constexpr (kMasks) list_ = {schedule_.mask, work.sequence.index, work.tile.head, work.tile.first_row};
            if constexpr (kFromDiagonal)
                order_ = {p_, work.sequence, work.tile.first_row + Tile::kBr - 1, Tile::kBc, work.tiles};
            int tile = work.tiles.end - 1;
            if constexpr (kPrefetchesQ) prefetch_q(work);
            load_k(work, tile);
            load_q(work);
            load_down_to(min(tile, work.tiles.first + Tile::kStages / 2), tile, work);
            if (lane_ == 0) ptx::barrier_arrive(&smem_.plans.near_end);
            load_down_to(work.tiles.first, tile, work);
            load_v(work, tile);
        }
    }

  private:
    static constexpr bool kPacked = includes(kProblems, Problems::kPacked);
    static constexpr bool kMasks = Changes<kProblems>::kMasks, kFromDiagonal = Changes<kProblems>::kFromDiagonal;
    // Whether the L2 cache gets the next rows' Q while Q's only place is taken. With a shorter ring of tiles, or a
    // bias, that measured slower
    static constexpr bool kPrefetchesQ = Tile::kQStages == 1 && Tile::kStages > 2 && !Tile::kBias;
    using Item = Work<Tile>;
    using ValueRows = typename SharedMemory<Tile>::ValueRows;

    /// The K tile at a place of the item's order.
    __device__ __forceinline__ int at(int place) const {
        if constexpr (kMasks) return MaskTiles::tile(list_.at(place));
        else if constexpr (kFromDiagonal) return order_.key(place * Tile::kBc) / Tile::kBc;
        else return place;
    }

    /// Waits until `slot` is empty in this round of its ring, then issues the copy of the rows from `row` on. Copies of
    /// `more` bytes will follow.
    template <class Rows>
    __device__ __forceinline__ void load(Rows& rows, const TensorMap& map, Slot& slot, unsigned parity,
                                         ptx::Barrier* barrier, int row, int head, const Item& work,
                                         unsigned more = 0) const {
        if (lane_ != 0) return;
        ptx::barrier_wait(&slot.empty, parity ^ 1);
        const int batch = batch_in_maps<kProblems>(p_.sequences, work.sequence.index);
        ptx::barrier_arrive_expect(barrier, sizeof(Rows) + more);
#pragma unroll
        for (int i = 0; i < static_cast<int>(std::extent_v<decltype(rows.panel)>); ++i)
            ptx::tensor_load(rows.panel[i], &map, barrier, {64 * i, row, head, batch});
    }

    /// The same for V's first `count` rows, with zeros behind them: beyond a tensor's end the copy itself writes zeros,
    /// but beyond a packed sequence's end it finds rows of the next sequence.
    __device__ __forceinline__ void load_cut(ValueRows& rows, Slot& slot, int row, const Item& work, int count) {
        ptx::barrier_wait(&slot.empty, v_.parity ^ 1);  // every lane for itself, since every lane writes there
        load(rows, maps_.v, slot, v_.parity, &smem_.patch, row, work.tile.head_k, work);
        ptx::barrier_wait(&smem_.patch, patch_parity_);
        patch_parity_ ^= 1;
        constexpr int kVectors = 64 / 8;  // of 16 bytes in a row of a panel
        constexpr int kAll = static_cast<int>(sizeof(rows.panel[0]) / sizeof(uint4));
#pragma unroll
        for (int i = 0; i < Tile::kValuePanels; ++i)
            for (int vector = max(0, count) * kVectors + lane_; vector < kAll; vector += 32)
                reinterpret_cast<uint4*>(rows.panel[i])[vector] = uint4{};
        ptx::fence_proxy_async();
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&slot.full);
    }

    /// Loads K of the tiles from `tile` - 1 down to `last`, and V one tile behind, from `tile` down to `last` + 1.
    __device__ __forceinline__ void load_down_to(int last, int& tile, const Item& work) {
        for (; tile > last; --tile) {
            load_k(work, tile - 1);
            load_v(work, tile);
        }
    }

    __device__ __forceinline__ void prefetch_q(const Item& work) const {
        if (lane_ != 0) return;
        const int batch = batch_in_maps<kProblems>(p_.sequences, work.sequence.index);
#pragma unroll
        for (int c = 0; c < Tile::kConsumers; ++c)
#pragma unroll
            for (int i = 0; i < Tile::kPanels; ++i)
                ptx::tensor_prefetch(&maps_.q,
                                     {64 * i, work.sequence.first_q + work.first_row(c), work.tile.head, batch});
    }

    __device__ __forceinline__ void load_q(const Item& work) {
#pragma unroll
        for (int c = 0; c < Tile::kConsumers; ++c) {
            Slot& slot = smem_.q_slot[q_.stage][c];
            load(smem_.q[q_.stage][c], maps_.q, slot, q_.parity, &slot.full, work.sequence.first_q + work.first_row(c),
                 work.tile.head, work);
        }
        q_.advance();
    }

    __device__ __forceinline__ void load_k(const Item& work, int tile) {
        tile = at(tile);
        Slot& slot = smem_.k_slot[k_.stage];
        unsigned bias_bytes = 0;
        if constexpr (Tile::kBias) bias_bytes = sizeof(smem_.bias[0]);
        load(smem_.k[k_.stage], maps_.k, slot, k_.parity, &slot.full, work.sequence.first_k + tile * Tile::kBc,
             work.tile.head_k, work, bias_bytes);
        if constexpr (Tile::kBias) load_bias(work, tile, slot);
        k_.advance();
    }

    /// The bias of a K tile. Queries that share a row of it have that one in their tile's first row.
    __device__ __forceinline__ void load_bias(const Item& work, int tile, Slot& slot) const {
        if (lane_ != 0) return;
        const Bias& bias = p_.bias;
#pragma unroll
        for (int c = 0; c < Tile::kConsumers; ++c)
            ptx::tensor_load(smem_.bias[k_.stage][c].panel, &maps_.bias, &slot.full,
                             {tile * Tile::kBc, bias.query == 0 ? 0 : work.first_row(c),
                              bias.head == 0 ? 0 : work.tile.head, bias.batch == 0 ? 0 : work.sequence.index});
    }

    /// Weights of 0 must not meet other sequences' rows, which may be infinite.
    __device__ __forceinline__ void load_v(const Item& work, int tile) {
        tile = at(tile);
        Slot& slot = smem_.v_slot[v_.stage];
        auto& rows = smem_.v[v_.stage];
        const int row = work.sequence.first_k + tile * Tile::kBc;
        const int count = work.sequence.seqlen_k - tile * Tile::kBc;  // of the sequence's rows
        if (kPacked && (p_.sequences.cu_seqlens_k || p_.sequences.seqused_k) && count < Tile::kBc)
            load_cut(rows, slot, row, work, count);
        else load(rows, maps_.v, slot, v_.parity, &slot.full, row, work.tile.head_k, work);
        v_.advance();
    }

    const ForwardParams& p_;
    const Maps& maps_;
    const Schedule& schedule_;
    SharedMemory<Tile>& smem_;
    PlanReader<Tile> plans_;
    const int lane_;
    TileList list_;       // of the item's tiles, which are places in it
    FromDiagonal order_;  // likewise
    RingPlace<Tile::kStages> k_, v_;
    RingPlace<Tile::kQStages> q_;
    unsigned patch_parity_ = 0;
};

/// The keys that a lane's two rows see.
class OwnRanges {
  public:
    OwnRanges() = default;
    __device__ __forceinline__ OwnRanges(const RangedMask& mask, int first_row, int last_row) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = min(first_row + 8 * i, last_row);
            begin_[i] = mask.begin(row), end_[i] = mask.end(row);
        }
    }
    __device__ __forceinline__ int begin(int i) const { return begin_[i]; }
    __device__ __forceinline__ int end(int i) const { return end_[i]; }
    /// The keys that all rows of the warp see.
    __device__ __forceinline__ int all_begin() const {
        return uniform(reduce_lanes(max(begin_[0], begin_[1]), [](int x, int y) { return max(x, y); }, 32));
    }
    __device__ __forceinline__ int all_end() const {
        return uniform(reduce_lanes(min(end_[0], end_[1]), [](int x, int y) { return min(x, y); }, 32));
    }

  private:
    int begin_[2], end_[2];
};

/// Tiles of which every row sees every key, by their first keys.
struct FreeTiles {
    int all_begin, all_end;
};

// ---- Consumers ------------------------------------------------------------------------------------------------------

/// One warpgroup with its 64 rows of the Q tile.
template <class Tile, Problems kProblems>
class Consumer {
  public:
    __device__ __forceinline__ Consumer(const ForwardParams& params, const Maps& tensor_maps, const Schedule& schedule,
                                        SharedMemory<Tile>& shared)
        : p_(params),
          maps_(tensor_maps),
          schedule_(schedule),
          smem_(shared),
          plans_(shared.plans),
          group_(uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads - 1)),
          warp_(uniform(static_cast<int>(threadIdx.x) / 32 % 4)),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void run() {
        Rows rows = next();
        if (rows.tiles == 0) return;
        if (group_ == Tile::kConsumers - 1) pass_turn();
        take_turn();
#pragma unroll 1
        for (int i = rows.before; i > 0; --i) skip_tile();
        await_q();
        await_k();
        multiply_qk();
        pass_turn();
        while (rows.tiles > 0) {
            attend(rows);
            // The last product of these rows, then the first of the next ones, beside which O is stored
            take_turn();
            multiply_pv(rows.tiles > 1);
            if constexpr (!kStagesRows) release_q();
            // Tiles that only other rows see, these pass over now: the next plan may wait for that
            const bool early = (kMasks || kRanges) && rows.after > 0;
            if (early) {
                ptx::wgmma_wait<0>();
                release_v();
#pragma unroll 1
                for (int i = rows.after; i > 0; --i) skip_tile();
            }
            const Rows following = next();
            const bool more = following.tiles > 0;
            if constexpr (kMerges<kProblems>)
                if (more && takes_others(following)) prefetch_others(following);
            // Tiles of the block that these rows do not see
            const int between = (early ? 0 : rows.after) + following.before;
            // The producer may need V's slot to go on
            const bool apart = early || !more || between >= (Tile::kTurns ? 1 : Tile::kStages);
            if (apart) {
                if (!early) {
                    ptx::wgmma_wait<0>();
                    release_v();
                }
#pragma unroll 1
                for (int i = between; i > 0; --i) skip_tile();
            } else {
#pragma unroll 1
                for (int i = between; i > 0; --i) skip(smem_.k_slot, k_);
            }
            if (more) {
                if constexpr (kStagesRows) q_.advance();
                await_q();
                await_k();
            } else {  // an unused product: wgmma needs one flow of control
                if constexpr (!kStagesRows) q_.stage = 0;
                k_.stage = 0;
            }
            multiply_qk();
            pass_turn();
            ptx::wgmma_wait<1>();
            if (!apart) {
                release_v();
#pragma unroll 1
                for (int i = between; i > 0; --i) skip(smem_.v_slot, v_);
            }
            finish(rows);
            rows = following;
        }
        ptx::wgmma_wait<0>();
        if (kStagesRows && lane_ == 0) ptx::store_wait_read<0>();
    }

  private:
    static constexpr bool kPacked = includes(kProblems, Problems::kPacked);
    static constexpr bool kModified = includes(kProblems, Problems::kModified);
    static constexpr bool kMasks = Changes<kProblems>::kMasks, kRanges = Changes<kProblems>::kRanges;
    static constexpr bool kChanges = Changes<kProblems>::kAny, kFromDiagonal = Changes<kProblems>::kFromDiagonal;
    static constexpr bool kConverted = includes(kProblems, Problems::kConverted);
    static constexpr bool kHasRuns = kConverted && Tile::kBc > kScaleRows;  // of keys with exponents of their own
    static constexpr bool kDrops = Changes<kProblems>::kDrops;
    static constexpr bool kStagesRows = kStagesO<Tile, kProblems>;
    // Whether the first P V sets O, which else has what it is added to: zeros, attention over other keys, or a run of
    // keys
    static constexpr bool kSetsO = Tile::kSetsO && !kMerges<kProblems> && !kHasRuns;
    // Whether tiles that are not plain vote as well, with infinite sums: where registers are few, ptxas else keeps
    // `done` in local memory
    static constexpr bool kAllVote = Changes<kProblems>::kCaps && Tile::kD <= 64;
    static_assert(!kAllVote || !(kPacked || kHasRuns));
    // Where V's runs lie far apart, a tile's V is waited for before its K is released
    static_assert(!kHasRuns || Tile::kStages > 1);
    // What the second product sums are the weights that it multiplies V by, as rounded: not dropped ones, not those of
    // converted inputs
    static_assert(!Tile::kProductSums || !(kDrops || kConverted || kMerges<kProblems> || kChanges));
    static_assert(!kTells<kProblems> || !(kPacked || kModified || kChanges || kConverted || kDrops));
    static_assert(!kMasks || (Tile::kBc == MaskTiles::kKeys && !Tile::kTurns));
    using T = typename Tile::T;
    using Place = RingPlace<Tile::kStages, /*kHidden=*/true>;
    using PerRow = RowValues<Tile::kWarpRows>;
    using Sums = typename Told<Tile, kProblems>::Sums;
    static constexpr int kBc = Tile::kBc;

    /// What this warp works on: 16 rows, and the K tiles that the warpgroup's rows see.
    struct Rows {
        Sequence sequence;
        int head;
        BandMask mask;
        int part;
        int first_query;
        int first_tile, tiles;  // no tiles: there are no more rows
        int before, after;      // tiles of the block that come before and after these
    };

    __device__ __forceinline__ int row() const { return lane_ / 4; }
    __device__ __forceinline__ int column() const { return lane_ % 4 * 2; }

    /// The rows in the block's next item.
    __device__ __forceinline__ Rows next() {
        const auto [work, seen, part] = plans_.next(group_);
        return {work.sequence,
                work.tile.head,
                work.mask,
                kTakesParts<Tile, kProblems> ? uniform(part) : kWhole,
                work.first_row(group_) + Tile::kWarpRows * warp_,
                seen.first,
                seen.end - seen.first,
                work.tiles.end - seen.end,
                seen.first - work.tiles.first};
    }

    /// This warp no longer needs the slot.
    __device__ __forceinline__ void release(Slot& slot) const {
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&slot.empty);
    }
    __device__ __forceinline__ void release_k() {
        release(smem_.k_slot[k_.stage]);
        k_.advance();
    }
    __device__ __forceinline__ void release_v() {
        release(smem_.v_slot[v_.stage]);
        v_.advance();
    }
    __device__ __forceinline__ void release_q() {
        release(smem_.q_slot[q_.stage][group_]);
        q_.advance();
    }
    /// The place from which O leaves: that of its rows' Q, since q_ is at the next rows. If there are none: the other
    /// place.
    __device__ __forceinline__ auto& staged() const { return smem_.q[q_.stage ^ 1][group_]; }
    /// This warp no longer needs the place of the Q before, when the copy engine has read the O in it.
    __device__ __forceinline__ void release_q_before() {
        if (lane_ == 0 && has_before_) {
            ptx::store_wait_read<0>();
            ptx::barrier_arrive(&smem_.q_slot[q_.stage ^ 1][group_].empty);
        }
        __syncwarp();
        has_before_ = true;
    }
    __device__ __forceinline__ void await_k() { ptx::barrier_wait(&smem_.k_slot[k_.stage].full, k_.parity); }
    __device__ __forceinline__ void await_q() { ptx::barrier_wait(&smem_.q_slot[q_.stage][group_].full, q_.parity); }

    /// Passes over a tile that none of this warpgroup's rows sees.
    __device__ __forceinline__ void skip(Slot (&slots)[Tile::kStages], Place& place) const {
        ptx::barrier_wait(&slots[place.stage].full, place.parity);
        release(slots[place.stage]);
        place.advance();
    }

    __device__ __forceinline__ void skip_tile() {
        pass_turn();
        skip(smem_.k_slot, k_);
        skip(smem_.v_slot, v_);
        take_turn();
    }

    // If two consumers issued at the same time, their products would coincide, and no softmax would overlap with them
    __device__ __forceinline__ void take_turn() const {
        if (Tile::kTurns) ptx::named_barrier_sync(1 + group_, 2 * Tile::kGroupThreads);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (Tile::kTurns) ptx::named_barrier_arrive(1 + (group_ + 1) % Tile::kConsumers, 2 * Tile::kGroupThreads);
    }

    /// Issues S = Q K^T.
    __device__ __forceinline__ void multiply_qk() {
        ptx::wgmma_fence();
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i) {
            const ptx::SharedMatrix<ptx::Major::K> q_rows(smem_.q[q_.stage][group_].panel[i]),
                k_rows(smem_.k[k_.stage].panel[i]);
#pragma unroll
            for (int step = 0; step < min(4, Tile::kD / 16 - 4 * i); ++step)
                ptx::wgmma<T, kBc>(s_.flat(), q_rows + 32 * step, k_rows + 32 * step, i + step > 0);
        }
        ptx::wgmma_commit();
    }

    /// Bytes from V's first panel of columns to the second, which may be that of quarters.
    __device__ __forceinline__ int between_panels() const {
        if constexpr (Tile::kProductSums)
            return static_cast<int>(smem_.quarters.panel - smem_.v[v_.stage].panel[0]) * static_cast<int>(sizeof(T));
        else return sizeof(smem_.v[0].panel[0]);
    }

    /// Issues O += P V, which may sum the weights too; not `begun`: this is O's first product.
    __device__ __forceinline__ void multiply_pv(bool begun) {
        ptx::barrier_wait(&smem_.v_slot[v_.stage].full, v_.parity);
        ptx::wgmma_fence();
        const ptx::SharedMatrix<ptx::Major::N> v_rows(smem_.v[v_.stage].panel, between_panels());
#pragma unroll
        for (int step = 0; step < kBc / 16; ++step)
            ptx::wgmma<T, Tile::kColumns>(o_.flat(), weights_[step], v_rows + 16 * 128 * step,
                                          step > 0 || begun || !kSetsO);
        ptx::wgmma_commit();
    }

    /// Computes S of this warp's rows once more, without the warpgroup.
    __device__ __forceinline__ void multiply_qk_again() {
        const auto at = [](const T* panel, int r, int vector) { return panel + 64 * r + 8 * (vector ^ r % 8); };
        s_.clear();
        const int q_row = Tile::kWarpRows * warp_ + lane_ % 16, k_row = lane_ / 16 * 8 + lane_ % 8;
#pragma unroll 1
        for (int step = 0; step < Tile::kD / 16; ++step) {
            const int vector = step % 4 * 2;
            std::uint32_t a[4], b[4];
            ptx::ldmatrix_x4(a, at(smem_.q[q_.stage][group_].panel[step / 4], q_row, vector + lane_ / 16));
#pragma unroll
            for (int j = 0; j < kBc / 16; ++j) {
                ptx::ldmatrix_x4(b, at(smem_.k[k_.stage].panel[step / 4], 16 * j + k_row, vector + lane_ / 8 % 2));
#pragma unroll
                for (int h = 0; h < 2; ++h) ptx::mma_m16n8k16<T>(s_.block[0][2 * j + h], a, {b[2 * h], b[2 * h + 1]});
            }
        }
    }

    /// Brings a product (with a softcap: the score that soft_cap made of the product) to log2 units.
    __device__ __forceinline__ float factor() const { return kModified && p_.softcap != 0.f ? 1.f : p_.scale * kLog2e; }
    __device__ __forceinline__ void soft_cap() {
        if (!kModified || p_.softcap == 0.f) return;
        const float to_x = p_.scale / p_.softcap, from_x = kLog2e * p_.softcap;
        s_.each([&](float& x, int, int) { x = from_x * ScoreMod<true>::tanh(x * to_x); });
    }

    /// Which tiles every row of the warp sees. With ranges, each lane keeps those of its rows from here on.
    __device__ __forceinline__ auto visible_tiles(const Rows& rows) {
        const int last_query = min(rows.first_query + Tile::kWarpRows, rows.sequence.seqlen_q) - 1;
        if constexpr (kRanges) {
            own_ranges_ = {RangedMask(p_, rows.sequence, rows.head), rows.first_query + row(), last_query};
            return FreeTiles{own_ranges_.all_begin(), own_ranges_.all_end() - kBc + 1};
        } else {
            return VisibleTiles<kBc>(rows.mask, rows.first_query, last_query);
        }
    }

    /// The rest of a product of converted inputs; soft_cap(), unless the instance takes ScoreMods.
    __device__ __forceinline__ void complete_products() {
        if constexpr (kConverted && kModified) scales_.complete(s_);
        if constexpr (!kChanges) soft_cap();
    }

    /// Adds what is known of a tile's P: to l its sums, unless the product sums them.
    __device__ __forceinline__ void add_sums(Sums sums) {
        if constexpr (kConverted) sums.weights.each([&](int, float& x) { x *= ptx::ex2(-scales_.weight()); });
        if constexpr (!Tile::kProductSums) softmax_.add(sums.weights);
        told_.add(sums);
    }

    /// P of a plain tile, by the old m; returns this lane's sums.
    __device__ __forceinline__ Sums weigh_plain(int key, float factor) {
        if constexpr (kChanges) {
            PerRow m = softmax_.m;
            if constexpr (kConverted) m.each([&](int, float& x) { x -= scales_.weight(); });
            Sums sums;
            sums.weights = changes_.weigh(s_, key, m);
            return sums;
        } else {
            PerRow offset;
            offset.each([&](int i, float& x) { x = -softmax_.m[i]; });
            if constexpr (kConverted) offset.each([&](int, float& x) { x += scales_.weight(); });
            return told_.template weigh<false>(s_, factor, offset);
        }
    }
    /// Adds a tile's sums if they show that no weight overflows. Returns whether they do (an int, as `done` is).
    __device__ __forceinline__ int try_sums(const Sums& sums) {
        const auto fit = static_cast<int>(all_rows([&](int i) { return sums.template fit<T>(i); }));
        if (fit) add_sums(sums);
        return fit;
    }

    /// Scores of keys that a row does not see become -inf: those left of its first key if `left`, right of its last key
    /// if `right`.
    __device__ __forceinline__ void hide(const Rows& rows, int key, bool left, bool right) {
        if constexpr (kRanges) hide_keys(s_, own_ranges_, [](int i) { return i; }, key + column(), left, right);
        else
            hide_keys(
                s_, rows.mask, [&](int i) { return rows.first_query + row() + 8 * i; }, key + column(), left, right);
    }

    /// Whether a tile's products, but for their scale, are its scores or near them. With a cap of up to kMost they
    /// differ by less than 1 in log2 units.
    __device__ __forceinline__ bool has_about_scores() {
        constexpr float kMost = 1e4f;
        if constexpr (kChanges) return !kConverted && changes_.look_near(s_) && p_.softcap <= kMost;
        return !kConverted;
    }
    /// m from a quarter of the keys of the rows' first tile: near enough to begin with. Returns whether it is moderate.
    __device__ __forceinline__ bool estimate_maximum(float factor) {
        const PerRow top = s_.template row_maximum<4>();
        const bool moderate = factor > 0.f && all_moderate(top, factor);
        if (moderate) softmax_.m.each([&](int i, float& m) { m = top[i] * factor; });
        return moderate;
    }

    /// Whether `holds` is true for all of the warp's rows, two a lane. Rows behind a packed sequence belong to the next
    /// one and do not count, or the bits of results would depend on them.
    template <class Holds>
    __device__ __forceinline__ bool all_rows(Holds holds) const {
        return __all_sync(kWarpMask,
                          (holds(0) || (kPacked && rows_left_ <= 0)) && (holds(1) || (kPacked && rows_left_ <= 8)));
    }

    /// Whether all x * factor are below 2^24: then rounded (as in m) and unrounded (in an FMA) they differ by less than
    /// 1. -inf (no visible key yet) counts as below, NaN does not.
    __device__ __forceinline__ bool all_moderate(const PerRow& x, float factor) const {
        constexpr float kLimit = 1 << 24;
        return all_rows([&](int h) { return x[h] == -INFINITY || fabsf(x[h] * factor) < kLimit; });
    }

    /// P with the exact maximum, this tile's visible scores included; rescales l, and O if it has begun. Returns
    /// whether m is moderate.
    template <class Hide>
    __device__ __forceinline__ bool weigh_exactly(float factor, bool begun, Hide hide_band) {
        PerRow top, offset;
        bool moderate, rounded = false;
#pragma unroll 1
        for (;;) {
            hide_band();
            top = s_.row_maximum();
            moderate = factor > 0.f && all_moderate(top, factor);
            if (moderate || rounded) break;
            // products are rounded first, so that the largest is m to the bit
            s_.each([&](float& x, int, int) { x *= factor; });
            factor = 1.f;
            rounded = true;
        }
        top.each([&](int i, float x) {
            const float m_before = softmax_.m[i], l_before = softmax_.l[i];
            const auto [base, rescale] = softmax_.raise(i, x * factor);
            told_.raise(i, m_before, softmax_.m[i], l_before, rescale);
            offset[i] = rounded ? 0.f : -base;
            if (rounded) s_.each_in_row(i, [&, base = base](float& score, int) { score -= base; });
            if constexpr (kConverted) {
                offset[i] += scales_.weight();
                if (begun || !kSetsO) o_.scale_row(i, rescale * ptx::ex2(scales_.rescale()));
            } else if (begun || !kSetsO) {
                o_.scale_row(i, rescale);
            }
        });
        add_sums(told_.template weigh<true>(s_, factor, offset));
        // Masks may leave a row without a key for long. Its m cannot serve
        if ((kChanges || kRanges) && !all_rows([&](int i) { return softmax_.m[i] != -INFINITY; })) return false;
        return !rounded && all_moderate(softmax_.m, 1.f);
    }

    /// P as the second product's operand: its layout is that of S, in pairs.
    __device__ __forceinline__ void pack_weights() {
        s_.each_pair([&](float x, float y, int i, int j) { weights_[j / 2][j % 2 * 2 + i] = packed<T>(x, y); });
    }

    /// A plain tile of two runs: P of each by exponents of its own. Returns whether the old m serves (an int, as `done`
    /// is).
    __device__ __forceinline__ int weigh_by_run() {
        PerRow sums[2];
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            const float factor = this->factor() * scales_.product(run), weight = scales_.weight_of(run);
            sums[run].each([&](int i, float& sum) {
                const float offset = weight - softmax_.m[i];
                sum = 0.f;
                s_.each_in_row(i, [&](float& x, int column) {
                    if (column / kScaleRows != run) return;
                    x = ptx::ex2(fmaf(x, factor, offset));
                    sum += x;
                });
            });
        }
        constexpr float kMost = Element<T>::kLargestSum;
        const bool fit = all_rows([&](int i) { return sums[0][i] <= kMost && sums[1][i] <= kMost; });
        if (!fit) return 0;
#pragma unroll
        for (int run = 0; run < 2; ++run) {
            const float by = ptx::ex2(-scales_.weight_of(run));
            softmax_.l.each([&](int i, float& l) { l = fmaf(sums[run][i], by, l); });
        }
        return 1;
    }
    /// After the exact path: brings P, which has been summed, to V's exponents of its two runs. Where they lie far
    /// apart, the second run's part of P V is added here, without the warpgroup, and O goes to the first run's unit.
    __device__ __forceinline__ void even_runs(int key) {
        if (!scales_.far()) return scales_.even_weights(s_);
        pack_weights();
        ptx::barrier_wait(&smem_.v_slot[v_.stage].full, v_.parity);
#pragma unroll
        for (int step = 0; step < kScaleRows / 16; ++step)
#pragma unroll
            for (int j = 0; j < Tile::kDv / 16; ++j) {
                std::uint32_t b[4];
                const int row = kScaleRows + 16 * step + lane_ % 16, vector = j % 4 * 2 + lane_ / 16;
                ptx::ldmatrix_x4_trans(b, smem_.v[v_.stage].panel[j / 4] + 64 * row + 8 * (vector ^ row % 8));
#pragma unroll
                for (int h = 0; h < 2; ++h)
                    ptx::mma_m16n8k16<T>(o_.block[0][2 * j + h], weights_[kScaleRows / 16 + step],
                                         {b[2 * h], b[2 * h + 1]});
            }
        const float before = scales_.weight();
        const auto [weight, rescale] = scales_.step_to_first(key);
        const float by = ptx::ex2(weight - before), of_o = ptx::ex2(rescale);
        s_.each([&](float& x, int, int column) { x = column < kScaleRows ? x * by : 0.f; });
#pragma unroll
        for (int i = 0; i < 2; ++i) o_.scale_row(i, of_o);
    }

    __device__ __forceinline__ bool drops() const { return !kModified || p_.dropout.rng_state; }
    /// Drops weights, which have been summed.
    __device__ __forceinline__ void drop_weights(const Rows& rows, int key) {
        if constexpr (kDrops)
            if (drops()) drop(weights_, p_.dropout, dropout_, rows.first_query, key);
    }

    /// With masks: the entries of the tiles that these rows work on, in turn.
    class Entries {
      public:
        __device__ __forceinline__ Entries(const Schedule& schedule, const Rows& rows) {
            if constexpr (kMasks) {
                list_ = {schedule.mask, rows.sequence.index, rows.head, rows.first_query};
                group_ = rows.first_query % Tile::kBr / Tile::kGroupRows;
                last_ = rows.first_tile;
                look_ahead(rows.first_tile + rows.tiles - 1);
                advance();
            }
        }
        /// Asks for the entry at `place`, if the rows have it.
        __device__ __forceinline__ void look_ahead(int place) { next_ = list_.at(max(place, last_)); }
        /// To the entry asked for.
        __device__ __forceinline__ void advance() { entry_ = uniform(next_); }

        __device__ __forceinline__ int key() const { return MaskTiles::tile(entry_) * kBc; }
        __device__ __forceinline__ bool is_hidden() const { return list_.entries && !MaskTiles::seen(entry_, group_); }
        __device__ __forceinline__ bool in_part() const {
            return list_.entries && MaskTiles::seen(entry_, group_) != MaskTiles::kSomeSeen;
        }

      private:
        TileList list_;
        int group_, last_;
        unsigned entry_, next_;
    };

    /// Whether the rows begin with attention over other keys: those of an item's first part do.
    __device__ __forceinline__ bool takes_others(const Rows& rows) const {
        return kMerges<kProblems> && p_.merges && (rows.part == kWhole || schedule_.is_first(rows.part));
    }
    /// Brings what the rows will begin with to the L2 cache.
    __device__ __forceinline__ void prefetch_others(const Rows& rows) const {
        const int query = rows.first_query + lane_ / 2, element = p_.out_dtype == DType::kFloat32 ? 4 : 2;
        if (query >= rows.sequence.seqlen_q) return;
        ptx::prefetch_line(p_.lse + merged_index(p_, rows.sequence, rows.head, query));
        const char* row = static_cast<const char*>(p_.o.data) +
                          (rows.sequence.index * p_.o.batch + rows.head * p_.o.head + query * p_.o.row) * element;
        for (int at = lane_ % 2 * kLineBytes; at < p_.head_dim_v * element; at += 2 * kLineBytes)
            ptx::prefetch_line(row + at);
    }
    /// The rows begin with attention over other keys. Relative to m the others' weights sum to 2^kRoom. So the weights
    /// of as many new keys are no subnormal numbers of half precision.
    template <class Stored>
    __device__ __forceinline__ void take_others(const Rows& rows, float factor) {
        constexpr float kRoom = 8.f;
        const float sum = ptx::ex2(kRoom);
        softmax_.l.each([&](int i, float& lse) {
            const int query = rows.first_query + row() + 8 * i;
            const bool inside = query < rows.sequence.seqlen_q;
            lse = inside ? p_.lse[merged_index(p_, rows.sequence, rows.head, query)] : 0.f;
            const auto* o = row_of<const Stored>(p_.o, rows.sequence.index, rows.head, query);
            load_row(o, i, o_, inside, p_.head_dim_v, lane_);
        });
        softmax_.m.each([&](int i, float& m) {
            const float lse = softmax_.l[i];
            const bool none = lse == -INFINITY;
            m = fmaf(lse, kLog2e, -kRoom);
            softmax_.l[i] = !none && lane_ % 4 == 0 ? sum : 0.f;
            arrange_row<Stored>(i, o_, sum, none, lane_);
        });
        softmax_.settled = factor > 0.f && all_moderate(softmax_.m, 1.f) &&
                           all_rows([&](int i) { return softmax_.m[i] != -INFINITY; });
    }

    /// All of the rows' work except their first product with K, issued before, and their last with V.
    __device__ __forceinline__ void attend(const Rows& rows) {
        const auto visible = visible_tiles(rows);
        float factor = kChanges ? 1.f : this->factor();
        rows_left_ = rows.sequence.seqlen_q - rows.first_query - row();
        const int last = rows.first_tile * kBc, first = last + (rows.tiles - 1) * kBc;

        ptx::wgmma_wait<0>();
        if constexpr (kStagesRows) release_q_before();  // not as soon as O is stored: the engine takes its time
        if (!kSetsO) o_.clear();
        softmax_ = {};
        told_ = {};
        const bool merges = takes_others(rows);
        if constexpr (kMerges<kProblems>) {
            if (merges && p_.out_dtype == DType::kFloat32) take_others<float>(rows, factor);
            else if (merges) take_others<T>(rows, factor);
        }
        [[maybe_unused]] Entries entries(schedule_, rows);
        [[maybe_unused]] const auto order = [&] {
            if constexpr (kFromDiagonal)
                return FromDiagonal(p_, rows.sequence, rows.first_query / Tile::kBr * Tile::kBr + Tile::kBr - 1, kBc,
                                    {rows.first_tile - rows.after, rows.first_tile + rows.tiles + rows.before});
            else return Nothing{};
        }();
        if constexpr (kChanges) changes_.take(rows.sequence, rows.head, rows.first_query);
        if constexpr (kConverted) scales_.take(rows.sequence, rows.head, rows.first_query, rows.mask);
        if constexpr (kDrops)
            if (drops()) dropout_ = {dropout_state(p_.dropout), p_.dropout.origin, rows.sequence.index, rows.head};
        for (int place = first;; place -= kBc) {
            int key = place;
            if constexpr (kMasks) key = entries.key();
            if constexpr (kFromDiagonal) key = order.key(place);
            if constexpr (Tile::kBias) changes_.find(smem_.bias[k_.stage][group_].panel);
            else if constexpr (kChanges) changes_.ask(key, kMasks && entries.in_part());
            if constexpr (kMasks) entries.look_ahead(place / kBc - 1);
            if constexpr (kConverted) {
                scales_.step(key);
                if constexpr (!kModified && !kHasRuns) factor = this->factor() * scales_.product();
            }
            ptx::wgmma_wait<1>();
            complete_products();
            // A tile that every row sees: the old m serves if no weight overflows
            const bool free = key >= visible.all_begin && key < visible.all_end;  // visible.all(): a comparison more
            if (key == first && free && !merges && has_about_scores())
                softmax_.settled = estimate_maximum(kChanges ? p_.scale * kLog2e : factor);
            bool plain = softmax_.settled && free;
            if constexpr (kFromDiagonal) plain = plain && !(order.goes_back(place) && changes_.rises(key));
            else if constexpr (kChanges) plain = plain && !changes_.rises(key);
            if constexpr (kConverted) plain = plain && scales_.rescale() == 0.f && !scales_.far();
            int done = 0;  // a bool takes more instructions here
            if constexpr (kAllVote) {
                Sums sums;
                if (plain) sums = weigh_plain(key, factor);
                else sums.weights.each([&](int, float& x) { x = INFINITY; });
                done = try_sums(sums);
            } else if (plain) {
                if constexpr (kHasRuns) done = weigh_by_run();
                else done = try_sums(weigh_plain(key, factor));
            }
            ptx::wgmma_wait<0>();
            if (place < first) release_v();
            if constexpr (kMasks) {
#pragma unroll 1
                for (; skipped_ > 0; --skipped_) skip(smem_.v_slot, v_);
            }
            if (!done) {
                if (plain) {
                    multiply_qk_again();
                    complete_products();
                }
                if constexpr (kChanges) changes_.apply(s_, key);
                if constexpr (kHasRuns) scales_.complete(s_);
                softmax_.settled = weigh_exactly(
                    factor, place < first, [&] { hide(rows, key, key < visible.all_begin, key >= visible.all_end); });
                if constexpr (kHasRuns) even_runs(key);
            }
            release_k();
            pack_weights();
            if (place == last) {
                drop_weights(rows, key);
                break;
            }
            const bool begun = place < first;
            if constexpr (kMasks) {
                entries.advance();
#pragma unroll 1
                for (; entries.is_hidden() && place - kBc > last && skipped_ < Tile::kStages - 1; ++skipped_) {
                    skip(smem_.k_slot, k_);
                    place -= kBc;
                    entries.look_ahead(place / kBc - 1);
                    entries.advance();
                }
            }
            await_k();
            take_turn();
            multiply_qk();
            drop_weights(rows, key);  // beside the product
            multiply_pv(begun);
            pass_turn();
        }
    }

    /// Whether the copy engine stores O. It does not see where a packed sequence ends.
    __device__ __forceinline__ bool leaves_staged(const Rows& rows) const {
        if (!kPacked || !p_.sequences.cu_seqlens_q) return kStagesRows;
        return kStagesRows && rows.first_query + Tile::kWarpRows <= rows.sequence.seqlen_q;
    }

    /// Stores O / l and the LSE to global memory, or a part of an item to the workspace.
    __device__ __forceinline__ void finish(const Rows& rows) {
        if constexpr (Tile::kProductSums) softmax_.l.each([&](int i, float& l) { l = o_.at(i, Tile::kDv); });
        const auto o = o_.template first<Tile::kDv>();
        const float kept = kDrops && drops() ? kept_scale(p_.dropout) : 1.f;
        if constexpr (kConverted) {
            store_rows<float, false>(p_, rows.sequence, rows.head, rows.first_query, 0, o, softmax_, lane_,
                                     scales_.unit() * kept);
        } else if (rows.part != kWhole) {
            if (rows.first_query < rows.sequence.seqlen_q)
                give(PartRows<Tile, kProblems>(p_, rows.part, rows.first_query % Tile::kBr, lane_), o, softmax_, told_);
        } else if (leaves_staged(rows)) {
            if constexpr (kStagesRows)
                stage_output(p_, maps_.o, staged().panel, Tile::kWarpRows * warp_, rows.sequence, rows.head,
                             rows.first_query, o, softmax_, lane_, kept);
        } else {
            store_rows<T, Tile::kSwapsOnce, kMerges<kProblems>>(p_, rows.sequence, rows.head, rows.first_query, 0, o,
                                                                softmax_, lane_, kept);
        }
        if (rows.part == kWhole) told_.store(p_, rows.sequence, rows.head, rows.first_query, softmax_, lane_);
        if constexpr (kStagesRows) __syncwarp();  // lane 0 was apart from the others
    }

    const ForwardParams& p_;
    const Maps& maps_;
    const Schedule& schedule_;
    SharedMemory<Tile>& smem_;
    PlanReader<Tile> plans_;
    const int group_, warp_, lane_;  // warpgroup among the consumers, warp in it
    Place k_, v_;
    RingPlace<Tile::kQStages, /*kHidden=*/true> q_;
    bool has_before_ = false;  // whether the warp has had rows before these

    std::conditional_t<kRanges, OwnRanges, Nothing> own_ranges_;

    RegisterTile<Tile::kWarpRows, kBc> s_;  // scores, then weights
    std::uint32_t weights_[kBc / 16][4];
    RegisterTile<Tile::kWarpRows, Tile::kColumns> o_;
    LaggedSoftmax<Tile::kWarpRows> softmax_;
    Told<Tile, kProblems> told_;
    int rows_left_;  // from row() on in the sequence
    std::conditional_t<kChanges, ScoreChanges<Tile, kProblems>, Nothing> changes_{p_, schedule_.mask,
                                                                                  schedule_.soft_cap};
    std::conditional_t<kConverted, TileScales<kBc>, Nothing> scales_{p_};
    std::conditional_t<kDrops, DropoutMask, Nothing> dropout_;
    int skipped_ = 0;  // K tiles that were passed over, and whose V tiles are yet to be
};

/// kPlain: the compiler knows that an item's bounds are the same in every thread. kPacked, for heads up to 64: packed
/// sequences alone. kGeneral: packed sequences, also with a softcap. kPackedDropped: packed sequences and dropout. With
/// kChanged: a bias, ALiBi, key ranges and dropout too.
// spills: sm_90a: warpgroup 0, with few registers, keeps parts of an item in local memory, and so do consumers at their
// limit, up to 25 values, kPacked 40, which plain and packed instances do not read in the loop over tiles, nor with
// statistics (3 consumers with maxima: 2), nor merged. With kChanged, more of both: the planner finds the places of
// tiles, and consumers keep the bias's rows and the list; in the loop they read up to six.
template <class Tile, Problems kProblems>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    forward(const __grid_constant__ ForwardParams p, const __grid_constant__ Maps maps,
            const __grid_constant__ Schedule schedule) {
    auto& smem = *ptx::opaque(&shared_memory<SharedMemory<Tile>>());  // or its address is computed again for every tile
    if (threadIdx.x == 32) ptx::prefetch(&maps.k), ptx::prefetch(&maps.q), ptx::prefetch(&maps.v);
    if (threadIdx.x == 0) {
        constexpr unsigned kWarps = 4;  // of a consumer; each releases by itself
        for (auto& stage : smem.q_slot)
            for (Slot& slot : stage) ptx::barrier_init(&slot.full, 1), ptx::barrier_init(&slot.empty, kWarps);
        for (auto* ring : {smem.k_slot, smem.v_slot})
            for (int i = 0; i < Tile::kStages; ++i) {
                ptx::barrier_init(&ring[i].full, 1);
                ptx::barrier_init(&ring[i].empty, kWarps * Tile::kConsumers);
            }
        smem.plans.prepare(kWarps * Tile::kConsumers);
        ptx::barrier_init(&smem.patch, 1);
        ptx::barrier_init_fence();
    }
    if constexpr (Tile::kProductSums) {
        for (int i = static_cast<int>(threadIdx.x); i < Tile::kBc * 64; i += Tile::kThreads)
            smem.quarters.panel[i] = static_cast<typename Tile::T>(0.25f);
        ptx::fence_proxy_async();
    }
    __syncwarp();  // registers change hands by whole warps
    ptx::let_next_grid_start();
    if (uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads) == 0) {
        ptx::release_registers<Tile::kProducerRegisters>();
        if (threadIdx.x < 32) {
            await_prepared<Tile>();
            ptx::wait_for_previous_grids();
            Producer<Tile, kProblems>(p, maps, schedule, smem).run();
        } else if (threadIdx.x < 64) {
            Planner<Tile, kProblems>(p, smem.plans).run(schedule);
        } else {
            await_prepared<Tile>();
        }
    } else {
        await_prepared<Tile>();
        ptx::acquire_registers<Tile::kConsumerRegisters>();
        ptx::wait_for_previous_grids();
        Consumer<Tile, kProblems>(p, maps, schedule, smem).run();
    }
}

/// The map of the bias, for boxes of box_rows rows and 64 keys.
inline TensorMap map_bias(const ForwardParams& p, int box_rows) {
    const Bias& b = p.bias;
    const auto size = [](std::int64_t stride, std::int64_t all) { return stride == 0 ? 1 : all; };
    return make_tensor_map(b.data, p.dtype,
                           {p.seqlen_k, size(b.query, p.seqlen_q), size(b.head, p.heads_q), size(b.batch, p.batch)},
                           {b.query, b.head, b.batch}, {64, box_rows, 1, 1});
}

template <class Tile, Problems kProblems>
void launch_tile(const ForwardParams& p, const DeviceFacts& device, const Shape& shape, Stream stream) {
    const Sequences& s = p.sequences;
    const std::int64_t rows_q = s.cu_seqlens_q ? s.total_q : p.seqlen_q,
                       rows_k = s.cu_seqlens_k ? s.total_k : p.seqlen_k;
    const Maps maps{
        map_rows(p, p.q, p.head_dim, rows_q, p.heads_q, Tile::kGroupRows),
        map_rows(p, p.k, p.head_dim, rows_k, p.heads_k, Tile::kBc),
        map_rows(p, p.v, p.head_dim_v, rows_k, p.heads_k, Tile::kBc),
        Tile::kBias ? map_bias(p, Tile::kGroupRows) : TensorMap{},
        kStagesO<Tile, kProblems> ? map_rows(p, p.o, p.head_dim_v, rows_q, p.heads_q, Tile::kWarpRows) : TensorMap{}};
    const Schedule schedule = make_schedule(p, device, shape);
    const int blocks = std::min(schedule.items, multiprocessors(device));
    const LaunchConfig config{dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), sizeof(SharedMemory<Tile>),
                              /*cluster=*/1, /*programmatic=*/true};
    launch(forward<Tile, kProblems>, config, stream, p, maps, schedule);
    if constexpr (kTakesParts<Tile, kProblems>)
        if (schedule.split.items > 0) launch_merge<Tile, kProblems>(p, schedule, stream);
}

/// Keys of a row whose weights a product may sum. The tensor cores cut their sums: every 16 keys take about 2^-24 of
/// the sum away, these keys 6e-5.
inline constexpr std::int64_t kMostProductSums = 16384;

/// `speed`: a block's, relative to other shapes of the same head dim.
template <class Tile, Problems kProblems>
Shape shape(float speed) {
    return {{Element<typename Tile::T>::kDType, 90, Tile::kD, Tile::kBr, Tile::kBc, Tile::kThreads / 32, Tile::kStages,
             sizeof(SharedMemory<Tile>), reinterpret_cast<const void*>(forward<Tile, kProblems>)},
            kProblems,
            Tile::kLargestDv,
            Tile::kDv,
            kTakesParts<Tile, kProblems>,
            Tile::kProductSums ? kMostProductSums : kMaxSeqlen,
            speed,
            launch_tile<Tile, kProblems>};
}

/// A row of a table of shapes. `speed`: a block's, relative to other shapes of the same head dim.
struct TableRow {
    TileShape tile;
    float speed = 1.f;
};
template <class T, Problems kProblems, const auto& kRows>
std::vector<Shape> shapes() {
    return of_rows<kRows>([](auto i) { return shape<Tile<T, kRows[i].tile>, kProblems>(kRows[i].speed); });
}

/// The shapes that ship (docs/tuning/hopper.md).
inline constexpr TableRow kPlainRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
    {{.d = 64, .consumers = 3, .keys = 128, .stages = 4}, 1.03f},
    {{.d = 64, .consumers = 2, .turns = true, .keys = 128, .stages = 4}, 0.87f},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 96, .consumers = 2, .keys = 128, .stages = 2}, 0.9f},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 2, .keys = 128, .stages = 2}, 0.9f},
    {{.d = 192, .d_v = 128, .consumers = 3, .keys = 64, .stages = 3, .q_stages = 1}},
    {{.d = 192, .d_v = 128, .consumers = 2, .keys = 128, .stages = 2, .q_stages = 1}, 0.97f},
    {{.d = 192, .consumers = 2, .keys = 64, .stages = 3, .q_stages = 1}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
    {{.d = 512, .columns = 256, .consumers = 2, .keys = 32, .stages = 2, .q_stages = 1}},
};
/// Packed sequences alone. Here, and for maxima, many keys have a shape whose lanes sum the weights.
inline constexpr TableRow kPackedRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4, .product_sums = true}},
    {{.d = 64, .consumers = 3, .keys = 128, .stages = 4, .product_sums = true}, 1.03f},
    {{.d = 64, .consumers = 2, .turns = true, .keys = 128, .stages = 4}, 0.87f},
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
};
inline constexpr TableRow kGeneralRows[] = {
    {{.d = 64, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 64, .consumers = 2, .turns = true, .keys = 128, .stages = 4}, 0.87f},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 96, .consumers = 2, .keys = 64, .stages = 4}, 0.86f},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 2, .keys = 64, .stages = 4}, 0.86f},
    {{.d = 192, .consumers = 2, .keys = 80, .stages = 2}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
    {{.d = 512, .columns = 256, .consumers = 2, .keys = 32, .stages = 2, .q_stages = 1}},
};
/// Plain problems with the rows' largest scores.
inline constexpr TableRow kMaximaRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4, .product_sums = true}},
    {{.d = 64, .consumers = 3, .keys = 128, .stages = 4, .product_sums = true}, 1.03f},
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
};
/// Plain problems with the rows' entropies, perhaps with their largest scores too.
inline constexpr TableRow kEntropyRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
    {{.d = 64, .consumers = 3, .keys = 96, .stages = 4}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
};
/// Plain problems that are merged with attention over other keys.
inline constexpr TableRow kMergedRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
    {{.d = 64, .consumers = 3, .keys = 128, .stages = 4}, 1.03f},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
};
/// With masks.
inline constexpr TableRow kMaskedRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
    {{.d = 64, .consumers = 3, .keys = 64, .stages = 4}, 0.8f},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 192, .consumers = 2, .keys = 64, .stages = 2}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
};
/// With ALiBi or key ranges, each alone.
inline constexpr TableRow kOneChangeRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 192, .consumers = 2, .keys = 80, .stages = 2}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
};
/// With a softcap alone.
inline constexpr TableRow kCappedRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
    {{.d = 64, .consumers = 2, .turns = true, .keys = 128, .stages = 4}, 0.87f},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 96, .consumers = 2, .keys = 64, .stages = 4}, 0.86f},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 2, .keys = 64, .stages = 4}, 0.86f},
    {{.d = 192, .consumers = 2, .keys = 80, .stages = 2}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
};
/// With a bias through shared memory.
inline constexpr TableRow kBiasedRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 3, .q_stages = 1, .bias = true}},
    {{.d = 64, .consumers = 3, .keys = 64, .stages = 4, .bias = true}},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 3, .q_stages = 1, .bias = true}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 3, .q_stages = 1, .bias = true}},
    {{.d = 192, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1, .bias = true}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1, .bias = true}},
};
/// With dropout.
inline constexpr TableRow kDroppedRows[] = {
    {{.d = 64, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 192, .consumers = 2, .keys = 80, .stages = 2}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
};
/// With kChanged.
inline constexpr TableRow kChangedRows[] = {
    {{.d = 64, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 192, .consumers = 2, .keys = 64, .stages = 2}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
    {{.d = 512, .columns = 256, .consumers = 2, .keys = 64, .stages = 1, .q_stages = 1}},
};
/// Of converted inputs: every 64 keys share exponents.
inline constexpr TableRow kConvertedRows[] = {
    {{.d = 64, .consumers = 4, .keys = 64, .stages = 4}},
    {{.d = 64, .consumers = 3, .keys = 128, .stages = 4}, 1.03f},
    {{.d = 64, .consumers = 2, .turns = true, .keys = 128, .stages = 4}, 0.87f},
    {{.d = 96, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 2, .keys = 128, .stages = 2}, 0.9f},
    {{.d = 192, .consumers = 2, .keys = 64, .stages = 3, .q_stages = 1}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
    {{.d = 512, .columns = 256, .consumers = 2, .keys = 32, .stages = 2, .q_stages = 1}},
};
inline constexpr TableRow kConvertedChangedRows[] = {
    {{.d = 64, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 128, .consumers = 3, .keys = 64, .stages = 4}},
    {{.d = 192, .consumers = 2, .keys = 64, .stages = 2}},
    {{.d = 256, .consumers = 2, .keys = 64, .stages = 2, .q_stages = 1}},
    {{.d = 512, .columns = 256, .consumers = 2, .keys = 64, .stages = 1, .q_stages = 1}},
};

}  // namespace flash_wmma::wgmma_sm90
