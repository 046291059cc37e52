"""Faults in dropout."""

from __future__ import annotations

from mutations.fault import Fault

NUMBERS = "csrc/dropout.h"
TILE = "csrc/device/dropout_tile.cuh"
DROPOUT = ("dropout",)
SIMT = ("simt",)
SM80 = ("mma_sm80",)
BWD_SIMT = ("bwd_simt",)
BWD_SM80 = ("bwd_sm80",)

FAULTS = [
    Fault(
        name="dropout-six-rounds",
        path=NUMBERS,
        old="round < 7",
        new="round < 6",
        why="the numbers are not those of Philox with seven rounds",
        kernels=("cpu",),
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-one-head",
        path=NUMBERS,
        old="head_(static_cast<std::uint32_t>(head))",
        new="head_(0)",
        why="all heads have the same mask",
        kernels=("cpu",),
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-without-offset",
        path=NUMBERS,
        old="dropout.rng_state[0] ^ dropout.rng_state[1] * 0x9e3779b97f4a7c15u",
        new="dropout.rng_state[0]",
        why="the second number of the state has no influence",
        kernels=("cpu",),
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-inverted",
        path=NUMBERS,
        old="return number >= threshold_;",
        new="return number < threshold_;",
        why="p of the weights are kept",
        kernels=("cpu",),
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-sequence",
        path="csrc/cpu/tasks.h",
        old="    p.dropout.first_entry += b;\n",
        new="",
        why="all packed sequences have the first one's mask",
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-backward-entry",
        path="csrc/cpu/backward.cpp",
        old="        one.dropout.first_entry += b;\n",
        new="",
        why="in backward all batch entries have the first one's mask",
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-cpu-scale",
        path="csrc/cpu/attention.inl",
        old="const float scale = p.dropout.rng_state ? kept_scale(p.dropout) : 1.f;",
        new="const float scale = 1.f;",
        why="kept weights are not divided by 1 - p",
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-cpu-few-rows",
        path="csrc/cpu/attention.inl",
        old="for (int j = 0; j < n; ++j) s[j] = kept[j] != 0.f ? s[j] : 0.f;",
        new="",
        why="few queries drop nothing",
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-simt-scale",
        path="csrc/forward/simt/simt.cuh",
        old="        if (p.dropout.rng_state) rescale *= kept_scale(p.dropout);\n",
        new="",
        why="kept weights are not divided by 1 - p",
        kernels=SIMT,
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-mma-warp-rows",
        path="csrc/forward/mma/kernel.cuh",
        old="each_kept<false>(s, kept_weights, work.tile.row(here.warp_row()).query,",
        new="each_kept<false>(s, kept_weights, work.tile.row(0).query,",
        why="all warps have the first one's mask",
        kernels=SM80,
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-tile-halves",
        path=TILE,
        old="f(right[2 * h + e], mask.keeps(numbers.at(h, 1, e)));",
        new="f(right[2 * h + e], mask.keeps(numbers.at(h, 0, e)));",
        why="keys eight apart have the same mask",
        kernels=SM80,
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-transposed-odd",
        path=TILE,
        old="f(left[2 * h + e], mask.keeps(numbers.at(0, h, row % 2)));",
        new="f(left[2 * h + e], mask.keeps(numbers.at(0, h, e)));",
        why="backward has another mask than forward",
        kernels=BWD_SM80,
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-mma-dv-scale",
        path="csrc/backward/mma/kernel.cuh",
        old="kGeneral && p.dropout.rng_state ? kept_scale(p.dropout) : 1.f;",
        new="1.f;",
        why="dV is not divided by 1 - p",
        kernels=BWD_SM80,
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-mma-minus-delta",
        path="csrc/backward/mma/kernel.cuh",
        old="x = s.at(i, 8 * part + column) < 0.f ? -minus :",
        new="x = s.at(i, 8 * part + column) < 0.f ? 0.f :",
        why="dS of dropped weights lacks delta",
        kernels=BWD_SM80,
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-simt-sign",
        path="csrc/backward/simt/bwd_simt.cuh",
        old="                    s[i][n] = fabsf(s[i][n]);\n",
        new="",
        why="dS of dropped weights has the wrong sign",
        kernels=BWD_SIMT,
        tests=DROPOUT,
    ),
    Fault(
        name="dropout-state-not-saved",
        path="flash_wmma/_call.py",
        old="tensors = [self.attn_bias, self.alibi_slopes, self.key_ranges, self.sinks, self.rng_state]",
        new="tensors = [self.attn_bias, self.alibi_slopes, self.key_ranges, self.sinks, None]",
        why="backward has no state",
        tests=DROPOUT,
    ),
]
