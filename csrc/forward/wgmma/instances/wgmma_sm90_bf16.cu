// The bf16 instances of wgmma_sm90.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> bf16_shapes() { return shapes<bf16, Problems::kPlain, kPlainRows>(); }

}  // namespace flash_wmma::wgmma_sm90
