// V's exponents (attention.h, Exponents) on their way into O, for kernels that read converted inputs.
#pragma once

#include <cmath>

namespace flash_wmma {

/// The unit 2^exponent of O, as it follows V's exponents from tile to tile. It never falls far below the largest met,
/// so that rescaling O cannot overflow. A tile far below loses only what is negligible beside the largest.
struct ValueUnit {
    float exponent, largest = -INFINITY;  // -inf: no tile met yet, O is 0

    __device__ explicit ValueUnit(bool converted) : exponent(converted ? -INFINITY : 0.f) {}

    /// The step to a tile with V's exponent `e` (+inf: zeros, which need no step): P is to be multiplied by 2^weight,
    /// O by 2^rescale first.
    struct Step {
        float weight, rescale;
    };
    __device__ Step step(float e) {
        constexpr float kSlack = 4.f, kRange = 96.f, kLeast = -20.f;
        if (e == INFINITY) return {0.f, 0.f};
        if (e <= exponent && e >= exponent - kSlack) return {e - exponent, 0.f};
        const float before = exponent;
        exponent = fmaxf(e, largest - kRange);
        largest = fmaxf(largest, exponent);
        return {fmaxf(e - exponent, kLeast), before - exponent};
    }
};

}  // namespace flash_wmma
