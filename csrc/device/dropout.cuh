// Dropout on the device: one weight at a time, and what backward takes of weights (dropout.h). dropout_tile.cuh has a
// warp's accumulators.
#pragma once

#include <launch.h>

#include "dropout.h"

namespace flash_wmma {

/// Backward keeps P of dropped weights, with its sign turned: this is what dV takes of it.
struct KeptPart {
    __device__ __forceinline__ float operator()(float x) const { return x < 0.f ? 0.f : x; }
};

/// Whether one weight is kept. A call, so that it takes its registers only where there is dropout.
__device__ __noinline__ inline bool keeps_weight(const Dropout& dropout, DropoutMask mask, int query, int key) {
    return keeps(dropout, mask.number(static_cast<int>(dropout.origin.query) + query,
                                      static_cast<int>(dropout.origin.key) + key));
}

}  // namespace flash_wmma
