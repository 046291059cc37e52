// The bf16 instances of wmma_v3 for packed sequences and ScoreMods.
// architectures: 8.0+PTX;9.0
#include "forward/wmma/wmma_v3.cuh"

namespace flash_wmma::wmma_v3 {

std::vector<Shape> sm80_bf16_general_shapes() { return shapes<bf16, Problems::kUndropped, kGeneralRows>(80); }

}  // namespace flash_wmma::wmma_v3
