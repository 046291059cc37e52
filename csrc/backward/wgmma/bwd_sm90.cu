// bwd_sm90: the choice among its instances, and its row in the registry.
// architectures: 9.0a
#include <algorithm>
#include <cmath>

#include "backward/wgmma/finish_beside.cuh"
#include "backward/wgmma/order.cuh"
#include "backward/wgmma/parts.cuh"
#include "backward/wgmma/prepare_beside.cuh"
#include "backward/wgmma/shapes.h"
#include "device/backward_rows.cuh"

namespace flash_wmma::backward {
namespace {

struct Sm90 {};  // prepare and finish are compiled once more, for sm_90a

const std::vector<Shape> kShapes = join(
    {sm90_half_shapes(), sm90_bf16_shapes(), sm90_half_ring(), sm90_bf16_ring(), sm90_wide_half_shapes(),
     sm90_wide_bf16_shapes(), sm90_half_dropped_shapes(), sm90_bf16_dropped_shapes(), sm90_wide_half_dropped_shapes(),
     sm90_wide_bf16_dropped_shapes(), sm90_half_general_shapes(), sm90_bf16_general_shapes(),
     sm90_wide_half_general_shapes(), sm90_wide_bf16_general_shapes(), sm90_half_two_passes(), sm90_bf16_two_passes(),
     sm90_half_general_two_passes(), sm90_bf16_general_two_passes()});
const std::vector<StatisticsShape> kStatisticsShapes = join({sm90_half_statistics(), sm90_bf16_statistics()});

std::int64_t largest_head_dim(const BackwardParams& p) { return std::max(p.forward.head_dim, p.forward.head_dim_v); }
bool is_wide(const BackwardParams& p) { return largest_head_dim(p) > 128; }

/// Whether dQ's buffer and the facts are of several launches.
bool is_shared(const BackwardParams& p) { return p.shared.stage != BackwardStage::kAll; }

/// Whether memory is slow beside the tensor cores.
constexpr int kSlowBus = 5120;  // bits, of an H100; an H200 has 6016
bool has_slow_memory(const DeviceFacts& device) { return 0 < device.memory_bus && device.memory_bus <= kSlowBus; }

/// How many keys a row sees on average, of the longest sequence, by the band: from its first, middle and last row.
std::int64_t visible_keys(const ForwardParams& p) {
    const std::int64_t offset = p.band.bottom_right ? p.seqlen_k - p.seqlen_q : 0;
    const auto of_row = [&](std::int64_t row) {
        const std::int64_t begin = std::max<std::int64_t>(row + offset - p.band.left, 0);
        return std::max<std::int64_t>(std::min(row + offset + p.band.right + 1, p.seqlen_k) - begin, 0);
    };
    return (of_row(0) + 2 * of_row(p.seqlen_q / 2) + of_row(p.seqlen_q - 1)) / 4;
}
bool is_dense(const ForwardParams& p) {
    return !p.sequences.cu_seqlens_q && !p.sequences.cu_seqlens_k && !p.sequences.seqused_k;
}
/// Without dropout, ranges or what else changes scores: that costs two passes twice.
bool has_scores_alone(const BackwardParams& p) {
    return includes(Problems::kPacked, problems_of(p, /*converted=*/false));
}
/// Up to how many keys of a row two products more take no longer than dQ's buffer and additions to it, where memory is
/// slow (docs/tuning/hopper_backward.md): fewer where exponentials take long, or what changes scores, of which there
/// are twice as many; more under a band, at whose ends tiles are skipped.
std::int64_t most_keys_of_two_passes(const BackwardParams& p) {
    const std::int64_t d = largest_head_dim(p);
    const bool banded = p.forward.band.left < kUnbounded || p.forward.band.right < kUnbounded;
    if (p.forward.key_ranges.data) return 0;
    if (!has_scores_alone(p)) return d > 64 ? 256 : 0;
    if (d <= 64) return 335;
    if (d <= 96) return banded ? 390 : 365;
    return banded ? 635 : 575;
}
bool has_few_keys(const BackwardParams& p, const DeviceFacts& device) {
    if (device.memory_bus <= 0) return false;
    return visible_keys(p.forward) * device.memory_bus <= most_keys_of_two_passes(p) * kSlowBus;
}
/// Whether all items have all tiles of queries.
bool has_equal_items(const ForwardParams& p) {
    return p.band.left >= kUnbounded && p.band.right >= kUnbounded && !p.key_ranges.data && is_dense(p);
}

/// Whether SMs would wait for the longest items, which two passes divide: by their products, of which an item of keys
/// has five where dQ is a sum, and in two passes four, and one of queries three. In rows times keys; items that take
/// equally long go in parts instead.
bool has_few_long_items(const BackwardParams& params, const DeviceFacts& device) {
    const ForwardParams& p = params.forward;
    if (device.memory_bus <= 0 || has_equal_items(p) || !is_dense(p) || !has_scores_alone(params)) return false;
    constexpr double kOwn = 128, kGain = 1.1;  // rows of an item; by which two passes have to end earlier
    const auto left = static_cast<double>(p.band.left), right = static_cast<double>(p.band.right),
               rows = static_cast<double>(p.seqlen_q), keys = static_cast<double>(p.seqlen_k),
               heads = static_cast<double>(p.heads_q * p.batch),
               group = static_cast<double>(p.heads_q) / static_cast<double>(std::max<std::int64_t>(p.heads_k, 1));
    const double offset = p.band.bottom_right ? keys - rows : 0;
    const double seeing = std::min(rows, keys - offset + left) - std::max(0., -offset - right);  // rows that see a key
    const double of_keys = kOwn * std::min(seeing, left + right + kOwn) * group,
                 of_queries = kOwn * std::min(keys, left + right + kOwn);
    const double of_sm = static_cast<double>(visible_keys(p)) * rows * heads / std::max(device.sm_count, 1);
    return 5 * of_keys >= kGain * std::max({4 * of_keys, 3 * of_queries, 7 * of_sm});
}

/// In how many batches items of deterministic calls come whose blocks take turns in a ring (backward/wgmma/order.cuh).
/// 0: two passes take no longer, which they do unless nearly all blocks are at work.
///
/// The blocks of a batch wait for each other, so each has to fit the device. A batch takes a round, and several that
/// fit at once, of different heads, share one.
std::int64_t ring_batches(const BackwardParams& params, const DeviceFacts& device) {
    const ForwardParams& p = params.forward;
    if (!has_equal_items(p) || problems_of(params, /*converted=*/false) != Problems::kPlain) return 0;
    constexpr std::int64_t kMore = 3;  // at most so many more batches than needed: each reads the rows again
    const std::int64_t keys = choose_shape(kShapes, p.dtype, Pass::kTurns, params, device).facts.bc;  // of an item
    const std::int64_t heads = p.heads_k * p.batch, items = (p.seqlen_k + keys - 1) / keys;
    const std::int64_t blocks = std::max(device.sm_count, 1), least = (items + blocks - 1) / blocks;
    if (heads == 0 || items == 0 || items * (least + kMore) > 0x7fffffff) return 0;
    std::int64_t best = 0, fewest = 10 * heads * items / (9 * blocks) + 1;  // rounds: less than nine tenths at work
    for (std::int64_t batches = least; batches <= std::min(items, least + kMore); ++batches) {
        const std::int64_t at_once = blocks / ((items + batches - 1) / batches);
        const std::int64_t rounds = std::max(batches, (heads * batches + at_once - 1) / at_once);
        if (rounds < fewest) best = batches, fewest = rounds;
    }
    return best;
}

/// How many heads' items come by turns in deterministic calls under a causal mask whose blocks take turns
/// (backward/wgmma/order.cuh): as many as begin together. 0: two passes take no longer. That is so where more than
/// kMost heads would begin together, as in short sequences. It is so where blocks have few items, since many rest at
/// the end.
std::int64_t heads_together(const BackwardParams& params, const DeviceFacts& device) {
    const ForwardParams& p = params.forward;
    const bool square = p.seqlen_q == p.seqlen_k && p.band.left >= kUnbounded && p.band.right == 0;
    if (!square || problems_of(params, /*converted=*/false) != Problems::kPlain) return 0;
    constexpr std::int64_t kLeastRounds = 8, kFewest = 2, kMost = 4;
    const std::int64_t keys = choose_shape(kShapes, p.dtype, Pass::kTurns, params, device).facts.bc;  // of an item
    const std::int64_t items = (p.seqlen_k + keys - 1) / keys, blocks = std::max(device.sm_count, 1);
    if (p.heads_k * p.batch * items < kLeastRounds * blocks || blocks / items > kMost) return 0;
    return std::max(blocks / items, kFewest);
}
/// Whether blocks take turns up to d = 128.
bool takes_ordered_turns(const BackwardParams& p, const DeviceFacts& device) {
    return ring_batches(p, device) > 0 || heads_together(p, device) > 0;
}

/// Up to d = 128, two passes for few keys and for few long items, if the memory's bus is known, and in deterministic
/// calls unless blocks take turns. Above d = 128 there is no second pass. There blocks take turns at dQ, and write dq,
/// in short sequences: in deterministic calls, which have an order anyway, and in others if memory is slow. With turns
/// an item has also those tiles whose ranges leave out its keys.
DqBy dq_of(const BackwardParams& p, const DeviceFacts& device) {
    if (is_shared(p)) return DqBy::kSums;
    if (!is_wide(p)) {
        const bool passes = has_few_keys(p, device) || has_few_long_items(p, device) ||
                            (p.deterministic && !takes_ordered_turns(p, device));
        return passes ? DqBy::kQueries : DqBy::kSums;
    }
    if (!p.deterministic && (p.forward.key_ranges.data || !has_slow_memory(device))) return DqBy::kSums;
    return p.forward.seqlen_k <= (p.deterministic ? 1024 : 512) ? DqBy::kTurns : DqBy::kSums;
}
/// Turns also give the additions an order.
bool takes_turns(const BackwardParams& p, const DeviceFacts& device) {
    const DqBy by = dq_of(p, device);
    return by == DqBy::kTurns || (by == DqBy::kSums && p.deterministic);
}
/// kKeys stands for both passes, which are one launch.
Pass pass_of(const BackwardParams& p, const DeviceFacts& device) {
    if (takes_turns(p, device)) return Pass::kTurns;
    return dq_of(p, device) == DqBy::kQueries ? Pass::kKeys : Pass::kFused;
}
const Shape& shape_of(const BackwardParams& p, const DeviceFacts& device, const Needs& needs = {}) {
    return choose_shape(kShapes, p.forward.dtype, pass_of(p, device), p, device, needs);
}

/// Items of all heads; tiles of queries that an item without a band has, of all heads that share its keys.
std::int64_t items_of(const ForwardParams& p, const Shape& shape) {
    return p.heads_k * p.batch * ((p.seqlen_k + shape.facts.bc - 1) / shape.facts.bc);
}
std::int64_t tiles_of(const ForwardParams& p, const Shape& shape) {
    return (p.seqlen_q + shape.facts.br - 1) / shape.facts.br * (p.heads_q / p.heads_k);
}

/// Bytes that an SM prepares, or brings to dq, while a block works on a tile of queries: 60 GB/s for 2.4 us.
constexpr double kBytesOfTile = 144e3;
/// The same for an item, which has as many tiles as its heads' items have on average, by the band.
double bytes_of_item(const ForwardParams& p, const Shape& shape) {
    const double tiles = static_cast<double>(tiles_of(p, shape)) * static_cast<double>(visible_keys(p)) /
                         static_cast<double>(p.seqlen_k);
    return kBytesOfTile * std::max(tiles, 1.);
}
/// How many SMs take all of HBM's bandwidth so.
constexpr double kAtOnce = 60;

/// Which items go in parts: those of the last round of blocks, if the call ends earlier so, where all items take
/// equally long. A part lasts as long as its tiles and some kMore more: it begins, and brings dK and dV together. Plain
/// problems are then run by an instance that takes up to kLonger more time for all items
/// (docs/tuning/hopper_backward.md). `lost`: what else the call takes longer with parts, in the time of a tile.
struct Parts {
    std::int64_t whole, split;
    int each;
};
Parts parts_of(const BackwardParams& params, const Shape& shape, const DeviceFacts& device, double lost) {
    const ForwardParams& p = params.forward;
    const std::int64_t items = items_of(p, shape);
    if (is_wide(params) || shape.pass != Pass::kFused || !has_equal_items(p) || items == 0) return {items, 0, 1};
    constexpr std::int64_t kMore = 14, kMostParts = 8;
    constexpr double kLonger = 0.03;
    const std::int64_t blocks = std::max(device.sm_count, 1), split = items % blocks;
    const std::int64_t rows = (p.seqlen_q + shape.facts.br - 1) / shape.facts.br;
    std::int64_t best = 1;
    const auto whole = static_cast<double>(tiles_of(p, shape)), rounds_before = static_cast<double>(items / blocks);
    double least = whole - lost - (shape.takes_parts ? 0 : kLonger * whole * rounds_before);  // of the last round
    for (std::int64_t each = 2; split > 0 && each <= std::min(kMostParts, rows); ++each) {
        const std::int64_t rounds = (split * each + blocks - 1) / blocks;
        const double tiles = static_cast<double>(rounds) * (whole / static_cast<double>(each) + kMore);
        if (tiles < least) least = tiles, best = each;
    }
    return best > 1 ? Parts{items - split, split, static_cast<int>(best)} : Parts{items, 0, 1};
}
/// Words of the sums, and how many counts, of a warp each.
struct PartsWords {
    std::int64_t sums, counts;
    std::int64_t bytes() const { return (sums + counts) * std::int64_t{sizeof(float)}; }
};
PartsWords words_of(const Parts& parts, const Shape& shape) {
    const std::int64_t warps = parts.split * (shape.facts.warps - 4);  // without warpgroup 0's
    return {warps * wgmma::PartSums::words(shape.facts.head_dim), warps};
}
/// Where they lie in dq's memory: behind L and D, which finish overwrites after their last use; 0 if there is no room.
std::int64_t parts_in_dq(const BackwardParams& params, const Shape& shape, const PartsWords& words) {
    const ForwardParams& p = params.forward;
    if (facts_in_dq(params, DqBy::kSums, shape.takes_terms) < 0) return 0;
    const std::int64_t facts = row_groups(p) * kRowGroup * facts_bytes(shape.takes_terms);
    return facts + words.bytes() <= DqMemory(params).bytes ? facts : 0;
}

const Instance& choose(const BackwardParams& p, const DeviceFacts& device) { return shape_of(p, device).facts; }

/// Who prepares rows beside the products (backward/wgmma/prepare_beside.cuh), and in which order: so many blocks, and
/// not the first `ahead` parts of rows, which all SMs prepare before. No blocks: products begin behind prepare.
struct Beside {
    int blocks = 0;
    unsigned ahead = 0;
    wgmma::PrepareOrder order{};
};
/// Where query heads share keys, all blocks walk through the rows of some heads together, from the last rows on, or
/// from the first ones if the band hides keys on the left alone. Batches of heads may differ by one from those of items
/// (mixed_in_batches). Above d = 128 one head after the other: no other order was measured there.
wgmma::PrepareOrder prepare_order(const BackwardParams& params, const Shape& shape, std::int64_t workers) {
    const ForwardParams& p = params.forward;
    const bool left = p.band.left < kUnbounded, right = p.band.right < kUnbounded;
    if (is_wide(params) || shape.pass != Pass::kFused || p.heads_q == p.heads_k) return {};
    if ((left && right) || (p.key_ranges.data && !left && !right)) return {};              // an item's rows are its own
    const auto items = static_cast<unsigned>(items_of(p, shape) / (p.batch * p.heads_k));  // of a head of keys
    const unsigned heads = wgmma::heads_of_first_items(p, items, static_cast<unsigned>(workers));
    return {heads * static_cast<unsigned>(p.heads_q / p.heads_k), !left};
}
/// The parts that hold the first rows in such an order: what the first items wait for.
std::int64_t first_parts(const ForwardParams& p, const wgmma::PrepareOrder& order) {
    constexpr std::int64_t kRows = 512;  // of a head
    return order.heads * std::min(kRows / wgmma::rows_of_part(p), wgmma::parts_of_head(p));
}
/// How many blocks it takes to prepare all other rows within an item's time.
std::int64_t blocks_in_time(const ForwardParams& p, const Shape& shape, std::int64_t ahead) {
    constexpr double kShare = 0.9;  // of that time
    const double bytes = wgmma::prepared_bytes(p, wgmma::parts_of_all(p) - ahead);
    return static_cast<std::int64_t>(std::ceil(bytes / (kShare * bytes_of_item(p, shape))));
}
/// Where items are few, some of the SMs that lack an item in the last round prepare. They have time until the other SMs
/// are done with their first items. Where heads share keys, the rows that come first are prepared ahead, if the others
/// are in time. Otherwise all rows of the first items' heads are, if items are equal.
Beside by_idle_blocks(const BackwardParams& params, const Shape& shape, std::int64_t most, std::int64_t workers) {
    const ForwardParams& p = params.forward;
    const std::int64_t items = items_of(p, shape), blocks = std::min((workers - items % workers) % workers, most);
    if (items < workers || blocks == 0) return {};
    const std::int64_t row_parts = wgmma::parts_of_all(p);
    const auto in_time = [&](std::int64_t ahead) {
        return ahead < row_parts && blocks_in_time(p, shape, ahead) <= blocks;
    };
    const std::int64_t first = workers - blocks;  // blocks that begin with an item
    // With a band, batches of heads depend on all blocks (mixed_keys)
    const wgmma::PrepareOrder order = prepare_order(params, shape, has_equal_items(p) ? first : workers);
    if (const std::int64_t ahead = first_parts(p, order); order.heads > 1 && in_time(ahead))
        return {static_cast<int>(blocks), static_cast<unsigned>(ahead), order};
    const std::int64_t heads = p.batch * p.heads_k, of_head = items / heads;
    const std::int64_t ahead = (first + of_head - 1) / of_head * (row_parts / heads);
    if (!has_equal_items(p) || !in_time(ahead)) return {};
    return {static_cast<int>(blocks), static_cast<unsigned>(ahead)};
}
/// Where items of different lengths are few. Where heads share keys, rows come in the order in which products come to
/// them. Below two rounds idle SMs prepare them. Up to d = 64 no more blocks prepare than have to, behind the first
/// rows, if they are in time: a block that prepares takes its first item late. Elsewhere all do, with nothing ahead.
/// Where heads do not share keys, all SMs prepare the heads of the first items ahead, if heads become dq one by one:
/// else it gains nothing.
Beside behind_first_items(const BackwardParams& params, const Shape& shape, std::int64_t blocks, std::int64_t workers) {
    const ForwardParams& p = params.forward;
    constexpr std::int64_t kLeastRounds = 2;  // of items, unless idle SMs prepare
    const bool window = p.band.left < kUnbounded && p.band.right < kUnbounded;
    if (window || p.key_ranges.data) return {};
    const wgmma::PrepareOrder order = prepare_order(params, shape, workers);
    if (items_of(p, shape) < kLeastRounds * workers)
        return order.heads > 1 ? by_idle_blocks(params, shape, blocks, workers) : Beside{};
    if (order.heads > 1) {
        const std::int64_t ahead = first_parts(p, order), fewest = blocks_in_time(p, shape, ahead);
        const bool in_time = ahead < wgmma::parts_of_all(p) && fewest <= blocks;
        const bool gains = !shape.counts_items;  // up to d = 64
        if (!gains || !in_time) return {static_cast<int>(blocks), 0, order};
        return {static_cast<int>(fewest), static_cast<unsigned>(ahead), order};
    }
    if (!shape.counts_items) return {};
    const std::int64_t heads = p.batch * p.heads_k, of_head = items_of(p, shape) / heads;
    const std::int64_t first =
        wgmma::heads_of_first_items(p, static_cast<unsigned>(of_head), static_cast<unsigned>(workers));
    if (first == heads) return {};
    return {static_cast<int>(blocks), static_cast<unsigned>(wgmma::parts_of_all(p) / heads * first)};
}
/// Nobody where blocks take turns, where products take so long that it hardly counts, where items are very few, or in
/// pairs so short that they wait for what is prepared. The blocks that prepare begin with items late. Where all items
/// take equally long, that may cost a round, so rounds are counted, in bytes that an SM prepares meanwhile: until 98 %
/// of the items are done, since blocks do not keep one pace.
Beside beside_of(const BackwardParams& params, const Shape& shape, const DeviceFacts& device) {
    const ForwardParams& p = params.forward;
    constexpr std::int64_t kMostKeys = 6000, kLeastKeysOfPairs = 600;  // that a row sees
    constexpr std::int64_t kLeastRounds = 4, kLeastEqualRounds = 8;    // of items
    const std::int64_t keys = visible_keys(p);
    if (!is_dense(p) || is_shared(params) || takes_turns(params, device) || keys > kMostKeys) return {};
    if (shape.blocks > 1 && keys < kLeastKeysOfPairs) return {};
    const std::int64_t blocks = wgmma::prepare_blocks(p, device), workers = std::max(device.sm_count / shape.blocks, 1);
    const std::int64_t items = items_of(p, shape);
    const bool equal = has_equal_items(p) && dq_of(params, device) != DqBy::kQueries;
    if (equal && items < kLeastEqualRounds * workers)
        return is_wide(params) ? Beside{} : by_idle_blocks(params, shape, blocks, workers);
    if (blocks == 0) return {};
    if (items < kLeastRounds * workers) return behind_first_items(params, shape, blocks, workers);
    if (!equal) return {static_cast<int>(blocks), 0, prepare_order(params, shape, workers)};

    const double item = bytes_of_item(p, shape), bytes = wgmma::prepared_bytes(p, wgmma::parts_of_all(p));
    const double delay = bytes / static_cast<double>(blocks) / item;  // in rounds, like what follows
    const std::int64_t late = (blocks + shape.blocks - 1) / shape.blocks, rounds = (items + workers - 1) / workers;
    std::int64_t beside = rounds;
    const auto done = [&] {  // items, by the end of so many rounds
        const auto of_late = static_cast<std::int64_t>(std::max(static_cast<double>(beside) - delay, 0.));
        return (workers - late) * beside + late * of_late;
    };
    while (50 * done() < 49 * items) ++beside;
    const double behind = static_cast<double>(rounds) + bytes / kAtOnce / item;
    return {static_cast<double>(beside) < behind ? static_cast<int>(blocks) : 0};
}

/// How a call is run.
struct Choice {
    const Shape& shape;
    Parts parts;
    Beside beside;
    DqBy dq_by;
};
/// Where rows are prepared beside products, sums of heads whose items none shares in parts are brought to dq head by
/// head (backward/wgmma/finish_beside.cuh), if the instance counts items. Few equal items that are plain have one that
/// does. Where heads share keys and all come in one batch, items of different lengths complete no head before the end:
/// finish comes behind.
Choice choice_of(const BackwardParams& p, const DeviceFacts& device) {
    const Shape& first = shape_of(p, device);
    const DqBy by = dq_of(p, device);
    const Beside beside = beside_of(p, first, device);
    const bool few_equal = beside.ahead > 0 && has_equal_items(p.forward);
    const bool plain = problems_of(p, /*converted=*/false) == Problems::kPlain;
    const Shape& shape = few_equal && plain ? shape_of(p, device, {.counts = true}) : first;
    const bool together = !has_equal_items(p.forward) && p.forward.heads_q > p.forward.heads_k &&
                          beside.order.heads == p.forward.batch * p.forward.heads_q;
    const bool heads = by == DqBy::kSums && beside.blocks > 0 && shape.counts_items && !together;
    double bytes = heads ? wgmma::finished_bytes(p.forward) : 0;
    if (few_equal)  // SMs idle in the last round do the rest, but not with parts
        bytes += wgmma::prepared_bytes(p.forward, wgmma::parts_of_all(p.forward) - beside.ahead);
    const Parts parts = parts_of(p, shape, device, bytes / kAtOnce / kBytesOfTile);
    if (parts.each == 1) return {shape, parts, beside, heads ? DqBy::kHeads : by};
    return {shape_of(p, device, {.parts = true}), parts, few_equal ? Beside{} : beside, by};
}

/// With DqBy::kHeads: behind which item an eighth of the blocks take no more, so that dq of complete heads comes on
/// their SMs by the time that the others are done. Equal items end unevenly by themselves.
void let_blocks_leave(Problem& problem, const Shape& shape) {
    const ForwardParams& p = problem.forward;
    constexpr int kShare = 8;
    const int leaving = std::min(std::max(problem.multiprocessors / kShare, 1), problem.multiprocessors - 1);
    if (has_equal_items(p) || leaving == 0) return;
    const double meanwhile = wgmma::finished_bytes(p) / leaving / bytes_of_item(p, shape);  // items of a block
    const double before = static_cast<double>(items_of(p, shape)) - meanwhile * (problem.multiprocessors - leaving);
    problem.leaving_blocks = leaving;
    problem.leaving_item = static_cast<int>(std::max(before, 0.));
}

/// The queue comes first, then how much is prepared and added, and then the turns or what belongs to parts, each
/// aligned as it has to be. Behind all of these comes dQ's buffer, to which a warp adds 512 bytes at a time: four cache
/// lines, or else parts of five.
constexpr std::int64_t kUnit = 16, kCacheLine = 128;
static_assert(sizeof(Queue) <= kUnit);
constexpr std::int64_t aligned(std::int64_t bytes, std::int64_t unit = kUnit) {
    return (bytes + unit - 1) / unit * unit;
}
/// Counts of Problem::prepared, which is there if blocks prepare beside the products; of Problem::added.
std::int64_t counts_of_prepared(const ForwardParams& p, const Choice& choice) {
    return choice.beside.blocks > 0 ? prepared_counts(p) : 0;
}
std::int64_t counts_of_added(const ForwardParams& p, const Choice& choice) {
    return choice.dq_by == DqBy::kHeads ? p.batch * p.heads_k : 0;
}
/// Bytes of the queue and of both.
std::int64_t bytes_before_turns(const ForwardParams& p, const Choice& choice) {
    return kUnit +
           aligned((counts_of_prepared(p, choice) + counts_of_added(p, choice)) * std::int64_t{sizeof(unsigned)});
}
std::int64_t counters_bytes(const BackwardParams& p, const Choice& choice) {
    const PartsWords parts = words_of(choice.parts, choice.shape);
    const std::int64_t counts = choice.shape.pass == Pass::kTurns
                                    ? row_groups(p.forward) * std::int64_t{sizeof(TurnCount)}
                                : parts_in_dq(p, choice.shape, parts) > 0 ? 0
                                                                          : parts.bytes();
    return aligned(bytes_before_turns(p.forward, choice) + counts, kCacheLine);
}

std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts& device) {
    if (p.statistics.wanted) return extents_bytes(p.forward);
    if (p.shared.stage == BackwardStage::kBegin || p.shared.stage == BackwardStage::kEnd) return 0;
    const Choice choice = choice_of(p, device);
    const std::int64_t counters = counters_bytes(p, choice);
    if (is_shared(p)) return counters;
    return counters + backward::workspace_bytes(p, /*converted=*/false, choice.dq_by, choice.shape.takes_terms);
}

/// Where everything lies that the launch does not share.
Problem problem_alone(const BackwardParams& p, const Choice& choice) {
    BackwardParams params = p;
    params.workspace = static_cast<char*>(p.workspace) + counters_bytes(p, choice);
    return problem_of(params, choice.dq_by, choice.shape.takes_terms);
}
/// dQ's buffer and the facts as the launches lay them out that share them: where the first of this one's rows are, and
/// how many more a head has.
Problem problem_shared(const BackwardParams& p, const Shape& shape) {
    const bool adds = p.shared.stage == BackwardStage::kAdd;
    BackwardParams all = p;
    all.workspace = p.shared.memory;
    if (adds) all.forward.seqlen_q = p.shared.rows;
    Problem problem = problem_of(all, DqBy::kSums, shape.takes_terms);
    static_cast<BackwardParams&>(problem) = p;
    if (!adds) return problem;
    const std::int64_t first = p.shared.first / kRowGroup, heads = p.forward.batch * p.forward.heads_q;
    problem.dq_rows += first * kRowGroup * p.forward.head_dim;
    if (problem.terms) problem.terms += first * (kRowGroup / 8);
    else problem.facts += first * (kRowGroup / 2);
    problem.more_groups = static_cast<int>((row_groups(all.forward) - row_groups(p.forward)) / heads);
    return problem;
}

template <class T>
void launch_of(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    const BackwardStage stage = p.shared.stage;
    const Choice choice = choice_of(p, device);
    const auto& [shape, parts, beside, dq_by] = choice;
    Problem problem = is_shared(p) ? problem_shared(p, shape) : problem_alone(p, choice);
    const auto prepare_rows = [&] {
        launch_rows(prepare<Sm90, T, false>, problem, stream, int{sizeof(PrepareMemory)});
    };
    if (stage == BackwardStage::kBegin) return prepare_rows();
    if (stage == BackwardStage::kEnd) return launch_rows(finish<Sm90, T>, problem, stream);

    auto* const counters = static_cast<char*>(p.workspace);
    problem.queue = reinterpret_cast<Queue*>(counters);
    auto* const counts = reinterpret_cast<unsigned*>(counters + kUnit);
    if (beside.blocks > 0) problem.prepared = counts;
    if (dq_by == DqBy::kHeads) problem.added = counts + counts_of_prepared(p.forward, choice);
    char* const turns = counters + bytes_before_turns(p.forward, choice);
    if (shape.pass == Pass::kTurns) problem.turns = reinterpret_cast<TurnCount*>(turns);
    if (parts.each > 1) {  // and no turns
        const PartsWords words = words_of(parts, shape);
        const std::int64_t in_dq = parts_in_dq(p, shape, words);
        auto* const sums = reinterpret_cast<float*>(in_dq > 0 ? static_cast<char*>(p.dq.data) + in_dq : turns);
        problem.parts = {static_cast<int>(parts.whole), parts.each, sums, words.sums + words.counts,
                         reinterpret_cast<unsigned*>(sums + words.sums)};
    }
    problem.multiprocessors = std::max(device.sm_count, 1);
    if (shape.pass == Pass::kTurns && !is_wide(p)) {
        problem.ring_batches = static_cast<int>(ring_batches(p, device));
        problem.heads_together = static_cast<int>(heads_together(p, device));
    }
    if (problem.extents) launch_rows(find_extents<Sm90>, problem, stream);
    if (beside.blocks > 0 || stage == BackwardStage::kAdd)
        launch(prepare_items<Sm90>, {dim3(problem.parts.words > 0 ? problem.multiprocessors : 1), dim3(kRowThreads)},
               stream, problem);
    else prepare_rows();
    const auto prepare_parts = [&](int blocks, const wgmma::PrepareOrder& order, unsigned begin, unsigned end) {
        if (begin == end) return;
        LaunchConfig config{dim3(static_cast<unsigned>(blocks)), dim3(wgmma::kPrepareThreads),
                            int{sizeof(wgmma::PrepareBesideMemory)}};
        config.programmatic = true;
        launch(wgmma::prepare_beside<T>, config, stream, problem, order, begin, end);
    };
    if (beside.blocks > 0) {
        prepare_parts(problem.multiprocessors, beside.order, 0, beside.ahead);
        prepare_parts(beside.blocks, beside.order, beside.ahead, static_cast<unsigned>(wgmma::parts_of_all(p.forward)));
    }
    if (dq_by == DqBy::kHeads) let_blocks_leave(problem, shape);
    shape.launch(problem, stream);
    if (dq_by == DqBy::kHeads) {
        LaunchConfig config{dim3(static_cast<unsigned>(problem.multiprocessors)), dim3(wgmma::kFinishThreads),
                            int{sizeof(wgmma::FinishMemory)}};
        config.programmatic = true;
        launch(wgmma::finish_beside<T>, config, stream, problem, shape.facts.bc,
               wgmma::FactsInDq::of(p, shape.takes_terms));
    } else if (stage == BackwardStage::kAll && dq_by == DqBy::kSums) {
        launch_rows(finish<Sm90, T>, problem, stream);
    }
}

/// Of dense calls with a band at most, whose dQ would be a sum in fp32 if each were alone.
std::int64_t shared_bytes(const BackwardParams& p, const DeviceFacts& device) {
    const bool plain = problems_of(p, /*converted=*/false) == Problems::kPlain;
    if (!plain || p.deterministic || p.statistics.wanted || dq_of(p, device) != DqBy::kSums) return 0;
    BackwardParams begins = p;
    begins.shared.stage = BackwardStage::kBegin;
    return backward::workspace_bytes(begins, /*converted=*/false, DqBy::kSums, shape_of(begins, device).takes_terms);
}

void launch_bwd_sm90(const BackwardParams& p, const DeviceFacts& device, Stream stream) {
    if (p.statistics.wanted) {
        Problem problem = problem_of_scores<Sm90>(p, p.workspace, stream);
        problem.multiprocessors = std::max(device.sm_count, 1);
        return launch_statistics(kStatisticsShapes, problem, stream);
    }
    if (p.forward.dtype == DType::kFloat16) launch_of<half>(p, device, stream);
    else launch_of<bf16>(p, device, stream);
}

/// In order and above d = 128, bwd_sm80's two passes take no longer; in short sequences of yet shorter ranges its
/// smaller tiles leave out more (docs/tuning/hopper_backward.md).
bool yields(const BackwardParams& p, const DeviceFacts&) {
    if (p.statistics.wanted) return false;  // a kernel of its own, which was not compared with bwd_sm80's in ranges
    return (p.deterministic && is_wide(p)) || (p.forward.key_ranges.data && p.forward.seqlen_k <= 512);
}

const BackwardKernelInfo kInfo = {
    with_instances({.name = "bwd_sm90",
                    .summary = "wgmma, TMA, P and dS in registers, dQ one tile late, from registers to fp32 additions",
                    .min_arch = 90,
                    .max_arch = 90,
                    .bf16_min_arch = 90,
                    .float16 = true,
                    .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim |
                                kDropout | kSinks | kBiasGradient | kDeterministic | kStatistics,
                    .auto_rank = 40},
                   kShapes),
    choose,
    workspace_bytes,
    launch_bwd_sm90,
    yields,
    /*tells=*/nullptr,
    /*tangents=*/nullptr,
    /*merges=*/nullptr,
    shared_bytes,
};
const Registration kRegistration(kInfo);

}  // namespace
}  // namespace flash_wmma::backward
