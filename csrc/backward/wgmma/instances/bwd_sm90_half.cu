// The half instances of bwd_sm90. The one for turns serves dense problems too.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_half_shapes() {
    return join({wgmma::shapes<half, Problems::kPlain, Pass::kFused>(),
                 wgmma::shapes<half, Problems::kPacked, Pass::kFused>(),
                 wgmma::shapes<half, Problems::kPacked, Pass::kTurns, wgmma::kTurnShapes>()});
}
}  // namespace flash_wmma::backward
