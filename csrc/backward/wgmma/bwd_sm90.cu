// bwd_sm90: the choice among its instances, and its row in the registry.
// architectures: 9.0a
#include <algorithm>

#include "backward/wgmma/shapes.h"
#include "device/backward_rows.cuh"

namespace flash_wmma::backward {
namespace {

struct Sm90 {};  // prepare is compiled once more, for sm_90a

const std::vector<Shape> kShapes =
    join({sm90_half_shapes(), sm90_bf16_shapes(), sm90_wide_half_shapes(), sm90_wide_bf16_shapes(),
          sm90_half_dropped_shapes(), sm90_bf16_dropped_shapes(), sm90_wide_half_dropped_shapes(),
          sm90_wide_bf16_dropped_shapes()});

const Shape& shape_of(Pass pass, const BackwardParams& p, const DeviceFacts& device) {
    return choose_shape(kShapes, p.forward.dtype, pass, p, device);
}

Pass pass_of(const BackwardParams& p) { return p.deterministic ? Pass::kOrdered : Pass::kFused; }

const Instance& choose(const BackwardParams& p, const DeviceFacts& device) {
    return shape_of(pass_of(p), p, device).facts;
}

/// The turns and the queue come first, in whole units of what has to stay aligned behind them.
std::int64_t counters_bytes(const BackwardParams& p) {
    constexpr std::int64_t kUnit = 16;
    const std::int64_t bytes = row_groups(p.forward) * std::int64_t{sizeof(TurnCount)} + std::int64_t{sizeof(unsigned)};
    return (bytes + kUnit - 1) / kUnit * kUnit;
}

std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts&) {
    return counters_bytes(p) + backward::workspace_bytes(p, /*converted=*/false, DqBy::kTurns);
}

template <class T>
void launch_of(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    BackwardParams params = p;
    params.workspace = static_cast<char*>(p.workspace) + counters_bytes(p);
    Problem problem = problem_of(params, DqBy::kTurns);
    problem.turns = static_cast<TurnCount*>(p.workspace);
    problem.queue = reinterpret_cast<unsigned*>(problem.turns + row_groups(p.forward));
    problem.multiprocessors = std::max(device.sm_count, 1);
    launch_rows(prepare<Sm90, T, false>, problem, stream);
    shape_of(pass_of(p), p, device).launch(problem, stream);
}

void launch_bwd_sm90(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    if (p.forward.dtype == DType::kFloat16) launch_of<half>(p, device, stream);
    else launch_of<bf16>(p, device, stream);
}

/// In order and above d = 128, bwd_sm80's two passes take no longer (docs/tuning/hopper_backward.md).
bool yields(const BackwardParams& p, const DeviceFacts&) {
    return p.deterministic && std::max(p.forward.head_dim, p.forward.head_dim_v) > 128;
}

const BackwardKernelInfo kInfo = {
    with_instances({.name = "bwd_sm90",
                    .summary = "wgmma, TMA, P and dS in registers, dQ one tile late, from registers to fp32 additions",
                    .min_arch = 90,
                    .max_arch = 90,
                    .bf16_min_arch = 90,
                    .float16 = true,
                    .features = kCausal | kWindow | kVarlen | kValueDim | kDropout | kSinks | kDeterministic,
                    .auto_rank = 40},
                   kShapes),
    choose,
    workspace_bytes,
    launch_bwd_sm90,
    yields,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::backward
