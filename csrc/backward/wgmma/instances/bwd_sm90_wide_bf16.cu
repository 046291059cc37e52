// The bf16 instances of bwd_sm90 for d above 128.
// architectures: 9.0a
#include "backward/wgmma/two_roles.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_wide_bf16_shapes() {
    return join({wgmma::wide_shapes<bf16, Problems::kPlain>(), wgmma::wide_shapes<bf16, Problems::kPacked>()});
}
}  // namespace flash_wmma::backward
