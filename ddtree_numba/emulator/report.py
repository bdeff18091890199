"""What `emulate` returns."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from .errors import EmulatorError
from .trace import KINDS, Race, Recorder, line_of

if TYPE_CHECKING:
    import pandas

__all__ = ["Report"]


class Report:
    """The result of one emulated launch.

    Attributes
    ----------
    kernel : str
        The kernel's name.
    grid, block : tuple of int
        x, y, z.
    traced : bool
        Whether the run was traced. Without a trace, asking for `races`, `counts` or
        `accesses` is an error: an empty list would look like a clean bill.
    dropped : int
        Accesses that `accesses` leaves out, because the trace keeps 4 million.
    """

    def __init__(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        recorder: Recorder | None,
    ) -> None:
        self.kernel = kernel
        self.grid = grid
        self.block = block
        self.traced = recorder is not None
        self.dropped = 0 if recorder is None else recorder.dropped
        self._recorder = recorder
        self._races = [] if recorder is None else recorder.finish()

    def _trace(self, wanted: str) -> Recorder:
        if self._recorder is None:
            raise EmulatorError(f"Report.{wanted} needs emulate(..., trace=True)")
        return self._recorder

    @property
    def races(self) -> list[Race]:
        """Accesses that nothing orders, one entry a pair of source lines."""
        self._trace("races")
        return self._races

    @property
    def counts(self) -> dict[str, int]:
        """Accesses of the busiest lane: ``{"global read": 3, "shared write": 1}``."""
        most = self._trace("counts").most
        return {" ".join(key): most[key] for key in sorted(most)}

    @cached_property
    def accesses(self) -> pandas.DataFrame:
        """Every access, in the order of execution.

        Columns: block (x, y, z), phase (block barriers passed), lane (in the block),
        array, space, index (tuple), kind ("read", "write", "atomic"), line.
        """
        import pandas as pd

        trace = self._trace("accesses")
        table = trace.accesses()
        names = [array.name for array in trace.arrays]
        spaces = [array.space for array in trace.arrays]
        index = np.empty(len(table["lane"]), object)
        for number in np.unique(table["array"]):
            rows = np.flatnonzero(table["array"] == number)
            parts = trace.arrays[number].index_of(table["offset"][rows])
            index[rows] = _tuples(parts, len(rows))
        blocks = np.empty(len(trace.blocks), object)
        blocks[:] = trace.blocks
        lines = [
            line_of(trace.codes[code], lasti)
            for code, lasti in zip(table["code"], table["lasti"].tolist(), strict=True)
        ]
        return pd.DataFrame(
            {
                "block": blocks[table["block"]],
                "phase": table["phase"],
                "lane": table["lane"],
                "array": np.array(names, object)[table["array"]],
                "space": np.array(spaces, object)[table["array"]],
                "index": index,
                "kind": np.array(list(KINDS.values()), object)[table["kind"]],
                "line": lines,
            }
        )

    def __repr__(self) -> str:
        text = f"<Report {self.kernel} grid {self.grid} block {self.block}"
        return text + (f", {len(self._races)} races>" if self.traced else ">")


def _tuples(parts: tuple[np.ndarray, ...], n: int) -> np.ndarray:
    found = np.empty(n, object)
    found[:] = list(zip(*(part.tolist() for part in parts), strict=True)) or [()] * n
    return found
