// A backward kernel's compiled tile shapes and the choice among them.
#pragma once

#include <algorithm>
#include <stdexcept>
#include <vector>

#include "shape_table.h"

namespace flash_wmma::backward {

struct Problem;

/// What a launch computes (backward/mma/kernel.cuh).
enum class Pass { kFused, kKeys, kQueries };

/// The problems that an instance takes: plain ones; also packed sequences and ScoreMods; all of these, with converted
/// inputs.
enum class Problems { kPlain, kGeneral, kConverted };

/// A tile shape of a pass and its launch.
struct Shape {
    Instance facts;
    Problems problems;
    Pass pass;
    void (*launch)(const Problem&, Stream);
    int resident = 1;  ///< blocks that an SM's shared memory must hold for the shape to pay
};

/// The first shape in the table for this pass, kind of problem and dtype of the products that holds d and d_v and fits
/// the device.
inline const Shape& choose_shape(const std::vector<Shape>& shapes, DType dtype, Pass pass, const ForwardParams& p,
                                 const DeviceFacts& device) {
    const int d = std::max(p.head_dim, p.head_dim_v);
    constexpr int kReserved = 1024;  // bytes that a block takes beyond those it asks for
    const bool converted = p.dtype != dtype, plain = !is_general(p);
    const auto takes = [&](Problems problems) {
        if (converted) return problems == Problems::kConverted;
        return problems == Problems::kGeneral || (plain && problems == Problems::kPlain);
    };
    for (const Shape& shape : shapes) {
        const Instance& tile = shape.facts;
        if (tile.dtype == dtype && tile.head_dim >= d && shape.pass == pass && takes(shape.problems) &&
            tile.min_arch <= device.arch &&
            shape.resident * (tile.smem_bytes + kReserved) <= device.smem_optin + kReserved)
            return shape;
    }
    throw std::runtime_error("flash_wmma: no tile of this kernel fits the device");
}

}  // namespace flash_wmma::backward
