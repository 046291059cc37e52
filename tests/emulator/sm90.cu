// What Hopper added: layouts of wgmma and of tensor copies, and bugs with them, one at a time. A kernel is right as
// kernel<Fault::kNone> and has one bug otherwise. tests/test_emulator_sm90.py expects the emulator to report each at
// the lines marked "fault: KERNEL line", or the result to be wrong, and to find nothing in the right one. Many of these
// bugs give right results on a GPU, most of the time.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <entry.h>
#include <launch.h>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <cstdint>
#include <utility>

namespace sm90 {

using flash_wmma::DType;
using flash_wmma::Entry;
using flash_wmma::launch;
using flash_wmma::make_tensor_map;
using flash_wmma::shared_memory;
using flash_wmma::TensorMap;
namespace ptx = flash_wmma::ptx;
using ptx::Major;

constexpr int kSide = 64, kPanelBytes = kSide * kSide * 2, kGroup = 128;  // elements, bytes, threads

/// Dense matrices of 16-bit elements, one after the other, to be copied in boxes of 64 columns and `box_rows` rows.
TensorMap map_of(const void* data, int columns, int rows, int matrices = 1, int box_rows = kSide) {
    const std::int64_t matrix = std::int64_t{columns} * rows;
    return make_tensor_map(data, DType::kFloat16, {columns, rows, matrices, 1}, {columns, matrix, matrix * matrices},
                           {kSide, box_rows, 1, 1});
}

// --- layouts ---------------------------------------------------------------------------------------------------------

struct Box {
    alignas(1024) std::uint16_t words[2 * kSide * kSide];
    ptx::Barrier full;
};

/// out: the shared memory behind a copy of 64 columns and 40 rows from (column, row) on, as it lies there.
__global__ void box(std::uint16_t* out, const __grid_constant__ TensorMap map, int column, int row) {
    auto& smem = shared_memory<Box>();
    constexpr int kRows = 40;
    if (threadIdx.x == 0) {
        ptx::barrier_init(&smem.full, 1);
        ptx::barrier_init_fence();
        ptx::prefetch(&map);
        ptx::barrier_arrive_expect(&smem.full, kRows * kSide * 2);            // count: box arrive
        ptx::tensor_load(smem.words, &map, &smem.full, {column, row, 1, 0});  // count: box copy
    }
    __syncthreads();
    ptx::barrier_wait(&smem.full, 0);  // count: box wait
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kSide; i += 32) out[i] = smem.words[i];
}
void run_box(std::uint16_t* out, const std::uint16_t* in, int columns, int rows, int column, int row) {
    launch(box, {dim3(1), dim3(32), sizeof(Box)}, nullptr, out, map_of(in, columns, rows, 2, 40), column, row);
}
const Entry kBox("box", run_box);

struct Stored {
    alignas(1024) std::uint16_t words[kSide * kSide];
};

/// Stores `in`, 40 rows of 64 columns, from (column, row) on.
__global__ void stored(const std::uint16_t* in, const __grid_constant__ TensorMap map, int column, int row) {
    auto& smem = shared_memory<Stored>();
    constexpr int kRows = 40;
    for (int i = static_cast<int>(threadIdx.x); i < kRows * kSide; i += 32) smem.words[i ^ i / kSide % 8 * 8] = in[i];
    ptx::fence_proxy_async();
    __syncwarp();
    if (threadIdx.x > 0) return;
    ptx::tensor_store(&map, smem.words, {column, row, 1, 0});  // count: stored store
    ptx::store_commit();
    ptx::store_wait_read<0>();
}
void run_stored(std::uint16_t* out, const std::uint16_t* in, int columns, int rows, int column, int row) {
    launch(stored, {dim3(1), dim3(32), sizeof(Stored)}, nullptr, in, map_of(out, columns, rows, 2, 40), column, row);
}
const Entry kStored("stored", run_stored);

enum class Left { kMemory, kTransposed, kRegisters };

/// d[thread][i] = the product of A, 64 x 64 by rows or by columns from memory, or a[thread][step][4] as registers of
/// it, and B, 64 rows along k of n (kMajor K: n rows along n of k), plus c.
template <class T, int N, Left kLeft, Major kMajor>
struct Operands {
    static constexpr int kPanels = kMajor == Major::K ? 1 : (N + kSide - 1) / kSide;
    static constexpr int kRows = kMajor == Major::K ? N : kSide;
    alignas(1024) T a[kSide * kSide];
    alignas(1024) T b[kPanels][kRows * kSide];
    ptx::Barrier full;
};
template <class T, int N, Left kLeft, Major kMajor>
__global__ void product(float* d, const std::uint32_t* a, const float* c, const __grid_constant__ TensorMap a_map,
                        const __grid_constant__ TensorMap b_map) {
    using Map = Operands<T, N, kLeft, kMajor>;
    constexpr bool kRegisters = kLeft == Left::kRegisters;
    auto& smem = shared_memory<Map>();
    const unsigned thread = threadIdx.x;
    if (thread == 0) {
        ptx::barrier_init(&smem.full, 1);
        ptx::barrier_init_fence();
        ptx::barrier_arrive_expect(&smem.full, sizeof(smem.b) + (kRegisters ? 0 : kPanelBytes));
        if (!kRegisters) ptx::tensor_load(smem.a, &a_map, &smem.full, {0, 0, 0, 0});
        for (int i = 0; i < Map::kPanels; ++i) ptx::tensor_load(smem.b[i], &b_map, &smem.full, {kSide * i, 0, 0, 0});
    }
    __syncthreads();
    ptx::barrier_wait(&smem.full, 0);
    float x[N / 2];
    for (int i = 0; i < N / 2; ++i) x[i] = c[N / 2 * static_cast<int>(thread) + i];
    std::uint32_t left[4][4];
    for (unsigned i = 0; kRegisters && i < 16; ++i) left[i / 4][i % 4] = a[16 * thread + i];
    ptx::wgmma_fence();
    const ptx::SharedMatrix<Major::K> rows(smem.a);
    const ptx::SharedMatrix<Major::N> transposed(smem.a);
    const ptx::SharedMatrix<kMajor> columns(smem.b, sizeof(smem.b[0]));
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        const auto right = columns + step * (kMajor == Major::K ? 32 : 16 * 128);
        if constexpr (kRegisters) ptx::wgmma<T, N>(x, left[step], right, true);  // count: product registers
        else if constexpr (kLeft == Left::kTransposed) ptx::wgmma<T, N>(x, transposed + 16 * 128 * step, right, true);
        else ptx::wgmma<T, N>(x, rows + 32 * step, right, true);  // count: product memory
    }
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < N / 2; ++i) d[N / 2 * static_cast<int>(thread) + i] = x[i];
}
template <class T, int N, Left kLeft, Major kMajor>
void run_product(float* d, const void* a, const void* b, const float* c) {
    using Map = Operands<T, N, kLeft, kMajor>;
    const TensorMap b_map = kMajor == Major::K ? map_of(b, kSide, N, 1, N) : map_of(b, N, kSide);
    launch(product<T, N, kLeft, kMajor>, {dim3(1), dim3(kGroup), sizeof(Map)}, nullptr, d,
           static_cast<const std::uint32_t*>(a), c, map_of(a, kSide, kSide), b_map);
}
using bf16 = __nv_bfloat16;
const Entry kProductHalf("product_half_64_memory_k", run_product<half, 64, Left::kMemory, Major::K>);
const Entry kProductWide("product_half_256_memory_k", run_product<half, 256, Left::kMemory, Major::K>);
const Entry kProductOdd("product_bf16_176_memory_k", run_product<bf16, 176, Left::kMemory, Major::K>);
const Entry kProductAlongN("product_bf16_128_memory_n", run_product<bf16, 128, Left::kMemory, Major::N>);
const Entry kProductTransposed("product_half_64_transposed_n", run_product<half, 64, Left::kTransposed, Major::N>);
const Entry kProductTransposedK("product_bf16_128_transposed_k", run_product<bf16, 128, Left::kTransposed, Major::K>);
const Entry kProductRegisters("product_half_64_registers_n", run_product<half, 64, Left::kRegisters, Major::N>);
const Entry kProductPanels("product_half_96_registers_n", run_product<half, 96, Left::kRegisters, Major::N>);
const Entry kProductWideAlongN("product_bf16_256_registers_n", run_product<bf16, 256, Left::kRegisters, Major::N>);
const Entry kProductRegistersK("product_bf16_128_registers_k", run_product<bf16, 128, Left::kRegisters, Major::K>);

/// d[thread][i] = the product of A, 64 x 16 as registers, and the transpose of B, N rows of 8, twice side by side.
/// Groups of 8 rows are two groups apart.
template <int N>
struct ShortRows {
    alignas(16) std::uint16_t groups[N / 8][2][8][8];
};
template <class T, int N>
__global__ void short_rows(float* d, const std::uint32_t* a, const std::uint16_t* b) {
    auto& smem = shared_memory<ShortRows<N>>();
    const int thread = static_cast<int>(threadIdx.x);
    for (int i = thread; i < 2 * N; i += kGroup) {
        const int row = i / 16 * 8 + i % 8;
        for (int k = 0; k < 8; ++k)
            smem.groups[i / 16][i / 8 % 2][i % 8][k] = i / 8 % 2 ? 0x7fff : b[8 * row + k];  // NaN
    }
    ptx::fence_proxy_async();
    __syncthreads();
    float x[N / 2];
    const std::uint32_t left[4] = {a[4 * thread], a[4 * thread + 1], a[4 * thread + 2], a[4 * thread + 3]};
    ptx::wgmma_fence();
    ptx::wgmma<T, N>(x, left, ptx::SharedMatrix<Major::K8>(smem.groups, sizeof(smem.groups[0])), false);
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    for (int i = 0; i < N / 2; ++i) d[N / 2 * thread + i] = x[i];
}
template <class T, int N>
void run_short_rows(float* d, const void* a, const void* b) {
    launch(short_rows<T, N>, {dim3(1), dim3(kGroup), sizeof(ShortRows<N>)}, nullptr, d,
           static_cast<const std::uint32_t*>(a), static_cast<const std::uint16_t*>(b));
}
const Entry kShortRowsHalf("short_rows_half_64", run_short_rows<half, 64>);
const Entry kShortRowsBf16("short_rows_bf16_128", run_short_rows<bf16, 128>);

// --- a pipeline: a producer warp copies tiles, a warpgroup adds up their products ------------------------------------

constexpr int kStages = 2, kTiles = 9;

enum class Pipeline {
    kNone,
    kNotInitialised,  // nobody initialises A's barrier
    kInitialisedTwice,
    kNoInitFence,
    kNoInitBarrier,
    kBarrierOverwritten,  // as if it were ordinary memory
    kNoExpect,            // the bytes are not announced
    kFewBytes,
    kManyBytes,
    kWrongParity,  // of the producer's wait
    kStuckParity,  // of the consumers' wait
    kFewArrivals,  // the barrier counts fewer than come
    kManyArrivals,
    kNoWait,            // for the copy
    kOneWarpWaits,      // for it
    kNoRelease,         // the producer does not wait for the consumers
    kEarlyRelease,      // before the product is asked for
    kReleaseOfPending,  // before the product's wait
    kNoProductWait,
    kNoFence,
    kMisplaced,  // not at a multiple of 1024 bytes
    kSmallBox,   // half the rows
    kWrongTile,
    kOldStage,  // multiplied instead of the new one
    kTooFar,    // multiplied, past the tile
    kUnused,    // a copy that nobody waits for
};

struct PipelineMemory {
    alignas(1024) half a[kSide * kSide];
    alignas(1024) half b[kStages][kSide * kSide];
    ptx::Barrier a_full, full[kStages], empty[kStages];
};

/// out (64 x 64) = sum over tiles of A B[tile]^T, all 64 x 64 by rows.
template <Pipeline kFault>
__global__ void pipeline(float* out, const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map) {
    auto& smem = shared_memory<PipelineMemory>();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == kGroup) {
        if (kFault != Pipeline::kNotInitialised) ptx::barrier_init(&smem.a_full, 1);  // fault: pipeline init a
        for (int s = 0; s < kStages; ++s) {
            ptx::barrier_init(&smem.full[s], 1);  // fault: pipeline init
            ptx::barrier_init(&smem.empty[s], kFault == Pipeline::kFewArrivals    ? 3
                                              : kFault == Pipeline::kManyArrivals ? 5
                                                                                  : 4);
        }
        if (kFault == Pipeline::kInitialisedTwice) ptx::barrier_init(&smem.full[1], 1);  // fault: pipeline second init
        if (kFault != Pipeline::kNoInitFence) ptx::barrier_init_fence();
    }
    if (kFault != Pipeline::kNoInitBarrier) __syncthreads();
    if (thread >= kGroup) {
        if (thread != kGroup) return;
        if (kFault != Pipeline::kNotInitialised) {
            ptx::barrier_arrive_expect(&smem.a_full, kPanelBytes);
            ptx::tensor_load(smem.a, &a_map, &smem.a_full, {0, 0, 0, 0});  // fault: pipeline copy a
        }
        for (int i = 0; i < (kFault == Pipeline::kUnused ? kTiles + 1 : kTiles); ++i) {
            const int s = i % kStages;
            const unsigned parity = static_cast<unsigned>(i / kStages % 2) ^ (kFault != Pipeline::kWrongParity);
            if (kFault != Pipeline::kNoRelease) ptx::barrier_wait(&smem.empty[s], parity);
            constexpr int kMore = kFault == Pipeline::kFewBytes ? -2048 : kFault == Pipeline::kManyBytes ? 16 : 0;
            if (kFault == Pipeline::kNoExpect) ptx::barrier_arrive(&smem.full[s]);
            else ptx::barrier_arrive_expect(&smem.full[s], kPanelBytes + kMore);  // fault: pipeline arrival
            half* place = smem.b[s] + (kFault == Pipeline::kMisplaced ? kSide : 0);
            const int tile = kFault == Pipeline::kWrongTile ? i / 2 : i;
            ptx::tensor_load(place, &b_map, &smem.full[s], {0, 0, tile, 0});  // fault: pipeline copy
        }
        return;
    }
    float d[kSide / 2];
    for (float& x : d) x = 0;
    ptx::barrier_wait(&smem.a_full, 0);  // fault: pipeline wait a
    const auto release = [&](int s) {
        if (thread % 32 == 0) ptx::barrier_arrive(&smem.empty[s]);
    };
    for (int i = 0; i < kTiles; ++i) {
        const int s = i % kStages;
        const unsigned parity = kFault == Pipeline::kStuckParity ? 0 : static_cast<unsigned>(i / kStages % 2);
        const bool waits = kFault == Pipeline::kOneWarpWaits ? thread < 32 : kFault != Pipeline::kNoWait;
        if (waits) ptx::barrier_wait(&smem.full[s], parity);
        if (kFault == Pipeline::kEarlyRelease) release(s);
        if (kFault != Pipeline::kNoFence) ptx::wgmma_fence();
        const ptx::SharedMatrix<Major::K> a(smem.a);
        const ptx::SharedMatrix<Major::K> b(smem.b[kFault == Pipeline::kOldStage ? 0 : s]);
        for (int k = 0; k < 4; ++k) {
            const auto columns = b + 32 * k + (kFault == Pipeline::kTooFar ? kStages * kPanelBytes : 0);
            ptx::wgmma<half, kSide>(d, a + 32 * k, columns, true);  // fault: pipeline product
        }
        ptx::wgmma_commit();
        if (kFault == Pipeline::kReleaseOfPending) release(s);
        if (kFault != Pipeline::kNoProductWait) ptx::wgmma_wait<0>();
        if (kFault == Pipeline::kBarrierOverwritten && thread == 0)
            smem.full[s].state = 0;  // fault: pipeline overwrite
        if (kFault != Pipeline::kEarlyRelease && kFault != Pipeline::kReleaseOfPending) release(s);
    }
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    for (int j = 0; j < kSide / 8; ++j)
        for (int i = 0; i < 4; ++i) out[(16 * warp + g + 8 * (i / 2)) * kSide + 8 * j + 2 * t + i % 2] = d[4 * j + i];
}
template <int... kFaults>
void run_pipeline(float* out, const half* a, const half* b, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&pipeline<Pipeline::kNone>) kKernels[] = {pipeline<static_cast<Pipeline>(kFaults)>...};
    const int rows = fault == static_cast<int>(Pipeline::kSmallBox) ? kSide / 2 : kSide;
    launch(kKernels[fault], {dim3(1), dim3(kGroup + 32), sizeof(PipelineMemory)}, nullptr, out, map_of(a, kSide, kSide),
           map_of(b, kSide, kSide, kTiles + 1, rows));
}
const Entry kPipeline(
    "pipeline", +[](float* out, const half* a, const half* b, int fault) {
        constexpr int kFaults = static_cast<int>(Pipeline::kUnused) + 1;
        run_pipeline(out, a, b, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- a handover: threads write what a product reads ------------------------------------------------------------------

enum class Handover {
    kNone,
    kNoProxyFence,
    kEarlyProxyFence,  // before the writes
    kProxyFenceOfOneLane,
    kNoBarrier,  // behind the fence
    kNoSwizzle,
    kWrongSwizzle,   // that of 64 bytes
    kUninitialised,  // the last rows
    kOverwritten,    // before the product's wait
    kCopiedOver,     // by a tensor copy, without a fence
};

struct HandoverMemory {
    alignas(1024) half a[kSide * kSide];
    alignas(1024) half b[kSide * kSide];
    ptx::Barrier full;
};

/// out (64 x 64) = A B^T, both 64 x 64 by rows.
template <Handover kFault>
__global__ void handover(float* out, const half* a, const __grid_constant__ TensorMap b_map) {
    auto& smem = shared_memory<HandoverMemory>();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        ptx::barrier_init(&smem.full, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (kFault == Handover::kCopiedOver) {
        smem.b[thread] = half(1.f);  // fault: handover b
        __syncthreads();
    }
    if (thread == 0) {
        ptx::barrier_arrive_expect(&smem.full, kPanelBytes);
        ptx::tensor_load(smem.b, &b_map, &smem.full, {0, 0, 0, 0});  // fault: handover copy
    }
    if (kFault == Handover::kEarlyProxyFence) ptx::fence_proxy_async();
    for (int i = thread; i < (kFault == Handover::kUninitialised ? kSide - 1 : kSide) * kSide / 8; i += kGroup) {
        const int row = i / 8, unit = i % 8;  // of 16 bytes
        const int place = kFault == Handover::kNoSwizzle      ? unit
                          : kFault == Handover::kWrongSwizzle ? unit ^ row / 2 % 4
                                                              : unit ^ row % 8;
        const auto from = reinterpret_cast<const uint4*>(a + kSide * row + 8 * unit);
        *reinterpret_cast<uint4*>(smem.a + kSide * row + 8 * place) = *from;  // fault: handover writes
    }
    constexpr bool kAll = kFault != Handover::kNoProxyFence && kFault != Handover::kEarlyProxyFence;
    if (kAll && (kFault != Handover::kProxyFenceOfOneLane || thread % 32 == 0)) ptx::fence_proxy_async();
    if (kFault != Handover::kNoBarrier) __syncthreads();
    ptx::barrier_wait(&smem.full, 0);
    float d[kSide / 2];
    ptx::wgmma_fence();
    const ptx::SharedMatrix<Major::K> rows(smem.a), columns(smem.b);
    for (int k = 0; k < 4; ++k)
        ptx::wgmma<half, kSide>(d, rows + 32 * k, columns + 32 * k, k > 0);  // fault: handover product
    ptx::wgmma_commit();
    if (kFault == Handover::kOverwritten && thread == 127) smem.a[0] = half(0.f);  // fault: handover overwrites
    ptx::wgmma_wait<0>();
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    for (int j = 0; j < kSide / 8; ++j)
        for (int i = 0; i < 4; ++i) out[(16 * warp + g + 8 * (i / 2)) * kSide + 8 * j + 2 * t + i % 2] = d[4 * j + i];
}
template <int... kFaults>
void run_handover(float* out, const half* a, const half* b, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&handover<Handover::kNone>) kKernels[] = {handover<static_cast<Handover>(kFaults)>...};
    launch(kKernels[fault], {dim3(1), dim3(kGroup), sizeof(HandoverMemory)}, nullptr, out, a, map_of(b, kSide, kSide));
}
const Entry kHandover(
    "handover", +[](float* out, const half* a, const half* b, int fault) {
        constexpr int kFaults = static_cast<int>(Handover::kCopiedOver) + 1;
        run_handover(out, a, b, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- a patch: a warp completes a tile that a copy has brought --------------------------------------------------------

enum class Patch {
    kNone,
    kWaitOfOneLane,  // for the copy
    kNoFence,
    kLateFence,  // behind the warp's synchronisation
    kNoSync,     // of the warp, before the one lane that says so
};

struct PatchMemory {
    alignas(1024) half a[kSide * kSide];
    alignas(1024) half b[kSide * kSide];
    ptx::Barrier loaded, full;
};

/// The warp's lanes come together, which orders no memory.
__device__ void meet() { __shfl_sync(0xffffffffu, 0, 0); }

/// out (64 x 64) = A B^T, both 64 x 64 by rows; of B the second half of the rows counts as zeros.
template <Patch kFault>
__global__ void patch(float* out, const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map) {
    auto& smem = shared_memory<PatchMemory>();
    const int thread = static_cast<int>(threadIdx.x), lane = thread % 32;
    if (thread == 0) {
        ptx::barrier_init(&smem.loaded, 1);
        ptx::barrier_init(&smem.full, 1);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (thread >= kGroup) {
        if (lane == 0) {
            ptx::barrier_arrive_expect(&smem.loaded, 2 * kPanelBytes);
            ptx::tensor_load(smem.a, &a_map, &smem.loaded, {0, 0, 0, 0});
            ptx::tensor_load(smem.b, &b_map, &smem.loaded, {0, 0, 0, 0});  // fault: patch copy
        }
        if (kFault != Patch::kWaitOfOneLane || lane == 0) ptx::barrier_wait(&smem.loaded, 0);
        meet();
        for (int i = lane; i < kSide * kSide / 16; i += 32)
            reinterpret_cast<uint4*>(smem.b + kSide * kSide / 2)[i] = uint4{};  // fault: patch zeros
        if (kFault != Patch::kNoFence && kFault != Patch::kLateFence) ptx::fence_proxy_async();
        if (kFault == Patch::kNoSync) meet();
        else __syncwarp();
        if (kFault == Patch::kLateFence) ptx::fence_proxy_async();
        meet();
        if (lane == 0) ptx::barrier_arrive(&smem.full);
        return;
    }
    ptx::barrier_wait(&smem.full, 0);
    float d[kSide / 2];
    ptx::wgmma_fence();
    const ptx::SharedMatrix<Major::K> rows(smem.a), columns(smem.b);
    for (int k = 0; k < 4; ++k)
        ptx::wgmma<half, kSide>(d, rows + 32 * k, columns + 32 * k, k > 0);  // fault: patch product
    ptx::wgmma_commit();
    ptx::wgmma_wait<0>();
    const int warp = thread / 32, g = lane / 4, t = lane % 4;
    for (int j = 0; j < kSide / 8; ++j)
        for (int i = 0; i < 4; ++i) out[(16 * warp + g + 8 * (i / 2)) * kSide + 8 * j + 2 * t + i % 2] = d[4 * j + i];
}
template <int... kFaults>
void run_patch(float* out, const half* a, const half* b, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&patch<Patch::kNone>) kKernels[] = {patch<static_cast<Patch>(kFaults)>...};
    launch(kKernels[fault], {dim3(1), dim3(kGroup + 32), sizeof(PatchMemory)}, nullptr, out, map_of(a, kSide, kSide),
           map_of(b, kSide, kSide));
}
const Entry kPatch(
    "patch", +[](float* out, const half* a, const half* b, int fault) {
        constexpr int kFaults = static_cast<int>(Patch::kNoSync) + 1;
        run_patch(out, a, b, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- a relay: a warp writes what another reads, one lane of a group speaks for all -----------------------------------

enum class Relay {
    kNone,
    kNoSyncBehindEmpty,  // of the writers, when one lane knows that the place is free
    kNoSyncBeforeFull,   // when all have written
    kNoSyncBehindFull,   // of the readers, when one lane knows that there is something
    kHalfKnows,          // the same, when half of them know
    kNoSyncBeforeEmpty,  // when all have read
    kHalfSync,           // the same, of both halves of the warp
    kMatrixReleased,     // the same: what all read is an ldmatrix, of one row
};

struct RelayMemory {
    uint4 rows[32];
    ptx::Barrier full, empty;
};

/// out[lane]: a sum over tiles of what row lane ^ 1 holds, or of the lane's elements of four 8 x 8 matrices.
template <Relay kFault, int kGroupLanes, bool kMatrix>
__global__ void relay(float* out) {
    auto& smem = shared_memory<RelayMemory>();
    const unsigned lane = threadIdx.x % 32;
    if (threadIdx.x == 0) {
        ptx::barrier_init(&smem.full, 32 / kGroupLanes);
        ptx::barrier_init(&smem.empty, 32 / kGroupLanes);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    const bool speaks = lane % kGroupLanes == 0;
    const auto sync = [&](Relay fault) {
        meet();
        if (kFault == fault) return;
        constexpr bool kHalf = kFault == Relay::kHalfSync;
        const unsigned lanes = kHalf && fault == Relay::kNoSyncBeforeEmpty ? 16 : kGroupLanes;
        if (lanes > 1) __syncwarp(0xffffffffu >> (32 - lanes) << lane / lanes * lanes);
        meet();
    };
    unsigned sum = 0;
    for (unsigned tile = 0; tile < kTiles; ++tile) {
        if (threadIdx.x < 32) {
            if (speaks) ptx::barrier_wait(&smem.empty, tile % 2 ^ 1);
            sync(Relay::kNoSyncBehindEmpty);
            const unsigned x = 32 * tile + lane;
            smem.rows[lane] = uint4{x, x, x, x};  // fault: relay writes
            sync(Relay::kNoSyncBeforeFull);
            if (speaks) ptx::barrier_arrive(&smem.full);
            continue;
        }
        if (kFault == Relay::kHalfKnows ? lane < 16 : speaks) ptx::barrier_wait(&smem.full, tile % 2);
        sync(kFault == Relay::kHalfKnows ? kFault : Relay::kNoSyncBehindFull);
        if (kMatrix) {
            std::uint32_t words[4];
            const uint4* row = smem.rows + (kFault == Relay::kMatrixReleased ? 0 : lane ^ 1);
            ptx::ldmatrix_x4(words, row);  // fault: relay matrices
            sum += words[0] + words[1] + words[2] + words[3];
        } else {
            sum += smem.rows[lane ^ 1].x;  // fault: relay reads
        }
        sync(kFault == Relay::kMatrixReleased ? kFault : Relay::kNoSyncBeforeEmpty);
        if (speaks) ptx::barrier_arrive(&smem.empty);
    }
    if (threadIdx.x >= 32) out[lane] = static_cast<float>(sum);
}
template <int... kFaults>
void run_relay(float* out, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&relay<Relay::kNone, 32, false>) kKernels[] = {
        relay<static_cast<Relay>(kFaults), 32, static_cast<Relay>(kFaults) == Relay::kMatrixReleased>...};
    launch(kKernels[fault], {dim3(1), dim3(64), sizeof(RelayMemory)}, nullptr, out);
}
const Entry kRelay(
    "relay", +[](float* out, int fault) {
        constexpr int kFaults = static_cast<int>(Relay::kMatrixReleased) + 1;
        run_relay(out, fault, std::make_integer_sequence<int, kFaults>());
    });
/// Groups of so many lanes; groups of one synchronise nowhere.
template <int kGroupLanes, bool kMatrix>
void run_groups(float* out) {
    launch(relay<Relay::kNone, kGroupLanes, kMatrix>, {dim3(1), dim3(64), sizeof(RelayMemory)}, nullptr, out);
}
const Entry kRelay32("relay_32_rows", run_groups<32, false>);
const Entry kRelay16("relay_16_rows", run_groups<16, false>);
const Entry kRelay1("relay_1_rows", run_groups<1, false>);
const Entry kRelayMatrix32("relay_32_matrices", run_groups<32, true>);
const Entry kRelayMatrix16("relay_16_matrices", run_groups<16, true>);
const Entry kRelayMatrix1("relay_1_matrices", run_groups<1, true>);

// --- bulk copies of bytes in order -----------------------------------------------------------------------------------

enum class Bulk {
    kNone,
    kNoWait,
    kNoProxyFence,      // behind the writes that the copy replaces
    kFewBytes,          // announced
    kOddBytes,          // no multiple of 16
    kMisalignedSource,  // of 16 bytes
    kMisplaced,         // not at a multiple of 16 bytes
    kTooLong,           // past the end of the source
};

struct BulkMemory {
    alignas(16) float words[2 * kGroup];
    ptx::Barrier full;
};

/// out = in, 128 floats.
template <Bulk kFault>
__global__ void bulk(float* out, const float* in) {
    auto& smem = shared_memory<BulkMemory>();
    const unsigned lane = threadIdx.x;
    if (lane == 0) {
        ptx::barrier_init(&smem.full, 1);
        ptx::barrier_init_fence();
    }
    for (unsigned i = lane; i < kGroup; i += 32) smem.words[i] = -1.f;  // fault: bulk writes
    if (kFault != Bulk::kNoProxyFence) ptx::fence_proxy_async();
    __syncwarp();
    if (lane == 0) {
        constexpr unsigned kBytes = sizeof(float) * (kFault == Bulk::kTooLong ? kGroup + 4 : kGroup);
        ptx::barrier_arrive_expect(&smem.full, kFault == Bulk::kFewBytes ? kBytes - 16 : kBytes);
        float* const to = smem.words + (kFault == Bulk::kMisplaced ? 2 : 0);
        const float* const from = in + (kFault == Bulk::kMisalignedSource ? 2 : 0);
        ptx::bulk_load(to, from, kFault == Bulk::kOddBytes ? kBytes - 8 : kBytes, &smem.full);  // fault: bulk copy
    }
    __syncwarp();
    if (kFault != Bulk::kNoWait) ptx::barrier_wait(&smem.full, 0);
    for (unsigned i = lane; i < kGroup; i += 32) out[i] = smem.words[i];  // fault: bulk reads
}
template <int... kFaults>
void run_bulk(float* out, const float* in, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&bulk<Bulk::kNone>) kKernels[] = {bulk<static_cast<Bulk>(kFaults)>...};
    launch(kKernels[fault], {dim3(1), dim3(32), sizeof(BulkMemory)}, nullptr, out, in);
}
const Entry kBulk(
    "bulk", +[](float* out, const float* in, int fault) {
        constexpr int kFaults = static_cast<int>(Bulk::kTooLong) + 1;
        run_bulk(out, in, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- what one block hands to the next through global memory ----------------------------------------------------------

enum class Chain {
    kNone,
    kNoWait,
    kNoRelease,
    kNoSyncwarp,  // before the release
};

/// Block by block, in the order in which they come: a row of 128 floats is the one before plus 1, and the first is in +
/// 1. `counters`: blocks that have come, and rows that are written.
template <Chain kFault>
__global__ void chain(float* out, const float* in, int* counters) {
    auto* const written = reinterpret_cast<unsigned*>(counters) + 1;
    const unsigned lane = threadIdx.x;
    unsigned row = 0;
    if (lane == 0) {
        row = static_cast<unsigned>(atomicAdd(counters, 1));
        while (kFault != Chain::kNoWait && ptx::load_acquire(written) < row) {
        }
    }
    __syncwarp();
    row = __shfl_sync(~0u, row, 0);
    const float* const from = row > 0 ? out + kGroup * (row - 1) : in;
    for (unsigned i = lane; i < kGroup; i += 32) {
        const float before = from[i ^ 1];            // fault: chain read
        out[kGroup * row + (i ^ 1)] = before + 1.f;  // fault: chain write
    }
    if (kFault != Chain::kNoSyncwarp) __syncwarp();
    if (lane > 0) return;
    if (kFault == Chain::kNoRelease) atomicAdd(written, 1u);
    else ptx::add_release(written, 1);
}
template <int... kFaults>
void run_chain(float* out, const float* in, int* counters, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&chain<Chain::kNone>) kKernels[] = {chain<static_cast<Chain>(kFaults)>...};
    launch(kKernels[fault], {dim3(4), dim3(32)}, nullptr, out, in, counters);
}
const Entry kChain(
    "chain", +[](float* out, const float* in, int* counters, int fault) {
        constexpr int kFaults = static_cast<int>(Chain::kNoSyncwarp) + 1;
        run_chain(out, in, counters, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- clusters: every block sends tiles to every block ----------------------------------------------------------------

enum class Exchange {
    kNone,
    kBlockSync,  // in place of the cluster's, before the first round
    kNoInitFence,
    kTargetNotFenced,  // behind the writes that the first tile replaces
    kNoEmptyWait,
    kLateEmptyWait,     // behind the writes of the next tile
    kNoSyncBehindWait,  // for the arrivals
    kNoProxyFence,
    kNoSync,           // of the warp, before the tile is sent
    kOverwritten,      // the tile that is sent
    kOutOfTheCluster,  // a tile is sent there
    kArrivalOutOfTheCluster,
    kNotInitialised,  // the barrier of a tile
    kOneBarrier,      // for the tiles of two rounds
    kUnordered,       // the same, and an atomic says when the first have come
    kOddBytes,        // no multiple of 16
    kNoBytes,
    kMisalignedSource,  // of 16 bytes
    kMisplaced,         // not at a multiple of 16 bytes
    kPastTheEnd,        // of shared memory
    kSourcePastTheEnd,
    kFromGlobal,
    kToGlobal,
    kGlobalBarrier,
    kFewBytes,  // announced
    kManyBytes,
    kNoExpect,
    kOneTileExpected,  // of those of all blocks
    kNoWait,           // from the second round on
    kTargetWritten,    // before the tile has come
    kNoRelease,        // of tiles that have been read
    kEarlyRelease,     // before the wait for them
    kReleaseOfUnread,  // behind the wait, before the reads
    kNoSyncBeforeRelease,
    kCleared,  // a tile, behind the reads: the release orders no writes
    kManyReleases,
    kNoLastSync,  // of the cluster, before a block ends
    kEnded,       // a block, before the others send to it
};

constexpr unsigned kRounds = 25;

template <int kBlocks>
struct ExchangeMemory {
    alignas(16) float sent[kStages][32];
    alignas(16) float received[kStages][kBlocks][32];
    ptx::Barrier full[kStages], empty[kStages], unused;
    unsigned rounds;  ///< that have come
};

/// out[block][lane]: the sum, over rounds and the blocks of the cluster, of 1000 round + 100 rank + (lane ^ 1).
template <Exchange kFault, int kBlocks>
__global__ void exchange(float* out) {
    auto& smem = shared_memory<ExchangeMemory<kBlocks>>();
    const unsigned lane = threadIdx.x % 32, rank = ptx::cluster_rank();
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            ptx::barrier_init(&smem.full[s], 1);  // fault: exchange init
            ptx::barrier_init(&smem.empty[s], kBlocks);
        }
        smem.rounds = 0;
        if (kFault != Exchange::kNoInitFence) ptx::barrier_init_fence();
    }
    if (kFault == Exchange::kTargetNotFenced && threadIdx.x < 32)
        smem.received[0][0][lane] = 0;  // fault: exchange target
    __syncwarp();
    if (kFault == Exchange::kBlockSync) __syncthreads();
    else ptx::cluster_sync();
    if (kFault == Exchange::kEnded && rank == 1) return;
    constexpr bool kOne = kFault == Exchange::kOneBarrier || kFault == Exchange::kUnordered;
    const auto full_of = [](unsigned i) { return kOne ? 0 : i % kStages; };
    float sum = 0;
    for (unsigned i = 0; i < kRounds; ++i) {
        const unsigned s = i % kStages, parity = i / kStages % 2;
        if (threadIdx.x < 32) {
            const auto wait = [&] {
                if (lane == 0) ptx::barrier_wait(&smem.empty[s], parity ^ 1);
                if (kFault != Exchange::kNoSyncBehindWait) __syncwarp();
            };
            if (kFault != Exchange::kNoEmptyWait && kFault != Exchange::kLateEmptyWait) wait();
            smem.sent[s][lane] = static_cast<float>(1000 * i + 100 * rank + lane);  // fault: exchange writes
            if (kFault != Exchange::kNoProxyFence) ptx::fence_proxy_async();
            if (kFault != Exchange::kNoSync) __syncwarp();
            if (kFault == Exchange::kLateEmptyWait) wait();
            while (kFault == Exchange::kUnordered && atomicAdd(&smem.rounds, 0u) < i) {
            }
            if (lane < kBlocks) {
                float* const end = reinterpret_cast<float*>(&smem + 1);
                const float* const from = kFault == Exchange::kMisalignedSource   ? smem.sent[s] + 2
                                          : kFault == Exchange::kSourcePastTheEnd ? end - 4
                                          : kFault == Exchange::kFromGlobal       ? out
                                                                                  : smem.sent[s];
                float* const to = kFault == Exchange::kMisplaced    ? smem.received[s][rank] + 2
                                  : kFault == Exchange::kPastTheEnd ? end - 4
                                  : kFault == Exchange::kToGlobal   ? out
                                                                    : smem.received[s][rank];
                ptx::Barrier* const full = kFault == Exchange::kNotInitialised  ? &smem.unused
                                           : kFault == Exchange::kGlobalBarrier ? reinterpret_cast<ptx::Barrier*>(out)
                                                                                : &smem.full[full_of(i)];
                constexpr unsigned kBytes = kFault == Exchange::kOddBytes  ? 120
                                            : kFault == Exchange::kNoBytes ? 0
                                                                           : 128;
                const unsigned there = kFault == Exchange::kOutOfTheCluster ? lane + kBlocks : lane;
                ptx::bulk_send(to, from, kBytes, full, there);  // fault: exchange send
            }
            if (kFault == Exchange::kOverwritten) {
                __syncwarp();
                if (lane == 5) smem.sent[s][lane] = 0;  // fault: exchange overwrites
            }
            continue;
        }
        if (kFault == Exchange::kTargetWritten && lane == 3) smem.received[s][0][lane] = 0;  // fault: exchange clears
        if (lane == 0) {
            constexpr int kMore = kFault == Exchange::kFewBytes          ? -16
                                  : kFault == Exchange::kManyBytes       ? 16
                                  : kFault == Exchange::kOneTileExpected ? 128 - kBlocks * 128
                                                                         : 0;
            if (kFault == Exchange::kNoExpect) ptx::barrier_arrive(&smem.full[s]);
            else ptx::barrier_arrive_expect(&smem.full[full_of(i)], kBlocks * 128 + kMore);
        }
        const auto release = [&] {
            const unsigned there = kFault == Exchange::kArrivalOutOfTheCluster ? lane + kBlocks : lane % kBlocks;
            const unsigned lanes = kFault == Exchange::kManyReleases ? kBlocks + 1 : kBlocks;
            if (kFault != Exchange::kNoRelease && lane < lanes)
                ptx::barrier_arrive_at(&smem.empty[s], there);  // fault: exchange release
        };
        if (kFault == Exchange::kEarlyRelease) release();
        if (kFault != Exchange::kNoWait || i == 0) ptx::barrier_wait(&smem.full[full_of(i)], kOne ? i % 2 : parity);
        if (kFault == Exchange::kUnordered && lane == 0) atomicAdd(&smem.rounds, 1u);
        if (kFault == Exchange::kReleaseOfUnread) release();
        for (int r = 0; r < kBlocks; ++r) sum += smem.received[s][r][lane ^ 1];  // fault: exchange reads
        if (kFault == Exchange::kCleared) {
            smem.received[s][1][lane ^ 1] = 0;  // fault: exchange clears tile
            ptx::fence_proxy_async();
        }
        if (kFault != Exchange::kNoSyncBeforeRelease) __syncwarp();
        if (kFault != Exchange::kEarlyRelease && kFault != Exchange::kReleaseOfUnread) release();
    }
    if (threadIdx.x >= 32) out[32 * blockIdx.x + lane] = sum;
    __syncwarp();
    if (kFault != Exchange::kNoLastSync) ptx::cluster_sync();
}
template <Exchange kFault, int kBlocks>
void run_exchange(float* out) {
    launch(exchange<kFault, kBlocks>, {dim3(2 * kBlocks), dim3(64), sizeof(ExchangeMemory<kBlocks>), kBlocks}, nullptr,
           out);
}
template <int... kFaults>
void run_exchanges(float* out, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&run_exchange<Exchange::kNone, 2>) kRuns[] = {
        run_exchange<static_cast<Exchange>(kFaults), 2>...};
    kRuns[fault](out);
}
const Entry kExchange(
    "exchange", +[](float* out, int fault) {
        constexpr int kFaults = static_cast<int>(Exchange::kEnded) + 1;
        run_exchanges(out, fault, std::make_integer_sequence<int, kFaults>());
    });
const Entry kExchange1("exchange_1", run_exchange<Exchange::kNone, 1>);  // without clusters: refused
const Entry kExchange4("exchange_4", run_exchange<Exchange::kNone, 4>);
const Entry kExchange8("exchange_8", run_exchange<Exchange::kNone, 8>);

// --- clusters: what their threads do before and behind a cluster_sync ------------------------------------------------

enum class Rendezvous {
    kNone,
    kNoSync,
    kBlockSync,     // in place of the cluster's
    kNoSecondSync,  // behind the reads
    kNoThirdSync,   // before the release
    kNoRelease,
    kNoLastSync,  // behind the acquire
    kHalfWarp,    // the lanes of a warp at different places
    kMissing,     // a warp, which waits elsewhere
};

/// out[block][thread] = the sum of what the two blocks of the cluster first write there, 64 block + thread; the second
/// cluster adds what the first has at this rank.
template <Rendezvous kFault>
__global__ void rendezvous(float* out, int* counter) {
    const unsigned thread = threadIdx.x, rank = ptx::cluster_rank();
    if (thread >= 64) return;  // nobody waits for these
    auto* const done = reinterpret_cast<unsigned*>(counter);
    float* const ours = out + 64 * (blockIdx.x - rank) + thread;
    ours[64 * rank] = static_cast<float>(64 * blockIdx.x + thread);  // fault: rendezvous first
    if (kFault == Rendezvous::kMissing && rank == 1 && thread < 32) __syncthreads();
    if (kFault == Rendezvous::kHalfWarp && thread % 32 < 16) ptx::cluster_sync();  // fault: rendezvous half
    else if (kFault == Rendezvous::kBlockSync) __syncthreads();
    else if (kFault != Rendezvous::kNoSync) ptx::cluster_sync();  // fault: rendezvous sync
    const float sum = ours[0] + ours[64];                         // fault: rendezvous reads
    if (kFault != Rendezvous::kNoSecondSync) {
        if (thread < 32) ptx::cluster_sync();
        else ptx::cluster_sync();
    }
    ours[64 * (rank ^ 1)] = sum;  // fault: rendezvous writes
    if (blockIdx.x < 2) {
        if (kFault != Rendezvous::kNoThirdSync) ptx::cluster_sync();
        if (rank == 0 || thread > 0) return;
        if (kFault == Rendezvous::kNoRelease) atomicAdd(done, 1u);
        else ptx::add_release(done, 1);
        return;
    }
    while (rank == 1 && thread == 0 && ptx::load_acquire(done) == 0) {
    }
    __syncwarp();
    if (kFault != Rendezvous::kNoLastSync) ptx::cluster_sync();
    ours[64 * (rank ^ 1)] += out[64 * (rank ^ 1) + thread];  // fault: rendezvous adds
}
template <int... kFaults>
void run_rendezvous(float* out, int* counter, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&rendezvous<Rendezvous::kNone>) kKernels[] = {rendezvous<static_cast<Rendezvous>(kFaults)>...};
    launch(kKernels[fault], {dim3(4), dim3(96), 0, 2}, nullptr, out, counter);
}
const Entry kRendezvous(
    "rendezvous", +[](float* out, int* counter, int fault) {
        constexpr int kFaults = static_cast<int>(Rendezvous::kMissing) + 1;
        run_rendezvous(out, counter, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- stores: a warp writes rows that its first lane stores -----------------------------------------------------------

enum class Stores {
    kNone,
    kNoProxyFence,
    kProxyFenceOfOneLane,
    kLateProxyFence,  // behind the synchronisation
    kNoSync,          // before the store
    kNoWait,          // before the buffer is written again
    kOlderGroup,      // the wait is for the store before
    kNoCommit,        // of one of the stores
    kNoSyncBehindWait,
    kOverwritten,     // by the lane itself, before its wait
    kAtExit,          // nobody waits for the last
    kNoCommitAtExit,  // of the last
    kNoSwizzle,
    kUninitialised,  // a row
    kMisplaced,      // not at a multiple of 1024 bytes
    kPastTheEnd,     // of shared memory
    kManyRows,       // in the map
    kTwice,          // by two lanes
};

constexpr int kStoredTiles = 5, kStoredRows = 32 * kStoredTiles - 7;

struct StoresMemory {
    alignas(1024) float tiles[2][32][32];
};

/// out[i] = i, 32 columns of kStoredRows rows. The map's elements are halves of floats.
template <Stores kFault>
__global__ void stores(const __grid_constant__ TensorMap map) {
    auto& smem = shared_memory<StoresMemory>();
    const int lane = static_cast<int>(threadIdx.x);
    const bool stores = lane == 0 || (kFault == Stores::kTwice && lane == 1);
    for (int tile = 0; tile < kStoredTiles; ++tile) {
        const int s = tile % 2;
        if (kFault != Stores::kNoWait && stores) ptx::store_wait_read<kFault == Stores::kOlderGroup ? 2 : 1>();
        meet();
        if (kFault != Stores::kNoSyncBehindWait) __syncwarp();
        for (int unit = 0; unit < 8; ++unit) {
            if (kFault == Stores::kUninitialised && lane == 3) continue;
            const int place = kFault == Stores::kNoSwizzle ? unit : unit ^ lane % 8;
            const auto x = static_cast<float>(1024 * tile + 32 * lane + 4 * unit);
            const float4 row{x, x + 1, x + 2, x + 3};
            *reinterpret_cast<float4*>(smem.tiles[s][lane] + 4 * place) = row;  // fault: stores writes
        }
        constexpr bool kAll = kFault != Stores::kNoProxyFence && kFault != Stores::kLateProxyFence;
        if (kAll && (kFault != Stores::kProxyFenceOfOneLane || lane == 0)) ptx::fence_proxy_async();
        meet();
        if (kFault != Stores::kNoSync) __syncwarp();
        if (kFault == Stores::kLateProxyFence) ptx::fence_proxy_async();
        meet();
        if (!stores) continue;
        const int past = kFault == Stores::kPastTheEnd ? 2 : kFault == Stores::kMisplaced ? 1 : 0;
        const float* from = kFault == Stores::kMisplaced ? smem.tiles[s][past] : smem.tiles[s + past][0];
        ptx::tensor_store(&map, from, {0, 32 * tile, 0, 0});  // fault: stores store
        const bool last = tile + 1 == kStoredTiles;
        if (kFault != (last ? Stores::kNoCommitAtExit : Stores::kNoCommit)) ptx::store_commit();
        if (kFault == Stores::kOverwritten) smem.tiles[s][2][5] = 0;  // fault: stores overwrites
    }
    if (kFault != Stores::kAtExit && stores) ptx::store_wait_read<0>();
}
template <int... kFaults>
void run_stores(float* out, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&stores<Stores::kNone>) kKernels[] = {stores<static_cast<Stores>(kFaults)>...};
    const int rows = kStoredRows + (fault == static_cast<int>(Stores::kManyRows) ? 1 : 0);
    launch(kKernels[fault], {dim3(1), dim3(32), sizeof(StoresMemory)}, nullptr, map_of(out, kSide, rows, 1, 32));
}
const Entry kStores(
    "stores", +[](float* out, int fault) {
        constexpr int kFaults = static_cast<int>(Stores::kTwice) + 1;
        run_stores(out, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- moves: a lane stores what a copy has brought --------------------------------------------------------------------

enum class Moves {
    kNone,
    kNoWait,       // for the copy
    kNoStoreWait,  // before the next copy
};

struct MovesMemory {
    alignas(1024) half tile[kSide * kSide];
    ptx::Barrier full;
};

/// out = in: kTiles tiles of 64 x 64 halves of floats.
template <Moves kFault>
__global__ void moves(const __grid_constant__ TensorMap to, const __grid_constant__ TensorMap from) {
    auto& smem = shared_memory<MovesMemory>();
    if (threadIdx.x > 0) return;
    ptx::barrier_init(&smem.full, 1);
    ptx::barrier_init_fence();
    for (int tile = 0; tile < kTiles; ++tile) {
        ptx::barrier_arrive_expect(&smem.full, kPanelBytes);
        ptx::tensor_load(smem.tile, &from, &smem.full, {0, 0, tile, 0});  // fault: moves copy
        if (kFault != Moves::kNoWait) ptx::barrier_wait(&smem.full, static_cast<unsigned>(tile % 2));
        ptx::tensor_store(&to, smem.tile, {0, 0, tile, 0});  // fault: moves store
        ptx::store_commit();
        if (kFault != Moves::kNoStoreWait) ptx::store_wait_read<0>();
    }
    ptx::store_wait_read<0>();
}
template <int... kFaults>
void run_moves(float* out, const float* in, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&moves<Moves::kNone>) kKernels[] = {moves<static_cast<Moves>(kFaults)>...};
    launch(kKernels[fault], {dim3(1), dim3(32), sizeof(MovesMemory)}, nullptr, map_of(out, kSide, kSide, kTiles),
           map_of(in, kSide, kSide, kTiles));
}
const Entry kMoves(
    "moves", +[](float* out, const float* in, int fault) {
        constexpr int kFaults = static_cast<int>(Moves::kNoStoreWait) + 1;
        run_moves(out, in, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- stores of matrices from registers -------------------------------------------------------------------------------

enum class Matrices {
    kNone,
    kNoSync,      // before other lanes read
    kMisaligned,  // a row's address
    kOutside,     // of shared memory
    kPastTheEnd,
};

struct MatricesMemory {
    alignas(16) std::uint16_t tile[256];
};

/// out[i]: element i of the shared memory behind a store of four matrices. Their elements are numbers from 0 on, by
/// rows; lane l names the place of row l ^ 5.
template <Matrices kFault>
__global__ void matrices(float* out) {
    auto& smem = shared_memory<MatricesMemory>();
    const unsigned lane = threadIdx.x;
    std::uint32_t r[4];
    for (unsigned m = 0; m < 4; ++m) {
        const unsigned first = 64 * m + 8 * (lane / 4) + 2 * (lane % 4);
        r[m] = first | (first + 1) << 16;
    }
    void* row = smem.tile + 8 * (lane ^ 5) + (kFault == Matrices::kMisaligned && lane == 3 ? 4 : 0);
    if (kFault == Matrices::kOutside && lane == 7) row = out;
    if (kFault == Matrices::kPastTheEnd && lane == 31) row = smem.tile + 256;
    ptx::stmatrix_x4(row, r);  // fault: matrices store
    if (kFault != Matrices::kNoSync) __syncwarp();
    for (unsigned i = lane; i < 256; i += 32) out[i] = smem.tile[i];  // fault: matrices reads
}
template <int... kFaults>
void run_matrices(float* out, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&matrices<Matrices::kNone>) kKernels[] = {matrices<static_cast<Matrices>(kFaults)>...};
    launch(kKernels[fault], {dim3(1), dim3(32), sizeof(MatricesMemory)}, nullptr, out);
}
const Entry kMatrices(
    "matrices", +[](float* out, int fault) {
        constexpr int kFaults = static_cast<int>(Matrices::kPastTheEnd) + 1;
        run_matrices(out, fault, std::make_integer_sequence<int, kFaults>());
    });

/// out[0][lane], out[1][lane]: the words in[0] of all lanes, and those of the lane's half of the warp, or'ed.
__global__ void reduced(unsigned* out, const unsigned* in) {
    const unsigned lane = threadIdx.x;
    out[lane] = __reduce_or_sync(0xffffffffu, in[lane]);
    out[32 + lane] = __reduce_or_sync(0xffffu << lane / 16 * 16, in[lane]);
}
const Entry kReduced(
    "reduced", +[](void* out, const void* in) {
        launch(reduced, {dim3(1), dim3(32)}, nullptr, static_cast<unsigned*>(out), static_cast<const unsigned*>(in));
    });

// --- registers of products -------------------------------------------------------------------------------------------

enum class Registers {
    kNone,
    kAccumulatorRead,  // before the wait
    kAccumulatorWritten,
    kOperandWritten,     // A, before the wait
    kOperandAfterFence,  // A is written after wgmma_fence
    kAccumulatorAfterFence,
    kOlderGroup,  // the wait is for the product before
    kNoCommit,
    kAtExit,       // nobody waits
    kOtherShape,   // one accumulator for two shapes
    kWrongPanels,  // their distance
    kWrongMajor,
    kWrongStep,    // along k
    kLanesDiffer,  // in a matrix
    kThreeWarps,
};

struct RegistersMemory {
    alignas(1024) half b[2][kSide * kSide];
    ptx::Barrier full;
};

/// out[thread][i]: part of D (64 x 128) = A B + A B, A 64 x 64 in registers a[thread][step][4], B 64 x 128 by rows.
template <Registers kFault>
__global__ void registers(float* out, const std::uint32_t* a, const __grid_constant__ TensorMap b_map) {
    auto& smem = shared_memory<RegistersMemory>();
    const unsigned thread = threadIdx.x;
    if (thread == 0) {
        ptx::barrier_init(&smem.full, 1);
        ptx::barrier_init_fence();
        ptx::barrier_arrive_expect(&smem.full, 2 * kPanelBytes);
        for (int i = 0; i < 2; ++i) ptx::tensor_load(smem.b[i], &b_map, &smem.full, {kSide * i, 0, 0, 0});
    }
    __syncthreads();
    ptx::barrier_wait(&smem.full, 0);
    float d[kSide];
    std::uint32_t left[4][4];
    for (unsigned i = 0; i < 16; ++i) left[i / 4][i % 4] = a[16 * thread + i];
    if (kFault == Registers::kThreeWarps && thread >= 96) return;
    const half* panel = smem.b[0] + (kFault == Registers::kLanesDiffer ? thread % 2 * 8 * kSide : 0);
    ptx::wgmma_fence();
    if (kFault == Registers::kOperandAfterFence) left[2][1] = 0;
    const int panels = kFault == Registers::kWrongPanels ? kPanelBytes / 2 : kPanelBytes;
    const ptx::SharedMatrix<Major::N> b(panel, panels);
    const ptx::SharedMatrix<Major::K> other(panel, panels);
    for (int group = 0; group < 2; ++group) {
        for (int k = 0; k < 4; ++k) {
            const int bytes = (kFault == Registers::kWrongStep ? 8 : 16) * 128 * k;
            if (kFault == Registers::kWrongMajor)
                ptx::wgmma<half, 2 * kSide>(d, left[k], other + 32 * k, group + k > 0);
            else ptx::wgmma<half, 2 * kSide>(d, left[k], b + bytes, group + k > 0);  // fault: registers product
            if (kFault == Registers::kOtherShape && k == 1) {
                float (&half_of_d)[kSide / 2] = *reinterpret_cast<float (*)[kSide / 2]>(d);
                ptx::wgmma<half, kSide>(half_of_d, left[k], b, true);  // fault: registers other shape
            }
        }
        if (kFault == Registers::kAccumulatorAfterFence && group == 0) {
            ptx::wgmma_commit();
            ptx::wgmma_wait<0>();
            for (float& x : d) x *= 2;
            continue;
        }
        if (kFault != Registers::kNoCommit) ptx::wgmma_commit();
    }
    if (kFault == Registers::kAccumulatorRead) out[kSide * thread] = d[0];  // fault: registers read
    if (kFault == Registers::kAccumulatorWritten) d[1] = 0;                 // fault: registers written
    if (kFault == Registers::kOperandWritten) left[3][3] = 0;               // fault: registers operand
    if (kFault == Registers::kOlderGroup) ptx::wgmma_wait<1>();
    else if (kFault != Registers::kAtExit) ptx::wgmma_wait<0>();
    if (kFault != Registers::kAtExit)
        for (int i = 0; i < kSide; ++i) out[kSide * thread + static_cast<unsigned>(i)] = d[i];  // fault: registers out
}
template <int... kFaults>
void run_registers(float* out, const void* a, const half* b, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&registers<Registers::kNone>) kKernels[] = {registers<static_cast<Registers>(kFaults)>...};
    launch(kKernels[fault], {dim3(1), dim3(kGroup), sizeof(RegistersMemory)}, nullptr, out,
           static_cast<const std::uint32_t*>(a), map_of(b, 2 * kSide, kSide));
}
const Entry kRegisters(
    "registers", +[](float* out, const void* a, const half* b, int fault) {
        constexpr int kFaults = static_cast<int>(Registers::kThreeWarps) + 1;
        run_registers(out, a, b, fault, std::make_integer_sequence<int, kFaults>());
    });

// --- how many registers a thread has ---------------------------------------------------------------------------------

enum class Budget {
    kNone,
    kTooMany,
    kOneWarp,  // of the four
};

/// out[thread] = 1; two consumer warpgroups take what the producer gives.
template <Budget kFault>
__global__ void budget(float* out) {
    if (threadIdx.x < kGroup) ptx::release_registers<kFault == Budget::kTooMany ? 40 : 24>();
    else if (kFault != Budget::kOneWarp || threadIdx.x % kGroup < 32)
        ptx::acquire_registers<240>();  // fault: budget inc
    out[threadIdx.x] = 1;
}
template <int... kFaults>
void run_budget(float* out, int fault, std::integer_sequence<int, kFaults...>) {
    constexpr decltype(&budget<Budget::kNone>) kKernels[] = {budget<static_cast<Budget>(kFaults)>...};
    launch(kKernels[fault], {dim3(1), dim3(3 * kGroup)}, nullptr, out);
}
const Entry kBudget(
    "budget", +[](float* out, int fault) {
        constexpr int kFaults = static_cast<int>(Budget::kOneWarp) + 1;
        run_budget(out, fault, std::make_integer_sequence<int, kFaults>());
    });

}  // namespace sm90
