// The reductions as a program of the emulator (flash_wmma.emulator.Program): their sources, unchanged.
#include <entry.h>

#include "reductions/reduce.cu"
#include "reductions/softmax.cu"

namespace flash_wmma::reductions {
namespace {

DeviceFacts device(int sm_count, int warp_size) {
    DeviceFacts facts;
    facts.sm_count = sm_count;
    facts.warp_size = warp_size;
    return facts;
}

Array array(const void* x, int type, std::int64_t rows, std::int64_t columns, std::int64_t stride) {
    return {x, static_cast<Type>(type), rows, columns, stride};
}

void reduce(const void* x, int type, std::int64_t rows, std::int64_t columns, std::int64_t stride, int reduction,
            int sm_count, int warp_size, void* out, void* workspace, std::int64_t workspace_size) {
    const Array a = array(x, type, rows, columns, stride);
    const DeviceFacts facts = device(sm_count, warp_size);
    if (workspace_bytes(a, facts) > workspace_size) throw std::runtime_error("reductions: the workspace is too small");
    reduce_rows(static_cast<Reduction>(reduction), a, out, workspace, facts, nullptr);
}

void softmax(const void* x, int type, std::int64_t rows, std::int64_t columns, std::int64_t stride, int sm_count,
             int warp_size, void* out) {
    softmax_rows(array(x, type, rows, columns, stride), out, device(sm_count, warp_size), nullptr);
}

const Entry kReduce("reduce", reduce), kSoftmax("softmax", softmax);

}  // namespace
}  // namespace flash_wmma::reductions
