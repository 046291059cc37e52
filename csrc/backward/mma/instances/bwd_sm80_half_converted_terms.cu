// The half instances of bwd_sm80 for gradients of statistics and slopes of converted inputs.
// architectures: 8.0+PTX;9.0
#include "backward/mma/bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_converted_terms_shapes() { return sm80_terms_shapes<half, Problems::kConverted>(); }

}  // namespace flash_wmma::backward
