// The half instances of bwd_sm90 with dropout, of packed sequences and dense problems.
// architectures: 9.0a
#include "backward/wgmma/bwd_sm90.cuh"

namespace flash_wmma::backward {
std::vector<Shape> sm90_half_dropped_shapes() {
    constexpr Problems kProblems = Problems::kPacked | Problems::kDropped;
    return join({wgmma::shapes<half, kProblems, Pass::kFused>(), wgmma::shapes<half, kProblems, Pass::kOrdered>()});
}
}  // namespace flash_wmma::backward
