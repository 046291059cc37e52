// bwd_sm80: the choice among its instances, and its row in the registry. fp32 inputs are converted to half.
// architectures: 8.0+PTX;9.0
#include "backward/mma/sm80_shapes.h"
#include "device/backward_rows.cuh"
#include "device/sm80.cuh"

namespace flash_wmma::backward {
namespace {

const std::vector<Shape> kShapes =
    join({sm80_half_shapes(), sm80_half_general_shapes(), sm80_half_split_shapes(), sm80_half_converted_shapes(),
          sm80_bf16_shapes(), sm80_bf16_general_shapes(), sm80_bf16_split_shapes()});
const std::vector<Instance> kInstances = instances_of(kShapes);

const Shape& shape_of(Pass pass, const BackwardParams& p, const DeviceFacts& device) {
    const bool converted = p.forward.dtype == DType::kFloat32;
    return choose_shape(kShapes, converted ? DType::kFloat16 : p.forward.dtype, pass, p.forward, device);
}

const Instance& choose(const BackwardParams& p, const DeviceFacts& device) {
    const Shape& shape = shape_of(p.deterministic ? Pass::kKeys : Pass::kFused, p, device);
    return kInstances[static_cast<std::size_t>(&shape - kShapes.data())];
}

std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts&) {
    return backward::workspace_bytes(p, p.forward.dtype == DType::kFloat32);
}

void launch_bwd_sm80(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    const auto shape = [&](Pass pass) { return shape_of(pass, p, device); };
    if (p.forward.dtype == DType::kFloat16) launch_all<mma::Sm80, half, false>(p, stream, shape);
    else if (p.forward.dtype == DType::kBFloat16) launch_all<mma::Sm80, bf16, false>(p, stream, shape);
    else launch_all<mma::Sm80, float, true>(p, stream, shape);
}

const BackwardKernelInfo kInfo = {
    {
        /*name=*/"bwd_sm80",
        /*summary=*/"mma.sync m16n8k16, ldmatrix, swizzled tiles, cp.async ring, dK and dV in registers",
        /*min_arch=*/80,
        /*bf16_min_arch=*/80,
        /*float32=*/true,
        /*float16=*/true,
        /*min_head_dim=*/1,
        /*max_head_dim=*/256,
        /*features=*/kCausal | kWindow | kBias | kAlibi | kSoftcap | kVarlen | kValueDim | kBiasGradient |
            kDeterministic,
        /*auto_rank=*/30,
        kInstances.data(),
        kInstances.size(),
    },
    choose,
    workspace_bytes,
    launch_bwd_sm80,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::backward
