// The items (Q tiles) of a problem of wgmma_sm90, as the host plans them: how many there are, whether blocks take them
// from a queue, and which are split over the keys.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device/tile_order.cuh"
#include "forward/wgmma/mask_tiles.cuh"
#include "forward/wgmma/shapes.h"

namespace flash_wmma::wgmma_sm90 {

/// Dense problems: the order of a head's Q tiles of `br` rows, by how many keys the band shows their rows.
inline TileOrder order_of(const ForwardParams& p, int br) {
    const std::int64_t offset = p.band.bottom_right ? p.seqlen_k - p.seqlen_q : 0;
    const auto row = [&](std::int64_t x) { return static_cast<int>(std::clamp(x, -kMaxSeqlen, kMaxSeqlen)); };
    return {static_cast<int>(p.seqlen_q), br, row(p.seqlen_k - offset - p.band.right - 1), row(p.band.left - offset)};
}
/// Whether the work per tile of `br` rows varies: by the sequence, the band, or a mask or ranges of its own.
inline bool is_uneven(const ForwardParams& p, int br) {
    if (p.sequences.cu_seqlens_q) return true;
    const bool masked = p.key_ranges.data || (p.bias.data && p.bias.dtype == DType::kBool);
    return masked || order_of(p, br).shorter() > 0;
}
inline int multiprocessors(const DeviceFacts& device) { return std::max(device.sm_count, 1); }
/// The number of Q tiles of `br` rows; a lower bound for packed sequences.
inline std::int64_t items_of(const ForwardParams& p, int br) {
    const bool packed = p.sequences.cu_seqlens_q;
    return ((packed ? p.sequences.total_q : p.seqlen_q) + br - 1) / br * p.heads_q * (packed ? 1 : p.batch);
}

/// The most keys that some row of a Q tile of `br` rows sees.
inline std::int64_t most_keys(const ForwardParams& p, int br) {
    const Band& band = p.band;
    std::int64_t keys = std::min(p.seqlen_k, band.left + band.right + std::min<std::int64_t>(br, p.seqlen_q));
    if (!p.sequences.cu_seqlens_q) {
        const std::int64_t offset = band.bottom_right ? p.seqlen_k - p.seqlen_q : 0;
        const std::int64_t begin = std::max<std::int64_t>(0, offset - band.left);
        keys = std::min(keys, std::min(p.seqlen_k, p.seqlen_q + offset + band.right) - begin);
    }
    return std::max<std::int64_t>(keys, 1);
}

using Queue = unsigned;  ///< how many items were taken from it

/// Whether blocks of `br` rows take their next items from a queue in the workspace. With few or short items a queue
/// costs more than it gains.
inline bool has_queue(const ForwardParams& p, const DeviceFacts& device, int br) {
    constexpr int kItems = 2, kKeys = 512;  // least of a block, least of an item's rows
    return is_uneven(p, br) && most_keys(p, br) >= kKeys && items_of(p, br) > std::int64_t{kItems} * device.sm_count;
}

/// Bytes in front of a mask's tiles in the workspace, for the queue.
inline constexpr std::int64_t kQueueBytes = 256;
/// The tiles of a boolean mask, in the workspace.
inline MaskTiles mask_tiles(const ForwardParams& p, int br) {
    return {p, br, static_cast<char*>(p.workspace) + kQueueBytes};
}

/// Items that would leave SMs idle are split over the keys: each of the last `items`, behind `whole` others, is the
/// work of `parts` blocks (split.cuh).
struct Split {
    int whole, items, parts;

    /// Of the workspace: in fp32 every part's O, four words for a lane's m and l, and four for its statistics.
    std::int64_t bytes(const Shape& shape) const {
        const bool tells = includes(Problems::kMaximaEntropies, shape.problems) && shape.problems != Problems::kPlain;
        const int facts = tells ? 16 : 8;  // of a row: two lanes have four words for it
        return std::int64_t{items} * parts * shape.facts.br * (shape.columns + facts) * std::int64_t{sizeof(float)};
    }
    /// How long an SM works, in rows times keys, if blocks take items in rounds. Measured are a block's speed, the cost
    /// of its first tile (no products beside its softmax), and that of parts: storing and reading rows, and a grid.
    double time(const Shape& shape, const ForwardParams& p, const DeviceFacts& device) const {
        constexpr double kRow = 4.75, kGrid = 25'000;
        const Instance& tile = shape.facts;
        const int sms = multiprocessors(device);
        const auto rounds = [&](std::int64_t n) { return static_cast<double>((n + sms - 1) / sms); };
        const auto keys = static_cast<double>(most_keys(p, tile.br));
        const auto rows = static_cast<double>(std::min<std::int64_t>(tile.br, p.seqlen_q));
        const double work =
            rounds(whole) * (keys + tile.bc) + rounds(std::int64_t{items} * parts) * (keys / parts + tile.bc);
        return work * tile.br / shape.speed + (items > 0 ? kRow * rows * items * parts + kGrid : 0);
    }
};
/// Whether the last `rest` items, of the last round of blocks, are shorter than the others.
inline bool ends_with_short_items(const ForwardParams& p, int br, int rest) {
    if (!is_uneven(p, br)) return false;
    const std::int64_t shorter = p.batch * p.heads_q * order_of(p, br).shorter();
    return shorter == 0 || rest <= shorter;  // 0: by a mask or ranges
}
/// The split that finishes first: none, or into as many parts as fit one or two rounds. If the last items are short,
/// all items are split or none is; with a queue none.
inline Split split_of(const ForwardParams& p, const DeviceFacts& device, const Shape& shape) {
    constexpr int kKeys = 512, kRounds = 2;  // of a part at least, of parts at most
    const std::int64_t items = items_of(p, shape.facts.br);
    const int sms = multiprocessors(device), rest = static_cast<int>(items % sms);
    Split best{static_cast<int>(items), 0, 1};
    if (!shape.splits || p.batch_invariant || rest == 0 || has_queue(p, device, shape.facts.br)) return best;
    if (items >= sms && ends_with_short_items(p, shape.facts.br, rest)) return best;
    double least = best.time(shape, p, device);
    for (int rounds = 1; rounds <= kRounds; ++rounds) {
        const auto parts =
            static_cast<int>(std::min(std::int64_t{rounds} * sms / rest, most_keys(p, shape.facts.br) / kKeys));
        const Split split{static_cast<int>(items - rest), rest, parts};
        const double time = parts > 1 ? split.time(shape, p, device) : least;
        if (time < least) best = split, least = time;
    }
    return best;
}

}  // namespace flash_wmma::wgmma_sm90
