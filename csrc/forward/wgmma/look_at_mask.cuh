// The grid that looks at a boolean mask before wgmma_sm90 runs (mask_tiles.cuh).
//
// A block makes a list: its warps share the rows of a Q tile, and a lane has 16 neighbouring keys of them at a time.
// Bytes become bits, four lanes' bits a tile's, which these lanes exchange for those that a quad of the kernel wants;
// then one warp knows of eight tiles what each group of rows sees.
//
// Bound: HBM, for a byte a key is read and a bit written.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>

#include "device/constants.cuh"
#include "forward/wgmma/mask_tiles.cuh"

namespace flash_wmma::wgmma_sm90 {

inline constexpr int kLookWarps = 8, kLookTiles = 8;  // of a block, at a time

struct LookMemory {
    unsigned seen[kLookWarps][MaskTiles::kMostGroups][kLookTiles];
};

/// A lane's 16 keys from `key` on of a row that begins at `row`, as bits; 0 beyond the end.
__device__ __forceinline__ unsigned look_at_keys(const bool* row, std::int64_t stride, int key, int keys, bool wide) {
    unsigned bits = 0;
    if (wide && key + 16 <= keys) {
        const uint4 bytes = *reinterpret_cast<const uint4*>(row + key);
        const unsigned words[] = {bytes.x, bytes.y, bytes.z, bytes.w};
#pragma unroll
        for (int i = 0; i < 4; ++i)  // the product brings the bytes' lowest bits together, from bit 28 on
            bits |= ((words[i] & 0x01010101u) * 0x10204080u >> 28) << (4 * i);
    } else {
#pragma unroll
        for (int i = 0; i < 16; ++i)
            if (key + i < keys && row[(key + i) * stride]) bits |= 1u << i;
    }
    return bits;
}

/// What a quad's lanes know of 16 keys of a row each, as they will need it: lane q gets the bits of keys 8 j + 2 q and
/// the next, j < 8.
__device__ __forceinline__ unsigned deal_in_quad(unsigned own, int lane) {
    const auto spread = [](unsigned byte) {  // pairs of bits, four apart
        byte = (byte | byte << 4) & 0x0f0f;
        return (byte | byte << 2) & 0x3333;
    };
    const unsigned for_lanes = spread(own & 0xff) | spread(own >> 8) << 2;  // four bits for each
    unsigned got = 0;
#pragma unroll
    for (int from = 0; from < 4; ++from)
        got |= (__shfl_sync(kWarpMask, for_lanes, from, 4) >> 4 * (lane % 4) & 0xf) << 4 * from;
    return got;
}

/// A block for every list. Its warps share the rows; a lane has 16 neighbouring keys.
__global__ void __launch_bounds__(32 * kLookWarps)
    look_at_mask(const __grid_constant__ Bias mask, const __grid_constant__ MaskTiles found, int keys) {
    auto& smem = shared_memory<LookMemory>();
    ptx::let_next_grid_start();
    ptx::wait_for_previous_grids();
    const int warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
    const int slice = static_cast<int>(blockIdx.x) / found.q_tiles,
              q_tile = static_cast<int>(blockIdx.x) % found.q_tiles;
    const bool* const first =
        static_cast<const bool*>(mask.data) + slice / found.heads * mask.batch + slice % found.heads * mask.head;
    const bool wide =
        mask.key == 1 && reinterpret_cast<std::uintptr_t>(mask.data) % 16 == 0 &&
        ((found.batches == 1 ? 0 : mask.batch) | (found.heads == 1 ? 0 : mask.head) | mask.query) % 16 == 0;
    const int groups = found.rows == 1 ? 1 : found.br / MaskTiles::kGroupRows;
    const std::int64_t list = std::int64_t{blockIdx.x} * (found.tiles + 1);
    int count = 0;  // of visible tiles
    for (int tile = 0; tile < found.tiles; tile += kLookTiles) {
        const int own_tile = tile + lane / 4, key = own_tile * MaskTiles::kKeys + lane % 4 * 16;
        const unsigned exist = (1u << max(0, min(16, keys - key))) - 1;
        for (int g = 0; g < groups; ++g) {
            unsigned seen = 0;
#pragma unroll 4
            for (int r = warp; r < MaskTiles::kGroupRows; r += kLookWarps) {
                // Rows behind the last one, of its warp, get its bits
                const int place = q_tile * found.br + g * MaskTiles::kGroupRows + r, row = min(place, found.rows - 1);
                if (place / MaskTiles::kWarpRows >= found.slice_runs() || (found.rows == 1 && r > 0)) break;
                const unsigned own = look_at_keys(first + row * mask.query, mask.key, key, keys, wide);
                seen |= (own != 0 ? MaskTiles::kSomeSeen : 0) | (own != exist ? MaskTiles::kSomeHidden : 0);
                const unsigned bits = deal_in_quad(own, lane);
                if (own_tile >= found.tiles) continue;
                const std::int64_t run = std::int64_t{slice} * found.slice_runs() + place / MaskTiles::kWarpRows;
                unsigned* const word =
                    found.bits + (run * found.tiles + own_tile) * found.lanes + place % 8 * 4 + lane % 4;
                if (found.rows == 1) *word = bits << 16 | bits;
                else reinterpret_cast<std::uint16_t*>(word)[place / 8 % 2] = static_cast<std::uint16_t>(bits);
            }
            seen |= __shfl_xor_sync(kWarpMask, seen, 1);
            seen |= __shfl_xor_sync(kWarpMask, seen, 2);
            if (lane % 4 == 0) smem.seen[warp][g][lane / 4] = seen;
        }
        __syncthreads();
        if (warp == 0) {  // a lane has a tile and a group
            const int group = groups == 1 && found.rows == 1 ? 0 : lane / kLookTiles, at = tile + lane % kLookTiles;
            unsigned seen = 0;
            if (group < groups)
                for (int w = 0; w < kLookWarps; ++w) seen |= smem.seen[w][group][lane % kLookTiles];
            if (!(seen & MaskTiles::kSomeSeen) || at >= found.tiles) seen = 0;
            unsigned entry = seen << (MaskTiles::kTileBits + lane / kLookTiles * 2);
            entry |= __shfl_xor_sync(kWarpMask, entry, 8);
            entry |= __shfl_xor_sync(kWarpMask, entry, 16);
            const unsigned visible = __ballot_sync(kWarpMask, entry != 0 && lane < kLookTiles);
            const int place = count + __popc(visible & ((1u << lane) - 1));
            if (lane < kLookTiles && at < found.tiles) found.rank[list + at] = place;
            if (visible >> lane & 1) found.order[list + place] = entry | static_cast<unsigned>(at);
            count += __popc(visible);
        }
        __syncthreads();
    }
    if (threadIdx.x == 0) {
        found.rank[list + found.tiles] = count;
        found.order[list + count] = ~0u << MaskTiles::kTileBits;
    }
}

inline void launch_look_at_mask(const ForwardParams& p, const MaskTiles& found, Stream stream) {
    LaunchConfig config{dim3(static_cast<unsigned>(found.lists())), dim3(32 * kLookWarps), sizeof(LookMemory)};
    config.programmatic = true;
    launch(look_at_mask, config, stream, p.bias, found, static_cast<int>(p.seqlen_k));
}

}  // namespace flash_wmma::wgmma_sm90
