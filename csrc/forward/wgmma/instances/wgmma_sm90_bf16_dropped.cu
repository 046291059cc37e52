// The bf16 instances of wgmma_sm90 with dropout, of packed sequences and dense problems.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {
std::vector<Shape> bf16_dropped_shapes() { return shapes<bf16, Problems::kPackedDropped, kDroppedRows>(); }
}  // namespace flash_wmma::wgmma_sm90
