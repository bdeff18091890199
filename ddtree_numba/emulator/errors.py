"""What can go wrong in an emulated kernel, each with the place where it did.

The code that finds a fault only says *what* is wrong; the hub (`lanes.py`) adds
*where*: kernel, file, line, block and lane.
"""

from __future__ import annotations

import linecache
from dataclasses import dataclass

__all__ = [
    "BarrierDivergenceError",
    "BarrierUseError",
    "DeadlockError",
    "EmulatorError",
    "InFlightError",
    "KernelError",
    "LaunchError",
    "MaskError",
    "MisalignedError",
    "OutOfBoundsError",
    "Place",
    "StuckError",
    "UninitialisedReadError",
    "UnfencedError",
    "UnsupportedError",
    "WarpgroupError",
]


@dataclass(frozen=True)
class Place:
    """Where a lane stood: the kernel, the source line, the block and the lane."""

    kernel: str
    filename: str
    lineno: int
    block: tuple[int, int, int]
    lane: int
    thread: tuple[int, int, int]

    def __str__(self) -> str:
        return (
            f"{self.kernel}, {source_line(self.filename, self.lineno)}, "
            f"block {self.block}, lane {self.lane} (thread {self.thread})"
        )


def source_line(filename: str, lineno: int) -> str:
    """``file.py:12 `the text of the line` ``, as every message shows a line."""
    text = linecache.getline(filename, lineno).strip()
    return f"{filename}:{lineno}" + (f" `{text}`" if text else "")


class EmulatorError(Exception):
    """A fault of an emulated kernel.

    Attributes
    ----------
    what : str
        The fault, without its place.
    place : Place or None
        Where the faulting lane stood; None where the fault is not one lane's.
    """

    def __init__(self, what: str, place: Place | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.place = place

    def __str__(self) -> str:
        return self.what if self.place is None else f"{self.what}\n  in {self.place}"

    @property
    def lineno(self) -> int | None:
        """The faulting source line, if the fault is one lane's."""
        return None if self.place is None else self.place.lineno


class LaunchError(EmulatorError, ValueError):
    """The launch itself is wrong: grid, block, shared memory or arguments."""


class UnsupportedError(EmulatorError, NotImplementedError):
    """The kernel uses something that the emulator does not know."""


class KernelError(EmulatorError):
    """The kernel's own Python code raised (the cause is chained)."""


class OutOfBoundsError(EmulatorError, IndexError):
    """An index outside its array's shape, or a negative one."""


class MisalignedError(EmulatorError, ValueError):
    """A wide instruction at an address that is no multiple of what it needs."""


class MaskError(EmulatorError, ValueError):
    """A lane calls a warp collective with a mask that does not name it."""


class UninitialisedReadError(EmulatorError):
    """A shared or local element is read before anything was written to it."""


class InFlightError(EmulatorError):
    """Memory is used while an asynchronous copy from or to it is on its way."""


class UnfencedError(EmulatorError):
    """An asynchronous instruction uses what no fence has made visible to it."""


class BarrierUseError(EmulatorError, ValueError):
    """A named barrier or mbarrier is used in a way that has no meaning."""


class WarpgroupError(EmulatorError, ValueError):
    """The lanes of a warpgroup do not execute an instruction together."""


class StuckError(EmulatorError):
    """No lane can go on.

    Attributes
    ----------
    waiting : dict
        ``{(operation, filename, lineno): [lanes]}`` of the lanes that wait.
    left : list of int
        The lanes that have returned from the kernel.
    """

    def __init__(
        self,
        what: str,
        waiting: dict[tuple[str, str, int], list[int]],
        left: list[int],
    ) -> None:
        super().__init__(what)
        self.waiting = waiting
        self.left = left


class BarrierDivergenceError(StuckError):
    """Some lanes wait at a block or named barrier that the others do not come to."""


class DeadlockError(StuckError):
    """A warp collective or an mbarrier waits for what never comes, or lanes spin."""
