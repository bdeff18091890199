"""Pictures of a round, computed from arrays: trees, their masks, the sweep.

Every function returns ``(figure, alt_text)``. Colours are Okabe and Ito's, and never
the only cue: the accepted path is also thick and square, other lines are dashed, cells
dotted. Figures are built without pyplot, so they need no display and leave no state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke

from ddtree_numba.tree import DraftTree, quoted

if TYPE_CHECKING:
    import pandas as pd

ORANGE, SKY, GREEN, BLUE, VERMILLION = (
    "#E69F00",
    "#56B4E9",
    "#009E73",
    "#0072B2",
    "#D55E00",
)
GREY = "#8A8A8A"

MOST_LABELS = 130
"""Rows up to which every node and every line of a mask carries its token."""

Decode = Callable[[Sequence[int]], str]


# ------------------------------------------------------------------------------ trees


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
    x, y = host.depths[b, :n], _levels(host.children(b))
    if ax is None:
        size = (2.2 + 0.62 * (x.max() + 1), 1.7 + _line_height(n) * (y.max() + 1))
        ax = _axes(size[0], float(np.clip(size[1], 3.5, 24.0)))
    _draw_edges(ax, host.parents[b, :n], x, y, set(path))
    prob = np.exp(host.log_probs[b, :n])
    _draw_nodes(ax, prob, x, y, path)
    if n <= MOST_LABELS:
        labelled: Sequence[int] = range(n)
    else:
        labelled = path or _first_children(host, b)
    for row in labelled:
        text = _token_text(host, b, row, decode)
        _label_node(ax, text, x[row], y[row], prob[row], row in path)
    ax.set_xlabel("drafted position (0: root)")
    ax.set_xticks(range(int(x.max()) + 1))
    ax.set_xlim(-0.6, x.max() + 0.9)
    ax.set_yticks([])
    # A tree of a few lines does not spread over the whole height.
    ax.set_ylim(max(y.max() + 0.8, 8), -1.4)
    ax.spines[["left", "right", "top"]].set_visible(False)
    ax.legend(
        handles=_tree_legend(bool(path)),
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
    )
    return ax.get_figure(root=True), _describe_tree(host, b, decode, path)  # type: ignore


def _levels(children: list[list[int]]) -> np.ndarray:
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
        # A halo keeps the letters readable where lines or nodes are dense.
        path_effects=[withStroke(linewidth=2.5, foreground="white")],
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
        f"Draft tree with a root and {n - 1} draft nodes, {host.depths[b].max()} deep; "
        f"the nodes' path probabilities add up to {prob[1:n].sum():.2f}."
    )
    if path:
        tokens = [_token_text(host, b, row, decode) for row in path]
        text += (
            f" Accepted: {len(path) - 1} draft nodes, rows "
            f"{', '.join(map(str, path))}, tokens {' '.join(tokens)}."
        )
    return text


# ------------------------------------------------------------------------------ masks


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
        side = min(2.2 + _line_height(n) * n, 9.0)
        ax = _axes(side + 1.2, side)
    band = max(2.0, 0.12 * n) if prefix_len else 0.0
    shades = np.array([[255, 255, 255], [86, 180, 233], [230, 159, 0]], np.uint8)
    shown = tail.astype(int)
    shown[path] *= 2
    ax.imshow(
        shades[shown], extent=(-0.5, n - 0.5, n - 0.5, -0.5), interpolation="none"
    )
    if prefix_len:
        ax.axvspan(-0.5 - band, -0.5, facecolor=SKY, hatch="//", edgecolor="white")
        ax.text(
            -0.5 - band / 2,
            (n - 1) / 2,
            f"prefix: {prefix_len} rows, seen by all",
            rotation=90,
            ha="center",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    _mark_cells(ax, tail, path)
    _label_rows(ax, host, b, n, decode, path)
    ax.set_xlim(-0.5 - band, n - 0.5)
    ax.set_xlabel("tree row attended to (cache row = prefix + row)")
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
    tokens = [_token_text(host, b, row, decode) for row in range(n)]
    ax.set_yticks(range(n), [f"{t} {row}" for row, t in enumerate(tokens)])
    ax.set_xticks(range(0, n, 1 if n <= 20 else 4))
    small = 9 if n <= 40 else 6
    ax.tick_params(axis="y", labelsize=small, labelfontfamily="monospace")
    for row in path:
        ax.get_yticklabels()[row].set_fontweight("bold")


# ------------------------------------------------------------------------------ sweep


def sweep_figure(frame: pd.DataFrame) -> tuple[Figure, str]:
    """Draw tokens per round and accepted drafts against the budget.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `ddtree_numba.sweep.sweep` makes it.

    Returns
    -------
    figure, alt_text
    """
    figure = Figure(figsize=(10, 4.4), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2)
    cues = zip((BLUE, VERMILLION, GREEN, ORANGE), "osD^", strict=True)
    alt_texts = []
    for (temperature, rows), (colour, marker) in zip(
        frame.groupby("temperature"), cues, strict=False
    ):
        trees = rows[rows["mode"] == "tree"].sort_values("n_draft_nodes")
        chain = rows[rows["mode"] == "chain"].iloc[0]
        name, style = f"T = {temperature:g}", {"color": colour, "marker": marker}
        budget, per_round = trees["n_draft_nodes"], trees["tokens_per_round"]
        left.plot(budget, per_round, label=f"tree, {name}", **style)
        left.axhline(
            chain["tokens_per_round"],
            color=colour,
            linestyle="--",
            label=f"chain of {chain['n_draft_nodes']}, {name}",
        )
        right.plot(budget, trees["accepted"], label=f"measured, {name}", **style)
        right.plot(
            budget,
            trees["expected_accepted"],
            color=colour,
            linestyle=":",
            marker=marker,
            markerfacecolor="white",
            label=f"Σp of the tree, {name}",
        )
        alt_texts.append(
            f"At {name} the tree commits {per_round.iloc[0]:.2f} tokens per round with "
            f"{budget.iloc[0]} draft nodes and {per_round.iloc[-1]:.2f} with "
            f"{budget.iloc[-1]}; the chain commits {chain['tokens_per_round']:.2f}."
        )
    left.set_ylabel("tokens per round (accepted drafts + bonus)")
    right.set_ylabel("accepted drafts per round")
    for ax in (left, right):
        ax.set_xscale("log", base=2)
        ax.set_xticks(sorted(frame.loc[frame["mode"] == "tree", "n_draft_nodes"]))
        ax.xaxis.set_major_formatter("{x:g}")
        ax.minorticks_off()
        ax.set_xlabel("n_draft_nodes (root not counted)")
        ax.set_ylim(bottom=0)
        ax.grid(color="#E5E5E5")
        ax.spines[["right", "top"]].set_visible(False)
        ax.legend(frameon=False, fontsize=8, loc="lower right")
    return figure, " ".join(alt_texts)


# ------------------------------------------------------------------------------ round


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
    lines = int(_levels(host.children(b)).max()) + 1
    height = float(np.clip(2.2 + _line_height(n) * max(lines, n / 2), 4.5, 16.0))
    width = 2.2 + 0.62 * (deep + 1)
    figure = Figure(figsize=(width + height, height), layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(width, height))
    _, tree_text = tree_figure(host, b, decode, accepted, ax=left)
    _, mask_text = mask_figure(host, b, prefix_len, decode, accepted, ax=right)
    return figure, f"Left: {tree_text} Right: {mask_text}"


# --------------------------------------------------------------------------- helpers


def _axes(width: float, height: float) -> Axes:
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure.subplots()


def _line_height(n: int) -> float:
    """Inches a line: room for a label while all nodes have one."""
    return 0.26 if n <= MOST_LABELS else 0.03


def _token_text(host: DraftTree, b: int, row: int, decode: Decode | None) -> str:
    token = int(host.token_ids[b, row])
    if decode is None:
        return str(token)
    text = quoted(decode)([token])
    # matplotlib reads text between dollar signs as mathematics.
    return (text if len(text) <= 8 else text[:7] + "…").replace("$", r"\$")
