"""Who knows what of whom: vector clocks over a block.

Time is counted for every lane by itself, and for the units that work beside the lanes
(copies in bulk, `wgmma`), in stretches between two points where it may tell others how
far it is. ``known[i]`` of a lane is the last stretch of `i` that is surely over for it.
An access of `i` in stretch n comes before one of a lane that knows ``known[i] >= n``.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

__all__ = ["Clock", "join"]


class Clock:
    """The time of a lane or of a unit.

    Attributes
    ----------
    index : int
        Whose it is.
    own : int
        The stretch that it is in.
    known : numpy.ndarray
        int32, of every index the last stretch that is over. Many share one array, so
        it is replaced and never changed.
    """

    __slots__ = ("index", "known", "own")

    def __init__(self, index: int, known: np.ndarray, own: int = 1) -> None:
        self.index, self.own, self.known = index, own, known


def join(clocks: Iterable[Clock]) -> np.ndarray:
    """What is over once all of `clocks` have come to where they are."""
    clocks = list(clocks)
    shared = {id(clock.known): clock.known for clock in clocks}
    known = np.maximum.reduce(list(shared.values()))
    index = [clock.index for clock in clocks]
    known = known.copy() if len(shared) == 1 else known
    np.maximum.at(known, index, [clock.own for clock in clocks])
    return known
