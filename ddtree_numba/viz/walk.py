"""The accept walk on a tree, and what it moves in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddtree_numba.tree import DraftTree, quoted
from ddtree_numba.viz.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    Decode,
    blank_axes,
    halo,
)
from ddtree_numba.viz.trees import levels, tree_figure

MOST_CHOICES = 40
"""Rows up to which every node says what the target wants after it."""


def accept_figure(
    tree: DraftTree,
    target_tokens: np.ndarray,
    accepted: Sequence[int],
    b: int = 0,
    decode: Decode | None = None,
) -> tuple[Figure, str]:
    """Draw request b's tree with the target's choice after each node, and the walk.

    Parameters
    ----------
    tree : DraftTree
    target_tokens : int [B, N]
        The target's choice after every row.
    accepted : sequence of int
        Rows of the accepted path, root first (-1 is padding).
    b : int
        Request.
    decode : callable, optional
        Text of a sequence of token ids; the ids themselves if omitted.

    Returns
    -------
    figure, alt_text
        The accepted path is thick, the rest dashed; beside a node, behind an arrow, the
        token that the target wants next. The choice after the last accepted row is the
        bonus, a star. In a large tree only the rows of the path say what they want.
    """
    host = tree.to_host()
    n = int(host.n_rows[b])
    path = [int(row) for row in accepted if row >= 0]
    x, y = host.depths[b, :n], levels(host.children(b))
    # Wider and higher than the tree alone: a choice stands at the lower right of a node
    # and must end before the line that leads down from it.
    width = min(10.0, 1.6 + 1.0 * (x.max() + 1))
    height = float(np.clip(1.4 + 0.3 * (y.max() + 1), 2.4, 24.0))
    ax = blank_axes(width, height)
    figure, text = tree_figure(host, b, decode, path, ax=ax)
    ax.set_ylim(y.max() + 0.9, -0.9)
    wanted = np.asarray(target_tokens)[b]
    for row in range(n) if n <= MOST_CHOICES else path:
        if row != path[-1]:
            choice = f"→{_shown(int(wanted[row]), decode)}"
            _label_choice(ax, choice, x[row], y[row], row in path)
    bonus = _shown(int(wanted[path[-1]]), decode)
    _draw_bonus(ax, x[path[-1]], y[path[-1]], bonus)
    text += (
        f" The target wants {bonus} after row {path[-1]}, which has no such child: "
        "the bonus, a star."
    )
    return figure, text


def _shown(token: int, decode: Decode | None) -> str:
    shown = quoted(decode)([token]) if decode else str(token)
    return shown.replace("$", r"\$")


def _label_choice(ax: Axes, text: str, x: float, y: float, on_path: bool) -> None:
    ax.annotate(
        text,
        (x, y),
        xytext=(6, -3),
        textcoords="offset points",
        ha="left",
        va="top",
        fontsize=8,
        fontweight="bold" if on_path else "normal",
        color=BLUE if on_path else "#555555",
        family="monospace",
        path_effects=halo(),
        zorder=5,
    )


def _draw_bonus(ax: Axes, x: float, y: float, text: str) -> None:
    """A star half a column behind the last accepted node."""
    star: dict[str, Any] = {"marker": "*", "markersize": 17, "markeredgecolor": "black"}
    ax.plot([x, x + 0.55], [y, y], color=GREEN, linewidth=2, linestyle=":", zorder=2)
    ax.plot([x + 0.55], [y], markerfacecolor=GREEN, zorder=6, **star)
    ax.annotate(
        text,
        (x + 0.55, y),
        xytext=(0, -9),
        textcoords="offset points",
        ha="center",
        va="top",
        fontsize=9,
        fontweight="bold",
        family="monospace",
        path_effects=halo(),
        zorder=7,
    )
    ax.set_xlim(right=max(ax.get_xlim()[1], x + 1.0))
    handles = [*ax.get_legend().legend_handles]  # type: ignore[union-attr]
    wants = Line2D([], [], linestyle="", marker="$\\rightarrow$", color=BLUE)
    wants.set_label("the target's choice")
    handles += [
        wants,
        Line2D([], [], linestyle=":", color=GREEN, markerfacecolor=GREEN, **star),
    ]
    handles[-1].set_label("bonus")
    ax.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=2,
        frameon=False,
    )


def compact_figure(
    before: Sequence[str],
    after: Sequence[str],
    rows: Sequence[int],
    prefix_len: int,
) -> tuple[Figure, str]:
    """Draw a cache before and after `kv_compact`, a cell a row.

    Parameters
    ----------
    before, after : sequence of str
        What each cache row holds, from row 0 on; as many in both.
    rows : sequence of int
        Accepted rows of the tree, root first (-1 is padding).
    prefix_len : int
        S before the round: tree row i is cache row S + i.

    Returns
    -------
    figure, alt_text
        Kept rows are filled and joined to where they go; what lies behind them
        afterwards is left over, and hatched.
    """
    kept = [int(row) for row in rows if row >= 0]
    n, new_len = len(before), prefix_len + len(kept)
    ax = blank_axes(min(10.0, 1.8 + 0.6 * n), 2.6)
    for column in range(n):
        moved = column - prefix_len in kept
        colour = SKY if column < prefix_len else ORANGE if moved else "white"
        _cell(ax, column, 1.0, before[column], colour, bold=moved)
        colour = SKY if column < prefix_len else ORANGE
        left_over = column >= new_len
        _cell(
            ax,
            column,
            0.0,
            after[column],
            "white" if left_over else colour,
            bold=prefix_len <= column < new_len,
            hatch="///" if left_over else None,
        )
    for to, row in enumerate(kept):
        ax.annotate(
            "",
            (prefix_len + to, 0.36),
            (prefix_len + row, 0.64),
            arrowprops={"arrowstyle": "->", "color": BLUE, "linewidth": 1.6},
        )
    ax.axvline(prefix_len - 0.5, color="black", linewidth=1.2, linestyle=":")
    ax.set_xlim(-0.6, n - 0.4)
    ax.set_ylim(-0.5, 1.5)
    ax.set_xticks(range(n))
    ax.set_xlabel(f"cache row (the tail begins at S = {prefix_len})")
    ax.set_yticks([1, 0], ["before", "after"])
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    moves = ", ".join(
        f"{prefix_len + row} to {prefix_len + to}" for to, row in enumerate(kept)
    )
    alt_text = (
        f"A cache of {n} rows, before and after. The first {prefix_len} are the prefix "
        f"and stay. Kept tail rows go: {moves}. The new prefix has {new_len} rows; "
        "what lies behind is left over."
    )
    return ax.get_figure(root=True), alt_text  # type: ignore[return-value]


def _cell(
    ax: Axes,
    column: int,
    y: float,
    text: str,
    colour: str,
    *,
    bold: bool,
    hatch: str | None = None,
) -> None:
    ax.bar(
        column,
        0.62,
        0.92,
        bottom=y - 0.31,
        facecolor=colour,
        edgecolor="black" if hatch is None else GREY,
        linewidth=0.8,
        hatch=hatch,
    )
    ax.text(
        column,
        y,
        text,
        ha="center",
        va="center",
        fontsize=9,
        fontweight="bold" if bold else "normal",
        family="monospace",
        path_effects=halo(),
    )
