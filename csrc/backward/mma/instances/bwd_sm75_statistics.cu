// The tile shapes and the instances of bwd_sm75's statistics: the kernel of statistics.cuh on Turing.
// architectures: 7.5+PTX
#include "backward/mma/sm75_shapes.h"
#include "backward/mma/statistics.cuh"
#include "device/sm75.cuh"

namespace flash_wmma::backward {
namespace {

/// A thread brings four vectors of a streamed tile through its registers. 17 to 33 KiB of shared memory. None was
/// timed.
constexpr TileShape kRows[] = {
    {.d = 64, .own_warps = 4, .stream_rows = 64, .stages = 2, .in_registers = 2, .blocks_per_sm = 2},
    {.d = 128, .own_warps = 4, .stream_rows = 32, .stages = 2, .in_registers = 2, .blocks_per_sm = 2},
    {.d = 256, .own_warps = 4, .row_tiles = 1, .stream_rows = 16, .stages = 2, .in_registers = 2, .blocks_per_sm = 2},
};

}  // namespace

std::vector<StatisticsShape> sm75_statistics() { return statistics_shapes<mma::Sm75, half, kRows>(); }

}  // namespace flash_wmma::backward
