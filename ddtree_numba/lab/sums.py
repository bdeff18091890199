"""Four kernels that sum the same numbers, and what their types cost (notebook 07)."""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

import numpy as np
from numba import cuda, float32, int32

from ddtree_numba import backend

if TYPE_CHECKING:
    import pandas as pd

# Each is one thread: `out[j]` is the sum of the first `lengths[j]` elements of `x`.
# x [T] f32, lengths [R] i32 rising, out [R] f32.


@cuda.jit
def literal_kernel(x, lengths, out):
    total = 0.0  # what is it on the GPU?
    n = 0
    for j in range(out.size):
        while n < lengths[j]:
            total += x[n]
            n += 1
        out[j] = total


@cuda.jit
def float32_kernel(x, lengths, out):
    total = np.float32(0)
    n = 0
    for j in range(out.size):
        while n < lengths[j]:
            total += x[n]
            n += 1
        out[j] = total


@cuda.jit
def float64_kernel(x, lengths, out):
    total = np.float64(0)
    n = 0
    for j in range(out.size):
        while n < lengths[j]:
            total += x[n]
            n += 1
        out[j] = total


@cuda.jit
def pair_kernel(x, lengths, out):
    total = np.float32(0)
    lost = np.float32(0)  # what rounding took from the total (Knuth's two-sum)
    n = 0
    for j in range(out.size):
        while n < lengths[j]:
            new = total + x[n]
            came = new - total
            lost += (total - (new - came)) + (x[n] - came)
            total = new
            n += 1
        out[j] = total + lost


KERNELS = {
    "0.0": literal_kernel,
    "float32": float32_kernel,
    "float64": float64_kernel,
    "float32 pair": pair_kernel,
}
SIGNATURE = (float32[::1], int32[::1], float32[::1])

RECORDED = {
    "0.0": {"f32": 0, "f64": 1, "convert": 1},
    "float32": {"f32": 1, "f64": 0, "convert": 0},
    "float64": {"f32": 0, "f64": 1, "convert": 1},
    "float32 pair": {"f32": 7, "f64": 0, "convert": 0},
}
"""What `instructions` found for sm_90 with numba-cuda 0.30.4."""


def sum_errors(executor: str, most: int = 200_000) -> pd.DataFrame:
    """Relative errors of the four kernels' sums of 0.1, at rising lengths.

    Parameters
    ----------
    executor : {"gpu", "emulator"}
    most : int
        The longest sum.

    Returns
    -------
    pandas.DataFrame
        Columns kernel (as in `KERNELS`), length, error.
    """
    import pandas as pd

    steps = math.log10(most)
    lengths = np.unique(np.logspace(0, steps, round(3 * steps) + 1).astype(np.int32))
    x = np.full(most, 0.1, np.float32)
    exact = lengths * float(x[0])  # a product of 18 and 24 bits: exact in float64
    tables = []
    for name, kernel in KERNELS.items():
        at = backend.place(executor, x=x)
        out = at.full(lengths.shape, 0, np.float32)
        at.launch(kernel, 1, 1, at.put(x), at.put(lengths), out)
        errors = np.abs(at.give(out) / exact - 1)
        tables.append(
            pd.DataFrame({"kernel": name, "length": lengths, "error": errors})
        )
    return pd.concat(tables, ignore_index=True)


def instructions() -> tuple[pd.DataFrame, str]:
    """Arithmetic instructions of the four kernels in PTX, an element summed.

    Returns
    -------
    table : pandas.DataFrame
        One row a kernel; columns f32, f64 and convert (between the two).
    source : str
        Whether they were compiled just now or recorded before.
    """
    import pandas as pd

    counts: dict[str, dict[str, float]] = {}
    try:
        for name, kernel in KERNELS.items():
            counts[name] = count_per_element(backend.compile_ptx(kernel, SIGNATURE))
        source = "compiled just now, for sm_90"
    except Exception:  # no compiler here: it comes with the extra `gpu`
        counts = {name: dict(row) for name, row in RECORDED.items()}
        source = "recorded earlier, for sm_90: this machine has no CUDA compiler"
    return pd.DataFrame(counts).T, source


def count_per_element(ptx: str) -> dict[str, float]:
    """Arithmetic on floats in the PTX of a sum, by type, for each load of an element.

    The compiler unrolls the loop; so many loads there are, so many elements it sums.
    """
    loads = len(re.findall(r"ld\.global\.f32", ptx))
    return {
        kind: len(re.findall(pattern, ptx)) // loads
        for kind, pattern in {
            "f32": r"\b(?:add|sub|mul|fma)(?:\.rn)?(?:\.ftz)?\.f32",
            "f64": r"\b(?:add|sub|mul|fma)(?:\.rn)?\.f64",
            "convert": r"\bcvt\.(?:\w+\.)*f64\.f32",
        }.items()
    }


def ptx_lines(kernel: Any, signature: tuple, what: str, most: int = 4) -> list[str]:
    """The first lines of a kernel's PTX that hold `what`, if it can be compiled here.

    Returns
    -------
    list of str
        At most `most`; one that says why there are none.
    """
    try:
        ptx = backend.compile_ptx(kernel, signature)
    except Exception:
        return ["(no CUDA compiler here: pip install ddtree_numba[gpu] brings it)"]
    found = [" ".join(line.split()) for line in ptx.splitlines() if what in line]
    return found[:most] or [f"(no {what})"]
