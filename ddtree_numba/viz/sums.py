"""What a type costs: the error of long sums, and the instructions of an element."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree_numba.viz.style import BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION

if TYPE_CHECKING:
    import pandas as pd

LINES: dict[str, dict[str, Any]] = {
    "float32": {"color": VERMILLION, "marker": "o", "linestyle": "-"},
    "float64": {"color": BLUE, "marker": "s", "linestyle": "--"},
    "float32 pair": {"color": GREEN, "marker": "^", "linestyle": ":"},
}
PARTS: dict[str, dict[str, Any]] = {
    "f32": {"color": SKY, "hatch": ""},
    "f64": {"color": ORANGE, "hatch": "//"},
    "convert": {"color": GREY, "hatch": ".."},
}
EXACT = 1e-9
"""Errors below are drawn here: the axis is logarithmic, and an exact sum has none."""


def sums_figure(
    errors: pd.DataFrame, counts: pd.DataFrame, executor: str
) -> tuple[Figure, str]:
    """Draw error against length, and arithmetic instructions an element.

    Parameters
    ----------
    errors : pandas.DataFrame
        As from `ddtree_numba.lab.sums.sum_errors`.
    counts : pandas.DataFrame
        As from `ddtree_numba.lab.sums.instructions`.
    executor : str
        Where the sums ran.

    Returns
    -------
    figure, alt_text
        The kernel that begins with a bare 0.0 is ringed, wherever this executor puts
        it.
    """
    figure = Figure(figsize=(9.6, 4.0), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=(3, 2))
    last = {}
    for name, rows in errors.groupby("kernel"):
        error = np.maximum(rows["error"].to_numpy(), EXACT)
        last[str(name)] = rows["error"].iloc[-1]
        style: dict[str, Any] = LINES.get(
            str(name),
            {"marker": "o", "markersize": 12, "markerfacecolor": "none",
             "color": "black", "linestyle": ""},
        )  # fmt: skip
        label = name if name in LINES else f"a bare {name}, on the {executor}"
        left.plot(rows["length"], error, label=label, **style)
    left.set(xscale="log", yscale="log", xlabel="numbers added", ylim=(EXACT / 2, 1))
    left.set_ylabel("relative error of the sum")
    left.axhline(2.0**-24, color=GREY, label="one rounding to float32")
    left.legend(frameon=False, fontsize=9, loc="upper left")
    _draw_counts(right, counts)
    for ax in (left, right):
        ax.spines[["right", "top"]].set_visible(False)
    found = ", ".join(f"{name} {error:.1g}" for name, error in last.items())
    made = "; ".join(
        f"{name}: " + ", ".join(f"{n:g} {part}" for part, n in row.items() if n)
        for name, row in counts.iterrows()
    )
    alt_text = (
        f"Left: relative error of {errors['length'].max()} additions of 0.1, run on "
        f"{executor}: {found}. Right: arithmetic instructions an element, from PTX: "
        f"{made}."
    )
    return figure, alt_text


def _draw_counts(ax: Axes, counts: pd.DataFrame) -> None:
    names = list(counts.index)[::-1]
    left = np.zeros(len(names))
    for part, style in PARTS.items():
        n = counts.loc[names, part].to_numpy(float)
        ax.barh(names, n, left=left, label=part, edgecolor="black", **style)
        left += n
    ax.set_xlabel("instructions for each number added, from PTX")
    ax.legend(frameon=False, fontsize=9, loc="lower right", bbox_to_anchor=(1, 0.3))
    ax.tick_params(axis="y", length=0)
