// bwd_simt: the instances of Pass::kQueries.
#include "bwd_simt.cuh"
#include "bwd_simt_shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> simt_queries_shapes() { return simt_shapes<Pass::kQueries>(); }

}  // namespace flash_wmma::backward
