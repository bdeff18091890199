"""tree_build: the draft tree of the most probable prefixes, best first.

Contract
--------
A node is a rank path ``(r1 … rd)``: the r1-th candidate of position 1, and so on. Its
score is the float64 sum of its candidates' log-probabilities, left to right. The tree
holds the ``n_draft_nodes`` best nodes under the root; rows stand in the order score
falling, ties by rank path, lexicographic. A score of -inf is never a node, and a
request with NaN anywhere is its root alone. `ddtree_numba.reference.tree_build` is the
specification.

Frontier
--------
Best-first search keeps a frontier of candidates. Taking one as the next row puts two
others in its place, its first child and its next sibling: neither can score higher. So
M rows need at most M candidates at a time, and the next row's parent is a row already.

Ties need the candidates' order by rank path, yet no path is ever compared: each
candidate knows its place in that order. Between a candidate and its next sibling stand
only the candidate's descendants, none of which is in the frontier before it is taken.
So its child and its sibling take its place, the child first, and every candidate behind
moves up by one::

    order     0      1      2              0      1        2      3
    frontier  (0,2)  (1,0)  (2)    take    (0,2)  (1,0,0)  (1,1)  (2)
                     ^                            child    sibling

Versions
--------
tree_build_kernel    one block a request: one warp selects the rows, M steps one after
                     the other, then all threads write them out
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import Place, is_device_array, place, whole_number
from ddtree_numba.tree import WORD_BITS, DraftTree, n_words

MAX_DRAFT_NODES = 1024
MAX_ROWS = MAX_DRAFT_NODES + 1
THREADS = 256
WARP = 32
LOWEST, HIGHEST = map(float, reference.FLOAT32_RANGE)
FULL_WARP = 0xFFFFFFFF
SIBLING, CHILD = 0, 1  # the lanes that put a taken row's two candidates in its place
NO_ORDER = NO_SLOT = 0xFFFF  # behind every candidate, none of them


@cuda.jit(device=True)
def has_nan(table):
    """Whether a request's log-probs hold NaN; a block barrier."""
    found = 0
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    for position in range(warp, table.shape[0], cuda.blockDim.x // WARP):
        for rank in range(lane, table.shape[1], WARP):
            x = table[position, rank]
            if x != x:
                found = 1
    return cuda.syncthreads_or(found) != 0


@cuda.jit(device=True)
def best_candidate(scores, orders, count, taken_order):
    """The warp finds the best of `count` candidates, or slot `NO_SLOT` if none is left.

    On the way it makes room for the newest candidate, a child that took the place of
    its parent: whoever stood there (its new sibling too) or behind moves up by one.
    """
    best = np.float64(-math.inf)
    order = np.uint32(NO_ORDER)
    slot = np.uint32(NO_SLOT)
    s = np.uint32(cuda.threadIdx.x)
    while s < count:
        score = scores[s]
        own = np.uint32(orders[s])
        if own >= taken_order and s + np.uint32(1) != count:
            own += np.uint32(1)
            orders[s] = own
        if (score > best) | ((score == best) & (own < order)):
            best, order, slot = score, own, s
        s += np.uint32(WARP)
    mine = best
    for distance in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL_WARP, best, distance)
        if other > best:
            best = other
    if best == -math.inf:  # in every lane alike
        return best, order, np.uint32(NO_SLOT)
    tied = cuda.ballot_sync(FULL_WARP, mine == best)
    if tied & (tied - np.uint32(1)):  # more than one lane
        lowest = np.int32(order) if mine == best else np.int32(NO_ORDER)
        for distance in (16, 8, 4, 2, 1):
            other_order = cuda.shfl_xor_sync(FULL_WARP, lowest, distance)
            if other_order < lowest:
                lowest = other_order
        tied = cuda.ballot_sync(FULL_WARP, mine == best and np.int32(order) == lowest)
    winner = cuda.ffs(tied) - 1
    order = np.uint32(cuda.shfl_sync(FULL_WARP, np.int32(order), winner))
    slot = np.uint32(cuda.shfl_sync(FULL_WARP, np.int32(slot), winner))
    return best, order, slot


@cuda.jit(device=True)
def score_of(table, parent_score, depth, rank):
    """Score of a parent's child, -inf if the table ends before it."""
    if depth > table.shape[0] or rank >= table.shape[1]:
        return np.float64(-math.inf)
    return parent_score + np.float64(table[depth - np.uint32(1), rank])


@cuda.jit(device=True)
def select_rows(
    table, budget, row_scores, row_parents, row_depths, row_ranks, row_before
):
    """One warp takes the best candidate as the next row until `budget` are taken.

    Fills the rows' arrays from row 1 on and returns how many rows there are. A slot of
    the frontier holds one candidate after the other, each the next sibling of the one
    before; row r's first child starts slot r.

    A lone warp is slow in proportion to its instructions, so rows, slots and ranks are
    unsigned: a signed index costs Numba a test for a negative one.
    """
    scores = cuda.shared.array(MAX_DRAFT_NODES, np.float64)
    orders = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)  # place by rank path
    parents = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)  # row
    ranks = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    before = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)  # previous sibling's row
    lane = cuda.threadIdx.x
    if lane == 0:
        row_scores[0] = np.float64(0.0)
        row_parents[0] = 0
        row_depths[0] = 0
        row_ranks[0] = 0
        orders[0] = 0
        parents[0] = 0
        ranks[0] = 0
        before[0] = 0
        scores[0] = score_of(table, row_scores[0], np.uint32(1), np.uint32(0))
    cuda.syncwarp()  # the first candidate is there before it is read
    order = np.uint32(NO_ORDER)  # of the row taken last
    row = np.uint32(1)
    while row <= budget:
        score, order, slot = best_candidate(scores, orders, row, order)
        if slot == np.uint32(NO_SLOT):  # in every lane alike
            break
        parent = np.uint32(parents[slot])
        rank = np.uint32(ranks[slot])
        previous = before[slot]
        depth = np.uint32(row_depths[parent]) + np.uint32(1)
        parent_score = row_scores[parent]
        cuda.syncwarp()  # every lane has read the slot before it changes
        if lane == SIBLING:
            row_scores[row] = score
            row_parents[row] = parent
            row_depths[row] = depth
            row_ranks[row] = rank
            row_before[row] = previous
            ranks[slot] = rank + np.uint32(1)
            before[slot] = row
            scores[slot] = score_of(table, parent_score, depth, rank + np.uint32(1))
        elif lane == CHILD and row < budget:  # the last row's child has no slot
            orders[row] = order
            parents[row] = row
            ranks[row] = 0
            before[row] = 0
            scores[row] = score_of(table, score, depth + np.uint32(1), np.uint32(0))
        row += np.uint32(1)
        cuda.syncwarp()  # the row and its two candidates are there
    return row


@cuda.jit(device=True)
def write_visibility(words, i, row_parents):
    """Set the bits of row i and its ancestors in its words, which are 0."""
    # Parents stand before children, so the bits come in falling order, and each word's
    # bits together. The root, row 0, ends every path.
    word = i // WORD_BITS
    bits = np.uint32(0)
    row = i
    while row > 0:
        if row // WORD_BITS != word:
            words[word] = bits
            word = row // WORD_BITS
            bits = np.uint32(0)
        bits |= np.uint32(1 << row % WORD_BITS)
        row = np.int64(row_parents[row])
    if word > 0:
        words[word] = bits
        bits = np.uint32(0)
    words[0] = bits | np.uint32(1)


@cuda.jit
def tree_build_kernel(
    log_probs,  # [B, L, K] f32
    candidates,  # [B, L, K] i32: their tokens
    n_draft_nodes,  # [B] i32: budgets, cut to 0 … most, if `ragged`
    ragged,  # i32: 0 if n_draft_nodes is not to be read, because all are `most`
    most,  # i32: the largest budget, N - 1 or less
    root_tokens,  # [B] i32, if `rooted`
    rooted,  # i32: 0 if root_tokens is not to be read, because they are unknown
    token_ids,  # out [B, N] i32
    parents,  # out [B, N] i32
    depths,  # out [B, N] i32
    next_token,  # out [B, N] i32
    next_sibling,  # out [B, N] i32
    row_log_probs,  # out [B, N] f32
    visibility,  # out [B, N, ceil(N/32)] u32
    n_rows,  # out [B] i32
):
    # float64 is meant: it adds float32 of like size exactly, so that equal paths tie.
    row_scores = cuda.shared.array(MAX_ROWS, np.float64)
    row_parents = cuda.shared.array(MAX_ROWS, np.uint16)  # of the root 0
    row_depths = cuda.shared.array(MAX_ROWS, np.uint16)
    row_ranks = cuda.shared.array(MAX_ROWS, np.uint16)
    row_before = cuda.shared.array(MAX_ROWS, np.uint16)  # previous sibling, or 0
    live = cuda.shared.array(1, np.int32)
    b = cuda.blockIdx.x
    n = parents.shape[1]
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP

    for i in range(warp, n, cuda.blockDim.x // WARP):
        for word in range(lane, visibility.shape[2], WARP):
            visibility[b, i, word] = 0
        if lane == 0:
            next_token[b, i] = -1
            next_sibling[b, i] = -1
    budget = most
    if ragged:
        budget = max(0, min(most, n_draft_nodes[b]))
    if has_nan(log_probs[b]):
        budget = 0
    if warp == 0:
        count = select_rows(
            log_probs[b],
            np.uint32(budget),
            row_scores,
            row_parents,
            row_depths,
            row_ranks,
            row_before,
        )
        if lane == 0:
            live[0] = count
            n_rows[b] = count
    # Orders the rows before they are read, and what was cleared before it is set.
    cuda.syncthreads()

    for i in range(cuda.threadIdx.x, n, cuda.blockDim.x):
        if i >= live[0]:
            token_ids[b, i] = -1
            parents[b, i] = -1
            depths[b, i] = -1
            row_log_probs[b, i] = np.float32(-math.inf)
            continue
        depth, rank = np.int32(row_depths[i]), row_ranks[i]
        if i == 0:
            token_ids[b, 0] = root_tokens[b] if rooted else -1
            parents[b, 0] = -1
        else:
            token_ids[b, i] = candidates[b, depth - 1, rank]
            parents[b, i] = row_parents[i]
            if rank == 0:
                next_token[b, row_parents[i]] = i
            else:
                next_sibling[b, row_before[i]] = i
        depths[b, i] = depth
        # A live row stays finite, even if it is less probable than float32 can say.
        score = min(max(row_scores[i], LOWEST), HIGHEST)
        row_log_probs[b, i] = np.float32(score)
        write_visibility(visibility[b, i], i, row_parents)


def tree_build(
    log_probs: Any,
    token_ids: Any,
    n_draft_nodes: Any,
    *,
    root_tokens: Any = None,
    max_draft_nodes: int | None = None,
    check: bool | None = None,
    executor: str | None = None,
) -> DraftTree:
    """Build the tree of the most probable prefixes, best first.

    Parameters
    ----------
    log_probs : float32 [B, L, K]
        As from `topk`: falling along K. -inf is never a node; a request with NaN
        anywhere gets the root alone.
    token_ids : int32 [B, L, K]
        The candidates' tokens.
    n_draft_nodes : int or int32 [B]
        Nodes beside the root, up to 1024. On a GPU the host does not read an array:
        budgets are cut to ``0 … max_draft_nodes`` there.
    root_tokens : int32 [B], optional
        Token of row 0; -1 if omitted.
    max_draft_nodes : int, optional
        Rows to allocate, less one; the largest of `n_draft_nodes` if omitted. Required
        if `n_draft_nodes` lies on a GPU.
    check : bool, optional
        Raise for what `topk` cannot have given: NaN, log-probs that rise along K or are
        above 0, negative tokens. If omitted, host arrays are checked; device arrays
        cannot be.
    executor : {"gpu", "emulator", "numpy"}, optional
        If omitted: ``DDTREE_EXECUTOR``, else NumPy for host arrays, the GPU for device
        arrays.

    Returns
    -------
    DraftTree
        Rows in selection order: score falling, ties by rank path, lexicographic. Where
        and what kind of array the inputs are.

    Raises
    ------
    TypeError, ValueError
        For arrays of the wrong dtype, shape or side, a negative or too large budget, a
        missing `max_draft_nodes`, ``check=True`` with device arrays, and (checked) bad
        log_probs, naming request and row.
    """
    one_for_all = n_draft_nodes is None or isinstance(n_draft_nodes, str | Real)
    budgets = None if one_for_all else n_draft_nodes
    at = place(
        executor,
        default="numpy",
        log_probs=log_probs,
        token_ids=token_ids,
        n_draft_nodes=budgets,
        root_tokens=root_tokens,
    )
    checked = at.checks(check, "log_probs")
    log_probs = at.check(log_probs, "log_probs", dtypes=(np.float32,), ndim=3)
    batch = log_probs.shape[0]
    i32 = (np.int32,)
    token_ids = at.check(
        token_ids, "token_ids", dtypes=i32, shape=log_probs.shape, convert=True
    )
    if root_tokens is not None:
        root_tokens = at.check(
            root_tokens, "root_tokens", dtypes=i32, shape=(batch,), convert=True
        )
    if budgets is not None:
        budgets = at.check(
            budgets, "n_draft_nodes", dtypes=i32, shape=(batch,), convert=True
        )
    most = _most_draft_nodes(n_draft_nodes, budgets, max_draft_nodes)
    if at.executor == "numpy":
        return reference.tree_build(
            log_probs,
            token_ids,
            n_draft_nodes if budgets is None else budgets,
            root_tokens=root_tokens,
            max_draft_nodes=most,
            check=checked,
        )
    if checked:
        reference.check_candidates(log_probs, token_ids)
    tree = _empty_tree(at, batch, most + 1)
    if batch and log_probs.size == 0:  # what is never a node stands for no candidate
        log_probs = at.full((batch, 1, 1), -np.inf, np.float32)
        token_ids = at.full((batch, 1, 1), -1, np.int32)
    if batch:
        absent = at.empty((1,), np.int32)
        at.launch(
            tree_build_kernel,
            batch,
            THREADS,
            at.put(log_probs),
            at.put(token_ids),
            absent if budgets is None else at.put(budgets),
            np.int32(budgets is not None),
            np.int32(n_draft_nodes if budgets is None else most),
            absent if root_tokens is None else at.put(root_tokens),
            np.int32(root_tokens is not None),
            *vars(tree).values(),
        )
    return DraftTree(**{name: at.give(x) for name, x in vars(tree).items()})


def _empty_tree(at: Place, batch: int, n: int) -> DraftTree:
    """Arrays for B trees of N rows where the kernel runs, with anything in them."""
    rows = (batch, n)
    return DraftTree(
        token_ids=at.empty(rows, np.int32),
        parents=at.empty(rows, np.int32),
        depths=at.empty(rows, np.int32),
        next_token=at.empty(rows, np.int32),
        next_sibling=at.empty(rows, np.int32),
        log_probs=at.empty(rows, np.float32),
        visibility=at.empty((batch, n, n_words(n)), np.uint32),
        n_rows=at.empty((batch,), np.int32),
    )


def _most_draft_nodes(
    n_draft_nodes: Any, budgets: Any, max_draft_nodes: int | None
) -> int:
    """Rows to allocate, less one; device budgets are not looked at."""
    if budgets is None:
        low = high = whole_number(n_draft_nodes, "n_draft_nodes", most=MAX_DRAFT_NODES)
    elif not is_device_array(budgets):
        low, high = int(budgets.min(initial=0)), int(budgets.max(initial=0))
    elif max_draft_nodes is None:
        raise ValueError(
            "max_draft_nodes is None, but n_draft_nodes lies on the GPU, where the "
            "host does not read it; expected an int"
        )
    else:
        low = high = 0
    most = MAX_DRAFT_NODES  # on every executor: what is legal must not depend on where
    if max_draft_nodes is not None:
        most = whole_number(max_draft_nodes, "max_draft_nodes", most=most)
    if low < 0 or high > most:
        raise ValueError(f"n_draft_nodes is {n_draft_nodes}; expected 0 … {most}")
    return high if max_draft_nodes is None else most
