"""The online softmax: a running maximum, and old sums that shrink when it moves."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree_numba.viz.style import BLUE, ORANGE, SKY


def online_figure(scores: np.ndarray, tile: int) -> tuple[Figure, str]:
    """Draw how a row's total grows and shrinks, tile by tile.

    Parameters
    ----------
    scores : float [T]
        One row's scores in base 2; -inf is a key that it does not see.
    tile : int
        Keys that come together.

    Returns
    -------
    figure, alt_text
        Above, the scores and the running maximum. Below, after each tile, the total
        ``sum 2^(s - top)``: what was there before, scaled to the new maximum, and what
        the tile adds.
    """
    steps = _steps(np.asarray(scores, np.float64), tile)
    figure = Figure(figsize=(8.2, 4.6), layout="constrained", facecolor="white")
    upper, lower = figure.subplots(2, 1, sharex=True)
    _draw_scores(upper, scores, steps, tile)
    centres = (np.arange(len(steps)) + 0.5) * tile - 0.5
    style: dict[str, Any] = {"width": 0.55 * tile, "edgecolor": "black"}
    old = np.array([step["old"] for step in steps])
    fresh = np.array([step["fresh"] for step in steps])
    lower.bar(centres, old, color=SKY, hatch="//", label="before, scaled", **style)
    lower.bar(centres, fresh, bottom=old, color=ORANGE, label="this tile's", **style)
    shown = list(zip(centres, steps, old + fresh, strict=True))
    for x, step, height in shown[1:]:
        lower.annotate(
            f"old × {step['shrink']:.3g}",
            (x, height),
            xytext=(0, 3),
            textcoords="offset points",
            ha="center",
            fontsize=9,
        )
    lower.set_ylim(0, 1.15 * max(*(old + fresh), 1.0))
    lower.set_ylabel("total")
    lower.set_xlabel("key")
    lower.set_xlim(-0.5, len(scores) - 0.5)
    for ax in (upper, lower):
        ax.legend(
            frameon=False,
            fontsize=9,
            ncols=2,
            loc="lower right",
            bbox_to_anchor=(1.0, 0.97),
        )
        ax.spines[["right", "top"]].set_visible(False)
        for end in range(tile, len(scores), tile):
            ax.axvline(end - 0.5, color="#BBBBBB", linestyle=":", zorder=0)
    shrinks = ", ".join(f"{step['shrink']:.3g}" for step in steps)
    tops = ", ".join(f"{step['top']:.3g}" for step in steps)
    alt_text = (
        f"{len(scores)} scores in {len(steps)} tiles of {tile}. After each tile the "
        f"running maximum is {tops}; the old total is scaled by {shrinks}, and then "
        f"the tile's own weights are added."
    )
    return figure, alt_text


def _steps(scores: np.ndarray, tile: int) -> list[dict[str, float]]:
    """Maximum, shrink, and both parts of the total after every tile."""
    steps: list[dict[str, float]] = []
    top, total = -np.inf, 0.0
    for start in range(0, len(scores), tile):
        part = scores[start : start + tile]
        part = part[part > -np.inf]
        highest = max(top, part.max(initial=-np.inf))
        shrink = 0.0 if top == -np.inf else float(np.exp2(top - highest))
        old, fresh = total * shrink, float(np.exp2(part - highest).sum())
        steps.append({"top": highest, "shrink": shrink, "old": old, "fresh": fresh})
        top, total = highest, old + fresh
    return steps


def _draw_scores(
    ax: Axes, scores: np.ndarray, steps: list[dict[str, float]], tile: int
) -> None:
    ax.scatter(range(len(scores)), scores, s=18, color="black", label="score s")
    edges = np.minimum(np.arange(len(steps) + 1) * tile, len(scores)) - 0.5
    tops = [step["top"] for step in steps]
    ax.stairs(tops, edges, color=BLUE, linewidth=2.2, label="top", baseline=None)
    ax.set_ylabel("score, base 2")
