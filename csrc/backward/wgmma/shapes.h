// The parts of bwd_sm90's table, one source each so that they compile side by side.
#pragma once

#include "backward_shapes.h"
#include "device/statistics_shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> sm90_half_shapes();
std::vector<Shape> sm90_bf16_shapes();
std::vector<Shape> sm90_half_ring();  // blocks take turns, in a ring or on stairs
std::vector<Shape> sm90_bf16_ring();
std::vector<Shape> sm90_wide_half_shapes();  // d above 128
std::vector<Shape> sm90_wide_bf16_shapes();
std::vector<Shape> sm90_half_dropped_shapes();
std::vector<Shape> sm90_bf16_dropped_shapes();
std::vector<Shape> sm90_wide_half_dropped_shapes();
std::vector<Shape> sm90_wide_bf16_dropped_shapes();
std::vector<Shape> sm90_half_general_shapes();
std::vector<Shape> sm90_bf16_general_shapes();
std::vector<Shape> sm90_wide_half_general_shapes();
std::vector<Shape> sm90_wide_bf16_general_shapes();
std::vector<Shape> sm90_half_two_passes();
std::vector<Shape> sm90_bf16_two_passes();
std::vector<Shape> sm90_half_general_two_passes();
std::vector<Shape> sm90_bf16_general_two_passes();
std::vector<StatisticsShape> sm90_half_statistics();
std::vector<StatisticsShape> sm90_bf16_statistics();

}  // namespace flash_wmma::backward
