// The half instances of bwd_sm80 for converted inputs.
// architectures: 8.0+PTX;9.0
#include "backward/mma/bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_converted_shapes() {
    return join({shapes<mma::Sm80, half, Pass::kFused, kSm80Converted, Problems::kConverted>(80),
                 shapes<mma::Sm80, half, Pass::kKeys, kSm80ConvertedKeys, Problems::kConverted>(80),
                 shapes<mma::Sm80, half, Pass::kQueries, kSm80ConvertedQueries, Problems::kConverted>(80)});
}

}  // namespace flash_wmma::backward
