// The parts of bwd_sm80's table, one source each so that they compile side by side.
#pragma once

#include "backward_shapes.h"
#include "device/statistics_shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_shapes();
std::vector<Shape> sm80_half_general_shapes();
std::vector<Shape> sm80_half_split_shapes();
std::vector<Shape> sm80_half_converted_shapes();
std::vector<Shape> sm80_half_terms_shapes();
std::vector<Shape> sm80_half_converted_terms_shapes();
std::vector<Shape> sm80_bf16_shapes();
std::vector<Shape> sm80_bf16_general_shapes();
std::vector<Shape> sm80_bf16_split_shapes();
std::vector<Shape> sm80_bf16_terms_shapes();
std::vector<StatisticsShape> sm80_half_statistics();
std::vector<StatisticsShape> sm80_bf16_statistics();

}  // namespace flash_wmma::backward
