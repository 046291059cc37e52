// bwd_sm90 without additions to dQ, for short sequences and deterministic calls: a pass over own keys, which computes dK and
// dV (bwd_sm90.cuh, Pass::kKeys), and one over own queries, which computes dQ (queries.cuh), in blocks of one grid.
//
// Seven products in place of five, but no fp32 buffer of dQ, which is cleared, added to and read again, and no order in
// which blocks would have to wait for each other: each gradient is written once, by one block.
//
// Blocks begin with one pass and go on with the other when the items of theirs are all taken. So both passes go through
// the heads side by side, what one has read is in the L2 cache for the other, and all blocks end together.
//
// Shared memory: the tiles of both passes lie in the same place. Their barriers lie behind both, side by side.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>
#include <cstdlib>

#include "backward/wgmma/bwd_sm90.cuh"
#include "backward/wgmma/launch.cuh"
#include "backward/wgmma/queries.cuh"

namespace flash_wmma::backward::wgmma {

struct TwoPassesMaps {
    Maps keys;
    QueriesMaps queries;
};
/// How many items each pass has, and how many blocks begin with the keys.
struct TwoPassesWork {
    int key_items, query_items, key_blocks;
};

template <class Keys, class Queries>
union TwoPassesMemory {
    SharedMemory<Keys> keys;
    QueriesMemory<Queries> queries;
};

// spills: sm_90a: as of backward (bwd_sm90.cuh).
template <class Keys, class Queries, Problems kProblems>
__global__ void __launch_bounds__(Keys::kThreads, 1)
    two_passes(const __grid_constant__ Problem problem, const __grid_constant__ TwoPassesMaps maps,
               const __grid_constant__ TwoPassesWork work) {
    static_assert(Keys::kThreads == Queries::kThreads && Keys::kConsumerRegisters == Queries::kConsumerRegisters);
    auto& smem = shared_memory<TwoPassesMemory<Keys, Queries>>();
    if (threadIdx.x == 0) {
        prepare_block<Keys, Pass::kKeys>(smem.keys);
        prepare_block(smem.queries);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    // of_keys(workers) and of_queries(workers), in this block's order
    const auto both = [&](auto of_keys, auto of_queries) {
        const bool keys_first = block < work.key_blocks;
#pragma unroll 1
        for (int turn = 0; turn < 2; ++turn) {
            if ((turn == 0) == keys_first) of_keys(Workers{turn > 0 ? -1 : block, work.key_blocks});
            else of_queries(Workers{turn > 0 ? -1 : block - work.key_blocks, blocks - work.key_blocks});
            ptx::fence_proxy_async();  // copies of the next pass write where this one wrote
            ptx::named_barrier_sync(1, Keys::kThreads);
        }
    };
    if (uniform(static_cast<int>(threadIdx.x) / Keys::kGroupThreads) == 0) {
        ptx::release_registers<Keys::kProducerRegisters>();
        both(
            [&](const Workers& workers) {
                serve<Keys, kProblems, Pass::kKeys>(problem, maps.keys, smem.keys, work.key_items, workers);
                __syncwarp();
            },
            [&](const Workers& workers) {
                serve<Queries, kProblems>(problem, maps.queries, smem.queries, work.query_items, workers);
                __syncwarp();
            });
    } else {
        ptx::acquire_registers<Keys::kConsumerRegisters>();
        both([&](const Workers&) { Consumer<Keys, kProblems, Pass::kKeys>(problem, maps.keys, smem.keys).run(); },
             [&](const Workers&) { QueriesConsumer<Queries, kProblems>(problem, maps.queries, smem.queries).run(); });
    }
}

template <class Keys, class Queries, Problems kProblems>
void launch_two_passes(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const unsigned key_items = owned_keys_grid(p, Keys::kItemKeys).x, query_items = assignment_grid(p, Queries::kOwn).x;
    if (key_items + query_items == 0) return;
    const unsigned blocks = std::min(key_items + query_items, static_cast<unsigned>(problem.multiprocessors));
    // Four products against three
    unsigned key_blocks = query_items == 0 ? blocks : key_items == 0 ? 0 : (4 * blocks + 3) / 7;
    if (const char* share = std::getenv("FW_KB")) key_blocks = blocks * static_cast<unsigned>(std::atoi(share)) / 100;
    launch(two_passes<Keys, Queries, kProblems>,
           {dim3(blocks), dim3(Keys::kThreads), sizeof(TwoPassesMemory<Keys, Queries>)}, stream, problem,
           TwoPassesMaps{maps_of<Keys>(problem), queries_maps<Queries>(problem)},
           TwoPassesWork{static_cast<int>(key_items), static_cast<int>(query_items), static_cast<int>(key_blocks)});
}

/// The shapes that ship (docs/tuning/hopper_backward.md). A place of dS is for dK and dV on their way out.
struct TwoPassesShape {
    TileShape keys;
    QueriesTileShape queries;
};
inline constexpr int kKeyBarriers = 225 * 1024, kQueryBarriers = kKeyBarriers + 1024;
inline constexpr TwoPassesShape kTwoPassesShapes[] = {
    {{.d = 64, .queries = 128, .ds_stages = 1, .folds_facts = true, .stages_rows = true, .barriers_at = kKeyBarriers},
     {.d = 64, .stages = 3, .barriers_at = kQueryBarriers}},
    {{.d = 96,
      .queries = 64,
      .value_stages = 1,
      .ds_stages = 1,
      .folds_facts = true,
      .stages_rows = true,
      .barriers_at = kKeyBarriers},
     {.d = 96, .barriers_at = kQueryBarriers}},
    {{.d = 128,
      .queries = 64,
      .value_stages = 1,
      .ds_stages = 1,
      .folds_facts = true,
      .stages_rows = true,
      .barriers_at = kKeyBarriers},
     {.d = 128, .barriers_at = kQueryBarriers}},
};

template <class T, Problems kProblems>
std::vector<Shape> two_passes_shapes() {
    return of_rows<kTwoPassesShapes>([](auto i) {
        using Keys = Tile<T, kTwoPassesShapes[i].keys>;
        using Queries = QueriesTile<T, kTwoPassesShapes[i].queries>;
        using Memory = TwoPassesMemory<Keys, Queries>;
        static_assert(sizeof(QueriesTiles<Queries>) <= kKeyBarriers && sizeof(SharedMemory<Keys>) == kQueryBarriers &&
                      sizeof(Memory) == 227 * 1024);
        return Shape{{Element<T>::kDType, 90, Keys::kD, Keys::kQueries, Keys::kKeys, Keys::kThreads / 32, Keys::kStages,
                      sizeof(Memory), reinterpret_cast<const void*>(two_passes<Keys, Queries, kProblems>)},
                     kProblems,
                     Pass::kKeys,
                     launch_two_passes<Keys, Queries, kProblems>,
                     /*resident=*/1,
                     folds_facts<Keys, kProblems>()};
    });
}

}  // namespace flash_wmma::backward::wgmma
