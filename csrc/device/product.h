// What a kernel leaves to a library (blas.h): the product of matrices.
#pragma once

#include <cstdint>

#include "attention.h"

namespace flash_wmma {

/// Matrices of `row`-strided rows with adjacent columns, `batch` elements apart.
struct Matrices {
    void* data;
    DType type;
    std::int64_t row, batch;
};

/// c[i] = a[i] b[i] for i < count: a (m, k), b (k, n), or (n, k) if it is transposed, c (m, n). Sums are fp32.
struct Product {
    Matrices a, b, c;
    bool transposed;
    std::int64_t m, n, k, count;
};

}  // namespace flash_wmma
