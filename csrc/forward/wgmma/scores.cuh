// What changes the scores of a warp's 16 rows beside their scale: softcap, an additive bias, a boolean mask, ALiBi
// (device/score_mod.cuh says in which order). An instance for one of them does that alone, a softcap by polynomials
// where they serve (device/soft_cap.cuh); one for all of them (kChanged) learns at run time what there is.
//
// Nothing of it is waited for together with the product. Tiles of a bias come with K's through shared memory, and
// ldmatrix gives a lane the words of its scores. With kChanged a lane asks for its part before it awaits the tile's
// scores, 16 bytes of a row at a time where the bias allows it, and the quad's lanes exchange words. Of a boolean mask
// it reads a word with the bits of its scores, and that only of a tile that is seen in part (mask_tiles.cuh). Where the
// old m serves, a bias or ALiBi is one FMA of a score: of the constant that is subtracted anyway,
//     P = exp2(S * scale + (bias * log2(e) - m)),
// and left or right of the diagonal a tile's ALiBi is linear in the key. What decides between paths is uniform(), or
// the compiler would take the whole loop for one in which lanes part.
#pragma once

#include <ptx.cuh>

#include <climits>
#include <cmath>
#include <cstdint>

#include "attention.h"
#include "device/constants.cuh"
#include "device/element.cuh"
#include "device/lagged_softmax.cuh"
#include "device/quad.cuh"
#include "device/register_tile.cuh"
#include "device/score_mod.cuh"
#include "device/soft_cap.cuh"
#include "device/tile.cuh"
#include "forward/wgmma/block.cuh"
#include "forward/wgmma/mask_tiles.cuh"

namespace flash_wmma::wgmma_sm90 {

template <class Tile, Problems kProblems>
class ScoreChanges {
    using T = typename Tile::T;
    static constexpr int Keys = Tile::kBc;

  public:
    using Scores = RegisterTile<16, Keys>;
    using PerRow = RowValues<16>;

    __device__ __forceinline__ ScoreChanges(const ForwardParams& params, const MaskTiles& tiles, const SoftCap& cap)
        : p_(params), tiles_(tiles), soft_cap_(cap) {}

    /// From now on: 16 rows of that head from `first_query` on.
    __device__ __forceinline__ void take(const Sequence& sequence, int head, int first_query) {
        const Bias& bias = p_.bias;
        const int lane = static_cast<int>(threadIdx.x) % 32, query = first_query + lane / 4;
        column_ = lane % 4 * 2;
        if constexpr (kSlopes) {
            diagonal_ = first_query + sequence.seqlen_k - sequence.seqlen_q;
            own_ = lane / 4 - column_;
            // uniform: or the compiler takes every branch on it for one that parts the warp
            slope_ = p_.alibi_slopes ? kLog2e * uniform(p_.alibi_slopes[sequence.index * p_.alibi_batch_stride + head])
                                     : 0.f;
            constexpr float kMost = 4.f;  // that scores may rise by from a tile to the next, in log2 units
            not_rising_ = slope_ * Keys > kMost ? diagonal_ - Keys : INT_MAX;
        }
        if (has_mask()) bits_ = tiles_.words(sequence.index, head, first_query) + lane % tiles_.lanes;
        const int last = static_cast<int>(p_.seqlen_q) - 1;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (kAll && bias.data && !has_mask())
                row_[i] = static_cast<const char*>(bias.data) +
                          (sequence.index * bias.batch + head * bias.head + min(query + 8 * i, last) * bias.query) *
                              (bias.dtype == DType::kFloat32 ? 4 : 2);
        }
    }

    /// Of an instance whose bias comes through shared memory: the next tile's is there. Queries that share a row of the
    /// bias have that one in the tile's first row.
    __device__ __forceinline__ void find(const T* bias_tile) { tile_ = bias_tile; }

    /// Asks for what the scores of the tile at `key` need. `in_part`: the mask hides some of its keys.
    __device__ __forceinline__ void ask(int key, bool in_part) {
        const Bias& bias = p_.bias;
        hides_ = has_mask() && in_part;
        if (hides_) seen_ = bits_[key / Keys * tiles_.lanes];
        if (slopes() && kEarly) find_offsets(key);
        if (kAll && bias.data && bias.dtype == Element<T>::kDType) {
            const bool inside = bias.key == 1 && key + Keys <= p_.seqlen_k;
            const std::uintptr_t at = reinterpret_cast<std::uintptr_t>(bias.data) |
                                      static_cast<std::uintptr_t>(2 * (bias.batch | bias.head | bias.query));
            if (inside && at % 16 == 0) ask_wide(key);
            else if (inside && at % 4 == 0) ask_pairs(key);
            else ask_singly(key);
        }
    }

    /// Products of the tile asked for become scores in log2 units, -inf where the mask hides the key. Any problem.
    __device__ __forceinline__ void apply(Scores& s, int key) {
        const Bias& bias = p_.bias;
        look_near(s);
        if (kCaps && all_within(s, soft_cap_.far.limit)) {
            s.each([&](float& x, int, int) { x *= soft_cap_.far(x); });
        } else {
            const float factor = cap(s);
            s.each([&](float& x, int, int) { x *= factor; });
        }
        if (kBiases) read_tile();
        if (kBiases || (kAll && bias.data && bias.dtype == Element<T>::kDType)) {
            s.each([&](float& x, int i, int column) { x = biased(x, asked(i, column)); });
        } else if (kAll && bias.data && bias.dtype == DType::kFloat32) {
            const int last = static_cast<int>(p_.seqlen_k) - 1;
            s.each([&](float& x, int i, int column) {
                const std::int64_t at = min(key + column_ + column, last) * bias.key;
                x = biased(x, reinterpret_cast<const float*>(row_[i])[at]);
            });
        }
        if (slopes()) {
            const auto distance = static_cast<float>(own_distance(key));
            s.each([&](float& x, int i, int column) {
                x = fmaf(-slope_, fabsf(distance + static_cast<float>(8 * i - column)), x);
            });
        }
        hide(s);
    }

    /// Looks whether two terms serve a tile, whose scores are then about its products but for their scale. If so, the
    /// tiles behind it are tried with two.
    __device__ __forceinline__ bool look_near(const Scores& s) {
        if constexpr (kCaps) near_ = all_within(s, soft_cap_.near.limit);
        return kCaps && near_;
    }

    /// P = exp2(score - m) of the tile asked for, in place of its products; returns this lane's part of the sums over
    /// the rows. Where a hidden key's product, or m, is infinite or NaN, so is the sum, and where a product is too
    /// large for the polynomial that was tried.
    __device__ __forceinline__ PerRow weigh(Scores& s, int key, const PerRow& m) {
        const Bias& bias = p_.bias;
        const bool adds = kAll && bias.data && bias.dtype != DType::kBool;
        PerRow offset;
        offset.each([&](int i, float& x) { x = -m[i]; });
        if (kBiases || (!slopes() && adds && bias.dtype == Element<T>::kDType)) {
            const float factor = cap(s);
            if (kBiases) read_tile();
            return weigh_by(
                s, [&](float x, int i, int c) { return fmaf(x, factor, fmaf(asked(i, c), kLog2e, offset[i])); });
        }
        if (slopes() && !adds && is_linear(key)) {
            if (!kEarly) find_offsets(key);
            const float factor = cap(s);
            offset.each([&](int i, float& x) { x += first_[i]; });
            hide(s);
            return weigh_by(s, [&](float x, int i, int c) {
                x = fmaf(x, factor, offset[i]);
                return c == 0 ? x : fmaf(tile_slope_, static_cast<float>(c), x);  // 0 * slope would be an FMA
            });
        }
        if constexpr (kCaps) {
            if (near_) {
                float largest = 0.f;  // square of a product
                PerRow sums = weigh_by(s, [&](float x, int i, int) {
                    largest = ptx::max_of_positive(largest, x * x);
                    return fmaf(x, soft_cap_.near(x), offset[i]);
                });
                if (!(largest <= soft_cap_.near.limit * soft_cap_.near.limit)) sums[0] = INFINITY;
                return sums;
            }
            if (all_within(s, soft_cap_.near.limit))
                return weigh_by(s, [&](float x, int i, int) { return fmaf(x, soft_cap_.near(x), offset[i]); });
            if (all_within(s, soft_cap_.far.limit))
                return weigh_by(s, [&](float x, int i, int) { return fmaf(x, soft_cap_.far(x), offset[i]); });
        }
        if (!slopes() && !adds) {
            const float factor = cap(s);
            hide(s);
            return flash_wmma::weigh(s, factor, offset);
        }
        apply(s, key);
        return flash_wmma::weigh(s, 1.f, offset);
    }

    /// Whether scores may rise from tile to tile, backwards, by more than the old m allows: right of a steep diagonal.
    __device__ __forceinline__ bool rises(int key) const { return kSlopes && key > not_rising_; }

  private:
    static constexpr bool kAll = Changes<kProblems>::kAll, kMasks = Changes<kProblems>::kMasks;
    static constexpr bool kSlopes = Changes<kProblems>::kSlopes, kBiases = Changes<kProblems>::kBiases;
    // Whether ALiBi's offsets are found before the tile's products are there. At d = 128 that measured slower
    static constexpr bool kEarly = Tile::kD <= 64;
    static constexpr bool kCaps = Changes<kProblems>::kCaps, kModified = includes(kProblems, Problems::kModified);

    __device__ __forceinline__ bool has_mask() const {
        return kMasks && p_.bias.data && (!kAll || p_.bias.dtype == DType::kBool);
    }

    /// Softcap. Returns what takes the result to log2 units.
    __device__ __forceinline__ float cap(Scores& s) const {
        if (!kCaps && (!kModified || p_.softcap == 0.f)) return p_.scale * kLog2e;
        const float to_x = p_.scale / p_.softcap;
        s.each([&](float& x, int, int) { x = ScoreMod<true>::tanh(x * to_x); });
        return p_.softcap * kLog2e;
    }

    /// Whether no |product| of the warp's passes `limit`. NaN does not count: it fails the vote on the sums.
    __device__ __forceinline__ static bool all_within(const Scores& s, float limit) {
        float largest[2] = {};
        s.each_pair([&](float x, float y, int i, int) { largest[i] = fmaxf(largest[i], fmaxf(fabsf(x), fabsf(y))); });
        return __all_sync(kWarpMask, fmaxf(largest[0], largest[1]) <= limit);
    }

    /// Scores of keys that the mask hides become -inf.
    __device__ __forceinline__ void hide(Scores& s) const {
        if constexpr (kMasks) {
            if (!hides_) return;
#pragma unroll
            for (int i = 0; i < 2; ++i)  // in the order of the bits, of which an instruction makes several predicates
                s.each_in_row(i, [&](float& x, int column) {
                    if (!(seen_ >> MaskTiles::bit(i, column) & 1)) x = -INFINITY;
                });
        }
    }

    /// Whether there is ALiBi.
    __device__ __forceinline__ bool slopes() const { return kSlopes && (!kAll || slope_ != 0.f); }
    /// From the lane's first column of the tile at `key` to the diagonal, in its first row.
    __device__ __forceinline__ int own_distance(int key) const { return diagonal_ - key + own_; }
    /// What ALiBi adds to the lane's scores of a tile of which all keys are on one side of the diagonal.
    __device__ __forceinline__ void find_offsets(int key) {
        // -slope_ right of the diagonal: by the bit of the sign, since no comparison is needed for that
        tile_slope_ = __int_as_float(__float_as_int(slope_) ^ ((diagonal_ - key) & INT_MIN));
        const auto distance = static_cast<float>(own_distance(key));
        first_.each([&](int i, float& x) { x = -tile_slope_ * (distance + static_cast<float>(8 * i)); });
    }
    /// Whether all 16 rows have all of the tile's keys on one side of them.
    __device__ __forceinline__ bool is_linear(int key) const {
        // The diagonal is right of the last but one key, or left of the first by 15: one comparison of unsigned numbers
        return static_cast<unsigned>(diagonal_ - key + 14) > Keys + 12U;
    }

    /// The score with the bias: -inf hides the key, whatever its score; a finite bias stays finite in log2 units.
    __device__ __forceinline__ static float biased(float score, float bias) {
        constexpr float kLeast = -2.35e38f;  // about the least float over log2(e)
        if (bias == -INFINITY) score = 0.f;
        else if (bias < kLeast) bias = kLeast;
        return fmaf(bias, kLog2e, score);
    }

    __device__ __forceinline__ float asked(int i, int column) const {
        const float2 pair = Element<T>::floats(words_[column / 16][column / 8 % 2 * 2 + i]);
        return column % 2 ? pair.y : pair.x;
    }
    __device__ __forceinline__ std::uint32_t& word(int i, int block) { return words_[block / 2][block % 2 * 2 + i]; }

    /// The lane's words of a tile in shared memory.
    __device__ __forceinline__ void read_tile() {
        const int lane = static_cast<int>(threadIdx.x) % 32, warp = static_cast<int>(threadIdx.x) / 32 % 4;
        const int row = p_.bias.query == 0 ? 0 : Tile::kWarpRows * warp + lane % 16;
#pragma unroll
        for (int j = 0; j < Keys / 16; ++j)
            ptx::ldmatrix_x4(words_[j], tile_ + 64 * row + 8 * ((2 * j + lane / 16) ^ row % 8));
    }

    __device__ __forceinline__ void ask_wide(int key) {
        const int quad_lane = column_ / 2;
        uint4 found[2][Keys / 32];
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < Keys / 32; ++j)
                found[i][j] = *reinterpret_cast<const uint4*>(row_[i] + 2 * (key + 32 * j + 8 * quad_lane));
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < Keys / 32; ++j) {
                std::uint32_t words[4] = {found[i][j].x, found[i][j].y, found[i][j].z, found[i][j].w};
                transpose_in_quad(words, quad_lane);
#pragma unroll
                for (int w = 0; w < 4; ++w) word(i, 4 * j + w) = words[w];
            }
    }
    __device__ __forceinline__ void ask_pairs(int key) {
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < Keys / 8; ++j)
                word(i, j) = *reinterpret_cast<const std::uint32_t*>(row_[i] + 2 * (key + column_ + 8 * j));
    }
    /// Any alignment and stride; behind the last key: the last key's.
    __device__ __forceinline__ void ask_singly(int key) {
        const int last = static_cast<int>(p_.seqlen_k) - 1;
#pragma unroll
        for (int i = 0; i < 2; ++i)
#pragma unroll
            for (int j = 0; j < Keys / 8; ++j) {
                std::uint32_t pair = 0;
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const std::int64_t at = min(key + column_ + 8 * j + e, last) * p_.bias.key;
                    pair |= std::uint32_t{reinterpret_cast<const std::uint16_t*>(row_[i])[at]} << 16 * e;
                }
                word(i, j) = pair;
            }
    }

    /// weigh() with score - m of each product from `exponent`.
    template <class Exponent>
    __device__ __forceinline__ static PerRow weigh_by(Scores& s, Exponent exponent) {
        PerRow sums;
        sums.each([&](int i, float& sum) {
            sum = 0.f;
            s.each_in_row(i, [&](float& x, int column) {
                x = ptx::ex2(exponent(x, i, column));
                sum = column == 0 ? x : sum + x;  // 0 + x would be an instruction
            });
        });
        return sums;
    }

    // An instance keeps what it uses
    const ForwardParams& p_;
    const MaskTiles& tiles_;
    const SoftCap& soft_cap_;
    bool near_;             // whether two terms served the tile that was looked at last
    const char* row_[2];    // of the bias
    const unsigned* bits_;  // of the mask, the lane's
    const T* tile_;         // of the bias, in shared memory
    float slope_;           // in log2 units
    int not_rising_;        // the last key from which a tile's scores do not rise so much
    float tile_slope_;      // of the tile asked for, by the key, if all keys are on one side of the diagonal
    PerRow first_;          // what ALiBi then adds in the lane's first column
    int column_;            // the lane's first
    int diagonal_;          // the key on it in the warp's first row
    int own_;               // the lane's first row less its first column
    std::uint32_t words_[Keys / 16]
                        [4];  // the lane's pairs of the bias: of 16 keys, rows 0 and 8, then the later 8 keys
    unsigned seen_;           // the mask's bits of the lane's scores
    bool hides_;              // whether they count
};

}  // namespace flash_wmma::wgmma_sm90
