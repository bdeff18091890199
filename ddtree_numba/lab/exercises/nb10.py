"""Notebook 10: choose how many splits keep a card busy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ddtree_numba.lab import compare
from ddtree_numba.lab.exercise import Case, Exercise, Wrong
from ddtree_numba.lab.recorded import recorded, split_times

ROWS, KEYS = 64, 32  # of a block, and of a tile of keys
PROCESSORS = 132  # of the card whose times are recorded


def pick_splits(blocks, tiles, processors):
    def cost(splits):
        rounds = -(-blocks * splits // processors)
        return rounds * (-(-tiles // splits) + 1) + splits / 10

    return min(range(1, tiles + 1), key=cost)


# ------------------------------------------------------------------------ wrong picks


def one(blocks, tiles, processors):
    return 1


def all_of_them(blocks, tiles, processors):
    return tiles


def fill_once(blocks, tiles, processors):
    return processors // blocks


def fill_at_least(blocks, tiles, processors):
    return min(-(-processors // blocks), tiles)


def always_four(blocks, tiles, processors):
    return 4


# ------------------------------------------------------------------------------ cases


def _cost(splits: int, blocks: int, tiles: int, processors: int) -> float:
    rounds = -(-blocks * splits // processors)
    return rounds * (-(-tiles // splits) + 1) + splits / 10


def _model(blocks: int, tiles: int, processors: int) -> Callable[[Any], str | None]:
    """A case of one shape and card, by the model."""

    def run(answer: Any) -> str | None:
        got = answer(blocks, tiles, processors)
        where = f"{blocks} blocks, {tiles} tiles, {processors} processors"
        want = pick_splits(blocks, tiles, processors)
        if says := _not_a_count(got, tiles, where):
            return says
        mine, best = (_cost(p, blocks, tiles, processors) for p in (int(got), want))
        if mine <= best:
            return None
        return (
            f"{where}: {got} splits cost {mine:.1f}, {want} cost {best:.1f}. "
            + _why(int(got), want, blocks, processors)
        )

    return run


def _not_a_count(got: Any, tiles: int, where: str) -> str | None:
    if problem := compare.value(isinstance(got, bool), False, "a bool"):
        return problem
    try:
        whole = int(got) == got
    except (TypeError, ValueError):
        whole = False
    if not whole or not 1 <= got <= tiles:
        return f"{where}: you pick {got!r:.40}; expected a whole number, 1 … {tiles}."
    return None


def _why(got: int, want: int, blocks: int, processors: int) -> str:
    if got > want:
        last = blocks * got % processors
        if last and last < processors // 2:
            return f"The last round has only {last} blocks for {processors} processors."
        return "Every split more has to be merged."
    if blocks * got < processors:
        return f"Only {blocks * got} of {processors} processors have work."
    return "Its rounds are longer than they need be."


def _measured(answer: Any) -> str | None:
    """What was recorded on a card: at most a fifth slower than the best."""
    for shape, times in split_times(recorded()).items():
        batch, n, heads, prefix = shape
        blocks, tiles = batch * -(-n * heads // ROWS), -(-(prefix + n) // KEYS)
        got = answer(blocks, tiles, PROCESSORS)
        where = f"{shape}: {blocks} blocks, {tiles} tiles"
        if says := _not_a_count(got, tiles, where):
            return says
        # Not every number was measured: the better of its two neighbours speaks for it.
        near = [max((p for p in times if p <= got), default=min(times))]
        near.append(min((p for p in times if p >= got), default=max(times)))
        mine = min(near, key=lambda p: times[p])
        best = min(times, key=lambda p: times[p])
        if times[mine] > 1.2 * times[best]:
            return (
                f"{where}: {mine} splits took {times[mine]:.0f} µs, {best} took "
                f"{times[best]:.0f} µs."
            )
    return None


EXERCISE = Exercise(
    notebook="10",
    title="choose the splits",
    name="pick_splits",
    hints=(
        "Write the cost as a function of P first. ⌈a / b⌉ is -(-a // b).",
        "min(range(1, tiles + 1), key=cost) tries them all; there are few.",
    ),
    solution=pick_splits,
    cases=(
        Case("33 blocks, 132 processors", _model(33, 66, 132)),
        Case("1 block", _model(1, 1024, 132)),
        Case("5 blocks", _model(5, 258, 132)),
        Case("264 blocks: more than processors", _model(264, 258, 132)),
        Case("40 blocks, 108 processors", _model(40, 64, 108)),
        Case("1 block, 2 tiles", _model(1, 2, 132)),
        Case("the recorded times", _measured),
    ),
    wrong=(
        Wrong("never split", one, "of 132 processors have work"),
        Wrong("a split a tile", all_of_them, "has to be merged"),
        Wrong("fill the card once", fill_once, "expected a whole number, 1"),
        Wrong("at least fill the card", fill_at_least, "The last round has only"),
        Wrong("always four", always_four, "expected a whole number, 1 … 2"),
    ),
)
