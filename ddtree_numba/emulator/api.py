"""What `numba.cuda` is inside an emulated kernel."""

from __future__ import annotations

import math
from collections.abc import Callable
from sys import _getframe
from typing import Any

import numpy as np

from . import scalars
from .arrays import POISON, Cells, Written, open_array, poisoned
from .errors import MaskError, UnsupportedError
from .half import Fp16
from .lanes import WARP, Hub
from .vectors import VECTORS

__all__ = ["Cuda"]

_FULL = 0xFFFFFFFF


class Cuda:
    """The module `numba.cuda` of one run.

    `threadIdx`, `blockIdx` and `laneid` are always those of the lane that runs; every
    other name is a function or namespace of that meaning in Numba. A name that is not
    here raises `UnsupportedError`.
    """

    warpsize = WARP

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.threadIdx = hub.thread
        self.blockIdx = hub.block
        self.blockDim = hub.block_dim
        self.gridDim = hub.grid_dim
        self.shared = _Shared(hub)
        self.local = _Local(hub)
        self.const = _Const(hub)
        self.atomic = _Atomic(hub)
        self.libdevice = _Libdevice()
        self.fp16 = Fp16()

    def __getattr__(self, name: str) -> Any:
        for table in (scalars.CASTS, VECTORS):
            if name in table:
                return table[name]
        raise UnsupportedError(f"the emulator has no cuda.{name}")

    # -- indices ----------------------------------------------------------------------

    @property
    def laneid(self) -> int:
        return self._hub.lane.laneid

    def grid(self, ndim: int) -> Any:
        t, b, d = self.threadIdx, self.blockIdx, self.blockDim
        x = b.x * d.x + t.x
        if ndim == 1:
            return x
        return (x, b.y * d.y + t.y, b.z * d.z + t.z)[:ndim]

    def gridsize(self, ndim: int) -> Any:
        d, g = self.blockDim, self.gridDim
        return g.x * d.x if ndim == 1 else (g.x * d.x, g.y * d.y, g.z * d.z)[:ndim]

    # -- block barriers ---------------------------------------------------------------

    def syncthreads(self) -> None:
        self._hub.rendezvous("block", "syncthreads", orders_memory=True)

    def syncthreads_count(self, predicate: Any) -> int:
        return self._hub.rendezvous(
            "block", "syncthreads_count", 0, bool(predicate), _for_all(sum), True
        )

    def syncthreads_and(self, predicate: Any) -> int:
        return self._hub.rendezvous(
            "block", "syncthreads_and", 0, bool(predicate), _for_all(all), True
        )

    def syncthreads_or(self, predicate: Any) -> int:
        return self._hub.rendezvous(
            "block", "syncthreads_or", 0, bool(predicate), _for_all(any), True
        )

    # -- warps ------------------------------------------------------------------------

    def syncwarp(self, mask: int = _FULL) -> None:
        self._hub.rendezvous("warp", "syncwarp", self._mask(mask), orders_memory=True)

    def _mask(self, mask: int) -> int:
        """A collective's mask as an unsigned number; it must name the caller."""
        mask = int(mask) & _FULL
        lane = self._hub.lane
        if not mask >> lane.laneid & 1:
            raise MaskError(
                f"lane {lane.index} (lane {lane.laneid} of its warp) takes part in a "
                f"collective whose mask {mask:#010x} does not name it"
            )
        return mask

    def shfl_sync(self, mask: int, value: Any, src_lane: int) -> Any:
        return self._shuffle("shfl_sync", mask, value, int(src_lane) % WARP)

    def shfl_up_sync(self, mask: int, value: Any, delta: int) -> Any:
        source = self._hub.lane.laneid - int(delta) % WARP
        return self._shuffle("shfl_up_sync", mask, value, source)

    def shfl_down_sync(self, mask: int, value: Any, delta: int) -> Any:
        source = self._hub.lane.laneid + int(delta) % WARP
        return self._shuffle("shfl_down_sync", mask, value, source)

    def shfl_xor_sync(self, mask: int, value: Any, lane_mask: int) -> Any:
        source = self._hub.lane.laneid ^ int(lane_mask) % WARP
        return self._shuffle("shfl_xor_sync", mask, value, source)

    def _shuffle(self, name: str, mask: int, value: Any, source: int) -> Any:
        if not 0 <= source < WARP:
            source = self._hub.lane.laneid  # beyond the warp: a lane keeps its value
        return self._collective(name, mask, (value, source), _exchange, 3)

    def ballot_sync(self, mask: int, predicate: Any) -> int:
        return self._collective("ballot_sync", mask, bool(predicate), _ballot)

    def all_sync(self, mask: int, predicate: Any) -> bool:
        return self._collective("all_sync", mask, bool(predicate), _for_all(all))

    def any_sync(self, mask: int, predicate: Any) -> bool:
        return self._collective("any_sync", mask, bool(predicate), _for_all(any))

    def eq_sync(self, mask: int, predicate: Any) -> bool:
        same = _for_all(lambda given: len(set(given)) == 1)
        return self._collective("eq_sync", mask, bool(predicate), same)

    def match_any_sync(self, mask: int, value: Any) -> int:
        return self._collective("match_any_sync", mask, value, _match_any)

    def match_all_sync(self, mask: int, value: Any) -> tuple[int, bool]:
        return self._collective("match_all_sync", mask, value, _match_all)

    def _collective(
        self,
        name: str,
        mask: int,
        payload: Any,
        combine: Callable[[dict], dict],
        kernel_is_up: int = 2,
    ) -> Any:
        # Shuffles and votes exchange values; they do not order memory (CUDA C++ guide).
        hub, mask, frame = self._hub, self._mask(mask), _getframe(kernel_is_up)
        return hub.rendezvous("warp", name, mask, payload, combine, frame=frame)

    def activemask(self) -> int:
        return self._hub.rendezvous("converged", "activemask", 0, True, _active)

    def lanemask_lt(self) -> int:
        return (1 << self.laneid) - 1

    # -- cache hints: loads and stores like any other ----------------------------------

    def ldca(self, array: Cells, index: Any) -> Any:
        return array.load(index, _getframe(1))

    ldcg = ldcs = ldlu = ldcv = ldca

    def stwb(self, array: Cells, index: Any, value: Any) -> None:
        array.store(index, value, _getframe(1))

    stcg = stcs = stwt = stwb

    # -- memory order and time: a trace wants to know, nothing else does ---------------

    def threadfence(self) -> None:
        self._hub.fence()

    def threadfence_block(self) -> None: ...

    def threadfence_system(self) -> None:
        self._hub.fence()

    def nanosleep(self, ns: int) -> None:
        self._hub.rendezvous("spin", "nanosleep")

    # -- scalars ----------------------------------------------------------------------

    popc = staticmethod(scalars.popc)
    clz = staticmethod(scalars.clz)
    ffs = staticmethod(scalars.ffs)
    brev = staticmethod(scalars.brev)
    fma = staticmethod(scalars.fma)
    cbrt = staticmethod(scalars.MATH["cbrt"])

    def selp(self, condition: Any, a: Any, b: Any) -> Any:
        return a if condition else b


# -- what a collective gives its lanes ------------------------------------------------


def _for_all(reduce: Callable[[Any], Any]) -> Callable[[dict], dict]:
    def combine(given: dict[int, Any]) -> dict[int, Any]:
        return dict.fromkeys(given, reduce(given.values()))

    return combine


def _exchange(given: dict[int, Any]) -> dict[int, Any]:
    """Every lane's value from its source; undefined where the source takes no part."""
    return {
        lane: given[source][0] if source in given else _undefined(value)
        for lane, (value, source) in given.items()
    }


def _undefined(value: Any) -> Any:
    if isinstance(value, float | np.floating):
        return type(value)(math.nan)
    return POISON << 16 | POISON


def _signed(bits: int) -> int:
    """A mask as numba types what ballots and matches give: int32."""
    return bits - (1 << WARP) if bits >> WARP - 1 else bits


def _active(given: dict[int, Any]) -> dict[int, int]:
    return dict.fromkeys(given, sum(1 << lane for lane in given))


def _ballot(given: dict[int, Any]) -> dict[int, int]:
    bits = sum(1 << lane for lane, yes in given.items() if yes)
    return dict.fromkeys(given, _signed(bits))


def _match_any(given: dict[int, Any]) -> dict[int, int]:
    return {
        lane: _signed(sum(1 << other for other, its in given.items() if its == value))
        for lane, value in given.items()
    }


def _match_all(given: dict[int, Any]) -> dict[int, tuple[int, bool]]:
    first = next(iter(given.values()))
    same = all(value == first for value in given.values())
    mask = _signed(sum(1 << lane for lane in given)) if same else 0
    return dict.fromkeys(given, (mask, same))


# -- memory ---------------------------------------------------------------------------


def _shape(shape: Any) -> tuple[int, ...]:
    return tuple(shape) if isinstance(shape, tuple | list) else (int(shape),)


class _Shared:
    """`cuda.shared`: every call site its own array, fresh in every block.

    `inlined` holds the ids of the code that numba inlines into its callers.
    """

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self.inlined: set[int] = set()

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Cells:
        frame = _getframe(1)
        sites = [self._hub.sites.of(frame)]
        caller = frame
        while id(caller.f_code) in self.inlined and caller.f_back is not None:
            caller = caller.f_back  # inlined: every call has arrays of its own
            sites.append(self._hub.sites.of(caller))
        name = sites[0].variable or f"shared@{frame.f_lineno}"
        kind = scalars.as_dtype(dtype)
        memory, size = self._hub.memory, _shape(shape)
        return memory.array(tuple(sites), name, size, kind, alignment)


class _Local:
    """`cuda.local`: every call its own array, which no other lane sees."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def array(self, shape: Any, dtype: Any, alignment: int | None = None) -> Cells:
        frame = _getframe(1)
        variable = self._hub.sites.of(frame).variable
        kind, size = scalars.as_dtype(dtype), _shape(shape)
        nbytes = math.prod(size) * kind.itemsize
        data = poisoned(nbytes).view(kind).reshape(size)
        written = memoryview(Written(nbytes))
        name = variable or f"local@{frame.f_lineno}"
        return open_array(name, "local", data, written)


class _Const:
    """`cuda.const`: a read-only copy."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def array_like(self, array: Any) -> Cells:
        frame = _getframe(1)
        variable = self._hub.sites.of(frame).variable
        name = variable or f"const@{frame.f_lineno}"
        data = np.array(array.data if isinstance(array, Cells) else array)
        data.flags.writeable = False
        return open_array(name, "const", data)


class _Atomic:
    """`cuda.atomic`: one step each, returning the old value."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub

    def __getattr__(self, name: str) -> Any:
        raise UnsupportedError(f"the emulator has no cuda.atomic.{name}")

    def add(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(index, lambda old: old + value, _getframe(1))

    def sub(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(index, lambda old: old - value, _getframe(1))

    def and_(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(index, lambda old: old & value, _getframe(1))

    def or_(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(index, lambda old: old | value, _getframe(1))

    def xor(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(index, lambda old: old ^ value, _getframe(1))

    def inc(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(
            index, lambda old: 0 if old >= value else old + 1, _getframe(1)
        )

    def dec(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(
            index,
            lambda old: value if old == 0 or old > value else old - 1,
            _getframe(1),
        )

    def exch(self, array: Cells, index: Any, value: Any) -> Any:
        old = array.update(index, lambda old: value, _getframe(1))
        return self._tried("atomic.exch", old, old != value)

    def max(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(
            index, lambda old: value if value > old else old, _getframe(1)
        )

    def min(self, array: Cells, index: Any, value: Any) -> Any:
        return array.update(
            index, lambda old: value if value < old else old, _getframe(1)
        )

    def nanmax(self, array: Cells, index: Any, value: Any) -> Any:
        def larger(old: Any) -> Any:
            return value if old != old or value > old else old

        return array.update(index, larger, _getframe(1))

    def nanmin(self, array: Cells, index: Any, value: Any) -> Any:
        def smaller(old: Any) -> Any:
            return value if old != old or value < old else old

        return array.update(index, smaller, _getframe(1))

    def cas(self, array: Cells, index: Any, old: Any, value: Any) -> Any:
        found = array.update(
            index, lambda now: value if now == old else now, _getframe(1)
        )
        return self._tried("atomic.cas", found, found == old)

    def compare_and_swap(self, array: Cells, old: Any, value: Any) -> Any:
        found = array.update(0, lambda now: value if now == old else now, _getframe(1))
        return self._tried("atomic.compare_and_swap", found, found == old)

    def _tried(self, name: str, found: Any, changed: bool) -> Any:
        """What was `found`; if it stays, perhaps a taken lock: let its holder run."""
        if not changed:
            self._hub.rendezvous("spin", name)
        return found


class _Libdevice:
    """`cuda.libdevice`: the functions of `scalars.LIBDEVICE`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return scalars.LIBDEVICE[name]
        except KeyError:
            raise UnsupportedError(
                f"the emulator has no cuda.libdevice.{name}"
            ) from None
