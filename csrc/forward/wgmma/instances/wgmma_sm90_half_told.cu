// The half instances of wgmma_sm90 that tell the rows' largest scores, their entropies, or both.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> half_told_shapes() {
    return join({shapes<half, Problems::kMaxima, kMaximaRows>(), shapes<half, Problems::kEntropies, kEntropyRows>(),
                 shapes<half, Problems::kMaximaEntropies, kEntropyRows>()});
}

}  // namespace flash_wmma::wgmma_sm90
