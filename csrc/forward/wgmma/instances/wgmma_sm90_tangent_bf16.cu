// The bf16 instances of wgmma_sm90 for tangents.
// architectures: 9.0a
#include "forward/wgmma/tangent.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<TangentShape> bf16_tangent_shapes() { return tangent_shapes<bf16, kTangentRows>(); }

}  // namespace flash_wmma::wgmma_sm90
