"""tree_accept: walk each draft tree along the target's own tokens.

Contract
--------
From the root, step to the child whose token is the target's choice after the row you
stand on, until there is none. The rows on the way are accepted; the target's choice
after the last of them is the bonus, the root of the next round.

    token = target_tokens[row]
    child = next_token[row]                   first child
    while token_ids[child] != token:
        child = next_sibling[child]           the lowest row wins if siblings repeat

`ddtree_numba.reference.tree_accept` is the specification. A malformed tree is safe:
along valid pointers rows only grow, so a pointer that does not is a cycle, and one
outside the live rows is never followed. Either ends the walk with a status.

Versions
--------
tree_accept_kernel    one thread a request, one loop for both kinds of step
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import place, whole_number
from ddtree_numba.reference import (
    ACCEPT_BACKWARD,
    ACCEPT_OK,
    ACCEPT_OUT_OF_RANGE,
    Accepted,
)
from ddtree_numba.tree import DraftTree

THREADS = 32


@cuda.jit
def tree_accept_kernel(
    token_ids,  # [B, N] i32: token of each row
    next_token,  # [B, N] i32: first child's row, or -1
    next_sibling,  # [B, N] i32: next sibling's row, or -1
    n_rows,  # [B] i32: live rows
    target_tokens,  # [B, N] i32: the target's choice after each row
    rows,  # out [B, W] i32: accepted rows, root first, -1 padded
    accept_len,  # out [B] i32: accepted rows with the root, 1 … W
    bonus,  # out [B] i32: the target's choice after the last accepted row
    status,  # out [B] i32: ACCEPT_OK, or why the walk ended early
):
    b = cuda.grid(1)
    if b >= rows.shape[0]:
        return
    width = rows.shape[1]
    live = min(n_rows[b], token_ids.shape[1])
    rows[b, 0] = 0
    length = 1
    fault = ACCEPT_OK
    wanted = target_tokens[b, 0]
    at, child = 0, next_token[b, 0]
    # `at` grows with every step, so there are at most N of them.
    while child != -1 and length < width:
        if child < 0 or child >= live:
            fault = ACCEPT_OUT_OF_RANGE
            break
        if child <= at:
            fault = ACCEPT_BACKWARD
            break
        at = child
        # Loaded before the comparison, so that the two wait for memory together.
        token = token_ids[b, at]
        child = next_sibling[b, at]
        if wanted >= 0 and token == wanted:
            rows[b, length] = at
            length += 1
            wanted = target_tokens[b, at]
            child = next_token[b, at]
    for k in range(length, width):
        rows[b, k] = -1
    accept_len[b] = length
    bonus[b] = wanted
    status[b] = fault


def tree_accept(
    tree: DraftTree,
    target_tokens: Any,
    *,
    max_depth: int | None = None,
    executor: str | None = None,
) -> Accepted:
    """Accept the longest path of each tree that agrees with the target.

    Parameters
    ----------
    tree : DraftTree
        B trees of N rows. Need not be valid: a bad pointer ends the walk with a status.
    target_tokens : int32 [B, N]
        The target's choice after each row, from `argmax` or a sample; negative ones
        match no child.
    max_depth : int, optional
        Deepest row there can be (the block's L): the width of `rows`, less one. N - 1
        if omitted.
    executor : {"gpu", "emulator", "numpy"}, optional
        If omitted: ``DDTREE_EXECUTOR``, else NumPy for host arrays, the GPU for device
        arrays.

    Returns
    -------
    Accepted
        ``rows [B, max_depth + 1]``, ``accept_len [B]``, ``bonus [B]``, ``status [B]``,
        all int32, where and what kind of array the inputs are.

    Raises
    ------
    TypeError, ValueError
        For something else than a tree, arrays of the wrong dtype, shape or side, or a
        `max_depth` that is no count.
    """
    if not isinstance(tree, DraftTree):
        raise TypeError(f"tree is a {type(tree).__name__}; expected a DraftTree")
    names = ("token_ids", "next_token", "next_sibling", "n_rows")
    fields = {name: getattr(tree, name) for name in names}
    at = place(executor, default="numpy", target_tokens=target_tokens, **fields)
    if max_depth is not None:
        max_depth = whole_number(max_depth, "max_depth")
    i32 = (np.int32,)
    batch, n = at.check(tree.token_ids, "token_ids", dtypes=i32, ndim=2).shape
    if n == 0:
        raise ValueError("token_ids has no rows; expected a root in every request")
    width = reference.accept_width(n, max_depth)
    target_tokens = at.take(
        target_tokens, "target_tokens", dtypes=i32, shape=(batch, n), convert=True
    )
    checked = {
        name: at.take(
            x, name, dtypes=i32, shape=(batch,) if name == "n_rows" else (batch, n)
        )
        for name, x in fields.items()
    }
    if at.executor == "numpy":
        tree = dataclasses.replace(tree, **checked)
        return reference.tree_accept(tree, target_tokens, max_depth=max_depth)
    outputs = Accepted(
        at.empty((batch, width), np.int32),
        *(at.empty((batch,), np.int32) for _ in range(3)),
    )
    grid = -(-batch // THREADS)
    at.launch(
        tree_accept_kernel, grid, THREADS, *checked.values(), target_tokens, *outputs
    )
    return Accepted(*map(at.give, outputs))
