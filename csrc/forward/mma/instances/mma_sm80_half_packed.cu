// The half instances of mma_sm80 for packed sequences.
// architectures: 8.0+PTX;9.0, one PTX
#include "forward/mma/mma_sm80.cuh"

namespace flash_wmma::mma {

std::vector<Shape> sm80_half_packed_shapes() { return sm80_shapes<half, kPacked>(); }

}  // namespace flash_wmma::mma
