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

Levels
------
All ancestors of one of the M best nodes are among them too. So they are found depth by
depth: a pool takes those children of its nodes of the depth before that score no less
than a bound. Ranks fall, so a node's children that pass are its first, and a binary
search counts them; a sum over the block's lanes says where each one's go, and then the
lanes share the children, not the parents. A histogram of the scores raises the bound to
the M-th best of what is known: at first of the paths that leave the most probable one
with their last token, then of the pool. Whatever the histogram cannot tell apart
remains, so at the end there are little more than M nodes. Their bins put them in order
but for the few of a bin, which are compared, by label where scores are equal. With very
many ties there is too much, and the frontier does it.

Labels
------
A node's label is its rank path in a code that keeps the order of paths and is short for
those that matter, from the highest bit on::

    rank    0   1    2    3      4      5      6      7 …
    code    0   100  101  11000  11001  11010  11011  1110000 …

Lowering some of a path's ranks gives a prefix that is as good and stands before it, so
among the M best the product of all ranks + 1 is M at most: a label takes a bit a level
and two for every doubling of M, which 63 bits hold up to `EXACT_DEPTH`. A label that is
cut off is not among the M best and comes behind those that are.

Versions
--------
tree_build_kernel           "simple": one block a request: one warp selects the rows, M
                            steps one after the other, then all threads write them out
tree_build_small_kernel     "small": as simple, up to 64 nodes: the frontier lies in the
                            registers of the warp, which knows what comes next
tree_build_parallel_kernel  "parallel": one block a request, L steps by levels
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import Place, is_device_array, place, whole_number
from ddtree_numba.kernels.wide import (
    FULL_WARP,
    PIECE,
    WARP,
    clear_bins,
    find_bin,
    last_bin,
    load_piece,
    loads_wide,
    redux_max,
    redux_min,
    scan_block,
)
from ddtree_numba.tree import WORD_BITS, DraftTree, n_words

MAX_DRAFT_NODES = 1024
MAX_ROWS = MAX_DRAFT_NODES + 1
THREADS = 256
LOWEST, HIGHEST = map(float, reference.FLOAT32_RANGE)
SIBLING, CHILD = 0, 1  # the lanes that put a taken row's two candidates in its place
NO_ORDER = NO_SLOT = 0xFFFF  # behind every candidate, none of them
NOTHING = -0x7FF00001  # -inf's upper half, as `best_candidate` orders scores
RISES, HOLDS_NAN = 1, 2

VERSIONS = ("auto", "simple", "small", "parallel")
SMALL = 64  # nodes whose candidates a warp holds in registers …
SLOTS = SMALL // WARP  # … so many a lane
SMALL_ROWS = SMALL + 1
SMALL_ROOM = SMALL_ROWS + WARP  # for a row that a lane does not write
# Depths and ranks that are looked at, one more than a tree has; whole pieces of them.
CORNER = SMALL_ROWS, SMALL + PIECE
SMALL_THREADS = 128
PARALLEL_THREADS = 512  # at most
LABEL_BITS = 63
EXACT_DEPTH = LABEL_BITS - 2 * (MAX_DRAFT_NODES.bit_length() - 1)
POOL = 8192  # nodes in the workspace
MOST_COUNTED = 4 * POOL  # children that are looked at to raise the bound
SORTED = 2048  # nodes that are put in order in shared memory
BINS = 2 * PARALLEL_THREADS  # at most: two a lane
SPAN = 64.0  # the bins go down to this log-probability if no bound is known
LEAST_SPAN = 1e-3
TO_SPARE = 1 + 2.0**-20  # many times what float32 rounds
COARSE = 8  # part of the bins to which the bound falls before they are spread again
LARGEST_SCALE = 1e30  # of the bins, so that it stays a float32
SPINES_FROM = 128  # budget from where spines are worth counting
PARENT, DEPTH, RANK, ROW, BITS = range(5)  # what the pool knows of a node


@cuda.jit(device=True)
def look_through(table, wide):
    """What is odd of a request's log-probs: `HOLDS_NAN`, `RISES` or above 0, or 0.

    A block barrier. It also brings the table near: every step reads from it.
    """
    tile = cuda.local.array(PIECE, np.float32)
    found = np.int32(0)
    pieces = (table.shape[1] + PIECE - 1) // PIECE
    p = cuda.threadIdx.x
    while p < table.shape[0] * pieces:
        position = np.uint32(p) // np.uint32(pieces)
        start = np.uint32((np.uint32(p) - position * np.uint32(pieces)) * PIECE)
        row = table[position]
        load_piece(row, start, wide, tile, 0)
        above = row[start - np.uint32(1)] if start > 0 else np.float32(0.0)
        for j in range(PIECE):
            x = tile[j]
            if x != x:
                found |= HOLDS_NAN
            elif x > above:
                found |= RISES
            above = x
        p += cuda.blockDim.x
    rises = cuda.syncthreads_or(np.int32(found & RISES)) != 0
    nan = cuda.syncthreads_or(np.int32(found & HOLDS_NAN)) != 0
    return (HOLDS_NAN if nan else 0) | (RISES if rises else 0)


@cuda.jit(device=True)
def put_root(rows):
    """Row 0."""
    row_scores, row_parents, row_depths, row_ranks, _ = rows
    row_scores[0] = np.float64(0.0)
    row_parents[0] = 0
    row_depths[0] = 0
    row_ranks[0] = 0


@cuda.jit(device=True)
def child_score(table, parent_score, depth, rank):
    """Score of a child at a depth, -inf if the table ends before it."""
    # Unsigned beside signed 64 bits would be compared as float64.
    if depth > np.uint32(table.shape[0]) or rank >= np.uint32(table.shape[1]):
        return np.float64(-math.inf)
    return parent_score + np.float64(table[np.uint32(depth - np.uint32(1)), rank])


@cuda.jit(device=True)
def lanes_of_least(x, lanes):
    """Of a ballot's lanes those that have the least unsigned x."""
    if cuda.popc(lanes) == 1:
        return lanes
    mine = lanes >> cuda.threadIdx.x & 1 != 0
    least = redux_min(x if mine else np.uint32(0xFFFFFFFF))
    return cuda.ballot_sync(FULL_WARP, mine and x == least)


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
        if own >= taken_order and np.uint32(s + np.uint32(1)) != count:
            own = np.uint32(own + np.uint32(1))
            orders[s] = own
        if (score > best) | ((score == best) & (own < order)):
            best, order, slot = score, own, s
        s = np.uint32(s + np.uint32(WARP))
    # Integers order scores: as their bits if positive, reversed if negative. The upper
    # half of them mostly tells.
    bits = cuda.libdevice.double_as_longlong(best)
    upper = np.int32(bits >> 32)
    upper ^= (upper >> 31) & 0x7FFFFFFF
    highest = redux_max(np.int32(upper))
    if highest == NOTHING:  # in every lane alike
        return best, order, np.uint32(NO_SLOT)
    lanes = cuda.ballot_sync(FULL_WARP, upper == highest)
    lanes = lanes_of_least(np.uint32(bits if bits < 0 else ~bits), lanes)
    lanes = lanes_of_least(order, lanes)
    winner = cuda.ffs(lanes) - 1
    best = cuda.shfl_sync(FULL_WARP, best, winner)
    order = np.uint32(cuda.shfl_sync(FULL_WARP, np.int32(order), winner))
    slot = np.uint32(cuda.shfl_sync(FULL_WARP, np.int32(slot), winner))
    return best, order, slot


@cuda.jit(device=True)
def select_rows(table, budget, frontier, rows):
    """One warp takes the best candidate as the next row until `budget` are taken.

    Fills the rows' arrays from row 1 on and returns how many rows there are. Slot s of
    the frontier holds row s's children, one after the other, each the next sibling of
    the one before.

    A lone warp is slow in proportion to its instructions, so rows, slots and ranks are
    unsigned: a signed index costs Numba a test for a negative one.
    """
    scores, orders, ranks, before = frontier
    row_scores, row_parents, row_depths, row_ranks, row_before = rows
    lane = cuda.threadIdx.x
    if lane == 0:
        put_root(rows)
        orders[0] = 0
        ranks[0] = 0
        before[0] = 0
        scores[0] = child_score(table, row_scores[0], np.uint32(1), np.uint32(0))
    cuda.syncwarp()  # the first candidate is there before it is read
    order = np.uint32(NO_ORDER)  # of the row taken last
    row = np.uint32(1)
    while row <= budget:
        score, order, slot = best_candidate(scores, orders, row, order)
        if slot == np.uint32(NO_SLOT):  # in every lane alike
            break
        rank = np.uint32(ranks[slot])
        previous = before[slot]
        depth = np.uint32(row_depths[slot] + np.uint32(1))
        parent_score = row_scores[slot]
        cuda.syncwarp()  # every lane has read the slot before it changes
        if lane == SIBLING:
            row_scores[row] = score
            row_parents[row] = slot
            row_depths[row] = depth
            row_ranks[row] = rank
            row_before[row] = previous
            rank = np.uint32(rank + np.uint32(1))
            ranks[slot] = rank
            before[slot] = row
            scores[slot] = child_score(table, parent_score, depth, rank)
        elif lane == CHILD and row < budget:  # the last row's child has no slot
            orders[row] = order
            ranks[row] = 0
            before[row] = 0
            depth = np.uint32(depth + np.uint32(1))
            scores[row] = child_score(table, score, depth, np.uint32(0))
        row = np.uint32(row + np.uint32(1))
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


@cuda.jit(device=True)
def start_request(b, n_draft_nodes, ragged, most, next_token, next_sibling, visibility):
    """Clear what is only set in places, and return the budget."""
    # Words as they lie in memory, with no division but for the first.
    n, width = np.uint32(visibility.shape[1]), np.uint32(visibility.shape[2])
    lanes = np.uint32(cuda.blockDim.x)
    row = np.uint32(np.uint32(cuda.threadIdx.x) // width)
    word = np.uint32(np.uint32(cuda.threadIdx.x) - row * width)
    rows_a_step = np.uint32(lanes // width)
    words_a_step = np.uint32(lanes - rows_a_step * width)
    while row < n:
        visibility[b, row, word] = 0
        row = np.uint32(row + rows_a_step)
        word = np.uint32(word + words_a_step)
        if word >= width:
            word = np.uint32(word - width)
            row = np.uint32(row + np.uint32(1))
    i = np.uint32(cuda.threadIdx.x)
    while i < n:
        next_token[b, i] = -1
        next_sibling[b, i] = -1
        i = np.uint32(i + lanes)
    budget = most
    if ragged:
        budget = max(0, min(most, n_draft_nodes[b]))
    return budget


@cuda.jit(device=True)
def write_row(b, i, live, candidates, root_tokens, rooted, rows, tree):
    """Write row i of a request with `live` rows, padding behind them."""
    row_scores, row_parents, row_depths, row_ranks, row_before = rows
    token_ids, parents, depths, links, log_probs, visibility, _ = tree
    next_token, next_sibling = links
    if i >= live:
        token_ids[b, i] = -1
        parents[b, i] = -1
        depths[b, i] = -1
        log_probs[b, i] = np.float32(-math.inf)
        return
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
    log_probs[b, i] = np.float32(score)
    write_visibility(visibility[b, i], i, row_parents)


@cuda.jit(device=True)
def write_tree(b, live, candidates, root_tokens, rooted, rows, tree):
    """All threads write a request of ``live[0]`` rows; begins with a block barrier."""
    _, parents, _, _, _, _, n_rows = tree
    # Orders the rows before they are read, and what was cleared before it is set.
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        n_rows[b] = live[0]
    i = cuda.threadIdx.x
    while i < parents.shape[1]:
        write_row(b, i, live[0], candidates, root_tokens, rooted, rows, tree)
        i += cuda.blockDim.x


# ----------------------------------------------------------------------- simple version


@cuda.jit
def tree_build_kernel(
    log_probs,  # [B, L, K] f32
    wide,  # i32: whether `loads_wide` allows loads of 16 bytes from it
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
    scores = cuda.shared.array(MAX_DRAFT_NODES, np.float64)
    orders = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)  # place by rank path
    ranks = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    before = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    live = cuda.shared.array(1, np.int32)
    b = cuda.blockIdx.x
    table = log_probs[b]
    rows = row_scores, row_parents, row_depths, row_ranks, row_before
    links = next_token, next_sibling
    tree = token_ids, parents, depths, links, row_log_probs, visibility, n_rows
    budget = start_request(b, n_draft_nodes, ragged, most, *links, visibility)
    if look_through(table, wide) & HOLDS_NAN:
        budget = 0
    if cuda.threadIdx.x < WARP:
        frontier = scores, orders, ranks, before
        count = select_rows(table, np.uint32(budget), frontier, rows)
        if cuda.threadIdx.x == 0:
            live[0] = count
    write_tree(b, live, candidates, root_tokens, rooted, rows, tree)


# ------------------------------------------------------------------------ small version


@cuda.jit(device=True)
def load_corner(table, wide, corner):
    """Load the ranks and depths that `SMALL` nodes can reach; whether NaN is anywhere.

    -inf stands behind a row's last candidate and behind the last row, so that nobody
    need ask whether there is a next sibling or a child. Ends with a block barrier.
    """
    tile = cuda.local.array(PIECE, np.float32)
    nan = np.int32(0)
    length = np.uint32(table.shape[0])
    pieces = np.uint32((table.shape[1] + 1) // PIECE + 1)
    p = np.uint32(cuda.threadIdx.x)
    while p < (length + np.uint32(2)) * pieces:
        position = np.uint32(p // pieces)
        start = np.uint32((p - position * pieces) * np.uint32(PIECE))
        row = table[min(position, np.uint32(length - np.uint32(1)))]
        load_piece(row, start, wide, tile, 0)
        kept = position < corner.shape[0] and start < corner.shape[1]
        for j in range(PIECE):
            x = tile[j] if position < length else np.float32(-math.inf)
            nan |= x != x
            if kept:
                corner[position, start + np.uint32(j)] = np.float64(x)
        p = np.uint32(p + np.uint32(cuda.blockDim.x))
    return cuda.syncthreads_or(nan) != 0


@cuda.jit(device=True)
def in_slot(values, k):
    """The k-th of a lane's values, which stay in registers."""
    value = values[0]
    for j in range(1, SLOTS):
        other = values[j]  # not in the choice below, or it would be one of addresses
        value = other if k == j else value
    return value


@cuda.jit(device=True)
def lane_says(x, lane):
    """A lane's unsigned x, for the warp."""
    return np.uint32(cuda.shfl_sync(FULL_WARP, np.int32(x), lane))


@cuda.jit(device=True)
def first_of_ties(scores, uppers, orders, highest, lanes):
    """Of the candidates whose upper half is `highest`, ballot for the best one."""
    least, first = np.uint32(0xFFFFFFFF), np.uint32(0xFFFFFFFF)
    lowers = cuda.local.array(SLOTS, np.uint32)
    for k in range(SLOTS):
        bits = cuda.libdevice.double_as_longlong(scores[k])
        lowers[k] = np.uint32(bits if bits < 0 else ~bits)
        if uppers[k] == highest:
            least = min(least, lowers[k])
    least = redux_min(np.uint32(least))
    for k in range(SLOTS):
        if uppers[k] == highest and lowers[k] == least:
            first = min(first, orders[k])
    first = redux_min(np.uint32(first))
    for k in range(SLOTS):  # no two orders are equal
        mine = uppers[k] == highest and orders[k] == first
        lanes[k] = cuda.ballot_sync(FULL_WARP, mine)


@cuda.jit(device=True)
def best_slot(scores, orders):
    """The slot of the warp's best candidate: which of whose lane; and if there is one.

    Says it in every lane.
    """
    uppers = cuda.local.array(SLOTS, np.int32)
    lanes = cuda.local.array(SLOTS, np.uint32)
    highest = np.int32(NOTHING)
    for k in range(SLOTS):
        # As in `best_candidate`. inf - inf, a negative NaN, comes below `NOTHING`.
        upper = np.int32(cuda.libdevice.double_as_longlong(scores[k]) >> 32)
        uppers[k] = upper ^ ((upper >> 31) & 0x7FFFFFFF)
        highest = max(highest, uppers[k])
    highest = redux_max(np.int32(highest))
    either, several = np.uint32(0), np.uint32(0)
    for k in range(SLOTS):
        lanes[k] = cuda.ballot_sync(FULL_WARP, uppers[k] == highest)
        several |= either & lanes[k]
        either |= lanes[k]
    if several | (either & np.uint32(either - np.uint32(1))) != 0:
        first_of_ties(scores, uppers, orders, highest, lanes)
    either, which = lanes[0], np.uint32(0)
    for k in range(1, SLOTS):
        either |= lanes[k]
        which = np.uint32(k) if lanes[k] != 0 else which
    winner = np.uint32(np.uint32(WARP - 1) - np.uint32(cuda.clz(np.int32(either))))
    return which, winner, highest != NOTHING


@cuda.jit(device=True)
def select_small(corner, budget, rows):
    """Do what `select_rows` does, with all that a step waits for in registers.

    Slot s is the (s // 32)-th of lane s % 32. Its candidate's next sibling and first
    child are scored while the warp looks for the best one, in case it is this.

    The chain of what waits for what is short only without branches: so a lane chooses
    among values that it has, and one that has no row to write writes it beside them.
    """
    row_scores, row_parents, row_depths, row_ranks, row_before = rows
    scores = cuda.local.array(SLOTS, np.float64)
    above = cuda.local.array(SLOTS, np.float64)  # their parents' scores
    orders = cuda.local.array(SLOTS, np.uint32)
    depths = cuda.local.array(SLOTS, np.uint32)
    ranks = cuda.local.array(SLOTS, np.uint32)
    before = cuda.local.array(SLOTS, np.uint32)
    siblings = cuda.local.array(SLOTS, np.float64)
    children = cuda.local.array(SLOTS, np.float64)
    lane = np.uint32(cuda.threadIdx.x)
    for k in range(SLOTS):
        scores[k] = np.float64(-math.inf)  # nothing in it yet
        above[k] = np.float64(0.0)
        orders[k] = np.uint32(NO_ORDER)
        depths[k] = np.uint32(1)
        ranks[k] = before[k] = np.uint32(0)
    if lane == 0:
        put_root(rows)
        scores[0] = above[0] + corner[0, 0]  # never -0.0
        orders[0] = np.uint32(0)
    row = np.uint32(1)
    while row <= budget:
        for k in range(SLOTS):
            depth, rank = depths[k], np.uint32(ranks[k] + np.uint32(1))
            siblings[k] = above[k] + corner[np.uint32(depth - np.uint32(1)), rank]
            children[k] = scores[k] + corner[depth, 0]
        which, winner, found = best_slot(scores, orders)
        if not found:  # in every lane alike
            break
        child = cuda.shfl_sync(FULL_WARP, in_slot(children, which), winner)
        score = cuda.shfl_sync(FULL_WARP, in_slot(scores, which), winner)
        order = lane_says(in_slot(orders, which), winner)
        depth = lane_says(in_slot(depths, which), winner)
        slot = np.uint32(which * np.uint32(WARP) + winner)
        at = row if lane == winner else np.uint32(lane + np.uint32(SMALL_ROWS))
        row_scores[at] = score
        row_parents[at] = slot
        row_depths[at] = depth
        row_ranks[at] = in_slot(ranks, which)
        row_before[at] = in_slot(before, which)
        for k in range(SLOTS):
            own = np.uint32(lane + np.uint32(k * WARP))
            taken, new = own == slot, own == row
            moved = np.uint32(orders[k] + np.uint32(orders[k] >= order))
            orders[k] = order if new else moved
            scores[k] = child if new else siblings[k] if taken else scores[k]
            above[k] = score if new else above[k]
            depths[k] = np.uint32(depth + np.uint32(1)) if new else depths[k]
            ranks[k] = np.uint32(ranks[k] + np.uint32(taken))
            before[k] = row if taken else before[k]
        row = np.uint32(row + np.uint32(1))
    return row


@cuda.jit
def tree_build_small_kernel(
    log_probs,  # [B, L, K] f32
    wide,  # i32: whether `loads_wide` allows loads of 16 bytes from it
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
    row_scores = cuda.shared.array(SMALL_ROOM, np.float64)
    row_parents = cuda.shared.array(SMALL_ROOM, np.uint16)  # of the root 0
    row_depths = cuda.shared.array(SMALL_ROOM, np.uint16)
    row_ranks = cuda.shared.array(SMALL_ROOM, np.uint16)
    row_before = cuda.shared.array(SMALL_ROOM, np.uint16)  # previous sibling, or 0
    corner = cuda.shared.array(CORNER, np.float64)
    live = cuda.shared.array(1, np.int32)
    b = cuda.blockIdx.x
    rows = row_scores, row_parents, row_depths, row_ranks, row_before
    links = next_token, next_sibling
    tree = token_ids, parents, depths, links, row_log_probs, visibility, n_rows
    budget = start_request(b, n_draft_nodes, ragged, most, *links, visibility)
    if load_corner(log_probs[b], wide, corner):
        budget = 0
    if cuda.threadIdx.x < WARP:
        count = select_small(corner, np.uint32(budget), rows)
        if cuda.threadIdx.x == 0:
            live[0] = count
    write_tree(b, live, candidates, root_tokens, rooted, rows, tree)


# --------------------------------------------------------------------- parallel version


@cuda.jit(device=True)
def bin_of(score, scale):
    """Bin of a score of 0 or less, 0 for the best; never falls as scores fall."""
    return np.int32(min(np.float32(-score) * scale, np.float32(last_bin())))


@cuda.jit(device=True)
def bound_of(bin_, scale, bound):
    """Raise the bound to below a bin, with one more to be safe from rounding."""
    if bin_ >= last_bin():  # which has no end
        return bound
    return max(bound, np.float64(np.float32(-(bin_ + 2)) / scale))


@cuda.jit(device=True)
def spread_over(bound):
    """The scale at which the bins end at a bound."""
    span = np.float32(-bound) if bound > -math.inf else np.float32(SPAN)
    return np.float32(last_bin() - 1) / span


@cuda.jit(device=True)
def count_spines(table, scale, histogram):
    """Count all paths that follow the best candidates but for their last one."""
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    position = warp
    while position < table.shape[0]:
        spine = np.float64(0.0)
        for before in range(position):
            spine += np.float64(table[before, 0])
        for rank in range(lane, table.shape[1], WARP):
            score = spine + np.float64(table[position, rank])
            if score > -math.inf:
                cuda.atomic.add(histogram, bin_of(score, scale), 1)
        position += cuda.blockDim.x // WARP


@cuda.jit(device=True)
def passing_children(row, score, bound):
    """How many of a node's children score no less than the bound: its first ones."""
    # The bound has more to spare than it is rounded by to what a candidate must have.
    least = np.float32(max(bound - score, LOWEST))
    low, high = np.uint32(0), np.uint32(row.size)
    while low < high:
        middle = np.uint32((low + high) >> np.uint32(1))
        if row[middle] >= least:
            low = np.uint32(middle + np.uint32(1))
        else:
            high = middle
    return np.int32(low)


@cuda.jit(device=True)
def place_of(j, offsets):
    """The last lane whose children start at j or before."""
    low, high = np.uint32(0), np.uint32(cuda.blockDim.x)
    while high - low > 1:
        middle = np.uint32((low + high) >> np.uint32(1))
        if offsets[middle] <= j:
            low = middle
        else:
            high = middle
    return low


@cuda.jit(device=True)
def add_rank(label, bits, rank):
    """A path's label, and its length in bits, when a rank is added to the path.

    Labels are numbers of 63 bits, so that int64 order them; what is longer is cut off.
    """
    doublings = np.int64(31) - cuda.clz(np.int32(rank + 1))
    length = 2 * doublings + 1
    ones = (np.int64(1) << doublings) - 1
    code = (ones << (doublings + 1)) | (rank + 1 - (np.int64(1) << doublings))
    left = LABEL_BITS - bits - length
    if left >= 0:
        label |= code << left
    elif left > -length:
        label |= code >> -left
    return label, bits + length


@cuda.jit(device=True)
def put_node(pool, slot, parent, depth, rank):
    """Describe a node of the pool."""
    nodes, labels, _ = pool
    label, bits = np.int64(0), np.int64(0)
    if parent >= 0:
        label = labels[np.uint32(parent)]
        bits = np.int64(nodes[BITS, np.uint32(parent)])
    labels[slot], nodes[BITS, slot] = add_rank(label, bits, rank)
    nodes[PARENT, slot] = parent
    nodes[DEPTH, slot] = depth
    nodes[RANK, slot] = rank


@cuda.jit(device=True)
def take_children(table, budget, depth, level, state, counting, batch, pool):
    """Put those children of a level of the pool that pass into the pool.

    `level` is where the level starts and ends; the root, of no slot, is node -1.
    `state`, and what is returned, is where the pool ends (beyond its size if it is too
    small), the bound, and the scale of the histogram, which counts what is in the pool.
    """
    used, bound, scale = state
    histogram, of_warps, _ = counting
    offsets, level_scores = batch
    scores = pool[2]
    row = table[depth - 1]
    start = level[0]
    while start < level[1]:
        parent = start + cuda.threadIdx.x
        score = np.float64(0.0)
        if 0 <= parent < level[1]:
            score = scores[parent]
        counted = stored = False
        while not stored:
            children = np.int32(0)
            if parent < level[1] and score >= bound:
                children = passing_children(row, score, bound)
            before, total = scan_block(children, of_warps)
            offsets[cuda.threadIdx.x] = before
            level_scores[cuda.threadIdx.x] = score
            cuda.syncthreads()  # the children's places are there before they are read
            stored = used + total <= scores.size
            if not stored and (counted or total > MOST_COUNTED):
                return scores.size + 1, bound, scale
            j = cuda.threadIdx.x
            while j < total:
                i = place_of(j, offsets)
                rank = j - offsets[i]
                child = level_scores[i] + np.float64(row[rank])
                if not counted:
                    cuda.atomic.add(histogram, bin_of(child, scale), 1)
                if stored:
                    slot = np.uint32(used + j)
                    scores[slot] = child
                    put_node(pool, slot, start + i, depth, rank)
                j += cuda.blockDim.x
            if not counted and total > 0:
                bound = bound_of(find_bin(counting, budget), scale, bound)
            counted = True
            cuda.syncthreads()  # the places were read; the children are in the pool
        used += total
        start += cuda.blockDim.x
    return used, bound, scale


@cuda.jit(device=True)
def count_pool(end, bound, scale, histogram, scores):
    """Count the pool's nodes that score no less than the bound."""
    clear_bins(histogram)
    slot = cuda.threadIdx.x
    while slot < end:
        if scores[slot] >= bound:
            cuda.atomic.add(histogram, bin_of(scores[slot], scale), 1)
        slot += cuda.blockDim.x


@cuda.jit(device=True)
def collect(table, budget, counting, batch, pool):
    """Fill the pool with the best nodes, at least `budget` if there are so many.

    Returns how many nodes it holds, more than its size if it is too small, and the
    bound of those that still count. For all threads; ends with a barrier.
    """
    histogram, scores = counting[0], pool[2]
    bound = np.float64(-math.inf)
    if budget <= table.shape[1]:  # there are as many nodes at depth 1
        least = min(table[0, budget - 1], np.float32(-LEAST_SPAN))
        # Sums round, and what is asked of a child does too.
        bound = np.float64(least * np.float32(TO_SPARE))
    scale = spread_over(bound)
    if budget >= SPINES_FROM:
        clear_bins(histogram)
        count_spines(table, scale, histogram)
        bound = bound_of(find_bin(counting, budget), scale, bound)
        scale = spread_over(bound)
    clear_bins(histogram)
    first, end = -1, 0
    depth = 1
    while depth <= table.shape[0] and first < end <= scores.size:
        state = (end, bound, scale)
        level = (first, end)
        used, bound, scale = take_children(
            table, budget, depth, level, state, counting, batch, pool
        )
        first, end = end, used
        # Few bins tell the nodes apart: spread what is within the bound over all.
        coarse = np.float32(last_bin() // COARSE)
        if np.float32(-bound) * scale < coarse and scale < LARGEST_SCALE:
            if end <= scores.size:
                scale = spread_over(bound)
                count_pool(end, bound, scale, histogram, scores)
        depth += 1
    return end, bound


@cuda.jit(device=True)
def order_nodes(end, bound, counting, pool, keys, slots):
    """Gather the pool's nodes that count, bin by bin, and return their number.

    It may be more than there is room for. Then ``histogram[i]`` is where bin i ends;
    within a bin there is no order. For all threads; ends with a block barrier.
    """
    histogram, of_warps, _ = counting
    scores = pool[2]
    scale = spread_over(bound)
    cuda.syncthreads()  # the histogram was read
    count_pool(end, bound, scale, histogram, scores)
    cuda.syncthreads()  # everything is counted before the bins are read
    first = np.uint32(2 * cuda.threadIdx.x)
    second = np.uint32(first + np.uint32(1))
    count = histogram[first]
    before, total = scan_block(count + histogram[second], of_warps)
    histogram[first] = before  # where the bins start
    histogram[second] = before + count
    cuda.syncthreads()  # every start is there before it is counted up
    if total <= keys.size:
        slot = cuda.threadIdx.x
        while slot < end:
            score = scores[slot]
            if score >= bound:
                i = cuda.atomic.add(histogram, bin_of(score, scale), 1)
                keys[i] = score
                slots[i] = slot
            slot += cuda.blockDim.x
    cuda.syncthreads()  # all are gathered before they are read
    return total


@cuda.jit(device=True)
def place_in_order(i, bound, histogram, pool, keys, slots):
    """How many nodes come before the i-th that `order_nodes` gathered."""
    nodes, labels, _ = pool
    key, slot = keys[i], np.int32(slots[i])
    own = bin_of(key, spread_over(bound))
    start = histogram[own - 1] if own > 0 else 0
    place = start
    for j in range(start, histogram[own]):
        if keys[j] > key:
            place += 1
        elif keys[j] == key and j != i:
            other = np.int32(slots[j])
            if labels[other] < labels[slot]:
                place += 1
            elif labels[other] == labels[slot]:  # an ancestor, or cut off: the shorter
                place += nodes[BITS, other] < nodes[BITS, slot]
    return place


@cuda.jit(device=True)
def write_rows(count, budget, bound, histogram, pool, keys, slots, rows):
    """Turn the best of the nodes gathered into rows; block barriers between."""
    row_scores, row_parents, row_depths, row_ranks, row_before = rows
    nodes = pool[0]
    if cuda.threadIdx.x == 0:
        put_root(rows)
    i = cuda.threadIdx.x
    while i < count:
        row = place_in_order(i, bound, histogram, pool, keys, slots) + 1
        nodes[ROW, slots[i]] = row
        if row <= budget:
            row_scores[row] = keys[i]
            row_parents[row] = slots[i]  # the node, until all rows are known
        i += cuda.blockDim.x
    cuda.syncthreads()  # every node's row is known before it is read
    live = min(count, budget) + 1
    row = 1 + cuda.threadIdx.x
    while row < live:
        slot = np.int32(row_parents[row])
        parent, rank = nodes[PARENT, slot], nodes[RANK, slot]
        row_depths[row] = nodes[DEPTH, slot]
        row_ranks[row] = rank
        row_parents[row] = nodes[ROW, parent] if parent >= 0 else 0
        # Children of a node stand side by side in the pool.
        row_before[row] = nodes[ROW, slot - 1] if rank > 0 else 0
        row += cuda.blockDim.x


@cuda.jit
def tree_build_parallel_kernel(
    log_probs,  # [B, L, K] f32
    wide,  # i32: whether `loads_wide` allows loads of 16 bytes from it
    candidates,  # [B, L, K] i32: their tokens
    n_draft_nodes,  # [B] i32: budgets, cut to 0 … most, if `ragged`
    ragged,  # i32: 0 if n_draft_nodes is not to be read, because all are `most`
    most,  # i32: the largest budget, N - 1 or less
    root_tokens,  # [B] i32, if `rooted`
    rooted,  # i32: 0 if root_tokens is not to be read, because they are unknown
    nodes,  # workspace [B, 5, P] i32: a node's PARENT, DEPTH, RANK, ROW and BITS
    labels,  # workspace [B, P] i64
    scores,  # workspace [B, P] f64
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
    keys = cuda.shared.array(SORTED, np.float64)
    slots = cuda.shared.array(SORTED, np.uint16)
    histogram = cuda.shared.array(BINS, np.int32)
    offsets = cuda.shared.array(PARALLEL_THREADS, np.int32)
    level_scores = cuda.shared.array(PARALLEL_THREADS, np.float64)
    of_warps = cuda.shared.array(WARP, np.int32)
    found = cuda.shared.array(3, np.int32)
    live = cuda.shared.array(1, np.int32)
    b = cuda.blockIdx.x
    table = log_probs[b]
    rows = row_scores, row_parents, row_depths, row_ranks, row_before
    links = next_token, next_sibling
    tree = token_ids, parents, depths, links, row_log_probs, visibility, n_rows
    budget = start_request(b, n_draft_nodes, ragged, most, *links, visibility)
    pool = nodes[b], labels[b], scores[b]
    counting, batch = (histogram, of_warps, found), (offsets, level_scores)
    odd = look_through(table, wide)  # for all threads alike, as all that is asked below
    if odd & HOLDS_NAN:
        budget = 0
    # Nodes to put in order, and the bound; too many if the frontier is to do it.
    count, bound = (0 if budget == 0 else SORTED + 1), np.float64(0.0)
    if budget > 0 and odd == 0 and table.shape[0] <= EXACT_DEPTH:
        end, bound = collect(table, budget, counting, batch, pool)
        if end <= scores.shape[1]:
            count = order_nodes(end, bound, counting, pool, keys, slots)
    if count <= SORTED:
        write_rows(count, budget, bound, histogram, pool, keys, slots, rows)
        if cuda.threadIdx.x == 0:
            live[0] = min(count, budget) + 1
    elif cuda.threadIdx.x < WARP:  # very many ties, or nothing that topk gives
        halves = slots[: SORTED // 2], slots[SORTED // 2 :]
        frontier = keys, *halves, histogram
        count = select_rows(table, np.uint32(budget), frontier, rows)
        if cuda.threadIdx.x == 0:
            live[0] = count
    write_tree(b, live, candidates, root_tokens, rooted, rows, tree)


def tree_build(
    log_probs: Any,
    token_ids: Any,
    n_draft_nodes: Any,
    *,
    root_tokens: Any = None,
    max_draft_nodes: int | None = None,
    check: bool | None = None,
    version: str = "auto",
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
    version : {"auto", "simple", "small", "parallel"}
        The kernel. All build the same tree; "small" up to 64 nodes. "auto" is small up
        to there, else parallel up to L = 43, and simple beyond.
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
    if version not in VERSIONS:
        raise ValueError(f"version is {version!r}; expected {', '.join(VERSIONS)}")
    if version == "auto":
        deep = log_probs.shape[1] > EXACT_DEPTH
        version = "small" if most <= SMALL else "simple" if deep else "parallel"
    elif version == "small" and most > SMALL:
        raise ValueError(
            f"n_draft_nodes is up to {most}; version 'small' takes up to {SMALL}"
        )
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
        log_probs = at.put(log_probs)
        given = (
            log_probs,
            np.int32(loads_wide(log_probs)),
            at.put(token_ids),
            absent if budgets is None else at.put(budgets),
            np.int32(budgets is not None),
            np.int32(n_draft_nodes if budgets is None else most),
            absent if root_tokens is None else at.put(root_tokens),
            np.int32(root_tokens is not None),
        )
        outputs = vars(tree).values()
        if version == "simple":
            at.launch(tree_build_kernel, batch, THREADS, *given, *outputs)
        elif version == "small":
            at.launch(tree_build_small_kernel, batch, SMALL_THREADS, *given, *outputs)
        else:
            pool = (
                at.empty((batch, 5, POOL), np.int32),
                at.empty((batch, POOL), np.int64),
                at.empty((batch, POOL), np.float64),
            )
            # Warps that find nothing to do take time from the others.
            threads = 128 if most <= 128 else 256 if most <= 512 else PARALLEL_THREADS
            at.launch(
                *(tree_build_parallel_kernel, batch, threads),
                *(*given, *pool, *outputs),
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
