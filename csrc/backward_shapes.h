// A backward kernel's compiled tile shapes and the choice among them.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "shape_table.h"

namespace flash_wmma::backward {

struct Problem;

/// What a launch computes (backward/mma/kernel.cuh). kTurns: the same as kFused, and blocks take turns at dQ of a tile,
/// so that the last one can write dq, or the additions have an order (backward/wgmma/turns.cuh).
enum class Pass { kFused, kKeys, kQueries, kTurns };

/// A tile shape of a pass and its launch.
struct Shape {
    Instance facts;
    Problems problems;
    Pass pass;
    void (*launch)(const Problem&, Stream);
    int resident = 1;           ///< blocks that an SM's shared memory must hold for the shape to pay
    bool takes_terms = false;   ///< L and D of the queries as terms of products (device/backward_rows.cuh)
    bool takes_parts = false;   ///< of items (backward/wgmma/parts.cuh)
    int blocks = 1;             ///< that share an item
    bool counts_items = false;  ///< whose dQ has been added (backward/wgmma/finish_beside.cuh)
};

/// What a call asks of an instance that others with the same tile and problems lack.
struct Needs {
    bool parts = false, counts = false;  // Shape::takes_parts, counts_items
};

/// The first shape in the table for this pass, these problems and this dtype of the products that holds d and d_v, fits
/// the device and has what is needed. Instances for converted inputs take no others.
inline const Shape& choose_shape(const std::vector<Shape>& shapes, DType dtype, Pass pass, const BackwardParams& p,
                                 const DeviceFacts& device, const Needs& needs = {}) {
    const int d = std::max(p.forward.head_dim, p.forward.head_dim_v);
    const bool converted = p.forward.dtype != dtype;
    const Problems problems = problems_of(p, converted);
    for (const Shape& shape : shapes) {
        const Instance& tile = shape.facts;
        if (tile.dtype == dtype && tile.head_dim >= d && shape.pass == pass && includes(shape.problems, problems) &&
            includes(shape.problems, Problems::kConverted) == converted && tile.min_arch <= device.arch &&
            fits(tile, shape.resident, device) && (shape.takes_parts || !needs.parts) &&
            (shape.counts_items || !needs.counts))
            return shape;
    }
    throw std::runtime_error("flash_wmma: no tile of this kernel fits the device");
}

/// The pass whose instance stands for the whole backward: the one that computes dK and dV.
inline Pass naming_pass(const BackwardParams& p) { return p.deterministic ? Pass::kKeys : Pass::kFused; }

}  // namespace flash_wmma::backward
