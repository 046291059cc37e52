// The bf16 instances of bwd_sm90 for any problem.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_bf16_general_shapes() {
    return wgmma::shapes<bf16, Problems::kGeneral, Pass::kFused, wgmma::kGeneralShapes>();
}
}  // namespace flash_wmma::backward
