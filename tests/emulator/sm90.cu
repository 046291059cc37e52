// What Hopper added, one bug at a time: each kernel is right as kernel<Fault::kNone> and has one bug otherwise.
// tests/test_emulator_sm90.py expects the emulator to report each at the lines marked "fault: NAME", or the result to be
// wrong, and nothing of the right one. Many of these bugs give right results on a GPU, most of the time.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <entry.h>
#include <launch.h>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <cstdint>

namespace sm90 {

using flash_wmma::DType;
using flash_wmma::Entry;
using flash_wmma::launch;
using flash_wmma::make_tensor_map;
using flash_wmma::shared_memory;
using flash_wmma::TensorMap;
namespace ptx = flash_wmma::ptx;
using ptx::Major;

constexpr int kSide = 64, kPanelBytes = kSide * kSide * 2, kWarpgroup = 128;

/// Matrices of 64 columns, `rows` rows each, one after the other: boxes of `box_rows` rows.
TensorMap map_of(const half* data, int columns, int rows, int matrices, int box_rows = kSide) {
    return make_tensor_map(data, DType::kFloat16, {columns, rows, matrices, 1},
                           {columns, std::int64_t{columns} * rows, std::int64_t{columns} * rows * matrices},
                           {kSide, box_rows, 1, 1});
}

/// D of 64 x N by row and column, as the comment of wgmma says.
template <int N>
__device__ void store(float* out, const float (&d)[N / 2], int thread) {
    const int warp = thread / 32, g = thread % 32 / 4, t = thread % 4;
    for (int j = 0; j < N / 8; ++j)
        for (int i = 0; i < 4; ++i) out[(16 * warp + g + 8 * (i / 2)) * N + 8 * j + 2 * t + i % 2] = d[4 * j + i];
}

// --- a pipeline: a producer warp copies tiles, a warpgroup adds up their products ---------------------------------------

constexpr int kStages = 2, kTiles = 5;

struct Pipeline {
    alignas(1024) half a[kSide * kSide];
    alignas(1024) half b[kStages][kSide * kSide];
    ptx::Barrier a_full, full[kStages], empty[kStages];
};

enum class Fault {
    kNone,
    kNoExpect,
    kFewBytes,
    kManyBytes,
    kWrongParity,
    kParityNotFlipped,
    kNoRelease,
    kReleasedEarly,
    kNoWait,
    kNoProductWait,
    kProductWaitOfOlder,
    kNoFence,
    kTwoArrivals,
    kNoInitFence,
    kNoInitBarrier,
    kNotInitialised,
    kInitialisedTwice,
    kMisaligned,
    kTooManyArrivals,
    kWrongTile,
    kProductOfOldStage,
    kBarrierOverwritten,
    kNotWaitedFor,
};

/// out (64 x 64) = sum over tiles of A B[tile]^T, B[tile] 64 x 64 by rows.
template <Fault kFault>
__global__ void pipeline(float* out, const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map) {
    auto& smem = shared_memory<Pipeline>();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        if (kFault != Fault::kNotInitialised) ptx::barrier_init(&smem.a_full, 1);
        for (int s = 0; s < kStages; ++s) {
            ptx::barrier_init(&smem.full[s], kFault == Fault::kTooManyArrivals ? 2 : 1);
            ptx::barrier_init(&smem.empty[s], kFault == Fault::kTwoArrivals ? 1 : 4);
        }
        if (kFault == Fault::kInitialisedTwice) ptx::barrier_init(&smem.full[1], 1);  // fault: kInitialisedTwice
        if (kFault != Fault::kNoInitFence) ptx::barrier_init_fence();
    }
    if (kFault != Fault::kNoInitBarrier) __syncthreads();
    else __syncwarp();
    if (thread >= kWarpgroup) {
        if (thread != kWarpgroup) return;
        ptx::barrier_arrive_expect(&smem.a_full, kPanelBytes);        // fault: kNotInitialised
        ptx::tensor_load(smem.a, &a_map, &smem.a_full, {0, 0, 0, 0});  // fault: kNoInitFence
        const int tiles = kFault == Fault::kNotWaitedFor ? kTiles + 1 : kTiles;
        for (int i = 0; i < tiles; ++i) {
            const int s = i % kStages;
            const unsigned parity = static_cast<unsigned>(i / kStages % 2);
            if (kFault != Fault::kNoRelease)
                ptx::barrier_wait(&smem.empty[s], kFault == Fault::kWrongParity ? parity : parity ^ 1);  // fault: kWrongParity producer
            const int bytes = kPanelBytes + (kFault == Fault::kFewBytes ? -2048 : kFault == Fault::kManyBytes ? 16 : 0);
            if (kFault == Fault::kNoExpect) ptx::barrier_arrive(&smem.full[s]);
            else ptx::barrier_arrive_expect(&smem.full[s], static_cast<unsigned>(bytes));
            half* place = smem.b[s] + (kFault == Fault::kMisaligned ? kSide : 0);
            ptx::tensor_load(place, &b_map, &smem.full[s], {0, 0, kFault == Fault::kWrongTile ? 0 : i, 0});  // fault: copy
        }
        return;
    }
    float d[kSide / 2];
    for (float& x : d) x = 0;
    ptx::barrier_wait(&smem.a_full, 0);
    for (int i = 0; i < kTiles; ++i) {
        const int s = i % kStages;
        const unsigned parity = static_cast<unsigned>(i / kStages % 2);
        if (kFault != Fault::kNoWait)
            ptx::barrier_wait(&smem.full[s], kFault == Fault::kParityNotFlipped ? 0 : parity);  // fault: consumer
        if (kFault == Fault::kReleasedEarly && thread % 32 == 0) ptx::barrier_arrive(&smem.empty[s]);
        if (kFault != Fault::kNoFence || i > 0) ptx::wgmma_fence();
        const ptx::SharedMatrix<Major::K> a(smem.a), b(smem.b[kFault == Fault::kProductOfOldStage ? 0 : s]);
        for (int k = 0; k < 4; ++k) ptx::wgmma<half, kSide>(d, a + 32 * k, b + 32 * k, true);  // fault: product
        ptx::wgmma_commit();
        if (kFault == Fault::kProductWaitOfOlder) ptx::wgmma_wait<1>();
        else if (kFault != Fault::kNoProductWait) ptx::wgmma_wait<0>();
        if (kFault == Fault::kBarrierOverwritten && thread == 0) smem.full[s].state = 0;  // fault: kBarrierOverwritten
        const bool releases = kFault != Fault::kReleasedEarly && thread % 32 == 0;
        if (releases) ptx::barrier_arrive(&smem.empty[s]);  // fault: release
    }
    if (kFault != Fault::kNoProductWait) ptx::wgmma_wait<0>();
    store<kSide>(out, d, thread);  // fault: read
}

template <Fault kFault>
void run_pipeline(float* out, const half* a, const half* b) {
    launch(pipeline<kFault>, {dim3(1), dim3(kWarpgroup + 32), sizeof(Pipeline)}, nullptr, out, map_of(a, kSide, kSide, 1),
           map_of(b, kSide, kSide, kTiles + 1));
}
const Entry kPipeline("pipeline", run_pipeline<Fault::kNone>);
const Entry kNoExpect("pipeline_no_expect", run_pipeline<Fault::kNoExpect>);
const Entry kFewBytes("pipeline_few_bytes", run_pipeline<Fault::kFewBytes>);
const Entry kManyBytes("pipeline_many_bytes", run_pipeline<Fault::kManyBytes>);
const Entry kWrongParity("pipeline_wrong_parity", run_pipeline<Fault::kWrongParity>);
const Entry kParityNotFlipped("pipeline_parity_not_flipped", run_pipeline<Fault::kParityNotFlipped>);
const Entry kNoRelease("pipeline_no_release", run_pipeline<Fault::kNoRelease>);
const Entry kReleasedEarly("pipeline_released_early", run_pipeline<Fault::kReleasedEarly>);
const Entry kNoWait("pipeline_no_wait", run_pipeline<Fault::kNoWait>);
const Entry kNoProductWait("pipeline_no_product_wait", run_pipeline<Fault::kNoProductWait>);
const Entry kProductWaitOfOlder("pipeline_product_wait_of_older", run_pipeline<Fault::kProductWaitOfOlder>);
const Entry kNoFence("pipeline_no_fence", run_pipeline<Fault::kNoFence>);
const Entry kTwoArrivals("pipeline_two_arrivals", run_pipeline<Fault::kTwoArrivals>);
const Entry kNoInitFence("pipeline_no_init_fence", run_pipeline<Fault::kNoInitFence>);
const Entry kNoInitBarrier("pipeline_no_init_barrier", run_pipeline<Fault::kNoInitBarrier>);
const Entry kNotInitialised("pipeline_not_initialised", run_pipeline<Fault::kNotInitialised>);
const Entry kInitialisedTwice("pipeline_initialised_twice", run_pipeline<Fault::kInitialisedTwice>);
const Entry kMisaligned("pipeline_misaligned", run_pipeline<Fault::kMisaligned>);
const Entry kTooManyArrivals("pipeline_too_many_arrivals", run_pipeline<Fault::kTooManyArrivals>);
const Entry kWrongTile("pipeline_wrong_tile", run_pipeline<Fault::kWrongTile>);
const Entry kProductOfOldStage("pipeline_product_of_old_stage", run_pipeline<Fault::kProductOfOldStage>);
const Entry kBarrierOverwritten("pipeline_barrier_overwritten", run_pipeline<Fault::kBarrierOverwritten>);
const Entry kNotWaitedFor("pipeline_not_waited_for", run_pipeline<Fault::kNotWaitedFor>);

}  // namespace sm90
