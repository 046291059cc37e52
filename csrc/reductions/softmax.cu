// Softmax along rows: exp(x - m) / l with the row's maximum m and sum l.
//
// m and l are found in one pass (online softmax): a thread keeps m and l of the elements it has seen, and rescales l
// when m grows. Lanes, and then warps, combine theirs in the same way. A second pass normalises. Short rows have a few
// neighbouring lanes each, which read the row again from L1. For long rows each thread keeps its own vectors in shared
// memory, so that x is read once. Rows that do not fit are read again, usually from L2.
//
// Bound: HBM, one read and one write of x.
#include <launch.h>
#include <shared_memory.cuh>

#include "device/constants.cuh"
#include "device/shuffle.cuh"
#include "reductions/values.cuh"

namespace flash_wmma::reductions {
namespace {

constexpr int kShortSoftmaxBytes = 2048;  // rows up to this size have lanes of a warp
constexpr int kKeptBytes = 47 * 1024;     // rows up to this size stay in shared memory, without an opt-in

/// A maximum, and the sum of exp(x - maximum).
struct Statistics {
    float maximum = -INFINITY, sum = 0.f;
};

/// exp(x - maximum), and 0 if x and the maximum are -inf: nothing was seen.
__device__ float weight(float x, float maximum) { return exp2f((x - (maximum == -INFINITY ? 0.f : maximum)) * kLog2e); }

template <int Count>
__device__ void add(Statistics& s, const float (&x)[Count]) {
    float maximum = s.maximum;
#pragma unroll
    for (const float value : x) maximum = fmaxf(maximum, value);
    if (maximum > s.maximum) {
        s.sum *= weight(s.maximum, maximum);
        s.maximum = maximum;
    }
#pragma unroll
    for (const float value : x) s.sum += weight(value, s.maximum);
}

struct Combine {
    __device__ Statistics operator()(const Statistics& a, const Statistics& b) const {
        const float maximum = fmaxf(a.maximum, b.maximum);
        return {maximum, a.sum * weight(a.maximum, maximum) + b.sum * weight(b.maximum, maximum)};
    }
};

__device__ Statistics reduce_lanes_of(Statistics s, int width) {
    for (int lanes = width / 2; lanes > 0; lanes /= 2)
        s = Combine()(s, Statistics{shuffle_xor(s.maximum, lanes), shuffle_xor(s.sum, lanes)});
    return s;
}

/// The statistics of the share of thread `thread` of `threads` in a row; calls keep(vector, i) for each of its vectors.
template <class T, class Keep>
__device__ Statistics statistics(const Row<T>& row, int thread, int threads, Keep keep) {
    Statistics s;
    row.each_single(thread, threads, [&](std::int64_t i) {
        const float x[] = {Values<T>::widen(row.x[i])};
        add(s, x);
    });
    row.each_vector(thread, threads, [&](const uint4& vector, std::int64_t i) {
        float x[Values<T>::kCount];
        Values<T>::unpack(vector, x);
        keep(vector, i);
        add(s, x);
    });
    return s;
}

/// Writes the same share of a row, normalised; vectors come from `vector(i)`.
template <class T, class Vector>
__device__ void normalise(const Row<T>& row, T* out, const Statistics& s, int thread, int threads, Vector vector) {
    const float inverse = 1.f / s.sum;
    // Not weight(): in a row of nothing but -inf, x - maximum is NaN.
    const auto weight_of = [&](float x) { return exp2f((x - s.maximum) * kLog2e) * inverse; };
    row.each_single(thread, threads,
                    [&](std::int64_t i) { out[i] = Values<T>::narrow(weight_of(Values<T>::widen(row.x[i]))); });
    for (std::int64_t i = thread; i < row.vectors; i += threads) {
        float x[Values<T>::kCount];
        Values<T>::unpack(vector(i), x);
#pragma unroll
        for (float& value : x) value = weight_of(value);
        reinterpret_cast<uint4*>(out + row.head)[i] = Values<T>::pack(x);
    }
}

/// A row of x, in vectors if they lie on the same 16-byte boundaries as those of the row of out.
template <class T>
__device__ Row<T> row_beside(const T* x, const T* out, std::int64_t n) {
    return Row<T>(x, n, (reinterpret_cast<std::uintptr_t>(x) - reinterpret_cast<std::uintptr_t>(out)) % 16 == 0);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    softmax_short_rows(const T* x, std::int64_t rows, std::int64_t columns, std::int64_t stride, int width, T* out) {
    const int thread = static_cast<int>(threadIdx.x), in_block = kThreads / width, group = thread / width;
    for (std::int64_t first = blockIdx.x * static_cast<std::int64_t>(in_block); first < rows;
         first += gridDim.x * static_cast<std::int64_t>(in_block)) {
        const std::int64_t i = first + group, n = i < rows ? columns : 0;
        const Row<T> row = row_beside(x + i * stride, out + i * columns, n);
        const Statistics own = statistics(row, thread % width, width, [](const uint4&, std::int64_t) {});
        const Statistics s = reduce_lanes_of(own, width);
        normalise(row, out + i * columns, s, thread % width, width, [&](std::int64_t v) { return row.body()[v]; });
    }
}

/// The row's vectors follow it, if they are kept.
struct SoftmaxMemory {
    float4 of_warps[kThreads / 32 / 2];  // two Statistics each
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    softmax_long_rows(const T* x, std::int64_t rows, std::int64_t columns, std::int64_t stride, bool kept, T* out) {
    auto& smem = shared_memory<SoftmaxMemory>();
    auto* of_warp = reinterpret_cast<Statistics*>(smem.of_warps);
    auto* vectors = reinterpret_cast<uint4*>(&smem + 1);
    const int thread = static_cast<int>(threadIdx.x), lanes = warp_lanes(), warps = kThreads / lanes;
    for (std::int64_t i = blockIdx.x; i < rows; i += gridDim.x) {
        const Row<T> row = row_beside(x + i * stride, out + i * columns, columns);
        const Statistics own = statistics(row, thread, kThreads, [&](const uint4& vector, std::int64_t v) {
            if (kept) vectors[v] = vector;
        });
        const Statistics warp = reduce_lanes_of(own, lanes);
        if (thread % lanes == 0) of_warp[thread / lanes] = warp;
        __syncthreads();
        Statistics s;
        for (int w = 0; w < warps; ++w) s = Combine()(s, of_warp[w]);
        normalise(row, out + i * columns, s, thread, kThreads,
                  [&](std::int64_t v) { return kept ? vectors[v] : row.body()[v]; });
        __syncthreads();
    }
}

template <class T>
void launch_softmax(const Array& x, void* out_, const DeviceFacts& device, Stream stream) {
    const T* data = static_cast<const T*>(x.data);
    T* out = static_cast<T*>(out_);
    const std::int64_t bytes = x.columns * static_cast<std::int64_t>(sizeof(T));
    if (bytes <= kShortSoftmaxBytes) {
        const int width = lanes_of_row<T>(x.columns, device.warp_size), in_block = kThreads / width;
        launch(softmax_short_rows<T>, {grid_of((x.rows + in_block - 1) / in_block, device), dim3(kThreads)}, stream,
               data, x.rows, x.columns, x.stride, width, out);
        return;
    }
    const bool kept = bytes <= kKeptBytes;
    const int smem = static_cast<int>(sizeof(SoftmaxMemory) + (kept ? bytes / 16 * 16 : 0));
    launch(softmax_long_rows<T>, {grid_of(x.rows, device), dim3(kThreads), smem}, stream, data, x.rows, x.columns,
           x.stride, kept, out);
}

}  // namespace

void softmax_rows(const Array& x, void* out, const DeviceFacts& device, Stream stream) {
    with_float_type(x.type, [&](auto zero) { launch_softmax<decltype(zero)>(x, out, device, stream); });
}

}  // namespace flash_wmma::reductions
