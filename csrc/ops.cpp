// The torch ops of flash_wmma: schemas, argument checks, params, dispatch. Built on torch's stable ABI, so that one
// binary serves every torch from 2.10 on, with or without CUDA. The Python functions check the same arguments first,
// with better words; these checks are the last line of defence.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))

#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "attention.h"
#include "emulation.h"
#include "registry.h"

// From torch's C shim; absent from a torch without CUDA, hence weak.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_wmma {
namespace {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

std::string shape_of(const Tensor& t) {
    std::string text = "(";
    for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.size(i));
    return text + ")";
}

DType dtype_of(const Tensor& t, const char* name) {
    switch (t.scalar_type()) {
        case ScalarType::Float: return DType::kFloat32;
        case ScalarType::Half: return DType::kFloat16;
        case ScalarType::BFloat16: return DType::kBFloat16;
        default: invalid(std::string(name) + ".dtype: allowed: float32, float16, bfloat16");
    }
}

Rows rows_of(const Tensor& t) { return {t.data_ptr(), t.stride(0), t.stride(1), t.stride(2)}; }

/// A tensor whose rows a kernel can read as they stand (attention.h): contiguous, 16-byte aligned, a multiple of 8 long.
bool kernel_readable(const Tensor& t) {
    const int64_t vector = 16 / static_cast<int64_t>(t.element_size());
    return t.stride(3) == 1 && t.size(3) % 8 == 0 && reinterpret_cast<uintptr_t>(t.data_ptr()) % 16 == 0 &&
           t.stride(0) % vector == 0 && t.stride(1) % vector == 0 && t.stride(2) % vector == 0;
}

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// The memory of a tensor, for the emulator. The tensor has elements.
emulator::Buffer buffer_of(const char* name, const Tensor& t, bool writable) {
    int64_t elements = 1;
    for (int64_t i = 0; i < t.dim(); ++i) elements += (t.size(i) - 1) * t.stride(i);
    return {name, t.data_ptr(), static_cast<std::size_t>(elements) * t.element_size(), writable};
}

Tensor empty(std::initializer_list<int64_t> sizes, ScalarType dtype, const Tensor& like) {
    return torch::stable::empty(sizes, dtype, std::nullopt, like.device());
}

/// `t`, or a copy of it that a kernel can read, its rows padded with zeros.
Tensor kernel_readable_copy(const Tensor& t) {
    if (kernel_readable(t)) return t;
    Tensor copy = torch::stable::new_zeros(t, {t.size(0), t.size(1), t.size(2), round_up(t.size(3), 8)});
    Tensor head = torch::stable::narrow(copy, 3, 0, t.size(3));
    torch::stable::copy_(head, t);
    return copy;
}

void check_qkv(const Tensor& q, const Tensor& k, const Tensor& v) {
    const std::array<std::pair<const char*, const Tensor*>, 3> all{{{"q", &q}, {"k", &k}, {"v", &v}}};
    for (const auto& [name, t] : all) {
        if (t->dim() != 4) invalid(std::string(name) + ": got shape " + shape_of(*t) + ", allowed: (B, H, N, d)");
        if (t->size(3) > kMaxSeqlen) invalid(std::string(name) + ": head dim is too large");
        if (t->scalar_type() != q.scalar_type()) invalid(std::string(name) + ".dtype differs from q's");
        if (t->device() != q.device()) invalid(std::string(name) + ".device differs from q's");
    }
    if (k.size(0) != q.size(0) || v.size(0) != q.size(0)) invalid("k, v: batch differs from q's");
    if (k.size(1) != v.size(1) || k.size(2) != v.size(2)) invalid("v: heads and length must be k's, " + shape_of(k));
    if (k.size(3) != q.size(3)) invalid("k: head dim differs from q's");
    if (k.size(1) == 0 ? q.size(1) != 0 : q.size(1) % k.size(1) != 0)
        invalid("q: number of heads must be a multiple of k's");
    if (std::max(q.size(2), k.size(2)) > kMaxSeqlen) invalid("q, k: at most 2^30 rows a sequence");
}

/// Arguments that the schema already carries and no kernel implements yet, refused by name.
void check_not_yet(const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                   const OptionalTensor& rng_state, double softcap, double dropout_p, int64_t num_splits) {
    const char* name = attn_bias                       ? "attn_bias"
                       : alibi_slopes                  ? "alibi_slopes"
                       : sinks                         ? "sinks"
                       : (rng_state || dropout_p != 0) ? "dropout_p"
                       : softcap != 0                  ? "softcap"
                       : num_splits > 1                ? "num_splits"
                                                       : nullptr;
    if (name) invalid(std::string(name) + ": not yet built");
}

std::tuple<Tensor, Tensor> forward(const Tensor& q, const Tensor& k, const Tensor& v, const OptionalTensor& attn_bias,
                                   const OptionalTensor& alibi_slopes, const OptionalTensor& sinks,
                                   const OptionalTensor& rng_state, std::optional<double> scale, int64_t window_left,
                                   int64_t window_right, bool bottom_right, double softcap, double dropout_p,
                                   int64_t num_splits, bool batch_invariant, std::string kernel_name) {
    check_qkv(q, k, v);
    check_not_yet(attn_bias, alibi_slopes, sinks, rng_state, softcap, dropout_p, num_splits);

    const bool cuda = q.is_cuda();
    if (!cuda && !q.is_cpu()) invalid("q.device: allowed are cpu and cuda");
    DeviceFacts device;
    if (cuda) {
        const DeviceRuntime* runtime = registry::device_runtime();
        if (!runtime)
            throw std::runtime_error(
                "flash_wmma was built without CUDA kernels: install nvcc and rebuild it (README, Installation)");
        device = runtime->facts(q.get_device_index());
    }
    // A CUDA kernel by name on CPU tensors runs in the emulator
    std::optional<Emulation> emulation;
    if (!cuda && kernel_name != "auto" && !registry::is_cpu_kernel(kernel_name)) {
        emulation.emplace(kernel_name);
        device = emulation->device();
    }

    ForwardParams p{};
    p.dtype = p.out_dtype = dtype_of(q, "q");
    p.batch = q.size(0);
    p.heads_q = q.size(1);
    p.heads_k = k.size(1);
    p.seqlen_q = q.size(2);
    p.seqlen_k = k.size(2);
    p.head_dim = static_cast<int32_t>(q.size(3));
    p.head_dim_v = static_cast<int32_t>(v.size(3));
    p.scale = static_cast<float>(scale.value_or(1.0 / std::sqrt(static_cast<double>(std::max(p.head_dim, 1)))));
    const auto bound = [](int64_t keys) { return keys < 0 ? kUnbounded : std::min(keys, kUnbounded); };
    p.band = {bound(window_left), bound(window_right), bottom_right};
    p.partials.num_splits = 1;
    p.batch_invariant = batch_invariant;
    const KernelInfo& kernel =
        registry::select(kernel_name, p, device, emulation ? emulation->kernels() : registry::kernels());

    Tensor lse = empty({p.batch, p.heads_q, p.seqlen_q}, ScalarType::Float, q);
    const int64_t padded_v = round_up(p.head_dim_v, 8);
    Tensor out = empty({p.batch, p.heads_q, p.seqlen_q, padded_v}, q.scalar_type(), q);
    if (lse.numel() == 0 || p.seqlen_k == 0 || padded_v == 0) {
        torch::stable::zero_(out);
        torch::stable::fill_(lse, -INFINITY);
    } else {
        const Tensor readable_q = kernel_readable_copy(q), readable_k = kernel_readable_copy(k),
                     readable_v = kernel_readable_copy(v);
        p.head_dim = static_cast<int32_t>(readable_q.size(3));
        p.head_dim_v = static_cast<int32_t>(padded_v);
        p.q = rows_of(readable_q);
        p.k = rows_of(readable_k);
        p.v = rows_of(readable_v);
        p.o = rows_of(out);
        p.lse = static_cast<float*>(lse.data_ptr());
        std::optional<Tensor> workspace;
        if (const int64_t bytes = kernel.workspace_bytes(p, device)) {
            workspace = empty({bytes}, ScalarType::Byte, q);
            p.workspace = workspace->data_ptr();
        }
        if (emulation) {
            std::vector<emulator::Buffer> buffers{buffer_of("q", readable_q, false), buffer_of("k", readable_k, false),
                                                  buffer_of("v", readable_v, false), buffer_of("o", out, true),
                                                  buffer_of("lse", lse, true)};
            if (workspace) buffers.push_back(buffer_of("workspace", *workspace, true));
            emulation->run(kernel, p, buffers);
        } else if (cuda) {
            const torch::stable::accelerator::DeviceGuard guard(q.get_device_index());
            void* stream = nullptr;
            STD_TORCH_CHECK(aoti_torch_get_current_cuda_stream &&
                                aoti_torch_get_current_cuda_stream(q.get_device_index(), &stream) == 0,
                            "no current CUDA stream");
            kernel.launch(p, device, stream);
        } else {
            kernel.launch(p, device, nullptr);
        }
    }
    if (padded_v != v.size(3)) out = torch::stable::contiguous(torch::stable::narrow(out, 3, 0, v.size(3)));
    return {out, lse};
}

[[noreturn]] void not_yet(const char* op) {
    throw std::runtime_error(std::string("flash_wmma::") + op + ": not yet built");
}

std::tuple<Tensor, Tensor> forward_varlen(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                          const OptionalTensor&, const OptionalTensor&, int64_t, int64_t,
                                          const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                          const OptionalTensor&, std::optional<double>, int64_t, int64_t, bool, double,
                                          double, int64_t, bool, std::string) {
    not_yet("forward_varlen");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward(const Tensor&, const OptionalTensor&, const Tensor&, const Tensor&,
                                                    const Tensor&, const Tensor&, const Tensor&, const OptionalTensor&,
                                                    const OptionalTensor&, const OptionalTensor&, const OptionalTensor&,
                                                    std::optional<double>, int64_t, int64_t, bool, double, double, bool,
                                                    std::string) {
    not_yet("backward");
}

std::tuple<Tensor, Tensor, Tensor, Tensor> backward_varlen(const Tensor&, const OptionalTensor&, const Tensor&,
                                                           const Tensor&, const Tensor&, const Tensor&, const Tensor&,
                                                           const Tensor&, const Tensor&, const OptionalTensor&, int64_t,
                                                           int64_t, const OptionalTensor&, const OptionalTensor&,
                                                           const OptionalTensor&, const OptionalTensor&,
                                                           std::optional<double>, int64_t, int64_t, bool, double,
                                                           double, bool, std::string) {
    not_yet("backward_varlen");
}

}  // namespace
}  // namespace flash_wmma

// window_left / window_right: keys a query sees to the left / right of its own position; negative: unbounded. Causal is
// (-1, 0). bottom_right aligns the band to the last key instead of the first. scale: default 1/sqrt(d).
// kernel_name and not kernel: torch's Inductor hands an op's keywords on to a function with a parameter of that name.
STABLE_TORCH_LIBRARY(flash_wmma, m) {
    m.def(
        "forward(Tensor q, Tensor k, Tensor v, Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, "
        "Tensor? rng_state=None, *, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, "
        "bool bottom_right=False, float softcap=0., float dropout_p=0., int num_splits=1, bool batch_invariant=False, "
        "str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
    m.def(
        "forward_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, "
        "Tensor? page_table, SymInt max_seqlen_q, SymInt max_seqlen_k, Tensor? attn_bias=None, "
        "Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? rng_state=None, *, float? scale=None, "
        "SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, float softcap=0., float dropout_p=0., "
        "int num_splits=1, bool batch_invariant=False, str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
    m.def(
        "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? rng_state=None, *, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, float softcap=0., "
        "float dropout_p=0., bool deterministic=False, str kernel_name=\"auto\") "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");
    m.def(
        "backward_varlen(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? rng_state=None, *, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, float softcap=0., "
        "float dropout_p=0., bool deterministic=False, str kernel_name=\"auto\") "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");
}

#define FLASH_WMMA_IMPLEMENT(m)                                         \
    (m).impl("forward", TORCH_BOX(&flash_wmma::forward));               \
    (m).impl("forward_varlen", TORCH_BOX(&flash_wmma::forward_varlen)); \
    (m).impl("backward", TORCH_BOX(&flash_wmma::backward));             \
    (m).impl("backward_varlen", TORCH_BOX(&flash_wmma::backward_varlen))

STABLE_TORCH_LIBRARY_IMPL(flash_wmma, CPU, m) { FLASH_WMMA_IMPLEMENT(m); }
STABLE_TORCH_LIBRARY_IMPL(flash_wmma, CUDA, m) { FLASH_WMMA_IMPLEMENT(m); }
