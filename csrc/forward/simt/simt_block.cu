// simt_block: a block of two dimensions, Bc x Br threads, one score of a tile each.
//
// Algorithm: that of simt_naive, all rows of the Q tile and all keys of a tile at once.
//
// Who owns what: thread (x, y) owns the score of row y and key x, and columns x, x + Bc, ... of O's row y. The Bc
// threads of a row are lanes of one warp: warp shuffles of width Bc find the row's maximum and sum, and bring P to the
// lanes that multiply it.
//
// Bound: requests to global memory. The lanes of a row read the same q, but k of 32 keys, d floats apart: again 32
// sectors per request. And every row of the block reads all of K and V for itself. In simt_shared the block reads them
// once.
#include "forward/simt/rung.cuh"

namespace flash_wmma::simt {
namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kBr* Tile::kBc) block(const __grid_constant__ ForwardParams p) {
    constexpr int kBr = Tile::kBr, kBc = Tile::kBc;
    const QTile tile = q_tile<kBr>(p);
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y), query = tile.first_row + y;
    const bool exists = query < p.seqlen_q;
    const VisibleKeys<kBr, kBc> keys(p, tile, y);
    const float* const q = row_of<const float>(p.q, tile.batch, tile.head, exists ? query : tile.first_row);
    float* const o = row_of<float>(p.o, tile.batch, tile.head, exists ? query : tile.first_row);
    if (exists)
        for (int c = x; c < p.head_dim_v; c += kBc) o[c] = 0.f;

    OnlineRow<kBc> row;
    for (int first = keys.first_tile; first < keys.end_tiles; first += kBc) {
        float score = -INFINITY;
        if (keys.sees(first + x)) {
            const float* const k = row_of<const float>(p.k, tile.batch, tile.head_k, first + x);
            float product = 0.f;
            for (int c = 0; c < p.head_dim; ++c) product = fmaf(q[c], k[c], product);
            score = product * scale_log2(p);
        }
        const float before = row.l;
        const auto step = row.advance(score);
        const float keep = before * step.rescale * row.inverse();
        for (int c = x; c - x < p.head_dim_v; c += kBc) {
            const bool inside = exists && c < p.head_dim_v;
            float sum = 0.f;
            for (int j = 0; j < kBc; ++j) {
                const float weight = shuffle(step.weight, j, kBc);
                if (inside && keys.sees(first + j))
                    sum = fmaf(weight, row_of<const float>(p.v, tile.batch, tile.head_k, first + j)[c], sum);
            }
            if (inside) o[c] = o[c] * keep + sum * row.inverse();
        }
    }
    if (exists && x == 0) p.lse[lse_index(p, tile.batch, tile.head, query)] = row.lse();
}

template <class Tile>
void launch_block(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    launch(block<Tile>, {q_tile_grid(p, Tile::kBr), dim3(Tile::kBc, Tile::kBr)}, stream, p);
}

const std::vector<Shape> kShapes = rung_shapes<RungTile<16, 64>, RungTile<32, 32>>([](auto tile) {
    using Tile = decltype(tile);
    return rung_shape<Tile>(block<Tile>, launch_block<Tile>, 256, Tile::kBr * Tile::kBc, 0);
});
const KernelInfo kInfo =
    rung_row<kShapes>("simt_block", "a 2-D block, a score a thread: row maximum and sum by warp shuffles");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
