"""Lanes and the hub that runs them in lock-step.

Every lane of a block is a greenlet. The hub lets one lane run at a time, until it waits
at a barrier or a warp collective or returns. When no lane can run, the hub looks which
of them wait for each other (`Hub._release`), gives those their results and goes on. If
nobody can be released, it lets a copy in bulk arrive (`bulk.py`); if there is none, it
runs another block, should a lane wait for one; and if that is of no use either, the
kernel is stuck and the hub says who waits where.
"""

from __future__ import annotations

import contextvars
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from sys import _getframe
from types import CodeType, FrameType
from typing import TYPE_CHECKING, Any

import numpy as np
from greenlet import getcurrent, greenlet  # type: ignore[import-untyped]

from .clocks import Clock, join
from .errors import (
    BarrierDivergenceError,
    DeadlockError,
    EmulatorError,
    KernelError,
    Place,
    StuckError,
    source_line,
)
from .sites import Site, Sites

if TYPE_CHECKING:
    from .copies import Copies
    from .hopper import Units
    from .shared import SharedMemory
    from .trace import Recorder

__all__ = [
    "INSTRUCTIONS", "WARP", "WARPGROUP", "Block", "Dim3", "Hub", "Lane", "Until",
]  # fmt: skip

WARP = 32
WARPGROUP = 128

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
    (whoever of the warp comes to the same place), ``"until"`` (until `until` is ready),
    or ``"spin"`` (nobody: the lane only lets others run).
    """

    __slots__ = (
        "combine", "mask", "name", "orders_memory", "payload", "scope", "site", "until",
    )  # fmt: skip

    def __init__(
        self,
        scope: str,
        name: str,
        mask: int,
        payload: Any,
        combine: Combine | None,
        orders_memory: bool,
        site: Site,
    ) -> None:
        self.scope, self.name, self.mask, self.site = scope, name, mask, site
        self.payload, self.combine = payload, combine
        self.orders_memory = orders_memory
        self.until: Until


class Until:
    """What a lane can wait for by itself.

    Attributes
    ----------
    kind : type
        The error, if it never comes.
    complaint : str
        What is wrong then.
    elsewhere : bool
        Whether another block may bring it.
    """

    kind: type[StuckError] = DeadlockError
    complaint = ""
    elsewhere = False

    def ready(self) -> bool:
        """Whether it is there."""
        raise NotImplementedError

    def __str__(self) -> str:
        """How far it is, for messages."""
        raise NotImplementedError


class Lane(Clock):
    """One thread of a block; `index` counts through the block, x fastest."""

    __slots__ = (
        "copies", "greenlet", "laneid", "left", "result", "thread", "wait", "warp",
    )  # fmt: skip

    def __init__(
        self, index: int, thread: tuple[int, int, int], known: np.ndarray
    ) -> None:
        super().__init__(index, known)
        self.thread = thread
        self.warp, self.laneid = divmod(index, WARP)
        self.left = False
        self.wait: Wait | None = None
        self.result: Any = None
        self.copies: Copies | None = None  # its asynchronous copies, once it has any
        self.greenlet: greenlet


class Block:
    """What is a block's own, while another one runs."""

    __slots__ = ("at", "lanes", "memory", "phase", "trace", "units")

    def __init__(
        self, at: tuple[int, int, int], lanes: list[Lane], memory: SharedMemory
    ) -> None:
        self.at, self.lanes, self.memory = at, lanes, memory
        self.phase = 0  # block barriers passed
        self.units: Units | None = None
        self.trace: Any = None


class Hub:
    """Runs the lanes of one block after another.

    Attributes
    ----------
    lane : Lane
        The lane that runs now.
    thread, block : Dim3
        `threadIdx` and `blockIdx` of that lane.
    now : Block
        Its block.
    order, random
        In which order lanes, blocks and copies in bulk go.
    sites : Sites
        Places in the source where lanes wait, copy, multiply or declare arrays.
    """

    def __init__(
        self,
        kernel: str,
        grid: tuple[int, int, int],
        block: tuple[int, int, int],
        order: str,
        seed: int,
        recorder: Recorder | None,
        new_memory: Callable[[], SharedMemory],
    ) -> None:
        self.kernel = kernel
        self.grid_dim = Dim3(*grid)
        self.block_dim = Dim3(*block)
        self.thread = Dim3()
        self.block = Dim3()
        self.order = order
        self.random = random.Random(seed)
        self.recorder = recorder
        self.sites = Sites()
        self.lane: Lane
        self.now: Block
        self._new_memory = new_memory
        self._spare: list[SharedMemory] = []  # of blocks that have ended
        n_lanes = block[0] * block[1] * block[2]
        # One place in a clock a lane, one for copies in bulk, one a warpgroup.
        self.bulk_index, self.group_index = n_lanes, n_lanes + 1
        n_groups = -(-n_lanes // WARPGROUP)
        self.nothing_known = np.zeros(n_lanes + 1 + n_groups, np.int32)

    @property
    def memory(self) -> SharedMemory:
        """The shared memory of the block that runs."""
        return self.now.memory

    @property
    def lanes(self) -> list[Lane]:
        return self.now.lanes

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
            self.sites.of(frame),
        )  # fmt: skip
        self.main.switch()
        return lane.result

    def wait_until(self, name: str, until: Until, frame: FrameType) -> None:
        """Let others run until `until` is ready."""
        if until.ready():
            return
        wait = Wait("until", name, 0, None, None, False, self.sites.of(frame))
        wait.until = until
        self.lane.wait = wait
        self.main.switch()

    def learn(self, lane: Lane, known: np.ndarray | None = None) -> None:
        """A new stretch of a lane's time begins, in which it knows `known` too."""
        if known is not None:
            lane.known = known
        lane.own += 1
        if self.recorder is not None and lane is self.lane:
            self.recorder.mark(lane, self.now.phase)

    def fence(self) -> None:
        """What the block did so far may be told to other blocks from here on."""
        if self.recorder is not None:
            self.recorder.fence(self.lane, self.now.phase)

    # -- running ----------------------------------------------------------------------

    def run(self, body: Callable[[], None]) -> None:
        """Run `body` in every lane of every block."""
        self.main = getcurrent()
        paused: list[tuple[Block, Iterator[None]]] = []
        try:
            for z, y, x in self._ordered(_box(self.grid_dim)):
                block = self._new_block((x, y, z))
                self._go_on(block, self._run_block(body), paused)
            while paused:
                self._take_turns(paused)
        finally:
            for block, _ in paused:
                self._kill(block)

    def _new_block(self, at: tuple[int, int, int]) -> Block:
        if self._spare:
            memory = self._spare.pop()
            memory.clear()
        else:
            memory = self._new_memory()
        lanes = [
            Lane(n, (x, y, z), self.nothing_known)
            for n, (z, y, x) in enumerate(_box(self.block_dim))
        ]
        block = Block(at, lanes, memory)
        if self.recorder is not None:
            block.trace = self.recorder.begin_block(at)
        return block

    def _go_on(self, block: Block, steps: Iterator[None], paused: list[Any]) -> None:
        """Run a block until it ends or waits for another."""
        self.now = block
        self.block.x, self.block.y, self.block.z = block.at
        if self.recorder is not None:
            self.recorder.enter_block(block.trace)
        try:
            ended = next(steps, self) is self
        except BaseException:
            self._kill(block)
            raise
        if ended:
            self._spare.append(block.memory)
        else:
            paused.append((block, steps))
        if self.recorder is not None:
            self.recorder.leave_block(ended)

    def _take_turns(self, paused: list[tuple[Block, Iterator[None]]]) -> None:
        """Let every paused block go on that can."""
        able = [n for n, (block, _) in enumerate(paused) if _can_go_on(block)]
        if not able:
            self.now = paused[0][0]
            self.block.x, self.block.y, self.block.z = self.now.at
            raise self._stuck()
        chosen = [paused[n] for n in able]
        for n in reversed(able):
            del paused[n]
        while chosen:
            block, steps = chosen.pop(0)
            try:
                self._go_on(block, steps, paused)
            except BaseException:
                paused += chosen
                raise

    def _ordered(self, items: Iterable[Any]) -> list[Any]:
        items = list(items)
        if self.order == "reverse":
            items.reverse()
        elif self.order == "shuffled":
            self.random.shuffle(items)
        return items

    def _run_block(self, body: Callable[[], None]) -> Iterator[None]:
        """Run the block; a yield is where it can only go on after another block."""
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
            while not ready and self._waits_elsewhere():
                yield
                ready = self._release()
            spins = spins + 1 if self._only_spins(ready) else 0
            if spins > SPIN_LIMIT:
                raise self._stuck("lanes spin and nothing changes")
        if self.now.units is not None:
            self.now.units.check_end()

    def _start(self) -> None:
        lane = self.lane
        lane.result()
        lane.left = True

    def _switch_to(self, lane: Lane) -> None:
        self.lane = lane
        thread = self.thread
        thread.x, thread.y, thread.z = lane.thread
        if self.recorder is not None:
            self.recorder.mark(lane, self.now.phase)
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

    def _kill(self, block: Block) -> None:
        for lane in block.lanes:
            if getattr(lane, "greenlet", None):  # started and not finished
                lane.greenlet.throw()

    # -- who may go on ----------------------------------------------------------------

    def _release(self) -> list[Lane]:
        """The lanes that may go on, now that none runs; raises when stuck.

        None if all have left, or if another block must run first.
        """
        waiting = [lane for lane in self.lanes if not lane.left]
        if not waiting:
            return []
        while True:
            released = self._release_block(waiting) or self._release_warps(waiting)
            if not released:
                released = self._release_converged(waiting)
            if released and not self._only_spins(released):
                return released
            if self.now.units is None or not self.now.units.let_one_arrive():
                break
        if not released and not self._waits_elsewhere():
            raise self._stuck()
        return released

    def _waits_elsewhere(self) -> bool:
        """Whether a lane waits for another block."""
        return any(_waits_elsewhere(lane) for lane in self.lanes)

    def _release_block(self, waiting: list[Lane]) -> list[Lane]:
        first = waiting[0].wait
        assert first is not None
        if len(waiting) < len(self.lanes) or first.scope != "block":
            return []
        site, name = first.site, first.name
        for lane in waiting:
            if lane.wait.site is not site or lane.wait.name != name:  # type: ignore[union-attr]
                return []
        self._combine(waiting, {lane.index: lane for lane in waiting})
        if self.recorder is not None:
            self.recorder.end_phase(self.now.phase, (name, site))
        self.now.phase += 1
        return waiting

    def _release_warps(self, waiting: list[Lane]) -> list[Lane]:
        """Every complete warp collective, and every lane that waits for no lane."""
        groups: dict[tuple[int, str, int, Site | None], list[Lane]] = defaultdict(list)
        released = []
        for lane in waiting:
            wait = lane.wait
            assert wait is not None
            if wait.scope == "warp":
                groups[lane.warp, wait.name, wait.mask, None].append(lane)
            elif wait.scope == "aligned":
                groups[lane.warp, wait.name, wait.mask, wait.site].append(lane)
            elif wait.scope == "spin" or (wait.scope == "until" and wait.until.ready()):
                released.append(lane)
        for (warp, _, mask, site), group in groups.items():
            needed = mask if site else mask & self._exists(warp)
            if len(group) == needed.bit_count():
                self._combine(group, {lane.laneid: lane for lane in group})
                released += group
        released.sort(key=lambda lane: lane.index)
        return released

    def _release_converged(self, waiting: list[Lane]) -> list[Lane]:
        groups: dict[tuple[int, Site], list[Lane]] = defaultdict(list)
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
            self.recorder.meet((wait.name, wait.site), len(group), there)
        if wait.combine is not None:
            given = {n: lane.wait.payload for n, lane in numbered.items()}  # type: ignore[union-attr]
            results = wait.combine(given)
            for n, lane in numbered.items():
                lane.result = results[n]
        if wait.orders_memory and wait.scope == "warp" and self.recorder is not None:
            known = join(group)
            for lane in group:
                self.learn(lane, known)

    def _only_spins(self, ready: list[Lane]) -> bool:
        return bool(ready) and all(
            lane.wait is not None and lane.wait.scope == "spin" for lane in ready
        )

    # -- nobody may go on -------------------------------------------------------------

    def _stuck(self, reason: str = "") -> StuckError:
        waiting: dict[tuple[str, str, int], list[int]] = defaultdict(list)
        states: dict[tuple[str, str, int], dict[str, None]] = defaultdict(dict)
        scopes = set()
        untils = []
        for lane in self.lanes:
            if lane.left:
                continue
            wait = lane.wait
            assert wait is not None
            filename, lineno = _users_line(lane.greenlet)
            key = wait.name, filename, lineno
            waiting[key].append(lane.index)
            scopes.add(wait.scope)
            if wait.scope == "until":
                untils.append(wait.until)
                states[key][f" ({wait.until})"] = None
            elif wait.mask:
                states[key][f" mask {wait.mask:#010x}"] = None
        left = [lane.index for lane in self.lanes if lane.left]
        kind: type[StuckError] = DeadlockError
        complaint = "a warp collective whose mask names lanes that do not come"
        if untils:
            kind, complaint = untils[0].kind, untils[0].complaint
        elif "block" in scopes:
            kind = BarrierDivergenceError
            complaint = "a barrier that not every lane of the block comes to"
        lines = [f"{self.kernel}, block {self.block.tuple()}: {reason or complaint}"]
        for key, lanes in waiting.items():
            name, filename, lineno = key
            shown = "".join(sorted(states[key]))
            where = source_line(filename, lineno)
            lines.append(f"  {_ranges(lanes)} wait at {name}{shown}, {where}")
        if left:
            lines.append(f"  {_ranges(left)} left the kernel")
        return kind("\n".join(lines), dict(waiting), left)


def _waits_elsewhere(lane: Lane) -> bool:
    wait = lane.wait
    return (
        not lane.left
        and wait is not None
        and wait.scope == "until"
        and wait.until.elsewhere
    )


def _can_go_on(block: Block) -> bool:
    """Whether what a paused block waits for has come."""
    return any(
        _waits_elsewhere(lane) and lane.wait.until.ready()  # type: ignore[union-attr]
        for lane in block.lanes
    )


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
