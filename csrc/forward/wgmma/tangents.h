// The compiled tile shapes of wgmma_sm90 for tangents, shared by its sources.
#pragma once

#include <vector>

#include "forward/wgmma/shapes.h"

namespace flash_wmma::wgmma_sm90 {

/// A tile shape and its launch.
struct TangentShape {
    Instance facts;
    void (*launch)(const TangentParams&, const DeviceFacts&, Stream);
};

std::vector<TangentShape> half_tangent_shapes();
std::vector<TangentShape> bf16_tangent_shapes();

}  // namespace flash_wmma::wgmma_sm90
