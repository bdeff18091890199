"""What every lane of a block reads and writes, from barrier to barrier."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from ddtree_numba.viz.style import GREY, blank_axes
from ddtree_numba.viz.traces import (
    KIND_STYLES,
    RACE_STYLE,
    Block,
    of_block,
    with_races,
)

if TYPE_CHECKING:
    import pandas as pd

    from ddtree_numba.emulator import Report

MOST_STEPS = 110
"""Columns up to which `lanes_figure` draws every access."""


def lanes_figure(report: Report, block: Block | None = None) -> tuple[Figure, str]:
    """Draw what every lane of a block reads and writes, from barrier to barrier.

    Parameters
    ----------
    report : ddtree_numba.emulator.Report
        Of a traced run.
    block : tuple of int, optional
        x, y, z of the block; the first that ran if omitted.

    Returns
    -------
    figure, alt_text
        A row a lane, a column the n-th access of one kind and source line to an array
        in its phase. Races are ringed. With more than `MOST_STEPS` columns accesses are
        counted instead.
    """
    block, table = of_block(with_races(report), block)
    n_lanes = int(np.prod(report.block))
    n_phases = int(table["phase"].max()) + 1 if len(table) else 0
    x, ends = _columns(table, n_phases)
    if n_phases == 0 or ends[-1] > MOST_STEPS:
        figure = _count_accesses(table, n_lanes, n_phases)
    else:
        barriers = report.barriers[report.barriers["block"] == block]
        figure = _draw_accesses(table, x, ends, barriers, n_lanes)
    figure.suptitle(f"{report.kernel}, block {block}", fontsize=11)
    kinds = table["kind"].value_counts()
    found = ", ".join(f"{n} {kind}s" for kind, n in kinds.items()) or "no access"
    alt_text = (
        f"{n_lanes} lanes of block {block} of {report.kernel}, {n_phases} phases "
        f"between barriers: {found}; {table['race'].sum() or 'none'} of them race."
    )
    return figure, alt_text


def _columns(table: pd.DataFrame, n_phases: int) -> tuple[np.ndarray, np.ndarray]:
    """Where every access stands, and where the phases end."""
    what = ["phase", "line", "array", "kind", "nth"]
    step = table.groupby(["phase", "lane"]).cumcount()
    nth = table.groupby(["phase", "lane", "line", "array", "kind"]).cumcount()
    keys = table[what[:-1]].assign(nth=nth, step=step)
    # Lanes that skip an access leave a gap: the others say where its column is.
    columns = keys.groupby(what)["step"].max().reset_index()
    columns = columns.sort_values(["phase", "step", "line", "array", "kind"])
    columns["x"] = np.arange(len(columns)) + columns["phase"] + 1
    x = keys[what].merge(columns, on=what, how="left")["x"].to_numpy()
    upto = np.searchsorted(columns["phase"], range(n_phases), side="right")
    return x, upto + np.arange(1, n_phases + 1)


def _draw_accesses(
    table: pd.DataFrame,
    x: np.ndarray,
    ends: np.ndarray,
    barriers: pd.DataFrame,
    n_lanes: int,
) -> Figure:
    height = _lane_height(n_lanes)
    size = (130 * height) ** 2 / 17
    ax = blank_axes(
        float(np.clip(2.6 + 0.2 * ends[-1], 5.0, 24.0)), 2 + n_lanes * height
    )
    y, racing = table["lane"].to_numpy(), table["race"].to_numpy()
    for kind, style in KIND_STYLES.items():
        rows = (table["kind"] == kind).to_numpy()
        if rows.any():
            style = {"linewidths": 1.0 if n_lanes <= 64 else 0.4, **style}
            ax.scatter(x[rows], y[rows], s=size, label=kind, zorder=3, **style)
    if racing.any():
        ax.scatter(x[racing], y[racing], s=3.4 * size, zorder=4, **RACE_STYLE)
    for at, n in zip(*np.unique(x, return_index=True), strict=True):
        ax.annotate(
            table["array"].iloc[n],
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=8,
            family="monospace",
        )
    for phase in barriers["phase"].to_numpy():
        if phase < len(ends):
            ax.axvline(ends[phase], color="black", linestyle="--", linewidth=1.4)
    begins = np.append(0, ends[:-1])
    ax.set_xticks((begins + ends) / 2, [str(n) for n in range(len(ends))])
    ax.tick_params(axis="x", length=0)
    lines = ", ".join(str(n) for n in sorted(set(barriers["line"])))
    ax.set_xlabel("phase" + (f" (dashed: barriers, line {lines})" if lines else ""))
    _finish_lanes(ax, n_lanes)
    ax.set_xlim(0, ends[-1])
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax.get_figure(root=True)  # type: ignore[return-value]


def _count_accesses(table: pd.DataFrame, n_lanes: int, n_phases: int) -> Figure:
    """Lanes × phases, the number of reads and of writes as shades and figures."""
    width = float(np.clip(3.0 + 2 * 0.42 * n_phases, 6.0, 24.0))
    figure = Figure(
        figsize=(width, 2 + n_lanes * _lane_height(n_lanes)),
        layout="constrained",
        facecolor="white",
    )
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, title, writes in (
        (left, "reads", False),
        (right, "writes and atomics", True),
    ):
        rows = table[(table["kind"] != "read") == writes]
        counts = np.zeros((n_lanes, max(1, n_phases)), int)
        np.add.at(counts, (rows["lane"].to_numpy(), rows["phase"].to_numpy()), 1)
        image = ax.imshow(counts, cmap="cividis", aspect="auto", vmin=0)
        if n_lanes <= 64 and n_phases <= 40:
            for (lane, phase), n in np.ndenumerate(counts):
                colour = "black" if n > 0.6 * counts.max() else "white"
                ax.text(phase, lane, n, ha="center", va="center", fontsize=7, c=colour)
        figure.colorbar(image, ax=ax, label="accesses", ticks=MaxNLocator(integer=True))
        ax.set_title(title)
        ax.set_xlabel("phase")
        ax.xaxis.get_major_locator().set_params(integer=True)
        _finish_lanes(ax, n_lanes)
    right.set_ylabel("")
    return figure


def _lane_height(n_lanes: int) -> float:
    """Inches a lane: room for its number, as long as the figure fits a screen."""
    return 0.2 if n_lanes <= 32 else 0.13 if n_lanes <= 64 else 0.06


def _finish_lanes(ax: Axes, n_lanes: int) -> None:
    for warp in range(32, n_lanes, 32):
        ax.axhline(warp - 0.5, color=GREY, linewidth=0.8)
    ax.set_ylim(n_lanes - 0.4, -0.6)
    ax.set_yticks(range(0, n_lanes, 1 if n_lanes <= 16 else 4 if n_lanes <= 64 else 32))
    ax.set_ylabel("lane" + (", a line between warps" if n_lanes > 32 else ""))
    ax.spines[["right", "top"]].set_visible(False)
