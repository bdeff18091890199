"""What every lane touched, and which accesses race.

Two accesses race when they touch a common byte, come from different lanes, at least one
writes, they are not both atomic, and nothing orders them: no block barrier lies between
them, no `syncwarp` that both lanes took part in, or they come from different blocks.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType
from typing import Any

import numpy as np

from .arrays import ATOMIC, READ, WRITE, Array
from .errors import source_line
from .lanes import Lane

__all__ = ["KINDS", "Race", "Recorder", "Table", "line_of"]

KINDS = {READ: "read", WRITE: "write", ATOMIC: "atomic"}

#: Accesses held as Python tuples before they are packed into columns.
PACK_AT = 200_000

#: Accesses kept for `Report.accesses`; counts and races see all of them.
KEEP = 4_000_000

#: Columns of the packed trace: column name -> dtype, one row an access.
COLUMNS = {
    "block": np.int32,  # number in the order of running
    "phase": np.int32,  # block barriers passed
    "lane": np.int32,
    "array": np.int32,  # Array.number
    "offset": np.int64,  # element of the array
    "kind": np.int8,
    "lasti": np.int32,  # instruction in the code
    "code": np.int32,
    "run": np.int32,  # stretch between two waits of a lane, in the block
}
Table = dict[str, np.ndarray]


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders.

    Attributes
    ----------
    array, space, index
        The element, as ``array[index]``; the space is "shared" or "global".
    kinds : tuple of str
        "read", "write" or "atomic", of the two accesses.
    blocks, phases, lanes, linenos, filenames : tuple
        Of the two accesses, the earlier line first. `lanes` count through the block; a
        phase is what lies between two block barriers.
    count : int
        Places (element and phase) that race in this way: same array, kinds and lines.
    """

    array: str
    space: str
    index: tuple[int, ...]
    kinds: tuple[str, str]
    blocks: tuple[tuple[int, int, int], tuple[int, int, int]]
    phases: tuple[int, int]
    lanes: tuple[int, int]
    filenames: tuple[str, str]
    linenos: tuple[int, int]
    count: int = 1

    @property
    def between_blocks(self) -> bool:
        """Whether the two lanes belong to different blocks."""
        return self.blocks[0] != self.blocks[1]

    def __str__(self) -> str:
        index = ", ".join(map(str, self.index))
        also = f" (and {self.count - 1} more places)" if self.count > 1 else ""
        lines = [f"race on {self.space} {self.array}[{index}]{also}"]
        for n in (0, 1):
            where = source_line(self.filenames[n], self.linenos[n])
            lines.append(
                f"  {self.kinds[n]} by block {self.blocks[n]} lane {self.lanes[n]} "
                f"in phase {self.phases[n]}, {where}"
            )
        return "\n".join(lines)


class Recorder:
    """Collects the accesses of a traced run.

    The arrays append ``(array number * 4 + kind, element, instruction, code)`` to
    `log`; whose accesses they are follows from the hub's `mark`s.
    """

    def __init__(self) -> None:
        self.log: list[tuple[int, int, int, CodeType]] = []
        self.arrays: list[Array] = []
        self.blocks: list[tuple[int, int, int]] = []
        self.codes: list[CodeType] = []
        self.most: dict[tuple[str, str], int] = {}
        self.kept: list[Table] = []
        self.dropped = 0
        self._code_numbers: dict[int, int] = {}
        self._marks: list[tuple[int, Lane, int]] = []
        self._clocks: list[tuple[int, tuple[int, ...]]] = []  # of the block's runs
        self._of_block: list[Table] = []
        self._global: list[Table] = []
        self._races: dict[tuple[Any, ...], Race] = {}

    # -- while the kernel runs --------------------------------------------------------

    def register(self, array: Array) -> int:
        """A number for an array whose accesses will be logged."""
        self.arrays.append(array)
        return len(self.arrays) - 1

    def begin_block(self, block: tuple[int, int, int]) -> None:
        self.blocks.append(block)
        self._clocks.clear()

    def mark(self, lane: Lane, phase: int) -> None:
        """`lane` runs from here on."""
        if len(self.log) > PACK_AT:
            self._pack()
        self._marks.append((len(self.log), lane, phase))
        self._clocks.append((lane.index, lane.clock))

    def end_block(self) -> None:
        """Count what the block did, and look for its races."""
        self._pack()
        table = _joined(self._of_block)
        self._of_block.clear()
        self._count(table)
        self._find(table, ("phase",), "lane", self._ordered)
        self._global.append(self._first_of_each(table))
        room = max(0, KEEP - sum(len(t["lane"]) for t in self.kept))
        self.kept.append({name: column[:room] for name, column in table.items()})
        self.dropped += max(0, len(table["lane"]) - room)

    def finish(self) -> list[Race]:
        """The races of the whole run, those between blocks last."""
        self._find(_joined(self._global), (), "block", lambda a, b: False)
        self._global.clear()
        return list(self._races.values())

    def accesses(self) -> Table:
        """The kept accesses as columns."""
        return _joined(self.kept)

    # -- packing ----------------------------------------------------------------------

    def _pack(self) -> None:
        n = len(self.log)
        first_run = len(self._clocks) - len(self._marks)
        starts = np.array([start for start, _, _ in self._marks] + [n])
        lanes = np.array([lane.index for _, lane, _ in self._marks], np.int32)
        phases = np.array([phase for _, _, phase in self._marks], np.int32)
        run = np.repeat(np.arange(len(self._marks)), np.diff(starts))
        tags, offsets, lastis, codes = zip(*self.log, strict=True) if n else ((),) * 4
        tag = np.fromiter(tags, np.int64, n)
        columns = {
            "block": np.full(n, len(self.blocks) - 1),
            "phase": phases[run],
            "lane": lanes[run],
            "array": tag >> 2,
            "offset": np.fromiter(offsets, np.int64, n),
            "kind": tag & 3,
            "lasti": np.fromiter(lastis, np.int32, n),
            "code": self._code_numbers_of(codes),
            "run": run + first_run,
        }
        self._of_block.append(
            {name: columns[name].astype(dtype) for name, dtype in COLUMNS.items()}
        )
        self.log.clear()
        # What the running lane logs next belongs to a run of its own.
        self._marks = []

    def _code_numbers_of(self, codes: Sequence[CodeType]) -> np.ndarray:
        ids = np.fromiter(map(id, codes), np.int64, len(codes))
        ids, first, which = np.unique(ids, return_index=True, return_inverse=True)
        for key, row in zip(ids.tolist(), first, strict=True):
            if key not in self._code_numbers:
                self._code_numbers[key] = len(self.codes)
                self.codes.append(codes[row])  # kept alive, so its id stays its own
        return np.array([self._code_numbers[key] for key in ids.tolist()], int)[which]

    def _count(self, table: Table) -> None:
        """Keep the largest number of accesses of one lane, by space and kind."""
        space_of_row = self._of_array(table, "space")
        for space in ("global", "shared"):
            for kind, name in KINDS.items():
                rows = (space_of_row == space) & (table["kind"] == kind)
                if rows.any():
                    most = int(np.bincount(table["lane"][rows]).max())
                    key = space, name
                    self.most[key] = max(self.most.get(key, 0), most)

    def _first_of_each(self, table: Table) -> Table:
        """One access a global element and kind: enough to see races between blocks."""
        rows = np.flatnonzero(self._of_array(table, "space") == "global")
        keys = tuple(table[name][rows] for name in ("array", "offset", "kind"))
        order = np.lexsort(keys)  # stable: the first access stays first
        rows = np.sort(rows[order[_starts(*(key[order] for key in keys))]])
        return {name: column[rows] for name, column in table.items()}

    def _of_array(self, table: Table, attribute: str) -> np.ndarray:
        """An attribute of every row's array."""
        numbers, which = np.unique(table["array"], return_inverse=True)
        return np.array([getattr(self.arrays[n], attribute) for n in numbers])[which]

    # -- races ------------------------------------------------------------------------

    def _ordered(self, before: int, after: int) -> bool:
        """Whether a `syncwarp` orders two runs of the block (`before` ran first)."""
        lane, clock = self._clocks[before]
        other, later = self._clocks[after]
        return lane // 32 == other // 32 and later[lane % 32] >= clock[lane % 32]

    def _find(
        self,
        table: Table,
        within: tuple[str, ...],
        owner: str,
        ordered: Callable[[int, int], bool],
    ) -> None:
        """Add the races among accesses that agree in `within`, by different owners."""
        for rows in self._suspects(table, within, owner):
            told = set()
            for a, b in _unordered_pairs(table, rows, owner, ordered):
                race = self._race(table, a, b)
                key = (
                    race.array, race.kinds, race.filenames, race.linenos,
                    race.between_blocks,
                )  # fmt: skip
                if key in told:
                    continue
                told.add(key)
                known = self._races.get(key)
                self._races[key] = (
                    replace(known, count=known.count + 1) if known else race
                )

    def _suspects(
        self, table: Table, within: tuple[str, ...], owner: str
    ) -> Iterator[np.ndarray]:
        """Rows of every place that several owners touch, not all in harmless ways."""
        if not len(table["lane"]):
            return
        rows, place = self._places(table)
        # Stable: inside a group the rows stay in the order of execution.
        order = np.lexsort((place, *(table[name][rows] for name in within)))
        rows, place = rows[order], place[order]
        starts = _starts(place, *(table[name][rows] for name in within))
        owners, kinds = table[owner][rows], table["kind"][rows]
        several = np.minimum.reduceat(owners, starts) != np.maximum.reduceat(
            owners, starts
        )
        writes = np.logical_or.reduceat(kinds == WRITE, starts)
        atomics = np.logical_or.reduceat(kinds == ATOMIC, starts)
        reads = np.logical_or.reduceat(kinds == READ, starts)
        ends = np.append(starts[1:], len(rows))
        for group in np.flatnonzero(several & (writes | (atomics & reads))):
            yield rows[starts[group] : ends[group]]

    def _places(self, table: Table) -> tuple[np.ndarray, np.ndarray]:
        """``(row, place)``: the memory that rows touch, in the largest common unit."""
        size = self._of_array(table, "itemsize")
        address = self._of_array(table, "address")
        address = address + table["offset"] * size
        unit = int(np.gcd.reduce(np.gcd(address, size)))
        count = size // unit
        rows = np.repeat(np.arange(len(size)), count)
        inside = np.arange(len(rows)) - np.repeat(np.cumsum(count) - count, count)
        return rows, address[rows] // unit + inside

    def _race(self, table: Table, a: int, b: int) -> Race:
        a, b = sorted((a, b), key=lambda row: self._side(table, row))

        def both(column: str) -> tuple[Any, Any]:
            return table[column][a].item(), table[column][b].item()

        first, second = (self.arrays[n] for n in both("array"))
        name = first.name
        if second.name != name:
            name = f"{first.name}/{second.name}"  # two arguments, the same memory
        kinds, blocks = both("kind"), both("block")
        sides = self._side(table, a), self._side(table, b)
        return Race(
            array=name,
            space=first.space,
            index=first.index_of(table["offset"][a].item()),
            kinds=(KINDS[kinds[0]], KINDS[kinds[1]]),
            blocks=(self.blocks[blocks[0]], self.blocks[blocks[1]]),
            phases=both("phase"),
            lanes=both("lane"),
            filenames=(sides[0][0], sides[1][0]),
            linenos=(sides[0][1], sides[1][1]),
        )

    def _side(self, table: Table, row: int) -> tuple[str, int, int]:
        """File, line and kind of an access: what a race's two sides are sorted by.

        Which of the two ran first says nothing; it follows from the order of the lanes.
        """
        code = self.codes[table["code"][row]]
        line = line_of(code, table["lasti"][row].item())
        return code.co_filename, line, table["kind"][row].item()


def _unordered_pairs(
    table: Table,
    rows: np.ndarray,
    owner: str,
    ordered: Callable[[int, int], bool],
) -> Iterator[tuple[int, int]]:
    """Racing pairs among accesses to one place, given in the order of execution.

    An access is held against the last write and against the reads and atomics since:
    as in FastTrack (Flanagan and Freund 2009), that misses no place with a race.
    """
    owners, kinds, runs = (table[c][rows].tolist() for c in (owner, "kind", "run"))
    against = {READ: (WRITE, ATOMIC), ATOMIC: (WRITE, READ), WRITE: tuple(KINDS)}
    last: dict[int, dict[int, int]] = {kind: {} for kind in KINDS}
    for n, kind in enumerate(kinds):
        for other in against[kind]:
            for m in last[other].values():
                if owners[m] != owners[n] and not ordered(runs[m], runs[n]):
                    yield int(rows[m]), int(rows[n])
        if kind == WRITE:
            for seen in last.values():
                seen.clear()
        last[kind][owners[n]] = n


def _starts(*columns: np.ndarray) -> np.ndarray:
    """Where a new combination begins in sorted columns."""
    new = np.ones(len(columns[0]), bool)
    new[1:] = np.logical_or.reduce([column[1:] != column[:-1] for column in columns])
    return np.flatnonzero(new)


def _joined(tables: list[Table]) -> Table:
    return {
        name: np.concatenate([t[name] for t in tables] or [np.zeros(0, dtype)])
        for name, dtype in COLUMNS.items()
    }


@lru_cache(maxsize=256)
def _lines(code: CodeType) -> tuple[list[int], list[int]]:
    spans = [(start, line or 0) for start, _, line in code.co_lines()]
    return [start for start, _ in spans], [line for _, line in spans]


def line_of(code: CodeType, lasti: int) -> int:
    """The source line of an instruction."""
    starts, lines = _lines(code)
    return lines[bisect_right(starts, lasti) - 1]
