// The statistics of bwd_sm90 (attention.h): two passes over the scores by tensor copies (TMA) and wgmma.
//
// Algorithm, with L the forward's log-sum-exp: own queries and streamed keys, S = Q K^T, or own keys and streamed
// queries of one query head, S^T = K Q^T; then P = exp(x - L) of the scores x, and what weight_sums.cuh makes of both.
// Every number belongs to one block, which adds it up in one order: the result is the same in every run.
//
// Roles: in warpgroup 0 one warp has rows copied, one tells the items, one brings L of the queries, one is idle. A
// consumer warpgroup has 64 own rows, and each of its warps 16 of them. It multiplies them with streamed tiles and adds
// up what it finds in registers (weight_sums.cuh). It passes by the tiles that its rows see nothing of.
//
// Two shapes for a head dim. Column sums of products that nothing changes take streamed tiles of 64 rows, and a
// warpgroup multiplies one beside the exponentials of the other. All else takes tiles of 128 rows, one product at a
// time: there a score takes more instructions, of which a larger tile saves some, and the consumers' products and sums
// overlap.
//
// Blocks are persistent where band and lengths alone say what an item's work is. They take items by turns, with a band
// the longest of all heads first. Packed sequences and key ranges have a block for each item.
//
// Bound: for 128 scores an SM is busy with exponentials for 8 cycles and with products for 4 at d = 64, for 8 at d =
// 128, for 16 at d = 256. Maxima alone take no exponentials.
#pragma once

#include <launch.h>
#include <ptx_sm90.cuh>
#include <shared_memory.cuh>

#include <algorithm>
#include <type_traits>

#include "backward/wgmma/block.cuh"
#include "backward/wgmma/order.cuh"
#include "backward/wgmma/products.cuh"
#include "device/pipeline.cuh"
#include "device/statistics_item.cuh"
#include "device/statistics_shapes.h"
#include "device/weight_sums.cuh"
#include "shape_table.h"

namespace flash_wmma::backward::wgmma {

/// Shape of a block's work.
struct StatisticsTileShape {
    int d;          ///< the largest that the instance holds
    int consumers;  ///< warpgroups with 64 own rows each
    int streamed;   ///< rows of a streamed tile
    int stages;     ///< streamed tiles in flight
    int products;   ///< tiles of scores that a warpgroup keeps; with two, one is multiplied while the other is added
    bool own_in_registers;  ///< or the products read own rows from shared memory
    int own_stages;         ///< places there for own rows
};

/// The same with what follows from it. Scalar is half or bf16.
template <class Scalar, StatisticsTileShape kShape>
struct StatisticsTile {
    using T = Scalar;
    static constexpr int kD = kShape.d, kPanels = kD / 64;  // panels of 64 columns
    static constexpr int kWarpRows = 16, kGroupRows = 64, kGroupThreads = 128;
    static constexpr int kConsumers = kShape.consumers, kOwn = kGroupRows * kConsumers;
    static constexpr int kThreads = kGroupThreads * (1 + kConsumers);
    static constexpr int kStream = kShape.streamed, kStep = kStream;  // a warp takes all of a tile at a time
    static constexpr int kStages = kShape.stages, kOwnStages = kShape.own_stages, kProducts = kShape.products;
    static constexpr bool kOwnInRegisters = kShape.own_in_registers;
    static constexpr int kPlans = 2;  // items told ahead
    // Registers of a thread, in multiples of 8: the consumers take those that warpgroup 0 does not need
    static constexpr int kLaunchRegisters = 65536 / kThreads / 8 * 8, kProducerRegisters = 32;
    static constexpr int kConsumerRegisters =
        (kLaunchRegisters * (1 + kConsumers) - kProducerRegisters) / kConsumers / 8 * 8;
    static_assert(kD % 64 == 0 && kStream % kRowGroup == 0 && kRowGroup % kWarpRows == 0);

    /// The same of a warpgroup's rows alone.
    struct Group {
        static constexpr int kOwn = kGroupRows, kStream = StatisticsTile::kStream;
    };
    /// A lane's place in a block of 16x8 accumulators.
    struct Place {
        int lane = static_cast<int>(threadIdx.x) % 32;
        __device__ __forceinline__ int row() const { return lane / 4; }
        __device__ __forceinline__ int column() const { return lane % 4 * 2; }
    };
};

/// Map of a block's shared memory: panels of 64 columns with the 128-byte swizzle.
template <class Tile, bool kOwnsKeys>
struct StatisticsMemory {
    using Item = StatisticsItem<Tile, kOwnsKeys>;
    template <int kRows>
    struct alignas(1024) Rows {
        typename Tile::T panel[Tile::kPanels][kRows * 64];
    };
    using Own = Rows<Tile::kOwn>;
    using Stream = Rows<Tile::kStream>;

    Own own[Tile::kOwnStages];
    Stream stream[Tile::kStages];
    // L of own queries, or of streamed ones at lse_place. Of these one place more: who has multiplied a tile, and gives
    // its place back, may still read its L, but no longer that of the tile before
    static constexpr int kLsePlaces = kOwnsKeys ? Tile::kStages + 1 : Tile::kOwnStages;
    alignas(16) float minus_lse[kLsePlaces][kOwnsKeys ? Tile::kStream : Tile::kOwn];
    Item plan[Tile::kPlans];
    Slot own_slot[Tile::kOwnStages], slot[Tile::kStages], plan_slot[Tile::kPlans];
};

/// Where the own and the streamed rows lie, for the copy engine.
struct StatisticsMaps {
    TensorMap own, stream;
};

/// Where scores of a tile of streamed rows lie.
template <class Tile, bool kOwnsKeys>
struct TilePlace : ScorePlace<Tile, kOwnsKeys> {
    /// As of ScorePlace. A mask with ranges knows a group of queries at a time. Called only if all streamed rows exist.
    template <class Mask>
    __device__ __forceinline__ bool all_visible(const Mask& mask) const {
        if constexpr (kOwnsKeys) {
            bool all = true;
#pragma unroll
            for (int i = 0; i < Tile::kStream; i += kRowGroup)
                all = all && mask.all_visible(this->stream + i, this->stream + i + kRowGroup - 1, this->own,
                                              this->own + Tile::kWarpRows - 1);
            return all;
        } else {
            return ScorePlace<Tile, kOwnsKeys>::all_visible(mask);
        }
    }
};

/// Where a tile's column lies among its numbers: a lane's columns of two adjacent blocks of accumulators are 16 bytes.
__device__ constexpr int lse_place(int column) {
    return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

/// A warpgroup's own rows as the products' A.
template <class Tile, class Memory>
class OwnRows {
    using T = typename Tile::T;

  public:
    /// Called when the rows are there. `group`: the number of the consumer warpgroup.
    __device__ __forceinline__ OwnRows(const typename Memory::Own& rows, int group)
        : rows_(rows), first_(Tile::kGroupRows * group) {
        if constexpr (Tile::kOwnInRegisters) {
            const int lane = static_cast<int>(threadIdx.x) % 32;
            const int row = first_ + static_cast<int>(threadIdx.x) / 32 % 4 * Tile::kWarpRows + lane % 16;
#pragma unroll
            for (int step = 0; step < Tile::kD / 16; ++step)
                ptx::ldmatrix_x4(words_[step],
                                 rows_.panel[step / 4] + 64 * row + 8 * ((step % 4 * 2 + lane / 16) ^ row % 8));
        }
    }
    /// Issues their products with a tile of streamed rows.
    __device__ __forceinline__ void multiply(RegisterTile<Tile::kWarpRows, Tile::kStream>& s,
                                             const typename Memory::Stream& stream) const {
        ptx::wgmma_fence();
        if constexpr (Tile::kOwnInRegisters) {
#pragma unroll
            for (int step = 0; step < Tile::kD / 16; ++step) {
                const ptx::SharedMatrix<ptx::Major::K> b(stream.panel[step / 4]);
                ptx::wgmma<T, Tile::kStream>(s.flat(), words_[step], b + step % 4 * 32, step > 0);
            }
            ptx::wgmma_commit();
        } else {
            issue_scores<T, Tile::kD>(s, rows_, first_, stream);
        }
    }

  private:
    const typename Memory::Own& rows_;
    const int first_;
    std::uint32_t words_[Tile::kOwnInRegisters ? Tile::kD / 16 : 1][4];
};

/// What the producer's warps do, one each: tell the items, have the rows copied, and bring L of the queries.
template <class Tile, bool kOwnsKeys>
class StatisticsProducer {
    using Memory = StatisticsMemory<Tile, kOwnsKeys>;
    using Item = typename Memory::Item;

  public:
    __device__ __forceinline__ StatisticsProducer(const Problem& problem, const StatisticsMaps& maps, Memory& shared)
        : problem_(problem), maps_(maps), smem_(shared) {}

    /// Arrivals that fill a place of streamed rows, and of own ones: the copy's, and L's of the queries.
    static constexpr unsigned kFillStreamed = kOwnsKeys ? 2 : 1, kFillOwn = kOwnsKeys ? 1 : 2;
    /// How many of the warps follow the plan.
    static constexpr unsigned kFollowers = 2;

    /// Called by a warp. Persistent blocks take the pass's items by fixed turns. With a band the longest of all heads
    /// come first: order.cuh mixes the heads of two items for each block, so it is told of a block for each item.
    __device__ __forceinline__ void plan(unsigned items) {
        const ForwardParams& p = problem_.forward;
        const bool orders = gridDim.x < items && (p.band.left < kUnbounded || p.band.right < kUnbounded);
        const auto heads = static_cast<unsigned>(p.heads_q / p.heads_k);
        RingPlace<Tile::kPlans> place;
        for (unsigned i = blockIdx.x; i < items; i += gridDim.x) {
            unsigned number = i;
            if (orders && kOwnsKeys) number = mixed_keys<Tile::kOwn>(p, i / heads, items) * heads + i % heads;
            else if (orders) number = mixed_queries<Tile::kOwn>(p, i, items);
            publish(smem_, place, Item::of(problem_, number));
        }
        Item none{};
        none.tiles = -1;
        publish(smem_, place, none);
    }
    /// Called by one thread.
    __device__ __forceinline__ void copy_rows() {
        RingPlace<Tile::kOwnStages> own;
        RingPlace<Tile::kStages> at;
        each_item<Tile, /*kWholeWarp=*/false>(smem_, [&](const Item& item) {
            const int batch = batch_in_maps<Problems::kPacked>(problem_.forward.sequences, item.own.sequence.index);
            Slot& own_slot = smem_.own_slot[own.stage];
            ptx::barrier_wait(&own_slot.empty, own.parity ^ 1);
            load(smem_.own[own.stage], maps_.own, own_slot, item.first_own() + item.own.first_row, item.own_head(),
                 batch);
            own.advance();
            for (int i = 0, row = item.last; i < item.tiles; ++i, row -= Tile::kStream, at.advance()) {
                Slot& slot = smem_.slot[at.stage];
                ptx::barrier_wait(&slot.empty, at.parity ^ 1);
                load(smem_.stream[at.stage], maps_.stream, slot, item.first_streamed() + row, item.streamed_head(),
                     batch);
            }
        });
    }
    /// Called by a warp. A lane has a query of each 32 of a tile, and asks for L before it waits for a place.
    __device__ __forceinline__ void bring_lse() {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        RingPlace<Tile::kOwnStages> own;
        RingPlace<Tile::kStages> at;
        RingPlace<Tile::kStages + 1> lse_at;
        each_item<Tile>(smem_, [&](const Item& item) {
            float lse[(kOwnsKeys ? Tile::kStream : Tile::kOwn) / 32];
            const auto ask = [&](int row) {
#pragma unroll
                for (float& x : lse) x = lse_of(problem_.forward, item.own.sequence, item.head, row + lane), row += 32;
            };
            const auto fill = [&](Slot& slot, unsigned parity, auto write) {
                ptx::barrier_wait(&slot.empty, parity ^ 1);
                int query = lane;
#pragma unroll
                for (const float x : lse) write(query, minus_lse_of(x)), query += 32;
            };
            const auto filled = [&](Slot& slot) {
                __syncwarp();
                if (lane == 0) ptx::barrier_arrive(&slot.full);
            };
            if constexpr (kOwnsKeys) {
                ask(item.last);
                for (int left = item.tiles, row = item.last; left > 0; --left, row -= Tile::kStream) {
                    Slot& slot = smem_.slot[at.stage];
                    fill(slot, at.parity,
                         [&](int query, float x) { smem_.minus_lse[lse_at.stage][lse_place(query)] = x; });
                    if (left > 1) ask(row - Tile::kStream);
                    filled(slot);
                    at.advance(), lse_at.advance();
                }
            } else {
                ask(item.own.first_row);
                Slot& slot = smem_.own_slot[own.stage];
                fill(slot, own.parity, [&](int query, float x) { smem_.minus_lse[own.stage][query] = x; });
                filled(slot);
                own.advance();
            }
        });
    }

  private:
    template <class Rows>
    __device__ __forceinline__ static void load(Rows& rows, const TensorMap& map, Slot& slot, int row, int head,
                                                int batch) {
        ptx::barrier_arrive_expect(&slot.full, sizeof(rows));
#pragma unroll
        for (int i = 0; i < Tile::kPanels; ++i)
            ptx::tensor_load(rows.panel[i], &map, &slot.full, {64 * i, row, head, batch});
    }

    const Problem& problem_;
    const StatisticsMaps& maps_;
    Memory& smem_;
};

/// Of an item's streamed tiles, from the last one on: how many a warpgroup's rows see nothing of, and how many are then
/// multiplied. With key ranges those are all.
struct SeenTiles {
    int before, count;

    template <class Tile, bool kOwnsKeys, class Mask>
    __device__ __forceinline__ static SeenTiles of(const ForwardParams& p, const StatisticsItem<Tile, kOwnsKeys>& item,
                                                   int group, const Mask& mask) {
        if constexpr (std::is_same_v<Mask, RowGroupMask>)
            if (mask.has_ranges()) return {0, item.tiles};
        OwnedTile own = item.own;
        own.first_row += Tile::kGroupRows * group;
        const BandMask& band = mask;
        const StreamedRange seen =
            streamed_range<typename Tile::Group, kOwnsKeys ? Pass::kKeys : Pass::kQueries>(p, own, band);
        if (seen.left == 0) return {item.tiles, 0};
        return {(item.last - seen.at.last) / Tile::kStream, (seen.at.last - seen.at.first) / Tile::kStream + 1};
    }
};

/// What a consumer does: the items' tiles of its own rows.
template <class Tile, bool kOwnsKeys, bool kModified>
__device__ __forceinline__ void consume(const Problem& problem, StatisticsMemory<Tile, kOwnsKeys>& smem) {
    using Memory = StatisticsMemory<Tile, kOwnsKeys>;
    const ForwardParams& p = problem.forward;
    const int warp = uniform(static_cast<int>(threadIdx.x) / 32) - Tile::kGroupThreads / 32, group = warp / 4;
    const typename Tile::Place lane;
    RingPlace<Tile::kOwnStages> own_at;
    RingPlace<Tile::kStages> at;
    RingPlace<Tile::kStages + 1> lse_at;
    each_item<Tile>(smem, [&](const typename Memory::Item& item) {
        const Sequence& sequence = item.own.sequence;
        const int own_row = item.own.first_row + Tile::kWarpRows * warp, own_rows = item.own_length();
        const auto mask = query_mask<kModified>(problem, sequence, item.head);
        const SeenTiles seen = SeenTiles::of<Tile, kOwnsKeys>(p, item, group, mask);
        WeightSums<Tile::kWarpRows, kOwnsKeys, kModified> sums(problem, sequence, item.head);

        const auto give_back = [&](Slot& slot) {
            __syncwarp();
            if (lane.lane == 0) ptx::barrier_arrive(&slot.empty);
        };
        Slot& own_slot = smem.own_slot[own_at.stage];
        ptx::barrier_wait(&own_slot.full, own_at.parity);
        const OwnRows<Tile, Memory> own(smem.own[own_at.stage], group);
        RowValues<Tile::kWarpRows> minus_lse;
        if constexpr (!kOwnsKeys)
            minus_lse.each([&](int i, float& x) {
                x = smem.minus_lse[own_at.stage][Tile::kWarpRows * warp + 8 * i + lane.row()];
            });
        if constexpr (Tile::kOwnInRegisters) give_back(own_slot);
        own_at.advance();

        RegisterTile<Tile::kWarpRows, Tile::kStream> s[Tile::kProducts];
        // A warp whose rows do not exist takes the last row's place: groups behind that row have no extent
        TilePlace<Tile, kOwnsKeys> place{{min(own_row, own_rows - 1), item.last - seen.before * Tile::kStream, lane}};
        const auto pass_by = [&](int tiles) {
            for (; tiles > 0; --tiles, at.advance(), lse_at.advance()) {
                ptx::barrier_wait(&smem.slot[at.stage].full, at.parity);
                give_back(smem.slot[at.stage]);
            }
        };
        const auto multiply = [&](auto& product, RingPlace<Tile::kStages> tile) {
            ptx::barrier_wait(&smem.slot[tile.stage].full, tile.parity);
            own.multiply(product, smem.stream[tile.stage]);
        };
        const auto add = [&](auto& product) {
            give_back(smem.slot[at.stage]);
            const float* const lse = smem.minus_lse[kOwnsKeys ? lse_at.stage : 0] + lse_place(lane.column());
            sums.add(
                product, p.scale * kLog2e,
                [&](int i, int column) { return kOwnsKeys ? lse[lse_place(column)] : minus_lse[i]; }, place, mask);
            at.advance(), lse_at.advance();
            place.stream -= Tile::kStream;
        };
        pass_by(seen.before);
        int left = seen.count;
        if constexpr (Tile::kProducts == 1) {
            for (; left > 0; --left) {
                multiply(s[0], at);
                ptx::wgmma_wait<0>();
                add(s[0]);
            }
        } else if (left > 0) {
            const auto next = [&] {
                RingPlace<Tile::kStages> tile = at;
                tile.advance();
                return tile;
            };
            // Adds a tile while the next one, if there is any, is multiplied. Each end has a wait of its own, or ptxas
            // serializes the products
            const auto step = [&](auto& product, auto& following) {
                if (--left == 0) {
                    ptx::wgmma_wait<0>();
                    add(product);
                    return false;
                }
                multiply(following, next());
                ptx::wgmma_wait<1>();
                add(product);
                return true;
            };
            multiply(s[0], at);
            while (step(s[0], s[1]) && step(s[1], s[0])) {
            }
        }
        pass_by(item.tiles - seen.before - seen.count);
        if constexpr (!Tile::kOwnInRegisters) give_back(own_slot);
        sums.store(own_row, own_rows - own_row, lane);
    });
}

// spills: sm_90a: warpgroup 0, with few registers, keeps parts of an item in local memory; consumers none in their
// loops.
template <class Tile, bool kOwnsKeys, Problems kProblems>
__global__ void __launch_bounds__(Tile::kThreads, 1)
    statistics(const __grid_constant__ Problem problem, const __grid_constant__ StatisticsMaps maps, unsigned items) {
    using Producer = StatisticsProducer<Tile, kOwnsKeys>;
    auto& smem = shared_memory<StatisticsMemory<Tile, kOwnsKeys>>();
    if (threadIdx.x == 0) {
        constexpr unsigned kConsumerWarps = 4 * Tile::kConsumers;
        prepare_slots(smem.own_slot, Producer::kFillOwn, kConsumerWarps);
        prepare_slots(smem.slot, Producer::kFillStreamed, kConsumerWarps);
        prepare_slots(smem.plan_slot, 1, kConsumerWarps + Producer::kFollowers);
        ptx::barrier_init_fence();
    }
    __syncthreads();
    if (uniform(static_cast<int>(threadIdx.x) / Tile::kGroupThreads) == 0) {
        ptx::release_registers<Tile::kProducerRegisters>();
        Producer producer(problem, maps, smem);
        if (threadIdx.x == 0) producer.copy_rows();
        else if (threadIdx.x / 32 == 1) producer.plan(items);
        else if (threadIdx.x / 32 == 2) producer.bring_lse();
    } else {
        ptx::acquire_registers<Tile::kConsumerRegisters>();
        consume<Tile, kOwnsKeys, includes(kProblems, Problems::kModified)>(problem, smem);
    }
}

template <class Tile, bool kOwnsKeys, Problems kProblems>
void launch_statistics_pass(const Problem& problem, Stream stream) {
    const ForwardParams& p = problem.forward;
    const dim3 grid = statistics_grid<Tile, kOwnsKeys>(p);
    if (grid.x == 0) return;
    const Sequences& s = p.sequences;
    const auto map = [&](bool keys, int rows) {
        const std::int64_t count =
            keys ? (s.cu_seqlens_k ? s.total_k : p.seqlen_k) : (s.cu_seqlens_q ? s.total_q : p.seqlen_q);
        return map_rows(p, keys ? p.k : p.q, p.head_dim, count, keys ? p.heads_k : p.heads_q, rows);
    };
    const StatisticsMaps maps{map(kOwnsKeys, Tile::kOwn), map(!kOwnsKeys, Tile::kStream)};
    // Where lengths or ranges make items what they are, the device deals them out, to a block each
    const bool even = !s.cu_seqlens_q && !s.cu_seqlens_k && !s.seqused_k && !p.key_ranges.data;
    const dim3 blocks(even ? std::min(grid.x, static_cast<unsigned>(problem.multiprocessors)) : grid.x);
    launch(statistics<Tile, kOwnsKeys, kProblems>,
           {blocks, dim3(Tile::kThreads), sizeof(StatisticsMemory<Tile, kOwnsKeys>)}, stream, problem, maps, grid.x);
}

/// The shapes that ship: for column sums of products that nothing changes, and for all else.
inline constexpr StatisticsTileShape kColumnShapes[] = {
    {.d = 64, .consumers = 4, .streamed = 64, .stages = 8, .products = 2, .own_in_registers = true, .own_stages = 1},
    {.d = 128, .consumers = 3, .streamed = 64, .stages = 6, .products = 2, .own_in_registers = true, .own_stages = 1},
    {.d = 256, .consumers = 4, .streamed = 64, .stages = 3, .products = 2, .own_in_registers = false, .own_stages = 1},
};
inline constexpr StatisticsTileShape kStatisticsShapes[] = {
    {.d = 64, .consumers = 4, .streamed = 128, .stages = 4, .products = 1, .own_in_registers = false, .own_stages = 2},
    {.d = 128, .consumers = 4, .streamed = 128, .stages = 2, .products = 1, .own_in_registers = false, .own_stages = 2},
    {.d = 256, .consumers = 3, .streamed = 128, .stages = 2, .products = 1, .own_in_registers = false, .own_stages = 1},
};
template <class T>
std::vector<StatisticsShape> statistics_shapes() {
    return of_rows<kStatisticsShapes>([](auto i) {
        using Tile = StatisticsTile<T, kStatisticsShapes[i]>;
        using ColumnTile = StatisticsTile<T, kColumnShapes[i]>;
        static_assert(Tile::kD == ColumnTile::kD);
        constexpr std::size_t kMost = 227 * 1024;
        static_assert(sizeof(StatisticsMemory<Tile, true>) <= kMost && sizeof(StatisticsMemory<Tile, false>) <= kMost &&
                      sizeof(StatisticsMemory<ColumnTile, true>) <= kMost);
        const auto columns = [](const Problem& problem, Stream stream) {
            const bool modified = includes(problems_of(problem.forward, /*converted=*/false), Problems::kModified);
            if (modified) launch_statistics_pass<Tile, true, Problems::kGeneral>(problem, stream);
            else launch_statistics_pass<ColumnTile, true, Problems::kPacked>(problem, stream);
        };
        return StatisticsShape{Element<T>::kDType, Tile::kD, launch_statistics_pass<Tile, false, Problems::kGeneral>,
                               columns};
    });
}

}  // namespace flash_wmma::backward::wgmma
