"""What every lane touched, and which accesses race.

Two accesses race when they touch a common byte, come from different lanes, at least one
writes, they are not both atomic, and nothing orders them: no block barrier lies between
them, no chain of `syncwarp`, named barriers and mbarriers leads from one to the other
(`clocks.py`), or they come from different blocks. What copies in bulk write and `wgmma`
reads are accesses of units that count as lanes of their own, behind the last.

Blocks are ordered as a whole: what a block did before a `threadfence` comes before what
another does after it has waited for a counter that the first raised after its fence.

What is held at once is bounded. When more than `HOLD` accesses have come together, or a
block has ended, they are looked at and let go. Of the phase that has not ended, and of
global memory for the whole run, two accesses an element and kind are kept, by two lanes
or blocks: enough to see that a later one races. (Not enough in one case: a phase of
more than `HOLD` accesses in which a `syncwarp` orders those two and not the others.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import CodeType
from typing import Any, NamedTuple

import numpy as np

from .arrays import ATOMIC, READ, WRITE, Array
from .clocks import Clock
from .errors import source_line
from .lanes import WARP
from .requests import Requests, starts
from .sites import Instructions, Site

__all__ = ["KINDS", "Race", "Recorder", "Table", "line_of"]

KINDS = {READ: "read", WRITE: "write", ATOMIC: "atomic"}

#: Accesses held as Python tuples before they are packed into columns.
PACK_AT = 100_000

#: Accesses held in columns (about 40 bytes each) before they are looked at.
HOLD = 1_000_000

#: Accesses kept for `Report.accesses`; everything else sees all of them.
KEEP = 1_000_000

#: Columns of the packed trace: column name -> dtype, one row an access.
COLUMNS = {
    "block": np.int32,  # number in the order of running
    "phase": np.int32,  # block barriers passed
    "lane": np.int32,
    "array": np.int32,  # Array.number
    "offset": np.int64,  # element of the array
    "kind": np.int8,
    "lasti": np.int32,  # the first instruction of a place in the code
    "code": np.int32,
    "run": np.int32,  # stretch between two waits of a lane, in the block
}
Table = dict[str, np.ndarray]

#: Where a lane waited: the operation and the place.
Meeting = tuple[str, Site]


@dataclass(frozen=True)
class Race:
    """Two accesses that nothing orders.

    Attributes
    ----------
    kernel : str
    array, space, index
        The element, as ``array[index]``; the space is "shared" or "global".
    kinds : tuple of str
        "read", "write" or "atomic", of the two accesses.
    blocks, phases, lanes, names, linenos, filenames : tuple
        Of the two accesses, the earlier line first. `lanes` count through the block
        (`names` says "lane 5" or which unit it is); a phase is what lies between two
        block barriers.
    count : int
        Places (element, block and phase) that race in this way: same array, kinds and
        lines.
    """

    kernel: str
    array: str
    space: str
    index: tuple[int, ...]
    kinds: tuple[str, str]
    blocks: tuple[tuple[int, int, int], tuple[int, int, int]]
    phases: tuple[int, int]
    lanes: tuple[int, int]
    names: tuple[str, str]
    filenames: tuple[str, str]
    linenos: tuple[int, int]
    count: int = 1

    @property
    def between_blocks(self) -> bool:
        """Whether the two lanes belong to different blocks."""
        return self.blocks[0] != self.blocks[1]

    def __str__(self) -> str:
        index = ", ".join(map(str, self.index))
        also = f" (and {self.count - 1} more like it)" if self.count > 1 else ""
        lines = [f"race in {self.kernel} on {self.space} {self.array}[{index}]{also}"]
        for n in (0, 1):
            where = source_line(self.filenames[n], self.linenos[n])
            lines.append(
                f"  {self.kinds[n]} by block {self.blocks[n]} {self.names[n]} "
                f"in phase {self.phases[n]}, {where}"
            )
        return "\n".join(lines)


class _Stage(NamedTuple):
    """What a block does between two points where it meets others.

    `known`: of other blocks by number, the last stage that comes before this one.
    """

    block: int
    own: int
    known: dict[int, int]


class _Run(Clock):
    """A stretch between two waits of a lane, with its time; `stage` by number."""

    __slots__ = ("stage",)

    def __init__(self, clock: Clock, stage: int) -> None:
        super().__init__(clock.index, clock.known, clock.own)
        self.stage = stage


class _OfBlock:
    """The trace of a block that has not ended.

    Attributes
    ----------
    number : int
        Of the block.
    marks : list
        Where in the log a lane began to run: (position, lane, phase, run).
    runs : list of _Run
    stage : int
        The number of its present stage.
    counts : dict
        ``{(space, kind): accesses of every lane}``
    held : list of Table
    carried : Table
        Of the phase that is not over.
    """

    def __init__(self, number: int, stage: int) -> None:
        self.number = number
        self.stage = stage
        self.marks: list[tuple[int, int, int, int]] = []
        self.runs: list[_Run] = []
        self.counts: dict[tuple[str, str], np.ndarray] = {}
        self.held: list[Table] = []
        self.carried = _joined([])


class Recorder:
    """Collects the accesses of a traced run.

    The arrays hand `note` their ``(array number * 4 + kind, element, instruction,
    code)``; whose accesses they are follows from the hub's `mark`s.

    Attributes
    ----------
    kernel : str
    n_lanes : int
        Of a block.
    arrays, blocks, codes : list
        By their numbers in the trace.
    most : dict
        ``{(space, kind): accesses of the busiest lane}``
    requests : Requests
    meetings : dict
        ``{where: [warp collectives, partial ones, their lanes, the fewest]}``
    barriers : list
        ``(block number, phase that ended, where)``
    dropped : int
        Accesses that are not kept for `Report.accesses`.
    """

    def __init__(self, kernel: str, n_lanes: int) -> None:
        self.kernel = kernel
        self.n_lanes = n_lanes
        self.log: list[tuple[int, int, int, CodeType]] = []
        self.arrays: list[Array] = []
        self.blocks: list[tuple[int, int, int]] = []
        self.codes: list[CodeType] = []
        self.most: dict[tuple[str, str], int] = {}
        self.requests = Requests()
        self.meetings: dict[Meeting, list[int]] = {}
        self.barriers: list[tuple[int, int, Meeting]] = []
        self.kept: list[Table] = []
        self.dropped = 0
        self.note = self._make_note()
        self._array_numbers: dict[tuple[Any, ...], int] = {}
        self._code_numbers: dict[int, int] = {}
        self._now: _OfBlock
        self._global: list[Table] = []  # with stages as runs
        self._stages: list[_Stage] = []
        self._posted: dict[int, dict[int, int]] = {}  # what atomics tell, by address
        self._merge_at = PACK_AT
        self._races: dict[tuple[Any, ...], Race] = {}

    # -- while the kernel runs --------------------------------------------------------

    def _make_note(self) -> Callable[[tuple[int, int, int, CodeType]], None]:
        log, append = self.log, self.log.append

        def note(access: tuple[int, int, int, CodeType]) -> None:
            append(access)
            if len(log) >= PACK_AT:
                self._pack()

        return note

    def register(self, array: Array) -> int:
        """The number of an array whose accesses will be logged."""
        key = (
            array.name, array.space, array.address, array.itemsize, array.shape,
            array.steps,
        )  # fmt: skip
        number = self._array_numbers.setdefault(key, len(self.arrays))
        if number == len(self.arrays):
            self.arrays.append(array)
        return number

    def begin_block(self, block: tuple[int, int, int]) -> _OfBlock:
        """The trace of a new block, for `enter_block`."""
        number = len(self.blocks)
        self.blocks.append(block)
        self._stages.append(_Stage(number, 1, {}))
        return _OfBlock(number, len(self._stages) - 1)

    def enter_block(self, block: _OfBlock) -> None:
        """What follows is of that block."""
        self._now = block

    def mark(self, clock: Clock, phase: int) -> None:
        """A lane (or a unit beside the lanes) runs from here on."""
        now = self._now
        if len(now.marks) >= PACK_AT:
            self._pack()
        now.marks.append((len(self.log), clock.index, phase, len(now.runs)))
        now.runs.append(_Run(clock, now.stage))

    def fence(self, clock: Clock, phase: int) -> None:
        """The block may tell others from here on what it did so far."""
        self._next_stage(clock, phase, {})

    def post(self, address: int) -> None:
        """The block raises a counter: it tells what it did before its last fence."""
        stage = self._stages[self._now.stage]
        if stage.own > 1:
            told = self._posted.setdefault(address, {})
            _add(told, {**stage.known, stage.block: stage.own - 1})

    def acquire(self, clock: Clock, phase: int, address: int) -> None:
        """The block has waited for a counter: it knows what that was told."""
        self._next_stage(clock, phase, self._posted.get(address, {}))

    def _next_stage(self, clock: Clock, phase: int, told: dict[int, int]) -> None:
        before = self._stages[self._now.stage]
        known = dict(before.known)
        _add(known, told)
        self._now.stage = len(self._stages)
        self._stages.append(_Stage(before.block, before.own + 1, known))
        self.mark(clock, phase)

    def meet(self, where: Meeting, n_lanes: int, n_there: int) -> None:
        """`n_lanes` of a warp's `n_there` lanes met at a collective."""
        known = self.meetings.setdefault(where, [0, 0, 0, WARP])
        known[0] += 1
        known[1] += n_lanes < n_there
        known[2] += n_lanes
        known[3] = min(known[3], n_lanes)

    def end_phase(self, phase: int, where: Meeting) -> None:
        """All lanes of the block met at a barrier."""
        if len(self.barriers) < KEEP:
            self.barriers.append((self._now.number, phase, where))

    def leave_block(self, ended: bool) -> None:
        """Another block runs next; one that has ended is looked at."""
        self._pack()
        if not ended:
            return
        self._look(phase=None)
        for key, counts in self._now.counts.items():
            self.most[key] = max(self.most.get(key, 0), int(counts.max()))

    def finish(self) -> list[Race]:
        """The races of the whole run, those between blocks last."""
        table = _joined(self._global)
        by_stage = np.argsort(table["run"], kind="stable")  # as they began
        self._find(_rows(table, by_stage), (), "block", self._blocks_ordered)
        self._global.clear()
        return list(self._races.values())

    def accesses(self) -> Table:
        """The kept accesses as columns."""
        return _joined(self.kept)

    # -- packing ----------------------------------------------------------------------

    def _pack(self) -> None:
        """Turn the log into columns."""
        if self.log:
            self._now.held.append(self._columns())
            self.log.clear()
        now = self._now
        if now.marks:
            _, lane, phase, run = now.marks[-1]  # whoever runs goes on running
            now.marks = [(0, lane, phase, run)]
            if sum(len(t["lane"]) for t in now.held) + len(now.runs) > HOLD:
                self._look(phase)

    def _columns(self) -> Table:
        n = len(self.log)
        begins, lanes, phases, runs = map(np.array, zip(*self._now.marks, strict=True))
        which = np.repeat(np.arange(len(begins)), np.diff(np.append(begins, n)))
        tags, offsets, lastis, codes = zip(*self.log, strict=True)
        tag = np.fromiter(tags, np.int64, n)
        code = self._code_numbers_of(codes)
        columns = {
            "block": np.full(n, self._now.number),
            "phase": phases[which],
            "lane": lanes[which],
            "array": tag >> 2,
            "offset": np.fromiter(offsets, np.int64, n),
            "kind": tag & 3,
            "lasti": self._instructions(code, np.fromiter(lastis, np.int32, n)),
            "code": code,
            "run": runs[which],
        }
        return {name: columns[name].astype(dtype) for name, dtype in COLUMNS.items()}

    def _code_numbers_of(self, codes: Sequence[CodeType]) -> np.ndarray:
        ids = np.fromiter(map(id, codes), np.int64, len(codes))
        ids, first, which = np.unique(ids, return_index=True, return_inverse=True)
        for key, row in zip(ids.tolist(), first, strict=True):
            if key not in self._code_numbers:
                self._code_numbers[key] = len(self.codes)
                self.codes.append(codes[row])  # kept alive, so its id stays its own
        return np.array([self._code_numbers[key] for key in ids.tolist()], int)[which]

    def _instructions(self, code: np.ndarray, lasti: np.ndarray) -> np.ndarray:
        """Where the place of each access in the source has its first instruction."""
        begin = np.empty_like(lasti)
        for number in np.unique(code):
            rows = code == number
            instructions = Instructions.of(self.codes[number])
            begin[rows] = instructions.first[instructions.at(lasti[rows])]
        return begin

    # -- looking ----------------------------------------------------------------------

    def _look(self, phase: int | None) -> None:
        """Take stock of what is held, of phases that are over if there are any.

        `phase` is not over (None: all are, the block has ended).
        """
        table, rest = _joined(self._now.held), _joined([])
        cut = False
        if phase is not None:
            over = table["phase"] != phase
            cut = not over.any()  # it alone fills the trace: look at a part of it
            if not cut:
                rest = _rows(table, np.flatnonzero(~over))
                table = _rows(table, np.flatnonzero(over))
        spaces = self._of_array(table, "space")
        by_lanes = table["lane"] < self.n_lanes
        self._take_stock(_rows(table, np.flatnonzero(by_lanes)), spaces[by_lanes])
        self._keep_global(_rows(table, np.flatnonzero(spaces == "global")))
        table = _joined([self._now.carried, table])
        self._find(table, ("phase",), "lane", self._ordered)
        going_on = np.flatnonzero(cut & (table["phase"] == phase))
        self._now.carried = _representatives(_rows(table, going_on), "lane")
        self._now.held = [rest]
        self._forget_runs()

    def _take_stock(self, table: Table, spaces: np.ndarray) -> None:
        """Count and keep accesses of lanes."""
        self._count(table, spaces)
        self.requests.add(table, self.arrays, spaces, self.n_lanes)
        room = max(0, KEEP - sum(len(t["lane"]) for t in self.kept))
        self.kept.append({name: column[:room] for name, column in table.items()})
        self.dropped += max(0, len(table["lane"]) - room)

    def _count(self, table: Table, spaces: np.ndarray) -> None:
        """Add to the block's accesses of every lane, by space and kind."""
        for space in ("global", "shared"):
            for kind, name in KINDS.items():
                rows = (spaces == space) & (table["kind"] == kind)
                if rows.any():
                    counts = np.bincount(table["lane"][rows], minlength=self.n_lanes)
                    before = self._now.counts.get((space, name), 0)
                    self._now.counts[space, name] = before + counts

    def _keep_global(self, table: Table) -> None:
        """Keep enough of global memory to see races between blocks."""
        stages = np.array([run.stage for run in self._now.runs], np.int32)
        table["run"] = stages[table["run"]]
        self._global.append(_representatives(table, "block"))
        if sum(len(t["lane"]) for t in self._global) > self._merge_at:
            merged = _representatives(_joined(self._global), "block")
            self._global = [merged]
            self._merge_at = max(PACK_AT, 2 * len(merged["lane"]))

    def _forget_runs(self) -> None:
        """Drop the clocks that no access at hand needs, and number the rest anew."""
        tables = [self._now.carried, *self._now.held]
        needed = np.unique(np.concatenate([t["run"] for t in tables]))
        for table in tables:
            table["run"] = np.searchsorted(needed, table["run"]).astype(np.int32)
        runs = [self._now.runs[n] for n in needed]
        if self._now.marks:
            position, lane, phase, run = self._now.marks[-1]
            self._now.marks = [(position, lane, phase, len(runs))]
            runs.append(self._now.runs[run])
        self._now.runs = runs

    def _of_array(self, table: Table, attribute: str) -> np.ndarray:
        """An attribute of every row's array."""
        numbers, which = np.unique(table["array"], return_inverse=True)
        return np.array([getattr(self.arrays[n], attribute) for n in numbers])[which]

    # -- races ------------------------------------------------------------------------

    def _ordered(self, before: int, after: int) -> bool:
        """Whether something orders two runs of the block (`before` ran first)."""
        first, second = self._now.runs[before], self._now.runs[after]
        return bool(second.known[first.index] >= first.own)

    def _blocks_ordered(self, one: int, other: int) -> bool:
        """Whether a counter orders two stages of different blocks."""
        a, b = self._stages[one], self._stages[other]
        return b.known.get(a.block, 0) >= a.own or a.known.get(b.block, 0) >= b.own

    def _find(
        self,
        table: Table,
        within: tuple[str, ...],
        owner: str,
        ordered: Callable[[int, int], bool],
    ) -> None:
        """Add the races among accesses that agree in `within`, by different owners."""
        for rows in self._suspects(table, within, owner):
            tried, told = set(), set()
            for a, b in _unordered_pairs(table, rows, owner, ordered):
                instructions = tuple(
                    table[name][row].item()
                    for name in ("array", "kind", "code", "lasti")
                    for row in (a, b)
                )
                if instructions in tried:
                    continue
                tried.add(instructions)
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
        begins = starts(place, *(table[name][rows] for name in within))
        owners, kinds = table[owner][rows], table["kind"][rows]
        several = np.minimum.reduceat(owners, begins) != np.maximum.reduceat(
            owners, begins
        )
        writes = np.logical_or.reduceat(kinds == WRITE, begins)
        atomics = np.logical_or.reduceat(kinds == ATOMIC, begins)
        reads = np.logical_or.reduceat(kinds == READ, begins)
        ends = np.append(begins[1:], len(rows))
        for group in np.flatnonzero(several & (writes | (atomics & reads))):
            yield rows[begins[group] : ends[group]]

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
            kernel=self.kernel,
            array=name,
            space=first.space,
            index=first.index_of(table["offset"][a].item()),
            kinds=(KINDS[kinds[0]], KINDS[kinds[1]]),
            blocks=(self.blocks[blocks[0]], self.blocks[blocks[1]]),
            phases=both("phase"),
            lanes=both("lane"),
            names=tuple(map(self._name, both("lane"))),  # type: ignore[arg-type]
            filenames=(sides[0][0], sides[1][0]),
            linenos=(sides[0][1], sides[1][1]),
        )

    def _name(self, lane: int) -> str:
        """A lane by its number, or the unit that stands behind the last lane."""
        if lane < self.n_lanes:
            return f"lane {lane}"
        group = lane - self.n_lanes - 1
        return "copy in bulk" if group < 0 else f"wgmma of warpgroup {group}"

    def _side(self, table: Table, row: int) -> tuple[str, int, int]:
        """File, line and kind of an access: what a race's two sides are sorted by.

        Which of the two ran first says nothing; it follows from the order of the lanes.
        """
        code = self.codes[table["code"][row]]
        line = line_of(code, table["lasti"][row].item())
        return code.co_filename, line, table["kind"][row].item()


def _add(known: dict[int, int], more: dict[int, int]) -> None:
    for block, stage in more.items():
        known[block] = max(known.get(block, 0), stage)


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


def _representatives(table: Table, owner: str) -> Table:
    """The first accesses of two owners to every element, in every kind."""
    keys = [table[name] for name in ("array", "offset", "kind")]
    order = np.lexsort(keys)  # stable: the first access stays first
    begins = starts(*(key[order] for key in keys))
    owners = table[owner][order]
    lengths = np.diff(np.append(begins, len(order)))
    others = np.flatnonzero(owners != np.repeat(owners[begins], lengths))
    _, second = np.unique(
        np.searchsorted(begins, others, side="right"), return_index=True
    )
    return _rows(table, np.sort(np.append(order[begins], order[others[second]])))


def _rows(table: Table, rows: np.ndarray) -> Table:
    return {name: column[rows] for name, column in table.items()}


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
