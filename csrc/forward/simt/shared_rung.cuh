// The kernel of the rungs with tiles in shared memory: simt_shared, simt_padded, simt_occupancy and simt_registers.
//
// Algorithm: that of simt_block. The block copies its Q tile and each K/V tile to shared memory, with neighbouring
// threads at neighbouring addresses, and every product reads the copies.
//
// Who owns what: the block owns the tiles. Thread (x, y) owns the score of row y and key x, and columns x, x + Bc, ...
// of O's row y: in global memory or, with InRegisters, in registers until the last tile.
//
// Bound: shared memory. A product reads two words for one FMA. The lanes of a row read the same word of Q, and column c
// of Bc rows of K. If these rows begin in the same bank (d is a multiple of 32 and KeyPadding 0), the reads are served
// one at a time. With rows of d + 1 words, the words lie in different banks.
#pragma once

#include <shared_memory.cuh>

#include "forward/simt/rung.cuh"

namespace flash_wmma::simt {

template <int HeadDim, int QRows, int Keys, int KeyPadding, bool OInRegisters>
struct SharedRung : RungTile<QRows, Keys> {
    static constexpr int kD = HeadDim, kBr = QRows, kBc = Keys;
    static constexpr bool kInRegisters = OInRegisters;

    struct SharedMemory {
        float q[kBr][kD];
        float k[kBc][kD + KeyPadding];
        float v[kBc][kD];
    };
};

/// All threads of the block copy rows [0, rows) of `from` to shared memory, and zeros beyond.
template <class Rung, int Rows, int Pitch>
__device__ __forceinline__ void load_tile(float (&to)[Rows][Pitch], const float* from, std::int64_t pitch, int rows,
                                          int columns) {
    const int tid = static_cast<int>(threadIdx.y) * Rung::kBc + static_cast<int>(threadIdx.x);
    for (int i = tid; i < Rows * Rung::kD; i += Rung::kBr * Rung::kBc) {
        const int row = i / Rung::kD, column = i % Rung::kD;
        if (column < columns) to[row][column] = row < rows ? from[row * pitch + column] : 0.f;
    }
}

// spills: sm_90: a block of 1024 threads has 64 registers a thread, so that up to 13 addresses and bounds wait in local
// memory.
template <class Rung>
__global__ void __launch_bounds__(Rung::kBr* Rung::kBc) shared(const __grid_constant__ ForwardParams p) {
    constexpr int kBr = Rung::kBr, kBc = Rung::kBc;
    auto& smem = shared_memory<typename Rung::SharedMemory>();
    const QTile tile = q_tile<kBr>(p);
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y), query = tile.first_row + y;
    const bool exists = query < p.seqlen_q;
    const VisibleKeys<kBr, kBc> keys(p, tile, y);
    float* const o = row_of<float>(p.o, tile.batch, tile.head, exists ? query : tile.first_row);
    constexpr int kColumns = Rung::kD / kBc;  // of O, per thread
    float sums[kColumns] = {};                // P V of a tile; O itself if it stays in registers
    if (exists && !Rung::kInRegisters)
        for (int c = x; c < p.head_dim_v; c += kBc) o[c] = 0.f;
    load_tile<Rung>(smem.q, row_of<const float>(p.q, tile.batch, tile.head, tile.first_row), p.q.row,
                    static_cast<int>(p.seqlen_q) - tile.first_row, p.head_dim);

    OnlineRow<kBc> row;
    for (int first = keys.first_tile; first < keys.end_tiles; first += kBc) {
        const int left = static_cast<int>(p.seqlen_k) - first;
        __syncthreads();  // the tile before has been used
        load_tile<Rung>(smem.k, row_of<const float>(p.k, tile.batch, tile.head_k, first), p.k.row, left, p.head_dim);
        load_tile<Rung>(smem.v, row_of<const float>(p.v, tile.batch, tile.head_k, first), p.v.row, left, p.head_dim_v);
        __syncthreads();

        float product = 0.f;
#pragma unroll 8
        for (int c = 0; c < p.head_dim; ++c) product = fmaf(smem.q[y][c], smem.k[x][c], product);
        const float before = row.l;
        const auto step = row.advance(keys.sees(first + x) ? product * scale_log2(p) : -INFINITY);
#pragma unroll
        for (float& sum : sums) sum = Rung::kInRegisters ? sum * step.rescale : 0.f;
        for (int j = 0; j < kBc; ++j) {
            const float weight = shuffle(step.weight, j, kBc);
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                if (x + kBc * i < p.head_dim_v) sums[i] = fmaf(weight, smem.v[j][x + kBc * i], sums[i]);
        }
        if constexpr (!Rung::kInRegisters) {
            const float keep = before * step.rescale * row.inverse();
#pragma unroll
            for (int i = 0; i < kColumns; ++i)
                if (exists && x + kBc * i < p.head_dim_v)
                    o[x + kBc * i] = o[x + kBc * i] * keep + sums[i] * row.inverse();
        }
    }
    if (!exists) return;
    if constexpr (Rung::kInRegisters)
#pragma unroll
        for (int i = 0; i < kColumns; ++i)
            if (x + kBc * i < p.head_dim_v) o[x + kBc * i] = sums[i] * row.inverse();
    if (x == 0) p.lse[lse_index(p, tile.batch, tile.head, query)] = row.lse();
}

template <class Rung>
void launch_shared(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    launch(shared<Rung>, {q_tile_grid(p, Rung::kBr), dim3(Rung::kBc, Rung::kBr), sizeof(typename Rung::SharedMemory)},
           stream, p);
}

template <class Rung>
Shape shared_shape() {
    return rung_shape<Rung>(shared<Rung>, launch_shared<Rung>, Rung::kD, Rung::kBr * Rung::kBc,
                            sizeof(typename Rung::SharedMemory));
}
template <class... Rungs>
std::vector<Shape> shared_shapes() {
    return rung_shapes<Rungs...>([](auto rung) { return shared_shape<decltype(rung)>(); });
}

}  // namespace flash_wmma::simt
