// Where the tokens are that append_rows writes: in their sequences, in the cache, in the rotary tables. The CPU's code
// and the CUDA kernel share this: it is constexpr, so that nvcc takes it for both.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "cache/append.h"

namespace flash_wmma {

struct Token {
    int sequence;
    std::int64_t at;   // in its sequence
    std::int64_t row;  // of the tensors, from the sequence's first; packed: from the first of all

    /// Elements to the token's row of the first head.
    [[gnu::always_inline]] constexpr std::int64_t offset(const Rows& rows) const {
        return sequence * rows.batch + row * rows.row;
    }
};

/// Token i. What lies behind the last packed sequence counts as the last one's.
[[gnu::always_inline]] constexpr Token token_of(const Tokens& tokens, std::int64_t i, int batch) {
    if (!tokens.cu_seqlens) {
        const int sequence = static_cast<int>(i / tokens.per_sequence);
        const std::int64_t at = i - sequence * tokens.per_sequence;
        return {sequence, at, at};
    }
    // The first sequence that ends behind i
    int low = 0, high = batch - 1;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (tokens.cu_seqlens[middle + 1] > i) high = middle;
        else low = middle + 1;
    }
    return {low, i - tokens.cu_seqlens[low], i};
}

/// Where a new key goes, if it has a place.
struct Place {
    bool exists;
    std::int64_t page, row;

    /// Elements to the row of the first head.
    [[gnu::always_inline]] constexpr std::int64_t offset(const Rows& cache) const {
        return page * cache.batch + row * cache.row;
    }
};

[[gnu::always_inline]] constexpr Place place_of(const AppendParams& p, const Token& key) {
    const std::int64_t at = p.cache_seqlens[key.sequence] + key.at;
    const bool has_table = p.table_columns >= 0;
    const std::int64_t end = has_table ? p.page_size * p.table_columns : p.page_size;
    // Behind the end of the last packed sequence there may be rows of nobody
    const bool own = key.at >= 0 && (!p.keys.cu_seqlens || key.row < p.keys.cu_seqlens[key.sequence + 1]);
    if (!own || at < 0 || at >= end) return {false, 0, 0};
    const std::int64_t run = at / p.page_size;
    const std::int64_t page =
        has_table ? p.page_table[key.sequence * p.table_columns + run] : std::int64_t{key.sequence};
    return {page >= 0 && page < p.num_pages, page, at - run * p.page_size};
}

/// The row of the rotary tables for a token. `advances`: tokens of a sequence are as far from each other there as here;
/// else all are at the first one's.
[[gnu::always_inline]] constexpr std::int64_t turn_of(const Rotary& rotary, const Token& token, bool advances) {
    const std::int64_t place = rotary.places[token.sequence] + (advances ? token.at : 0);
    return std::max(std::int64_t{0}, std::min(place, rotary.rows - 1));
}

/// The length of a sequence with its new keys.
[[gnu::always_inline]] constexpr std::int32_t new_length(const AppendParams& p, int sequence) {
    const std::int32_t* const cu = p.keys.cu_seqlens;
    const std::int64_t more = cu ? std::int64_t{cu[sequence + 1]} - cu[sequence] : p.keys.per_sequence;
    constexpr std::int64_t kMost = std::numeric_limits<std::int32_t>::max();
    return static_cast<std::int32_t>(std::min(p.cache_seqlens[sequence] + more, kMost));
}

}  // namespace flash_wmma
