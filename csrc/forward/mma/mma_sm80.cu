// mma_sm80: the choice among its instances, and its row in the registry.
// architectures: 8.0+PTX;9.0, one PTX
#include "device/tiled_kernel.h"
#include "forward/mma/sm80_shapes.h"

namespace flash_wmma::mma {
namespace {

const std::vector<Shape> kShapes =
    join({sm80_half_shapes(), sm80_half_packed_shapes(), sm80_half_general_shapes(), sm80_half_cached_shapes(),
          sm80_half_dropped_shapes(), sm80_bf16_shapes(), sm80_bf16_packed_shapes(), sm80_bf16_general_shapes(),
          sm80_bf16_cached_shapes(), sm80_bf16_dropped_shapes()});

const KernelInfo kInfo = Tiled<kShapes, /*kConverts=*/true>::row(
    {.name = "mma_sm80",
     .summary = "mma.sync m16n8k16, ldmatrix, swizzled tiles, cp.async ring, lagged maximum, P in registers",
     .min_arch = 80,
     .bf16_min_arch = 80,
     .float32 = true,
     .float16 = true,
     .features =
         kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks | kCache,
     .auto_rank = 30});
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::mma
