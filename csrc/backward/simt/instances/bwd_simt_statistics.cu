// The instances of bwd_simt's statistics.
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

}  // namespace

std::vector<StatisticsShape> simt_statistics_shapes() {
    return of_rows<kStatisticsRows>([](auto i) {
        using Tile = SimtTile<kStatisticsRows[i]>;
        return StatisticsShape{DType::kFloat32, kStatisticsRows[i].d, launch_pass<Tile, false>,
                               launch_pass<Tile, true>};
    });
}

}  // namespace flash_wmma::backward
