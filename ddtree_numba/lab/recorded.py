"""Times for the notebooks: recorded, or measured where there is a GPU."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ddtree_numba._data import data_path

if TYPE_CHECKING:
    import pandas as pd

RECORDED, LEFT_OUT = "bench/bench.csv", "bench/left_out.csv"


def recorded() -> pd.DataFrame:
    """The recorded run, as `ddtree bench` wrote it."""
    from ddtree_numba import bench  # most notebooks need none

    return bench.load(data_path(RECORDED))


def measurements(where: str, stages: Sequence[str] | None = None) -> pd.DataFrame:
    """Rows of a benchmark, and a printed line that says whose.

    Parameters
    ----------
    where : str
        What `lab.start` returned: on "gpu" the quick set of shapes is measured here
        (about a minute), else the recorded run is read.
    stages : sequence of str, optional
        Measure these only; all if omitted.

    Returns
    -------
    pandas.DataFrame
        `ddtree_numba.bench.rows.Row` explains the columns.
    """
    if where == "gpu":
        from ddtree_numba import bench

        with tempfile.TemporaryDirectory() as folder:
            frame = bench.bench(
                Path(folder), stages=stages, shapes="quick", progress=True
            )
        how = "measured now"
    else:
        frame, how = recorded(), f"recorded in data/{RECORDED}"
    _say_whose(frame, how)
    return frame


def _say_whose(frame: pd.DataFrame, how: str) -> None:
    """Print how times were come by, on which card, and when."""
    first = frame.iloc[0]
    print(
        f"Times {how}: one {first['card']}, driver {first['driver']}, "
        f"numba-cuda {first['numba_cuda']}, {first['date']}"
    )


def left_out_parts() -> pd.DataFrame:
    """What each part of the wgmma kernel adds to its time; prints whose time it is.

    Recorded, on a GPU too: `ddtree bench --left-out` compiles the kernel six times.

    Returns
    -------
    pandas.DataFrame
        As `ddtree_numba.bench.left_out.parts` makes it.
    """
    from ddtree_numba import bench
    from ddtree_numba.bench import left_out

    frame = bench.load(data_path(LEFT_OUT))
    _say_whose(frame, f"recorded in data/{LEFT_OUT}")
    return left_out.parts(frame)


def split_times(
    frame: pd.DataFrame,
) -> dict[tuple[int, int, int, int], dict[int, float]]:
    """Microseconds by the number of splits, for each shape (B, N, H, S) there is."""
    rows = frame[(frame["stage"] == "splits") & (frame["us"] > 0)]
    times: dict[tuple[int, int, int, int], dict[int, float]] = {}
    for row in rows.to_dict("records"):
        b, n, h, s = map(int, row["shape"].split(")")[0].strip("(").split(","))
        times.setdefault((b, n, h, s), {})[int(row["version"].split()[1])] = row["us"]
    return times
