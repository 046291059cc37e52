// Functions for the kernels' tables of tile shapes. A Shape is any struct whose member `facts` is its Instance.
#pragma once

#include <initializer_list>
#include <vector>

#include "registry.h"

namespace flash_wmma {

/// The parts of a table as one.
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

/// Whether p has packed sequences or ScoreMods, which plain instances do not handle.
inline bool is_general(const ForwardParams& p) {
    const Sequences& s = p.sequences;
    return p.bias.data || p.alibi_slopes || p.softcap != 0.f || s.cu_seqlens_q || s.cu_seqlens_k || s.seqused_k;
}

}  // namespace flash_wmma
