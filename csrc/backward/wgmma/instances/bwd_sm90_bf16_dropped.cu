// The bf16 instances of bwd_sm90 with dropout, of packed sequences and dense problems.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_bf16_dropped_shapes() { return wgmma::shapes<bf16, Problems::kPackedDropped, Pass::kFused>(); }
}  // namespace flash_wmma::backward
