// The half instances of wgmma_sm90 that merge O and LSE with those of other keys.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> half_merged_shapes() { return shapes<half, Problems::kMerged, kMergedRows>(); }

}  // namespace flash_wmma::wgmma_sm90
