// simt: the kernel of simt.cuh, its tile shapes, and its row in the registry.
#include "forward/simt/simt.cuh"

namespace flash_wmma::simt {
namespace {

/// The shapes that ship, found by a sweep (benchmark/tiles.py, docs/simt.md): per head dim the fastest first, then
/// shapes with less shared memory.
constexpr TableRow<TileShape> kRows[] = {
    {{.d = 64, .lane_columns = 8, .rows = 8, .keys = 32, .stages = 2, .blocks_per_sm = 2}, {2.f, 2}},
    {{.d = 64, .lane_columns = 16, .rows = 8, .keys = 64, .stages = 2, .blocks_per_sm = 2}, {0.f, 2}},
    {{.d = 64, .lane_columns = 8, .keys = 64, .blocks_per_sm = 2}},
    {{.d = 64, .lane_columns = 8, .keys = 32, .blocks_per_sm = 2}},
    {{.d = 128, .warps = 8, .lane_columns = 16, .rows = 8, .keys = 64, .blocks_per_sm = 1}},
    {{.d = 128, .lane_columns = 16, .rows = 8, .keys = 32, .blocks_per_sm = 2}},
    {{.d = 128, .warps = 2, .lane_columns = 16, .rows = 8, .keys = 32, .blocks_per_sm = 2}},
    {{.d = 256, .warps = 8, .lane_columns = 16, .keys = 64, .blocks_per_sm = 1}},
    {{.d = 256, .lane_columns = 16, .keys = 16, .blocks_per_sm = 2}},
    {{.d = 256, .warps = 2, .lane_columns = 16, .keys = 16, .blocks_per_sm = 2}},
    {{.d = 512, .warps = 1, .lane_columns = 8, .keys = 8, .blocks_per_sm = 1, .columns = 256}},
};
const std::vector<Shape> kShapes = of_rows<kRows>([](auto i) { return shape<Tile<kRows[i].tile>>(kRows[i].pays); });

const KernelInfo kInfo = Tiled<kShapes>::row(
    {.name = "simt",
     .summary = "fp32 FMAs on CUDA cores: register tiles, 16-byte accesses, P through shared memory within a warp",
     .min_arch = 75,
     .float32 = true,
     .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks});
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
