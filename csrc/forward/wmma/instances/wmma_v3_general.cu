// The half instances of wmma_v3 for packed sequences and ScoreMods.
#include "forward/wmma/wmma_v3.cuh"

namespace flash_wmma::wmma_v3 {

std::vector<Shape> half_general_shapes() { return shapes<half, Problems::kUndropped, kGeneralRows>(75); }

}  // namespace flash_wmma::wmma_v3
