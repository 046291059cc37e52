// A forward kernel's compiled tile shapes and the choice among them.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "shape_table.h"

namespace flash_wmma {

/// A tile shape and its launch. It is faster than the later shapes of the same head dim in the table if there are at
/// least `blocks_per_sm` blocks per SM and an SM's shared memory holds `resident` blocks.
struct Shape {
    Instance facts;
    int problems;  ///< problems it is for, as its kernel numbers them (or is_general: false or true)
    float blocks_per_sm;
    int resident;
    void (*launch)(const ForwardParams&, Stream);
    int lanes = 0;  ///< least lanes per warp that it runs with
};

/// Whether the device's warps have enough lanes and an SM's shared memory holds the shape's resident blocks. An SM has
/// 1 KiB more than a block may opt in to; a block takes 1 KiB more than it asks for.
inline bool fits(const Shape& shape, const DeviceFacts& device) {
    constexpr int kReserved = 1024;
    return shape.lanes <= device.warp_size &&
           shape.resident * (shape.facts.smem_bytes + kReserved) <= device.smem_optin + kReserved;
}

/// Takes the least head dim that holds d and d_v. Among its shapes that fit the device, chooses the first in the table
/// that fills the device, or else the last. With `batch_invariant` it chooses the first that fits, whatever the number
/// of heads and sequences.
inline const Shape& choose_shape(const std::vector<Shape>& shapes, DType dtype, int problems, const ForwardParams& p,
                                 const DeviceFacts& device) {
    const int d = std::max(p.head_dim, p.head_dim_v);
    const Shape* chosen = nullptr;
    for (const Shape& shape : shapes) {
        const Instance& tile = shape.facts;
        if (tile.dtype != dtype || tile.head_dim < d || shape.problems != problems) continue;
        if (tile.min_arch > device.arch || !fits(shape, device)) continue;
        if (chosen && chosen->facts.head_dim < tile.head_dim) break;
        chosen = &shape;
        const std::int64_t rows = p.sequences.cu_seqlens_q ? p.sequences.total_q : p.seqlen_q * p.batch;
        const auto blocks = static_cast<float>(rows * p.heads_q) / static_cast<float>(tile.br);
        if (p.batch_invariant || blocks >= shape.blocks_per_sm * static_cast<float>(device.sm_count)) break;
    }
    if (!chosen) throw std::runtime_error("flash_wmma: no tile of this kernel fits the device");
    return *chosen;
}

}  // namespace flash_wmma
