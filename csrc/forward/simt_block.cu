// simt_block: a block of two dimensions, Bc x Br threads, one score of a tile each.
//
// Algorithm: that of simt_naive, all rows of the Q tile and all keys of a tile at once.
//
// Who owns what: thread (x, y) the score of row y and key x, and of O's row y the columns x, x + Bc, ... The Bc threads
// of a row are lanes of one warp: its maximum and its sum are warp shuffles of width Bc, and so is the way of P to
// those who multiply it.
//
// Bound: requests to global memory. The lanes of a row read the same q, but k of 32 keys, d floats apart: 32 sectors a
// request again. And every row of the block reads all of K and V for itself. simt_shared has the block read them once.
#include "simt_rung.cuh"

namespace flash_wmma::simt {
namespace {

template <int Br, int Bc>
__global__ void __launch_bounds__(Br* Bc) block(const __grid_constant__ ForwardParams p) {
    const QTile tile = q_tile<Br>(p);
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y), query = tile.first_row + y;
    const bool exists = query < p.seqlen_q;
    const VisibleKeys<Br, Bc> keys(p, tile, y);
    const float* const q = row_of<const float>(p.q, tile.batch, tile.head, exists ? query : tile.first_row);
    float* const o = row_of<float>(p.o, tile.batch, tile.head, exists ? query : tile.first_row);
    if (exists)
        for (int c = x; c < p.head_dim_v; c += Bc) o[c] = 0.f;

    OnlineRow<Bc> row;
    for (int first = keys.first_tile; first < keys.end_tiles; first += Bc) {
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
        for (int c = x; c - x < p.head_dim_v; c += Bc) {
            const bool inside = exists && c < p.head_dim_v;
            float sum = 0.f;
            for (int j = 0; j < Bc; ++j) {
                const float weight = shuffle(step.weight, j, Bc);
                if (inside && keys.sees(first + j))
                    sum = fmaf(weight, row_of<const float>(p.v, tile.batch, tile.head_k, first + j)[c], sum);
            }
            if (inside) o[c] = o[c] * keep + sum * row.inverse();
        }
    }
    if (exists && x == 0) p.lse[lse_index(p, tile.batch, tile.head, query)] = row.lse();
}

constexpr int kBr = 32, kBc = 32;

void launch_block(const ForwardParams& p, Stream stream) {
    launch(block<kBr, kBc>, {q_tile_grid(p, kBr), dim3(kBc, kBr)}, stream, p);
}

const std::vector<Shape> kShapes = {rung_shape<kBr, kBc>(block<kBr, kBc>, launch_block, 256, kBr* kBc, 0)};
const KernelInfo kInfo = Rung<kShapes>::info(
    /*name=*/"simt_block", /*summary=*/"a 2-D block, a score a thread: row maximum and sum by warp shuffles");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
