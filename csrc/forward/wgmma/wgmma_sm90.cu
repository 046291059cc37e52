// wgmma_sm90: the choice among its instances, and its row in the registry.
// architectures: 9.0a
#include <launch.h>
#include <ptx_sm90.cuh>

#include <algorithm>
#include <cstdint>
#include <stdexcept>

#include "device/convert.h"
#include "forward/wgmma/items.h"
#include "forward/wgmma/look_at_mask.cuh"
#include "forward/wgmma/tangents.h"

namespace flash_wmma::wgmma_sm90 {
namespace {

const std::vector<Shape> kShapes = join(
    {half_shapes(), half_general_shapes(), half_changed_shapes(), half_dropped_shapes(), bf16_shapes(),
     bf16_general_shapes(), bf16_changed_shapes(), bf16_dropped_shapes(), converted_shapes(),
     converted_changed_shapes(), half_told_shapes(), bf16_told_shapes(), half_merged_shapes(), bf16_merged_shapes()});
const std::vector<TangentShape> kTangentShapes = join({half_tangent_shapes(), bf16_tangent_shapes()});

bool converts(const ForwardParams& p) { return p.dtype == DType::kFloat32; }

/// Whether the copy engine can bring tiles of the bias.
bool has_tiles(const ForwardParams& p) {
    const Bias& b = p.bias;
    const bool aligned = reinterpret_cast<std::uintptr_t>(b.data) % 16 == 0 && (b.batch | b.head | b.query) % 8 == 0;
    return b.dtype == p.dtype && b.key == 1 && aligned && std::min({b.batch, b.head, b.query}) >= 0;
}

/// What p asks of an instance. Those for one change alone hold no more than 256 columns.
Problems asked(const ForwardParams& p) {
    const bool masked = MaskTiles::wanted(p), biased = p.bias.data && !masked, sloped = p.alibi_slopes,
               ranged = p.key_ranges.data, wide = std::max(p.head_dim, p.head_dim_v) > 256;
    const int changes = masked + biased + sloped + ranged;
    const bool plain = problems_of(p, false) == Problems::kPlain;
    if (converts(p)) return plain ? Problems::kConverted : Problems::kConvertedChanged;
    if (p.dropout.rng_state)
        return changes > 0 || wide || p.softcap != 0.f ? Problems::kGeneralChanged : Problems::kPackedDropped;
    const Sequences& s = p.sequences;
    const bool packed = s.cu_seqlens_q || s.cu_seqlens_k || s.seqused_k;
    if (plain && p.row_max) return p.entropy ? Problems::kMaximaEntropies : Problems::kMaxima;
    if (plain && p.entropy) return Problems::kEntropies;
    if (plain && (p.merges || p.out_dtype != p.dtype)) return Problems::kMerged;
    if (changes == 0) {
        const bool narrow = std::max(p.head_dim, p.head_dim_v) <= 64;
        if (plain) return Problems::kPlain;
        if (packed && narrow && p.softcap == 0.f) return Problems::kPacked;
        return packed || wide ? Problems::kGeneral : Problems::kCapped;
    }
    if (packed || wide || p.softcap != 0.f || changes > 1 || (biased && !has_tiles(p)))
        return Problems::kGeneralChanged;
    return masked ? Problems::kMasked : biased ? Problems::kBiased : sloped ? Problems::kSloped : Problems::kRanged;
}

/// Takes the least head dims that hold d and d_v, and of their shapes the one that finishes first. With
/// `batch_invariant`: the first shape.
const Shape& choose_shape(const ForwardParams& p, const DeviceFacts& device) {
    const Problems problems = asked(p);
    const DType dtype = converts(p) ? DType::kFloat16 : p.dtype;
    const Shape* chosen = nullptr;
    double least_time = 0;
    for (const Shape& shape : kShapes) {
        const Instance& tile = shape.facts;
        if (tile.dtype != dtype || shape.problems != problems) continue;
        if (tile.head_dim < p.head_dim || shape.head_dim_v < p.head_dim_v) continue;
        if (most_keys(p, tile.br) > shape.most_keys) continue;
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

void clear_queue(const ForwardParams& p, Stream stream) {
    LaunchConfig config{dim3(1), dim3(1)};
    config.programmatic = true;
    launch(clear, config, stream, static_cast<Queue*>(p.workspace));
}

/// Bytes of the queue or of the parts of split items, since a problem never has both; with a boolean mask, of the queue
/// and of the mask's tiles. In front of them, converted inputs.
std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts& device) {
    const Shape& shape = choose_shape(p, device);
    const std::int64_t converted = converts(p) ? converted_bytes(p) : 0;
    if (MaskTiles::wanted(p)) return converted + kQueueBytes + mask_tiles(p, shape.facts.br).bytes();
    return converted + (has_queue(p, device, shape.facts.br) ? static_cast<std::int64_t>(sizeof(Queue))
                                                             : split_of(p, device, shape).bytes(shape));
}

/// The same problem with `count` columns of V and O, from `first` on.
ForwardParams columns_of(const ForwardParams& p, int first, int count) {
    ForwardParams part = p;
    part.v.data = static_cast<char*>(p.v.data) + std::ptrdiff_t{first} * 2;
    part.o.data = static_cast<char*>(p.o.data) + std::ptrdiff_t{first} * (p.out_dtype == DType::kFloat32 ? 4 : 2);
    part.head_dim_v = std::min(count, p.head_dim_v - first);
    return part;
}

void launch_wgmma_sm90(const ForwardParams& given, const DeviceFacts& device, Stream stream) {
    const Shape& shape = choose_shape(given, device);
    const ForwardParams p = converts(given) ? convert_to_half_chained(given, stream) : given;
    if (MaskTiles::wanted(p)) launch_look_at_mask(p, mask_tiles(p, shape.facts.br), stream);
    for (int column = 0; column < p.head_dim_v; column += shape.columns) {
        if (has_queue(p, device, shape.facts.br)) clear_queue(p, stream);
        shape.launch(columns_of(p, column, shape.columns), device, shape, stream);
    }
}

/// Whether mma_sm80 finishes first (docs/tuning/hopper.md): with so few keys that a block's start and end count, while
/// there are SMs to spare; or also with few rows, which would leave most of this kernel's Q tiles empty.
bool yields(const ForwardParams& p, const DeviceFacts& device) {
    if (p.batch_invariant) return false;  // or the choice would depend on the batch
    const std::int64_t q_tiles = items_of(p, 128), head_dim = std::max({p.head_dim, p.head_dim_v, 64});
    return (p.seqlen_k * head_dim < 256 * 128 && 2 * q_tiles <= device.sm_count) ||
           (p.seqlen_k <= 64 && (p.seqlen_q <= 64 || q_tiles <= device.sm_count));
}

/// Plain problems of heads up to 128 have instances for statistics of the rows, and for merging.
bool tells(const ForwardParams& p, const DeviceFacts&) {
    return asked(p) == Problems::kPlain && std::max(p.head_dim, p.head_dim_v) <= 128;
}
bool merges(const ForwardParams& p, const DeviceFacts& device) { return tells(p, device) && !p.sinks; }

/// For tangents of what moves: the least head dim that holds d and d_v; null: none does.
const TangentShape* tangent_shape(const ForwardParams& p, const Moves& moves) {
    for (const TangentShape& shape : kTangentShapes)
        if (shape.facts.dtype == p.dtype && std::max(p.head_dim, p.head_dim_v) <= shape.facts.head_dim &&
            shape.moves == moves)
            return &shape;
    return nullptr;
}

bool takes_tangents(const ForwardParams& p, const DeviceFacts&) {
    return asked(p) == Problems::kPlain && tangent_shape(p, {});
}

std::int64_t tangent_workspace_bytes(const TangentParams& p, const DeviceFacts& device) {
    const int rows = tangent_shape(p.forward, Moves::of(p))->facts.br;
    return has_queue(p.forward, device, rows) ? static_cast<std::int64_t>(sizeof(Queue)) : 0;
}

void launch_with_tangents(const TangentParams& given, const DeviceFacts& device, Stream stream) {
    TangentParams p = given;
    p.forward.workspace = given.workspace;
    const TangentShape& shape = *tangent_shape(p.forward, Moves::of(p));
    if (has_queue(p.forward, device, shape.facts.br)) clear_queue(p.forward, stream);
    shape.launch(p, device, stream);
}

const TangentKernel kTangents = {takes_tangents, tangent_workspace_bytes, launch_with_tangents};

const KernelInfo kInfo = {
    with_instances(
        {.name = "wgmma_sm90",
         .summary = "wgmma, TMA, planner, producer and two to four consumer warpgroups, lagged maximum, P in registers",
         .min_arch = 90,
         .max_arch = 90,
         .bf16_min_arch = 90,
         .float32 = true,
         .float16 = true,
         .features =
             kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks,
         .auto_rank = 40},
        kShapes),
    choose,
    workspace_bytes,
    launch_wgmma_sm90,
    yields,
    tells,
    &kTangents,
    merges,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::wgmma_sm90
