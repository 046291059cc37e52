// What general instances of bwd_sm90 do to a tile beyond plain attention: soft cap, bias and ALiBi between the product
// and the softmax, key ranges behind it, and on the way back the bias's gradient and the soft cap's derivative.
//
// Biases and ranges come from global memory, element by element, beside the products. The derivative of the soft cap
// waits for dS in half precision, packed: the registers do not hold it in fp32, and dS is rounded as coarsely behind
// it.
#pragma once

#include <cuda_fp16.h>
#include <ptx.cuh>

#include "backward/wgmma/block.cuh"
#include "device/key_mask.cuh"
#include "device/register_tile.cuh"
#include "device/score_mod.cuh"

namespace flash_wmma::backward::wgmma {

/// A lane's scores of a tile: whose they are, and the lane's first query and key. kRowsAreKeys: columns are queries;
/// otherwise the reverse.
template <bool kRowsAreKeys>
struct ScoresPlace {
    Sequence sequence;
    int head, first_query, first_key;

    /// Of row i of this lane and column c (register_tile.cuh).
    __device__ __forceinline__ int query(int i, int c) const { return first_query + (kRowsAreKeys ? c : 8 * i); }
    __device__ __forceinline__ int key(int i, int c) const { return first_key + (kRowsAreKeys ? 8 * i : c); }
};

/// Nothing: as of ScoreChanges. kFolds: L is in the products (query_facts.cuh).
template <int kColumns, bool kRowsAreKeys, bool kFolds>
class NoChanges {
    using Scores = RegisterTile<16, kColumns>;
    using ScoresPlace = wgmma::ScoresPlace<kRowsAreKeys>;

  public:
    __device__ __forceinline__ explicit NoChanges(const Problem& problem) : problem_(problem) {}
    __device__ __forceinline__ float apply(Scores&, const ScoresPlace&) const {
        return (kFolds ? problem_.terms_scale : problem_.forward.scale) * kLog2e;
    }
    __device__ __forceinline__ static constexpr bool hide(Scores&, const ScoresPlace&) { return false; }
    __device__ __forceinline__ static void follow_back(Scores&, const ScoresPlace&, Seen) {}

  private:
    const Problem& problem_;
};

template <int kColumns, bool kRowsAreKeys>
class ScoreChanges {
    using Scores = RegisterTile<16, kColumns>;
    using ScoresPlace = wgmma::ScoresPlace<kRowsAreKeys>;

  public:
    __device__ __forceinline__ explicit ScoreChanges(const Problem& problem) : problem_(problem) {}

    /// Products become scores in log2 units, if there is something to change. Returns what they are still to be
    /// multiplied by.
    __device__ __forceinline__ float apply(Scores& s, const ScoresPlace& at) {
        const ForwardParams& p = problem_.forward;
        const float scale = p.scale * kLog2e;
        if (!ScoreMod<true>::active(p)) return scale;
        const ScoreMod<true> mod(p, at.sequence, QTile{at.sequence.index, at.head, 0, 0});
        mod.apply_each([&](auto f) { s.each([&](float&, int i, int c) { f(i, c); }); },
                       [&](int i, int c) -> float& { return s.at(i, c); },
                       [&](int i, int c) { return Half{slopes_[c / 8 * 2 + i], c % 2}; }, scale,
                       [&](int i, int c) { return at.query(i, c); }, [&](int i, int c) { return at.key(i, c); });
        return 1.f;
    }

    /// P = 0 outside of the queries' ranges and the band, if there are ranges. Whether there are.
    __device__ __forceinline__ bool hide(Scores& p, const ScoresPlace& at) const {
        const RangedMask mask(problem_.forward, at.sequence, at.head);
        if (!mask.has_ranges()) return false;
        const RangedRows rows = mask.rows();
        p.each([&](float& x, int i, int c) {
            if (rows.hides(at.query(i, c), at.key(i, c))) x = 0.f;
        });
        return true;
    }

    /// Adds dS to the bias's gradient, if rows are keys, and brings it through the soft cap.
    __device__ __forceinline__ void follow_back(Scores& ds, const ScoresPlace& at, Seen seen) const {
        const ForwardParams& p = problem_.forward;
        if (seen == Seen::kNone) ds.clear();  // whatever the keys and the tile's rows hold
        if (kRowsAreKeys && problem_.dbias.data) add_to_dbias(ds, at);
        if (p.softcap != 0.f) ds.each([&](float& x, int i, int c) { x *= slope(i, c); });
    }

  private:
    /// One half of a word.
    struct Half {
        std::uint32_t& word;
        int upper;
        __device__ __forceinline__ void operator=(float x) const {
            const std::uint32_t bits = __half_as_ushort(__float2half_rn(x));
            word = upper ? word | bits << 16 : bits;
        }
    };
    __device__ __forceinline__ float slope(int i, int c) const {
        const std::uint32_t word = slopes_[c / 8 * 2 + i];
        return __half2float(__ushort_as_half(static_cast<unsigned short>(c % 2 ? word >> 16 : word & 0xffff)));
    }

    __device__ __forceinline__ void add_to_dbias(Scores& ds, const ScoresPlace& at) const {
        const ForwardParams& p = problem_.forward;
        const BiasGradient& b = problem_.dbias;
        float* const dbias = b.data + at.sequence.index * b.batch + at.head * b.head;
        const int queries = min(at.sequence.seqlen_q, static_cast<int>(p.seqlen_q));
        const int keys = min(at.sequence.seqlen_k, static_cast<int>(p.seqlen_k));
        const float unit = unscaled_factor(p);
        ds.each([&](float& x, int i, int c) {
            const std::int64_t q = at.query(i, c), k = at.key(i, c);
            // NaN != 0, so NaN is always added
            if (x != 0.f && q < queries && k < keys) ptx::red_add(dbias + q * b.query + k * b.key, x * unit);
        });
    }

    const Problem& problem_;
    std::uint32_t slopes_[kColumns / 4];  // the soft cap's derivatives, of neighbouring columns
};

}  // namespace flash_wmma::backward::wgmma
