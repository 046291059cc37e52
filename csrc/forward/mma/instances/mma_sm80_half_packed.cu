// The half instances of mma_sm80 for packed sequences.
// architectures: 8.0+PTX;9.0, one PTX
#include "forward/mma/mma_sm80.cuh"

namespace flash_wmma::mma {

std::vector<Shape> sm80_half_packed_shapes() { return shapes<Sm80, half, Problems::kPacked, kSm80Rows>(80); }

}  // namespace flash_wmma::mma
