// The half instances of bwd_sm90.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_half_shapes() {
    return join({wgmma::shapes<half, Problems::kPlain, Pass::kFused, wgmma::kPlainShapes>(),
                 wgmma::shapes<half, Problems::kPacked, Pass::kFused>()});
}
}  // namespace flash_wmma::backward
