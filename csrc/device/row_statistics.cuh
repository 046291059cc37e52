// What forward tells of each row beside its O and LSE, from the same pass: the largest score, and the entropy.
//
// Both follow the softmax's lagging maximum m (lagged_softmax.cuh). With t = score - m in log2 units, weights p = 2^t,
// and L the sum of all p and of the sink's weight,
//     max = m + log2(largest p),      entropy = -ln 2 * sum of (p / L) (t - log2 L).
// So a lane keeps its largest p and its moment, the sum of p t, and both move with m. No key that a row sees raises the
// largest p above 2^16, and the key that m came from has p = 1. So the largest score is right to the rounding of the
// score and of ex2, some 1e-7.
//
// The largest p costs half an instruction a score: floats that are not negative have the order of their bits, and an
// integer maximum takes three operands (VIMNMX3). Where a product sums the weights, it costs nothing more: it proves
// that no weight overflows, as the sum does elsewhere. The moment costs one FMA a score. Its sum of a tile has a vote,
// as the sum of weights has: a score of -inf on a tile that all rows see would add 0 * inf.
#pragma once

#include <ptx.cuh>

#include <cstdint>

#include "attention.h"
#include "device/constants.cuh"
#include "device/element.cuh"
#include "device/lagged_softmax.cuh"
#include "device/quad.cuh"
#include "device/register_tile.cuh"
#include "device/sink.cuh"
#include "device/tile.cuh"

namespace flash_wmma {

/// Of a lane's rows. With neither statistic it is the softmax's own work, and keeps nothing. Without `kSums` the
/// weights are summed elsewhere.
template <int Rows, bool kMax, bool kEntropy, bool kSums>
struct RowStatistics {
    static_assert(kSums || !kEntropy);  // the moment moves with m by what the weights sum up to
    RowValues<Rows> largest;            ///< this lane's largest weight
    RowValues<Rows> moment;             ///< this lane's sum of weight * log2(weight)

    __device__ __forceinline__ RowStatistics() {
        largest.each([&](int i, float& x) {
            if (kMax) x = 0.f;
            if (kEntropy) moment[i] = 0.f;
        });
    }

    /// Of a tile's rows, this lane's part.
    struct Sums {
        RowValues<Rows> weights;  ///< their sums or, without kSums, the largest
        RowValues<Rows> largest, moment;

        /// Whether the sums of row i, or its largest weight, prove that no weight overflows T, and none was 0 * inf.
        /// NaN does not.
        template <class T>
        __device__ __forceinline__ bool fit(int i) const {
            return weights[i] <= Element<T>::kLargestSum && (!kEntropy || moment[i] == moment[i]);
        }
    };

    /// weigh() of a tile. kHides: hidden keys have the score -inf.
    template <bool kHides, int Columns>
    __device__ __forceinline__ static Sums weigh(RegisterTile<Rows, Columns>& s, float factor,
                                                 const RowValues<Rows>& offset) {
        constexpr float kNone = -1000.f;  // its weight is 0
        Sums sums;
        if constexpr (kEntropy || (kMax && kSums)) {
            sums.weights.each([&](int i, float& sum) {
                sum = sums.largest[i] = sums.moment[i] = 0.f;
                s.each_in_row(i, [&](float& x, int) {
                    float t = fmaf(x, factor, offset[i]);
                    if (kHides && kEntropy) t = ptx::max_nan(t, kNone);
                    x = ptx::ex2(t);
                    sum += x;
                    if (kMax) sums.largest[i] = ptx::max_of_positive(sums.largest[i], x);
                    if (kEntropy) sums.moment[i] = fmaf(x, t, sums.moment[i]);
                });
            });
        } else {
            sums.weights = flash_wmma::weigh<kSums>(s, factor, offset);
        }
        return sums;
    }

    /// Adds what is known of a tile. NaN, which ex2 gives without a sign, has the largest bits.
    __device__ __forceinline__ void add(const Sums& sums) {
        if constexpr (kEntropy) moment.each([&](int i, float& x) { x += sums.moment[i]; });
        if constexpr (kMax)
            largest.each(
                [&](int i, float& x) { x = ptx::max_of_positive(x, kSums ? sums.largest[i] : sums.weights[i]); });
    }

    /// Row i's m went from `before` to `after`, by which its sum of weights, `sum` before, was multiplied by `rescale`.
    __device__ __forceinline__ void raise(int i, float before, float after, float sum, float rescale) {
        if constexpr (kMax) largest[i] *= rescale;
        if constexpr (kEntropy) moment[i] = rescale > 0.f ? rescale * fmaf(before - after, sum, moment[i]) : 0.f;
    }

    /// A lane's two rows as a vector, and a part of the keys added as such: with its m and its sums, to the m of all.
    __device__ __forceinline__ float4 packed() const { return {largest[0], largest[1], moment[0], moment[1]}; }
    __device__ __forceinline__ void add(const float4& part, const float (&part_m)[2], const float (&part_l)[2],
                                        const RowValues<Rows>& m) {
        RowStatistics its;
        its.largest[0] = part.x, its.largest[1] = part.y, its.moment[0] = part.z, its.moment[1] = part.w;
        largest.each([&](int i, float& x) {
            const float rescale = part_m[i] == -INFINITY ? 0.f : ptx::ex2(part_m[i] - m[i]);
            its.raise(i, part_m[i], m[i], part_l[i], rescale);
            if (kMax) x = ptx::max_nan(x, its.largest[i]);
            if (kEntropy) moment[i] += its.moment[i];
        });
    }

    /// Stores what is asked for of the rows from `first_query` on, whose softmax is complete. A row with a score of
    /// +inf has that maximum.
    __device__ __forceinline__ void store(const ForwardParams& p, const Sequence& sequence, int head, int first_query,
                                          const LaggedSoftmax<Rows>& softmax, int lane) const {
        if constexpr (kMax || kEntropy)
            softmax.l.each([&](int i, float l) {
                const int query = first_query + lane / 4 + 8 * i;
                const bool stores = lane % 4 == 0 && query < sequence.seqlen_q;
                const std::int64_t at = lse_index(p, sequence, head, query);
                const float m = softmax.m[i];
                if constexpr (kMax) {
                    const float top = over_quad(largest[i], [](float x, float y) { return ptx::max_nan(x, y); });
                    if (stores) p.row_max[at] = m == INFINITY ? m : (m + log2f(top)) * kLn2;
                }
                if constexpr (kEntropy) {
                    const auto add = [](float x, float y) { return x + y; };
                    const float weights = over_quad(l, add), all_moment = over_quad(moment[i], add);
                    float base = m, sum = weights;
                    const float rescale = take_sink(p, head, base, sum);
                    const float shift = m - base - log2f(sum);  // from t to the logarithm of a weight's share
                    const float entropy = -kLn2 * (rescale / sum) * fmaf(shift, weights, all_moment);
                    if (stores) p.entropy[at] = weights == 0.f ? 0.f : entropy;
                }
            });
    }
};

}  // namespace flash_wmma
