// The bf16 instances of bwd_sm80 for gradients of statistics and slopes.
// architectures: 8.0+PTX;9.0
#include "backward/mma/bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_bf16_terms_shapes() { return sm80_terms_shapes<bf16>(); }

}  // namespace flash_wmma::backward
