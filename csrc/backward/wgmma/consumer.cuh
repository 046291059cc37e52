// What the consumers of both arrangements share (bwd_sm90.cuh, two_roles.cuh): a warp's words with the producer, P and
// dS of its keys, and its rows of dK and dV.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>

#include <type_traits>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/products.cuh"
#include "backward/wgmma/query_facts.cuh"
#include "backward/wgmma/score_changes.cuh"
#include "backward/wgmma/store_rows.cuh"
#include "device/constants.cuh"
#include "device/dropout_tile.cuh"
#include "device/element.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma::backward::wgmma {

/// The place of an item's next tile, in instances that ask for it.
template <class Tile, bool kAsks>
class NextPlace {
  public:
    __device__ __forceinline__ void begin(const Item&) {}
    __device__ __forceinline__ QueryPlace take(const Item&) { return {}; }
};
template <class Tile>
class NextPlace<Tile, true> {
  public:
    __device__ __forceinline__ void begin(const Item& item) { next_ = {item.start_head, item.start}; }
    __device__ __forceinline__ QueryPlace take(const Item& item) {
        const QueryPlace at = next_;
        next_.template advance<Tile>(item);
        return at;
    }

  private:
    QueryPlace next_{};
};

/// Which weights of an item's tiles dropout keeps. What is known of an item stays in shared memory. kAlways: there is
/// dropout in all problems of the instance.
template <class Tile, bool kAlways>
class ItemDropout {
  public:
    __device__ __forceinline__ explicit ItemDropout(const Dropout& dropout)
        : dropout_(dropout), state_(drops() ? dropout_state(dropout) : DropoutState{}) {}

    __device__ __forceinline__ bool drops() const { return kAlways || dropout_.rng_state; }
    /// Of a tile and of the keys of a warp.
    __device__ __forceinline__ KeptTile<true, 16, Tile::kQueries> kept(const Item& item, const QueryPlace& at,
                                                                       int warp_key) const {
        const DropoutMask mask(state_, dropout_.origin, item.sequence.index, at.head);
        return {dropout_, mask, at.row, item.first_key + warp_key};
    }

  private:
    const Dropout& dropout_;
    const DropoutState state_;
};

template <class Tile>
class NoDropout {
  public:
    __device__ __forceinline__ explicit NoDropout(const Dropout&) {}
    __device__ __forceinline__ static constexpr bool drops() { return false; }
    __device__ __forceinline__ static KeptTile<true, 16, Tile::kQueries> kept(const Item&, const QueryPlace&, int) {
        return {};
    }
};

/// What an instance's problems and pass ask of its consumers.
template <class Tile, Problems kProblems, Pass kPass>
struct Asks {
    static constexpr bool kDrops = includes(kProblems, Problems::kDropped),
                          kChanges = includes(kProblems, Problems::kModified);
    using Place = NextPlace<Tile, kDrops || kChanges>;
    using Dropout = std::conditional_t<kDrops, ItemDropout<Tile, !kChanges>, NoDropout<Tile>>;
    using Changes = std::conditional_t<kChanges, ScoreChanges<Tile::kQueries, true>,
                                       NoChanges<Tile::kQueries, true, folds_facts<Tile, kProblems>()>>;
    using Facts = std::conditional_t<folds_facts<Tile, kProblems>(), FoldedFacts<Tile>, LoadedFacts<Tile>>;

    /// Whether a tile has no part in any gradient, whatever its rows and the keys hold. In turns alone, where ranges
    /// leave many such tiles: ptxas fences about products that may be left out.
    __device__ __forceinline__ static bool leaves_out(Seen seen) {
        if constexpr (kChanges && kPass == Pass::kTurns)
            return uniform(static_cast<int>(seen)) == static_cast<int>(Seen::kNone);
        else return false;
    }
};

/// A warp of a consumer, with 16 of the block's keys.
template <class Tile>
class ConsumerWarp {
  protected:
    using T = typename Tile::T;
    static constexpr int kQueries = Tile::kQueries;
    using Gradient = RegisterTile<16, Tile::kD>;      // rows of dK or dV
    using Weights = std::uint32_t[kQueries / 16][4];  // P^T or dS^T as an operand: rows are keys
    using Scores = RegisterTile<16, kQueries>;        // the same as accumulators

    /// `key_group`: which 64 of the block's keys are the warpgroup's.
    __device__ __forceinline__ ConsumerWarp(const Problem& problem, int key_group)
        : problem_(problem),
          group_(key_group),
          warp_(uniform(static_cast<int>(threadIdx.x) / 32 % 4)),
          lane_(static_cast<int>(threadIdx.x) % 32) {}

    __device__ __forceinline__ int row() const { return lane_ / 4; }
    __device__ __forceinline__ int column() const { return lane_ % 4 * 2; }
    __device__ __forceinline__ int warp_key() const { return Tile::kGroupKeys * group_ + Tile::kWarpKeys * warp_; }

    /// This warp's word to the others of the slot's barrier.
    __device__ __forceinline__ void tell(ptx::Barrier& barrier) const {
        __syncwarp();
        if (lane_ == 0) ptx::barrier_arrive(&barrier);
    }

    /// What the producer wrote. One lane reads it, the one that says later that the place is empty.
    template <class X>
    __device__ __forceinline__ X told(const X& shared) const {
        X x;
        if (lane_ == 0) x = shared;
        return uniform(x);
    }

    // ---- P and dS ---------------------------------------------------------------------------------------------------

    /// Issues own rows of `keys` times `queries`, transposed. `adds`: to what is there. kParts: `queries` are one of
    /// that many parts of the columns.
    template <int kParts = 1, class KeyRows, class QueryRows>
    __device__ __forceinline__ void multiply_rows(Scores& product, const KeyRows& keys, const QueryRows& queries,
                                                  bool adds, int part = 0) const {
        const int first = Tile::kPanels / kParts * part;
#pragma unroll
        for (int j = 0; j < Tile::kPanels / kParts; ++j) {
            const int i = first + j;
            const ptx::SharedMatrix<ptx::Major::K> a(keys.panel[i] + 64 * Tile::kGroupKeys * group_),
                b(queries.panel[j]);
#pragma unroll
            for (int step = 0; step < 4; ++step)
                if (64 * i + 16 * step < Tile::kD)
                    ptx::wgmma<T, kQueries>(product.flat(), a + 32 * step, b + 32 * step, adds || i + step > 0);
        }
        ptx::wgmma_commit();
    }

    /// P of own keys in place of S, which `factor` brings to log2 units. `lse`: the facts, with L.
    template <class Facts>
    __device__ __forceinline__ static void weigh(Scores& s, const Facts& lse, float factor) {
        s.each([&](float& x, int, int c) { x = ptx::ex2(fmaf(x, factor, lse.of_column(c))); });
    }
    /// Of own keys and a tile of queries.
    __device__ __forceinline__ ScoresPlace<true> scores_place(const Item& item, const QueryPlace& at) const {
        return {item.sequence, at.head, at.row + column(), item.first_key + warp_key() + row()};
    }

    /// P = 0 where a query does not see a key.
    __device__ __forceinline__ void hide(Scores& p, const Item& item, int first_query) const {
        const BandMask mask = told(item.mask);
        const int first_key = told(item.first_key) + warp_key() + row(), base = first_query + column();
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int key = first_key + 8 * i, first = mask.first_query(key) - base;
            const int last = key < mask.seqlen_k ? mask.last_query(key) - base : -1;
            p.each_in_row(i, [&](float& x, int c) {
                if (c < first || c > last) x = 0.f;
            });
        }
    }
    /// dS in place of dP. `delta`: the facts, with D.
    template <class Facts>
    __device__ __forceinline__ static void differentiate(Scores& dp, const Scores& p, const Facts& delta) {
        dp.each([&](float& x, int i, int c) { x = p.at(i, c) * delta.plus_delta(x, c); });
    }
    /// The same with dropout, where D is that of dS times 1 - p; and P of dropped weights becomes 0.
    template <class Facts>
    __device__ __forceinline__ static void differentiate(Scores& dp, Scores& p, const Facts& delta,
                                                         const KeptTile<true, 16, kQueries>& kept_weights) {
        kept_weights.each([&](int i, int c, bool kept) {
            float &weight = p.at(i, c), &x = dp.at(i, c);
            const float minus = weight * delta.of_column(c);
            weight = kept ? weight : 0.f;
            x = fmaf(weight, x, minus);
        });
    }
    __device__ __forceinline__ static void pack(Weights& weights, const Scores& scores) {
        scores.each_pair([&](float x, float y, int i, int j) { weights[j / 2][j % 2 * 2 + i] = packed<T>(x, y); });
    }

    /// Own rows to shared memory, in the swizzle of the panels.
    template <class Transposed>
    __device__ __forceinline__ void store_weights(Transposed& to, const Weights& weights) const {
        // Of this lane's row in a panel, hidden: or every address is kept through the loop
        const int at = ptx::opaque(64 * (warp_key() + lane_ % 16) + 8 * (lane_ / 16 ^ lane_ % 8));
#pragma unroll
        for (int step = 0; step < kQueries / 16; ++step)
            ptx::stmatrix_x4(to.panel[step / 4] + (at ^ 16 * (step % 4)), weights[step]);
    }

    // ---- dQ ---------------------------------------------------------------------------------------------------------

    /// Adds 16 rows of dQ to the buffer. `to`: this lane's place there. `columns`: how many exist.
    template <int kColumns>
    __device__ __forceinline__ static void add(float* to, const RegisterTile<16, kColumns>& dq, int columns) {
        each_block<kColumns>(columns,
                             [&](int j) { ptx::red_add_4(to + DqFragment::offset(0, 8 * j, 0), dq.block[0][j]); });
    }
    /// Brings 16 rows of dQ of a tile, from its row and column on, to where the task says.
    template <int kColumns>
    __device__ __forceinline__ void bring(const DqTask& task, RegisterTile<16, kColumns>& dq, int row, int column,
                                          float factor) const {
        const ForwardParams& p = problem_.forward;
        const int head_dim = static_cast<int>(p.head_dim), columns = head_dim - column;
        if (task.rows <= row || columns <= 0) return;
        float* const sums = problem_.dq_rows + static_cast<std::int64_t>(task.group) * (kRowGroup * head_dim) +
                            DqFragment::offset(row, column, head_dim) + 4 * lane_;
        const auto at = [&](int j) { return reinterpret_cast<float4*>(sums + DqFragment::offset(0, 8 * j, 0)); };
        if (task.finishes) {
            if (!task.first)
                each_block<kColumns>(columns, [&](int j) {
                    const float4 sum = *at(j);
                    float (&x)[4] = dq.block[0][j];
                    x[0] += sum.x, x[1] += sum.y, x[2] += sum.z, x[3] += sum.w;
                });
            const std::int64_t pitch = problem_.dq.row;
            store_rows(static_cast<T*>(task.dq) + (row + this->row()) * pitch + column, pitch,
                       task.rows - row - this->row(), columns, dq, p.scale * factor, lane_);
        } else if (task.first) {
            each_block<kColumns>(columns, [&](int j) {
                const float (&x)[4] = dq.block[0][j];
                *at(j) = make_float4(x[0], x[1], x[2], x[3]);
            });
        } else {
            add(sums, dq, columns);
        }
    }
    /// f(j) for each block of 8 columns that exists.
    template <int kColumns, class F>
    __device__ __forceinline__ static void each_block(int columns, F f) {
        if (columns >= kColumns) {
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j) f(j);
        } else {
#pragma unroll
            for (int j = 0; j < kColumns / 8; ++j)
                if (8 * j < columns) f(j);
        }
    }

    // ---- dK and dV --------------------------------------------------------------------------------------------------

    /// Issues gradient += weights * queries: dV += P^T dO, or dK += dS^T Q. Unless `left_out`. `adds`: to what is
    /// there.
    template <class QueryRows>
    __device__ __forceinline__ void multiply_weights(Gradient& gradient, const Weights& weights,
                                                     const QueryRows& queries, bool adds, bool left_out = false) const {
        if (!left_out) issue_weighted<T, Tile::kD>(gradient, weights, queries, adds);
        ptx::wgmma_commit();
    }

    /// Writes own rows of dK or dV, from a column on.
    template <int kColumns>
    __device__ __forceinline__ void store(const Rows& rows, const KeyTile& keys, std::int64_t columns,
                                          const RegisterTile<16, kColumns>& gradient, float factor,
                                          int first_column = 0) const {
        const int key = warp_key() + row();
        store_rows(row_of<T>(rows, keys.batch, keys.head, keys.row + key) + first_column, rows.row, keys.rows - key,
                   static_cast<int>(columns) - first_column, gradient, factor, lane_);
    }
    /// The same of keys that no query sees.
    __device__ __forceinline__ void store_zeros(const Rows& rows, const KeyTile& keys, std::int64_t head_dim) const {
        const int columns = static_cast<int>(head_dim);
        for (int i = lane_; i < Tile::kWarpKeys * columns / 8; i += 32) {
            const int key = warp_key() + i / (columns / 8);
            if (key < keys.rows)
                *reinterpret_cast<uint4*>(row_of<T>(rows, keys.batch, keys.head, keys.row + key) +
                                          i % (columns / 8) * 8) = uint4{};
        }
    }

    /// What gradients of dropped weights are multiplied by.
    template <bool kDrops>
    __device__ __forceinline__ float unscaled() const {
        return kDrops ? unscaled_factor(problem_.forward) : 1.f;
    }

    const Problem& problem_;
    const int group_, warp_, lane_;  // 64 of the block's keys, 16 of them
};

}  // namespace flash_wmma::backward::wgmma
