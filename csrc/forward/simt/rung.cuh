// What the early rungs of the SIMT ladder share: a step of the online softmax over a row that neighbouring lanes hold,
// the keys that a row sees, and a row in the registry.
#pragma once

#include <launch.h>
#include <ptx.cuh>

#include "attention.h"
#include "device/constants.cuh"
#include "device/mask.cuh"
#include "device/shuffle.cuh"
#include "device/tile.cuh"
#include "device/tiled_kernel.h"

namespace flash_wmma::simt {

/// m and l of a row, in log2 units. Bc neighbouring lanes hold its scores, one each.
template <int Bc>
struct OnlineRow {
    float m = -INFINITY, l = 0.f;

    /// The weight of this lane's score, and the factor that brings l and O to the new maximum.
    struct Step {
        float weight, rescale;
    };
    __device__ __forceinline__ Step advance(float score) {
        const float before = m;
        m = fmaxf(before, reduce_lanes(score, [](float x, float y) { return fmaxf(x, y); }, Bc));
        const float base = m == -INFINITY ? 0.f : m;  // no visible key yet
        const Step step{ptx::ex2(score - base), ptx::ex2(before - base)};
        l = l * step.rescale + reduce_lanes(step.weight, [](float x, float y) { return x + y; }, Bc);
        return step;
    }
    __device__ float inverse() const { return l == 0.f ? 0.f : 1.f / l; }
    __device__ float lse() const { return l == 0.f ? -INFINITY : (m + log2f(l)) * kLn2; }
};

/// The factor from products to scores in log2 units.
__device__ inline float scale_log2(const ForwardParams& p) { return p.scale * kLog2e; }

/// The keys that row r of a tile sees (none if it lies beyond Nq), and the tiles of Bc keys that any row of it sees.
template <int Br, int Bc>
struct VisibleKeys {
    int begin, end;             // of the row
    int first_tile, end_tiles;  // keys
    __device__ VisibleKeys(const ForwardParams& p, const QTile& tile, int r) {
        const BandMask mask(p.band, p.seqlen_q, p.seqlen_k);
        const int rows = static_cast<int>(p.seqlen_q), query = tile.first_row + r;
        begin = mask.begin(query);
        end = query < rows ? mask.end(query) : 0;
        first_tile = mask.begin(tile.first_row) / Bc * Bc;
        end_tiles = mask.end(min(tile.first_row + Br, rows) - 1);
    }
    __device__ bool sees(int key) const { return begin <= key && key < end; }
};

/// A block's rows and keys, and the least lanes per warp that it runs with: Bc, if the lanes of one warp share a row.
template <int Br, int Bc, int Lanes = Bc>
struct RungTile {
    static constexpr int kBr = Br, kBc = Bc, kLanes = Lanes;
};

/// A rung's instance: a kernel whose block is a Tile and `threads` threads.
template <class Tile>
Shape rung_shape(void (*kernel)(ForwardParams), void (*launch)(const ForwardParams&, const DeviceFacts&, Stream),
                 int head_dim, int threads, int smem_bytes) {
    return {{DType::kFloat32, 75, head_dim, Tile::kBr, Tile::kBc, (threads + 31) / 32, 1, smem_bytes,
             reinterpret_cast<const void*>(kernel)},
            Problems::kPlain,
            Pays(),
            launch,
            Tile::kLanes};
}

/// The table of a rung: shape_of(tile) of each tile, except those that need more lanes than any target of the compiler
/// has.
template <class... Tiles, class ShapeOf>
std::vector<Shape> rung_shapes(ShapeOf shape_of) {
    std::vector<Shape> shapes;
    const auto add = [&](auto tile) {
        if constexpr (decltype(tile)::kLanes <= kMostLanes) shapes.push_back(shape_of(tile));
    };
    (add(Tiles()), ...);
    return shapes;
}

/// A rung's row in the registry.
template <const std::vector<Shape>& kShapes>
KernelInfo rung_row(const char* name, const char* summary,
                    std::int64_t (*workspace_bytes)(const ForwardParams&, const DeviceFacts&) = no_workspace) {
    KernelInfo row = Tiled<kShapes>::row(
        {.name = name, .summary = summary, .min_arch = 75, .float32 = true, .features = kCausal | kWindow | kValueDim});
    row.workspace_bytes = workspace_bytes;
    return row;
}

}  // namespace flash_wmma::simt
