// The half instances of bwd_sm90's statistics.
// architectures: 9.0a
#include "backward/wgmma/statistics.cuh"

namespace flash_wmma::backward {

std::vector<StatisticsShape> sm90_half_statistics() { return wgmma::statistics_shapes<half>(); }

}  // namespace flash_wmma::backward
