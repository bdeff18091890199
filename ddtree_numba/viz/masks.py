"""The attention mask of a tree, and a round: tree and mask side by side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree_numba.tree import DraftTree
from ddtree_numba.viz.style import SKY, Decode, blank_axes, line_height, token_text
from ddtree_numba.viz.trees import levels, tree_figure


def mask_figure(
    tree: DraftTree,
    b: int = 0,
    prefix_len: int = 0,
    decode: Decode | None = None,
    accepted: Sequence[int] = (),
    *,
    ax: Axes | None = None,
) -> tuple[Figure, str]:
    """Draw which cache rows each tree row attends to, the prefix collapsed.

    Parameters
    ----------
    tree, b, decode, accepted, ax
        As for `tree_figure`.
    prefix_len : int
        Cache rows before the tree; all live rows see all of them, so they are drawn as
        one hatched band.

    Returns
    -------
    figure, alt_text
    """
    host = tree.to_host()
    n = int(host.n_rows[b])
    tail = host.mask(b, 0)[:n, :n]
    path = [int(row) for row in accepted if row >= 0]
    if ax is None:
        side = min(2.2 + line_height(n) * n, 9.0)
        ax = blank_axes(side + 1.2, side)
    band = max(2.0, 0.12 * n) if prefix_len else 0.0
    shades = np.array([[255, 255, 255], [86, 180, 233], [230, 159, 0]], np.uint8)
    shown = tail.astype(int)
    shown[path] *= 2
    ax.imshow(
        shades[shown], extent=(-0.5, n - 0.5, n - 0.5, -0.5), interpolation="none"
    )
    if prefix_len:
        ax.axvspan(-0.5 - band, -0.5, facecolor=SKY, hatch="//", edgecolor="white")
        tall = n >= 12  # a few rows have no room for an upright line
        between = " " if tall else "\n"
        ax.text(
            -0.5 - band / 2,
            (n - 1) / 2,
            f"prefix:{between}{prefix_len} rows,{between}seen by all",
            rotation=90 if tall else 0,
            fontsize=None if tall else 6,
            ha="center",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    _mark_cells(ax, tail, path)
    _label_rows(ax, host, b, n, decode, path)
    ax.set_xlim(-0.5 - band, n - 0.5)
    ax.set_xlabel("tree row attended to\n(cache row = prefix + row)")
    ax.set_ylabel("tree row that attends")
    seen, triangle = int(tail.sum()), n * (n + 1) // 2
    alt_text = (
        f"Attention mask of {n} tree rows: each sees the prefix of {prefix_len} rows, "
        f"its ancestors and itself, {seen} of the {triangle} cells that a causal "
        f"triangle would show."
    )
    if path:
        alt_text += f" Accepted rows {', '.join(map(str, path))} are marked."
    return ax.get_figure(root=True), alt_text  # type: ignore


def _mark_cells(ax: Axes, tail: np.ndarray, path: Sequence[int]) -> None:
    """A second cue for the coloured cells, where there is room for one."""
    n = len(tail)
    if n > 40:
        return
    rows, columns = np.nonzero(tail)
    on_path = np.isin(rows, path)
    size = 900 / n
    ax.scatter(columns[~on_path], rows[~on_path], s=size / 9, c="black", marker="o")
    ax.scatter(columns[on_path], rows[on_path], s=size / 5, c="black", marker="s")
    edges = np.arange(n + 1) - 0.5
    ax.hlines(edges, -0.5, n - 0.5, color="#DDDDDD", linewidth=0.5, zorder=1)
    ax.vlines(edges, -0.5, n - 0.5, color="#DDDDDD", linewidth=0.5, zorder=1)


def _label_rows(
    ax: Axes,
    host: DraftTree,
    b: int,
    n: int,
    decode: Decode | None,
    path: Sequence[int],
) -> None:
    if n > 70:
        return
    tokens = [token_text(host, b, row, decode) for row in range(n)]
    ax.set_yticks(range(n), [f"{t} {row}" for row, t in enumerate(tokens)])
    ax.set_xticks(range(0, n, 1 if n <= 20 else 4))
    small = 9 if n <= 40 else 6
    ax.tick_params(axis="y", labelsize=small, labelfontfamily="monospace")
    for row in path:
        ax.get_yticklabels()[row].set_fontweight("bold")


def round_figure(
    tree: DraftTree,
    b: int = 0,
    prefix_len: int = 0,
    decode: Decode | None = None,
    accepted: Sequence[int] = (),
) -> tuple[Figure, str]:
    """Draw a round's tree beside its mask; arguments as for `mask_figure`."""
    host = tree.to_host()
    n, deep = int(host.n_rows[b]), int(host.depths[b].max())
    lines = int(levels(host.children(b)).max()) + 1
    height = float(np.clip(2.2 + line_height(n) * max(lines, n / 2), 4.5, 16.0))
    width = 2.2 + 0.62 * (deep + 1)
    figure = Figure(figsize=(width + height, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(width, height))
    _, tree_text = tree_figure(host, b, decode, accepted, ax=left)
    _, mask_text = mask_figure(host, b, prefix_len, decode, accepted, ax=right)
    return figure, f"Left: {tree_text} Right: {mask_text}"
