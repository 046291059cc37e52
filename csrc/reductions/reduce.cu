// Maximum and sum along rows; a whole array is one row.
//
// Three levels, as the machine has them. A thread folds its share of a row, in 16-byte loads, into as many accumulators
// as a vector has elements. The lanes of a warp combine theirs by a butterfly of shuffles. The warps of a block meet in
// shared memory, once. Long rows, if there are too few of them to occupy the device, are cut into segments of a block
// each, whose results a second launch combines. Short rows need no shared memory: a few neighbouring lanes reduce each,
// so that a warp reduces several rows at a time.
//
// Nothing is added by atomics, and the order of additions follows from the sizes and the device alone, so results are
// bitwise the same from run to run.
//
// Bound: HBM, one read of x.
#include <launch.h>
#include <shared_memory.cuh>

#include <algorithm>
#include <type_traits>

#include "device/shuffle.cuh"
#include "reductions/values.cuh"

namespace flash_wmma::reductions {
namespace {

constexpr int kShortRowBytes = 8192;  // rows up to this size are reduced by lanes of a warp
constexpr int kBlocksPerSm = 8;       // of kThreads threads, for long rows: all that an SM holds
constexpr std::int64_t kLeastSegment = 8 * kThreads * kLoads;  // elements of a row that are worth a block

/// The larger; NaN if either is.
struct Max {
    template <class Wide>
    using Total = Wide;
    template <class T>
    using Out = T;
    template <class T>
    __device__ static T identity() {
        if constexpr (std::is_same_v<T, float>) return -INFINITY;
        else return INT_MIN;
    }
    template <class T>
    __device__ T operator()(T a, T b) const {
        return b > a || b != b ? b : a;
    }
};

/// The sum; of int32 in int64, as in torch.
struct Sum {
    template <class Wide>
    using Total = std::conditional_t<std::is_same_v<Wide, float>, float, std::int64_t>;
    template <class T>
    using Out = std::conditional_t<std::is_same_v<T, std::int32_t>, std::int64_t, T>;
    template <class T>
    __device__ static T identity() {
        return 0;
    }
    template <class T>
    __device__ T operator()(T a, T b) const {
        return a + b;
    }
};

template <class T, class Op>
using Total = typename Op::template Total<typename Values<T>::Wide>;
template <class T, class Op>
using Out = typename Op::template Out<T>;

template <class T, class Op>
__device__ Out<T, Op> rounded(Total<T, Op> total) {
    if constexpr (std::is_same_v<Out<T, Op>, std::int64_t>) return total;
    else return Values<T>::narrow(total);
}

/// The share of thread `thread` of `threads` in x[0 ... n).
template <class T, class Op>
__device__ Total<T, Op> fold(const T* x, std::int64_t n, int thread, int threads) {
    using Acc = Total<T, Op>;
    constexpr int kCount = Values<T>::kCount;
    const Op op;
    Acc totals[kCount];
#pragma unroll
    for (Acc& total : totals) total = Op::template identity<Acc>();
    const Row<T> row(x, n);
    row.each_single(thread, threads,
                    [&](std::int64_t i) { totals[0] = op(totals[0], static_cast<Acc>(Values<T>::widen(x[i]))); });
    row.each_vector(thread, threads, [&](const uint4& vector, std::int64_t) {
        typename Values<T>::Wide values[kCount];
        Values<T>::unpack(vector, values);
#pragma unroll
        for (int e = 0; e < kCount; ++e) totals[e] = op(totals[e], static_cast<Acc>(values[e]));
    });
#pragma unroll
    for (int step = kCount / 2; step > 0; step /= 2)
#pragma unroll
        for (int e = 0; e < step; ++e) totals[e] = op(totals[e], totals[e + step]);
    return totals[0];
}

template <class Acc>
struct SharedMemory {
    Acc of_warp[kThreads / 32];
};

/// Reduces over the block's threads; thread 0 gets the result. All threads call it; they may call it again.
template <class Acc, class Op>
__device__ Acc reduce_block(Acc value, Op op) {
    auto& smem = shared_memory<SharedMemory<Acc>>();
    const int lanes = warp_lanes(), thread = static_cast<int>(threadIdx.x), warps = kThreads / lanes;
    value = reduce_lanes(value, op, lanes);
    if (thread % lanes == 0) smem.of_warp[thread / lanes] = value;
    __syncthreads();
    if (thread < lanes) {
        value = thread < warps ? smem.of_warp[thread] : Op::template identity<Acc>();
        value = reduce_lanes(value, op, lanes);
    }
    __syncthreads();
    return value;
}

/// `width` neighbouring lanes reduce a row.
template <class T, class Op>
__global__ void __launch_bounds__(kThreads) reduce_short_rows(const T* x, std::int64_t rows, std::int64_t columns,
                                                              std::int64_t stride, int width, Out<T, Op>* out) {
    const int thread = static_cast<int>(threadIdx.x), in_block = kThreads / width, group = thread / width;
    for (std::int64_t first = blockIdx.x * static_cast<std::int64_t>(in_block); first < rows;
         first += gridDim.x * static_cast<std::int64_t>(in_block)) {
        const std::int64_t row = first + group, n = row < rows ? columns : 0;
        const auto total = reduce_lanes(fold<T, Op>(x + row * stride, n, thread % width, width), Op(), width);
        if (row < rows && thread % width == 0) out[row] = rounded<T, Op>(total);
    }
}

/// A block reduces a segment of a row: to `out` if the segment is the row, else to `partials` (rows, segments).
template <class T, class Op>
__global__ void __launch_bounds__(kThreads)
    reduce_segments(const T* x, std::int64_t rows, std::int64_t columns, std::int64_t stride, std::int64_t segment,
                    int segments, Out<T, Op>* out, Total<T, Op>* partials) {
    for (std::int64_t piece = blockIdx.x; piece < rows * segments; piece += gridDim.x) {
        const std::int64_t row = piece / segments, begin = piece % segments * segment;
        const std::int64_t n = min(segment, columns - begin);
        const auto share = fold<T, Op>(x + row * stride + begin, n, static_cast<int>(threadIdx.x), kThreads);
        const auto total = reduce_block(share, Op());
        if (threadIdx.x != 0) continue;
        if (segments == 1) out[row] = rounded<T, Op>(total);
        else partials[piece] = total;
    }
}

/// The second pass: a block combines the segments of a row.
template <class T, class Op>
__global__ void __launch_bounds__(kThreads)
    combine_segments(const Total<T, Op>* partials, int segments, Out<T, Op>* out) {
    const Op op;
    auto total = Op::template identity<Total<T, Op>>();
    for (int i = static_cast<int>(threadIdx.x); i < segments; i += kThreads)
        total = op(total, partials[static_cast<std::int64_t>(blockIdx.x) * segments + i]);
    total = reduce_block(total, op);
    if (threadIdx.x == 0) out[blockIdx.x] = rounded<T, Op>(total);
}

/// How blocks share the rows.
struct Plan {
    std::int64_t segment;  ///< elements of a row that a block reduces, a multiple of kLeastSegment unless it is the row
    int segments;          ///< of a row

    Plan(const Array& x, const DeviceFacts& device) : segment(x.columns), segments(1) {
        const std::int64_t blocks = static_cast<std::int64_t>(kBlocksPerSm) * device.sm_count;
        if (x.rows >= blocks / 2 || x.columns <= kLeastSegment) return;
        const std::int64_t wanted = blocks / x.rows;
        const std::int64_t least = (x.columns + wanted - 1) / wanted;
        segment = (least + kLeastSegment - 1) / kLeastSegment * kLeastSegment;
        segments = static_cast<int>((x.columns + segment - 1) / segment);
    }
};

template <class T, class Op>
void run(const Array& x, void* out_, void* workspace, const DeviceFacts& device, Stream stream) {
    const T* data = static_cast<const T*>(x.data);
    auto* out = static_cast<Out<T, Op>*>(out_);
    auto* partials = static_cast<Total<T, Op>*>(workspace);
    if (x.columns * static_cast<std::int64_t>(sizeof(T)) <= kShortRowBytes) {
        const int width = lanes_of_row<T>(x.columns, device.warp_size), in_block = kThreads / width;
        launch(reduce_short_rows<T, Op>, {grid_of((x.rows + in_block - 1) / in_block, device), dim3(kThreads)}, stream,
               data, x.rows, x.columns, x.stride, width, out);
        return;
    }
    const Plan plan(x, device);
    constexpr int kSmem = sizeof(SharedMemory<Total<T, Op>>);
    launch(reduce_segments<T, Op>, {grid_of(x.rows * plan.segments, device), dim3(kThreads), kSmem}, stream, data,
           x.rows, x.columns, x.stride, plan.segment, plan.segments, out, partials);
    if (plan.segments > 1)
        launch(combine_segments<T, Op>, {dim3(static_cast<unsigned>(x.rows)), dim3(kThreads), kSmem}, stream, partials,
               plan.segments, out);
}

template <class T>
void run(Reduction reduction, const Array& x, void* out, void* workspace, const DeviceFacts& device, Stream stream) {
    if (reduction == Reduction::kMax) run<T, Max>(x, out, workspace, device, stream);
    else run<T, Sum>(x, out, workspace, device, stream);
}

}  // namespace

std::int64_t workspace_bytes(const Array& x, const DeviceFacts& device) {
    const int segments = Plan(x, device).segments;
    return segments > 1 ? x.rows * segments * static_cast<std::int64_t>(sizeof(std::int64_t)) : 0;
}

void reduce_rows(Reduction reduction, const Array& x, void* out, void* workspace, const DeviceFacts& device,
                 Stream stream) {
    if (x.type == Type::kInt32) run<std::int32_t>(reduction, x, out, workspace, device, stream);
    else with_float_type(x.type, [&](auto zero) { run<decltype(zero)>(reduction, x, out, workspace, device, stream); });
}

}  // namespace flash_wmma::reductions
