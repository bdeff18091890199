"""Where a kernel runs: on the GPU, in the emulator, or as its NumPy twin.

========== ================================================== ===================
executor   what it is                                         what it proves
========== ================================================== ===================
gpu        numba-cuda on an NVIDIA GPU                        everything
emulator   the kernel's Python source, lane by lane on a CPU  values at small
                                                              sizes, races, bounds
numpy      `ddtree_numba.reference`                           what must come out
========== ================================================== ===================

There is no silent fallback. An argument decides, then ``DDTREE_EXECUTOR``, then the
default of whoever asks; asking for a GPU that is not there is an error that says why.

A host wrapper is written once for the three: `place` says where it runs, takes the
inputs there, launches, and gives the outputs back in the caller's own kind of array.
Within a `Workspace` calls that are repeated allocate only once, so that a CUDA graph
can hold them.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from typing import Any

import numpy as np

if not hasattr(np, "row_stack"):
    # NumPy 2.5 dropped this alias of vstack and numba-cuda 0.30 still names it when it
    # compiles its first kernel; give it back before numba.cuda is imported.
    np.row_stack = np.vstack  # noqa: NPY201

import numba
from numba import config, cuda, types

EXECUTORS = ("gpu", "emulator", "numpy")

# Most of our grids are small on purpose (one block a request).
config.CUDA_LOW_OCCUPANCY_WARNINGS = 0


def to_float32(x: Any) -> Any:
    """Return a float element, or bf16 bits held as uint16, as float32.

    Usable in kernels on every executor: this text is what the emulator runs, the
    overload below is what the GPU compiles.
    """
    if isinstance(x, float | np.floating):
        return np.float32(x)
    # A NumPy integer, or a Python one: integers in the emulator's arrays are those.
    return np.uint32(int(x) << 16).view(np.float32)


def overload_for_cuda(function: Callable) -> Callable:
    """`numba.extending.overload` for the CUDA target, wherever this build keeps it."""
    if config.ENABLE_CUDASIM:  # the simulator runs the Python text itself
        return lambda implementation: implementation
    try:
        from numba.cuda.extending import overload
    except ImportError:  # numba's built-in target (macOS)
        from numba.extending import overload

        return overload(function, target="cuda")
    return overload(function)


@overload_for_cuda(to_float32)
def _to_float32_overload(x):
    if isinstance(x, types.Integer):

        def from_bf16_bits(x):
            return cuda.libdevice.int_as_float(np.int32(np.uint32(x) << np.uint32(16)))

        return from_bf16_bits

    def from_float(x):
        return np.float32(x)

    return from_float


# --------------------------------------------------------------------------- choosing


@functools.cache
def gpu_problem() -> str | None:
    """Why kernels cannot run on a GPU here, in one sentence; None if they can.

    The answer comes from compiling and running a one-line kernel, once a process, so
    that a driver older than the CUDA wheels is found here and not in a user's kernel.
    """
    if config.ENABLE_CUDASIM:
        return "Numba's CUDA simulator is on (NUMBA_ENABLE_CUDASIM=1), so no GPU runs"
    try:
        if not cuda.is_available():
            return "no NVIDIA GPU with a working driver was found on this machine"
        _probe()
    except Exception as error:  # any failure of driver, wheels or card means "no GPU"
        return explain_gpu_error(error)
    return None


def explain_gpu_error(error: BaseException) -> str:
    """One plain sentence for an error of the CUDA driver or toolchain."""
    text = str(error)
    if "UNSUPPORTED_PTX_VERSION" in text or "nsupported PTX version" in text:
        return (
            "the CUDA wheels are newer than this machine's driver (unsupported PTX "
            "version): install the extra gpu12, or pin cuda-toolkit to the CUDA "
            "version that nvidia-smi shows"
        )
    if "NVVM" in text or "nvvm" in text or "nvrtc" in text.lower():
        return (
            "the CUDA compiler libraries are missing: pip install "
            '"ddtree_numba[gpu]" (or [gpu12] for a CUDA 12 driver)'
        )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return f"the GPU could not be used: {type(error).__name__}: {' '.join(lines)[:300]}"


def _probe() -> None:
    @cuda.jit
    def answer_kernel(out):  # out [1] i32
        out[0] = 42

    out = cuda.to_device(np.zeros(1, np.int32))
    answer_kernel[1, 1](out)
    if out.copy_to_host()[0] != 42:
        raise RuntimeError("a one-line kernel did not write its answer")


def choose(executor: str | None = None, *, default: str | None = None) -> str:
    """Decide the executor: argument, then ``DDTREE_EXECUTOR``, then `default`.

    Parameters
    ----------
    executor : {"gpu", "emulator", "numpy"}, optional
        What the caller asks for.
    default : str, optional
        What to use if nobody asks; otherwise the GPU if there is one, else NumPy.

    Raises
    ------
    ValueError
        For an unknown name.
    RuntimeError
        If a GPU is asked for and there is none; the message says why.
    """
    source = "executor" if executor else "DDTREE_EXECUTOR"
    asked = executor or os.environ.get("DDTREE_EXECUTOR") or None
    if asked is None:
        return default or ("numpy" if gpu_problem() else "gpu")
    if asked not in EXECUTORS:
        raise ValueError(f"{source}={asked!r} is not one of {', '.join(EXECUTORS)}")
    if asked == "gpu" and (problem := gpu_problem()):
        raise RuntimeError(f"{source}='gpu' was asked for, but {problem}.")
    return asked


def banner(executor: str | None = None) -> str:
    """One line: executor, card and compute capability, versions."""
    executor = choose(executor)
    if executor == "gpu":
        device = cuda.get_current_device()
        name = device.name.decode() if isinstance(device.name, bytes) else device.name
        major, minor = device.compute_capability
        where = f"gpu ({name}, compute capability {major}.{minor})"
    else:
        where = f"{executor} (CPU, no GPU used)"
    try:
        from numba_cuda import __version__ as numba_cuda
    except ImportError:
        numba_cuda = "built-in"
    return (
        f"ddtree_numba on {where} | Python {platform.python_version()}, "
        f"NumPy {np.__version__}, Numba {numba.__version__}, numba-cuda {numba_cuda}"
    )


# ---------------------------------------------------------------------------- placing


def is_device_array(x: Any) -> bool:
    """Whether `x` lies on a GPU (it has ``__cuda_array_interface__``)."""
    # Asking a CPU torch tensor raises instead of answering.
    try:
        return hasattr(x, "__cuda_array_interface__") and not isinstance(x, np.ndarray)
    except (AttributeError, TypeError, RuntimeError):
        return False


class _Reinterpreted:
    """A device array's memory under another description."""

    def __init__(self, owner: Any, **changes: Any) -> None:
        self.owner = owner  # keeps the memory alive
        described = {**owner.__cuda_array_interface__, **changes}
        described.pop("descr", None)  # it would contradict a new typestr
        self.__cuda_array_interface__ = described


def reinterpret(x: Any, dtype: Any) -> Any:
    """The same memory as `x` with elements of another dtype of the same size.

    ``x.view(dtype)``, for device arrays too, strided ones among them.
    """
    dtype = np.dtype(dtype)
    if isinstance(x, np.ndarray):
        return x.view(dtype)
    return cuda.as_cuda_array(_Reinterpreted(x, typestr=dtype.str), sync=False)


def with_leading_axis(x: Any) -> Any:
    """``x[np.newaxis]``, for device arrays too."""
    if isinstance(x, np.ndarray):
        return x[np.newaxis]
    strides = (x.shape[0] * x.strides[0], *x.strides)
    described = _Reinterpreted(x, shape=(1, *x.shape), strides=strides)
    return cuda.as_cuda_array(described, sync=False)


def _is_bf16(x: Any) -> bool:
    return str(getattr(x, "dtype", "")) in ("torch.bfloat16", "bfloat16")


class Workspace:
    """The arrays of calls that are repeated, and the stream of their launches.

    What the stages allocate within ``with workspace:`` is kept the first time; every
    later time the same calls get the same arrays, in the same order. Hence their
    results hold until the next time, nothing is allocated any more, and a CUDA graph,
    which replays launches on the addresses that it saw, can capture the calls::

        workspace = Workspace()
        with workspace:
            tree = tree_build(*topk(logits, 64), 64)  # allocates, compiles
        with workspace, torch.cuda.graph(graph):
            tree = tree_build(*topk(logits, 64), 64)

    Attributes
    ----------
    stream : int
        Handle of the stream that launches go to; 0 is the one that the arrays' library
        works on (Numba: CUDA's default stream).

    Raises
    ------
    TypeError, ValueError
        For a stream that is no handle, and from an allocation that differs from the
        first time's in shape or dtype.
    RuntimeError
        If a workspace is entered within itself, or by two threads at the same time.

    Notes
    -----
    A first time that ends with an error was none: what it allocated is forgotten.
    """

    def __init__(self, stream: int = 0) -> None:
        self.stream = whole_number(stream, "stream")
        self._arrays: list[Any] = []
        self._kept = 0  # of them, from calls that came to their end
        self._used = 0
        self._token: Token | None = None

    def __enter__(self) -> Workspace:
        if self._token:
            raise RuntimeError("this workspace is in use already")
        self._token = _workspace.set(self)
        self._used = 0
        return self

    def __exit__(self, error: object, *_: object) -> None:
        assert self._token is not None
        _workspace.reset(self._token)
        self._token = None
        if error:
            del self._arrays[self._kept :]
        else:
            self._kept = len(self._arrays)

    def take(self, shape: tuple[int, ...], dtype: np.dtype, make: Callable) -> Any:
        """The next array, from ``make(shape, dtype)`` the first time."""
        if self._used == len(self._arrays):
            self._arrays.append(make(shape, dtype))
        x = self._arrays[self._used]
        if x.shape != shape or x.dtype != dtype:
            raise ValueError(
                f"allocation {self._used} of a workspace has shape {shape} and dtype "
                f"{dtype}; expected the first time's, {x.shape} and {x.dtype}: other "
                "calls need a workspace of their own"
            )
        self._used += 1
        return x


_workspace: ContextVar[Workspace | None] = ContextVar("workspace", default=None)


@cuda.jit
def fill_kernel(
    value,  # of x's dtype
    x,  # out [n] any element
):
    i = cuda.grid(1)
    if i < x.size:
        x[i] = value


FILL_THREADS = 256


class Place:
    """Where one call of a stage runs; made by `place`.

    Attributes
    ----------
    executor : str
        "gpu", "emulator" or "numpy".
    on_device : bool
        Whether the caller's arrays lie on a GPU: then outputs stay there, and nothing
        is copied to the host to be checked.
    library : str
        Whose arrays they are: "numpy", "numba", "torch" or "cupy".
    """

    def __init__(self, executor: str, library: str) -> None:
        self.executor = executor
        self.on_device = library != "numpy"
        self.library = library

    @property
    def stream(self) -> Any:
        """Numba's object for the stream that launches go to; 0 is CUDA's default."""
        workspace = _workspace.get()
        handle = workspace.stream if workspace else 0
        handle = handle or _current_stream(self.library)
        return cuda.external_stream(handle) if handle else 0

    def checks(self, check: bool | None, name: str) -> bool:
        """Whether a stage is to look at its inputs' values.

        Parameters
        ----------
        check : bool, optional
            What the caller asks for; None means "where the host can see them".
        name : str
            The argument whose values they are, for the message.

        Raises
        ------
        TypeError, ValueError
            For a check that is no bool, and if device arrays were to be checked: that
            would need the host.
        """
        if check is not None and not isinstance(check, bool | np.bool_):
            raise TypeError(f"check is {check!r}; expected a bool or None")
        if check and self.on_device:
            raise ValueError(
                f"check is True, but {name} lie on the GPU; expected False"
            )
        return not self.on_device if check is None else bool(check)

    def take(self, x: Any, name: str, **expected: Any) -> Any:
        """Check an input, as `check` does, and bring it to where the kernel runs."""
        return self.put(self.check(x, name, **expected))

    def check(
        self,
        x: Any,
        name: str,
        *,
        dtypes: Sequence[Any] | None,
        ndim: int | None = None,
        shape: Sequence[int | None] | None = None,
        convert: bool = False,
    ) -> Any:
        """An input as a NumPy or Numba array, where it lies, if it is as expected.

        Parameters
        ----------
        x : array
            A NumPy array or sequence, or a device array (never copied).
        name : str
            The argument's name, for messages.
        dtypes : sequence of dtype, or None
            What is accepted (None: anything); uint16 among them means bf16 bits.
        ndim, shape : optional
            Expected rank, or expected shape with None for "any".
        convert : bool
            Convert host input to ``dtypes[0]`` where that loses nothing (small index
            arrays that people write as lists).

        Raises
        ------
        TypeError, ValueError
            Naming the argument, what was given and what is expected.
        """
        allowed = None if dtypes is None else [np.dtype(d) for d in dtypes]
        if is_device_array(x):
            # Kernels run on the stream that the array's library works on (`launch`), so
            # there is nothing to wait for here, and a wait would stop the host.
            if _is_bf16(x):
                x = _Reinterpreted(x, typestr="<u2")
            x = cuda.as_cuda_array(x, sync=False)
        else:
            x = _as_array(x, name)
            if convert and allowed:
                x = _convert(x, name, allowed[0])
        if allowed is not None and x.dtype not in allowed:
            expected = " or ".join(_dtype_name(d) for d in allowed)
            raise TypeError(
                f"{name} has dtype {_dtype_name(x.dtype)}; expected {expected}"
            )
        if shape is not None:
            ndim = len(shape)
        if ndim is not None and x.ndim != ndim:
            raise ValueError(f"{name} has shape {x.shape}; expected {ndim} dimensions")
        if shape is not None and any(
            want is not None and want != have
            for want, have in zip(shape, x.shape, strict=True)
        ):
            wanted = ", ".join("*" if n is None else str(n) for n in shape)
            raise ValueError(f"{name} has shape {x.shape}; expected ({wanted})")
        return x

    def put(self, x: Any) -> Any:
        """A checked array, where the kernel runs."""
        if self.executor == "gpu" and isinstance(x, np.ndarray):
            return cuda.to_device(np.ascontiguousarray(x))
        return x

    def empty(self, shape: Sequence[int], dtype: Any) -> Any:
        """An uninitialised array where the kernel runs; within a workspace, its own."""
        make = cuda.device_array if self.executor == "gpu" else np.empty
        workspace = _workspace.get()
        if workspace:
            return workspace.take(tuple(shape), np.dtype(dtype), make)
        return make(tuple(shape), np.dtype(dtype))

    def full(self, shape: Sequence[int], value: Any, dtype: Any) -> Any:
        """An array filled with `value` where the kernel runs."""
        x = self.empty(shape, dtype)
        if self.executor != "gpu":
            x[...] = value
        elif x.size:  # not uploaded: a graph could not hold that
            grid = -(-x.size // FILL_THREADS)
            flat = x.reshape(x.size)
            self.launch(fill_kernel, grid, FILL_THREADS, x.dtype.type(value), flat)
        return x

    def write(self, x: Any, values: np.ndarray) -> None:
        """Overwrite an array that `put` or `empty` made."""
        if self.executor == "gpu":
            x.copy_to_device(values)
        else:
            x[...] = values

    def launch(
        self,
        kernel: Any,
        grid: Any,
        block: Any,
        *args: Any,
        dynamic_shared: int = 0,
        cooperative: bool = False,
    ) -> None:
        """Run ``kernel[grid, block](*args)`` here, with `dynamic_shared` bytes.

        `cooperative`: all blocks run at the same time, so they may wait for one another
        (an error of the driver if there is no room for so many).

        Returns at once on a GPU: the launch follows whatever the caller's library
        (torch, CuPy) has queued on its current stream. An empty grid does nothing.
        """
        if 0 in np.atleast_1d(grid):
            return
        if self.executor == "gpu":
            configured = kernel[grid, block, self.stream, dynamic_shared]
            # Set, not appended to: Numba keeps a kernel's configurations.
            configured.pre_launch_callbacks[:] = [
                *[_allow_dynamic_shared] * (dynamic_shared > 48 * 1024),
                *[_launch_together] * cooperative,
            ]
            configured(*args)
            return
        from ddtree_numba.emulator import emulate

        emulate(kernel, grid, block, *args, dynamic_shared=dynamic_shared)

    def give(self, x: Any) -> Any:
        """Return an output in the caller's kind of array (device kinds: no copy)."""
        if self.executor != "gpu" or self.library == "numba":
            return x
        if self.library == "torch":
            import torch

            return torch.as_tensor(x, device="cuda")
        if self.library == "cupy":
            import cupy

            return cupy.asarray(x)
        return x.copy_to_host()


def place(
    executor: str | None = None, *, default: str | None = None, **arrays: Any
) -> Place:
    """Decide where a call runs from the executor asked for and its arrays.

    Parameters
    ----------
    executor : str, optional
        As for `choose`.
    default : str, optional
        What to use for host arrays if nobody asks.
    **arrays
        The call's array arguments by name; None is passed over. They lie either all on
        the host or all on the GPU.

    Raises
    ------
    TypeError
        If host and device arrays are mixed, or device arrays go to a CPU executor.
    """
    given = {name: x for name, x in arrays.items() if x is not None}
    device = {name: x for name, x in given.items() if is_device_array(x)}
    if not device:
        return Place(choose(executor, default=default), "numpy")
    host = sorted(given.keys() - device.keys())
    if host:
        raise TypeError(
            f"{', '.join(host)} on the host, but {', '.join(device)} on the GPU; "
            "expected all arrays on one side"
        )
    if choose(executor, default="gpu") != "gpu":
        raise TypeError(
            f"{', '.join(device)} on the GPU, but the executor is "
            f"{choose(executor)!r}; copy to the host first, or use executor='gpu'"
        )
    library = type(next(iter(device.values()))).__module__.partition(".")[0]
    return Place("gpu", library if library in ("torch", "cupy") else "numba")


def _current_stream(library: str) -> int:
    """Handle of the stream that a library works on now; 0 is CUDA's default."""
    if library == "torch":
        import torch

        return torch.cuda.current_stream().cuda_stream
    if library == "cupy":
        import cupy

        return cupy.cuda.get_current_stream().ptr
    return 0


def whole_number(x: Any, name: str, *, least: int = 0, most: int | None = None) -> int:
    """A count that a caller gave, as an int.

    Raises
    ------
    TypeError, ValueError
        For anything but an integer (a bool is none), and one outside its range.
    """
    expected = f"{least} or more" if most is None else f"{least} … {most}"
    if isinstance(x, bool) or not isinstance(x, int | np.integer):
        raise TypeError(
            f"{name} is {x!r} ({type(x).__name__}); expected an int, {expected}"
        )
    if x < least or (most is not None and x > most):
        raise ValueError(f"{name} is {x}; expected {expected}")
    return int(x)


def _as_array(x: Any, name: str) -> np.ndarray:
    try:
        array = np.asarray(x)
    except ValueError as error:  # rows of different length
        raise ValueError(f"{name} is no array: {error}") from error
    if array.ndim == 0 and array.dtype == object:  # None, or an object of any kind
        raise TypeError(f"{name} is a {type(x).__name__}; expected an array")
    return array


def check_writeable(x: Any, name: str) -> None:
    """Raise unless x is an array, on any side, that can be changed in place."""
    if is_device_array(x):
        read_only = x.__cuda_array_interface__["data"][1]
    elif isinstance(x, np.ndarray):
        read_only = not x.flags.writeable
    else:
        raise TypeError(
            f"{name} is a {type(x).__name__}; expected an array, which is changed in "
            "place"
        )
    if read_only:
        raise ValueError(f"{name} is read-only; expected an array to change in place")


def _convert(x: np.ndarray, name: str, dtype: np.dtype) -> np.ndarray:
    if x.dtype == dtype:
        return x
    if x.dtype.kind not in "iu" and x.size:
        raise TypeError(f"{name} has dtype {x.dtype}; expected {dtype}")
    limits = np.iinfo(dtype)
    if x.size and (x.min() < limits.min or x.max() > limits.max):
        raise ValueError(f"{name} holds values outside {dtype}")
    return x.astype(dtype)


def _dtype_name(dtype: np.dtype) -> str:
    return "uint16 (bf16 bits)" if dtype == np.uint16 else str(dtype)


def _allow_dynamic_shared(kernel: Any, launch_config: Any) -> None:
    """Raise a kernel's limit of dynamic shared memory (48 KB unless asked for)."""
    from cuda.bindings import driver

    attribute = driver.CUfunction_attribute
    device = driver.cuCtxGetDevice()[1]
    (status,) = driver.cuKernelSetAttribute(
        attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
        launch_config.sharedmem,
        kernel._codelibrary.get_cufunc().handle,
        device,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(
            f"this GPU does not give a block {launch_config.sharedmem} bytes of "
            f"shared memory ({status.name})"
        )


def _launch_together(kernel: Any, launch_config: Any) -> None:
    """Have Numba launch a kernel cooperatively, as it does where a grid is synced."""
    kernel.cooperative = True


# -------------------------------------------------------------------- looking at PTX


def compile_ptx(
    kernel: Any, signature: tuple, *, compute_capability: tuple[int, int] = (9, 0)
) -> str:
    """PTX of a kernel for a compute capability; needs the `gpu` extra, but no GPU.

    Parameters
    ----------
    kernel : numba.cuda dispatcher
        A ``@cuda.jit`` kernel.
    signature : tuple of numba types
        Its argument types, such as ``(float32[:, ::1], int32)``.
    """
    from unittest import mock

    from numba.cuda import dispatcher

    class Device:
        """Device functions ask the current device for this one thing."""

    Device.compute_capability = compute_capability  # type: ignore[attr-defined]
    with mock.patch.object(dispatcher, "get_current_device", Device):
        ptx, _ = cuda.compile_ptx(
            kernel,
            signature,
            cc=compute_capability,
            launch_bounds=getattr(kernel, "targetoptions", {}).get("launch_bounds"),
        )
    return ptx
