"""Time every stage and version on a GPU, next to what others run for the same work.

Every case is checked before it is timed, on random inputs and with poisoned outputs,
against the float64 reference; what is wrong is reported and not timed. Times are
medians of CUDA-graph replays with their spread, at once ("burst") and after a second of
load ("sustained"): `ddtree_numba.bench.timing` says how. Ceilings are measured in the
same run: a copy on the device, and a bf16 product of two 8192 × 8192 matrices by torch.

"warm" rows read the same inputs again and again, as after the kernel that wrote them;
"cold" rows go round more sets of inputs than the second-level cache holds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tqdm import tqdm

from ddtree_numba import backend
from ddtree_numba.bench.rows import COLUMNS, Ceilings, Row, RowFile, environment

STAGES = (
    "verify_attn",
    "splits",
    "logits_to_tree",
    "after_target",
    "round",
    "single",
)
SHAPES = ("full", "quick", "tiny")
FINISHED, UNFINISHED = "bench.csv", "bench.partial.csv"
LEFT_OUT, LEFT_OUT_UNFINISHED = "left_out.csv", "left_out.partial.csv"

if TYPE_CHECKING:
    import pandas as pd

    from ddtree_numba.bench.cases import Case
    from ddtree_numba.bench.timing import Recorder

__all__ = [
    "SHAPES",
    "STAGES",
    "bench",
    "bench_left_out",
    "load",
    "require_gpu",
    "require_hopper",
    "table",
]


def bench(
    out: Path,
    *,
    stages: Sequence[str] | None = None,
    shapes: str = "full",
    with_peers: bool = False,
    executor: str | None = None,
    progress: bool = False,
) -> pd.DataFrame:
    """Measure, and write a row to ``out/bench.csv`` for each case and regime.

    Parameters
    ----------
    out : Path
        Folder. Until the run ends its rows stand in ``bench.partial.csv``, each on the
        disk as soon as it is known.
    stages : sequence of str, optional
        Some of `STAGES`; all if omitted.
    shapes : {"full", "quick", "tiny"}
    with_peers : bool
        Whether to measure what others run, too, as far as it can be imported.
    executor : str, optional
        "gpu"; anything else is refused.
    progress : bool
        Show a progress bar.

    Returns
    -------
    pandas.DataFrame
        The rows; `ddtree_numba.bench.rows.Row` explains the columns.

    Raises
    ------
    ValueError
        For a stage or a set of shapes that is not known.
    RuntimeError
        Without a GPU: the emulator and NumPy say what is right, not what is fast.
    """
    require_gpu(executor)
    from ddtree_numba.bench import cases as plan

    stages = STAGES if stages is None else stages
    for stage in stages:
        if stage not in STAGES:
            raise ValueError(f"stage {stage!r} is not one of {', '.join(STAGES)}")
    _check_shapes(shapes)
    todo = list(plan.cases(stages, shapes, with_peers))
    return _record(todo, out / UNFINISHED, out / FINISHED, progress)


def bench_left_out(
    out: Path, *, shapes: str = "full", progress: bool = False
) -> pd.DataFrame:
    """Time `verify_attn`'s wgmma version with parts left out, as `bench` times stages.

    `ddtree_numba.bench.left_out` says what is left out, and what the rows mean. They go
    to ``out/left_out.csv``, in the same way and with the same columns as `bench`'s.

    Parameters
    ----------
    out, shapes, progress
        As for `bench`.

    Returns
    -------
    pandas.DataFrame
        The rows; `ddtree_numba.bench.left_out.parts` makes times of parts of them.

    Raises
    ------
    ValueError
        For a set of shapes that is not known.
    RuntimeError
        Without a GPU that can run this version.
    """
    require_hopper()
    from ddtree_numba.bench import cases as plan

    _check_shapes(shapes)
    todo = list(plan.left_out_cases(shapes))
    return _record(todo, out / LEFT_OUT_UNFINISHED, out / LEFT_OUT, progress)


def _check_shapes(shapes: str) -> None:
    if shapes not in SHAPES:
        raise ValueError(f"shapes {shapes!r} is not one of {', '.join(SHAPES)}")


def _record(
    todo: Sequence[Case], partial: Path, finished: Path, progress: bool
) -> pd.DataFrame:
    """Measure cases, and write their rows to `partial` until all are there."""
    file = RowFile(partial)
    try:
        for row in measured(todo, progress):
            file.write(row)
    finally:
        file.close()
    return load(partial.replace(finished))


def require_gpu(executor: str | None = None) -> None:
    """Raise RuntimeError unless kernels run on a GPU here."""
    chosen = backend.choose(executor, default="gpu")
    problem = backend.gpu_problem() if chosen == "gpu" else f"this is {chosen!r}"
    if problem:
        raise RuntimeError(
            f"only the executor 'gpu' can be timed, but {problem}. The emulator and "
            "NumPy tell what a kernel computes, not how fast it is"
        )


def require_hopper() -> None:
    """Raise RuntimeError unless kernels run here on a GPU that has `wgmma`."""
    require_gpu()
    from ddtree_numba.kernels.verify_attn_wgmma import card_problem

    if found := card_problem():
        raise RuntimeError(found)


def measured(todo: Sequence[Case], progress: bool) -> Iterator[Row]:
    """Check and time cases, one after the other."""
    from ddtree_numba.bench.timing import Recorder

    recorder, ceilings = Recorder(), Ceilings()
    bar = tqdm(todo, disable=not progress)
    for case in bar:
        bar.set_description(f"{case.stage} {case.version} {case.shape}")
        for row in rows_of(case, recorder, ceilings):
            vars(row).update(environment())
            yield row


def rows_of(case: Case, recorder: Recorder, ceilings: Ceilings) -> Iterator[Row]:
    """The rows of one case: a regime each, or one that says why there is none."""
    from ddtree_numba.bench.problems import WrongResult
    from ddtree_numba.bench.timing import measure

    blank = Row(
        case.stage, case.version, case.shape, memory=case.memory, note=case.note
    )
    try:
        ready = case.prepare(recorder)
        timings = measure(ready.launches, recorder, ready.library, loaded=case.loaded)
    except WrongResult as error:
        yield dataclasses.replace(blank, status="wrong", note=str(error))
        return
    except Exception as error:  # whatever keeps a peer or a version from running here
        why = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        yield dataclasses.replace(blank, status="skipped", note=why)
        return
    for regime, timing in timings.items():
        row = dataclasses.replace(
            blank,
            regime=regime,
            us=timing.median_us,
            us_low=timing.low_us,
            us_high=timing.high_us,
            samples=timing.samples,
            error=ready.error,
            peer=ready.peer,
        )
        ceilings.apply(row, case.work)
        yield row


def load(path: Path) -> pd.DataFrame:
    """Recorded rows of a CSV file; text that is empty stays text.

    Raises
    ------
    ValueError
        For a file that is no such record.
    """
    import pandas as pd

    kinds = {column.name: column.type for column in dataclasses.fields(Row)}
    try:
        frame = pd.read_csv(path, dtype=kinds)
        frame = frame[list(COLUMNS)]
    except (ValueError, KeyError) as error:
        why = " ".join(str(error).split())
        raise ValueError(
            f"{path} is no record of `ddtree bench`: {why}; expected CSV with the "
            f"columns {', '.join(COLUMNS)}"
        ) from error
    return frame.fillna({name: "" for name, kind in kinds.items() if kind == "str"})


def table(frame: pd.DataFrame) -> str:
    """The rows as text, without the columns that are the same for all."""
    shown = frame[["stage", "version", "shape", "regime", "memory"]].copy()
    timed = frame["us"].notna()
    spread = (
        frame["us_low"].map("{:.1f}".format)
        + "…"
        + frame["us_high"].map("{:.1f}".format)
    )
    shown["µs"] = frame["us"].map("{:.1f}".format).where(timed, "")
    shown["10…90 %"] = spread.where(timed, "")
    for name, column, digits in (
        ("TFLOP/s", "tflops", 0),
        ("GB/s", "gbs", 0),
        ("%", "percent", 0),
    ):
        text = frame[column].map(f"{{:.{digits}f}}".format)
        shown[name] = text.where(frame[column].notna(), "")
    shown["of"] = frame["ceiling"].where(frame["percent"].notna(), "")
    shown["note"] = (frame["status"] + ": " + frame["note"]).where(
        ~timed, frame["note"]
    )
    return shown.to_string(index=False)
