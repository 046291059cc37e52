// The row in the registry of the backward kernels on tensor cores: a table of tile shapes for one machine.
#pragma once

#include "backward_shapes.h"
#include "device/backward_rows.cuh"
#include "device/convert.h"
#include "device/element.cuh"

namespace flash_wmma::backward {

/// Input types that the machine does not multiply are converted to half.
template <class Machine, const std::vector<Shape>& kShapes>
struct TensorCoreRow {
    static bool converts(const BackwardParams& p) { return !reads(kShapes, p.forward.dtype); }
    static const Shape& shape(Pass pass, const BackwardParams& p, const DeviceFacts& device) {
        return choose_shape(kShapes, converts(p) ? DType::kFloat16 : p.forward.dtype, pass, p.forward, device);
    }
    static const Instance& choose(const BackwardParams& p, const DeviceFacts& device) {
        return shape(naming_pass(p), p, device).facts;
    }
    static std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts&) {
        return backward::workspace_bytes(p, converts(p));
    }
    static void launch(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
        const auto shape_of = [&](Pass pass) { return shape(pass, p, device); };
        constexpr bool kConvertsBf16 = !Machine::kMultipliesBf16;
        if (p.forward.dtype == DType::kFloat16) launch_all<Machine, half, false>(p, stream, shape_of);
        else if (p.forward.dtype == DType::kBFloat16) launch_all<Machine, bf16, kConvertsBf16>(p, stream, shape_of);
        else launch_all<Machine, float, true>(p, stream, shape_of);
    }
    static BackwardKernelInfo row(const KernelFacts& facts) {
        return {with_instances(facts, kShapes), choose, workspace_bytes, launch};
    }
};

}  // namespace flash_wmma::backward
