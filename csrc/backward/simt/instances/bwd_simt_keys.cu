// bwd_simt: the instances of Pass::kKeys.
#include "backward/simt/bwd_simt.cuh"
#include "backward/simt/shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> simt_keys_shapes() { return simt_shapes<Pass::kKeys>(); }

}  // namespace flash_wmma::backward
