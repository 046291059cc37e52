// The bf16 instances of bwd_sm80's statistics.
// architectures: 8.0+PTX;9.0
#include "backward/mma/sm80_statistics.cuh"

namespace flash_wmma::backward {

std::vector<StatisticsShape> sm80_bf16_statistics() { return statistics_shapes<mma::Sm80, bf16, kSm80Statistics>(); }

}  // namespace flash_wmma::backward
