// The row in the registry of the backward kernels on tensor cores: a table of tile shapes for one machine.
#pragma once

#include "backward_shapes.h"
#include "device/backward_rows.cuh"
#include "device/convert.h"
#include "device/element.cuh"
#include "device/statistics_shapes.h"

namespace flash_wmma::backward {

/// Input types that the machine does not multiply are converted to half.
template <class Machine, const std::vector<Shape>& kShapes, const std::vector<StatisticsShape>& kStatisticsShapes>
struct TensorCoreRow {
    static bool converts(const BackwardParams& p) { return !reads(kShapes, p.forward.dtype); }
    static const Shape& shape(Pass pass, const BackwardParams& p, const DeviceFacts& device) {
        return choose_shape(kShapes, converts(p) ? DType::kFloat16 : p.forward.dtype, pass, p, device);
    }
    static const Instance& choose(const BackwardParams& p, const DeviceFacts& device) {
        return shape(naming_pass(p), p, device).facts;
    }
    static std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts&) {
        if (p.statistics.wanted) return scores_bytes(p) + extents_bytes(p.forward);
        return backward::workspace_bytes(p, converts(p), dq_by(p));
    }
    static void launch(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
        if (p.statistics.wanted) return launch_statistics(p, stream);
        const auto shape_of = [&](Pass pass) { return shape(pass, p, device); };
        constexpr bool kConvertsBf16 = !Machine::kMultipliesBf16;
        if (p.forward.dtype == DType::kFloat16) launch_all<Machine, half, false>(p, stream, shape_of);
        else if (p.forward.dtype == DType::kBFloat16) launch_all<Machine, bf16, kConvertsBf16>(p, stream, shape_of);
        else launch_all<Machine, float, true>(p, stream, shape_of);
    }
    static BackwardKernelInfo row(const KernelFacts& facts) {
        return {with_instances(facts, kShapes), choose, workspace_bytes, launch};
    }

  private:
    static void launch_statistics(const BackwardParams& p, Stream stream) {
        BackwardParams params = p;
        if (converts(p)) params.forward = convert_to_half(without_values(p), stream);
        void* const extents = static_cast<char*>(p.workspace) + scores_bytes(p);
        backward::launch_statistics(kStatisticsShapes, problem_of_scores<Machine>(params, extents, stream), stream);
    }
    /// Of the workspace: converted q and k, for statistics. Values have no part in scores.
    static std::int64_t scores_bytes(const BackwardParams& p) {
        return converts(p) ? converted_bytes(without_values(p)) : 0;
    }
    static ForwardParams without_values(const BackwardParams& p) {
        ForwardParams scores = p.forward;
        scores.head_dim_v = 0;
        scores.workspace = p.workspace;
        return scores;
    }
};

}  // namespace flash_wmma::backward
