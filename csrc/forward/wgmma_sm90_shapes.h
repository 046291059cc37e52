// The compiled tile shapes of wgmma_sm90, shared by its sources.
#pragma once

#include <cstdint>
#include <vector>

#include "../shape_table.h"

namespace flash_wmma::wgmma_sm90 {

/// A tile shape and its launch.
struct Shape {
    Instance facts;
    bool general;  ///< also for packed sequences and softcap
    float speed;   ///< of a block, beside the other shapes of its head dim
    void (*launch)(const ForwardParams&, const DeviceFacts&, Stream);
};

using Queue = unsigned;  ///< how many items were taken from it

/// Whether a tile's work depends on its place (causal).
inline bool is_uneven(const ForwardParams& p) {
    return !p.sequences.cu_seqlens_q && p.band.right < kUnbounded && p.band.left >= kUnbounded;
}
/// Whether blocks of `br` rows then take items from a queue in the workspace, when they want one. Of few or short items
/// that costs more than it gains.
inline bool has_queue(const ForwardParams& p, const DeviceFacts& device, int br) {
    constexpr int kItems = 2, kKeys = 512;  // least of a block, least of a head
    const std::int64_t items = (p.seqlen_q + br - 1) / br * p.heads_q * p.batch;
    return is_uneven(p) && p.seqlen_k >= kKeys && items > std::int64_t{kItems} * device.sm_count;
}

std::vector<Shape> half_shapes();
std::vector<Shape> half_general_shapes();
std::vector<Shape> bf16_shapes();
std::vector<Shape> bf16_general_shapes();

}  // namespace flash_wmma::wgmma_sm90
