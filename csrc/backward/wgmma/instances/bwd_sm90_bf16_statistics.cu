// The bf16 instances of bwd_sm90's statistics.
// architectures: 9.0a
#include "backward/wgmma/statistics.cuh"

namespace flash_wmma::backward {

std::vector<StatisticsShape> sm90_bf16_statistics() { return wgmma::statistics_shapes<bf16>(); }

}  // namespace flash_wmma::backward
