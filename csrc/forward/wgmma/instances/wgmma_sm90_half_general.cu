// The half instances of wgmma_sm90 for packed sequences and softcap.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> half_general_shapes() {
    return join({shapes<half, Problems::kPacked, kPackedRows>(), shapes<half, Problems::kGeneral, kGeneralRows>()});
}

}  // namespace flash_wmma::wgmma_sm90
