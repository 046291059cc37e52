// What is done to a score between Q K^T and the softmax: soft cap, additive or boolean bias, ALiBi. One policy, absent or
// present; which of the three a present one does, and the bias's type and strides, are known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ptx.cuh>

#include <cmath>

#include "../attention.h"
#include "tile.cuh"

namespace flash_wmma {

template <bool Present>
class ScoreMod;

/// Nothing: products become scores where exp2 multiplies them by their scale anyway.
template <>
class ScoreMod<false> {
  public:
    __device__ ScoreMod(const ForwardParams&, const Sequence&, const QTile&) {}
    __device__ static constexpr bool active(const ForwardParams&) { return false; }
};

/// score = cap * tanh(product * scale / cap) + bias[query, key] - slope * |query + Nk - Nq - key|, in log2 units.
template <>
class ScoreMod<true> {
  public:
    __device__ ScoreMod(const ForwardParams& params, const Sequence& sequence, const QTile& tile)
        : p(params), offset_(sequence.seqlen_k - sequence.seqlen_q) {
        const Bias& b = p.bias;
        const int bytes = b.dtype == DType::kFloat32 ? 4 : b.dtype == DType::kBool ? 1 : 2;
        const std::int64_t first = sequence.index * b.batch + tile.head * b.head;
        bias_ = b.data ? static_cast<const char*>(b.data) + first * bytes : nullptr;
        paired_ =
            b.key == 1 && (b.query | first) % 2 == 0 && reinterpret_cast<std::uintptr_t>(b.data) % (2 * bytes) == 0;
        slope_ = p.alibi_slopes ? kLog2e * p.alibi_slopes[sequence.index * p.alibi_batch_stride + tile.head] : 0.f;
    }

    /// Whether there is anything to apply.
    __device__ static bool active(const ForwardParams& p) { return p.softcap != 0.f || p.bias.data || p.alibi_slopes; }

    /// Products of one query row with the keys key + 8 j + e, e = 0, 1, j < Pairs, become scores; at(j, e) is a reference
    /// to them, key is even, `scale` brings a product to log2 units. Keys and queries past the end are allowed: nothing
    /// is read there, and their scores mean nothing.
    template <int Pairs, class At>
    __device__ __forceinline__ void apply(At at, float scale, int query, int key) const {
#pragma unroll
        for (int j = 0; j < Pairs; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) at(j, e) *= scale;
        if (p.softcap != 0.f) cap<Pairs>(at);
        if (bias_) {
            switch (p.bias.dtype) {
                case DType::kFloat32: add_bias<float, Pairs>(at, query, key); break;
                case DType::kFloat16: add_bias<__half, Pairs>(at, query, key); break;
                case DType::kBFloat16: add_bias<__nv_bfloat16, Pairs>(at, query, key); break;
                case DType::kBool: add_bias<bool, Pairs>(at, query, key); break;
            }
        }
        if (slope_ != 0.f) {
            const auto to_first = static_cast<float>(query + offset_ - key);
#pragma unroll
            for (int j = 0; j < Pairs; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    float& score = at(j, e);
                    score = fmaf(-slope_, fabsf(to_first - static_cast<float>(8 * j + e)), score);
                }
        }
    }

  private:
    static constexpr float kLog2e = 1.44269504088896341f;

    const ForwardParams& p;
    const char* bias_;  // of this head
    float slope_;       // in log2 units
    int offset_;
    bool paired_;  // whether keys 2 n and 2 n + 1 are one aligned load

    /// tanh(x) = 1 - 2 / (e^2x + 1), which loses digits near 0: there x - x^3 / 3.
    template <int Pairs, class At>
    __device__ __forceinline__ void cap(At at) const {
        const float to_x = 1.f / (kLog2e * p.softcap), from_x = kLog2e * p.softcap;
#pragma unroll
        for (int j = 0; j < Pairs; ++j)
#pragma unroll
            for (int e = 0; e < 2; ++e) {
                float& score = at(j, e);
                const float x = score * to_x;
                const float far = 1.f - __fdividef(2.f, ptx::ex2(2.f * kLog2e * x) + 1.f);
                const float near = fmaf(x * x, -x / 3.f, x);
                score = from_x * (fabsf(x) < 0.02f ? near : far);
            }
    }

    __device__ static float biased(float score, float bias) { return fmaf(bias, kLog2e, score); }
    __device__ static float biased(float score, __half bias) { return biased(score, __half2float(bias)); }
    __device__ static float biased(float score, __nv_bfloat16 bias) { return biased(score, __bfloat162float(bias)); }
    __device__ static float biased(float score, bool visible) { return visible ? score : -INFINITY; }

    template <class T, int Pairs, class At>
    __device__ __forceinline__ void add_bias(At at, int query, int key) const {
        struct alignas(2 * sizeof(T)) Pair {
            T first, second;
        };
        const int last_query = static_cast<int>(p.seqlen_q) - 1, last_key = static_cast<int>(p.seqlen_k) - 1;
        const T* row = reinterpret_cast<const T*>(bias_) + min(query, last_query) * p.bias.query;
        if (paired_ && key + 8 * (Pairs - 1) < last_key) {
#pragma unroll
            for (int j = 0; j < Pairs; ++j) {
                const Pair pair = *reinterpret_cast<const Pair*>(row + key + 8 * j);
                at(j, 0) = biased(at(j, 0), pair.first);
                at(j, 1) = biased(at(j, 1), pair.second);
            }
        } else {
#pragma unroll
            for (int j = 0; j < Pairs; ++j)
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    at(j, e) = biased(at(j, e), row[min(key + 8 * j + e, last_key) * p.bias.key]);
        }
    }
};

}  // namespace flash_wmma
