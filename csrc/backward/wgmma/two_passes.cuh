// bwd_sm90 without additions to dQ, for short sequences, few long items, and deterministic calls whose blocks take no
// turns: a pass over own keys, which computes dK and dV (bwd_sm90.cuh, Pass::kKeys), and one over own queries, which
// computes dQ (queries.cuh), in blocks of one grid.
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

// spills: sm_90a: warpgroup 0, with few registers, keeps parts of an item of either pass in local memory, and consumers
// some of an item's, of a tile what dropout or changed scores need: about 150 to 240 bytes in plain problems, to 700
// with packed sequences and dropout, 700 and 1150 in general ones.
// ptxas: C7519: it fences before dP's products behind the wait for V, and before S of the next tile behind that for K.
template <class Keys, class Queries, Problems kProblems>
__global__ void __launch_bounds__(Keys::kThreads, 1)
    two_passes(const __grid_constant__ Problem problem, const __grid_constant__ TwoPassesMaps maps,
               const __grid_constant__ TwoPassesWork work) {
    static_assert(Keys::kThreads == Queries::kThreads && Keys::kConsumerRegisters == Queries::kConsumerRegisters);
    auto& smem = shared_memory<TwoPassesMemory<Keys, Queries>>();
    if (threadIdx.x == 0) {
        prepare_block<Keys, Pass::kKeys>(problem, smem.keys);
        prepare_block(smem.queries);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    const int block = static_cast<int>(blockIdx.x), blocks = static_cast<int>(gridDim.x);
    const bool keys_first = block < work.key_blocks;
    const auto end_of_pass = [] {
        __syncwarp();
        ptx::fence_proxy_async();  // copies of the next pass write where this one wrote
        ptx::named_barrier_sync(1, Keys::kThreads);
    };
    if (uniform(static_cast<int>(threadIdx.x) / Keys::kGroupThreads) == 0) {
        ptx::release_registers<Keys::kProducerRegisters>();
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
            const bool late = pass > 0;  // such a block has no number in the pass
            if ((pass == 0) == keys_first)
                serve<Keys, kProblems, Pass::kKeys>(problem, maps.keys, smem.keys, work.key_items,
                                                    {late ? -1 : block, work.key_blocks});
            else
                serve<Queries, kProblems>(problem, maps.queries, smem.queries, work.query_items,
                                          {late ? -1 : block - work.key_blocks, blocks - work.key_blocks});
            end_of_pass();
        }
    } else {
        ptx::acquire_registers<Keys::kConsumerRegisters>();
#pragma unroll 1
        for (int pass = 0; pass < 2; ++pass) {
            if ((pass == 0) == keys_first) Consumer<Keys, kProblems, Pass::kKeys>(problem, maps.keys, smem.keys).run();
            else QueriesConsumer<Queries, kProblems>(problem, maps.queries, smem.queries).run();
            end_of_pass();
        }
    }
    if (problem.prepared) ptx::wait_for_previous_grids();  // so that who waits for this grid waits for prepare
}

template <class Keys, class Queries, Problems kProblems>
void launch_two_passes(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const unsigned key_items = owned_keys_grid(p, Keys::kItemKeys).x, query_items = assignment_grid(p, Queries::kOwn).x;
    if (key_items + query_items == 0) return;
    const unsigned blocks = std::min(key_items + query_items, static_cast<unsigned>(problem.multiprocessors));
    // Four products against three. If items of keys are few, all begin at once: where query heads share keys each is
    // long
    const unsigned key_blocks = std::min(key_items, key_items < 4 * blocks ? blocks : (4 * blocks + 3) / 7);
    LaunchConfig config{dim3(blocks), dim3(Keys::kThreads), sizeof(TwoPassesMemory<Keys, Queries>)};
    config.programmatic = problem.prepared != nullptr;
    launch(two_passes<Keys, Queries, kProblems>, config, stream, problem,
           TwoPassesMaps{maps_of<Keys>(problem), queries_maps<Queries>(problem)},
           TwoPassesWork{static_cast<int>(key_items), static_cast<int>(query_items), static_cast<int>(key_blocks)});
}

/// The shapes that ship (docs/tuning/hopper_backward.md). A place of dS is for dK and dV on their way out.
struct TwoPassesShape {
    TileShape keys;
    QueriesTileShape queries;
};
inline constexpr int kKeyBarriers = 225 * 1024, kQueryBarriers = kKeyBarriers + 1024;
constexpr TwoPassesShape two_passes_shape(TileShape keys, QueriesTileShape queries) {
    keys.ds_stages = 1, keys.barriers_at = kKeyBarriers;
    queries.barriers_at = kQueryBarriers;
    return {keys, queries};
}
inline constexpr TwoPassesShape kTwoPassesShapes[] = {
    two_passes_shape({.d = 64, .queries = 128, .folds_facts = true, .stages_rows = true}, {.d = 64, .stages = 3}),
    two_passes_shape({.d = 96, .queries = 64, .value_stages = 1, .folds_facts = true, .stages_rows = true}, {.d = 96}),
    two_passes_shape({.d = 128, .queries = 64, .value_stages = 1, .folds_facts = true, .stages_rows = true},
                     {.d = 128}),
};
/// Of general problems, which need registers for what changes scores.
inline constexpr TwoPassesShape kGeneralTwoPassesShapes[] = {
    two_passes_shape({.d = 64, .queries = 64}, {.d = 64, .keys = 64, .stages = 4}),
    two_passes_shape({.d = 128, .queries = 64, .value_stages = 1}, {.d = 128, .keys = 64, .stages = 4}),
};

template <class T, Problems kProblems, const auto& kRows = kTwoPassesShapes>
std::vector<Shape> two_passes_shapes() {
    return of_rows<kRows>([](auto i) {
        using Keys = Tile<T, kRows[i].keys>;
        using Queries = QueriesTile<T, kRows[i].queries>;
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
