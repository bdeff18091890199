"""What each source line of a kernel costs in memory."""

from __future__ import annotations

import inspect
import textwrap
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddtree_numba.viz.style import SKY, VERMILLION

if TYPE_CHECKING:
    import pandas as pd

    from ddtree_numba.emulator import Report


def memory_figure(report: Report, kernel: Any) -> tuple[Figure, str]:
    """Draw what each source line of a kernel costs in memory, beside its text.

    Parameters
    ----------
    report : ddtree_numba.emulator.Report
        Of a traced run.
    kernel : a `cuda.jit` kernel, a device function or a plain function
        Whose source to show; a device function has lines of its own.

    Returns
    -------
    figure, alt_text
        For each array that a line accesses a bar: 32-byte sectors a warp request of
        global memory, or passes over the banks of shared memory. What could not be
        saved is plain, what better placed elements would save is hatched.
    """
    function = getattr(kernel, "py_func", kernel)
    lines, first = inspect.getsourcelines(function)
    lines = textwrap.dedent("".join(lines)).splitlines()
    numbers = range(first, first + len(lines))
    memory = report.memory
    here = memory["file"] == function.__code__.co_filename
    here &= memory["line"].isin(numbers)
    costs = memory[here]
    units = {
        "sectors": "sectors a request, global",
        "passes": "passes a request, shared",
    }
    units = {what: unit for what, unit in units.items() if costs[what].notna().any()}
    # A line is as high as its bars; those of the two kinds stand beside each other.
    bars = costs.groupby(["line", "space"]).size().groupby("line").max()
    heights = np.array([bars.get(number, 1) for number in numbers])
    tops = np.cumsum(heights) - heights
    text_width = 0.5 + 0.078 * max(len(line) for line in lines)
    figure = Figure(
        figsize=(text_width + 3.6 * len(units), 1.1 + 0.2 * heights.sum()),
        layout="constrained",
        facecolor="white",
    )
    widths = (text_width, *[3.6] * len(units))
    axes = figure.subplots(
        1, len(widths), sharey=True, width_ratios=widths, squeeze=False
    )[0]
    axes[0].set_xlim(0, 1)
    axes[0].set_axis_off()
    for top, number, line in zip(tops, numbers, lines, strict=True):
        shown = f"{number:4d}  {line}".replace("$", r"\$")
        axes[0].text(0, top, shown, va="center", fontsize=8, family="monospace")
    for ax, (what, unit) in zip(axes[1:], units.items(), strict=True):
        rows = costs[costs[what].notna()]
        nth = rows.groupby("line").cumcount().to_numpy()
        _draw_costs(ax, rows, tops[rows["line"] - first] + nth, what)
        ax.set_xlabel(unit, fontsize=8)
    for ax in axes:
        for number in bars.index:
            top = tops[number - first]
            ax.axhspan(top - 0.5, top + bars[number] - 0.5, color="#F3F3F3", zorder=0)
    axes[0].set_ylim(heights.sum() - 0.3, -0.7)
    elsewhere = int(memory.loc[~here, "requests"].sum())
    title = f"{function.__name__}: memory requests of a warp, count × what: cost of one"
    title += f" ({elsewhere} more in other functions)" if elsewhere else ""
    figure.suptitle(title, fontsize=11)
    return figure, _describe_costs(function.__name__, costs, elsewhere)


def _draw_costs(ax: Axes, costs: pd.DataFrame, y: np.ndarray, what: str) -> None:
    """Draw a bar for each row of costs."""
    style: dict[str, Any] = {"height": 0.72, "edgecolor": "black", "linewidth": 0.5}
    cost, best = costs[what].to_numpy(), costs[f"{what}_at_best"].to_numpy()
    ax.barh(y, best, color=SKY, **style)
    ax.barh(y, cost - best, left=best, color=VERMILLION, hatch="////", **style)
    for at, one, least, row in zip(y, cost, best, costs.itertuples(), strict=True):
        text = f"{row.requests} × {row.kind} {row.array}: {one:.3g}"
        text += f" ({least:.3g} would do)" if one > least else ""
        ax.annotate(
            text,
            (one, at),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    ax.set_xlim(0, 2.2 * cost.max())
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0, labelleft=False)
    ax.spines[["right", "top"]].set_visible(False)


def _describe_costs(name: str, costs: pd.DataFrame, elsewhere: int) -> str:
    text = f"Memory requests of {name}: {int(costs['requests'].sum())} in its lines."
    for what, unit in (("sectors", "sectors"), ("passes", "passes")):
        rows = costs[costs[what].notna()]
        if not len(rows):
            continue
        excess = rows[what] - rows[f"{what}_at_best"]
        worst = rows.iloc[int(excess.to_numpy().argmax())]
        if excess.max() > 0:
            text += (
                f" Most could be saved in line {worst['line']}, {worst['kind']} of "
                f"{worst['array']}: {worst[what]:.3g} {unit} a request, "
                f"{worst[f'{what}_at_best']:.3g} would do."
            )
        else:
            text += f" No {unit} could be saved."
    if elsewhere:
        text += f" {elsewhere} requests come from other functions."
    return text
