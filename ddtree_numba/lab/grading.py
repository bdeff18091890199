"""Run an exercise's cases on any answer: wrong, broken, endless or missing."""

from __future__ import annotations

import linecache
import re
import signal
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from ddtree_numba.emulator import EmulatorError, KernelError
from ddtree_numba.lab.exercise import Case, Complaint, Exercise, find

PASSED, FAILED, UNWRITTEN = "passed", "failed", "unwritten"
"""`UNWRITTEN`: nothing was tried."""

SECONDS_A_CASE = 20.0
"""After this a case is stopped; the slowest takes about one."""

_FOLDER = re.compile(r"\S*[/\\](?=[^/\\\s]+:\d)")  # of "folder/file.py:12"
_PACKAGE = Path(__file__).resolve().parents[1]
_STDLIB = Path(traceback.__file__).resolve().parent


@dataclass(frozen=True)
class Result:
    """What a case found: its status, and a line that helps unless it passed."""

    case: str
    status: str
    says: str = ""


class _OutOfTime(BaseException):
    """No Exception, so that an answer's own ``except`` does not swallow it."""


def grade(n: int | str, answer: Any) -> list[Result]:
    """Results of every case of notebook n's exercise; see `lab.check`."""
    exercise = find(n)
    if says := _no_answer(exercise, answer):
        status = UNWRITTEN if answer is None or answer is ... else FAILED
        first, *others = exercise.cases
        return [
            Result(first.name, status, says),
            *(Result(case.name, status) for case in others),
        ]
    results: list[Result] = []
    for case in exercise.cases:
        try:
            results.append(_run(case, answer))
        except _OutOfTime:
            results.append(Result(case.name, FAILED, _endless()))
            break
    untried = exercise.cases[len(results) :]
    return results + [Result(case.name, UNWRITTEN) for case in untried]


def _endless() -> str:
    return (
        f"It did not come back within {SECONDS_A_CASE:g} seconds: is there a loop that "
        "never ends? (The cases below were not tried.)"
    )


def _no_answer(exercise: Exercise, answer: Any) -> str | None:
    """Why nothing can be tried, if that is so."""
    name, kind = exercise.name, type(answer).__name__
    if answer is None or answer is ...:
        return f"{name} is not written yet."
    if _is_kernel(exercise.solution) and not _is_kernel(answer):
        return f"{name} is no kernel but of type {kind}: is @cuda.jit above it?"
    if callable(exercise.solution) and not callable(answer):
        return f"{name} is of type {kind}; expected a function, not what it returns."
    return None


def _is_kernel(x: Any) -> bool:
    return hasattr(type(x), "py_func") or hasattr(x, "py_func")


def _run(case: Case, answer: Any) -> Result:
    try:
        with _time_limit(SECONDS_A_CASE):
            says = case.run(answer)
    except Complaint as complaint:
        says = str(complaint)
    except (Exception, SystemExit, GeneratorExit) as error:
        # What a kernel raises comes wrapped by the emulator.
        cause = error.__cause__ if isinstance(error, KernelError) else error
        if type(cause) is NotImplementedError:
            return Result(case.name, UNWRITTEN, f"Not written yet. {cause}".rstrip())
        says = _describe(error)
    return Result(case.name, FAILED if says else PASSED, says or "")


def _describe(error: BaseException) -> str:
    """One line: what was raised, and by which line of the answer."""
    if isinstance(error, EmulatorError) and error.place:
        place = error.place
        return (
            f"{type(error).__name__}: {' '.join(error.what.split())} (block "
            f"{place.block[0]}, lane {place.lane}, "
            f"{_source(place.filename, place.lineno)})"
        )
    text = " ".join(_FOLDER.sub("", str(error)).split())
    says = f"It raised {type(error).__name__}" + (f": {text}" if text else "")
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_library(frame.filename):
            continue
        if linecache.getline(frame.filename, frame.lineno or 0).strip():
            return f"{says} ({_source(frame.filename, frame.lineno)})"
    return says


def _source(filename: str, line: int | None) -> str:
    return f"line {line}: {linecache.getline(filename, line or 0).strip()}"


def _is_library(filename: str) -> bool:
    path = Path(filename)
    return bool({_PACKAGE, _STDLIB} & {*path.parents}) or "site-packages" in path.parts


@contextmanager
def _time_limit(seconds: float) -> Iterator[None]:
    """Stop what runs after some seconds, where the system has alarms for it."""
    main = threading.current_thread() is threading.main_thread()
    if not (main and hasattr(signal, "setitimer")):
        yield
        return

    def stop(number: int, frame: FrameType | None) -> None:
        raise _OutOfTime

    before = signal.signal(signal.SIGALRM, stop)
    # Again and again: a bare ``except:`` in a loop catches the first.
    remaining, _ = signal.setitimer(signal.ITIMER_REAL, seconds, 0.1)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if remaining:  # somebody else's alarm, a test's for example
            signal.setitimer(signal.ITIMER_REAL, remaining)
