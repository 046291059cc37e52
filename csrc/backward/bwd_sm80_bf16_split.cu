// The bf16 instances of bwd_sm80's deterministic passes, and of the fused one for less shared memory.
#include "bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_bf16_split_shapes() { return join({sm80_split_shapes<bf16>(), sm80_small_shapes<bf16>()}); }

}  // namespace flash_wmma::backward
