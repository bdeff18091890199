"""kv_compact: move the accepted rows of the KV tail to its front, in place.

Contract
--------
Tree row i of request b lies at cache row ``prefix_lens[b] + i``. After `tree_accept`
only a path remains: its k-th row moves to ``prefix_lens[b] + k``, in every layer, and
the prefix grows by ``accept_len[b]``. What stands behind it is dropped (left as it is).

`ddtree_numba.reference.kv_compact` is the specification. In place is safe without a
barrier because a column is one thread's alone, and because accepted rows ascend: the
k-th is never before k, so what a step overwrites was read by an earlier step, or was
not accepted.

Versions
--------
kv_compact_kernel    one thread a column of a layer of a request
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import (
    check_writeable,
    place,
    reinterpret,
    with_leading_axis,
)

THREADS = 128


@cuda.jit
def kv_compact_kernel(
    prefix_lens,  # [B] i32: prefix lengths before
    rows,  # [B, W] i32: accepted rows, ascending
    accept_len,  # [B] i32: how many of them count
    kv_cache,  # in and out [layers, B, S_max, D] any element
    new_prefix_lens,  # out [B] i32: prefix lengths after
):
    b = cuda.blockIdx.x
    layer = cuda.blockIdx.y
    column = cuda.blockIdx.z * cuda.blockDim.x + cuda.threadIdx.x
    if column >= kv_cache.shape[3]:
        return
    start = prefix_lens[b]
    count = min(accept_len[b], rows.shape[1])
    if start < 0:
        count = 0
    kept, before = 0, -1
    while kept < count:
        row = rows[b, kept]
        # Unchecked input ends here at the latest: nothing outside the cache is touched.
        if row <= before or start + row >= kv_cache.shape[2]:
            break
        if row != kept:
            kv_cache[layer, b, start + kept, column] = kv_cache[
                layer, b, start + row, column
            ]
        before = row
        kept += 1
    if layer == 0 and column == 0:
        new_prefix_lens[b] = start + kept


def kv_compact(
    kv_cache: Any,
    prefix_lens: Any,
    rows: Any,
    accept_len: Any,
    *,
    executor: str | None = None,
) -> Any:
    """Move the accepted tail rows to the front of the tail, in place.

    Parameters
    ----------
    kv_cache : 1-, 2-, 4- or 8-byte elements [B, S_max, D] or [layers, B, S_max, D]
        Changed in place, wherever it lies; strided views are fine.
    prefix_lens : int32 [B]
        Prefix lengths of the round that ends: tree row i lies at ``prefix_lens[b]+i``.
    rows : int32 [B, W]
        Accepted rows, ascending, from `tree_accept`.
    accept_len : int32 [B]
        Accepted rows, 0 … W.
    executor : {"gpu", "emulator", "numpy"}, optional
        If omitted: ``DDTREE_EXECUTOR``, else NumPy for host arrays, the GPU for device
        arrays.

    Returns
    -------
    int32 [B]
        The new prefix lengths, ``prefix_lens + accept_len``, in the inputs' kind.

    Raises
    ------
    TypeError, ValueError
        For arrays of the wrong dtype, shape or side, a read-only cache, and (host
        arrays) rows that do not ascend or do not lie in the cache. Device arrays are
        not looked at: there a request stops at its first bad row.
    """
    at = place(
        executor,
        default="numpy",
        kv_cache=kv_cache,
        prefix_lens=prefix_lens,
        rows=rows,
        accept_len=accept_len,
    )
    check_writeable(kv_cache, "kv_cache")
    cache = at.check(kv_cache, "kv_cache", dtypes=None)
    if cache.ndim not in (3, 4) or 0 in (*cache.shape[:-3], cache.shape[-1]):
        raise ValueError(
            f"kv_cache has shape {cache.shape}; expected (B, S_max, D) or "
            "(layers, B, S_max, D) with a layer and a column at least"
        )
    if cache.dtype.hasobject or cache.dtype.itemsize not in (1, 2, 4, 8):
        raise TypeError(
            f"kv_cache has dtype {cache.dtype}; expected elements of 1, 2, 4 or 8 bytes"
        )
    batch = cache.shape[-3]
    prefix_lens, rows, accept_len = (
        at.check(x, name, dtypes=(np.int32,), shape=shape, convert=True)
        for x, name, shape in (
            (prefix_lens, "prefix_lens", (batch,)),
            (rows, "rows", (batch, None)),
            (accept_len, "accept_len", (batch,)),
        )
    )
    if not at.on_device:
        reference.check_compaction(cache, prefix_lens, rows, accept_len)
    if at.executor == "numpy":
        return reference.kv_compact(cache, prefix_lens, rows, accept_len)
    placed = at.put(cache)
    words = _as_words(placed)
    layers, _, _, d = words.shape
    inputs = map(at.put, (prefix_lens, rows, accept_len))
    new_prefix_lens = at.empty((batch,), np.int32)
    grid = (batch, layers, -(-d // THREADS))
    at.launch(kv_compact_kernel, grid, THREADS, *inputs, words, new_prefix_lens)
    if placed is not cache:  # a host cache that went to the GPU comes back
        cache[...] = placed.copy_to_host()
    return at.give(new_prefix_lens)


def _as_words(cache: Any) -> Any:
    """A cache as [layers, B, S_max, D] unsigned integers: moving needs no more."""
    if cache.ndim == 3:
        cache = with_leading_axis(cache)
    return reinterpret(cache, f"u{cache.dtype.itemsize}")
