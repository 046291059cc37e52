// The row in the registry of a forward kernel that is a table of tile shapes.
#pragma once

#include <vector>

#include "device/convert.h"
#include "forward_shapes.h"

namespace flash_wmma {

/// kConverts: an input type that no shape reads is converted to half in the workspace.
template <const std::vector<Shape>& kShapes, bool kConverts = false>
struct Tiled {
    static bool converts(const ForwardParams& p) { return kConverts && !reads(kShapes, p.dtype); }
    static const Shape& shape(const ForwardParams& p, const DeviceFacts& device) {
        const bool converted = converts(p);
        return choose_shape(kShapes, converted ? DType::kFloat16 : p.dtype, problems_of(p, converted), p, device);
    }
    static const Instance& choose(const ForwardParams& p, const DeviceFacts& device) { return shape(p, device).facts; }
    static std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts& device) {
        if constexpr (kConverts)
            if (converts(p)) return converted_bytes(p);
        return shape(p, device).workspace_bytes(p, device);
    }
    static void launch(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
        const auto run = shape(p, device).launch;
        if constexpr (kConverts)
            if (converts(p)) return run(convert_to_half(p, stream), device, stream);
        run(p, device, stream);
    }
    static KernelInfo row(const KernelFacts& facts) {
        return {with_instances(facts, kShapes), choose, workspace_bytes, launch};
    }
};

}  // namespace flash_wmma
