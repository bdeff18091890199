"""CUDA's vector types: `cuda.float32x4`, or `cuda.float4`, and the like."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .errors import UnsupportedError
from .scalars import CASTS

__all__ = ["VECTORS"]


class Vector:
    """Up to four numbers of one type: x, y, z, w, which cannot be assigned to."""

    __slots__ = ("_parts",)

    def __init__(self, parts: list[Any]) -> None:
        self._parts = parts

    def __getattr__(self, name: str) -> Any:
        n = "xyzw".find(name)
        if len(name) == 1 and 0 <= n < len(self._parts):
            return self._parts[n]
        raise UnsupportedError(f"a vector of {len(self._parts)} has no .{name}")


def _vector(name: str, cast: Callable[[Any], Any], size: int) -> Callable[..., Vector]:
    """The constructor of a vector type: of numbers, of shorter vectors, or of both."""

    def make(*given: Any) -> Vector:
        parts: list[Any] = []
        for one in given:
            parts += one._parts if isinstance(one, Vector) else [one]
        if len(parts) != size:
            raise UnsupportedError(f"{name}: expected {size} numbers, got {len(parts)}")
        return Vector([cast(part) for part in parts])

    return make


def _make_vectors() -> dict[str, Callable[..., Vector]]:
    c_names = {
        "int8": ["char"], "int16": ["short"], "int32": ["int"],
        "int64": ["long", "longlong"], "float32": ["float"], "float64": ["double"],
    }  # fmt: skip
    c_names |= {f"u{k}": [f"u{n}" for n in v] for k, v in c_names.items() if "int" in k}
    table: dict[str, Callable[..., Vector]] = {}
    for kind, aliases in c_names.items():
        for size in (1, 2, 3, 4):
            make = _vector(f"{kind}x{size}", CASTS[kind], size)
            names = [f"{kind}x{size}", *(f"{alias}{size}" for alias in aliases)]
            table |= dict.fromkeys(names, make)
    return table


#: ``{name in numba.cuda: constructor}``
VECTORS = _make_vectors()
