"""Faults of heads wider than a block's part of the columns."""

from __future__ import annotations

from .fault import Fault

TESTS = ("wide_heads", "backward_mma", "backward")

FAULTS = [
    Fault(
        name="wide-first-values-for-all",
        path="csrc/forward/mma/key_value_ring.cuh",
        old="v(work.key_rows(work.p.v, key) + work.first_column(), work.p.v.row, work.columns()) {}",
        new="v(work.key_rows(work.p.v, key), work.p.v.row, work.columns()) {}",
        why="every block of a row multiplies the first columns of V",
        kernels=("mma_sm75",),
        tests=TESTS,
    ),
    Fault(
        name="wide-values-past-the-last-column",
        path="csrc/forward/mma/block.cuh",
        old="int columns() const { return p.head_dim_v - first_column(); }",
        new="int columns() const { return p.head_dim_v; }",
        why="the last block of a row reads and writes columns behind d_v",
        kernels=("mma_sm75",),
        tests=TESTS,
    ),
    Fault(
        name="wide-result-in-first-columns",
        path="csrc/forward/mma/copies.cuh",
        old="work.sequence.first_q + query) + work.first_column();",
        new="work.sequence.first_q + query);",
        why="every block of a row stores its part of O in the first columns",
        kernels=("mma_sm75",),
        tests=TESTS,
    ),
    Fault(
        name="wide-one-part-of-columns",
        path="csrc/forward/mma/kernel.cuh",
        old="static_cast<unsigned>((p.head_dim_v + Tile::kColumns - 1) / Tile::kColumns);",
        new="static_cast<unsigned>((p.head_dim_v + Tile::kD - 1) / Tile::kD);",
        why="the columns behind the first part are not computed",
        kernels=("mma_sm75",),
        tests=TESTS,
    ),
    Fault(
        name="wide-simt-values",
        path="csrc/forward/simt/simt.cuh",
        old="sequence.first_k + key) + first_column, p.v.row,",
        new="sequence.first_k + key), p.v.row,",
        why="both blocks of a row multiply the first columns of V",
        kernels=("simt",),
        tests=TESTS,
    ),
    Fault(
        name="wide-gradients-of-first-columns",
        path="csrc/backward/mma/tile.cuh",
        old="return Tile::first_column() + stream_warp * Tile::kWarpColumns;",
        new="return stream_warp * Tile::kWarpColumns;",
        why="both blocks of own rows compute the first columns of dK and dV",
        kernels=("bwd_sm80",),
        tests=TESTS,
    ),
    Fault(
        name="wide-dq-of-first-columns",
        path="csrc/backward/mma/products.cuh",
        old="int column = Tile::first_column() + thread.warp",
        new="int column = thread.warp",
        why="both blocks of own rows add the first columns of dQ",
        kernels=("bwd_sm80",),
        tests=TESTS,
    ),
    Fault(
        name="wide-bias-gradient-twice",
        path="csrc/backward/mma/kernel.cuh",
        old="if (problem.dbias.data && Tile::first_column() == 0)",
        new="if (problem.dbias.data)",
        why="both blocks of own rows add to the gradient of the bias",
        kernels=("bwd_sm80",),
        tests=TESTS,
    ),
    Fault(
        name="wide-simt-dq-of-first-columns",
        path="csrc/backward/simt/bwd_simt.cuh",
        old="const int column = Tile::first_column() + unit % kRowVectors * 4,",
        new="const int column = unit % kRowVectors * 4,",
        why="both blocks of own rows add the first columns of dQ",
        kernels=("bwd_simt",),
        tests=TESTS,
    ),
    Fault(
        name="wide-simt-bias-gradient-twice",
        path="csrc/backward/simt/bwd_simt.cuh",
        old="kOwnsKeys && b.data && Tile::first_column() == 0)",
        new="kOwnsKeys && b.data)",
        why="both blocks of own rows add to the gradient of the bias",
        kernels=("bwd_simt",),
        tests=TESTS,
    ),
    Fault(
        name="wide-shared-memory-not-asked",
        path="csrc/registry.cpp",
        old="if (instance.min_arch <= device.arch && instance.smem_bytes <= device.smem_optin)",
        new="if (instance.min_arch <= device.arch)",
        why="a kernel is taken for a head dim that no shape of the device's shared memory holds",
        tests=("wide_heads",),
    ),
]
