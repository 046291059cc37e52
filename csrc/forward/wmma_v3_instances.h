// The compiled tile shapes of wmma_v3, shared by its sources: wmma_v3.cu and wmma_v3_general.cu for every architecture,
// wmma_v3_sm80_*.cu for those from sm_80 on.
#pragma once

#include <vector>

#include "../registry.h"

namespace flash_wmma::wmma_v3 {

/// A tile shape and its launch. From `blocks_per_sm` blocks an SM on it is faster than the next smaller tile of the same
/// head dim, which fills the device better.
struct Shape {
    Instance facts;
    bool general;  ///< for packed sequences and ScoreMods
    float blocks_per_sm;
    void (*launch)(const ForwardParams&, Stream);
};

std::vector<Shape> half_general_shapes();

/// Shapes for sm_80 and later. Absent (null) from a build without such an architecture.
__attribute__((weak)) std::vector<Shape> sm80_half_shapes();
__attribute__((weak)) std::vector<Shape> sm80_bf16_shapes();
__attribute__((weak)) std::vector<Shape> sm80_bf16_general_shapes();

}  // namespace flash_wmma::wmma_v3
