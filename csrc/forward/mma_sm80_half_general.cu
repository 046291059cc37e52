// The half instances of mma_sm80 for packed sequences, ScoreMods and converted inputs.
#include "mma_sm80.cuh"

namespace flash_wmma::mma {

std::vector<Shape> sm80_half_general_shapes() { return sm80_shapes<half, true>(); }

}  // namespace flash_wmma::mma
