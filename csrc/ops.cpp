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
#include <utility>
#include <vector>

#include "attention.h"
#include "emulation.h"
#include "registry.h"

// From torch's C shim; absent from a torch without CUDA, hence weak.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

namespace flash_wmma {
namespace {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

[[noreturn]] void invalid(const std::string& what) { throw std::invalid_argument(what); }

// ---- Tensors --------------------------------------------------------------------------------------------------------

/// torch's numbers for the types and devices that occur here.
struct Codes {
    std::array<std::pair<int32_t, DType>, 4> dtypes{{{aoti_torch_dtype_float32(), DType::kFloat32},
                                                     {aoti_torch_dtype_float16(), DType::kFloat16},
                                                     {aoti_torch_dtype_bfloat16(), DType::kBFloat16},
                                                     {aoti_torch_dtype_bool(), DType::kBool}}};
    int32_t float32 = aoti_torch_dtype_float32(), int32 = aoti_torch_dtype_int32(), byte = aoti_torch_dtype_uint8();
    int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
};

const Codes& codes() {
    static const Codes all;
    return all;
}

/// An argument and what is asked of it, each question once: every one is a call into torch.
struct Operand {
    const Tensor& tensor;
    const char* name;
    int64_t dim;
    int64_t *sizes, *strides;
    int32_t dtype, device_type, device_index;
    void* data;

    Operand(const Tensor& t, const char* argument) : tensor(t), name(argument) {
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t.get(), &dim));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &sizes));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &strides));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device_index));
        STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(t.get(), &data));
    }

    bool same_device(const Operand& other) const {
        return device_type == other.device_type && device_index == other.device_index;
    }
    std::string shape() const {
        std::string text = "(";
        for (int64_t i = 0; i < dim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
        return text + ")";
    }
    [[noreturn]] void refuse(const std::string& allowed) const {
        invalid(std::string(name) + ": got shape " + shape() + ", allowed: " + allowed);
    }
    DType element_type(const char* allowed) const {
        for (const auto& [code, type] : codes().dtypes)
            if (code == dtype) return type;
        invalid(std::string(name) + ".dtype: allowed: " + allowed);
    }
};

int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

/// The memory of a tensor, for the emulator.
emulator::Buffer buffer_of(const char* name, const Tensor& t, bool writable) {
    int64_t elements = 1;
    for (int64_t i = 0; i < t.dim(); ++i) elements = t.size(i) == 0 ? 0 : elements + (t.size(i) - 1) * t.stride(i);
    return {name, t.data_ptr(), static_cast<std::size_t>(elements) * t.element_size(), writable};
}

/// Uninitialised memory. Not torch::stable::empty: that goes through the dispatcher, boxed, and takes half a microsecond.
template <std::size_t kDim>
Tensor empty(const std::array<int64_t, kDim>& sizes, const std::array<int64_t, kDim>& strides, int32_t dtype,
             const Operand& like) {
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_empty_strided(kDim, sizes.data(), strides.data(), dtype, like.device_type,
                                                           like.device_index, &handle));
    return Tensor(handle);
}

/// The strides of a contiguous tensor, as torch counts them.
template <std::size_t kDim>
std::array<int64_t, kDim> contiguous(const std::array<int64_t, kDim>& sizes) {
    std::array<int64_t, kDim> strides{};
    int64_t stride = 1;
    for (std::size_t i = kDim; i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
    return strides;
}

/// The strides of rows (..., head, row, column), or of (..., row, head) for a tensor of three dimensions.
Rows rows_of(void* data, int64_t dim, const int64_t* strides) {
    return dim == 4 ? Rows{data, strides[0], strides[1], strides[2]} : Rows{data, 0, strides[1], strides[0]};
}

/// Whether a kernel can read the rows as they stand (attention.h): contiguous, 16-byte aligned, a multiple of 8 long.
bool kernel_readable(const Operand& t) {
    const int64_t vector = t.dtype == codes().float32 ? 4 : 8, last = t.dim - 1;
    if (t.strides[last] != 1 || t.sizes[last] % 8 != 0 || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
    for (int64_t i = 0; i < last; ++i)
        if (t.strides[i] % vector != 0) return false;
    return true;
}

/// Rows that a kernel can read: the argument's own or, in `copy`, a copy padded with zeros.
Rows readable_rows(const Operand& t, OptionalTensor& copy) {
    if (kernel_readable(t)) return rows_of(t.data, t.dim, t.strides);
    std::array<int64_t, 4> sizes{};
    std::copy_n(t.sizes, t.dim, sizes.begin());
    sizes[static_cast<std::size_t>(t.dim - 1)] = round_up(t.sizes[t.dim - 1], 8);
    copy = torch::stable::new_zeros(t.tensor, {sizes.data(), static_cast<std::size_t>(t.dim)});
    Tensor head = torch::stable::narrow(*copy, t.dim - 1, 0, t.sizes[t.dim - 1]);
    torch::stable::copy_(head, t.tensor);
    const Operand made(*copy, t.name);
    return rows_of(made.data, made.dim, made.strides);
}

// ---- Arguments ------------------------------------------------------------------------------------------------------

/// What forward and forward_varlen have in common, but for q, k and v.
struct Options {
    const OptionalTensor &attn_bias, &alibi_slopes, &sinks, &rng_state;
    std::optional<double> scale;
    int64_t window_left, window_right;
    bool bottom_right;
    double softcap, dropout_p;
    int64_t num_splits;
    bool batch_invariant;
    const std::string& kernel_name;
};

/// Arguments that the schema already carries and no kernel implements yet, refused by name.
void check_not_yet(const Options& o) {
    const char* name = o.sinks                             ? "sinks"
                       : (o.rng_state || o.dropout_p != 0) ? "dropout_p"
                       : o.num_splits > 1                  ? "num_splits"
                                                           : nullptr;
    if (name) invalid(std::string(name) + ": not yet built");
}

void check_inputs(const Operand& q, const Operand& k, const Operand& v) {
    const bool packed = q.dim == 3;
    for (const Operand* t : {&q, &k, &v}) {
        if (t->dim != q.dim) t->refuse(packed ? "(total, H, d)" : "(B, H, N, d)");
        if (t->sizes[t->dim - 1] > kMaxSeqlen) invalid(std::string(t->name) + ": head dim is too large");
        if (t->dtype != q.dtype) invalid(std::string(t->name) + ".dtype differs from q's");
        if (!t->same_device(q)) invalid(std::string(t->name) + ".device differs from q's");
    }
    if (q.element_type("float32, float16, bfloat16") == DType::kBool)
        invalid("q.dtype: allowed: float32, float16, bfloat16");
    if (q.device_type != codes().cpu && q.device_type != codes().cuda) invalid("q.device: allowed are cpu and cuda");
    const int64_t last = q.dim - 1;
    if (!packed && (k.sizes[0] != q.sizes[0] || v.sizes[0] != q.sizes[0])) invalid("k, v: batch differs from q's");
    for (int64_t i = 0; i < last; ++i)
        if (v.sizes[i] != k.sizes[i]) invalid("v: heads and length must be k's, " + k.shape());
    if (k.sizes[last] != q.sizes[last]) invalid("k: head dim differs from q's");
    if (k.sizes[1] == 0 ? q.sizes[1] != 0 : q.sizes[1] % k.sizes[1] != 0)
        invalid("q: number of heads must be a multiple of k's");
    const int64_t row = packed ? 0 : 2;
    if (std::max(q.sizes[row], k.sizes[row]) > kMaxSeqlen)
        invalid(packed ? "q, k: at most 2^30 rows" : "q, k: at most 2^30 rows a sequence");
}

/// A mask that broadcasts to (B, Hq, Nq, Nk), by strides: nothing is expanded.
Bias bias_of(const Tensor& t, const ForwardParams& p, const Operand& q) {
    const Operand bias(t, "attn_bias");
    const DType type = bias.element_type("bool, float32, q's");
    if (type != DType::kBool && type != DType::kFloat32 && type != p.dtype)
        invalid("attn_bias.dtype: allowed: bool, float32, q's");
    if (!bias.same_device(q)) invalid("attn_bias.device differs from q's");
    const std::array<int64_t, 4> full{p.batch, p.heads_q, p.seqlen_q, p.seqlen_k};
    std::array<int64_t, 4> strides{};
    for (int64_t i = 0; i < bias.dim; ++i) {
        const int64_t at = 4 - bias.dim + i;
        const bool fits = at >= 0 && (bias.sizes[i] == 1 || bias.sizes[i] == full[static_cast<std::size_t>(at)]);
        if (!fits) bias.refuse("what broadcasts to (B, Hq, Nq, Nk)");
        strides[static_cast<std::size_t>(at)] = bias.sizes[i] == 1 ? 0 : bias.strides[i];
    }
    return {bias.data, type, strides[0], strides[1], strides[2], strides[3]};
}

/// Slopes (Hq) or (B, Hq), float32; `kept` holds them where they had to be copied.
void set_alibi(ForwardParams& p, const Tensor& t, const Operand& q, OptionalTensor& kept) {
    kept = torch::stable::contiguous(t);
    const Operand slopes(*kept, "alibi_slopes");
    if (slopes.dtype != codes().float32) invalid("alibi_slopes.dtype: allowed: float32");
    if (!slopes.same_device(q)) invalid("alibi_slopes.device differs from q's");
    const bool batched = slopes.dim == 2;
    if ((slopes.dim != 1 && !batched) || slopes.sizes[slopes.dim - 1] != p.heads_q ||
        (batched && slopes.sizes[0] != p.batch))
        slopes.refuse("(Hq) or (B, Hq)");
    p.alibi_slopes = static_cast<const float*>(slopes.data);
    p.alibi_batch_stride = batched ? p.heads_q : 0;
}

/// int32 (n); `kept` holds them where they had to be copied.
const int32_t* lengths_of(const Tensor& t, const char* name, int64_t n, const Operand& q, OptionalTensor& kept) {
    kept = torch::stable::contiguous(t);
    const Operand lengths(*kept, name);
    if (lengths.dim != 1 || lengths.sizes[0] != n) lengths.refuse("(" + std::to_string(n) + ")");
    if (lengths.dtype != codes().int32) invalid(std::string(name) + ".dtype: allowed: int32");
    if (!lengths.same_device(q)) invalid(std::string(name) + ".device differs from q's");
    return static_cast<const int32_t*>(lengths.data);
}

// ---- Forward --------------------------------------------------------------------------------------------------------

/// Shape and strides of out, whose last dimension is contiguous, and the shape of lse, which is contiguous.
template <std::size_t kDim>
struct Results {
    std::array<int64_t, kDim> out, out_strides;
    std::array<int64_t, kDim - 1> lse, lse_strides;
};

/// Chooses a kernel for p, which lacks what is not said by q, k, v and the sizes of the problem, and runs it.
template <std::size_t kDim>
std::tuple<Tensor, Tensor> run(ForwardParams& p, const Operand& q, const Operand& k, const Operand& v, const Options& o,
                               const Results<kDim>& shapes) {
    const int64_t head_dim = q.sizes[q.dim - 1], head_dim_v = v.sizes[v.dim - 1];
    p.dtype = p.out_dtype = q.element_type("");
    p.heads_q = q.sizes[1];
    p.heads_k = k.sizes[1];
    p.head_dim = static_cast<int32_t>(head_dim);
    p.head_dim_v = static_cast<int32_t>(head_dim_v);
    p.scale = static_cast<float>(o.scale.value_or(1.0 / std::sqrt(static_cast<double>(std::max(p.head_dim, 1)))));
    const auto bound = [](int64_t keys) { return keys < 0 ? kUnbounded : std::min(keys, kUnbounded); };
    p.band = {bound(o.window_left), bound(o.window_right), o.bottom_right};
    OptionalTensor slopes;
    if (o.attn_bias) p.bias = bias_of(*o.attn_bias, p, q);
    if (o.alibi_slopes) set_alibi(p, *o.alibi_slopes, q, slopes);
    p.softcap = static_cast<float>(o.softcap);
    if (!(p.softcap >= 0.f && p.softcap < INFINITY)) invalid("softcap: allowed: 0 (none) or a positive number");
    p.partials.num_splits = 1;
    p.batch_invariant = o.batch_invariant;

    const bool cuda = q.device_type == codes().cuda;
    DeviceFacts device;
    if (cuda) {
        const DeviceRuntime* runtime = registry::device_runtime();
        if (!runtime)
            throw std::runtime_error(
                "flash_wmma was built without CUDA kernels: install nvcc and rebuild it (README, Installation)");
        device = runtime->facts(q.device_index);
    }
    // A CUDA kernel by name on CPU tensors runs in the emulator
    std::optional<Emulation> emulation;
    if (!cuda && o.kernel_name != "auto" && !registry::is_cpu_kernel(o.kernel_name)) {
        emulation.emplace(o.kernel_name, "forward");
        device = emulation->device();
    }
    const KernelInfo& kernel =
        registry::select(o.kernel_name, p, device, emulation ? emulation->kernels() : registry::kernels());

    Tensor lse = empty(shapes.lse, shapes.lse_strides, codes().float32, q);
    // Kernels write whole 16-byte rows: a d_v that is no multiple of 8 takes a detour.
    const int64_t padded_v = round_up(head_dim_v, 8);
    std::array<int64_t, kDim> padded = shapes.out, padded_strides = shapes.out_strides;
    padded.back() = padded_v;
    if (padded_v != head_dim_v)
        for (std::size_t i = 0; i + 1 < kDim; ++i) padded_strides[i] = padded_strides[i] / head_dim_v * padded_v;
    Tensor out = empty(padded, padded_strides, q.dtype, q);
    void *out_data = nullptr, *lse_data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(out.get(), &out_data));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(lse.get(), &lse_data));

    int64_t rows = 1;
    for (const int64_t size : shapes.lse) rows *= size;
    const bool no_keys = p.seqlen_k == 0 || k.sizes[kDim == 4 ? 2 : 0] == 0;
    if (rows == 0 || no_keys || p.batch == 0 || p.seqlen_q == 0 || padded_v == 0) {
        torch::stable::zero_(out);
        torch::stable::fill_(lse, -INFINITY);
    } else {
        OptionalTensor q_copy, k_copy, v_copy, workspace;
        p.head_dim = static_cast<int32_t>(round_up(head_dim, 8));
        p.head_dim_v = static_cast<int32_t>(padded_v);
        p.q = readable_rows(q, q_copy);
        p.k = readable_rows(k, k_copy);
        p.v = readable_rows(v, v_copy);
        p.o = rows_of(out_data, kDim, padded_strides.data());
        p.lse = static_cast<float*>(lse_data);
        p.lse_batch = kDim == 4 ? shapes.lse_strides[0] : 0;
        p.lse_head = shapes.lse_strides[kDim - 3];
        if (const int64_t bytes = kernel.workspace_bytes(p, device)) {
            workspace = empty<1>({bytes}, {1}, codes().byte, q);
            STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(workspace->get(), &p.workspace));
        }
        if (emulation) {
            std::vector<emulator::Buffer> buffers{buffer_of("q", q_copy ? *q_copy : q.tensor, false),
                                                  buffer_of("k", k_copy ? *k_copy : k.tensor, false),
                                                  buffer_of("v", v_copy ? *v_copy : v.tensor, false),
                                                  buffer_of("o", out, true), buffer_of("lse", lse, true)};
            if (workspace) buffers.push_back(buffer_of("workspace", *workspace, true));
            if (o.attn_bias) buffers.push_back(buffer_of("attn_bias", *o.attn_bias, false));
            if (slopes) buffers.push_back(buffer_of("alibi_slopes", *slopes, false));
            const auto add_lengths = [&](const char* name, const int32_t* lengths, int64_t n) {
                if (lengths) buffers.push_back({name, lengths, static_cast<std::size_t>(n) * sizeof *lengths, false});
            };
            add_lengths("cu_seqlens_q", p.sequences.cu_seqlens_q, p.batch + 1);
            add_lengths("cu_seqlens_k", p.sequences.cu_seqlens_k, p.batch + 1);
            add_lengths("seqused_k", p.sequences.seqused_k, p.batch);
            emulation->run(kernel, p, buffers);
        } else if (cuda) {
            const torch::stable::accelerator::DeviceGuard guard(q.device_index);
            void* stream = nullptr;
            STD_TORCH_CHECK(
                aoti_torch_get_current_cuda_stream && aoti_torch_get_current_cuda_stream(q.device_index, &stream) == 0,
                "no current CUDA stream");
            kernel.launch(p, device, stream);
        } else {
            kernel.launch(p, device, nullptr);
        }
    }
    if (padded_v == head_dim_v) return {std::move(out), std::move(lse)};
    Tensor result = empty(shapes.out, shapes.out_strides, q.dtype, q);
    torch::stable::copy_(result, torch::stable::narrow(out, kDim - 1, 0, head_dim_v));
    return {std::move(result), std::move(lse)};
}

std::tuple<Tensor, Tensor> forward(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                   std::optional<double> scale, int64_t window_left, int64_t window_right,
                                   bool bottom_right, bool out_bnhd, const OptionalTensor& attn_bias,
                                   const OptionalTensor& alibi_slopes, double softcap, const OptionalTensor& sinks,
                                   const OptionalTensor& rng_state, double dropout_p, int64_t num_splits,
                                   bool batch_invariant, const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    if (q.dim != 4) q.refuse("(B, H, N, d)");
    check_inputs(q, k, v);
    const Options options{attn_bias,    alibi_slopes, sinks,     rng_state,  scale,           window_left, window_right,
                          bottom_right, softcap,      dropout_p, num_splits, batch_invariant, kernel_name};
    check_not_yet(options);

    ForwardParams p{};
    p.batch = q.sizes[0];
    p.seqlen_q = q.sizes[2];
    p.seqlen_k = k.sizes[2];
    const int64_t heads = q.sizes[1], n = q.sizes[2], dv = v.sizes[3];
    Results<4> shapes{{p.batch, heads, n, dv}, {}, {p.batch, heads, n}, contiguous<3>({p.batch, heads, n})};
    shapes.out_strides = contiguous<4>(out_bnhd ? std::array{p.batch, n, heads, dv} : shapes.out);
    if (out_bnhd) std::swap(shapes.out_strides[1], shapes.out_strides[2]);
    return run(p, q, k, v, options, shapes);
}

std::tuple<Tensor, Tensor> forward_varlen(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                          const OptionalTensor& seqused_k, const OptionalTensor& page_table,
                                          int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
                                          int64_t window_left, int64_t window_right, bool bottom_right,
                                          const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes,
                                          double softcap, const OptionalTensor& sinks, const OptionalTensor& rng_state,
                                          double dropout_p, int64_t num_splits, bool batch_invariant,
                                          const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    if (q.dim != 3) q.refuse("(total, H, d)");
    check_inputs(q, k, v);
    const Options options{attn_bias,    alibi_slopes, sinks,     rng_state,  scale,           window_left, window_right,
                          bottom_right, softcap,      dropout_p, num_splits, batch_invariant, kernel_name};
    check_not_yet(options);
    if (page_table) invalid("page_table: not yet built");
    if (cu_seqlens_q.dim() != 1 || cu_seqlens_q.size(0) < 1) invalid("cu_seqlens_q: allowed: (B + 1)");
    for (const auto& [name, length] : {std::pair{"max_seqlen_q", max_seqlen_q}, {"max_seqlen_k", max_seqlen_k}})
        if (length < 0 || length > kMaxSeqlen) invalid(std::string(name) + ": allowed: 0 to 2^30");

    ForwardParams p{};
    p.batch = cu_seqlens_q.size(0) - 1;
    p.seqlen_q = max_seqlen_q;
    p.seqlen_k = max_seqlen_k;
    OptionalTensor kept_q, kept_k, kept_used;
    p.sequences.cu_seqlens_q = lengths_of(cu_seqlens_q, "cu_seqlens_q", p.batch + 1, q, kept_q);
    p.sequences.cu_seqlens_k = lengths_of(cu_seqlens_k, "cu_seqlens_k", p.batch + 1, q, kept_k);
    if (seqused_k) p.sequences.seqused_k = lengths_of(*seqused_k, "seqused_k", p.batch, q, kept_used);
    p.sequences.total_q = q.sizes[0];
    p.sequences.total_k = k.sizes[0];
    const int64_t heads = q.sizes[1], n = q.sizes[0], dv = v.sizes[2];
    const Results<3> shapes{{n, heads, dv}, contiguous<3>({n, heads, dv}), {heads, n}, contiguous<2>({heads, n})};
    return run(p, q, k, v, options, shapes);
}

[[noreturn]] void not_yet(const char* op) {
    throw std::runtime_error(std::string("flash_wmma::") + op + ": not yet built");
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
// (-1, 0). bottom_right aligns the band to the last key instead of the first. scale: default 1/sqrt(d). out_bnhd: out is
// (B, H, N, d) in shape and (B, N, H, d) in memory. No argument is keyword-only and the common ones come first, since
// each that is passed costs a call a tenth of a microsecond, by keyword some tenths.
// kernel_name and not kernel: torch's Inductor hands an op's keywords on to a function with a parameter of that name.
STABLE_TORCH_LIBRARY(flash_wmma, m) {
    m.def(
        "forward(Tensor q, Tensor k, Tensor v, float? scale=None, SymInt window_left=-1, SymInt window_right=-1, "
        "bool bottom_right=False, bool out_bnhd=False, Tensor? attn_bias=None, Tensor? alibi_slopes=None, "
        "float softcap=0., Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., int num_splits=1, "
        "bool batch_invariant=False, str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
    m.def(
        "forward_varlen(Tensor q, Tensor k, Tensor v, Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, "
        "Tensor? page_table, SymInt max_seqlen_q, SymInt max_seqlen_k, float? scale=None, SymInt window_left=-1, "
        "SymInt window_right=-1, bool bottom_right=False, Tensor? attn_bias=None, Tensor? alibi_slopes=None, "
        "float softcap=0., Tensor? sinks=None, Tensor? rng_state=None, float dropout_p=0., int num_splits=1, "
        "bool batch_invariant=False, str kernel_name=\"auto\") -> (Tensor out, Tensor lse)");
    m.def(
        "backward(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? rng_state=None, "
        "float? scale=None, SymInt window_left=-1, SymInt window_right=-1, bool bottom_right=False, float softcap=0., "
        "float dropout_p=0., bool deterministic=False, str kernel_name=\"auto\") "
        "-> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)");
    m.def(
        "backward_varlen(Tensor dout, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, "
        "Tensor cu_seqlens_q, Tensor cu_seqlens_k, Tensor? seqused_k, SymInt max_seqlen_q, SymInt max_seqlen_k, "
        "Tensor? attn_bias=None, Tensor? alibi_slopes=None, Tensor? sinks=None, Tensor? rng_state=None, "
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
