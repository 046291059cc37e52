// What the blocks of bwd_sm90 do, and in what order: one queue of three kinds of tasks.
//
//     prepare: L and D of a run of query rows, and 0 in their part of dQ's buffer;
//     item:    a tile of keys (block.cuh), which adds to the buffer;
//     finish:  dQ of a run of rows, from the buffer.
//
// Prepare and finish are bound by HBM, items by the tensor cores: so the runs of rows are spread among the items.
//
// Units: key/value heads that follow each other, with the query heads that read them. An item waits until all runs of
// its unit are prepared, finish waits until all items of its unit have added their dQ. `prepared` and `added` of
// Problem count both.
//
// Order: first, runs are prepared until every block has had one, and the units of the first items are complete. Then
// come cycles, one a unit but for the last: its items and, spread among them, as many prepares as it takes to stay
// ahead, and finishes of a unit that began about two items a block before. Then the last unit's items, then all other
// finishes, which fill the time until the last blocks are done.
//
// No deadlock, however few blocks are resident: a task waits for tasks alone that come before it in the queue, and
// whoever takes a task from the queue brings it to an end. For this a block that has to wait first adds what it holds
// back, the dQ of its last tile (Producer::await).
#pragma once

#include <launch.h>

#include <algorithm>
#include <stdexcept>

#include "backward/wgmma/block.cuh"
#include "device/backward_rows.cuh"

namespace flash_wmma::backward::wgmma {

inline constexpr unsigned kRunGroups = 4;  ///< groups of rows of a run: two warps to a group, eight in a block

/// Runs of rows among the items of a cycle: `items_apart` items, then `rows_together` runs, and so on `times` times.
struct Mixture {
    unsigned items, rows, items_apart, rows_together, times;

    static Mixture of(unsigned items, unsigned rows) {
        if (rows == 0 || items == 0) return {items, rows, 1, 0, items};
        if (items >= rows) return {items, rows, items / rows, 1, rows};
        return {items, rows, 1, rows / items, items};
    }
    __host__ __device__ __forceinline__ unsigned tasks() const { return items + rows; }

    struct Place {
        bool item;
        unsigned index;  // of the cycle's items or runs
    };
    __device__ __forceinline__ Place at(unsigned place) const {
        const unsigned period = items_apart + rows_together, turn = place / period, rest = place % period;
        if (turn < times)
            return rest < items_apart ? Place{true, turn * items_apart + rest}
                                      : Place{false, turn * rows_together + rest - items_apart};
        const unsigned more = place - times * period, items_left = items - times * items_apart;
        return more < items_left ? Place{true, times * items_apart + more}
                                 : Place{false, times * rows_together + more - items_left};
    }
};

/// A task. Items: `index` is the number of the tile of keys as owned_keys counts. Runs of rows: groups first to
/// first + count - 1.
struct Task {
    TaskKind kind;
    unsigned unit, index, count;
};

/// The tasks of a grid. Heads are key/value heads: of all batch entries or, packed, of all sequences together.
struct Schedule {
    unsigned heads, tiles, groups;        // tiles of keys and groups of query rows of a head
    unsigned unit_heads, units;           // heads of a unit; the last one has what is left
    bool by_turns, last_by_turns;         // a unit's heads take turns, tile by tile
    unsigned unit_runs, last_runs, runs;  // runs of a unit, of the last one, of all
    unsigned first_runs, cycle_runs;      // prepared before the first item, and in each cycle
    unsigned behind;                      // the first cycle that finishes runs, those of unit 0
    Mixture early, late;                  // of the cycles before that, and from then on
    unsigned tasks;

    __device__ __forceinline__ unsigned heads_of(unsigned unit) const {
        return unit + 1 == units ? heads - unit * unit_heads : unit_heads;
    }
    __device__ __forceinline__ unsigned items_of(unsigned unit) const { return heads_of(unit) * tiles; }
    __device__ __forceinline__ unsigned runs_of(unsigned unit) const {
        return unit + 1 == units ? last_runs : unit_runs;
    }

    __device__ __forceinline__ Task at(unsigned place) const {
        if (place < first_runs) return run(TaskKind::kPrepare, place);
        place -= first_runs;
        const unsigned all_early = behind * early.tasks();
        unsigned cycle = behind;
        if (place < all_early) {
            cycle = place / early.tasks(), place %= early.tasks();
        } else if (place -= all_early; late.tasks() > 0) {
            const unsigned more = min(place / late.tasks(), units - 1 - behind);
            cycle += more, place -= more * late.tasks();
        }
        const unsigned finished = (max(cycle, behind) - behind) * unit_runs;  // before this cycle
        if (cycle + 1 == units) {
            const unsigned items = items_of(cycle);
            return place < items ? item(cycle, place) : run(TaskKind::kFinish, finished + place - items);
        }
        const Mixture::Place found = (cycle < behind ? early : late).at(place);
        if (found.item) return item(cycle, found.index);
        if (found.index < cycle_runs) return run(TaskKind::kPrepare, first_runs + cycle * cycle_runs + found.index);
        return run(TaskKind::kFinish, finished + found.index - cycle_runs);
    }

  private:
    __device__ __forceinline__ Task item(unsigned unit, unsigned index) const {
        const unsigned together = heads_of(unit), first = unit * unit_heads * tiles;
        if (!by_turns && !(last_by_turns && unit + 1 == units)) return {TaskKind::kItem, unit, first + index, 1};
        return {TaskKind::kItem, unit, first + index % together * tiles + index / together, 1};
    }
    /// Past the last run there is nothing to do.
    __device__ __forceinline__ Task run(TaskKind kind, unsigned index) const {
        if (index >= runs) return {TaskKind::kNothing, 0, 0, 0};
        const unsigned unit = min(index / unit_runs, units - 1);
        const unsigned first = unit * unit_heads * groups + (index - unit * unit_runs) * kRunGroups;
        const unsigned end = (unit * unit_heads + heads_of(unit)) * groups;
        return {kind, unit, first, min(kRunGroups, end - first)};
    }
};

/// The order of a unit's heads, of items of `keys` keys:
///
/// If the additions have an order (order.cuh), heads take turns. An item follows the one before in its head at a
/// distance of a tile or two, and blocks ask for items faster than that.
///
/// Dense causal problems, in which a head's first tile of keys has the most queries: heads one after the other for the
/// L2 cache, and at the end all heads of about two items a block by turns, the longest items first, so that blocks
/// finish together. These heads are the last unit.
inline Schedule schedule_of(const ForwardParams& p, int keys, bool ordered, unsigned multiprocessors) {
    constexpr unsigned kOrderedHeads = 4;
    const Sequences& s = p.sequences;
    const auto ceil = [](unsigned x, unsigned y) { return (x + y - 1) / y; };
    const bool packed = s.cu_seqlens_k;
    const std::int64_t heads = p.heads_k * (packed ? 1 : p.batch);
    const std::int64_t tiles = packed ? packed_tiles(s.total_k, p.batch, keys) : (p.seqlen_k + keys - 1) / keys;
    if (row_groups(p) + heads * tiles > 0x3fffffff)
        throw std::runtime_error("flash_wmma: more than 2^30 tiles of keys and groups of query rows");
    Schedule x{};
    x.heads = static_cast<unsigned>(heads), x.tiles = static_cast<unsigned>(tiles);
    x.groups = static_cast<unsigned>(row_groups(p)) / x.heads;
    const unsigned blocks = std::min(multiprocessors, x.heads * (x.tiles + 2 * ceil(x.groups, kRunGroups)));
    x.unit_heads = ordered ? kOrderedHeads : ceil(kRunGroups, x.groups);
    x.by_turns = ordered, x.last_by_turns = !packed && !s.seqused_k && p.band.right < kUnbounded;
    const unsigned mixed = x.last_by_turns && !ordered ? std::min(x.heads, ceil(2 * blocks, x.tiles)) : 0;
    x.units = mixed > 0 ? (x.heads - mixed) / x.unit_heads + 1 : ceil(x.heads, x.unit_heads);
    const unsigned last_heads = x.heads - (x.units - 1) * x.unit_heads, cycles = x.units - 1;
    const unsigned items = x.unit_heads * x.tiles;  // of a unit
    x.unit_runs = ceil(x.unit_heads * x.groups, kRunGroups), x.last_runs = ceil(last_heads * x.groups, kRunGroups);
    x.runs = cycles * x.unit_runs + x.last_runs;
    x.first_runs = std::min(x.runs, std::max(blocks, (ceil(blocks, items) + 1) * x.unit_runs));
    x.cycle_runs = cycles == 0 ? 0 : std::max(x.unit_runs, ceil(x.runs - x.first_runs, cycles));
    x.behind = std::min(cycles, ceil(2 * blocks, items) + 1);
    x.early = Mixture::of(items, x.cycle_runs), x.late = Mixture::of(items, x.cycle_runs + x.unit_runs);
    x.tasks = x.first_runs + x.behind * x.early.tasks() + (cycles - x.behind) * x.late.tasks() + last_heads * x.tiles +
              x.runs - (cycles - x.behind) * x.unit_runs;
    return x;
}

}  // namespace flash_wmma::backward::wgmma
