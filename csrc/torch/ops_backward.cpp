// flash_wmma::backward, backward_varlen, backward_begin, backward_add and backward_end.
#include "torch/ops.h"

namespace flash_wmma {
namespace {

/// What backward is given beyond forward's arguments.
struct Given {
    const Tensor& dout;
    const OptionalTensor& dlse;
    const Tensor &out, &lse;
    bool bias_grad, deterministic;
    const std::string& forward_kernel;  ///< kernel_name of the forward that computed out and lse
    const OptionalTensor &dentropy, &dcolumn_sum;
    bool slopes_grad = false;
};
const OptionalTensor kNone;

/// Checks that t has q's shape, dtype and device, with v's number of columns.
void check_like_out(const Operand& t, const Operand& q, const Operand& v) {
    bool same = t.dim == q.dim && t.sizes[t.dim - 1] == v.sizes[v.dim - 1];
    for (int64_t i = 0; same && i + 1 < q.dim; ++i) same = t.sizes[i] == q.sizes[i];
    if (!same) t.refuse("that of out");
    if (t.dtype != q.dtype) invalid(std::string(t.name) + ".dtype differs from q's");
    if (!t.same_device(q)) invalid(std::string(t.name) + ".device differs from q's");
}

/// lse, its gradient or another float32 number for each query or key, contiguous.
template <std::size_t kDim>
Tensor like_lse(const Tensor& t, const char* name, const std::array<int64_t, kDim>& sizes, const Operand& q,
                const char* allowed = "that of forward's lse") {
    Tensor made = torch::stable::contiguous(t);
    const Operand lse(made, name);
    if (lse.dim != static_cast<int64_t>(kDim) || !std::equal(sizes.begin(), sizes.end(), lse.sizes))
        lse.refuse(allowed);
    if (lse.dtype != codes().float32) invalid(std::string(name) + ".dtype: allowed: float32");
    if (!lse.same_device(q)) invalid(std::string(name) + ".device differs from q's");
    return made;
}

/// The gradient of an additive bias, while a kernel adds it up: fp32, of the bias's own shape.
class BiasSum {
  public:
    BiasSum(const CheckedCall& call, bool wanted, BackwardParams& params) : like_(call.q) {
        if (!wanted) return;
        if (!call.options.attn_bias || params.forward.bias.dtype == DType::kBool)
            invalid("bias_grad: there is no additive attn_bias");
        const Operand bias(*call.options.attn_bias, "attn_bias");
        dtype_ = bias.dtype;
        dim_ = bias.dim;
        std::copy_n(bias.sizes, dim_, sizes_.end() - dim_);
        strides_ = contiguous(sizes_);
        sum_ = make(codes().float32);
        torch::stable::zero_(*sum_);
        const auto step = [&](std::size_t i) { return sizes_[i] == 1 ? 0 : strides_[i]; };
        params.dbias = {static_cast<float*>(data_of(*sum_)), step(0), step(1), step(2), step(3)};
    }

    void add_buffer(std::vector<emulator::Buffer>& buffers) const {
        if (sum_) buffers.push_back(buffer_of("dbias", *sum_, true));
    }
    /// The gradient in the bias's dtype; empty if it was not wanted.
    Tensor take() {
        if (!sum_) return empty<1>({0}, {1}, like_.dtype, like_);
        if (dtype_ == codes().float32) return std::move(*sum_);
        Tensor rounded = make(dtype_);
        torch::stable::copy_(rounded, *sum_);
        return rounded;
    }

  private:
    Tensor make(int32_t dtype) const {
        return empty(dim_, sizes_.data() + 4 - dim_, strides_.data() + 4 - dim_, dtype, like_);
    }

    const Operand& like_;
    std::array<int64_t, 4> sizes_{1, 1, 1, 1}, strides_{};
    int64_t dim_ = 0;
    int32_t dtype_ = 0;
    OptionalTensor sum_;
};

/// Uninitialised memory for the gradient of q, k or v: dense, with heads and rows in the argument's order.
template <std::size_t kDim>
Written<kDim> gradient_of(const Operand& t) {
    std::array<int64_t, kDim> sizes;
    std::copy_n(t.sizes, kDim, sizes.begin());
    if constexpr (kDim == 4) return {sizes, row_strides(sizes, t.strides[1] < t.strides[2]), t};
    else return {sizes, contiguous(sizes), t};
}

/// (B, Hq, Nk), or packed (Hq, total_k): numbers for each key.
template <std::size_t kDim>
std::array<int64_t, kDim> key_sizes(const CheckedCall& call) {
    const Operand &q = call.q, &k = call.k;
    if constexpr (kDim == 3) return {q.sizes[0], q.sizes[1], k.sizes[2]};
    else return {q.sizes[1], k.sizes[0]};
}

template <std::size_t kDim>
Tensor numbers(const std::array<int64_t, kDim>& sizes, double value, const Operand& q) {
    Tensor made = empty(sizes, contiguous(sizes), codes().float32, q);
    torch::stable::fill_(made, value);
    return made;
}
Tensor nothing(const Operand& q) { return empty<1>({0}, {1}, codes().float32, q); }

/// Sets the strides of numbers for each key.
template <std::size_t kDim>
void set_key_strides(BackwardParams& p, const std::array<int64_t, kDim>& sizes) {
    p.key_head = sizes[kDim - 1];
    p.key_batch = kDim == 3 ? sizes[kDim - 2] * p.key_head : 0;
}

template <std::size_t kDim>
std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> run(CheckedCall& call, const Given& given) {
    const Operand &q = call.q, &k = call.k, &v = call.v, dout(given.dout, "dout"), out(given.out, "out");
    for (const Operand* t : {&dout, &out}) check_like_out(*t, q, v);
    const auto lse_sizes = call.lse_sizes<kDim - 1>();
    const Tensor lse = like_lse(given.lse, "lse", lse_sizes, q);
    OptionalTensor dlse;
    if (given.dlse) dlse = like_lse(*given.dlse, "dlse", lse_sizes, q);

    BackwardParams p{};
    p.forward = call.params;
    p.deterministic = given.deterministic;
    BiasSum dbias(call, given.bias_grad, p);
    const auto of_keys = key_sizes<kDim - 1>(call);
    set_key_strides(p, of_keys);
    OptionalTensor dentropy, dcolumn_sum, dslopes;
    if (given.dentropy) dentropy = like_lse(*given.dentropy, "dentropy", lse_sizes, q);
    if (given.dcolumn_sum)
        dcolumn_sum = like_lse(*given.dcolumn_sum, "dcolumn_sum", of_keys, q, "(B, Hq, Nk), packed (Hq, total_k)");
    if (given.slopes_grad) {
        if (!call.options.alibi_slopes) invalid("slopes_grad: there are no alibi_slopes");
        dslopes = numbers(of_keys, 0, q);
        p.dslopes = static_cast<float*>(data_of(*dslopes));
    }
    if (dentropy) p.dentropy = static_cast<const float*>(data_of(*dentropy));
    if (dcolumn_sum) p.dcolumn_sum = static_cast<const float*>(data_of(*dcolumn_sum));
    const Target target(q, call.options.kernel_name, "backward");
    if (call.options.kernel_name == "auto")
        p.exact = registry::is_exact(given.forward_kernel, p.forward, target.device());
    const BackwardKernelInfo& kernel = target.choose(p);

    Written<kDim> dq = gradient_of<kDim>(q), dk = gradient_of<kDim>(k), dv = gradient_of<kDim>(v);
    if (call.empty() || call.packed())
        for (Written<kDim>* t : {&dq, &dk, &dv}) torch::stable::zero_(t->memory());
    if (!call.empty()) {
        const Readable q_rows(q), k_rows(k), v_rows(v), out_rows(out), dout_rows(dout);
        call.point_to(q_rows, k_rows, v_rows, lse);
        p.forward = call.params;
        p.forward.o = out_rows.rows;
        p.dout = dout_rows.rows;
        p.dq = dq.rows();
        p.dk = dk.rows();
        p.dv = dv.rows();
        if (dlse) p.dlse = static_cast<const float*>(data_of(*dlse));
        target.run(kernel, p, [&] {
            std::vector<emulator::Buffer> buffers{
                q_rows.buffer("q"),   k_rows.buffer("k"),       v_rows.buffer("v"),
                out_rows.buffer("o"), dout_rows.buffer("dout"), buffer_of("lse", lse, false),
                dq.buffer("dq"),      dk.buffer("dk"),          dv.buffer("dv")};
            if (dlse) buffers.push_back(buffer_of("dlse", *dlse, false));
            if (dentropy) buffers.push_back(buffer_of("dentropy", *dentropy, false));
            if (dcolumn_sum) buffers.push_back(buffer_of("dcolumn_sum", *dcolumn_sum, false));
            if (dslopes) buffers.push_back(buffer_of("dslopes", *dslopes, true));
            dbias.add_buffer(buffers);
            call.add_buffers(buffers);
            return buffers;
        });
    }
    return {dq.take(), dk.take(), dv.take(), dbias.take(), dslopes ? std::move(*dslopes) : nothing(q)};
}

/// Without dslopes.
template <std::size_t kDim>
Gradients run_plain(CheckedCall& call, const Given& given) {
    auto [dq, dk, dv, dbias, dslopes] = run<kDim>(call, given);
    return {std::move(dq), std::move(dk), std::move(dv), std::move(dbias)};
}

/// f(call) with the checked arguments, dense or packed.
template <class F>
auto dense_or_packed(const Operand& q, const Operand& k, const Operand& v, const Options& options,
                     const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
                     const OptionalTensor& seqused_k, int64_t max_seqlen_q, int64_t max_seqlen_k, const F& f) {
    if (cu_seqlens_q.has_value() != cu_seqlens_k.has_value())
        invalid("cu_seqlens_q, cu_seqlens_k: one without the other");
    if (!cu_seqlens_q) {
        CheckedCall call(q, k, v, options);
        return f(call, std::integral_constant<std::size_t, 4>());
    }
    CheckedCall call(q, k, v, options, {*cu_seqlens_q, *cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k});
    return f(call, std::integral_constant<std::size_t, 3>());
}

/// The statistics whose names are in `wanted`.
template <std::size_t kDim>
std::tuple<Tensor, Tensor, Tensor, Tensor> count(CheckedCall& call, const Tensor& lse_tensor, const std::string& wanted,
                                                 const OptionalTensor& key_weights_tensor,
                                                 const std::string& forward_kernel) {
    const Operand &q = call.q, &k = call.k;
    const auto of_queries = call.lse_sizes<kDim - 1>(), of_keys = key_sizes<kDim - 1>(call);
    const Tensor lse = like_lse(lse_tensor, "lse", of_queries, q);
    OptionalTensor key_weights;
    if (key_weights_tensor)
        key_weights = like_lse(*key_weights_tensor, "key_weights", of_keys, q, "(B, Hq, Nk), packed (Hq, total_k)");

    BackwardParams p{};
    p.forward = call.params;
    p.statistics.wanted = true;
    set_key_strides(p, of_keys);
    const Target target(q, call.options.kernel_name, "backward");
    if (call.options.kernel_name == "auto") p.exact = registry::is_exact(forward_kernel, p.forward, target.device());
    const BackwardKernelInfo& kernel = target.choose(p);

    const auto asked = [&](const char* name) { return wanted.find(name) != std::string::npos; };
    Tensor row_max = asked("max") ? numbers(of_queries, -INFINITY, q) : nothing(q);
    Tensor entropy = asked("entropy") ? numbers(of_queries, 0, q) : nothing(q);
    Tensor column_sum = asked("column_sum") ? numbers(of_keys, 0, q) : nothing(q);
    Tensor row_sum = key_weights ? numbers(of_queries, 0, q) : nothing(q);
    if (!call.empty()) {
        const Readable q_rows(q), k_rows(k);
        call.point_to(q_rows, k_rows, k_rows, lse);
        p.forward = call.params;
        const auto written = [&](const char* name, Tensor& t) {
            return asked(name) ? static_cast<float*>(data_of(t)) : nullptr;
        };
        p.forward.row_max = written("max", row_max);
        p.forward.entropy = written("entropy", entropy);
        p.statistics.column_sum = written("column_sum", column_sum);
        if (key_weights) {
            p.statistics.key_weights = static_cast<const float*>(data_of(*key_weights));
            p.statistics.row_sum = static_cast<float*>(data_of(row_sum));
        }
        target.run(kernel, p, [&] {
            std::vector<emulator::Buffer> buffers{q_rows.buffer("q"), k_rows.buffer("k"), buffer_of("lse", lse, false)};
            if (asked("max")) buffers.push_back(buffer_of("row_max", row_max, true));
            if (asked("entropy")) buffers.push_back(buffer_of("entropy", entropy, true));
            if (asked("column_sum")) buffers.push_back(buffer_of("column_sum", column_sum, true));
            if (key_weights) {
                buffers.push_back(buffer_of("key_weights", *key_weights, false));
                buffers.push_back(buffer_of("row_sum", row_sum, true));
            }
            call.add_buffers(buffers);
            return buffers;
        });
    }
    return {std::move(row_max), std::move(entropy), std::move(column_sum), std::move(row_sum)};
}

/// A part of several calls of backward with the same queries (SharedQueries): dense, with a band at most.
class SharedCall {
  public:
    SharedCall(const Operand& q, const Operand& k, const Operand& v, const Options& options,
               const std::string& forward_kernel)
        : call_(q, k, v, options), target_(q, options.kernel_name, "backward") {
        params.forward = call_.params;
        if (options.kernel_name == "auto")
            params.exact = registry::is_exact(forward_kernel, params.forward, target_.device());
        kernel_ = &target_.choose(params);
    }
    BackwardParams params{};

    bool empty() const { return call_.empty(); }
    /// Points the params to what a launch reads, as CheckedCall does.
    template <class... Read>
    void point_to(const Read&... read) {
        call_.point_to(read...);
        params.forward = call_.params;
    }
    /// Bytes of the memory that such calls have in common, of which the first has these params; 0: the kernel has none.
    int64_t bytes() const { return kernel_->shared_bytes ? kernel_->shared_bytes(params, target_.device()) : 0; }
    /// Sets the params' stage and the memory, which backward_begin has made for `rows` queries.
    void share(BackwardStage stage, const Tensor& memory, int64_t first, int64_t rows) {
        params.shared = {stage, data_of(memory), first, rows};
        BackwardParams all = params;
        all.forward.seqlen_q = rows;
        const Operand given(memory, "memory");
        if (!kernel_->shared_bytes || given.dim != 1 || given.dtype != codes().byte || !given.same_device(call_.q) ||
            given.sizes[0] != kernel_->shared_bytes(all, target_.device()))
            invalid("memory: allowed: what backward_begin made of these queries for the same kernel");
    }
    template <class Buffers>
    void run(const Buffers& buffers) {
        target_.run(*kernel_, params, buffers);
    }

  private:
    CheckedCall call_;
    Target target_;
    const BackwardKernelInfo* kernel_;
};

/// The options of a call with a band alone.
Options of_band(std::optional<double> scale, int64_t window_left, int64_t window_right, bool bottom_right,
                const std::string& kernel_name) {
    return {kNone,       kNone,        kNone,        kNone, kNone, kNone,      scale,
            window_left, window_right, bottom_right, 0.,    0.,    kernel_name};
}

}  // namespace

Tensor backward_begin(const Tensor& dout_tensor, const OptionalTensor& dlse_tensor, const Tensor& q_tensor,
                      const Tensor& k_tensor, const Tensor& v_tensor, const Tensor& out_tensor,
                      const Tensor& lse_tensor, std::optional<double> scale, int64_t window_left, int64_t window_right,
                      bool bottom_right, const std::string& kernel_name, const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v"), dout(dout_tensor, "dout"),
        out(out_tensor, "out");
    const Options options = of_band(scale, window_left, window_right, bottom_right, kernel_name);
    SharedCall call(q, k, v, options, forward_kernel);
    for (const Operand* t : {&dout, &out}) check_like_out(*t, q, v);
    const std::array<int64_t, 3> lse_sizes{q.sizes[0], q.sizes[1], q.sizes[2]};
    const Tensor lse = like_lse(lse_tensor, "lse", lse_sizes, q);
    OptionalTensor dlse;
    if (dlse_tensor) dlse = like_lse(*dlse_tensor, "dlse", lse_sizes, q);
    const auto memory_of = [&](int64_t bytes) { return empty<1>({bytes}, {1}, codes().byte, q); };
    if (call.empty()) return memory_of(0);

    call.point_to(lse);
    const Tensor memory = memory_of(call.bytes());
    if (call.bytes() == 0) return memory;
    const Readable out_rows(out), dout_rows(dout);
    BackwardParams& p = call.params;
    p.forward.o = out_rows.rows;
    p.dout = dout_rows.rows;
    if (dlse) p.dlse = static_cast<const float*>(data_of(*dlse));
    call.share(BackwardStage::kBegin, memory, 0, q.sizes[2]);
    call.run([&] {
        std::vector<emulator::Buffer> buffers{out_rows.buffer("o"), dout_rows.buffer("dout"),
                                              buffer_of("lse", lse, false), buffer_of("memory", memory, true)};
        if (dlse) buffers.push_back(buffer_of("dlse", *dlse, false));
        return buffers;
    });
    return memory;
}

std::tuple<Tensor, Tensor> backward_add(const Tensor& memory, int64_t first, int64_t rows, const Tensor& dout_tensor,
                                        const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                        std::optional<double> scale, int64_t window_left, int64_t window_right,
                                        bool bottom_right, const std::string& kernel_name,
                                        const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v"), dout(dout_tensor, "dout");
    const Options options = of_band(scale, window_left, window_right, bottom_right, kernel_name);
    SharedCall call(q, k, v, options, forward_kernel);
    check_like_out(dout, q, v);
    const int64_t queries = q.sizes[2];
    if (first < 0 || rows < queries || first > rows - queries || first % kScaleRows ||
        (queries % kScaleRows && first < rows - queries))
        invalid("first " + std::to_string(first) + ", rows " + std::to_string(rows) +
                ": the queries begin and end at multiples of " + std::to_string(kScaleRows) +
                " of the rows, or at their end");
    Written<4> dk = gradient_of<4>(k), dv = gradient_of<4>(v);
    if (call.empty()) {
        for (Written<4>* t : {&dk, &dv}) torch::stable::zero_(t->memory());
    } else {
        const Readable q_rows(q), k_rows(k), v_rows(v), dout_rows(dout);
        call.point_to(q_rows, k_rows, v_rows, nothing(q));
        BackwardParams& p = call.params;
        p.dout = dout_rows.rows;
        p.dk = dk.rows();
        p.dv = dv.rows();
        call.share(BackwardStage::kAdd, memory, first, rows);
        call.run([&] {
            return std::vector<emulator::Buffer>{q_rows.buffer("q"),
                                                 k_rows.buffer("k"),
                                                 v_rows.buffer("v"),
                                                 dout_rows.buffer("dout"),
                                                 dk.buffer("dk"),
                                                 dv.buffer("dv"),
                                                 buffer_of("memory", memory, true)};
        });
    }
    return {dk.take(), dv.take()};
}

Tensor backward_end(const Tensor& memory, const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                    std::optional<double> scale, int64_t window_left, int64_t window_right, bool bottom_right,
                    const std::string& kernel_name, const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options = of_band(scale, window_left, window_right, bottom_right, kernel_name);
    SharedCall call(q, k, v, options, forward_kernel);
    Written<4> dq = gradient_of<4>(q);
    call.point_to(nothing(q));
    call.params.dq = dq.rows();
    call.share(BackwardStage::kEnd, memory, 0, q.sizes[2]);
    call.run([&] { return std::vector<emulator::Buffer>{dq.buffer("dq"), buffer_of("memory", memory, false)}; });
    return dq.take();
}

Gradients backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q_tensor, const Tensor& k_tensor,
                   const Tensor& v_tensor, const Tensor& out, const Tensor& lse, std::optional<double> scale,
                   int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
                   const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                   const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p,
                   const OptionalTensor& dropout_origin, bool bias_grad, bool deterministic,
                   const std::string& kernel_name, const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   sinks,   rng_state, dropout_origin, scale,
                          window_left, window_right, bottom_right, softcap, dropout_p, kernel_name};
    CheckedCall call(q, k, v, options);
    return run_plain<4>(call, {dout, dlse, out, lse, bias_grad, deterministic, forward_kernel, kNone, kNone});
}

Gradients backward_varlen(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q_tensor,
                          const Tensor& k_tensor, const Tensor& v_tensor, const Tensor& out, const Tensor& lse,
                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                          int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale, int64_t window_left,
                          int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
                          const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                          const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p,
                          const OptionalTensor& dropout_origin, bool bias_grad, bool deterministic,
                          const std::string& kernel_name, const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   sinks,   rng_state, dropout_origin, scale,
                          window_left, window_right, bottom_right, softcap, dropout_p, kernel_name};
    CheckedCall call(q, k, v, options, {cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k});
    return run_plain<3>(call, {dout, dlse, out, lse, bias_grad, deterministic, forward_kernel, kNone, kNone});
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> backward_with_statistics(
    const Tensor& dout, const OptionalTensor& dlse, const Tensor& q_tensor, const Tensor& k_tensor,
    const Tensor& v_tensor, const Tensor& out, const Tensor& lse, const OptionalTensor& dentropy,
    const OptionalTensor& dcolumn_sum, const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seqused_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
    int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
    const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
    const OptionalTensor& rng_state, double dropout_p, const OptionalTensor& dropout_origin, bool bias_grad,
    bool slopes_grad, bool deterministic, const std::string& kernel_name, const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   kNone,   rng_state, dropout_origin, scale,
                          window_left, window_right, bottom_right, softcap, dropout_p, kernel_name};
    const Given given{dout,          dlse,           out,      lse,         bias_grad,
                      deterministic, forward_kernel, dentropy, dcolumn_sum, slopes_grad};
    return dense_or_packed(q, k, v, options, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k,
                           [&](CheckedCall& call, auto dim) { return run<dim>(call, given); });
}

std::tuple<Tensor, Tensor, Tensor, Tensor> statistics(
    const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& lse, const std::string& wanted,
    const OptionalTensor& key_weights, const OptionalTensor& cu_seqlens_q, const OptionalTensor& cu_seqlens_k,
    const OptionalTensor& seqused_k, int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale,
    int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
    const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
    const std::string& kernel_name, const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   kNone,   kNone, kNone,      scale,
                          window_left, window_right, bottom_right, softcap, 0.,    kernel_name};
    return dense_or_packed(
        q, k, k, options, cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k,
        [&](CheckedCall& call, auto dim) { return count<dim>(call, lse, wanted, key_weights, forward_kernel); });
}

}  // namespace flash_wmma
