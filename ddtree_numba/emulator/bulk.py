"""Copies in bulk (TMA): boxes of a tensor, or runs of bytes, that come by themselves.

One lane asks, with a place in shared memory; an mbarrier counts the bytes. A GPU moves
them at any time before it completes the barrier's phase. Here they arrive as late as
possible: when no lane of the block can go on without them. Until then reading the place
that they go to, or sending another copy there, is an error, as it is to have written
there or to where they come from.
"""

from __future__ import annotations

import ctypes
import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from .arrays import IN_FLIGHT, WRITE
from .barriers import Mbarrier
from .clocks import Clock, join
from .errors import InFlightError, LaunchError
from .lanes import Hub
from .spans import Span

if TYPE_CHECKING:
    from .intrinsics import Executing

__all__ = ["CHUNK", "Box", "Bulk", "TensorMap", "tensor_map"]

SWIZZLE = 128  # bytes of a row of the one pattern that is emulated, or 0 for none
CHUNK = 16  # bytes: sizes and addresses are multiples; a swizzle keeps them together
_MAGIC = 0x454D554C41544F52
_WORDS = 16  # of 64 bits, as of the driver's own maps

#: The owners of mapped memory: a map names one by a number, and keeps none alive.
_OWNERS: weakref.WeakValueDictionary[int, np.ndarray] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def tensor_map(
    tensor: np.ndarray, box: tuple[int, ...], *, swizzle: int = SWIZZLE
) -> np.ndarray:
    """What the driver's `cuTensorMapEncodeTiled` makes, for the emulator.

    Parameters
    ----------
    tensor : numpy.ndarray
        1 to 4 axes, the last contiguous; it must stay alive as long as the map is used.
    box : tuple of int
        Elements of a box, in the order of the tensor's axes, each at most 256.
    swizzle : {0, 128}
        Bytes of the swizzle. With 128 the box's last axis has so many bytes.

    Returns
    -------
    numpy.ndarray
        uint64 [16], an argument for a kernel. It means nothing to a GPU.

    Raises
    ------
    ValueError
        A tensor or a box that TMA cannot take.
    """
    if not 1 <= tensor.ndim <= 4 or len(box) != tensor.ndim:
        raise ValueError(f"box: expected {tensor.ndim} (1 to 4) sizes, got {box}")
    if not all(1 <= size <= 256 for size in box):
        raise ValueError(f"box: expected sizes from 1 to 256, got {box}")
    if swizzle not in (0, SWIZZLE):
        raise ValueError(f"swizzle: expected 0 or {SWIZZLE}, got {swizzle}")
    row = box[-1] * tensor.itemsize
    if row % CHUNK or (swizzle and row != swizzle):
        expected = f"{swizzle}, as the swizzle" if swizzle else f"a multiple of {CHUNK}"
        raise ValueError(f"box: rows of {row} bytes; expected {expected}")
    address = tensor.__array_interface__["data"][0]
    steps = [
        n for n, size in zip(tensor.strides, tensor.shape, strict=True) if size > 1
    ]
    odd = [step for step in (address, *steps[:-1]) if step % CHUNK or step <= 0]
    if odd or steps[-1:] != [tensor.itemsize]:
        raise ValueError(
            f"tensor: expected a contiguous last axis, and an address and strides that "
            f"are positive multiples of {CHUNK} bytes, got strides {tensor.strides}"
        )
    owner = tensor
    while isinstance(owner.base, np.ndarray):
        owner = owner.base
    number = next(_numbers)
    _OWNERS[number] = owner
    kind = tensor.ndim << 16 | tensor.itemsize << 8 | swizzle
    axes = zip(tensor.shape, box, tensor.strides, strict=True)
    given = [_MAGIC, number, address, kind, *(part for axis in axes for part in axis)]
    return np.array(given + [0] * (_WORDS - len(given)), np.uint64)


@dataclass(frozen=True)
class TensorMap:
    """What a map says.

    Attributes
    ----------
    tensor : numpy.ndarray
        The memory itself, unsigned integers of the element's size.
    box : tuple of int
    swizzle : int
    """

    tensor: np.ndarray
    box: tuple[int, ...]
    swizzle: int

    @property
    def nbytes(self) -> int:
        """Bytes of a box, with what lies outside the tensor."""
        return int(np.prod(self.box)) * self.tensor.itemsize

    @classmethod
    def read(cls, instruction: str, words: np.ndarray) -> TensorMap:
        """What uint64 [16] say."""
        magic, number, address, kind, *rest = words.tolist()
        if magic != _MAGIC:
            raise LaunchError(
                f"{instruction}: expected a map from emulator.hopper.tensor_map"
            )
        if number not in _OWNERS:
            raise LaunchError(f"{instruction}: the tensor of its map is gone")
        ndim, itemsize, swizzle = kind >> 16, kind >> 8 & 0xFF, kind & 0xFF
        shape, box, strides = (rest[n : 3 * ndim : 3] for n in range(3))
        nbytes = itemsize + sum(
            (size - 1) * step for size, step in zip(shape, strides, strict=True)
        )
        memory = (ctypes.c_uint8 * nbytes).from_address(address)
        tensor: np.ndarray = np.ndarray(
            shape, f"u{itemsize}", buffer=memory, strides=strides
        )
        return cls(tensor, tuple(box), swizzle)


class Box(NamedTuple):
    """A box of a tensor on its way to a place in shared memory.

    Attributes
    ----------
    tensor : TensorMap
    start : tuple of int
        Its first element, innermost axis first; any part may lie outside.
    address : int
        Where it goes.
    """

    tensor: TensorMap
    start: tuple[int, ...]
    address: int

    def bytes(self) -> np.ndarray:
        """The box as it stands in shared memory, uint8."""
        tensor, box = self.tensor.tensor, self.tensor.box
        values = np.zeros(box, tensor.dtype)
        inside, there = [], []
        for first, size, length in zip(
            reversed(self.start), box, tensor.shape, strict=True
        ):
            begin = min(max(first, 0), length)
            end = max(begin, min(first + size, length))
            inside.append(slice(begin, end))
            there.append(slice(begin - first, end - first))
        if all(part.stop > part.start for part in inside):
            values[tuple(there)] = tensor[tuple(inside)]
        return self._swizzled(values.reshape(-1).view(np.uint8))

    def _swizzled(self, plain: np.ndarray) -> np.ndarray:
        """Chunk c of a 128-byte line at c ^ (line & 7), lines counted by address."""
        if not self.tensor.swizzle:
            return plain
        lines = plain.reshape(-1, SWIZZLE // CHUNK, CHUNK)
        line = np.arange(len(lines))[:, None]
        pattern = line + self.address // SWIZZLE & 7
        return lines[line, np.arange(SWIZZLE // CHUNK) ^ pattern].reshape(-1)


class _Load:
    """A copy on its way; as text, who asked for it and where."""

    def __init__(
        self,
        name: str,
        lane: Executing,
        to: Span,
        read: Callable[[], np.ndarray],
        barrier: Mbarrier,
        clock: Clock,
    ) -> None:
        self.name, self.to, self.read, self.barrier = name, to, read, barrier
        self.clock = clock
        self.lane = lane.hub.lane.index
        self.site = lane.hub.sites.of(lane.frame)
        self.new = read()

    def __str__(self) -> str:
        who = f"the {self.name} of lane {self.lane}"
        return f"{who} ({self.site}, for {self.barrier.name})"


class Bulk:
    """The copies in bulk of one block that have not arrived."""

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.clock = Clock(hub.bulk_index, hub.nothing_known, 0)
        self.flying: list[_Load] = []

    def request(
        self,
        name: str,
        lane: Executing,
        to: Span,
        read: Callable[[], np.ndarray],
        barrier: Mbarrier,
    ) -> None:
        """Put a copy on its way; read : gives its source's bytes as they are now."""
        to.check_at_rest(f"{name} to it")
        recorder = self.hub.recorder
        if recorder is not None:
            known = join([self.hub.lane])
            self.clock = Clock(self.clock.index, known, self.clock.own + 1)
        load = _Load(name, lane, to, read, barrier, self.clock)
        if recorder is not None:
            self._log(load)
            self.hub.learn(self.hub.lane)
        assert to.written is not None
        to.written[:] = bytes([IN_FLIGHT]) * len(to.written)
        to.piece.in_flight.update(dict.fromkeys(_chunks(to), load))
        self.flying.append(load)

    def let_one_arrive(self) -> bool:
        """Let one copy arrive; whether there was one."""
        if not self.flying:
            return False
        order = self.hub.order
        which = 0 if order == "forward" else len(self.flying) - 1
        if order == "shuffled":
            which = self.hub.random.randrange(len(self.flying))
        self._arrive(self.flying.pop(which))
        return True

    def _arrive(self, load: _Load) -> None:
        to = load.to
        assert to.written is not None
        if to.written != bytes([IN_FLIGHT]) * len(to.written):
            raise InFlightError(
                f"{to.name}: written {to.writer()} while {load} was on its way there"
            )
        if (load.read() != load.new).any():
            raise InFlightError(f"the source was written while {load} was reading it")
        for chunk in _chunks(to):
            del to.piece.in_flight[chunk]
        if self.hub.recorder is not None:
            self._log(load)
        to.arrive(load.new)
        load.barrier.receive(self.hub, len(load.new), load.clock)

    def _log(self, load: _Load) -> None:
        """Note the write of a copy, as its own and not the lane's that runs."""
        recorder = self.hub.recorder
        assert recorder is not None
        recorder.mark(load.clock, self.hub.now.phase)
        load.to.log(WRITE, load.site)
        recorder.mark(self.hub.lane, self.hub.now.phase)

    def check_end(self) -> None:
        """Raise if the block ends too early."""
        if self.flying:
            load = self.flying[0]
            raise InFlightError(
                f"{load.to.name}: the block ends while {load} is on its way there"
            )


def _chunks(to: Span) -> range:
    return range(to.address // CHUNK, (to.address + len(to.bytes)) // CHUNK)
