// The parts of mma_sm80's table, one source each so that they compile side by side.
#pragma once

#include "forward_shapes.h"

namespace flash_wmma::mma {

std::vector<Shape> sm80_half_shapes();
std::vector<Shape> sm80_half_packed_shapes();
std::vector<Shape> sm80_half_general_shapes();
std::vector<Shape> sm80_half_cached_shapes();
std::vector<Shape> sm80_half_dropped_shapes();
std::vector<Shape> sm80_bf16_shapes();
std::vector<Shape> sm80_bf16_packed_shapes();
std::vector<Shape> sm80_bf16_general_shapes();
std::vector<Shape> sm80_bf16_cached_shapes();
std::vector<Shape> sm80_bf16_dropped_shapes();

}  // namespace flash_wmma::mma
