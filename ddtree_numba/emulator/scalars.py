"""Scalar arithmetic as a kernel sees it: casts, builtins, `math`, bits, libdevice.

Integers are Python ints between two stores. Numba widens every integer operation to
64 bits, so this is what a kernel computes as long as nothing exceeds 64 bits and no
unsigned difference goes below zero; NumPy's 32-bit scalars would wrap where the GPU
does not. `uint64` stays a NumPy scalar, because code that uses it wants its wrap.
float32 stays NumPy's float32 and is rounded after every operation.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from .errors import UnsupportedError

__all__ = [
    "BUILTINS", "CASTS", "LIBDEVICE", "MATH", "as_dtype", "brev", "clz", "ffs", "fma",
    "to_odd",
]  # fmt: skip

_ONE32 = np.float32(1)
_FLOAT32, _FLOAT16 = np.float32, np.float16
_BITWISE = {
    np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.left_shift, np.right_shift
}  # fmt: skip


def as_dtype(kind: Any) -> np.dtype:
    """The NumPy dtype of a NumPy dtype, a NumPy type, a numba type or a cast."""
    found = getattr(kind, "dtype", kind)
    if hasattr(found, "cast_python_value"):
        found = str(found)  # numba's scalar types print as NumPy's names
    try:
        return np.dtype(found)
    except TypeError as error:
        raise UnsupportedError(f"no NumPy dtype for {kind!r}") from error


def _saturated(x: Any, bits: int, signed: bool, rounding: Any = int) -> int:
    """A float as an integer as PTX `cvt` gives it: saturated, NaN by its table.

    NaN is 0 only from 16 and 32 bits to at most 32 (PTX ISA, `cvt`).
    """
    low, high = (-(1 << bits - 1), 1 << bits - 1) if signed else (0, 1 << bits)
    if x != x:
        narrow = bits <= 32 and x.__class__ in (_FLOAT32, _FLOAT16)
        return 0 if narrow else (low or high >> 1)
    if not low <= x < high:
        return low if x < low else high - 1
    return int(rounding(x))


class TypedInt(int):
    """What an integer cast gives: a Python int whose bits can be viewed as a float."""

    dtype: np.dtype

    def view(self, kind: Any) -> Any:
        """The same bits as another scalar type of that size."""
        target = as_dtype(kind)
        return CASTS[target.name](np.array(self, self.dtype).view(target)[()])

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any) -> Any:
        """An operation with a NumPy scalar, of which `uint64` stays what it is."""
        wide = any(isinstance(x, np.uint64) for x in operands)

        def plain(x: Any) -> Any:
            if not isinstance(x, TypedInt):
                return x
            if wide and (x.dtype.kind == "u" or ufunc in _BITWISE):
                return CASTS["uint64"](x)
            return np.int64(x)  # beside uint64 numba makes float64 of it, as NumPy

        return getattr(ufunc, method)(*map(plain, operands))


def _integer_cast(dtype: np.dtype) -> Callable[[Any], Any]:
    typed = type(dtype.name, (TypedInt,), {"dtype": dtype, "__slots__": ()})
    bits = dtype.itemsize * 8
    span, mask = 1 << bits, (1 << bits) - 1
    low = -(span >> 1) if dtype.kind == "i" else 0
    high = low + span

    def cast(x: Any = 0) -> Any:
        if x.__class__ is not int:
            if isinstance(x, float | np.floating):
                # There is no conversion to 8 bits: one to 16, cut off.
                x = _saturated(x, max(bits, 16), low < 0)
            else:
                x = int(x)
        if not low <= x < high:
            x &= mask
            x = x if x < high else x - span
        return typed(x)

    return cast


def _float32(x: Any = 0.0) -> Any:
    kind = x.__class__
    if kind is float or kind is int:
        return _ONE32 * x  # seven times faster than the constructor
    return _FLOAT32(x)


def _make_casts() -> dict[str, Callable[[Any], Any]]:
    casts: dict[str, Callable[[Any], Any]] = {}
    for name in ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32"):
        casts[name] = _integer_cast(np.dtype(name))
    wrap64 = _integer_cast(np.dtype("uint64"))

    def uint64(x: Any = 0) -> Any:
        return np.uint64(wrap64(x))

    casts["uint64"] = uint64
    casts["float32"] = _float32
    for kind in (np.float16, np.float64, np.complex64, np.complex128):
        casts[np.dtype(kind).name] = partial(kind)
    casts["bool"] = partial(bool)
    for name, cast in casts.items():
        cast.dtype = np.dtype(name)  # type: ignore[attr-defined]
    return casts


#: ``{dtype name: cast}``; a cast also stands for its dtype (`as_dtype`).
CASTS = _make_casts()


# -- builtins -----------------------------------------------------------------------


def _maximum(a: Any, *others: Any) -> Any:
    """`max`: numba makes of two floats `fmax`, which passes NaN over; else Python's."""
    if len(others) != 1:
        return max(a, *others)
    (b,) = others
    if a > b:
        return a
    if b > a:
        return b
    if not (isinstance(a, float | np.floating) and isinstance(b, float | np.floating)):
        return a
    if a != a:
        return b
    return a if b != b or a else a + b  # of two zeros the positive one


def _minimum(a: Any, *others: Any) -> Any:
    """`min`, as `_maximum`."""
    if len(others) != 1:
        return min(a, *others)
    (b,) = others
    if a < b:
        return a
    if b < a:
        return b
    if not (isinstance(a, float | np.floating) and isinstance(b, float | np.floating)):
        return a
    if a != a:
        return b
    return a if b != b or a else -(-a - b)


def _to_int(x: Any = 0) -> int:
    """`int(x)`: a float becomes 64 bits."""
    if isinstance(x, float | np.floating):
        return _saturated(x, 64, signed=True)
    return int(x)


def _round(x: Any, ndigits: Any = None) -> Any:
    """`round`: to the nearest integer, ties to even, as `llrint`."""
    if ndigits is not None or not isinstance(x, float | np.floating):
        return round(x, ndigits)
    return _saturated(np.float64(x), 64, signed=True, rounding=round)


#: ``{the builtin: what a kernel runs instead}``
BUILTINS = {max: _maximum, min: _minimum, int: _to_int, round: _round}


# -- math ---------------------------------------------------------------------------


def _like(y: Any, *args: Any) -> Any:
    """A result as numba types it: float64 but for float32 or float16 arguments."""
    kinds = set(map(type, args))
    if _FLOAT32 in kinds and not kinds & {float, np.float64}:
        return _ONE32 * y
    return _FLOAT16(y) if kinds == {_FLOAT16} else np.float64(y)


def _gamma_limit(x: float) -> float:
    """gamma where Python raises: poles and overflow."""
    if x == 0:
        return math.copysign(math.inf, x)
    return math.inf if x > 0 else math.nan


#: Where Python's function raises and NumPy has none.
_BEYOND: dict[str, Callable[..., float]] = {
    "gamma": _gamma_limit,
    "lgamma": lambda x: math.inf,
}


def _float_function(name: str) -> Callable[..., Any]:
    """`math.<name>` that keeps float32 and gives inf or NaN where Python raises."""
    exact = getattr(math, name)
    vector = getattr(np, {"pow": "power", "fabs": "abs"}.get(name, name), None)
    beyond = _BEYOND.get(name, vector)

    def function(*args: Any) -> Any:
        try:
            y = exact(*args)
        except (OverflowError, ValueError):
            if beyond is None:
                raise
            y = float(beyond(*(np.float64(x) for x in args)))
        return _like(y, *args)

    def unary(x: Any) -> Any:
        try:
            y = exact(x)
        except (OverflowError, ValueError):
            if beyond is None:
                raise
            y = float(beyond(np.float64(x)))
        if x.__class__ is _FLOAT32:
            return _ONE32 * y
        return np.float64(y) if x.__class__ is not _FLOAT16 else _FLOAT16(y)

    chosen = function if name in _BINARY else unary
    chosen.__name__ = name
    return chosen


def _whole(name: str) -> Callable[[Any], Any]:
    """`floor`, `ceil` or `trunc`: a float here, unlike Python's."""
    vector = getattr(np, name)
    return lambda x: vector(x if isinstance(x, np.floating) else np.float64(x))


def _ldexp(x: Any, exponent: Any) -> Any:
    try:
        return _like(math.ldexp(x, int(exponent)), x)
    except OverflowError:
        return _like(math.copysign(math.inf, x), x)


def _frexp(x: Any) -> tuple[Any, int]:
    fraction, exponent = math.frexp(x)
    return _like(fraction, x), exponent


def _modf(x: Any) -> tuple[Any, Any]:
    fraction, whole = math.modf(x)
    return _like(fraction, x), _like(whole, x)


_BINARY = ("atan2", "copysign", "fmod", "hypot", "pow", "remainder", "nextafter")
_UNARY = (
    "acos acosh asin asinh atan atanh cbrt cos cosh degrees erf erfc exp exp2 expm1 "
    "fabs gamma lgamma log log10 log1p log2 radians sin sinh sqrt tan tanh"
).split()

#: ``{the function of Python's math: what a kernel runs instead}``
MATH: dict[str, Callable[..., Any]] = {
    name: _float_function(name) for name in (*_UNARY, *_BINARY) if hasattr(math, name)
}
MATH |= {name: _whole(name) for name in ("floor", "ceil", "trunc")}
MATH |= {"ldexp": _ldexp, "frexp": _frexp, "modf": _modf}


# -- bits ---------------------------------------------------------------------------


def _width(x: Any) -> int:
    """Bits of an integer operand: of its type if a cast gave it one, else 32 or 64."""
    if isinstance(x, TypedInt | np.integer):
        return x.dtype.itemsize * 8
    fits = -(1 << 31) <= int(x) < (1 << 32)
    return 32 if fits else 64


def _bits(x: Any) -> tuple[int, int]:
    width = _width(x)
    return int(x) & ((1 << width) - 1), width


def popc(x: Any) -> int:
    """Number of set bits."""
    return _bits(x)[0].bit_count()


def clz(x: Any) -> int:
    """Leading zero bits (untyped: of 32, or of 64 for values that need 64)."""
    value, width = _bits(x)
    return width - value.bit_length()


def ffs(x: Any) -> int:
    """Position of the lowest set bit, from 1; 0 if none is set."""
    value, _ = _bits(x)
    return (value & -value).bit_length()


def brev(x: Any) -> int:
    """The bits in reverse order (untyped: of 32, or of 64 where 32 do not do)."""
    width = max(_width(x), 32)
    value = int(x) & ((1 << width) - 1)
    return int(format(value, f"0{width}b")[::-1], 2)


def to_odd(x: float, y: float) -> float:
    """x + y in float64, rounded to odd: a second rounding to float32 is then right."""
    total = x + y
    if not math.isfinite(total):
        return total
    part = total - x
    error = (x - (total - part)) + (y - part)
    if error and not struct.unpack("<Q", struct.pack("<d", total))[0] & 1:
        total = math.nextafter(total, math.copysign(math.inf, error))
    return total


def fma(a: Any, b: Any, c: Any) -> Any:
    """``a * b + c`` with one rounding."""
    if float in map(type, (a, b, c)) or np.float64 in map(type, (a, b, c)):
        return _fma64(float(a), float(b), float(c))
    # A product of two float32 is exact in float64.
    return _ONE32 * to_odd(float(a) * float(b), float(c))


def _fma64(a: float, b: float, c: float) -> Any:
    if not all(map(math.isfinite, (a, b, c))):
        return np.float64(a) * np.float64(b) + np.float64(c)
    from fractions import Fraction  # exact, and rare in kernels

    exact = Fraction(a) * Fraction(b) + Fraction(c)
    try:
        return np.float64(float(exact)) if exact else np.float64(a * b + c)
    except OverflowError:
        return np.float64(math.copysign(math.inf, exact))


def _reinterpret(source: str, target: str) -> Callable[[Any], Any]:
    """The bits of one scalar type read as another."""
    names = {"i": "int32", "I": "uint32", "q": "int64", "f": "float32", "d": "float64"}
    cast, result = CASTS[names[source]], CASTS[names[target]]

    def function(x: Any) -> Any:
        if source == "f":
            packed = np.float32(x).tobytes()  # struct raises where float32 overflows
        else:
            packed = struct.pack("<" + source, cast(x))
        if target == "f":
            return np.frombuffer(packed, np.float32)[0]  # keeps a NaN's payload
        return result(struct.unpack("<" + target, packed)[0])

    return function


# -- libdevice ----------------------------------------------------------------------


def _in_float32(function: Callable[..., Any]) -> Callable[..., Any]:
    def narrowed(*args: Any) -> Any:
        return np.float32(function(*(np.float32(x) for x in args)))

    return narrowed


def _round_to_int(rounding: Callable[[Any], Any]) -> Callable[[Any], int]:
    """float to int32 with a rounding; out of range saturates, NaN gives 0."""

    def convert(x: Any) -> int:
        if x != x:
            return 0
        return int(min(max(rounding(np.float64(x)), -(2.0**31)), 2.0**31 - 1))

    return convert


def _make_libdevice() -> dict[str, Callable[..., Any]]:
    table: dict[str, Callable[..., Any]] = {
        "int_as_float": _reinterpret("i", "f"),
        "float_as_int": _reinterpret("f", "i"),
        "uint_as_float": _reinterpret("I", "f"),
        "float_as_uint": _reinterpret("f", "I"),
        "longlong_as_double": _reinterpret("q", "d"),
        "double_as_longlong": _reinterpret("d", "q"),
        "popc": popc,
        "clz": clz,
        "ffs": ffs,
        "brev": lambda x: CASTS["int32"](brev(int(x) & 0xFFFFFFFF)),
        "fmaf": lambda a, b, c: fma(*map(np.float32, (a, b, c))),
        "fma": lambda a, b, c: fma(*map(np.float64, (a, b, c))),
        "mulhi": lambda a, b: CASTS["int32"]((int(a) * int(b)) >> 32),
        "umulhi": lambda a, b: (int(a) & 0xFFFFFFFF) * (int(b) & 0xFFFFFFFF) >> 32,
    }
    rounded = {"rn": np.rint, "rz": np.trunc, "ru": np.ceil, "rd": np.floor}
    for suffix, rounding in rounded.items():
        table[f"float2int_{suffix}"] = _round_to_int(rounding)
        table[f"int2float_{suffix}"] = np.float32  # exact below 2**24
    functions: dict[str, Callable[..., Any]] = {
        "exp": np.exp, "exp2": np.exp2, "log": np.log, "log2": np.log2,
        "exp10": lambda x: np.power(type(x)(10), x), "log10": np.log10,
        "expm1": np.expm1, "log1p": np.log1p, "sqrt": np.sqrt, "cbrt": np.cbrt,
        "rsqrt": lambda x: type(x)(1) / np.sqrt(x), "pow": np.power,
        "sin": np.sin, "cos": np.cos, "tan": np.tan, "tanh": np.tanh,
        "fabs": np.abs, "fmax": np.fmax, "fmin": np.fmin, "floor": np.floor,
        "ceil": np.ceil, "trunc": np.trunc, "rint": np.rint,
        "fmod": np.fmod, "copysign": np.copysign,
        "erf": lambda x: type(x)(math.erf(x)), "erfc": lambda x: type(x)(math.erfc(x)),
    }  # fmt: skip
    for name, function in functions.items():
        table[name] = lambda *a, f=function: np.float64(f(*map(np.float64, a)))
        table[name + "f"] = _in_float32(function)
    for name in "exp log log2 exp10 log10 pow sin cos tan".split():
        table[f"fast_{name}f"] = table[name + "f"]  # exact here, approximate there
    table["fast_fdividef"] = _in_float32(np.divide)
    return table


#: ``{name in numba.cuda.libdevice: what it computes}``
LIBDEVICE = _make_libdevice()
