"""Places in a kernel's source: which instructions are one.

Lanes meet at a place in the source, but a frame only knows an offset in the bytecode,
and one call in the source may stand at several: Python compiles the conditions of
loops and the ends of ``try`` twice, and from 3.12 on also ``f(a if c else b)`` behind a
``return``, once for each branch. So the instructions of one kind that have one position
in the source count as one.
"""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType, FrameType
from typing import NamedTuple

import numpy as np

from .errors import source_line

__all__ = ["Instructions", "Site", "Sites"]


class Instructions(NamedTuple):
    """The instructions of some code, in their order.

    Attributes
    ----------
    offsets : numpy.ndarray
        Where each begins, int32; its inline caches follow it.
    first : numpy.ndarray
        Where the first of the same opcode and position in the source begins, int32.
        It is the instruction itself if positions are not known
        (``python -X no_debug_ranges``), or without width, as in generated code.
    variables : list of str or None
        What variable each stores to.
    """

    offsets: np.ndarray
    first: np.ndarray
    variables: list[str | None]

    @classmethod
    @lru_cache(maxsize=256)
    def of(cls, code: CodeType) -> Instructions:
        """Those of `code`."""
        offsets, first, variables = [], [], []
        known: dict[object, int] = {}
        for each in dis.get_instructions(code):
            position = each.positions
            place = each.opcode, position
            if position is None or None in position or position[::2] == position[1::2]:
                place = each.offset, None
            offsets.append(each.offset)
            first.append(known.setdefault(place, each.offset))
            variables.append(_stored(each))
        return cls(np.array(offsets, np.int32), np.array(first, np.int32), variables)

    def at(self, lasti: int | np.ndarray) -> np.ndarray:
        """The numbers of the instructions that `lasti` is in, or their caches are."""
        return np.searchsorted(self.offsets, lasti, side="right") - 1


def _stored(instruction: dis.Instruction) -> str | None:
    """The variable that an instruction stores to, the first if there are two."""
    name = instruction.argval
    if isinstance(name, tuple):  # STORE_FAST_LOAD_FAST of Python 3.13
        name = name[0]
    stores = instruction.opname.startswith("STORE_") and isinstance(name, str)
    return name if stores else None


class Site:
    """A place in a kernel's source; one object in a run, so compare by identity.

    Attributes
    ----------
    f_code, f_lasti, f_lineno
        As a frame names it. The offset is that of the first instruction there.
    variable : str or None
        That the result of a call goes to.
    """

    __slots__ = ("f_code", "f_lasti", "f_lineno", "variable")

    def __init__(
        self, f_code: CodeType, f_lasti: int, f_lineno: int, variable: str | None
    ) -> None:
        self.f_code, self.f_lasti, self.f_lineno = f_code, f_lasti, f_lineno
        self.variable = variable

    def __str__(self) -> str:
        return source_line(self.f_code.co_filename, self.f_lineno)


class Sites:
    """The sites of one run."""

    def __init__(self) -> None:
        # By ids: from Python 3.12 on the hash of code takes a pass over all of it.
        self._of_frames: dict[tuple[int, int], Site] = {}
        self._sites: dict[tuple[int, int], Site] = {}

    def of(self, frame: FrameType) -> Site:
        """Where a frame is."""
        key = id(frame.f_code), frame.f_lasti
        found = self._of_frames.get(key)
        if found is None:
            found = self._of_frames[key] = self._find(frame)
        return found

    def _find(self, frame: FrameType) -> Site:
        code = frame.f_code
        instructions = Instructions.of(code)
        first = int(instructions.first[instructions.at(frame.f_lasti)])
        key = id(code), first
        if key not in self._sites:  # which keeps `code` alive, so its id stays its own
            after = int(instructions.at(first)) + 1
            variable = (*instructions.variables, None)[after]
            self._sites[key] = Site(code, first, frame.f_lineno or 0, variable)
        return self._sites[key]
