// simt_fa1: attention in the order of FlashAttention (Dao et al. 2022, algorithm 1): K/V tiles outside, Q tiles inside.
//
// Algorithm: for each K/V tile, which stays in shared memory, the block walks over all Q tiles. Between two K/V tiles
// of a Q tile come all other Q tiles, so that its O, m and l go to global memory and come back every time:
//     m' = max(m, max S);  P = exp2(S - m');  l' = l exp2(m - m') + sum P;  O = (O l exp2(m - m') + P V) / l'.
//
// Who owns what: a block owns a head of a batch entry, and takes its tiles one after the other. Threads as in
// simt_shared.
//
// Bound: too few blocks, B * Hq. And traffic: Q is read, and O read and written, ceil(Nk / Bc) times.
// FlashAttention-2's order, rows outside, has one block per Q tile: it reads Q once, writes O once, and reads K and V
// ceil(Nq / Br) times.
#include "forward/simt/shared_rung.cuh"

namespace flash_wmma::simt {
namespace {

template <class Rung>
__global__ void __launch_bounds__(Rung::kBr* Rung::kBc) fa1(const __grid_constant__ ForwardParams p) {
    constexpr int kBr = Rung::kBr, kBc = Rung::kBc;
    auto& smem = shared_memory<typename Rung::SharedMemory>();
    const int x = static_cast<int>(threadIdx.x), y = static_cast<int>(threadIdx.y);
    const int heads = static_cast<int>(p.heads_q), batch = static_cast<int>(blockIdx.x) / heads;
    const int head = static_cast<int>(blockIdx.x) % heads, head_k = head / static_cast<int>(p.heads_q / p.heads_k);
    auto* const states = static_cast<OnlineRow<kBc>*>(p.workspace) + std::int64_t{blockIdx.x} * p.seqlen_q;
    const int rows = static_cast<int>(p.seqlen_q), key_count = static_cast<int>(p.seqlen_k);
    for (int query = y; query < rows; query += kBr) {
        for (int c = x; c < p.head_dim_v; c += kBc) row_of<float>(p.o, batch, head, query)[c] = 0.f;
        if (x == 0) states[query] = {};
    }

    for (int first = 0; first < key_count; first += kBc) {
        __syncthreads();
        load_tile<Rung>(smem.k, row_of<const float>(p.k, batch, head_k, first), p.k.row, key_count - first, p.head_dim);
        load_tile<Rung>(smem.v, row_of<const float>(p.v, batch, head_k, first), p.v.row, key_count - first,
                        p.head_dim_v);
        for (int first_row = 0; first_row < rows; first_row += kBr) {
            const QTile tile{batch, head, head_k, first_row};
            const VisibleKeys<kBr, kBc> keys(p, tile, y);
            if (first < keys.first_tile || first >= keys.end_tiles) continue;  // no row sees any of the keys
            __syncthreads();  // the Q tile before has been used, and its states are written
            load_tile<Rung>(smem.q, row_of<const float>(p.q, batch, head, first_row), p.q.row, rows - first_row,
                            p.head_dim);
            __syncthreads();

            const int query = first_row + y;
            const bool exists = query < rows;
            float product = 0.f;
#pragma unroll 8
            for (int c = 0; c < p.head_dim; ++c) product = fmaf(smem.q[y][c], smem.k[x][c], product);
            OnlineRow<kBc> row;
            if (exists) row = states[query];
            const float before = row.l;
            const auto step = row.advance(keys.sees(first + x) ? product * scale_log2(p) : -INFINITY);
            const float keep = before * step.rescale * row.inverse();
            float sums[Rung::kD / kBc] = {};
            for (int j = 0; j < kBc; ++j) {
                const float weight = shuffle(step.weight, j, kBc);
#pragma unroll
                for (int i = 0; i < Rung::kD / kBc; ++i)
                    if (x + kBc * i < p.head_dim_v) sums[i] = fmaf(weight, smem.v[j][x + kBc * i], sums[i]);
            }
            sync_warp();  // the row's lanes have read its state
            if (!exists) continue;
            float* const o = row_of<float>(p.o, batch, head, query);
#pragma unroll
            for (int i = 0; i < Rung::kD / kBc; ++i)
                if (x + kBc * i < p.head_dim_v) o[x + kBc * i] = o[x + kBc * i] * keep + sums[i] * row.inverse();
            if (x == 0) states[query] = row;
        }
    }
    __syncthreads();
    for (int query = y; query < rows; query += kBr)
        if (x == 0) p.lse[lse_index(p, batch, head, query)] = states[query].lse();
}

template <class Rung>
void launch_fa1(const ForwardParams& p, const DeviceFacts&, Stream stream) {
    const std::int64_t blocks = p.batch * p.heads_q;
    if (blocks > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 heads");
    launch(fa1<Rung>,
           {dim3(static_cast<unsigned>(blocks)), dim3(Rung::kBc, Rung::kBr), sizeof(typename Rung::SharedMemory)},
           stream, p);
}

template <class Rung>
Shape fa1_shape() {
    return rung_shape<Rung>(fa1<Rung>, launch_fa1<Rung>, Rung::kD, Rung::kBr * Rung::kBc,
                            sizeof(typename Rung::SharedMemory));
}

/// m and l of every row.
std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    return p.batch * p.heads_q * p.seqlen_q * static_cast<std::int64_t>(sizeof(OnlineRow<32>));
}

const std::vector<Shape> kShapes =
    rung_shapes<SharedRung<64, 16, 64, 1, false>, SharedRung<64, 32, 32, 1, false>, SharedRung<128, 32, 32, 1, false>,
                SharedRung<256, 16, 16, 1, false>>([](auto rung) { return fa1_shape<decltype(rung)>(); });
const KernelInfo kInfo = rung_row<kShapes>(
    "simt_fa1", "FlashAttention-1's order: K/V tiles outside, O, m and l through global memory", workspace_bytes);
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::simt
