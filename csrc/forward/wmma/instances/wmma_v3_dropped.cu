// The half instances of wmma_v3 with dropout, of all problems.
#include "forward/wmma/wmma_v3.cuh"

namespace flash_wmma::wmma_v3 {

std::vector<Shape> half_dropped_shapes() { return shapes<half, Problems::kAny, kGeneralRows>(75); }

}  // namespace flash_wmma::wmma_v3
