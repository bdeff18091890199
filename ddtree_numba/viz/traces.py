"""What pictures of a traced run share: marks, and which accesses race."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ddtree_numba.viz.style import BLUE, GREEN, ORANGE, VERMILLION

if TYPE_CHECKING:
    import pandas as pd

    from ddtree_numba.emulator import Report

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

Block = tuple[int, int, int]


def of_block(table: pd.DataFrame, block: Block | None) -> tuple[Block, pd.DataFrame]:
    """A block (the table's first if None) and its rows."""
    if block is None:
        block = table["block"].iloc[0] if len(table) else (0, 0, 0)
    return block, table[table["block"] == block].reset_index(drop=True)


def with_races(report: Report) -> pd.DataFrame:
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
