// The kernel of plain problems of bwd_sm75 at d = 256: warps in three roles.
//
// Algorithm and names as in kernel.cuh; a block owns keys and streams queries. A warp's role is
//     kValues    S^T = K Q^T,   P^T = exp2(S^T * scale - L),   dV += P^T dO,
//     kKeys      dP^T = V dO^T, dS^T = P^T (dP^T - D),         dK += dS^T Q, or
//     kQueries   dQ += dS K, and the copies of streamed tiles, from global to shared memory through registers.
// So a warp of the first two has, as in two_roles.cuh, a gradient and K or V in registers, but waits for neither copies
// nor additions. kQueries has K in registers as well, so that K takes no shared memory. Twelve warps, three a
// scheduler, share an SM; two_roles.cuh has eight.
//
// Who owns what: of each role, four warps. Of the scores, two warps share 16 streamed rows: each computes those of all
// own rows over half of d, they add their halves up through shared memory, and each goes on with 16 own rows. Of a
// gradient a warp owns all rows and a quarter of the columns. So an ldmatrix of a streamed tile serves eight HMMAs.
//
// Shared memory holds two tiles of Q and one of dO. What a role does of tile t, between the barriers:
//     kValues    S, P                           kMeet   dV               kUsed
//     kKeys      a half of dP                   kMeet   the rest, dS     kUsed   dK                kDone
//     kQueries   Q of t + 1, dQ of t - 1                                 kUsed   dO of t + 1       kDone
// Two warps that add up halves have a barrier of their own. kValues and kQueries also meet alone, where no warp has to
// wait. So every warp passes four barriers a tile, and a warp that overwrites data has passed more barriers than others
// had when they read them: racecheck compares these numbers (docs/tuning/backward.md).
// A tile of Q is there one tile ahead; a tile of dO is replaced between its last use and dP of the next. Blocks begin a
// head's ring of tiles three tiles apart, so that their additions to dQ do not meet at the same rows.
//
// Bound: the additions to dQ. A tile of 32 queries and 32 keys adds 32 KiB, which keeps L2's input busy 70 % of the
// time on the H200; a tile takes 2,600 cycles without them, 3,060 with them. Of those, HMMA (m16n8k8) take 1,280, and
// shared memory and what shares its pipe, copies and additions, 1,800.
#pragma once

#include "backward/mma/products.cuh"
#include "backward/mma/streamed_tiles.cuh"
#include "backward_shapes.h"
#include "device/backward_scores.cuh"

namespace flash_wmma::backward {

template <class Tile>
struct ThreeRolesMemory {
    using Rows = typename TileMemory<Tile>::StreamRows;
    using Weights = typename TileMemory<Tile>::Weights;
    static_assert(std::is_same_v<Rows, typename TileMemory<Tile>::OwnRows>);
    Rows q[2], dout;   // q: K and V before, gradients on their way out at the end
    Weights p, ds[2];  // dS of this tile and the one before
    RowPair facts[2][Tile::kStream / 2];
    float4 sums[2][Tile::kRoleWarps][2][32];  // halves of scores for another warp, of kValues and kKeys
};

/// The tiles of a Cursor's heads as a ring, begun `tiles` tiles later.
struct Ring : Cursor {
    int heads, end;  // heads, and the one behind them

    __device__ Ring(const Cursor& cursor, int tiles, int count)
        : Cursor(cursor), heads(count), end(cursor.head + count) {
        if (last >= first) row -= tiles % ((last - first) / step + 1) * step;
    }
    __device__ bool advance() {
        if (!Cursor::advance()) return false;
        if (head == end) head -= heads;
        return true;
    }
};

/// The scores of a warp before they are added up: all own rows, and its part of the streamed ones, over half of d.
template <class Tile>
struct HalfScores {
    static constexpr int kSteps = Tile::kD / 2 / 16;
    std::uint32_t own[2][kSteps][4];  // the row tile that the warp goes on with, and the one that goes to the other

    template <class Rows>
    __device__ __forceinline__ void load(const Rows& rows, const Thread<Tile>& thread) {
        const Reader<Fragment::kA, Rows> read(thread.lane, 0, column(thread));
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int c = 0; c < kSteps; ++c) read(own[r][c], rows, 16 * (thread.own_warp ^ r), 16 * c);
    }
    /// S += the products of steps [begin, end); `read` begins at the warp's streamed rows and columns.
    template <class Rows>
    __device__ __forceinline__ void multiply(RegisterTile<32, 16>& s, const Reader<Fragment::kB, Rows>& read,
                                             const Rows& stream, int begin, int end) const {
#pragma unroll
        for (int c = begin; c < end; ++c) {
            std::uint32_t b[4];
            read(b, stream, 0, 16 * c);
#pragma unroll
            for (int r = 0; r < 2; ++r) backward::multiply<Tile>(s.block[r][0], s.block[r][1], own[r][c], b);
        }
    }
    __device__ static int column(const Thread<Tile>& thread) { return thread.own_warp * (Tile::kD / 2); }
};

/// A warp's part of a gradient: all own rows, and a part of the columns.
template <class Tile>
struct GradientTile : Tile {
    static constexpr int kOwnWarps = 1, kStreamWarps = Tile::kRoleWarps, kRowTiles = Tile::kOwn / 16;
    static constexpr int kWarpRows = Tile::kOwn, kWarpColumns = Tile::kD / kStreamWarps;
};

/// dQ of the streamed queries from all own keys, which a warp has in registers: all rows, and a part of the columns.
template <class Tile>
struct QueryGradient {
    static constexpr int kColumns = Tile::kD / Tile::kRoleWarps, kPart = 32;  // of a warp, and at a time
    static constexpr int kSteps = Tile::kOwn / 16, kRowTiles = Tile::kStream / 16;
    std::uint32_t keys[kSteps][kColumns / 16][4];

    template <class OwnRows>
    __device__ __forceinline__ void load(const OwnRows& rows, const Thread<Tile>& thread) {
        const Reader<Fragment::kBAcross, OwnRows> read(thread.lane, 0, column(thread));
#pragma unroll
        for (int k = 0; k < kSteps; ++k)
#pragma unroll
            for (int c = 0; c < kColumns / 16; ++c) read(keys[k][c], rows, 16 * k, 16 * c);
    }
    /// Adds dQ to the buffer that begins with the tile's first row.
    template <class Weights>
    __device__ __forceinline__ void add(float* dq_rows, int head_dim, const Weights& ds,
                                        const Thread<Tile>& thread) const {
        const Reader<Fragment::kAAcross, Weights> read_ds(thread.lane, 0, 0);
#pragma unroll
        for (int part = 0; part < kColumns; part += kPart) {
            RegisterTile<Tile::kStream, kPart> dq;
            dq.clear();
#pragma unroll
            for (int k = 0; k < kSteps; ++k)
#pragma unroll
                for (int r = 0; r < kRowTiles; ++r) {
                    std::uint32_t a[4];
                    read_ds(a, ds, 16 * k, 16 * r);
#pragma unroll
                    for (int c = 0; c < kPart / 16; ++c)
                        multiply<Tile>(dq.block[r][2 * c], dq.block[r][2 * c + 1], a, keys[k][part / 16 + c]);
                }
            const int first = column(thread) + part;
            const bool all = first + kPart <= head_dim;
#pragma unroll
            for (int r = 0; r < kRowTiles; ++r) {
                float* const to = ptx::opaque(dq_rows + DqFragment::offset(16 * r, first, head_dim));
                if (all)
#pragma unroll
                    for (int c = 0; c < kPart / 8; ++c)
                        DqFragment::add(to + DqFragment::offset(0, 8 * c, head_dim), dq.block[r][c], thread.lane);
                else
#pragma unroll
                    for (int c = 0; c < kPart / 8; ++c)
                        if (first + 8 * c < head_dim)
                            DqFragment::add(to + DqFragment::offset(0, 8 * c, head_dim), dq.block[r][c], thread.lane);
            }
        }
    }
    __device__ static int column(const Thread<Tile>& thread) { return thread.warp % Tile::kRoleWarps * kColumns; }
};

/// The copies of the streamed tiles of Q or dO by the warps of a role, each a row at a time, in the order of a Ring.
template <class Tile>
class RoleCopies {
  public:
    using T = typename Tile::T;
    static constexpr int kRowsAtOnce = Tile::kRoleWarps, kCount = Tile::kStream / kRowsAtOnce;  // vectors of a thread
    static_assert(Tile::kD == 8 * 32 && 8 % kRowsAtOnce == 0);

    __device__ RoleCopies(const Rows& rows, int d, const OwnedTile& own, const Ring& ring, const Thread<Tile>& thread)
        : rows_(rows),
          own_(own),
          at_(ring),
          row_(thread.warp % Tile::kRoleWarps),
          column_(8 * thread.lane),
          inside_(column_ < d),
          from_(from()) {}

    __device__ __forceinline__ void start() {
        if (new_head_) from_ = from();
        if (inside_) {
            const int left = own_.sequence.seqlen_q - at_.row - row_;
            const T* vector = from_;
            if (left > Tile::kStream - kRowsAtOnce)
#pragma unroll
                for (int i = 0; i < kCount; ++i, vector += kRowsAtOnce * rows_.row)
                    vectors_[i] = *reinterpret_cast<const uint4*>(vector);
            else
#pragma unroll
                for (int i = 0; i < kCount; ++i, vector += kRowsAtOnce * rows_.row)
                    vectors_[i] = i * kRowsAtOnce < left ? *reinterpret_cast<const uint4*>(vector) : uint4{0, 0, 0, 0};
        }
        from_ -= Tile::kStream * rows_.row;
        new_head_ = at_.advance();
    }
    /// Stores the tile that was started last to shared memory.
    template <class Target>
    __device__ __forceinline__ void finish(Target& target) const {
        constexpr int kAlike = 8 / kRowsAtOnce;  // rows 8 apart are swizzled alike
#pragma unroll
        for (int i = 0; i < kCount; ++i)
            *reinterpret_cast<uint4*>(target.at(row_ + i % kAlike * kRowsAtOnce, column_) + i / kAlike * 8 * Tile::kD) =
                vectors_[i];
    }
    /// Of the next copy, and whether it is a head's first.
    __device__ const Ring& at() const { return at_; }
    __device__ bool new_head() const { return new_head_; }

  private:
    __device__ const T* from() const {
        const Sequence& s = own_.sequence;
        return row_of<const T>(rows_, s.index, at_.head, s.first_q + at_.row + row_) + column_;
    }

    const Rows& rows_;
    const OwnedTile& own_;
    Ring at_;
    int row_, column_;
    bool inside_, new_head_ = false;
    const T* from_;
    uint4 vectors_[kCount] = {};  // zeros beyond d
};

// spills: sm_75 sm_90: loop-invariant values, at most two loads a tile.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    backward_three_roles(const __grid_constant__ Problem problem) {
    using T = typename Tile::T;
    using Map = ThreeRolesMemory<Tile>;
    using Wide = GradientTile<Tile>;
    enum Role { kValues, kKeys, kQueries };
    static_assert(Tile::kOwnWarps == 2 && Tile::kStreamWarps == 2 && Tile::kRowTiles == 1 && Tile::kStep == 16);
    constexpr int kRoleThreads = 32 * Tile::kRoleWarps;
    const ForwardParams& p = problem.forward;
    auto& smem = shared_memory<Map>();
    const Thread<Tile> thread(static_cast<int>(threadIdx.x));
    const OwnedTile own = owned_keys<Tile::kOwn, false>(p);
    if (own.rows <= 0) return;
    const Sequence& sequence = own.sequence;
    const BandMask mask(p.band, sequence.seqlen_q, sequence.seqlen_k);
    const StreamedRange range = streamed_range<Tile, Pass::kFused>(p, own, mask);
    int left = range.left;
    Ring at(range.at, 3 * (own.first_row / Tile::kOwn), static_cast<int>(p.heads_q / p.heads_k));

    enum Barrier { kAll, kMeet, kUsed, kDone, kAlone, kSums = kAlone + 3 };  // kAlone: three of them, kSums: four
    const auto meet = [] { ptx::named_barrier_sync(kMeet, 2 * kRoleThreads); };
    const auto used = [] { ptx::named_barrier_sync(kUsed, Tile::kThreads); };
    const auto done = [] { ptx::named_barrier_sync(kDone, 2 * kRoleThreads); };
    const auto meet_alone = [&] { ptx::named_barrier_sync(kAlone + thread.role, kRoleThreads); };

    if (left > 0) {
        copy_own<Tile, Pass::kFused>(smem.q[0], smem.q[1], problem, own);
        __syncthreads();
    }
    if (thread.role == kQueries) {
        if (left > 0) {
            QueryGradient<Tile> gradient;
            gradient.load(smem.q[0], thread);
            RoleCopies<Tile> q(p.q, p.head_dim, own, at, thread), dout(problem.dout, p.head_dim_v, own, at, thread);
            const int tid = static_cast<int>(threadIdx.x) % kRoleThreads;
            const auto facts_at = [&](const Ring& ring) {
                return facts_of(problem, sequence, ring.head) + ring.row / 2 + tid;
            };
            const RowPair* facts = facts_at(at);
            uint4 pair{};
            const auto start_q = [&] {
                if (tid < Tile::kStream / 2) pair = *reinterpret_cast<const uint4*>(facts);
                q.start();
                facts = q.new_head() ? facts_at(q.at()) : facts - Tile::kStream / 2;
            };
            const auto finish_q = [&](int slot) {
                q.finish(smem.q[slot]);
                if (tid < Tile::kStream / 2) *reinterpret_cast<uint4*>(&smem.facts[slot][tid]) = pair;
            };
            start_q();
            dout.start();
            used();  // own rows are in registers; the streamed ones take their place
            finish_q(0);
            dout.finish(smem.dout);
            if (left > 1) {
                start_q();
                dout.start();
            }
            used();
            bool any = false;  // whether there is a dS
            float* dq_rows = dq_of(problem, sequence, at.head, at.row);
            for (int parity = 0;; parity ^= 1, --left) {
                meet_alone();
                meet_alone();
                if (left > 1) finish_q(parity ^ 1);
                if (left > 2) start_q();
                if (any) {
                    gradient.add(dq_rows, p.head_dim, smem.ds[parity ^ 1], thread);
                    dq_rows -= Tile::kStream * p.head_dim;
                    if (at.advance()) dq_rows = dq_of(problem, sequence, at.head, at.row);
                }
                any = true;
                if (left == 0) break;
                used();
                if (left > 1) dout.finish(smem.dout);
                if (left > 2) dout.start();
                done();
            }
        }
        used();
        return;
    }

    const bool values = thread.role == kValues;
    const Thread<Wide> wide(static_cast<int>(threadIdx.x));
    Gradient<Wide> gradient;  // dV or dK
    gradient.clear();
    if (left > 0) {
        HalfScores<Tile> half;
        half.load(smem.q[values ? 0 : 1], thread);
        used();
        const int first = thread.warp_stream();  // of the tile's rows
        const Reader<Fragment::kB, typename Map::Rows> read_scored(thread.lane, first,
                                                                   HalfScores<Tile>::column(thread));
        const Reader<Fragment::kA, typename Map::Weights> read_weights(thread.lane, 0, 0);
        const Reader<Fragment::kBAcross, typename Map::Rows> read_weighed(thread.lane, 0, wide.warp_column());
        const float scale = p.scale * kLog2e;
        used();  // the first tile has landed
        for (int parity = 0; left > 0; parity ^= 1, --left, at.advance()) {
            const auto& scored = values ? smem.q[parity] : smem.dout;
            const auto& weighed = values ? smem.dout : smem.q[parity];
            const auto& shared = values ? smem.p : smem.ds[parity];

            RegisterTile<32, 16> halves;
            halves.clear();
            {
                constexpr int kPart = HalfScores<Tile>::kSteps / 2;
                const auto read = read_scored.anew();
                half.multiply(halves, read, scored, 0, kPart);
                if (!values) meet();  // tells kValues that dO has landed, and kKeys that P is there
                half.multiply(halves, read, scored, kPart, HalfScores<Tile>::kSteps);
            }
            Scores<Tile> s;  // S, P or dP, dS
            {
                auto& sums = smem.sums[thread.role];
                const int warp = thread.warp % Tile::kRoleWarps, other = warp ^ Tile::kStreamWarps;
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float (&x)[4] = halves.block[1][j];
                    sums[warp][j][thread.lane] = make_float4(x[0], x[1], x[2], x[3]);
                }
                ptx::named_barrier_sync(kSums + thread.role * Tile::kStreamWarps + thread.stream_warp, 64);
#pragma unroll
                for (int j = 0; j < 2; ++j) {
                    const float4 sum = sums[other][j][thread.lane];
                    const float (&x)[4] = halves.block[0][j];
                    s.block[0][j][0] = x[0] + sum.x;
                    s.block[0][j][1] = x[1] + sum.y;
                    s.block[0][j][2] = x[2] + sum.z;
                    s.block[0][j][3] = x[3] + sum.w;
                }
            }

            const RowPair* pairs = &smem.facts[parity][(first + thread.column()) / 2];
            if (values) {
                const auto lse = [&](int, int column) { return pairs[column / 8 * 4].minus_lse[column % 2]; };
                const ScorePlace<Tile, true> place{own.first_row + thread.warp_row(), at.row + first, thread};
                weigh_scores(s, scale, lse, place, mask);
                exchange<Tile>(smem.p, s, first, thread);
                meet();
            } else {
                weigh<Tile>(s, smem.p, pairs, first, thread);
                exchange<Tile>(smem.ds[parity], s, first, thread);
                used();
            }

            const auto read_a = read_weights.anew();
            const auto read_b = read_weighed.anew();
#pragma unroll
            for (int k = 0; k < Tile::kStream; k += 16) {
                std::uint32_t weights[Wide::kRowTiles][4];
#pragma unroll
                for (int r = 0; r < Wide::kRowTiles; ++r) read_a(weights[r], shared, 16 * r, k);
                multiply_weights<Wide>(gradient, weights, read_b, weighed, k);
            }
            if (values) {
                meet_alone();
                used();
            } else {
                done();
            }
        }
    }

    used();  // streamed tiles have been used; the gradients take their place on the way out
    const Rows& out = values ? problem.dv : problem.dk;
    store<Wide>(row_of<T>(out, sequence.index, own.head_k, own.first_row), out.row, own.rows,
                values ? p.head_dim_v : p.head_dim, gradient, values ? 1.f : p.scale, smem.q[values ? 0 : 1], wide);
}

}  // namespace flash_wmma::backward
