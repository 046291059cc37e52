// The bf16 instances of wgmma_sm90 that merge O and LSE with those of other keys.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> bf16_merged_shapes() { return shapes<bf16, Problems::kMerged, kMergedRows>(); }

}  // namespace flash_wmma::wgmma_sm90
