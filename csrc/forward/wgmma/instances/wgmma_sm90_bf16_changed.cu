// The bf16 instances of wgmma_sm90 for biases, ALiBi and key ranges.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> bf16_changed_shapes() { return shapes<bf16, Problems::kGeneralChanged, kChangedRows>(); }

}  // namespace flash_wmma::wgmma_sm90
