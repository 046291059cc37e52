// How the blocks of a launch share the work of a call with a key/value cache, whose lengths only the device knows.
//
// An item is a Q tile of grouped heads with all keys that it sees. Items are laid end to end, each as long as its K
// tiles (one without keys: one tile), and every block takes an equal run of them, whatever the lengths are. So a run
// begins or ends inside an item: its blocks store parts, which a second grid merges. A block finds its run by itself
// from the lengths; the grids depend on shapes and the device alone, so that one CUDA graph serves all lengths.
//
// Neighbouring blocks form a team: they have runs of the same keys, each for a head of its own of as many neighbouring
// heads. In a cache whose rows of all heads lie side by side they so read adjacent memory at about the same time, which
// is what memory likes. Elsewhere it costs nothing: all heads of a sequence have equal items.
//
// The second grid plans nothing: the block in which an item begins leaves a record of where the item's parts are.
//
// `batch_invariant`: parts are units of kUnitKeys keys, counted from an item's first tile, whoever computes them. There
// are no records: the number of an item says where its parts are.
//
// Bound: latency. Each warp of a block reads all lengths, 32 at a time, before the first copy: beside the grid before
// where grids overlap. The second grid reads a record and then all parts at once.
#pragma once

#include <launch.h>

#include <algorithm>
#include <bit>
#include <stdexcept>

#include "device/grouped_tile.cuh"
#include "device/key_parts.cuh"
#include "device/programmatic.cuh"
#include "forward/mma/block.cuh"
#include "forward/mma/copies.cuh"
#include "registry.h"
#include "shape_table.h"

namespace flash_wmma::mma {

/// The share that the host decides on.
struct Split {
    Divisor group;         ///< query heads of a key/value head
    int blocks = 0;        ///< that share the items; 0: each block has an item to itself
    int team_shift = 0;    ///< log2 of the blocks of a team, each of which has a head to itself
    int unit_shift = 0;    ///< log2 of the K tiles that stay together
    int parts = 0;         ///< of an item at most, if every unit is a part; 0: a block's run within an item is
    int records = 0;       ///< if every unit is no part: of items, or of the blocks if there are fewer
    bool by_item = false;  ///< whether they are of items
    int lanes_shift = 0;   ///< log2 of the lanes that share an item's parts in the second grid
    int slices = 0;        ///< of an item in the second grid, of kMergeThreads each
};

constexpr int kUnitKeys = 512;     // of a unit with batch_invariant
constexpr int kMergeThreads = 64;  // of a block of the second grid
constexpr int kMergeBlocks = 12;   // of an SM: 80 registers. Unbounded, ptxas takes 72 and loads O behind m and l
constexpr int kMergeBeside = 2;    // of an SM, beside blocks of the first grid
constexpr int kSlicesOfBlock = 2;  // of the second grid, at most
constexpr int kPartsOfLane = 4;    // where an item has more, lanes share them
constexpr int kMostLanes = 8;      // with more, too many blocks for an SM beside those of the first grid
constexpr int kLeastBlocks = 90;   // percent of what there could be: memory binds, and does not need the last SMs
constexpr int kTeamBytes = 4096;   // that a team reads of a key, or of its value

/// Whether the first grid leaves room for kMergeBeside blocks of the second on an SM: where few rows share a key, and
/// grids may overlap. A second grid without room would keep the next call's blocks out.
template <class Tile>
inline constexpr bool kLeavesRoom = Tile::kKeyWarps > 1 && Tile::kD <= 128 && !Tile::Machine::kThroughRegisters;

/// Registers of a thread of the first grid.
template <class Tile>
constexpr int registers_beside_merge() {
    constexpr int kOfSm = 65536, kOfMerge = kOfSm / kMergeBlocks / (8 * kMergeThreads) * (8 * kMergeThreads);
    const int left = kOfSm - (kLeavesRoom<Tile> ? kMergeBeside * kOfMerge : 0);
    return std::min(255, left / (8 * Tile::kThreads * Tile::kBlocksPerSm) * 8);
}

/// Where the parts of an item are, which begins in the run of block `block`. parts < 2: nowhere.
struct alignas(16) Record {
    int parts, block, first_q, seqlen_q;
    int batch, head_k, first_row;  // of its tile
};

/// log2 of the lanes of the second grid that share an item's parts, if an item has so many.
inline int merging_lanes_shift(std::int64_t parts) {
    return std::bit_width(static_cast<unsigned>(std::clamp<std::int64_t>(parts / kPartsOfLane, 1, kMostLanes))) - 1;
}

/// Nearly `most` blocks, among which items of equal lengths can be shared so that no block begins in the middle of one
/// and goes on with another: it would wait for its first copies twice. Where there are none, `most`.
inline std::int64_t even_blocks(std::int64_t items, std::int64_t most) {
    const std::int64_t each = (items + most - 1) / most;  // items of a block
    const std::int64_t even = items < most ? most / items * items : items % each == 0 ? items / each : 0;
    return 100 * even >= kLeastBlocks * most ? even : most;
}

/// log2 of the blocks of a team, of so many blocks in all.
template <class Tile>
int team_shift_of(std::int64_t heads, std::int64_t blocks) {
    constexpr std::int64_t kMost = kTeamBytes / (Tile::kD * static_cast<int>(sizeof(typename Tile::T)));
    int shift = 0;
    while (heads % (2 << shift) == 0 && (2 << shift) <= std::min(kMost, blocks)) ++shift;
    return shift;
}

/// Blocks that the device holds at once.
template <class Tile>
int resident_blocks(const DeviceFacts& device) {
    const int held = blocks_held(static_cast<int>(sizeof(BlockSmem<Tile>)), device);
    return std::max(device.sm_count, 1) * std::clamp(held, 1, Tile::kBlocksPerSm);
}

template <class Tile>
Split split_of(const ForwardParams& p, const DeviceFacts& device) {
    constexpr std::int64_t kItems = 4, kMost = 0x7fffffff;  // of a block: with so many whole items there is no need
    const std::int64_t items = cached_assignment_grid(p, Tile::kBr).x;
    const std::int64_t tiles = (p.seqlen_k + Tile::kBc - 1) / Tile::kBc, resident = resident_blocks<Tile>(device);
    const int hint = p.partials.num_splits;
    Split split{.group = Divisor(p.heads_q / p.heads_k)};
    const auto merge_with = [&](std::int64_t parts) {  // of an item
        split.lanes_shift = merging_lanes_shift(parts);
        const std::int64_t rows = std::min<std::int64_t>(Tile::kBr, p.seqlen_q * split.group.divisor());
        split.slices =
            static_cast<int>(((rows * (Tile::kD / 4) << split.lanes_shift) + kMergeThreads - 1) / kMergeThreads);
    };
    const auto share = [&](std::int64_t blocks) {  // whole teams
        split.team_shift = team_shift_of<Tile>(p.heads_k, blocks);
        const auto in_teams = [&] { return blocks >> split.team_shift << split.team_shift; };
        while (100 * in_teams() < kLeastBlocks * blocks) --split.team_shift;
        split.blocks = static_cast<int>(in_teams());
    };
    if (hint == 1 || tiles == 1) return split;
    if (p.batch_invariant) {
        constexpr unsigned kUnitTiles = kUnitKeys / Tile::kBc;
        static_assert(std::has_single_bit(kUnitTiles));
        const std::int64_t parts = (tiles + kUnitTiles - 1) / kUnitTiles;
        if (parts == 1) return split;
        if (items * parts > kMost) throw std::runtime_error("flash_wmma: more than 2^31 - 1 parts of 512 keys");
        share(std::min(items * parts, resident));
        split.unit_shift = std::countr_zero(kUnitTiles);
        split.parts = static_cast<int>(parts);
        merge_with(parts);
        return split;
    }
    const bool one_tile = p.seqlen_q * split.group.divisor() <= Tile::kBr;  // a head, whose lengths may differ widely
    if ((!one_tile && items >= kItems * resident) || items * tiles > kMost) return split;
    const std::int64_t wanted = hint > 0 ? items * hint : even_blocks(items, resident);
    share(std::min({wanted, resident, items * tiles}));
    split.by_item = !p.sequences.cu_seqlens_q && items < split.blocks;
    split.records = static_cast<int>(split.by_item ? items : split.blocks);
    merge_with(split.blocks / items);  // if the lengths are equal
    return split;
}

template <class Tile>
using TilePart = StoredPart<Tile::kBr, Tile::kD>;

/// Places for parts in the workspace, where records lie behind them.
template <class Tile>
__host__ __device__ std::int64_t places(const Split& split, std::int64_t items) {
    return split.parts ? items * split.parts : 2 * std::int64_t{split.blocks};
}
template <class Tile>
std::int64_t split_bytes(const ForwardParams& p, const DeviceFacts& device) {
    const Split split = split_of<Tile>(p, device);
    const std::int64_t items = cached_assignment_grid(p, Tile::kBr).x;
    return places<Tile>(split, items) * TilePart<Tile>::kSize * std::int64_t{sizeof(float)} +
           split.records * std::int64_t{sizeof(Record)};
}

/// The part at `place` of the workspace, of a Q tile.
template <class Tile>
__device__ __forceinline__ TilePart<Tile> stored_part(const ForwardParams& p, std::int64_t place) {
    return TilePart<Tile>(static_cast<float*>(p.workspace) + place * TilePart<Tile>::kSize);
}
/// A record, if every unit is no part.
template <class Tile>
__device__ __forceinline__ Record& record(const ForwardParams& p, const Split& split, int number) {
    float* const behind = static_cast<float*>(p.workspace) + places<Tile>(split, 0) * TilePart<Tile>::kSize;
    return reinterpret_cast<Record*>(behind)[number];
}

/// A unit's place: the `unit`-th of a Q tile, of a head of the `heads`-th heads that a team works on. Sequence p.batch:
/// as for cached_sequence.
struct Place {
    int sequence, heads, tile, unit;
};

/// The items of the sequences, and their units: those of one head for each block of a team.
template <class Tile>
class Items {
  public:
    __device__ Items(const ForwardParams& params, const Split& split)
        : p_(params),
          shift_(split.unit_shift),
          group_(split.group),
          heads_(static_cast<int>(params.heads_k) >> split.team_shift) {}

    /// Of a Q tile.
    __device__ int units(const Sequence& s, int tile) const {
        int first = 0, last = s.seqlen_q - 1;
        if (s.seqlen_q * group_.divisor() > Tile::kBr) {
            const int row = tile * Tile::kBr;
            first = group_.quotient(row), last = min(group_.quotient(row + Tile::kBr - 1), last);
        }
        const KeyExtent keys = BandMask(p_.band, s.seqlen_q, s.seqlen_k).extent(first, last);
        return max(1, (Work<Tile>::tiles_of(keys) + (1 << shift_) - 1) >> shift_);
    }
    /// Moves to the next item's first unit. `s` is the sequence of the place.
    __device__ void advance(Place& at, Sequence& s) const {
        at.unit = 0;
        if (++at.tile < q_tiles(s)) return;
        at.tile = 0;
        if (++at.heads < heads_) return;
        at.heads = 0;
        while (at.sequence < p_.batch && q_tiles(s = cached_sequence(p_, ++at.sequence)) == 0) continue;
    }

  protected:
    __device__ int q_tiles(const Sequence& s) const {
        return (s.seqlen_q * group_.divisor() + Tile::kBr - 1) / Tile::kBr;
    }
    __device__ int units_of_head(const Sequence& s) const {
        int sum = 0;
#pragma unroll 1
        for (int t = 0, count = q_tiles(s); t < count; ++t) sum += units(s, t);
        return sum;
    }

    const ForwardParams& p_;
    int shift_;
    Divisor group_;
    int heads_;
};

/// Each team's run of the units of all items. The first runs are the longer ones, by a unit.
struct Share {
    int used = 0;  ///< teams with a run
    int run = 0, longer = 0;

    Share() = default;
    __device__ Share(int total, const Split& split) {
        // If every unit is a part, it changes no bit how many share them
        used = min(split.blocks >> split.team_shift, total);
        run = static_cast<int>(static_cast<unsigned>(total) / static_cast<unsigned>(max(used, 1)));
        longer = total - run * used;
    }
    __device__ int units(int team) const { return run + (team < longer); }
    /// The first of a team's units.
    __device__ int begin(int team) const { return team * run + min(team, longer); }
    /// Teams from that one on among which so many units are.
    __device__ int teams_with(int units, int team) const {
        const int in_longer = max(longer - team, 0) * (run + 1);
        const bool beyond = units > in_longer;
        const int each = beyond ? run : run + 1, rest = beyond ? units - in_longer : units;
        return (beyond ? max(longer - team, 0) : 0) + (rest + each - 1) / each;
    }
};

/// The sequences, and one behind them for packed rows behind the last.
__device__ inline int sequences_of(const ForwardParams& p) {
    return static_cast<int>(p.batch) + (p.sequences.cu_seqlens_q ? 1 : 0);
}

/// The lengths of a lane's sequences, as far as they stay in registers.
struct Lengths {
    static constexpr int kMost = 2;  // sequences

    int first = 0, count = 0;  ///< of the lane's sequences: kMost at most where a plan is made early
    CachedEntries of[kMost]{};

    /// The same read again. Does not wait for what it reads.
    __device__ Lengths again(const ForwardParams& p) const {
        const int last = sequences_of(p) - 1;
        Lengths found{.first = first, .count = count};
#pragma unroll
        for (int i = 0; i < kMost; ++i)
            if (32 * i <= last) found.of[i] = cached_entries(p, min(first + i, last));
        return found;
    }
    __device__ bool same(const Lengths& x) const {
        bool same = true;
#pragma unroll
        for (int i = 0; i < kMost; ++i) same &= i >= count || of[i] == x.of[i];
        return same;
    }
};

/// The items end to end. Called by whole warps.
template <class Tile>
class Runs : public Items<Tile> {
  public:
    __device__ Runs(const ForwardParams& params, const Split& split) : Items<Tile>(params, split) {
        const int sequences = sequences_of(p_);
        each_ = (sequences + 31) / 32;
        const int first = lane() * each_, end = min(first + each_, sequences);
        lengths.first = first, lengths.count = max(end - first, 0);
        int own = 0;
#pragma unroll 1
        for (int i = first; i < end; ++i) {
            const CachedEntries entries = cached_entries(p_, i);
            const Sequence s = cached_sequence(p_, i, entries);
            const int of_head = this->units_of_head(s);
            if (i == first) first_ = s, of_first_ = of_head, lengths.of[0] = entries;
            else last_ = s, of_last_ = of_head, lengths.of[1] = entries;
            own += this->heads_ * of_head;
        }
        upto_ = sum_upto(own);
        before_ = upto_ - own;
        const int total = __shfl_sync(kWarpMask, upto_, 31);
        share = Share(total, split);
    }

    Share share;
    Lengths lengths;

    /// Where a unit before the end is.
    struct Found {
        Place at;
        Sequence sequence;
        int units;  ///< of the item
    };
    __device__ Found find(int unit) const {
        // Old lengths of packed queries may add up to more than an int: whatever is found then lies in the tensors
        const int owner = max(__ffs(static_cast<int>(__ballot_sync(kWarpMask, upto_ > unit))) - 1, 0);
        const auto of_owner = [&](int x) { return __shfl_sync(kWarpMask, x, owner); };
        int rest = unit - of_owner(before_), of_head = of_owner(of_first_);
        const bool behind_first = each_ > 1 && rest >= this->heads_ * of_head;  // among the owner's sequences
        int index = owner * each_ + behind_first;
        const auto number = [&](int Sequence::* x) { return of_owner(behind_first ? last_.*x : first_.*x); };
        Sequence s{min(index, static_cast<int>(p_.batch) - 1), number(&Sequence::first_q), number(&Sequence::first_k),
                   number(&Sequence::seqlen_q), number(&Sequence::seqlen_k)};
        if (each_ <= Lengths::kMost) {
            if (behind_first) rest -= this->heads_ * of_head, of_head = of_owner(of_last_);
        } else {
            const int end = min((owner + 1) * each_, static_cast<int>(p_.batch) + 1);
            index = search(owner * each_, end, rest,
                           [&](int i) { return this->heads_ * this->units_of_head(cached_sequence(p_, i)); });
            s = cached_sequence(p_, index), of_head = this->units_of_head(s);
        }
        const auto quotient = [](int x, int y) { return static_cast<unsigned>(x) / static_cast<unsigned>(y); };
        const int last_heads = this->heads_ - 1;
        const int heads =
            last_heads ? static_cast<int>(min(quotient(rest, of_head), static_cast<unsigned>(last_heads))) : 0;
        rest -= heads * of_head;
        const int count = this->q_tiles(s);
        if (count == 1) return {{index, heads, 0, rest}, s, of_head};
        const int tile = search(0, count, rest, [&](int t) { return this->units(s, t); });
        return {{index, heads, tile, rest}, s, this->units(s, tile)};
    }

  private:
    using Items<Tile>::p_;
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % 32; }

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

    int each_;                        // sequences of a lane
    Sequence first_{}, last_{};       // of them; last_ only if there are others
    int of_first_ = 0, of_last_ = 0;  // units of one of their heads
    int upto_, before_;               // units of the lanes up to this one, and of those before it
};

/// What a block works on, one run of units within an item after the other. Called by whole warps.
///
/// The plan is made beside the grids before, from the lengths as they then are, unless there are so many sequences that
/// it would have to read a length twice. Once those grids are complete, the lengths are read again, and if they are
/// others, the plan is made again.
template <class Tile>
class Walk {
  public:
    static constexpr std::int64_t kWhole = -1;

    __device__ Walk(const ForwardParams& params, const Split& split) : p_(params), split_(split) {}

    /// Goes to the first run, or to the next one. False: there is none.
    __device__ bool next() {
        if (begun_) return advance();
        bool found;
        do {
            found = plan();
            if (!found) wait([] {});
        } while (!found && !holds());
        if (!found && split_.records && !split_.by_item && threadIdx.x == 0)
            record<Tile>(p_, split_, block()).parts = 0;
        return found;
    }
    /// Waits for the grids before, behind fetch_ahead() if they may still run. To be called in each run before anything
    /// but lengths is read.
    template <class FetchAhead>
    __device__ void wait(FetchAhead fetch_ahead) {
        if (waited_) return;
        if (early_) fetch_ahead();
        wait_for_previous_grids();
        waited_ = true;
        if (early_) again_ = lengths_.again(p_);
    }
    /// False: the plan does not hold, and next() makes it again. To be asked of each run, behind wait(), before
    /// anything is written.
    __device__ bool holds() {
        begun_ = !early_ || __all_sync(kWarpMask, lengths_.same(again_));
        early_ = false, lengths_ = again_ = {};  // else they would stay in registers
        return begun_;
    }
    /// Whether there is a next one.
    __device__ bool goes_on() const { return split_.blocks != 0 && left_ > units_; }

    __device__ const CachedAssignment& assigned() const { return assigned_; }
    /// Where the run's part goes in the workspace, or kWhole: the run is an item.
    __device__ std::int64_t place() const { return place_; }
    /// Leaves of an item's tiles the run's.
    __device__ void narrow(Work<Tile>& work) const {
        if (split_.blocks == 0) return;
        const int first = at_.unit << split_.unit_shift;
        work.keep(first, min(units_ << split_.unit_shift, work.tiles - first));
    }
    /// Leaves the record of the item that the run begins, for the second grid. One thread of a block.
    __device__ void leave_record() const {
        if (!leaves_record()) return;
        const int behind = all_ - units_;  // units in other teams, if the run begins the item
        const int parts = at_.unit == 0 && behind ? 1 + share_.teams_with(behind, team() + 1) : 0;
        const Sequence& s = assigned_.sequence;
        const GroupedTile& t = assigned_.tile;
        record<Tile>(p_, split_, split_.by_item ? number() : block()) = {parts,   block(),  s.first_q,  s.seqlen_q,
                                                                         t.batch, t.head_k, t.first_row};
    }

  private:
    /// Goes to the first run.
    __device__ bool plan() {
        // These read a length more than once: it must not change between
        if (split_.blocks == 0 || sequences_of(p_) > 32 * Lengths::kMost) wait([] {});
        early_ = grids_overlap() && !waited_;
        if (split_.blocks == 0) {
            const CachedAssignment a = cached_assignment<Tile::kBr>(p_, split_.group);
            assigned_ = a;
            return a.tile.first_row >= 0 && a.tile.row(0).query < a.sequence.seqlen_q;
        }
        const Runs<Tile> runs(p_, split_);
        share_ = runs.share, lengths_ = runs.lengths;
        if (team() >= share_.used) return false;
        const auto found = runs.find(share_.begin(team()));
        at_ = found.at, all_ = found.units, left_ = share_.units(team());
        reach(found.sequence);
        return true;
    }
    /// Goes to the next one.
    __device__ bool advance() {
        if (!goes_on()) return false;
        left_ -= units_, at_.unit += units_;
        Sequence s = assigned_.sequence;
        if (at_.unit == all_) {
            const Items<Tile> items(p_, split_);
            items.advance(at_, s);
            all_ = items.units(s, at_.tile);
        }
        reach(s);
        return true;
    }

    __device__ static int block() { return static_cast<int>(blockIdx.x); }
    __device__ int team() const { return block() >> split_.team_shift; }
    /// The block's own of the heads at at_.
    __device__ int head_k() const { return (at_.heads << split_.team_shift) + block() - (team() << split_.team_shift); }
    /// Of the item.
    __device__ int number() const {
        const int first_q = assigned_.sequence.first_q;
        return static_cast<int>(
            cached_block<Tile::kBr>(p_, split_.group.divisor(), at_.sequence, first_q, head_k(), at_.tile));
    }
    /// Each record is left once: an item's where it begins, a block's with its last run.
    __device__ bool leaves_record() const {
        return split_.records && (split_.by_item ? at_.unit == 0 : left_ == units_);
    }

    /// Takes what the block has of the item at at_, in sequence s.
    __device__ void reach(const Sequence& s) {
        assigned_ = {s, {s.index, head_k(), split_.group.divisor(), at_.tile * Tile::kBr}};
        units_ = min(left_, split_.parts ? 1 : all_ - at_.unit);
        if (units_ == all_) place_ = kWhole;
        else if (split_.parts) place_ = std::int64_t{number()} * split_.parts + at_.unit;
        else place_ = 2 * block() + (at_.unit == 0);  // a block's last run begins an item
    }

    const ForwardParams& p_;
    const Split& split_;
    bool waited_ = false, begun_ = false;  // for the grids before; with the runs of a plan that holds
    bool early_ = false;                   // whether the plan was made before the wait
    Lengths lengths_, again_;              // that the plan comes from; as they are behind the wait
    CachedAssignment assigned_;
    Share share_;
    Place at_{};
    int all_ = 0;  // units of the item
    int units_ = 0, left_ = 0;
    std::int64_t place_ = kWhole;
};

/// The second grid: 2^lanes_shift lanes of a warp merge four columns of a row of an item, whose parts lie at the
/// record, or in the item's places. A block has one slice of an item, or several: as many as the launch says, since
/// behind a bound that ptxas does not take for the same in all threads it loads O later.
template <class Tile>
__global__ void __launch_bounds__(kMergeThreads, kMergeBlocks)
    merge(const __grid_constant__ ForwardParams p, const __grid_constant__ Split split) {
    using T = typename Tile::T;
    constexpr int kVectors = Tile::kD / 4;  // of a row
    let_next_grid_start();
    const int shift = 5 - split.lanes_shift, of_warp = 1 << shift;  // vectors of a warp
    const int lane = static_cast<int>(threadIdx.x) % 32, first_part = lane >> shift;
    const int number = static_cast<int>(blockIdx.x);
    wait_for_previous_grids();
    Sequence s{};
    GroupedTile tile{};
    int parts, block = 0;
    if (split.parts) {
        const CachedAssignment a = cached_assignment<Tile::kBr>(p, split.group, static_cast<unsigned>(number));
        if (a.tile.first_row < 0) return;
        s = a.sequence, tile = a.tile;
        parts = Items<Tile>(p, split).units(s, tile.first_row / Tile::kBr);
    } else {
        const Record found = record<Tile>(p, split, number);
        s.index = found.batch, s.first_q = found.first_q, s.seqlen_q = found.seqlen_q;
        tile = {found.batch, found.head_k, split.group.divisor(), found.first_row};
        parts = found.parts, block = found.block;
    }
    const int rows = min(Tile::kBr, tile.rows(s.seqlen_q));
    if (parts < 2 || rows < 1) return;  // a number of no tile may have keys
    // Part i is of the i-th team from the item's first on; it is the last run of the first one's block
    const std::int64_t place = split.parts ? std::int64_t{number} * split.parts : 2 * block;
    const int next = split.parts ? 1 : 2 << split.team_shift, last_run = split.parts ? 0 : 1;
    for (auto slice = blockIdx.y; slice < static_cast<unsigned>(split.slices); slice += gridDim.y) {
        const auto thread = static_cast<int>(slice * kMergeThreads + threadIdx.x);
        const int at = (thread / 32 << shift) + (lane & (of_warp - 1)), row = at / kVectors, column = at % kVectors * 4;
        const auto vector = [&](std::int64_t at_place) {
            return stored_part<Tile>(p, at_place).vector(min(row, rows - 1), column);
        };
        MergedVector all(first_part, 1 << split.lanes_shift, parts, vector(place + last_run), vector(place),
                         next * TilePart<Tile>::kSize);
        all.over_lanes(of_warp);
        if (row < rows && first_part == 0) {
            const auto [query, head] = tile.row(row, split.group);
            const RowEnd end(p, head, all.m, all.l, 1.f);
            if (column == 0) p.lse[lse_index(p, s, head, query)] = end.lse;
            if (column < p.head_dim_v)
                *reinterpret_cast<uint2*>(row_of<T>(p.o, s.index, head, s.first_q + query) + column) =
                    make_uint2(packed<T>(all.o[0] * end.factor, all.o[1] * end.factor),
                               packed<T>(all.o[2] * end.factor, all.o[3] * end.factor));
        }
    }
}

/// After the first grid, on the same stream.
template <class Tile>
void launch_merge(const ForwardParams& p, const DeviceFacts& device, const Split& split, Stream stream) {
    if (split.blocks == 0 || (split.blocks == 1 && split.parts == 0)) return;
    const std::int64_t blocks = split.parts ? std::int64_t{cached_assignment_grid(p, Tile::kBr).x} : split.records;
    const bool overlaps = may_launch_programmatically(device);
    std::int64_t of_item = split.slices;  // blocks; fewer if all then fit beside those of the first grid
    const std::int64_t fit = kMergeBeside * device.sm_count / blocks;
    if (kLeavesRoom<Tile> && overlaps && fit < of_item && fit * kSlicesOfBlock >= of_item) of_item = fit;
    LaunchConfig config{dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(of_item)), dim3(kMergeThreads)};
    config.programmatic = overlaps;
    launch(merge<Tile>, config, stream, p, split);
}

}  // namespace flash_wmma::mma
