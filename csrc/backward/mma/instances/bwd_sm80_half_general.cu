// The half instances of bwd_sm80 for packed sequences and ScoreMods.
// architectures: 8.0+PTX;9.0
#include "backward/mma/bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_general_shapes() { return sm80_general_shapes<half>(); }

}  // namespace flash_wmma::backward
