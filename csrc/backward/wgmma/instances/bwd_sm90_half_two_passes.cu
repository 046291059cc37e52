// The half instances of bwd_sm90 in two passes.
// architectures: 9.0a
#include "backward/wgmma/two_passes.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_half_two_passes() {
    return join({wgmma::two_passes_shapes<half, Problems::kPlain>(),
                 wgmma::two_passes_shapes<half, Problems::kPacked>(),
                 wgmma::two_passes_shapes<half, Problems::kPackedDropped>()});
}
}  // namespace flash_wmma::backward
