// unfused: standard attention (Algorithm 0 of FlashAttention's paper), the baseline of the other kernels.
//
//     S = Q K^T           by cuBLAS, a batch of products; all of S, fp32, in global memory
//     P = softmax(S)      this file's kernel: scale, softcap, bias, ALiBi, mask; the row's maximum and sum; P and LSE
//     O = P V             by cuBLAS
//
// Memory grows with Nq Nk: 4 bytes per score, and 2 more for P if the inputs are half or bf16. (P of fp32 inputs takes
// the place of S.)
//
// The kernel: one warp per row, or a whole block if rows are long. A lane takes four neighbouring scores at a time,
// makes them final, in log2 units, keeps them, and tracks their maximum and sum (online softmax). Lanes, then warps,
// combine their maxima and sums. A second pass over the kept scores writes P, zeros included. Scores are kept in shared
// memory or, if the row is too long for that, in place in global memory.
//
// Query heads that read one key/value head: the r-th query heads of all groups make one batch, so that K and V are
// multiplied in place and never repeated.
//
// Bound: HBM. S is written and read, P is written and read: 12 bytes per score for half (16 for fp32) and only 4 d
// FLOPs.
#include <blas.h>
#include <capture.h>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <launch.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include <cmath>
#include <cstddef>
#include <iterator>
#include <type_traits>

#include "attention.h"
#include "device/constants.cuh"
#include "device/element.cuh"
#include "device/key_mask.cuh"
#include "device/score_mod.cuh"
#include "device/shuffle.cuh"
#include "device/tile.cuh"
#include "registry.h"

namespace flash_wmma {
namespace {

constexpr int kThreads = 256, kVector = 4;
constexpr int kMaxD = 256;
constexpr int kShortRow = 1024;        // keys up to which a row has a warp of its own
constexpr int kKeptScores = 11 << 10;  // of a row, that fit in shared memory without an opt-in

std::int64_t aligned(std::int64_t bytes) { return (bytes + 255) / 256 * 256; }

/// Map of the workspace. Rows of S and P are `pitch` elements apart, in the order of (B, Hq, Nq).
struct Workspace {
    std::int64_t pitch, rows;
    float* s;
    void* p;
    char* copies;
    std::int64_t bytes;

    explicit Workspace(const ForwardParams& params) {
        auto* base = static_cast<char*>(params.workspace);
        pitch = (params.seqlen_k + 7) / 8 * 8;
        rows = params.batch * params.heads_q * params.seqlen_q;
        const std::int64_t s_bytes = aligned(rows * pitch * static_cast<std::int64_t>(sizeof(float)));
        s = reinterpret_cast<float*>(base);
        const bool in_place = params.dtype == DType::kFloat32;
        p = base + (in_place ? 0 : s_bytes);
        bytes = s_bytes + (in_place ? 0 : aligned(rows * pitch * 2));
        copies = base + bytes;
    }
};

/// A maximum, and the sum of exp2(x - maximum).
struct Statistics {
    float maximum = -INFINITY, sum = 0.f;
};

/// exp2(x - maximum), and 0 where nothing was seen.
__device__ float weight(float x, float maximum) { return ptx::ex2(x - (maximum == -INFINITY ? 0.f : maximum)); }

__device__ Statistics combined(const Statistics& a, const Statistics& b) {
    const float maximum = fmaxf(a.maximum, b.maximum);
    return {maximum, a.sum * weight(a.maximum, maximum) + b.sum * weight(b.maximum, maximum)};
}

/// The kept scores follow, if they are kept in shared memory.
struct SharedMemory {
    float4 of_warps[kThreads / 32 / 2];  // two Statistics each
};

template <class T>
__device__ void store(T* to, const float (&x)[kVector]) {
    if constexpr (std::is_same_v<T, float>) {
        *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]);
    } else {
        typename Element<T>::Pair pairs[] = {Element<T>::pair(x[0], x[1]), Element<T>::pair(x[2], x[3])};
        *reinterpret_cast<uint2*>(to) = *reinterpret_cast<const uint2*>(pairs);
    }
}

/// One row per warp or, with WholeBlock, per block.
template <class T, bool WholeBlock>
__global__ void __launch_bounds__(kThreads)
    unfused_softmax(const __grid_constant__ ForwardParams p, float* s, T* weights, std::int64_t pitch, bool kept) {
    auto& smem = shared_memory<SharedMemory>();
    auto* of_warp = reinterpret_cast<Statistics*>(smem.of_warps);
    const int lanes = warp_lanes(), warp = static_cast<int>(threadIdx.x) / lanes, warps = kThreads / lanes;
    const int thread = static_cast<int>(threadIdx.x) % (WholeBlock ? kThreads : lanes);
    const int threads = WholeBlock ? kThreads : lanes;
    const std::int64_t row = WholeBlock ? blockIdx.x : blockIdx.x * static_cast<std::int64_t>(warps) + warp;
    if (row >= p.batch * p.heads_q * p.seqlen_q) return;  // a whole warp, and no barrier follows
    const int query = static_cast<int>(row % p.seqlen_q);
    const std::int64_t slice = row / p.seqlen_q;
    const int batch = static_cast<int>(slice / p.heads_q), head = static_cast<int>(slice % p.heads_q);
    const Sequence sequence{batch, 0, 0, static_cast<int>(p.seqlen_q), static_cast<int>(p.seqlen_k)};
    const ScoreMod<true> score_mod(p, sequence, QTile{batch, head, 0, query});
    const auto mask = key_mask<true>(p, sequence, head);
    const int begin = mask.begin(query), end = mask.end(query);

    // Thread t has the vectors t, t + threads, ... in both passes, so no other thread reads what it keeps.
    auto* from = reinterpret_cast<float4*>(s + row * pitch);
    auto* here = reinterpret_cast<float4*>(&smem + 1) + (WholeBlock ? 0 : warp * (pitch / kVector));
    float4* keeps = kept ? here : from;
    const int first = begin / kVector / threads * threads;
    Statistics own;
    for (int v = first + thread; v * kVector < end; v += threads) {
        const float4 loaded = from[v];
        float x[kVector] = {loaded.x, loaded.y, loaded.z, loaded.w}, unused[kVector];
        score_mod.apply_each(
            [](auto f) {
#pragma unroll
                for (int e = 0; e < kVector; ++e) f(0, e);
            },
            [&](int, int e) -> float& { return x[e]; }, [&](int, int e) -> float& { return unused[e]; },
            p.scale* kLog2e, [&](int, int) { return query; }, [&](int, int e) { return v * kVector + e; });
        float maximum = own.maximum;
#pragma unroll
        for (int e = 0; e < kVector; ++e) {
            const int key = v * kVector + e;
            if (key < begin || key >= end) x[e] = -INFINITY;
            maximum = fmaxf(maximum, x[e]);
        }
        own.sum *= weight(own.maximum, maximum);
        own.maximum = maximum;
#pragma unroll
        for (const float score : x) own.sum += weight(score, maximum);
        keeps[v] = make_float4(x[0], x[1], x[2], x[3]);
    }
    for (int step = lanes / 2; step > 0; step /= 2)
        own = combined(own, Statistics{shuffle_xor(own.maximum, step), shuffle_xor(own.sum, step)});
    if constexpr (WholeBlock) {
        if (thread % lanes == 0) of_warp[warp] = own;
        __syncthreads();
        own = Statistics{};
        for (int w = 0; w < warps; ++w) own = combined(own, of_warp[w]);
    }

    // A row that sees no key has the sum 0. NaN stays NaN.
    const float inverse = own.sum == 0.f ? 0.f : 1.f / own.sum;
    T* out = weights + row * pitch;
    for (int v = thread; v * kVector < p.seqlen_k; v += threads) {
        float x[kVector] = {0.f, 0.f, 0.f, 0.f};
        if (v >= first && v * kVector < end) {
            const float4 score = keeps[v];
            x[0] = weight(score.x, own.maximum) * inverse, x[1] = weight(score.y, own.maximum) * inverse;
            x[2] = weight(score.z, own.maximum) * inverse, x[3] = weight(score.w, own.maximum) * inverse;
        }
        store(out + v * kVector, x);
    }
    if (thread == 0) p.lse[row] = own.sum == 0.f ? -INFINITY : kLn2 * (own.maximum + log2f(own.sum));
}

/// Copies rows that cuBLAS cannot take in place, and makes them contiguous.
template <class T>
__global__ void __launch_bounds__(kThreads)
    copy_rows(Rows in, T* out, std::int64_t heads, std::int64_t rows, std::int64_t columns, std::int64_t elements) {
    for (std::int64_t i = blockIdx.x * static_cast<std::int64_t>(kThreads) + threadIdx.x; i < elements;
         i += gridDim.x * static_cast<std::int64_t>(kThreads)) {
        const std::int64_t row = i / columns, slice = row / rows;
        const std::int64_t from = slice / heads * in.batch + slice % heads * in.head + row % rows * in.row;
        out[i] = static_cast<const T*>(in.data)[from + i % columns];
    }
}

/// A (B, H, N, d) operand for cuBLAS. Rows that overlap (expanded tensors) or lie too far apart are copied.
struct Operand {
    Rows rows;
    std::int64_t heads, n, columns;

    Operand(const Rows& in, std::int64_t heads_, std::int64_t n_, std::int64_t columns_)
        : rows(in), heads(heads_), n(n_), columns(columns_) {
        if (n == 1) rows.row = columns;
    }
    bool copied() const { return rows.row < columns || rows.row > 0x7fffffff; }
    std::int64_t elements(const ForwardParams& p) const { return p.batch * heads * n * columns; }
    std::int64_t bytes(const ForwardParams& p) const {
        return copied() ? aligned(elements(p) * (p.dtype == DType::kFloat32 ? 4 : 2)) : 0;
    }
    /// Copies the rows to `copies` if they need it, and advances `copies`.
    void prepare(const ForwardParams& p, char*& copies, Stream stream) {
        if (!copied()) return;
        const LaunchConfig config{dim3(1024), dim3(kThreads)};
        if (p.dtype == DType::kFloat32)
            launch(copy_rows<float>, config, stream, rows, reinterpret_cast<float*>(copies), heads, n, columns,
                   elements(p));
        else  // half or bf16: 16 bits
            launch(copy_rows<half>, config, stream, rows, reinterpret_cast<half*>(copies), heads, n, columns,
                   elements(p));
        const std::int64_t taken = bytes(p);
        rows = {copies, heads * n * columns, n * columns, columns};
        copies += taken;
    }
};

struct Operands {
    Operand q, k, v;
    explicit Operands(const ForwardParams& p)
        : q(p.q, p.heads_q, p.seqlen_q, p.head_dim),
          k(p.k, p.heads_k, p.seqlen_k, p.head_dim),
          v(p.v, p.heads_k, p.seqlen_k, p.head_dim_v) {}
    std::int64_t bytes(const ForwardParams& p) const { return q.bytes(p) + k.bytes(p) + v.bytes(p); }
};

/// c = a b for every query head, with b of its key/value head; (m x k) times (k x n).
void multiply_heads(const ForwardParams& p, const Rows& a, DType type, const Rows& b, bool transposed, const Rows& c,
                    DType out_type, std::int64_t n, std::int64_t k, Stream stream) {
    const std::int64_t group = p.heads_q / p.heads_k, m = p.seqlen_q;
    const auto moved = [](const Rows& rows, DType of, std::int64_t elements) {
        return static_cast<char*>(rows.data) + elements * (of == DType::kFloat32 ? 4 : 2);
    };
    const auto dense = [&](const Rows& rows, std::int64_t step) { return rows.batch == p.heads_k * step; };
    const bool one_batch = p.batch == 1 || (dense(a, group * a.head) && dense(b, b.head) && dense(c, group * c.head));
    const std::int64_t calls = one_batch ? 1 : p.batch, count = one_batch ? p.batch * p.heads_k : p.heads_k;
    const RelaxedCapture relaxed;  // torch's first cuBLAS handle allocates memory
    for (std::int64_t batch = 0; batch < calls; ++batch)
        for (std::int64_t r = 0; r < group; ++r)
            multiply({{moved(a, type, batch * a.batch + r * a.head), type, a.row, group * a.head},
                      {moved(b, type, batch * b.batch), type, b.row, b.head},
                      {moved(c, out_type, batch * c.batch + r * c.head), out_type, c.row, group * c.head},
                      transposed,
                      m,
                      n,
                      k,
                      count},
                     stream);
}

/// Bytes of shared memory for the kept scores; 0 if they do not fit.
int kept_bytes(const ForwardParams& p) {
    const std::int64_t pitch = Workspace(p).pitch;
    if (p.seqlen_k <= kShortRow) return static_cast<int>(pitch * 4 * (kThreads / 32));
    return pitch <= kKeptScores ? static_cast<int>(pitch * 4) : 0;
}

template <class T>
void launch_softmax(const ForwardParams& p, const DeviceFacts& device, const Workspace& w, Stream stream) {
    const bool whole_block = p.seqlen_k > kShortRow;
    const std::int64_t of_block = whole_block ? 1 : kThreads / device.warp_size;
    const std::int64_t blocks = (w.rows + of_block - 1) / of_block;
    if (blocks > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 blocks of rows");
    const LaunchConfig config{dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
                              static_cast<int>(sizeof(SharedMemory)) + kept_bytes(p)};
    launch(whole_block ? unfused_softmax<T, true> : unfused_softmax<T, false>, config, stream, p, w.s,
           static_cast<T*>(w.p), w.pitch, kept_bytes(p) > 0);
}

template <class T>
constexpr Instance instance(DType dtype, int min_arch, bool whole_block) {
    return {dtype,
            min_arch,
            kMaxD,
            whole_block ? 1 : kThreads / 32,
            kVector * (whole_block ? kThreads : 32),
            kThreads / 32,
            1,
            static_cast<int>(sizeof(SharedMemory)) + 4 * (whole_block ? kKeptScores : kShortRow * (kThreads / 32)),
            reinterpret_cast<const void*>(whole_block ? unfused_softmax<T, true> : unfused_softmax<T, false>)};
}

/// br: rows per block of the softmax. bc: keys that a warp (or block) takes per step. smem_bytes: the most it may take.
const Instance kInstances[] = {
    instance<float>(DType::kFloat32, 75, false), instance<float>(DType::kFloat32, 75, true),
    instance<half>(DType::kFloat16, 75, false),  instance<half>(DType::kFloat16, 75, true),
    instance<bf16>(DType::kBFloat16, 80, false), instance<bf16>(DType::kBFloat16, 80, true),
};

const Instance& choose(const ForwardParams& p, const DeviceFacts&) {
    const int type = p.dtype == DType::kFloat32 ? 0 : p.dtype == DType::kFloat16 ? 1 : 2;
    return kInstances[2 * type + (p.seqlen_k > kShortRow)];
}

std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    return Workspace(p).bytes + Operands(p).bytes(p);
}

void launch_unfused(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    const Workspace w(p);
    Operands o(p);
    char* copies = w.copies;
    for (Operand* operand : {&o.q, &o.k, &o.v}) operand->prepare(p, copies, stream);
    const std::int64_t head = p.seqlen_q * w.pitch;
    const Rows scores{w.s, p.heads_q * head, head, w.pitch}, weights{w.p, p.heads_q * head, head, w.pitch};

    multiply_heads(p, o.q.rows, p.dtype, o.k.rows, true, scores, DType::kFloat32, p.seqlen_k, p.head_dim, stream);
    switch (p.dtype) {
        case DType::kFloat32: launch_softmax<float>(p, device, w, stream); break;
        case DType::kFloat16: launch_softmax<half>(p, device, w, stream); break;
        default: launch_softmax<bf16>(p, device, w, stream); break;
    }
    multiply_heads(p, weights, p.dtype, o.v.rows, false, p.o, p.out_dtype, p.head_dim_v, p.seqlen_k, stream);
}

const KernelInfo kInfo = {
    {.name = "unfused",
     .summary = "standard attention: products by cuBLAS, softmax between them, scores in global memory",
     .min_arch = 75,
     .bf16_min_arch = 80,
     .float32 = true,
     .float16 = true,
     .max_head_dim = kMaxD,
     .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kValueDim,
     .instances = {std::begin(kInstances), std::end(kInstances)}},
    choose,
    workspace_bytes,
    launch_unfused,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma
