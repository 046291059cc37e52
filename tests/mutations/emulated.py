"""Faults in what orders memory in wgmma_sm90, and in the emulator, which must see such faults."""

from __future__ import annotations

from mutations.fault import Fault

WGMMA = ("wgmma_sm90",)

AGAIN = (
    "            if (!done) {\n"
    "                if (plain) {\n"
    "                    multiply_qk_again();\n"
    "                    complete_products();\n"
    "                }\n"
    "                if constexpr (kChanges) changes_.apply(s_, key);\n"
    "                if constexpr (kHasRuns) scales_.complete(s_);\n"
    "                softmax_.settled = weigh_exactly(\n"
    "                    factor, place < first, "
    "[&] { hide(rows, key, key < visible.all_begin, key >= visible.all_end); });\n"
    "                if constexpr (kHasRuns) even_runs(key);\n"
    "            }\n"
)
"""What a consumer of wgmma_sm90 does with K after the vote."""

FAULTS = [
    # ----------------------------------------------------------------- wgmma_sm90: barriers, parities, fences, releases
    Fault(
        name="wgmma-release-without-syncwarp",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="        __syncwarp();\n        if (lane_ == 0) ptx::barrier_arrive(&slot.empty);\n",
        new="        if (lane_ == 0) ptx::barrier_arrive(&slot.empty);\n",
        why="lane 0 releases a tile that other lanes may still read, where scores are computed again",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-k-released-before-it-is-read-again",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old=AGAIN + "            release_k();\n",
        new="            release(smem_.k_slot[k_.stage]);\n" + AGAIN + "            k_.advance();\n",
        why="K of a tile whose vote failed is read behind its release",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-cut-without-syncwarp",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="        ptx::fence_proxy_async();\n        __syncwarp();\n",
        new="        ptx::fence_proxy_async();\n",
        why="lane 0 says that V's last tile is full while other lanes write zeros there",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-cut-late-fence",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="        ptx::fence_proxy_async();\n        __syncwarp();\n",
        new="        __syncwarp();\n        ptx::fence_proxy_async();\n",
        why="the fences of the other lanes are not ordered before the arrival of lane 0",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-cut-waits-in-one-lane",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="        ptx::barrier_wait(&smem_.patch, patch_parity_);\n",
        new="        if (lane_ == 0) ptx::barrier_wait(&smem_.patch, patch_parity_);\n",
        why="the other lanes write zeros while the copy is under way",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-cut-parity",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="        patch_parity_ ^= 1;\n",
        new="",
        why="the second tile that a block cuts is written before its copy has landed",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-near-end-of-every-lane",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="            if (lane_ == 0) ptx::barrier_arrive(&smem_.plans.near_end);\n",
        new="            ptx::barrier_arrive(&smem_.plans.near_end);\n",
        why="an item's end is said 32 times",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-skip-without-wait",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="        ptx::barrier_wait(&slots[place.stage].full, place.parity);\n",
        new="",
        why="a tile that a warpgroup does not see is released before it is there",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-q-not-awaited",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="q_.advance();\n                await_q();\n                await_k();\n",
        new="q_.advance();\n                await_k();\n",
        why="the second Q tile of a block is multiplied before it is there",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-v-not-awaited",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="        ptx::barrier_wait(&smem_.v_slot[v_.stage].full, v_.parity);\n        ptx::wgmma_fence();\n",
        new="        ptx::wgmma_fence();\n",
        why="V is multiplied before it is there",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-product-without-fence",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="        ptx::barrier_wait(&smem_.v_slot[v_.stage].full, v_.parity);\n        ptx::wgmma_fence();\n",
        new="        ptx::barrier_wait(&smem_.v_slot[v_.stage].full, v_.parity);\n",
        why="weights and O are used as registers of a product that does not come after their last use",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-scores-without-fence",
        path="csrc/forward/wgmma/wgmma_sm90.cuh",
        old="    __device__ __forceinline__ void multiply_qk() {\n        ptx::wgmma_fence();\n",
        new="    __device__ __forceinline__ void multiply_qk() {\n",
        why="S is written by a product that does not come after its last use",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-plan-read-early",
        path="csrc/forward/wgmma/plan.cuh",
        old="        ptx::barrier_wait(&slot.full, place_.parity);\n        View view{};\n",
        new="        View view{};\n",
        why="a plan is read before it is there",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-plan-released-early",
        path="csrc/forward/wgmma/plan.cuh",
        old="""\
            view = {plan.work, plan.seen[consumer], plan.part};
            ptx::barrier_arrive(&slot.empty);
""",
        new="""\
            ptx::barrier_arrive(&slot.empty);
            view = {plan.work, plan.seen[consumer], plan.part};
""",
        why="the planner may write the next plan while this one is read",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-plan-published-early",
        path="csrc/forward/wgmma/plan.cuh",
        old="""\
            for (int c = 0; c < Tile::kConsumers; ++c) plan.seen[c] = own[c];
            ptx::barrier_arrive(&slot.full);
""",
        new="""\
            for (int c = 0; c < Tile::kConsumers; ++c) {
                if (c == 0) ptx::barrier_arrive(&slot.full);
                plan.seen[c] = own[c];
            }
""",
        why="a plan is full before it says what each consumer sees",
        kernels=WGMMA,
    ),
    Fault(
        name="wgmma-plan-arrivals",
        path="csrc/forward/wgmma/block.cuh",
        old="ptx::barrier_init(&s.empty, consumer_warps + 1);",
        new="ptx::barrier_init(&s.empty, consumer_warps);",
        why="a plan's place is free before all have read it",
        kernels=WGMMA,
    ),
    # -------------------------------------------------------------------------------- the emulator: the order of memory
    Fault(
        name="emulator-fence-not-required",
        path="csrc/emulator/memory.cpp",
        old='    return {"missing fence.proxy.async", 0, w.warp, w.lane, writer_pcs_[g]};\n',
        new="    return {};\n",
        why="products read what threads wrote without fence.proxy.async, and nothing is said",
    ),
    Fault(
        name="emulator-fence-of-the-warp",
        path="csrc/emulator/tensor_copy.cpp",
        old="    clock.published.raise(lane.warp, lane.lane, epoch);\n",
        new="    clock.published.raise(lane.warp, epoch);\n",
        why="a fence of one lane publishes what the others wrote",
    ),
    Fault(
        name="emulator-fence-known-to-all",
        path="csrc/emulator/tensor_copy.cpp",
        old="    learn(lane, &lane, epoch, clock);\n",
        new="    warp_of(lane).clock.join(clock);\n",
        why="a fence is known to the warp's other lanes before they synchronise",
    ),
    Fault(
        name="emulator-arrival-of-the-warp",
        path="csrc/emulator/machine.cpp",
        old="    to.known.raise(lane.warp, lane.lane, epochs_[static_cast<std::size_t>(lane.warp)]++);\n",
        new="    to.known.raise(lane.warp, epochs_[static_cast<std::size_t>(lane.warp)]++);\n",
        why="a lane that arrives hands on what other lanes did without synchronisation",
    ),
    Fault(
        name="emulator-arrival-in-its-epoch",
        path="csrc/emulator/machine.cpp",
        old="    to.known.raise(lane.warp, lane.lane, epochs_[static_cast<std::size_t>(lane.warp)]++);\n",
        new="    to.known.raise(lane.warp, lane.lane, epochs_[static_cast<std::size_t>(lane.warp)]);\n",
        why="what a lane does behind its arrival counts as done before",
    ),
    Fault(
        name="emulator-wait-of-the-warp",
        path="csrc/emulator/tensor_copy.cpp",
        old="    if (config.checks) learn(lane, &b, b.phase, b.completed);\n",
        new="    if (config.checks) warp_of(lane).clock.join(b.completed);\n",
        why="a lane that waits learns for others, which have not synchronised with it",
    ),
    Fault(
        name="emulator-half-a-warp-is-all",
        path="csrc/emulator/machine.cpp",
        old="        if (live(warp) & ~warp.news[i].lanes) {\n",
        new="        if (live(warp) & ~warp.news[i].lanes & 0xffff) {\n",
        why="what half of a warp's lanes know, all know",
    ),
    Fault(
        name="emulator-lanes-of-a-warp-apart",
        path="csrc/emulator/memory.cpp",
        old="        raise(x.agent, least);\n",
        new="        (void)least;\n",
        why="32 lanes that arrive one by one are not taken as their warp: a race is made up",
    ),
    Fault(
        name="emulator-reads-are-no-races",
        path="csrc/emulator/memory.cpp",
        old="        for (std::size_t i = 0; i < reading_.size(); ++i) {\n",
        new="        for (std::size_t i = 1; i < reading_.size(); ++i) {\n",
        why="a place that the first reader still reads is written over",
    ),
    Fault(
        name="emulator-collective-of-one-lane",
        path="csrc/emulator/access.cpp",
        old="    if (collective) who.lane = kTogether;\n",
        new="    if (collective && writes(kind)) who.lane = kTogether;\n",
        why="a row that ldmatrix reads is read by the lane that has its address alone",
    ),
    Fault(
        name="emulator-shuffle-orders-memory",
        path="csrc/emulator/include/cuda_runtime.h",
        old="sizeof(T) / 4 ? sizeof(T) / 4 : 1, 0, false,",
        new="sizeof(T) / 4 ? sizeof(T) / 4 : 1, 0, true,",
        why="a shuffle stands for __syncwarp",
    ),
    Fault(
        name="emulator-atomics-of-a-warp-in-order",
        path="csrc/emulator/memory.cpp",
        old="                    if (w.warp == who.warp) now.lane = kSeveral;\n",
        new="                    if (w.warp == who.warp) now.lane = static_cast<std::int8_t>(who.lane);\n",
        why="of lanes of a warp that update a place only the last counts",
    ),
    # ----------------------------------------------------------------- the emulator: bounds, barriers, copies, products
    Fault(
        name="emulator-shared-bound",
        path="csrc/emulator/access.cpp",
        old="        if (arena.offset(address) + static_cast<std::size_t>(bytes) > arena.bytes_per_block())\n",
        new="        if (arena.offset(address) > arena.bytes_per_block())\n",
        why="an access of the first byte behind shared memory is in bounds",
    ),
    Fault(
        name="emulator-global-bound",
        path="csrc/emulator/memory.cpp",
        old="address + static_cast<std::uintptr_t>(bytes) <= b.end && (!found",
        new="address <= b.end && (!found",
        why="an access just behind a tensor is in bounds",
    ),
    Fault(
        name="emulator-phase-without-bytes",
        path="csrc/emulator/tensor_copy.cpp",
        old="    if (--b.outstanding == 0 && b.bytes == 0) end_phase(b);\n",
        new="    if (--b.outstanding == 0) end_phase(b);\n",
        why="a phase ends before the bytes that it counts",
    ),
    Fault(
        name="emulator-too-many-arrivals",
        path="csrc/emulator/tensor_copy.cpp",
        old="    if (!b.outstanding)\n        stop(",
        new="    if (!b.outstanding && !b.arrivals)\n        stop(",
        why="a phase takes more arrivals than it has",
    ),
    Fault(
        name="emulator-box-from-its-first-row",
        path="csrc/emulator/tensor_copy.cpp",
        old="outside = outside || i < 0 || i >= map.size[d];",
        new="outside = outside || i < 0 || i > map.size[d];",
        why="a tensor copy brings a row from behind the tensor, not zeros",
    ),
    Fault(
        name="emulator-copy-at-exit",
        path="csrc/emulator/machine.cpp",
        old="        if (!barrier.copies.empty())\n",
        new="        if (barrier.copies.size() > 1)\n",
        why="a block may end while a tensor copy is under way",
    ),
    Fault(
        name="emulator-barrier-as-memory",
        path="csrc/emulator/memory.cpp",
        old="        writers_[g].barrier = 1;\n",
        new="        writers_[g].barrier = 0;\n",
        why="a barrier may be used as ordinary memory",
    ),
    Fault(
        name="emulator-cp-async-one-group-more",
        path="csrc/emulator/access.cpp",
        old="        if (copy.group >= landing) {\n",
        new="        if (copy.group > landing) {\n",
        why="a wait lands the copies of a group that it need not wait for",
    ),
    Fault(
        name="emulator-products-one-group-more",
        path="csrc/emulator/wgmma.cpp",
        old="        group.groups > static_cast<std::uint64_t>(pending) ?",
        new="        pending ? group.groups : group.groups > static_cast<std::uint64_t>(pending) ?",
        why="a wait ends a group of products that it need not wait for",
    ),
    Fault(
        name="emulator-clocks-of-one-warp",
        path="csrc/emulator/wgmma.cpp",
        old="        for (int w = 1; w < kWarps; ++w) clock.meet(",
        new="        for (int w = 1; w < kWarps; ++w) clock.join(",
        why="a product knows what one of its warps knows",
    ),
    Fault(
        name="emulator-registers-of-a",
        path="csrc/emulator/wgmma.cpp",
        old="""    if (what.a) check(what.a, 4, "A's");\n""",
        new="""    if (what.a) check(what.a, 1, "A's");\n""",
        why="A's other registers may be written behind the fence",
    ),
    # ------------------------------------------------------------------------------------------- the emulator: clusters
    Fault(
        name="emulator-remote-arrival-orders-writes",
        path="csrc/emulator/tensor_copy.cpp",
        old="    if (config.checks && writes) hand_on(*t_lane, b.arrived);\n",
        new="    if (config.checks) hand_on(*t_lane, b.arrived);\n",
        why="an arrival at a barrier of another block orders what was written before it",
    ),
    Fault(
        name="emulator-send-reads-at-once",
        path="csrc/emulator/tensor_copy.cpp",
        old="    const Accessor who = later_reader(lane, b.agent, copy.epoch, clock);\n",
        new="    Accessor who = accessor(lane);\n    who.async_proxy = true;\n",
        why="a copy to another block has read its source as soon as it is asked for",
    ),
    Fault(
        name="emulator-send-for-any-phase",
        path="csrc/emulator/tensor_copy.cpp",
        old="b.agent, kTogether, b.completed.known.of(b.agent)))\n",
        new="b.agent, kTogether, 0))\n",
        why="bytes may count for a phase that the sender takes to be over",
    ),
    Fault(
        name="emulator-block-ends-early",
        path="csrc/emulator/machine.cpp",
        old="    if (block.live > 0 || block.uses.empty()) return;\n",
        new="    if (block.live >= 0 || block.uses.empty()) return;\n",
        why="a block may end before others have done with its shared memory",
    ),
    Fault(
        name="emulator-cluster-sync-of-a-block",
        path="csrc/emulator/machine.cpp",
        old="    if (b.arrived == (visit.threads ? visit.threads : cluster ? live_ : block.live)) complete",
        new="    if (b.arrived >= (visit.threads ? visit.threads : block.live)) complete",
        why="a cluster_sync does not wait for the cluster's other blocks",
    ),
    # ------------------------------------------------------------------------------------------- the emulator: counters
    Fault(
        name="emulator-sectors-of-64",
        path="csrc/emulator/counters.cpp",
        old="    constexpr std::uintptr_t kSector = 32;\n    std::array",
        new="    constexpr std::uintptr_t kSector = 64;\n    std::array",
        why="sectors are counted twice as large as they are",
    ),
    Fault(
        name="emulator-wide-requests-in-halves",
        path="csrc/emulator/counters.cpp",
        old="int at_once = bytes <= 4 ? 32 : bytes == 8 ? 16 : 8;",
        new="int at_once = bytes <= 4 ? 32 : 16;",
        why="a request of 16 bytes a lane goes in two parts, not in four",
    ),
    Fault(
        name="emulator-waits-not-in-the-timeline",
        path="csrc/emulator/tensor_copy.cpp",
        old="        if (until < b.completed_at)\n            record(",
        new="        if (until > b.completed_at)\n            record(",
        why="the timeline lacks waits that last",
    ),
]
