"""What `emulate` returns."""

from __future__ import annotations

import linecache
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import EmulatorError
from .requests import FIGURES
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
        Whether the run was traced. Without a trace, asking for `races` or any other
        part of it is an error: an empty list would look like a clean bill.
    dropped : int
        Accesses that `accesses` leaves out, because it keeps the first million. The
        rest of the report is made from all of them.
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

    def score(self) -> str:
        """`counts` as a table, in the form of GPU-Puzzles' score.

        An atomic is neither a read nor a write here; it gets a column if there is one.
        """
        counts = self.counts
        columns = [f"{s} {k}" for s in ("global", "shared") for k in ("read", "write")]
        columns += [key for key in counts if key.endswith("atomic")]
        names = [f"{key.title()}s" for key in columns]
        figures = [str(counts.get(key, 0)) for key in columns]
        rows = [
            "| " + " | ".join(f"{text:>13}" for text in row) + " |"
            for row in (names, figures)
        ]
        return "\n".join(["Score (Max Per Thread):", *rows])

    @cached_property
    def accesses(self) -> pandas.DataFrame:
        """Every access, in the order of execution.

        Columns: block (x, y, z), phase (block barriers passed), lane (in the block),
        array, space, index (tuple; the first element's), elements (more than one if a
        wide instruction took them at once), kind ("read", "write", "atomic"), line.
        """
        import pandas as pd

        trace = self._trace("accesses")
        table = trace.accesses()
        names = [array.name for array in trace.arrays]
        spaces = [array.space for array in trace.arrays]
        widths = [array.width for array in trace.arrays]
        index = np.empty(len(table["lane"]), object)
        for number in np.unique(table["array"]):
            rows = np.flatnonzero(table["array"] == number)
            parts = trace.arrays[number].index_of(table["offset"][rows])
            index[rows] = _tuples(parts, len(rows))
        blocks = np.empty(len(trace.blocks), object)
        blocks[:] = trace.blocks
        places = np.stack([table["code"], table["lasti"]])
        unique, which = np.unique(places, axis=1, return_inverse=True)
        lines = [line_of(trace.codes[code], lasti) for code, lasti in unique.T.tolist()]
        return pd.DataFrame(
            {
                "block": blocks[table["block"]],
                "phase": table["phase"],
                "lane": table["lane"],
                "array": np.array(names, object)[table["array"]],
                "space": np.array(spaces, object)[table["array"]],
                "index": index,
                "elements": np.array(widths, int)[table["array"]],
                "kind": np.array(list(KINDS.values()), object)[table["kind"]],
                "line": np.array(lines, int)[which],
            }
        )

    @cached_property
    def barriers(self) -> pandas.DataFrame:
        """Every block barrier: block, phase (that it ended), name, file, line.

        The first million of them.
        """
        import pandas as pd

        trace = self._trace("barriers")
        rows = [
            (trace.blocks[n], phase, name, site.f_code.co_filename, site.f_lineno)
            for n, phase, (name, site) in trace.barriers
        ]
        return pd.DataFrame(rows, columns=["block", "phase", "name", "file", "line"])

    @cached_property
    def memory(self) -> pandas.DataFrame:
        """What each source line costs, by array: warp requests, sectors, conflicts.

        Columns: file, line, source, array, space, kind,

        - requests: loads or stores of a warp;
        - lanes: active lanes a request;
        - sectors, sectors_at_best: of 32 bytes a request of global memory, and the
          number that its distinct bytes would fill if they lay together;
        - passes, passes_at_best: over the banks of shared memory a request, and the
          number without bank conflicts;
        - conflicts: passes beyond that, of all requests.

        It is what the source asks for: the compiler may keep values in registers or
        join neighbouring loads, and caches are not counted. Allocations start at a
        multiple of 256 bytes, as on the GPU. How lanes are put together to requests is
        told in `requests.py`; lanes that skip an access in some iterations of a loop
        shift it.
        """
        rows = self._requests("memory")
        keys = ["file", "line", "source", "array", "space", "kind"]
        table = rows.groupby(keys, as_index=False)[list(FIGURES)].sum()
        result = table[[*keys, "requests"]].copy()
        result["lanes"] = table["lanes"] / table["requests"]
        for space, figure in (("global", "sectors"), ("shared", "passes")):
            for name in (figure, f"{figure}_at_best"):
                mean = table[name] / table["requests"]
                result[name] = mean.where(table["space"] == space)
        beyond = table["passes"] - table["passes_at_best"]
        result["conflicts"] = beyond.where(table["space"] == "shared")
        return result

    @cached_property
    def divergence(self) -> pandas.DataFrame:
        """Where only a part of a warp was active, as far as the trace can see it.

        One row a source line and operation (an access or a warp collective) that was
        executed by fewer lanes than the warp has, at least once; none if there is no
        such line. A branch without either is not seen.

        Columns: file, line, source, what, executed (by a warp), partial (of those, by
        fewer lanes), lanes (on average), fewest_lanes.
        """
        import pandas as pd

        trace = self._trace("divergence")
        columns = ["executed", "partial", "lanes", "fewest_lanes"]
        keys = ["file", "line", "source", "what"]
        made = self._requests("divergence").rename(columns={"requests": "executed"})
        made["what"] = made["kind"] + " " + made["array"]
        met = [
            (*_place(site.f_code, site.f_lasti), name, *figures)
            for (name, site), figures in trace.meetings.items()
        ]
        rows = [*made[keys + columns].itertuples(index=False, name=None), *met]
        table = pd.DataFrame(rows, columns=keys + columns)
        table = table.astype(dict.fromkeys(columns, int))
        folds = dict.fromkeys(columns, "sum") | {"fewest_lanes": "min"}
        table = table.groupby(keys, as_index=False).agg(folds)
        table["lanes"] = table["lanes"] / table["executed"]
        return table[table["partial"] > 0].reset_index(drop=True)

    def _requests(self, wanted: str) -> pandas.DataFrame:
        """Total requests, one row an instruction, array and kind."""
        import pandas as pd

        trace = self._trace(wanted)
        rows: list[tuple[Any, ...]] = []
        for (code, lasti, number, kind), figures in trace.requests.totals.items():
            array = trace.arrays[number]
            place = _place(trace.codes[code], lasti)
            rows.append((*place, array.name, array.space, KINDS[kind], *figures))
        keys = ["file", "line", "source", "array", "space", "kind"]
        table = pd.DataFrame(rows, columns=[*keys, *FIGURES])
        return table.astype(dict.fromkeys(FIGURES, int))

    def __repr__(self) -> str:
        text = f"<Report {self.kernel} grid {self.grid} block {self.block}"
        if self.traced:
            text += f", {len(self._races)} races"
        if self.dropped:
            text += f", {self.dropped} accesses not kept"
        return text + ">"


def _place(code: Any, lasti: int) -> tuple[str, int, str]:
    """File, line and source text of an instruction."""
    line = line_of(code, lasti)
    return code.co_filename, line, linecache.getline(code.co_filename, line).strip()


def _tuples(parts: tuple[np.ndarray, ...], n: int) -> np.ndarray:
    found = np.empty(n, object)
    found[:] = list(zip(*(part.tolist() for part in parts), strict=True)) or [()] * n
    return found
