// wgmma_sm90's kernel for tangents: out, lse and their tangents, given those of q, k and v, in one pass over the keys.
//
// Algorithm: a block owns Br = 64 * consumers query rows of one head and loops over tiles of Bc keys, from the last
// visible one back to the first:
//     S = Q K^T                T = scale (dQ K^T + Q dK^T)
//     P = exp2(S scale - m)    R = P (T - c)                  m: the lagging maximum; c: a constant of the row
//     l += rowsum P            mu += rowsum R
//     O += P V                 N += P dV + R V
// and at the end, without a sink,
//     out = O / l              lse = m + ln l
//     dlse = c + mu / l        dout = (N - (mu / l) O) / l
// tangent_softmax.cuh has m and c, and the sink. A sink's own tangent is not the kernel's. Where q or k alone moves,
// the products with the tangents of the others are left out (Moves).
//
// Roles, as in wgmma_sm90.cuh: warpgroup 0 plans and produces, one warp each; a consumer warpgroup owns 64 rows, each
// of its warps 16 of them. S, T, P, R, O and N are in registers. Dense problems, any band; items are whole.
//
// Order of a consumer: beside T it makes P; beside O += P V and N += P dV it makes R; then come S of the next tile and
// N += R V, and when these are done T of the next. So at most O and N, S and T, and P as an operand are held at a time,
// 208 registers at d = 128, 184 at d = 64. The two consumers are free to drift apart, and the products of one go on
// beside what the other computes. Where m rises, which all of the consumer's warps then know, c moves: N needs O and T
// before the products with V.
//
// Shared memory: Q with dQ of the block's rows, and rings of K with dK and of V with dV, as panels of 64 columns with
// the 128-byte swizzle.
//
// Bound, as counted and not yet timed: the tensor cores. There are six products of depth d where forward has two.
// Beside them a scheduler issues instructions in half of the cycles at d = 64, in a third at d = 128, and exponentials
// take a third and a sixth. S and T read both operands from shared memory: with 64 keys (d = 128) that takes its whole
// bandwidth while they run, with 96 five sixths.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>

#include "forward/wgmma/tangent_consumer.cuh"
#include "forward/wgmma/tangent_producer.cuh"

namespace flash_wmma::wgmma_sm90 {

// spills: sm_90a: at d = 128 warpgroup 0, with few registers, keeps parts of an item in local memory, and so do
// consumers at their limit, which read one value of it in the loop over tiles.
template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    forward_with_tangents(const __grid_constant__ TangentParams p, const __grid_constant__ TangentMaps maps,
                          const __grid_constant__ Schedule schedule) {
    auto& smem =
        *ptx::opaque(&shared_memory<TangentMemory<Tile>>());  // or its address is computed again for every tile
    if (threadIdx.x == 0) {
        constexpr unsigned kWarps = 4;  // of a consumer; each releases by itself
        for (auto& stage : smem.q_slot)
            for (Slot& slot : stage) ptx::barrier_init(&slot.full, 1), ptx::barrier_init(&slot.empty, kWarps);
        for (auto* ring : {smem.k_slot, smem.v_slot})
            for (int i = 0; i < Tile::kStages; ++i) {
                ptx::barrier_init(&ring[i].full, 1);
                ptx::barrier_init(&ring[i].empty, kWarps * Tile::kConsumers);
            }
        smem.plans.prepare(kWarps * Tile::kConsumers);
        ptx::barrier_init_fence();
    }
    __syncwarp();  // registers change hands by whole warps
    ptx::let_next_grid_start();
    if (uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads) == 0) {
        ptx::release_registers<Tile::kProducerRegisters>();
        if (threadIdx.x < 32) {
            await_prepared<Tile>();
            ptx::wait_for_previous_grids();
            TangentProducer<Tile>(maps, smem).run();
        } else if (threadIdx.x < 64) {
            Planner<Tile, Problems::kPlain>(p.forward, smem.plans).run(schedule);
        } else {
            await_prepared<Tile>();
        }
    } else {
        await_prepared<Tile>();
        ptx::acquire_registers<Tile::kConsumerRegisters>();
        ptx::wait_for_previous_grids();
        TangentConsumer<Tile>(p, smem).run();
    }
}

template <class Tile>
Instance tangent_facts() {
    return {Element<typename Tile::T>::kDType,
            90,
            Tile::kD,
            Tile::kBr,
            Tile::kBc,
            Tile::kThreads / 32,
            Tile::kStages,
            sizeof(TangentMemory<Tile>),
            reinterpret_cast<const void*>(forward_with_tangents<Tile>)};
}

template <class Tile>
void launch_tangents(const TangentParams& p, const DeviceFacts& device, Stream stream) {
    const ForwardParams& f = p.forward;
    const auto of_queries = [&](const Rows& rows) {
        return map_rows(f, rows, f.head_dim, f.seqlen_q, f.heads_q, Tile::kGroupRows);
    };
    const auto of_keys = [&](const Rows& rows, std::int64_t columns) {
        return map_rows(f, rows, columns, f.seqlen_k, f.heads_k, Tile::kBc);
    };
    TangentMaps maps{{of_queries(f.q), {}}, {of_keys(f.k, f.head_dim), {}}, {of_keys(f.v, f.head_dim_v), {}}};
    if constexpr (Tile::kMoves.q) maps.q.moved = of_queries(p.dq);
    if constexpr (Tile::kMoves.k) maps.k.moved = of_keys(p.dk, f.head_dim);
    if constexpr (Tile::kMoves.v) maps.v.moved = of_keys(p.dv, f.head_dim_v);
    const Shape whole{tangent_facts<Tile>(), Problems::kPlain, Tile::kD, Tile::kD,
                      /*splits=*/false,      kMaxSeqlen,       1.f,      nullptr};
    const Schedule schedule = make_schedule(f, device, whole);
    const int blocks = std::min(schedule.items, multiprocessors(device));
    const LaunchConfig config{dim3(static_cast<unsigned>(blocks)), dim3(Tile::kThreads), sizeof(TangentMemory<Tile>),
                              /*cluster=*/1, /*programmatic=*/true};
    launch(forward_with_tangents<Tile>, config, stream, p, maps, schedule);
}

template <class T, const auto& kRows>
std::vector<TangentShape> tangent_shapes() {
    return of_rows<kRows>([](auto i) {
        using Shaped = TangentTile<T, kRows[i]>;
        return TangentShape{tangent_facts<Shaped>(), Shaped::kMoves, launch_tangents<Shaped>};
    });
}

/// The shapes that ship.
constexpr TangentTileShape tangents_at_64(Moves moves) {
    return {.d = 64, .keys = 96, .stages = 3, .q_stages = 2, .moves = moves};
}
constexpr TangentTileShape tangents_at_128(Moves moves) {
    return {.d = 128, .keys = 64, .stages = moves.v ? 2 : 3, .moves = moves};
}
inline constexpr Moves kQMoves{.k = false, .v = false}, kKMoves{.q = false, .v = false};
inline constexpr TangentTileShape kTangentRows[] = {
    tangents_at_64({}),  tangents_at_64(kQMoves),  tangents_at_64(kKMoves),
    tangents_at_128({}), tangents_at_128(kQMoves), tangents_at_128(kKMoves),
};

}  // namespace flash_wmma::wgmma_sm90
