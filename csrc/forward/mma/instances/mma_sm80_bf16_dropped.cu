// The bf16 instances of mma_sm80 with dropout, of packed sequences and dense problems.
// architectures: 8.0+PTX;9.0, one PTX
#include "forward/mma/mma_sm80.cuh"

namespace flash_wmma::mma {

std::vector<Shape> sm80_bf16_dropped_shapes() {
    return shapes<Sm80, bf16, Problems::kPackedDropped, kSm80GeneralRows>(80);
}

}  // namespace flash_wmma::mma
