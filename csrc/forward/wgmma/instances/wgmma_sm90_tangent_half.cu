// The half instances of wgmma_sm90 for tangents.
// architectures: 9.0a
#include "forward/wgmma/tangent.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<TangentShape> half_tangent_shapes() { return tangent_shapes<half, kTangentRows>(); }

}  // namespace flash_wmma::wgmma_sm90
