// The consumers of the kernel for tangents (tangent.cuh).
#pragma once

#include <ptx_sm90.cuh>

#include "device/element.cuh"
#include "device/hide_keys.cuh"
#include "device/visible_tiles.cuh"
#include "forward/wgmma/output.cuh"
#include "forward/wgmma/plan.cuh"
#include "forward/wgmma/tangent_block.cuh"
#include "forward/wgmma/tangent_softmax.cuh"
#include "forward/wgmma/tangents.h"

namespace flash_wmma::wgmma_sm90 {

/// One warpgroup with its 64 rows of the Q tile.
template <class Tile>
class TangentConsumer {
  public:
    __device__ __forceinline__ TangentConsumer(const TangentParams& params, TangentMemory<Tile>& shared)
        : p_(params.forward),
          moved_(params),
          smem_(shared),
          plans_(shared.plans),
          group_(uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads - 1)),
          warp_(uniform(static_cast<int>(threadIdx.x) / 32 % 4)),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ void run() {
        Rows rows = next();
        if (rows.tiles == 0) return;
        skip_tiles(rows.before);
        await_q();
        await_k();
        multiply_qk();
        while (rows.tiles > 0) {
            attend(rows);
            multiply_moved_pv(rows.tiles > 1);
            release(smem_.q_slot[q_.stage][group_]);
            q_.advance();
            const Rows following = next();
            const bool more = following.tiles > 0;
            ptx::wgmma_wait<0>();
            release_v();
            skip_tiles(rows.after + following.before);
            if (more) {
                await_q();
                await_k();
            } else {
                q_.stage = k_.stage = 0;  // an unused product: wgmma needs one flow of control
            }
            multiply_qk();
            finish(rows);
            rows = following;
        }
        ptx::wgmma_wait<0>();
    }

  private:
    using T = typename Tile::T;
    using Place = RingPlace<Tile::kStages, /*kHidden=*/true>;
    using QRows = typename TangentMemory<Tile>::QRows;
    using Weights = std::uint32_t[Tile::kBc / 16][4];
    static constexpr int kBc = Tile::kBc;

    /// What this warp works on: 16 rows, and the K tiles that the warpgroup's rows see.
    struct Rows {
        Sequence sequence;
        int head;
        BandMask mask;
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
    __device__ __forceinline__ void await_k() { ptx::barrier_wait(&smem_.k_slot[k_.stage].full, k_.parity); }
    __device__ __forceinline__ void await_v() { ptx::barrier_wait(&smem_.v_slot[v_.stage].full, v_.parity); }
    __device__ __forceinline__ void await_q() { ptx::barrier_wait(&smem_.q_slot[q_.stage][group_].full, q_.parity); }

    /// Whether some warp of the warpgroup says so, of one tile after the other.
    __device__ __forceinline__ bool any_warp(bool of_this) {
        auto& votes = smem_.votes[group_][votes_ & 1];  // the next tile's are apart: some warps may still read these
        if (lane_ == 0) votes.of_warp[warp_] = of_this;
        ptx::named_barrier_sync(1 + group_, Tile::kGroupThreads);
        ++votes_;
        const int4 all = *reinterpret_cast<const int4*>(votes.of_warp);
        return (all.x | all.y | all.z | all.w) != 0;
    }

    /// Passes over tiles that none of this warpgroup's rows sees.
    __device__ __forceinline__ void skip_tiles(int count) {
#pragma unroll 1
        for (; count > 0; --count) {
            await_k();
            release_k();
            await_v();
            release_v();
        }
    }

    /// Issues scores (+)= a b^T, of rows of queries and rows of keys.
    template <class QPanels, class KeyPanels>
    __device__ __forceinline__ void multiply(RegisterTile<16, kBc>& scores, const QPanels& a, const KeyPanels& b,
                                             bool adds) {
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i) {
            const ptx::SharedMatrix<ptx::Major::K> q_rows(a[i]), k_rows(b[i]);
#pragma unroll
            for (int step = 0; step < 4; ++step)
                ptx::wgmma<T, kBc>(scores.flat(), q_rows + 32 * step, k_rows + 32 * step, adds || i + step > 0);
        }
    }
    // Q's address is hidden from the compiler, or the descriptors of all its parts are kept through the loop over tiles

    /// Issues S = Q K^T.
    __device__ __forceinline__ void multiply_qk() {
        const QRows& q = *ptx::opaque(&smem_.q[q_.stage][group_]);
        const auto& k = smem_.k[k_.stage];
        ptx::wgmma_fence();
        multiply(s_, q.panel, k.panel, false);
        ptx::wgmma_commit();
    }
    /// Issues T = Q dK^T + dQ K^T, of what moves.
    __device__ __forceinline__ void multiply_moved_qk() {
        const QRows& q = *ptx::opaque(&smem_.q[q_.stage][group_]);
        const auto& k = smem_.k[k_.stage];
        ptx::wgmma_fence();
        if constexpr (Tile::kMoves.k) multiply(t_, q.panel, k.moved, false);
        if constexpr (Tile::kMoves.q) multiply(t_, q.moved, k.panel, Tile::kMoves.k);
        ptx::wgmma_commit();
    }

    /// Issues O += P V, and N += P dV if V moves; not `begun`: their first products.
    __device__ __forceinline__ void multiply_pv(bool begun) {
        await_v();
        const auto& v = smem_.v[v_.stage];
        const ptx::SharedMatrix<ptx::Major::N> rows(v.panel, sizeof(v.panel[0]));
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBc / 16; ++step) {
            const bool adds = step > 0 || begun;
            ptx::wgmma<T, Tile::kD>(o_.flat(), weights_[step], rows + 16 * 128 * step, adds);
            if constexpr (Tile::kMoves.v) {
                const ptx::SharedMatrix<ptx::Major::N> moved(v.moved, sizeof(v.moved[0]));
                ptx::wgmma<T, Tile::kD>(n_.flat(), weights_[step], moved + 16 * 128 * step, adds);
            }
        }
        ptx::wgmma_commit();
    }
    /// Issues N += P (T - c) V, of the same V and with the same `begun`.
    __device__ __forceinline__ void multiply_moved_pv(bool begun) {
        const auto& v = smem_.v[v_.stage];
        const ptx::SharedMatrix<ptx::Major::N> rows(v.panel, sizeof(v.panel[0]));
        ptx::wgmma_fence();
#pragma unroll
        for (int step = 0; step < kBc / 16; ++step)
            ptx::wgmma<T, Tile::kD>(n_.flat(), moved_weights_[step], rows + 16 * 128 * step,
                                    Tile::kMoves.v || step > 0 || begun);
        ptx::wgmma_commit();
    }

    __device__ __forceinline__ static void pack(Weights& weights, const RegisterTile<16, kBc>& tile) {
        tile.each_pair([&](float x, float y, int i, int j) { weights[j / 2][j % 2 * 2 + i] = packed<T>(x, y); });
    }

    /// All of the rows' work except their first products with K, issued before, and their last with V.
    __device__ __forceinline__ void attend(const Rows& rows) {
        const int last_query = min(rows.first_query + Tile::kWarpRows, rows.sequence.seqlen_q) - 1;
        const VisibleTiles<kBc> visible(rows.mask, rows.first_query, last_query);
        const int last = rows.first_tile * kBc, first = last + (rows.tiles - 1) * kBc;
        softmax_ = {};
        ptx::wgmma_wait<0>();
        multiply_moved_qk();
        for (int key = first;; key -= kBc) {
            const bool left = key < visible.all_begin, right = key >= visible.all_end;
            const bool begun = key < first;
            softmax_.weigh(
                s_, p_.scale * kLog2e,
                [&] {
                    const auto query = [&](int i) { return rows.first_query + row() + 8 * i; };
                    hide_keys(s_, rows.mask, query, key + column(), left, right);
                },
                [&](int i, float x) {
                    if (begun) o_.scale_row(i, x), n_.scale_row(i, x);
                });
            pack(weights_, s_);
            if (any_warp(softmax_.raised())) {  // a wait is for all of a warpgroup
                ptx::wgmma_wait<0>();
                softmax_.recentre(t_, s_, p_.scale, left || right, [&](int i, float x) {
                    if (begun) n_.each_in_row(i, [&](float& y, int c) { y = fmaf(-x, o_.at(i, c), y); });
                });
            }
            multiply_pv(begun);
            ptx::wgmma_wait<1>();
            release_k();
            softmax_.move(t_, s_, p_.scale, left || right);
            pack(moved_weights_, t_);
            if (key == last) break;
            await_k();
            multiply_qk();
            multiply_moved_pv(begun);
            ptx::wgmma_wait<0>();
            release_v();
            multiply_moved_qk();
        }
    }

    /// Stores the rows' results to global memory.
    __device__ __forceinline__ void finish(const Rows& rows) {
        store_rows<T, false>(p_, rows.sequence, rows.head, rows.first_query, 0, o_, softmax_.softmax(), lane_);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const auto ends = softmax_.ends(p_, rows.head, i);
            const int query = rows.first_query + row() + 8 * i;
            const bool inside = query < rows.sequence.seqlen_q;
            if (lane_ % 4 == 0 && inside) moved_.dlse[lse_index(p_, rows.sequence, rows.head, query)] = ends.dlse;
            n_.each_in_row(i, [&](float& x, int c) { x = fmaf(ends.from_o, o_.at(i, c), x); });
            store_row<false>(row_of<T>(moved_.dout, rows.sequence.index, rows.head, query), i, n_, ends.scale, 1.f,
                             ends.none, inside, 0, p_.head_dim_v, lane_);
        }
    }

    const ForwardParams& p_;
    const TangentParams& moved_;
    TangentMemory<Tile>& smem_;
    PlanReader<Tile> plans_;
    const int group_, warp_, lane_;  // warpgroup among the consumers, warp in it
    Place k_, v_;
    RingPlace<Tile::kQStages, /*kHidden=*/true> q_;

    RegisterTile<16, kBc> s_, t_;      // scores, then P; their tangents, then P (T - c)
    Weights weights_, moved_weights_;  // the same as operands
    RegisterTile<16, Tile::kD> o_, n_;
    TangentSoftmax softmax_;
    int votes_ = 0;  // that were taken
};

}  // namespace flash_wmma::wgmma_sm90
