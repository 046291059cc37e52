// The compiled tile shapes of wmma_v3, shared by its sources: wmma_v3.cu, instances/wmma_v3_general.cu and
// instances/wmma_v3_dropped.cu for every architecture, instances/wmma_v3_sm80_*.cu for those from sm_80 on.
#pragma once

#include <vector>

#include "forward_shapes.h"

namespace flash_wmma::wmma_v3 {

std::vector<Shape> half_general_shapes();
std::vector<Shape> half_dropped_shapes();

/// Shapes for sm_80 and later. Absent (null) from a build without such an architecture.
__attribute__((weak)) std::vector<Shape> sm80_half_shapes();
__attribute__((weak)) std::vector<Shape> sm80_bf16_shapes();
__attribute__((weak)) std::vector<Shape> sm80_bf16_general_shapes();
__attribute__((weak)) std::vector<Shape> sm80_bf16_dropped_shapes();

}  // namespace flash_wmma::wmma_v3
