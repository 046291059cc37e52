// What the kernels' tables of tile shapes have in common, whatever else a table says of a shape: any struct whose
// member `facts` is its Instance.
#pragma once

#include <initializer_list>
#include <vector>

#include "registry.h"

namespace flash_wmma {

/// The parts of a table, one behind the other.
template <class Shape>
std::vector<Shape> join(std::initializer_list<std::vector<Shape>> parts) {
    std::vector<Shape> all;
    for (const auto& part : parts) all.insert(all.end(), part.begin(), part.end());
    return all;
}

/// The instances of `shapes`, in the same order.
template <class Shape>
std::vector<Instance> instances_of(const std::vector<Shape>& shapes) {
    std::vector<Instance> instances;
    for (const Shape& shape : shapes) instances.push_back(shape.facts);
    return instances;
}

/// Packed sequences and ScoreMods, which plain instances do without.
inline bool is_general(const ForwardParams& p) {
    const Sequences& s = p.sequences;
    return p.bias.data || p.alibi_slopes || p.softcap != 0.f || s.cu_seqlens_q || s.cu_seqlens_k || s.seqused_k;
}

}  // namespace flash_wmma
