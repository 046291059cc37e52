// The bf16 instances of bwd_sm90.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_bf16_shapes() {
    return join({wgmma::shapes<bf16, Problems::kPlain, Pass::kFused, wgmma::kPlainShapes>(),
                 wgmma::shapes<bf16, Problems::kPacked, Pass::kFused>()});
}
}  // namespace flash_wmma::backward
