// The bf16 instances of bwd_sm80 for packed sequences and ScoreMods.
// architectures: 8.0+PTX;9.0
#include "backward/mma/bwd_sm80.cuh"

namespace flash_wmma::backward {

std::vector<Shape> sm80_bf16_general_shapes() { return shapes<mma::Sm80, bf16, Pass::kFused, kSm80General>(80); }

}  // namespace flash_wmma::backward
