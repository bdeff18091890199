"""Matrix products of a warpgroup (``wgmma``): who comes to them, when they are done.

They are asynchronous: the lanes go on, and until they have waited for the group that a
product belongs to, its sums are nobody's, and what it reads must stay. Here a product
reads its operands when the last of the 128 lanes has come to it; a lane gets its sums
when it waits for them, and not before.

Only the products themselves are the warpgroup's: all lanes come to the same ones, in
the same order. Fences, commits and waits are each lane's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .arrays import IN_FLIGHT, WRITTEN, Cells, Written, unwritten
from .clocks import Clock, join
from .errors import (
    InFlightError,
    OutOfBoundsError,
    UnfencedError,
    UninitialisedReadError,
    WarpgroupError,
)
from .lanes import WARP, WARPGROUP, Hub, Until
from .sites import Site
from .wgmma import (
    NAME,
    ROWS,
    Operand,
    registers_of_sums,
    sums_of_registers,
    tile_of_registers,
)

if TYPE_CHECKING:
    from .intrinsics import Executing

__all__ = ["Product", "Warpgroup"]


class Product(NamedTuple):
    """What a product does: see `hopper.multiply`."""

    n: int
    accumulate: bool
    a_columns: bool
    b_rows: bool


# -- a lane's registers ---------------------------------------------------------------


class _Registers:
    """The `n` / 2 float32 of a lane that a product adds to."""

    def __init__(self, given: Any, n: int) -> None:
        if not isinstance(given, Cells) or given.shape != (n // 2,):
            raise OutOfBoundsError(
                f"{NAME} n{n}: expected a local array of {n // 2} float32 as sums, got "
                f"{given!r}"
            )
        self.cells, self.n = given, n
        self.address = given.array.address + given.origin * given.itemsize
        assert given.written is not None
        start = given.origin * given.itemsize
        self.flags = given.written[start : start + 2 * n]
        self.bitmap: Written = given.written.obj  # type: ignore[assignment]

    def take(self, running: _Running, accumulate: bool) -> None:
        """Mark them as on their way."""
        before = self.flags.tobytes()
        if (at := before.find(IN_FLIGHT)) >= 0:
            raise InFlightError(
                f"{self.cells.array.name}: sums of {NAME} n{self.n} overlap with those "
                f"of {self.bitmap.arriving(self.address + at)}"
            )
        if accumulate and before != WRITTEN * len(before):
            raise UninitialisedReadError(unwritten(self.cells.array.name, "local"))
        self.flags[:] = bytes([IN_FLIGHT]) * len(before)
        self.bitmap.in_flight.update(dict.fromkeys(self._chunks(), running))

    def arrive(self, values: np.ndarray, running: _Running) -> None:
        """Give them to the lane."""
        if self.flags != bytes([IN_FLIGHT]) * len(self.flags):
            raise InFlightError(
                f"{self.cells.array.name}: written while {running} was adding to it"
            )
        self.cells.data[:] = values
        self.flags[:] = WRITTEN * len(self.flags)
        for chunk in self._chunks():
            del self.bitmap.in_flight[chunk]

    def _chunks(self) -> range:
        """The 16-byte pieces that they touch, by address // 16."""
        return range(self.address // 16, -(-(self.address + 2 * self.n) // 16))


class _Brought(NamedTuple):
    """What a lane brings to a product."""

    sums: _Registers
    fresh: bool  # whether they hold values of the lane's own
    a: tuple[int, ...] | None  # its part of A, if that is in registers
    clock: Clock


class _LaneState:
    """How far a lane of the warpgroup is."""

    def __init__(self) -> None:
        self.position = 0  # products that it has come to
        self.fenced = False
        self.pending: list[_Running] = []  # since its last commit
        self.groups: list[list[_Running]] = []  # oldest first
        self.flying: dict[int, tuple[_Registers, _Running]] = {}  # by address


# -- products -------------------------------------------------------------------------


class _Running:
    """A product that is not done; as text, what and where.

    Attributes
    ----------
    key : tuple
        What all lanes must agree in: the product, descriptors of A (or None) and B.
    brought : list of _Brought
        One a lane that has come.
    operands : list of Operand
        Those in shared memory, B last.
    sums : _Sums
    own : int
        Its stretch in the warpgroup's clock.
    done : bool
        Whether its operands are free again.
    """

    def __init__(self, site: Site, key: Any, number: int) -> None:
        self.site, self.key, self.number = site, key, number
        self.brought: list[Any] = [None] * WARPGROUP
        self.came = 0
        self.operands: list[Operand] = []
        self.sums: _Sums
        self.committed = False
        self.own = 0
        self.done = False

    def finish(self) -> None:
        """It is over: its operands must still be what they were."""
        if not self.done:
            self.done = True
            for operand in self.operands:
                operand.check_unchanged(self)

    def __str__(self) -> str:
        state = "not waited for" if self.committed else "not even committed"
        return f"the {NAME} of warpgroup {self.number} ({self.site}, {state})"


class _AllHaveCome(Until):
    complaint = "a product that not all lanes of its warpgroup come to"

    def __init__(self, running: _Running) -> None:
        self.running = running

    def ready(self) -> bool:
        return self.running.came == WARPGROUP

    def __str__(self) -> str:
        return f"{self.running.came} of {WARPGROUP} lanes have come to {self.running}"


class _Sums:
    """The sums of a warpgroup, [64, n]."""

    def __init__(self, addresses: list[int], n: int) -> None:
        self.addresses = addresses  # of the lanes' registers
        self.values = np.zeros((ROWS, n), np.float32)
        self._registers: np.ndarray | None = None

    def registers(self) -> np.ndarray:
        """The same, as the lanes hold them."""
        if self._registers is None:
            self._registers = registers_of_sums(self.values)
        return self._registers

    def load(self, brought: Sequence[_Brought]) -> None:
        """Begin with what the lanes hold that have values of their own."""
        fresh = [place for place, each in enumerate(brought) if each.fresh]
        if fresh:
            registers = self.registers().copy()
            registers[fresh] = [brought[place].sums.cells.data for place in fresh]
            self.values = sums_of_registers(registers)

    def add(self, a: np.ndarray, b: np.ndarray, accumulate: bool) -> None:
        """Add the product of bfloat16 bits [64, 16] and [n, 16], transposed."""
        new = _wide(a) @ _wide(b).T
        if accumulate:
            new += self.values
        self.values = new.astype(np.float32)
        self._registers = None


def _wide(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32).astype(np.float64)


class Warpgroup:
    """128 lanes that multiply together.

    A lane that comes to a product leaves what it brings and goes on; the last lane
    executes it.
    """

    def __init__(self, hub: Hub, number: int) -> None:
        self.hub, self.number = hub, number
        self.lanes = [_LaneState() for _ in range(WARPGROUP)]
        self.open: list[_Running] = []  # that some lanes have not come to
        self.executed = 0
        self.sums: dict[int, _Sums] = {}  # by the address of lane 0's registers
        self.own = 0

    # -- what a lane does -------------------------------------------------------------

    @property
    def _state(self) -> _LaneState:
        return self.lanes[self.hub.lane.index % WARPGROUP]

    def fence(self) -> None:
        self._state.fenced = True

    def multiply(
        self, lane: Executing, sums: Any, a: Any, b: int, product: Product
    ) -> None:
        state = self._state
        if not state.fenced:
            raise UnfencedError(
                f"{NAME} without a wgmma.fence since its registers were the lane's own "
                "(since the last wgmma.wait_group)"
            )
        in_registers = isinstance(a, tuple)
        running = self._come(lane, (product, None if in_registers else a, b))
        registers = _Registers(sums, product.n)
        _, before = state.flying.get(registers.address, (None, None))
        if before is None or before.key[0].n != product.n:
            registers.take(running, product.accumulate)
        state.flying[registers.address] = registers, running
        state.pending.append(running)
        own = self.hub.lane
        clock = Clock(own.index, own.known, own.own)
        running.brought[own.index % WARPGROUP] = _Brought(
            registers, before is None, a if in_registers else None, clock
        )
        if self.hub.recorder is not None:
            self.hub.learn(own)
        if running.came == WARPGROUP:
            self._execute(running)

    def commit(self) -> None:
        state = self._state
        for running in state.pending:
            running.committed = True
        state.groups.append(state.pending)
        state.pending = []

    def wait(self, lane: Executing, n: int) -> None:
        state = self._state
        count = max(0, len(state.groups) - n)
        over = [running for group in state.groups[:count] for running in group]
        del state.groups[:count]
        if over:
            self.hub.wait_until("wgmma.wait_group", _AllHaveCome(over[-1]), lane.frame)
        for running in over:
            running.finish()
        own = self.hub.lane
        for address, (registers, running) in list(state.flying.items()):
            if running in over:
                values = running.sums.registers()[own.index % WARPGROUP]
                registers.arrive(values, running)
                del state.flying[address]
        state.fenced = False
        if over and self.hub.recorder is not None:
            known = own.known.copy()
            known[self.hub.group_index + self.number] = over[-1].own
            self.hub.learn(own, known)

    def check_end(self) -> None:
        """Raise if products have not been waited for when the block ends."""
        for state in self.lanes:
            for _, running in state.flying.values():
                raise InFlightError(f"the block ends before {running} is done")

    # -- together ---------------------------------------------------------------------

    def _come(self, lane: Executing, key: Any) -> _Running:
        """The lane that runs comes to its next product."""
        state = self._state
        at = state.position - self.executed
        site = self.hub.sites.of(lane.frame)
        if at == len(self.open):
            self.open.append(_Running(site, key, self.number))
        running = self.open[at]
        who = f"lane {self.hub.lane.index}"
        if running.site is not site:
            raise WarpgroupError(
                f"{who} comes to a {NAME} here, others of its warpgroup to {running}"
            )
        if running.key != key:
            raise WarpgroupError(
                f"{NAME} of {key} in {who}, of {running.key} in others of its warpgroup"
            )
        state.position += 1
        running.came += 1
        return running

    def _execute(self, running: _Running) -> None:
        """All lanes have come: read the operands and add their product."""
        del self.open[0]
        self.executed += 1
        product, a_bits, b_bits = running.key
        brought = running.brought
        if a_bits is None:
            a = tile_of_registers(np.array([each.a for each in brought], np.uint32))
        else:
            in_a = Operand(self.hub, a_bits, ROWS, product.a_columns)
            running.operands.append(in_a)
            a = in_a.values
        in_b = Operand(self.hub, b_bits, product.n, product.b_rows)
        running.operands.append(in_b)
        running.sums = sums = self._sums_of(brought, product.n)
        if product.accumulate:
            sums.load(brought)
        sums.add(a, in_b.values, product.accumulate)
        if self.hub.recorder is not None:
            self._log(running)

    def _sums_of(self, brought: Sequence[_Brought], n: int) -> _Sums:
        """The sums that these lanes add to, all of them the same."""
        addresses = [each.sums.address for each in brought]
        known = self.sums.get(addresses[0])
        if known is not None and known.addresses == addresses:
            return known
        if not all(each.fresh for each in brought):
            raise WarpgroupError(f"{NAME}: its lanes add to sums of different products")
        self.sums[addresses[0]] = _Sums(addresses, n)
        return self.sums[addresses[0]]

    def _log(self, running: _Running) -> None:
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
        clocks = [each.clock for each in running.brought]
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
