"""What `ddtree bench` measured: under the card's roofs, and version by version."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddtree_numba.viz.style import (
    BLUE,
    GREEN,
    GREY,
    SKY,
    VERMILLION,
    blank_axes,
    halo,
)

if TYPE_CHECKING:
    import pandas as pd

OWN = {
    "simple": (GREY, "x"),
    "split": (SKY, "v"),
    "mma": (GREEN, "s"),
    "wgmma": (BLUE, "o"),
    "wgmma, exact max": (BLUE, "d"),
}
TREES = {
    "auto": ("ddtree_numba", BLUE, "o"),
    "torch + heapq": ("torch + heapq", VERMILLION, "P"),
}
OTHERS = "P^<>*h"  # white markers with a vermillion edge


def roofline_figure(frame: pd.DataFrame) -> tuple[Figure, str]:
    """Draw `verify_attn` under the roofs that were measured in the same run.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `ddtree_numba.bench.bench` makes it.

    Returns
    -------
    figure, alt_text
        Right of the ridge a shape is bound by arithmetic, left of it by memory. The
        distance up to the roof is what a version leaves on the table.

    Raises
    ------
    ValueError
        If no version of `verify_attn` was timed, or one twice at a shape.
    """
    ax = blank_axes(9.5, 6)
    ax.set_xscale("log")
    ax.set_yscale("log")
    roofs = _ceilings(frame)
    rows = _attention_rows(frame)
    intensity = 1e3 * rows["tflops"] / rows["gbs"]
    low, high = intensity.min() / 1.6, intensity.max() * 1.6
    alt_texts = []
    if "matmul" in roofs and "copy" in roofs:
        flat, slope = roofs["matmul"], roofs["copy"] / 1e3
        ridge = flat / slope
        bends = [min(low, ridge / 2), ridge, max(high, ridge * 2)]
        ax.plot(bends, [bends[0] * slope, flat, flat], color="black", linewidth=1.5)
        ax.annotate(
            f"bf16 product of 8192 × 8192: {flat:.0f} TFLOP/s",
            (bends[1], flat),
            xytext=(0, 4),
            textcoords="offset points",
            va="bottom",
        )
        middle = (bends[0] * ridge) ** 0.5
        ax.annotate(
            f"copy: {slope:.2f} TB/s",
            (middle, middle * slope),
            xytext=(0, 2),
            textcoords="offset points",
            ha="right",
            va="bottom",
            path_effects=halo(),
        )
        alt_texts.append(
            f"Roofs: {slope:.2f} TB/s of a copy, {flat:.0f} TFLOP/s of a bf16 product."
        )
    for version, (style, part) in _by_version(rows):
        ax.plot(intensity[part.index], part["tflops"], label=version, **style)
    for _, part in rows.groupby("shape", sort=False):
        best = _fastest(part)
        # NaN where no ceiling was measured.
        share = f", {best['percent']:.0f} % of its roof" if best["percent"] > 0 else ""
        alt_texts.append(
            f"{best['shape'].removesuffix(' bf16')}: {best['version']} reaches "
            f"{best['tflops']:.0f} TFLOP/s{share}."
        )
    _name_intensities(ax, intensity, rows["shape"])
    ax.set_xlabel(
        "arithmetic intensity, FLOP a byte (inputs read once, outputs written)"
    )
    ax.set_ylabel("TFLOP/s, burst; more is better")
    ax.set_title("verify_attn (B, N, H, S), bf16", loc="left")
    _finish(ax)
    return ax.get_figure(root=True), " ".join(alt_texts)  # type: ignore[return-value]


def _name_intensities(ax: Axes, intensity: pd.Series, shapes: pd.Series) -> None:
    """Write shapes above the roof; those of nearly one intensity share a place."""
    places: dict[float, list[str]] = {}
    of_shape = dict(zip(shapes, intensity, strict=True))
    for shape, x in sorted(of_shape.items(), key=lambda item: item[1]):
        near = [at for at in places if x < 1.08 * at]  # a line of text is as wide
        places.setdefault(near[0] if near else x, []).append(shape)
    top = ax.get_ylim()[1]
    for x, names in places.items():
        text = "\n".join(name.removesuffix(" bf16") for name in names)
        ax.text(x, 1.5 * top, text, rotation=90, ha="center", va="bottom", fontsize=8)
    ax.set_ylim(top=20 * top)


def ladder_figure(frame: pd.DataFrame) -> tuple[Figure, str]:
    """Draw every version of `verify_attn` on every shape, and logits → tree.

    Parameters
    ----------
    frame : pandas.DataFrame
        As `ddtree_numba.bench.bench` makes it.

    Returns
    -------
    figure, alt_text
        A marker is the burst rate, the line from it ends at the sustained one. The
        rates of a bf16 product in the same run are upright lines: dashed the burst,
        dotted the sustained one.

    Raises
    ------
    ValueError
        If no version of `verify_attn` was timed, or one twice at a shape.
    """
    figure = Figure(figsize=(12.5, 5.2), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, width_ratios=[1.6, 1])
    alt_texts = [_draw_ladder(left, frame), _draw_tree_times(right, frame)]
    return figure, " ".join(text for text in alt_texts if text)


def _draw_ladder(ax: Axes, frame: pd.DataFrame) -> str:
    rows = _attention_rows(frame)
    loaded = _attention_rows(frame, "sustained").set_index(["version", "shape"])
    shapes = list(dict.fromkeys(rows["shape"]))
    line = {shape: -y for y, shape in enumerate(shapes)}
    for version, (style, part) in _by_version(rows):
        for row in part.itertuples():
            key = (version, row.shape)
            if key in loaded.index:
                ends = [row.tflops, loaded.loc[key, "tflops"]]
                edge = style["markeredgecolor"]
                ax.plot(ends, [line[row.shape]] * 2, color=edge, linewidth=1)
        ax.plot(part["tflops"], part["shape"].map(line), label=version, **style)
    # Named above the first shape and below the last, where no marker is.
    products = _draw_product(ax, frame, "burst", "--", 0.65)
    products += _draw_product(ax, frame, "sustained", ":", 0.4 - len(shapes))
    ax.set_yticks(list(line.values()), [s.removesuffix(" bf16") for s in shapes])
    ax.set_ylim(0.05 - len(shapes), 1.0)
    ax.set_xlim(left=0)
    ax.set_xlabel("TFLOP/s, more is better: marker burst, line's end sustained")
    ax.set_title("verify_attn (B, N, H, S), bf16", loc="left")
    _finish(ax)
    best = _fastest(rows)
    return (
        f"{len(shapes)} shapes of verify_attn; the fastest is {best['version']} at "
        f"{best['shape']} with {best['tflops']:.0f} TFLOP/s.{products}"
    )


def _draw_product(
    ax: Axes, frame: pd.DataFrame, regime: str, dashes: str, y: float
) -> str:
    """Draw the rate of a bf16 product, named at height y, if it was measured."""
    roofs = _ceilings(frame, regime)
    if "matmul" not in roofs:
        return ""
    ax.axvline(roofs["matmul"], color="black", linestyle=dashes, linewidth=1)
    ax.annotate(
        f"bf16 product,\n{regime}",
        (roofs["matmul"], y),
        xytext=(-3, 0),
        textcoords="offset points",
        ha="right",
        fontsize=8,
        va="center",
    )
    return f" A bf16 product has {roofs['matmul']:.0f} TFLOP/s, {regime}."


def _draw_tree_times(ax: Axes, frame: pd.DataFrame) -> str:
    rows = _timed(frame, "logits_to_tree", "burst", "warm")
    rows = rows[
        rows["shape"].str.startswith("(1,") & rows["shape"].str.contains("bf16")
    ]
    ax.set_title("logits (15 × 163840, bf16) → tree, one request", loc="left")
    if rows.empty:
        ax.set_axis_off()
        return ""
    budget = rows["shape"].str.extract(r"M=(\d+)", expand=False).astype(int)
    texts = []
    for version, (label, colour, marker) in TREES.items():
        part = rows[rows["version"] == version]
        if part.empty:
            continue
        at = budget[part.index]
        ax.plot(at, part["us"], color=colour, marker=marker, label=label)
        spread = [part["us"] - part["us_low"], part["us_high"] - part["us"]]
        ax.errorbar(at, part["us"], spread, fmt="none", ecolor=colour, capsize=3)
        ends = part.loc[[at.idxmin(), at.idxmax()], "us"]
        texts.append(
            f"{label} takes {ends.iloc[0]:.0f} µs from logits to a tree of "
            f"{at.min()} nodes and {ends.iloc[1]:.0f} µs to one of {at.max()}."
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log")
    ax.set_xticks(sorted(set(budget)))
    ax.xaxis.set_major_formatter("{x:g}")
    ax.minorticks_off()
    ax.set_xlabel("n_draft_nodes")
    ax.set_ylabel("µs, less is better")
    _finish(ax)
    return " ".join(texts)


def _timed(frame: pd.DataFrame, stage: str, regime: str, memory: str) -> pd.DataFrame:
    from ddtree_numba.bench.rows import of_one_run  # pictures else need no numba

    wanted = {"stage": stage, "regime": regime, "status": "ok", "memory": memory}
    keep = frame["us"] > 0
    for column, value in wanted.items():
        keep &= frame[column] == value
    return of_one_run(frame[keep])


def _attention_rows(frame: pd.DataFrame, regime: str = "burst") -> pd.DataFrame:
    rows = _timed(frame, "verify_attn", regime, "warm")
    if rows.empty and regime == "burst":
        raise ValueError("frame has no timed row of verify_attn")
    return rows


def _fastest(rows: pd.DataFrame) -> dict[Any, Any]:
    return max(rows.to_dict("records"), key=lambda row: row["tflops"])


def _ceilings(frame: pd.DataFrame, regime: str = "burst") -> dict[str, float]:
    """Ceilings as measured in a regime: TFLOP/s of "matmul", GB/s of "copy"."""
    rows = frame[(frame["stage"] == "ceiling") & (frame["regime"] == regime)]
    units = {"matmul": "tflops", "copy": "gbs"}
    return {
        row["version"]: row[units[row["version"]]]
        for _, row in rows.iterrows()
        if row["status"] == "ok"
    }


def _by_version(rows: pd.DataFrame) -> list[tuple[str, tuple[dict[str, Any], Any]]]:
    """Each version's marker and rows: ours by their names, then others'."""
    present = list(dict.fromkeys(rows["version"]))
    others = iter(OTHERS * len(present))
    found = []
    for version in present:
        colour, marker = OWN.get(version) or (VERMILLION, next(others))
        style = {
            "color": colour,
            "marker": marker,
            "linestyle": "none",
            "markersize": 8,
            "markeredgecolor": colour,
            "markerfacecolor": colour if version in OWN else "white",
        }
        found.append((version, (style, rows[rows["version"] == version])))
    return found


def _finish(ax: Axes) -> None:
    ax.grid(color="#E5E5E5")
    ax.set_axisbelow(True)
    ax.spines[["right", "top"]].set_visible(False)
    ax.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.13),
        ncols=4,
        frameon=False,
        fontsize=8,
    )
