"""Division by a product and a shift (csrc/device/divisor.h), at numbers at which a product that is too short fails."""

from __future__ import annotations

import shutil

import pytest
import torch
from programs import FOLDER

from flash_wmma.emulator import Program

LARGEST = 2**31 - 1


@pytest.fixture(scope="module")
def program() -> Program:
    if shutil.which("g++") is None:
        pytest.skip("no g++")
    return Program(FOLDER / "divisor.cu")


def divisors() -> list[int]:
    near_powers = [2**i + by for i in range(31) for by in (-1, 0, 1)]
    generator = torch.Generator().manual_seed(0)
    spread = [int(2.0 ** (31 * float(x))) for x in torch.rand(100, generator=generator)]
    return sorted({d for d in [3, 5, 6, 7, 10, 132, 641, LARGEST, *near_powers, *spread] if 1 <= d <= LARGEST})


def test_quotients(program: Program) -> None:
    """Beside each multiple of the divisor, up to the largest number: there a quotient that is off by a little shows."""
    for divisor in divisors():
        last = LARGEST // divisor
        quotients = {0, 1, 2, last // 3, last // 2, last - 1, last}
        numbers = {q * divisor + by for q in quotients for by in (-1, 0, 1)} | {LARGEST}
        n = torch.tensor(sorted(x for x in numbers if 0 <= x <= LARGEST), dtype=torch.int32)
        quotient, remainder = torch.full_like(n, -1), torch.full_like(n, -1)
        program.call("divide", n, len(n), divisor, quotient, remainder)
        assert torch.equal(quotient, n // divisor), divisor
        assert torch.equal(remainder, n % divisor), divisor


@pytest.mark.parametrize("divisor", [0, -1])
def test_no_divisor(program: Program, divisor: int) -> None:
    n = torch.zeros(1, dtype=torch.int32)
    with pytest.raises(RuntimeError, match="divisor"):
        program.call("divide", n, 1, divisor, n.clone(), n.clone())
