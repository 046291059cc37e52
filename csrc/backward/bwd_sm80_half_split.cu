// The half instances of bwd_sm80's deterministic passes, and of the fused one for less shared memory.
#include "bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_split_shapes() { return join({sm80_split_shapes<half>(), sm80_small_shapes<half>()}); }

}  // namespace flash_wmma::backward
