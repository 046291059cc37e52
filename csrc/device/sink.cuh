// Attention sinks: a key of each query head that has a logit and no value. It takes its share of the softmax and adds
// nothing to O.
//
// A sink joins a row's softmax after all keys, so that no loop knows of it. Parts of a split over the keys do not take
// it: their merge does, once.
#pragma once

#include <ptx.cuh>

#include "attention.h"
#include "device/constants.cuh"

namespace flash_wmma {

/// Takes the head's sink, if there are any, into a row's maximum m (log2 units) and sum l over all its keys. Returns
/// the factor by which the row of O comes to the new m; 0 for a row that saw no key. -inf changes nothing, +inf and NaN
/// make l NaN.
__device__ __forceinline__ float take_sink(const ForwardParams& p, int head, float& m, float& l) {
    if (!p.sinks) return 1.f;
    const float sink = p.sinks[head] * kLog2e, top = fmaxf(m, sink);
    const float base = top == -INFINITY ? 0.f : top, rescale = ptx::ex2(m - base);
    l = fmaf(l, rescale, ptx::ex2(sink - base));
    m = top;
    return rescale;
}

}  // namespace flash_wmma
