// The half instances of bwd_sm80.
#include "backward/mma/bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_shapes() { return sm80_plain_shapes<half>(); }

}  // namespace flash_wmma::backward
