// flash_wmma::append_kv.
#include "cache/append.h"
#include "torch/ops.h"

namespace flash_wmma {

// Absent from a build without CUDA kernels, hence weak.
__attribute__((weak)) void append_rows(const AppendParams& params, Stream stream);

namespace {

/// Rows that are read: the argument, or a contiguous copy if a row's elements are not adjacent.
struct Adjacent {
    OptionalTensor copy;
    Rows rows;

    explicit Adjacent(const Operand& t) : rows(rows_of(t.data, t.dim, t.strides)) {
        if (t.sizes[t.dim - 1] <= 1 || t.strides[t.dim - 1] == 1) return;
        copy = torch::stable::contiguous(t.tensor);
        const Operand made(*copy, t.name);
        rows = rows_of(made.data, made.dim, made.strides);
    }
};

/// A cache: its own memory or, if a row's elements are not adjacent, a copy that is brought back.
struct WrittenCache {
    const Operand& cache;
    Adjacent kept;

    explicit WrittenCache(const Operand& t) : cache(t), kept(t) {}
    void bring_back() {
        if (!kept.copy) return;
        Tensor own = cache.tensor;
        torch::stable::copy_(own, *kept.copy);
    }
};

/// A contiguous int32 tensor (n) on the device of `like`, or null. `kept` holds it.
const std::int32_t* numbers(const OptionalTensor& t, const char* name, int64_t n, const Operand& like,
                            OptionalTensor& kept) {
    if (!t) return nullptr;
    kept = torch::stable::contiguous(*t);
    const Operand x(*kept, name);
    if (x.dtype != codes().int32 || x.dim != 1 || x.sizes[0] != n || !x.same_device(like))
        x.refuse("(" + std::to_string(n) + "), int32, on k's device");
    return static_cast<const std::int32_t*>(x.data);
}

void check(bool holds, const Operand& t, const std::string& allowed) {
    if (!holds) t.refuse(allowed);
}

/// (B, H, N, d), or packed (total, H, d).
Tokens tokens_of(const Operand& t, const std::int32_t* cu_seqlens) {
    if (cu_seqlens) return {t.sizes[0], 0, cu_seqlens};
    return {t.sizes[0] * t.sizes[2], t.sizes[2], nullptr};
}

/// Sequences of packed tokens.
int64_t sequences_of(const Tensor& cu_seqlens_k) {
    const Operand cu(cu_seqlens_k, "cu_seqlens_k");
    check(cu.dim == 1 && cu.sizes[0] > 0, cu, "(B + 1)");
    return cu.sizes[0] - 1;
}

}  // namespace

std::tuple<Tensor, Tensor> append_kv(const Tensor& k_cache, const Tensor& v_cache, const Tensor& k_tensor,
                                     const Tensor& v_tensor, const Tensor& cache_seqlens,
                                     const OptionalTensor& page_table, const OptionalTensor& cu_seqlens_k,
                                     const OptionalTensor& q_tensor, const OptionalTensor& cu_seqlens_q,
                                     const OptionalTensor& rotary_cos, const OptionalTensor& rotary_sin,
                                     const OptionalTensor& rotary_seqlens, bool queries_advance, bool interleaved) {
    const Operand ks(k_cache, "k_cache"), vs(v_cache, "v_cache"), k(k_tensor, "k"), v(v_tensor, "v");
    const bool on_gpu = k.device_type == codes().cuda;
    if (on_gpu && !append_rows)
        throw std::runtime_error(
            "flash_wmma was built without CUDA kernels: install nvcc and rebuild it (README, Installation)");
    AppendParams p{};
    p.dtype = k.element_type("float32, float16, bfloat16");
    if (p.dtype == DType::kBool) invalid("k.dtype: got bool, allowed: float32, float16, bfloat16");
    p.table_columns = -1;
    check(ks.dim == 4 && vs.dim == 4, ks, "(pages, H, page_size, d), as v_cache");
    check(k.dim == (cu_seqlens_k ? 3 : 4) && v.dim == k.dim, k, cu_seqlens_k ? "(total, H, d)" : "(B, H, N, d)");
    for (int64_t i = 0; i + 1 < 4; ++i) {
        check(ks.sizes[i] == vs.sizes[i], vs, "k_cache's sizes but for the last");
        check(i + 1 >= k.dim || k.sizes[i] == v.sizes[i], v, "k's sizes but for the last");
    }
    for (const auto& [t, cache] : {std::pair(&k, &ks), std::pair(&v, &vs)})
        check(t->sizes[1] == cache->sizes[1] && t->sizes[t->dim - 1] == cache->sizes[3] && t->dtype == k.dtype &&
                  cache->dtype == k.dtype && t->same_device(k) && cache->same_device(k),
              *t, "heads, head dim, dtype and device of its cache, " + cache->shape());

    const int64_t batch = cu_seqlens_k ? sequences_of(*cu_seqlens_k) : k.sizes[0];
    OptionalTensor kept[4], table;
    p.batch = static_cast<std::int32_t>(batch);
    p.heads_k = static_cast<std::int32_t>(ks.sizes[1]);
    p.head_dim = static_cast<int>(ks.sizes[3]), p.head_dim_v = static_cast<int>(vs.sizes[3]);
    p.cache_seqlens = numbers(cache_seqlens, "cache_seqlens", batch, k, kept[0]);
    p.keys = tokens_of(k, numbers(cu_seqlens_k, "cu_seqlens_k", batch + 1, k, kept[1]));
    p.num_pages = ks.sizes[0], p.page_size = ks.sizes[2];
    if (page_table) {
        table = torch::stable::contiguous(*page_table);
        const Operand x(*table, "page_table");
        check(x.dim == 2 && x.sizes[0] == batch && x.dtype == codes().int32 && x.same_device(k), x,
              "(B, n), int32, on k's device");
        p.page_table = static_cast<const std::int32_t*>(x.data);
        p.table_columns = x.sizes[1];
    }
    const Adjacent k_rows(k), v_rows(v);
    WrittenCache k_written(ks), v_written(vs);
    p.k = k_rows.rows, p.v = v_rows.rows;
    p.k_cache = k_written.kept.rows, p.v_cache = v_written.kept.rows;

    // What is rotated
    OptionalTensor kept_tables[2];
    std::optional<Operand> q;
    std::optional<Adjacent> q_rows;
    Tensor rotated = empty<1>({0}, {1}, k.dtype, k);
    if (rotary_cos) {
        if (!rotary_sin) invalid("rotary_sin: got None, allowed: a tensor beside rotary_cos");
        kept_tables[0] = torch::stable::contiguous(*rotary_cos),
        kept_tables[1] = torch::stable::contiguous(*rotary_sin);
        const Operand cos(*kept_tables[0], "rotary_cos"), sin(*kept_tables[1], "rotary_sin");
        for (const Operand* t : {&cos, &sin})
            check(t->dim == 2 && t->sizes[0] == cos.sizes[0] && t->sizes[1] == cos.sizes[1] && t->sizes[0] > 0 &&
                      2 * t->sizes[1] <= ks.sizes[3] && t->dtype == k.dtype && t->same_device(k),
                  *t, "(rows, at most d / 2), k's dtype and device, both tables alike");
        p.rotary = {cos.data,       sin.data,        cos.strides[0],
                    sin.strides[0], cos.sizes[0],    static_cast<int>(cos.sizes[1]),
                    interleaved,    queries_advance, p.cache_seqlens};
        if (rotary_seqlens) p.rotary.places = numbers(rotary_seqlens, "rotary_seqlens", batch, k, kept[2]);
        if (q_tensor) {
            q.emplace(*q_tensor, "q");
            check(q->dim == (cu_seqlens_q ? 3 : 4) && q->sizes[q->dim - 1] == ks.sizes[3] && q->dtype == k.dtype &&
                      q->same_device(k) && (cu_seqlens_q || q->sizes[0] == batch),
                  *q, "(B, Hq, N, d), or packed (total, Hq, d), k's d, dtype and device");
            p.heads_q = static_cast<std::int32_t>(q->sizes[1]);
            p.queries = tokens_of(*q, numbers(cu_seqlens_q, "cu_seqlens_q", batch + 1, k, kept[3]));
            q_rows.emplace(*q);
            p.q = q_rows->rows;
            // Rows of all heads side by side, as they are read
            if (q->dim == 4) {
                const std::array<int64_t, 4> sizes{q->sizes[0], q->sizes[1], q->sizes[2], q->sizes[3]};
                rotated = empty(sizes, row_strides(sizes, true), k.dtype, k);
            } else {
                const std::array<int64_t, 3> sizes{q->sizes[0], q->sizes[1], q->sizes[2]};
                rotated = empty(sizes, contiguous(sizes), k.dtype, k);
            }
            const Operand made(rotated, "q");
            p.rotated_q = rows_of(made.data, made.dim, made.strides);
        }
    }
    Tensor seqlens = empty<1>({batch}, {1}, codes().int32, k);
    p.seqlens = static_cast<std::int32_t*>(data_of(seqlens));
    if (batch > 0) {
        if (on_gpu) {
            const torch::stable::accelerator::DeviceGuard guard(k.device_index);
            append_rows(p, current_stream(k.device_index));
        } else {
            cpu::append_rows(p);
        }
        k_written.bring_back(), v_written.bring_back();
    }
    return {std::move(rotated), std::move(seqlens)};
}

}  // namespace flash_wmma
