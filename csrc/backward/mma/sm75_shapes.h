// The part of bwd_sm75's table that is in a source of its own.
#pragma once

#include "device/statistics_shapes.h"

namespace flash_wmma::backward {

std::vector<StatisticsShape> sm75_statistics();

}  // namespace flash_wmma::backward
