// The kinds of problems that the instances of kernel.cuh are for. An instance for fewer keeps less in registers.
#pragma once

#include "shape_table.h"

namespace flash_wmma::mma {

enum Problems : int {
    kDense,   ///< a block's bounds are known to be the same in every thread
    kPacked,  ///< also packed sequences
    kAny,     ///< also ScoreMods and converted inputs
};

/// The least kind that covers p.
inline Problems problems_of(const ForwardParams& p, bool converted) {
    if (converted || p.bias.data || p.alibi_slopes || p.softcap != 0.f) return kAny;
    return is_general(p) ? kPacked : kDense;
}

}  // namespace flash_wmma::mma
