// The half instances of wgmma_sm90.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> half_shapes() { return shapes<half, Problems::kPlain, kPlainRows>(); }

}  // namespace flash_wmma::wgmma_sm90
