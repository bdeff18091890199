"""Which lane touched which element of an array, phase by phase."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from ddtree_numba.viz.traces import RACE_STYLE, Block, of_block, with_races

if TYPE_CHECKING:
    import pandas as pd

    from ddtree_numba.emulator import Report

MOST_ROWS, MOST_COLUMNS = 48, 64
"""Elements of an array that `access_figure` shows."""

MOST_PHASES = 12
"""Phases that `access_figure` shows."""


def access_figure(
    report: Report, array: str, block: Block | None = None
) -> tuple[Figure, str]:
    """Draw which lane of a block touched which element of an array, phase by phase.

    Parameters
    ----------
    report : ddtree_numba.emulator.Report
        Of a traced run.
    array : str
        Its name in the kernel.
    block : tuple of int, optional
        The first block that touches the array if omitted.

    Returns
    -------
    figure, alt_text
        Reads and writes apart; a row a phase for one dimension, else a panel a phase. A
        cell's shade is the lowest lane that touched it; it names that lane, or counts
        the lanes. Races are ringed. Shown are the first `MOST_PHASES` phases with an
        access, and of the elements touched the first `MOST_ROWS` × `MOST_COLUMNS`.

    Raises
    ------
    ValueError
        If the run, or the block, made no access to such an array.
    """
    table = with_races(report)
    known = ", ".join(sorted(set(table["array"]))) or "none"
    table = table[table["array"] == array]
    if not len(table):
        raise ValueError(f"array is {array!r}; expected one that is accessed: {known}")
    block, rows = of_block(table, block)
    if not len(rows):
        raise ValueError(f"block is {block}; expected one that accesses {array}")
    accesses, rows = rows, _each_element(rows)
    cells = _cells(rows)
    flat = cells["row"].nunique() <= 1
    phases = sorted(set(cells["phase"]))[: MOST_ROWS if flat else MOST_PHASES]
    shown = cells[cells["phase"].isin(phases)]
    if flat:
        shown = shown.assign(row=shown["phase"].map(phases.index))
    n_lanes = int(np.prod(report.block))
    figure = _draw_maps(shown, phases, flat, n_lanes)
    title = f"{array} in {report.kernel}, block {block}"
    title += " (a part)" if len(shown) < len(rows) else ""
    figure.suptitle(title, fontsize=11)
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, 0.09 * len(title)), height)
    if shown["race"].any():
        rings = figure.axes[0].collections
        figure.legend(handles=rings, loc="outside lower center", frameon=False)
    alt_text = f"Accesses of block {block} of {report.kernel} to {array}: "
    alt_text += _describe_accesses(accesses, rows, len(rows) - len(shown))
    return figure, alt_text


def _describe_accesses(
    accesses: pd.DataFrame, elements: pd.DataFrame, n_outside: int
) -> str:
    writes = int((accesses["kind"] != "read").sum())
    raced = elements.loc[elements["race"], "index"].nunique()
    text = (
        f"{len(accesses) - writes} reads and {writes} writes of "
        f"{elements['index'].nunique()} elements in {elements['phase'].nunique()} "
        f"phases; {raced or 'no'} elements are raced for."
    )
    if n_outside:
        text += f" {n_outside} accesses of an element lie outside the picture."
    return text


def _each_element(rows: pd.DataFrame) -> pd.DataFrame:
    """The accesses, a row for each element that a wide one takes."""
    counts = rows["elements"].to_numpy()
    each = rows.loc[rows.index.repeat(counts)].reset_index(drop=True)
    nth = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
    each["index"] = [
        (*index[:-1], index[-1] + n) if n else index
        for index, n in zip(each["index"], nth, strict=True)
    ]
    return each


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Where in the picture each access is; those that lie outside are left out."""
    index = np.zeros((len(rows), 2), int)
    for n, (*leading, column) in enumerate(i or (0,) for i in rows["index"]):
        index[n] = leading[-1] if leading else 0, column
    planes = [i[:-2] for i in rows["index"]]
    order = {plane: n for n, plane in enumerate(sorted(set(planes)))}
    height = index[:, 0].max() + 1
    # Planes of an array of more dimensions stand below each other.
    row = index[:, 0] + height * np.array([order[plane] for plane in planes])
    cells = rows.assign(
        row=row - row.min(),
        column=index[:, 1] - index[:, 1].min(),
        row_name=[", ".join(map(str, i[:-1] or (0,))) for i in rows["index"]],
        column_name=index[:, 1],
        write=rows["kind"] != "read",
    )
    return cells[(cells["row"] < MOST_ROWS) & (cells["column"] < MOST_COLUMNS)]


def _draw_maps(
    cells: pd.DataFrame, phases: Sequence[int], flat: bool, n_lanes: int
) -> Figure:
    shape = int(cells["row"].max()) + 1, int(cells["column"].max()) + 1
    kinds = sorted(set(cells["write"]))
    grid = (len(kinds), 1) if flat else (len(phases), len(kinds))
    cell = 0.27 if flat or max(shape) <= 32 else 0.15
    numbers = cell > 0.2
    figure = Figure(
        figsize=(
            max(2.4, 0.8 + cell * shape[1]) * grid[1] + 1.0,
            (0.7 + cell * shape[0]) * grid[0] + 0.7,
        ),
        layout="constrained",
        facecolor="white",
    )
    axes = figure.subplots(*grid, squeeze=False).ravel()
    panels = [(None, kind) for kind in kinds]
    if not flat:
        panels = [(phase, kind) for phase in phases for kind in kinds]  # type: ignore
    for ax, (phase, write) in zip(axes, panels, strict=True):
        here = cells[cells["write"] == write]
        title = "writes" if write else "reads"
        if phase is not None:
            here = here[here["phase"] == phase]
            title = f"phase {phase}: {title if len(here) else 'no ' + title}"
        ax.set_title(title, fontsize=9)
        image = _draw_map(ax, here, shape, n_lanes, numbers)
        names = ("phase", "column_name") if flat else ("row_name", "column_name")
        _number_cells(ax, cells, names)
        if flat:
            ax.set_ylabel("phase", fontsize=8)
            ax.set_xlabel("element", fontsize=8)
    several = "n×: n lanes" if numbers else "dot: several"
    label = f"lane ({several}; shade: the lowest)"
    figure.colorbar(
        image, ax=axes.tolist(), label=label, aspect=25,
        ticks=MaxNLocator(integer=True),
    )  # fmt: skip
    return figure


def _draw_map(
    ax: Axes,
    cells: pd.DataFrame,
    shape: tuple[int, int],
    n_lanes: int,
    numbers: bool,
) -> Any:
    lowest = np.full(shape, np.nan)
    at: Any
    for at, lanes in cells.groupby(["row", "column"])["lane"]:
        row, column = at
        lowest[row, column] = lanes.min()
        n = lanes.nunique()
        colour = "white" if lanes.min() < 0.6 * n_lanes else "black"
        if numbers:
            text = str(lanes.min()) if n == 1 else f"{n}×"
            ax.text(
                column, row, text, ha="center", va="center", fontsize=6.5, color=colour
            )
        elif n > 1:
            ax.plot(column, row, ".", color=colour, markersize=2)
    image = ax.imshow(lowest, cmap="cividis", vmin=0, vmax=max(1, n_lanes - 1))
    raced = cells[cells["race"]].drop_duplicates(["row", "column"])
    ax.scatter(
        raced["column"], raced["row"], s=260 if numbers else 70, clip_on=False,
        path_effects=[withStroke(linewidth=3.6, foreground="white")], **RACE_STYLE,
    )  # fmt: skip
    ax.set_xticks(np.arange(shape[1] + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(shape[0] + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="#DDDDDD", linewidth=0.5)
    ax.tick_params(which="both", length=0, labelsize=7)
    return image


def _number_cells(ax: Axes, cells: pd.DataFrame, names: tuple[str, str]) -> None:
    """Label rows and columns by what they are in the array."""
    for axis, place, name in (
        (ax.yaxis, "row", names[0]),
        (ax.xaxis, "column", names[1]),
    ):
        known = cells.drop_duplicates(place).sort_values(place)
        known = known[known[place] % (1 if len(known) <= 32 else 8) == 0]
        axis.set_ticks(known[place].to_list(), known[name].astype(str).to_list())
