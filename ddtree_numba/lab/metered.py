"""Arrays that count the bytes of every array made from them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


class Meter:
    """Counts new arrays; arrays that `wrap` gives, and what is made of them, report.

    Attributes
    ----------
    bytes : int
        Of all arrays made by NumPy functions and operators. Views are free; copies by
        methods, and what a function makes inside, are not seen.
    largest : tuple of int
        Shape of the largest of them.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self.largest: tuple[int, ...] = ()
        self._most = 0

    def wrap(self, x: np.ndarray) -> np.ndarray:
        """A copy of x that reports to this meter."""
        metered = np.array(x).view(_Metered)
        metered.meter = self
        return metered

    def result(self, x: Any) -> Any:
        """What a function gave: counted, and reporting from now on."""
        if isinstance(x, tuple | list):
            return type(x)(self.result(part) for part in x)
        if not isinstance(x, np.ndarray):
            return x
        if x.base is None:
            self.bytes += x.nbytes
            if x.nbytes > self._most:
                self._most, self.largest = x.nbytes, x.shape
        metered = x.view(_Metered)
        metered.meter = self
        return metered


class _Metered(np.ndarray):
    meter: Meter

    def __array_finalize__(self, parent: Any) -> None:
        if isinstance(parent, _Metered):
            self.meter = parent.meter

    def __array_ufunc__(
        self, ufunc: np.ufunc, method: str, *inputs: Any, **kwargs: Any
    ) -> Any:
        if "out" in kwargs:  # in place: no new array
            getattr(ufunc, method)(*_plain(inputs), **_plain(kwargs))
            return kwargs["out"][0]
        return self.meter.result(getattr(ufunc, method)(*_plain(inputs), **kwargs))

    def __array_function__(
        self, function: Callable, types: Any, args: Any, kwargs: Any
    ) -> Any:
        return self.meter.result(function(*_plain(args), **_plain(kwargs)))


def _plain(x: Any) -> Any:
    """The same arguments with ordinary arrays."""
    if isinstance(x, dict):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, tuple | list):
        return type(x)(_plain(part) for part in x)
    return x.view(np.ndarray) if isinstance(x, _Metered) else x
