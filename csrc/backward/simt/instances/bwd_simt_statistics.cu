// The instances of bwd_simt's statistics, and their launches.
#include <launch.h>

#include "backward/simt/shapes.h"
#include "backward/simt/statistics.cuh"

namespace flash_wmma::backward {
namespace {

template <class Tile, bool kOwnsKeys>
void launch_pass(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const dim3 grid = kOwnsKeys ? owned_keys_grid(p, Tile::kOwn) : assignment_grid(p, Tile::kOwn);
    if (grid.x > 0)
        launch(statistics_simt<Tile, kOwnsKeys>, {grid, dim3(Tile::kThreads), sizeof(StatisticsMemory<Tile>)}, stream,
               problem);
}

template <class Tile>
void launch_tile(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    if (p.row_max || p.entropy || problem.statistics.row_sum) launch_pass<Tile, false>(problem, stream);
    if (problem.statistics.column_sum) launch_pass<Tile, true>(problem, stream);
}

struct StatisticsShape {
    int head_dim;
    void (*launch)(const Problem&, Stream);
};
const auto kShapes = of_rows<kStatisticsRows>(
    [](auto i) { return StatisticsShape{kStatisticsRows[i].d, launch_tile<SimtTile<kStatisticsRows[i]>>}; });

}  // namespace

void launch_simt_statistics(const Problem& problem, Stream stream) {
    for (const StatisticsShape& shape : kShapes)
        if (problem.forward.head_dim <= shape.head_dim) return shape.launch(problem, stream);
    throw std::runtime_error("flash_wmma: no tile of this kernel holds the head dim");
}

}  // namespace flash_wmma::backward
