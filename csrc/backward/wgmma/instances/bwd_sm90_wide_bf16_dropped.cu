// The bf16 instances of bwd_sm90 for d above 128 with dropout, of packed sequences and dense problems.
// architectures: 9.0a
#include "backward/wgmma/two_roles.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_wide_bf16_dropped_shapes() {
    return join({wgmma::wide_shapes<bf16, Problems::kPackedDropped, Pass::kFused>(),
                 wgmma::wide_shapes<bf16, Problems::kPackedDropped, Pass::kTurns, wgmma::kWideTurnShapes>()});
}
}  // namespace flash_wmma::backward
