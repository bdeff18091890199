"""argmax: the target's own choice after every row of the tree.

Contract
--------
The id of a row's highest logit, the lowest id on a tie (0.0 and -0.0 tie). Padding rows
(``n_rows[b]`` and up) answer -1 and are never read. So does a row with NaN or +inf, or
with nothing but -inf; `tree_accept` then goes no further than that row.
`ddtree_numba.reference.argmax` is the specification.

Versions
--------
argmax_kernel    one block a row, which is read once
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import place, to_float32

THREADS = 512
UNROLL = 8  # elements that a thread loads before it looks at the first
WARP = 32
FULL_WARP = 0xFFFFFFFF
NOBODY = 0x7FFFFFFF  # larger than every id


@cuda.jit(device=True)
def best_of_warp(best, token):
    """Highest value and its lowest id over a warp, for every lane of it."""
    distance = WARP // 2
    while distance > 0:
        other_best = cuda.shfl_xor_sync(FULL_WARP, best, distance)
        other_token = cuda.shfl_xor_sync(FULL_WARP, token, distance)
        if other_best > best or (other_best == best and other_token < token):
            best = other_best
            token = other_token
        distance //= 2
    return best, token


@cuda.jit
def argmax_kernel(
    logits,  # [B, N, V] f32, f16 or u16 (bf16 bits)
    n_rows,  # [B] i32: live rows, if `ragged`
    ragged,  # i32: 0 if n_rows is not to be read, because all rows are live
    tokens,  # out [B, N] i32
):
    b = cuda.blockIdx.x // tokens.shape[1]
    i = cuda.blockIdx.x % tokens.shape[1]
    if ragged and i >= n_rows[b]:  # the whole block leaves
        if cuda.threadIdx.x == 0:
            tokens[b, i] = -1
        return
    row = logits[b, i]
    tile = cuda.local.array(UNROLL, np.float32)
    best = np.float32(-math.inf)
    token = np.int32(NOBODY)
    bad = False
    for start in range(cuda.threadIdx.x, row.size, UNROLL * cuda.blockDim.x):
        for j in range(UNROLL):
            at = start + j * cuda.blockDim.x
            tile[j] = np.float32(-math.inf)
            if at < row.size:
                tile[j] = to_float32(row[at])
        for j in range(UNROLL):
            x = tile[j]
            if x != x or x == np.float32(math.inf):
                bad = True
            elif x > best:  # a thread's ids grow: its first best is the lowest
                best = x
                token = np.int32(start + j * cuda.blockDim.x)

    bests = cuda.shared.array(WARP, np.float32)
    winners = cuda.shared.array(WARP, np.int32)
    best, token = best_of_warp(best, token)
    if cuda.threadIdx.x % WARP == 0:
        bests[cuda.threadIdx.x // WARP] = best
        winners[cuda.threadIdx.x // WARP] = token
    # Orders every warp's best before it is read; and one bad element spoils the row.
    bad = cuda.syncthreads_or(np.int32(bad)) != 0
    if cuda.threadIdx.x >= WARP:
        return
    best = np.float32(-math.inf)
    token = np.int32(NOBODY)
    if cuda.threadIdx.x < cuda.blockDim.x // WARP:
        best = bests[cuda.threadIdx.x]
        token = winners[cuda.threadIdx.x]
    best, token = best_of_warp(best, token)
    if cuda.threadIdx.x == 0:
        tokens[b, i] = -1 if bad or token == NOBODY else token


def argmax(
    logits: Any,
    n_rows: Any = None,
    *,
    check: bool | None = None,
    executor: str | None = None,
) -> Any:
    """The target's choice after every row: highest logit, lowest id on a tie.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 (uint16 bits in NumPy) [B, N, V]
    n_rows : int32 [B], optional
        Live rows, 0 … N; padding rows are never read. All rows are live if omitted.
    check : bool, optional
        Raise for a live row with NaN, +inf or only -inf; otherwise it answers -1. If
        omitted, host arrays are checked; device arrays cannot be.
    executor : {"gpu", "emulator", "numpy"}, optional
        If omitted: ``DDTREE_EXECUTOR``, else NumPy for host arrays, the GPU for device
        arrays.

    Returns
    -------
    int32 [B, N]
        -1 for padding rows and (unchecked) bad ones.

    Raises
    ------
    TypeError, ValueError
        For arrays of the wrong dtype, shape or side, n_rows outside 0 … N (host
        arrays), ``check=True`` with device arrays, and (checked) a bad row, naming
        request and row.
    """
    at = place(executor, default="numpy", logits=logits, n_rows=n_rows)
    checked = at.checks(check, "logits")
    given = at.check(
        logits, "logits", dtypes=(np.float32, np.float16, np.uint16), ndim=3
    )
    batch, n, vocab = given.shape
    live = None
    if n_rows is not None:
        live = at.check(
            n_rows, "n_rows", dtypes=(np.int32,), shape=(batch,), convert=True
        )
        if not at.on_device and ((live < 0) | (live > n)).any():
            raise ValueError(f"n_rows is {live.tolist()}; expected 0 … {n}")
    if vocab == 0:
        raise ValueError(f"logits has shape {given.shape}; expected V of 1 or more")
    if at.executor == "numpy":
        return reference.argmax(given, live, check=checked)
    tokens = at.empty((batch, n), np.int32)
    if batch * n:
        at.launch(
            argmax_kernel,
            batch * n,
            min(THREADS, -(-vocab // WARP) * WARP),
            at.put(given),
            at.empty((1,), np.int32) if live is None else at.put(live),
            np.int32(live is not None),
            tokens,
        )
    tokens = at.give(tokens)
    if checked and (tokens[_live_rows(n, live)] < 0).any():
        reference.argmax(given, live)  # raises, and says which row and why
    return tokens


def _live_rows(n: int, n_rows: np.ndarray | None) -> Any:
    return ... if n_rows is None else np.arange(n) < n_rows[:, None]
