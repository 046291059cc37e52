// The instances of bwd_simt, each pass's in its own source file so that they compile at the same time.
#pragma once

#include "backward_shapes.h"
#include "device/statistics_shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> simt_fused_shapes();
std::vector<Shape> simt_keys_shapes();
std::vector<Shape> simt_queries_shapes();
std::vector<StatisticsShape> simt_statistics_shapes();

}  // namespace flash_wmma::backward
