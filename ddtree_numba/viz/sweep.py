"""Tokens per round against the tree's budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from ddtree_numba.viz.style import BLUE, GREEN, ORANGE, VERMILLION

if TYPE_CHECKING:
    import pandas as pd


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
