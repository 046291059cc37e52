// Deliberate bugs, each beside its right twin: kernel<true> is right, kernel<false> has the bug.
// tests/test_emulator_faults.py expects the emulator to report each at the lines marked "fault: NAME" and to find
// nothing in the twin. Most of these bugs give right results on most GPUs, most of the time.
#include <cuda_fp16.h>
#include <entry.h>
#include <launch.h>
#include <mma.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include <cstdint>
#include <type_traits>

namespace faults {

using flash_wmma::Entry;
using flash_wmma::launch;
using flash_wmma::shared_memory;
namespace ptx = flash_wmma::ptx;
namespace wmma = nvcuda::wmma;

constexpr unsigned kAll = 0xffffffffu;

/// Every kernel reads `in` and writes `out`, both of n floats.
using Kernel = void (*)(float* out, const float* in, int n);
struct NoMemory {};

template <Kernel Right, Kernel Wrong, unsigned Blocks, unsigned Threads, class Map = NoMemory>
void run(float* out, const float* in, int n, int right) {
    const int bytes = std::is_empty_v<Map> ? 0 : static_cast<int>(sizeof(Map));
    launch(right ? Right : Wrong, {dim3(Blocks), dim3(Threads), bytes}, nullptr, out, in, n);
}

// --- barriers that are missing ---------------------------------------------------------------------------------------

struct Exchange {
    float words[64];
};
template <bool Right>
__global__ void dropped_syncthreads(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    smem.words[threadIdx.x] = in[threadIdx.x];  // fault: dropped_syncthreads writes
    if constexpr (Right) __syncthreads();
    else __syncwarp();
    out[threadIdx.x] = smem.words[threadIdx.x & 31];  // fault: dropped_syncthreads reads
}
const Entry kDroppedSyncthreads("dropped_syncthreads",
                                run<dropped_syncthreads<true>, dropped_syncthreads<false>, 1, 64, Exchange>);

/// Each lane reads what the lane before it wrote, in the emulator as on a GPU always in time: the result is right.
template <bool Right>
__global__ void dropped_syncwarp(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned lane = threadIdx.x;
    smem.words[lane] = in[lane];  // fault: dropped_syncwarp writes
    if constexpr (Right) __syncwarp();
    out[lane] = smem.words[lane ? lane - 1 : 0];  // fault: dropped_syncwarp reads
}
const Entry kDroppedSyncwarp("dropped_syncwarp", run<dropped_syncwarp<true>, dropped_syncwarp<false>, 1, 32, Exchange>);

/// A shuffle brings lanes together but orders no memory.
template <bool Right>
__global__ void shuffle_as_barrier(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned lane = threadIdx.x;
    smem.words[lane] = in[lane];  // fault: shuffle_as_barrier writes
    const float next = __shfl_down_sync(kAll, in[lane], 1);
    if constexpr (Right) __syncwarp();
    out[lane] = next + smem.words[31 - lane];  // fault: shuffle_as_barrier reads
}
const Entry kShuffleAsBarrier("shuffle_as_barrier",
                              run<shuffle_as_barrier<true>, shuffle_as_barrier<false>, 1, 32, Exchange>);

/// The writer is the last to read, but another warp has read too.
template <bool Right>
__global__ void two_warps_read(float* out, const float*, int) {
    const unsigned t = threadIdx.x;
    float value = 0;
    if (t < 32) value = out[512];  // fault: two_warps_read reads
    if constexpr (Right) __syncthreads();
    if (t == 32) out[512] = out[512] + 1;  // fault: two_warps_read writes
    out[t] = value;
}
const Entry kTwoWarpsRead("two_warps_read", run<two_warps_read<true>, two_warps_read<false>, 1, 64>);

/// Of two warps that have added one reads the sum, as if its own addition had been the last.
template <bool Right>
__global__ void own_atomic_last(float* out, const float*, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned t = threadIdx.x;
    if (t == 0) smem.words[0] = 0;
    __syncthreads();
    if (t % 32 == 0) atomicAdd(&smem.words[0], 1.f);  // fault: own_atomic_last adds
    if constexpr (Right) __syncthreads();
    if (t == 32) out[0] = smem.words[0];  // fault: own_atomic_last reads
}
const Entry kOwnAtomicLast("own_atomic_last", run<own_atomic_last<true>, own_atomic_last<false>, 1, 64, Exchange>);

/// The same of two lanes of a warp.
template <bool Right>
__global__ void own_lane_last(float* out, const float*, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned lane = threadIdx.x;
    if (lane == 0) smem.words[0] = 0;
    __syncwarp();
    if (lane < 2) atomicAdd(&smem.words[0], 1.f);  // fault: own_lane_last adds
    if constexpr (Right) __syncwarp();
    if (lane == 1) out[0] = smem.words[0];  // fault: own_lane_last reads
}
const Entry kOwnLaneLast("own_lane_last", run<own_lane_last<true>, own_lane_last<false>, 1, 32, Exchange>);

template <bool Right>
__global__ void own_global_atomic_last(float* out, const float*, int) {
    const unsigned t = threadIdx.x;
    if (t % 32 == 0) atomicAdd(&out[512], 1.f);  // fault: own_global_atomic_last adds
    if constexpr (Right) __syncthreads();
    if (t == 32) out[512] = 5;  // fault: own_global_atomic_last writes
}
const Entry kOwnGlobalAtomicLast("own_global_atomic_last",
                                 run<own_global_atomic_last<true>, own_global_atomic_last<false>, 1, 64>);

/// The lower lanes synchronise among themselves and read what an upper one wrote.
template <bool Right>
__global__ void half_a_syncwarp(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned lane = threadIdx.x;
    smem.words[lane] = in[lane];  // fault: half_a_syncwarp writes
    if (lane < 16) {
        __syncwarp(0xffff);
        const float mirrored = smem.words[15 - lane];
        __syncwarp(0xffff);
        smem.words[lane] = mirrored;
        __syncwarp(0xffff);
        out[lane] = smem.words[Right ? 15 - lane : 16 + lane];  // fault: half_a_syncwarp reads
    }
}
const Entry kHalfASyncwarp("half_a_syncwarp", run<half_a_syncwarp<true>, half_a_syncwarp<false>, 1, 32, Exchange>);

/// Two lanes write one word.
template <bool Right>
__global__ void same_word(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned lane = threadIdx.x;
    smem.words[Right ? lane : lane / 2] = in[lane];  // fault: same_word
    __syncwarp();
    if (lane < 16) out[lane] = smem.words[lane];
}
const Entry kSameWord("same_word", run<same_word<true>, same_word<false>, 1, 32, Exchange>);

/// One barrier a round is enough for two stages, not for one.
struct Stages {
    float words[2][64];
};
template <bool Right>
__global__ void wrong_double_buffer(float* out, const float* in, int) {
    auto& smem = shared_memory<Stages>();
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
        const int stage = Right ? i % 2 : 0;
        smem.words[stage][threadIdx.x] = in[threadIdx.x] + static_cast<float>(i);  // fault: wrong_double_buffer writes
        __syncthreads();
        sum += smem.words[stage][63 - threadIdx.x];  // fault: wrong_double_buffer reads
    }
    out[threadIdx.x] = sum;
}
const Entry kWrongDoubleBuffer("wrong_double_buffer",
                               run<wrong_double_buffer<true>, wrong_double_buffer<false>, 1, 64, Stages>);

// --- asynchronous copies ---------------------------------------------------------------------------------------------

struct alignas(16) Tile {
    float words[2][128];
};
/// The newest group may still be under way when the tile is read.
template <bool Right>
__global__ void missing_async_wait(float* out, const float* in, int) {
    auto& smem = shared_memory<Tile>();
    const unsigned lane = threadIdx.x;
    for (int stage = 0; stage < 2; ++stage) {
        ptx::cp_async_16(&smem.words[stage][4 * lane], &in[4 * lane], 16);  // fault: missing_async_wait copies
        ptx::cp_async_commit();
    }
    ptx::cp_async_wait<Right ? 0 : 1>();
    __syncwarp();
    out[lane] = smem.words[0][lane] + smem.words[1][lane];  // fault: missing_async_wait reads
    ptx::cp_async_wait<0>();
}
const Entry kMissingAsyncWait("missing_async_wait",
                              run<missing_async_wait<true>, missing_async_wait<false>, 1, 32, Tile>);

/// A wait is for the own copies alone: those of other lanes need a barrier too.
template <bool Right>
__global__ void async_without_barrier(float* out, const float* in, int) {
    auto& smem = shared_memory<Tile>();
    const unsigned lane = threadIdx.x;
    ptx::cp_async_16(&smem.words[0][4 * lane], &in[4 * lane], 16);  // fault: async_without_barrier copies
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if constexpr (Right) __syncwarp();
    out[lane] = smem.words[0][lane];  // fault: async_without_barrier reads
}
const Entry kAsyncWithoutBarrier("async_without_barrier",
                                 run<async_without_barrier<true>, async_without_barrier<false>, 1, 32, Tile>);

/// The next tile is under way into the place that other lanes still read.
template <bool Right>
__global__ void async_too_early(float* out, const float* in, int) {
    auto& smem = shared_memory<Tile>();
    const unsigned lane = threadIdx.x % 32;
    float sum = 0;
    for (int i = 0; i < 2; ++i) {
        if (threadIdx.x < 32) {
            ptx::cp_async_16(&smem.words[0][4 * lane], &in[4 * lane], 16);  // fault: async_too_early copies
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
        }
        __syncthreads();
        sum += smem.words[0][threadIdx.x];  // fault: async_too_early reads
        if constexpr (Right) __syncthreads();
    }
    out[threadIdx.x] = sum;
}
const Entry kAsyncTooEarly("async_too_early", run<async_too_early<true>, async_too_early<false>, 1, 64, Tile>);

/// Zeros for the tail, written while a copy of the whole row is under way.
template <bool Right>
__global__ void async_target_written(float* out, const float* in, int) {
    auto& smem = shared_memory<Tile>();
    const unsigned lane = threadIdx.x;
    ptx::cp_async_16(&smem.words[0][4 * lane], &in[4 * lane], 16);  // fault: async_target_written copies
    ptx::cp_async_commit();
    if constexpr (Right) ptx::cp_async_wait<0>();
    if (lane == 31) smem.words[0][127] = 0;  // fault: async_target_written writes
    ptx::cp_async_wait<0>();
    __syncwarp();
    out[lane] = smem.words[0][96 + lane];
}
const Entry kAsyncTargetWritten("async_target_written",
                                run<async_target_written<true>, async_target_written<false>, 1, 32, Tile>);

template <bool Right>
__global__ void async_at_exit(float* out, const float* in, int) {
    auto& smem = shared_memory<Tile>();
    const unsigned lane = threadIdx.x;
    ptx::cp_async_16(&smem.words[0][4 * lane], &in[4 * lane], 16);  // fault: async_at_exit copies
    ptx::cp_async_commit();
    if constexpr (Right) ptx::cp_async_wait<0>();
    out[lane] = in[lane];
}
const Entry kAsyncAtExit("async_at_exit", run<async_at_exit<true>, async_at_exit<false>, 1, 32, Tile>);

// --- lanes that disagree ---------------------------------------------------------------------------------------------

template <bool Right>
__global__ void skipped_shuffle(float* out, const float* in, int) {
    float sum = in[threadIdx.x];
    if (Right || threadIdx.x != 3) sum += __shfl_xor_sync(kAll, sum, 1);  // fault: skipped_shuffle shuffles
    __syncwarp();                                                         // fault: skipped_shuffle skips
    out[threadIdx.x] = sum;
}
const Entry kSkippedShuffle("skipped_shuffle", run<skipped_shuffle<true>, skipped_shuffle<false>, 1, 32>);

/// Lanes past the end leave; the rest still name them.
template <bool Right>
__global__ void exited_lane(float* out, const float* in, int) {
    if (threadIdx.x >= 24) return;
    float sum = in[threadIdx.x];
    sum += __shfl_xor_sync(Right ? 0xffffffu : kAll, sum, 1);  // fault: exited_lane
    out[threadIdx.x] = sum;
}
const Entry kExitedLane("exited_lane", run<exited_lane<true>, exited_lane<false>, 1, 32>);

template <bool Right>
__global__ void own_lane_left_out(float* out, const float* in, int) {
    float sum = in[threadIdx.x];
    sum += __shfl_xor_sync(Right ? kAll : 0x7fffffffu, sum, 1);  // fault: own_lane_left_out
    out[threadIdx.x] = sum;
}
const Entry kOwnLaneLeftOut("own_lane_left_out", run<own_lane_left_out<true>, own_lane_left_out<false>, 1, 32>);

/// Half of the lanes think that not all take part.
template <bool Right>
__global__ void masks_differ(float* out, const float* in, int) {
    const unsigned mask = Right || threadIdx.x < 16 ? kAll : 0xffffff00u;
    out[threadIdx.x] = __shfl_sync(mask, in[threadIdx.x], 20);  // fault: masks_differ
}
const Entry kMasksDiffer("masks_differ", run<masks_differ<true>, masks_differ<false>, 1, 32>);

/// A lane outside the mask gives nothing: the result is wrong, and shows it.
template <bool Right>
__global__ void shuffle_from_outside(float* out, const float* in, int) {
    if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, in[threadIdx.x], Right ? 15 : 16);
}
const Entry kShuffleFromOutside("shuffle_from_outside",
                                run<shuffle_from_outside<true>, shuffle_from_outside<false>, 1, 32>);

// --- barriers that threads come to differently -----------------------------------------------------------------------

template <bool Right>
__global__ void divergent_barrier(float* out, const float* in, int) {
    if (Right || threadIdx.x < 40) __syncthreads();  // fault: divergent_barrier some
    else __syncthreads();                            // fault: divergent_barrier others
    out[threadIdx.x] = in[threadIdx.x];
}
const Entry kDivergentBarrier("divergent_barrier", run<divergent_barrier<true>, divergent_barrier<false>, 1, 64>);

/// Whole warps, but at two places: hardware takes them for one barrier, and what follows is out of step.
template <bool Right>
__global__ void two_barriers(float* out, const float* in, int) {
    if (Right || threadIdx.x < 32) __syncthreads();  // fault: two_barriers some
    else __syncthreads();                            // fault: two_barriers others
    out[threadIdx.x] = in[threadIdx.x];
}
const Entry kTwoBarriers("two_barriers", run<two_barriers<true>, two_barriers<false>, 1, 64>);

template <bool Right>
__global__ void deadlock(float* out, const float* in, int) {
    if (!Right && blockIdx.x == 1 && threadIdx.x == 3) __syncwarp();  // fault: deadlock one
    __syncthreads();                                                  // fault: deadlock others
    out[threadIdx.x + 64 * blockIdx.x] = in[threadIdx.x];
}
const Entry kDeadlock("deadlock", run<deadlock<true>, deadlock<false>, 2, 64>);

/// A producer warp and two consumers. The producer counts them wrong.
template <bool Right>
__global__ void named_barrier_counts(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        smem.words[lane] = in[lane];
        ptx::named_barrier_arrive(2, Right ? 96 : 64);  // fault: named_barrier_counts producer
    } else {
        ptx::named_barrier_sync(2, 96);  // fault: named_barrier_counts consumer
        out[threadIdx.x] = smem.words[lane];
    }
}
const Entry kNamedBarrierCounts("named_barrier_counts",
                                run<named_barrier_counts<true>, named_barrier_counts<false>, 1, 96, Exchange>);

/// All count too few: the two producers are enough, and nobody comes for the consumer.
template <bool Right>
__global__ void named_barrier_too_few(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    if (warp == 2) {
        ptx::named_barrier_sync(2, Right ? 96 : 64);  // fault: named_barrier_too_few
        out[lane] = smem.words[lane] + smem.words[lane + 32];
    } else {
        smem.words[lane + 32 * warp] = in[lane];
        ptx::named_barrier_arrive(2, Right ? 96 : 64);
    }
}
const Entry kNamedBarrierTooFew("named_barrier_too_few",
                                run<named_barrier_too_few<true>, named_barrier_too_few<false>, 1, 96, Exchange>);

/// All count too many.
template <bool Right>
__global__ void named_barrier_too_many(float* out, const float* in, int) {
    ptx::named_barrier_sync(5, Right ? 64 : 96);  // fault: named_barrier_too_many
    out[threadIdx.x] = in[threadIdx.x];
}
const Entry kNamedBarrierTooMany("named_barrier_too_many",
                                 run<named_barrier_too_many<true>, named_barrier_too_many<false>, 1, 64>);

/// Barriers count whole warps.
template <bool Right>
__global__ void named_barrier_of_lanes(float* out, const float* in, int) {
    ptx::named_barrier_sync(5, Right ? 64 : 48);  // fault: named_barrier_of_lanes
    out[threadIdx.x] = in[threadIdx.x];
}
const Entry kNamedBarrierOfLanes("named_barrier_of_lanes",
                                 run<named_barrier_of_lanes<true>, named_barrier_of_lanes<false>, 1, 64>);

/// What is written after the arrival, the other side may not read.
template <bool Right>
__global__ void written_after_arrival(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    const unsigned lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        smem.words[lane] = in[lane];
        if constexpr (!Right) ptx::named_barrier_arrive(1, 64);
        smem.words[lane + 32] = in[lane];  // fault: written_after_arrival writes
        if constexpr (Right) ptx::named_barrier_arrive(1, 64);
    } else {
        ptx::named_barrier_sync(1, 64);
        out[lane] = smem.words[lane] + smem.words[lane + 32];  // fault: written_after_arrival reads
    }
}
const Entry kWrittenAfterArrival("written_after_arrival",
                                 run<written_after_arrival<true>, written_after_arrival<false>, 1, 64, Exchange>);

// --- shared memory ---------------------------------------------------------------------------------------------------

struct Rows {
    float tile[16][32];
    float sums[32];
};
/// One row more than the tile has: the next member of the map.
template <bool Right>
__global__ void off_by_one_row(float* out, const float* in, int) {
    auto& smem = shared_memory<Rows>();
    const unsigned lane = threadIdx.x;
    for (int r = 0; r < 16; ++r) smem.tile[r][lane] = in[32 * r + static_cast<int>(lane)];
    __syncwarp();
    float sum = 0;
    const float* words = &smem.tile[0][0];
    for (unsigned r = 0; r < (Right ? 16 : 17); ++r) sum += words[32 * r + lane];  // fault: off_by_one_row
    smem.sums[lane] = sum;
    out[lane] = smem.sums[lane];
}
const Entry kOffByOneRow("off_by_one_row", run<off_by_one_row<true>, off_by_one_row<false>, 1, 32, Rows>);

/// The rows that the tensor does not have are left as they were.
template <bool Right>
__global__ void uninitialised_tile(float* out, const float* in, int) {
    auto& smem = shared_memory<Rows>();
    const unsigned lane = threadIdx.x;
    constexpr int kRows = 10;
    for (int r = 0; r < (Right ? 16 : kRows); ++r)
        smem.tile[r][lane] = r < kRows ? in[32 * r + static_cast<int>(lane)] : 0.f;
    __syncwarp();
    float sum = 0;
    for (int r = 0; r < 16; ++r) sum += smem.tile[r][lane];  // fault: uninitialised_tile
    out[lane] = sum;
}
const Entry kUninitialisedTile("uninitialised_tile",
                               run<uninitialised_tile<true>, uninitialised_tile<false>, 1, 32, Rows>);

struct Counts {
    int words[32];
};
template <bool Right>
__global__ void uninitialised_counter(float* out, const float*, int) {
    auto& smem = shared_memory<Counts>();
    if (Right) smem.words[threadIdx.x] = 0;
    __syncwarp();
    atomicAdd(&smem.words[threadIdx.x / 4], 1);  // fault: uninitialised_counter
    __syncwarp();
    out[threadIdx.x] = static_cast<float>(smem.words[threadIdx.x / 4]);
}
const Entry kUninitialisedCounter("uninitialised_counter",
                                  run<uninitialised_counter<true>, uninitialised_counter<false>, 1, 32, Counts>);

/// Past the end of all that the launch asked for.
template <bool Right>
__global__ void shared_out_of_bounds(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    float* words = smem.words;
    words[2 * threadIdx.x + (Right ? 1 : 2)] = in[threadIdx.x];  // fault: shared_out_of_bounds
    __syncwarp();
    out[threadIdx.x] = words[2 * threadIdx.x + (Right ? 1 : 2)];
}
const Entry kSharedOutOfBounds("shared_out_of_bounds",
                               run<shared_out_of_bounds<true>, shared_out_of_bounds<false>, 1, 32, Exchange>);

/// Two arrays cut out of one by hand; the second starts before the first has ended.
template <bool Right>
__global__ void overlapping_arrays(float* out, const float* in, int) {
    auto& smem = shared_memory<Exchange>();
    float *first = smem.words, *second = smem.words + (Right ? 32 : 28);
    const unsigned lane = threadIdx.x % 32;
    if (threadIdx.x < 32) first[lane] = in[lane];  // fault: overlapping_arrays first
    else second[lane] = in[lane];                  // fault: overlapping_arrays second
    __syncthreads();
    out[threadIdx.x] = first[lane] + second[lane];
}
const Entry kOverlappingArrays("overlapping_arrays",
                               run<overlapping_arrays<true>, overlapping_arrays<false>, 1, 64, Exchange>);

struct Large {
    float words[1024];
};
template <bool Right>
__global__ void map_too_large(float* out, const float* in, int) {
    float* words;
    if constexpr (Right) words = shared_memory<Exchange>().words;
    else words = shared_memory<Large>().words;  // fault: map_too_large
    words[threadIdx.x] = in[threadIdx.x];
    out[threadIdx.x] = words[threadIdx.x];
}
const Entry kMapTooLarge("map_too_large", run<map_too_large<true>, map_too_large<false>, 1, 32, Exchange>);

/// One lane adds atomically, another just looks.
template <bool Right>
__global__ void atomic_and_plain(float* out, const float*, int) {
    auto& smem = shared_memory<Counts>();
    smem.words[threadIdx.x] = 0;
    __syncwarp();
    atomicAdd(&smem.words[0], 1);  // fault: atomic_and_plain adds
    if constexpr (Right) __syncwarp();
    out[threadIdx.x] = static_cast<float>(smem.words[0]);  // fault: atomic_and_plain reads
}
const Entry kAtomicAndPlain("atomic_and_plain", run<atomic_and_plain<true>, atomic_and_plain<false>, 1, 32, Counts>);

// --- alignment and matrices ------------------------------------------------------------------------------------------

template <int Pitch>
struct Halves {
    alignas(32) half tile[16][Pitch];
};
/// Rows of 72 bytes: every second one starts between two multiples of 16.
template <bool Right>
__global__ void misaligned_ldmatrix(float* out, const float* in, int) {
    constexpr int kPitch = Right ? 40 : 36;
    auto& smem = shared_memory<Halves<kPitch>>();
    const unsigned lane = threadIdx.x;
    for (int r = 0; r < 16; ++r) smem.tile[r][lane] = __float2half(in[32 * r + static_cast<int>(lane)]);
    __syncwarp();
    std::uint32_t r[4];
    ptx::ldmatrix_x4(r, &smem.tile[lane % 16][lane / 16 * 8]);  // fault: misaligned_ldmatrix
    out[lane] = static_cast<float>(r[0] ^ r[1] ^ r[2] ^ r[3]);
}
const Entry kMisalignedLdmatrix("misaligned_ldmatrix",
                                run<misaligned_ldmatrix<true>, misaligned_ldmatrix<false>, 1, 32, Halves<40>>);

template <bool Right>
__global__ void misaligned_vector_shared(float* out, const float* in, int) {
    auto& smem = shared_memory<Tile>();
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) (&smem.words[0][0])[i] = in[i];
    __syncwarp();
    const float* from = &smem.words[0][0] + 4 * lane + (Right ? 0 : 2);
    const float4 x = *reinterpret_cast<const float4*>(from);  // fault: misaligned_vector_shared
    out[lane] = x.x + x.y + x.z + x.w;
}
const Entry kMisalignedVectorShared("misaligned_vector_shared",
                                    run<misaligned_vector_shared<true>, misaligned_vector_shared<false>, 1, 32, Tile>);

template <bool Right>
__global__ void misaligned_vector_global(float* out, const float* in, int) {
    const float* from = in + 4 * threadIdx.x + (Right ? 0 : 1);
    const float2 x = *reinterpret_cast<const float2*>(from);  // fault: misaligned_vector_global
    out[threadIdx.x] = x.x + x.y;
}
const Entry kMisalignedVectorGlobal("misaligned_vector_global",
                                    run<misaligned_vector_global<true>, misaligned_vector_global<false>, 1, 32>);

/// A tile that starts 8 halves into a row: 16 bytes, where wmma wants 32.
template <bool Right>
__global__ void misaligned_wmma(float* out, const float* in, int) {
    auto& smem = shared_memory<Halves<32>>();
    const unsigned lane = threadIdx.x;
    for (int r = 0; r < 16; ++r) smem.tile[r][lane] = __float2half(in[32 * r + static_cast<int>(lane)]);
    __syncwarp();
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
    wmma::load_matrix_sync(a, &smem.tile[0][Right ? 16 : 8], 32);  // fault: misaligned_wmma
    out[lane] = __half2float(a.x[0]);
}
const Entry kMisalignedWmma("misaligned_wmma", run<misaligned_wmma<true>, misaligned_wmma<false>, 1, 32, Halves<32>>);

struct Floats {
    alignas(32) float words[16 * 24];
};
template <bool Right>
__global__ void wmma_pitch(float* out, const float*, int) {
    auto& smem = shared_memory<Floats>();
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    wmma::fill_fragment(c, 1.f);
    wmma::store_matrix_sync(smem.words, c, Right ? 24 : 18, wmma::mem_row_major);  // fault: wmma_pitch
    __syncwarp();
    out[threadIdx.x] = threadIdx.x < 16 ? smem.words[24 * threadIdx.x] : 0;
}
const Entry kWmmaPitch("wmma_pitch", run<wmma_pitch<true>, wmma_pitch<false>, 1, 32, Floats>);

/// Each lane its own row, as in ldmatrix: wmma wants the tile's address from all.
template <bool Right>
__global__ void wmma_lanes_differ(float* out, const float* in, int) {
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    const float* tile = in + (Right ? 0 : 16 * (threadIdx.x % 16));
    wmma::load_matrix_sync(c, tile, 16, wmma::mem_row_major);  // fault: wmma_lanes_differ
    out[threadIdx.x] = c.x[0];
}
const Entry kWmmaLanesDiffer("wmma_lanes_differ", run<wmma_lanes_differ<true>, wmma_lanes_differ<false>, 1, 32>);

/// Rows and columns 8 further on, taken for each other: nothing is touched that should not be, the result is wrong.
template <bool Right>
__global__ void wrong_lane_map(float* out, const float* in, int) {
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    wmma::load_matrix_sync(c, in, 16, wmma::mem_row_major);
    const int lane = static_cast<int>(threadIdx.x);
    for (int i = 0; i < c.num_elements; ++i) {
        const int second = i / 2 % 2, fourth = i / 4;
        const int row = lane / 4 + 8 * (Right ? second : fourth);
        const int column = 2 * (lane % 4) + i % 2 + 8 * (Right ? fourth : second);
        out[16 * row + column] = c.x[i];
    }
}
const Entry kWrongLaneMap("wrong_lane_map", run<wrong_lane_map<true>, wrong_lane_map<false>, 1, 32>);

// --- global memory ---------------------------------------------------------------------------------------------------

/// A last tile of 28 elements, read as 32.
template <bool Right>
__global__ void unmasked_tail_read(float* out, const float* in, int n) {
    const int i = n - 28 + static_cast<int>(threadIdx.x);
    float x = 0;
    if (!Right || i < n) x = in[i];  // fault: unmasked_tail_read
    out[threadIdx.x] = x;
}
const Entry kUnmaskedTailRead("unmasked_tail_read", run<unmasked_tail_read<true>, unmasked_tail_read<false>, 1, 32>);

template <bool Right>
__global__ void unmasked_tail_write(float* out, const float* in, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const float x = in[i < n ? i : 0];
    if (!Right || i < n) out[i] = x;  // fault: unmasked_tail_write
}
const Entry kUnmaskedTailWrite("unmasked_tail_write",
                               run<unmasked_tail_write<true>, unmasked_tail_write<false>, 33, 32>);

/// A row that starts 4 elements late, copied past its end.
template <bool Right>
__global__ void async_tail(float* out, const float* in, int n) {
    auto& smem = shared_memory<Tile>();
    const int i = n - 128 + 4 * static_cast<int>(threadIdx.x) + (Right ? 0 : 4);
    ptx::cp_async_16(&smem.words[0][4 * threadIdx.x], &in[i], 16);  // fault: async_tail
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();
    out[threadIdx.x] = smem.words[0][threadIdx.x];
}
const Entry kAsyncTail("async_tail", run<async_tail<true>, async_tail<false>, 1, 32, Tile>);

/// A line that the block does not read.
template <bool Right>
__global__ void line_in_vain(float* out, const float* in, int) {
    ptx::prefetch_line(&in[Right ? 0 : 64]);  // fault: line_in_vain
    __syncwarp();
    out[threadIdx.x] = in[threadIdx.x];
}
const Entry kLineInVain("line_in_vain", run<line_in_vain<true>, line_in_vain<false>, 1, 32>);

/// A line that is not the tensor's.
template <bool Right>
__global__ void line_outside(float* out, const float* in, int n) {
    ptx::prefetch_line(&in[Right ? n - 1 : n + 32]);  // fault: line_outside
    __syncwarp();
    for (int i = static_cast<int>(threadIdx.x); i < n; i += 32) out[threadIdx.x] = in[i];
}
const Entry kLineOutside("line_outside", run<line_outside<true>, line_outside<false>, 1, 32>);

/// Every block adds its part.
template <bool Right>
__global__ void blocks_accumulate(float* out, const float* in, int) {
    const float x = in[32 * blockIdx.x + threadIdx.x];
    if constexpr (Right) atomicAdd(&out[threadIdx.x], x);
    else out[threadIdx.x] += x;  // fault: blocks_accumulate
}
const Entry kBlocksAccumulate("blocks_accumulate", run<blocks_accumulate<true>, blocks_accumulate<false>, 4, 32>);

/// The maximum of a row: on a GPU it is right whenever its maximum happens to be written last.
template <bool Right>
__global__ void racing_maximum(float* out, const float* in, int) {
    const float x = in[threadIdx.x];
    if constexpr (Right) {
        atomicMax(reinterpret_cast<int*>(out), __float_as_int(x));
    } else {
        if (x > *out) *out = x;  // fault: racing_maximum
    }
}
const Entry kRacingMaximum("racing_maximum", run<racing_maximum<true>, racing_maximum<false>, 1, 32>);

/// Warps of one block hand something over through global memory.
template <bool Right>
__global__ void global_handover(float* out, const float* in, int) {
    out[threadIdx.x] = in[threadIdx.x];  // fault: global_handover writes
    if constexpr (Right) __syncthreads();
    out[threadIdx.x + 64] = out[63 - threadIdx.x];  // fault: global_handover reads
}
const Entry kGlobalHandover("global_handover", run<global_handover<true>, global_handover<false>, 1, 64>);

/// A block overwrites what another one reads.
template <bool Right>
__global__ void blocks_in_place(float* out, const float*, int) {
    const unsigned i = 32 * blockIdx.x + threadIdx.x;
    const float x = out[Right ? i : (i + 32) % 128];  // fault: blocks_in_place reads
    out[i] = x + 1;                                   // fault: blocks_in_place writes
}
const Entry kBlocksInPlace("blocks_in_place", run<blocks_in_place<true>, blocks_in_place<false>, 4, 32>);

/// The input as a place for what is half done.
template <bool Right>
__global__ void written_input(float* out, const float* in, int) {
    float* place = Right ? out : const_cast<float*>(in);
    place[threadIdx.x] = 2 * in[threadIdx.x];  // fault: written_input
}
const Entry kWrittenInput("written_input", run<written_input<true>, written_input<false>, 1, 32>);

// --- what is easily overlooked ---------------------------------------------------------------------------------------

template <bool Right>
__global__ void memcpy_past_the_end(float* out, const float* in, int n) {
    memcpy(out + n - (Right ? 8 : 4), in, 32);  // fault: memcpy_past_the_end
}
const Entry kMemcpyPastTheEnd("memcpy_past_the_end", run<memcpy_past_the_end<true>, memcpy_past_the_end<false>, 1, 1>);

/// The whole array, by every lane.
template <bool Right>
__global__ void racing_memset(float* out, const float*, int) {
    auto& smem = shared_memory<Exchange>();
    if (!Right || threadIdx.x == 0) memset(smem.words, 0, sizeof smem.words);  // fault: racing_memset
    __syncwarp();
    out[threadIdx.x] = smem.words[threadIdx.x];
}
const Entry kRacingMemset("racing_memset", run<racing_memset<true>, racing_memset<false>, 1, 32, Exchange>);

struct Words {
    alignas(16) float words[256];
};
template <bool Right>
__global__ void ldmatrix_of_global(float* out, const float* in, int) {
    auto& smem = shared_memory<Words>();
    for (unsigned i = threadIdx.x; i < 128; i += 32) smem.words[i] = in[i];
    __syncwarp();
    std::uint32_t r[4];
    ptx::ldmatrix_x4(r, (Right ? smem.words : out) + 4 * threadIdx.x);  // fault: ldmatrix_of_global
    out[threadIdx.x] = r[0] ? 1 : 0;
}
const Entry kLdmatrixOfGlobal("ldmatrix_of_global",
                              run<ldmatrix_of_global<true>, ldmatrix_of_global<false>, 1, 32, Words>);

template <bool Right>
__global__ void async_from_shared(float* out, const float* in, int) {
    auto& smem = shared_memory<Words>();
    smem.words[4 + threadIdx.x] = in[threadIdx.x];
    __syncwarp();
    if (threadIdx.x) return;
    ptx::cp_async_16(smem.words, Right ? in : smem.words + 4, 16);  // fault: async_from_shared
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    out[0] = smem.words[0];
}
const Entry kAsyncFromShared("async_from_shared", run<async_from_shared<true>, async_from_shared<false>, 1, 32, Words>);

/// A lane waits for a flag, which another warp may set. Also, much memory of its own.
template <bool Right>
__global__ void flag_never_set(float* out, const float* in, int n) {
    if (threadIdx.x == 0) {
        float own[50000];
        for (int i = 0; i < 50000; ++i) own[i] = in[i % n];
        float flag = 0;
        while (flag == 0.f) flag = atomicAdd(&out[512], 0.f);  // fault: flag_never_set
        out[0] = own[1000 + static_cast<int>(in[0])];
    } else if (threadIdx.x == 32 && Right) {
        atomicExch(&out[512], 1.f);
    }
}
const Entry kFlagNeverSet("flag_never_set", run<flag_never_set<true>, flag_never_set<false>, 1, 64>);

}  // namespace faults
