// The half instances of bwd_sm90 for any problem.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_half_general_shapes() {
    return wgmma::shapes<half, Problems::kGeneral, Pass::kFused, wgmma::kGeneralShapes>();
}
}  // namespace flash_wmma::backward
