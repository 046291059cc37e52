// A block of bwd_sm90: its tile shape, the map of its shared memory, and the order of its tiles of queries.
#pragma once

#include <ptx_sm90.cuh>

#include <cstddef>
#include <type_traits>

#include "backward/wgmma/order.cuh"
#include "backward/wgmma/pair.cuh"
#include "backward/wgmma/parts.cuh"
#include "device/backward_rows.cuh"
#include "device/mask.cuh"
#include "device/nothing.cuh"
#include "device/owned_tile.cuh"
#include "device/pipeline.cuh"
#include "device/row_group_mask.cuh"

namespace flash_wmma::backward::wgmma {

/// Shape of a block's work.
struct TileShape {
    int d;                      ///< the largest d and d_v that the instance holds
    int queries;                ///< of a streamed tile of Q and dO
    int stages = 2;             ///< streamed tiles in flight
    int key_stages = 2;         ///< K of items in flight
    int value_stages = 2;       ///< V of items in flight
    int ds_stages = 2;          ///< tiles of dS in flight, and of P with two roles
    int consumers = 2;          ///< warpgroups, of 64 keys each unless two_roles
    bool stores_first = false;  ///< dS goes to shared memory before the products that follow it, not between them
    bool folds_facts = false;   ///< L and D into the products, in plain problems (query_facts.cuh)
    int tiles_told = 64;        ///< places for TileFacts: 64, or 8 where shared memory is short
    bool stages_rows = false;   ///< dK and dV leave through shared memory (device/staged_rows.cuh)
    bool ring = false;          ///< blocks take turns at dQ, in a ring or on stairs (turns.cuh)
    bool counts_items = false;  ///< whose dQ has been added (finish_beside.cuh)
    bool two_roles = false;     ///< both consumers have the same 64 keys and different products (two_roles.cuh)
    bool paired = false;        ///< two blocks share an item, 64 keys each (pair.cuh), and shared memory is short
    int barriers_at = 0;        ///< the offset of the barriers in shared memory, if not right behind what is there
};

/// The blocks that begin with a pass over items, and the number of this one among them; negative: it comes later. Each
/// of them has its first item beforehand, unless all are taken from the queue (Planner); the others are taken from it.
struct Workers {
    int index, count;

    /// All blocks of the grid.
    __device__ __forceinline__ static Workers all() {
        return {static_cast<int>(blockIdx.x), static_cast<int>(gridDim.x)};
    }
};

/// The same with what follows from it. Scalar is half or bf16.
template <class Scalar, TileShape kShape>
struct Tile {
    using T = Scalar;
    static constexpr int kD = kShape.d, kQueries = kShape.queries, kStages = kShape.stages;
    static constexpr int kDsStages = kShape.ds_stages, kConsumers = kShape.consumers;
    static constexpr bool kLooksAhead = kQueries == 64;  // L in registers a tile ahead, where there are any
    static constexpr bool kStoresFirst = kShape.stores_first, kTwoRoles = kShape.two_roles, kPaired = kShape.paired,
                          kFoldsFacts = kShape.folds_facts, kStagesRows = kShape.stages_rows, kRing = kShape.ring,
                          kCountsItems = kShape.counts_items;
    static constexpr int kBarriersAt = kShape.barriers_at;
    static constexpr int kKeyStages = kShape.key_stages, kValueStages = kShape.value_stages;
    static constexpr int kPlans = 3;      // items that are known
    static constexpr int kTileFacts = 4;  // tiles whose L and D are there, or under way: at least kStages + 2
    static constexpr int kTilesTold = kShape.tiles_told, kTilesAtOnce = kTilesTold < 64 ? 2 : 32;
    static_assert(kTileFacts >= kStages + 2 && kTilesTold > kTilesAtOnce + kStages + 2);
    static constexpr int kWarpKeys = 16, kGroupKeys = 64, kGroupThreads = 128;
    static constexpr int kKeys = kTwoRoles ? kGroupKeys : kGroupKeys * kConsumers;
    static constexpr int kBlocks = kPaired ? 2 : 1, kItemKeys = kKeys * kBlocks;  // of an item
    // dO comes and goes whole and with Q, or in a pair by itself: in halves by columns, for which there are three
    // places
    static constexpr bool kHalvesDout = kPaired;
    static constexpr int kDoutParts = kHalvesDout ? 2 : 1, kDoutPlaces = kHalvesDout ? 3 : kStages;
    static constexpr int kThreads = kGroupThreads * (kConsumers + 1);
    // Registers of a thread, in multiples of 8: the consumers take those that warpgroup 0 does not need
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8, kProducerRegisters = 24;
    static constexpr int kConsumerRegisters =
        (kLaunchRegisters * (kConsumers + 1) - kProducerRegisters) / kConsumers / 8 * 8;
    static constexpr int kPanels = (kD + 63) / 64, kQueryPanels = kQueries / 64;  // of 64 columns
    static_assert(!kPaired || (kTwoRoles && kPanels % 2 == 0));
    static_assert(!kCountsItems || !kTwoRoles);
    // dQ of a tile, if the consumers share it: 64 queries and all columns each, or all queries and 64 columns
    static constexpr bool kSharesQueries = kQueryPanels == kConsumers;
    static constexpr int kDqColumns = kSharesQueries ? kD : 64;
    static_assert(kD % 32 == 0 && kQueries % 64 == 0 && (!kTwoRoles || (kConsumers == 2 && kQueryPanels == 1)));
    static_assert(kQueries % kRowGroup == 0);
};

/// Rows of a head's K and V, and of dK and dV.
struct KeyTile {
    int batch, head, row, rows;  // the first row in the tensors, and how many exist from it on: none if not positive
};

/// What a block works on at a time: a tile of keys, and the tiles of queries that see some of them (in a pair: some of
/// both blocks' keys), in the order start, start + step, ..., last, first, ... So blocks of a head begin at different
/// tiles, and their additions to dQ do not meet. Keys and queries count from the sequence's first.
///
/// If several query heads share the keys, each tile is worked on in all of them, from start_head on. Blocks begin at
/// different heads of the same tile or of neighbouring ones. So what one block reads and adds to is in the L2 cache for
/// the others. Under a causal mask the items of the first half of a head's keys, which are long, walk down from the
/// last tile. Those of the second half come after them and walk up: a block that had n tiles of the longest item's
/// takes one that is n tiles shorter than it, and begins where the others of its half have come to. Where the band
/// hides keys on the left alone, it is the same from the last keys and the first tile on. Where it hides keys on both
/// sides (a window), items have n different tiles each: all begin at tiles of neighbouring numbers modulo n, and walk
/// down; those that the sequence's beginning or end cuts begin near it.
///
/// In a ring (turns.cuh) the heads of a group come one after the other: all blocks of a batch are at the same head,
/// whose rows the L2 cache holds. Under a causal mask, if blocks take turns, the heads of a group come so too, and
/// items walk up from their first tile or down from their last (StaircaseOrder).
///
/// If the additions have another order (turns.cuh), start is first. With a band that is bounded on the right (causal)
/// it runs backwards: first is then the last tile of queries, and the last tile of keys, which has the fewest queries,
/// is the sequence's first item. Otherwise a block would wait at its first tile for all items before.
struct Item {
    Sequence sequence;
    KeyTile keys;
    BandMask mask;
    int first_key;
    int head, heads, start_head;   // the query heads that read the keys: the first, how many, which is worked on first
    int first, last, start, step;  // first rows of tiles of queries, and from one to the next
    int tiles;                     // of all heads. 0: no query sees a key; negative: there are no more items
    int rows;                      // tiles of a head, of all parts of the item
    int split;                     // PartOfItem, of parts
    int ends;                      // whether it is the item's last part
};

template <Pass kPass>
__device__ __forceinline__ bool in_order(const Problem& problem) {
    return kPass == Pass::kTurns && problem.deterministic;
}
template <class Tile, Pass kPass>
__device__ __forceinline__ bool runs_backwards(const Problem& problem) {
    return !Tile::kRing && in_order<kPass>(problem) && problem.forward.band.right < kUnbounded;
}

/// Whether an instance works on items in parts. The code for that costs time even where there are none, so plain
/// problems whose items go in parts are left to the instance for packed sequences (docs/tuning/hopper_backward.md).
template <class Tile, Problems kProblems, Pass kPass>
constexpr bool takes_parts() {
    return !Tile::kTwoRoles && kPass == Pass::kFused && kProblems != Problems::kPlain;
}

/// Whether consumers skip tiles whose queries see none of their keys, though they see others of the block's: where
/// another pass computes dQ, and a tile has no more queries than a consumer has keys, so that a band has such tiles at
/// its ends. An item's first tile is not skipped if it has code of its own, which sets dK and dV.
template <class Tile, Pass kPass>
constexpr bool skips_hidden_tiles() {
    return kPass == Pass::kKeys && Tile::kQueries <= Tile::kGroupKeys;
}

/// Whether an instance can tell which heads' dQ is complete (finish_beside.cuh). Up to d = 64 the code for it costs
/// what it gains (docs/tuning/hopper_backward.md), unless items are few and equal: these have an instance of their own.
template <class Tile, Pass kPass>
constexpr bool can_count_items() {
    return kPass == Pass::kFused && Tile::kCountsItems;
}
/// Whether it does so in this call.
template <class Tile, Pass kPass>
__device__ __forceinline__ bool counts_items(const Problem& problem) {
    return can_count_items<Tile, kPass>() && problem.added;
}

inline constexpr unsigned kAddedBarriers = 4;  // of as many items with tiles

/// Called by whole warps.
template <class Tile, Problems kProblems, Pass kPass>
__device__ __forceinline__ Item item_of(const Problem& problem, int index, const Workers& workers) {
    const ForwardParams& p = problem.forward;
    constexpr bool kParts = takes_parts<Tile, kProblems, kPass>();
    const PartOfItem part =
        kParts && problem.parts.each > 1 ? PartOfItem::of(problem.parts, index) : PartOfItem{index, 0, -1};
    constexpr int kStep = Tile::kQueries, kKeys = Tile::kItemKeys;
    constexpr bool kPacked = includes(kProblems, Problems::kPacked);
    auto place = static_cast<unsigned>(part.item);
    const bool ordered = in_order<kPass>(problem);
    const auto ring = RingOrder::of<kKeys>(problem);
    const auto stairs = StaircaseOrder::of<kKeys>(problem);
    bool backwards = runs_backwards<Tile, kPass>(problem);
    if constexpr (Tile::kRing) {
        const int all_heads = static_cast<int>(p.heads_k * p.batch);
        if (stairs.used()) {
            const auto at = stairs.place(index, all_heads);
            place = static_cast<unsigned>(at.item), backwards = at.down;
        } else {
            place = static_cast<unsigned>(ring.place(index, all_heads));
        }
    } else if (ordered) place = interleaved<kKeys, kPacked>(p, place);
    else if (!kPacked && (p.band.left < kUnbounded || p.band.right < kUnbounded))
        place = mixed_keys<kKeys>(p, place, static_cast<unsigned>(workers.count) / Tile::kBlocks);
    OwnedTile own = owned_keys<kKeys, kPacked>(p, place);
    const Sequence& s = own.sequence;
    if (!Tile::kRing && backwards && own.first_row >= 0 && own.rows > 0) {
        const int rows = own.first_row + own.rows, tiles = (rows + kKeys - 1) / kKeys;
        own.first_row = (tiles - 1) * kKeys - own.first_row;
        own.rows = rows - own.first_row;
    }
    const BandMask mask(p.band, s.seqlen_q, s.seqlen_k);
    const int end_key = min(own.first_row + kKeys, s.seqlen_k);
    // Whose turn it is follows from the band alone (turns.cuh): there items have all tiles that it shows, and ranges
    // may hide all keys of an item from all queries of a tile
    constexpr bool kRanged = includes(kProblems, Problems::kModified) && kPass != Pass::kTurns;
    const auto [begin, end] =
        queries_that_see(query_mask<kRanged>(problem, s, own.head), own.head, own.first_row, end_key - 1, s.seqlen_q);
    const int first = begin / kStep * kStep, last = (end - 1) / kStep * kStep;
    const bool used = end > begin && own.first_row >= 0 && own.first_row < s.seqlen_k;
    const int tiles = used ? (last - first) / kStep + 1 : 0;
    const int blocks = (s.seqlen_k + kKeys - 1) / kKeys, block = own.first_row / kKeys;
    const int heads = static_cast<int>(p.heads_q / p.heads_k);
    const bool turns = used && !ordered, together = turns && heads > 1;
    const MostSeen most(mask, s.seqlen_q);
    const bool hides_left = most.hides_left(), hides_right = most.hides_right(s.seqlen_k);
    const bool cut_begin = first == 0, cut_end = last + kStep >= s.seqlen_q;
    const bool up = cut_begin && (!cut_end || (hides_left && !hides_right));
    // Of the items that begin where the sequence begins or ends
    const int nth =
        max(up ? min(most.of_first, s.seqlen_k - 1) / kKeys - block : block - max(most.of_last, 0) / kKeys, 0);
    // Whether it comes after the longer half, and walks the other way
    const bool follows = hides_left != hides_right && 2 * nth >= blocks;
    const bool down = backwards || (together && up == follows);
    int turned = 0;
    if (Tile::kRing) turned = stairs.used() ? 0 : ring.first_tile(block, tiles);
    else if (together)
        turned = cut_begin || cut_end ? min(nth / heads, tiles - 1) : (last / kStep + block / heads) % tiles;
    else if (turns) turned = static_cast<int>(static_cast<std::int64_t>(tiles) * block / blocks);
    // Not with a tile that could be skipped, at the band's right end
    if (skips_hidden_tiles<Tile, kPass>() && !together && turned == 0 && tiles > 1) turned = 1;
    const int step = down ? -kStep : kStep, from = down ? last : first;
    int begun = 0, left = tiles;  // tiles of a head
    if (kParts && part.split >= 0) {
        begun = tiles * part.part / problem.parts.each;
        left = tiles * (part.part + 1) / problem.parts.each - begun;
        turned = (turned + begun) % tiles;
    }
    if constexpr (Tile::kPaired) {
        const int before = Tile::kKeys * static_cast<int>(ptx::cluster_rank());
        own.first_row += before, own.rows -= before;
    }
    return {s,
            {s.index, own.head_k, s.first_k + own.first_row, own.rows},
            mask,
            own.first_row,
            own.head,
            heads,
            own.head + (together ? block % heads : 0),
            from,
            down ? first : last,
            from + step * turned,
            step,
            left * heads,
            tiles,
            part.split,
            part.part == problem.parts.each - 1};
}

/// How much of some keys a tile's queries see. kNone: by key ranges, between tiles that see some, in a pair, and in
/// turns; or of a consumer's keys, where it skips such tiles.
enum class Seen : unsigned char { kAll, kSome, kNone };

/// What the consumers are told of a tile of queries.
struct TileFacts {
    int groups;  // of rows, from the tile before to this one in dQ's buffer
    int first_query, rows;
    Seen seen[2];  // where consumers skip tiles: of each one's keys; else [0]: of the block's
};

/// Words of dQ's buffer from one group of rows to another.
__device__ __forceinline__ std::int64_t dq_step(const Problem& problem, int groups) {
    return static_cast<std::int64_t>(groups) * (kRowGroup * static_cast<int>(problem.forward.head_dim));
}

/// The place of a tile of queries in an item.
struct QueryPlace {
    int head, row;

    /// Of the item's tile number n, to which n steps of advance() lead.
    template <class Tile>
    __device__ __forceinline__ static QueryPlace of(const Item& item, int n) {
        int head = item.start_head + (Tile::kRing ? n / item.rows : n % item.heads);
        if (head >= item.head + item.heads) head -= item.heads;
        int row = item.start + (Tile::kRing ? n % item.rows : n / item.heads) * item.step;
        if (item.step > 0 ? row > item.last : row < item.last) row -= item.rows * item.step;
        return {head, row};
    }
    template <class Tile>
    __device__ __forceinline__ void advance(const Item& item) {
        const int next_row = row == item.last ? item.first : row + item.step;
        if (Tile::kRing) {
            row = next_row;
            head += row == item.start;
        } else {
            head = head + 1 == item.head + item.heads ? item.head : head + 1;
            if (head == item.start_head) row = next_row;
        }
    }
};

/// Where an item's dQ of a tile of queries goes, and how, if blocks take turns (turns.cuh).
struct DqTask {
    void* dq;             // the tile's first row in the caller's dq
    int group, rows;      // of rows, in the buffer; how many rows exist from the first on
    int first, finishes;  // whether the item is the first to be done with the tile, and whether it is the last
};

/// Whether L and D go into the products. A changed score takes L late, and dropout takes D apart from dP.
template <class Tile, Problems kProblems>
constexpr bool folds_facts() {
    return Tile::kFoldsFacts && !includes(kProblems, Problems::kModified) && !includes(kProblems, Problems::kDropped);
}

/// Whether an item's first tile has code of its own (bwd_sm90.cuh), so that V comes behind its Q and dO: not where
/// ptxas finds too few registers, as in general problems.
template <class Tile, Problems kProblems>
constexpr bool first_tile_apart() {
    return !Tile::kTwoRoles && !includes(kProblems, Problems::kModified);
}

/// L and D of a tile's queries, one or the other way.
template <class Tile>
union QueryFacts {
    RowPair pairs[Tile::kQueries / 2];
    RowTerms terms[Tile::kFoldsFacts ? Tile::kQueries / 8 : 1];
};

/// Turns at dQ (turns.cuh).
template <int kTilesTold>
struct TurnsMemory {
    DqTask task[kTilesTold];
    Slot slot[2];          // full when the turn has come, empty when it is over
    ptx::Barrier seen[2];  // says that pass_turns knows that it is over
};

/// What lies in a block's shared memory beside barriers: panels of 64 columns with the 128-byte swizzle.
template <class Tile>
struct SharedTiles {
    using T = typename Tile::T;
    struct alignas(1024) KeyRows {
        T panel[Tile::kPanels][Tile::kKeys * 64];
    };
    struct alignas(1024) QueryRows {
        T panel[Tile::kPanels][Tile::kQueries * 64];
    };
    struct alignas(1024) Transposed {  // dS^T: rows are keys, columns queries
        T panel[Tile::kQueryPanels][Tile::kKeys * 64];
    };
    KeyRows k[Tile::kKeyStages], v[Tile::kValueStages];
    struct alignas(1024) DoutRows {
        T panel[Tile::kPanels / Tile::kDoutParts][Tile::kQueries * 64];
    };
    QueryRows q[Tile::kStages];
    DoutRows dout[Tile::kDoutPlaces];
    Transposed ds[Tile::kDsStages];
    // Of two roles: P
    [[no_unique_address]] std::conditional_t<Tile::kTwoRoles, Transposed[Tile::kDsStages], Nothing> p;
    [[no_unique_address]] std::conditional_t<Tile::kPaired, PairMemory<Tile, Transposed>, Nothing> pair;
    /// For dK and dV on their way out, as one panel; their other panel is a place of dS.
    struct alignas(1024) Staged {
        T panel[Tile::kKeys * 64];
    };
    [[no_unique_address]] std::conditional_t<Tile::kStagesRows && Tile::kQueryPanels == 1, Staged, Nothing> staged;
    QueryFacts<Tile> facts[Tile::kTileFacts];
    TileFacts tile[Tile::kTilesTold];
    Item plan[Tile::kPlans];
};
/// Between them and the barriers, which begin at kBarriersAt, a multiple of 1024; 0: right behind.
template <class Tiles, int kBarriersAt, bool kAny = (kBarriersAt > sizeof(Tiles))>
struct BeforeBarriers {
    static_assert(kBarriersAt == 0 || kBarriersAt == sizeof(Tiles));
};
template <class Tiles, int kBarriersAt>
struct alignas(1024) BeforeBarriers<Tiles, kBarriersAt, true> {
    std::byte bytes[kBarriersAt - sizeof(Tiles)];
};

/// Map of a block's shared memory.
template <class Tile>
struct SharedMemory : SharedTiles<Tile> {
    [[no_unique_address]] BeforeBarriers<SharedTiles<Tile>, Tile::kBarriersAt> before_barriers;
    Slot key_slot[Tile::kKeyStages], value_slot[Tile::kValueStages], slot[Tile::kStages], ds_slot[Tile::kDsStages];
    std::conditional_t<Tile::kTwoRoles, Slot[Tile::kDsStages], Nothing> p_slot;
    std::conditional_t<Tile::kHalvesDout, Slot[Tile::kDoutPlaces], Nothing> dout_slot;  // or else slot is dO's too
    std::conditional_t<Tile::kTwoRoles || Tile::kRing, TurnsMemory<Tile::kTilesTold>, Nothing> turns;
    // Say that all dQ of an item with tiles has been added (finish_beside.cuh)
    std::conditional_t<Tile::kTwoRoles || Tile::kRing, Nothing, ptx::Barrier[kAddedBarriers]> added;
    Slot plan_slot[Tile::kPlans];
    ptx::Barrier take_next;                     // says that the block's next item is to be taken (planner.cuh)
    ptx::Barrier facts_full[Tile::kTileFacts];  // of facts and tile
    ptx::Barrier under_way[Tile::kTileFacts];   // says that copies of a tile's Q and dO were asked for
    ptx::Barrier key_patch, query_patch;  // say that rows have come of which the warp that copied them clears some
};

/// The place of a part of dO of tile n.
template <class Tile>
struct DoutPlace {
    unsigned place, parity;
    __device__ __forceinline__ static DoutPlace of(unsigned n, int part) {
        const unsigned count = Tile::kDoutParts * n + static_cast<unsigned>(part);  // before it
        return {count % Tile::kDoutPlaces, count / Tile::kDoutPlaces % 2};
    }
};

/// Prepares the barriers of places that are full after `fills` arrivals and empty after `readers`.
template <int kCount>
__device__ __forceinline__ void prepare_slots(Slot (&slots)[kCount], unsigned fills, unsigned readers) {
    for (Slot& slot : slots) ptx::barrier_init(&slot.full, fills), ptx::barrier_init(&slot.empty, readers);
}

/// Says the next item, in the place `plan` of the ring. Called by a whole warp.
template <class Memory, class AnyItem, int kPlans>
__device__ __forceinline__ void publish(Memory& smem, RingPlace<kPlans>& plan, const AnyItem& item) {
    Slot& slot = smem.plan_slot[plan.stage];
    if (threadIdx.x % 32 == 0) {
        ptx::barrier_wait(&slot.empty, plan.parity ^ 1);
        smem.plan[plan.stage] = item;
        ptx::barrier_arrive(&slot.full);
    }
    plan.advance();
}
/// Calls on_item(item) for the block's items with tiles, as the plan says them. A whole warp, or a single lane.
template <class Tile, bool kWholeWarp = true, class Memory, class OnItem>
__device__ __forceinline__ void each_item(Memory& smem, OnItem on_item) {
    for (RingPlace<Tile::kPlans> plan;; plan.advance()) {
        Slot& slot = smem.plan_slot[plan.stage];
        ptx::barrier_wait(&slot.full, plan.parity);
        const auto item = smem.plan[plan.stage];
        if (item.tiles < 0) return;
        if (item.tiles > 0) on_item(item);
        if constexpr (kWholeWarp) __syncwarp();
        if (!kWholeWarp || threadIdx.x % 32 == 0) ptx::barrier_arrive(&slot.empty);
    }
}

/// Where the tensors lie, for the copy engine.
struct Maps {
    TensorMap q, k, v, dout;
    TensorMap dk{}, dv{};  // to store 16 rows, if the instance stages them
};

}  // namespace flash_wmma::backward::wgmma
