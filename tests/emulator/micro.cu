// One kernel per phenomenon that the emulator counts: strides, widths, conflicts, divergence, matrix instructions.
// tests/test_emulator_counts.py has the counts, derived by hand; compiled by nvcc the same kernels give Nsight
// Compute's. Loops over a runtime count are not unrolled and every access stands on a line of its own, so that g++ and
// nvcc make the same accesses of it. "count: NAME" marks the lines that the tests look at.
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <entry.h>
#include <launch.h>
#include <mma.h>
#include <ptx.cuh>
#include <shared_memory.cuh>

#include <cstdint>

namespace micro {

using flash_wmma::Entry;
using flash_wmma::launch;
using flash_wmma::shared_memory;
namespace ptx = flash_wmma::ptx;
namespace wmma = nvcuda::wmma;

// --- global memory ---------------------------------------------------------------------------------------------------

/// Lanes `Stride` floats apart.
template <int Stride>
__global__ void global_stride(float* out, const float* in) {
    const unsigned i = threadIdx.x * Stride;
    const float x = in[i];  // count: global_stride load
    out[i] = x + 1;         // count: global_stride store
}
template <int Stride>
void run_global_stride(float* out, const float* in) {
    launch(global_stride<Stride>, {dim3(1), dim3(32)}, nullptr, out, in);
}
const Entry kGlobalStride1("global_stride_1", run_global_stride<1>);
const Entry kGlobalStride2("global_stride_2", run_global_stride<2>);
const Entry kGlobalStride8("global_stride_8", run_global_stride<8>);
const Entry kGlobalStride33("global_stride_33", run_global_stride<33>);

/// Neighbours, but from one float past a sector's start.
__global__ void global_shifted(float* out, const float* in) {
    const float x = in[threadIdx.x + 1];  // count: global_shifted load
    out[threadIdx.x] = x;                 // count: global_shifted store
}
void run_global_shifted(float* out, const float* in) { launch(global_shifted, {dim3(1), dim3(32)}, nullptr, out, in); }
const Entry kGlobalShifted("global_shifted", run_global_shifted);

/// Every lane the same word.
__global__ void global_broadcast(float* out, const float* in) {
    const float x = in[blockIdx.x];                      // count: global_broadcast load
    out[blockIdx.x * blockDim.x + threadIdx.x] = x + 1;  // count: global_broadcast store
}
void run_global_broadcast(float* out, const float* in, int blocks) {
    launch(global_broadcast, {dim3(static_cast<unsigned>(blocks)), dim3(64)}, nullptr, out, in);
}
const Entry kGlobalBroadcast("global_broadcast", run_global_broadcast);

/// A last warp of 16 lanes, of which 8 have something to do.
__global__ void partial_warp(float* out, const float* in, int n) {
    const int i = static_cast<int>(threadIdx.x);
    if (i >= n) return;
    const float x = in[i];  // count: partial_warp load
    out[i] = x;             // count: partial_warp store
}
void run_partial_warp(float* out, const float* in, int n) {
    launch(partial_warp, {dim3(1), dim3(48)}, nullptr, out, in, n);
}
const Entry kPartialWarp("partial_warp", run_partial_warp);

// --- shared memory ---------------------------------------------------------------------------------------------------

/// A 32x32 tile by 8 warps, with `Pad` floats at the end of each row.
template <int Pad>
struct TransposeMemory {
    float tile[32][32 + Pad];
};
template <int Pad>
__global__ void transpose(float* out, const float* in) {
    auto& smem = shared_memory<TransposeMemory<Pad>>();
    const unsigned x = threadIdx.x, y = threadIdx.y;
    for (unsigned row = y; row < 32; row += 8) {
        const float value = in[row * 32 + x];  // count: transpose global load
        smem.tile[row][x] = value;             // count: transpose store
    }
    __syncthreads();  // count: transpose barrier
    for (unsigned row = y; row < 32; row += 8) {
        const float value = smem.tile[x][row];  // count: transpose load
        out[row * 32 + x] = value;              // count: transpose global store
    }
}
template <int Pad>
void run_transpose(float* out, const float* in) {
    launch(transpose<Pad>, {dim3(1), dim3(32, 8), sizeof(TransposeMemory<Pad>)}, nullptr, out, in);
}
const Entry kTranspose0("transpose_0", run_transpose<0>);
const Entry kTranspose1("transpose_1", run_transpose<1>);

/// Lanes `Stride` floats apart.
template <int Stride>
struct StrideMemory {
    float words[32 * Stride];
};
template <int Stride>
__global__ void shared_stride(float* out, const float* in) {
    auto& smem = shared_memory<StrideMemory<Stride>>();
    const unsigned lane = threadIdx.x;
    const float loaded = in[lane];                         // count: shared_stride global load
    smem.words[lane * Stride] = loaded;                    // count: shared_stride store
    __syncwarp();                                          // count: shared_stride sync
    const float value = smem.words[(31 - lane) * Stride];  // count: shared_stride load
    out[lane] = value;                                     // count: shared_stride global store
}
template <int Stride>
void run_shared_stride(float* out, const float* in) {
    launch(shared_stride<Stride>, {dim3(1), dim3(32), sizeof(StrideMemory<Stride>)}, nullptr, out, in);
}
const Entry kSharedStride1("shared_stride_1", run_shared_stride<1>);
const Entry kSharedStride2("shared_stride_2", run_shared_stride<2>);
const Entry kSharedStride8("shared_stride_8", run_shared_stride<8>);
const Entry kSharedStride16("shared_stride_16", run_shared_stride<16>);
const Entry kSharedStride32("shared_stride_32", run_shared_stride<32>);
const Entry kSharedStride33("shared_stride_33", run_shared_stride<33>);

/// 4, 8 and 16 bytes a lane, lanes `Stride` bytes apart in shared memory.
template <class Vector, int Stride>
struct alignas(16) VectorMemory {
    unsigned char bytes[32 * Stride];
    __device__ Vector& at(unsigned lane) { return *reinterpret_cast<Vector*>(&bytes[lane * Stride]); }
};
template <class Vector, int Stride>
__global__ void vectors(Vector* out, const Vector* in) {
    auto& smem = shared_memory<VectorMemory<Vector, Stride>>();
    const unsigned lane = threadIdx.x;
    const Vector loaded = in[lane];           // count: vectors global load
    smem.at(lane) = loaded;                   // count: vectors store
    __syncwarp();                             // count: vectors sync
    const Vector value = smem.at(31 - lane);  // count: vectors load
    out[lane] = value;                        // count: vectors global store
    const Vector shared = smem.at(lane / 2);  // count: vectors pairs
    out[lane + 32] = shared;                  // count: vectors second global store
}
template <class Vector, int Stride>
void run_vectors(float* out, const float* in) {
    launch(vectors<Vector, Stride>, {dim3(1), dim3(32), sizeof(VectorMemory<Vector, Stride>)}, nullptr,
           reinterpret_cast<Vector*>(out), reinterpret_cast<const Vector*>(in));
}
const Entry kVectors4("vectors_4", run_vectors<float, 4>);
const Entry kVectors8("vectors_8", run_vectors<float2, 8>);
const Entry kVectors16("vectors_16", run_vectors<float4, 16>);
const Entry kVectorRows8("vectors_8_by_row", run_vectors<float2, 128>);
const Entry kVectorRows16("vectors_16_by_row", run_vectors<float4, 128>);
const Entry kVectorPadded16("vectors_16_by_padded_row", run_vectors<float4, 144>);

/// One word for all lanes; then two words of one bank, for one half of the warp each.
struct BroadcastMemory {
    float words[64];
};
__global__ void shared_broadcast(float* out, int which) {
    auto& smem = shared_memory<BroadcastMemory>();
    const unsigned lane = threadIdx.x;
    smem.words[lane] = static_cast<float>(lane);       // count: shared_broadcast store
    smem.words[lane + 32] = static_cast<float>(lane);  // count: shared_broadcast second store
    __syncwarp();                                      // count: shared_broadcast sync
    const float one = smem.words[which];               // count: shared_broadcast one
    const float two = smem.words[lane / 16 * 32];      // count: shared_broadcast two
    out[lane] = one + two;                             // count: shared_broadcast global store
}
void run_shared_broadcast(float* out, int which) {
    launch(shared_broadcast, {dim3(1), dim3(32), sizeof(BroadcastMemory)}, nullptr, out, which);
}
const Entry kSharedBroadcast("shared_broadcast", run_shared_broadcast);

/// A column of halves, two of which share a word in a row.
template <int Pitch>
struct HalfMemory {
    half tile[32][Pitch];
};
template <int Pitch>
__global__ void half_column(half* out, const half* in) {
    auto& smem = shared_memory<HalfMemory<Pitch>>();
    const unsigned lane = threadIdx.x;
    const half loaded = in[lane];                // count: half_column global load
    smem.tile[lane][0] = loaded;                 // count: half_column store
    smem.tile[0][lane + 1] = loaded;             // count: half_column row
    __syncwarp();                                // count: half_column sync
    const half value = smem.tile[31 - lane][0];  // count: half_column load
    out[lane] = value;                           // count: half_column global store
}
template <int Pitch>
void run_half_column(std::uint16_t* out, const std::uint16_t* in) {
    launch(half_column<Pitch>, {dim3(1), dim3(32), sizeof(HalfMemory<Pitch>)}, nullptr, reinterpret_cast<half*>(out),
           reinterpret_cast<const half*>(in));
}
const Entry kHalfColumn64("half_column_64", run_half_column<64>);
const Entry kHalfColumn66("half_column_66", run_half_column<66>);

// --- divergence ------------------------------------------------------------------------------------------------------

struct LoopMemory {
    float words[96];
};
/// Lane l makes l % 4 rounds.
__global__ void divergent_loop(float* out) {
    auto& smem = shared_memory<LoopMemory>();
    const unsigned lane = threadIdx.x;
    for (unsigned i = lane; i < 96; i += 32) smem.words[i] = static_cast<float>(i);  // count: divergent_loop store
    __syncwarp();                                                                    // count: divergent_loop sync
    float sum = 0;
#pragma unroll 1
    for (unsigned i = 0; i < lane % 4; ++i) sum += smem.words[i * 32 + lane];  // count: divergent_loop load
    out[lane] = sum;                                                           // count: divergent_loop global store
}
void run_divergent_loop(float* out) { launch(divergent_loop, {dim3(1), dim3(32), sizeof(LoopMemory)}, nullptr, out); }
const Entry kDivergentLoop("divergent_loop", run_divergent_loop);

/// Odd lanes go one way for `rounds` rounds, even lanes the other.
__global__ void divergent_branch(float* out, const float* in, int rounds) {
    const unsigned lane = threadIdx.x;
    float sum = in[lane];  // count: divergent_branch load
    if (lane % 2) {
#pragma unroll 1
        for (int i = 0; i < rounds; ++i) {
            const float x = in[lane + 32 * static_cast<unsigned>(i + 1)];  // count: divergent_branch odd
            sum = sum * x + 1;
        }
    } else {
#pragma unroll 1
        for (int i = 0; i < rounds; ++i) {
            const float x = in[2 * lane + static_cast<unsigned>(i)];  // count: divergent_branch even
            sum = x - sum;
        }
    }
    out[lane] = sum;  // count: divergent_branch store
}
void run_divergent_branch(float* out, const float* in, int rounds) {
    launch(divergent_branch, {dim3(1), dim3(32)}, nullptr, out, in, rounds);
}
const Entry kDivergentBranch("divergent_branch", run_divergent_branch);

/// The same branch where every lane of a warp goes the same way.
__global__ void uniform_branch(float* out, const float* in, int rounds) {
    float sum = in[threadIdx.x];  // count: uniform_branch load
    if (threadIdx.x / 32 % 2) {
#pragma unroll 1
        for (int i = 0; i < rounds; ++i) {
            const float x = in[threadIdx.x + 32 * static_cast<unsigned>(i + 1)];  // count: uniform_branch one warp
            sum = x - sum;
        }
    }
    out[threadIdx.x] = sum;  // count: uniform_branch store
}
void run_uniform_branch(float* out, const float* in, int rounds) {
    launch(uniform_branch, {dim3(1), dim3(64)}, nullptr, out, in, rounds);
}
const Entry kUniformBranch("uniform_branch", run_uniform_branch);

// --- matrices --------------------------------------------------------------------------------------------------------

/// Sixteen rows of 64 halves, with `Pad` more each.
template <int Pad>
struct MatrixMemory {
    alignas(32) half tile[16][64 + Pad];
};
/// Copied from global memory, 16 bytes a lane.
template <int Pad>
__device__ void fill(MatrixMemory<Pad>& smem, const uint4* in) {
    for (unsigned i = threadIdx.x; i < 128; i += 32)
        *reinterpret_cast<uint4*>(&smem.tile[i / 8][i % 8 * 8]) = in[i];  // count: fill
    __syncwarp();                                                         // count: fill sync
}

template <int Pad>
__global__ void ldmatrix(unsigned* out, const uint4* in) {
    auto& smem = shared_memory<MatrixMemory<Pad>>();
    const unsigned lane = threadIdx.x;
    fill(smem, in);
    std::uint32_t four[4], two[2];
    ptx::ldmatrix_x4(four, &smem.tile[lane % 16][lane / 16 * 8]);         // count: ldmatrix x4
    ptx::ldmatrix_x2_trans(two, &smem.tile[lane % 16][16]);               // count: ldmatrix x2
    out[lane] = four[0] + four[1] + four[2] + four[3] + two[0] + two[1];  // count: ldmatrix global store
}
template <int Pad>
void run_ldmatrix(float* out, const float* in) {
    launch(ldmatrix<Pad>, {dim3(1), dim3(32), sizeof(MatrixMemory<Pad>)}, nullptr, reinterpret_cast<unsigned*>(out),
           reinterpret_cast<const uint4*>(in));
}
const Entry kLdmatrix0("ldmatrix_0", run_ldmatrix<0>);
const Entry kLdmatrix8("ldmatrix_8", run_ldmatrix<8>);

/// Accumulator fragments to shared memory and back.
template <int Pitch>
struct AccumulatorMemory {
    alignas(32) float tile[16 * Pitch];
};
template <int Pitch, bool Columns>
__global__ void accumulator(float* out) {
    auto& smem = shared_memory<AccumulatorMemory<Pitch>>();
    constexpr auto kLayout = Columns ? wmma::mem_col_major : wmma::mem_row_major;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    for (int i = 0; i < c.num_elements; ++i) c.x[i] = static_cast<float>(threadIdx.x) + static_cast<float>(i);
    wmma::store_matrix_sync(smem.tile, c, Pitch, kLayout);     // count: accumulator store
    __syncwarp();                                              // count: accumulator sync
    wmma::load_matrix_sync(c, smem.tile, Pitch, kLayout);      // count: accumulator load
    wmma::store_matrix_sync(out, c, 16, wmma::mem_row_major);  // count: accumulator global store
}
template <int Pitch, bool Columns>
void run_accumulator(float* out) {
    launch(accumulator<Pitch, Columns>, {dim3(1), dim3(32), sizeof(AccumulatorMemory<Pitch>)}, nullptr, out);
}
const Entry kRows16("accumulator_rows_16", run_accumulator<16, false>);
const Entry kRows20("accumulator_rows_20", run_accumulator<20, false>);
const Entry kRows24("accumulator_rows_24", run_accumulator<24, false>);
const Entry kRows32("accumulator_rows_32", run_accumulator<32, false>);
const Entry kColumns16("accumulator_columns_16", run_accumulator<16, true>);
const Entry kColumns20("accumulator_columns_20", run_accumulator<20, true>);
const Entry kColumns24("accumulator_columns_24", run_accumulator<24, true>);

/// half operands out of shared memory (matrix_a) and out of global memory (matrix_b), and their product.
template <int Pad>
__global__ void operands(float* out, const half* in) {
    auto& smem = shared_memory<MatrixMemory<Pad>>();
    fill(smem, reinterpret_cast<const uint4*>(in));
    wmma::fragment<wmma::matrix_a, 16, 16, 16, half, wmma::row_major> a;
    wmma::fragment<wmma::matrix_b, 16, 16, 16, half, wmma::col_major> b;
    wmma::fragment<wmma::accumulator, 16, 16, 16, float> c;
    wmma::fill_fragment(c, 0.f);
    wmma::load_matrix_sync(a, &smem.tile[0][0], 64 + Pad);     // count: operands shared
    wmma::load_matrix_sync(b, in, 64);                         // count: operands global
    wmma::mma_sync(c, a, b, c);                                // count: operands product
    wmma::store_matrix_sync(out, c, 16, wmma::mem_row_major);  // count: operands store
}
template <int Pad>
void run_operands(float* out, const std::uint16_t* in) {
    launch(operands<Pad>, {dim3(1), dim3(32), sizeof(MatrixMemory<Pad>)}, nullptr, out,
           reinterpret_cast<const half*>(in));
}
const Entry kOperands0("operands_0", run_operands<0>);
const Entry kOperands8("operands_8", run_operands<8>);

/// `rounds` rounds of each mma.sync, by two warps.
__global__ void products(float* out, const unsigned* in, int rounds) {
    const unsigned lane = threadIdx.x;
    float d[4] = {};
    const std::uint32_t b[2] = {in[lane], in[lane + 64]};  // count: products load
    const std::uint32_t a2[2] = {b[0], b[1]}, a4[4] = {b[0], b[1], b[0], b[1]};
#pragma unroll 1
    for (int i = 0; i < rounds; ++i) {
        ptx::mma_m16n8k8(d, a2, b[0]);               // count: products m16n8k8
        ptx::mma_m16n8k16<half>(d, a4, b);           // count: products m16n8k16 half
        ptx::mma_m16n8k16<__nv_bfloat16>(d, a4, b);  // count: products m16n8k16 bfloat16
    }
    out[lane] = d[0] + d[1] + d[2] + d[3];  // count: products store
}
void run_products(float* out, const int* in, int rounds) {
    launch(products, {dim3(1), dim3(64)}, nullptr, out, reinterpret_cast<const unsigned*>(in), rounds);
}
const Entry kProducts("products", run_products);

// --- the rest --------------------------------------------------------------------------------------------------------

struct alignas(16) CopyMemory {
    float words[128];
};
__global__ void async_copy(float* out, const float* in) {
    auto& smem = shared_memory<CopyMemory>();
    const unsigned lane = threadIdx.x;
    ptx::cp_async_16(&smem.words[4 * lane], &in[4 * lane], 16);  // count: async_copy
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();                          // count: async_copy sync
    const float value = smem.words[lane];  // count: async_copy load
    out[lane] = value;                     // count: async_copy store
}
void run_async_copy(float* out, const float* in) {
    launch(async_copy, {dim3(1), dim3(32), sizeof(CopyMemory)}, nullptr, out, in);
}
const Entry kAsyncCopy("async_copy", run_async_copy);

struct AtomicMemory {
    int words[32];
};
/// Every lane its own word; what was there before is not used.
__global__ void atomics(int* out, const int* in) {
    auto& smem = shared_memory<AtomicMemory>();
    const unsigned lane = threadIdx.x;
    const int value = in[lane];                // count: atomics load
    smem.words[lane] = 0;                      // count: atomics store
    __syncwarp();                              // count: atomics sync
    atomicAdd(&smem.words[31 - lane], value);  // count: atomics shared
    __syncwarp();                              // count: atomics second sync
    const int sum = smem.words[lane];          // count: atomics shared load
    atomicAdd(&out[lane], sum);                // count: atomics global
}
void run_atomics(int* out, const int* in) {
    launch(atomics, {dim3(1), dim3(32), sizeof(AtomicMemory)}, nullptr, out, in);
}
const Entry kAtomics("atomics", run_atomics);

/// A sum over each of two warps, a double passed on, and a vote.
__global__ void shuffles(float* out, const float* in) {
    float sum = in[threadIdx.x];                                                  // count: shuffles load
    for (int i = 16; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);  // count: shuffles xor
    const double mine = 2.0 * static_cast<double>(sum) + threadIdx.x;
    const double twice = __shfl_down_sync(0xffffffffu, mine, 1);                     // count: shuffles double
    const unsigned votes = __ballot_sync(0xffffffffu, twice > 100);                  // count: shuffles vote
    out[threadIdx.x] = sum + static_cast<float>(twice) + static_cast<float>(votes);  // count: shuffles store
}
void run_shuffles(float* out, const float* in) { launch(shuffles, {dim3(1), dim3(64)}, nullptr, out, in); }
const Entry kShuffles("shuffles", run_shuffles);

struct ExchangeMemory {
    float words[64];
};
/// Warp 0 writes and only arrives; warp 1 waits for it and reads. Then all meet.
__global__ void named_barriers(float* out, const float* in) {
    auto& smem = shared_memory<ExchangeMemory>();
    const unsigned lane = threadIdx.x % 32;
    if (threadIdx.x < 32) {
        const float value = in[lane];      // count: named_barriers global load
        smem.words[lane] = value;          // count: named_barriers store
        ptx::named_barrier_arrive(3, 64);  // count: named_barriers arrive
    } else {
        ptx::named_barrier_sync(3, 64);             // count: named_barriers sync
        const float value = smem.words[31 - lane];  // count: named_barriers load
        out[lane] = value;                          // count: named_barriers global store
    }
    __syncthreads();  // count: named_barriers all
}
void run_named_barriers(float* out, const float* in) {
    launch(named_barriers, {dim3(1), dim3(64), sizeof(ExchangeMemory)}, nullptr, out, in);
}
const Entry kNamedBarriers("named_barriers", run_named_barriers);

__global__ void exponentials(float* out, const float* in) {
    const float x = in[threadIdx.x];        // count: exponentials load
    const float y = ptx::ex2(ptx::ex2(x));  // count: exponentials
    out[threadIdx.x] = y;                   // count: exponentials store
}
void run_exponentials(float* out, const float* in) { launch(exponentials, {dim3(1), dim3(64)}, nullptr, out, in); }
const Entry kExponentials("exponentials", run_exponentials);

/// A sum over the block by shuffles within a warp (or a wavefront of 64) and shared memory between them.
struct SumMemory {
    float sums[32];
};
__global__ void block_sum(float* out, const float* in) {
    auto& smem = shared_memory<SumMemory>();
    const int lane = static_cast<int>(threadIdx.x) % warpSize, warp = static_cast<int>(threadIdx.x) / warpSize;
    float sum = in[threadIdx.x];
#pragma unroll 1
    for (int i = warpSize / 2; i > 0; i /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, i);  // count: block_sum shuffle
    if (lane == 0) smem.sums[warp] = sum;
    __syncthreads();  // count: block_sum barrier
    if (threadIdx.x == 0) {
        float total = 0;
#pragma unroll 1
        for (int i = 0; i < static_cast<int>(blockDim.x) / warpSize; ++i) total += smem.sums[i];
        out[0] = total;
        out[1] = static_cast<float>(warpSize);
    }
}
void run_block_sum(float* out, const float* in) {
    launch(block_sum, {dim3(1), dim3(256), sizeof(SumMemory)}, nullptr, out, in);
}
const Entry kBlockSum("block_sum", run_block_sum);

}  // namespace micro
