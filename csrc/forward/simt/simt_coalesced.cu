// simt_coalesced: like simt_naive, a block of one dimension and of as many rows as threads, but its lanes read
// neighbouring addresses.
//
// Algorithm: that of simt_naive. The warp takes its rows one after the other, and its lane c takes columns c, c + 32,
// ... of q, k, v and o: a request is 128 adjacent bytes, four sectors instead of 32. The sum over the columns is then
// spread over the lanes: each score needs a shuffle tree.
//
// Who owns what: while a row is worked on, lane j has the score and the weight of the tile's key j; lane r keeps m and
// l of row r.
//
// Bound: instructions. At d = 64 a score takes 2 FMAs, 5 shuffles and 5 additions; the maximum and the sum of a row are
// shuffle trees too. simt_block gives every score a thread of its own.
#include "forward/simt/rung.cuh"

namespace flash_wmma::simt {
namespace {

template <class Tile>
__global__ void __launch_bounds__(Tile::kLanes) coalesced(const __grid_constant__ ForwardParams p) {
    constexpr int kLanes = Tile::kLanes;  // of a row: Br and Bc
    const QTile tile = q_tile<kLanes>(p);
    const int lane = static_cast<int>(threadIdx.x);
    const int rows = min(kLanes, static_cast<int>(p.seqlen_q) - tile.first_row);
    float own_m = -INFINITY, own_l = 0.f;  // of row `lane`
    for (int row = 0; row < rows; ++row)
        for (int c = lane; c < p.head_dim_v; c += kLanes)
            row_of<float>(p.o, tile.batch, tile.head, tile.first_row + row)[c] = 0.f;

    const VisibleKeys<kLanes, kLanes> any(p, tile, 0);
    for (int first = any.first_tile; first < any.end_tiles; first += kLanes)
        for (int row = 0; row < rows; ++row) {
            const VisibleKeys<kLanes, kLanes> keys(p, tile, row);
            const float* const q = row_of<const float>(p.q, tile.batch, tile.head, tile.first_row + row);
            float* const o = row_of<float>(p.o, tile.batch, tile.head, tile.first_row + row);
            float score = -INFINITY;
            for (int j = 0; j < kLanes; ++j) {
                if (!keys.sees(first + j)) continue;
                const float* const k = row_of<const float>(p.k, tile.batch, tile.head_k, first + j);
                float product = 0.f;
                for (int c = lane; c < p.head_dim; c += kLanes) product = fmaf(q[c], k[c], product);
                product = reduce_lanes(product, [](float x, float y) { return x + y; }, kLanes);
                if (lane == j) score = product * scale_log2(p);
            }

            OnlineRow<kLanes> state{shuffle(own_m, row, kLanes), shuffle(own_l, row, kLanes)};
            const float before = state.l;
            const auto step = state.advance(score);
            const float keep = before * step.rescale * state.inverse();
            for (int c = lane; c - lane < p.head_dim_v; c += kLanes) {
                const bool inside = c < p.head_dim_v;
                float sum = 0.f;
                for (int j = 0; j < kLanes; ++j) {
                    const float weight = shuffle(step.weight, j, kLanes);
                    if (inside && keys.sees(first + j))
                        sum = fmaf(weight, row_of<const float>(p.v, tile.batch, tile.head_k, first + j)[c], sum);
                }
                if (inside) o[c] = o[c] * keep + sum * state.inverse();
            }
            if (lane == row) own_m = state.m, own_l = state.l;
        }
    if (lane < rows)
        p.lse[lse_index(p, tile.batch, tile.head, tile.first_row + lane)] = OnlineRow<kLanes>{own_m, own_l}.lse();
}

template <class Tile>
void launch_coalesced(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    launch(coalesced<Tile>, {q_tile_grid(p, Tile::kBr), dim3(Tile::kLanes)}, stream, p);
}

/// A block is a warp.
const std::vector<Shape> kShapes = rung_shapes<RungTile<64, 64>, RungTile<32, 32>>([](auto tile) {
    using Tile = decltype(tile);
    return rung_shape<Tile>(coalesced<Tile>, launch_coalesced<Tile>, 256, Tile::kLanes, 0);
});
const KernelInfo kInfo =
    rung_row<kShapes>("simt_coalesced", "as simt_naive, lanes along the columns: neighbouring addresses");
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
