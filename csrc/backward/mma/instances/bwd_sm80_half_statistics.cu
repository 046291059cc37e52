// The half instances of bwd_sm80's statistics, of converted inputs too.
// architectures: 8.0+PTX;9.0
#include "backward/mma/sm80_statistics.cuh"

namespace flash_wmma::backward {

std::vector<StatisticsShape> sm80_half_statistics() { return statistics_shapes<mma::Sm80, half, kSm80Statistics>(); }

}  // namespace flash_wmma::backward
