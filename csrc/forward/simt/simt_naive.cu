// simt_naive: attention in fp32 as one would first write it: a thread owns a query row, in a block of one dimension.
//
// Algorithm (FlashAttention, with the loop over rows outside): a thread loops over tiles of Bc keys. For each tile it
// computes the scores of its row in registers, their maximum and their sum, and rewrites its row of O in global memory:
//     m' = max(m, max S);  P = exp2(S - m');  l' = l exp2(m - m') + sum P;  O = (O l exp2(m - m') + P V) / l'.
//
// Who owns what: thread i owns row i of the Q tile, its S, m and l, and row i of O.
//
// Bound: requests to global memory. The lanes of a warp read q and o of 32 rows, which lie d floats apart: 32 sectors
// per request, with 4 bytes used of each. k and v are the same for all lanes. Every product needs both loads.
// simt_coalesced changes which lane reads what.
#include "forward/simt/rung.cuh"

namespace flash_wmma::simt {
namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kBr) naive(const __grid_constant__ ForwardParams p) {
    constexpr int kBr = Tile::kBr, kBc = Tile::kBc;
    const QTile tile = q_tile<kBr>(p);
    const int row = static_cast<int>(threadIdx.x), query = tile.first_row + row;
    if (query >= p.seqlen_q) return;
    const VisibleKeys<kBr, kBc> keys(p, tile, row);
    const float* const q = row_of<const float>(p.q, tile.batch, tile.head, query);
    float* const o = row_of<float>(p.o, tile.batch, tile.head, query);
    for (int c = 0; c < p.head_dim_v; ++c) o[c] = 0.f;

    float m = -INFINITY, l = 0.f;
    for (int first = keys.first_tile; first < keys.end_tiles; first += kBc) {
        float s[kBc], top = m;
#pragma unroll
        for (int j = 0; j < kBc; ++j) {
            s[j] = -INFINITY;
            if (keys.sees(first + j)) {
                const float* const k = row_of<const float>(p.k, tile.batch, tile.head_k, first + j);
                float product = 0.f;
                for (int c = 0; c < p.head_dim; ++c) product = fmaf(q[c], k[c], product);
                s[j] = product * scale_log2(p);
            }
            top = fmaxf(top, s[j]);
        }
        const float base = top == -INFINITY ? 0.f : top;  // no visible key yet
        const float before = l * ptx::ex2(m - base);
        m = top, l = before;
#pragma unroll
        for (int j = 0; j < kBc; ++j) l += s[j] = ptx::ex2(s[j] - base);
        const float inverse = l == 0.f ? 0.f : 1.f / l;
        for (int c = 0; c < p.head_dim_v; ++c) {
            float sum = 0.f;
#pragma unroll
            for (int j = 0; j < kBc; ++j)
                if (keys.sees(first + j))
                    sum = fmaf(s[j], row_of<const float>(p.v, tile.batch, tile.head_k, first + j)[c], sum);
            o[c] = (o[c] * before + sum) * inverse;
        }
    }
    p.lse[lse_index(p, tile.batch, tile.head, query)] = l == 0.f ? -INFINITY : (m + log2f(l)) * kLn2;
}

template <class Tile>
void launch_naive(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    launch(naive<Tile>, {q_tile_grid(p, Tile::kBr), dim3(Tile::kBr)}, stream, p);
}

/// A block is a warp.
const std::vector<Shape> kShapes = rung_shapes<RungTile<64, 32, 64>, RungTile<32, 32>>([](auto tile) {
    using Tile = decltype(tile);
    return rung_shape<Tile>(naive<Tile>, launch_naive<Tile>, 256, Tile::kBr, 0);
});
const KernelInfo kInfo = rung_row<kShapes>("simt_naive", "fp32 on CUDA cores: a thread a row, O rewritten every tile");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
