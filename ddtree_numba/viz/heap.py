"""Best-first search, step by step: the tree so far beside the heap."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from ddtree_numba.viz.style import BLUE, GREY, ORANGE, SKY, halo

if TYPE_CHECKING:
    from ddtree_numba.lab.best_first import Step

RankPath = tuple[int, ...]
Places = dict[RankPath, tuple[int, int]]

MOST_ON_HEAP = 12
"""Entries of the heap that a panel shows."""

MOST_PANELS = 16
"""Steps that `heap_figure` and `heap_animation` show."""


def heap_figure(
    steps: Sequence[Step], words: Sequence[Sequence[str]], *, columns: int = 2
) -> tuple[Figure, str]:
    """Draw a panel for every step: what was taken, what waits on the heap.

    Parameters
    ----------
    steps : sequence of Step
        As `ddtree_numba.lab.best_first.best_first` returns them.
    words : [L][K] of str
        The candidates of each position.
    columns : int
        Panels beside each other.

    Returns
    -------
    figure, alt_text
        In the tree taken nodes carry the number of their turn, the newest is square;
        dashed ones wait. On the heap entries stand best first, new ones hatched. Shown
        are the first `MOST_PANELS` steps.
    """
    steps = steps[:MOST_PANELS]
    places = _places(steps)
    rows = -(-len(steps) // columns)
    height = 0.75 + 0.22 * max(_levels(places), _most_waiting(steps))
    figure = Figure(
        figsize=(4.9 * columns, height * rows),
        layout=ConstrainedLayoutEngine(w_pad=0.08, h_pad=0.1),
        facecolor="white",
    )
    axes = figure.subplots(rows, 2 * columns, width_ratios=[1.25, 1] * columns)
    axes = np.reshape(axes, (-1, 2))
    for n, pair in enumerate(axes):
        if n < len(steps):
            _draw_step(pair[0], pair[1], steps, n, words, places)
        else:
            for ax in pair:
                ax.set_axis_off()
    return figure, _describe(steps, words)


def heap_animation(steps: Sequence[Step], words: Sequence[Sequence[str]]) -> str:
    """The panels of `heap_figure` as a film with controls, in HTML.

    Parameters
    ----------
    steps, words
        As for `heap_figure`.

    Returns
    -------
    str
        For `ddtree_numba.viz.show_film`.
    """
    from ddtree_numba.viz.film import film

    steps = steps[:MOST_PANELS]
    places = _places(steps)
    height = 1.0 + 0.3 * max(_levels(places), _most_waiting(steps))
    figure = Figure(figsize=(7.0, height), layout="constrained", facecolor="white")
    axes = figure.subplots(1, 2, width_ratios=[1.25, 1])

    def draw(n: int) -> None:
        for ax in axes:
            ax.clear()
        _draw_step(axes[0], axes[1], steps, n, words, places)

    return film(figure, draw, len(steps), _describe(steps, words))


# ----------------------------------------------------------------------------- layout


def _places(steps: Sequence[Step]) -> Places:
    """Depth and line of every prefix that is taken or waits at some time."""
    known = {()} | {step.taken for step in steps}
    known |= {path for step in steps for _, path in step.heap}
    places: Places = {}
    line = -1
    for path in sorted(known):  # a prefix stands before what continues it
        # A first child stands level with its parent, as in `tree_figure`.
        line += not (path and path[-1] == 0)
        places[path] = len(path), max(line, 0)
    return places


def _levels(places: Places) -> int:
    return 1 + max(line for _, line in places.values())


def _most_waiting(steps: Sequence[Step]) -> int:
    return min(MOST_ON_HEAP, max(len(step.heap) for step in steps))


# ---------------------------------------------------------------------------- drawing


def _draw_step(
    tree_ax: Axes,
    heap_ax: Axes,
    steps: Sequence[Step],
    n: int,
    words: Sequence[Sequence[str]],
    places: Places,
) -> None:
    step = steps[n]
    turns = {steps[i].taken: i + 1 for i in range(n + 1)}
    turns[()] = 0
    waiting = [path for _, path in step.heap]
    _draw_edges(tree_ax, [path for path in turns if path], places, "-", "black")
    _draw_edges(tree_ax, waiting, places, ":", GREY)
    for path in (*waiting, *turns):
        _draw_node(tree_ax, path, places[path], turns.get(path), n + 1, words)
    deepest = max(depth for depth, _ in places.values())
    tree_ax.set_xlim(-0.4, deepest + 0.6)
    tree_ax.set_ylim(_levels(places) - 0.4, -0.9)
    tree_ax.set_axis_off()
    text = f"{n + 1}. takes “{_text(step.taken, words)}”, {np.exp(step.score):.3g}"
    tree_ax.set_title(text, loc="left", fontsize=9, fontweight="bold")
    _draw_heap(heap_ax, step, words, _most_waiting(steps))


def _draw_edges(
    ax: Axes, paths: Sequence[RankPath], places: Places, style: str, colour: str
) -> None:
    lines = []
    for path in paths:
        (x, y), (x1, y1) = places[path[:-1]], places[path]
        lines.append([(x, y), (x + 0.35, y), (x + 0.35, y1), (x1, y1)])
    ax.add_collection(
        LineCollection(lines, colors=colour, linestyles=style, linewidths=1, zorder=1)
    )


def _draw_node(
    ax: Axes,
    path: RankPath,
    at: tuple[int, int],
    turn: int | None,
    now: int,
    words: Sequence[Sequence[str]],
) -> None:
    style: dict[str, Any] = {"s": 90, "facecolor": "white", "edgecolor": "black"}
    if turn is None:
        style |= {"s": 40, "edgecolor": GREY, "linestyle": ":"}
    elif turn == now:
        style |= {"s": 110, "facecolor": ORANGE, "marker": "s"}
    ax.scatter(*at, zorder=3, **style)
    if turn:
        ax.text(*at, str(turn), ha="center", va="center_baseline", fontsize=8, zorder=4)
    if not path:
        return
    ax.annotate(
        words[len(path) - 1][path[-1]],
        at,
        xytext=(8, 1),
        textcoords="offset points",
        va="bottom",
        fontsize=8.5,
        family="monospace",
        fontweight="bold" if turn == now else "normal",
        color="#555555" if turn is None else "black",
        path_effects=halo(),
        zorder=5,
    )


def _draw_heap(
    ax: Axes, step: Step, words: Sequence[Sequence[str]], n_lines: int
) -> None:
    shown = step.heap[:n_lines]
    for line, (score, path) in enumerate(shown):
        new = path in step.offered
        ax.barh(
            line,
            np.exp(score),
            height=0.7,
            facecolor="white" if new else SKY,
            edgecolor=BLUE,
            hatch="////" if new else None,
        )
        text = f"{_text(path, words)}  {np.exp(score):.3g}" + ("  new" if new else "")
        ax.text(
            np.exp(score) + 0.02,
            line,
            text,
            va="center",
            fontsize=8,
            family="monospace",
        )
    if len(step.heap) > n_lines:
        ax.set_xlabel(f"… and {len(step.heap) - n_lines} more", fontsize=8)
    ax.set_title("heap, best first", loc="left", fontsize=9)
    ax.set_xlim(0, 1)
    ax.set_ylim(n_lines - 0.4, -0.6)
    ax.set_xticks([])
    ax.set_yticks([])
    ax.spines[["right", "top", "bottom"]].set_visible(False)


def _text(path: RankPath, words: Sequence[Sequence[str]]) -> str:
    return " ".join(words[i][rank] for i, rank in enumerate(path))


def _describe(steps: Sequence[Step], words: Sequence[Sequence[str]]) -> str:
    taken = "; ".join(
        f"{i}. “{_text(step.taken, words)}” ({np.exp(step.score):.3g})"
        for i, step in enumerate(steps, 1)
    )
    last = ", ".join(f"“{_text(path, words)}”" for _, path in steps[-1].heap)
    return (
        f"The first {len(steps)} steps of best-first search. Taken off the heap in "
        f"turn: {taken}. "
        f"Each puts its next sibling and its first child on the heap. At the end there "
        f"wait: {last or 'none'}."
    )
