// How a thread of the reductions walks a row in 16-byte loads, wherever the row begins.
#pragma once

#include <launch.h>

#include <climits>
#include <cmath>

#include "device/values.cuh"
#include "reductions/reductions.h"

namespace flash_wmma::reductions {

constexpr int kThreads = 256;  // of a block
constexpr int kLoads = 4;      // 16-byte loads that a thread has under way

/// A row of n elements: `head` elements before the first 16-byte boundary, whole vectors, the rest. If `aligned` is
/// false: one by one throughout.
template <class T>
struct Row {
    const T* x;
    std::int64_t n, head, vectors;

    __device__ Row(const T* x_, std::int64_t n_, bool aligned = true) : x(x_), n(n_) {
        const std::int64_t past = (reinterpret_cast<std::uintptr_t>(x) / sizeof(T)) % Values<T>::kCount;
        head = aligned ? min(n, (Values<T>::kCount - past) % Values<T>::kCount) : n;
        vectors = (n - head) / Values<T>::kCount;
    }
    __device__ const uint4* body() const { return reinterpret_cast<const uint4*>(x + head); }

    /// one(i) for this thread's share of the elements outside of vectors; x[i] is the element.
    template <class One>
    __device__ __forceinline__ void each_single(int thread, int threads, One one) const {
        for (std::int64_t i = thread; i < head; i += threads) one(i);
        for (std::int64_t i = head + vectors * Values<T>::kCount + thread; i < n; i += threads) one(i);
    }
    /// many(vector, i) for its share of the vectors, several of them loaded before the first is used.
    template <class Many>
    __device__ __forceinline__ void each_vector(int thread, int threads, Many many) const {
        const uint4* from = body();
        std::int64_t i = thread;
        for (; i + (kLoads - 1) * threads < vectors; i += kLoads * threads) {
            uint4 loaded[kLoads];
#pragma unroll
            for (int l = 0; l < kLoads; ++l) loaded[l] = from[i + l * threads];
#pragma unroll
            for (int l = 0; l < kLoads; ++l) many(loaded[l], i + l * threads);
        }
        for (; i < vectors; i += threads) many(from[i], i);
    }
};

/// Neighbouring lanes that share a short row: enough for a vector each, a power of two, at most a warp.
template <class T>
int lanes_of_row(std::int64_t columns, int warp) {
    int lanes = 1;
    while (lanes < warp && lanes * Values<T>::kCount < columns) lanes *= 2;
    return lanes;
}

/// A grid for that many pieces of work. Blocks take several pieces if there are more than kBlocksPerSm per SM.
inline dim3 grid_of(std::int64_t pieces, const DeviceFacts& device) {
    constexpr std::int64_t kBlocksPerSm = 64;
    const std::int64_t most = kBlocksPerSm * device.sm_count;
    return dim3(static_cast<unsigned>(pieces < most ? pieces : most));
}

/// Calls f with a value of the type.
template <class F>
void with_float_type(Type type, F f) {
    switch (type) {
        case Type::kFloat32: f(float{}); break;
        case Type::kFloat16: f(half{}); break;
        default: f(bf16{}); break;
    }
}

}  // namespace flash_wmma::reductions
