// The bf16 instances of bwd_sm90 for d above 128 for any problem.
// architectures: 9.0a
#include "backward/wgmma/two_roles.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_wide_bf16_general_shapes() {
    return join({wgmma::wide_shapes<bf16, Problems::kGeneral, Pass::kFused, wgmma::kGeneralWideShapes>(),
                 wgmma::wide_shapes<bf16, Problems::kGeneral, Pass::kTurns, wgmma::kGeneralWideTurnShapes>()});
}
}  // namespace flash_wmma::backward
