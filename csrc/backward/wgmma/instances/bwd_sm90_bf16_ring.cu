// The bf16 instances of bwd_sm90 whose blocks take turns, in a ring or on stairs.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_bf16_ring() {
    return wgmma::shapes<bf16, Problems::kPlain, Pass::kTurns, wgmma::kRingShapes>();
}
}  // namespace flash_wmma::backward
