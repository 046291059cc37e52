"""Faults in what bwd_sm90 does beside its products: rows are prepared, and heads are brought to dq."""

from __future__ import annotations

from mutations.fault import Fault

FOLDER = "csrc/backward/wgmma/"
KERNEL = ("bwd_sm90",)
PRODUCER = FOLDER + "producer.cuh"
LAUNCH = FOLDER + "bwd_sm90.cu"
ROWS = "csrc/device/backward_rows.cuh"
BESIDE, FINISH = FOLDER + "prepare_beside.cuh", FOLDER + "finish_beside.cuh"

FAULTS = [
    Fault(
        name="bwd-sm90-beside-rows-of-another-part",
        path=BESIDE,
        old="static_cast<int>(part) % of_group * all;",
        new="static_cast<int>(part) % of_group / 2 * all;",
        why="every second part has the rows of the one before",
        kernels=KERNEL,
        tests=("beside",),
    ),
    Fault(
        name="bwd-sm90-beside-sum-of-another-row",
        path=BESIDE,
        old="sum[u], lane % kAtOnce * kLanes);",
        new="sum[u], lane / kLanes * kLanes);",
        why="a lane that owns a row takes the sum of the row that it helped to add up",
        kernels=KERNEL,
        tests=("beside",),
    ),
    Fault(
        name="bwd-sm90-beside-dq-not-cleared",
        path=BESIDE,
        old="    if (problem.dq_rows) {\n        auto* const dq",
        new="    if (false) {\n        auto* const dq",
        why="blocks add to what was in memory",
        kernels=KERNEL,
        tests=("beside",),
    ),
    Fault(
        name="bwd-sm90-beside-the-last-row-alone",
        path=BESIDE,
        old="i < min(rows, all);",
        new="i < min(rows - 1, all);",
        why="a part of one row has no D",
        kernels=KERNEL,
        tests=("beside",),
    ),
    Fault(
        name="bwd-sm90-beside-head-of-another-entry",
        path=BESIDE,
        old="row_of<const T>(problem.dout, of.index,",
        new="row_of<const T>(problem.dout, 0,",
        why="D has dO of another batch entry",
        kernels=KERNEL,
        tests=("beside",),
    ),
    Fault(
        name="bwd-sm90-beside-in-another-order",
        path=BESIDE,
        old="                sum[u] = add_products(sum[u], a, b);\n",
        new="                for (int e = 0; e < 8; ++e) sum[u] = fmaf(a[e], b[e], sum[u]);\n",
        why="D's last bits depend on which grid prepares, and so on the number of multiprocessors",
        kernels=KERNEL,
        tests=("test_deterministic",),
    ),
    Fault(
        name="bwd-sm90-finish-part-of-another-warp",
        path=FINISH,
        old="problem.dq_rows + std::int64_t{part} * words",
        new="problem.dq_rows + std::int64_t{first} * words",
        why="all parts that are taken together have the rows of the first",
        kernels=KERNEL,
        tests=("finish_beside",),
    ),
    Fault(
        name="bwd-sm90-finish-too-few-parts",
        path=FINISH,
        old="return finished_parts_of_head(p) * p.batch * p.heads_k;",
        new="return finished_parts_of_head(p) * p.heads_k;",
        why="dq of other batch entries than the first is not written",
        kernels=KERNEL,
        tests=("finish_beside",),
    ),
    Fault(
        name="bwd-sm90-finish-rows-that-do-not-exist",
        path=FINISH,
        old="problem.dq.row, left - lane / 4,",
        new="problem.dq.row, kFinishedRows,",
        why="rows behind a head's last one are written",
        kernels=KERNEL,
        tests=("finish_beside",),
    ),
    Fault(
        name="bwd-sm90-finish-place-not-awaited",
        path=FINISH,
        old="        ptx::barrier_wait(&slot.empty, place.parity ^ 1);\n        smem.part",
        new="        smem.part",
        why="a copy overwrites rows that a warp reads",
        kernels=KERNEL,
        tests=("finish_beside",),
    ),
    Fault(
        name="bwd-sm90-counts-what-is-not-begun",
        path=FINISH,
        old="                count_before();\n                head_before = head, ++items;\n",
        new="                head_before = head, ++items;\n                count_before();\n",
        why="items without tiles fill the plan, so that the next one, with whose first tile dQ is added, never comes",
        kernels=KERNEL,
        tests=("finish_beside",),
    ),
    Fault(
        name="bwd-sm90-leaves-with-an-item",
        path=PRODUCER,
        old="index >= problem_.leaving_item) break;\n            const int next = taken() + before;\n",
        new="index >= problem_.leaving_item) {\n                    taken();\n                    break;\n"
        "                }\n            const int next = taken() + before;\n",
        why="a block that takes no more items has taken one",
        kernels=KERNEL,
        tests=("finish_beside",),
    ),
    Fault(
        name="bwd-sm90-beside-with-few-items",
        path=LAUNCH,
        old="items < kLeastRounds * workers) return {};",
        new="items < workers) return {};",
        why="blocks that begin late have nothing left to do, and others wait for all heads",
        kernels=KERNEL,
        tests=("beside",),
    ),
    Fault(
        name="bwd-sm90-beside-late-blocks-not-counted",
        path=LAUNCH,
        old="(workers - late) * beside + late * of_late;",
        new="(workers - late) * beside + late * beside;",
        why="equal items take a round more",
        kernels=KERNEL,
        tests=("beside",),
    ),
    Fault(
        name="bwd-sm90-beside-ahead-not-prepared",
        path=LAUNCH,
        old="        prepare_parts(problem.multiprocessors, 0, beside.ahead);\n",
        new="",
        why="the first items wait for heads that nobody prepares",
        kernels=KERNEL,
        tests=("few_equal_items",),
    ),
    Fault(
        name="bwd-sm90-beside-ahead-twice",
        path=LAUNCH,
        old="prepare_parts(beside.blocks, beside.ahead, static",
        new="prepare_parts(beside.blocks, 0, static",
        why="more parts of a head are counted than it has, and dQ is cleared while others add to it",
        kernels=KERNEL,
        tests=("few_equal_items",),
    ),
    Fault(
        name="bwd-sm90-added-counts-not-cleared",
        path=ROWS,
        old="    clear(problem.added, p.batch * p.heads_k);\n",
        new="",
        why="a head's items are counted from what memory held",
        kernels=KERNEL,
        tests=("finish_beside",),
    ),
]
