// The launch of bwd_sm90's instances.
#pragma once

#include <launch.h>

#include <algorithm>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/shapes.h"
#include "device/element.cuh"

namespace flash_wmma::backward::wgmma {

/// A kernel of an instance: the problem, its tensors and how many items there are.
using InstanceKernel = void(const Problem, const Maps, int);

template <class Tile>
Maps maps_of(const Problem& problem) {
    const ForwardParams& p = problem.forward;
    const Sequences& s = p.sequences;
    const std::int64_t rows_q = s.cu_seqlens_q ? s.total_q : p.seqlen_q,
                       rows_k = s.cu_seqlens_k ? s.total_k : p.seqlen_k;
    Maps maps{map_rows(p, p.q, p.head_dim, rows_q, p.heads_q, Tile::kQueries),
              map_rows(p, p.k, p.head_dim, rows_k, p.heads_k, Tile::kKeys),
              map_rows(p, p.v, p.head_dim_v, rows_k, p.heads_k, Tile::kKeys),
              map_rows(p, problem.dout, p.head_dim_v, rows_q, p.heads_q, Tile::kQueries)};
    if constexpr (Tile::kStagesRows) {
        maps.dk = map_rows(p, problem.dk, p.head_dim, rows_k, p.heads_k, Tile::kWarpKeys);
        maps.dv = map_rows(p, problem.dv, p.head_dim_v, rows_k, p.heads_k, Tile::kWarpKeys);
    }
    return maps;
}

template <class Tile, InstanceKernel* kKernel>
void launch_tile(const Problem& problem, Stream stream) {
    const ItemParts& parts = problem.parts;
    unsigned items = owned_keys_grid(problem.forward, Tile::kItemKeys).x;
    if (items == 0) return;
    if (parts.each > 1) items += (items - static_cast<unsigned>(parts.whole)) * static_cast<unsigned>(parts.each - 1);
    const unsigned workers = std::max(static_cast<unsigned>(problem.multiprocessors) / Tile::kBlocks, 1u);
    const dim3 grid(std::min(items, workers) * Tile::kBlocks);
    LaunchConfig config{grid, dim3(Tile::kThreads), sizeof(SharedMemory<Tile>), Tile::kBlocks};
    config.cooperative = Tile::kRing && problem.heads_together == 0;  // blocks of a ring wait for all others
    config.programmatic = problem.prepared != nullptr;
    launch(kKernel, config, stream, problem, maps_of<Tile>(problem), static_cast<int>(items));
}

/// The row of a kernel in the table of shapes.
template <class Tile, Problems kProblems, Pass kPass, InstanceKernel* kKernel>
Shape shape_of_tile() {
    using Memory = SharedMemory<Tile>;
    static_assert(sizeof(Memory) <= 227 * 1024);
    return {{Element<typename Tile::T>::kDType, 90, Tile::kD, Tile::kQueries, Tile::kItemKeys, Tile::kThreads / 32,
             Tile::kStages, sizeof(Memory), reinterpret_cast<const void*>(kKernel)},
            kProblems,
            kPass,
            launch_tile<Tile, kKernel>,
            /*resident=*/1,
            folds_facts<Tile, kProblems>(),
            takes_parts<Tile, kProblems, kPass>(),
            Tile::kBlocks,
            can_count_items<Tile, kPass>()};
}

}  // namespace flash_wmma::backward::wgmma
