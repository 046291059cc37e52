// The parts of bwd_sm80's table, one source each so that they compile side by side.
#pragma once

#include "mma_shapes.h"

namespace flash_wmma::backward {

std::vector<Shape> sm80_half_shapes();

}  // namespace flash_wmma::backward
