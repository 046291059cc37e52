// The instances of wgmma_sm90 for converted inputs.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> converted_shapes() { return shapes<half, Problems::kConverted, kConvertedRows>(); }

}  // namespace flash_wmma::wgmma_sm90
