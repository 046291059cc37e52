// Merges attention over one part of the keys with attention over another, in place:
//     lse' = log(exp(lse) + exp(part_lse)),   out' = out exp(lse - lse') + part_out exp(part_lse - lse').
// Computed in fp32, rounded once. A part that sees no key has lse -inf and weight 0.
//
// A block has some whole rows, a thread 16 bytes of the part, or one element where rows are no multiples of 16 bytes.
// Every thread of a row reads both lse; the row's first one writes the new lse behind a barrier.
//
// Bound: HBM, two reads and one write of the rows.
#include "merge/merge.h"

#include <launch.h>

#include <algorithm>
#include <cmath>

#include "device/values.cuh"

namespace flash_wmma {
namespace {

constexpr int kThreads = 256;  // of a block

__device__ float log_of_sum(float a, float b) {
    if (a == b && isinf(a)) return a;       // no key in either, or both infinite
    const float difference = fabsf(a - b);  // NaN if either is
    return fmaxf(a, b) + log1pf(expf(-difference));
}
/// The weight of a part; of one that sees no key 0, even if the other sees none either.
__device__ float share(float lse, float of_both) { return expf(lse - (of_both == -INFINITY ? 0.f : of_both)); }

/// kCount elements at p, in fp32: 16 bytes at a time, or one element.
template <class T, int kCount>
__device__ void load(const T* p, float (&x)[kCount]) {
    if constexpr (kCount == 1) {
        x[0] = Values<T>::widen(*p);
    } else {
        constexpr int kEach = Values<T>::kCount;
#pragma unroll
        for (int i = 0; i < kCount; i += kEach)
            Values<T>::unpack(reinterpret_cast<const uint4*>(p)[i / kEach], reinterpret_cast<float (&)[kEach]>(x[i]));
    }
}
template <class T, int kCount>
__device__ void store(T* p, const float (&x)[kCount]) {
    if constexpr (kCount == 1) {
        *p = Values<T>::narrow(x[0]);
    } else {
        constexpr int kEach = Values<T>::kCount;
#pragma unroll
        for (int i = 0; i < kCount; i += kEach)
            reinterpret_cast<uint4*>(p)[i / kEach] = Values<T>::pack(reinterpret_cast<const float (&)[kEach]>(x[i]));
    }
}

/// Sum: the type of the whole; T: that of the part. A row has `units` threads.
template <class Sum, class T, int kCount>
__global__ void __launch_bounds__(kThreads) merge(const MergeParams p, int units) {
    const int rows_at_once = kThreads / units, own = static_cast<int>(threadIdx.x) / units;
    const int unit = static_cast<int>(threadIdx.x) - own * units;
    const std::int64_t index = std::int64_t{blockIdx.x} * rows_at_once + own;
    const bool exists = own < rows_at_once && index < p.batch * p.heads * p.rows_of_part;
    float* to = nullptr;
    float merged = 0.f;
    if (exists) {
        const std::int64_t i = index % p.rows_of_part, slice = index / p.rows_of_part;
        const std::int64_t head = slice % p.heads, batch = slice / p.heads, row = p.rows ? p.rows[i] : i;
        to = p.lse.data + batch * p.lse.batch + head * p.lse.head + row * p.lse.row;
        const float lse = *to,
                    part = p.part_lse.data[batch * p.part_lse.batch + head * p.part_lse.head + i * p.part_lse.row];
        merged = log_of_sum(lse, part);
        const float weight = share(lse, merged), part_weight = share(part, merged);
        Sum* const out = static_cast<Sum*>(p.out.data) + batch * p.out.batch + head * p.out.head + row * p.out.row;
        const T* const from = static_cast<const T*>(p.part_out.data) + batch * p.part_out.batch +
                              head * p.part_out.head + i * p.part_out.row;
        for (int column = unit * kCount; column < p.head_dim_v; column += units * kCount) {
            float x[kCount], y[kCount];
            load(out + column, x);
            load(from + column, y);
#pragma unroll
            for (int e = 0; e < kCount; ++e) x[e] = fmaf(y[e], part_weight, x[e] * weight);
            store(out + column, x);
        }
    }
    __syncthreads();  // the row's threads have read its lse
    if (exists && unit == 0) *to = merged;
}

/// Whether all rows are made of whole units of `count` elements on 16-byte boundaries.
bool vectors(const MergeParams& p, int count) {
    const auto fits = [&](const Rows& r) {
        return reinterpret_cast<std::uintptr_t>(r.data) % 16 == 0 && r.batch % count == 0 && r.head % count == 0 &&
               r.row % count == 0;
    };
    return p.head_dim_v % count == 0 && fits(p.out) && fits(p.part_out);
}

template <class Sum, class T>
void launch_merge(const MergeParams& p, Stream stream) {
    constexpr int kCount = Values<T>::kCount;
    const bool wide = vectors(p, kCount);
    const int units = std::clamp(p.head_dim_v / (wide ? kCount : 1), 1, kThreads);
    const std::int64_t rows = p.batch * p.heads * p.rows_of_part, rows_at_once = kThreads / units;
    const std::int64_t blocks = (rows + rows_at_once - 1) / rows_at_once;
    if (blocks > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 blocks of rows to merge");
    if (blocks > 0)
        launch(wide ? merge<Sum, T, kCount> : merge<Sum, T, 1>, {dim3(static_cast<unsigned>(blocks)), dim3(kThreads)},
               stream, p, units);
}

template <class T>
void launch_parts_of(const MergeParams& p, Stream stream) {
    if (p.dtype == DType::kFloat32) launch_merge<float, T>(p, stream);
    else launch_merge<T, T>(p, stream);
}

}  // namespace

void merge_rows(const MergeParams& params, Stream stream) {
    switch (params.part_dtype) {
        case DType::kFloat32: return launch_merge<float, float>(params, stream);
        case DType::kFloat16: return launch_parts_of<half>(params, stream);
        default: return launch_parts_of<bf16>(params, stream);
    }
}

}  // namespace flash_wmma
