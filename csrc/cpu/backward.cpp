// The native CPU kernel `bwd_cpu`: gradients for fp32, fp16 and bf16. Arithmetic is fp32 throughout, or by
// other instructions as exact (pairs.inl).
//
// This file splits the work (backward.inl is the algorithm). Every batch entry or packed sequence is an entry. For each
// of its key/value heads, a few tasks share the keys, split by shape alone. Each task writes its own part of dq; the
// parts are added in order afterwards. Tasks that add to the same elements of dbias run one after the other. Statistics
// have a task for each entry and query head.
#include <vector>

#include "cpu/tasks.h"

namespace flash_wmma::cpu {
namespace {

/// Moves the pointers to numbers of each query by `queries`, and those to numbers of each key by `keys`.
void move_numbers(BackwardParams& p, std::int64_t queries, std::int64_t keys) {
    const auto move = [](std::int64_t by, auto&... pointers) {
        ((pointers = pointers ? pointers + by : nullptr), ...);
    };
    move(queries, p.dlse, p.dentropy, p.forward.row_max, p.forward.entropy, p.statistics.row_sum);
    move(keys, p.dcolumn_sum, p.dslopes, p.statistics.key_weights, p.statistics.column_sum);
}

/// One batch entry, or one packed sequence, as a problem with batch 1.
BackwardParams entry_of(const BackwardParams& all, std::int64_t b) {
    const ForwardParams& f = all.forward;
    BackwardParams p = all;
    if (f.sequences.cu_seqlens_q) {
        p.forward = sequence(f, b);
        const Run queries(f.sequences.cu_seqlens_q, b, f.sequences.total_q, f.seqlen_q),
            keys(f.sequences.cu_seqlens_k, b, f.sequences.total_k, f.seqlen_k);
        for (Rows* t : {&p.dout, &p.dq}) t->data = moved(t->data, queries.begin * t->row, f.out_dtype);
        for (Rows* t : {&p.dk, &p.dv}) t->data = moved(t->data, keys.begin * t->row, f.out_dtype);
        move_numbers(p, queries.begin, keys.begin);
    } else {
        ForwardParams& one = p.forward;
        one.batch = 1;
        one.dropout.origin.entry += b;
        for (Rows* t : {&one.q, &one.k, &one.v}) t->data = moved(t->data, b * t->batch, f.dtype);
        for (Rows* t : {&one.o, &p.dout, &p.dq, &p.dk, &p.dv}) t->data = moved(t->data, b * t->batch, f.out_dtype);
        one.lse += b * f.lse_batch;
        move_numbers(p, b * f.lse_batch, b * p.key_batch);
        if (one.bias.data) one.bias.data = moved(const_cast<void*>(f.bias.data), b * f.bias.batch, f.bias.dtype);
        if (one.alibi_slopes) one.alibi_slopes += b * f.alibi_batch_stride;
        if (one.key_ranges.data) one.key_ranges.data += b * f.key_ranges.batch;
    }
    if (p.dbias.data) p.dbias.data += b * p.dbias.batch;
    return p;
}

struct Entry {
    BackwardParams params;
    std::int64_t splits, split_keys, part;  ///< part: floats of one split's dq
    std::int64_t first_delta, first_dq;     ///< floats into their arrays
    std::int64_t rows() const { return params.forward.heads_q * params.forward.seqlen_q; }
};

/// The work of a call, and where its memory lies in the workspace.
struct Plan {
    const IsaKernel& isa = select_isa();
    std::vector<Entry> entries;
    std::int64_t splits = 1;  ///< the most of any entry
    std::int64_t deltas = 0, parts = 0, scratch, stride, workers;

    explicit Plan(const BackwardParams& p) {
        // Enough tasks for the threads of a large machine, each with enough keys to pay for its part of dq.
        constexpr std::int64_t kTasks = 64, kMinSplitKeys = 4 * kTileKeys;
        constexpr double kWorkerGrain = 1e6;  // multiply-adds that are worth waking a thread for
        double work = 0;
        const ForwardParams& f = p.forward;
        scratch = ceil_div(isa.backward_scratch(f), 16) * 16;
        stride = isa.query_stride(f);
        const std::int64_t wanted = std::max(std::int64_t{1}, kTasks / (f.batch * f.heads_k));
        for (std::int64_t b = 0; b < f.batch; ++b) {
            Entry e{};
            e.params = entry_of(p, b);
            const ForwardParams& one = e.params.forward;
            if (one.seqlen_q == 0 || one.seqlen_k == 0) continue;
            work += 2.5 * static_cast<double>(one.heads_q * one.seqlen_q) * static_cast<double>(one.seqlen_k) *
                    (one.head_dim + one.head_dim_v);
            const std::int64_t tiles = ceil_div(one.seqlen_k, kTileKeys);
            e.split_keys = std::max(kMinSplitKeys, ceil_div(tiles, wanted) * kTileKeys);
            e.splits = ceil_div(one.seqlen_k, e.split_keys);
            e.part = e.rows() * stride;
            e.first_delta = deltas;
            e.first_dq = parts;
            deltas += ceil_div(e.rows(), 16) * 16;
            parts += e.splits * e.part;
            splits = std::max(splits, e.splits);
            entries.push_back(e);
        }
        const std::int64_t threads = thread_count();
        workers = std::clamp(static_cast<std::int64_t>(std::min(work / kWorkerGrain, 1e6)), std::int64_t{1}, threads);
    }
    std::int64_t floats() const { return workers * scratch + deltas + parts; }
};

std::int64_t workspace_bytes(const BackwardParams& p, const DeviceFacts&) {
    return Plan(p).floats() * static_cast<std::int64_t>(sizeof(float));
}

void launch(const BackwardParams& p, const DeviceFacts&, Stream) {
    const Plan plan(p);
    const ForwardParams& f = p.forward;
    float *scratch = static_cast<float*>(p.workspace), *deltas = scratch + plan.workers * plan.scratch,
          *parts = deltas + plan.deltas;
    const auto count = static_cast<std::int64_t>(plan.entries.size());
    if (p.statistics.wanted)
        return run_tasks(plan.workers, count * f.heads_q, [&](std::int64_t t, std::int64_t worker) {
            plan.isa.statistics(plan.entries[static_cast<std::size_t>(t / f.heads_q)].params, t % f.heads_q,
                                scratch + worker * plan.scratch);
        });

    run_tasks(plan.workers, count * f.heads_q, [&](std::int64_t t, std::int64_t worker) {
        const Entry& e = plan.entries[static_cast<std::size_t>(t / f.heads_q)];
        plan.isa.delta(e.params, t % f.heads_q, 0, e.params.forward.seqlen_q, deltas + e.first_delta,
                       scratch + worker * plan.scratch);
    });

    // Tasks form a group if they have the same (entry, head, split), without the dimensions over which dbias is
    // broadcast.
    const bool shared = p.dbias.data;
    const std::int64_t by_entry = shared && p.dbias.batch == 0 ? 1 : count,
                       by_head = shared && p.dbias.head == 0 ? 1 : f.heads_k,
                       by_split = shared && p.dbias.key == 0 ? 1 : plan.splits;
    run_tasks(plan.workers, by_entry * by_head * by_split, [&](std::int64_t group, std::int64_t worker) {
        for (std::int64_t i = group / by_split / by_head; i < count; i += by_entry) {
            const Entry& e = plan.entries[static_cast<std::size_t>(i)];
            for (std::int64_t head = group / by_split % by_head; head < f.heads_k; head += by_head)
                for (std::int64_t split = group % by_split; split < e.splits; split += by_split) {
                    const std::int64_t begin = split * e.split_keys;
                    const BackwardTask task{head, begin, std::min(begin + e.split_keys, e.params.forward.seqlen_k),
                                            deltas + e.first_delta,
                                            parts + e.first_dq + split * e.part + head * (e.part / f.heads_k)};
                    plan.isa.backward(e.params, task, scratch + worker * plan.scratch);
                }
        }
    });

    run_tasks(plan.workers, count * f.heads_q, [&](std::int64_t t, std::int64_t worker) {
        const Entry& e = plan.entries[static_cast<std::size_t>(t / f.heads_q)];
        const std::int64_t head = t % f.heads_q, rows = e.params.forward.seqlen_q;
        for (std::int64_t i = 0; i < rows; ++i)
            plan.isa.finish_query(e.params, head, i, parts + e.first_dq + (head * rows + i) * plan.stride,
                                  static_cast<int>(e.splits), e.part, scratch + worker * plan.scratch);
    });
}

const BackwardKernelInfo kKernel = {
    {.name = "bwd_cpu",
     .summary = "native CPU kernel, as exact as fp32 arithmetic, a block of keys a task",
     .bf16_min_arch = 1,
     .float32 = true,
     .float16 = true,
     .max_head_dim = kMaxHeadDim,
     .features = kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks |
                 kDeterministic | kBiasGradient | kDeterministicBiasGradient | kStatistics | kStatisticsGradient |
                 kSlopesGradient,
     .auto_rank = 100},
    /*choose=*/nullptr,
    workspace_bytes,
    launch,
};
const Registration registration(kKernel);

}  // namespace
}  // namespace flash_wmma::cpu
