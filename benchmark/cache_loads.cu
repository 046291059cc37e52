// How fast an H200 brings a key/value cache to its SMs: a kernel that loads and does nothing else, the bound of a
// decode step (docs/tuning/decode.md).
//
//     nvcc -O3 -std=c++20 -arch=sm_90a benchmark/cache_loads.cu -o cache_loads && ./cache_loads
//
// Each block takes an equal run of the tiles of all heads, as forward/mma/split.cuh shares them: heads one after the
// other, or in teams of blocks that read as many neighbouring heads at a time. The ways to load:
//
//     cp.async     16 bytes a thread, to a ring of stages in shared memory
//     ld.global    16 bytes a thread, to registers
//     bulk         a copy of each row (cp.async.bulk), issued by the lanes of a warp, to the ring
//     tensor       a copy of each tile's 64 columns (TMA), issued by a thread, to the ring
//
// Prints microseconds and TB/s: the median of rounds of two launches, on a cache far larger than L2.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <vector>

namespace {

void check(cudaError_t error) {
    if (error == cudaSuccess) return;
    std::fprintf(stderr, "%s\n", cudaGetErrorString(error));
    std::exit(1);
}

enum class Way { kAsync, kRegisters, kBulk, kTensor };

/// K and V (batch, length, heads, d) of half, or (batch, heads, length, d): strides in bytes.
struct Cache {
    const char *k, *v;
    int batch, heads, length;
    std::int64_t batch_stride, head_stride, row_stride;
    float* sink;  ///< keeps the compiler from dropping the loads
};

__device__ std::uint32_t shared(const void* p) { return static_cast<std::uint32_t>(__cvta_generic_to_shared(p)); }

__device__ void expect(std::uint64_t& barrier, int bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(&barrier)), "r"(bytes)
                 : "memory");
}
__device__ void await(std::uint64_t& barrier, int parity) {
    std::uint32_t done = 0;
    while (!done)
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(shared(&barrier)), "r"(parity)
                     : "memory");
}

template <Way kWay, int kD, int kKeys, int kStages, int kThreads, int kBlocks>
__global__ void __launch_bounds__(kThreads, kBlocks)
    load(const Cache c, int team, const __grid_constant__ CUtensorMap k_map,
         const __grid_constant__ CUtensorMap v_map) {
    constexpr int kRow = kD * 2, kTile = kKeys * kRow, kChunks = kRow / 16, kPieces = 2 * kKeys * kChunks;
    extern __shared__ char raw[];
    __shared__ std::uint64_t full[kStages];
    char* const ring = raw + (1024 - shared(raw) % 1024) % 1024;
    const int thread = static_cast<int>(threadIdx.x), block = static_cast<int>(blockIdx.x);
    if (thread == 0)
        for (auto& barrier : full) asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(&barrier)));
    asm volatile("fence.mbarrier_init.release.cluster;");
    __syncthreads();

    const int tiles = c.length / kKeys, teams = static_cast<int>(gridDim.x) / team, groups = c.heads / team;
    const std::int64_t all = std::int64_t{c.batch} * groups * tiles;
    const bool idle = block / team >= teams;
    const std::int64_t begin = idle ? 0 : all * (block / team) / teams,
                       end = idle ? 0 : all * (block / team + 1) / teams;
    struct At {
        int batch, head, tile;
        std::int64_t offset;
    };
    const auto where = [&](std::int64_t unit) {
        const int tile = static_cast<int>(unit % tiles), group = static_cast<int>(unit / tiles % groups);
        const int batch = static_cast<int>(unit / tiles / groups), head = group * team + block % team;
        return At{batch, head, tile,
                  batch * c.batch_stride + head * c.head_stride + std::int64_t{tile} * kKeys * c.row_stride};
    };
    /// Where 16 bytes of a tile are: of K, then of V.
    const auto piece = [&](const At& at, int i) {
        const int row = i % (kKeys * kChunks) / kChunks;
        return (i < kKeys * kChunks ? c.k : c.v) + at.offset + row * c.row_stride + i % kChunks * 16;
    };
    float sum = 0.f;
    if constexpr (kWay == Way::kRegisters) {
        for (std::int64_t unit = begin; unit < end; ++unit) {
            const At at = where(unit);
            uint4 x[kPieces / kThreads];
#pragma unroll
            for (int i = 0; i < kPieces / kThreads; ++i)
                asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                             : "=r"(x[i].x), "=r"(x[i].y), "=r"(x[i].z), "=r"(x[i].w)
                             : "l"(piece(at, thread + i * kThreads)));
#pragma unroll
            for (const uint4& y : x) sum += __uint_as_float(y.x ^ y.y ^ y.z ^ y.w);
        }
    } else {
        const auto issue = [&](std::int64_t unit, int stage) {
            const At at = where(unit);
            char* const to = ring + stage * 2 * kTile;
            if constexpr (kWay == Way::kAsync) {
#pragma unroll
                for (int i = thread; i < kPieces; i += kThreads) {
                    const int row = i / kChunks, chunk = i % kChunks ^ row % 8;
                    asm volatile(
                        "cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared(to + row * kRow + chunk * 16)),
                        "l"(piece(at, i)));
                }
            } else if constexpr (kWay == Way::kBulk) {
                if (thread == 0) expect(full[stage], 2 * kTile);
                __syncwarp();
                for (int row = thread; thread < 32 && row < 2 * kKeys; row += 32)
                    asm volatile(
                        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                            shared(to + row * kRow)),
                        "l"(piece(at, row * kChunks)), "r"(kRow), "r"(shared(&full[stage]))
                        : "memory");
            } else if (thread == 0) {
                expect(full[stage], 2 * kTile);
                for (int column = 0; column < 2 * kD; column += 64)
                    asm volatile(
                        "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes "
                        "[%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(shared(to + column / 64 * kKeys * 128)),
                        "l"(column < kD ? &k_map : &v_map), "r"(column % kD), "r"(at.tile * kKeys), "r"(at.head),
                        "r"(at.batch), "r"(shared(&full[stage]))
                        : "memory");
            }
        };
        const auto next = [&](std::int64_t unit, int stage) {
            if (unit < end) issue(unit, stage);
            if (kWay == Way::kAsync) asm volatile("cp.async.commit_group;");
        };
        for (int stage = 0; stage < kStages - 1; ++stage) next(begin + stage, stage);
        int stage = 0, parity = 0;
        for (std::int64_t unit = begin; unit < end; ++unit) {
            if constexpr (kWay == Way::kAsync) asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2));
            else await(full[stage], parity);
            __syncthreads();  // all have read the stage that is filled next
            next(unit + kStages - 1, (stage + kStages - 1) % kStages);
            sum += *reinterpret_cast<const float*>(ring + stage * 2 * kTile + thread * 16);
            if (++stage == kStages) stage = 0, parity ^= 1;
        }
    }
    if (sum == 123.456f) *c.sink = sum;
}

CUtensorMap map_of(const void* data, const Cache& c, int d, int keys) {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found{};
    check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found));
    const cuuint64_t sizes[] = {static_cast<cuuint64_t>(d), static_cast<cuuint64_t>(c.length),
                                static_cast<cuuint64_t>(c.heads), static_cast<cuuint64_t>(c.batch)};
    const cuuint64_t strides[] = {static_cast<cuuint64_t>(c.row_stride), static_cast<cuuint64_t>(c.head_stride),
                                  static_cast<cuuint64_t>(c.batch_stride)};
    const cuuint32_t box[] = {64, static_cast<cuuint32_t>(keys), 1, 1}, steps[] = {1, 1, 1, 1};
    CUtensorMap map;
    if (reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
            &map, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, 4, const_cast<void*>(data), sizes, strides, box, steps,
            CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE) != CUDA_SUCCESS)
        std::exit(1);
    return map;
}

template <Way kWay, int kD, int kKeys, int kStages, int kThreads, int kBlocks>
void measure(const char* name, const Cache& c, int team) {
    constexpr int kRounds = 13, kLaunches = 2;
    const auto kernel = load<kWay, kD, kKeys, kStages, kThreads, kBlocks>;
    const int bytes = kWay == Way::kRegisters ? 0 : kStages * kKeys * kD * 4 + 1024;
    check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    const CUtensorMap k_map = map_of(c.k, c, kD, kKeys), v_map = map_of(c.v, c, kD, kKeys);
    int sms = 0;
    check(cudaDeviceGetAttribute(&sms, cudaDevAttrMultiProcessorCount, 0));
    cudaEvent_t before, after;
    check(cudaEventCreate(&before)), check(cudaEventCreate(&after));
    std::vector<float> ms;
    for (int round = 0; round < kRounds; ++round) {
        check(cudaEventRecord(before));
        for (int i = 0; i < kLaunches; ++i) kernel<<<sms * kBlocks, kThreads, bytes>>>(c, team, k_map, v_map);
        check(cudaGetLastError()), check(cudaEventRecord(after)), check(cudaEventSynchronize(after));
        check(cudaEventElapsedTime(&ms.emplace_back(), before, after));
    }
    std::sort(ms.begin(), ms.end());
    const double us = ms[kRounds / 2] * 1e3 / kLaunches, read = 4.0 * c.batch * c.heads * c.length * kD;
    std::printf("  %-9s %3d keys, %d stages, %3d threads, %d blocks an SM, teams of %d: %6.1f us %5.2f TB/s\n", name,
                kKeys, kStages, kThreads, kBlocks, team, us, read / us / 1e6);
}

template <int kD>
void measure_all(const Cache& c) {
    constexpr int kTile = 64 * 128 / kD;  // keys of 16 KiB
    for (const int team : {1, 8}) {
        measure<Way::kAsync, kD, kTile, 3, 128, 2>("cp.async", c, team);
        measure<Way::kRegisters, kD, kTile / 2, 1, 256, 8>("ld.global", c, team);
        measure<Way::kBulk, kD, kTile, 3, 128, 2>("bulk", c, team);
        measure<Way::kTensor, kD, kTile, 3, 128, 2>("tensor", c, team);
    }
}

}  // namespace

int main() {
    constexpr std::int64_t kBatch = 16, kLength = 8192;
    for (const auto& [heads, d] : {std::pair(8, 128), std::pair(32, 64)}) {
        const std::int64_t row = d * 2, bytes = kBatch * heads * kLength * row;
        char* memory = nullptr;
        check(cudaMalloc(&memory, static_cast<std::size_t>(2 * bytes) + sizeof(float)));
        check(cudaMemset(memory, 0, static_cast<std::size_t>(2 * bytes)));
        for (const bool beside : {true, false}) {
            const Cache cache{memory,
                              memory + bytes,
                              kBatch,
                              heads,
                              kLength,
                              heads * kLength * row,
                              beside ? row : kLength * row,
                              beside ? heads * row : row,
                              reinterpret_cast<float*>(memory + 2 * bytes)};
            std::printf("%d sequences, %d heads, d = %d, %d keys, rows of %s\n", cache.batch, heads, d, cache.length,
                        beside ? "all heads side by side" : "a head side by side");
            if (d == 64) measure_all<64>(cache);
            else measure_all<128>(cache);
        }
        check(cudaFree(memory));
    }
}
