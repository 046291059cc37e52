// How the blocks of a launch share the work of a call with a key/value cache, whose lengths only the device knows.
//
// An item is a Q tile of grouped heads with all keys that it sees. Items are laid end to end, each as long as its K tiles
// (one without keys: one tile), and every block takes an equal run of them, whatever the lengths are. So a run begins or
// ends inside an item: its blocks store parts, which a second grid merges. A block finds its run by itself from the
// lengths; the grids depend on shapes and the device alone, so that one CUDA graph serves all lengths.
//
// `batch_invariant`: parts are units of kUnitKeys keys, counted from an item's first tile, whoever computes them.
//
// Bound: latency. Each warp of a block reads all lengths, 32 at a time, before the first copy.
#pragma once

#include <launch.h>

#include <algorithm>
#include <stdexcept>

#include "device/grouped_tile.cuh"
#include "device/key_parts.cuh"
#include "forward/mma/block.cuh"
#include "forward/mma/copies.cuh"
#include "registry.h"
#include "shape_table.h"

namespace flash_wmma::mma {

/// The share that the host decides on.
struct Split {
    int blocks = 0;  ///< that share the items; 0: each block has an item to itself
    int unit = 1;    ///< K tiles that stay together
    int parts = 0;   ///< of an item at most, if every unit is a part; 0: a block's run within an item is
};

constexpr int kUnitKeys = 512;  // of a unit with batch_invariant
constexpr int kLeastTiles = 2;  // of a run: shorter ones would cost more to merge than they save
constexpr int kMergeWarps = 4;  // of a block of the second grid: each has every fourth part
constexpr int kMergeColumns = 32;

/// Blocks that the device holds at once.
template <class Tile>
int resident_blocks(const DeviceFacts& device) {
    const int held = (device.smem_optin + kReservedSharedMemory) /
                     (static_cast<int>(sizeof(BlockSmem<Tile>)) + kReservedSharedMemory);
    return std::max(device.sm_count, 1) * std::clamp(held, 1, Tile::kBlocksPerSm);
}

template <class Tile>
Split split_of(const ForwardParams& p, const DeviceFacts& device) {
    constexpr std::int64_t kItems = 4, kMost = 0x7fffffff;  // of a block: with so many whole items there is no need
    const std::int64_t items = cached_assignment_grid(p, Tile::kBr).x;
    const std::int64_t tiles = (p.seqlen_k + Tile::kBc - 1) / Tile::kBc, blocks = resident_blocks<Tile>(device);
    const int hint = p.partials.num_splits;
    if (hint == 1 || tiles == 1) return {};
    if (p.batch_invariant) {
        const int unit = kUnitKeys / Tile::kBc;
        const std::int64_t parts = (tiles + unit - 1) / unit;
        if (parts == 1) return {};
        if (items * parts > kMost) throw std::runtime_error("flash_wmma: more than 2^31 - 1 parts of 512 keys");
        return {static_cast<int>(std::min(items * parts, blocks)), unit, static_cast<int>(parts)};
    }
    const bool one_tile = p.seqlen_q * (p.heads_q / p.heads_k) <= Tile::kBr;  // a head, whose lengths may differ widely
    if ((!one_tile && items >= kItems * blocks) || items * tiles > kMost) return {};
    const std::int64_t wanted = hint > 0 ? items * hint : blocks;
    return {static_cast<int>(std::min({wanted, blocks, items * tiles})), 1, 0};
}

/// Places for parts in the workspace.
template <class Tile>
std::int64_t split_bytes(const ForwardParams& p, const DeviceFacts& device) {
    const Split split = split_of<Tile>(p, device);
    const std::int64_t items = cached_assignment_grid(p, Tile::kBr).x;
    const std::int64_t places = split.parts ? items * split.parts : 2 * std::int64_t{split.blocks};
    return places * (Tile::kBr / 16) * PartRows<Tile::kD>::kSize * std::int64_t{sizeof(float4)};
}

/// The part at `place` of the workspace, of 16 rows: those of the Q tile from `row` on.
template <class Tile>
__device__ __forceinline__ PartRows<Tile::kD> stored_part(const ForwardParams& p, std::int64_t place, int row,
                                                          int lane) {
    const std::int64_t slice = place * (Tile::kBr / 16) + row / 16;
    return {static_cast<float4*>(p.workspace) + slice * PartRows<Tile::kD>::kSize, lane};
}

/// A unit's place: the `unit`-th of a Q tile. Sequence p.batch: as for cached_sequence.
struct Place {
    int sequence, head_k, tile, unit;
};

/// The items of the sequences, and their units.
template <class Tile>
class Items {
  public:
    __device__ Items(const ForwardParams& params, const Split& split)
        : p_(params), unit_(split.unit), group_(static_cast<int>(params.heads_q) / static_cast<int>(params.heads_k)) {}

    __device__ CachedAssignment assignment(const Place& at) const {
        const Sequence s = cached_sequence(p_, at.sequence);
        return {s, {s.index, at.head_k, group_, at.tile * Tile::kBr}};
    }
    /// Of a Q tile.
    __device__ int units(const Sequence& s, int tile) const {
        const int first = tile * Tile::kBr, last = min((first + Tile::kBr - 1) / group_, s.seqlen_q - 1);
        const KeyExtent keys = BandMask(p_.band, s.seqlen_q, s.seqlen_k).extent(first / group_, last);
        return max(1, (Work<Tile>::tiles_of(keys) + unit_ - 1) / unit_);
    }
    /// Moves to the next item's first unit.
    __device__ void advance(Place& at) const {
        at.unit = 0;
        if (++at.tile < q_tiles(cached_sequence(p_, at.sequence))) return;
        at.tile = 0;
        if (++at.head_k < p_.heads_k) return;
        at.head_k = 0;
        while (at.sequence < p_.batch && q_tiles(cached_sequence(p_, ++at.sequence)) == 0) continue;
    }

  protected:
    __device__ int q_tiles(const Sequence& s) const { return (s.seqlen_q * group_ + Tile::kBr - 1) / Tile::kBr; }
    __device__ int units_of_head(const Sequence& s) const {
        int sum = 0;
        for (int t = 0, count = q_tiles(s); t < count; ++t) sum += units(s, t);
        return sum;
    }

    const ForwardParams& p_;
    int unit_, group_;
};

/// The items end to end, and each block's run of their units. Called by whole warps.
template <class Tile>
class Runs : public Items<Tile> {
  public:
    __device__ Runs(const ForwardParams& params, const Split& split) : Items<Tile>(params, split) {
        const int sequences = static_cast<int>(p_.batch) + (p_.sequences.cu_seqlens_q ? 1 : 0);
        each_ = (sequences + 31) / 32;
        const int first = lane() * each_, end = min(first + each_, sequences);
        int own = 0;
        for (int i = first; i < end; ++i) own += units_of(i);
        upto_ = sum_upto(own);
        before_ = upto_ - own;
        const int total = __shfl_sync(kWarpMask, upto_, 31);
        // If every unit is a part, it changes no bit how many blocks share them
        const int least = split.parts ? 1 : kLeastTiles;
        used_ = min(split.blocks, (total + least - 1) / least);
        run_ = total / max(used_, 1), longer_ = total - run_ * used_;
    }

    /// Blocks with a run.
    __device__ int used() const { return used_; }
    /// The first unit of a block's run; of block used(): behind the last unit. The first runs are the longer ones, by a
    /// unit.
    __device__ int begin(int block) const { return block * run_ + min(block, longer_); }
    /// The first block whose run begins at that unit or behind it.
    __device__ int first_block_from(int unit) const {
        const int behind = unit - longer_ * (run_ + 1);
        return behind <= 0 ? (unit + run_) / (run_ + 1) : longer_ + (behind + run_ - 1) / run_;
    }
    /// Where a unit before the end is.
    __device__ Place find(int unit) const {
        const int owner = __ffs(static_cast<int>(__ballot_sync(kWarpMask, upto_ > unit))) - 1;
        int rest = unit - __shfl_sync(kWarpMask, before_, owner);
        const int end = min((owner + 1) * each_, static_cast<int>(p_.batch) + 1);
        const int index = search(owner * each_, end, rest, [&](int i) { return units_of(i); });
        const Sequence s = cached_sequence(p_, index);
        const int of_head = this->units_of_head(s), head_k = rest / of_head, count = this->q_tiles(s);
        rest -= head_k * of_head;
        const int tile = search(0, count, rest, [&](int t) { return this->units(s, t); });
        return {index, head_k, tile, rest};
    }

  private:
    using Items<Tile>::p_;
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }
    __device__ int units_of(int sequence) const {
        return static_cast<int>(p_.heads_k) * this->units_of_head(cached_sequence(p_, sequence));
    }

    /// The sum over the lanes up to this one.
    __device__ static int sum_upto(int x) {
#pragma unroll
        for (int by = 1; by < 32; by *= 2) {
            const int other = __shfl_up_sync(kWarpMask, x, static_cast<unsigned>(by));
            if (lane() >= by) x += other;
        }
        return x;
    }
    /// The least i from `first` on with units(first) + ... + units(i) > rest; leaves what `rest` has beyond i's first.
    /// There is one below `end`, unless somebody writes to the lengths: then it is end - 1.
    template <class Units>
    __device__ static int search(int first, int end, int& rest, Units units) {
        for (;; first += 32) {
            const int i = first + lane(), own = i < end ? units(i) : 0, upto = sum_upto(own);
            const unsigned beyond = __ballot_sync(kWarpMask, upto > rest);
            const int found = beyond ? __ffs(static_cast<int>(beyond)) - 1 : 31;
            rest -= __shfl_sync(kWarpMask, beyond ? upto - own : upto, found);
            if (beyond || first + 32 >= end) return min(first + found, end - 1);
        }
    }

    int each_;           // sequences of a lane
    int upto_, before_;  // units of the lanes up to this one, and of those before it
    int used_, run_, longer_;
};

/// What a block works on, one run of units within an item after the other. Called by whole warps.
template <class Tile>
class Walk {
  public:
    static constexpr std::int64_t kWhole = -1;

    __device__ Walk(const ForwardParams& params, const Split& split) : p_(params), split_(split) {}

    /// Goes to the first run. False: there is none.
    __device__ bool start() {
        if (split_.blocks == 0) {
            const CachedAssignment a = cached_assignment<Tile::kBr>(p_);
            assigned_ = a;
            return a.tile.first_row >= 0 && a.tile.row(0).query < a.sequence.seqlen_q;
        }
        const Runs<Tile> runs(p_, split_);
        const int block = static_cast<int>(blockIdx.x);
        if (block >= runs.used()) return false;
        at_ = runs.find(runs.begin(block));
        left_ = runs.begin(block + 1) - runs.begin(block);
        take();
        return true;
    }
    /// Goes to the next one.
    __device__ bool next() {
        left_ -= units_;
        if (split_.blocks == 0 || left_ <= 0) return false;
        at_.unit += units_;
        const Items<Tile> items(p_, split_);
        if (at_.unit == items.units(assigned_.sequence, at_.tile)) items.advance(at_);
        take();
        return true;
    }

    __device__ const CachedAssignment& assigned() const { return assigned_; }
    /// Where the run's part goes in the workspace, or kWhole: the run is an item.
    __device__ std::int64_t place() const { return place_; }
    /// Leaves of an item's tiles the run's.
    __device__ void narrow(Work<Tile>& work) const {
        if (split_.blocks == 0) return;
        const int first = at_.unit * split_.unit;
        work.keep(first, min(units_ * split_.unit, work.tiles - first));
    }

  private:
    __device__ void take() {
        const Items<Tile> items(p_, split_);
        assigned_ = items.assignment(at_);
        const int all = items.units(assigned_.sequence, at_.tile);
        units_ = min(left_, split_.parts ? 1 : all - at_.unit);
        if (units_ == all) {
            place_ = kWhole;
        } else if (split_.parts) {
            const unsigned item = cached_block<Tile::kBr>(p_, at_.sequence, at_.head_k, at_.tile);
            place_ = std::int64_t{item} * split_.parts + at_.unit;
        } else {
            place_ = 2 * static_cast<int>(blockIdx.x) + (at_.unit == 0);  // a block's last run begins an item
        }
    }

    const ForwardParams& p_;
    const Split& split_;
    CachedAssignment assigned_;
    Place at_{};
    int units_ = 0, left_ = 0;
    std::int64_t place_ = kWhole;
};

/// The second grid: a block merges the parts of 16 rows of an item, kMergeColumns columns of O. Its warps share the
/// parts, and then the columns.
// spills: sm_75 sm_80 sm_90: a word at d = 32.
template <class Tile>
__global__ void __launch_bounds__(32 * kMergeWarps)
    merge(const __grid_constant__ ForwardParams p, const __grid_constant__ Split split) {
    constexpr int kColumnSlices = Tile::kD / kMergeColumns, kRowSlices = Tile::kBr / 16;
    const int index = static_cast<int>(blockIdx.x), column = index % kColumnSlices * kMergeColumns;
    const int row = index / kColumnSlices % kRowSlices * 16, number = index / (kColumnSlices * kRowSlices);
    CachedAssignment a;
    int parts, block = 0;
    if (split.parts) {  // `number` is the item's
        a = cached_assignment<Tile::kBr>(p, static_cast<unsigned>(number));
        if (a.tile.first_row < 0) return;
        parts = Items<Tile>(p, split).units(a.sequence, a.tile.first_row / Tile::kBr);
    } else {  // the item that begins in the run of block `number`, and ends behind it
        const Runs<Tile> runs(p, split);
        block = number;
        if (block + 1 >= runs.used()) return;
        const int unit = runs.begin(block + 1);
        const Place at = runs.find(unit);
        if (at.unit == 0 || unit - at.unit < runs.begin(block)) return;
        a = runs.assignment(at);
        parts = runs.first_block_from(unit - at.unit + runs.units(a.sequence, at.tile)) - block;
    }
    if (parts <= 1 || a.tile.row(row).query >= a.sequence.seqlen_q) return;

    auto& shared = shared_memory<float4[kMergeWarps][PartRows<kMergeColumns>::kSize]>();
    const Thread<Tile> thread;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const auto stored = [&](int i) {
        const std::int64_t place = split.parts ? std::int64_t{number} * split.parts + i : 2 * (block + i) + (i == 0);
        return stored_part<Tile>(p, place, row, thread.lane);
    };
    const auto some = merge_parts<kMergeColumns>(warp, parts, kMergeWarps, column / 8, stored);
    const auto given = [&](int i) { return PartRows<kMergeColumns>(shared[i], thread.lane); };
    some.give_o(given(warp), 0);
    some.give_facts(given(warp));
    __syncthreads();
    constexpr int kColumns = kMergeColumns / kMergeWarps;
    const auto all = merge_parts<kColumns>(0, kMergeWarps, 1, warp * kColumns / 8, given);
    const Work<Tile> work(p, a, BandMask(p.band, a.sequence.seqlen_q, a.sequence.seqlen_k));
    store_result<Problems::kGeneralCached>(work, all.o, all.m, all.l, 1.f, row, column + warp * kColumns,
                                           column == 0 && warp == 0, thread);
}

/// After the first grid, on the same stream.
template <class Tile>
void launch_merge(const ForwardParams& p, const Split& split, Stream stream) {
    if (split.blocks == 0 || (split.blocks == 1 && split.parts == 0)) return;
    const std::int64_t items = split.parts ? std::int64_t{cached_assignment_grid(p, Tile::kBr).x} : split.blocks - 1;
    const std::int64_t blocks = items * (Tile::kD / kMergeColumns) * (Tile::kBr / 16);
    if (blocks > 0x7fffffff) throw std::runtime_error("flash_wmma: more than 2^31 - 1 blocks merge the parts");
    launch(merge<Tile>,
           {dim3(static_cast<unsigned>(blocks)), dim3(32 * kMergeWarps),
            int{sizeof(float4) * kMergeWarps * PartRows<kMergeColumns>::kSize}},
           stream, p, split);
}

}  // namespace flash_wmma::mma
