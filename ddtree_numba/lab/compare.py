"""Compare what an answer returned with what it should be, in one helpful line."""

from __future__ import annotations

from typing import Any

import numpy as np

Problem = str | None


def value(got: Any, want: Any, what: str) -> Problem:
    """Whether two values are equal, of one type up to NumPy's integers and tuples.

    Parameters
    ----------
    got, want : object
    what : str
        What the value is, for the line: "the parent of row 3".

    Returns
    -------
    str or None
        None if they are equal.
    """
    if got is None:
        return f"{what} is None; expected {want!r}. (Is there a return?)"
    try:
        if _plain(got) == _plain(want):
            return None
    except Exception:  # an object that cannot even be compared
        pass
    return f"{what} is {_shown(got)}; expected {want!r}."


def number(got: Any, want: float, what: str, *, rtol: float = 1e-9) -> Problem:
    """Whether a number is another, up to a relative tolerance."""
    if got is None:
        return f"{what} is None; expected a number. (Is there a return?)"
    try:
        as_float = float(got)
    except (TypeError, ValueError):
        return f"{what} is a {type(got).__name__}; expected a number."
    if abs(as_float - want) <= rtol * max(1.0, abs(want)):
        return None
    return f"{what} is {as_float:.6g}; expected {want:.6g}."


def arrays(
    got: Any, want: Any, what: str, *, atol: float = 0.0, rtol: float = 0.0
) -> Problem:
    """Whether two arrays are equal, or close.

    Parameters
    ----------
    got, want : array
        Lists are taken as arrays.
    what : str
    atol, rtol : float
        As in `numpy.isclose`; 0 means exactly. NaN never matches a number.

    Returns
    -------
    str or None
        None if they are equal; else the first reason: no array, another shape, other
        kinds of elements, and at last the first element that differs.
    """
    want = np.asarray(want)
    if got is None:
        return (
            f"{what} is None; expected an array of {want.shape}. (Is there a return?)"
        )
    try:
        got = np.asarray(got)
    except Exception:
        return f"{what} is a {type(got).__name__}; expected an array."
    if got.dtype.kind not in "biuf":
        return f"{what} has dtype {got.dtype}; expected {want.dtype}."
    if got.shape != want.shape:
        return f"{what} has shape {got.shape}; expected {want.shape}."
    if got.dtype.kind == "f" and want.dtype.kind in "biu":
        return f"{what} has dtype {got.dtype}; expected {want.dtype}."
    close = np.isclose(
        got.astype(float), want.astype(float), atol=atol, rtol=rtol, equal_nan=True
    )
    if close.all():
        return None
    wrong = np.argwhere(~close)
    at = tuple(int(i) for i in wrong[0])
    place = f"[{', '.join(map(str, at))}]" if at else ""
    return (
        f"{what}{place} is {got[at]}; expected {want[at]} "
        f"({len(wrong)} of {want.size} elements differ)."
    )


def _plain(x: Any) -> Any:
    """Python's own numbers, tuples for lists."""
    if isinstance(x, np.ndarray):
        x = x.tolist()
    if isinstance(x, np.generic):
        return x.item()
    if isinstance(x, list | tuple):
        return tuple(_plain(item) for item in x)
    return x


def _shown(x: Any) -> str:
    try:
        text = repr(_plain(x))
    except Exception:
        text = f"a {type(x).__name__}"
    return text if len(text) <= 80 else text[:79] + "…"
