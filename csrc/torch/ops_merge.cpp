// flash_wmma::merge_parts on CUDA tensors.
#include "merge/merge.h"
#include "torch/ops.h"

namespace flash_wmma {

// Absent from a build without CUDA kernels, hence weak.
__attribute__((weak)) void merge_rows(const MergeParams& params, Stream stream);

namespace {

void check(bool holds, const Operand& t, const std::string& allowed) {
    if (!holds) t.refuse(allowed);
}

/// (B, H, n) or (H, n).
RowValues values_of(const Operand& t) {
    const int64_t* s = t.strides + t.dim - 2;
    return {static_cast<float*>(t.data), t.dim == 3 ? t.strides[0] : 0, s[0], s[1]};
}

}  // namespace

void merge_parts(const Tensor& out_tensor, const Tensor& lse_tensor, const Tensor& part_out_tensor,
                 const Tensor& part_lse_tensor, const OptionalTensor& rows_tensor) {
    if (!merge_rows)
        throw std::runtime_error(
            "flash_wmma was built without CUDA kernels: install nvcc and rebuild it (README, Installation)");
    const Operand out(out_tensor, "out"), lse(lse_tensor, "lse"), part_out(part_out_tensor, "part_out"),
        part_lse(part_lse_tensor, "part_lse");
    const bool packed = out.dim == 3;
    const int64_t row = packed ? 0 : 2, head = 1;
    check(packed || out.dim == 4, out, "(B, H, N, d_v), or packed (N, H, d_v)");
    check(part_out.dim == out.dim, part_out, "out's dimensions");
    check(lse.dim == out.dim - 1 && part_lse.dim == lse.dim, lse, "(B, H, N), or packed (H, N), as part_lse");
    for (int64_t i = 0; i < out.dim; ++i)
        check(i == row || part_out.sizes[i] == out.sizes[i], part_out, "out's sizes but for the rows");
    for (const auto& [t, of] : {std::pair(&lse, &out), std::pair(&part_lse, &part_out)})
        check(t->dtype == codes().float32 && t->sizes[t->dim - 1] == of->sizes[row] &&
                  t->sizes[t->dim - 2] == of->sizes[head] && (packed || t->sizes[0] == of->sizes[0]),
              *t, "float32, a value for each row");
    for (const Operand* t : {&lse, &part_out, &part_lse}) check(t->same_device(out), *t, "out's device");
    for (const Operand* t : {&out, &part_out})
        check(t->sizes[t->dim - 1] <= 1 || t->strides[t->dim - 1] == 1, *t, "adjacent elements in a row");
    MergeParams p{};
    p.dtype = out.element_type("float32, float16, bfloat16");
    p.part_dtype = part_out.element_type("float32, float16, bfloat16");
    check(p.part_dtype != DType::kBool && (p.dtype == p.part_dtype || p.dtype == DType::kFloat32), out,
          "part_out's dtype or float32");
    p.batch = packed ? 1 : out.sizes[0], p.heads = out.sizes[head], p.rows_of_part = part_out.sizes[row];
    p.head_dim_v = static_cast<int>(out.sizes[out.dim - 1]);
    p.out = rows_of(out.data, out.dim, out.strides),
    p.part_out = rows_of(part_out.data, part_out.dim, part_out.strides);
    p.lse = values_of(lse), p.part_lse = values_of(part_lse);
    if (rows_tensor) {
        const Operand rows(*rows_tensor, "rows");
        check(rows.dtype == codes().int64 && rows.dim == 1 && rows.sizes[0] == p.rows_of_part &&
                  (rows.sizes[0] <= 1 || rows.strides[0] == 1) && rows.same_device(out),
              rows, "(rows of part_out), int64, contiguous, on out's device");
        p.rows = static_cast<const std::int64_t*>(rows.data);
    } else {
        check(part_out.sizes[row] == out.sizes[row], part_out, "as many rows as out, or rows");
    }
    const torch::stable::accelerator::DeviceGuard guard(out.device_index);
    merge_rows(p, current_stream(out.device_index));
}

}  // namespace flash_wmma
