"""What speculation brings: how much a round accepts, and when that pays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.figure import Figure

from ddtree_numba.viz.style import BLUE, GREEN, GREY, ORANGE, SKY, VERMILLION

if TYPE_CHECKING:
    import pandas as pd

_BARS = ((SKY, "", "o"), (ORANGE, "///", "s"), (GREEN, "..", "^"))
_LINES = ((BLUE, "o", "-"), (ORANGE, "s", "--"), (VERMILLION, "D", ":"))


def accepted_figure(
    accepted: Mapping[str, Sequence[int]], n_positions: int
) -> tuple[Figure, str]:
    """Draw how many drafts rounds accepted, a bar a number, modes side by side.

    Parameters
    ----------
    accepted : dict of str to sequence of int
        By mode, at most three: accepted drafts of each round, the bonus not counted.
    n_positions : int
        L, the most that can be accepted.

    Returns
    -------
    figure, alt_text
        Bars are shares of the mode's rounds; a marker above them is its mean.
    """
    figure = Figure(figsize=(8, 3.6), layout="constrained", facecolor="white")
    ax = figure.subplots()
    width = 0.8 / len(accepted)
    alt_texts = []
    for i, (name, lengths) in enumerate(accepted.items()):
        colour, hatch, marker = _BARS[i]
        share = np.bincount(lengths, minlength=n_positions + 1) / len(lengths)
        mean = float(np.mean(lengths))
        at = np.arange(n_positions + 1) + (i - (len(accepted) - 1) / 2) * width
        style: dict[str, Any] = {"facecolor": colour, "edgecolor": "black"}
        ax.bar(at, share, width, hatch=hatch, linewidth=0.6, label=name, **style)
        # Above the bars, at the mean.
        where: dict[str, Any] = {
            "xycoords": ("data", "axes fraction"),
            "va": "center",
            "fontsize": 8,
        }
        high = 1.06 + 0.08 * (len(accepted) - 1 - i)
        ax.plot(
            mean, high, marker, c=colour, mec="black", ms=8, clip_on=False,
            transform=ax.get_xaxis_transform(),
        )  # fmt: skip
        ax.annotate(f"   {name}: mean {mean:.2f}", (mean, high), **where)
        alt_texts.append(
            f"{name}: {len(lengths)} rounds accept {mean:.2f} drafts on average; "
            f"{share[0]:.0%} accept none, {share[-1]:.0%} all {n_positions}."
        )
    ax.yaxis.set_major_formatter(lambda share, _: f"{share:.0%}")
    ax.set_xticks(range(n_positions + 1))
    ax.set_xlabel("accepted drafts in a round")
    ax.set_ylabel("share of rounds")
    ax.spines[["right", "top"]].set_visible(False)
    ax.legend(frameon=False, loc="upper right")
    return figure, "Histogram of accepted drafts. " + " ".join(alt_texts)


def speedup_figure(
    frame: pd.DataFrame, row_costs: Sequence[float], draft_cost: float
) -> tuple[Figure, str]:
    """Draw the speed-up over plain decoding against the budget, for costs of a row.

    Parameters
    ----------
    frame : pandas.DataFrame
        Rows of `ddtree_numba.sweep.sweep` at one temperature; trees are used.
    row_costs : sequence of float
        r, at most three: what a further row costs, in plain steps.
    draft_cost : float
        d, what drafting costs, in plain steps.

    Returns
    -------
    figure, alt_text
        ``tokens per round / (1 + d + r M)``; the best budget of each line is starred.
    """
    trees = frame[frame["mode"] == "tree"].sort_values("n_draft_nodes")
    budget = trees["n_draft_nodes"].to_numpy()
    tokens = trees["tokens_per_round"].to_numpy()
    figure = Figure(figsize=(8, 3.8), layout="constrained", facecolor="white")
    ax = figure.subplots()
    alt_texts = []
    for (colour, marker, line), cost in zip(_LINES, row_costs, strict=False):
        speedup = tokens / (1 + draft_cost + cost * budget)
        best = int(speedup.argmax())
        ax.plot(
            budget, speedup, c=colour, marker=marker, ls=line, label=f"r = {cost:g}"
        )
        ax.plot(budget[best], speedup[best], "*", c=colour, mec="black", ms=17)
        alt_texts.append(
            f"With r = {cost:g} the best budget is {budget[best]}, "
            f"{speedup[best]:.1f} times plain decoding."
        )
    ax.axhline(1, color=GREY, linewidth=1, linestyle=(0, (6, 3)))
    ax.annotate(
        " plain decoding", (1, 1), xycoords=("axes fraction", "data"), va="center"
    )
    ax.set_xscale("log", base=2)
    ax.set_xticks(budget)
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_ylim(bottom=0)
    ax.set_xlabel("n_draft_nodes")
    ax.set_ylabel("times plain decoding")
    ax.grid(color="#E5E5E5")
    ax.spines[["right", "top"]].set_visible(False)
    ax.legend(
        title="cost of a further row", frameon=False, loc="upper left",
        bbox_to_anchor=(1.0, 1.0),
    )  # fmt: skip
    return figure, (
        f"Speed-up over plain decoding against the budget, drafting at {draft_cost:g} "
        "of a step. " + " ".join(alt_texts)
    )
