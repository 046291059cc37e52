// Items of bwd_sm90 in parts. Items that take equally long, as without a mask, end together, and the last round of
// blocks may lack many: it takes as long as if it were whole. So the items of that round are worked on in parts, each
// with a share of the tiles of queries, by blocks of their own.
//
// All parts but an item's last add their dK and dV to sums in global memory, which `prepare` or `prepare_items` has
// cleared; the last one, which some block takes after them, waits until they have done so, and adds the sums to its
// own. With more than two parts the order of the additions differs from run to run, as dQ's does.
#pragma once

#include <launch.h>
#include <ptx.cuh>
#include <ptx_sm90.cuh>

#include "device/backward_rows.cuh"
#include "device/register_tile.cuh"

namespace flash_wmma::backward::wgmma {

/// What an index of the queue stands for.
struct PartOfItem {
    int item, part;  // of `each` parts of the item, if it has parts
    int split;       // number of the item among those that have parts; negative: it has none

    __device__ __forceinline__ static PartOfItem of(const ItemParts& parts, int index) {
        if (index < parts.whole) return {index, 0, -1};
        const int behind = index - parts.whole, split = behind / parts.each;
        return {parts.whole + split, behind % parts.each, split};
    }
};

/// A warp's place in the sums and counts of an item with parts.
class PartSums {
  public:
    /// `warp`: of those that own keys.
    template <class Tile>
    __device__ __forceinline__ static PartSums of(const ItemParts& parts, int split, int warp, int lane) {
        constexpr int kWarps = 4 * Tile::kConsumers;
        const int at = split * kWarps + warp;
        return {parts.sums + std::int64_t{at} * words(Tile::kD) + 4 * lane, parts.counts + at};
    }
    /// fp32 words of a warp: 16 rows of dK and dV.
    __host__ __device__ static constexpr int words(int columns) { return 2 * 16 * columns; }

    template <int kColumns>
    __device__ __forceinline__ void add(const RegisterTile<16, kColumns>& dk, const RegisterTile<16, kColumns>& dv) {
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            ptx::red_add_4(sums_ + 256 * j, dk.block[0][j]);
            ptx::red_add_4(sums_ + 256 * j + 128, dv.block[0][j]);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) ptx::add_release(count_, 1);
    }
    /// Waits for the other parts, and adds what they have added to.
    template <int kColumns>
    __device__ __forceinline__ void take(RegisterTile<16, kColumns>& dk, RegisterTile<16, kColumns>& dv, int others) {
        if (threadIdx.x % 32 == 0)
            while (ptx::load_acquire(count_) < static_cast<unsigned>(others)) {
            }
        __syncwarp();
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j) {
            add_four(dk.block[0][j], sums_ + 256 * j);
            add_four(dv.block[0][j], sums_ + 256 * j + 128);
        }
    }

  private:
    __device__ __forceinline__ PartSums(float* sums, unsigned* count) : sums_(sums), count_(count) {}
    __device__ __forceinline__ static void add_four(float (&x)[4], const float* sum) {
        const float4 four = *reinterpret_cast<const float4*>(sum);
        x[0] += four.x, x[1] += four.y, x[2] += four.z, x[3] += four.w;
    }

    float* sums_;
    unsigned* count_;
};

}  // namespace flash_wmma::backward::wgmma
