"""Notebook 02: which two prefixes go on the heap when one is taken off."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ddtree_numba.lab.best_first import best_first, brute_force, pushes
from ddtree_numba.lab.exercise import Case, Complaint, Exercise, Wrong

TABLES = 200


def _offers(answer: Any, path: tuple[int, ...], length: int, kept: int) -> list[tuple]:
    """What an answer offers, checked for what would only fail later."""
    offers = answer(path, length, kept)
    if offers is None:
        raise Complaint(
            "pushes returned None; expected a list of rank paths. (Is there a return?)"
        )
    if isinstance(offers, tuple) and all(isinstance(rank, int) for rank in offers):
        raise Complaint(
            f"After {path} it returned {offers}, one rank path; expected a list of "
            "them, also of one."
        )
    offers = list(offers)
    for offer in offers:
        if not isinstance(offer, tuple) or not offer:
            raise Complaint(
                f"After {path} it offers {offer!r}; expected a rank path, a tuple."
            )
        if len(offer) > length:
            raise Complaint(
                f"After {path} it offers {offer}, which is {len(offer)} long; only "
                f"{length} positions are drafted."
            )
        if not 0 <= offer[-1] < kept:
            raise Complaint(
                f"After {path} it offers {offer}: ranks are 0 … {kept - 1}, so the "
                "last candidate has no next sibling."
            )
    return offers


def _after(path: tuple[int, ...], length: int, kept: int) -> Case:
    def run(answer: Any) -> str | None:
        got = sorted(_offers(answer, path, length, kept))
        want = sorted(pushes(path, length, kept))
        if got == want:
            return None
        sibling, child = path[:-1] + (path[-1] + 1,), path + (0,)
        shown = ", ".join(map(str, got)) or "nothing"
        says = f"After {path} it offers {shown}."
        if child in want and child not in got:
            says += f" The first child, {child}, is missing."
        if sibling in want and sibling not in got:
            says += f" The next sibling, {sibling}, is missing."
        if extra := [offer for offer in got if offer not in want]:
            says += f" {extra[0]} has its turn later: something else offers it."
        return says

    return Case(f"after {path}, L = {length}, K = {kept}", run)


def _random_tables() -> Iterator[np.ndarray]:
    """Tables of log-probabilities, most of them with many ties."""
    rng = np.random.default_rng(2)
    for _ in range(TABLES):
        length, kept = rng.integers(1, 5), rng.integers(1, 5)
        steps = rng.integers(0, 3, size=(length, kept))  # halvings from rank to rank
        halvings = 1 + np.cumsum(steps, axis=1)
        yield (halvings * np.float32(np.log(0.5))).astype(np.float32)


def _brute_force(answer: Any) -> str | None:
    for i, table in enumerate(_random_tables()):
        length, kept = table.shape
        m = min(12, sum(kept**depth for depth in range(1, length + 1)))
        steps = best_first(table, m, lambda *where: _offers(answer, *where))
        got, want = [step.taken for step in steps], brute_force(table, m)
        if got == want:
            continue
        if len(set(got)) < len(got):
            twice = next(path for path in got if got.count(path) > 1)
            return f"Table {i}: {twice} is taken twice, so it was offered twice."
        if len(got) < len(want):
            missing = next(path for path in want if path not in got)
            return f"Table {i}: the heap runs empty; nothing ever offers {missing}."
        at = next(
            n for n, pair in enumerate(zip(got, want, strict=True)) if len({*pair}) > 1
        )
        return (
            f"Table {i}, node {at + 1}: it takes {got[at]}, but {want[at]} comes first."
        )
    return None


def _one_way(answer: Any) -> str | None:
    """Every prefix is offered once."""
    length, kept = 3, 3
    offered = [(0,)]
    for path in offered:  # grows while it is read
        offered += _offers(answer, path, length, kept)
        if len(offered) > 100:
            return f"Prefixes are offered again and again, {offered[-1]} for one."
    for path in set(offered):
        if (n := offered.count(path)) > 1:
            return f"{path} is offered {n} times; a prefix has one way onto the heap."
    if (n := len(offered)) != 39:
        return (
            f"{n} of the 39 prefixes of 3 positions and 3 candidates are ever offered."
        )
    return None


# ----------------------------------------------------------------- plausible and wrong


def _all_children(path, n_positions, n_candidates):
    if len(path) == n_positions:
        return []
    return [path + (rank,) for rank in range(n_candidates)]


def _child_of_same_rank(path, n_positions, n_candidates):
    offers = []
    if path[-1] + 1 < n_candidates:
        offers.append(path[:-1] + (path[-1] + 1,))
    if len(path) < n_positions:
        offers.append(path + (path[-1],))
    return offers


def _siblings_of_first_position_only(path, n_positions, n_candidates):
    offers = []
    if len(path) == 1 and path[-1] + 1 < n_candidates:
        offers.append((path[-1] + 1,))
    if len(path) < n_positions:
        offers.append(path + (0,))
    return offers


def _every_rank_up(path, n_positions, n_candidates):
    offers = [
        path[:i] + (path[i] + 1,) + path[i + 1 :]
        for i in range(len(path))
        if path[i] + 1 < n_candidates
    ]
    return offers + ([path + (0,)] if len(path) < n_positions else [])


def _one_of_the_two(path, n_positions, n_candidates):
    if path[-1] + 1 < n_candidates:
        return path[:-1] + (path[-1] + 1,)
    return path + (0,)


def _no_bounds(path, n_positions, n_candidates):
    return [path[:-1] + (path[-1] + 1,), path + (0,)]


EXERCISE = Exercise(
    notebook="02",
    title="the two pushes",
    name="pushes",
    hints=(
        "A rank path is a tuple. Its next sibling differs in the last rank alone; its "
        "first child is one rank longer.",
        "path[:-1] + (path[-1] + 1,) is the next sibling, if there is a candidate of "
        "that rank. path + (0,) is the first child, if there is a position for it.",
    ),
    solution=pushes,
    cases=(
        _after((0,), 3, 3),
        _after((1, 2), 3, 4),
        _after((0, 2), 3, 3),
        _after((1, 0, 1), 3, 3),
        Case("every prefix is offered exactly once", _one_way),
        Case(f"as brute force, {TABLES} random tables with ties", _brute_force),
    ),
    wrong=(
        Wrong("all children", _all_children, "The next sibling, (1,), is missing"),
        Wrong(
            "child of the same rank",
            _child_of_same_rank,
            "The first child, (1, 2, 0), is missing",
        ),
        Wrong(
            "siblings in the first position only",
            _siblings_of_first_position_only,
            "nothing ever offers",
        ),
        Wrong(
            "every rank up", _every_rank_up, "is taken twice, so it was offered twice"
        ),
        Wrong("one of the two, bare", _one_of_the_two, "expected a list of them"),
        Wrong("no bounds", _no_bounds, "the last candidate has no next sibling"),
    ),
)
