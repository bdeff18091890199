"""`numba.cuda.fp16`: half precision functions, rounded once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .errors import UnsupportedError
from .scalars import to_odd

__all__ = ["FP16", "Fp16"]

_HALF, _FLOAT = np.float16, np.float32


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of halves, computed in float32: exact or nearly so, then rounded."""
    return lambda *args: _HALF(function(*(_FLOAT(_HALF(x)) for x in args)))


def _hfma(a: Any, b: Any, c: Any) -> Any:
    # The product of two halves is exact in float64.
    return _HALF(to_odd(float(_HALF(a)) * float(_HALF(b)), float(_HALF(c))))


def _compare(function: Callable[[Any, Any], Any]) -> Callable[[Any, Any], bool]:
    return lambda a, b: bool(function(_HALF(a), _HALF(b)))


def _make_fp16() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {"hfma": _hfma}
    functions: dict[str, Callable[..., Any]] = {
        "hadd": np.add, "hsub": np.subtract, "hmul": np.multiply, "hdiv": np.divide,
        "hneg": np.negative, "habs": np.abs, "hmax": np.fmax, "hmin": np.fmin,
        "hsin": np.sin, "hcos": np.cos, "hlog": np.log, "hlog2": np.log2,
        "hlog10": np.log10, "hexp": np.exp, "hexp2": np.exp2, "htanh": np.tanh,
        "hexp10": lambda x: np.power(_FLOAT(10), x), "hsqrt": np.sqrt,
        "hrsqrt": lambda x: _FLOAT(1) / np.sqrt(x), "hrcp": np.reciprocal,
        "hfloor": np.floor, "hceil": np.ceil, "hrint": np.rint, "htrunc": np.trunc,
        "htanh_approx": np.tanh,
    }  # fmt: skip
    table |= {name: _in_float32(function) for name, function in functions.items()}
    comparisons = {
        "heq": np.equal, "hne": np.not_equal, "hge": np.greater_equal,
        "hgt": np.greater, "hle": np.less_equal, "hlt": np.less,
    }  # fmt: skip
    table |= {name: _compare(function) for name, function in comparisons.items()}
    table |= {"half2float": _FLOAT, "float2half": _HALF, "float2half_rn": _HALF}
    return table


#: ``{name in numba.cuda.fp16, without leading underscores: what it computes}``
FP16 = _make_fp16()


class Fp16:
    """`cuda.fp16`."""

    def __getattr__(self, name: str) -> Any:
        try:
            return FP16[name.lstrip("_")]
        except KeyError:
            raise UnsupportedError(f"the emulator has no cuda.fp16.{name}") from None
