"""Whether an installed wheel works, away from the sources. Prints what its import adds to torch's.

try_wheel.py FOLDER     FOLDER: where it was installed
"""

from __future__ import annotations

import subprocess
import sys

import torch

import flash_wmma

IMPORT = """
import time, torch
start = time.process_time()
import flash_wmma
print(time.process_time() - start)
"""


def import_seconds() -> float:
    """Of processor time, the least of several: others use the machine too."""
    runs = [
        subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True) for _ in range(7)
    ]
    return min(float(run.stdout) for run in runs)


def main() -> None:
    built = flash_wmma.build_info()
    assert str(built.library).startswith(sys.argv[1]), built
    torch.manual_seed(0)
    q, k, v = torch.randn(3, 2, 4, 100, 64)
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    for kernel, allowed in (("cpu", 1e-5), ("wmma_v1", 3e-3)):
        error = float((flash_wmma.forward(q, k, v, kernel=kernel) - expected).abs().max())
        assert error < allowed, error
        print(f"flash_wmma {built.version}, CUDA {built.cuda}, torch {torch.__version__}, {kernel}: error {error:.1e}")
    print(f"import flash_wmma: {1000 * import_seconds():.0f} ms of processor time beside torch's")


if __name__ == "__main__":
    main()
