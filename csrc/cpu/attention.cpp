// The native CPU kernel `cpu`: FlashAttention-2 forward for fp32, fp16 and bf16. Arithmetic is fp32
// throughout, or by other instructions as exact (pairs.inl).
//
// This file splits the work and runs it on torch's threads; attention.inl is the algorithm; attention_<isa>.cpp compile
// it for one instruction set each and register it. The best instruction set that the processor has runs, or the one
// that the environment variable FLASH_WMMA_CPU_ISA names.
//
// A task is a run of Q tiles of one key/value head. Threads draw tasks from one counter, the longest first: causal
// queries that see many keys, and the longest of packed sequences. Each packed sequence is a problem of its own. Short
// queries against many keys (decoding) are also split over the keys, by shape alone, and the splits are combined in
// order. So every row is computed in the same order, whatever the number of threads: results are bitwise equal from run
// to run, and those of a packed sequence bitwise equal to those of the sequence alone.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "cpu/tasks.h"
#include "registry.h"

namespace flash_wmma {
namespace cpu {
namespace {

/// Whether each batch entry is a problem of its own.
bool has_sequences(const ForwardParams& p) { return p.sequences.cu_seqlens_q || p.sequences.page_size; }

/// One dense problem: a dense call, or one sequence of a packed call or of a cache, with pointers to its rows.
struct DenseProblem {
    ForwardParams params;
    std::int64_t rows;                ///< packed rows of a key/value head
    std::int64_t heads;               ///< batch * heads_k
    std::int64_t splits, split_keys;  ///< these affect the result, so they depend on the shape alone
    std::int64_t row_tasks = 0;       ///< tasks over the rows of a head
    std::int64_t partials;            ///< floats, of one split of one head
    std::int64_t first_task = 0, first_combination = 0, first_partial = 0;

    explicit DenseProblem(const ForwardParams& p) : params(p) {
        // A split must be long enough to pay for its partial result, and there must be few enough of them to combine.
        constexpr std::int64_t kSplitRows = 96, kMinSplitKeys = 512, kMaxSplits = 32;
        rows = p.seqlen_q * (p.heads_q / p.heads_k);
        heads = p.batch * p.heads_k;
        split_keys = p.seqlen_k;
        if (rows <= kSplitRows)
            split_keys = std::max(kMinSplitKeys, ceil_div(ceil_div(p.seqlen_k, kMaxSplits), kTileKeys) * kTileKeys);
        splits = ceil_div(p.seqlen_k, split_keys);
        partials = splits > 1 ? rows * partial_stride(p.head_dim_v) : 0;
    }
    std::int64_t tasks() const { return heads * row_tasks * splits; }
    std::int64_t combinations() const { return splits > 1 ? heads * row_tasks : 0; }
    /// Multiply-adds. Few rows wait for memory, so they count as kLeastRows.
    double work() const {
        constexpr std::int64_t kLeastRows = 16;
        return static_cast<double>(heads) * static_cast<double>(std::max(rows, kLeastRows)) *
               static_cast<double>(params.seqlen_k) * (params.head_dim + params.head_dim_v);
    }
};

/// The work of a call: its problems, the longest first, and how threads share them.
struct Plan {
    const IsaKernel* isa;
    std::vector<DenseProblem> problems;
    std::int64_t task_rows;  ///< packed rows of a task
    std::int64_t tasks = 0, combinations = 0;
    std::int64_t workers, combine_workers;
    std::int64_t scratch;       ///< floats, of one worker
    std::int64_t partials = 0;  ///< floats

    explicit Plan(const ForwardParams& p) : isa(&select_isa()) {
        // Multiply-adds, and floats of partial results, that are worth waking a thread for.
        constexpr double kWorkerGrain = 1e6;
        constexpr std::int64_t kCombineGrain = 1 << 18;

        if (has_sequences(p)) {
            for (std::int64_t b = 0; b < p.batch; ++b) {
                const ForwardParams one = sequence(p, b);
                if (one.seqlen_q > 0 && one.seqlen_k > 0) problems.emplace_back(one);
            }
            std::stable_sort(problems.begin(), problems.end(), [](const DenseProblem& a, const DenseProblem& b) {
                return a.params.seqlen_q * a.params.seqlen_k > b.params.seqlen_q * b.params.seqlen_k;
            });
        } else {
            problems.emplace_back(p);
        }
        double work = 0;
        std::int64_t tiles = 0;
        for (const DenseProblem& problem : problems) {
            work += problem.work();
            tiles += problem.heads * problem.splits * ceil_div(problem.rows, isa->tile_rows);
        }
        const std::int64_t threads = thread_count();
        workers = std::clamp(static_cast<std::int64_t>(std::min(work / kWorkerGrain, 1e6)), std::int64_t{1}, threads);
        // Large tasks share K/V tiles, small ones keep the threads evenly busy.
        const std::int64_t task_tiles = std::clamp(tiles / (4 * workers), std::int64_t{1}, std::int64_t{kMaxTaskTiles});
        task_rows = task_tiles * isa->tile_rows;
        for (DenseProblem& problem : problems) {
            problem.row_tasks = ceil_div(problem.rows, task_rows);
            problem.first_task = tasks;
            problem.first_combination = combinations;
            problem.first_partial = partials;
            tasks += problem.tasks();
            combinations += problem.combinations();
            partials += problem.heads * problem.splits * problem.partials;
        }
        workers = std::max(std::int64_t{1}, std::min(workers, tasks));
        scratch = ceil_div(isa->scratch_floats(p, task_tiles), 16) * 16;
        combine_workers = std::clamp(partials / kCombineGrain, std::int64_t{1}, workers);
    }

    /// The problem whose range of tasks (or combinations) holds the index.
    const DenseProblem& problem_of(std::int64_t index, std::int64_t DenseProblem::* first) const {
        const auto after = [&](std::int64_t i, const DenseProblem& problem) { return i < problem.*first; };
        return *(std::upper_bound(problems.begin(), problems.end(), index, after) - 1);
    }

    Task rows_of(const DenseProblem& problem, std::int64_t head, std::int64_t index) const {
        Task task{};
        task.batch = head / problem.params.heads_k;
        task.head_k = head % problem.params.heads_k;
        task.row_begin = index * task_rows;
        task.row_end = std::min(task.row_begin + task_rows, problem.rows);
        return task;
    }
};

std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    const Plan plan(p);
    return (plan.workers * plan.scratch + plan.partials) * static_cast<std::int64_t>(sizeof(float));
}

/// o = 0 and lse = the sink or -inf for the rows [begin, end) of the first batch entry, or for packed rows.
void clear_rows(const ForwardParams& p, std::int64_t begin, std::int64_t end) {
    const std::size_t bytes = static_cast<std::size_t>(p.head_dim_v) * (p.out_dtype == DType::kFloat32 ? 4 : 2);
    for (std::int64_t row = begin; row < end; ++row)
        for (std::int64_t head = 0; head < p.heads_q; ++head) {
            std::memset(moved(p.o.data, row * p.o.row + head * p.o.head, p.out_dtype), 0, bytes);
            p.lse[head * p.lse_head + row] = p.sinks ? p.sinks[head] : -HUGE_VALF;
        }
}

/// Clears the rows of queries without keys: rows in no sequence, rows cut off, rows of a sequence without keys.
void clear_idle_rows(const ForwardParams& p) {
    const Sequences& s = p.sequences;
    std::int64_t next = 0;
    for (std::int64_t b = 0; b < p.batch; ++b) {
        const ForwardParams one = sequence(p, b);
        const bool idle = one.seqlen_k == 0;
        if (!s.cu_seqlens_q) {
            if (idle) clear_rows(one, 0, one.seqlen_q);
            continue;
        }
        const Run run(s.cu_seqlens_q, b, s.total_q, p.seqlen_q);
        clear_rows(p, next, idle ? run.begin + run.length : run.begin);
        next = std::max(next, run.begin + run.length);
    }
    if (s.cu_seqlens_q) clear_rows(p, next, s.total_q);
}

void launch(const ForwardParams& p, const DeviceFacts&, Stream) {
    const Plan plan(p);
    float* scratch = static_cast<float*>(p.workspace);
    float* partials = scratch + plan.workers * plan.scratch;
    if (has_sequences(p)) clear_idle_rows(p);

    run_tasks(plan.workers, plan.tasks, [&](std::int64_t index, std::int64_t worker) {
        const DenseProblem& problem = plan.problem_of(index, &DenseProblem::first_task);
        const std::int64_t t = index - problem.first_task, split = t % problem.splits,
                           row_task = problem.row_tasks - 1 - t / problem.splits % problem.row_tasks,
                           head = t / problem.splits / problem.row_tasks;
        Task task = plan.rows_of(problem, head, row_task);
        task.key_begin = split * problem.split_keys;
        task.key_end = std::min(task.key_begin + problem.split_keys, problem.params.seqlen_k);
        if (problem.splits > 1)
            task.partial = partials + problem.first_partial + (head * problem.splits + split) * problem.partials +
                           task.row_begin * partial_stride(p.head_dim_v);
        plan.isa->attend(problem.params, task, scratch + worker * plan.scratch);
    });
    run_tasks(plan.combine_workers, plan.combinations, [&](std::int64_t index, std::int64_t) {
        const DenseProblem& problem = plan.problem_of(index, &DenseProblem::first_combination);
        const std::int64_t t = index - problem.first_combination, head = t / problem.row_tasks;
        Task task = plan.rows_of(problem, head, t % problem.row_tasks);
        task.partial = partials + problem.first_partial + head * problem.splits * problem.partials +
                       task.row_begin * partial_stride(p.head_dim_v);
        plan.isa->combine(problem.params, task, static_cast<int>(problem.splits), problem.partials);
    });
}

const KernelInfo kKernel = {
    {.name = "cpu",
     .summary = "native CPU kernel, as exact as fp32 arithmetic, a lane per query row",
     .bf16_min_arch = 1,
     .float32 = true,
     .float16 = true,
     .max_head_dim = kMaxHeadDim,
     .max_cached_head_dim = kMaxHeadDim,
     .features =
         kCausal | kWindow | kBias | kKeyRanges | kAlibi | kSoftcap | kVarlen | kValueDim | kDropout | kSinks | kCache,
     .auto_rank = 100},
    /*choose=*/nullptr,
    workspace_bytes,
    launch,
};
const Registration registration(kKernel);

}  // namespace

}  // namespace cpu
}  // namespace flash_wmma
