"""How often a kernel reads each element of an array, and what that costs in time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from ddtree_numba.viz.style import BLUE, GREEN, ORANGE, SKY, VERMILLION

if TYPE_CHECKING:
    import pandas as pd

    from ddtree_numba.emulator import Report

CUES = (
    (VERMILLION, "o", "-"),
    (BLUE, "s", "--"),
    (GREEN, "^", ":"),
    (ORANGE, "D", "-."),
)
"""Colour, marker and line of the first, second … version."""


def element_reads(report: Report, array: str, shape: Sequence[int]) -> np.ndarray:
    """Reads of every element of an array in global memory, by all lanes.

    Parameters
    ----------
    report : ddtree_numba.emulator.Report
        Of a traced run.
    array : str
        Its name in the kernel.
    shape : sequence of int
        Its last two dimensions; what is read of the others is added up.

    Returns
    -------
    int64, of that shape
        A wide read counts once for each of its elements.

    Raises
    ------
    ValueError
        If the trace did not keep all accesses, or there is no read of such an array.
    """
    if report.dropped:
        raise ValueError(
            f"report leaves {report.dropped} accesses out; expected a run of fewer"
        )
    table = report.accesses
    rows = table[(table["array"] == array) & (table["kind"] == "read")]
    if not len(rows):
        known = ", ".join(sorted(set(table["array"]))) or "none"
        raise ValueError(f"array is {array!r}; expected one that is read: {known}")
    index = np.array([i[-2:] for i in rows["index"]])
    width = rows["elements"].to_numpy()
    first = np.repeat(index, width, axis=0)
    nth = np.arange(len(first)) - np.repeat(np.cumsum(width) - width, width)
    reads = np.zeros(tuple(shape), np.int64)
    np.add.at(reads, (first[:, 0], first[:, 1] + nth), 1)
    return reads


def reads_figure(
    reads: Mapping[str, np.ndarray], prefix_len: int, d_latent: int
) -> tuple[Figure, str]:
    """Draw how often each version reads a latent element, cache row by cache row.

    Parameters
    ----------
    reads : mapping of version to int [rows, D]
        As from `element_reads`.
    prefix_len : int
        Rows from here on are the tree's.
    d_latent : int
        Dc; the mean is over these columns.

    Returns
    -------
    figure, alt_text
    """
    figure = Figure(figsize=(8.2, 3.6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    alt_texts = []
    for (name, counts), cue in zip(reads.items(), CUES, strict=False):
        mean = counts[:, :d_latent].mean(axis=1)
        colour, marker, line = cue
        ax.plot(
            mean, color=colour, marker=marker, linestyle=line, markevery=6, markersize=6
        )
        typical = float(np.median(mean[:prefix_len]))
        ax.annotate(
            f"{name}: {typical:g}×",
            (prefix_len / 2, typical),
            xytext=(0, 6),
            textcoords="offset points",
            color=colour,
            ha="center",
            fontweight="bold",
        )
        alt_texts.append(f"{name} {typical:g} times")
    ax.axvspan(prefix_len - 0.5, len(mean) - 0.5, color="#EEEEEE", zorder=0)
    ax.annotate(
        "tree ",
        (prefix_len - 0.5, 0.93),
        xycoords=("data", "axes fraction"),
        ha="right",
    )
    _log_axis(ax, "reads of a latent element")
    ax.set_ylim(0.7, 2.2 * max(counts.max() for counts in reads.values()))
    ax.set_xlabel("cache row")
    ax.set_xlim(-1, len(mean) - 0.5)
    alt_text = (
        f"Reads of a latent element in each of {len(mean)} cache rows. A row of the "
        f"prefix is read by {', by '.join(alt_texts)}. The last "
        f"{len(mean) - prefix_len} rows are the tree's: the simple version reads them "
        "only for the rows that see them."
    )
    return figure, alt_text


def times_figure(rows: pd.DataFrame) -> tuple[Figure, str]:
    """Draw the time of every version on one shape.

    Parameters
    ----------
    rows : pandas.DataFrame
        A row a version, with the columns of `ddtree_numba.bench.bench`. What was not
        timed is left out.

    Returns
    -------
    figure, alt_text

    Raises
    ------
    ValueError
        If no row was timed.
    """
    rows = rows[rows["us"] > 0].sort_values("us", ascending=False)
    if rows.empty:
        raise ValueError("rows has no timed row")
    shape, card = rows["shape"].iloc[0], rows["card"].iloc[0]
    height = 1.3 + 0.42 * len(rows)
    figure = Figure(figsize=(8.2, height), layout="constrained", facecolor="white")
    ax = figure.subplots()
    bars = ax.barh(rows["version"], rows["us"], color=SKY, edgecolor="black")
    labels = [
        f"{us:,.{0 if us >= 100 else 1}f} µs, {tflops:.3g} TFLOP/s"
        for us, tflops in zip(rows["us"], rows["tflops"], strict=True)
    ]
    ax.bar_label(bars, labels, padding=4)
    ax.set_xscale("log")
    ax.set_xlim(rows["us"].min() / 2, 12 * rows["us"].max())
    ax.invert_yaxis()
    ax.set_xlabel("µs, the shorter the better (logarithmic)")
    ax.set_title(f"verify_attn, (B, N, H, S) = {shape}, {card}", fontsize=10)
    ax.spines[["right", "top"]].set_visible(False)
    texts = [f"{v} {text}" for v, text in zip(rows["version"], labels, strict=True)]
    return figure, f"Times of verify_attn at {shape} on {card}: {'; '.join(texts)}."


def _log_axis(ax: Axes, label: str) -> None:
    ax.set_yscale("log", base=2)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:g}"))
    ax.set_ylabel(label)
    ax.grid(axis="y", color="#E5E5E5")
    ax.spines[["right", "top"]].set_visible(False)
