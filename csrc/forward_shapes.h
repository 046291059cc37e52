// A forward kernel's compiled tile shapes and the choice among them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "shape_table.h"

namespace flash_wmma {

/// When a tile shape is faster than the later shapes of the same head dim in the table.
struct Pays {
    float blocks_per_sm = 0.f;                    ///< if there are at least so many blocks per SM
    int resident = 1;                             ///< and an SM's shared memory holds so many
    std::int64_t rows = kMaxSeqlen * kMaxSeqlen;  ///< and at most so many query rows of a sequence share a key
};

/// A row of a kernel's table: what names the instance, and when it pays.
template <class TileShape>
struct TableRow {
    TileShape tile;
    Pays pays = {};
};

/// A tile shape and its launch.
struct Shape {
    Instance facts;
    Problems problems;
    Pays pays;
    void (*launch)(const ForwardParams&, const DeviceFacts&, Stream);
    int lanes = 0;  ///< least lanes per warp that it runs with
    std::int64_t (*workspace_bytes)(const ForwardParams&, const DeviceFacts&) = no_workspace<ForwardParams>;
};

/// Of the sets in the table that include `problems`, the one with the fewest.
inline Problems fewest(const std::vector<Shape>& shapes, DType dtype, Problems problems) {
    Problems found = Problems::kAll;
    for (const Shape& shape : shapes)
        if (shape.facts.dtype == dtype && includes(shape.problems, problems)) found = std::min(found, shape.problems);
    return found;
}

/// Takes the least head dim that holds d and d_v. Among its shapes for the fewest problems that fit the device, chooses
/// the first in the table that fills the device, or else the last. With `batch_invariant` it chooses the first that
/// fits, whatever the number of heads and sequences.
inline const Shape& choose_shape(const std::vector<Shape>& shapes, DType dtype, Problems problems,
                                 const ForwardParams& p, const DeviceFacts& device) {
    const int d = std::max(p.head_dim, p.head_dim_v);
    const Problems kind = fewest(shapes, dtype, problems);
    const std::int64_t rows_of_key = p.seqlen_q * (p.heads_q / std::max<std::int64_t>(p.heads_k, 1));
    const Shape* chosen = nullptr;
    for (const Shape& shape : shapes) {
        const Instance& tile = shape.facts;
        if (tile.dtype != dtype || tile.head_dim < d || shape.problems != kind) continue;
        if (tile.min_arch > device.arch || shape.lanes > device.warp_size || !fits(tile, shape.pays.resident, device))
            continue;
        if (rows_of_key > shape.pays.rows) continue;
        if (chosen && chosen->facts.head_dim < tile.head_dim) break;
        chosen = &shape;
        const std::int64_t rows = p.sequences.cu_seqlens_q ? p.sequences.total_q : p.seqlen_q * p.batch;
        const auto blocks = static_cast<float>(rows * p.heads_q) / static_cast<float>(tile.br);
        if (p.batch_invariant || blocks >= shape.pays.blocks_per_sm * static_cast<float>(device.sm_count)) break;
    }
    if (!chosen) throw std::runtime_error("flash_wmma: no tile of this kernel fits the device");
    return *chosen;
}

}  // namespace flash_wmma
