"""Operands of a warpgroup's matrix products (``wgmma``): where their elements are.

A product takes 64 rows by 16 columns of bfloat16 as A, from shared memory or from the
128 lanes' registers, and 16 by n as B from shared memory, and adds to 64 by n float32
sums in registers. When it does so is in `warpgroup.py`.

Source: NVIDIA, PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from .arrays import IN_FLIGHT, READ, Written, unwritten
from .errors import (
    InFlightError,
    OutOfBoundsError,
    UnfencedError,
    UninitialisedReadError,
    UnsupportedError,
)
from .lanes import WARPGROUP, Hub
from .sites import Site
from .spans import log_blocks

__all__ = [
    "DEPTH",
    "NAME",
    "ROWS",
    "Operand",
    "operand_places",
    "registers_of_a",
    "registers_of_sums",
    "sums_of_registers",
    "tile_of_registers",
]

ROWS, DEPTH = 64, 16  # of A
NAME = "wgmma.mma_async"
SWIZZLE_128 = 1  # in bits 62 and 63 of a descriptor
BOTH_WRITTEN = 0x0101  # the flags of an element's two bytes, as one number


# -- who holds what -------------------------------------------------------------------
#
# With w = lane // 32, g = lane % 32 // 4, t = lane % 4 of the warpgroup's 128 lanes:
#
#   sums [64, n]   register 4 j + 2 h + e   row 16 w + 8 h + g, column 8 j + 2 t + e
#   A [64, 16]     register 2 k + h, half e row 16 w + 8 h + g, column 8 k + 2 t + e


def sums_of_registers(registers: np.ndarray) -> np.ndarray:
    """[128 lanes, n / 2] -> the sums [64, n]."""
    n = registers.shape[1] * 2
    parts = registers.reshape(4, 8, 4, n // 8, 2, 2)  # w, g, t, j, h, e
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(ROWS, n)


def registers_of_sums(sums: np.ndarray) -> np.ndarray:
    """The sums [64, n] -> [128 lanes, n / 2]."""
    n = sums.shape[1]
    parts = sums.reshape(4, 2, 8, n // 8, 4, 2)  # w, h, g, j, t, e
    return parts.transpose(0, 2, 4, 3, 1, 5).reshape(WARPGROUP, n // 2)


def tile_of_registers(registers: np.ndarray) -> np.ndarray:
    """uint32 [128 lanes, 4] -> A as bfloat16 bits, uint16 [64, 16]."""
    halves = np.ascontiguousarray(registers, np.uint32).view(np.uint16)
    parts = halves.reshape(4, 8, 4, 2, 2, 2)  # w, g, t, k, h, e
    return parts.transpose(0, 4, 1, 3, 2, 5).reshape(ROWS, DEPTH)


def registers_of_a(tile: np.ndarray) -> np.ndarray:
    """A as bfloat16 bits, uint16 [64, 16] -> uint32 [128 lanes, 4]."""
    parts = tile.reshape(4, 2, 8, 2, 4, 2)  # w, h, g, k, t, e
    halves = parts.transpose(0, 2, 4, 3, 1, 5).reshape(WARPGROUP, 8)
    return np.ascontiguousarray(halves).view(np.uint32)


# -- operands in shared memory --------------------------------------------------------


class Descriptor(NamedTuple):
    """Where an operand stands: bytes, as the 64 bits of a descriptor say."""

    start: int
    leading: int
    stride: int

    @classmethod
    def read(cls, bits: int) -> Descriptor:
        bits = int(bits) & (1 << 64) - 1
        if bits >> 62 != SWIZZLE_128 or bits >> 49 & 7:
            raise UnsupportedError(
                f"{NAME}: descriptor {bits:#018x}; the emulator knows the 128-byte "
                "swizzle (bits 62 and 63: 1) with base offset 0"
            )
        return cls(*((bits >> at & 0x3FFF) << 4 for at in (0, 16, 32)))


@lru_cache(maxsize=256)
def operand_places(
    rows: int, leading: int, stride: int, transposed: bool, start: int
) -> np.ndarray:
    """Where an operand's elements stand, in 16-bit elements from `start` on.

    Parameters
    ----------
    rows : int
        M of A or N of B.
    leading, stride : int
        The descriptor's offsets in bytes.
    transposed : bool
        False: a row's 16 elements lie together (K-major); lines of 128 bytes, groups of
        8 lines `stride` apart. True (MN-major): 64 rows lie together in a line, a line
        for each of the 16 columns; groups of 8 lines `stride`, groups of 64 rows
        `leading` apart.
    start : int
        Modulo 1024: chunk c (16 bytes) of a line stands at ``c ^ (line & 7)``, and
        lines are counted by their address.

    Returns
    -------
    numpy.ndarray
        int64 [rows, 16].
    """
    row, k = np.arange(rows)[:, None], np.arange(DEPTH)
    if transposed:
        plain = row // 64 * leading + k // 8 * stride + k % 8 * 128 + row % 64 * 2
    else:
        plain = row // 8 * stride + row % 8 * 128 + k * 2
    address = start + plain
    return ((address ^ (address >> 7 & 7) << 4) - start) // 2


class Operand:
    """An operand in shared memory, as it was when it was read."""

    def __init__(self, hub: Hub, bits: int, rows: int, transposed: bool) -> None:
        start, leading, stride = Descriptor.read(bits)
        self.piece = piece = hub.memory.piece(start, NAME)
        places = operand_places(rows, leading, stride, transposed, start % 1024)
        first = start - piece.base
        self.places = places + first // 2
        if first % 2 or self.places.min() < 0 or self.places.max() >= len(piece) // 2:
            raise OutOfBoundsError(
                f"{_element(piece, first)}: an operand of {NAME}, {rows} by {DEPTH}, "
                f"leading offset {leading}, stride {stride}, passes the array's end"
            )
        self._check()
        self.values = self._elements(piece.data)
        unseen = self.values != self._elements(piece.proxy())
        if unseen.any():
            raise UnfencedError(
                f"{self._name(unseen)}: stored, and then read by {NAME} without a "
                "fence.proxy.async in between"
            )

    def _elements(self, of: Any) -> np.ndarray:
        whole = np.frombuffer(of, np.uint16, len(self.piece) // 2)
        return whole[self.places]

    def _check(self) -> None:
        missing = self._elements(self.piece) != BOTH_WRITTEN
        if not missing.any():
            return
        name = self._name(missing)
        at = 2 * int(self.places[missing].min())
        flags = self.piece[at : at + 2]
        if IN_FLIGHT in flags:
            copy = self.piece.arriving(self.piece.start + at)
            raise InFlightError(f"{name}: read while {copy} is on its way there")
        raise UninitialisedReadError(unwritten(name, "shared"))

    def _name(self, which: np.ndarray) -> str:
        return _element(self.piece, 2 * int(self.places[which].min()))

    def check_unchanged(self, product: Any) -> None:
        """Raise if it is not what it was."""
        changed = self._elements(self.piece.data) != self.values
        changed |= self._elements(self.piece) != BOTH_WRITTEN
        if changed.any():
            raise InFlightError(
                f"{self._name(changed)}: written while {product} was reading it"
            )

    def log(self, rows: slice, site: Site) -> None:
        """Note in the trace that some rows are read."""
        array = self.piece.array
        assert array is not None
        first = self.piece.start // 16
        blocks = np.unique(self.places[rows] // 8) + first
        log_blocks(array, 16, blocks.tolist(), READ, site)


def _element(piece: Written, at: int) -> str:
    """The element that a byte of a piece of memory belongs to."""
    array = piece.array
    assert array is not None
    index = array.index_of(at // array.itemsize)
    return f"{array.name}[{', '.join(map(str, index))}]"
