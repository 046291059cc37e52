// bwd_sm80: the choice among its instances, and its row in the registry. fp32 inputs are converted to half.
// architectures: 8.0+PTX;9.0
#include "backward/mma/row.cuh"
#include "backward/mma/sm80_shapes.h"
#include "device/sm80.cuh"

namespace flash_wmma::backward {
namespace {

const std::vector<Shape> kShapes =
    join({sm80_half_shapes(), sm80_half_general_shapes(), sm80_half_split_shapes(), sm80_half_converted_shapes(),
          sm80_half_terms_shapes(), sm80_half_converted_terms_shapes(), sm80_bf16_shapes(), sm80_bf16_general_shapes(),
          sm80_bf16_split_shapes(), sm80_bf16_terms_shapes()});
const std::vector<StatisticsShape> kStatisticsShapes = join({sm80_half_statistics(), sm80_bf16_statistics()});

const BackwardKernelInfo kInfo = TensorCoreRow<mma::Sm80, kShapes, kStatisticsShapes>::row(
    {.name = "bwd_sm80",
     .summary = "mma.sync m16n8k16, ldmatrix, swizzled tiles, cp.async ring, dK and dV in registers",
     .min_arch = 80,
     .bf16_min_arch = 80,
     .float32 = true,
     .float16 = true,
     .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks |
                 kBiasGradient | kDeterministic | kStatistics | kStatisticsGradient | kSlopesGradient,
     .auto_rank = 30});
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::backward
