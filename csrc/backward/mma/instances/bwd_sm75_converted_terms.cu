// The instances of bwd_sm75 for gradients of statistics and of slopes of converted inputs.
// architectures: 7.5+PTX
#include "backward/mma/sm75_terms.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm75_converted_terms_shapes() { return sm75_terms<Problems::kConverted>(); }

}  // namespace flash_wmma::backward
