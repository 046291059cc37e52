"""Faults of the kernel for tangents, and of what decides that it runs."""

from __future__ import annotations

from mutations.fault import Fault

SOFTMAX = "csrc/forward/wgmma/tangent_softmax.cuh"
CONSUMER = "csrc/forward/wgmma/tangent_consumer.cuh"
FUNC = "flash_wmma/_func.py"
WGMMA = ("wgmma_sm90",)
TESTS = ("tangents",)

FAULTS = [
    Fault(
        name="tangents-of-one-begin-with-what-was-there",
        path=CONSUMER,
        old="Tile::kMoves.v || step > 0 || begun);",
        new="true);",
        why="where V does not move, N is added to what the registers held",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-of-q-are-added-to-those-before",
        path=CONSUMER,
        old="k.panel, Tile::kMoves.k);",
        new="k.panel, true);",
        why="where Q alone moves, T keeps that of the tile before",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-moment-without-rescaling",
        path=SOFTMAX,
        old="                moment_[i] *= scale;\n",
        new="",
        why="a row's moment stays that of an old m",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-of-hidden-keys",
        path=SOFTMAX,
        old="            if (p.at(i, column) == 0.f) x = 0.f;\n",
        new="",
        why="0 * inf: what a row does not see moves it",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-no-centre",
        path=SOFTMAX,
        old="            if (fabsf(change) < INFINITY) {",
        new="            if (change == INFINITY) {",
        why="what the tangents of a row have in common is rounded with the weights",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-centre-moved-alone",
        path=SOFTMAX,
        old="                take(i, change);\n",
        new="",
        why="what N has of earlier tiles is counted from another centre",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-votes-overwritten",
        path=CONSUMER,
        old="smem_.votes[group_][votes_ & 1];",
        new="smem_.votes[group_][0];",
        why="a warp votes on the next tile while others read this one's votes",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-centre-without-the-sink",
        path=SOFTMAX,
        old="centre * sink - rescale * moment",
        new="-rescale * moment",
        why="the sink's share of the weights does not move",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-values-released-early",
        path=CONSUMER,
        old="            ptx::wgmma_wait<0>();\n            release_v();\n            multiply_moved_qk();",
        new="            release_v();\n            ptx::wgmma_wait<0>();\n            multiply_moved_qk();",
        why="the next V comes while products read this one",
        kernels=WGMMA,
        tests=TESTS,
    ),
    Fault(
        name="tangents-of-recorded-tensors",
        path=FUNC,
        old="if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (*primals, *tangents))",
        new="if False",
        why="a gradient of tangents loses its graph",
        tests=TESTS,
    ),
    Fault(
        name="tangents-below-another-transform",
        path=FUNC,
        old="made = None if torch._C._are_functorch_transforms_active() else _computed",
        new="made = _computed",
        why="the kernel is given wrapped tensors",
        tests=TESTS,
    ),
]
