// bwd_simt: the facts it needs of every query row, the choice among its instances, and its row in the registry.
#include <launch.h>

#include "backward/simt/shapes.h"
#include "device/backward_rows.cuh"
#include "device/shuffle.cuh"

namespace flash_wmma::backward {
namespace {

/// Stands for a Machine.
struct Simt {};

/// Writes L (here in natural units, not log2) and D of the rows of a group, and clears their dQ if atomics add to it.
__global__ void __launch_bounds__(kRowThreads) prepare_simt(const __grid_constant__ Problem problem) {
    const ForwardParams& p = problem.forward;
    const RowGroup group = row_group(p, blockIdx.x);
    const Sequence& sequence = group.sequence;
    const int tid = static_cast<int>(threadIdx.x), lane = tid % 32;
    for (int i = tid / 32; i < kRowGroup; i += kRowThreads / 32) {
        const int row = group.first_row + i;
        const bool used = row >= 0 && row < sequence.seqlen_q;
        float sum = 0.f;
        if (used) {
            const float* o = row_of<const float>(p.o, sequence.index, group.head, sequence.first_q + row);
            const float* dout = row_of<const float>(problem.dout, sequence.index, group.head, sequence.first_q + row);
            float* dq = row_of<float>(problem.dq, sequence.index, group.head, sequence.first_q + row);
            for (int c = lane; c < p.head_dim_v; c += 32) sum = fmaf(o[c], dout[c], sum);
            if (!problem.deterministic)
                for (int c = lane; c < p.head_dim; c += 32) dq[c] = 0.f;
        }
        sum = reduce_lanes(sum, [](float x, float y) { return x + y; }, 32);
        if (lane > 0) continue;
        RowFacts facts;
        if (used) facts = {problem, sequence, group.head, row, sum};
        RowPair& pair = problem.facts[(std::int64_t{blockIdx.x} * kRowGroup + i) / 2];
        pair.minus_lse[i % 2] = facts.minus_lse;
        pair.minus_delta[i % 2] = facts.minus_delta;
    }
}

const std::vector<Shape> kShapes = join({simt_fused_shapes(), simt_keys_shapes(), simt_queries_shapes()});
const std::vector<StatisticsShape> kStatisticsShapes = simt_statistics_shapes();

const Shape& shape_of(Pass pass, const BackwardParams& p, const DeviceFacts& device) {
    return choose_shape(kShapes, DType::kFloat32, pass, p, device);
}

const Instance& choose(const BackwardParams& p, const DeviceFacts& device) {
    return shape_of(naming_pass(p), p, device).facts;
}

/// L and D of every row, then Problem::extents. dQ is added up in place.
std::int64_t facts_bytes(const BackwardParams& p) {
    return row_groups(p.forward) * (kRowGroup / 2) * static_cast<std::int64_t>(sizeof(RowPair));
}
std::int64_t simt_workspace_bytes(const BackwardParams& p, const DeviceFacts&) {
    return facts_bytes(p) + extents_bytes(p.forward);
}

void launch_bwd_simt(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    Problem problem{p, static_cast<RowPair*>(p.workspace), nullptr};
    if (extents_bytes(p.forward) > 0)
        problem.extents = reinterpret_cast<KeyExtent*>(static_cast<char*>(p.workspace) + facts_bytes(p));
    if (problem.extents) launch_rows(find_extents<Simt>, problem, stream);
    if (p.statistics.wanted) return launch_statistics(kStatisticsShapes, problem, stream);
    launch_rows(prepare_simt, problem, stream);
    const auto run = [&](Pass pass) { shape_of(pass, p, device).launch(problem, stream); };
    if (p.deterministic) {
        run(Pass::kKeys);
        run(Pass::kQueries);
    } else {
        run(Pass::kFused);
    }
}

const BackwardKernelInfo kInfo = {
    with_instances(
        {.name = "bwd_simt",
         .summary =
             "fp32 FMAs on CUDA cores: register tiles, dK and dV in registers, dQ by atomics or a pass of its own",
         .min_arch = 75,
         .float32 = true,
         .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout |
                     kSinks | kBiasGradient | kDeterministic | kStatistics | kStatisticsGradient | kSlopesGradient,
         .auto_rank = 10},
        kShapes),
    choose,
    simt_workspace_bytes,
    launch_bwd_simt,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::backward
