// How the warps of kernel.cuh load Q from global memory and store O to it.
#pragma once

#include "device/quad.cuh"
#include "device/sink.cuh"
#include "forward/mma/block.cuh"
#include "problems.h"

namespace flash_wmma::mma {

/// Q's rows of this warp from global to shared memory, zeros beyond the sequence's end.
template <class Tile>
__device__ __forceinline__ void copy_q(Smem<Tile>& smem, const Work<Tile>& work, const Thread<Tile>& thread) {
    constexpr int kVectors = Tile::kD / 8, kThreads = 32 * Tile::kDimWarps;
    [[maybe_unused]] const int first = work.tile.first_row + thread.warp_row();
    [[maybe_unused]] const typename Tile::T* from = nullptr;
    if constexpr (Tile::kCached) from = work.q_row(thread.warp_row() + min(thread.lane, Tile::kWarpRows - 1));
    else from = work.q_rows(first);
#pragma unroll
    for (int i = 0; i < Tile::kWarpRows * kVectors / kThreads; ++i) {
        const auto vector = static_cast<unsigned>(thread.dim_warp * 32 + thread.lane + i * kThreads);
        const int row = static_cast<int>(vector / kVectors), column = static_cast<int>(vector % kVectors * 8);
        auto* const to = smem.q_rows(thread.row_warp).at(row, column);
        if constexpr (Tile::kCached) {
            // Lane r knows where row r lies; rows that do not exist are not read
            const auto of_row = reinterpret_cast<const typename Tile::T*>(
                __shfl_sync(kWarpMask, reinterpret_cast<std::uintptr_t>(from), row));
            const bool inside = thread.warp_row() + row < work.rows();
            const bool copies = inside && column < work.p.head_dim;
            Tile::Machine::copy_16(to, of_row + column, copies);
        } else {
            const bool inside = row < work.sequence.seqlen_q - first && column < work.p.head_dim;
            Tile::Machine::copy_16(to, from + row * work.p.q.row + column, inside);
        }
    }
}

/// Stores O * factor to global memory as Out: of 16 (or 32) rows of the Q tile from `first_row` on, the columns from
/// `first_column` on. 16-bit types go in pieces of 16 bytes: lanes that share a row swap words.
template <class Out, class Tile, int kRows, int kColumns>
__device__ __forceinline__ void store_o(const Work<Tile>& work, const RegisterTile<kRows, kColumns>& o,
                                        const RowValues<kRows>& factor, int first_row, int first_column,
                                        const Thread<Tile>& thread) {
    const ForwardParams& p = work.p;
    const int lane_row = ptx::opaque(thread.row());
    factor.each([&](int i, float row_factor) {
        const auto [query, head] = work.tile.row(first_row + 8 * i + lane_row);
        const bool inside = query < work.sequence.seqlen_q;
        Out* const out =
            row_of<Out>(p.o, work.sequence.index, head, work.sequence.first_q + query) + work.first_column();
        const auto value = [&](int c, int e) { return o.block[i / 2][c][i % 2 * 2 + e] * row_factor; };
        if constexpr (std::is_same_v<Out, float>) {
#pragma unroll
            for (int c = 0; c < kColumns / 8; ++c) {
                const int column = first_column + 8 * c;
                if (inside && column < work.columns())
                    *reinterpret_cast<float2*>(out + column + thread.column()) = make_float2(value(c, 0), value(c, 1));
            }
        } else {
#pragma unroll
            for (int c = 0; c < kColumns / 8; c += 4) {
                std::uint32_t words[4];
#pragma unroll
                for (int w = 0; w < 4; ++w) {
                    const int tile = min(c + w, kColumns / 8 - 1);
                    words[w] = packed<Out>(value(tile, 0), value(tile, 1));
                }
                transpose_in_quad(words, thread.lane % 4);
                const int part = c + thread.lane % 4, column = first_column + 8 * part;
                if (inside && part < kColumns / 8 && column < work.columns())
                    *reinterpret_cast<uint4*>(out + column) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    });
}

/// What a row of a head ends with: the factor of its O, `unit` / l with the head's sink, or 0 if it saw no key; and the
/// LSE.
struct RowEnd {
    float factor, lse;

    __device__ __forceinline__ RowEnd(const ForwardParams& p, int head, float m, float l, float unit) {
        const bool none = l == 0.f;
        const float rescale = take_sink(p, head, m, l);
        lse = (m + __log2f(l)) * kLn2;  // without a key and a sink -inf + -inf
        factor = none ? 0.f : rescale * __fdividef(unit, l);
    }
};

/// Stores O / l, times `factor`, and the LSE, both with the head's sink: of 16 (or 32) rows of the Q tile from
/// `first_row` on, the columns from `first_column` on. l is that of whole rows.
template <Problems kProblems, class Tile, int kRows, int kColumns>
__device__ __forceinline__ void store_result(const Work<Tile>& work, const RegisterTile<kRows, kColumns>& o,
                                             const RowValues<kRows>& m, const RowValues<kRows>& l, float factor,
                                             int first_row, int first_column, bool with_lse,
                                             const Thread<Tile>& thread) {
    constexpr bool kPackedToo = includes(kProblems, Problems::kPacked);
    constexpr bool kMayScale = includes(kProblems, Problems::kConverted);
    const ForwardParams& p = work.p;
    const Sequence& sequence = work.sequence;
    RowValues<kRows> inverse_l;  // times `factor`; 0 for a row that saw no key
    l.each([&](int i, float sum) {
        const auto [query, head] = work.tile.row(first_row + 8 * i + thread.row());
        const RowEnd end(p, head, m[i], sum, factor);
        inverse_l[i] = end.factor;
        if (with_lse && thread.lane % 4 == 0 && query < sequence.seqlen_q && work.first_column() == 0)
            p.lse[kPackedToo ? lse_index(p, sequence, head, query) : lse_index(p, sequence.index, head, query)] =
                end.lse;
    });
    using T = typename Tile::T;  // with converted inputs, O has their type before conversion
    if (!kMayScale || p.out_dtype == Element<T>::kDType)
        store_o<T>(work, o, inverse_l, first_row, first_column, thread);
    else if (Tile::Machine::kMultipliesBf16 || p.out_dtype == DType::kFloat32)
        store_o<float>(work, o, inverse_l, first_row, first_column, thread);
    else store_o<bf16>(work, o, inverse_l, first_row, first_column, thread);
}

}  // namespace flash_wmma::mma
