"""Matrix products of a warpgroup (``wgmma``): operands, registers, and their order.

A product takes 64 rows by 16 columns of bfloat16 as A, from shared memory or from the
128 lanes' registers, and 16 by n as B from shared memory, and adds to 64 by n float32
sums in registers. It is asynchronous: the lanes go on, and until they have waited for
the group that it belongs to, the sums are nobody's, and what it reads must stay.

Here the operands are read when the last of the 128 lanes has come to the product; the
sums come to the lanes' arrays at the wait, and not before.

Source: NVIDIA, PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions".
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .arrays import IN_FLIGHT, READ, WRITTEN, Cells, Written, unwritten
from .clocks import Clock, join
from .errors import (
    InFlightError,
    OutOfBoundsError,
    UnfencedError,
    UninitialisedReadError,
    UnsupportedError,
    WarpgroupError,
)
from .lanes import WARP, WARPGROUP, Hub, Until
from .spans import Site, log_blocks

if TYPE_CHECKING:
    from .intrinsics import Executing

__all__ = [
    "Product",
    "Warpgroup",
    "operand_places",
    "registers_of_a",
    "registers_of_sums",
    "sums_of_registers",
    "tile_of_registers",
]

ROWS, DEPTH = 64, 16  # of A
NAME = "wgmma.mma_async"
SWIZZLE_128 = 1  # in bits 62 and 63 of a descriptor


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


class _Operand:
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
        missing = self._elements(self.piece) != 0x0101
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

    def check_still(self, product: Any) -> None:
        """Raise if it is not what it was."""
        changed = self._elements(self.piece.data) != self.values
        changed |= self._elements(self.piece) != 0x0101
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
        log_blocks(array, blocks.tolist(), READ, site)


def _element(piece: Written, at: int) -> str:
    """The element that a byte of a piece of memory belongs to."""
    array = piece.array
    assert array is not None
    index = array.index_of(at // array.itemsize)
    return f"{array.name}[{', '.join(map(str, index))}]"


# -- products -------------------------------------------------------------------------


class Product(NamedTuple):
    """What a product does: see `hopper.multiply`."""

    n: int
    accumulate: bool
    a_columns: bool
    b_rows: bool


class _Sums:
    """Sums on their way to the registers of the 128 lanes."""

    def __init__(
        self, addresses: list[int], cells: Sequence[Cells], n: int, accumulate: bool
    ) -> None:
        self.addresses, self.cells, self.n = addresses, cells, n
        self.values = np.zeros((ROWS, n), np.float32)
        if accumulate:
            held = np.stack([each.data[: n // 2] for each in cells])
            self.values = sums_of_registers(held)
        self.last: _Running

    def add(self, a: np.ndarray, b: np.ndarray, accumulate: bool) -> None:
        """Add the product of bfloat16 bits [64, 16] and [n, 16], transposed."""
        new = _wide(a) @ _wide(b).T
        if accumulate:
            new += self.values
        self.values = new.astype(np.float32)

    def arrive(self) -> None:
        """Give every lane its registers."""
        registers = registers_of_sums(self.values)
        for lane, cells in enumerate(self.cells):
            flags = _flags(cells, self.n)
            if flags != bytes([IN_FLIGHT]) * len(flags):
                raise InFlightError(
                    f"{cells.array.name} of lane {lane} of the warpgroup: written "
                    f"while {self.last} was adding to it"
                )
            cells.data[: self.n // 2] = registers[lane]
            flags[:] = WRITTEN * len(flags)
            for chunk in _chunks(cells, self.n):
                del _bitmap(cells).in_flight[chunk]


def _wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


def _bitmap(cells: Cells) -> Written:
    assert cells.written is not None
    return cells.written.obj  # type: ignore[return-value]


def _flags(cells: Cells, n: int) -> memoryview:
    """The part of the bitmap that belongs to a lane's registers."""
    assert cells.written is not None
    first = cells.origin * cells.itemsize
    return cells.written[first : first + 2 * n]


def _address(cells: Cells) -> int:
    return cells.array.address + cells.origin * cells.itemsize


def _chunks(cells: Cells, n: int) -> range:
    """The 16-byte pieces that a lane's registers touch, by address // 16."""
    first = _address(cells)
    return range(first // 16, -(-(first + 2 * n) // 16))


class _Running:
    """A product that has not been waited for; as text, what and where."""

    def __init__(self, site: Site, number: int) -> None:
        self.site, self.number = site, number
        self.operands: list[_Operand] = []
        self.committed = False
        self.own = 0  # its stretch in the warpgroup's clock

    def __str__(self) -> str:
        state = "not waited for" if self.committed else "not even committed"
        return f"the {NAME} of warpgroup {self.number} ({self.site}, {state})"


class _Instruction(Until):
    """What the lanes of a warpgroup come to, one after another.

    Attributes
    ----------
    given : list
        What each lane brings.
    came : int
        Lanes that have come.
    running : _Running
        Its product, if it is one.
    known : numpy.ndarray
        What a wait lets its lanes know, once it is over.
    """

    complaint = "an instruction of a warpgroup that not all of its lanes come to"

    def __init__(self, name: str, site: Site, key: Any, number: int) -> None:
        self.name, self.site, self.key = name, site, key
        self.given: list[Any] = [None] * WARPGROUP
        self.came = 0
        self.running = _Running(site, number)
        self.known: np.ndarray

    def ready(self) -> bool:
        return self.came == WARPGROUP

    def __str__(self) -> str:
        return f"{self.came} of {WARPGROUP} lanes have come"


class Warpgroup:
    """128 lanes that execute ``wgmma`` instructions together.

    A lane that comes to one leaves what it brings and goes on; the last lane executes
    it. Only at a wait the lanes wait for each other.
    """

    def __init__(self, hub: Hub, number: int) -> None:
        self.hub, self.number = hub, number
        self.stream: list[_Instruction] = []  # that some lanes have not come to
        self.first = 0  # how many are done before those
        self.position = [0] * WARPGROUP
        self.fenced = [False] * WARPGROUP
        self.taken: dict[tuple[int, int], int] = {}  # (lane, address) -> n
        self.sums: dict[int, _Sums] = {}  # by the address of lane 0's
        self.pending: list[_Running] = []
        self.groups: list[list[_Running]] = []
        self.own = 0

    # -- what a lane does -------------------------------------------------------------

    def fence(self, lane: Executing) -> None:
        self._come(lane, "wgmma.fence", None, None)
        self.fenced[self._own_place()] = True

    def multiply(
        self, lane: Executing, sums: Any, a: Any, b: int, product: Product
    ) -> None:
        if not self.fenced[self._own_place()]:
            raise UnfencedError(
                f"{NAME} without a wgmma.fence since its registers were the lane's own "
                "(since the last wgmma.wait_group)"
            )
        in_registers = isinstance(a, tuple)
        key = product, None if in_registers else a, b
        own = self.hub.lane
        clock = Clock(own.index, own.known, own.own)
        given = sums, a if in_registers else None, clock
        instruction = self._come(lane, NAME, key, given)
        self._take(sums, product, instruction.running)
        if self.hub.recorder is not None:
            self.hub.learn(own)
        if instruction.ready():
            self._multiply(instruction)

    def commit(self, lane: Executing) -> None:
        if self._come(lane, "wgmma.commit_group", None, None).ready():
            for running in self.pending:
                running.committed = True
            self.groups.append(self.pending)
            self.pending = []

    def wait(self, lane: Executing, n: int) -> None:
        name = "wgmma.wait_group"
        instruction = self._come(lane, name, n, None)
        if instruction.ready():
            instruction.known = self._retire(n)
        self.hub.wait_until(name, instruction, lane.frame)
        self.fenced[self._own_place()] = False
        if self.hub.recorder is not None:
            own = self.hub.lane
            self.hub.learn(own, np.maximum(own.known, instruction.known))

    def check_end(self) -> None:
        """Raise if products have not been waited for when the block ends."""
        left = [*self.pending, *(each for group in self.groups for each in group)]
        if left:
            raise InFlightError(f"the block ends before {left[0]} is done")

    # -- together ---------------------------------------------------------------------

    def _own_place(self) -> int:
        return self.hub.lane.index % WARPGROUP

    def _come(self, lane: Executing, name: str, key: Any, given: Any) -> _Instruction:
        """The lane that runs comes to its next instruction."""
        place = self._own_place()
        at = self.position[place] - self.first
        self.position[place] += 1
        frame = lane.frame
        if at == len(self.stream):
            self.stream.append(_Instruction(name, Site.of(frame), key, self.number))
        found = self.stream[at]
        same_site = found.site[:2] == (frame.f_code, frame.f_lasti)
        if found.name != name or not same_site:
            raise WarpgroupError(
                f"lane {self.hub.lane.index} comes to {name}, others of its warpgroup "
                f"to {found.name} ({found.site})"
            )
        if found.key != key:
            raise WarpgroupError(
                f"{name} with {key} in lane {self.hub.lane.index}, and {found.key} in "
                "others of its warpgroup"
            )
        found.given[place] = given
        found.came += 1
        if found.ready():
            del self.stream[0]
            self.first += 1
        return found

    def _take(self, sums: Any, product: Product, running: _Running) -> None:
        """Mark the lane's registers as on their way."""
        n = product.n
        if not isinstance(sums, Cells) or sums.shape != (n // 2,):
            raise OutOfBoundsError(
                f"{NAME} n{n}: expected a local array of {n // 2} float32 as sums, got "
                f"{sums!r}"
            )
        flags = _flags(sums, n)
        before = flags.tobytes()
        key = self._own_place(), _address(sums)
        if before == bytes([IN_FLIGHT]) * len(before):
            if self.taken.get(key) == n:
                return
        elif IN_FLIGHT not in before:
            if product.accumulate and before != WRITTEN * len(before):
                raise UninitialisedReadError(unwritten(sums.array.name, "local"))
            flags[:] = bytes([IN_FLIGHT]) * len(flags)
            flying = dict.fromkeys(_chunks(sums, n), running)
            _bitmap(sums).in_flight.update(flying)
            self.taken[key] = n
            return
        first = _address(sums) + before.index(IN_FLIGHT)
        raise InFlightError(
            f"{sums.array.name}: sums of {NAME} n{n} overlap with those of "
            f"{_bitmap(sums).arriving(first)}"
        )

    def _multiply(self, instruction: _Instruction) -> None:
        """All lanes have come: read the operands and add their product."""
        product, a_bits, b_bits = instruction.key
        cells, registers, clocks = zip(*instruction.given, strict=True)
        running = instruction.running
        if a_bits is None:
            a = tile_of_registers(np.array(registers, np.uint32))
        else:
            in_a = _Operand(self.hub, a_bits, ROWS, product.a_columns)
            running.operands.append(in_a)
            a = in_a.values
        in_b = _Operand(self.hub, b_bits, product.n, product.b_rows)
        running.operands.append(in_b)

        sums = self._sums_of(cells, product)
        sums.add(a, in_b.values, product.accumulate)
        sums.last = running
        self.pending.append(running)
        if self.hub.recorder is not None:
            self._log(running, clocks)

    def _sums_of(self, cells: Sequence[Cells], product: Product) -> _Sums:
        """The sums that these lanes add to, all of them the same."""
        addresses = [_address(each) for each in cells]
        known = self.sums.get(addresses[0])
        if known is None:
            known = _Sums(addresses, cells, product.n, product.accumulate)
            self.sums[addresses[0]] = known
        if known.addresses != addresses:
            raise WarpgroupError(f"{NAME}: its lanes add to sums of different products")
        return known

    def _retire(self, n: int) -> np.ndarray:
        """All groups but the newest `n` are done; returns what is known then."""
        count = max(0, len(self.groups) - n)
        done = [running for group in self.groups[:count] for running in group]
        del self.groups[:count]
        known = self.hub.nothing_known.copy()
        for running in done:
            for operand in running.operands:
                operand.check_still(running)
            known[self.hub.group_index + self.number] = running.own
        for key, sums in list(self.sums.items()):
            if sums.last in done:
                sums.arrive()
                del self.sums[key]
                for place, address in enumerate(sums.addresses):
                    del self.taken[place, address]
        return known

    def _log(self, running: _Running, clocks: Sequence[Clock]) -> None:
        """Note what a product reads, as its own and not the lane's that came last.

        Every warp starts its part when it comes there: it reads its 16 rows of A (if
        those are in memory) and all of B.
        """
        hub = self.hub
        recorder = hub.recorder
        assert recorder is not None
        self.own += 1
        running.own = self.own
        index = hub.group_index + self.number
        warps = [
            join(clocks[first : first + WARP]) for first in range(0, WARPGROUP, WARP)
        ]
        for warp, known in enumerate(warps):
            recorder.mark(Clock(index, known, self.own), hub.now.phase)
            for in_a in running.operands[:-1]:
                in_a.log(slice(16 * warp, 16 * warp + 16), running.site)
        known = np.minimum.reduce(warps)
        recorder.mark(Clock(index, known, self.own), hub.now.phase)
        running.operands[-1].log(slice(None), running.site)
        recorder.mark(hub.lane, hub.now.phase)
