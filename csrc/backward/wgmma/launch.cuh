// The launch of bwd_sm90's instances.
#pragma once

#include <launch.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/rows.cuh"
#include "backward/wgmma/shapes.h"
#include "device/element.cuh"

namespace flash_wmma::backward::wgmma {

/// A kernel of an instance: the problem, its tensors and what there is to do.
using InstanceKernel = void(const Problem, const Maps, const Work);

inline constexpr int kMostRowBlocks = 32;

/// The units of heads (rows.cuh).
inline std::int64_t units_of(const ForwardParams& p) {
    return p.heads_k * (p.sequences.cu_seqlens_q ? 1 : p.batch);
}
/// Words of the counters, which come first in the workspace: those of Work, then, for an order, Problem::turns.
inline std::int64_t counters_of(const ForwardParams& p, bool ordered) {
    return 3 + kMostRowBlocks + 2 * units_of(p) + (ordered ? row_groups(p) : 0);
}
inline Work work_of(const ForwardParams& p, int keys, unsigned blocks, unsigned* counters) {
    const unsigned items = owned_keys_grid(p, keys).x;
    const std::int64_t groups = row_groups(p), units = units_of(p);
    if (groups > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 groups of query rows");
    const auto unit_items = static_cast<unsigned>(items / units), unit_groups = static_cast<unsigned>(groups / units);
    const unsigned first_units = blocks / std::max(unit_items, 1u) + 1;
    unsigned* const of_units = counters + 3 + kMostRowBlocks;
    return {.items = items,
            .groups = static_cast<unsigned>(groups),
            .unit_items = unit_items,
            .unit_groups = unit_groups,
            .first_groups = std::min(static_cast<unsigned>(groups), first_units * unit_groups),
            .row_blocks = static_cast<unsigned>(std::atoi(std::getenv("FW_R") ? std::getenv("FW_R") : "16")),
            .to_work_on = counters,
            .to_begin = counters + 1,
            .to_prepare = counters + 2,
            .prepared = of_units,
            .added = of_units + units,
            .finished = counters + 3};
}

template <class Tile, bool kPacked, class Memory, InstanceKernel* kKernel>
void launch_tile(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    if (units_of(p) == 0) return;
    const auto blocks = static_cast<unsigned>(problem.multiprocessors);
    const Work work = work_of(p, Tile::kKeys, blocks, problem.queue);
    const Sequences& s = p.sequences;
    const std::int64_t rows_q = s.cu_seqlens_q ? s.total_q : p.seqlen_q,
                       rows_k = s.cu_seqlens_k ? s.total_k : p.seqlen_k;
    Maps maps{};
    if (work.items > 0)
        maps = {map_rows(p, p.q, p.head_dim, rows_q, p.heads_q, Tile::kQueries),
                    map_rows(p, p.k, p.head_dim, rows_k, p.heads_k, Tile::kKeys),
                    map_rows(p, p.v, p.head_dim_v, rows_k, p.heads_k, Tile::kKeys),
                    map_rows(p, problem.dout, p.head_dim_v, rows_q, p.heads_q, Tile::kQueries),
                map_rows(p, p.o, p.head_dim_v, rows_q, p.heads_q, kRowGroup),
                map_rows(p, problem.dout, p.head_dim_v, rows_q, p.heads_q, kRowGroup)};
    const dim3 grid(std::min(std::max(work.items, work.groups), blocks));
    if (grid.x > 0) launch(kKernel, {grid, dim3(Tile::kThreads), sizeof(Memory)}, stream, problem, maps, work);
    constexpr unsigned kWarps = kRowThreads / 32;  // a group each
    const dim3 rest((work.groups + kWarps - 1) / kWarps);
    if (rest.x > 0) launch(finish_rest<typename Tile::T, kPacked>, {rest, dim3(kRowThreads)}, stream, problem, work);
}

/// The row of a kernel in the table of shapes. Memory: its map of the shared memory.
template <class Tile, Problems kProblems, Pass kPass, class Memory, InstanceKernel* kKernel>
Shape shape_of_tile() {
    static_assert(sizeof(Memory) <= 227 * 1024);
    return {{Element<typename Tile::T>::kDType, 90, Tile::kD, Tile::kQueries, Tile::kKeys, Tile::kThreads / 32,
             Tile::kStages, sizeof(Memory), reinterpret_cast<const void*>(kKernel)},
            kProblems,
            kPass,
            launch_tile<Tile, includes(kProblems, Problems::kPacked), Memory, kKernel>};
}

}  // namespace flash_wmma::backward::wgmma
