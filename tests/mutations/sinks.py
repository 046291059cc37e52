"""Faults in attention sinks."""

from __future__ import annotations

from mutations.fault import Fault

SINK = "csrc/device/sink.cuh"
CPU = "csrc/cpu/attention.inl"
AUTOGRAD = "flash_wmma/_autograd.py"
SIMT = ("simt",)
SM80 = ("mma_sm80",)
SM90 = ("wgmma_sm90",)
V3 = ("wmma_v3",)
SINKS = ("sinks",)

FAULTS = [
    # ------------------------------------------------------------------------------------------- device: the brick
    Fault(
        name="sink-natural-units",
        path=SINK,
        old="p.sinks[head] * kLog2e",
        new="p.sinks[head]",
        why="the sink is taken for a logarithm to the base 2",
        kernels=SIMT,
        tests=SINKS,
    ),
    Fault(
        name="sink-of-the-first-head",
        path=SINK,
        old="p.sinks[head]",
        new="p.sinks[0]",
        why="all heads have the first one's sink",
        kernels=SIMT,
        tests=SINKS,
    ),
    Fault(
        name="sink-never-raises",
        path=SINK,
        old="top = fmaxf(m, sink);",
        new="top = m;",
        why="a sink far above the scores overflows, and rows without a key have none",
        kernels=SIMT,
        tests=SINKS,
    ),
    Fault(
        name="sink-minus-infinity",
        path=SINK,
        old="top == -INFINITY ? 0.f : top",
        new="top",
        why="a row without a key and with a sink of -inf becomes NaN",
        kernels=SIMT,
        tests=SINKS,
    ),
    Fault(
        name="sink-without-rescale",
        path=SINK,
        old="return rescale;",
        new="return 1.f;",
        why="a sink above the scores leaves O at the old scale",
        kernels=SIMT,
        tests=SINKS,
    ),
    Fault(
        name="sink-keeps-m",
        path=SINK,
        old="    m = top;\n",
        new="",
        why="the LSE of a row whose sink is above its scores is too small",
        kernels=SIMT,
        tests=SINKS,
    ),
    # ------------------------------------------------------------------------------------------- device: the kernels
    Fault(
        name="sink-mma-row-without-keys",
        path="csrc/forward/mma/copies.cuh",
        old="factor = none ? 0.f : rescale *",
        new="factor = rescale *",
        why="a row without a key is NaN if its sink is",
        kernels=SM80,
        tests=SINKS,
    ),
    Fault(
        name="sink-mma-factor",
        path="csrc/forward/mma/copies.cuh",
        old="none ? 0.f : rescale * __fdividef",
        new="none ? 0.f : __fdividef",
        why="a sink above the scores leaves O at the old scale",
        kernels=SM80,
        tests=SINKS,
    ),
    Fault(
        name="sink-wgmma-row-without-keys",
        path="csrc/forward/wgmma/output.cuh",
        old="sum == 0.f ? -INFINITY : (m + ptx::lg2(sum)) * kLn2;",
        new="none ? -INFINITY : (m + ptx::lg2(sum)) * kLn2;",
        why="the LSE of a row without a key is not its sink",
        kernels=SM90,
        tests=SINKS,
    ),
    Fault(
        name="sink-wgmma-factor",
        path="csrc/forward/wgmma/output.cuh",
        old="inverse = rescale * ptx::rcp(sum);",
        new="inverse = ptx::rcp(sum);",
        why="a sink above the scores leaves O at the old scale",
        kernels=SM90,
        tests=SINKS,
    ),
    Fault(
        name="sink-v3-row-without-keys",
        path="csrc/forward/wmma/v3_block.cuh",
        old="smem.inverse_l[row] = none ? 0.f :",
        new="smem.inverse_l[row] = l == 0.f ? 0.f :",
        why="a row without a key is NaN if its sink is",
        kernels=V3,
        tests=SINKS,
    ),
    # ------------------------------------------------------------------------------------------- the CPU
    Fault(
        name="sink-cpu-each-split",
        path=CPU,
        old="    if (task.partial) return {1.f, 0.f};\n",
        new="",
        why="parts of a row are normalised, sink included, before they are added up",
        tests=SINKS,
    ),
    Fault(
        name="sink-cpu-scale",
        path=CPU,
        old="    const double top = maximum * maximum_scale(p);\n",
        new="    const double top = maximum;\n",
        why="the sink is compared with scores before scaling",
        tests=SINKS,
    ),
    Fault(
        name="sink-cpu-of-another-head",
        path=CPU,
        old="const RowEnd end = row_end(p, row.head, maximum, sum);",
        new="const RowEnd end = row_end(p, task.head_k, maximum, sum);",
        why="split rows of grouped heads have the sinks of other heads",
        tests=SINKS,
    ),
    Fault(
        name="sink-cpu-idle-rows",
        path="csrc/cpu/attention.cpp",
        old="p.sinks ? p.sinks[head] : -HUGE_VALF",
        new="-HUGE_VALF",
        why="packed rows without keys have no sink in their LSE",
        tests=SINKS,
    ),
    # ------------------------------------------------------------------------------------------- the ops
    Fault(
        name="sink-empty-call",
        path="csrc/torch/arguments.cpp",
        old="if (sinks_) torch::stable::copy_(lse, torch::stable::unsqueeze(*sinks_, 1));\n    else ",
        new="",
        why="a call without keys ignores the sinks",
        tests=SINKS,
    ),
    Fault(
        name="sink-strides",
        path="csrc/torch/arguments.cpp",
        old='    kept = torch::stable::contiguous(t);\n    const Operand sinks(*kept, "sinks");',
        new='    kept = t;\n    const Operand sinks(*kept, "sinks");',
        why="sinks that do not lie side by side are read elsewhere",
        tests=SINKS,
    ),
    Fault(
        name="sink-cached-op",
        path="csrc/torch/ops_forward.cpp",
        old="const Options options{attn_bias,   alibi_slopes, none,         sinks,",
        new="const Options options{attn_bias,   alibi_slopes, none,         none,",
        why="forward_cached drops the sinks",
        tests=SINKS,
    ),
    # ------------------------------------------------------------------------------------------- gradients
    Fault(
        name="sink-gradient-sign",
        path=AUTOGRAD,
        old="    return -(weights * delta)",
        new="    return (weights * delta)",
        why="the sinks' gradient has the wrong sign",
        tests=SINKS,
    ),
    Fault(
        name="sink-gradient-without-dlse",
        path=AUTOGRAD,
        old="        delta = delta - dlse\n",
        new="        pass\n",
        why="the sinks' gradient ignores lse's",
        tests=SINKS,
    ),
    Fault(
        name="sink-gradient-of-empty-rows",
        path=AUTOGRAD,
        old=".exp().masked_fill(lse.isneginf(), 0)",
        new=".exp()",
        why="a sink of -inf and a row without a key give NaN",
        tests=SINKS,
    ),
    Fault(
        name="sink-gradient-packed",
        path=AUTOGRAD,
        old="    if out.dim() == 3:  # packed\n        delta = delta.transpose(0, 1)\n",
        new="",
        why="packed rows and heads change places",
        tests=SINKS,
    ),
    Fault(
        name="sink-not-saved",
        path="flash_wmma/_call.py",
        old="self.key_ranges, self.sinks, self.rng_state]",
        new="self.key_ranges, None, self.rng_state]",
        why="sinks are lost between forward and backward",
        tests=SINKS,
    ),
]
