// The torch ops of flash_wmma: their schemas, and what implements them.
#include "torch/ops.h"

// The ops' namespace, torch.ops.flash_wmma. A build that shall live beside another in one process has its own.
#ifndef FLASH_WMMA_NAMESPACE
#define FLASH_WMMA_NAMESPACE flash_wmma
#endif
// torch's macros, whose first argument must be a name and no macro.
#define OPS(name, m) STABLE_TORCH_LIBRARY(name, m)
#define OPS_ON(device, name, m) STABLE_TORCH_LIBRARY_IMPL(name, device, m)

// window_left / window_right: keys a query sees to the left / right of its own position; negative: unbounded. Causal is
// (-1, 0). bottom_right aligns the band to the last key instead of the first. scale: default 1/sqrt(d). out_bnhd: out
// is (B, H, N, d) in shape and (B, N, H, d) in memory. No argument is keyword-only and the common ones come first: each
// argument that is passed costs a tenth of a microsecond per call, by keyword some tenths.
// dropout_origin: (entry, head, query, key) of the first weight in the whole whose mask the call has part of, int64 on
// the CPU; of queries and keys multiples of 16.
// bias_grad: dbias is wanted, and has attn_bias's shape and dtype; otherwise dbias is empty.
// forward_kernel: the kernel_name that forward was given; "auto" converts only what forward's kernel converted.
// kernel_name, not kernel: torch's Inductor passes an op's keywords on to a function with a parameter called kernel.
OPS(FLASH_WMMA_NAMESPACE, m) {
    m.def(
        "forward(Tensor q, Tensor k, Tensor v, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, "
        "bool bottom_right=False, bool out_bnhd=False, Tensor? attn_bias=None, Tensor? alibi_slopes=None, "
        "Tensor? key_ranges=None, float softcap=0., Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., "
        "Tensor? dropout_origin=None, "
        "int num_splits=1, bool batch_invariant=False, str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
    // forward of a dense problem that writes an out which is there, of any strides. Returns lse.
    m.def(
        "forward_into(Tensor(a!) out, Tensor q, Tensor k, Tensor v, float? scale=None, "
        "SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, Tensor? attn_bias=None, "
        "Tensor? alibi_slopes=None, Tensor? key_ranges=None, float softcap=0., Tensor? sinks=None, "
        "Tensor? rng_state=None, float dropout_p=0., Tensor? dropout_origin=None, bool batch_invariant=False, "
        "str kernel_name=\"auto\") -> Tensor lse");
    // forward of a dense problem that writes an out, of float32, and an lse which are there, of any strides. merges:
    // they hold attention over other keys, and become that over all; out is of q's type or float32. False, and they are
    // as they were: the kernel cannot do that; then forward and merge_parts do it.
    m.def(
        "forward_merged(Tensor(a!) out, Tensor(b!) lse, Tensor q, Tensor k, Tensor v, bool merges, float? scale=None, "
        "SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, str kernel_name=\"auto\") -> bool");
    // forward of a dense problem, with row_max and entropy of `statistics`; `wanted`: some of "max entropy", the other
    // is empty. They come from the kernel of forward if it tells them, else from a pass of their own.
    m.def(
        "forward_with_statistics(Tensor q, Tensor k, Tensor v, str wanted, float? scale=None, SymInt window_left=-1, "
        "SymInt window_right=-1, bool bottom_right=False, Tensor? sinks=None, bool batch_invariant=False, "
        "str kernel_name=\"auto\") -> (Tensor out, Tensor lse, Tensor row_max, Tensor entropy)");
    // forward of a dense problem with its tangents, given those of q, k and v (none: zeros), in one pass; the sinks do
    // not move. takes_tangents: whether the kernel of forward does that. If not, it is made of other ops (_tangent.py).
    m.def(
        "takes_tangents(Tensor q, Tensor k, Tensor v, float? scale=None, SymInt window_left=-1, "
        "SymInt window_right=-1, bool bottom_right=False, Tensor? sinks=None, bool batch_invariant=False, "
        "str kernel_name=\"auto\") -> bool");
    m.def(
        "forward_with_tangents(Tensor q, Tensor k, Tensor v, Tensor? dq, Tensor? dk, Tensor? dv, float? scale=None, "
        "SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, bool out_bnhd=False, "
        "Tensor? sinks=None, bool batch_invariant=False, str kernel_name=\"auto\") -> "
        "(Tensor out, Tensor lse, Tensor dout, Tensor dlse)");
    m.def(
        "forward_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale=None, SymInt window_left=-1, "
        "SymInt window_right=-1, bool bottom_right=False, Tensor? attn_bias=None, Tensor? alibi_slopes=None, "
        "Tensor? key_ranges=None, float softcap=0., Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., "
        "Tensor? dropout_origin=None, "
        "int num_splits=1, bool batch_invariant=False, str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
    // q (B, Hq, Nq, d), or packed with cu_seqlens_q; caches (pages, Hk, page_size, d), of which page_table (B, n) names
    // each sequence's; without one, sequence b has page b. num_splits: about so many parts of the keys; 0: the kernel
    // decides.
    m.def(
        "forward_cached(Tensor q, Tensor k_cache, Tensor v_cache, Tensor cache_seqlens, Tensor? page_table, "
        "Tensor? cache_leftpad, Tensor? cu_seqlens_q, SymInt max_seqlen_q, int num_splits=0, float? scale=None, "
        "SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, bool out_bnhd=False, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, float softcap=0., Tensor? sinks=None, bool "
        "batch_invariant=False, "
        "str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
    // Writes k and v (B, Hk, n, d), or packed (total, Hk, d) with cu_seqlens_k, behind the rows that a cache holds.
    // With rotary_cos and rotary_sin (rows, r / 2) k is rotated by the places from rotary_seqlens on (else
    // cache_seqlens), and q too: by these if queries_advance, else all queries of a sequence by its first place.
    // Returns q rotated, (0) without, and the new lengths.
    m.def(
        "append_kv(Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor k, Tensor v, Tensor cache_seqlens, "
        "Tensor? page_table, Tensor? cu_seqlens_k, Tensor? q=None, Tensor? cu_seqlens_q=None, "
        "Tensor? rotary_cos=None, Tensor? rotary_sin=None, Tensor? rotary_seqlens=None, bool queries_advance=False, "
        "bool interleaved=False) -> (Tensor q, Tensor seqlens)");
    // Attention over a part of the keys, merged in place into that over others: out (B, H, N, d_v) and lse (B, H, N),
    // or packed (N, H, d_v) and (H, N); out in float32 or in the part's dtype. rows: which rows of out the part's are,
    // each at most once, int64.
    m.def("merge_parts(Tensor(a!) out, Tensor(b!) lse, Tensor part_out, Tensor part_lse, Tensor? rows=None) -> ()");
    m.def(
        "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? key_ranges=None, float softcap=0., "
        "Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., Tensor? dropout_origin=None, "
        "bool bias_grad=False, bool deterministic=False, str kernel_name=\"auto\", str forward_kernel=\"auto\") -> "
        "(Tensor dq, Tensor dk, "
        "Tensor dv, Tensor dbias)");
    m.def(
        "backward_varlen(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? key_ranges=None, float softcap=0., "
        "Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., Tensor? dropout_origin=None, "
        "bool bias_grad=False, bool deterministic=False, str kernel_name=\"auto\", str forward_kernel=\"auto\") -> "
        "(Tensor dq, Tensor dk, "
        "Tensor dv, Tensor dbias)");
    // Several calls of backward of a dense problem with the same queries and scale, whose dq is one sum in fp32. begin
    // makes `memory`, empty if the kernel cannot share, or is faster without; k, v and the band are those of one of the
    // calls. add: of queries from `first` on of the `rows` that begin was given, multiples of 64 or the end.
    m.def(
        "backward_begin(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, "
        "str kernel_name=\"auto\", str forward_kernel=\"auto\") -> Tensor memory");
    m.def(
        "backward_add(Tensor(a!) memory, SymInt first, SymInt rows, Tensor dout, Tensor q, Tensor k, Tensor v, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, "
        "str kernel_name=\"auto\", str forward_kernel=\"auto\") -> (Tensor dk, Tensor dv)");
    m.def(
        "backward_end(Tensor memory, Tensor q, Tensor k, Tensor v, float? scale=None, SymInt window_left=-1, "
        "SymInt window_right=-1, bool bottom_right=False, str kernel_name=\"auto\", "
        "str forward_kernel=\"auto\") -> Tensor dq");
    // backward, dense or with cu_seqlens packed, with more: dentropy (as lse) and dcolumn_sum ((B, Hq, Nk), packed
    // (Hq, total_k)), whose parts of delta are in dlse; dslopes, shaped as dcolumn_sum, is to be summed over keys.
    m.def(
        "backward_with_statistics(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? dentropy, Tensor? dcolumn_sum, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? seqused_k, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, "
        "bool bottom_right=False, Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? key_ranges=None, "
        "float softcap=0., Tensor? rng_state=None, float dropout_p=0., Tensor? dropout_origin=None, "
        "bool bias_grad=False, bool slopes_grad=False, "
        "bool deterministic=False, str kernel_name=\"auto\", str forward_kernel=\"auto\") -> (Tensor dq, Tensor dk, "
        "Tensor dv, Tensor dbias, Tensor dslopes)");
    // Of the weights P = exp(x - lse): row_max of the scores x, entropy = -sum_j P ln P, column_sum = sum_i P, and
    // row_sum = sum_j P key_weights_j. `wanted`: some of "max entropy column_sum"; the others are empty, and so is
    // row_sum without key_weights, (B, Hq, Nk) or packed (Hq, total_k), as column_sum. The others are as lse.
    m.def(
        "statistics(Tensor q, Tensor k, Tensor lse, str wanted, Tensor? key_weights, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale=None, "
        "SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, Tensor? attn_bias=None, "
        "Tensor? alibi_slopes=None, Tensor? key_ranges=None, float softcap=0., str kernel_name=\"auto\", "
        "str forward_kernel=\"auto\") -> (Tensor row_max, Tensor entropy, Tensor column_sum, Tensor row_sum)");
    // Reductions of an array, and along the rows of a matrix; on CPU tensors torch's own (flash_wmma/reductions.py), of
    // which merge_parts is made there too (flash_wmma/_merge.py).
    m.def("array_max(Tensor x) -> Tensor");
    m.def("array_sum(Tensor x) -> Tensor");
    m.def("row_max(Tensor x) -> Tensor");
    m.def("row_sum(Tensor x) -> Tensor");
    m.def("row_softmax(Tensor x) -> Tensor");
}

#define FLASH_WMMA_IMPLEMENT(m)                                                             \
    (m).impl("forward", TORCH_BOX(&flash_wmma::forward));                                   \
    (m).impl("forward_into", TORCH_BOX(&flash_wmma::forward_into));                         \
    (m).impl("forward_merged", TORCH_BOX(&flash_wmma::forward_merged));                     \
    (m).impl("forward_with_statistics", TORCH_BOX(&flash_wmma::forward_with_statistics));   \
    (m).impl("takes_tangents", TORCH_BOX(&flash_wmma::takes_tangents));                     \
    (m).impl("forward_with_tangents", TORCH_BOX(&flash_wmma::forward_with_tangents));       \
    (m).impl("forward_varlen", TORCH_BOX(&flash_wmma::forward_varlen));                     \
    (m).impl("forward_cached", TORCH_BOX(&flash_wmma::forward_cached));                     \
    (m).impl("append_kv", TORCH_BOX(&flash_wmma::append_kv));                               \
    (m).impl("backward", TORCH_BOX(&flash_wmma::backward));                                 \
    (m).impl("backward_varlen", TORCH_BOX(&flash_wmma::backward_varlen));                   \
    (m).impl("backward_begin", TORCH_BOX(&flash_wmma::backward_begin));                     \
    (m).impl("backward_add", TORCH_BOX(&flash_wmma::backward_add));                         \
    (m).impl("backward_end", TORCH_BOX(&flash_wmma::backward_end));                         \
    (m).impl("backward_with_statistics", TORCH_BOX(&flash_wmma::backward_with_statistics)); \
    (m).impl("statistics", TORCH_BOX(&flash_wmma::statistics))

OPS_ON(CPU, FLASH_WMMA_NAMESPACE, m) { FLASH_WMMA_IMPLEMENT(m); }
OPS_ON(CUDA, FLASH_WMMA_NAMESPACE, m) {
    FLASH_WMMA_IMPLEMENT(m);
    m.impl("merge_parts", TORCH_BOX(&flash_wmma::merge_parts));
    m.impl("array_max", TORCH_BOX(&flash_wmma::array_max));
    m.impl("array_sum", TORCH_BOX(&flash_wmma::array_sum));
    m.impl("row_max", TORCH_BOX(&flash_wmma::row_max));
    m.impl("row_sum", TORCH_BOX(&flash_wmma::row_sum));
    m.impl("row_softmax", TORCH_BOX(&flash_wmma::row_softmax));
}
