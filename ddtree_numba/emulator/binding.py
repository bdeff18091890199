"""The kernel's function, bound to the emulator instead of to `numba.cuda`.

Nothing of the kernel's module changes: a copy of the function gets a globals dictionary
of its own, in which `numba.cuda`, the integer types, `math` and the device functions
stand replaced, however they were imported.
"""

from __future__ import annotations

import builtins
import dis
import math
import sys
from collections.abc import Callable
from functools import lru_cache
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, ModuleType
from typing import Any

import numpy as np

from .api import Cuda
from .arrays import open_array
from .errors import UnsupportedError
from .intrinsics import find_emulation
from .scalars import BUILTINS, CASTS, MATH, as_dtype

__all__ = ["bind", "plain_function"]

_MISSING = object()

#: Modules of numba whose functions have no Python body, and their place in `Cuda`.
_STUB_MODULES = {".cuda.libdevice": "libdevice", ".cuda_fp16": "fp16"}


def plain_function(kernel: Any) -> FunctionType:
    """The Python function of a jitted kernel or device function, or itself."""
    function = getattr(kernel, "py_func", kernel)
    if not isinstance(function, FunctionType):
        raise TypeError(
            f"kernel: expected a function or a cuda.jit kernel, got {kernel!r}"
        )
    return function


def bind(kernel: Any, cuda: Cuda) -> Callable[..., None]:
    """A copy of the kernel's function that runs on `cuda`."""
    return _Binder(cuda).kernel_code(plain_function(kernel))


class _Binder:
    """Replaces what a kernel's names mean."""

    def __init__(self, cuda: Cuda) -> None:
        self.cuda = cuda
        self.bound: dict[tuple[int, bool], Any] = {}
        self.keep: list[Any] = []  # what `bound` knows by id must stay alive
        self.vocabulary: dict[int, Any] = {}
        for kind in set(np.sctypeDict.values()):
            if np.dtype(kind).name in CASTS:
                self.vocabulary[id(kind)] = CASTS[np.dtype(kind).name]
        for limits in (np.finfo, np.iinfo):
            self.vocabulary[id(limits)] = _of_dtype(limits)
        for name, function in MATH.items():
            self.vocabulary[id(getattr(math, name))] = function
        self.vocabulary |= {id(old): new for old, new in BUILTINS.items()}
        self.vocabulary[id(float)] = CASTS["float64"]
        self.real = sys.modules.get("numba.cuda")
        self.stubs = _cuda_names(self.real)

    # -- functions --------------------------------------------------------------------

    def kernel_code(self, function: FunctionType) -> Any:
        """A copy of device code, every name in it replaced."""
        return self._copy(function, self.replace, device=True)

    def python_code(self, function: FunctionType) -> Any:
        """A plain Python function that a kernel calls (numba has an `overload`).

        It runs as it is; only the parts of `numba.cuda` in it are replaced.
        """
        if not self._mentions_cuda(function, set()):
            return function
        return self._copy(function, self.replace_cuda, device=False)

    def _copy(
        self, function: FunctionType, replace: Callable[[Any], Any], device: bool
    ) -> Any:
        key = id(function), device
        if key in self.bound:
            return self.bound[key]
        names: dict[str, Any] = {"__builtins__": builtins}
        for dunder in ("__name__", "__package__"):
            names[dunder] = function.__globals__.get(dunder)
        closure = function.__closure__ and tuple(
            CellType() for _ in function.__closure__
        )
        copy = FunctionType(
            function.__code__, names, function.__name__, function.__defaults__, closure
        )
        self.bound[key] = copy  # before its names: it may call itself
        self.keep.append(function)
        for name in _names(function.__code__):
            value = function.__globals__.get(name, _MISSING)
            if value is _MISSING:
                value = getattr(builtins, name, _MISSING)
            if value is not _MISSING:
                names[name] = replace(value)
                if isinstance(names[name], _GlobalArray):
                    names[name] = names[name].named(name)
        for new, old in zip(closure or (), function.__closure__ or (), strict=True):
            if _filled(old):
                new.cell_contents = replace(old.cell_contents)
        return copy

    def _mentions_cuda(self, function: FunctionType, seen: set[int]) -> bool:
        seen.add(id(function))
        values = [function.__globals__.get(n) for n in _names(function.__code__)]
        values += [c.cell_contents for c in function.__closure__ or () if _filled(c)]
        return any(
            value is self.real
            or id(value) in self.stubs
            or hasattr(value, "py_func")
            or (
                isinstance(value, FunctionType)
                and id(value) not in seen
                and self._mentions_cuda(value, seen)
            )
            for value in values
        )

    # -- values -----------------------------------------------------------------------

    def replace_cuda(self, value: Any) -> Any:
        """What a name of `numba.cuda` or a function stands for; else the value."""
        if value is self.real:
            return self.cuda
        if id(value) in self.stubs:
            found: Any = self.cuda
            for part in self.stubs[id(value)].split("."):
                if part == "laneid":
                    raise UnsupportedError(
                        "laneid: numba compiles only cuda.laneid, so import cuda"
                    )
                found = getattr(found, part)
            return found
        if instruction := find_emulation(value, self.cuda._hub):
            return instruction
        if hasattr(value, "py_func"):
            if getattr(value, "targetoptions", {}).get("inline") in (True, "always"):
                self.cuda.shared.inlined.add(id(value.py_func.__code__))
            return self.kernel_code(value.py_func)
        if isinstance(value, FunctionType):
            for module, namespace in _STUB_MODULES.items():
                if value.__module__.endswith(module):  # its own text does nothing
                    return getattr(getattr(self.cuda, namespace), value.__name__)
            return self.python_code(value)
        return value

    def replace(self, value: Any) -> Any:
        """What a kernel's name stands for in the emulator."""
        if id(value) in self.vocabulary:
            return self.vocabulary[id(value)]
        if isinstance(value, ModuleType) and value is not self.real:
            return _Module(value, self)
        if hasattr(value, "cast_python_value"):  # a numba scalar type
            name = {"boolean": "bool"}.get(str(value), str(value))
            return CASTS.get(name, value)
        if isinstance(value, np.ndarray):
            return _GlobalArray(value)
        if isinstance(value, np.generic):
            return CASTS[value.dtype.name](value)
        return self.replace_cuda(value)


class _Module:
    """A module in a kernel's eyes: its attributes, replaced when they are used."""

    def __init__(self, module: ModuleType, binder: _Binder) -> None:
        self.__dict__["_source"] = module
        self.__dict__["_binder"] = binder

    def __getattr__(self, name: str) -> Any:
        found = self._binder.replace(getattr(self._source, name))
        if isinstance(found, _GlobalArray):
            found = found.named(name)
        self.__dict__[name] = found  # the next use finds it directly
        return found


def _of_dtype(limits: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`np.finfo` or `np.iinfo` of a cast, which stands for its type."""
    return lambda kind: limits(as_dtype(kind))


class _GlobalArray:
    """A module's NumPy array, which numba freezes into the kernel."""

    def __init__(self, data: np.ndarray) -> None:
        self.data = data

    def named(self, name: str) -> Any:
        data = self.data.view()
        data.flags.writeable = False
        return open_array(name, "const", data)


@lru_cache(maxsize=1024)
def _names(code: CodeType) -> set[str]:
    """Every global name that code and the functions in it mention."""
    instructions = dis.get_instructions(code)
    found = {str(i.argval) for i in instructions if i.opname == "LOAD_GLOBAL"}
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            found |= _names(constant)
    return found


def _filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


@lru_cache(maxsize=1)
def _cuda_names(module: ModuleType | None) -> dict[int, str]:
    """``id -> name`` of what `from numba.cuda import …` can bring into a kernel."""
    names: dict[int, str] = {}
    for name, value in vars(module).items() if module else ():
        if isinstance(value, ModuleType | BuiltinFunctionType | int | str):
            continue
        origin = getattr(value, "__module__", "") or ""
        intrinsic = type(value).__name__ == "_Intrinsic"
        if intrinsic or ".cuda.stubs" in origin or name in vars(Cuda):
            names[id(value)] = name
            for inner, stub in vars(value).items() if isinstance(value, type) else ():
                if not inner.startswith("_") and isinstance(stub, type):
                    names[id(stub)] = f"{name}.{inner}"
    return names
