// The bf16 instances of bwd_sm90. The one for turns serves dense problems too.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_bf16_shapes() {
    return join({wgmma::shapes<bf16, Problems::kPlain, Pass::kFused>(),
                 wgmma::shapes<bf16, Problems::kPacked, Pass::kFused>(),
                 wgmma::shapes<bf16, Problems::kPacked, Pass::kTurns, wgmma::kTurnShapes>()});
}
}  // namespace flash_wmma::backward
