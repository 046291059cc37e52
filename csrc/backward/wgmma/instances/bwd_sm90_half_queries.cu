// The half instances of bwd_sm90 for own queries, of packed sequences and dense problems.
// architectures: 9.0a
#include "backward/wgmma/queries.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_half_queries() {
    return join({wgmma::queries_shapes<half, Problems::kPacked>(), wgmma::queries_shapes<half, Problems::kPackedDropped>()});
}
}  // namespace flash_wmma::backward
