"""A generation round by round: what each committed, and where its time went."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from ddtree_numba.tree import quoted
from ddtree_numba.viz.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    VERMILLION,
    Decode,
    blank_axes,
    draw_share,
)

if TYPE_CHECKING:
    from ddtree_numba.decode import Generation

LOOKS = {  # in the order of a round; on a GPU it is timed as a whole
    "draft": (SKY, ""),
    "topk": (GREEN, ".."),
    "tree_build": (ORANGE, "//"),
    "verify": (BLUE, ""),
    "choose": (VERMILLION, "xx"),
    "accept": (GREY, "\\\\"),
    "compact": ("#CC79A7", "++"),
    "round": (BLUE, "//"),
}
"""Colour and hatch of each stage."""

ROOM = 0.07
"""Of the longest bar: what a label needs."""


def timeline_figure(
    run: Generation, decode: Decode | None = None, *, b: int = 0, most: int = 24
) -> tuple[Figure, str]:
    """Draw the first rounds of a run as columns of tokens, plain decoding below.

    Parameters
    ----------
    run : Generation
        With drafts (mode "tree" or "chain").
    decode : callable, optional
        Text of a sequence of token ids; the ids themselves if omitted.
    b : int
        Request.
    most : int
        Rounds that are drawn.

    Returns
    -------
    figure, alt_text
        Upwards from the line, each column holds what one round committed: accepted
        drafts, and on top its bonus, framed. Below the line is what plain decoding has
        after as many passes of the target: one token each, the same text.
    """
    rounds = [trace.committed[b] for trace in run.rounds if trace.committed[b]][:most]
    text = [token for committed in rounds for token in committed]
    highest = max(map(len, rounds), default=1)
    ax = blank_axes(min(10.0, 1.6 + 0.5 * len(rounds)), 1.9 + 0.26 * highest)
    show = quoted(decode) if decode else lambda ids: str(ids[0])
    for column, (committed, trace) in enumerate(zip(rounds, run.rounds, strict=False)):
        drafts = len(trace.path(b)) - 1
        for k, token in enumerate(committed):
            bonus = k == drafts
            _token(ax, column, 0.2 + k, show([token]), GREEN if bonus else ORANGE)
        _token(ax, column, -1.6, show([text[column]]), SKY)
    ax.axhline(-0.1, color="black", linewidth=1)
    ax.set_xlim(-0.6, len(rounds) - 0.4)
    ax.set_ylim(-1.8, highest + 0.5)
    ax.set_xticks(range(len(rounds)), [str(n + 1) for n in range(len(rounds))])
    ax.set_xlabel("round = one pass of the target")
    ticks = [n for n in (1, 4, 8, 12, 16) if n <= highest]
    ax.set_yticks([-1.1, *(n - 0.3 for n in ticks)], ["plain", *map(str, ticks)])
    ax.set_ylabel("tokens of a round")
    ax.tick_params(length=0)
    ax.spines[["top", "right", "bottom"]].set_visible(False)
    ax.legend(
        handles=[
            Patch(facecolor=ORANGE, edgecolor="black", label="accepted draft"),
            Patch(facecolor=GREEN, edgecolor="black", linewidth=2, label="bonus"),
            Patch(facecolor=SKY, edgecolor="black", label="plain decoding"),
        ],
        loc="lower center",
        bbox_to_anchor=(0.5, 1.0),
        ncols=3,
        frameon=False,
    )
    alt_text = (
        f"{len(rounds)} rounds of mode {run.mode}, one column each, committing "
        f"{', '.join(str(len(tokens)) for tokens in rounds)} tokens: {len(text)} in "
        f"all. Below, plain decoding has {len(rounds)} tokens after as many passes."
    )
    return ax.get_figure(root=True), alt_text  # type: ignore[return-value]


def _token(ax: Axes, column: int, bottom: float, text: str, colour: str) -> None:
    ax.bar(
        column,
        0.9,
        0.86,
        bottom=bottom,
        facecolor=colour,
        edgecolor="black",
        linewidth=1.8 if colour == GREEN else 0.6,
    )
    ax.text(
        column,
        bottom + 0.43,
        text.replace("$", r"\$"),
        ha="center",
        va="center",
        fontsize=9,
        fontweight="bold" if colour == GREEN else "normal",
        color="white" if colour == GREEN else "black",
        family="monospace",
    )


def stages_figure(runs: dict[str, Generation]) -> tuple[Figure, str]:
    """Draw where the time of a round went, a bar a run.

    Parameters
    ----------
    runs : dict of str to Generation
        Named runs.

    Returns
    -------
    figure, alt_text
        Each bar is the mean wall time of a round, cut by stage. A share is written on
        it where there is room.
    """
    ax = blank_axes(8.0, 1.5 + 0.55 * len(runs))
    told = []
    rounds = {
        name: {s: t / len(run.rounds) * 1e3 for s, t in run.stage_seconds.items()}
        for name, run in runs.items()
    }
    longest = max(sum(times.values()) for times in rounds.values())
    for y, (name, times) in enumerate(rounds.items()):
        total, left = sum(times.values()), 0.0
        for stage in (s for s in LOOKS if s in times):
            width, label = times[stage], stage if y == 0 else None
            draw_share(ax, y, left, width, LOOKS[stage], height=0.6, label=label)
            if width > ROOM * longest:
                _share(ax, left + width / 2, y, width / total)
            left += width
        main = max(times, key=lambda s: times[s])
        told.append(
            f"{name} {total:.3g} ms, most of it {main} ({times[main] / total:.0%})"
        )
    ax.set_yticks(range(len(runs)), list(runs))
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds a round")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=7, frameon=False,
        fontsize=9, columnspacing=1.0, handlelength=1.4,
    )  # fmt: skip
    alt_text = "Time of a round by stage: " + "; ".join(told) + "."
    return ax.get_figure(root=True), alt_text  # type: ignore[return-value]


def _share(ax: Axes, x: float, y: float, share: float) -> None:
    ax.text(
        x,
        y,
        f"{share:.0%}",
        ha="center",
        va="center",
        fontsize=9,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.2},
    )


def gain_figure(
    expected: Sequence[float], measured: Sequence[float], n_draft_nodes: Sequence[int]
) -> tuple[Figure, str]:
    """Draw tokens a round, as predicted from the trees and as measured, by budget.

    Parameters
    ----------
    expected, measured : sequence of float
        Tokens a round (accepted drafts and bonus).
    n_draft_nodes : sequence of int
        Budgets, ascending.

    Returns
    -------
    figure, alt_text
    """
    ax = blank_axes(5.5, 3.2)
    x = np.arange(len(n_draft_nodes))
    ax.plot(x, measured, "o-", color=BLUE, label="measured")
    ax.plot(x, expected, "D--", color=ORANGE, label="1 + Σp of the trees")
    ax.set_xticks(x, list(map(str, n_draft_nodes)))
    ax.set_xlabel("n_draft_nodes")
    ax.set_ylabel("tokens a round")
    ax.set_ylim(0, max([*expected, *measured]) * 1.15)
    ax.grid(axis="y", color="#DDDDDD")
    ax.spines[["top", "right"]].set_visible(False)
    ax.legend(frameon=False, loc="lower right")
    pairs = zip(n_draft_nodes, expected, measured, strict=True)
    told = "; ".join(f"{m}: {e:.2f} and {t:.2f}" for m, e, t in pairs)
    alt_text = f"Tokens a round by budget, expected and measured: {told}."
    return ax.get_figure(root=True), alt_text  # type: ignore[return-value]
