"""Arrays as a lane sees them: strict bounds, poison, a bitmap of what was written.

An `Array` names a piece of memory. `Cells` are a view of it that a kernel
indexes; rows, slices and `.view(dtype)` give further `Cells` on the same bytes. One
element access must cost little, so the classes for one and two dimensions spell the
common case out, and everything else goes through `Cells._resolve`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from operator import mul
from sys import _getframe
from types import FrameType
from typing import TYPE_CHECKING, Any

import numpy as np

from .errors import (
    EmulatorError,
    InFlightError,
    LaunchError,
    OutOfBoundsError,
    UninitialisedReadError,
    UnsupportedError,
)
from .scalars import CASTS, as_dtype

if TYPE_CHECKING:
    from .trace import Recorder

__all__ = [
    "ATOMIC", "IN_FLIGHT", "READ", "WRITE", "WRITTEN", "Array", "Cells", "Written",
    "open_array", "poisoned", "unwritten",
]  # fmt: skip

READ, WRITE, ATOMIC = 0, 1, 2

#: Poison, two bytes repeated: NaN as float16, bfloat16, float32 and float64; as an
#: int16 it is 32765, as an int32 2147319805.
POISON = 0x7FFD

# One byte of the bitmap a byte of memory: 0 until it is written. It is read in words as
# wide as an element, so a typed view of half-written bytes sees that they are.
WRITTEN = b"\x01"
IN_FLIGHT = 2  # a copy is on its way there
_WRITTEN = {1: 0x01, 2: 0x0101, 4: 0x01010101, 8: 0x0101010101010101}
_WORDS = {1: "B", 2: "H", 4: "I", 8: "Q"}


class Written(bytearray):
    """The bitmap of a piece of shared or local memory, and what else is known of it.

    Attributes
    ----------
    in_flight : dict
        ``{address // 16: copy}`` of what is on its way there.
    data : numpy.ndarray
        The memory, uint8 (of shared memory only, like all that follows).
    start, base : int
        Its first address in this process, and in the block's shared memory.
    array : Array or None
        Whose it is.
    fenced : numpy.ndarray or None
        The memory as asynchronous instructions see it: what was stored since the last
        proxy fence is not there. None as long as there were none.
    """

    data: np.ndarray
    start: int
    base: int
    array: Array | None
    fenced: np.ndarray | None

    def __init__(self, nbytes: int) -> None:
        super().__init__(nbytes)
        self.in_flight: dict[int, Any] = {}
        self.array = self.fenced = None

    def renew(self) -> None:
        """Make it as if nothing had ever been written."""
        self[:] = bytes(len(self))
        self.data[:] = poisoned(len(self))
        self.in_flight.clear()
        self.fenced = None

    def proxy(self) -> np.ndarray:
        """`fenced`, from now on kept."""
        if self.fenced is None:
            self.fenced = poisoned(len(self))
        return self.fenced

    def arriving(self, address: int) -> Any:
        """What is on its way to an address."""
        return self.in_flight.get(address // 16)


def poisoned(nbytes: int, alignment: int = 16) -> np.ndarray:
    """Fresh bytes, uint8 [nbytes], filled with poison.

    They stand at a multiple of `alignment` (a power of two, at least 8) that is no
    multiple of twice as much: what relies on more goes wrong here too.
    """
    room = np.full((nbytes + 3 * alignment) // 2, POISON, np.uint16).view(np.uint8)
    start = (alignment - _address(room)) % (2 * alignment)
    return room[start : start + nbytes]


def _address(data: np.ndarray) -> int:
    return data.__array_interface__["data"][0]


def _allocation(data: np.ndarray) -> int:
    """The address of the array of which `data` is a view; itself if of none."""
    while isinstance(data.base, np.ndarray):
        data = data.base
    return _address(data)


def unwritten(name: str, space: str) -> str:
    """The fault of a read that nothing was written for."""
    text = f"{name}: {space} memory is read before anything was written to it"
    if space == "shared":
        text += " (or another lane writes it, and a barrier is missing)"
    return text


def _check_dtype(name: str, dtype: np.dtype) -> None:
    if dtype.names:
        raise UnsupportedError(
            f"{name}: records are not emulated; give the kernel their fields as "
            f"arrays, {name}[{dtype.names[0]!r}] and so on"
        )
    if dtype.kind not in "biufc":
        raise UnsupportedError(f"{name}: expected an array of numbers, got {dtype}")
    if not dtype.isnative:
        raise LaunchError(f"{name}: dtype {dtype} has a foreign byte order")


class Array:
    """The description of a named piece of memory.

    Attributes
    ----------
    name : str
        As the source calls it.
    space : str
        ``"global"``, ``"shared"``, ``"local"`` or ``"const"``.
    address, allocation : int
        Of element 0 and of the array that the memory is part of, in bytes.
    shape, steps, itemsize
        Of the array; steps count elements.
    number : int
        In the trace; 0 without one.
    width : int
        Elements of an access.
    """

    width = 1
    __slots__ = (
        "address", "allocation", "itemsize", "name", "number", "recorder", "shape",
        "space", "steps", "wide",
    )  # fmt: skip

    def __init__(
        self, name: str, space: str, data: np.ndarray, recorder: Recorder | None
    ) -> None:
        _check_dtype(name, data.dtype)
        if any(step % data.itemsize for step in data.strides):
            raise LaunchError(f"{name}: strides {data.strides} split an element")
        self.name = name
        self.space = space
        self.address = _address(data)
        self.allocation = _allocation(data)
        self.shape = data.shape
        self.itemsize = data.itemsize
        self.steps = tuple(step // data.itemsize for step in data.strides)
        self.wide: dict[int, Array] = {}  # by bytes, see spans.py
        self.recorder = recorder
        self.number = 0 if recorder is None else recorder.register(self)

    def index_of(self, offset: Any) -> tuple[Any, ...]:
        """The index of the element `offset` elements after element 0 (or of many)."""
        axes = range(len(self.shape))
        flipped = [a for a in axes if self.steps[a] < 0]
        offset = offset - sum((self.shape[a] - 1) * self.steps[a] for a in flipped)
        index: list[Any] = [0 * offset for _ in axes]
        for axis in sorted(axes, key=lambda a: -abs(self.steps[a])):
            step = abs(self.steps[axis])
            if step and self.shape[axis] > 1:
                index[axis] = offset // step
                offset = offset % step
        for axis in flipped:
            index[axis] = self.shape[axis] - 1 - index[axis]
        return tuple(index)


def open_array(
    name: str,
    space: str,
    data: np.ndarray,
    written: memoryview | None = None,
    recorder: Recorder | None = None,
) -> Cells:
    """Name a piece of memory and give the view of all of it.

    Parameters
    ----------
    name, space
        As of `Array`.
    data : numpy.ndarray
        The memory; strides are multiples of the item size.
    written : memoryview, optional
        One byte a byte of `data` (contiguous then), nonzero where something was
        written; without it every element counts as written.
    recorder : Recorder, optional
        Logs every access (a traced run).
    """
    return _cells(Array(name, space, data, recorder), data, written)


def _cells(array: Array, data: np.ndarray, written: memoryview | None) -> Cells:
    kind = (CellsN, Cells1, Cells2)[data.ndim] if data.ndim < 3 else CellsN
    return kind(array, data, written)


class Cells:
    """A view of an `Array`, indexed by a kernel.

    Attributes
    ----------
    shape, dtype, ndim, size, strides, itemsize, nbytes, T
        As of a NumPy array.
    """

    __slots__ = (
        "array", "cells", "data", "log", "n0", "n1", "origin", "read_tag", "s0", "s1",
        "shape", "sink", "steps", "store_word", "words", "write_tag", "written",
    )  # fmt: skip

    def __init__(
        self, array: Array, data: np.ndarray, written: memoryview | None
    ) -> None:
        self.array = array
        self.data = data
        self.shape = data.shape
        dtype = data.dtype
        size = dtype.itemsize
        # A memoryview gives Python ints (see scalars.py) and is twice as fast.
        plain = dtype.kind in "ib" or (dtype.kind == "u" and size < 8)
        self.cells: Any = memoryview(data) if plain else data  # type: ignore[arg-type]
        # It also refuses floats, which must not be converted as NumPy does it.
        self.sink: Any = memoryview(data) if dtype.kind == "u" else self.cells  # type: ignore[arg-type]
        self.log = None if array.recorder is None else array.recorder.note
        self.words: Any = None
        self.store_word = _WRITTEN.get(size, 0)
        self.written = written
        if written is not None and size in _WORDS:
            self.words = written.cast(_WORDS[size])  # type: ignore[call-overload]
        self.origin = (_address(data) - array.address) // size
        self.steps = tuple(step // size for step in data.strides)
        self.n0: int
        self.n1: int
        self.n0, self.s0 = (self.shape[0], self.steps[0]) if data.ndim else (0, 0)
        self.n1, self.s1 = (self.shape[1], self.steps[1]) if data.ndim > 1 else (0, 0)
        self.read_tag = array.number * 4 + READ
        self.write_tag = array.number * 4 + WRITE

    # -- the general way --------------------------------------------------------------

    def _resolve(self, index: Any) -> tuple[int, ...] | np.ndarray:
        """An element's index as a tuple, or the view that `index` names."""
        parts = index if isinstance(index, tuple) else (index,)
        if Ellipsis in [p for p in parts if p is Ellipsis]:
            at = next(n for n, p in enumerate(parts) if p is Ellipsis)
            missing = len(self.shape) - len(parts) + 1
            parts = parts[:at] + (slice(None),) * missing + parts[at + 1 :]
        if len(parts) > len(self.shape):
            raise OutOfBoundsError(
                f"{self._called(index)}: {len(parts)} indices into shape {self.shape}"
            )
        for part, size in zip(parts, self.shape, strict=False):
            if isinstance(part, slice):
                continue
            if isinstance(part, float | np.floating) or not hasattr(part, "__index__"):
                raise UnsupportedError(
                    f"{self._called(index)}: an index must be an integer or a slice, "
                    f"not {type(part).__name__}"
                )
            if not 0 <= part < size:
                why = " (negative indices count as outside)" if part < 0 else ""
                if self.array.space == "shared" and self.array.shape == (0,):
                    why = ": the launch gives no dynamic shared memory (dynamic_shared)"
                raise OutOfBoundsError(
                    f"{self._called(index)} is outside shape {self.shape}{why}"
                )
        if len(parts) == len(self.shape) and not any(
            isinstance(part, slice) for part in parts
        ):
            return tuple(part.__index__() for part in parts)
        return self.data[parts]

    def _called(self, index: Any) -> str:
        def show(part: Any) -> str:
            if isinstance(part, slice):
                ends = (part.start, part.stop)
                return ":".join("" if end is None else str(end) for end in ends)
            return "..." if part is Ellipsis else str(part)

        parts = index if isinstance(index, tuple) else (index,)
        name = self.array.name
        if (self.shape, self.steps) != (self.array.shape, self.array.steps):
            name = f"(view of {name})"  # whose indices are not the array's
        return f"{name}[{', '.join(map(show, parts))}]"

    def _offset(self, index: tuple[int, ...]) -> int:
        return self.origin + sum(
            i * step for i, step in zip(index, self.steps, strict=True)
        )

    def _unreadable(self, offset: int) -> EmulatorError:
        address = self.array.address + offset * self.itemsize
        where = ", ".join(map(str, self.array.index_of(offset)))
        name = f"{self.array.name}[{where}]"
        copy = self.words.obj.arriving(address)
        if copy is not None:
            return InFlightError(f"{name}: read while {copy} is on its way there")
        return UninitialisedReadError(unwritten(name, self.array.space))

    def load(self, index: Any, frame: FrameType, kind: int = READ) -> Any:
        """An element or a view, whatever `index` is; `frame` is the kernel's."""
        where = self._resolve(index)
        if isinstance(where, np.ndarray):
            return _cells(self.array, where, self.written)
        offset = self._offset(where)
        if self.log is not None:
            self.log((self.read_tag + kind, offset, frame.f_lasti, frame.f_code))
        if self.words is not None and self.words[offset] != self.store_word:
            raise self._unreadable(offset)
        return self.cells[where]

    def store(self, index: Any, value: Any, frame: FrameType) -> None:
        """Write an element, or every element of a view."""
        where = self._resolve(index)
        if isinstance(where, np.ndarray):
            view = _cells(self.array, where, self.written)
            for at in np.ndindex(view.shape):
                given = isinstance(value, Cells)
                one = value.load(at, frame) if given else value
                view.store(at, one, frame)
            return
        offset = self._offset(where)
        if self.log is not None:
            self.log((self.write_tag, offset, frame.f_lasti, frame.f_code))
        if self.words is not None:
            self.words[offset] = self.store_word
        self._put(where, value)

    def _put(self, where: Any, value: Any) -> None:
        """Write one element; integers wrap as on the GPU."""
        if not self.data.flags.writeable:
            raise UnsupportedError(f"{self.array.name} is read-only")
        if isinstance(value, Cells):
            value._as_number()
        try:
            self.data[where] = CASTS[self.data.dtype.name](value)
        except KeyError:
            self.data[where] = value

    def update(self, index: Any, new: Callable[[Any], Any], frame: FrameType) -> Any:
        """Replace an element by `new(old)` as one atomic step; returns the old one."""
        old = self.load(index, frame, ATOMIC)
        if isinstance(old, Cells):
            old._as_number()
        where = self._resolve(index)
        self._put(where, new(old))
        recorder = self.array.recorder
        if recorder is not None and self.array.space == "global":
            recorder.post(self.address_of(index))
        return old

    def address_of(self, index: Any) -> int:
        """The address of an element."""
        where = self._resolve(index)
        assert isinstance(where, tuple)
        return self.array.address + self._offset(where) * self.itemsize

    # -- not as a number --------------------------------------------------------------

    def _as_number(self, *_: Any) -> Any:
        """What arithmetic, comparisons and the like do with an array: refuse it."""
        raise UnsupportedError(
            f"{self.array.name}: an array of shape {self.shape} where a number is "
            "needed; a kernel computes with elements"
        )

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = _as_number
    __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = _as_number
    __mod__ = __rmod__ = __pow__ = __rpow__ = __matmul__ = __rmatmul__ = _as_number
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = _as_number
    __lshift__ = __rlshift__ = __rshift__ = __rrshift__ = __invert__ = _as_number
    __neg__ = __pos__ = __abs__ = _as_number
    __bool__ = __float__ = __int__ = __index__ = _as_number
    __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _as_number
    __hash__ = object.__hash__
    __array_ufunc__ = None  # a NumPy scalar leaves its operators to those above

    # -- as a NumPy array -------------------------------------------------------------

    def __len__(self) -> int:
        if not self.shape:
            raise UnsupportedError(f"len({self.array.name}): it has no dimension")
        return self.shape[0]

    def __iter__(self) -> Iterator[Any]:
        for i in range(len(self)):
            yield self.load(i, _getframe(1))

    def __repr__(self) -> str:
        return f"<{self.array.space} {self.array.name} {self.shape} {self.dtype}>"

    @property
    def dtype(self) -> np.dtype:
        return self.data.dtype

    @property
    def ndim(self) -> int:
        return self.data.ndim

    @property
    def size(self) -> int:
        return self.data.size

    @property
    def itemsize(self) -> int:
        return self.data.itemsize

    @property
    def nbytes(self) -> int:
        return self.data.nbytes

    @property
    def strides(self) -> tuple[int, ...]:
        return self.data.strides

    @property
    def T(self) -> Cells:  # noqa: N802
        return _cells(self.array, self.data.T, self.written)

    def reshape(self, *shape: Any) -> Cells:
        """The same memory in another shape (contiguous arrays only)."""
        if len(shape) == 1 and isinstance(shape[0], tuple):
            shape = shape[0]
        if not self.data.flags.c_contiguous:
            raise UnsupportedError(f"{self.array.name}: reshape needs C order")
        return self._on_same_bytes(self.data.reshape(shape))

    def ravel(self) -> Cells:
        """The same memory in one dimension (contiguous arrays only)."""
        return self.reshape(-1)

    def view(self, kind: Any) -> Cells:
        """The same bytes as another dtype."""
        return self._on_same_bytes(self.data.view(as_dtype(kind)))

    def _on_same_bytes(self, data: np.ndarray) -> Cells:
        written = self.written
        if written is not None:
            start = _address(data) - self.array.address
            written = written[start : start + data.nbytes]
        old = self.array
        return open_array(old.name, old.space, data, written, old.recorder)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__array_"):  # NumPy tries to make a number of it
            self._as_number()
        raise UnsupportedError(f"{self.array.name}.{name}: no such attribute here")


class Cells1(Cells):
    """One dimension."""

    __slots__ = ()

    def __getitem__(self, i: Any) -> Any:
        try:
            if 0 <= i < self.n0:
                value = self.cells[i]
                if self.log is not None:
                    f = _getframe(1)
                    k = self.origin + i * self.s0
                    self.log((self.read_tag, k, f.f_lasti, f.f_code))
                if self.words is None:
                    return value
                if self.words[self.origin + i * self.s0] == self.store_word:
                    return value
        except (TypeError, IndexError):
            pass
        return self.load(i, _getframe(1))

    def __setitem__(self, i: Any, value: Any) -> None:
        try:
            if 0 <= i < self.n0:
                self.sink[i] = value
                if self.log is not None:
                    f = _getframe(1)
                    k = self.origin + i * self.s0
                    self.log((self.write_tag, k, f.f_lasti, f.f_code))
                if self.words is not None:
                    self.words[self.origin + i * self.s0] = self.store_word
                return
        except (TypeError, ValueError, IndexError, OverflowError):
            pass  # a slice, or a value that must wrap
        self.store(i, value, _getframe(1))


class Cells2(Cells):
    """Two dimensions."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        try:
            i, j = index
            if 0 <= i < self.n0 and 0 <= j < self.n1:
                value = self.cells[index]
                if self.log is not None:
                    f = _getframe(1)
                    k = self.origin + i * self.s0 + j * self.s1
                    self.log((self.read_tag, k, f.f_lasti, f.f_code))
                if self.words is None:
                    return value
                k = self.origin + i * self.s0 + j * self.s1
                if self.words[k] == self.store_word:
                    return value
        except (TypeError, ValueError, IndexError):
            pass
        return self.load(index, _getframe(1))

    def __setitem__(self, index: Any, value: Any) -> None:
        try:
            i, j = index
            if 0 <= i < self.n0 and 0 <= j < self.n1:
                self.sink[index] = value
                if self.log is not None:
                    f = _getframe(1)
                    k = self.origin + i * self.s0 + j * self.s1
                    self.log((self.write_tag, k, f.f_lasti, f.f_code))
                if self.words is not None:
                    k = self.origin + i * self.s0 + j * self.s1
                    self.words[k] = self.store_word
                return
        except (TypeError, ValueError, IndexError, OverflowError):
            pass
        self.store(index, value, _getframe(1))


class CellsN(Cells):
    """Any other number of dimensions; NumPy finds an index that is too large."""

    __slots__ = ()

    def __getitem__(self, index: Any) -> Any:
        try:
            if len(index) == len(self.steps) and min(index) >= 0:
                value = self.cells[index]
                if self.log is not None:
                    f = _getframe(1)
                    k = sum(map(mul, index, self.steps), self.origin)
                    self.log((self.read_tag, k, f.f_lasti, f.f_code))
                if self.words is None:
                    return value
                k = sum(map(mul, index, self.steps), self.origin)
                if self.words[k] == self.store_word:
                    return value
        except (TypeError, ValueError, IndexError):
            pass
        return self.load(index, _getframe(1))

    def __setitem__(self, index: Any, value: Any) -> None:
        try:
            if len(index) == len(self.steps) and min(index) >= 0:
                self.sink[index] = value
                if self.log is not None:
                    f = _getframe(1)
                    k = sum(map(mul, index, self.steps), self.origin)
                    self.log((self.write_tag, k, f.f_lasti, f.f_code))
                if self.words is not None:
                    k = sum(map(mul, index, self.steps), self.origin)
                    self.words[k] = self.store_word
                return
        except (TypeError, ValueError, IndexError, OverflowError):
            pass
        self.store(index, value, _getframe(1))
