"""Colours, sizes and labels that every picture shares."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import AbstractPathEffect, withStroke

from ddtree_numba.tree import DraftTree, quoted

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


def blank_axes(width: float, height: float) -> Axes:
    """Axes of a new white figure, its size in inches."""
    figure = Figure(figsize=(width, height), layout="constrained", facecolor="white")
    return figure.subplots()


def draw_share(
    ax: Axes,
    y: float,
    left: float,
    width: float,
    look: tuple[str, str],
    *,
    height: float,
    label: str | None,
) -> None:
    """Draw a share of a horizontal bar; look : its colour and hatch."""
    colour, hatch = look
    ax.barh(
        y,
        width,
        left=left,
        height=height,
        facecolor=colour,
        hatch=hatch,
        edgecolor="black",
        linewidth=0.6,
        label=label,
    )


def halo() -> list[AbstractPathEffect]:
    """Keeps letters readable where lines or nodes are dense."""
    return [withStroke(linewidth=2.5, foreground="white")]


def line_height(n: int) -> float:
    """Inches a line: room for a label while all nodes have one."""
    return 0.26 if n <= MOST_LABELS else 0.03


def token_text(host: DraftTree, b: int, row: int, decode: Decode | None) -> str:
    """A row's token in up to eight letters, or its id."""
    token = int(host.token_ids[b, row])
    if decode is None:
        return str(token)
    text = quoted(decode)([token])
    # matplotlib reads text between dollar signs as mathematics.
    return (text if len(text) <= 8 else text[:7] + "…").replace("$", r"\$")
