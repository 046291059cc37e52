"""Which element of a tile each lane holds: in the emulator, and on a GPU where there is one, as the kernels rely on.

On a machine with a GPU and no nvcc, FLASH_WMMA_TEST_PROGRAMS names a folder with lane_maps.so, made by
nvcc -std=c++20 -Icsrc -Icsrc/device -shared -Xcompiler -fPIC -arch=sm_90 tests/emulator/lane_maps.cu -o lane_maps.so
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from programs import FOLDER, GpuProgram, gpu_program

from flash_wmma.emulator import Program, settings


@dataclass(frozen=True)
class Machine:
    program: Program | GpuProgram
    device: str


@pytest.fixture(scope="module", params=["emulator", pytest.param("cuda", marks=pytest.mark.gpu)])
def machine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Machine:
    if request.param == "cuda":
        return Machine(gpu_program("lane_maps", tmp_path_factory.mktemp("programs")), "cuda")
    return Machine(Program(FOLDER / "lane_maps.cu"), "cpu")


def table(rows: int, columns: int, f: Callable[[int, int], int]) -> torch.Tensor:
    return torch.tensor([[f(i, j) for j in range(columns)] for i in range(rows)])


def place(use: str, lane: int, i: int) -> tuple[int, int]:
    """Row and column of element ``i`` of a lane's fragment. Of matrix_b's columns (n) and rows (k), those that lanes go
    along and those that elements go along change places."""
    along, pairs = lane // 4, 2 * (lane % 4) + i % 2
    if use == "matrix_b":
        return pairs + 8 * (i // 2 % 2), along + 8 * (i // 4 % 2)
    return along + 8 * (i // 2 % 2), pairs + 8 * (i // 4 % 2)


@pytest.mark.parametrize("layout", ["row", "column"])
@pytest.mark.parametrize(
    "fragment", ["matrix_a_half", "matrix_b_half", "matrix_a_bf16", "matrix_b_bf16", "accumulator"]
)
def test_wmma(machine: Machine, fragment: str, layout: str) -> None:
    out = torch.full((32, 16), -1.0, device=machine.device)
    machine.program.call(f"{fragment}_{layout}", out)

    def index(lane: int, i: int) -> int:
        row, column = place(fragment.rsplit("_", 1)[0], lane, i)
        return 16 * row + column if layout == "row" else 16 * column + row

    elements = 16 if "half" in fragment else 8  # half operands hold each element twice
    assert torch.equal(out[:, :elements].long().cpu(), table(32, elements, index))
    assert (out[:, elements:] == -1).all()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("matrices", [2, 4])
def test_ldmatrix(machine: Machine, matrices: int, transposed: bool) -> None:
    out = torch.full((32, 2 * matrices), -1, dtype=torch.int32, device=machine.device)
    machine.program.call(f"ldmatrix_x{matrices}{'_trans' if transposed else ''}", out)

    def index(lane: int, i: int) -> int:
        along, pairs = lane // 4, 2 * (lane % 4) + i % 2
        return 64 * (i // 2) + (8 * pairs + along if transposed else 8 * along + pairs)

    assert torch.equal(out.long().cpu(), table(32, 2 * matrices, index))


@pytest.mark.parametrize(
    ("shape", "k", "dtype"), [("half", 8, torch.float16), ("half", 16, torch.float16), ("bf16", 16, torch.bfloat16)]
)
def test_mma(machine: Machine, shape: str, k: int, dtype: torch.dtype) -> None:
    """Operands put into registers by the formulae of csrc/device/ptx.cuh give the product that the formula finds in d:
    exactly, as they are small integers."""

    def grid(*sizes: int) -> tuple[torch.Tensor, ...]:
        return torch.meshgrid(*map(torch.arange, sizes), indexing="ij")

    generator = torch.Generator().manual_seed(k)
    for _ in range(4):
        a = torch.randint(-15, 16, (16, k), generator=generator).to(dtype)
        b = torch.randint(-15, 16, (k, 8), generator=generator).to(dtype)
        c = torch.randint(-99, 100, (16, 8), generator=generator).float()
        lane, i, pair = grid(32, k // 4, 2)
        a_registers = a[lane // 4 + 8 * (i % 2), 8 * (i // 2) + 2 * (lane % 4) + pair]
        lane, i, pair = grid(32, k // 8, 2)
        b_registers = b[8 * i + 2 * (lane % 4) + pair, lane // 4]
        lane, i = grid(32, 4)
        place_of_d = lane // 4 + 8 * (i // 2), 2 * (lane % 4) + i % 2
        d = torch.zeros(32, 4, device=machine.device)
        a_pairs, b_pairs = (x.contiguous().view(torch.int32).to(machine.device) for x in (a_registers, b_registers))
        machine.program.call(f"m16n8k{k}_{shape}", d, a_pairs, b_pairs, c[place_of_d].to(machine.device))
        assert torch.equal(d.cpu(), (a.float() @ b.float() + c)[place_of_d])


def test_seeds_change_nothing() -> None:
    program = Program(FOLDER / "lane_maps.cu", mode="fast")
    out = torch.zeros(3, 32, 16)
    for seed in range(3):
        with settings(seed=seed):
            program.call("accumulator_row", out[seed])
    assert torch.equal(out[0], out[1])
    assert torch.equal(out[0], out[2])
