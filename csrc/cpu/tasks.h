// What the drivers of the CPU kernels share (attention.cpp, backward.cpp): the compute unit that runs, sequences of a
// packed call, and tasks on threads.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>

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

/// Sequence b of a packed call as dense attention.
inline ForwardParams sequence(const ForwardParams& packed, std::int64_t b) {
    const Sequences& s = packed.sequences;
    const Run queries(s.cu_seqlens_q, b, s.total_q, packed.seqlen_q),
        keys(s.cu_seqlens_k, b, s.total_k, packed.seqlen_k);
    ForwardParams p = packed;
    p.sequences = {};
    p.batch = 1;
    p.seqlen_q = queries.length;
    p.seqlen_k = s.seqused_k ? std::clamp(std::int64_t{s.seqused_k[b]}, std::int64_t{0}, keys.length) : keys.length;
    p.q.data = moved(p.q.data, queries.begin * p.q.row, p.dtype);
    p.k.data = moved(p.k.data, keys.begin * p.k.row, p.dtype);
    p.v.data = moved(p.v.data, keys.begin * p.v.row, p.dtype);
    p.o.data = moved(p.o.data, queries.begin * p.o.row, p.out_dtype);
    p.lse += queries.begin;
    if (p.bias.data) p.bias.data = moved(const_cast<void*>(p.bias.data), b * p.bias.batch, p.bias.dtype);
    if (p.alibi_slopes) p.alibi_slopes += b * p.alibi_batch_stride;
    if (p.key_ranges.data) p.key_ranges.data += queries.begin * p.key_ranges.query;
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
