// flash_wmma::forward_with_tangents, and takes_tangents: whether a call can be one.
#include "torch/ops.h"

namespace flash_wmma {
namespace {

const OptionalTensor kNone;

/// The tangent of an argument: that tensor, or zeros.
class Tangent {
  public:
    Tangent(const OptionalTensor& given, const char* name, const Operand& moved)
        : tensor_(given ? *given : zeros(moved)), operand_(tensor_, name), readable_(checked(operand_, moved)) {}
    Tangent(const Tangent&) = delete;

    Rows rows() const { return readable_.rows; }
    emulator::Buffer buffer() const { return readable_.buffer(operand_.name); }

  private:
    static Tensor zeros(const Operand& moved) {
        return torch::stable::new_zeros(moved.tensor, {moved.sizes, static_cast<std::size_t>(moved.dim)});
    }
    static const Operand& checked(const Operand& t, const Operand& moved) {
        if (!t.same_device(moved)) invalid(std::string(t.name) + ".device: allowed: that of " + moved.name);
        if (t.dtype != moved.dtype) invalid(std::string(t.name) + ".dtype: allowed: that of " + moved.name);
        if (t.dim != moved.dim || !std::equal(t.sizes, t.sizes + t.dim, moved.sizes))
            t.refuse("that of " + std::string(moved.name));
        return t;
    }

    Tensor tensor_;
    Operand operand_;
    Readable readable_;
};

/// What the kernel of forward has for tangents, or null.
const TangentKernel* kernel_for(const CheckedCall& call, const Target& target) {
    const TangentKernel* const tangents = target.choose(call.params).tangents;
    return tangents && tangents->takes(call.params, target.device()) ? tangents : nullptr;
}

}  // namespace

bool takes_tangents(const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor, std::optional<double> scale,
                    int64_t window_left, int64_t window_right, bool bottom_right, const OptionalTensor& sinks,
                    bool batch_invariant, const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{kNone,       kNone,        kNone,        sinks, kNone, kNone,      scale,
                          window_left, window_right, bottom_right, 0.,    0.,    kernel_name};
    CheckedCall call(q, k, v, options);
    call.params.batch_invariant = batch_invariant;
    return kernel_for(call, {q, kernel_name, "forward"}) != nullptr;
}

std::tuple<Tensor, Tensor, Tensor, Tensor> forward_with_tangents(
    const Tensor& q_tensor, const Tensor& k_tensor, const Tensor& v_tensor, const OptionalTensor& q_tangent,
    const OptionalTensor& k_tangent, const OptionalTensor& v_tangent, std::optional<double> scale, int64_t window_left,
    int64_t window_right, bool bottom_right, bool out_bnhd, const OptionalTensor& sinks, bool batch_invariant,
    const std::string& kernel_name) {
    const Operand q(q_tensor, "q"), k(k_tensor, "k"), v(v_tensor, "v");
    const Options options{kNone,       kNone,        kNone,        sinks, kNone, kNone,      scale,
                          window_left, window_right, bottom_right, 0.,    0.,    kernel_name};
    CheckedCall call(q, k, v, options);
    call.params.batch_invariant = batch_invariant;
    const Target target(q, kernel_name, "forward");
    const TangentKernel* const kernel = kernel_for(call, target);
    if (!kernel) invalid("kernel '" + kernel_name + "' has no tangents of this in one pass");

    const auto lse_sizes = call.lse_sizes<3>();
    const auto numbers = [&] { return empty(lse_sizes, contiguous(lse_sizes), codes().float32, q); };
    Tensor lse = numbers(), dlse = numbers();
    const std::array<int64_t, 4> sizes{q.sizes[0], q.sizes[1], q.sizes[2], v.sizes[3]};
    const auto strides = row_strides(sizes, out_bnhd);
    Written<4> out(sizes, strides, q), dout(sizes, strides, q);
    // Zeros for what does not move, unless q or k alone does: kernels then leave out the others' products
    const bool alone = !v_tangent && q_tangent.has_value() != k_tangent.has_value();
    std::optional<Tangent> dq, dk, dv;
    if (q_tangent || !alone) dq.emplace(q_tangent, "dq", q);
    if (k_tangent || !alone) dk.emplace(k_tangent, "dk", k);
    if (v_tangent || !alone) dv.emplace(v_tangent, "dv", v);
    const auto rows_of = [](const std::optional<Tangent>& tangent) { return tangent ? tangent->rows() : Rows{}; };
    if (call.empty() || call.params.head_dim_v == 0) {
        call.see_no_key(out.memory(), lse);
        torch::stable::zero_(dout.memory());
        torch::stable::zero_(dlse);
    } else {
        const Readable q_rows(q), k_rows(k), v_rows(v);
        call.point_to(q_rows, k_rows, v_rows, lse);
        call.params.o = out.rows();
        TangentParams p{call.params, rows_of(dq), rows_of(dk),
                        rows_of(dv), dout.rows(), static_cast<float*>(data_of(dlse)),
                        nullptr};
        target.run(*kernel, p, [&] {
            std::vector<emulator::Buffer> buffers{
                q_rows.buffer("q"),  k_rows.buffer("k"),          v_rows.buffer("v"),           out.buffer("o"),
                dout.buffer("dout"), buffer_of("lse", lse, true), buffer_of("dlse", dlse, true)};
            for (const std::optional<Tangent>* const moved : {&dq, &dk, &dv})
                if (*moved) buffers.push_back((*moved)->buffer());
            call.add_buffers(buffers);
            return buffers;
        });
    }
    return {out.take(), std::move(lse), dout.take(), std::move(dlse)};
}

}  // namespace flash_wmma
