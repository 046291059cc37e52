// How the warps of kernel.cuh load Q from global memory and store O to it.
#pragma once

#include "device/quad.cuh"
#include "forward/mma/block.cuh"

namespace flash_wmma::mma {

/// Q's rows of this warp from global to shared memory, zeros beyond the sequence's end.
template <class Tile>
__device__ __forceinline__ void copy_q(Smem<Tile>& smem, const Work<Tile>& work, const Thread<Tile>& thread) {
    constexpr int kVectors = Tile::kD / 8, kThreads = 32 * Tile::kDimWarps;
    [[maybe_unused]] const int first = work.tile.first_row + thread.warp_row();
    [[maybe_unused]] const typename Tile::T* from = nullptr;
    if constexpr (!Tile::kCached) from = work.q_rows(first);
#pragma unroll
    for (int i = 0; i < Tile::kWarpRows * kVectors / kThreads; ++i) {
        const auto vector = static_cast<unsigned>(thread.dim_warp * 32 + thread.lane + i * kThreads);
        const int row = static_cast<int>(vector / kVectors), column = static_cast<int>(vector % kVectors * 8);
        auto* const to = smem.q[thread.row_warp].at(row, column);
        if constexpr (Tile::kCached) {
            const bool inside = work.tile.row(thread.warp_row() + row).query < work.sequence.seqlen_q;
            const bool copies = inside && column < work.p.head_dim;
            Tile::Machine::copy_16(to, copies ? work.q_row(thread.warp_row() + row) + column : work.q_row(0), copies);
        } else {
            const bool inside = row < work.sequence.seqlen_q - first && column < work.p.head_dim;
            Tile::Machine::copy_16(to, from + row * work.p.q.row + column, inside);
        }
    }
}

/// Stores O * factor to global memory as Out. 16-bit types go in pieces of 16 bytes: lanes that share a row swap words.
template <class Out, class Tile>
__device__ __forceinline__ void store_o(const Work<Tile>& work, const Output<Tile>& o, const PerRow<Tile>& factor,
                                        const Thread<Tile>& thread) {
    const ForwardParams& p = work.p;
    const int lane_row = ptx::opaque(thread.row());
    factor.each([&](int i, float row_factor) {
        const auto [query, head] = work.tile.row(thread.warp_row() + 8 * i + lane_row);
        const bool inside = query < work.sequence.seqlen_q;
        Out* const out =
            row_of<Out>(p.o, work.sequence.index, head, work.sequence.first_q + query) + work.first_column();
        const auto value = [&](int c, int e) { return o.block[i / 2][c][i % 2 * 2 + e] * row_factor; };
        if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
            for (int c = 0; c < Tile::kWarpColumns / 8; ++c) {
                const int column = thread.warp_column() + 8 * c;
                if (inside && column < work.columns())
                    *reinterpret_cast<float2*>(out + column + thread.column()) = make_float2(value(c, 0), value(c, 1));
            }
        } else {
#pragma unroll
            for (int c = 0; c < Tile::kWarpColumns / 8; c += 4) {
                std::uint32_t words[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const int tile = min(c + w, Tile::kWarpColumns / 8 - 1);
                    words[w] = packed<Out>(value(tile, 0), value(tile, 1));
                }
                transpose_in_quad(words, thread.lane % 4);
                const int part = c + thread.lane % 4, column = thread.warp_column() + 8 * part;
                if (inside && part < Tile::kWarpColumns / 8 && column < work.columns())
                    *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    });
}

}  // namespace flash_wmma::mma
