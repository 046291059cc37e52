// The bf16 instances of bwd_sm90 for d above 128. The one for turns serves dense problems too.
// architectures: 9.0a
#include "backward/wgmma/two_roles.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_wide_bf16_shapes() {
    return join({wgmma::wide_shapes<bf16, Problems::kPlain, Pass::kFused>(),
                 wgmma::wide_shapes<bf16, Problems::kPacked, Pass::kFused>(),
                 wgmma::wide_shapes<bf16, Problems::kPacked, Pass::kTurns, wgmma::kWideTurnShapes>()});
}
}  // namespace flash_wmma::backward
