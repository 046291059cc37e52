// The copies of the tiles of a block of kernel.cuh, two_roles.cuh or three_roles.cuh, own and streamed, to shared
// memory.
#pragma once

#include <ptx.cuh>

#include "backward/mma/tile.cuh"
#include "device/streamed_range.cuh"

namespace flash_wmma::backward {

/// Copies the own tiles to shared memory.
template <class Tile, Pass kPass, class OwnRows>
__device__ __forceinline__ void copy_own(OwnRows& first, OwnRows& second, const Problem& problem,
                                         const OwnedTile& own) {
    using Copy = typename Tile::Machine::template Copy<Tile, Tile::kOwn>;
    constexpr bool kOwnsKeys = kPass != Pass::kQueries;
    const ForwardParams& p = problem.forward;
    const Sequence& s = own.sequence;
    const int head = kOwnsKeys ? own.head_k : own.head, left = (kOwnsKeys ? s.seqlen_k : s.seqlen_q) - own.first_row;
    const auto copy = [&](auto& to, const Rows& rows, int d) {
        const int row = (kOwnsKeys ? s.first_k : s.first_q) + own.first_row;
        Copy vectors(row_of<const typename Tile::T>(rows, s.index, head, row), rows.row, d);
        vectors.start(to, rows.row, left);
        vectors.finish(to);
    };
    copy(first, kOwnsKeys ? p.k : p.q, p.head_dim);
    copy(second, kOwnsKeys ? p.v : problem.dout, p.head_dim_v);
}

/// The copies of streamed tiles to the ring, in the order of a Cursor.
template <class Tile, Pass kPass>
class StreamedTiles {
  public:
    using T = typename Tile::T;
    using Copy = typename Tile::Machine::template Copy<Tile, Tile::kStream>;
    static constexpr bool kOfQueries = kPass != Pass::kQueries;
    /// Whether a tile can wait in registers while products are computed.
    static constexpr bool kWaitsInRegisters = Tile::Machine::kThroughRegisters && Copy::kCount <= 4;

    __device__ StreamedTiles(const Problem& problem, const OwnedTile& own, const Cursor& cursor)
        : p_(problem),
          own_(own),
          at_(cursor),
          first_(rows(true), pitch(true), p_.forward.head_dim),
          second_(rows(false), pitch(false), p_.forward.head_dim_v) {}

    template <class Map>
    __device__ __forceinline__ void start(Map& smem, int slot) {
        if (new_head_) {
            first_ = Copy(rows(true), pitch(true), p_.forward.head_dim);
            second_ = Copy(rows(false), pitch(false), p_.forward.head_dim_v);
        }
        const int left = (kOfQueries ? own_.sequence.seqlen_q : own_.sequence.seqlen_k) - at_.row;
        if (left >= Tile::kStream) {
            first_.start(smem.ring[slot].first, pitch(true));
            second_.start(smem.ring[slot].second, pitch(false));
        } else {
            first_.start(smem.ring[slot].first, pitch(true), left);
            second_.start(smem.ring[slot].second, pitch(false), left);
        }
        if constexpr (kOfQueries)
            if (threadIdx.x < Tile::kStream / 2) {
                const RowPair* from = facts_of(p_, own_.sequence, at_.head) + at_.row / 2 + threadIdx.x;
                if constexpr (Tile::Machine::kThroughRegisters) pair_ = *reinterpret_cast<const uint4*>(from);
                else ptx::cp_async_16(&smem.facts[slot][threadIdx.x], from, 16);
            }
        new_head_ = at_.advance();
    }
    /// If copies go through registers: stores the tile that was started last to shared memory.
    template <class Map>
    __device__ __forceinline__ void finish(Map& smem, int slot) {
        first_.finish(smem.ring[slot].first);
        second_.finish(smem.ring[slot].second);
        if constexpr (kOfQueries && Tile::Machine::kThroughRegisters)
            if (threadIdx.x < Tile::kStream / 2) *reinterpret_cast<uint4*>(&smem.facts[slot][threadIdx.x]) = pair_;
    }

  private:
    __device__ std::int64_t pitch(bool first) const {
        return first ? (kOfQueries ? p_.forward.q.row : p_.forward.k.row)
                     : (kOfQueries ? p_.dout.row : p_.forward.v.row);
    }
    __device__ const T* rows(bool first) const {
        const Sequence& s = own_.sequence;
        if constexpr (kOfQueries)
            return row_of<const T>(first ? p_.forward.q : p_.dout, s.index, at_.head, s.first_q + at_.row);
        else return row_of<const T>(first ? p_.forward.k : p_.forward.v, s.index, own_.head_k, s.first_k + at_.row);
    }

    const Problem& p_;
    const OwnedTile& own_;
    Cursor at_;              // of the next copy
    bool new_head_ = false;  // whether it is a head's first
    Copy first_, second_;
    uint4 pair_;
};

}  // namespace flash_wmma::backward
