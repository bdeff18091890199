"""Notebook 07: find the line that makes float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda, float32

from ddtree_numba import backend
from ddtree_numba.emulator import emulate
from ddtree_numba.lab import compare
from ddtree_numba.lab.exercise import Case, Exercise, Wrong
from ddtree_numba.lab.gpu_types import float64_lines

SIGNATURE = (float32[::1], float32[::1], float32, float32[::1])


@cuda.jit
def rms_norm(x, weight, eps, out):
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * x[j]
    mean = total / np.float32(x.size)
    scale = np.float32(1) / math.sqrt(mean + eps)
    for j in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        out[j] = x[j] * scale * weight[j]


# ---------------------------------------------------------------------- wrong answers


@cuda.jit
def unchanged(x, weight, eps, out):
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * x[j]
    mean = total / x.size
    scale = np.float32(1) / math.sqrt(mean + eps)
    for j in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        out[j] = x[j] * scale * weight[j]


@cuda.jit
def cast_at_the_store(x, weight, eps, out):
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * x[j]
    mean = total / x.size
    scale = np.float32(1) / math.sqrt(mean + eps)
    for j in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        out[j] = np.float32(x[j] * scale * weight[j])


@cuda.jit
def cast_too_late(x, weight, eps, out):
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * x[j]
    mean = np.float32(total / x.size)
    scale = np.float32(1) / math.sqrt(mean + eps)
    for j in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        out[j] = x[j] * scale * weight[j]


@cuda.jit
def divided_as_integers(x, weight, eps, out):
    total = np.float32(0)
    for j in range(x.size):
        total += x[j] * x[j]
    mean = np.float32(total // np.float32(x.size))
    scale = np.float32(1) / math.sqrt(mean + eps)
    for j in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        out[j] = x[j] * scale * weight[j]


@cuda.jit
def another_literal(x, weight, eps, out):
    total = 0.0
    for j in range(x.size):
        total += x[j] * x[j]
    mean = total / np.float32(x.size)
    scale = np.float32(1) / math.sqrt(mean + eps)
    for j in range(cuda.threadIdx.x, x.size, cuda.blockDim.x):
        out[j] = x[j] * scale * weight[j]


# ------------------------------------------------------------------------------ cases


def _numbers(answer: Any) -> str | None:
    for n in (5, 70):
        rng = np.random.default_rng(n)
        x, weight = rng.standard_normal((2, n), np.float32)
        out = np.zeros(n, np.float32)
        emulate(answer, 1, 32, x, weight, np.float32(1e-5), out)
        mean = (x.astype(np.float64) ** 2).mean()
        want = x * weight / np.sqrt(mean + 1e-5)
        # 70 float32 additions, each off by half a unit of the 24th bit at most
        if problem := compare.arrays(out, want, "out", rtol=1e-5, atol=1e-7):
            return f"With {n} elements: {problem} The mean is a true division."
    return None


def _types(answer: Any) -> str | None:
    try:
        lines = float64_lines(answer, SIGNATURE)
    except Exception as error:
        text = " ".join(str(error).split())[:150]
        return f"Numba cannot compile it for a GPU ({type(error).__name__}): {text}"
    if not lines:
        return None
    number, text = lines[0]
    others = f", and from there {len(lines) - 1} more" if len(lines) > 1 else ""
    return f"Line {number} computes in float64: `{text}`{others}."


def _ptx(answer: Any) -> str | None:
    try:
        ptx = backend.compile_ptx(answer, SIGNATURE)
    except Exception:  # no compiler here; the types above have said it already
        return _types(answer)
    if n := ptx.count(".f64"):
        return f".f64 occurs {n} times in its PTX."
    return None


EXERCISE = Exercise(
    notebook="07",
    title="find the line that makes float64",
    name="rms_norm",
    hints=(
        "Read each line with the table above beside you. Which operands meet that "
        "are not both float32? float64_lines(rms_norm, signature) names the lines.",
        "x.size is an int64, and a float32 divided by an int64 is a float64. Cast the "
        "integer before the division, not the quotient after it.",
    ),
    solution=rms_norm,
    cases=(
        Case("the right numbers (emulator)", _numbers),
        Case("no line in float64 (Numba's types)", _types),
        Case("no .f64 in PTX (in the types, where CUDA's compiler is missing)", _ptx),
    ),
    wrong=(
        Wrong("unchanged", unchanged, "Line 5 computes in float64"),
        Wrong("cast at the store", cast_at_the_store, "Line 5 computes in float64"),
        Wrong("the quotient cast", cast_too_late, "Line 5 computes in float64"),
        Wrong("an integer division", divided_as_integers, "a true division"),
        Wrong("a bare 0.0", another_literal, "Line 2 computes in float64"),
    ),
)
