// The bf16 instances of wgmma_sm90 for packed sequences and softcap.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> bf16_general_shapes() {
    return join({shapes<bf16, Problems::kPacked, kPackedRows>(), shapes<bf16, Problems::kGeneral, kGeneralRows>()});
}

}  // namespace flash_wmma::wgmma_sm90
