"""Instructions of one's own in an emulated kernel.

An intrinsic of `numba.cuda.extending` is text for the compiler; the emulator cannot
know what it means. So it brings a Python function that does what it does::

    @intrinsic
    def lane_sum(typingctx, x): ...              # what the GPU executes

    @emulation(lane_sum)
    def _(lane, x):                              # what the emulator does instead
        return lane.together("lane_sum", x, lambda given: [sum(given)] * 32)

The function runs in every lane, as the kernel does. Its first argument is the lane at
that instruction (`Executing`): it reads and writes memory in wide pieces with all of
the emulator's checks, brings the warp's 32 lanes together for a function of all of
them, and knows copies that arrive later (`copies.py`). What goes wrong in it is
reported at the kernel's line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from sys import _getframe
from types import FrameType
from typing import Any

import numpy as np

from .copies import Copies
from .errors import OutOfBoundsError, UnsupportedError
from .lanes import INSTRUCTIONS, WARP, Hub
from .spans import Span

__all__ = ["Executing", "emulation", "find_emulation"]

Emulation = Callable[..., Any]

#: ``{id of an intrinsic: (the intrinsic, its emulation)}``
_EMULATIONS: dict[int, tuple[Any, Emulation]] = {}


def emulation(intrinsic: Any) -> Callable[[Emulation], Emulation]:
    """Decorate the function that stands for `intrinsic` in emulated kernels.

    The function's first argument is an `Executing`, then come the intrinsic's own.
    """

    def register(function: Any) -> Any:
        _EMULATIONS[id(intrinsic)] = intrinsic, function
        INSTRUCTIONS.add(function.__code__)
        return function

    return register


def find_emulation(value: Any, hub: Hub) -> Emulation | None:
    """What a kernel on `hub` calls for an intrinsic; None for anything else."""
    _, function = _EMULATIONS.get(id(value), (None, None))
    if function is None and type(value).__name__ != "_Intrinsic":
        return None

    def instruction(*args: Any) -> Any:
        if function is None:
            raise UnsupportedError(
                f"the emulator does not know what {value} does: register its emulation "
                "(ddtree_numba.emulator.emulation)"
            )
        return function(Executing(hub, _getframe(1)), *args)

    return instruction


class Executing:
    """A lane at an instruction.

    Attributes
    ----------
    lane : int
        Its number in the warp.
    hub : Hub
        Who runs the lanes; ``hub.lane`` is this one.
    frame : FrameType
        The kernel's, at the instruction.
    """

    __slots__ = ("frame", "hub", "lane")

    def __init__(self, hub: Hub, frame: FrameType) -> None:
        self.hub = hub
        self.frame = frame
        self.lane = hub.lane.laneid

    def together(
        self, name: str, given: Any, over_warp: Callable[[list[Any]], Sequence[Any]]
    ) -> Any:
        """Wait for all 32 lanes of the warp at this very instruction.

        Parameters
        ----------
        name : str
            The instruction, for messages.
        given
            What this lane brings.
        over_warp : callable
            What the 32 lanes brought -> what each of them gets.

        Raises
        ------
        DeadlockError, BarrierDivergenceError
            Some lanes are elsewhere, or the warp has fewer than 32.
        """

        def combine(by_lane: dict[int, Any]) -> dict[int, Any]:
            results = over_warp([by_lane[lane] for lane in range(WARP)])
            return dict(enumerate(results))

        return self.hub.rendezvous(
            "aligned", name, (1 << WARP) - 1, given, combine, frame=self.frame
        )

    # -- memory -----------------------------------------------------------------------

    def read(
        self, name: str, array: Any, index: Any, nbytes: int, space: str = "shared"
    ) -> np.ndarray:
        """`nbytes` bytes from an element on, uint8 [nbytes]; aligned to `nbytes`."""
        span = Span(array, index, nbytes, name, space, alignment=nbytes)
        return span.read(self.frame)

    def write(
        self, name: str, array: Any, index: Any, new: np.ndarray, space: str = "shared"
    ) -> None:
        """Write bytes from an element on; the element is aligned to as many."""
        new = new.view(np.uint8)
        span = Span(array, index, len(new), name, space, alignment=len(new))
        span.write(new, self.frame)

    # -- copies that arrive later -----------------------------------------------------

    def copy_later(
        self,
        name: str,
        to: Any,
        to_index: Any,
        source: Any,
        source_index: Any,
        n_read: int = 16,
    ) -> None:
        """Ask for 16 bytes from global to shared memory, zero from `n_read` on.

        With ``n_read = 0`` the source may lie anywhere.
        """
        if not 0 <= n_read <= 16:
            raise OutOfBoundsError(f"{name} of {n_read} bytes: expected 0 to 16")
        target = Span(to, to_index, 16, name, "shared", alignment=16)
        origin = None
        if n_read:
            origin = Span(source, source_index, n_read, name, "global", alignment=16)
        self._copies.request(name, self.hub.lane, self.frame, target, origin)

    def commit_copies(self) -> None:
        """Close the group of the copies since the last commit."""
        self._copies.commit()

    def wait_for_copies(self, n: int) -> None:
        """Let all groups arrive but the newest `n`."""
        self._copies.wait(n, self.frame)

    @property
    def _copies(self) -> Copies:
        lane = self.hub.lane
        if lane.copies is None:
            lane.copies = Copies()
        return lane.copies
