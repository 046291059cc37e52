// merge_rows as a program of the emulator (flash_wmma.emulator.Program): its source, unchanged.
#include <entry.h>

#include "merge/merge.cu"

namespace flash_wmma {
namespace {

/// `sizes`: batch, heads, rows of the part, d_v. `strides`: of batch, head and row: of out, part_out, lse, part_lse.
void run(int dtype, int part_dtype, const std::int64_t* sizes, const std::int64_t* strides, void* out, void* lse,
         const void* part_out, const void* part_lse, const std::int64_t* rows) {
    const auto rows_of = [&](const void* data, int i) {
        return Rows{const_cast<void*>(data), strides[3 * i], strides[3 * i + 1], strides[3 * i + 2]};
    };
    const auto values_of = [&](const void* data, int i) {
        return RowValues{static_cast<float*>(const_cast<void*>(data)), strides[3 * i], strides[3 * i + 1],
                         strides[3 * i + 2]};
    };
    const MergeParams p{sizes[0],
                        sizes[1],
                        sizes[2],
                        static_cast<int>(sizes[3]),
                        static_cast<DType>(dtype),
                        static_cast<DType>(part_dtype),
                        rows_of(out, 0),
                        values_of(lse, 2),
                        rows_of(part_out, 1),
                        values_of(part_lse, 3),
                        rows};
    merge_rows(p, nullptr);
}

const Entry kMerge("merge", run);

}  // namespace
}  // namespace flash_wmma
