"""The shared memory of one block: its arrays, and where they stand.

Every array is a piece of memory of its own, so that nothing lies behind its end by
chance. For instructions that take an address, each piece also has a place in a space of
32-bit addresses, with the same alignment.
"""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import TYPE_CHECKING

import numpy as np

from .arrays import Cells, Written, open_array, poisoned
from .errors import LaunchError, OutOfBoundsError

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = ["SHARED_LIMIT", "SharedMemory"]

STATIC_SHARED_LIMIT = 48 * 1024  # bytes a block, every card
SHARED_LIMIT = 227 * 1024  # bytes a block with dynamic memory, sm_90
RESERVED = 1024  # addresses below it are the system's on sm_90, and so never null here


class SharedMemory:
    """Shared memory of a block.

    Parameters
    ----------
    dynamic_nbytes : int
        What the launch gives.
    """

    def __init__(self, dynamic_nbytes: int, recorder: Recorder | None) -> None:
        self._recorder = recorder
        self._dynamic_nbytes = dynamic_nbytes
        self._dynamic: Written | None = None
        self._static_nbytes = 0
        self._arrays: dict[Hashable, Cells] = {}
        self._pieces: list[Written] = []
        self._end = RESERVED

    def clear(self) -> None:
        """Make all memory as if it were new: a trace knows it by its address."""
        for piece in self._pieces:
            piece.renew()

    def fence_proxy(self) -> None:
        """Let asynchronous instructions see what was stored."""
        for piece in self._pieces:
            piece.proxy()[:] = piece.data

    def array(
        self,
        site: Hashable,
        name: str,
        shape: tuple[int, ...],
        dtype: np.dtype,
        alignment: int | None,
    ) -> Cells:
        """The array that the kernel declares at `site`."""
        found = self._arrays.get(site)
        if found is None:
            found = self._new(name, shape, dtype, alignment or dtype.itemsize)
            self._arrays[site] = found
        return found

    def _new(
        self, name: str, shape: tuple[int, ...], dtype: np.dtype, alignment: int
    ) -> Cells:
        if math.prod(shape) == 0:
            piece = self._dynamic_piece(name, alignment)
            count = self._dynamic_nbytes // dtype.itemsize
            data = piece.data[: count * dtype.itemsize].view(dtype)
        else:
            nbytes = math.prod(shape) * dtype.itemsize
            self._static_nbytes += nbytes
            self._check_size(name)
            piece = self._allocate(nbytes, alignment)
            data = piece.data.view(dtype).reshape(shape)
        written = memoryview(piece)[: data.nbytes]
        cells = open_array(name, "shared", data, written, self._recorder)
        piece.array = piece.array or cells.array
        return cells

    def _dynamic_piece(self, name: str, alignment: int) -> Written:
        """The dynamic memory, as aligned as its first declaration asks."""
        if self._dynamic is None:
            self._dynamic = self._allocate(self._dynamic_nbytes, max(16, alignment))
        if self._dynamic.base % alignment:
            raise LaunchError(
                f"{name}: dynamic shared memory is declared with alignment {alignment} "
                "after it was declared with less; let the first declaration ask for "
                "the most"
            )
        return self._dynamic

    def _allocate(self, nbytes: int, alignment: int) -> Written:
        data = poisoned(nbytes, max(8, alignment))
        piece = Written(nbytes)
        piece.data, piece.start = data, data.__array_interface__["data"][0]
        # The same distance from a multiple of 1024, the longest pattern of a swizzle.
        piece.base = -(-self._end // 1024) * 1024 + piece.start % 1024
        self._end = piece.base + nbytes
        self._pieces.append(piece)
        return piece

    def _check_size(self, name: str) -> None:
        static, dynamic = self._static_nbytes, self._dynamic_nbytes
        if static > STATIC_SHARED_LIMIT or static + dynamic > SHARED_LIMIT:
            raise LaunchError(
                f"{name}: the block needs {static} bytes of static and {dynamic} of "
                f"dynamic shared memory; the limits are {STATIC_SHARED_LIMIT} static "
                f"and {SHARED_LIMIT} together"
            )

    def piece(self, address: int, instruction: str) -> Written:
        """The piece of memory that a 32-bit address lies in."""
        for piece in self._pieces:
            if piece.base <= address < piece.base + len(piece):
                return piece
        raise OutOfBoundsError(
            f"{instruction}: address {address:#x} lies in no shared array"
        )
