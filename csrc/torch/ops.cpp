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
// bias_grad: dbias is wanted, and has attn_bias's shape and dtype; otherwise dbias is empty.
// forward_kernel: the kernel_name that forward was given; "auto" converts only what forward's kernel converted.
// kernel_name, not kernel: torch's Inductor passes an op's keywords on to a function with a parameter called kernel.
OPS(FLASH_WMMA_NAMESPACE, m) {
    m.def(
        "forward(Tensor q, Tensor k, Tensor v, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, "
        "bool bottom_right=False, bool out_bnhd=False, Tensor? attn_bias=None, Tensor? alibi_slopes=None, "
        "Tensor? key_ranges=None, float softcap=0., Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., "
        "int num_splits=1, bool batch_invariant=False, str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
    m.def(
        "forward_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, "
        "SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale=None, SymInt window_left=-1, "
        "SymInt window_right=-1, bool bottom_right=False, Tensor? attn_bias=None, Tensor? alibi_slopes=None, "
        "Tensor? key_ranges=None, float softcap=0., Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., "
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
    m.def(
        "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? key_ranges=None, float softcap=0., "
        "Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., bool bias_grad=False, "
        "bool deterministic=False, str kernel_name=\"auto\", str forward_kernel=\"auto\") -> (Tensor dq, Tensor dk, "
        "Tensor dv, Tensor dbias)");
    m.def(
        "backward_varlen(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? key_ranges=None, float softcap=0., "
        "Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., bool bias_grad=False, "
        "bool deterministic=False, str kernel_name=\"auto\", str forward_kernel=\"auto\") -> (Tensor dq, Tensor dk, "
        "Tensor dv, Tensor dbias)");
    // Reductions of an array, and along the rows of a matrix; on CPU tensors torch's own (flash_wmma/reductions.py).
    m.def("array_max(Tensor x) -> Tensor");
    m.def("array_sum(Tensor x) -> Tensor");
    m.def("row_max(Tensor x) -> Tensor");
    m.def("row_sum(Tensor x) -> Tensor");
    m.def("row_softmax(Tensor x) -> Tensor");
}

#define FLASH_WMMA_IMPLEMENT(m)                                         \
    (m).impl("forward", TORCH_BOX(&flash_wmma::forward));               \
    (m).impl("forward_varlen", TORCH_BOX(&flash_wmma::forward_varlen)); \
    (m).impl("forward_cached", TORCH_BOX(&flash_wmma::forward_cached)); \
    (m).impl("backward", TORCH_BOX(&flash_wmma::backward));             \
    (m).impl("backward_varlen", TORCH_BOX(&flash_wmma::backward_varlen))

OPS_ON(CPU, FLASH_WMMA_NAMESPACE, m) { FLASH_WMMA_IMPLEMENT(m); }
OPS_ON(CUDA, FLASH_WMMA_NAMESPACE, m) {
    FLASH_WMMA_IMPLEMENT(m);
    m.impl("array_max", TORCH_BOX(&flash_wmma::array_max));
    m.impl("array_sum", TORCH_BOX(&flash_wmma::array_sum));
    m.impl("row_max", TORCH_BOX(&flash_wmma::row_max));
    m.impl("row_sum", TORCH_BOX(&flash_wmma::row_sum));
    m.impl("row_softmax", TORCH_BOX(&flash_wmma::row_softmax));
}
