// Products of matrices by cuBLAS, on CUDA. Kernel files include <blas.h>; the emulator has its own definition of the
// same interface. cuBLAS and its handle are torch's: the loader finds them with this library. Without CUDA they are
// absent, hence weak.
#pragma once

#include <climits>
#include <stdexcept>
#include <string>

#include "device/product.h"

extern "C" {
__attribute__((weak)) int torch_get_current_cuda_blas_handle(void** handle);
__attribute__((weak)) int cublasGemmStridedBatchedEx(void* handle, int op_a, int op_b, int m, int n, int k,
                                                     const void* alpha, const void* a, int type_a, int row_a,
                                                     long long batch_a, const void* b, int type_b, int row_b,
                                                     long long batch_b, const void* beta, void* c, int type_c,
                                                     int row_c, long long batch_c, int count, int compute_type,
                                                     int algorithm);
}

namespace flash_wmma {

/// Computes the product, asynchronously on torch's current stream of the current device, with the precision of fp32
/// that torch's matmul has there. Throws std::runtime_error if cuBLAS reports an error, or if a size exceeds its int.
inline void multiply(const Product& p, Stream) {
    // cuBLAS's own numbers for the arguments, as its header has them.
    constexpr int kAsIs = 0, kTransposed = 1, kCompute32F = 68, kDefaultAlgorithm = -1;
    const auto type = [](DType t) { return t == DType::kFloat32 ? 0 : t == DType::kFloat16 ? 2 : 14; };
    const auto checked = [](std::int64_t n, const char* what) {
        if (n < 0 || n > INT_MAX) throw std::runtime_error(std::string("flash_wmma: cuBLAS: ") + what + " beyond int");
        return static_cast<int>(n);
    };
    void* handle = nullptr;
    if (!torch_get_current_cuda_blas_handle || !cublasGemmStridedBatchedEx ||
        torch_get_current_cuda_blas_handle(&handle) != 0)
        throw std::runtime_error("flash_wmma: torch gives no cuBLAS handle");
    // A row-major matrix is a column-major one transposed: c^T = b^T a^T.
    const float one = 1.f, zero = 0.f;
    const int status = cublasGemmStridedBatchedEx(
        handle, p.transposed ? kTransposed : kAsIs, kAsIs, checked(p.n, "n"), checked(p.m, "m"), checked(p.k, "k"),
        &one, p.b.data, type(p.b.type), checked(p.b.row, "a row stride"), p.b.batch, p.a.data, type(p.a.type),
        checked(p.a.row, "a row stride"), p.a.batch, &zero, p.c.data, type(p.c.type), checked(p.c.row, "a row stride"),
        p.c.batch, checked(p.count, "the number of products"), kCompute32F, kDefaultAlgorithm);
    if (status == 0) return;
    const char* name = status == 1    ? "not initialised"
                       : status == 3  ? "allocation failed"
                       : status == 7  ? "invalid value"
                       : status == 8  ? "architecture mismatch"
                       : status == 13 ? "execution failed"
                       : status == 15 ? "not supported"
                                      : "internal error";
    throw std::runtime_error("flash_wmma: cublasGemmStridedBatchedEx: " + std::string(name) + " (status " +
                             std::to_string(status) + ")");
}

}  // namespace flash_wmma
