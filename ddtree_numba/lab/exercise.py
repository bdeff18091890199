"""What an exercise is: a module `exercises/nbNN.py` holds one, as ``EXERCISE``."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from ddtree_numba.lab import exercises


class Complaint(Exception):
    """What a case raises to say its line from deep within."""


@dataclass(frozen=True)
class Case:
    """One thing that an answer must get right.

    Attributes
    ----------
    name : str
        What is tried, in a few words.
    run : callable
        Takes the answer; returns None if it is right, else one line that helps, or
        raises it as a `Complaint`. It may let the answer raise.
    """

    name: str
    run: Callable[[Any], str | None]


@dataclass(frozen=True)
class Wrong:
    """A plausible wrong answer and what a case must say to it.

    Attributes
    ----------
    name : str
    answer : object
    says : str
        A part of the line of some case.
    """

    name: str
    answer: Any
    says: str


@dataclass(frozen=True)
class Exercise:
    """An exercise of one notebook.

    Attributes
    ----------
    notebook : str
        Its number, two digits.
    title : str
    name : str
        The variable that the learner sets: a function, a kernel or a value.
    hints : tuple of str
        From gentle to nearly there.
    solution : object
        Its source is revealed; a plain value is shown as ``name = value``.
    cases : tuple of Case
    wrong : tuple of Wrong
        At least three.
    """

    notebook: str
    title: str
    name: str
    hints: tuple[str, ...]
    solution: Any
    cases: tuple[Case, ...]
    wrong: tuple[Wrong, ...]

    def source(self) -> str:
        """The solution as a cell of the notebook."""
        function = getattr(self.solution, "py_func", self.solution)
        if inspect.isfunction(function):
            return inspect.getsource(function).rstrip()
        return f"{self.name} = {self.solution!r}"


def numbers() -> list[str]:
    """Numbers of the notebooks that have an exercise."""
    modules = pkgutil.iter_modules(exercises.__path__)
    return sorted(m.name.removeprefix("nb") for m in modules if m.name[:2] == "nb")


def find(n: int | str) -> Exercise:
    """The exercise of notebook n: 2, "2", "02" or "02_best_first_by_hand".

    Raises
    ------
    ValueError
        If there is none.
    """
    number = str(n).partition("_")[0].zfill(2)
    if number not in numbers():
        raise ValueError(f"n is {n!r}; expected one of {', '.join(numbers())}")
    return import_module(f"{exercises.__name__}.nb{number}").EXERCISE
