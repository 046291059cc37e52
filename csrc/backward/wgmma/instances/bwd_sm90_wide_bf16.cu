// The bf16 instances of bwd_sm90 for d above 128.
// architectures: 9.0a
#include "backward/wgmma/two_roles.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_wide_bf16_shapes() { return wgmma::wide_shapes<bf16>(); }
}  // namespace flash_wmma::backward
