// The half instances of wmma_v3 that need sm_80's registers and shared memory.
// architectures: 8.0+PTX;9.0, one PTX
#include "forward/wmma/wmma_v3.cuh"

namespace flash_wmma::wmma_v3 {

std::vector<Shape> sm80_half_shapes() { return shapes<half, kPlain, kWideRows>(80); }

}  // namespace flash_wmma::wmma_v3
