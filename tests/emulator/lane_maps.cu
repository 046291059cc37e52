// Which element of a tile each lane holds, of every matrix instruction in use: dumped as the hardware, or the emulator,
// has it. tests/test_emulator_lane_maps.py compares with the formulae that the kernels rely on.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <entry.h>
#include <launch.h>
#include <mma.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include <cstdint>

namespace lane_maps {

using flash_wmma::Entry;
using flash_wmma::launch;
using flash_wmma::shared_memory;
namespace ptx = flash_wmma::ptx;
namespace wmma = nvcuda::wmma;

using bf16 = __nv_bfloat16;

/// A 16x16 tile of which every element is its own index: exact in half and in bf16.
template <class T>
struct TileMemory {
    alignas(32) T tile[256];
};
template <class T>
__device__ void fill(T* tile) {
    for (unsigned i = threadIdx.x; i < 256; i += 32) tile[i] = T(static_cast<float>(i));
    __syncwarp();
}

/// out[lane][i] = x[i] of a fragment; 16 places a lane, of which bf16's operands and accumulators use 8.
template <class Fragment>
__device__ void dump(float* out, const Fragment& f) {
    for (int i = 0; i < f.num_elements; ++i)
        out[16 * threadIdx.x + static_cast<unsigned>(i)] = static_cast<float>(f.x[i]);
}

template <class Use, class T, class Layout>
__global__ void operand(float* out) {
    auto& smem = shared_memory<TileMemory<T>>();
    fill(smem.tile);
    wmma::fragment<Use, 16, 16, 16, T, Layout> f;
    wmma::load_matrix_sync(f, smem.tile, 16);
    dump(out, f);
}
template <class Use, class T, class Layout>
void run_operand(float* out) {
    launch(operand<Use, T, Layout>, {dim3(1), dim3(32), sizeof(TileMemory<T>)}, nullptr, out);
}
const Entry kAHalf("matrix_a_half_row", run_operand<wmma::matrix_a, half, wmma::row_major>);
const Entry kAHalfColumn("matrix_a_half_column", run_operand<wmma::matrix_a, half, wmma::col_major>);
const Entry kBHalf("matrix_b_half_row", run_operand<wmma::matrix_b, half, wmma::row_major>);
const Entry kBHalfColumn("matrix_b_half_column", run_operand<wmma::matrix_b, half, wmma::col_major>);
const Entry kABf16("matrix_a_bf16_row", run_operand<wmma::matrix_a, bf16, wmma::row_major>);
const Entry kABf16Column("matrix_a_bf16_column", run_operand<wmma::matrix_a, bf16, wmma::col_major>);
const Entry kBBf16("matrix_b_bf16_row", run_operand<wmma::matrix_b, bf16, wmma::row_major>);
const Entry kBBf16Column("matrix_b_bf16_column", run_operand<wmma::matrix_b, bf16, wmma::col_major>);

template <bool Columns>
__global__ void accumulator(float* out) {
    auto& smem = shared_memory<TileMemory<float>>();
    fill(smem.tile);
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> f;
    wmma::load_matrix_sync(f, smem.tile, 16, Columns ? wmma::mem_col_major : wmma::mem_row_major);
    dump(out, f);
}
template <bool Columns>
void run_accumulator(float* out) {
    launch(accumulator<Columns>, {dim3(1), dim3(32), sizeof(TileMemory<float>)}, nullptr, out);
}
const Entry kAccumulator("accumulator_row", run_accumulator<false>);
const Entry kAccumulatorColumn("accumulator_column", run_accumulator<true>);

/// out[lane][i]: the i-th element of 16 bits that a lane gets. The tile is four matrices of 8x8, one after another.
template <int Matrices, bool Transposed>
__global__ void ldmatrix(int* out) {
    auto& smem = shared_memory<TileMemory<std::uint16_t>>();
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 256; i += 32) smem.tile[i] = static_cast<std::uint16_t>(i);
    __syncwarp();
    const std::uint16_t* row = &smem.tile[8 * lane % (64 * Matrices)];
    std::uint32_t r[Matrices];
    if constexpr (Matrices == 4 && !Transposed) ptx::ldmatrix_x4(r, row);
    if constexpr (Matrices == 4 && Transposed) ptx::ldmatrix_x4_trans(r, row);
    if constexpr (Matrices == 2 && !Transposed) ptx::ldmatrix_x2(r, row);
    if constexpr (Matrices == 2 && Transposed) ptx::ldmatrix_x2_trans(r, row);
    for (int i = 0; i < Matrices; ++i) {
        out[2 * Matrices * static_cast<int>(lane) + 2 * i] = static_cast<int>(r[i] & 0xffff);
        out[2 * Matrices * static_cast<int>(lane) + 2 * i + 1] = static_cast<int>(r[i] >> 16);
    }
}
template <int Matrices, bool Transposed>
void run_ldmatrix(int* out) {
    launch(ldmatrix<Matrices, Transposed>, {dim3(1), dim3(32), sizeof(TileMemory<std::uint16_t>)}, nullptr, out);
}
const Entry kLdmatrix4("ldmatrix_x4", run_ldmatrix<4, false>);
const Entry kLdmatrix4Trans("ldmatrix_x4_trans", run_ldmatrix<4, true>);
const Entry kLdmatrix2("ldmatrix_x2", run_ldmatrix<2, false>);
const Entry kLdmatrix2Trans("ldmatrix_x2_trans", run_ldmatrix<2, true>);

/// d[lane][4] = the product of registers as they are given: a[lane][K / 4], b[lane][K / 8], c[lane][4].
template <class T, int K>
__global__ void product(float* d, const unsigned* a, const unsigned* b, const float* c) {
    const unsigned lane = threadIdx.x;
    float x[4];
    for (unsigned i = 0; i < 4; ++i) x[i] = c[4 * lane + i];
    std::uint32_t left[K / 4];
    for (unsigned i = 0; i < K / 4; ++i) left[i] = a[K / 4 * lane + i];
    if constexpr (K == 8) {
        ptx::mma_m16n8k8(x, left, b[lane]);
    } else {
        const std::uint32_t right[2] = {b[2 * lane], b[2 * lane + 1]};
        ptx::mma_m16n8k16<T>(x, left, right);
    }
    for (unsigned i = 0; i < 4; ++i) d[4 * lane + i] = x[i];
}
template <class T, int K>
void run_product(float* d, const int* a, const int* b, const float* c) {
    launch(product<T, K>, {dim3(1), dim3(32)}, nullptr, d, reinterpret_cast<const unsigned*>(a),
           reinterpret_cast<const unsigned*>(b), c);
}
const Entry kProduct8("m16n8k8_half", run_product<half, 8>);
const Entry kProduct16("m16n8k16_half", run_product<half, 16>);
const Entry kProductBf16("m16n8k16_bf16", run_product<bf16, 16>);

}  // namespace lane_maps
