"""The draft tree."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddtree_numba.tree import DraftTree
from ddtree_numba.viz.style import (
    BLUE,
    GREY,
    MOST_LABELS,
    ORANGE,
    Decode,
    blank_axes,
    halo,
    line_height,
    token_text,
)


def tree_figure(
    tree: DraftTree,
    b: int = 0,
    decode: Decode | None = None,
    accepted: Sequence[int] = (),
    *,
    ax: Axes | None = None,
) -> tuple[Figure, str]:
    """Draw request b's tree, root on the left, one column a drafted position.

    Parameters
    ----------
    tree : DraftTree
    b : int
        Request.
    decode : callable, optional
        Text of a sequence of token ids; the ids themselves if omitted.
    accepted : sequence of int
        Rows of the accepted path, root first (-1 is padding).
    ax : matplotlib Axes, optional
        Where to draw; a figure of a fitting size if omitted.

    Returns
    -------
    figure, alt_text
        A node's area is its path's probability. A first child stands level with its
        parent, so the most probable continuation of any node is a straight line.
    """
    host = tree.to_host()
    n = int(host.n_rows[b])
    path = [int(row) for row in accepted if row >= 0]
    x, y = host.depths[b, :n], levels(host.children(b))
    if ax is None:
        size = (2.2 + 0.62 * (x.max() + 1), 1.7 + line_height(n) * (y.max() + 1))
        ax = blank_axes(size[0], float(np.clip(size[1], 3.5, 24.0)))
    _draw_edges(ax, host.parents[b, :n], x, y, set(path))
    prob = np.exp(host.log_probs[b, :n])
    _draw_nodes(ax, prob, x, y, path)
    if n <= MOST_LABELS:
        labelled: Sequence[int] = range(n)
    else:
        labelled = path or _first_children(host, b)
    for row in labelled:
        text = token_text(host, b, row, decode)
        _label_node(ax, text, x[row], y[row], prob[row], row in path)
    ax.set_xlabel("drafted position (0: root)")
    ax.set_xticks(range(int(x.max()) + 1))
    ax.set_xlim(-0.6, x.max() + 0.9)
    ax.set_yticks([])
    # A tree of a few lines does not spread over the whole height.
    ax.set_ylim(max(y.max() + 0.8, 8), -max(1.4, 0.012 * y.max()))
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.legend(
        handles=_tree_legend(bool(path)),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
    )
    return ax.get_figure(root=True), _describe_tree(host, b, decode, path)  # type: ignore


def levels(children: list[list[int]]) -> np.ndarray:
    """A line for every row: the first child keeps its parent's, others get new ones."""
    line = np.zeros(len(children), int)
    used = -1
    stack = [(0, True)]
    while stack:
        row, opens = stack.pop()
        if opens:
            used += 1
        line[row] = used
        below = children[row]
        stack += [(child, k > 0) for k, child in reversed(list(enumerate(below)))]
    return line


def _first_children(host: DraftTree, b: int) -> list[int]:
    rows = [0]
    while (child := int(host.next_token[b, rows[-1]])) > 0:
        rows.append(child)
    return rows


def _draw_edges(
    ax: Axes, parents: np.ndarray, x: np.ndarray, y: np.ndarray, path: set[int]
) -> None:
    # Down from the parent, then across: lines of different parents never cross.
    elbows = {}
    for row in range(1, len(parents)):
        above = parents[row]
        bend = x[above] + 0.4
        corners = [(x[above], y[above]), (bend, y[above]), (bend, y[row])]
        elbows[row] = [*corners, (x[row], y[row])]
    others = [elbow for row, elbow in elbows.items() if row not in path]
    accepted = [elbow for row, elbow in elbows.items() if row in path]
    ax.add_collection(
        LineCollection(others, colors=GREY, linewidths=0.9, linestyles="--", zorder=1)
    )
    ax.add_collection(LineCollection(accepted, colors=BLUE, linewidths=3.2, zorder=2))


def _draw_nodes(
    ax: Axes, prob: np.ndarray, x: np.ndarray, y: np.ndarray, path: Sequence[int]
) -> None:
    area = _area(prob)
    others = np.setdiff1d(np.arange(len(prob)), path)
    style: dict[str, Any] = {"edgecolors": "black", "linewidths": 0.7, "zorder": 3}
    ax.scatter(x[others], y[others], s=area[others], c="white", marker="o", **style)
    ax.scatter(x[path], y[path], s=area[path], c=ORANGE, marker="s", **style)


def _area(prob: Any) -> Any:
    """Marker area in square points; an improbable node remains a visible dot."""
    return 8 + 130 * prob


def _label_node(
    ax: Axes, text: str, x: float, y: float, prob: float, on_path: bool
) -> None:
    ax.annotate(
        text,
        (x, y),
        xytext=(0, _area(prob) ** 0.5 / 2 + 0.5),
        textcoords="offset points",
        ha="center",
        va="bottom",
        fontsize=9,
        fontweight="bold" if on_path else "normal",
        family="monospace",
        path_effects=halo(),
        zorder=4,
    )


def _tree_legend(with_path: bool) -> list[Line2D]:
    def node(marker: str, face: str, **line: Any) -> Line2D:
        return Line2D(
            [], [], marker=marker, markerfacecolor=face, markeredgecolor="black", **line
        )

    other = node("o", "white", color=GREY, linestyle="--")
    other.set_label("drafted" + (", not accepted" if with_path else ""))
    if not with_path:
        return [other]
    accepted = node("s", ORANGE, color=BLUE, linewidth=3.2, label="accepted path")
    return [accepted, other]


def _describe_tree(
    host: DraftTree, b: int, decode: Decode | None, path: Sequence[int]
) -> str:
    n, prob = int(host.n_rows[b]), np.exp(host.log_probs[b])
    text = (
        f"Draft tree with a root and {n - 1} draft nodes, {host.depths[b].max()} deep"
    )
    if (prob[1:n] < 1).any():  # else it came without probabilities
        text += f"; the nodes' path probabilities add up to {prob[1:n].sum():.2f}"
    text += "."
    if path:
        tokens = [token_text(host, b, row, decode) for row in path]
        text += (
            f" Accepted: {len(path) - 1} draft nodes, rows "
            f"{', '.join(map(str, path))}, tokens {' '.join(tokens)}."
        )
    return text
