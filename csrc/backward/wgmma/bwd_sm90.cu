// bwd_sm90: the choice among its instances, and its row in the registry.
// architectures: 9.0a
#include <algorithm>
#include <cstdlib>

#include "backward/wgmma/shapes.h"
#include "device/backward_rows.cuh"

namespace flash_wmma::backward {
namespace {

struct Sm90 {};  // prepare and finish are compiled once more, for sm_90a

const std::vector<Shape> kShapes =
    join({sm90_half_shapes(), sm90_bf16_shapes(), sm90_wide_half_shapes(), sm90_wide_bf16_shapes(),
          sm90_half_dropped_shapes(), sm90_bf16_dropped_shapes(), sm90_wide_half_dropped_shapes(),
          sm90_wide_bf16_dropped_shapes(), sm90_half_general_shapes(), sm90_bf16_general_shapes(),
          sm90_wide_half_general_shapes(), sm90_wide_bf16_general_shapes(), sm90_half_two_passes(),
          sm90_bf16_two_passes()});
const std::vector<StatisticsShape> kStatisticsShapes = join({sm90_half_statistics(), sm90_bf16_statistics()});

/// Blocks take turns at dQ, and write dq, if sequences are so short that passes over dQ's buffer are a large part of the
/// time: in deterministic calls, which have an order anyway, and in others if memory is slow (docs/tuning/
/// hopper_backward.md). With turns an item has also those tiles whose ranges leave out its keys.
DqBy dq_of(const BackwardParams& p, const DeviceFacts& device) {
    if (const char* by = std::getenv("FW_DQ")) {
        if (*by == 'q' && std::max(p.forward.head_dim, p.forward.head_dim_v) <= 128 &&
            !includes(problems_of(p, false), Problems::kModified))
            return DqBy::kQueries;
        if (*by == 's') return DqBy::kSums;
    }
    constexpr int kNarrowBus = 5120;  // of an H100; an H200 has 6016
    const bool slow = 0 < device.memory_bus && device.memory_bus <= kNarrowBus;
    if (!p.deterministic && (p.forward.key_ranges.data || !slow)) return DqBy::kSums;
    const std::int64_t longest =
        std::max(p.forward.head_dim, p.forward.head_dim_v) > 64 && p.deterministic ? 1024 : 512;
    return p.forward.seqlen_k <= longest ? DqBy::kTurns : DqBy::kSums;
}
/// Turns also give the additions an order.
bool takes_turns(const BackwardParams& p, const DeviceFacts& device) {
    const DqBy by = dq_of(p, device);
    return by != DqBy::kQueries && (p.deterministic || by == DqBy::kTurns);
}
const Shape& shape_of(const BackwardParams& p, const DeviceFacts& device) {
    const Pass pass = takes_turns(p, device)                   ? Pass::kTurns
                      : dq_of(p, device) == DqBy::kQueries ? Pass::kKeys
                                                           : Pass::kFused;
    return choose_shape(kShapes, p.forward.dtype, pass, p, device);
}

/// Problem::sole_rows: of plain dense problems whose rows all see the first key; without turns. 0 if a head's terms do not
/// fit where they would then lie.
int sole_rows(const BackwardParams& params, const Shape& shape) {
    const ForwardParams& p = params.forward;
    if (!shape.writes_sole_rows) return 0;
    const std::int64_t offset = p.band.bottom_right ? p.seqlen_k - p.seqlen_q : 0;
    if (offset + p.band.right < 0 || p.band.left < p.seqlen_q - 1 + offset) return 0;
    const std::int64_t keys = shape.facts.bc, queries = shape.facts.br;  // of a tile
    const std::int64_t all = (p.seqlen_q + kRowGroup - 1) / kRowGroup * kRowGroup;
    const std::int64_t alone =
        p.seqlen_k <= keys ? all
                           : std::clamp<std::int64_t>(keys - offset - p.band.right, 0, p.seqlen_q) / queries * queries;
    return all * facts_bytes(true) <= alone * p.head_dim * std::int64_t{sizeof(float)} ? static_cast<int>(alone) : 0;
}

const Instance& choose(const BackwardParams& p, const DeviceFacts& device) { return shape_of(p, device).facts; }

/// The queue and the turns come first, each aligned as what follows has to be.
constexpr std::int64_t kUnit = 16;
std::int64_t counters_bytes(const BackwardParams& p, const DeviceFacts& device) {
    const std::int64_t turns = takes_turns(p, device) ? row_groups(p.forward) * std::int64_t{sizeof(TurnCount)} : 0;
    return kUnit + (turns + kUnit - 1) / kUnit * kUnit;
}

std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts& device) {
    if (p.statistics.wanted) return extents_bytes(p.forward);
    const Shape& shape = shape_of(p, device);
    return counters_bytes(p, device) +
           backward::workspace_bytes(p, /*converted=*/false, dq_of(p, device), shape.takes_terms, sole_rows(p, shape));
}

template <class T>
void launch_of(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    auto* const workspace = static_cast<char*>(p.workspace);
    BackwardParams params = p;
    params.workspace = workspace + counters_bytes(p, device);
    const Shape& shape = shape_of(p, device);
    Problem problem = problem_of(params, dq_of(p, device), shape.takes_terms, sole_rows(p, shape));
    problem.queue = reinterpret_cast<Queue*>(workspace);
    if (takes_turns(p, device)) problem.turns = reinterpret_cast<TurnCount*>(workspace + kUnit);
    problem.multiprocessors = std::max(device.sm_count, 1);
    launch_rows(prepare<Sm90, T, false>, problem, stream);
    if (problem.extents) launch_rows(find_extents<Sm90>, problem, stream);
    shape.launch(problem, stream);
    if (problem.dq_by == DqBy::kSums && problem.sole_rows < p.forward.seqlen_q)
        launch_rows(finish<Sm90, T>, problem, stream);
}

void launch_bwd_sm90(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    if (p.statistics.wanted)
        return launch_statistics(kStatisticsShapes, problem_of_scores<Sm90>(p, p.workspace, stream), stream);
    if (p.forward.dtype == DType::kFloat16) launch_of<half>(p, device, stream);
    else launch_of<bf16>(p, device, stream);
}

/// In order and above d = 128, bwd_sm80's two passes take no longer; in short sequences of yet shorter ranges its smaller
/// tiles leave out more (docs/tuning/hopper_backward.md).
bool yields(const BackwardParams& p, const DeviceFacts&) {
    if (p.statistics.wanted) return false;  // a kernel of its own, which was not compared with bwd_sm80's in ranges
    const bool wide = std::max(p.forward.head_dim, p.forward.head_dim_v) > 128;
    return (p.deterministic && wide) || (p.forward.key_ranges.data && p.forward.seqlen_k <= 512);
}

const BackwardKernelInfo kInfo = {
    with_instances({.name = "bwd_sm90",
                    .summary = "wgmma, TMA, P and dS in registers, dQ one tile late, from registers to fp32 additions",
                    .min_arch = 90,
                    .max_arch = 90,
                    .bf16_min_arch = 90,
                    .float16 = true,
                    .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim |
                                kDropout | kSinks | kBiasGradient | kDeterministic | kStatistics,
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
