"""The notebooks' exercises: check an answer, hint at it, reveal it.

    lab.start()              the banner; where kernels run
    lab.check(2, pushes)     a table, case by case, whatever the answer is
    lab.hint(2)              a hint; the next one when it is called again
    lab.reveal(2)            the solution's source

``python -m ddtree_numba.lab build`` runs the notebooks and writes them with outputs.
"""

from __future__ import annotations

import itertools
import textwrap
from typing import Any

from numba import config

from ddtree_numba import backend
from ddtree_numba.lab.exercise import find
from ddtree_numba.lab.grading import FAILED, PASSED, UNWRITTEN, Result, grade
from ddtree_numba.lab.recorded import left_out_parts, measurements

__all__ = [
    "Result",
    "check",
    "grade",
    "hint",
    "left_out_parts",
    "measurements",
    "reveal",
    "start",
]

_MARKS = {PASSED: "✓", UNWRITTEN: "·"}
_hints: dict[str, Any] = {}


def start() -> str:
    """Print what this notebook runs on; returns "gpu" or "emulator".

    That is where cells whose subject is a kernel run it. Whole models run on the GPU
    too, or in NumPy where there is none.
    """
    where = "gpu" if backend.choose() == "gpu" else "emulator"
    # Learners hand small host arrays to kernels; Numba's warning would be the loudest
    # line on the page.
    config.CUDA_WARN_ON_IMPLICIT_COPY = 0
    print(backend.banner())
    if where == "gpu":
        print("Kernels run on the GPU; the emulator, on the CPU, shows what lanes do.")
    else:
        print(
            "Kernels run in the emulator: every lane, one after the other, in Python."
        )
    return where


def check(n: int | str, answer: Any) -> None:
    """Print how an answer does, case by case; never raises because of the answer.

    Parameters
    ----------
    n : int or str
        The notebook's number.
    answer : object
        What the exercise asks for; anything else is told apart, kindly.
    """
    exercise = find(n)
    results = grade(n, answer)
    print(f"Exercise {exercise.notebook} · {exercise.title}")
    said = ""
    for result in results:
        again = bool(said) and result.says == said  # one reason for all is said once
        note = " (as above)" if again and result.status == FAILED else ""
        print(f"  {_MARKS.get(result.status, '✗')} {result.case}{note}")
        if result.says and not again:
            print(textwrap.fill(result.says, 80, **_INDENT))
        said = result.says
    passed = sum(result.status == PASSED for result in results)
    if passed == len(results):
        print(f"All {passed} cases pass.")
    else:
        number = int(exercise.notebook)
        print(f"{passed} of {len(results)} cases pass. lab.hint({number}) helps.")


_INDENT: dict[str, Any] = {
    "initial_indent": "      ",
    "subsequent_indent": "      ",
    "break_long_words": False,
}


def hint(n: int | str) -> None:
    """Print a hint; the next one when called again, and after the last the first."""
    exercise = find(n)
    hints = _hints.setdefault(exercise.notebook, itertools.cycle(_numbered(exercise)))
    print(next(hints))


def _numbered(exercise: Any) -> list[str]:
    count = len(exercise.hints)
    hints = [
        textwrap.fill(f"Hint {i} of {count}: {text}", 88)
        for i, text in enumerate(exercise.hints, 1)
    ]
    hints[-1] += f"\n(The solution: lab.reveal({int(exercise.notebook)}).)"
    return hints


def reveal(n: int | str) -> None:
    """Print the solution, to be pasted into the exercise's cell."""
    print(find(n).source())
