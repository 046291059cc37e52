// The bf16 instances of wgmma_sm90 that tell the rows' largest scores, their entropies, or both.
// architectures: 9.0a
#include "forward/wgmma/wgmma_sm90.cuh"

namespace flash_wmma::wgmma_sm90 {

std::vector<Shape> bf16_told_shapes() {
    return join({shapes<bf16, Problems::kMaxima, kMaximaRows>(), shapes<bf16, Problems::kEntropies, kEntropyRows>(),
                 shapes<bf16, Problems::kMaximaEntropies, kEntropyRows>()});
}

}  // namespace flash_wmma::wgmma_sm90
