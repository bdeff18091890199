"""Notebook 06: the rescale line of the online softmax."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from ddtree_numba.lab import compare
from ddtree_numba.lab.attention import weigh
from ddtree_numba.lab.exercise import Case, Exercise, Wrong


def add_tile(top, total, acc, scores, values):
    new_top = max(top, scores.max())
    weights = weigh(scores, new_top)
    shrink = weigh(top, new_top)
    total = total * shrink + weights.sum()
    acc = acc * shrink + weights @ values
    return new_top, total, acc


# ---------------------------------------------------------------------- wrong answers


def _with(shrink: Callable[[Any, Any], Any]) -> Callable:
    """The solution with another rescale line."""

    def add_tile(top, total, acc, scores, values):
        new_top = max(top, scores.max())
        weights = weigh(scores, new_top)
        factor = shrink(top, new_top)
        with np.errstate(invalid="ignore"):
            total = total * factor + weights.sum()
            acc = acc * factor + weights @ values
        return new_top, total, acc

    return add_tile


def never(top, new_top):
    return 1.0


def upside_down(top, new_top):
    return np.float64(np.exp2(new_top - top))


def unguarded(top, new_top):
    with np.errstate(invalid="ignore"):
        return np.exp2(np.subtract(top, new_top))


def natural(top, new_top):
    return 0.0 if top == -np.inf else np.exp(top - new_top)


def tile_too(top, total, acc, scores, values):
    new_top = max(top, scores.max())
    weights = weigh(scores, new_top)
    shrink = weigh(top, new_top)
    total = (total + weights.sum()) * shrink
    acc = (acc + weights @ values) * shrink
    return new_top, total, acc


def acc_forgotten(top, total, acc, scores, values):
    new_top = max(top, scores.max())
    weights = weigh(scores, new_top)
    total = total * weigh(top, new_top) + weights.sum()
    acc = acc + weights @ values
    return new_top, total, acc


# ------------------------------------------------------------------------------ cases


def _tiles(*tiles: list[float]) -> Callable[[Any], str | None]:
    """A case: tiles of scores one after another, against a softmax over all of them."""

    def run(answer: Any) -> str | None:
        rng = np.random.default_rng(6)
        parts = [np.array(tile, np.float64) for tile in tiles]
        values = [rng.uniform(1, 2, (len(part), 3)) for part in parts]
        top, total, acc = -np.inf, 0.0, np.zeros(3)
        for scores, value in zip(parts, values, strict=True):
            top, total, acc = answer(top, total, acc.copy(), scores.copy(), value)
        return _look_at(top, total, acc, np.concatenate(parts), np.concatenate(values))

    return run


def _look_at(
    top: Any, total: Any, acc: Any, scores: np.ndarray, values: np.ndarray
) -> str | None:
    want_top = scores.max()
    weights = weigh(scores, want_top)
    if np.isnan(total) or np.isnan(acc).any():
        return (
            "NaN. While nothing is seen top is -inf, and the old sums are 0: the "
            "factor must be 0 then, not 2^(+inf), and not -inf - (-inf), which is NaN."
        )
    if top != want_top:
        return f"top, after all tiles, is {top}; expected {want_top}."
    want = weights.sum()
    total_is_wrong = compare.number(total, want, "total, after all tiles,")
    if total_is_wrong and total > want:
        return f"{total_is_wrong} Too large: old weights still count from the old top."
    if total_is_wrong:
        return (
            f"{total_is_wrong} Too small: the factor scales the old sum alone, by a "
            "power of 2."
        )
    acc_is_wrong = compare.arrays(acc, weights @ values, "acc", rtol=1e-9, atol=1e-12)
    if acc_is_wrong:
        return f"{acc_is_wrong} total is right, so acc was scaled by something else."
    return None


UNSEEN = -np.inf

EXERCISE = Exercise(
    notebook="06",
    title="the rescale line",
    name="add_tile",
    hints=(
        "total holds a sum of 2^(s - top). Which factor turns it into a sum of "
        "2^(s - new_top)? The same one does it for acc.",
        "2^(s - new_top) = 2^(s - top) · 2^(top - new_top). In a tile that sees "
        "nothing both tops may be -inf: weigh(score, top) is made for that.",
    ),
    solution=add_tile,
    cases=(
        Case("one tile (needs no rescaling)", _tiles([0.0, 1.0, -2.0])),
        Case("the largest score comes first", _tiles([3.0, 0.0], [1.0, 2.0], [0.0])),
        Case("rising gently", _tiles([0.0, 1.0], [2.0, 0.0], [3.5])),
        Case(
            "spiky: each tile beats the last", _tiles([0.0, 1.0], [4.0], [9.0, 900.0])
        ),
        Case("a single visible key", _tiles([UNSEEN] * 2, [UNSEEN, 5.0], [UNSEEN])),
        Case("an empty split", _tiles([UNSEEN, UNSEEN], [UNSEEN])),
    ),
    wrong=(
        Wrong("no rescaling", _with(never), "still count from the old top"),
        Wrong("upside down", _with(upside_down), "not 2^(+inf)"),
        Wrong("no care for -inf", _with(unguarded), "not -inf - (-inf)"),
        Wrong("e instead of 2", _with(natural), "by a power of 2"),
        Wrong("the tile scaled too", tile_too, "the old sum alone"),
        Wrong("acc forgotten", acc_forgotten, "acc was scaled by something else"),
    ),
)
