// mma_sm80: the choice among its instances, and its row in the registry.
// architectures: 8.0+PTX;9.0, one PTX
#include "device/convert.h"
#include "forward/mma/sm80_shapes.h"

namespace flash_wmma::mma {
namespace {

const std::vector<Shape> kShapes = join({sm80_half_shapes(), sm80_half_packed_shapes(), sm80_half_general_shapes(),
                                         sm80_bf16_shapes(), sm80_bf16_packed_shapes(), sm80_bf16_general_shapes()});
const std::vector<Instance> kInstances = instances_of(kShapes);

const Shape& choose_shape(const ForwardParams& p, const DeviceFacts& device) {
    const bool converted = p.dtype == DType::kFloat32;
    return flash_wmma::choose_shape(kShapes, converted ? DType::kFloat16 : p.dtype, problems_of(p, converted), p,
                                    device);
}

const Instance& choose(const ForwardParams& p, const DeviceFacts& device) {
    return kInstances[static_cast<std::size_t>(&choose_shape(p, device) - kShapes.data())];
}

std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    return p.dtype == DType::kFloat32 ? converted_bytes(p) : 0;
}

void launch_mma_sm80(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    const Shape& shape = choose_shape(p, device);
    shape.launch(p.dtype == DType::kFloat32 ? convert_to_half(p, stream) : p, stream);
}

const KernelInfo kInfo = {
    /*name=*/"mma_sm80",
    /*summary=*/"mma.sync m16n8k16, ldmatrix, swizzled tiles, cp.async ring, lagged maximum, P in registers",
    /*min_arch=*/80,
    /*bf16_min_arch=*/80,
    /*float32=*/true,
    /*float16=*/true,
    /*min_head_dim=*/1,
    /*max_head_dim=*/256,
    /*features=*/kCausal | kWindow | kBias | kAlibi | kSoftcap | kVarlen | kValueDim,
    /*auto_rank=*/30,
    kInstances.data(),
    kInstances.size(),
    choose,
    workspace_bytes,
    launch_mma_sm80,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::mma
