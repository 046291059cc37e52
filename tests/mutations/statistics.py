"""Faults in return_aux, in the gradient of ALiBi's slopes, and in those of reductions."""

from __future__ import annotations

from mutations.fault import Fault

CPU = "csrc/cpu/backward.inl"
TERMS = "csrc/device/weight_terms.cuh"
ROWS = "csrc/backward/simt/rows.cuh"
COUNTED = "csrc/backward/simt/statistics.cuh"
KERNEL = "csrc/backward/simt/bwd_simt.cuh"
PYTHON = "flash_wmma/_statistics.py"
SIMT = ("bwd_simt",)
STATISTICS = ("statistics",)
SLOPES = ("slopes",)

FAULTS = [
    # ------------------------------------------------------------------------------------------------------ on the CPU
    Fault(
        name="cpu-entropy-without-logarithm",
        path=CPU,
        old="zero : weighed.weight * weighed.log_weight;",
        new="zero : weighed.weight * weighed.weight;",
        why="the entropy is minus the sum of the squared weights",
        tests=STATISTICS,
    ),
    Fault(
        name="cpu-maximum-of-hidden-keys",
        path=CPU,
        old="if (row.lo <= key && key <= row.hi && (x > maximum || x != x))",
        new="if (key >= 0 && (x > maximum || x != x))",
        why="keys that the band hides count for the maximum",
        tests=STATISTICS,
    ),
    Fault(
        name="cpu-entropy-gradient-turned",
        path=CPU,
        old="dweight -= Isa::broadcast(dentropy)",
        new="dweight += Isa::broadcast(dentropy)",
        why="the entropy's gradient has the wrong sign",
        tests=STATISTICS,
    ),
    Fault(
        name="cpu-column-gradient-of-the-first-lanes",
        path=CPU,
        old="dweight[i] += dcolumn_sum[j + i];",
        new="dweight[i] += dcolumn_sum[i];",
        why="keys of a tile beyond the first lanes have others' gradients",
        tests=STATISTICS,
    ),
    Fault(
        name="cpu-slopes-turned",
        path=CPU,
        old="dslopes[j + i] -= gradient[i]",
        new="dslopes[j + i] += gradient[i]",
        why="the slopes' gradient has the wrong sign",
        tests=SLOPES,
    ),
    # ------------------------------------------------------------------------------------------------------- on a GPU
    Fault(
        name="terms-in-log2",
        path=TERMS,
        old="(kLn2 * log2f(weight))",
        new="log2f(weight)",
        why="the entropy's gradient is in bits",
        kernels=SIMT,
        tests=STATISTICS,
    ),
    Fault(
        name="terms-of-the-first-key",
        path=TERMS,
        old="sum += dcolumn_sum_[key];",
        new="sum += dcolumn_sum_[0];",
        why="all keys have the first one's gradient",
        kernels=SIMT,
        tests=STATISTICS,
    ),
    Fault(
        name="terms-of-all-weights",
        path=TERMS,
        old="return sum * factor_;",
        new="return sum;",
        why="with dropout the terms are multiplied by 1 / (1 - p)",
        kernels=SIMT,
        tests=STATISTICS,
    ),
    Fault(
        name="counted-in-the-first-entry",
        path=COUNTED,
        old="numbers += s.index * p.lse_batch + ",
        new="numbers += ",
        why="all batch entries write the first one's numbers",
        kernels=SIMT,
        tests=STATISTICS,
    ),
    Fault(
        name="counted-hidden-keys",
        path=COUNTED,
        old="if (!all_visible && (k < mask.begin(q) || k >= mask.end(q))) return;",
        new="if (!all_visible && k >= mask.end(q)) return;",
        why="keys before the window count",
        kernels=SIMT,
        tests=STATISTICS,
    ),
    Fault(
        name="counted-without-nan",
        path=COUNTED,
        old="return x > y || x != x ? x : y;",
        new="return x > y ? x : y;",
        why="a maximum passes over NaN",
        kernels=SIMT,
        tests=STATISTICS,
    ),
    Fault(
        name="key-sums-of-one-lane",
        path=ROWS,
        old="simt::over_row<Tile>(sums[i], [](float x, float y) { return x + y; })",
        new="sums[i]",
        why="a key's sum is that of the queries of one lane",
        kernels=SIMT,
        tests=STATISTICS,
    ),
    Fault(
        name="slopes-without-dropouts-factor",
        path=KERNEL,
        old="own.head + h, slopes_sum, factor, thread",
        new="own.head + h, slopes_sum, 1.f, thread",
        why="with dropout the slopes' gradient is multiplied by 1 - p",
        kernels=SIMT,
        tests=SLOPES,
    ),
    # --------------------------------------------------------------------------------------------------------- Python
    Fault(
        name="entropy-gradient-without-the-sink",
        path=PYTHON,
        old="(1 - of_sinks)",
        new="torch.ones_like(lse)",
        why="weights of a row with a sink count as 1",
        tests=STATISTICS,
    ),
    Fault(
        name="entropy-gradient-uncentred",
        path=PYTHON,
        old="delta if dentropy is None else delta + dentropy",
        new="delta",
        why="the derivative of P ln P lacks its 1",
        tests=STATISTICS,
    ),
    Fault(
        name="slopes-of-the-next-sequence",
        path="flash_wmma/_ops.py",
        old="(row < first[1:, None])",
        new="(row <= first[1:, None])",
        why="the first key of the next sequence counts for a sequence's slopes",
        tests=("slopes", "statistics"),
    ),
    Fault(
        name="hook-takes-torchs-mask",
        path="flash_wmma/_hook.py",
        old="dropout_p != 0 and rng_state.dtype != torch.int64",
        new="dropout_p < 0",
        why="a backward whose forward was torch's drops other weights",
        tests=("hook",),
    ),
    Fault(
        name="maximum-gradient-not-shared",
        path="flash_wmma/reductions.py",
        old="of_each / count",
        new="of_each",
        why="each of several equal maxima has the whole gradient",
    ),
]
