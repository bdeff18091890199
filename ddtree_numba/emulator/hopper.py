"""Hopper's asynchronous instructions: barriers, copies in bulk, warpgroup products.

What `ddtree_numba.kernels.ptx` binds its instructions to. Every function takes the lane
at its instruction (`Executing`) first.

- Named barriers and mbarriers bring a part of a block together (`barriers.py`).
- A copy in bulk (TMA) is asked for by one lane and arrives by itself (`bulk.py`): here
  as late as is possible, when no lane can go on without it.
- ``wgmma`` multiplies for 128 lanes, from shared memory, while they go on
  (`warpgroup.py`). The sums are theirs again when they have waited for them.
- Both look at shared memory by another way than loads and stores do. What was stored is
  there for them after ``fence.proxy.async``, and not before. So it is with what another
  block stored in global memory, and copies in bulk: ``fence.proxy.async.global``.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from .arrays import ATOMIC, READ, WRITE
from .barriers import Mbarrier, NamedBarrier, Threshold
from .bulk import CHUNK, Box, Bulk, TensorMap, tensor_map
from .errors import BarrierUseError, LaunchError, UnfencedError, UnsupportedError
from .intrinsics import Executing
from .lanes import WARPGROUP, Block, Hub
from .spans import Span
from .warpgroup import Product, Warpgroup

__all__ = [
    "Units",
    "barrier_arrive",
    "barrier_or",
    "barrier_sync",
    "bulk_copy",
    "bulk_load",
    "commit_products",
    "fence_mbarriers",
    "fence_products",
    "fence_proxy",
    "fence_proxy_global",
    "mbarrier_arrive",
    "mbarrier_init",
    "mbarrier_wait",
    "multiply",
    "set_max_registers",
    "shared_address",
    "tensor_map",
    "wait_for_at_least",
    "wait_for_products",
]


class Units:
    """What works beside the lanes of one block, and their barriers.

    Attributes
    ----------
    mbarriers : dict
        By their shared address.
    named : dict
        Named barriers by number.
    groups : dict
        Warpgroups by number.
    bulk : Bulk
        Copies in bulk.
    stale : set of int
        Lanes whose copies in bulk may not see what they have waited for.
    """

    def __init__(self, hub: Hub) -> None:
        self.hub = hub
        self.mbarriers: dict[int, Mbarrier] = {}
        self.named: dict[int, NamedBarrier] = {}
        self.groups: dict[int, Warpgroup] = {}
        self.bulk = Bulk(hub)
        self.stale: set[int] = set()

    def let_one_arrive(self) -> bool:
        """Let a copy in bulk arrive, if there is one on its way."""
        return self.bulk.let_one_arrive()

    def check_end(self) -> None:
        """Raise if the block ends before what its units do."""
        self.bulk.check_end()
        for group in self.groups.values():
            group.check_end()


def _units(hub: Hub) -> Units:
    block: Block = hub.now
    if block.units is None:
        block.units = Units(hub)
    return block.units


# -- named barriers -------------------------------------------------------------------


def barrier_sync(lane: Executing, number: int, n_lanes: int) -> None:
    """``bar.sync``: wait until `n_lanes` have come to barrier `number`."""
    _meet(lane, "bar.sync", number, n_lanes, False)


def barrier_or(lane: Executing, number: int, n_lanes: int, predicate: Any) -> int:
    """``bar.red.or``: the same; 1 if any lane that waits brought a predicate, or 0."""
    return int(_meet(lane, "bar.red.or", number, n_lanes, bool(predicate)))


def _meet(lane: Executing, name: str, number: int, n_lanes: int, brings: bool) -> bool:
    hub = lane.hub
    barrier = _named(lane, name, number, n_lanes)
    generation = barrier.arrive(hub, n_lanes, brings)
    hub.wait_until(name, barrier.after(generation), lane.frame)
    barrier.leave(hub)
    return barrier.result


def barrier_arrive(lane: Executing, number: int, n_lanes: int) -> None:
    """``bar.arrive``: count as one that has come to the barrier, and go on."""
    _named(lane, "bar.arrive", number, n_lanes).arrive(lane.hub, n_lanes)


def _named(lane: Executing, name: str, number: int, n_lanes: int) -> NamedBarrier:
    if not 0 <= number < 16:
        raise BarrierUseError(f"{name} {number}: there are barriers 0 to 15")
    if n_lanes <= 0 or n_lanes % 32 or n_lanes > len(lane.hub.lanes):
        raise BarrierUseError(
            f"{name} {number}: {n_lanes} lanes; expected a multiple of 32, at most the "
            f"block's {len(lane.hub.lanes)}"
        )
    named = _units(lane.hub).named
    return named.setdefault(number, NamedBarrier(number))


# -- mbarriers ------------------------------------------------------------------------


def mbarrier_init(lane: Executing, array: Any, index: Any, count: int) -> None:
    """``mbarrier.init``: the 8 bytes at an element become a barrier for `count`."""
    span = Span(array, index, 8, "mbarrier.init", "shared", alignment=8)
    address = _address(span)
    barriers = _units(lane.hub).mbarriers
    if address in barriers:
        raise BarrierUseError(
            f"{span.name}: mbarrier.init of what is a barrier already"
        )
    if not 1 <= count < 2**20:
        raise BarrierUseError(
            f"{span.name}: a count of {count}; expected 1 to 2**20 - 1"
        )
    span.check_at_rest("mbarrier.init")
    span.log(WRITE, lane.frame)
    barriers[address] = Mbarrier(span.name, count, lane.hub)


def mbarrier_arrive(
    lane: Executing, array: Any, index: Any, n_bytes: int | None = None
) -> None:
    """``mbarrier.arrive``, with `n_bytes` ``.expect_tx``: this lane has come.

    The phase then also waits for so many bytes of copies in bulk.
    """
    name = "mbarrier.arrive" if n_bytes is None else "mbarrier.arrive.expect_tx"
    barrier = _mbarrier(lane, name, array, index)
    barrier.arrive(lane.hub, n_bytes or 0)


def mbarrier_wait(lane: Executing, array: Any, index: Any, parity: int) -> None:
    """``mbarrier.try_wait.parity`` until it is true: the phase of `parity` is over."""
    barrier = _mbarrier(lane, "mbarrier.try_wait", array, index)
    hub = lane.hub
    hub.wait_until("mbarrier.try_wait", barrier.after(int(parity) & 1), lane.frame)
    barrier.leave(hub)


def fence_mbarriers(lane: Executing) -> None:
    """``fence.mbarrier_init``: copies in bulk see the barriers made so far."""
    for barrier in _units(lane.hub).mbarriers.values():
        barrier.fenced = True


def _mbarrier(lane: Executing, name: str, array: Any, index: Any) -> Mbarrier:
    span = Span(array, index, 8, name, "shared", alignment=8)
    barrier = _units(lane.hub).mbarriers.get(_address(span))
    if barrier is None:
        raise BarrierUseError(f"{span.name}: {name} before mbarrier.init")
    span.log(ATOMIC, lane.frame)
    return barrier


# -- shared memory, seen by units -----------------------------------------------------


def shared_address(lane: Executing, array: Any, index: Any, alignment: int = 1) -> int:
    """The 32-bit address of an element of a shared array."""
    return _address(Span(array, index, 1, "its address", "shared", alignment))


def _address(span: Span) -> int:
    return span.piece.base + span.address - span.piece.start


def fence_proxy(lane: Executing) -> None:
    """``fence.proxy.async``: units see what was stored in shared memory so far.

    So far by any lane, which is kinder than a GPU: there, by this one and by those that
    a barrier orders before it.
    """
    lane.hub.memory.fence_proxy()
    fence_mbarriers(lane)


def fence_proxy_global(lane: Executing) -> None:
    """``fence.proxy.async.global``: units see what the lane knows of global memory."""
    _units(lane.hub).stale.discard(lane.hub.lane.index)


# -- copies in bulk -------------------------------------------------------------------


def bulk_load(
    lane: Executing,
    to: Any,
    to_index: Any,
    maps: Any,
    map_index: Any,
    coordinates: tuple[int, ...],
    barrier: Any,
    barrier_index: Any,
) -> None:
    """``cp.async.bulk.tensor``: a box of a tensor, counted by an mbarrier.

    maps, map_index
        An argument of the kernel that holds what `tensor_map` gave, and the first
        element of that.
    coordinates
        Of the box's first element, innermost axis first.
    """
    name = "cp.async.bulk.tensor"
    counts = _counting(lane, name, barrier, barrier_index)
    words = Span(maps, map_index, 128, name, "global", alignment=8).bytes
    tensor = TensorMap.read(name, words.view(np.uint64))
    span = Span(to, to_index, tensor.nbytes, name, "shared", 128, across_rows=True)
    box = Box(tensor, coordinates, _address(span))
    _units(lane.hub).bulk.request(name, lane, span, box.bytes, counts)


def bulk_copy(
    lane: Executing,
    to: Any,
    to_index: Any,
    source: Any,
    source_index: Any,
    n_bytes: int,
    barrier: Any,
    barrier_index: Any,
) -> None:
    """``cp.async.bulk``: neighbouring global bytes, counted by an mbarrier."""
    name = "cp.async.bulk"
    counts = _counting(lane, name, barrier, barrier_index)
    if n_bytes <= 0 or n_bytes % CHUNK:
        raise UnsupportedError(
            f"{name} of {n_bytes} bytes: expected a multiple of {CHUNK} above 0"
        )
    span = Span(to, to_index, n_bytes, name, "shared", CHUNK, across_rows=True)
    origin = Span(source, source_index, n_bytes, name, "global", CHUNK, True)
    units = _units(lane.hub)
    if lane.hub.lane.index in units.stale:
        raise UnfencedError(
            f"{origin.name}: {name} without a fence.proxy.async.global since the lane "
            "waited for another block: it may miss what that stored"
        )
    origin.log(READ, lane.frame)
    units.bulk.request(name, lane, span, origin.bytes.copy, counts)


def _counting(lane: Executing, name: str, barrier: Any, index: Any) -> Mbarrier:
    """The mbarrier that a copy in bulk is to count for."""
    counts = _mbarrier(lane, name, barrier, index)
    if not counts.fenced:
        raise BarrierUseError(
            f"{counts.name}: {name} on a barrier that no fence.mbarrier_init (or "
            "fence.proxy.async) has made visible to it"
        )
    return counts


# -- warpgroup products ---------------------------------------------------------------


def fence_products(lane: Executing) -> None:
    """``wgmma.fence``: registers written so far may be used by products."""
    _group(lane, "wgmma.fence").fence()


def multiply(
    lane: Executing,
    sums: Any,
    a: int | tuple[int, ...],
    b: int,
    *,
    n: int,
    accumulate: bool = True,
    a_columns: bool = False,
    b_rows: bool = False,
) -> None:
    """``wgmma.mma_async`` m64nNk16, bfloat16: sums += A @ B, later.

    Parameters
    ----------
    sums : local array of n // 2 float32
    a, b
        Descriptors; `a` may also be this lane's four registers (or Cells of them).
    accumulate : bool
        False: sums = A @ B.
    a_columns, b_rows : bool
        The operand is stored transposed: A as [16, 64], B as [16, n] (MN-major).
    """
    product = Product(n, bool(accumulate), a_columns, b_rows)
    _group(lane, "wgmma.mma_async").multiply(lane, sums, a, b, product)


def commit_products(lane: Executing) -> None:
    """``wgmma.commit_group``: the products since the last commit are a group."""
    _group(lane, "wgmma.commit_group").commit()


def wait_for_products(lane: Executing, n: int) -> None:
    """``wgmma.wait_group``: wait for all groups but the newest `n`."""
    _group(lane, "wgmma.wait_group").wait(lane, n)


def _group(lane: Executing, name: str) -> Warpgroup:
    hub = lane.hub
    number = hub.lane.index // WARPGROUP
    groups = _units(hub).groups
    if number not in groups:
        if len(hub.lanes) < (number + 1) * WARPGROUP:
            raise LaunchError(
                f"{name} needs warpgroups of {WARPGROUP} lanes; the block's last one "
                f"has {len(hub.lanes) - number * WARPGROUP}"
            )
        groups[number] = Warpgroup(hub, number)
    return groups[number]


# -- registers, other blocks ----------------------------------------------------------


def set_max_registers(lane: Executing, count: int) -> None:
    """``setmaxnreg``: nothing here but a look at the count."""
    if count % 8 or not 24 <= count <= 256:
        raise ValueError(f"setmaxnreg {count}: expected a multiple of 8, 24 to 256")


def wait_for_at_least(lane: Executing, array: Any, index: Any, value: int) -> None:
    """Load (``ld.acquire``) until a counter is `value` or more; other blocks run."""
    hub = lane.hub
    hub.wait_until("ld.acquire", Threshold(array, index, value), lane.frame)
    array.load(index, lane.frame, ATOMIC)
    _units(hub).stale.add(hub.lane.index)
    if hub.recorder is not None:
        hub.recorder.acquire(hub.lane, hub.now.phase, array.address_of(index))
