// Where the rows of a sequence lie in a key/value cache. The CPU kernel and CUDA kernels share this: it is constexpr,
// so that nvcc takes it for both. Always inline: units for one instruction set must not emit functions (cpu/isa.h).
#pragma once

#include "attention.h"

namespace flash_wmma {

/// The rows of one sequence in a cache (attention.h, Sequences). Whatever lengths and page numbers are, the rows lie in
/// the cache, and only the entries of rows in use are read from the table.
struct CachedRows {
    const std::int32_t* pages;  ///< of the sequence; null: it is page `page`
    int page, num_pages, page_size;
    int first, count;  ///< row of key 0, number of keys

    /// Of `count` keys, key 0 in row `first`.
    [[gnu::always_inline]] constexpr CachedRows(const Sequences& s, int sequence, int first_row, int keys)
        : pages(s.page_table ? s.page_table + sequence * s.page_table_stride : nullptr),
          page(sequence),
          num_pages(s.num_pages),
          page_size(s.page_size),
          first(first_row),
          count(keys) {}
    /// With a sequence's entries of leftpad (0: none) and seqused_k, whatever they are.
    [[gnu::always_inline]] constexpr CachedRows(const Sequences& s, std::int64_t capacity, int sequence, int leftpad,
                                                int used)
        : CachedRows(s, sequence, clamp(leftpad, static_cast<int>(capacity)), 0) {
        count = clamp(clamp(used, static_cast<int>(capacity)) - first, static_cast<int>(capacity));
    }
    [[gnu::always_inline]] constexpr CachedRows(const Sequences& s, std::int64_t capacity, int sequence)
        : CachedRows(s, capacity, sequence, s.leftpad ? s.leftpad[sequence] : 0, s.seqused_k[sequence]) {}

    /// Where key j is, j < count: a row of the sequence's `run`-th page.
    struct Place {
        int run, row;
    };
    [[gnu::always_inline]] constexpr Place place(int j) const {
        const int row = first + j, run = pages ? row / page_size : 0;
        return {run, row - run * page_size};
    }
    /// The sequence's `run`-th page, as the table has it: what looks ahead need not wait for it.
    [[gnu::always_inline]] constexpr int page_of(int run) const { return pages ? pages[run] : page; }
    /// Elements from the cache's first row of a head to a row of a page.
    [[gnu::always_inline]] constexpr std::int64_t offset(const Rows& rows, int of_page, int row) const {
        return (pages ? clamp(of_page, num_pages - 1) : page) * rows.batch + row * rows.row;
    }
    /// The same to key j.
    [[gnu::always_inline]] constexpr std::int64_t offset(const Rows& rows, int j) const {
        const Place at = place(j);
        return offset(rows, page_of(at.run), at.row);
    }
    /// Whether key 0 and all others lie at equal distances.
    [[gnu::always_inline]] constexpr bool contiguous() const {
        return !pages || count == 0 || first / page_size == (first + count - 1) / page_size;
    }

  private:
    [[gnu::always_inline]] static constexpr int clamp(int x, int largest) {
        return x < 0 ? 0 : x > largest ? largest : x;
    }
};

}  // namespace flash_wmma
