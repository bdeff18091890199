"""Where a kernel's time goes, from its times with parts left out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from ddtree_numba.viz.style import (
    BLUE,
    GREEN,
    GREY,
    ORANGE,
    SKY,
    blank_axes,
    draw_share,
)

if TYPE_CHECKING:
    import pandas as pd

LOOKS = ((GREY, "--"), (BLUE, ""), (ORANGE, "//"), (SKY, ".."), (GREEN, "\\\\"))
"""Colour and hatch of each part, in the kernel's order."""


def left_out_figure(parts: pd.DataFrame) -> tuple[Figure, str]:
    """Draw what each part of a kernel adds to its time, a bar a shape.

    Parameters
    ----------
    parts : pandas.DataFrame
        As `ddtree_numba.bench.left_out.parts` makes it: microseconds, a line a shape, a
        column each of five parts, in the kernel's order.

    Returns
    -------
    figure, alt_text
        Each bar is the whole kernel, whose time stands at its end; each part has its
        own above it.

    Raises
    ------
    ValueError
        If there is no line, or not a column each of five parts.
    """
    if parts.empty or parts.shape[1] != len(LOOKS):
        raise ValueError(
            f"parts has shape {parts.shape}; expected a line or more, and {len(LOOKS)} "
            "columns"
        )
    ax = blank_axes(9.0, 1.3 + 0.62 * len(parts))
    told = []
    for y, (shape, times) in enumerate(parts.iterrows()):
        left = 0.0
        for (part, us), look in zip(times.items(), LOOKS, strict=True):
            label = str(part) if y == 0 else None
            draw_share(ax, y, left, us, look, height=0.5, label=label)
            # Above the bar: inside it, hatches and narrow parts leave no room.
            ax.text(left + us / 2, y - 0.29, f"{us:.1f}", ha="center", fontsize=9)
            left += us
        ax.text(left, y, f" {left:.1f} µs", va="center", fontweight="bold")
        each = ", ".join(f"{part} {us:.1f}" for part, us in times.items())
        told.append(f"{shape} {left:.1f} µs: {each}")
    ax.set_yticks(range(len(parts)), list(parts.index))
    ax.set_ylim(len(parts) - 0.5, -0.65)
    ax.margins(x=0.1)
    ax.set_xlim(left=0)
    ax.set_xlabel("time of verify_attn (wgmma) in µs, by part; less is better")
    ax.set_ylabel("(B, N, H, S)")
    ax.spines[["right", "top"]].set_visible(False)
    ax.legend(
        loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=len(LOOKS), frameon=False,
        fontsize=9, columnspacing=1.2, handlelength=1.4,
    )  # fmt: skip
    alt_text = (
        "Where the time of verify_attn (wgmma) goes, at shapes (B, N, H, S). "
        + "; ".join(told)
        + "."
    )
    return ax.get_figure(root=True), alt_text  # type: ignore[return-value]
