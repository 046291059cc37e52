// bwd_sm90: the choice among its instances, and its row in the registry.
// architectures: 9.0a
#include "backward/wgmma/shapes.h"
#include "device/backward_rows.cuh"

namespace flash_wmma::backward {
namespace {

struct Sm90 {};  // prepare and finish are compiled once more, for sm_90a

const std::vector<Shape> kShapes = join({sm90_half_shapes(), sm90_bf16_shapes()});

const Shape& shape_of(Pass pass, const BackwardParams& p, const DeviceFacts& device) {
    return choose_shape(kShapes, p.forward.dtype, pass, p.forward, device);
}

const Instance& choose(const BackwardParams& p, const DeviceFacts& device) {
    return shape_of(Pass::kFused, p, device).facts;
}

std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts&) {
    return backward::workspace_bytes(p, /*converted=*/false);
}

void launch_bwd_sm90(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    const auto shape = [&](Pass pass) { return shape_of(pass, p, device); };
    if (p.forward.dtype == DType::kFloat16) launch_all<Sm90, half, false>(p, stream, shape);
    else launch_all<Sm90, bf16, false>(p, stream, shape);
}

const BackwardKernelInfo kInfo = {
    with_instances({.name = "bwd_sm90",
                    .summary = "wgmma, TMA, P and dS in registers, dQ one tile late, from registers to fp32 additions",
                    .min_arch = 90,
                    .max_arch = 90,
                    .bf16_min_arch = 90,
                    .float16 = true,
                    .max_head_dim = 128,
                    .features = kCausal | kWindow | kValueDim,
                    .auto_rank = 40},
                   kShapes),
    choose,
    workspace_bytes,
    launch_bwd_sm90,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::backward
