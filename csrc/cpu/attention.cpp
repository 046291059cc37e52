// The native CPU kernel `cpu`: FlashAttention-2 forward for fp32, fp16 and bf16, fp32 arithmetic throughout.
//
// This file splits the work and runs it on torch's threads; attention.inl is the algorithm; attention_<isa>.cpp compile
// it for one instruction set each and register it. The best one that the processor has runs, or the one that the
// environment variable FLASH_WMMA_CPU_ISA names.
//
// A task is a run of Q tiles of one key/value head. Threads draw tasks from one counter, causal tasks the longest first.
// Short queries against many keys (decoding) are also split over the keys, by shape alone, and the splits are combined
// in order. So every row is computed in the same order whatever the number of threads: bitwise equal from run to run.
#define TORCH_TARGET_VERSION (((0ULL + 2) << 56) | ((0ULL + 10) << 48))

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "isa.h"
#include "registry.h"

namespace flash_wmma {
namespace cpu {
namespace {

std::vector<const IsaKernel*>& isa_kernels() {
    static std::vector<const IsaKernel*> kernels;
    return kernels;
}

const IsaKernel& select_isa() {
    const char* wanted = std::getenv("FLASH_WMMA_CPU_ISA");
    const IsaKernel* best = nullptr;
    std::string names;
    for (const IsaKernel* kernel : isa_kernels()) {
        const bool named = wanted && std::strcmp(wanted, kernel->name) == 0;
        if (!kernel->supported()) {
            if (named) throw std::invalid_argument(std::string("FLASH_WMMA_CPU_ISA: this processor has no ") + wanted);
            continue;
        }
        if (named) return *kernel;
        names += std::string(names.empty() ? "'" : ", '") + kernel->name + "'";
        if (!best || kernel->rank > best->rank) best = kernel;
    }
    if (wanted)
        throw std::invalid_argument(std::string("FLASH_WMMA_CPU_ISA: got '") + wanted + "', allowed here: " + names);
    return *best;
}

std::int64_t ceil_div(std::int64_t a, std::int64_t b) { return (a + b - 1) / b; }

/// How the work is cut. Only `splits` and `split_keys` bear on the result; they depend on the shape alone.
struct Plan {
    const IsaKernel* isa;
    std::int64_t rows;       ///< packed rows of a key/value head
    std::int64_t task_rows;  ///< of them, in one task
    std::int64_t row_tasks;  ///< tasks over the rows of a head
    std::int64_t splits, split_keys;
    std::int64_t heads;  ///< batch * heads_k
    std::int64_t workers, combine_workers;
    std::int64_t scratch;   ///< floats, of one worker
    std::int64_t partials;  ///< floats, of one split of one head
};

Plan make_plan(const ForwardParams& p) {
    // A split must be long enough to pay for its partial result, and there must be few enough of them to combine.
    constexpr std::int64_t kSplitRows = 96, kMinSplitKeys = 512, kMaxSplits = 32;
    // Multiply-adds that are worth waking a thread for; a single row waits for memory and counts as several.
    constexpr std::int64_t kLeastRows = 16;
    constexpr double kWorkerGrain = 1e6;
    // Floats of partial results, likewise.
    constexpr std::int64_t kCombineGrain = 1 << 18;

    Plan plan{};
    plan.isa = &select_isa();
    plan.rows = p.seqlen_q * (p.heads_q / p.heads_k);
    plan.heads = p.batch * p.heads_k;
    plan.split_keys = p.seqlen_k;
    if (plan.rows <= kSplitRows)
        plan.split_keys = std::max(kMinSplitKeys, ceil_div(ceil_div(p.seqlen_k, kMaxSplits), kTileKeys) * kTileKeys);
    plan.splits = ceil_div(p.seqlen_k, plan.split_keys);

    const double work =
        static_cast<double>(plan.heads) * std::max(plan.rows, kLeastRows) * p.seqlen_k * (p.head_dim + p.head_dim_v);
    const std::int64_t threads = torch::stable::get_num_threads();
    const std::int64_t useful =
        std::max(std::int64_t{1}, static_cast<std::int64_t>(std::min(work / kWorkerGrain, 1e6)));
    const std::int64_t tiles = ceil_div(plan.rows, plan.isa->tile_rows);
    const std::int64_t workers = std::min(threads, useful);
    // Large tasks share K/V tiles, small ones keep the threads evenly busy.
    const std::int64_t task_tiles =
        std::clamp(plan.heads * plan.splits * tiles / (4 * workers), std::int64_t{1}, std::int64_t{kMaxTaskTiles});
    plan.task_rows = task_tiles * plan.isa->tile_rows;
    plan.row_tasks = ceil_div(plan.rows, plan.task_rows);
    plan.workers = std::min(workers, plan.heads * plan.splits * plan.row_tasks);
    plan.scratch = ceil_div(plan.isa->scratch_floats(p, task_tiles), 16) * 16;
    plan.partials = plan.splits > 1 ? plan.rows * partial_stride(p.head_dim_v) : 0;
    plan.combine_workers =
        std::clamp(plan.heads * plan.splits * plan.partials / kCombineGrain, std::int64_t{1}, plan.workers);
    return plan;
}

std::int64_t workspace_bytes(const ForwardParams& p, const DeviceFacts&) {
    const Plan plan = make_plan(p);
    return (plan.workers * plan.scratch + plan.heads * plan.splits * plan.partials) *
           static_cast<std::int64_t>(sizeof(float));
}

/// Runs work(task, worker) for every task in [0, tasks), each as soon as a worker is free.
template <class Work>
void run_tasks(std::int64_t workers, std::int64_t tasks, const Work& work) {
    std::atomic<std::int64_t> next{0};
    const auto drain = [&](std::int64_t worker, std::int64_t) {
        for (std::int64_t task; (task = next.fetch_add(1, std::memory_order_relaxed)) < tasks;) work(task, worker);
    };
    if (workers == 1) drain(0, 1);
    else torch::stable::parallel_for(0, workers, 1, drain);
}

void launch(const ForwardParams& p, const DeviceFacts&, Stream) {
    const Plan plan = make_plan(p);
    float* scratch = static_cast<float*>(p.workspace);
    float* partials = scratch + plan.workers * plan.scratch;
    const auto rows_of = [&](std::int64_t head, std::int64_t index) {
        Task task{};
        task.batch = head / p.heads_k;
        task.head_k = head % p.heads_k;
        task.row_begin = index * plan.task_rows;
        task.row_end = std::min(task.row_begin + plan.task_rows, plan.rows);
        return task;
    };

    run_tasks(plan.workers, plan.heads * plan.row_tasks * plan.splits, [&](std::int64_t t, std::int64_t worker) {
        const std::int64_t split = t % plan.splits, head = t / plan.splits / plan.row_tasks;
        Task task = rows_of(head, plan.row_tasks - 1 - t / plan.splits % plan.row_tasks);
        task.key_begin = split * plan.split_keys;
        task.key_end = std::min(task.key_begin + plan.split_keys, p.seqlen_k);
        if (plan.splits > 1)
            task.partial =
                partials + (head * plan.splits + split) * plan.partials + task.row_begin * partial_stride(p.head_dim_v);
        plan.isa->attend(p, task, scratch + worker * plan.scratch);
    });
    if (plan.splits == 1) return;
    run_tasks(plan.combine_workers, plan.heads * plan.row_tasks, [&](std::int64_t t, std::int64_t) {
        const std::int64_t head = t / plan.row_tasks;
        Task task = rows_of(head, t % plan.row_tasks);
        task.partial = partials + head * plan.splits * plan.partials + task.row_begin * partial_stride(p.head_dim_v);
        plan.isa->combine(p, task, static_cast<int>(plan.splits), plan.partials);
    });
}

const KernelInfo kKernel{
    "cpu",
    "native CPU kernel, fp32 arithmetic, a lane per query row",
    /*min_arch=*/0,
    /*bf16_min_arch=*/1,
    /*float32=*/true,
    /*float16=*/true,
    /*min_head_dim=*/1,
    /*max_head_dim=*/256,
    kCausal | kWindow | kValueDim,
    /*auto_rank=*/100,
    /*instances=*/nullptr,
    /*instance_count=*/0,
    /*choose=*/nullptr,
    workspace_bytes,
    launch,
};
const Registration registration(kKernel);

}  // namespace

IsaRegistration::IsaRegistration(const IsaKernel& kernel) { isa_kernels().push_back(&kernel); }

}  // namespace cpu
}  // namespace flash_wmma
