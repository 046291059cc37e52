// The half instances of bwd_sm80 for gradients of statistics and slopes.
// architectures: 8.0+PTX;9.0
#include "backward/mma/bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_terms_shapes() { return sm80_terms_shapes<half>(); }

}  // namespace flash_wmma::backward
