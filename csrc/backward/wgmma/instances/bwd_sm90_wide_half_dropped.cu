// The half instances of bwd_sm90 for d above 128 with dropout, of packed sequences and dense problems.
// architectures: 9.0a
#include "backward/wgmma/two_roles.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_wide_half_dropped_shapes() {
    return join({wgmma::wide_shapes<half, Problems::kPackedDropped, Pass::kFused>(),
                 wgmma::wide_shapes<half, Problems::kPackedDropped, Pass::kTurns, wgmma::kWideTurnShapes>()});
}
}  // namespace flash_wmma::backward
