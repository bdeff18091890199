"""argmax: the target's own choice after every row of the tree.

Contract
--------
The id of a row's highest logit, the lowest id on a tie (0.0 and -0.0 tie). Padding rows
(``n_rows[b]`` and up) answer -1 and are never read. So does a row with NaN or +inf, or
with nothing but -inf; `tree_accept` then goes no further than that row.
`ddtree_numba.reference.argmax` is the specification.

Kernels
-------
argmax_scan_kernel   a warp a span of 1024 logits: the highest, and the piece of eight
                     that holds it first
argmax_pick_kernel   a warp a row: the best span's piece, and the place in it

The rows of one tree are too few to fill a GPU with a block each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import place, to_float32
from ddtree_numba.kernels.wide import (
    FULL_WARP,
    PIECE,
    WARP,
    load_piece,
    loads_wide,
    redux_min,
    warp_max,
)

THREADS = 128
PIECES = 4  # of eight logits, that a lane of the scan holds
HELD = PIECES * PIECE
SPAN = WARP * HELD  # logits of a warp
NOBODY = 0xFFFFFFFF  # behind every piece


@cuda.jit(device=True)
def best_of_warp(best, start):
    """Highest value of a warp and the lowest start that goes with it."""
    highest = warp_max(best)
    return highest, redux_min(start if best == highest else np.uint32(NOBODY))


@cuda.jit
def argmax_scan_kernel(
    logits,  # [B, N, V] f32, f16 or u16 (bf16 bits)
    wide,  # i32: whether `loads_wide` allows loads of 16 bytes
    n_rows,  # [B] i32: live rows, if `ragged`
    ragged,  # i32: 0 if n_rows is not to be read, because all rows are live
    tops,  # out [B*N, S] f32: every span's highest logit, NaN if it is bad
    starts,  # out [B*N, S] i32: where the first piece starts that holds it
):
    tile = cuda.local.array(HELD, np.float32)
    lane = np.uint32(cuda.threadIdx.x % WARP)
    r = np.uint32(cuda.blockIdx.x)
    s = np.uint32((cuda.blockIdx.y * THREADS + cuda.threadIdx.x) // WARP)
    n = np.uint32(logits.shape[1])
    b = np.uint32(r // n)
    i = np.uint32(r - b * n)
    # The whole warp leaves.
    if s >= tops.shape[1] or (ragged and i >= n_rows[b]):
        return
    row = logits[b, i]
    first = np.uint32(s * SPAN + lane * PIECE)
    for p in range(PIECES):
        load_piece(row, first + np.uint32(p * WARP * PIECE), wide, tile, p * PIECE)
    best = np.float32(-math.inf)
    start = np.uint32(first)
    bad = False
    for p in range(PIECES):
        x = tile[p * PIECE]
        for j in range(PIECE):
            bad |= not tile[p * PIECE + j] < np.float32(math.inf)  # NaN is not either
            x = cuda.libdevice.fmaxf(x, tile[p * PIECE + j])
        if x > best:  # a lane's pieces ascend: its first best is the lowest
            best = x
            start = np.uint32(first + np.uint32(p * WARP * PIECE))
    best, start = best_of_warp(best, start)
    bad = cuda.any_sync(FULL_WARP, bad)
    if lane == 0:
        tops[r, s] = np.float32(math.nan) if bad else best
        starts[r, s] = start


@cuda.jit
def argmax_pick_kernel(
    logits,  # [B, N, V] f32, f16 or u16 (bf16 bits)
    n_rows,  # [B] i32: live rows, if `ragged`
    ragged,  # i32: 0 if n_rows is not to be read, because all rows are live
    tops,  # [B*N, S] f32
    starts,  # [B*N, S] i32
    tokens,  # out [B, N] i32
):
    lane = np.uint32(cuda.threadIdx.x % WARP)
    r = np.uint32(cuda.grid(1) // WARP)
    if r >= tops.shape[0]:  # the whole warp leaves
        return
    n = np.uint32(tokens.shape[1])
    b = np.uint32(r // n)
    i = np.uint32(r - b * n)
    if ragged and i >= n_rows[b]:
        if lane == 0:
            tokens[b, i] = -1
        return
    best = np.float32(-math.inf)
    start = np.uint32(NOBODY)
    bad = False
    for s in range(cuda.threadIdx.x % WARP, tops.shape[1], WARP):
        x, its_start = tops[r, np.uint32(s)], np.uint32(starts[r, np.uint32(s)])
        bad |= x != x
        if x > best:  # a lane's spans ascend
            best, start = x, its_start
    best, start = best_of_warp(best, start)
    bad = cuda.any_sync(FULL_WARP, bad)
    if bad or best == np.float32(-math.inf):
        if lane == 0:
            tokens[b, i] = -1
        return
    at = np.uint32(start + lane)
    here = lane < PIECE and at < logits.shape[2]
    x = to_float32(logits[b, i, at if here else start])
    lanes = cuda.ballot_sync(FULL_WARP, here and x == best)
    if lane == 0:
        tokens[b, i] = start + np.uint32(cuda.ffs(lanes) - 1)


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
        placed = at.put(given)
        ragged = np.int32(live is not None)
        live_rows = at.empty((1,), np.int32) if live is None else at.put(live)
        spans = -(-vocab // SPAN)
        tops = at.empty((batch * n, spans), np.float32)
        starts = at.empty((batch * n, spans), np.int32)
        at.launch(
            *(argmax_scan_kernel, (batch * n, -(-spans * WARP // THREADS)), THREADS),
            *(placed, np.int32(loads_wide(placed)), live_rows, ragged, tops, starts),
        )
        at.launch(
            *(argmax_pick_kernel, -(-batch * n * WARP // THREADS), THREADS),
            *(placed, live_rows, ragged, tops, starts, tokens),
        )
    tokens = at.give(tokens)
    if checked and (tokens[_live_rows(n, live)] < 0).any():
        reference.argmax(given, live)  # raises, and says which row and why
    return tokens


def _live_rows(n: int, n_rows: np.ndarray | None) -> Any:
    return ... if n_rows is None else np.arange(n) < n_rows[:, None]
