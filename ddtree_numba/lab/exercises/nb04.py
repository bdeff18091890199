"""Notebook 04: fill one row of the tree's mask."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.lab import compare
from ddtree_numba.lab.exercise import Case, Exercise, Wrong

WORKED = [-1, 0, 1, 0, 3]
"""The | cat sat | dog sat: rows in the order of their probability."""


def mask_row(parents, i, prefix_len):
    row = np.zeros(prefix_len + len(parents), bool)
    row[:prefix_len] = True
    while i >= 0:
        row[prefix_len + i] = True
        i = parents[i]
    return row


# ------------------------------------------------------------------------- wrong rows


def causal_row(parents, i, prefix_len):
    return np.arange(prefix_len + len(parents)) <= prefix_len + i


def transposed_row(parents, i, prefix_len):
    n = len(parents)
    tail = [mask_row(parents, j, 0)[i] for j in range(n)]
    return np.concatenate([np.ones(prefix_len, bool), tail])


def prefixless_row(parents, i, prefix_len):
    row = mask_row(parents, i, prefix_len)
    row[:prefix_len] = False
    return row


def tail_row(parents, i, prefix_len):
    return mask_row(parents, i, 0)


def wrong_stride_row(parents, i, prefix_len):
    n = len(parents)
    flat = np.concatenate([mask_row(parents, j, prefix_len) for j in range(n)])
    return flat[i * n : i * n + prefix_len + n]  # a row has prefix_len + n columns


def children_row(parents, i, prefix_len):
    row = np.arange(prefix_len + len(parents)) < prefix_len
    row[prefix_len:] = np.equal(parents, i)
    row[prefix_len + i] = True
    return row


def strict_row(parents, i, prefix_len):
    row = mask_row(parents, i, prefix_len)
    row[prefix_len + i] = False
    return row


# ------------------------------------------------------------------------------ cases


def _every_row(parents: list[int], prefix_len: int) -> Callable[[Any], str | None]:
    """A case that asks for every row of one tree."""

    def run(answer: Any) -> str | None:
        for i in range(len(parents)):
            got = answer(np.array(parents), i, prefix_len)
            if says := _look_at(got, parents, i, prefix_len):
                return says
        return None

    return run


def _look_at(got: Any, parents: list[int], i: int, prefix_len: int) -> str | None:
    """What is wrong with one row, by its likely cause."""
    want = mask_row(parents, i, prefix_len)
    what = f"mask_row(parents={_short(parents)}, i={i}, prefix_len={prefix_len})"
    problem = compare.arrays(got, want, what)
    if problem is None:
        return None
    row = np.asarray(got)
    if row.shape != want.shape:
        return f"{problem} Columns are [prefix, tail]: S first, then a tree row each."
    row = row.astype(bool)
    if np.array_equal(row, want):
        return problem  # right but for its dtype
    if not row[:prefix_len].all():
        says = f"Row {i} does not see the prefix, columns 0 … {prefix_len - 1}"
        # Row 0 was right, or it would have been the one to complain.
        return says + (f", row 0 did: is the stride {len(want)}?" if i else ".")
    tail = row[prefix_len:]
    below = [j for j in range(i + 1, len(parents)) if mask_row(parents, j, 0)[i]]
    if below and tail[below].all():
        return (
            f"Row {i} sees row {below[0]}, its descendant: the transpose. "
            "A row sees those above it."
        )
    j = int(np.flatnonzero(tail != want[prefix_len:])[0])
    if not tail[j]:
        who = "itself" if j == i else f"row {j}, its ancestor"
        return f"Row {i} does not see {who} (column {prefix_len} + {j})."
    if j in below:
        return f"Row {i} sees row {j}, its descendant. A row sees those above it."
    return (
        f"Row {i} sees row {j}, which is not its ancestor: "
        f"column {prefix_len} + {j} belongs to another branch."
    )


def _short(parents: list[int]) -> str:
    return str(parents) if len(parents) <= 8 else f"[… {len(parents)} rows]"


def _random_parents(n: int) -> list[int]:
    rng = np.random.default_rng(4)
    return [-1, *(int(rng.integers(0, i)) for i in range(1, n))]


EXERCISE = Exercise(
    notebook="04",
    title="fill a row of the mask",
    name="mask_row",
    hints=(
        "The row has prefix_len + len(parents) columns. Two kinds of them are True: "
        "all of the prefix, and the tail columns of i and of its ancestors.",
        "Start at i, set column prefix_len + i, and go on with i = parents[i] until "
        "that is -1.",
    ),
    solution=mask_row,
    cases=(
        Case("a chain (a causal row passes this one)", _every_row([-1, 0, 1, 2], 3)),
        Case("The | cat sat | dog sat", _every_row(WORKED, 3)),
        Case("two siblings, no prefix", _every_row([-1, 0, 0], 0)),
        Case("33 rows at random", _every_row(_random_parents(33), 5)),
    ),
    wrong=(
        Wrong("causal", causal_row, "which is not its ancestor"),
        Wrong("transposed", transposed_row, "the transpose"),
        Wrong("prefix missing", prefixless_row, "does not see the prefix"),
        Wrong("tail only", tail_row, "[prefix, tail]"),
        Wrong("row 0 only: a wrong stride", wrong_stride_row, "stride"),
        Wrong("children, not ancestors", children_row, "sees row 1, its descendant."),
        Wrong("not itself", strict_row, "does not see itself"),
    ),
)
