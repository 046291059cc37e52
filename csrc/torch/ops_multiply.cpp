// torch's matmul for a kernel that leaves products to a library and runs in the emulator.
#include <atomic>

#include "device/product.h"
#include "torch/arguments.h"
#include "torch/emulation.h"

namespace flash_wmma {
namespace {

using torch::headeronly::ScalarType;

std::atomic<int> g_products{0};

Tensor tensor_of(const Matrices& m, int64_t count, int64_t rows, int64_t columns) {
    const ScalarType type = m.type == DType::kFloat32   ? ScalarType::Float
                            : m.type == DType::kFloat16 ? ScalarType::Half
                                                        : ScalarType::BFloat16;
    const torch::stable::Device cpu(torch::headeronly::DeviceType::CPU);
    return torch::stable::from_blob(m.data, {count, rows, columns}, {m.batch, m.row, 1}, cpu, type);
}

}  // namespace

void multiply_by_torch(const Product& p) {
    ++g_products;
    const auto wide = [](const Tensor& t) { return torch::stable::to(t, ScalarType::Float); };
    const Tensor a = wide(tensor_of(p.a, p.count, p.m, p.k));
    const Tensor b = wide(p.transposed ? tensor_of(p.b, p.count, p.n, p.k) : tensor_of(p.b, p.count, p.k, p.n));
    Tensor c = tensor_of(p.c, p.count, p.m, p.n);
    torch::stable::copy_(c, torch::stable::matmul(a, p.transposed ? torch::stable::transpose(b, 1, 2) : b));
}

}  // namespace flash_wmma

int flash_wmma_emulated_products() { return flash_wmma::g_products; }
