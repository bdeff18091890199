"""Several neighbouring elements at once, as instructions wider than one see them.

A `Span` is checked when it is made (bounds, alignment) and when it is read (was it
written, is a copy on its way there). In the trace it is one access, not one an element.
"""

from __future__ import annotations

from types import FrameType
from typing import Any

import numpy as np

from .arrays import IN_FLIGHT, READ, WRITE, WRITTEN, Array, Cells, unwritten
from .errors import (
    InFlightError,
    MisalignedError,
    OutOfBoundsError,
    UninitialisedReadError,
    UnsupportedError,
    source_line,
)
from .trace import line_of

__all__ = ["Span"]


class Span:
    """`nbytes` bytes of an array's row, from an element on.

    Parameters
    ----------
    cells : Cells
        The array; its last axis must be contiguous.
    index : int or tuple
        Of the first element.
    nbytes : int
    instruction : str
        Who wants it, for messages.
    space : str
        The address space where that instruction works.
    alignment : int
        The bytes of which the first element's address must be a multiple.

    Attributes
    ----------
    bytes : numpy.ndarray
        The memory itself, uint8 [nbytes].
    address : int
    name : str
        ``tile[3, 8:16]``
    """

    __slots__ = ("address", "array", "bytes", "name", "written")

    def __init__(
        self,
        cells: Cells,
        index: Any,
        nbytes: int,
        instruction: str,
        space: str,
        alignment: int,
    ) -> None:
        if not isinstance(cells, Cells):
            raise UnsupportedError(f"{instruction} of {cells!r}, which is no array")
        self.array = cells.array
        if self.array.space != space:
            raise UnsupportedError(
                f"{instruction} works on {space} memory; {self.array.name} is "
                f"{self.array.space}"
            )
        where = cells._resolve(index)
        if isinstance(where, np.ndarray):
            raise UnsupportedError(
                f"{instruction} of {self.array.name}: {index} names no element of "
                f"shape {cells.shape}"
            )
        size = cells.itemsize
        *row, first = where
        end = first + -(-nbytes // size)
        offset = cells._offset(where)
        self.name = _name(self.array, offset, end - first)
        self.address = self.array.address + offset * size
        if past := self.address % alignment:
            raise MisalignedError(
                f"{self.name}: {instruction} needs an address that is a multiple of "
                f"{alignment} bytes, this is {past} past one" + _advice(self.array)
            )
        if end > cells.shape[-1]:
            raise OutOfBoundsError(
                f"{self.name}: the {nbytes} bytes of {instruction} pass the end of a "
                f"row, shape {cells.shape}"
            )
        if cells.strides[-1] != size:
            raise UnsupportedError(f"{self.name}: the last axis is not contiguous")
        self.bytes = cells.data[tuple(row)][first:end].view(np.uint8)[:nbytes]
        start = self.address - self.array.address
        written = cells.written
        self.written = None if written is None else written[start : start + nbytes]

    def check_readable(self) -> None:
        """Raise unless every byte is written and has arrived."""
        if self.written is None or self.written == WRITTEN * len(self.written):
            return
        self.check_at_rest("read")
        raise UninitialisedReadError(unwritten(self.name, self.array.space))

    def check_at_rest(self, what: str) -> None:
        """Raise if a copy is on its way to any of the bytes."""
        if self.written is not None and IN_FLIGHT in self.written.tobytes():
            copy = self.written.obj.in_flight[self.address // 16]  # type: ignore
            raise InFlightError(f"{self.name}: {what} while {copy} is on its way there")

    def log(self, kind: int, frame: FrameType) -> None:
        """Note an access in the trace, if there is one."""
        recorder = self.array.recorder
        if recorder is None:
            return
        wide = self.array.wide
        if wide is None:
            wide = self.array.wide = _Wide(self.array, 16)
        offset = (self.address - wide.address) // wide.itemsize
        entry = wide.number * 4 + kind, offset, frame.f_lasti, frame.f_code
        recorder.note(entry)

    def writer(self) -> str:
        """The last line that wrote to any of the bytes, as far as the trace knows."""
        recorder = self.array.recorder
        if recorder is None:
            return "by a line that trace=True would name"
        for tag, offset, lasti, code in reversed(recorder.log):
            array = recorder.arrays[tag >> 2]
            start = array.address + offset * array.itemsize
            overlaps = -array.itemsize < start - self.address < len(self.bytes)
            if overlaps and tag & 3 != READ:
                return "by " + source_line(code.co_filename, line_of(code, lasti))
        return "by a line that the trace no longer knows"

    def read(self, frame: FrameType) -> np.ndarray:
        """The bytes, copied."""
        self.log(READ, frame)
        self.check_readable()
        return self.bytes.copy()

    def write(self, new: np.ndarray, frame: FrameType) -> None:
        self.log(WRITE, frame)
        self.bytes[:] = new
        if self.written is not None:
            self.written[:] = WRITTEN * len(self.written)


def _name(array: Array, offset: int, count: int) -> str:
    """`count` elements of a row as the whole array counts them, not a view of it."""
    *row, first = array.index_of(offset)
    before = "".join(f"{part}, " for part in row)
    return f"{array.name}[{before}{first}:{first + count}]"


def _advice(array: Array) -> str:
    if array.space == "shared":
        return (
            " (a shared array has the alignment of its element unless it is declared "
            "with alignment=16)"
        )
    return ""


class _Wide(Array):
    """An array as a row of wide blocks, for the trace."""

    __slots__ = ("of", "width")

    def __init__(self, array: Array, nbytes: int) -> None:
        assert array.recorder is not None
        self.of = array
        self.name, self.space = array.name, array.space
        self.address = array.address - array.address % nbytes
        self.allocation = array.allocation
        self.itemsize = nbytes
        self.width = nbytes // array.itemsize
        self.shape, self.steps = array.shape, array.steps
        self.recorder = array.recorder
        self.number = array.recorder.register(self)

    def index_of(self, offset: Any) -> tuple[Any, ...]:
        """The first element of a block, as an index into the array itself."""
        start = offset * self.itemsize + self.address - self.of.address
        return self.of.index_of(start // self.of.itemsize)
