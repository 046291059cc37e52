// Functions for the kernels' tables of tile shapes. A Shape is any struct whose member `facts` is its Instance.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <type_traits>
#include <utility>
#include <vector>

#include "problems.h"
#include "registry.h"

namespace flash_wmma {

/// shape_of(i) of each row of a constant table, i a std::integral_constant: the row is a constant, so that it can name
/// an instance.
template <const auto& kRows, class ShapeOf>
auto of_rows(ShapeOf shape_of) {
    return [&]<std::size_t... kIndex>(std::index_sequence<kIndex...>) {
        return std::vector{shape_of(std::integral_constant<std::size_t, kIndex>())...};
    }(std::make_index_sequence<std::size(kRows)>());
}

/// The parts of a table as one.
template <class Shape>
std::vector<Shape> join(std::initializer_list<std::vector<Shape>> parts) {
    std::vector<Shape> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
}

/// These facts with the instances of `shapes` and, unless the facts say it, the largest head dim of any.
template <class Shape>
KernelFacts with_instances(KernelFacts facts, const std::vector<Shape>& shapes) {
    int largest = 0;
    for (const Shape& shape : shapes) {
        facts.instances.push_back(shape.facts);
        largest = std::max(largest, shape.facts.head_dim);
    }
    if (facts.max_head_dim == 0) facts.max_head_dim = largest;
    return facts;
}

/// Whether some shape's products are of that type. Other inputs have to be converted.
template <class Shape>
bool reads(const std::vector<Shape>& shapes, DType dtype) {
    for (const Shape& shape : shapes)
        if (shape.facts.dtype == dtype) return true;
    return false;
}

/// How many blocks with so many bytes of shared memory an SM holds. From Ampere on a block takes 1 KiB more, and an SM
/// has as much more than a block may opt in to.
inline int blocks_held(int smem_bytes, const DeviceFacts& device) {
    const int reserved = device.arch >= 80 ? 1024 : 0;
    return (device.smem_optin + reserved) / std::max(smem_bytes + reserved, 1);
}

/// Whether an SM's shared memory holds `resident` blocks of the instance.
inline bool fits(const Instance& tile, int resident, const DeviceFacts& device) {
    return blocks_held(tile.smem_bytes, device) >= resident;
}

}  // namespace flash_wmma
