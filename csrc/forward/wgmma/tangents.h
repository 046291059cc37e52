// The compiled tile shapes of wgmma_sm90 for tangents, shared by its sources.
#pragma once

#include <vector>

#include "forward/wgmma/shapes.h"

namespace flash_wmma::wgmma_sm90 {

/// Which of the tensors have a tangent. The others do not move.
struct Moves {
    bool q = true, k = true, v = true;

    static Moves of(const TangentParams& p) {
        return {p.dq.data != nullptr, p.dk.data != nullptr, p.dv.data != nullptr};
    }
    constexpr bool operator==(const Moves&) const = default;
};

/// A tile shape and its launch.
struct TangentShape {
    Instance facts;
    Moves moves;
    void (*launch)(const TangentParams&, const DeviceFacts&, Stream);
};

std::vector<TangentShape> half_tangent_shapes();
std::vector<TangentShape> bf16_tangent_shapes();

}  // namespace flash_wmma::wgmma_sm90
