// The contract between the op append_kv (csrc/torch/ops_append.cpp) and its kernel: no torch, no CUDA.
#pragma once

#include <cstdint>

#include "attention.h"

namespace flash_wmma {

/// Tokens of all sequences: `count` of them, `per_sequence` of each, or packed if there is cu_seqlens (B + 1). Token i
/// of packed ones is row i of the tensors.
struct Tokens {
    std::int64_t count;
    std::int64_t per_sequence;
    const std::int32_t* cu_seqlens;
};

/// Rotary embedding (https://arxiv.org/abs/2104.09864): elements a and b of a pair become a cos - b sin and
/// a sin + b cos. Row r of the tables, of `rows`, is the place r; places are clamped to the rows. The pairs are
/// elements 2 i and 2 i + 1 if `interleaved`, else i and i + half; elements from 2 * half on stay as they are. half is
/// 0 if nothing is rotated.
struct Rotary {
    const void *cos, *sin;  ///< of the tensors' dtype
    std::int64_t cos_row, sin_row, rows;
    int half;
    bool interleaved;
    bool queries_advance;        ///< query i of a sequence is i places behind its first; else all are at the first
    const std::int32_t* places;  ///< (B): of each sequence's first query and key
};

/// New keys and values behind those that a cache holds, and the rotated queries. All rows have adjacent elements.
struct AppendParams {
    DType dtype;
    std::int32_t batch, heads_q, heads_k;
    int head_dim, head_dim_v;

    Tokens queries;     ///< none unless they are rotated
    Rows q, rotated_q;  ///< head_dim columns
    Tokens keys;
    Rows k, v;
    Rows k_cache, v_cache;  ///< `batch` is the stride of pages

    /// Key i of sequence b is written to row cache_seqlens[b] + i of the sequence. Row r of a sequence is row
    /// r % page_size of page page_table[b * table_columns + r / page_size]; without a table (table_columns below 0), of
    /// page b. What lies beyond the table or has another page than 0 to num_pages - 1 is not written.
    const std::int32_t *cache_seqlens, *page_table;
    std::int64_t table_columns, num_pages, page_size;

    Rotary rotary;          ///< of q and k
    std::int32_t* seqlens;  ///< (B), written: cache_seqlens and the new keys together, at most 2^31 - 1
};

/// Asynchronously. batch is positive. Throws std::runtime_error if the launch fails.
void append_rows(const AppendParams& params, Stream stream);

namespace cpu {
/// The same of tensors in the CPU's memory, done when it returns.
void append_rows(const AppendParams& params);
}  // namespace cpu

}  // namespace flash_wmma
