"""Notebook 00: a kernel that is right for arrays of every length."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba.emulator import OutOfBoundsError, emulate
from ddtree_numba.lab import compare
from ddtree_numba.lab.exercise import Case, Exercise, Wrong

BLOCKS, THREADS = 2, 8


@cuda.jit
def exp_kernel(log_probs, probs):  # log_probs [n] f32; probs out [n] f32
    for i in range(cuda.grid(1), log_probs.shape[0], cuda.gridsize(1)):
        probs[i] = math.exp(log_probs[i])


def _length(n: int, name: str) -> Case:
    def run(answer: Any) -> str | None:
        log_probs = -np.arange(1, n + 1, dtype=np.float32) / 4
        probs = np.full(n, -1, np.float32)
        try:
            report = emulate(answer, BLOCKS, THREADS, log_probs, probs, trace=True)
        except OutOfBoundsError as error:
            assert error.place is not None
            lane, block = error.place.lane, error.place.block[0]
            return (
                f"With n = {n}, lane {lane} of block {block} leaves the array: "
                f"{BLOCKS * THREADS} lanes run, whether or not there is an element for "
                "each."
            )
        untouched = np.flatnonzero(probs == -1)
        if untouched.size:
            return (
                f"With n = {n}, probs[{untouched[0]}] was never written"
                + (
                    f", nor were {untouched.size - 1} more"
                    if len(untouched) > 1
                    else ""
                )
                + f"; {BLOCKS * THREADS} lanes must cover {n} elements."
            )
        if report.races:
            return f"With n = {n}, several lanes write the same element."
        return compare.arrays(probs, np.exp(log_probs), "probs", rtol=1e-6)

    return Case(f"n = {n}: {name}", run)


# ----------------------------------------------------------------- plausible and wrong


@cuda.jit
def _no_guard(log_probs, probs):
    i = cuda.grid(1)
    probs[i] = math.exp(log_probs[i])


@cuda.jit
def _one_too_many(log_probs, probs):
    i = cuda.grid(1)
    if i <= log_probs.shape[0]:
        probs[i] = math.exp(log_probs[i])


@cuda.jit
def _guard_alone(log_probs, probs):
    i = cuda.grid(1)
    if i < log_probs.shape[0]:
        probs[i] = math.exp(log_probs[i])


@cuda.jit
def _blocks_do_the_same(log_probs, probs):
    for i in range(cuda.threadIdx.x, log_probs.shape[0], cuda.blockDim.x):
        probs[i] = math.exp(log_probs[i])


@cuda.jit
def _stride_of_a_block(log_probs, probs):
    for i in range(cuda.grid(1), log_probs.shape[0], cuda.blockDim.x):
        probs[i] = math.exp(log_probs[i])


EXERCISE = Exercise(
    notebook="00",
    title="a kernel for arrays of every length",
    name="exp_kernel",
    hints=(
        "Lanes too many: a lane whose i is not below log_probs.shape[0] does nothing.",
        "Lanes too few: each takes several elements. All lanes of the grid together "
        "are cuda.gridsize(1), so that is how far a lane's next element lies.",
        "One line does both: for i in range(first, n, step).",
    ),
    solution=exp_kernel,
    cases=(
        _length(16, "as long as the grid"),
        _length(13, "a little shorter"),
        _length(1, "one element"),
        _length(0, "nothing at all"),
        _length(17, "one element longer"),
        _length(40, "much longer"),
    ),
    wrong=(
        Wrong("no guard", _no_guard, "lane 5 of block 1 leaves the array"),
        Wrong("one too many", _one_too_many, "lane 1 of block 0 leaves the array"),
        Wrong("guard alone", _guard_alone, "probs[16] was never written"),
        Wrong("blocks do the same", _blocks_do_the_same, "write the same element"),
        Wrong("stride of a block", _stride_of_a_block, "write the same element"),
    ),
)
