// bwd_simt: the instances of Pass::kFused.
#include "bwd_simt.cuh"
#include "bwd_simt_shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> simt_fused_shapes() { return simt_shapes<Pass::kFused>(); }

}  // namespace flash_wmma::backward
