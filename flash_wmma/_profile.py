"""What a profiler shows of a kernel, without a GPU: the figures of one run, as text, as JSON and drawn."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from . import _plots, _report
from ._errors import refuse
from ._figures import Counts, Launch, Line


@dataclass(frozen=True)
class Profile:
    """Figures of a kernel's run in the emulator: the answer of :func:`flash_wmma.profile`. ``print`` shows them."""

    kernel: str
    inputs: str
    """The inputs in words."""
    arch: int
    """The architecture that it chose its tiles for, also of the occupancy, 10 * major + minor."""
    launches: tuple[Launch, ...] = field(repr=False)
    """The functions that it launched, in order."""
    ideal_read_bytes: int | None
    """Bytes of q, k and v, each read once; ``None``: unknown."""
    ideal_written_bytes: int | None
    """Bytes of the output and the logarithms of the softmax's denominators, each written once; ``None``: unknown."""
    products: int = 0
    """Products of matrices that it left to cuBLAS, here to torch's matmul. Nothing is counted of them."""

    @property
    def counts(self) -> Counts:
        """The counts of all launches. What :attr:`products` do is not among them."""
        return sum((launch.counts for launch in self.launches), Counts.of(()))

    @property
    def read_bytes(self) -> int | None:
        """Bytes that all launches read from global memory; ``None``: unknown, since there are :attr:`products`."""
        return None if self.products else self.counts.read_bytes

    @property
    def written_bytes(self) -> int | None:
        """Bytes that all launches write to global memory; ``None``: unknown, since there are :attr:`products`."""
        return None if self.products else self.counts.written_bytes

    @property
    def lines(self) -> tuple[Line, ...]:
        """The lines of all launches. A line that several functions run, as in a header, is there once for each."""
        return tuple(line for launch in self.launches for line in launch.lines)

    def at(self, line: int | str | None) -> tuple[Line, ...]:
        """The lines that ``line`` means: a number, ``"wmma_v2.cu:116"``, or the whole of :attr:`Line.source`. ``None``:
        the line with most bank conflicts or, if there are none, most sectors beyond the ideal ones.

        Raises:
            ValueError: memory is accessed in no such line, or in several files' line of that number.
        """
        lines = [known for known in self.lines if known.requests]
        if not lines:
            raise ValueError(f"{self.kernel} accesses no memory")
        if line is None:
            worst = max(lines, key=_waste)
            return tuple(known for known in lines if known.source == worst.source)
        wanted = str(line)
        found = [known for known in lines if _means(wanted, known.source)]
        sources = list(dict.fromkeys(known.source for known in found))
        if len(sources) != 1:
            allowed = sources or list(dict.fromkeys(known.source for known in lines))
            refuse("line", repr(line), ", ".join(allowed))
        return tuple(found)

    def to_dict(self) -> dict[str, Any]:
        """All figures, in plain types."""
        return {
            "kernel": self.kernel,
            "inputs": self.inputs,
            "arch": self.arch,
            "products": self.products,
            "read_bytes": self.read_bytes,
            "written_bytes": self.written_bytes,
            "ideal_read_bytes": self.ideal_read_bytes,
            "ideal_written_bytes": self.ideal_written_bytes,
            "counts": self.counts.to_dict(),
            "launches": [
                {
                    "function": launch.function,
                    "launches": launch.launches,
                    "grid": launch.grid,
                    "block": launch.block,
                    "smem_bytes": launch.smem_bytes,
                    "warps": launch.warps,
                    "occupancy": None
                    if launch.occupancy is None
                    else {**asdict(launch.occupancy), "percent": launch.occupancy.percent},
                    "counts": launch.counts.to_dict(),
                    "lines": [
                        {
                            "source": line.source,
                            "text": line.text,
                            "counts": line.counts.to_dict(),
                            "worst_requests": [asdict(request) for request in line.requests],
                        }
                        for line in launch.lines
                    ],
                    "timeline": [asdict(wait) for wait in launch.timeline],
                }
                for launch in self.launches
            ],
        }

    def to_json(self, indent: int | None = 1) -> str:
        """All figures, derived ones included, in total, by launch and by source line."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)

    def _shown(self) -> _report.Report:
        inputs = f": {self.inputs}" if self.inputs else ""
        title = f"{self.kernel} in the emulator, as on sm_{self.arch}{inputs}"
        return _report.Report(title, self.launches, self.products, self.ideal_read_bytes, self.ideal_written_bytes)

    def __str__(self) -> str:
        return _report.text(self._shown())

    def __rich__(self) -> object:
        return _report.renderable(self._shown())

    def plot_banks(self, line: int | str | None = None, path: str | Path | None = None) -> Any:
        """Draws which lane touches which bank of shared memory, or which sector of global memory, in the line's request
        with most wavefronts or sectors: lanes downwards, banks or sectors to the right. Where banks conflict, the
        colour is the pass in which a lane is served.

        Args:
            line: as in :meth:`at`.
            path: a file to write, such as ``"banks.png"``.

        Returns:
            The matplotlib figure. Without ``path`` it is pyplot's too, and ``matplotlib.pyplot.show()`` shows it.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: as :meth:`at`.
        """
        return _plots.banks(self.at(line), self.kernel, path)

    def plot_timeline(self, path: str | Path | None = None) -> Any:
        """Draws when the warps of block 0 run and when they wait at a barrier, over logical time (:class:`Event`). For
        a kernel with tensor copies or warpgroup products it draws these, and the waits, of each warp or warpgroup.

        Args and returns: as :meth:`plot_banks`.

        Raises:
            ImportError: matplotlib is missing.
            ValueError: no function that was launched has barriers.
        """
        return _plots.timeline(self.launches, self.kernel, path)


def _waste(line: Line) -> tuple[int, int]:
    both = line.counts.global_
    return line.counts.bank_conflicts, both.sectors - both.ideal_sectors


def _means(wanted: str, source: str) -> bool:
    return wanted == source or source.endswith((f"/{wanted}", f":{wanted}"))
