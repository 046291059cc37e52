// mma_sm75 (mma_sm75.cuh): its instances, the choice among them, and its row in the registry.
#include "mma_sm75.cuh"

#include "../device/convert.h"

namespace flash_wmma::mma {
namespace {

const std::vector<Shape> kShapes = join({sm75_shapes(), sm75_general_shapes()});
const std::vector<Instance> kInstances = instances_of(kShapes);

const Shape& choose_shape(const ForwardParams& p, const DeviceFacts& device) {
    return choose_shape(kShapes, DType::kFloat16, p, device);
}

const Instance& choose(const ForwardParams& p, const DeviceFacts& device) {
    return kInstances[static_cast<std::size_t>(&choose_shape(p, device) - kShapes.data())];
}

std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    return p.dtype == DType::kFloat16 ? 0 : converted_bytes(p);
}

void launch_mma_sm75(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    const Shape& shape = choose_shape(p, device);
    shape.launch(p.dtype == DType::kFloat16 ? p : convert_to_half(p, stream), stream);
}

const KernelInfo kInfo = {
    /*name=*/"mma_sm75",
    /*summary=*/"mma.sync m16n8k8, ldmatrix, swizzled tiles, register prefetch, at most 64 KiB of shared memory",
    /*min_arch=*/75,
    /*bf16_min_arch=*/75,
    /*float32=*/true,
    /*float16=*/true,
    /*min_head_dim=*/1,
    /*max_head_dim=*/256,
    /*features=*/kCausal | kWindow | kBias | kAlibi | kSoftcap | kVarlen | kValueDim,
    /*auto_rank=*/20,
    kInstances.data(),
    kInstances.size(),
    choose,
    workspace_bytes,
    launch_mma_sm75,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::mma
