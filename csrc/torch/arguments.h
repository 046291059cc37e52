// What the ops share: tensors in the form that kernels want, checks of arguments, and where a call runs. The Python
// functions check the same arguments first, with better messages; these checks are the last line of defence.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "attention.h"
#include "registry.h"
#include "torch/emulation.h"
#include "torch/stable.h"

namespace flash_wmma {

using torch::stable::Tensor;
using OptionalTensor = std::optional<Tensor>;

[[noreturn]] inline void invalid(const std::string& what) { throw std::invalid_argument(what); }

// ---- Tensors --------------------------------------------------------------------------------------------------------

/// torch's numbers for the types and devices that occur here.
struct Codes {
    std::array<std::pair<int32_t, DType>, 4> dtypes{{{aoti_torch_dtype_float32(), DType::kFloat32},
                                                     {aoti_torch_dtype_float16(), DType::kFloat16},
                                                     {aoti_torch_dtype_bfloat16(), DType::kBFloat16},
                                                     {aoti_torch_dtype_bool(), DType::kBool}}};
    int32_t float32 = aoti_torch_dtype_float32(), int32 = aoti_torch_dtype_int32(), byte = aoti_torch_dtype_uint8();
    int32_t int64 = aoti_torch_dtype_int64();
    int32_t cpu = aoti_torch_device_type_cpu(), cuda = aoti_torch_device_type_cuda();
};

const Codes& codes();

/// An argument and its properties. Each is asked for once, since each question is a call into torch.
struct Operand {
    const Tensor& tensor;
    const char* name;
    int64_t dim;
    int64_t *sizes, *strides;
    int32_t dtype, device_type, device_index;
    void* data;

    Operand(const Tensor& t, const char* argument);

    bool same_device(const Operand& other) const {
        return device_type == other.device_type && device_index == other.device_index;
    }
    std::string shape() const;
    [[noreturn]] void refuse(const std::string& allowed) const;
    DType element_type(const char* allowed) const;
};

inline int64_t round_up(int64_t n, int64_t multiple) { return (n + multiple - 1) / multiple * multiple; }

void* data_of(const Tensor& t);

/// The memory of a tensor, for the emulator.
emulator::Buffer buffer_of(const char* name, const Tensor& t, bool writable);

/// Uninitialised memory. Not by torch::stable::empty, which goes through the dispatcher, boxed, and takes half a
/// microsecond.
Tensor empty(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, const Operand& like);

template <std::size_t kDim>
Tensor empty(const std::array<int64_t, kDim>& sizes, const std::array<int64_t, kDim>& strides, int32_t dtype,
             const Operand& like) {
    return empty(kDim, sizes.data(), strides.data(), dtype, like);
}

/// The strides of a contiguous tensor, as torch counts them.
template <std::size_t kDim>
std::array<int64_t, kDim> contiguous(const std::array<int64_t, kDim>& sizes) {
    std::array<int64_t, kDim> strides{};
    int64_t stride = 1;
    for (std::size_t i = kDim; i-- > 0; stride *= std::max<int64_t>(sizes[i], 1)) strides[i] = stride;
    return strides;
}

/// Rows of a tensor with these strides: (batch, head, row, column), or (row, head, column) if `dim` is 3.
Rows rows_of(void* data, int64_t dim, const int64_t* strides);

/// Contiguous strides of (B, H, N, columns), or with `bnhd` those of (B, N, H, columns) in memory.
std::array<int64_t, 4> row_strides(const std::array<int64_t, 4>& sizes, bool bnhd);

/// Whether a kernel can read the rows as they stand (attention.h): contiguous, 16-byte aligned, a multiple of 8 long.
bool kernel_readable(const Operand& t);

/// Rows that a kernel reads, and the tensor that holds them: the argument or a copy padded with zeros.
struct Readable {
    Rows rows;
    OptionalTensor copy;
    const Tensor& tensor;

    explicit Readable(const Operand& t);
    emulator::Buffer buffer(const char* name) const { return buffer_of(name, copy ? *copy : tensor, false); }
};

/// Rows that a kernel writes. A kernel writes whole 16-byte vectors, so a number of columns that is no multiple of 8 is
/// written with padding and then copied.
template <std::size_t kDim>
class Written {
  public:
    Written(const std::array<int64_t, kDim>& sizes, const std::array<int64_t, kDim>& strides, const Operand& like)
        : sizes_(sizes), strides_(strides), padded_strides_(strides), like_(like) {
        std::array<int64_t, kDim> padded = sizes;
        padded.back() = round_up(sizes.back(), 8);
        if (padded.back() != sizes.back())
            for (std::size_t i = 0; i + 1 < kDim; ++i)
                padded_strides_[i] = padded_strides_[i] / sizes.back() * padded.back();
        memory_.emplace(empty(padded, padded_strides_, like.dtype, like));
    }
    /// The rows of an argument that a kernel can read as they stand: it can write them too.
    explicit Written(const Operand& given) : like_(given), memory_(given.tensor) {
        std::copy_n(given.sizes, kDim, sizes_.begin());
        std::copy_n(given.strides, kDim, strides_.begin());
        padded_strides_ = strides_;
    }
    Rows rows() const { return rows_of(data_of(*memory_), kDim, padded_strides_.data()); }
    Tensor& memory() { return *memory_; }
    emulator::Buffer buffer(const char* name) const { return buffer_of(name, *memory_, true); }
    /// The result, once the kernel has written it.
    Tensor take() {
        if (padded_strides_ == strides_) return std::move(*memory_);
        Tensor result = empty(sizes_, strides_, like_.dtype, like_);
        torch::stable::copy_(result, torch::stable::narrow(*memory_, kDim - 1, 0, sizes_.back()));
        return result;
    }

  private:
    std::array<int64_t, kDim> sizes_, strides_, padded_strides_;
    const Operand& like_;
    OptionalTensor memory_;
};

// ---- Arguments ------------------------------------------------------------------------------------------------------

/// The arguments that all ops share, apart from q, k and v.
struct Options {
    const OptionalTensor &attn_bias, &alibi_slopes, &key_ranges, &sinks, &rng_state, &dropout_origin;
    std::optional<double> scale;
    int64_t window_left, window_right;
    bool bottom_right;
    double softcap, dropout_p;
    const std::string& kernel_name;
};

/// The lengths of packed sequences.
struct Lengths {
    const Tensor &cu_seqlens_q, &cu_seqlens_k;
    const OptionalTensor& seqused_k;
    int64_t max_seqlen_q, max_seqlen_k;
};

/// Where sequences lie in a key/value cache.
struct Cache {
    const Tensor& seqlens;
    const OptionalTensor &page_table, &leftpad, &cu_seqlens_q;
    int64_t max_seqlen_q;
};

/// The checked arguments of a call as a kernel sees them. Memory that they point to lives as long as this object and
/// the tensors. Still missing are the pointers to q, k, v, o and lse, and the padding of head dims.
struct CheckedCall {
    const Operand &q, &k, &v;
    const Options& options;
    ForwardParams params{};

    /// (B, H, N, d).
    CheckedCall(const Operand& q, const Operand& k, const Operand& v, const Options& options);
    /// Packed: (total, H, d).
    CheckedCall(const Operand& q, const Operand& k, const Operand& v, const Options& options, const Lengths& lengths);

    /// With a cache: k and v (pages, Hk, page_size, d).
    CheckedCall(const Operand& q, const Operand& k, const Operand& v, const Options& options, const Cache& cache);

    bool packed() const { return q.dim == 3; }
    /// Whether no query sees a key, so that there is nothing to run.
    bool empty() const;
    /// Writes the result of queries that see no key.
    void see_no_key(Tensor& out, Tensor& lse) const;
    /// (B, Hq, Nq), or packed (Hq, total_q), contiguous.
    template <std::size_t kDim>
    std::array<int64_t, kDim> lse_sizes() const {
        if constexpr (kDim == 3) return {q.sizes[0], q.sizes[1], q.sizes[2]};
        else return {q.sizes[1], q.sizes[0]};
    }
    /// Points the params to q, k, v and lse, and pads the head dims.
    void point_to(const Readable& q_rows, const Readable& k_rows, const Readable& v_rows, const Tensor& lse);
    /// The same for a launch that reads no q, k and v.
    void point_to(const Tensor& lse);
    /// The memory of the options, for the emulator.
    void add_buffers(std::vector<emulator::Buffer>& buffers) const;

  private:
    void set_options();
    OptionalTensor slopes_, sinks_, rng_state_, cu_seqlens_q_, cu_seqlens_k_, seqused_k_, leftpad_, page_table_;
};

// ---- Where a call runs ----------------------------------------------------------------------------------------------

/// torch's current stream on a CUDA device.
Stream current_stream(int32_t device_index);

/// Where a call runs: on the device of the tensors or, for a CUDA kernel named on CPU tensors, in the emulator.
class Target {
  public:
    Target(const Operand& q, const std::string& kernel_name, const char* direction);

    const DeviceFacts& device() const { return device_; }

    template <class Params>
    const Kernel<Params>& choose(const Params& params) const {
        return registry::select(kernel_name_, params, device_,
                                emulation_ ? emulation_->kernels() : registry::kernels());
    }

    /// Gives the kernel its workspace and launches it. buffers() returns the memory that the kernel may touch; only the
    /// emulator asks for it.
    template <class Launched, class Params, class Buffers>
    void run(const Launched& kernel, Params& params, const Buffers& buffers) const {
        OptionalTensor workspace;
        if (const int64_t bytes = kernel.workspace_bytes(params, device_)) {
            workspace = empty<1>({bytes}, {1}, codes().byte, q_);
            params.workspace = data_of(*workspace);
        }
        if (emulation_) {
            std::vector<emulator::Buffer> all = buffers();
            if (workspace) all.push_back(buffer_of("workspace", *workspace, true));
            emulation_->run(kernel, params, all);
        } else {
            on_stream([&](Stream stream) { kernel.launch(params, device_, stream); });
        }
    }

  private:
    template <class Launch>
    void on_stream(const Launch& launch) const {
        if (q_.device_type != codes().cuda) return launch(nullptr);
        const torch::stable::accelerator::DeviceGuard guard(q_.device_index);
        launch(current_stream(q_.device_index));
    }

    const Operand& q_;
    const std::string& kernel_name_;
    DeviceFacts device_;
    std::optional<Emulation> emulation_;
};

}  // namespace flash_wmma
