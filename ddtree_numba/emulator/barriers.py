"""Barriers for a part of a block: named ones, and mbarriers in shared memory.

A barrier counts who has come. The last to come completes it: whoever waits may go on,
and it begins to count anew. Whoever comes tells the barrier what it knows
(`clocks.py`), and whoever has waited knows what it was told.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .clocks import Clock, join
from .errors import BarrierDivergenceError, BarrierUseError
from .lanes import Hub, Until

__all__ = ["Mbarrier", "NamedBarrier", "Threshold"]


class _Told:
    """What those who have come know together; kept only for a trace."""

    __slots__ = ("before", "now")

    def __init__(self, nothing: np.ndarray) -> None:
        self.now = nothing  # of the phase that is not over
        self.before = nothing  # of the last that is over

    def hear(self, clock: Clock) -> None:
        self.now = np.maximum(self.now, join([clock]))

    def complete(self) -> None:
        # A phase knows what the phases before it knew: its waiters passed through them.
        self.before = self.now


def _arrived(hub: Hub, told: _Told) -> None:
    """The lane that runs tells a barrier what it knows."""
    if hub.recorder is not None:
        told.hear(hub.lane)
        hub.learn(hub.lane)


def _informed(hub: Hub, told: _Told) -> None:
    """The lane that runs knows what a complete barrier was told."""
    if hub.recorder is not None:
        hub.learn(hub.lane, np.maximum(hub.lane.known, told.before))


class NamedBarrier:
    """One of the sixteen barriers of a block."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.expected = 0  # lanes, as long as some have come
        self.came = 0
        self.generation = 0
        self.brought = False
        self.result = False  # of the last generation that is over
        self.told: _Told | None = None

    def arrive(self, hub: Hub, n_lanes: int, brings: bool = False) -> int:
        """One lane more; returns the generation that it belongs to.

        Whether any lane `brings` something is the generation's `result`.
        """
        self.told = self.told or _Told(hub.nothing_known)
        if self.came and n_lanes != self.expected:
            raise BarrierUseError(
                f"barrier {self.number}: a lane comes for {n_lanes} lanes, others came "
                f"for {self.expected}"
            )
        generation = self.generation
        self.expected = n_lanes
        self.came += 1
        self.brought |= brings
        _arrived(hub, self.told)
        if self.came == n_lanes:
            self.told.complete()
            self.result, self.brought = self.brought, False
            self.came = 0
            self.generation += 1
        return generation

    def after(self, generation: int) -> Until:
        return _NamedDone(self, generation)

    def leave(self, hub: Hub) -> None:
        assert self.told is not None
        _informed(hub, self.told)


class _NamedDone(Until):
    kind = BarrierDivergenceError
    complaint = "a named barrier that fewer lanes come to than it is for"

    def __init__(self, barrier: NamedBarrier, generation: int) -> None:
        self.barrier, self.generation = barrier, generation

    def ready(self) -> bool:
        return self.barrier.generation > self.generation

    def __str__(self) -> str:
        b = self.barrier
        return f"barrier {b.number}: {b.came} of {b.expected} lanes have come"


class Mbarrier:
    """A barrier in shared memory that counts lanes, and bytes of copies in bulk.

    Attributes
    ----------
    name : str
        ``full[2]``
    count : int
        Arrivals that complete a phase.
    pending : int
        Those that are missing in this one.
    n_bytes : int
        Bytes that are missing; negative if more have come than are expected so far.
    phase : int
        Phases that are over.
    fenced : bool
        Whether copies in bulk see that it is a barrier.
    """

    def __init__(self, name: str, count: int, hub: Hub) -> None:
        self.name, self.count, self.pending = name, count, count
        self.n_bytes = 0
        self.phase = 0
        self.fenced = False
        self.told = _Told(hub.nothing_known)

    def arrive(self, hub: Hub, n_bytes: int) -> None:
        """The lane that runs has come; `n_bytes` more are expected."""
        if self.pending == 0:
            raise BarrierUseError(
                f"{self.name}: more arrivals than the {self.count} that it is for, "
                f"before its phase {self.phase} is over"
            )
        self.pending -= 1
        self.n_bytes += n_bytes
        _arrived(hub, self.told)
        self._turn()

    def receive(self, hub: Hub, n_bytes: int, clock: Clock) -> None:
        """A copy in bulk has arrived."""
        self.n_bytes -= n_bytes
        if hub.recorder is not None:
            self.told.hear(clock)
        self._turn()

    def _turn(self) -> None:
        if self.pending == 0 and self.n_bytes == 0:
            self.told.complete()
            self.pending = self.count
            self.phase += 1

    def after(self, parity: int) -> Until:
        return _PhaseDone(self, parity)

    def leave(self, hub: Hub) -> None:
        _informed(hub, self.told)


class _PhaseDone(Until):
    complaint = "an mbarrier whose phase is never over"

    def __init__(self, barrier: Mbarrier, parity: int) -> None:
        self.barrier, self.parity = barrier, parity

    def ready(self) -> bool:
        return self.barrier.phase & 1 != self.parity

    def __str__(self) -> str:
        b = self.barrier
        came = b.count - b.pending
        text = f"{b.name}, for parity {self.parity}; phase {b.phase}: {came} of "
        text += f"{b.count} arrivals"
        if b.n_bytes > 0:
            text += f", {b.n_bytes} bytes missing"
        if b.n_bytes < 0:
            text += f", {-b.n_bytes} bytes more than expected"
        return text


class Threshold(Until):
    """A counter in global memory that other blocks raise."""

    complaint = "a counter that no other block raises any more"
    elsewhere = True

    def __init__(self, array: Any, index: Any, value: int) -> None:
        self.array, self.index, self.value = array, index, value

    def ready(self) -> bool:
        # Counters of 32 bits go round: what is half of that ahead was there before.
        ahead = int(self.array.data[self.index]) - int(self.value)
        return (ahead & 0xFFFFFFFF) < 1 << 31

    def __str__(self) -> str:
        found = self.array.data[self.index]
        return f"{self.array.array.name}[{self.index}] is {found}, for {self.value}"
