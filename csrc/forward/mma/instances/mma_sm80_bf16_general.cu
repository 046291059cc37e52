// The bf16 instances of mma_sm80 for ScoreMods, packed or not.
// architectures: 8.0+PTX;9.0, one PTX
#include "forward/mma/mma_sm80.cuh"

namespace flash_wmma::mma {

std::vector<Shape> sm80_bf16_general_shapes() { return shapes<Sm80, bf16, Problems::kGeneral, kSm80GeneralRows>(80); }

}  // namespace flash_wmma::mma
