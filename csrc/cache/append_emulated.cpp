// append_rows as a program of the emulator (flash_wmma.emulator.Program): its source, unchanged.
#include <entry.h>

#include "cache/append.cu"

namespace flash_wmma {
namespace {

/// `sizes` and `strides`: the numbers of AppendParams in the order that they are read here.
void run(int dtype, const std::int64_t* sizes, const std::int64_t* strides, const void* q, void* rotated_q,
         const void* k, const void* v, void* k_cache, void* v_cache, const std::int32_t* cache_seqlens,
         const std::int32_t* page_table, const std::int32_t* cu_seqlens_q, const std::int32_t* cu_seqlens_k,
         const void* cos, const void* sin, const std::int32_t* places, std::int32_t* seqlens) {
    const auto next = [&]() { return *sizes++; };
    const auto number = [&]() { return static_cast<int>(next()); };
    const auto rows = [&](const void* data) {
        const Rows r{const_cast<void*>(data), strides[0], strides[1], strides[2]};
        strides += 3;
        return r;
    };
    AppendParams p{};
    p.dtype = static_cast<DType>(dtype);
    p.batch = number(), p.heads_q = number(), p.heads_k = number();
    p.head_dim = number(), p.head_dim_v = number();
    p.queries.count = next(), p.queries.per_sequence = next(), p.queries.cu_seqlens = cu_seqlens_q;
    p.keys.count = next(), p.keys.per_sequence = next(), p.keys.cu_seqlens = cu_seqlens_k;
    p.table_columns = next(), p.num_pages = next(), p.page_size = next();
    p.rotary = {cos, sin, 0, 0, next(), number(), false, false, places};
    p.rotary.cos_row = p.rotary.sin_row = p.rotary.half;
    p.rotary.interleaved = number() != 0, p.rotary.queries_advance = number() != 0;
    p.q = rows(q), p.rotated_q = rows(rotated_q), p.k = rows(k), p.v = rows(v);
    p.k_cache = rows(k_cache), p.v_cache = rows(v_cache);
    p.cache_seqlens = cache_seqlens, p.page_table = page_table, p.seqlens = seqlens;
    append_rows(p, nullptr);
}

const Entry kAppend("append", run);

}  // namespace
}  // namespace flash_wmma
