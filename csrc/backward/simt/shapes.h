// The instances of bwd_simt, each pass's in its own source file so that they compile at the same time.
#pragma once

#include "backward_shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> simt_fused_shapes();
std::vector<Shape> simt_keys_shapes();
std::vector<Shape> simt_queries_shapes();

/// Computes BackwardParams::statistics.
void launch_simt_statistics(const Problem& problem, Stream stream);

}  // namespace flash_wmma::backward
