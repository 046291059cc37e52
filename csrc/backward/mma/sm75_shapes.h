// The parts of bwd_sm75's table that are in sources of their own.
#pragma once

#include "backward_shapes.h"
#include "device/statistics_shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> sm75_terms_shapes();
std::vector<Shape> sm75_converted_terms_shapes();
std::vector<StatisticsShape> sm75_statistics();

}  // namespace flash_wmma::backward
