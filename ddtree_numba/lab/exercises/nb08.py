"""Notebook 08: walk a tree along the target's own tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba import reference
from ddtree_numba.lab import compare
from ddtree_numba.lab.exercise import Case, Exercise, Wrong
from ddtree_numba.tree import DraftTree


def accept(token_ids, next_token, next_sibling, target_tokens):
    rows = [0]
    child = next_token[0]
    while child != -1:
        if token_ids[child] == target_tokens[rows[-1]]:
            rows.append(int(child))
            child = next_token[child]
        else:
            child = next_sibling[child]
    return rows, int(target_tokens[rows[-1]])


# ------------------------------------------------------------------------ wrong walks


def first_child_only(token_ids, next_token, next_sibling, target_tokens):
    rows = [0]
    child = next_token[0]
    while child != -1 and token_ids[child] == target_tokens[rows[-1]]:
        rows.append(int(child))
        child = next_token[child]
    return rows, int(target_tokens[rows[-1]])


def any_row(token_ids, next_token, next_sibling, target_tokens):
    rows = [0]
    for row in range(1, len(token_ids)):
        if token_ids[row] == target_tokens[rows[-1]]:
            rows.append(row)
    return rows, int(target_tokens[rows[-1]])


def last_sibling(token_ids, next_token, next_sibling, target_tokens):
    rows = [0]
    while True:
        child, match = next_token[rows[-1]], -1
        while child != -1:
            if token_ids[child] == target_tokens[rows[-1]]:
                match = child
            child = next_sibling[child]
        if match == -1:
            return rows, int(target_tokens[rows[-1]])
        rows.append(int(match))


def drafted_bonus(token_ids, next_token, next_sibling, target_tokens):
    rows, _ = accept(token_ids, next_token, next_sibling, target_tokens)
    return rows, int(token_ids[rows[-1]])


def without_root(token_ids, next_token, next_sibling, target_tokens):
    rows, bonus = accept(token_ids, next_token, next_sibling, target_tokens)
    return rows[1:], bonus


def own_choice(token_ids, next_token, next_sibling, target_tokens):
    rows = [0]
    child = next_token[0]
    while child != -1:
        if token_ids[child] == target_tokens[child]:
            rows.append(int(child))
            child = next_token[child]
        else:
            child = next_sibling[child]
    return rows, int(target_tokens[rows[-1]])


# ------------------------------------------------------------------------------ cases


def _walk(parents: list[int], tokens: list[int], target: list[int]) -> Callable:
    """A case of one tree."""

    def run(answer: Any) -> str | None:
        tree = DraftTree.from_parents([parents], [tokens])
        return _look_at(answer, tree, np.array(target, np.int32))

    return run


def _look_at(answer: Any, tree: DraftTree, target: np.ndarray) -> str | None:
    """What is wrong with one walk, by its likely cause."""
    want = reference.tree_accept(tree, target[None])
    rows = [int(row) for row in want.rows[0] if row >= 0]
    tokens, next_token = tree.token_ids[0], tree.next_token[0]
    next_sibling = tree.next_sibling[0]
    got = answer(tokens.copy(), next_token.copy(), next_sibling.copy(), target.copy())
    if not isinstance(got, tuple) or len(got) != 2:
        return f"accept returned {got!r:.60}; expected (rows, bonus)."
    where = f"target {target.tolist()}" if len(target) <= 8 else f"{len(target)} rows"
    problem = compare.value(got[0], rows, f"rows ({where})")
    if problem:
        return f"{problem} {_likely(got[0], rows, tree)}".rstrip()
    what = f"bonus ({where})"
    if problem := compare.value(got[1], int(want.bonus[0]), what):
        return f"{problem} It is what the target wants after the last row, {rows[-1]}."
    return None


def _likely(got: Any, want: list[int], tree: DraftTree) -> str:
    try:
        path = [int(row) for row in got]
    except (TypeError, ValueError):
        return "Rows are a list of integers."
    if path == want[1:] or path[:1] != [0]:
        return "The root, row 0, always counts."
    parents = tree.parents[0]
    for above, row in zip(path, path[1:], strict=False):
        if 0 < row < len(parents) and parents[row] != above:
            return f"Row {row} is no child of row {above}: another branch."
    if path == want[: len(path)]:
        return f"Row {want[len(path)]} is a child of row {path[-1]}, and matches."
    k = next(k for k, row in enumerate(path) if want[k : k + 1] != [row])
    token = tree.token_ids[0][path[k]]
    if k < len(want) and tree.token_ids[0][want[k]] == token:
        return f"Rows {want[k]} and {path[k]} have the same token: the lower row wins."
    return f"After row {path[k - 1]} the target did not want row {path[k]}'s token."


def _random_walks(answer: Any) -> str | None:
    rng = np.random.default_rng(8)
    for _ in range(100):
        n = int(rng.integers(1, 14))
        parents = [-1, *(int(rng.integers(0, i)) for i in range(1, n))]
        tree = DraftTree.from_parents([parents], [rng.integers(0, 3, n)])
        target = rng.integers(0, 3, n).astype(np.int32)
        if says := _look_at(answer, tree, target):
            return says
    return None


WORKED = [-1, 0, 1, 0, 3]
THE, CAT, SAT, DOG, RAN = range(5)

EXERCISE = Exercise(
    notebook="08",
    title="walk along the target's tokens",
    name="accept",
    hints=(
        "Two kinds of step: down to next_token[row] if the child you look at is what "
        "the target wants, across to next_sibling[child] if it is not.",
        "Keep rows = [0] and child = next_token[0]. While child is not -1, compare "
        "token_ids[child] with target_tokens[rows[-1]].",
    ),
    solution=accept,
    cases=(
        Case(
            "dog sat, then ran",
            _walk(WORKED, [THE, CAT, SAT, DOG, SAT], [DOG, SAT, RAN, SAT, RAN]),
        ),
        Case(
            "nothing matches",
            _walk(WORKED, [THE, CAT, SAT, DOG, SAT], [RAN, SAT, RAN, SAT, RAN]),
        ),
        Case("the whole path", _walk([-1, 0, 1, 2], [0, 5, 6, 7], [5, 6, 7, 8])),
        Case(
            "the token stands under another parent only",
            _walk([-1, 0, 0, 1], [0, 5, 6, 7], [6, 7, 7, 9]),
        ),
        Case("two siblings alike", _walk([-1, 0, 0], [0, 7, 7], [7, 1, 2])),
        Case("a root alone", _walk([-1], [0], [3])),
        Case("100 random trees with ties", _random_walks),
    ),
    wrong=(
        Wrong("first child only", first_child_only, "is a child of row 0, and matches"),
        Wrong("any row with the token", any_row, "another branch"),
        Wrong("the last of equal siblings", last_sibling, "the lower row wins"),
        Wrong("the drafted token as bonus", drafted_bonus, "after the last row"),
        Wrong("the root left out", without_root, "always counts"),
        Wrong("the child's own choice", own_choice, "is a child of row 0, and matches"),
    ),
)
