"""Pictures, computed from arrays and traces: trees, masks, the sweep, what lanes do.

Every function returns ``(figure, alt_text)``. Colours are Okabe and Ito's, and never
the only cue: the accepted path is also thick and square, other lines are dashed, cells
dotted. Figures are built without pyplot, so they need no display and leave no state.
"""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from ddtree_numba.tree import DraftTree, quoted

if TYPE_CHECKING:
    import pandas as pd

    from ddtree_numba.emulator import Report

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
    ax.set_ylim(max(y.max() + 0.8, 8), -max(1.4, 0.012 * y.max()))
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
        tall = n >= 12  # a few rows have no room for an upright line
        between = " " if tall else "\n"
        ax.text(
            -0.5 - band / 2,
            (n - 1) / 2,
            f"prefix:{between}{prefix_len} rows,{between}seen by all",
            rotation=90 if tall else 0,
            fontsize=None if tall else 6,
            ha="center",
            va="center",
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.5},
        )
    _mark_cells(ax, tail, path)
    _label_rows(ax, host, b, n, decode, path)
    ax.set_xlim(-0.5 - band, n - 0.5)
    ax.set_xlabel("tree row attended to\n(cache row = prefix + row)")
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


# ---------------------------------------------------------------------- what lanes do

KIND_STYLES: dict[str, dict[str, Any]] = {
    "read": {"marker": "o", "facecolors": "white", "edgecolors": BLUE},
    "write": {"marker": "s", "facecolors": ORANGE, "edgecolors": "black"},
    "atomic": {"marker": "D", "facecolors": GREEN, "edgecolors": "black"},
}
RACE_STYLE: dict[str, Any] = {
    "marker": "o",
    "facecolors": "none",
    "edgecolors": VERMILLION,
    "linewidths": 1.8,
    "label": "race",
}

MOST_STEPS = 110
"""Columns up to which `lanes_figure` draws every access."""

MOST_ROWS, MOST_COLUMNS = 48, 64
"""Elements of an array that `access_figure` shows."""

MOST_PHASES = 12
"""Phases that `access_figure` shows."""

Block = tuple[int, int, int]


def lanes_figure(report: Report, block: Block | None = None) -> tuple[Figure, str]:
    """Draw what every lane of a block reads and writes, from barrier to barrier.

    Parameters
    ----------
    report : ddtree_numba.emulator.Report
        Of a traced run.
    block : tuple of int, optional
        x, y, z of the block; the first that ran if omitted.

    Returns
    -------
    figure, alt_text
        A row a lane, a column the n-th access of one kind and source line to an array
        in its phase. Races are ringed. With more than `MOST_STEPS` columns accesses are
        counted instead.
    """
    block, table = _of_block(_with_races(report), block)
    n_lanes = int(np.prod(report.block))
    n_phases = int(table["phase"].max()) + 1 if len(table) else 0
    x, ends = _columns(table, n_phases)
    if n_phases == 0 or ends[-1] > MOST_STEPS:
        figure = _count_accesses(table, n_lanes, n_phases)
    else:
        barriers = report.barriers[report.barriers["block"] == block]
        figure = _draw_accesses(table, x, ends, barriers, n_lanes)
    figure.suptitle(f"{report.kernel}, block {block}", fontsize=11)
    kinds = table["kind"].value_counts()
    found = ", ".join(f"{n} {kind}s" for kind, n in kinds.items()) or "no access"
    alt_text = (
        f"{n_lanes} lanes of block {block} of {report.kernel}, {n_phases} phases "
        f"between barriers: {found}; {table['race'].sum() or 'none'} of them race."
    )
    return figure, alt_text


def _of_block(table: pd.DataFrame, block: Block | None) -> tuple[Block, pd.DataFrame]:
    if block is None:
        block = table["block"].iloc[0] if len(table) else (0, 0, 0)
    return block, table[table["block"] == block].reset_index(drop=True)


def _with_races(report: Report) -> pd.DataFrame:
    """The accesses and which of them take part in a race, as a column `race`."""
    table = report.accesses.assign(race=False)
    for race in report.races:
        names, owner = race.array.split("/"), "lane"
        place = ["block", "phase"]
        if race.between_blocks:
            place, owner = [], "block"
        if len(names) == 1:
            place.append("index")  # else one memory has two names and other indices
        concerned = table[table["array"].isin(names) & table["line"].isin(race.linenos)]
        for _, rows in concerned.groupby(place or "space"):
            kinds = set(rows["kind"])
            if rows[owner].nunique() > 1 and kinds not in ({"read"}, {"atomic"}):
                table.loc[rows.index, "race"] = True
    return table


def _columns(table: pd.DataFrame, n_phases: int) -> tuple[np.ndarray, np.ndarray]:
    """Where every access stands, and where the phases end."""
    what = ["phase", "line", "array", "kind", "nth"]
    step = table.groupby(["phase", "lane"]).cumcount()
    nth = table.groupby(["phase", "lane", "line", "array", "kind"]).cumcount()
    keys = table[what[:-1]].assign(nth=nth, step=step)
    # Lanes that skip an access leave a gap: the others say where its column is.
    columns = keys.groupby(what)["step"].max().reset_index()
    columns = columns.sort_values(["phase", "step", "line", "array", "kind"])
    columns["x"] = np.arange(len(columns)) + columns["phase"] + 1
    x = keys[what].merge(columns, on=what, how="left")["x"].to_numpy()
    upto = np.searchsorted(columns["phase"], range(n_phases), side="right")
    return x, upto + np.arange(1, n_phases + 1)


def _draw_accesses(
    table: pd.DataFrame,
    x: np.ndarray,
    ends: np.ndarray,
    barriers: pd.DataFrame,
    n_lanes: int,
) -> Figure:
    height = _lane_height(n_lanes)
    size = (130 * height) ** 2 / 17
    ax = _axes(float(np.clip(2.6 + 0.2 * ends[-1], 5.0, 24.0)), 2 + n_lanes * height)
    y, racing = table["lane"].to_numpy(), table["race"].to_numpy()
    for kind, style in KIND_STYLES.items():
        rows = (table["kind"] == kind).to_numpy()
        if rows.any():
            style = {"linewidths": 1.0 if n_lanes <= 64 else 0.4, **style}
            ax.scatter(x[rows], y[rows], s=size, label=kind, zorder=3, **style)
    if racing.any():
        ax.scatter(x[racing], y[racing], s=3.4 * size, zorder=4, **RACE_STYLE)
    for at, n in zip(*np.unique(x, return_index=True), strict=True):
        ax.annotate(
            table["array"].iloc[n],
            (at, 1),
            xycoords=("data", "axes fraction"),
            xytext=(0, 3),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="bottom",
            fontsize=8,
            family="monospace",
        )
    for phase in barriers["phase"].to_numpy():
        if phase < len(ends):
            ax.axvline(ends[phase], color="black", linestyle="--", linewidth=1.4)
    begins = np.append(0, ends[:-1])
    ax.set_xticks((begins + ends) / 2, [str(n) for n in range(len(ends))])
    ax.tick_params(axis="x", length=0)
    lines = ", ".join(str(n) for n in sorted(set(barriers["line"])))
    ax.set_xlabel("phase" + (f" (dashed: barriers, line {lines})" if lines else ""))
    _finish_lanes(ax, n_lanes)
    ax.set_xlim(0, ends[-1])
    ax.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0), frameon=False)
    return ax.get_figure(root=True)  # type: ignore[return-value]


def _count_accesses(table: pd.DataFrame, n_lanes: int, n_phases: int) -> Figure:
    """Lanes × phases, the number of reads and of writes as shades and figures."""
    width = float(np.clip(3.0 + 2 * 0.42 * n_phases, 6.0, 24.0))
    figure = Figure(
        figsize=(width, 2 + n_lanes * _lane_height(n_lanes)),
        layout="constrained",
        facecolor="white",
    )
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, title, writes in (
        (left, "reads", False),
        (right, "writes and atomics", True),
    ):
        rows = table[(table["kind"] != "read") == writes]
        counts = np.zeros((n_lanes, max(1, n_phases)), int)
        np.add.at(counts, (rows["lane"].to_numpy(), rows["phase"].to_numpy()), 1)
        image = ax.imshow(counts, cmap="cividis", aspect="auto", vmin=0)
        if n_lanes <= 64 and n_phases <= 40:
            for (lane, phase), n in np.ndenumerate(counts):
                colour = "black" if n > 0.6 * counts.max() else "white"
                ax.text(phase, lane, n, ha="center", va="center", fontsize=7, c=colour)
        figure.colorbar(image, ax=ax, label="accesses", ticks=MaxNLocator(integer=True))
        ax.set_title(title)
        ax.set_xlabel("phase")
        ax.xaxis.get_major_locator().set_params(integer=True)
        _finish_lanes(ax, n_lanes)
    right.set_ylabel("")
    return figure


def _lane_height(n_lanes: int) -> float:
    """Inches a lane: room for its number, as long as the figure fits a screen."""
    return 0.2 if n_lanes <= 32 else 0.13 if n_lanes <= 64 else 0.06


def _finish_lanes(ax: Axes, n_lanes: int) -> None:
    for warp in range(32, n_lanes, 32):
        ax.axhline(warp - 0.5, color=GREY, linewidth=0.8)
    ax.set_ylim(n_lanes - 0.4, -0.6)
    ax.set_yticks(range(0, n_lanes, 1 if n_lanes <= 16 else 4 if n_lanes <= 64 else 32))
    ax.set_ylabel("lane" + (", a line between warps" if n_lanes > 32 else ""))
    ax.spines[["right", "top"]].set_visible(False)


def access_figure(
    report: Report, array: str, block: Block | None = None
) -> tuple[Figure, str]:
    """Draw which lane of a block touched which element of an array, phase by phase.

    Parameters
    ----------
    report : ddtree_numba.emulator.Report
        Of a traced run.
    array : str
        Its name in the kernel.
    block : tuple of int, optional
        The first block that touches the array if omitted.

    Returns
    -------
    figure, alt_text
        Reads and writes apart; a row a phase for one dimension, else a panel a phase. A
        cell's shade is the lowest lane that touched it; it names that lane, or counts
        the lanes. Races are ringed. Shown are the first `MOST_PHASES` phases with an
        access, and of the elements touched the first `MOST_ROWS` × `MOST_COLUMNS`.

    Raises
    ------
    ValueError
        If the run, or the block, made no access to such an array.
    """
    table = _with_races(report)
    known = ", ".join(sorted(set(table["array"]))) or "none"
    table = table[table["array"] == array]
    if not len(table):
        raise ValueError(f"array is {array!r}; expected one that is accessed: {known}")
    block, rows = _of_block(table, block)
    if not len(rows):
        raise ValueError(f"block is {block}; expected one that accesses {array}")
    accesses, rows = rows, _each_element(rows)
    cells = _cells(rows)
    flat = cells["row"].nunique() <= 1
    phases = sorted(set(cells["phase"]))[: MOST_ROWS if flat else MOST_PHASES]
    shown = cells[cells["phase"].isin(phases)]
    if flat:
        shown = shown.assign(row=shown["phase"].map(phases.index))
    n_lanes = int(np.prod(report.block))
    figure = _draw_maps(shown, phases, flat, n_lanes)
    title = f"{array} in {report.kernel}, block {block}"
    title += " (a part)" if len(shown) < len(rows) else ""
    figure.suptitle(title, fontsize=11)
    width, height = figure.get_size_inches()
    figure.set_size_inches(max(width, 0.09 * len(title)), height)
    if shown["race"].any():
        rings = figure.axes[0].collections
        figure.legend(handles=rings, loc="outside lower center", frameon=False)
    alt_text = f"Accesses of block {block} of {report.kernel} to {array}: "
    alt_text += _describe_accesses(accesses, rows, len(rows) - len(shown))
    return figure, alt_text


def _describe_accesses(
    accesses: pd.DataFrame, elements: pd.DataFrame, n_outside: int
) -> str:
    writes = int((accesses["kind"] != "read").sum())
    raced = elements.loc[elements["race"], "index"].nunique()
    text = (
        f"{len(accesses) - writes} reads and {writes} writes of "
        f"{elements['index'].nunique()} elements in {elements['phase'].nunique()} "
        f"phases; {raced or 'no'} elements are raced for."
    )
    if n_outside:
        text += f" {n_outside} accesses of an element lie outside the picture."
    return text


def _each_element(rows: pd.DataFrame) -> pd.DataFrame:
    """The accesses, a row for each element that a wide one takes."""
    counts = rows["elements"].to_numpy()
    each = rows.loc[rows.index.repeat(counts)].reset_index(drop=True)
    nth = np.arange(len(each)) - np.repeat(np.cumsum(counts) - counts, counts)
    each["index"] = [
        (*index[:-1], index[-1] + n) if n else index
        for index, n in zip(each["index"], nth, strict=True)
    ]
    return each


def _cells(rows: pd.DataFrame) -> pd.DataFrame:
    """Where in the picture each access is; those that lie outside are left out."""
    index = np.zeros((len(rows), 2), int)
    for n, (*leading, column) in enumerate(i or (0,) for i in rows["index"]):
        index[n] = leading[-1] if leading else 0, column
    planes = [i[:-2] for i in rows["index"]]
    order = {plane: n for n, plane in enumerate(sorted(set(planes)))}
    height = index[:, 0].max() + 1
    # Planes of an array of more dimensions stand below each other.
    row = index[:, 0] + height * np.array([order[plane] for plane in planes])
    cells = rows.assign(
        row=row - row.min(),
        column=index[:, 1] - index[:, 1].min(),
        row_name=[", ".join(map(str, i[:-1] or (0,))) for i in rows["index"]],
        column_name=index[:, 1],
        write=rows["kind"] != "read",
    )
    return cells[(cells["row"] < MOST_ROWS) & (cells["column"] < MOST_COLUMNS)]


def _draw_maps(
    cells: pd.DataFrame, phases: Sequence[int], flat: bool, n_lanes: int
) -> Figure:
    shape = int(cells["row"].max()) + 1, int(cells["column"].max()) + 1
    kinds = sorted(set(cells["write"]))
    grid = (len(kinds), 1) if flat else (len(phases), len(kinds))
    cell = 0.27 if flat or max(shape) <= 32 else 0.15
    numbers = cell > 0.2
    figure = Figure(
        figsize=(
            max(2.4, 0.8 + cell * shape[1]) * grid[1] + 1.0,
            (0.7 + cell * shape[0]) * grid[0] + 0.7,
        ),
        layout="constrained",
        facecolor="white",
    )
    axes = figure.subplots(*grid, squeeze=False).ravel()
    panels = [(None, kind) for kind in kinds]
    if not flat:
        panels = [(phase, kind) for phase in phases for kind in kinds]  # type: ignore
    for ax, (phase, write) in zip(axes, panels, strict=True):
        here = cells[cells["write"] == write]
        title = "writes" if write else "reads"
        if phase is not None:
            here = here[here["phase"] == phase]
            title = f"phase {phase}: {title if len(here) else 'no ' + title}"
        ax.set_title(title, fontsize=9)
        image = _draw_map(ax, here, shape, n_lanes, numbers)
        names = ("phase", "column_name") if flat else ("row_name", "column_name")
        _number_cells(ax, cells, names)
        if flat:
            ax.set_ylabel("phase", fontsize=8)
            ax.set_xlabel("element", fontsize=8)
    several = "n×: n lanes" if numbers else "dot: several"
    label = f"lane ({several}; shade: the lowest)"
    figure.colorbar(
        image, ax=axes.tolist(), label=label, aspect=25,
        ticks=MaxNLocator(integer=True),
    )  # fmt: skip
    return figure


def _draw_map(
    ax: Axes,
    cells: pd.DataFrame,
    shape: tuple[int, int],
    n_lanes: int,
    numbers: bool,
) -> Any:
    lowest = np.full(shape, np.nan)
    at: Any
    for at, lanes in cells.groupby(["row", "column"])["lane"]:
        row, column = at
        lowest[row, column] = lanes.min()
        n = lanes.nunique()
        colour = "white" if lanes.min() < 0.6 * n_lanes else "black"
        if numbers:
            text = str(lanes.min()) if n == 1 else f"{n}×"
            ax.text(
                column, row, text, ha="center", va="center", fontsize=6.5, color=colour
            )
        elif n > 1:
            ax.plot(column, row, ".", color=colour, markersize=2)
    image = ax.imshow(lowest, cmap="cividis", vmin=0, vmax=max(1, n_lanes - 1))
    raced = cells[cells["race"]].drop_duplicates(["row", "column"])
    ax.scatter(
        raced["column"], raced["row"], s=260 if numbers else 70, clip_on=False,
        path_effects=[withStroke(linewidth=3.6, foreground="white")], **RACE_STYLE,
    )  # fmt: skip
    ax.set_xticks(np.arange(shape[1] + 1) - 0.5, minor=True)
    ax.set_yticks(np.arange(shape[0] + 1) - 0.5, minor=True)
    ax.grid(which="minor", color="#DDDDDD", linewidth=0.5)
    ax.tick_params(which="both", length=0, labelsize=7)
    return image


def _number_cells(ax: Axes, cells: pd.DataFrame, names: tuple[str, str]) -> None:
    """Label rows and columns by what they are in the array."""
    for axis, place, name in (
        (ax.yaxis, "row", names[0]),
        (ax.xaxis, "column", names[1]),
    ):
        known = cells.drop_duplicates(place).sort_values(place)
        known = known[known[place] % (1 if len(known) <= 32 else 8) == 0]
        axis.set_ticks(known[place].to_list(), known[name].astype(str).to_list())


def memory_figure(report: Report, kernel: Any) -> tuple[Figure, str]:
    """Draw what each source line of a kernel costs in memory, beside its text.

    Parameters
    ----------
    report : ddtree_numba.emulator.Report
        Of a traced run.
    kernel : a `cuda.jit` kernel, a device function or a plain function
        Whose source to show; a device function has lines of its own.

    Returns
    -------
    figure, alt_text
        For each array that a line accesses a bar: 32-byte sectors a warp request of
        global memory, or passes over the banks of shared memory. What could not be
        saved is plain, what better placed elements would save is hatched.
    """
    function = getattr(kernel, "py_func", kernel)
    lines, first = inspect.getsourcelines(function)
    lines = textwrap.dedent("".join(lines)).splitlines()
    numbers = range(first, first + len(lines))
    memory = report.memory
    here = memory["file"] == function.__code__.co_filename
    here &= memory["line"].isin(numbers)
    costs = memory[here]
    units = {
        "sectors": "sectors a request, global",
        "passes": "passes a request, shared",
    }
    units = {what: unit for what, unit in units.items() if costs[what].notna().any()}
    # A line is as high as its bars; those of the two kinds stand beside each other.
    bars = costs.groupby(["line", "space"]).size().groupby("line").max()
    heights = np.array([bars.get(number, 1) for number in numbers])
    tops = np.cumsum(heights) - heights
    text_width = 0.5 + 0.078 * max(len(line) for line in lines)
    figure = Figure(
        figsize=(text_width + 3.6 * len(units), 1.1 + 0.2 * heights.sum()),
        layout="constrained",
        facecolor="white",
    )
    widths = (text_width, *[3.6] * len(units))
    axes = figure.subplots(
        1, len(widths), sharey=True, width_ratios=widths, squeeze=False
    )[0]
    axes[0].set_xlim(0, 1)
    axes[0].set_axis_off()
    for top, number, line in zip(tops, numbers, lines, strict=True):
        shown = f"{number:4d}  {line}".replace("$", r"\$")
        axes[0].text(0, top, shown, va="center", fontsize=8, family="monospace")
    for ax, (what, unit) in zip(axes[1:], units.items(), strict=True):
        rows = costs[costs[what].notna()]
        nth = rows.groupby("line").cumcount().to_numpy()
        _draw_costs(ax, rows, tops[rows["line"] - first] + nth, what)
        ax.set_xlabel(unit, fontsize=8)
    for ax in axes:
        for number in bars.index:
            top = tops[number - first]
            ax.axhspan(top - 0.5, top + bars[number] - 0.5, color="#F3F3F3", zorder=0)
    axes[0].set_ylim(heights.sum() - 0.3, -0.7)
    elsewhere = int(memory.loc[~here, "requests"].sum())
    title = f"{function.__name__}: memory requests of a warp, count × what: cost of one"
    title += f" ({elsewhere} more in other functions)" if elsewhere else ""
    figure.suptitle(title, fontsize=11)
    return figure, _describe_costs(function.__name__, costs, elsewhere)


def _draw_costs(ax: Axes, costs: pd.DataFrame, y: np.ndarray, what: str) -> None:
    """Draw a bar for each row of costs."""
    style: dict[str, Any] = {"height": 0.72, "edgecolor": "black", "linewidth": 0.5}
    cost, best = costs[what].to_numpy(), costs[f"{what}_at_best"].to_numpy()
    ax.barh(y, best, color=SKY, **style)
    ax.barh(y, cost - best, left=best, color=VERMILLION, hatch="////", **style)
    for at, one, least, row in zip(y, cost, best, costs.itertuples(), strict=True):
        text = f"{row.requests} × {row.kind} {row.array}: {one:.3g}"
        text += f" ({least:.3g} would do)" if one > least else ""
        ax.annotate(
            text,
            (one, at),
            xytext=(3, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
        )
    ax.set_xlim(0, 2.2 * cost.max())
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.tick_params(axis="x", labelsize=8)
    ax.tick_params(axis="y", length=0, labelleft=False)
    ax.spines[["right", "top"]].set_visible(False)


def _describe_costs(name: str, costs: pd.DataFrame, elsewhere: int) -> str:
    text = f"Memory requests of {name}: {int(costs['requests'].sum())} in its lines."
    for what, unit in (("sectors", "sectors"), ("passes", "passes")):
        rows = costs[costs[what].notna()]
        if not len(rows):
            continue
        excess = rows[what] - rows[f"{what}_at_best"]
        worst = rows.iloc[int(excess.to_numpy().argmax())]
        if excess.max() > 0:
            text += (
                f" Most could be saved in line {worst['line']}, {worst['kind']} of "
                f"{worst['array']}: {worst[what]:.3g} {unit} a request, "
                f"{worst[f'{what}_at_best']:.3g} would do."
            )
        else:
            text += f" No {unit} could be saved."
    if elsewhere:
        text += f" {elsewhere} requests come from other functions."
    return text


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
