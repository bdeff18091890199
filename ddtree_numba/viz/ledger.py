"""Shape ledger: what attention over a latent cache moves, naive against absorbed."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from ddtree_numba.viz.style import BLUE, GREEN, ORANGE, SKY

if TYPE_CHECKING:
    import pandas as pd

KIMI = {"N": 33, "H": 64, "S": 8192, "Dn": 128, "Dv": 128, "Dc": 512, "Dr": 64}
"""Sizes of Kimi K2 (DeepSeek-V3's too, but for H = 128) with a tree of 33 rows."""

# name, shape, kind; a symbol or a sum of symbols a dimension. T = S + N cache rows.
NAIVE = (
    ("queries", ("N", "H", "Dn+Dr"), "query"),
    ("W_UK", ("H", "Dn", "Dc"), "weight"),
    ("W_UV", ("H", "Dv", "Dc"), "weight"),
    ("cache", ("T", "Dc+Dr"), "cache"),
    ("keys", ("T", "H", "Dn"), "expanded"),
    ("values", ("T", "H", "Dv"), "expanded"),
    ("out", ("N", "H", "Dv"), "query"),
)
ABSORBED = (
    ("queries", ("N", "H", "Dn+Dr"), "query"),
    ("W_UK", ("H", "Dn", "Dc"), "weight"),
    ("W_UV", ("H", "Dv", "Dc"), "weight"),
    ("cache", ("T", "Dc+Dr"), "cache"),
    ("absorbed q", ("N", "H", "Dc+Dr"), "query"),
    ("latent out", ("N", "H", "Dc"), "query"),
    ("out", ("N", "H", "Dv"), "query"),
)
FORMS = {"naive": NAIVE, "absorbed": ABSORBED}
CUES = {
    "expanded": (ORANGE, "//", "keys and values of every head"),
    "cache": (SKY, "", "latent cache, shared by all heads"),
    "weight": (GREEN, "..", "weights"),
    "query": (BLUE, "xx", "a tree's queries and outputs"),
}


def mla_ledger(sizes: Mapping[str, int] = KIMI, itemsize: int = 2) -> pd.DataFrame:
    """Every array of one layer's attention, both ways, for one request.

    Parameters
    ----------
    sizes : mapping
        N, H, S, Dn (q_nope's width), Dv (a head's value), Dc and Dr.
    itemsize : int
        Bytes of an element; 2 for bfloat16.

    Returns
    -------
    pandas.DataFrame
        Columns form ("naive" or "absorbed"), array, kind, symbols, shape, bytes.
    """
    import pandas as pd

    known = {**sizes, "T": sizes["S"] + sizes["N"]}
    rows = []
    for form, arrays in FORMS.items():
        for name, symbols, kind in arrays:
            shape = tuple(sum(known[x] for x in s.split("+")) for s in symbols)
            text = " × ".join(f"({s})" if "+" in s else s for s in symbols)
            rows.append((form, name, kind, text, shape, itemsize * prod(shape)))
    columns = ["form", "array", "kind", "symbols", "shape", "bytes"]
    return pd.DataFrame(rows, columns=columns)


def ledger_figure(ledger: pd.DataFrame) -> tuple[Figure, str]:
    """Draw a ledger: an array is a box whose area is its bytes, on one scale.

    Parameters
    ----------
    ledger : pandas.DataFrame
        As from `mla_ledger`.

    Returns
    -------
    figure, alt_text
    """
    forms = list(dict.fromkeys(ledger["form"]))
    totals = ledger.groupby("form")["bytes"].sum()
    figure = Figure(figsize=(9.8, 3.3), layout="constrained", facecolor="white")
    axes = figure.subplots(1, len(forms))
    side = totals.max() ** 0.5
    for ax, form in zip(axes, forms, strict=True):
        rows = ledger[ledger["form"] == form].sort_values(
            "bytes", ascending=False, kind="stable"
        )
        _draw_boxes(ax, rows, side)
        _list_arrays(ax, rows, side)
        ax.set_title(f"{form}: {_size(totals[form])}", fontsize=12, fontweight="bold")
    handles = [
        Rectangle((0, 0), 1, 1, label=label, **_look(kind))
        for kind, (_, _, label) in CUES.items()
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=4, frameon=False, fontsize=9
    )
    parts = []
    for form in forms:
        rows = ledger[ledger["form"] == form].sort_values(
            "bytes", ascending=False, kind="stable"
        )
        largest = ", ".join(
            f"{r.array} {_size(r.bytes)}" for r in _entries(rows.head(3))
        )
        parts.append(f"{form} {_size(totals[form])} in all, the largest {largest}")
    alt_text = "Arrays of one layer's attention as boxes sized by bytes. "
    return figure, alt_text + "; ".join(parts) + "."


def _look(kind: str) -> dict[str, Any]:
    colour, hatch, _ = CUES[kind]
    return {"facecolor": colour, "hatch": hatch, "edgecolor": "black", "linewidth": 0.8}


def _draw_boxes(ax: Axes, rows: pd.DataFrame, side: float) -> None:
    """Strips from the bottom up, the largest first; small arrays share one."""
    bottom = 0.0
    for strip in _strips(rows, side):
        height, left = strip["bytes"].sum() / side, 0.0
        for row in _entries(strip):
            wide = row.bytes / height
            ax.add_patch(Rectangle((left, bottom), wide, height, **_look(row.kind)))
            left += wide
        bottom += height
    ax.set_xlim(-0.02 * side, 2.44 * side)
    ax.set_ylim(-0.02 * side, 1.02 * side)
    ax.set_aspect("equal")
    ax.set_axis_off()


def _list_arrays(ax: Axes, rows: pd.DataFrame, side: float) -> None:
    """The ledger in words, beside the boxes, in their order."""
    step = side / 9
    for n, row in enumerate(_entries(rows[::-1])):
        y = side - (n + 1) * step
        swatch = Rectangle((1.07 * side, y), 0.06 * side, 0.06 * side)
        swatch.update(_look(row.kind))
        ax.add_patch(swatch)
        text: dict[str, Any] = {"va": "center", "fontsize": 9}
        middle = y + 0.03 * side
        ax.text(1.16 * side, middle, row.array, **text)
        ax.text(1.58 * side, middle, row.symbols, **text)
        ax.text(2.42 * side, middle, _size(row.bytes), ha="right", **text)


def _strips(rows: pd.DataFrame, side: float) -> list[pd.DataFrame]:
    large = rows["bytes"] > 0.04 * side**2
    strips = [rows[rows["array"] == name] for name in rows.loc[large, "array"]]
    if not large.all():
        strips.append(rows[~large])
    return strips


def _entries(rows: pd.DataFrame) -> list[Any]:
    return list(rows.itertuples())


def _size(n: float) -> str:
    return f"{n / 1e6:.1f} MB" if n < 99.95e6 else f"{n / 1e6:.0f} MB"
