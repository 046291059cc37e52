// The route of wmma_v3 for hardware whose fragment layout is not the known one.
#pragma once

#include "forward/wmma/v3_block.cuh"

namespace flash_wmma::wmma_v3 {

/// The whole of a block's work for any fragment layout, once Q is in shared memory: S and P through shared memory, 16
/// keys at a time, a lane pair on each row. Not inlined, so that it costs the common route no registers.
// spills: sm_80 sm_90: as forward, whose registers bound it.
template <class Tile, Problems kProblems>
__device__ __noinline__ void attend_opaque(const ForwardParams& p) {
    using T = typename Tile::T;
    constexpr bool kModified = includes(kProblems, Problems::kModified);
    auto& smem = shared_memory<SharedMemory<Tile>>();
    const Work<Tile, kProblems> work(p);
    const int warp_row = static_cast<int>(threadIdx.x) / 32 * Tile::kWarpRows;
    QOperand<Tile> q;
    q.load(smem, warp_row);
    OAccumulators<Tile> o;
    clear<Tile>(o);
    const int lane = static_cast<int>(threadIdx.x) % 32, row = lane / 2, first_column = lane % 2 * 8;
    const int seqlen_k = work.sequence.seqlen_k;
    const float q_scale = work.query_scale(warp_row);
    auto& [k, v, warps] = smem.opaque;
    auto& scratch = warps[threadIdx.x / 32];
    const DropoutMask dropout_mask = work.dropout_mask();

    ValueUnit unit(work.v_exp);
    float m[Tile::kRowTiles], l[Tile::kRowTiles];  // of row lane / 2; both lanes of the pair hold the whole sum
    for (int r = 0; r < Tile::kRowTiles; ++r) m[r] = -INFINITY, l[r] = 0.f;

    ptx::cp_async_wait<0>();  // the first K tile, copied for the other route, must not land later
    for (int key = work.first_key; key <= work.last_key; key += 16) {
        __syncthreads();
        copy_tile_async<Tile, 16>(k, work.k, p.k.row, key, seqlen_k, p.head_dim);
        copy_tile_async<Tile, 16>(v, work.v, p.v.row, key, seqlen_k, p.head_dim_v);
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncthreads();
        const float scale = work.score_scale(q_scale, key);
        const float factor = ScoreMod<kModified>::active(p) ? 1.f : scale;
        const ValueUnit::Step value = work.v_exp ? unit.step(work.v_exp[key / kScaleRows]) : ValueUnit::Step{0.f, 0.f};

#pragma unroll
        for (int r = 0; r < Tile::kRowTiles; ++r) {
            Accumulator s;
            wmma::fill_fragment(s, 0.f);
#pragma unroll
            for (int c = 0; c < Tile::kD / 16; ++c) {
                KFragment<Tile> kt;
                wmma::load_matrix_sync(kt, &k[0][16 * c], Tile::kPitch);
                wmma::mma_sync(s, q.template fragment<false>(r, c), kt, s);
            }
            wmma::store_matrix_sync(&scratch.tile[0][0], s, 20, wmma::mem_row_major);
            __syncwarp();

            const int query = work.tile.row(warp_row + 16 * r + row).query;
            const int begin = work.mask.begin(query) - key, end = work.mask.end(query) - key;
            float score[8], top = m[r], sum = 0.f;
            for (int i = 0; i < 8; ++i) score[i] = scratch.tile[row][first_column + i];
            if constexpr (kModified)
                if (ScoreMod<kModified>::active(p)) {
                    const ScoreMod<kModified> mod(p, work.sequence, work.tile);
                    for (int i = 0; i < 8; i += 2)
                        mod.template apply<1, 1>([&](int, int, int e) -> float& { return score[i + e]; }, scale,
                                                 [&](int) { return query; }, key + first_column + i);
                }
            for (int i = 0; i < 8; ++i) {
                const int column = first_column + i;
                score[i] = column >= begin && column < end ? score[i] * factor : -INFINITY;
                top = fmaxf(top, score[i]);
            }
            top = fmaxf(top, __shfl_xor_sync(kWarpMask, top, 1));
            const float base = top == -INFINITY ? 0.f : top, rescale = ptx::ex2(m[r] - base);
            for (int i = 0; i < 8; ++i) {
                const float weight = ptx::ex2(score[i] + value.weight - base);
                bool kept = true;
                if constexpr (Work<Tile, kProblems>::kDrops)
                    kept = keeps_weight(p.dropout, dropout_mask, query, key + first_column + i);
                scratch.p[row][first_column + i] = Element<T>::from(kept ? weight : 0.f);
                sum += weight;
            }
            sum += __shfl_xor_sync(kWarpMask, sum, 1);
            m[r] = top;
            l[r] = l[r] * rescale + sum * ptx::ex2(-value.weight);
            const float rescale_o = rescale * ptx::ex2(value.rescale);
            __syncwarp();

            AFragment<Tile> weights;
            wmma::load_matrix_sync(weights, &scratch.p[0][0], 24);
#pragma unroll
            for (int c = 0; c < Tile::kD / 16; ++c) {
                wmma::store_matrix_sync(&scratch.tile[0][0], o[r][c], 20, wmma::mem_row_major);
                __syncwarp();
                for (int i = 0; i < 8; ++i) scratch.tile[row][first_column + i] *= rescale_o;
                __syncwarp();
                wmma::load_matrix_sync(o[r][c], &scratch.tile[0][0], 20, wmma::mem_row_major);
                VFragment<Tile> vt;
                wmma::load_matrix_sync(vt, &v[0][16 * c], Tile::kPitch);
                wmma::mma_sync(o[r][c], weights, vt, o[r][c]);
                __syncwarp();
            }
        }
    }
    for (int r = 0; r < Tile::kRowTiles; ++r)
        if (lane % 2 == 0) finish_row(work, smem, unit, warp_row + 16 * r + row, m[r], l[r]);
    __syncthreads();
    store_o(work, smem, o, warp_row);
}

}  // namespace flash_wmma::wmma_v3
