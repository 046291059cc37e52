// The bf16 instances of wmma_v3 with dropout, of all problems.
// architectures: 8.0+PTX;9.0
#include "forward/wmma/wmma_v3.cuh"

namespace flash_wmma::wmma_v3 {

std::vector<Shape> sm80_bf16_dropped_shapes() { return shapes<bf16, Problems::kAny, kGeneralRows>(80); }

}  // namespace flash_wmma::wmma_v3
