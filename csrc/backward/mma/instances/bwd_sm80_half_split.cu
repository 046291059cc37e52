// The half instances of the deterministic passes of bwd_sm80.
// architectures: 8.0+PTX;9.0
#include "backward/mma/bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_split_shapes() {
    return join({shapes<mma::Sm80, half, Pass::kKeys, kSm80Keys>(80),
                 shapes<mma::Sm80, half, Pass::kQueries, kSm80Queries>(80)});
}

}  // namespace flash_wmma::backward
