"""Notebook 03: put the barriers of the tree builder back where they are needed."""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32, int32

from ddtree_numba import reference
from ddtree_numba.emulator import BarrierDivergenceError, Report, emulate
from ddtree_numba.lab.exercise import Case, Complaint, Exercise, Wrong
from ddtree_numba.lab.small_build import (
    WARP,
    best_slot,
    grow_kernel,
    hasty_kernel,
    outputs,
    random_table,
    read_node,
    start,
    write_step,
)

M = 8


def _grow(answer: Any, seed: int, **options: Any) -> tuple[Report, np.ndarray, Any]:
    table = random_table(4, 4, seed)
    parents, scores = outputs(M)
    try:
        report = emulate(answer, 1, WARP, table, parents, scores, **options)
    except BarrierDivergenceError as error:
        raise Complaint(
            "Some lanes wait at a barrier that the others never come to: it stands "
            "inside an if. All lanes of a block must meet at every barrier."
        ) from error
    ids = np.tile(np.arange(4, dtype=np.int32), (1, 4, 1))
    return report, parents, reference.tree_build(table[None], ids, M).parents[0]


def _parity(order: str) -> Case:
    def run(answer: Any) -> str | None:
        for seed in range(3):
            _, parents, want = _grow(answer, seed, order=order)
            if not np.array_equal(parents, want):
                return (
                    f"Table {seed}, lanes in {order} order: parents "
                    f"{parents.tolist()}; expected {want.tolist()}."
                )
        return None

    return Case(f"the same tree, lanes in {order} order", run)


def _no_races(answer: Any) -> str | None:
    report, _, _ = _grow(answer, 0, trace=True)
    if not report.races:
        return None
    race = report.races[0]
    (first, second), (one, other) = race.kinds, race.lanes
    index = ", ".join(map(str, race.index))
    return (
        f"{race.array}[{index}]: a {first} by lane {one} and a {second} by lane "
        f"{other}, and no barrier between them (raced for in {race.count} places)."
    )


def _two_a_step(answer: Any) -> str | None:
    report, _, _ = _grow(answer, 0, trace=True)
    barriers = len(report.barriers) - 1  # one ends start
    if barriers <= 2 * M:
        return None
    return f"{barriers} barriers for {M} rows: two a row are enough, each costs time."


# ----------------------------------------------------------------- plausible and wrong


@cuda.jit
def _none(table, parents, scores):
    waiting = cuda.shared.array(32, float32)
    node = cuda.shared.array((32, 3), int32)
    start(table, waiting, node, parents, scores)
    for row in range(1, parents.shape[0]):
        slot, score = best_slot(waiting)
        taken = read_node(node, slot)
        write_step(table, waiting, node, parents, scores, row, slot, score, taken)


@cuda.jit
def _after_reading_only(table, parents, scores):
    waiting = cuda.shared.array(32, float32)
    node = cuda.shared.array((32, 3), int32)
    start(table, waiting, node, parents, scores)
    for row in range(1, parents.shape[0]):
        slot, score = best_slot(waiting)
        taken = read_node(node, slot)
        cuda.syncthreads()
        write_step(table, waiting, node, parents, scores, row, slot, score, taken)


@cuda.jit
def _for_the_writers_only(table, parents, scores):
    waiting = cuda.shared.array(32, float32)
    node = cuda.shared.array((32, 3), int32)
    start(table, waiting, node, parents, scores)
    for row in range(1, parents.shape[0]):
        slot, score = best_slot(waiting)
        taken = read_node(node, slot)
        cuda.syncthreads()
        if cuda.threadIdx.x < 2:
            write_step(table, waiting, node, parents, scores, row, slot, score, taken)
            cuda.syncthreads()


@cuda.jit
def _everywhere(table, parents, scores):
    waiting = cuda.shared.array(32, float32)
    node = cuda.shared.array((32, 3), int32)
    start(table, waiting, node, parents, scores)
    for row in range(1, parents.shape[0]):
        slot, score = best_slot(waiting)
        cuda.syncthreads()
        taken = read_node(node, slot)
        cuda.syncthreads()
        write_step(table, waiting, node, parents, scores, row, slot, score, taken)
        cuda.syncthreads()


EXERCISE = Exercise(
    notebook="03",
    title="the builder's barriers",
    name="grow_kernel",
    hints=(
        "Ask of each shared array: who wrote what I read here, and could it still be "
        "on its way? And who will overwrite what I read before I have read it?",
        "best_slot and read_node read in all lanes; write_step writes in two. Between "
        "a read by all and a write by two there must be a barrier, in both directions.",
    ),
    solution=grow_kernel,
    cases=(
        _parity("forward"),
        _parity("reverse"),
        _parity("shuffled"),
        Case("no races", _no_races),
        Case("no barrier too many", _two_a_step),
    ),
    wrong=(
        Wrong("none", _none, "lanes in reverse order: parents"),
        Wrong("after reading only", _after_reading_only, "and no barrier between them"),
        Wrong("after writing only", hasty_kernel, "a read by lane"),
        Wrong("for the writers only", _for_the_writers_only, "it stands inside an if"),
        Wrong("everywhere", _everywhere, "two a row are enough"),
    ),
)
