// flash_wmma::backward and backward_varlen.
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
};

/// Checks that t has q's shape, dtype and device, with v's number of columns.
void check_like_out(const Operand& t, const Operand& q, const Operand& v) {
    bool same = t.dim == q.dim && t.sizes[t.dim - 1] == v.sizes[v.dim - 1];
    for (int64_t i = 0; same && i + 1 < q.dim; ++i) same = t.sizes[i] == q.sizes[i];
    if (!same) t.refuse("that of out");
    if (t.dtype != q.dtype) invalid(std::string(t.name) + ".dtype differs from q's");
    if (!t.same_device(q)) invalid(std::string(t.name) + ".device differs from q's");
}

/// lse or its gradient, contiguous.
template <std::size_t kDim>
Tensor like_lse(const Tensor& t, const char* name, const std::array<int64_t, kDim>& sizes, const Operand& q) {
    Tensor made = torch::stable::contiguous(t);
    const Operand lse(made, name);
    if (lse.dim != static_cast<int64_t>(kDim) || !std::equal(sizes.begin(), sizes.end(), lse.sizes))
        lse.refuse("that of forward's lse");
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

template <std::size_t kDim>
Gradients run(CheckedCall& call, const Given& given) {
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
            dbias.add_buffer(buffers);
            call.add_buffers(buffers);
            return buffers;
        });
    }
    return {dq.take(), dk.take(), dv.take(), dbias.take()};
}

}  // namespace

Gradients backward(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q_tensor, const Tensor& k_tensor,
                   const Tensor& v_tensor, const Tensor& out, const Tensor& lse, std::optional<double> scale,
                   int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
                   const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                   const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p, bool bias_grad,
                   bool deterministic, const std::string& kernel_name, const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   sinks,   rng_state, scale,
                          window_left, window_right, bottom_right, softcap, dropout_p, kernel_name};
    CheckedCall call(q, k, v, options);
    return run<4>(call, {dout, dlse, out, lse, bias_grad, deterministic, forward_kernel});
}

Gradients backward_varlen(const Tensor& dout, const OptionalTensor& dlse, const Tensor& q_tensor,
                          const Tensor& k_tensor, const Tensor& v_tensor, const Tensor& out, const Tensor& lse,
                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k, const OptionalTensor& seqused_k,
                          int64_t max_seqlen_q, int64_t max_seqlen_k, std::optional<double> scale, int64_t window_left,
                          int64_t window_right, bool bottom_right, const OptionalTensor& attn_bias,
                          const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                          const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p,
                          bool bias_grad, bool deterministic, const std::string& kernel_name,
                          const std::string& forward_kernel) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   sinks,   rng_state, scale,
                          window_left, window_right, bottom_right, softcap, dropout_p, kernel_name};
    CheckedCall call(q, k, v, options, {cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k});
    return run<3>(call, {dout, dlse, out, lse, bias_grad, deterministic, forward_kernel});
}

}  // namespace flash_wmma
