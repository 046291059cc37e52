#include "torch/arguments.h"

#include <cmath>

#include "dropout.h"

// From torch's C shim; absent from a torch without CUDA, hence weak.
extern "C" __attribute__((weak)) AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** stream);

// Older torch, 2.11 among them, has the check alone, without the text of the error behind a failure.
#ifndef STABLE_TORCH_ERROR_CODE_CHECK
#define STABLE_TORCH_ERROR_CODE_CHECK TORCH_ERROR_CODE_CHECK
#endif

namespace flash_wmma {

// ---- Tensors --------------------------------------------------------------------------------------------------------

const Codes& codes() {
    static const Codes all;
    return all;
}

Operand::Operand(const Tensor& t, const char* argument) : tensor(t), name(argument) {
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dim(t.get(), &dim));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(t.get(), &sizes));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_strides(t.get(), &strides));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_dtype(t.get(), &dtype));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_type(t.get(), &device_type));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_device_index(t.get(), &device_index));
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(t.get(), &data));
}

std::string Operand::shape() const {
    std::string text = "(";
    for (int64_t i = 0; i < dim; ++i) text += (i ? ", " : "") + std::to_string(sizes[i]);
    return text + ")";
}

void Operand::refuse(const std::string& allowed) const {
    invalid(std::string(name) + ": got shape " + shape() + ", allowed: " + allowed);
}

DType Operand::element_type(const char* allowed) const {
    for (const auto& [code, type] : codes().dtypes)
        if (code == dtype) return type;
    invalid(std::string(name) + ".dtype: allowed: " + allowed);
}

void* data_of(const Tensor& t) {
    void* data = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(aoti_torch_get_data_ptr(t.get(), &data));
    return data;
}

emulator::Buffer buffer_of(const char* name, const Tensor& t, bool writable) {
    int64_t elements = 1;
    for (int64_t i = 0; i < t.dim(); ++i) elements = t.size(i) == 0 ? 0 : elements + (t.size(i) - 1) * t.stride(i);
    return {name, t.data_ptr(), static_cast<std::size_t>(elements) * t.element_size(), writable};
}

Tensor empty(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, const Operand& like) {
    AtenTensorHandle handle = nullptr;
    STABLE_TORCH_ERROR_CODE_CHECK(
        aoti_torch_empty_strided(dim, sizes, strides, dtype, like.device_type, like.device_index, &handle));
    return Tensor(handle);
}

Rows rows_of(void* data, int64_t dim, const int64_t* strides) {
    return dim == 4 ? Rows{data, strides[0], strides[1], strides[2]} : Rows{data, 0, strides[1], strides[0]};
}

std::array<int64_t, 4> row_strides(const std::array<int64_t, 4>& sizes, bool bnhd) {
    if (!bnhd) return contiguous<4>(sizes);
    std::array<int64_t, 4> strides = contiguous<4>({sizes[0], sizes[2], sizes[1], sizes[3]});
    std::swap(strides[1], strides[2]);
    return strides;
}

bool kernel_readable(const Operand& t) {
    const int64_t vector = t.dtype == codes().float32 ? 4 : 8, last = t.dim - 1;
    if (t.strides[last] != 1 || t.sizes[last] % 8 != 0 || reinterpret_cast<uintptr_t>(t.data) % 16 != 0) return false;
    for (int64_t i = 0; i < last; ++i)
        if (t.strides[i] % vector != 0) return false;
    return true;
}

Readable::Readable(const Operand& t) : tensor(t.tensor) {
    if (kernel_readable(t)) {
        rows = rows_of(t.data, t.dim, t.strides);
        return;
    }
    std::array<int64_t, 4> sizes{};
    std::copy_n(t.sizes, t.dim, sizes.begin());
    sizes[static_cast<std::size_t>(t.dim - 1)] = round_up(t.sizes[t.dim - 1], 8);
    copy = torch::stable::new_zeros(t.tensor, {sizes.data(), static_cast<std::size_t>(t.dim)});
    Tensor head = torch::stable::narrow(*copy, t.dim - 1, 0, t.sizes[t.dim - 1]);
    torch::stable::copy_(head, t.tensor);
    const Operand made(*copy, t.name);
    rows = rows_of(made.data, made.dim, made.strides);
}

// ---- Arguments ------------------------------------------------------------------------------------------------------

namespace {

void check_inputs(const Operand& q, const Operand& k, const Operand& v, bool cached = false) {
    const bool packed = q.dim == 3;
    for (const Operand* t : {&q, &k, &v}) {
        const bool in_cache = cached && t != &q;
        if (t->dim != (in_cache ? 4 : q.dim))
            t->refuse(in_cache ? "(pages, H, page_size, d)" : packed ? "(total, H, d)" : "(B, H, N, d)");
        if (t->sizes[t->dim - 1] > kMaxSeqlen) invalid(std::string(t->name) + ": head dim is too large");
        if (t->dtype != q.dtype) invalid(std::string(t->name) + ".dtype differs from q's");
        if (!t->same_device(q)) invalid(std::string(t->name) + ".device differs from q's");
    }
    if (q.element_type("float32, float16, bfloat16") == DType::kBool)
        invalid("q.dtype: allowed: float32, float16, bfloat16");
    if (q.device_type != codes().cpu && q.device_type != codes().cuda) invalid("q.device: allowed are cpu and cuda");
    const int64_t last = k.dim - 1;
    if (!packed && !cached && (k.sizes[0] != q.sizes[0] || v.sizes[0] != q.sizes[0]))
        invalid("k, v: batch differs from q's");
    for (int64_t i = 0; i < last; ++i)
        if (v.sizes[i] != k.sizes[i]) invalid("v: heads and length must be k's, " + k.shape());
    if (k.sizes[last] != q.sizes[q.dim - 1]) invalid("k: head dim differs from q's");
    if (k.sizes[1] == 0 ? q.sizes[1] != 0 : q.sizes[1] % k.sizes[1] != 0)
        invalid("q: number of heads must be a multiple of k's");
    const int64_t row = packed ? 0 : 2;
    if (std::max(q.sizes[row], cached ? k.sizes[2] : k.sizes[row]) > kMaxSeqlen)
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

/// Slopes (Hq) or (B, Hq), float32; `kept` holds the copy if one was needed.
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

/// Logits (Hq), float32; `kept` holds the copy if one was needed.
const float* sinks_of(const Tensor& t, const ForwardParams& p, const Operand& q, OptionalTensor& kept) {
    kept = torch::stable::contiguous(t);
    const Operand sinks(*kept, "sinks");
    if (sinks.dtype != codes().float32) invalid("sinks.dtype: allowed: float32");
    if (!sinks.same_device(q)) invalid("sinks.device differs from q's");
    if (sinks.dim != 1 || sinks.sizes[0] != p.heads_q) sinks.refuse("(Hq)");
    return static_cast<const float*>(sinks.data);
}

/// Entry, head, query and key: (4), int64, on the CPU.
DropoutOrigin origin_of(const Tensor& t) {
    const Operand origin(t, "dropout_origin");
    if (origin.dtype != aoti_torch_dtype_int64()) invalid("dropout_origin.dtype: allowed: int64");
    if (origin.device_type != codes().cpu) invalid("dropout_origin.device: allowed: cpu");
    if (origin.dim != 1 || origin.sizes[0] != 4) origin.refuse("(4)");
    const auto number = [&](int i) { return static_cast<const int64_t*>(origin.data)[i * origin.strides[0]]; };
    for (int i = 0; i < 4; ++i)
        if (number(i) < 0 || number(i) > kMaxSeqlen || (i >= 2 && number(i) % 16))
            invalid("dropout_origin: allowed: numbers from 0 to 2^30, of queries and keys multiples of 16");
    return {number(0), number(1), static_cast<uint32_t>(number(2)), static_cast<uint32_t>(number(3))};
}

/// The state (2), int64; `kept` holds the copy if one was needed.
Dropout dropout_of(const Options& o, const Operand& q, OptionalTensor& kept) {
    if (!(o.dropout_p >= 0 && o.dropout_p < 1)) invalid("dropout_p: allowed: 0 to 1, not 1 itself");
    if (o.dropout_p == 0) return {};
    if (!o.rng_state) invalid("rng_state: allowed: a tensor (2), since dropout_p is not 0");
    kept = torch::stable::contiguous(*o.rng_state);
    const Operand state(*kept, "rng_state");
    if (state.dtype != aoti_torch_dtype_int64()) invalid("rng_state.dtype: allowed: int64");
    if (!state.same_device(q)) invalid("rng_state.device differs from q's");
    if (state.dim != 1 || state.sizes[0] != 2) state.refuse("(2)");
    const DropoutOrigin origin = o.dropout_origin ? origin_of(*o.dropout_origin) : DropoutOrigin{};
    return make_dropout(static_cast<const uint64_t*>(state.data), static_cast<float>(o.dropout_p), origin);
}

/// Ranges (B or 1, Hq or 1, Nq, 2), packed (Hq or 1, total_q, 2), int32, by strides.
KeyRanges ranges_of(const Tensor& t, const ForwardParams& p, const Operand& q) {
    const Operand ranges(t, "key_ranges");
    if (ranges.dtype != codes().int32) invalid("key_ranges.dtype: allowed: int32");
    if (!ranges.same_device(q)) invalid("key_ranges.device differs from q's");
    const bool packed = q.dim == 3;
    const std::array<int64_t, 4> full{p.batch, p.heads_q, q.sizes[packed ? 0 : 2], 2};
    std::array<int64_t, 4> strides{};
    const int64_t first = 4 - q.dim;
    bool fits = ranges.dim == q.dim;
    for (int64_t i = 0; fits && i < q.dim; ++i) {
        const auto at = static_cast<std::size_t>(first + i);
        const bool broadcast = at < 2 && ranges.sizes[i] == 1;
        fits = broadcast || ranges.sizes[i] == full[at];
        strides[at] = broadcast ? 0 : ranges.strides[i];
    }
    if (!fits) ranges.refuse(packed ? "(Hq or 1, total_q, 2)" : "(B or 1, Hq or 1, Nq, 2)");
    return {static_cast<const int32_t*>(ranges.data), strides[0], strides[1], strides[2], strides[3]};
}

/// int32 (batch, n) with adjacent entries of a sequence; `kept` holds the copy if one was needed.
const int32_t* table_of(const Tensor& t, int64_t batch, const Operand& q, OptionalTensor& kept) {
    kept = t.dim() == 2 && t.stride(1) == 1 ? t : torch::stable::contiguous(t);
    const Operand table(*kept, "page_table");
    if (table.dim != 2 || table.sizes[0] != batch) table.refuse("(" + std::to_string(batch) + ", n)");
    if (table.dtype != codes().int32) invalid("page_table.dtype: allowed: int32");
    if (!table.same_device(q)) invalid("page_table.device differs from q's");
    return static_cast<const int32_t*>(table.data);
}

/// int32 (n); `kept` holds the copy if one was needed.
const int32_t* lengths_of(const Tensor& t, const char* name, int64_t n, const Operand& q, OptionalTensor& kept) {
    kept = torch::stable::contiguous(t);
    const Operand lengths(*kept, name);
    if (lengths.dim != 1 || lengths.sizes[0] != n) lengths.refuse("(" + std::to_string(n) + ")");
    if (lengths.dtype != codes().int32) invalid(std::string(name) + ".dtype: allowed: int32");
    if (!lengths.same_device(q)) invalid(std::string(name) + ".device differs from q's");
    return static_cast<const int32_t*>(lengths.data);
}

}  // namespace

CheckedCall::CheckedCall(const Operand& q_, const Operand& k_, const Operand& v_, const Options& o)
    : q(q_), k(k_), v(v_), options(o) {
    if (q.dim != 4) q.refuse("(B, H, N, d)");
    check_inputs(q, k, v);
    params.batch = q.sizes[0];
    params.seqlen_q = q.sizes[2];
    params.seqlen_k = k.sizes[2];
    set_options();
}

CheckedCall::CheckedCall(const Operand& q_, const Operand& k_, const Operand& v_, const Options& o,
                         const Lengths& lengths)
    : q(q_), k(k_), v(v_), options(o) {
    if (q.dim != 3) q.refuse("(total, H, d)");
    check_inputs(q, k, v);
    if (lengths.cu_seqlens_q.dim() != 1 || lengths.cu_seqlens_q.size(0) < 1) invalid("cu_seqlens_q: allowed: (B + 1)");
    for (const auto& [name, length] :
         {std::pair{"max_seqlen_q", lengths.max_seqlen_q}, {"max_seqlen_k", lengths.max_seqlen_k}})
        if (length < 0 || length > kMaxSeqlen) invalid(std::string(name) + ": allowed: 0 to 2^30");
    ForwardParams& p = params;
    p.batch = lengths.cu_seqlens_q.size(0) - 1;
    p.seqlen_q = lengths.max_seqlen_q;
    p.seqlen_k = lengths.max_seqlen_k;
    p.sequences.cu_seqlens_q = lengths_of(lengths.cu_seqlens_q, "cu_seqlens_q", p.batch + 1, q, cu_seqlens_q_);
    p.sequences.cu_seqlens_k = lengths_of(lengths.cu_seqlens_k, "cu_seqlens_k", p.batch + 1, q, cu_seqlens_k_);
    if (lengths.seqused_k) p.sequences.seqused_k = lengths_of(*lengths.seqused_k, "seqused_k", p.batch, q, seqused_k_);
    p.sequences.total_q = q.sizes[0];
    p.sequences.total_k = k.sizes[0];
    set_options();
}

CheckedCall::CheckedCall(const Operand& q_, const Operand& k_, const Operand& v_, const Options& o, const Cache& cache)
    : q(q_), k(k_), v(v_), options(o) {
    if (q.dim != (cache.cu_seqlens_q ? 3 : 4)) q.refuse(cache.cu_seqlens_q ? "(total, H, d)" : "(B, H, N, d)");
    check_inputs(q, k, v, true);
    ForwardParams& p = params;
    Sequences& s = p.sequences;
    if (cache.cu_seqlens_q) {
        if (cache.cu_seqlens_q->dim() != 1 || cache.cu_seqlens_q->size(0) < 1)
            invalid("cu_seqlens_q: allowed: (B + 1)");
        p.batch = cache.cu_seqlens_q->size(0) - 1;
        p.seqlen_q = cache.max_seqlen_q;
        if (p.seqlen_q < 0 || p.seqlen_q > kMaxSeqlen) invalid("max_seqlen_q: allowed: 0 to 2^30");
        s.cu_seqlens_q = lengths_of(*cache.cu_seqlens_q, "cu_seqlens_q", p.batch + 1, q, cu_seqlens_q_);
        s.total_q = q.sizes[0];
    } else {
        p.batch = q.sizes[0];
        p.seqlen_q = q.sizes[2];
    }
    s.seqused_k = lengths_of(cache.seqlens, "cache_seqlens", p.batch, q, seqused_k_);
    if (cache.leftpad) s.leftpad = lengths_of(*cache.leftpad, "cache_leftpad", p.batch, q, leftpad_);
    const int64_t pages = k.sizes[0], page_size = k.sizes[2];
    if (pages > kMaxSeqlen) invalid("k_cache: at most 2^30 pages");
    int64_t runs = 1;
    if (cache.page_table) {
        s.page_table = table_of(*cache.page_table, p.batch, q, page_table_);
        s.page_table_stride = page_table_->stride(0);
        runs = page_table_->size(1);
    } else if (pages < p.batch) {
        invalid("k_cache: fewer batch entries than q's");
    }
    if (page_size > 0 && runs > kMaxSeqlen / page_size) invalid("page_table: at most 2^30 rows a sequence");
    p.seqlen_k = pages > 0 ? runs * page_size : 0;
    s.page_size = static_cast<int32_t>(page_size);
    s.num_pages = static_cast<int32_t>(pages);
    set_options();
}

void CheckedCall::set_options() {
    ForwardParams& p = params;
    p.dtype = p.out_dtype = q.element_type("");
    p.heads_q = q.sizes[1];
    p.heads_k = k.sizes[1];
    p.head_dim = static_cast<int32_t>(q.sizes[q.dim - 1]);
    p.head_dim_v = static_cast<int32_t>(v.sizes[v.dim - 1]);
    p.scale = static_cast<float>(options.scale.value_or(1.0 / std::sqrt(static_cast<double>(std::max(p.head_dim, 1)))));
    if (!std::isfinite(p.scale)) invalid("scale: allowed: a finite float32");
    const auto bound = [](int64_t keys) { return keys < 0 ? kUnbounded : std::min(keys, kUnbounded); };
    p.band = {bound(options.window_left), bound(options.window_right), options.bottom_right};
    if (options.attn_bias) p.bias = bias_of(*options.attn_bias, p, q);
    if (options.alibi_slopes) set_alibi(p, *options.alibi_slopes, q, slopes_);
    if (options.key_ranges) p.key_ranges = ranges_of(*options.key_ranges, p, q);
    if (options.sinks) p.sinks = sinks_of(*options.sinks, p, q, sinks_);
    p.dropout = dropout_of(options, q, rng_state_);
    if (!(options.softcap == 0 || (options.softcap >= 1e-30 && options.softcap <= 1e30)))
        invalid("softcap: allowed: 0 (none) or 1e-30 to 1e30");
    p.softcap = static_cast<float>(options.softcap);
    p.partials.num_splits = 1;
}

void CheckedCall::see_no_key(Tensor& out, Tensor& lse) const {
    torch::stable::zero_(out);
    if (sinks_) torch::stable::copy_(lse, torch::stable::unsqueeze(*sinks_, 1));
    else torch::stable::fill_(lse, -INFINITY);
}

bool CheckedCall::empty() const {
    const int64_t row = packed() ? 0 : 2;
    return q.sizes[row] == 0 || (!params.sequences.page_size && k.sizes[row] == 0) || params.seqlen_q == 0 ||
           params.seqlen_k == 0 || params.batch == 0 || params.heads_q == 0;
}

void CheckedCall::point_to(const Readable& q_rows, const Readable& k_rows, const Readable& v_rows, const Tensor& lse) {
    params.q = q_rows.rows;
    params.k = k_rows.rows;
    params.v = v_rows.rows;
    point_to(lse);
}

void CheckedCall::point_to(const Tensor& lse) {
    params.head_dim = static_cast<int32_t>(round_up(params.head_dim, 8));
    params.head_dim_v = static_cast<int32_t>(round_up(params.head_dim_v, 8));
    params.lse = static_cast<float*>(data_of(lse));
    params.lse_head = q.sizes[packed() ? 0 : 2];
    params.lse_batch = packed() ? 0 : params.heads_q * params.lse_head;
}

void CheckedCall::add_buffers(std::vector<emulator::Buffer>& buffers) const {
    if (options.attn_bias) buffers.push_back(buffer_of("attn_bias", *options.attn_bias, false));
    if (slopes_) buffers.push_back(buffer_of("alibi_slopes", *slopes_, false));
    if (options.key_ranges) buffers.push_back(buffer_of("key_ranges", *options.key_ranges, false));
    if (sinks_) buffers.push_back(buffer_of("sinks", *sinks_, false));
    if (rng_state_) buffers.push_back(buffer_of("rng_state", *rng_state_, false));
    if (cu_seqlens_q_) buffers.push_back(buffer_of("cu_seqlens_q", *cu_seqlens_q_, false));
    if (cu_seqlens_k_) buffers.push_back(buffer_of("cu_seqlens_k", *cu_seqlens_k_, false));
    if (seqused_k_) buffers.push_back(buffer_of("seqused_k", *seqused_k_, false));
    if (leftpad_) buffers.push_back(buffer_of("cache_leftpad", *leftpad_, false));
    if (page_table_) buffers.push_back(buffer_of("page_table", *page_table_, false));
}

// ---- Where a call runs ----------------------------------------------------------------------------------------------

Stream current_stream(int32_t device_index) {
    void* stream = nullptr;
    STD_TORCH_CHECK(
        aoti_torch_get_current_cuda_stream && aoti_torch_get_current_cuda_stream(device_index, &stream) == 0,
        "no current CUDA stream");
    return stream;
}

Target::Target(const Operand& q, const std::string& kernel_name, const char* direction)
    : q_(q), kernel_name_(kernel_name) {
    if (q.device_type == codes().cuda) {
        const DeviceRuntime* runtime = registry::device_runtime();
        if (!runtime)
            throw std::runtime_error(
                "flash_wmma was built without CUDA kernels: install nvcc and rebuild it (README, Installation)");
        device_ = runtime->facts(q.device_index);
    } else if (kernel_name != "auto" && !registry::is_cpu_kernel(kernel_name)) {
        emulation_.emplace(kernel_name, direction);
        device_ = emulation_->device();
    }
}

}  // namespace flash_wmma
