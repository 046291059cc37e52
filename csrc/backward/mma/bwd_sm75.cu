// bwd_sm75: the kernels of kernel.cuh, two_roles.cuh and three_roles.cuh on Turing, and by JIT on anything later:
// m16n8k8 of half, tiles through registers, at most 64 KiB of shared memory; bf16 and fp32 inputs are converted. Its
// instances but those for statistics and their gradients, the choice among them, and its row in the registry.
// architectures: 7.5+PTX
#include "backward/mma/row.cuh"
#include "backward/mma/shapes.cuh"
#include "backward/mma/sm75_shapes.h"
#include "device/sm75.cuh"

namespace flash_wmma::backward {
namespace {

/// In each pass the plain shapes come first. Up to d = 128 two blocks of four warps an SM are fastest; if shared memory
/// holds only one, as on Turing, a block of eight warps is. At d = 256 a block of twelve is.
constexpr TableRow kPlainRows[] = {
    {kPlain, {.d = 32, .own_warps = 4, .stream_rows = 64, .in_registers = 1, .blocks_per_sm = 2}},
    {kPlain, {.d = 64, .own_warps = 4, .stream_rows = 32, .in_registers = 1, .blocks_per_sm = 2}, 2},
    {kPlain,
     {.d = 64, .stream_warps = 2, .row_tiles = 4, .stream_rows = 32, .stages = 2, .in_registers = 2, .roles = 2}},
    {kPlain, {.d = 128, .stream_warps = 2, .stream_rows = 32}, 2},
    {kPlain, {.d = 128, .stream_warps = 2, .stream_rows = 32, .stages = 2, .in_registers = 2, .roles = 2}},
    {kPlain, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .in_registers = 2, .roles = 3}},
};
constexpr TableRow kFusedRows[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 32, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .stream_warps = 2, .stream_rows = 32}},
    {kGeneral, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .in_registers = 1}},
};
constexpr TableRow kKeysRows[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 32, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .stream_warps = 2, .stream_rows = 32}},
    {kGeneral, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .in_registers = 1}},
};
constexpr TableRow kQueriesRows[] = {
    {kGeneral, {.d = 64, .own_warps = 4, .stream_rows = 32, .in_registers = 2, .blocks_per_sm = 2}},
    {kGeneral, {.d = 128, .own_warps = 4, .row_tiles = 1, .stream_rows = 32, .step = 32, .blocks_per_sm = 2}},
    {kGeneral, {.d = 256, .stream_warps = 2, .row_tiles = 1, .stream_rows = 32, .in_registers = 1}},
};

template <Pass kPass, const auto& kRows, Problems kMore = Problems::kPlain>
std::vector<Shape> shapes() {
    return backward::shapes<mma::Sm75, half, kPass, kRows, kMore>(75);
}
const std::vector<Shape> kShapes = join(
    {shapes<Pass::kFused, kPlainRows>(), shapes<Pass::kFused, kFusedRows>(), shapes<Pass::kKeys, kKeysRows>(),
     shapes<Pass::kQueries, kQueriesRows>(), shapes<Pass::kFused, kFusedRows, Problems::kConverted>(),
     shapes<Pass::kKeys, kKeysRows, Problems::kConverted>(),
     shapes<Pass::kQueries, kQueriesRows, Problems::kConverted>(), sm75_terms_shapes(), sm75_converted_terms_shapes()});
const std::vector<StatisticsShape> kStatisticsShapes = sm75_statistics();

const BackwardKernelInfo kInfo = TensorCoreRow<mma::Sm75, kShapes, kStatisticsShapes>::row(
    {.name = "bwd_sm75",
     .summary = "mma.sync m16n8k8, ldmatrix, swizzled tiles, dK and dV in registers, at most 64 KiB of shared memory",
     .min_arch = 75,
     .bf16_min_arch = 75,
     .float32 = true,
     .float16 = true,
     .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks |
                 kBiasGradient | kDeterministic | kStatistics | kStatisticsGradient | kSlopesGradient,
     .auto_rank = 20});
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::backward
