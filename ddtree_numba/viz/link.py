"""A tree beside its mask, level row by row, with one row's path carried across."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.patches import ConnectionPatch, Rectangle

from ddtree_numba.tree import DraftTree
from ddtree_numba.viz.style import BLUE, GREY, ORANGE, SKY, Decode, token_text

MOST_ROWS = 70
"""Rows up to which every line has a number and its token."""


def link_figure(
    tree: DraftTree,
    row: int,
    b: int = 0,
    prefix_len: int = 0,
    decode: Decode | None = None,
) -> tuple[Figure, str]:
    """Draw request b's tree beside its mask, and follow one row from tree to mask.

    Parameters
    ----------
    tree : DraftTree
    row : int
        The tree row that is followed.
    b : int
        Request.
    prefix_len : int
        Cache rows before the tree: one hatched band in the mask.
    decode : callable, optional
        Text of a sequence of token ids; the ids themselves if omitted.

    Returns
    -------
    figure, alt_text
        Row i of the tree (not an order by branches) stands level with row i of the
        mask. From each ancestor of `row` a line goes right to its cell on the mask's
        diagonal, and down its column to `row`.

    Raises
    ------
    ValueError
        If the request has no such row.
    """
    host = tree.to_host()
    n = int(host.n_rows[b])
    if not 0 <= row < n:
        raise ValueError(f"row is {row}; expected 0 … {n - 1}")
    path = host.paths(b)[row]
    deep = int(host.depths[b, :n].max())
    height = float(np.clip(1.3 + 0.27 * n, 2.6, 9.5))
    widths = (max(1.6, 0.34 * (deep + 1) + 1.0), height)
    width = min(sum(widths) + 0.9, 10.0)
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True, width_ratios=widths)
    _draw_tree(left, host, b, n, path, decode)
    _draw_mask(right, host, b, n, path, prefix_len)
    for ancestor in path:
        _carry(figure, left, right, int(host.depths[b, ancestor]), ancestor, row)
    tokens = " ".join(token_text(host, b, r, decode) for r in path)
    alt_text = (
        f"Left: a tree of {n} rows, one line a row. Right: its mask on the same lines. "
        f"Row {row} is followed: its path is rows {', '.join(map(str, path))} (tokens "
        f"{tokens}), and just these {len(path)} tail cells of its mask row are set"
        + (f", besides the prefix of {prefix_len} rows." if prefix_len else ".")
    )
    return figure, alt_text


def _draw_tree(
    ax: Axes, host: DraftTree, b: int, n: int, path: list[int], decode: Decode | None
) -> None:
    depths, parents = host.depths[b, :n], host.parents[b, :n]
    edges = {
        row: [(depths[parents[row]], parents[row]), (depths[row], row)]
        for row in range(1, n)
    }
    others = [edge for row, edge in edges.items() if row not in path]
    own = [edge for row, edge in edges.items() if row in path]
    ax.add_collection(
        LineCollection(others, colors=GREY, linewidths=0.9, linestyles="--", zorder=1)
    )
    ax.add_collection(LineCollection(own, colors=BLUE, linewidths=3.0, zorder=2))
    rest = np.setdiff1d(np.arange(n), path)
    style: dict[str, Any] = {"edgecolors": "black", "linewidths": 0.7, "zorder": 3}
    ax.scatter(depths[rest], rest, s=36, c="white", marker="o", **style)
    ax.scatter(depths[path], path, s=52, c=ORANGE, marker="s", **style)
    if n <= MOST_ROWS:
        names = [f"{token_text(host, b, r, decode)}  {r}" for r in range(n)]
        ax.set_yticks(range(n), names, family="monospace", fontsize=9)
        for r in path:
            ax.get_yticklabels()[r].set_fontweight("bold")
    ax.set_xticks(range(int(depths.max()) + 1))
    ax.set_xlim(-0.5, depths.max() + 0.5)
    ax.set_xlabel("depth")
    ax.set_ylabel("token and row")
    ax.set_title("tree", fontsize=10)
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.tick_params(axis="y", length=0)


def _draw_mask(
    ax: Axes, host: DraftTree, b: int, n: int, path: list[int], prefix_len: int
) -> None:
    row = path[-1]
    band = max(1.6, 0.1 * n) if prefix_len else 0.0
    tail = host.mask(b, 0)[:n, :n]
    for i, j in np.argwhere(tail):
        own = i == row
        ax.add_patch(
            Rectangle((j - 0.5, i - 0.5), 1, 1, facecolor=ORANGE if own else SKY)
        )
    rows, columns = np.nonzero(tail)
    own = rows == row
    size = min(30.0, 900 / n)
    ax.scatter(columns[~own], rows[~own], s=size / 3, c="black", marker="o")
    ax.scatter(columns[own], rows[own], s=size, c="black", marker="s", zorder=5)
    edges = np.arange(n + 1) - 0.5
    ax.hlines(edges, -0.5 - band, n - 0.5, color="#DDDDDD", linewidth=0.5)
    ax.vlines(edges, -0.5, n - 0.5, color="#DDDDDD", linewidth=0.5)
    if prefix_len:
        ax.axvspan(-0.5 - band, -0.5, facecolor=SKY, hatch="//", edgecolor="white")
    ax.add_patch(
        Rectangle(
            (-0.5 - band, row - 0.5), n + band, 1, fill=False, linewidth=2, zorder=6
        )
    )
    ticks = range(0, n, 1 if n <= 20 else 4)
    if prefix_len:
        ax.set_xticks(
            [-0.5 - band / 2, *ticks], [f"0…{prefix_len - 1}", *map(str, ticks)]
        )
        ax.set_xlabel(f"prefix, then tail row j (cache row {prefix_len} + j)")
    else:
        ax.set_xticks(ticks)
        ax.set_xlabel("tail row j")
    ax.set_xlim(-0.5 - band, n - 0.5)
    ax.set_ylim(n - 0.4, -0.6)
    ax.tick_params(axis="y", length=0)
    ax.set_title("mask: who sees whom", fontsize=10)


def _carry(
    figure: Figure, left: Axes, right: Axes, depth: int, ancestor: int, row: int
) -> None:
    """A line from a node to its cell on the diagonal, and down to the row."""
    style: dict[str, Any] = {"color": BLUE, "linewidth": 1.4, "linestyle": ":"}
    figure.add_artist(
        ConnectionPatch(
            (depth, ancestor),
            (ancestor, ancestor),
            coordsA=left.transData,
            coordsB=right.transData,
            zorder=4,
            **style,
        )
    )
    if ancestor != row:
        right.annotate(
            "",
            (ancestor, row - 0.25),
            (ancestor, ancestor),
            arrowprops={"arrowstyle": "->", "color": BLUE, "linewidth": 1.6},
            zorder=6,
        )
