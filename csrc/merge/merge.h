// The contract between the op merge_parts (csrc/torch/ops_merge.cpp) and its kernel: no torch, no CUDA.
#pragma once

#include <cstdint>

#include "attention.h"

namespace flash_wmma {

/// Rows of lse: element (b, h, i) is data[b * batch + h * head + i * row].
struct RowValues {
    float* data;
    std::int64_t batch, head, row;
};

/// Attention over some keys, merged with attention over others. Row i of the part is row rows[i] of the whole, or row i
/// without such a table. All rows have adjacent elements, and no two rows of the part are one of the whole.
struct MergeParams {
    std::int64_t batch, heads, rows_of_part;
    int head_dim_v;
    DType dtype, part_dtype;  ///< equal, or the whole is of kFloat32

    Rows out;       ///< read and written
    RowValues lse;  ///< read and written
    Rows part_out;
    RowValues part_lse;
    const std::int64_t* rows;
};

/// Asynchronously. Throws std::runtime_error if the launch fails.
void merge_rows(const MergeParams& params, Stream stream);

}  // namespace flash_wmma
