"""Several neighbouring elements at once, as instructions wider than one see them.

A `Span` is checked when it is made (bounds, alignment) and when it is read (was it
written, is a copy on its way there). In the trace it is one access, not one an element.
"""

from __future__ import annotations

from collections.abc import Iterable
from types import FrameType
from typing import Any

import numpy as np

from .arrays import (
    IN_FLIGHT,
    READ,
    WRITE,
    WRITTEN,
    Array,
    Cells,
    Written,
    unwritten,
)
from .errors import (
    InFlightError,
    MisalignedError,
    OutOfBoundsError,
    UninitialisedReadError,
    UnsupportedError,
    source_line,
)
from .sites import Site
from .trace import line_of

__all__ = ["Span", "log_blocks"]


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
    across_rows : bool
        Whether the bytes may go on in the next row, of an array without gaps.

    Attributes
    ----------
    bytes : numpy.ndarray
        The memory itself, uint8 [nbytes].
    address : int
    """

    __slots__ = ("_place", "address", "array", "bytes", "written")

    def __init__(
        self,
        cells: Cells,
        index: Any,
        nbytes: int,
        instruction: str,
        space: str,
        alignment: int,
        across_rows: bool = False,
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
        data, n_elements = cells.data[tuple(row)], -(-nbytes // size)
        if across_rows and cells.data.flags.c_contiguous:
            first = int(np.ravel_multi_index(where, cells.shape))
            data = cells.data.reshape(-1)
        end = first + n_elements
        offset = cells._offset(where)
        self._place = offset, n_elements
        self.address = self.array.address + offset * size
        if past := self.address % alignment:
            raise MisalignedError(
                f"{self.name}: {instruction} needs an address that is a multiple of "
                f"{alignment} bytes, this is {past} past one"
                + _advice(self.array, alignment)
            )
        if end > len(data):
            raise OutOfBoundsError(
                f"{self.name}: the {nbytes} bytes of {instruction} pass the end of "
                f"{'the array' if across_rows else 'a row'}, shape {cells.shape}"
            )
        if data.strides[0] != size:
            raise UnsupportedError(f"{self.name}: the last axis is not contiguous")
        self.bytes = data[first:end].view(np.uint8)[:nbytes]
        start = self.address - self.array.address
        written = cells.written
        self.written = None if written is None else written[start : start + nbytes]

    @property
    def name(self) -> str:
        """``tile[3, 8:16]``: as the whole array counts its elements, not a view."""
        *row, first = self.array.index_of(self._place[0])
        before = "".join(f"{part}, " for part in row)
        return f"{self.array.name}[{before}{first}:{first + self._place[1]}]"

    @property
    def piece(self) -> Written:
        """What is known of the memory around it."""
        assert self.written is not None
        return self.written.obj  # type: ignore[return-value]

    def check_readable(self) -> None:
        """Raise unless every byte is written and has arrived."""
        if self.written is None or self.written == WRITTEN * len(self.written):
            return
        self.check_at_rest("read")
        raise UninitialisedReadError(unwritten(self.name, self.array.space))

    def check_at_rest(self, what: str) -> None:
        """Raise if a copy is on its way to any of the bytes."""
        written = b"" if self.written is None else self.written.tobytes()
        if (at := written.find(IN_FLIGHT)) >= 0:
            copy = self.piece.arriving(self.address + at)
            raise InFlightError(f"{self.name}: {what} while {copy} is on its way there")

    def log(self, kind: int, frame: FrameType | Site) -> None:
        """Note an access in the trace, if there is one."""
        # Of 16 bytes each, or one of the next power of two.
        width = min(16, 1 << (len(self.bytes) - 1).bit_length())
        end = self.address + len(self.bytes)
        blocks = range(self.address // width, -(-end // width))
        log_blocks(self.array, width, blocks, kind, frame)

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

    def arrive(self, new: np.ndarray) -> None:
        """Write as an asynchronous instruction does, which sees it at once."""
        assert self.written is not None
        self.bytes[:] = new
        self.written[:] = WRITTEN * len(self.written)
        piece = self.piece
        start = self.address - piece.start
        piece.proxy()[start : start + len(new)] = new


def log_blocks(
    array: Array,
    width: int,
    blocks: Iterable[int],
    kind: int,
    frame: FrameType | Site,
) -> None:
    """Note accesses to blocks of `width` bytes, each by its address // width."""
    recorder = array.recorder
    if recorder is None:
        return
    wide = array.wide.get(width)
    if wide is None:
        wide = array.wide[width] = _Wide(array, width)
    tag, first = wide.number * 4 + kind, wide.address // width
    for block in blocks:
        recorder.note((tag, block - first, frame.f_lasti, frame.f_code))


def _advice(array: Array, alignment: int) -> str:
    if array.space == "shared":
        return (
            " (a shared array has the alignment of its element unless it is declared "
            f"with alignment={alignment})"
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
        self.width = max(1, nbytes // array.itemsize)
        self.shape, self.steps = array.shape, array.steps
        self.recorder = array.recorder
        self.number = array.recorder.register(self)

    def index_of(self, offset: Any) -> tuple[Any, ...]:
        """The first element of a block, as an index into the array itself."""
        start = offset * self.itemsize + self.address - self.of.address
        return self.of.index_of(start // self.of.itemsize)
