// The bf16 instances of bwd_sm90 for own queries, of packed sequences and dense problems.
// architectures: 9.0a
#include "backward/wgmma/queries.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_bf16_queries() {
    return join({wgmma::queries_shapes<bf16, Problems::kPacked>(), wgmma::queries_shapes<bf16, Problems::kPackedDropped>()});
}
}  // namespace flash_wmma::backward
