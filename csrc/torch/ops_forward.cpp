// flash_wmma::forward, forward_into, forward_merged, forward_with_statistics, forward_varlen and forward_cached.
#include "torch/ops.h"

namespace flash_wmma {
namespace {

/// The statistics of rows that a kernel of forward tells; none: not asked for.
struct Told {
    OptionalTensor row_max, entropy;
    bool done = false;  ///< whether the kernel told them
};

/// Has the kernel write out and lse. `told`: what else it writes. `strides`: those of a dense lse that is not
/// contiguous.
template <std::size_t kDim>
void launch(CheckedCall& call, const Target& target, const KernelInfo& kernel, const Written<kDim>& out,
            const Tensor& lse, const Told* told, const int64_t* strides = nullptr) {
    const Readable q_rows(call.q), k_rows(call.k), v_rows(call.v);
    call.point_to(q_rows, k_rows, v_rows, lse);
    if (strides) call.params.lse_batch = strides[0], call.params.lse_head = strides[1];
    call.params.o = out.rows();
    target.run(kernel, call.params, [&] {
        std::vector<emulator::Buffer> buffers{q_rows.buffer("q"), k_rows.buffer("k"), v_rows.buffer("v"),
                                              out.buffer("o"), buffer_of("lse", lse, true)};
        if (call.params.row_max) buffers.push_back(buffer_of("row_max", *told->row_max, true));
        if (call.params.entropy) buffers.push_back(buffer_of("entropy", *told->entropy, true));
        call.add_buffers(buffers);
        return buffers;
    });
}

/// Writes out. Returns lse.
template <std::size_t kDim>
Tensor write(CheckedCall& call, Written<kDim>& out, bool batch_invariant, Told* told = nullptr) {
    const Operand& q = call.q;
    ForwardParams& p = call.params;
    p.batch_invariant = batch_invariant;
    const Target target(q, call.options.kernel_name, "forward");
    const KernelInfo& kernel = target.choose(p);

    const auto lse_sizes = call.lse_sizes<kDim - 1>();
    Tensor lse = empty(lse_sizes, contiguous(lse_sizes), codes().float32, q);
    if (call.empty() || p.head_dim_v == 0) {
        call.see_no_key(out.memory(), lse);
    } else {
        if (told && kernel.tells && kernel.tells(p, target.device())) {
            if (told->row_max) p.row_max = static_cast<float*>(data_of(*told->row_max));
            if (told->entropy) p.entropy = static_cast<float*>(data_of(*told->entropy));
            told->done = true;
        }
        launch(call, target, kernel, out, lse, told);
    }
    return lse;
}

/// `out_bnhd`: out is (B, H, N, d) in shape and (B, N, H, d) in memory.
template <std::size_t kDim>
std::tuple<Tensor, Tensor> run(CheckedCall& call, const std::array<int64_t, kDim>& out_sizes, bool out_bnhd,
                               int64_t num_splits, bool batch_invariant, Told* told = nullptr) {
    if (num_splits > 1) invalid("num_splits: not yet built");
    std::array<int64_t, kDim> strides = contiguous(out_sizes);
    if constexpr (kDim == 4) strides = row_strides(out_sizes, out_bnhd);
    Written<kDim> out(out_sizes, strides, call.q);
    Tensor lse = write(call, out, batch_invariant, told);
    return {out.take(), std::move(lse)};
}

}  // namespace

std::tuple<Tensor, Tensor> forward(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                   std::optional<double> scale, int64_t window_left, int64_t window_right,
                                   bool bottom_right, bool out_bnhd, const OptionalTensor& attn_bias,
                                   const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges, double softcap,
                                   const OptionalTensor& sinks, const OptionalTensor& rng_state, double dropout_p,
                                   const OptionalTensor& dropout_origin, int64_t num_splits, bool batch_invariant,
                                   const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   sinks,   rng_state, dropout_origin, scale,
                          window_left, window_right, bottom_right, softcap, dropout_p, kernel_name};
    CheckedCall call(q, k, v, options);
    const std::array<int64_t, 4> out{q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
    return run<4>(call, out, out_bnhd, num_splits, batch_invariant);
}

Tensor forward_into(const Tensor& out_tensor, const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                    std::optional<double> scale, int64_t window_left, int64_t window_right, bool bottom_right,
                    const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes,
                    const OptionalTensor& key_ranges, double softcap, const OptionalTensor& sinks,
                    const OptionalTensor& rng_state, double dropout_p, const OptionalTensor& dropout_origin,
                    bool batch_invariant, const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v"), out(out_tensor, "out");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   sinks,   rng_state, dropout_origin, scale,
                          window_left, window_right, bottom_right, softcap, dropout_p, kernel_name};
    CheckedCall call(q, k, v, options);
    const std::array<int64_t, 4> sizes{q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
    if (out.dim != 4 || !std::equal(sizes.begin(), sizes.end(), out.sizes)) out.refuse("(B, Hq, Nq, d_v)");
    if (out.dtype != q.dtype) invalid("out.dtype differs from q's");
    if (!out.same_device(q)) invalid("out.device differs from q's");
    if (kernel_readable(out)) {
        Written<4> rows(out);
        return write(call, rows, batch_invariant);
    }
    auto [made, lse] = run<4>(call, sizes, false, 1, batch_invariant);
    Tensor to = out_tensor;
    torch::stable::copy_(to, made);
    return lse;
}

bool forward_merged(const Tensor& out_tensor, const Tensor& lse_tensor, const Tensor& q_tensor, const Tensor& k_tensor,
                    const Tensor& v_tensor, bool merges, std::optional<double> scale, int64_t window_left,
                    int64_t window_right, bool bottom_right, const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v"), out(out_tensor, "out"), lse(lse_tensor, "lse");
    const OptionalTensor none;
    const Options options{none,        none,         none,         none, none, none,       scale,
                          window_left, window_right, bottom_right, 0.,   0.,   kernel_name};
    CheckedCall call(q, k, v, options);
    const std::array<int64_t, 4> sizes{q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
    if (out.dim != 4 || !std::equal(sizes.begin(), sizes.end(), out.sizes)) out.refuse("(B, Hq, Nq, d_v)");
    if (out.dtype != codes().float32 && !(merges && out.dtype == q.dtype)) out.refuse("float32, or q's dtype to merge");
    if (lse.dim != 3 || !std::equal(sizes.begin(), sizes.end() - 1, lse.sizes) || lse.dtype != codes().float32 ||
        (lse.sizes[2] > 1 && lse.strides[2] != 1))
        lse.refuse("(B, Hq, Nq), float32, with adjacent elements in a row");
    for (const Operand* t : {&out, &lse})
        if (!t->same_device(q)) t->refuse("q's device");
    ForwardParams& p = call.params;
    const Target target(q, kernel_name, "forward");
    const KernelInfo& kernel = target.choose(p);
    if (call.empty() || sizes[3] == 0 || !kernel_readable(out) || !kernel.merges || !kernel.merges(p, target.device()))
        return false;
    p.merges = merges;
    p.out_dtype = out.element_type("");
    launch(call, target, kernel, Written<4>(out), lse_tensor, nullptr, lse.strides);
    return true;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_with_statistics(const Tensor& q_tensor, const Tensor& k_tensor,
                                                                   const Tensor& v_tensor, const std::string& wanted,
                                                                   std::optional<double> scale, int64_t window_left,
                                                                   int64_t window_right, bool bottom_right,
                                                                   const OptionalTensor& sinks, bool batch_invariant,
                                                                   const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const OptionalTensor none;
    const Options options{none,        none,         none,         sinks, none, none,       scale,
                          window_left, window_right, bottom_right, 0.,    0.,   kernel_name};
    CheckedCall call(q, k, v, options);
    const auto lse_sizes = call.lse_sizes<3>();
    const auto made = [&](const char* name) -> OptionalTensor {
        if (wanted.find(name) == std::string::npos) return {};
        return empty(lse_sizes, contiguous(lse_sizes), codes().float32, q);
    };
    Told told{made("max"), made("entropy")};
    const std::array<int64_t, 4> out_sizes{q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
    auto [out, lse] = run<4>(call, out_sizes, false, 1, batch_invariant, &told);
    if (!told.done) {
        auto [row_max, entropy, column_sum, row_sum] =
            statistics(q_tensor, k_tensor, lse, wanted, none, none, none, none, 0, 0, scale, window_left, window_right,
                       bottom_right, none, none, none, 0., "auto", kernel_name);
        return {std::move(out), std::move(lse), std::move(row_max), std::move(entropy)};
    }
    const auto given = [&](OptionalTensor& t) { return t ? std::move(*t) : empty<1>({0}, {1}, codes().float32, q); };
    return {std::move(out), std::move(lse), given(told.row_max), given(told.entropy)};
}

std::tuple<Tensor, Tensor> forward_varlen(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor,
                                          const Tensor& cu_seqlens_q, const Tensor& cu_seqlens_k,
                                          const OptionalTensor& seqused_k, int64_t max_seqlen_q, int64_t max_seqlen_k,
                                          std::optional<double> scale, int64_t window_left, int64_t window_right,
                                          bool bottom_right, const OptionalTensor& attn_bias,
                                          const OptionalTensor& alibi_slopes, const OptionalTensor& key_ranges,
                                          double softcap, const OptionalTensor& sinks, const OptionalTensor& rng_state,
                                          double dropout_p, const OptionalTensor& dropout_origin, int64_t num_splits,
                                          bool batch_invariant, const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{attn_bias,   alibi_slopes, key_ranges,   sinks,   rng_state, dropout_origin, scale,
                          window_left, window_right, bottom_right, softcap, dropout_p, kernel_name};
    CheckedCall call(q, k, v, options, {cu_seqlens_q, cu_seqlens_k, seqused_k, max_seqlen_q, max_seqlen_k});
    const std::array<int64_t, 3> out{q.sizes[0], q.sizes[1], v.sizes[2]};
    return run<3>(call, out, false, num_splits, batch_invariant);
}

std::tuple<Tensor, Tensor> forward_cached(const Tensor& q_tensor, const Tensor& k_cache, const Tensor& v_cache,
                                          const Tensor& cache_seqlens, const OptionalTensor& page_table,
                                          const OptionalTensor& cache_leftpad, const OptionalTensor& cu_seqlens_q,
                                          int64_t max_seqlen_q, int64_t num_splits, std::optional<double> scale,
                                          int64_t window_left, int64_t window_right, bool bottom_right, bool out_bnhd,
                                          const OptionalTensor& attn_bias, const OptionalTensor& alibi_slopes,
                                          double softcap, const OptionalTensor& sinks, bool batch_invariant,
                                          const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_cache, "k_cache"), v(v_cache, "v_cache");
    const OptionalTensor none;
    const Options options{attn_bias,   alibi_slopes, none,         sinks,   none, none,       scale,
                          window_left, window_right, bottom_right, softcap, 0.,   kernel_name};
    CheckedCall call(q, k, v, options, {cache_seqlens, page_table, cache_leftpad, cu_seqlens_q, max_seqlen_q});
    if (num_splits < 0) invalid("num_splits: allowed: 0 or more");
    call.params.partials.num_splits = static_cast<int32_t>(std::min<int64_t>(num_splits, kMaxSeqlen));
    if (call.packed())
        return run<3>(call, std::array<int64_t, 3>{q.sizes[0], q.sizes[1], v.sizes[3]}, false, 1, batch_invariant);
    const std::array<int64_t, 4> out{q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
    return run<4>(call, out, out_bnhd, 1, batch_invariant);
}

}  // namespace flash_wmma
