// The bf16 instances of bwd_sm90 in two passes for any problem.
// architectures: 9.0a
#include "backward/wgmma/two_passes.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_bf16_general_two_passes() {
    return wgmma::two_passes_shapes<bf16, Problems::kGeneral, wgmma::kGeneralTwoPassesShapes>();
}
}  // namespace flash_wmma::backward
