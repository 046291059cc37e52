// The online softmax of a warp's 16 rows, and what their tangents need of it.
//
// With T the scores' tangents, and P = exp2(S - m) with a maximum m that may lag behind (device/lagged_softmax.cuh), a
// row keeps l = sum of P and its moment, the sum of P (T - c). The row's constant c is the weighted mean of T, as of
// the last tile with which m rose: so no later weights are much larger than those that made it. In exact arithmetic c
// cancels out of all results; in the second product's type P (T - c) rounds, and overflows, by what T differs from c,
// not by what the row's tangents have in common.
//
// m rises when a tile's scores pass it by more than 2^kLag in weights: then l, the moment and the accumulators are
// rescaled, and otherwise not, since accumulators are many beside a tile's scores. c moves with it: a change of c by x
// takes x l from the moment, and x O from N. kLag is small, since P is a factor of P (T - c). Every tile takes the
// maximum of its scores: products bind here, and instructions are to spare.
#pragma once

#include <ptx.cuh>

#include <cmath>

#include "device/constants.cuh"
#include "device/lagged_softmax.cuh"
#include "device/quad.cuh"
#include "device/register_tile.cuh"
#include "device/sink.cuh"

namespace flash_wmma::wgmma_sm90 {

class TangentSoftmax {
    using PerRow = RowValues<16>;

  public:
    __device__ __forceinline__ TangentSoftmax() {
        moment_.each([&](int i, float& x) { x = centre_[i] = 0.f; });
    }

    /// P in place of a tile's products, which `factor` brings to log2 units. hide() makes the scores of hidden keys
    /// -inf. Calls rescale(i, x) for every row of the accumulators that is to be multiplied by x.
    template <int Keys, class Hide, class Rescale>
    __device__ __forceinline__ void weigh(RegisterTile<16, Keys>& s, float factor, Hide hide, Rescale rescale) {
        hide();
        PerRow top = s.row_maximum(), offset;
        const bool moderate = factor > 0.f && all_moderate(top, factor);
        if (!moderate) {  // products are rounded first, so that the largest is m to the bit
            s.each([&](float& x, int, int) { x *= factor; });
            factor = 1.f;
            hide();
            top = s.row_maximum();
        }
        bool near = moderate;
        top.each([&](int i, float x) { near = near && x * factor <= softmax_.m[i] + kLag; });
        raised_ = !__all_sync(kWarpMask, near);
        if (raised_)
            top.each([&](int i, float x) {
                const float scale = softmax_.raise(i, x * factor).rescale;
                moment_[i] *= scale;
                rescale(i, scale);
            });
        offset.each([&](int i, float& x) { x = -softmax_.base(softmax_.m[i]); });
        earlier_ = softmax_.l;
        softmax_.add(flash_wmma::weigh(s, factor, offset));
    }

    /// Whether m rose with the last tile: recentre() comes before the tile's products with V.
    __device__ __forceinline__ bool raised() const { return raised_; }

    /// Takes c anew, given the products of T, which `scale` completes, and P. Calls take(i, x) for every row of N that
    /// is to lose x O.
    template <int Keys, class Take>
    __device__ __forceinline__ void recentre(RegisterTile<16, Keys>& t, const RegisterTile<16, Keys>& p, float scale,
                                             bool hides, Take take) {
        if (hides) forget_hidden(t, p);
        const auto add = [](float x, float y) { return x + y; };
        centre_.each([&](int i, float& centre) {
            float sum = moment_[i];
            t.each_in_row(i, [&](float& x, int column) { sum = fmaf(p.at(i, column), fmaf(x, scale, -centre), sum); });
            const float change = __fdividef(over_quad(sum, add), over_quad(softmax_.l[i], add));
            if (fabsf(change) < INFINITY) {  // not without keys, and not if a weight or a tangent is not finite
                centre += change;
                moment_[i] = fmaf(-change, earlier_[i], moment_[i]);
                take(i, change);
            }
        });
    }

    /// P (T - c) in place of the products of T, which `scale` completes, given P. `hides`: some keys are hidden, whose
    /// T may be anything.
    template <int Keys>
    __device__ __forceinline__ void move(RegisterTile<16, Keys>& t, const RegisterTile<16, Keys>& p, float scale,
                                         bool hides) {
        if (hides) forget_hidden(t, p);
        moment_.each([&](int i, float& sum) {
            t.each_in_row(i, [&](float& x, int column) {
                x = p.at(i, column) * fmaf(x, scale, -centre_[i]);
                sum += x;
            });
        });
    }

    /// m and l.
    __device__ __forceinline__ const LaggedSoftmax<16>& softmax() const { return softmax_; }

    /// Row i of complete sums: the tangent of the LSE, and what is to become of N, the sum of P dV + P (T - c) V, to be
    /// dO: (N + from_o O) scale. All 0 for a row without keys.
    struct Ends {
        float dlse, from_o, scale;
        bool none;
    };
    __device__ __forceinline__ Ends ends(const ForwardParams& p, int head, int i) const {
        const auto add = [](float x, float y) { return x + y; };
        const float keys = over_quad(softmax_.l[i], add), moment = over_quad(moment_[i], add), centre = centre_[i];
        float m = softmax_.m[i], sum = keys;
        const float rescale = take_sink(p, head, m, sum), inverse = 1.f / sum;
        if (keys == 0.f) return {0.f, 0.f, 0.f, true};
        const float sink = sum - rescale * keys;  // the sink's weight
        return {rescale * fmaf(centre, keys, moment) * inverse, (centre * sink - rescale * moment) * inverse,
                rescale * inverse, false};
    }

  private:
    static constexpr float kLag = 2.f;

    /// Whether all x * factor are below 2^24 (device/lagged_softmax.cuh). -inf counts as below, NaN does not.
    __device__ __forceinline__ static bool all_moderate(const PerRow& x, float factor) {
        constexpr float kLimit = 1 << 24;
        return __all_sync(kWarpMask, x.all([&](float y) { return y == -INFINITY || fabsf(y * factor) < kLimit; }));
    }

    /// T of keys without weight, which may be anything.
    template <int Keys>
    __device__ __forceinline__ static void forget_hidden(RegisterTile<16, Keys>& t, const RegisterTile<16, Keys>& p) {
        t.each([&](float& x, int i, int column) {
            if (p.at(i, column) == 0.f) x = 0.f;
        });
    }

    LaggedSoftmax<16> softmax_;
    PerRow moment_, centre_;
    PerRow earlier_;  // l without the last tile
    bool raised_ = false;
};

}  // namespace flash_wmma::wgmma_sm90
