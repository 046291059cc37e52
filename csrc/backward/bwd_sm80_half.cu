// The half instances of bwd_sm80.
#include "bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_shapes() { return sm80_fused_shapes<half, false>(); }

}  // namespace flash_wmma::backward
