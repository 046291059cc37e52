// bwd_simt: the instances of Pass::kFused.
#include "backward/simt/bwd_simt.cuh"
#include "backward/simt/shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> simt_fused_shapes() { return simt_shapes<Pass::kFused>(); }

}  // namespace flash_wmma::backward
