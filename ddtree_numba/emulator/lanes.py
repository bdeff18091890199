"""Lanes and the hub that runs them in lock-step.

Every lane of a block is a greenlet. The hub lets one lane run at a time, until it waits
at a barrier or a warp collective or returns. When no lane can run, the hub looks which
of them wait for each other (`Hub._release`), gives those their results and goes on; if
nobody can be released, the kernel is stuck and the hub says who waits where.
"""

from __future__ import annotations

import contextvars
import random
from collections import defaultdict
from collections.abc import Callable, Iterable
from sys import _getframe
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from .errors import (
    BarrierDivergenceError,
    DeadlockError,
    EmulatorError,
    KernelError,
    Place,
    StuckError,
    source_line,
)

if TYPE_CHECKING:
    from .copies import Copies
    from .trace import Recorder

__all__ = ["INSTRUCTIONS", "WARP", "Dim3", "Hub", "Lane"]

WARP = 32

#: Code that stands for one instruction of a kernel (intrinsics.py), wherever it is.
INSTRUCTIONS: set[CodeType] = set()

#: Rounds in which lanes only spin before the hub calls it a deadlock.
SPIN_LIMIT = 10_000

#: ``combine({lane: payload}) -> {lane: result}``
Combine = Callable[[dict[int, Any]], dict[int, Any]]


class Dim3:
    """x, y, z; the hub rewrites the one that is `threadIdx` at every switch."""

    __slots__ = ("x", "y", "z")

    def __init__(self, x: int = 0, y: int = 0, z: int = 0) -> None:
        self.x, self.y, self.z = x, y, z

    def tuple(self) -> tuple[int, int, int]:
        return self.x, self.y, self.z


class Wait:
    """What a lane waits for.

    `scope` is ``"block"`` (all lanes of the block), ``"warp"`` (the lanes that `mask`
    names), ``"aligned"`` (the 32 lanes of a warp, at the same place), ``"converged"``
    (whoever of the warp comes to the same place), or ``"spin"`` (nobody: the lane only
    lets others run).
    """

    __slots__ = ("combine", "mask", "name", "orders_memory", "payload", "scope", "site")

    def __init__(
        self,
        scope: str,
        name: str,
        mask: int,
        payload: Any,
        combine: Combine | None,
        orders_memory: bool,
        site: tuple[Any, int],
    ) -> None:
        self.scope, self.name, self.mask, self.site = scope, name, mask, site
        self.payload, self.combine = payload, combine
        self.orders_memory = orders_memory


_FIRST_CLOCKS = [tuple(int(j == n) for j in range(WARP)) for n in range(WARP)]


class Lane:
    """One thread of a block.

    `index` counts through the block, x fastest. `clock` is a vector clock over the
    warp: the stretch between two warp barriers that this lane is in, and for every
    other lane the last stretch that is known to be over.
    """

    __slots__ = (
        "clock", "copies", "greenlet", "index", "laneid", "left", "result", "thread",
        "wait", "warp",
    )  # fmt: skip

    def __init__(self, index: int, thread: tuple[int, int, int]) -> None:
        self.index = index
        self.thread = thread
        self.warp, self.laneid = divmod(index, WARP)
        self.left = False
        self.wait: Wait | None = None
        self.result: Any = None
        self.copies: Copies | None = None  # its asynchronous copies, once it has any
        self.clock = _FIRST_CLOCKS[self.laneid]
        self.greenlet: greenlet


class Hub:
    """Runs the lanes of one block after another.

    Attributes
    ----------
    lane : Lane
        The lane that runs now.
    thread, block : Dim3
        `threadIdx` and `blockIdx` of that lane.
    """

    def __init__(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        order: str,
        seed: int,
        recorder: Recorder | None,
    ) -> None:
        self.kernel = kernel
        self.grid_dim = Dim3(*grid)
        self.block_dim = Dim3(*block)
        self.thread = Dim3()
        self.block = Dim3()
        self.order = order
        self.random = random.Random(seed)
        self.recorder = recorder
        self.phase = 0
        self.lane: Lane
        self.lanes: list[Lane] = []
        self.new_block: Callable[[], None] = lambda: None

    # -- what a lane calls ------------------------------------------------------------

    def rendezvous(
        self,
        scope: str,
        name: str,
        mask: int = 0,
        payload: Any = None,
        combine: Combine | None = None,
        orders_memory: bool = False,
        frame: FrameType | None = None,
    ) -> Any:
        """Wait for the other lanes; returns this lane's part of `combine`'s result.

        Parameters
        ----------
        scope, name, mask
            Who must come (`Wait`), to what.
        payload
            What this lane brings.
        combine : callable, optional
            ``{lane: payload} -> {lane: result}``; lanes are numbered inside the warp
            (scope "block": inside the block).
        orders_memory : bool
            Whether accesses before it are ordered against accesses after it.
        frame : optional
            The kernel's; given if it is not the caller's caller.
        """
        frame = frame or _getframe(2)
        lane = self.lane
        lane.wait = Wait(
            scope, name, mask, payload, combine, orders_memory,
            (frame.f_code, frame.f_lasti),
        )  # fmt: skip
        self.main.switch()
        return lane.result

    # -- running ----------------------------------------------------------------------

    def run(self, body: Callable[[], None]) -> None:
        """Run `body` in every lane of every block."""
        self.main = getcurrent()
        for z, y, x in self._ordered(_box(self.grid_dim)):
            self.block.x, self.block.y, self.block.z = x, y, z
            self.phase = 0
            self.new_block()
            if self.recorder is not None:
                self.recorder.begin_block((x, y, z))
            try:
                self._run_block(body)
            finally:
                self._kill()
            if self.recorder is not None:
                self.recorder.end_block()

    def _ordered(self, items: Iterable[Any]) -> list[Any]:
        items = list(items)
        if self.order == "reverse":
            items.reverse()
        elif self.order == "shuffled":
            self.random.shuffle(items)
        return items

    def _run_block(self, body: Callable[[], None]) -> None:
        self.lanes = [
            Lane(n, (x, y, z)) for n, (z, y, x) in enumerate(_box(self.block_dim))
        ]
        for lane in self.lanes:
            lane.greenlet = greenlet(self._start)
            # A fresh greenlet has an empty context, NumPy's errstate is in ours.
            lane.greenlet.gr_context = contextvars.copy_context()
            lane.result = body
        ready = self.lanes
        spins = 0
        while ready:
            for lane in self._ordered(ready):
                self._switch_to(lane)
            ready = self._release()
            spins = spins + 1 if self._only_spins(ready) else 0
            if spins > SPIN_LIMIT:
                raise self._stuck("lanes spin and nothing changes")

    def _start(self) -> None:
        lane = self.lane
        lane.result()
        lane.left = True

    def _switch_to(self, lane: Lane) -> None:
        self.lane = lane
        thread = self.thread
        thread.x, thread.y, thread.z = lane.thread
        if self.recorder is not None:
            self.recorder.mark(lane, self.phase)
        try:
            lane.greenlet.switch()
        except EmulatorError as error:
            error.place = error.place or self._place(error, lane)
            raise
        except Exception as error:
            what = f"{type(error).__name__}: {error}"
            raise KernelError(what, self._place(error, lane)) from error

    def _place(self, error: BaseException, lane: Lane) -> Place:
        """The innermost frame of the error that is the kernel's own code."""
        filename, lineno = "?", 0
        trace = error.__traceback__
        while trace is not None:
            if _is_users(trace.tb_frame):
                filename, lineno = trace.tb_frame.f_code.co_filename, trace.tb_lineno
            trace = trace.tb_next
        block = self.block.tuple()
        return Place(self.kernel, filename, lineno, block, lane.index, lane.thread)

    def _kill(self) -> None:
        for lane in self.lanes:
            if lane.greenlet:  # started and not finished
                lane.greenlet.throw()

    # -- who may go on ----------------------------------------------------------------

    def _release(self) -> list[Lane]:
        """The lanes that may go on, now that none runs; raises when stuck."""
        waiting = [lane for lane in self.lanes if not lane.left]
        if not waiting:
            return []
        released = self._release_block(waiting) or self._release_warps(waiting)
        if not released:
            released = self._release_converged(waiting)
        if not released:
            raise self._stuck()
        return released

    def _release_block(self, waiting: list[Lane]) -> list[Lane]:
        first = waiting[0].wait
        assert first is not None
        if len(waiting) < len(self.lanes) or first.scope != "block":
            return []
        site, name = first.site, first.name
        for lane in waiting:
            if lane.wait.site != site or lane.wait.name != name:  # type: ignore[union-attr]
                return []
        self._combine(waiting, {lane.index: lane for lane in waiting})
        if self.recorder is not None:
            self.recorder.end_phase(self.phase, (name, *site))
        self.phase += 1
        return waiting

    def _release_warps(self, waiting: list[Lane]) -> list[Lane]:
        """Every complete warp collective, and every lane that spins."""
        groups: dict[tuple[int, str, int, Any], list[Lane]] = defaultdict(list)
        released = []
        for lane in waiting:
            wait = lane.wait
            assert wait is not None
            if wait.scope == "warp":
                groups[lane.warp, wait.name, wait.mask, None].append(lane)
            elif wait.scope == "aligned":
                groups[lane.warp, wait.name, wait.mask, wait.site].append(lane)
            elif wait.scope == "spin":
                released.append(lane)
        for (warp, _, mask, site), group in groups.items():
            needed = mask if site else mask & self._exists(warp)
            if len(group) == needed.bit_count():
                self._combine(group, {lane.laneid: lane for lane in group})
                released += group
        released.sort(key=lambda lane: lane.index)
        return released

    def _release_converged(self, waiting: list[Lane]) -> list[Lane]:
        groups: dict[tuple[int, Any], list[Lane]] = defaultdict(list)
        for lane in waiting:
            wait = lane.wait
            assert wait is not None
            if wait.scope == "converged":
                groups[lane.warp, wait.site].append(lane)
        for group in groups.values():
            self._combine(group, {lane.laneid: lane for lane in group})
        return [lane for group in groups.values() for lane in group]

    def _exists(self, warp: int) -> int:
        """The mask of the lanes that a warp has (the last one may be short)."""
        return (1 << min(WARP, len(self.lanes) - warp * WARP)) - 1

    def _combine(self, group: list[Lane], numbered: dict[int, Lane]) -> None:
        wait = group[0].wait
        assert wait is not None
        if self.recorder is not None and wait.scope != "block":
            there = self._exists(group[0].warp).bit_count()
            self.recorder.meet((wait.name, *wait.site), len(group), there)
        if wait.combine is not None:
            given = {n: lane.wait.payload for n, lane in numbered.items()}  # type: ignore[union-attr]
            results = wait.combine(given)
            for n, lane in numbered.items():
                lane.result = results[n]
        if wait.orders_memory and wait.scope == "warp":
            clocks = (lane.clock for lane in group)
            known = [max(counts) for counts in zip(*clocks, strict=True)]
            for lane in group:
                own = list(known)
                own[lane.laneid] += 1
                lane.clock = tuple(own)

    def _only_spins(self, ready: list[Lane]) -> bool:
        return bool(ready) and all(
            lane.wait is not None and lane.wait.scope == "spin" for lane in ready
        )

    # -- nobody may go on -------------------------------------------------------------

    def _stuck(self, reason: str = "") -> StuckError:
        waiting: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        scopes = set()
        for lane in self.lanes:
            if lane.left:
                continue
            assert lane.wait is not None
            filename, lineno = _users_line(lane.greenlet)
            waiting[lane.wait.name, filename, lineno].append(lane.index)
            scopes.add(lane.wait.scope)
        left = [lane.index for lane in self.lanes if lane.left]
        kind = BarrierDivergenceError if "block" in scopes else DeadlockError
        lines = [f"{self.kernel}, block {self.block.tuple()}: " + (reason or (
            "a barrier that not every lane of the block comes to"
            if kind is BarrierDivergenceError
            else "a warp collective whose mask names lanes that do not come"
        ))]  # fmt: skip
        for (name, filename, lineno), lanes in waiting.items():
            masks = {self.lanes[n].wait.mask for n in lanes}  # type: ignore[union-attr]
            shown = "".join(f" mask {mask:#010x}" for mask in sorted(masks) if mask)
            where = source_line(filename, lineno)
            lines.append(f"  {_ranges(lanes)} wait at {name}{shown}, {where}")
        if left:
            lines.append(f"  {_ranges(left)} left the kernel")
        return kind("\n".join(lines), dict(waiting), left)


def _box(size: Dim3) -> list[tuple[int, int, int]]:
    """(z, y, x) of every point, x fastest."""
    return [
        (z, y, x) for z in range(size.z) for y in range(size.y) for x in range(size.x)
    ]


def _is_users(frame: Any) -> bool:
    """Whether a frame is the kernel's side, not the emulator's or NumPy's."""
    if frame.f_code in INSTRUCTIONS:
        return False
    package = frame.f_globals.get("__package__") or ""
    return package != __package__ and package.split(".")[0] != "numpy"


def _users_line(lane: greenlet) -> tuple[str, int]:
    """Where a waiting lane stands in the kernel's source."""
    frame = lane.gr_frame
    while not _is_users(frame):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


def _ranges(lanes: list[int]) -> str:
    """``lanes 0-3, 8``"""
    runs: list[list[int]] = []
    for n in lanes:
        if runs and runs[-1][-1] == n - 1:
            runs[-1][1:] = [n]
        else:
            runs.append([n])
    text = ", ".join("-".join(str(n) for n in run) for run in runs)
    return f"lane {text}" if len(lanes) == 1 else f"lanes {text}"
