// The contract between the reductions' ops (csrc/torch/ops_reductions.cpp) and their kernels: no torch, no CUDA.
#pragma once

#include <cstdint>

#include "attention.h"
#include "registry.h"

namespace flash_wmma::reductions {

enum class Type : std::int32_t { kFloat32, kFloat16, kBFloat16, kInt32 };
enum class Reduction : std::int32_t { kMax, kSum };

/// Rows of numbers: element (i, j) is data[i * stride + j]. A whole array is one row.
struct Array {
    const void* data;
    Type type;
    std::int64_t rows, columns, stride;
};

/// Bytes of workspace that reduce_rows needs.
std::int64_t workspace_bytes(const Array& x, const DeviceFacts& device);

/// out[i] = the maximum or the sum of row i, asynchronously. x has at least one row and one column. Maxima have x's
/// type and are NaN if the row holds a NaN. Sums of int32 are int64; those of half and bf16 are summed in fp32 and
/// rounded once. Results are bitwise the same from run to run on a device. Throws std::runtime_error if a launch fails.
void reduce_rows(Reduction reduction, const Array& x, void* out, void* workspace, const DeviceFacts& device,
                 Stream stream);

/// out (rows, columns), contiguous, of x's type, which is not int32: exp(x - maximum) / sum along each row; NaN in a
/// row that holds NaN or +inf, or nothing but -inf. Throws std::runtime_error if the launch fails.
void softmax_rows(const Array& x, void* out, const DeviceFacts& device, Stream stream);

}  // namespace flash_wmma::reductions
