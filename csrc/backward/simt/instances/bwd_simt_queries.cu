// bwd_simt: the instances of Pass::kQueries.
#include "backward/simt/bwd_simt.cuh"
#include "backward/simt/shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> simt_queries_shapes() { return simt_shapes<Pass::kQueries>(); }

}  // namespace flash_wmma::backward
