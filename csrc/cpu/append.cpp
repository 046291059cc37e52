// append_rows on CPUs (cache/append.h): what csrc/cache/append.cu does, one token after the other.
#include <cstring>

#include "cache/places.h"
#include "cpu/tasks.h"

namespace flash_wmma::cpu {
namespace {

/// A row of the first head.
struct FirstRow {
    void* data;
    std::int64_t head;  ///< elements to the next head's
};

class Appending {
  public:
    explicit Appending(const AppendParams& params) : p_(params), isa_(select_isa()) {}

    void run() const {
        constexpr std::int64_t kGrain = 1 << 15;  // elements that are worth waking a thread for
        constexpr std::int64_t kTokens = 32;  // of a task: one behind the other they lie in the same pages of memory
        for (int b = 0; b < p_.batch; ++b) p_.seqlens[b] = new_length(p_, b);
        const std::int64_t queries = p_.queries.count, keys = p_.keys.count;
        const std::int64_t elements =
            queries * p_.heads_q * p_.head_dim + keys * p_.heads_k * (p_.head_dim + p_.head_dim_v);
        const std::int64_t workers = std::clamp(elements / kGrain, std::int64_t{1}, thread_count());
        run_tasks(workers, ceil_div(queries + keys, kTokens), [&](std::int64_t task, std::int64_t) {
            const std::int64_t end = std::min((task + 1) * kTokens, queries + keys);
            for (std::int64_t i = task * kTokens; i < end; ++i)
                if (i < queries) write_query(token_of(p_.queries, i, p_.batch));
                else write_key(token_of(p_.keys, i - queries, p_.batch));
        });
    }

  private:
    void write_query(const Token& query) const {
        write_turned(row(p_.q, query), row(p_.rotated_q, query), p_.heads_q, query, p_.rotary.queries_advance);
    }
    void write_key(const Token& key) const {
        const Place place = place_of(p_, key);
        if (!place.exists) return;
        write_turned(row(p_.k, key), row(p_.k_cache, place), p_.heads_k, key, true);
        copy(row(p_.v, key), row(p_.v_cache, place), p_.heads_k, 0, p_.head_dim_v);
    }

    template <class Where>
    FirstRow row(const Rows& rows, const Where& where) const {
        return {moved(rows.data, where.offset(rows), p_.dtype), rows.head};
    }

    /// All heads of a query's or a key's row, rotated if there are tables.
    void write_turned(FirstRow from, FirstRow to, int heads, const Token& token, bool advances) const {
        const Rotary& r = p_.rotary;
        copy(from, to, heads, 2 * r.half, p_.head_dim);
        if (r.half == 0) return;
        const std::int64_t turn = turn_of(r, token, advances);
        const void *const cos = moved(const_cast<void*>(r.cos), turn * r.cos_row, p_.dtype),
                          *const sin = moved(const_cast<void*>(r.sin), turn * r.sin_row, p_.dtype);
        for (int h = 0; h < heads; ++h)
            isa_.rotate(moved(from.data, h * from.head, p_.dtype), moved(to.data, h * to.head, p_.dtype), p_.dtype, cos,
                        sin, r.half, r.interleaved);
    }
    /// Columns [begin, end) of all heads.
    void copy(FirstRow from, FirstRow to, int heads, int begin, int end) const {
        if (begin == end) return;
        const auto bytes = static_cast<std::size_t>(end - begin) * (p_.dtype == DType::kFloat32 ? 4 : 2);
        for (int h = 0; h < heads; ++h)
            std::memcpy(moved(to.data, h * to.head + begin, p_.dtype),
                        moved(from.data, h * from.head + begin, p_.dtype), bytes);
    }

    const AppendParams& p_;
    const IsaKernel& isa_;
};

}  // namespace

void append_rows(const AppendParams& params) { Appending(params).run(); }

}  // namespace flash_wmma::cpu
