// Products of matrices, in the emulator: the same interface as csrc/device/blas.h. The process that loads this library
// provides the multiplication: torch's matmul.
#pragma once

#include <stdexcept>

#include "device/product.h"

namespace flash_wmma {

using Multiply = void (*)(const Product&);

inline Multiply& multiplier() {
    static Multiply given = nullptr;
    return given;
}

EMULATOR_UNSEEN inline void multiply(const Product& p, Stream) {
    if (!multiplier()) throw std::runtime_error("emulator: nothing was given that multiplies matrices");
    multiplier()(p);
}

}  // namespace flash_wmma

extern "C" __attribute__((visibility("default"), used)) inline void flash_wmma_set_multiply(flash_wmma::Multiply f) {
    flash_wmma::multiplier() = f;
}
