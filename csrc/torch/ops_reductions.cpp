// flash_wmma::array_max, array_sum, row_max, row_sum and row_softmax, on CUDA tensors.
#include "reductions/reductions.h"
#include "torch/ops.h"

namespace flash_wmma {
namespace reductions {

// Absent from a build without CUDA kernels, hence weak.
__attribute__((weak)) std::int64_t workspace_bytes(const Array& x, const DeviceFacts& device);
__attribute__((weak)) void reduce_rows(Reduction reduction, const Array& x, void* out, void* workspace,
                                       const DeviceFacts& device, Stream stream);
__attribute__((weak)) void softmax_rows(const Array& x, void* out, const DeviceFacts& device, Stream stream);

}  // namespace reductions

namespace {

using reductions::Array;
using reductions::Reduction;
using reductions::Type;

Type type_of(const Operand& x) {
    if (x.dtype == codes().int32) return Type::kInt32;
    switch (x.element_type("float32, float16, bfloat16, int32")) {
        case DType::kFloat32: return Type::kFloat32;
        case DType::kFloat16: return Type::kFloat16;
        case DType::kBFloat16: return Type::kBFloat16;
        case DType::kBool: break;
    }
    invalid("x.dtype: allowed: float32, float16, bfloat16, int32");
}

DeviceFacts device_of(const Operand& x) {
    const DeviceRuntime* runtime = registry::device_runtime();
    if (!runtime || !reductions::reduce_rows)
        throw std::runtime_error(
            "flash_wmma was built without CUDA kernels: install nvcc and rebuild it (README, Installation)");
    return runtime->facts(x.device_index);
}

/// x (N, C) with adjacent columns: in place, or copied to `kept`.
Array rows_of(const Operand& x, OptionalTensor& kept) {
    if (x.dim != 2) x.refuse("(N, C)");
    const int64_t rows = x.sizes[0], columns = x.sizes[1];
    if (columns <= 1 || x.strides[1] == 1) return {x.data, type_of(x), rows, columns, x.strides[0]};
    kept = torch::stable::contiguous(x.tensor);
    return {data_of(*kept), type_of(x), rows, columns, columns};
}

/// x of any shape as one row.
Array array_of(const Operand& x, OptionalTensor& kept) {
    kept = torch::stable::contiguous(x.tensor);
    int64_t elements = 1;
    for (int64_t i = 0; i < x.dim; ++i) elements *= x.sizes[i];
    return {data_of(*kept), type_of(x), 1, elements, elements};
}

/// One result per row, of shape (N) or, if `dim` is 0, ().
Tensor reduce(const Operand& x, const Array& array, Reduction reduction, int64_t dim) {
    const DeviceFacts device = device_of(x);
    const bool sum = reduction == Reduction::kSum;
    const int32_t dtype = sum && array.type == Type::kInt32 ? aoti_torch_dtype_int64() : x.dtype;
    const int64_t stride = 1;
    Tensor out = empty(dim, &array.rows, &stride, dtype, x);
    if (array.columns == 0) {
        if (!sum) x.refuse("at least one element to take the maximum of");
        torch::stable::zero_(out);
    } else if (array.rows > 0) {
        const torch::stable::accelerator::DeviceGuard guard(x.device_index);
        OptionalTensor workspace;
        if (const int64_t bytes = reductions::workspace_bytes(array, device))
            workspace = empty<1>({bytes}, {1}, codes().byte, x);
        reductions::reduce_rows(reduction, array, data_of(out), workspace ? data_of(*workspace) : nullptr, device,
                                current_stream(x.device_index));
    }
    return out;
}

Tensor reduce_array(const Tensor& x_tensor, Reduction reduction) {
    const Operand x(x_tensor, "x");
    OptionalTensor kept;
    return reduce(x, array_of(x, kept), reduction, 0);
}

Tensor reduce_rows(const Tensor& x_tensor, Reduction reduction) {
    const Operand x(x_tensor, "x");
    OptionalTensor kept;
    return reduce(x, rows_of(x, kept), reduction, 1);
}

}  // namespace

Tensor array_max(const Tensor& x) { return reduce_array(x, Reduction::kMax); }
Tensor array_sum(const Tensor& x) { return reduce_array(x, Reduction::kSum); }
Tensor row_max(const Tensor& x) { return reduce_rows(x, Reduction::kMax); }
Tensor row_sum(const Tensor& x) { return reduce_rows(x, Reduction::kSum); }

Tensor row_softmax(const Tensor& x_tensor) {
    const Operand x(x_tensor, "x");
    OptionalTensor kept;
    const Array array = rows_of(x, kept);
    if (array.type == Type::kInt32) invalid("x.dtype: allowed: float32, float16, bfloat16");
    const DeviceFacts device = device_of(x);
    const std::array<int64_t, 2> sizes{array.rows, array.columns};
    Tensor out = empty(sizes, contiguous(sizes), x.dtype, x);
    if (array.rows > 0 && array.columns > 0) {
        const torch::stable::accelerator::DeviceGuard guard(x.device_index);
        reductions::softmax_rows(array, data_of(out), device, current_stream(x.device_index));
    }
    return out;
}

}  // namespace flash_wmma
