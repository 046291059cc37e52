// What the drivers of the CPU kernels share (attention.cpp, backward.cpp): the compute unit that runs, sequences of a
// packed call, and tasks on threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

#include "cached_rows.h"
#include "cpu/isa.h"
#include "cpu/threads.h"
#include "registry.h"

namespace flash_wmma::cpu {

/// The best compute unit that the processor supports, or the one that FLASH_WMMA_CPU_ISA names.
const IsaKernel& select_isa();

inline std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// The rows of a sequence in a packed tensor (attention.h), `longest` at most.
struct Run {
    std::int64_t begin, length;
    Run(const std::int32_t* cu_seqlens, std::int64_t b, std::int64_t total, std::int64_t longest) {
        begin = std::clamp(std::int64_t{cu_seqlens[b]}, std::int64_t{0}, total);
        length = std::min(std::clamp(std::int64_t{cu_seqlens[b + 1]}, begin, total) - begin, longest);
    }
};

inline void* moved(void* data, std::int64_t elements, DType dtype) {
    return static_cast<char*>(data) + elements * (dtype == DType::kFloat32 ? 4 : dtype == DType::kBool ? 1 : 2);
}

/// Points `one` to the keys of sequence b of `all`, packed or in a cache.
inline void take_keys(ForwardParams& one, const ForwardParams& all, std::int64_t b) {
    const Sequences& s = all.sequences;
    std::int64_t k = 0, v = 0;  // elements to its first row
    if (s.page_size) {
        const CachedRows rows(s, all.seqlen_k, static_cast<int>(b));
        one.seqlen_k = rows.count;
        if (!rows.contiguous()) {  // attention.inl gathers the rows
            one.sequences.seqused_k = s.seqused_k + b;
            if (s.leftpad) one.sequences.leftpad = s.leftpad + b;
            one.sequences.page_table = rows.pages;
            one.sequences.page_size = s.page_size;
            one.sequences.num_pages = s.num_pages;
        } else if (rows.count > 0) {
            k = rows.offset(all.k, 0), v = rows.offset(all.v, 0);
        }
    } else {
        const Run keys(s.cu_seqlens_k, b, s.total_k, all.seqlen_k);
        one.seqlen_k =
            s.seqused_k ? std::clamp(std::int64_t{s.seqused_k[b]}, std::int64_t{0}, keys.length) : keys.length;
        k = keys.begin * all.k.row, v = keys.begin * all.v.row;
    }
    one.k.data = moved(all.k.data, k, all.dtype);
    one.v.data = moved(all.v.data, v, all.dtype);
}

/// Sequence b of a packed call, or of one with a cache, as dense attention. The keys of a cache may lie in pages still.
inline ForwardParams sequence(const ForwardParams& all, std::int64_t b) {
    const Sequences& s = all.sequences;
    ForwardParams p = all;
    p.sequences = {};
    p.batch = 1;
    p.dropout.origin.entry += b;
    take_keys(p, all, b);
    std::int64_t q = b * p.q.batch, o = b * p.o.batch;
    if (s.cu_seqlens_q) {
        const Run queries(s.cu_seqlens_q, b, s.total_q, all.seqlen_q);
        p.seqlen_q = queries.length;
        q = queries.begin * p.q.row, o = queries.begin * p.o.row;
        p.lse += queries.begin;
        if (p.key_ranges.data) p.key_ranges.data += queries.begin * p.key_ranges.query;  // a cache has none
    } else {
        p.lse += b * p.lse_batch;
    }
    p.q.data = moved(p.q.data, q, p.dtype);
    p.o.data = moved(p.o.data, o, p.out_dtype);
    if (p.bias.data) p.bias.data = moved(const_cast<void*>(p.bias.data), b * p.bias.batch, p.bias.dtype);
    if (p.alibi_slopes) p.alibi_slopes += b * p.alibi_batch_stride;
    return p;
}

/// Runs work(task, worker) for every task in [0, tasks), each as soon as a worker is free.
template <class Work>
void run_tasks(std::int64_t workers, std::int64_t tasks, const Work& work) {
    std::atomic<std::int64_t> next{0};
    const auto drain = [&](std::int64_t worker) {
        for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) work(task, worker);
    };
    if (workers == 1) drain(0);
    else in_parallel(workers, drain);
}

}  // namespace flash_wmma::cpu
