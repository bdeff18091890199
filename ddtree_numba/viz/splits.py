"""Time against the number of splits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from matplotlib.figure import Figure

from ddtree_numba.viz.style import BLUE, GREEN, ORANGE, blank_axes

if TYPE_CHECKING:
    import pandas as pd

LOOKS = ((BLUE, "o"), (ORANGE, "s"), (GREEN, "^"))


def splits_figure(frame: pd.DataFrame) -> tuple[Figure, str]:
    """Draw the times of `verify_attn` ("mma") by the number of splits, a line a shape.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `ddtree_numba.bench.bench` makes it, with rows of the stage "splits".

    Returns
    -------
    figure, alt_text
        The best of each shape's measured numbers is ringed.

    Raises
    ------
    ValueError
        If there are no such rows.
    """
    rows = frame[(frame["stage"] == "splits") & (frame["us"] > 0)]
    if rows.empty:
        raise ValueError("frame has no timed row of stage splits")
    ax = blank_axes(8.0, 4.0)
    told = []
    for (shape, part), (colour, marker) in zip(
        rows.groupby("shape", sort=False), LOOKS * len(rows), strict=False
    ):
        splits = [int(version.split()[1]) for version in part["version"]]
        times = list(part["us"])
        name = str(shape).removesuffix(" bf16")
        ax.plot(splits, times, color=colour, marker=marker, label=name)
        best = min(range(len(times)), key=times.__getitem__)
        ax.plot(splits[best], times[best], "o", color=colour, ms=16, mfc="none", mew=2)
        ax.annotate(
            f"{splits[best]}",
            (splits[best], times[best]),
            xytext=(0, -20),
            textcoords="offset points",
            ha="center",
        )
        told.append(
            f"{name}: {times[0]:.0f} µs with {splits[0]}, least with {splits[best]} "
            f"({times[best]:.0f} µs), {times[-1]:.0f} µs with {splits[-1]}"
        )
    ax.margins(y=0.18)
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ticks = [1, 2, 4, 8, 16, 32, 64, 128]
    ax.set_xticks(ticks, [str(tick) for tick in ticks])
    ax.set_xlabel("splits of the mma version (the best of these ringed)")
    ax.set_ylabel("µs, the merge included; less is better")
    ax.grid(color="#E5E5E5")
    ax.spines[["right", "top"]].set_visible(False)
    ax.legend(title="(B, N, H, S)", frameon=False)
    alt_text = "Time by the number of splits. " + "; ".join(told) + "."
    return ax.get_figure(root=True), alt_text  # type: ignore[return-value]
