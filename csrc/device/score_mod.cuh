// Changes to a score between Q K^T and the softmax: soft cap, additive or boolean bias, ALiBi. One policy, absent or
// present; which of the three a present one applies, and the bias's type and strides, are known at run time.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ptx.cuh>

#include <cmath>

#include "attention.h"
#include "device/constants.cuh"
#include "device/tile.cuh"

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
        : p(params),
          last_query_(min(sequence.seqlen_q, static_cast<int>(params.seqlen_q)) - 1),
          offset_(sequence.seqlen_k - sequence.seqlen_q) {
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

    /// Products of query(i), i < Rows, with the keys key + 8 j + e, e = 0, 1, j < Pairs, become scores; at(i, j, e) is
    /// a reference to them, key is even, `scale` brings a product to log2 units. Keys and queries past the end are
    /// allowed: nothing is read there, and their scores mean nothing.
    template <int Rows, int Pairs, class At, class Query>
    __device__ __forceinline__ void apply(At at, float scale, Query query, int key) const {
        const auto each = [&](auto f) {
#pragma unroll
            for (int i = 0; i < Rows; ++i)
#pragma unroll
                for (int j = 0; j < Pairs; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) f(at(i, j, e), i, 8 * j + e);
        };
        if (p.softcap != 0.f) {
            // Not by /, whose slow path a cap of 0 takes: compilers compute this once, whether there is a cap or not
            const float to_x = __fdividef(scale, kLog2e * p.softcap), from_x = kLog2e * p.softcap;
            each([&](float& score, int, int) { score = from_x * tanh(score * to_x); });
        } else {
            each([&](float& score, int, int) { score *= scale; });
        }
        if (bias_) {
            switch (p.bias.dtype) {
                case DType::kFloat32: add_bias<float, Rows, Pairs>(at, query, key); break;
                case DType::kFloat16: add_bias<__half, Rows, Pairs>(at, query, key); break;
                case DType::kBFloat16: add_bias<__nv_bfloat16, Rows, Pairs>(at, query, key); break;
                case DType::kBool: add_bias<bool, Rows, Pairs>(at, query, key); break;
            }
        }
        if (slope_ != 0.f)
            each([&](float& score, int i, int offset) {
                const auto distance = static_cast<float>(query(i) + offset_ - key) - static_cast<float>(offset);
                score = fmaf(-slope_, fabsf(distance), score);
            });
    }

    /// The same for products in any arrangement: each(f) calls f(i, n) for all of them, x(i, n) is the product of
    /// query(i, n) and key(i, n), and slope(i, n) becomes the derivative of the score by the scaled product, if there
    /// is a softcap. A query past the end of its sequence gets no bias: a NaN or an infinity would reach the gradients
    /// of the keys.
    template <class Each, class X, class Slope, class Query, class Key>
    __device__ __forceinline__ void apply_each(Each each, X x, Slope slope, float scale, Query query, Key key) const {
        if (p.softcap != 0.f) {
            const float to_x = scale / (kLog2e * p.softcap), from_x = kLog2e * p.softcap;
            each([&](int i, int n) {
                const float t = tanh(x(i, n) * to_x);
                slope(i, n) = fmaf(-t, t, 1.f);
                x(i, n) = from_x * t;
            });
        } else {
            each([&](int i, int n) { x(i, n) *= scale; });
        }
        if (bias_) {
            const int last_key = static_cast<int>(p.seqlen_k) - 1;
            const auto add = [&](auto type) {
                const auto* bias = reinterpret_cast<const decltype(type)*>(bias_);
                each([&](int i, int n) {
                    const int row = query(i, n);
                    const std::int64_t q = min(row, last_query_), k = min(key(i, n), last_key);
                    const float score = biased(x(i, n), bias[q * p.bias.query + k * p.bias.key]);
                    if (row <= last_query_) x(i, n) = score;
                });
            };
            switch (p.bias.dtype) {
                case DType::kFloat32: add(float{}); break;
                case DType::kFloat16: add(__half{}); break;
                case DType::kBFloat16: add(__nv_bfloat16{}); break;
                case DType::kBool: add(bool{}); break;
            }
        }
        if (slope_ != 0.f)
            each([&](int i, int n) {
                x(i, n) = fmaf(-slope_, fabsf(static_cast<float>(query(i, n) + offset_ - key(i, n))), x(i, n));
            });
    }

    /// 1 - 2 / (e^2x + 1), which loses digits near 0: there x - x^3 / 3.
    __device__ static float tanh(float x) {
        const float far = 1.f - __fdividef(2.f, ptx::ex2(2.f * kLog2e * x) + 1.f);
        return fabsf(x) < 0.02f ? fmaf(x * x, x * (-1.f / 3.f), x) : far;
    }

  private:
    const ForwardParams& p;
    const char* bias_;  // of this head
    float slope_;       // in log2 units
    int last_query_;    // of the sequence, as far as the call says that it goes
    int offset_;
    bool paired_;  // whether keys 2 n and 2 n + 1 are one aligned load

    /// -inf hides the key, whatever its score; a finite bias stays finite in log2 units.
    __device__ static float biased(float score, float bias) {
        constexpr float kLeast = -2.35e38f;  // about the least float over log2(e)
        if (bias == -INFINITY) score = 0.f;
        else if (bias < kLeast) bias = kLeast;
        return fmaf(bias, kLog2e, score);
    }
    __device__ static float biased(float score, __half bias) {
        const float wide = __half2float(bias);
        return fmaf(wide, kLog2e, wide == -INFINITY ? 0.f : score);
    }
    __device__ static float biased(float score, __nv_bfloat16 bias) { return biased(score, __bfloat162float(bias)); }
    __device__ static float biased(float score, bool visible) { return visible ? score : -INFINITY; }

    template <class T, int Rows, int Pairs, class At, class Query>
    __device__ __forceinline__ void add_bias(At at, Query query, int key) const {
        struct alignas(2 * sizeof(T)) Pair {
            T x, y;
        };
        const int last_query = static_cast<int>(p.seqlen_q) - 1, last_key = static_cast<int>(p.seqlen_k) - 1;
        const auto row = [&](int i) {
            return reinterpret_cast<const T*>(bias_) + min(query(i), last_query) * p.bias.query;
        };
        if (paired_ && key + 8 * (Pairs - 1) < last_key) {
#pragma unroll
            for (int i = 0; i < Rows; ++i) {
                const T* from = row(i) + key;
                Pair bias[Pairs];
#pragma unroll
                for (int j = 0; j < Pairs; ++j) bias[j] = *reinterpret_cast<const Pair*>(from + 8 * j);
#pragma unroll
                for (int j = 0; j < Pairs; ++j) {
                    at(i, j, 0) = biased(at(i, j, 0), bias[j].x);
                    at(i, j, 1) = biased(at(i, j, 1), bias[j].y);
                }
            }
        } else {
#pragma unroll
            for (int i = 0; i < Rows; ++i)
#pragma unroll
                for (int j = 0; j < Pairs; ++j)
#pragma unroll
                    for (int e = 0; e < 2; ++e) {
                        const std::int64_t k = min(key + 8 * j + e, last_key);
                        at(i, j, e) = biased(at(i, j, e), row(i)[k * p.bias.key]);
                    }
        }
    }
};

}  // namespace flash_wmma
