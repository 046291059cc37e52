// The kernel of plain problems where it is the faster one: of bwd_sm80 above d = 64, of bwd_sm75 up to d = 128 where an
// SM holds one block. Warps in two roles share the work of kernel.cuh's kernel, one for P and dV, one for dS and dK.
//
// Algorithm and names as in kernel.cuh; a block owns keys and streams queries. A warp's role is
//     Role::kValues  S^T = K Q^T,   P^T = exp2(S^T * scale - L),   dV += P^T dO, or
//     Role::kKeys    dP^T = V dO^T, dS^T = P^T (dP^T - D),         dK += dS^T Q:
// the same products, with K and V, Q and dO exchanged. So a warp has one gradient in registers instead of two, and a
// larger part of this one: an ldmatrix of a streamed tile serves twice as many HMMAs.
//
// Who owns what: of each role, `kOwnWarps` x 2 warps. Two stream warps share own rows: each computes the scores of half
// of the streamed rows and owns half of the columns of the gradient; P and dS go through shared memory. All warps share
// dQ += dS K, a tile later, so that the block meets at one barrier a tile. kKeys begins a tile with dQ and kValues
// ends with it: one role's exponentials meet the other's products, and P is there when dS needs it. In 64 KiB own
// operands stay in registers, K and V alike.
//
// Bound: tensor cores and shared memory alike. 64 queries x 128 keys at d = 128 are 3,840 cycles of HMMA and about
// 4,200 of shared memory; 64 x 64 at d = 256 3,840 and 5,000.
#pragma once

#include "backward/mma/products.cuh"
#include "backward/mma/streamed_tiles.cuh"
#include "backward_shapes.h"
#include "device/backward_scores.cuh"

namespace flash_wmma::backward {

enum class Role { kValues, kKeys };

template <class Tile>
struct TwoRolesMemory : TileMemory<Tile> {
    using typename TileMemory<Tile>::Weights;
    Weights p, ds[2];  // dS of this tile and the one before
    RowPair facts[Tile::kStages][Tile::kStream / 2];
};

// spills: sm_75 sm_80 sm_90: loop-invariant values (bounds, addresses) of tiles at the register limit.
template <class Tile, Pass kPass>
__global__ void __launch_bounds__(Tile::kThreads, Tile::kBlocksPerSm)
    backward_two_roles(const __grid_constant__ Problem problem) {
    using T = typename Tile::T;
    using Map = TwoRolesMemory<Tile>;
    constexpr int kRowTiles = Tile::kRowTiles;
    static_assert(Tile::kStreamWarps == 2 && Tile::kStep == Tile::kWarpStream);
    static_assert(Tile::kStages == 2);
    static_assert(Tile::kFirstInRegisters == Tile::kSecondInRegisters);
    const ForwardParams& p = problem.forward;
    auto& smem = shared_memory<Map>();
    const Thread<Tile> thread(static_cast<int>(threadIdx.x));
    const bool values = static_cast<Role>(thread.role) == Role::kValues;
    const OwnedTile own = owned_keys<Tile::kOwn, false>(p);
    if (own.rows <= 0) return;
    const Sequence& sequence = own.sequence;
    const BandMask mask(p.band, sequence.seqlen_q, sequence.seqlen_k);
    StreamedRange range = streamed_range<Tile, kPass>(p, own, mask);

    Gradient<Tile> gradient;  // dV or dK
    gradient.clear();
    if (range.left > 0) {
        Cursor& at = range.at;
        int& left = range.left;
        const auto& own_tile = values ? smem.first : smem.second();
        OwnOperand<Tile, Tile::kFirstInRegisters> operand;
        copy_own<Tile, kPass>(smem.first, smem.second(), problem, own);
        if constexpr (Tile::kSecondInRegisters) {
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            __syncthreads();
            operand.load(own_tile, thread);
            __syncthreads();  // the ring takes its place
        }
        StreamedTiles<Tile, kPass> stream(problem, own, at);
        stream.start(smem, 0);
        stream.finish(smem, 0);
        ptx::cp_async_commit();

        const float scale = p.scale * kLog2e;
        float* dq_rows = nullptr;  // of the tile before
        for (int parity = 0;; parity ^= 1) {
            const int next = 1 - parity;
            ptx::cp_async_wait<0>();
            __syncthreads();  // this tile has landed, the one before has been used and its dS is there
            if (left > 1) stream.start(smem, next);
            ptx::cp_async_commit();
            const auto& scored = values ? smem.ring[parity].first : smem.ring[parity].second;
            const auto& weighed = values ? smem.ring[parity].second : smem.ring[parity].first;
#pragma unroll 1
            for (int turn = 0; turn < 2; ++turn) {
                if (turn != thread.role) {
                    if constexpr (kPass == Pass::kFused)
                        if (dq_rows) {
                            // Computed again, so that these products' addresses take no registers during the others
                            const Thread<Tile> again(ptx::opaque(static_cast<int>(threadIdx.x)));
                            add_to_dq<Tile>(dq_rows, p.head_dim, smem.ds[parity ^ 1], smem.first, again);
                        }
                    continue;
                }
                if (left == 0) continue;

                Scores<Tile> s;                          // S, P or dP, dS
                const int first = thread.warp_stream();  // of the tile's rows
                const RowPair* pairs = &smem.facts[parity][(first + thread.column()) / 2];
                const int barrier = 1 + thread.warp % Tile::kRoleWarps;  // of the two warps with the same scores
                s.clear();
                multiply_rows<Tile>(s, operand, own_tile, scored, first, thread);
                if (values) {
                    const auto lse = [&](int, int column) { return pairs[column / 8 * 4].minus_lse[column % 2]; };
                    const ScorePlace<Tile, true> place{own.first_row + thread.warp_row(), at.row + first, thread};
                    weigh_scores(s, scale, lse, place, mask);
                    exchange<Tile>(smem.p, s, first, thread);
                } else {
                    ptx::named_barrier_sync(barrier, 64);
                    weigh<Tile>(s, smem.p, pairs, first, thread);
                    exchange<Tile>(smem.ds[parity], s, first, thread);
                }
                ptx::named_barrier_sync(1 + Tile::kRoleWarps + thread.role * Tile::kOwnWarps + thread.own_warp,
                                        32 * Tile::kStreamWarps);
                const auto& shared = values ? smem.p : smem.ds[parity];
                const Thread<Tile> again(ptx::opaque(static_cast<int>(threadIdx.x)));
                const Reader<Fragment::kA, typename Map::Weights> read(again.lane, again.warp_row(), 0);
#pragma unroll
                for (int k = 0; k < Tile::kStream; k += 16) {
                    std::uint32_t weights[kRowTiles][4];
#pragma unroll
                    for (int r = 0; r < kRowTiles; ++r) read(weights[r], shared, 16 * r, k);
                    multiply_weights<Tile>(gradient, weights, weighed, k, again);
                    // P has long been there. The other role finishes dP about now, so that neither waits
                    if (k == Tile::kStream / 2 - 16 && values) ptx::named_barrier_sync(barrier, 64);
                }
            }
            if (left == 0) break;
            if constexpr (kPass == Pass::kFused) dq_rows = dq_of(problem, sequence, at.head, at.row);
            --left;
            at.advance();
            if constexpr (kPass != Pass::kFused)
                if (left == 0) break;
            if (left > 0) stream.finish(smem, next);
        }
    }

    __syncthreads();  // own rows have been used; the gradients take their place on the way out
    const Rows& out = values ? problem.dv : problem.dk;
    store<Tile>(row_of<T>(out, sequence.index, own.head_k, own.first_row), out.row, own.rows,
                values ? p.head_dim_v : p.head_dim, gradient, values ? 1.f : p.scale,
                values ? smem.first : smem.second(), thread);
}

}  // namespace flash_wmma::backward
