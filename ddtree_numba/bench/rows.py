"""Rows of the benchmark: what each says, their rates, and the file that keeps them."""

from __future__ import annotations

import csv
import datetime
import functools
import os
import platform
import subprocess
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numba
import numpy as np
from numba import cuda

if TYPE_CHECKING:
    import pandas as pd


class Work(NamedTuple):
    """What a launch must do at the least, whoever does it."""

    flop: float = 0.0
    nbytes: float = 0.0  # each input read once, each output written once


@dataclass
class Row:
    """One measurement, a line of the CSV; times in microseconds."""

    stage: str
    version: str
    shape: str
    regime: str = "burst"  # or sustained
    memory: str = "warm"  # or cold: whether the second-level cache holds the inputs
    us: float = np.nan  # median
    us_low: float = np.nan  # 10th percentile of the samples
    us_high: float = np.nan  # 90th
    samples: int = 0
    tflops: float = np.nan
    gbs: float = np.nan
    ceiling: str = ""  # the nearer one: matmul or copy
    percent: float = np.nan  # of that ceiling, as measured in this run and regime
    floor_us: float = np.nan  # the least time under that ceiling
    error: float = np.nan  # largest absolute error against float64
    status: str = "ok"  # or wrong, skipped; of stage left_out: it ran
    note: str = ""
    peer: str = ""  # a peer's version
    card: str = ""
    driver: str = ""
    python: str = ""
    numpy: str = ""
    numba: str = ""
    numba_cuda: str = ""
    torch: str = ""
    commit: str = ""
    date: str = ""


COLUMNS = tuple(column.name for column in fields(Row))


@dataclass
class Ceilings:
    """Rates that this card reached in this run, by regime."""

    tflops: dict[str, float] = field(default_factory=dict)
    gbs: dict[str, float] = field(default_factory=dict)

    def apply(self, row: Row, work: Work) -> None:
        """Fill in a timed row's rates and its share of the nearer ceiling.

        A row of the stage "ceiling" is a ceiling from then on.
        """
        if work.flop:
            row.tflops = work.flop / row.us / 1e6
        if work.nbytes:
            row.gbs = work.nbytes / row.us / 1e3
        if row.stage == "ceiling":
            if row.version == "copy":
                self.gbs[row.regime] = row.gbs
            else:
                self.tflops[row.regime] = row.tflops
        floors = {}
        if work.flop and row.regime in self.tflops:
            floors["matmul"] = work.flop / self.tflops[row.regime] / 1e6
        if work.nbytes and row.regime in self.gbs:
            floors["copy"] = work.nbytes / self.gbs[row.regime] / 1e3
        if floors:
            row.ceiling = max(floors, key=lambda name: floors[name])
            row.floor_us = floors[row.ceiling]
            row.percent = 100 * row.floor_us / row.us


class RowFile:
    """A CSV file whose rows are on the disk as soon as they are known."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w", newline="", encoding="utf-8")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()
        self._file.flush()

    def write(self, row: Row) -> None:
        """Append a row; what is not known is an empty field."""
        line = {}
        for name, value in vars(row).items():
            text = f"{value:.6g}" if isinstance(value, float) else str(value)
            line[name] = "" if text == "nan" else text
        self._writer.writerow(line)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def of_one_run(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of one stage, regime and memory, as they are.

    Raises
    ------
    ValueError
        If a version is there twice at a shape.
    """
    twice = rows[rows.duplicated(["version", "shape"])]
    if not twice.empty:
        version, shape = twice.iloc[0][["version", "shape"]]
        raise ValueError(
            f"frame has {version!r} at {shape} twice; expected the rows of one run"
        )
    return rows


@functools.cache
def environment() -> dict[str, str]:
    """Card, driver, versions, commit and date: columns that every row has."""
    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    git = ("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty")
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return {
        "card": name,
        "driver": _first_line(*query),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "numba_cuda": _version("numba_cuda"),
        "torch": _version("torch"),
        # A copy of the tree without its history is told.
        "commit": os.environ.get("DDTREE_COMMIT") or _first_line(*git),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def _version(package: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _first_line(*command: str) -> str:
    """The first line that a command prints; empty if it fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else ""
