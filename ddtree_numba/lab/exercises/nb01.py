"""Notebook 01: how many tokens of a chain are accepted on average."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from ddtree_numba.lab import compare
from ddtree_numba.lab.exercise import Case, Exercise, Wrong

CHAINS = 20


def expected_accepted(p):
    """Expected accepted drafts; p[i]: draft i matches, given that all before it do."""
    expected, reached = 0.0, 1.0
    for match in p:
        reached *= match  # this draft and all before it match
        expected += reached
    return expected


def _by_enumeration(p: np.ndarray) -> float:
    """Every combination of match and mismatch, its probability, what is accepted."""
    expected = 0.0
    for matches in itertools.product((True, False), repeat=len(p)):
        probability = np.prod(
            [q if m else 1 - q for q, m in zip(p, matches, strict=True)]
        )
        accepted = len(list(itertools.takewhile(bool, matches)))
        expected += float(probability) * accepted
    return expected


def _chain(p: list[float], why: str = "") -> Case:
    def run(answer: Any) -> str | None:
        says = compare.number(
            answer(list(p)), _by_enumeration(np.array(p)), f"E of {p}"
        )
        return f"{says} {why}".rstrip() if says else None

    return Case(f"p = {p}", run)


def _random_chains(answer: Any) -> str | None:
    rng = np.random.default_rng(1)
    for i in range(CHAINS):
        p = rng.uniform(0, 1, size=rng.integers(1, 9)).round(3)
        want = _by_enumeration(p)
        if says := compare.number(answer(p.tolist()), want, f"E of {p.tolist()}"):
            return f"Chain {i}: {says}"
    return None


# ----------------------------------------------------------------- plausible and wrong


def _sum(p):
    return float(sum(p))


def _all_or_nothing(p):
    return len(p) * float(np.prod(p))


def _with_the_bonus(p):
    return 1 + expected_accepted(p)


def _mean_rate(p):
    rate = float(np.mean(p)) if len(p) else 0.0
    return sum(rate**k for k in range(1, len(p) + 1))


def _without_the_full_chain(p):
    reached = np.cumprod([1.0, *p])
    return float(sum(k * reached[k] * (1 - p[k]) for k in range(len(p))))


EXERCISE = Exercise(
    notebook="01",
    title="the expected accepted length of a chain",
    name="expected_accepted",
    hints=(
        "The number of accepted drafts is a sum of ones, one for each accepted draft. "
        "So its expectation is a sum of probabilities.",
        "Draft k is accepted if it matches and all before it do: p[0] p[1] … p[k]. Add "
        "those products up.",
    ),
    solution=expected_accepted,
    cases=(
        _chain([], "Nothing is drafted."),
        _chain([1.0, 1.0, 1.0], "All match; the bonus is not a draft."),
        _chain([0.5]),
        _chain([0.0, 1.0, 1.0], "After a mismatch nothing is accepted, however good."),
        _chain([1.0, 0.0, 1.0], "What comes before the mismatch is accepted."),
        Case(f"{CHAINS} random chains, exactly", _random_chains),
    ),
    wrong=(
        Wrong("sum", _sum, "After a mismatch nothing is accepted"),
        Wrong("all or nothing", _all_or_nothing, "What comes before the mismatch is"),
        Wrong("with the bonus", _with_the_bonus, "the bonus is not a draft"),
        Wrong("mean rate", _mean_rate, "After a mismatch nothing is accepted"),
        Wrong("without the full chain", _without_the_full_chain, "All match"),
    ),
)
