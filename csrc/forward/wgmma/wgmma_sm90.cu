// wgmma_sm90: the choice among its instances, and its row in the registry.
// architectures: 9.0a
#include <launch.h>
#include <ptx_sm90.cuh>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "forward/wgmma/items.h"
#include "forward/wgmma/look_at_mask.cuh"

namespace flash_wmma::wgmma_sm90 {
namespace {

const std::vector<Shape> kShapes =
    join({half_shapes(), half_general_shapes(), half_changed_shapes(), half_dropped_shapes(), bf16_shapes(),
          bf16_general_shapes(), bf16_changed_shapes(), bf16_dropped_shapes()});

/// Whether the copy engine can bring tiles of the bias.
bool has_tiles(const ForwardParams& p) {
    const Bias& b = p.bias;
    const bool aligned = reinterpret_cast<std::uintptr_t>(b.data) % 16 == 0 && (b.batch | b.head | b.query) % 8 == 0;
    return b.dtype == p.dtype && b.key == 1 && aligned && std::min({b.batch, b.head, b.query}) >= 0;
}

/// What p asks of an instance.
Problems asked(const ForwardParams& p) {
    const bool masked = p.key_ranges.data || MaskTiles::wanted(p), biased = p.bias.data && !MaskTiles::wanted(p);
    const bool changed = masked || biased || p.alibi_slopes;
    if (p.dropout.rng_state) return changed || p.softcap != 0.f ? Problems::kGeneralChanged : Problems::kPackedDropped;
    if (!changed) return problems_of(p, false) == Problems::kPlain ? Problems::kPlain : Problems::kGeneral;
    const Sequences& s = p.sequences;
    const bool alone = !s.cu_seqlens_q && !s.cu_seqlens_k && !s.seqused_k && p.softcap == 0.f &&
                       masked + biased + (p.alibi_slopes != nullptr) == 1;
    if (alone && masked) return Problems::kMasked;
    if (alone && p.alibi_slopes) return Problems::kSloped;
    return alone && has_tiles(p) ? Problems::kBiased : Problems::kGeneralChanged;
}

/// Takes the least head dims that hold d and d_v, and of their shapes the one that finishes first. With
/// `batch_invariant`: the first shape.
const Shape& choose_shape(const ForwardParams& p, const DeviceFacts& device) {
    const Problems problems = asked(p);
    const Shape* chosen = nullptr;
    double least_time = 0;
    for (const Shape& shape : kShapes) {
        const Instance& tile = shape.facts;
        if (tile.dtype != p.dtype || shape.problems != problems) continue;
        if (tile.head_dim < p.head_dim || shape.head_dim_v < p.head_dim_v) continue;
        if (chosen &&
            (p.batch_invariant || chosen->facts.head_dim != tile.head_dim || chosen->head_dim_v != shape.head_dim_v))
            break;
        const double time = split_of(p, device, shape).time(shape, p, device);
        if (chosen && time >= least_time) continue;
        chosen = &shape;
        least_time = time;
    }
    if (!chosen) throw std::runtime_error("flash_wmma: wgmma_sm90 has no tile for this");
    return *chosen;
}

const Instance& choose(const ForwardParams& p, const DeviceFacts& device) { return choose_shape(p, device).facts; }

/// One thread, a grid of its own: unlike a memset, it overlaps with the grids before and behind it.
__global__ void clear(Queue* queue) {
    ptx::let_next_grid_start();
    ptx::wait_for_previous_grids();
    *queue = 0;
}

/// Bytes of the queue or of the parts of split items, since a problem never has both; with a boolean mask, of the queue
/// and of the mask's tiles.
std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts& device) {
    const Shape& shape = choose_shape(p, device);
    if (MaskTiles::wanted(p)) return kQueueBytes + mask_tiles(p, shape.facts.br).bytes();
    return has_queue(p, device, shape.facts.br) ? sizeof(Queue) : split_of(p, device, shape).bytes(shape);
}

void launch_wgmma_sm90(const ForwardParams& p, const DeviceFacts& device, Stream stream) {
    const Shape& shape = choose_shape(p, device);
    if (has_queue(p, device, shape.facts.br)) {
        LaunchConfig config{dim3(1), dim3(1)};
        config.programmatic = true;
        launch(clear, config, stream, static_cast<Queue*>(p.workspace));
    }
    if (MaskTiles::wanted(p)) launch_look_at_mask(p, mask_tiles(p, shape.facts.br), stream);
    shape.launch(p, device, shape, stream);
}

/// Whether mma_sm80 finishes first (docs/tuning/hopper.md): with so few keys that a block's start and end count, while
/// there are SMs to spare; or also with few rows, which would leave most of this kernel's Q tiles empty.
bool yields(const ForwardParams& p, const DeviceFacts& device) {
    if (p.batch_invariant) return false;  // or the choice would depend on the batch
    const std::int64_t q_tiles = items_of(p, 128), head_dim = std::max({p.head_dim, p.head_dim_v, 64});
    return (p.seqlen_k * head_dim <= 256 * 128 && 2 * q_tiles <= device.sm_count) ||
           (p.seqlen_k <= 64 && (p.seqlen_q <= 64 || q_tiles <= device.sm_count));
}

const KernelInfo kInfo = {
    with_instances(
        {.name = "wgmma_sm90",
         .summary = "wgmma, TMA, planner, producer and two to four consumer warpgroups, lagged maximum, P in registers",
         .min_arch = 90,
         .max_arch = 90,
         .bf16_min_arch = 90,
         .float16 = true,
         .features =
             kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks,
         .auto_rank = 40},
        kShapes),
    choose,
    workspace_bytes,
    launch_wgmma_sm90,
    yields,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::wgmma_sm90
