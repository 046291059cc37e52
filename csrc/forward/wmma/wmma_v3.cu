// wmma_v3 (wmma_v3.cuh): its half instances, the choice among all of them, and its row in the registry.
// architectures: 7.5;8.0+PTX;9.0, one PTX
#include "forward/wmma/wmma_v3.cuh"

#include <algorithm>
#include <tuple>

#include "device/tiled_kernel.h"

namespace flash_wmma::wmma_v3 {

namespace {

/// In place of the wide shapes on sm_75, where those would not keep their registers.
inline constexpr TableRow kTuringRows[] = {
    {{.d = 64, .row_tiles = 2, .keys = 32, .q_in_registers = true, .blocks_per_sm = 2}, {0.75f}},
    {{.d = 96, .keys = 32, .q_in_registers = true, .blocks_per_sm = 2}},
    {{.d = 192, .keys = 16, .q_in_registers = false, .blocks_per_sm = 1}},
};

/// Every shape of this build, by head dim, the largest tile first.
const std::vector<Shape> kShapes = [] {
    std::vector<Shape> all = join({shapes<half, kPlain, kCommonRows>(75), shapes<half, kPlain, kTuringRows>(75)});
    for (auto* more : {sm80_half_shapes, sm80_bf16_shapes, half_general_shapes, sm80_bf16_general_shapes,
                       half_dropped_shapes, sm80_bf16_dropped_shapes})
        if (more)
            for (const Shape& shape : more()) all.push_back(shape);
    std::stable_sort(all.begin(), all.end(), [](const Shape& a, const Shape& b) {
        return std::make_tuple(a.facts.head_dim, -a.facts.br, -a.facts.bc) <
               std::make_tuple(b.facts.head_dim, -b.facts.br, -b.facts.bc);
    });
    return all;
}();

const KernelInfo kInfo = Tiled<kShapes, /*kConverts=*/true>::row(
    {.name = "wmma_v3",
     .summary = "WMMA, exact per-row softmax in registers, lagged maximum, any d up to 256, cp.async, padded tiles",
     .min_arch = 75,
     .bf16_min_arch = sm80_bf16_shapes ? 80 : 0,
     .float32 = true,
     .float16 = true,
     .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks,
     .auto_rank = 10});
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::wmma_v3
