// The ops; the schemas in ops.cpp say what their arguments are.
#pragma once

#include <tuple>

#include "torch/arguments.h"

namespace flash_wmma {

std::tuple<Tensor, Tensor> forward(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                   std::optional<double> scale, int64_t window_left, int64_t window_right,
                                   bool bottom_right, bool out_bnhd, const OptionalTensor& attn_bias,
                                   const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                                   const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p,
                                   const OptionalTensor& dropout_origin, int64_t num_splits, bool batch_invariant,
                                   const std::string& kernel_name);

/// lse.
Tensor forward_into(const Tensor& out, const Tensor& q, const Tensor& k, const Tensor& v, std::optional<double> scale,
                    int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
                    const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                    const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p,
                    const OptionalTensor& dropout_origin, bool batch_invariant, const std::string& kernel_name);
/// Whether the kernel merges; if not, nothing was done.
bool forward_merged(const Tensor& out, const Tensor& lse, const Tensor& q, const Tensor& k, const Tensor& v,
                    bool merges, std::optional<double> scale, int64_t window_left, int64_t window_right,
                    bool bottom_right, const std::string& kernel_name);
/// out, lse, row_max, entropy.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_with_statistics(const Tensor& q_tensor, const Tensor& k_tensor,
                                                                   const Tensor& v_tensor, const std::string& wanted,
                                                                   std::optional<double> scale, int64_t window_left,
                                                                   int64_t window_right, bool bottom_right,
                                                                   const OptionalTensor& sinks, bool batch_invariant,
                                                                   const std::string& kernel_name);

/// Whether forward_with_tangents takes these.
bool takes_tangents(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor, std::optional<double> scale,
                    int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& sinks,
                    bool batch_invariant, const std::string& kernel_name);

/// out, lse, and their tangents.
std::tuple<Tensor, Tensor, Tensor, Tensor> forward_with_tangents(
    const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor, const OptionalTensor& q_tangent,
    const OptionalTensor& k_tangent, const OptionalTensor& v_tangent, std::optional<double> scale, int64_t window_left,
    int64_t window_right, bool bottom_right, bool out_bnhd, const OptionalTensor& sinks, bool batch_invariant,
    const std::string& kernel_name);

std::tuple<Tensor, Tensor> forward_varlen(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                          const OptionalTensor& seqused_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                          std::optional<double> scale, int64_t window_left, int64_t window_right,
                                          bool bottom_right, const OptionalTensor& attn_bias,
                                          const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges,
                                          double softcap, const OptionalTensor& sinks, const OptionalTensor& rng_state,
                                          double dropout_p, const OptionalTensor& dropout_origin, int64_t num_splits,
                                          bool batch_invariant, const std::string& kernel_name);

std::tuple<Tensor, Tensor> forward_cached(const Tensor& q_tensor, const Tensor& k_cache, const Tensor& v_cache,
                                          const Tensor& cache_seqlens, const OptionalTensor& page_table,
                                          const OptionalTensor& cache_leftpad, const OptionalTensor& cu_seqlens_q,
                                          int64_t max_seqlen_q, int64_t num_splits, std::optional<double> scale,
                                          int64_t window_left, int64_t window_right, bool bottom_right, bool out_bnhd,
                                          const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes,
                                          double softcap, const OptionalTensor& sinks, bool batch_invariant,
                                          const std::string& kernel_name);

/// q rotated, the new lengths. On CUDA tensors.
std::tuple<Tensor, Tensor> append_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_tensor,
                                     const Tensor& v_tensor, const Tensor& cache_seqlens,
                                     const OptionalTensor& page_table, const OptionalTensor& cu_seqlens_k,
                                     const OptionalTensor& q_tensor, const OptionalTensor& cu_seqlens_q,
                                     const OptionalTensor& rotary_cos, const OptionalTensor& rotary_sin,
                                     const OptionalTensor& rotary_seqlens, bool queries_advance, bool interleaved);

/// On CUDA tensors.
void merge_parts(const Tensor& out_tensor, const Tensor& lse_tensor, const Tensor& part_out_tensor,
                 const Tensor& part_lse_tensor, const OptionalTensor& rows_tensor);

/// dq, dk, dv, dbias.
using Gradients = std::tuple<Tensor, Tensor, Tensor, Tensor>;

Gradients backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q_tensor, const Tensor& k_tensor,
                   const Tensor& v_tensor, const Tensor& out, const Tensor& lse, std::optional<double> scale,
                   int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
                   const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                   const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p,
                   const OptionalTensor& dropout_origin, bool bias_grad, bool deterministic,
                   const std::string& kernel_name, const std::string& forward_kernel);

Gradients backward_varlen(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q_tensor,
                          const Tensor& k_tensor, const Tensor& v_tensor, const Tensor& out, const Tensor& lse,
                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                          int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale, int64_t window_left,
                          int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
                          const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                          const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p,
                          const OptionalTensor& dropout_origin, bool bias_grad, bool deterministic,
                          const std::string& kernel_name, const std::string& forward_kernel);

// Several calls with the same queries, whose dq is one sum (SharedQueries).

/// What the calls have in common; empty, if the kernel cannot share, or is faster without.
Tensor backward_begin(const Tensor& dout_tensor, const OptionalTensor& dlse_tensor, const Tensor& q_tensor,
                      const Tensor& k_tensor, const Tensor& v_tensor, const Tensor& out_tensor,
                      const Tensor& lse_tensor, std::optional<double> scale, int64_t window_left, int64_t window_right,
                      bool bottom_right, const std::string& kernel_name, const std::string& forward_kernel);
/// dk, dv of some keys. The queries are those of backward_begin, of which there were `rows`, from `first` on.
std::tuple<Tensor, Tensor> backward_add(const Tensor& memory, int64_t first, int64_t rows, const Tensor& dout_tensor,
                                        const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                        std::optional<double> scale, int64_t window_left, int64_t window_right,
                                        bool bottom_right, const std::string& kernel_name,
                                        const std::string& forward_kernel);
/// dq.
Tensor backward_end(const Tensor& memory, const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                    std::optional<double> scale, int64_t window_left, int64_t window_right, bool bottom_right,
                    const std::string& kernel_name, const std::string& forward_kernel);

/// dq, dk, dv, dbias, dslopes.
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_with_statistics(
    const Tensor& dout, const OptionalTensor& dlse, const Tensor& q_tensor, const Tensor& k_tensor,
    const Tensor& v_tensor, const Tensor& out, const Tensor& lse, const OptionalTensor& dentropy,
    const OptionalTensor& dcolumn_sum, const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seqused_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
    int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
    const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
    const OptionalTensor& rng_state, double dropout_p, const OptionalTensor& dropout_origin, bool bias_grad,
    bool slopes_grad, bool deterministic, const std::string& kernel_name, const std::string& forward_kernel);

/// row_max, entropy, column_sum, row_sum.
std::tuple<Tensor, Tensor, Tensor, Tensor> statistics(
    const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& lse, const std::string& wanted,
    const OptionalTensor& key_weights, const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seqused_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
    int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
    const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
    const std::string& kernel_name, const std::string& forward_kernel);

// Reductions of CUDA tensors.
Tensor array_max(const Tensor& x);
Tensor array_sum(const Tensor& x);
Tensor row_max(const Tensor& x);
Tensor row_sum(const Tensor& x);
Tensor row_softmax(const Tensor& x);

}  // namespace flash_wmma
