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

    [[gnu::always_inline]] constexpr CachedRows(const Sequences& s, std::int64_t capacity, int sequence)
        : pages(s.page_table ? s.page_table + sequence * s.page_table_stride : nullptr),
          page(sequence),
          num_pages(s.num_pages),
          page_size(s.page_size),
          first(s.leftpad ? clamp(s.leftpad[sequence], static_cast<int>(capacity)) : 0),
          count(clamp(clamp(s.seqused_k[sequence], static_cast<int>(capacity)) - first, static_cast<int>(capacity))) {}

    /// Where key j is, j < count. The page is as the table has it, so that what looks ahead need not wait for it.
    struct Place {
        int page, row;
    };
    [[gnu::always_inline]] constexpr Place place(int j) const {
        const int row = first + j, run = pages ? row / page_size : 0;
        return {pages ? pages[run] : page, row - run * page_size};
    }
    /// Elements from the cache's first row of a head to a place.
    [[gnu::always_inline]] constexpr std::int64_t offset(const Rows& rows, const Place& at) const {
        return (pages ? clamp(at.page, num_pages - 1) : page) * rows.batch + at.row * rows.row;
    }
    [[gnu::always_inline]] constexpr std::int64_t offset(const Rows& rows, int j) const {
        return offset(rows, place(j));
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
