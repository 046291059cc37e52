// What is told of weights (Statistics in attention.h), as a warp on tensor cores adds it up over tiles of scores:
//     own queries, streamed keys:                       max_j x,  -sum_j P ln P,  sum_j P w_j
//     own keys, streamed queries of one query head:     sum_i P.
#pragma once

#include <ptx.cuh>

#include "device/backward_rows.cuh"
#include "device/backward_scores.cuh"
#include "device/constants.cuh"
#include "device/quad.cuh"
#include "device/register_tile.cuh"
#include "device/score_mod.cuh"
#include "device/tile.cuh"

namespace flash_wmma::backward {

/// The LSE of a query, -inf if the query does not exist. Apart from minus_lse_of, which has to wait for the load.
__device__ __forceinline__ float lse_of(const ForwardParams& p, const Sequence& sequence, int head, int query) {
    if (query >= sequence.seqlen_q) return -INFINITY;
    return p.lse[sequence.index * p.lse_batch + head * p.lse_head + sequence.first_q + query];
}
/// -L in log2 units. -inf of a query that sees no key, so that its P is 0.
__device__ __forceinline__ float minus_lse_of(float lse) { return lse == -INFINITY ? lse : -kLog2e * lse; }

/// The sums of a warp's Rows own rows, each over a lane's columns. kModified: scores may have a softcap, a bias or
/// ALiBi.
template <int Rows, bool kOwnsKeys, bool kModified>
class WeightSums {
  public:
    __device__ __forceinline__ WeightSums(const Problem& problem, const Sequence& sequence, int head)
        : problem_(problem), sequence_(sequence), head_(head) {
        sum_.each([&](int i, float& x) {
            maximum_[i] = -INFINITY;
            entropy_[i] = x = 0.f;
        });
    }

    /// Adds a tile of products, which `factor` brings to log2 units. minus_lse(i, column) is -L of the query.
    template <int Columns, class MinusLse, class Place, class Mask>
    __device__ __forceinline__ void add(RegisterTile<Rows, Columns>& s, float factor, MinusLse minus_lse,
                                        const Place& place, const Mask& mask) {
        const ForwardParams& p = problem_.forward;
        if constexpr (kModified)
            if (ScoreMod<true>::active(p)) {
                change(s, factor, place);
                factor = 1.f;
            }
        const auto log_weight = [&](float x, int i, int column) { return fmaf(x, factor, minus_lse(i, column)); };
        if constexpr (kOwnsKeys) {
            const bool exist = place.stream + Columns <= sequence_.seqlen_q;
            if (exist && place.all_visible(mask)) {
                s.each([&](float x, int i, int column) { sum_[i] += ptx::ex2(log_weight(x, i, column)); });
                return;
            }
            s.each([&](float& x, int i, int column) { x = ptx::ex2(log_weight(x, i, column)); });
            hide(s, place, mask);
            if (!exist) hide_behind(s, place);
            s.each([&](float weight, int i, int) { sum_[i] += weight; });
        } else {
            if (!(factor > 0.f)) {  // the largest product need not be the largest score
                s.each([&](float& x, int, int) { x *= factor; });
                factor = 1.f;
            }
            if (!place.all_visible(mask)) hide(s, place, mask, -INFINITY);
            if (p.row_max) take_maxima(s, factor);
            if (p.entropy || problem_.statistics.row_sum) add_entropies(s, log_weight);
            if (problem_.statistics.row_sum) add_weighted(s, place);
        }
    }

    /// Combines the numbers of each own row over its quad and stores them: of `rows` rows from `first` on. Place: as
    /// of ScorePlace.
    template <class Place>
    __device__ __forceinline__ void store(int first, int rows, const Place& place) const {
        const ForwardParams& p = problem_.forward;
        const Statistics& asked = problem_.statistics;
        const auto plus = [](float x, float y) { return x + y; };
        if constexpr (kOwnsKeys) {
            const std::int64_t head = sequence_.index * problem_.key_batch + head_ * problem_.key_head;
            store(asked.column_sum, head + sequence_.first_k + first, rows, sum_, 1.f, plus, place);
        } else {
            const std::int64_t head = sequence_.index * p.lse_batch + head_ * p.lse_head, at = head + sequence_.first_q;
            const auto most = [](float x, float y) { return ptx::max_nan(x, y); };
            store(p.row_max, at + first, rows, maximum_, kLn2, most, place);
            store(p.entropy, at + first, rows, entropy_, kLn2, plus, place);
            store(asked.row_sum, at + first, rows, sum_, 1.f, plus, place);
        }
    }

  private:
    /// Streamed queries behind the sequence's end have no weights. Their scores may be NaN: what lies there may be
    /// infinite, and zeros there may be multiplied with a key that is.
    template <int Columns, class Place>
    __device__ __forceinline__ void hide_behind(RegisterTile<Rows, Columns>& weights, const Place& place) const {
        weights.each([&](float& x, int i, int column) {
            if (place.query(i, column) >= sequence_.seqlen_q) x = 0.f;
        });
    }
    /// Products become scores in log2 units.
    template <int Columns, class Place>
    __device__ __forceinline__ void change(RegisterTile<Rows, Columns>& s, float factor, const Place& place) const {
        const ScoreMod<true> mod(problem_.forward, sequence_, QTile{sequence_.index, head_, 0, 0});
        struct {
            __device__ void operator=(float) const {}
        } const no_slope;  // of the soft cap, which gradients need
        mod.apply_each([&](auto f) { s.each([&](float&, int i, int column) { f(i, column); }); },
                       [&](int i, int column) -> float& { return s.at(i, column); }, [&](int, int) { return no_slope; },
                       factor, [&](int i, int column) { return place.query(i, column); },
                       [&](int i, int column) { return place.key(i, column); });
    }
    template <int Columns>
    __device__ __forceinline__ void take_maxima(RegisterTile<Rows, Columns>& s, float factor) {
        RowValues<Rows> of_tile;
        of_tile.each([](int, float& x) { x = -INFINITY; });
        s.each([&](float x, int i, int) { of_tile[i] = ptx::max_nan(of_tile[i], x); });
        of_tile.each([&](int i, float x) { maximum_[i] = ptx::max_nan(maximum_[i], x * factor); });
    }
    /// Scores become weights.
    template <int Columns, class LogWeight>
    __device__ __forceinline__ void add_entropies(RegisterTile<Rows, Columns>& s, LogWeight log_weight) {
        s.each([&](float& x, int i, int column) {
            const float t = log_weight(x, i, column);
            x = ptx::ex2(t);
            if (t != -INFINITY) entropy_[i] = fmaf(-x, t, entropy_[i]);
        });
    }
    /// Of a row whose LSE is NaN hidden keys have weights too, which are NaN.
    template <int Columns, class Place>
    __device__ __forceinline__ void add_weighted(RegisterTile<Rows, Columns>& s, const Place& place) {
        const float* const key_weights = problem_.statistics.key_weights + sequence_.index * problem_.key_batch +
                                         head_ * problem_.key_head + sequence_.first_k;
        s.each([&](float weight, int i, int column) {
            const int key = min(place.key(i, column), sequence_.seqlen_k - 1);
            if (weight != 0.f) sum_[i] = fmaf(weight, key_weights[key], sum_[i]);
        });
    }

    /// Nothing if `numbers` is null.
    template <class Combine, class Place>
    __device__ __forceinline__ static void store(float* numbers, std::int64_t at, int rows,
                                                 const RowValues<Rows>& values, float factor, Combine combine,
                                                 const Place& place) {
        values.each([&](int i, float x) {
            const float all = over_quad(x, combine);
            const int row = 8 * i + place.row();
            if (numbers && place.column() == 0 && row < rows) numbers[at + row] = all * factor;
        });
    }

    const Problem& problem_;
    const Sequence& sequence_;
    const int head_;
    RowValues<Rows> maximum_, entropy_, sum_;  // sum_: of P, or of P w
};

}  // namespace flash_wmma::backward
