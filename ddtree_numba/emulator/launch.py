"""`emulate`: one kernel launch on the CPU."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from .api import Cuda
from .arrays import open_array
from .binding import bind, plain_function
from .errors import LaunchError
from .lanes import Hub
from .report import Report
from .scalars import CASTS
from .shared import SHARED_LIMIT, SharedMemory
from .trace import Recorder

__all__ = ["emulate", "traced"]

ORDERS = ("forward", "reverse", "shuffled")
MAX_THREADS = 1024  # a block
MAX_BLOCK = (1024, 1024, 64)
MAX_GRID = (2**31 - 1, 65535, 65535)

_reports: ContextVar[list[Report] | None] = ContextVar("reports", default=None)


@contextmanager
def traced() -> Iterator[list[Report]]:
    """Trace every launch within, those of a stage's host wrapper too.

    Yields
    ------
    list of Report
        One a launch, in their order; filled as they end.

    Examples
    --------
    >>> with traced() as reports:                                 # doctest: +SKIP
    ...     verify_attn(..., executor="emulator")
    >>> reports[0].races                                          # doctest: +SKIP
    []
    """
    reports: list[Report] = []
    token = _reports.set(reports)
    try:
        yield reports
    finally:
        _reports.reset(token)


def emulate(
    kernel: Callable[..., None],
    grid: int | tuple[int, ...],
    block: int | tuple[int, ...],
    *args: Any,
    dynamic_shared: int = 0,
    order: str = "forward",
    seed: int = 0,
    trace: bool = False,
) -> Report:
    """Run a kernel on the CPU, lane by lane.

    Parameters
    ----------
    kernel : a `cuda.jit` kernel or a plain function
        It is not changed, and neither is its module.
    grid, block : int or tuple of int
        Blocks, and threads of a block: x, (x, y) or (x, y, z).
    *args
        NumPy arrays (changed in place), numbers, and tuples of these.
    dynamic_shared : int
        Bytes of dynamic shared memory.
    order : {"forward", "reverse", "shuffled"}
        In which order lanes (between two barriers) and blocks run. A correct kernel
        gives the same result in all three.
    seed : int
        Of the shuffling.
    trace : bool
        Record every access to global and shared memory, find races, and count what
        warps ask of memory (see `Report`). Without it bounds, uninitialised reads,
        divergent barriers and deadlocks are still found.

    Returns
    -------
    Report

    Raises
    ------
    LaunchError
        The launch is impossible on any GPU, or an argument has no meaning in a kernel.
    EmulatorError
        The kernel is wrong (see its subclasses); the message names the place.

    Examples
    --------
    >>> emulate(scale_kernel, 4, 32, x, y)                        # doctest: +SKIP
    >>> emulate(scale_kernel, 4, 32, x, y, trace=True).races      # doctest: +SKIP
    []
    """
    function = plain_function(kernel)
    name = function.__name__
    grid_dim = _dim3(f"{name}, grid", grid, MAX_GRID)
    block_dim = _dim3(f"{name}, block", block, MAX_BLOCK)
    threads = block_dim[0] * block_dim[1] * block_dim[2]
    if threads > MAX_THREADS:
        raise LaunchError(
            f"{name}, block: {block_dim} has {threads} threads, the limit is "
            f"{MAX_THREADS}"
        )
    if order not in ORDERS:
        raise LaunchError(f"order: expected one of {ORDERS}, got {order!r}")
    if dynamic_shared < 0:
        raise LaunchError(f"dynamic_shared: expected bytes >= 0, got {dynamic_shared}")
    if dynamic_shared > SHARED_LIMIT:
        raise LaunchError(
            f"{name}, dynamic_shared: {dynamic_shared} bytes, the limit is "
            f"{SHARED_LIMIT}"
        )
    reports = _reports.get()
    traces = trace or reports is not None
    recorder = Recorder(name, threads) if traces else None
    names = _parameter_names(function, args)
    given = [_argument(n, a, recorder) for n, a in zip(names, args, strict=True)]
    hub = Hub(
        name, grid_dim, block_dim, order, seed, recorder,
        lambda: SharedMemory(dynamic_shared, recorder),
    )  # fmt: skip
    cuda = Cuda(hub)
    bound = bind(function, cuda)
    # Division by zero gives inf or NaN and float32 overflows to inf, as on the GPU.
    with np.errstate(all="ignore"):
        hub.run(lambda: bound(*given))
        report = Report(name, grid_dim, block_dim, recorder)
    if reports is not None:
        reports.append(report)
    return report


def _dim3(
    name: str, size: int | tuple[int, ...], limit: tuple[int, int, int]
) -> tuple[int, int, int]:
    given = tuple(size) if isinstance(size, tuple | list) else (size,)
    if not 1 <= len(given) <= 3 or not all(
        isinstance(n, int | np.integer) for n in given
    ):
        raise LaunchError(f"{name}: expected one to three integers, got {size!r}")
    x, y, z = (*(int(n) for n in given), 1, 1)[:3]
    if not all(1 <= n <= most for n, most in zip((x, y, z), limit, strict=True)):
        raise LaunchError(f"{name}: expected sizes from 1 to {limit}, got {size!r}")
    return x, y, z


def _parameter_names(function: Callable[..., None], args: tuple[Any, ...]) -> list[str]:
    try:
        bound = inspect.signature(function).bind(*args)
    except TypeError as error:
        raise LaunchError(f"{function.__name__}: {error}") from None
    names: list[str] = []
    for name, value in bound.arguments.items():
        kind = inspect.signature(function).parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            names += [f"{name}[{n}]" for n in range(len(value))]
        else:
            names.append(name)
    return names


def _argument(name: str, value: Any, recorder: Recorder | None) -> Any:
    """What a kernel sees of a launch argument."""
    if isinstance(value, np.ndarray):
        return open_array(name, "global", value, recorder=recorder)
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        names = [f".{field}" for field in fields or ()]
        names = names or [f"[{n}]" for n in range(len(value))]
        parts = [
            _argument(name + part, each, recorder)
            for part, each in zip(names, value, strict=True)
        ]
        return type(value)(*parts) if fields else tuple(parts)
    if isinstance(value, np.generic):
        return CASTS[value.dtype.name](value)
    if isinstance(value, float):
        return np.float64(value)  # a Python float is float64 in a kernel
    if isinstance(value, int | complex) or value is None:
        return value
    raise LaunchError(
        f"{name}: expected a NumPy array, a number or a tuple of these, "
        f"got {type(value).__name__}"
    )
