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
than a bound. Scores fall with the rank, so those that pass are a node's first children:
a few lanes look at them, more only if all of those pass; a ballot says which do and
where they go.

The bound is known before the first level. A path that leaves the most probable one for
a single token and comes back to it scores what that one does to the same depth, and
what the token costs: a histogram of all of these has the M-th best of them in one of
its bins. There are many such paths among the best, so the pool gets some two times M
nodes. Where they are few, as where most candidates are masked, it would get too many:
then a histogram of the pool and its last level's children raises the bound.

At the end the pool's histogram leaves little more than M nodes. Their bins put them in
order but for the few of a bin, which are compared, by label where scores are equal.
With very many ties there is too much for the pool, and the frontier does it.

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

"auto" is small up to 64 nodes, else parallel up to `EXACT_DEPTH` positions (43), and
simple beyond.
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
PARALLEL_THREADS = 768  # at most
LABEL_BITS = 63
EXACT_DEPTH = LABEL_BITS - 2 * (MAX_DRAFT_NODES.bit_length() - 1)
DEPTHS = EXACT_DEPTH + 1
POOL = 8192  # nodes in the workspace
NEAR = 2048  # the first of them, whose scores lie in shared memory
MOST_SURPLUS = 3  # times the budget: if more are in the pool, the bound is raised
TEAM = 4  # lanes that look at a node's first children
LAST_OF_TEAMS = 0x88888888  # a ballot of their last lanes
SORTED = 2048  # nodes that are put in order in shared memory
BINS = 2 * PARALLEL_THREADS  # at most: two a lane
SPAN = 64.0  # the bins go down to minus this if no bound is known
NO_BOUND = -np.finfo(np.float64).max  # above -inf, which is never a node
LEAST_SPAN = 1e-3
TO_SPARE = 1 + 2.0**-20  # many times what float32 rounds
COARSE = 8  # if all that count are in the first of so many parts, bins spread again
LARGEST_SCALE = 1e30  # of the bins, so that it stays a float32
LINK, BEFORE, ROW = range(3)  # what the pool knows of a node
DEPTH_BITS = 63 << 10  # of a LINK: parent << 16 | depth << 10 | rank


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
    if cuda.syncthreads_or(found) == 0:
        return 0
    nan = cuda.syncthreads_or(np.int32(found & HOLDS_NAN)) != 0
    return HOLDS_NAN if nan else RISES


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
    word = np.uint32(i // np.uint32(WORD_BITS))
    bits = np.uint32(0)
    row = i
    while row > 0:
        if np.uint32(row // np.uint32(WORD_BITS)) != word:
            words[word] = bits
            word = np.uint32(row // np.uint32(WORD_BITS))
            bits = np.uint32(0)
        bits |= np.uint32(1) << np.uint32(row % np.uint32(WORD_BITS))
        row = np.uint32(row_parents[row])
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
    depth, rank = np.uint32(row_depths[i]), row_ranks[i]
    if i == 0:
        token_ids[b, 0] = root_tokens[b] if rooted else -1
        parents[b, 0] = -1
    else:
        token_ids[b, i] = candidates[b, np.uint32(depth - np.uint32(1)), rank]
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
    i = np.uint32(cuda.threadIdx.x)
    while i < parents.shape[1]:
        write_row(b, i, live[0], candidates, root_tokens, rooted, rows, tree)
        i = np.uint32(i + np.uint32(cuda.blockDim.x))


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
    b = np.uint32(cuda.blockIdx.x)
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
    b = np.uint32(cuda.blockIdx.x)
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
    span = np.float32(-bound) if bound > NO_BOUND else np.float32(SPAN)
    return np.float32(last_bin() - 1) / span


@cuda.jit(device=True)
def add_up_spine(length, firsts, spine):
    """Score the most probable path up to every position, a lane each."""
    position = np.uint32(cuda.threadIdx.x)
    if position < length:
        score = np.float32(0.0)
        for before in range(position + np.uint32(1)):
            score += firsts[np.uint32(before)]
        spine[position] = score


@cuda.jit(device=True)
def count_detours(table, ranks, firsts, spine, bound, scale, histogram):
    """Count all paths that leave the most probable one at one position at most."""
    least = np.float32(max(bound, LOWEST))
    length = np.uint32(table.shape[0])
    rank = np.uint32(cuda.threadIdx.x % WARP)
    position = np.uint32(cuda.threadIdx.x // WARP)
    while True:  # every warp a position and 32 of its ranks, then others
        while position >= length:
            position = np.uint32(position - length)
            rank = np.uint32(rank + np.uint32(WARP))
        if rank >= ranks:
            break
        step = table[position, rank] - firsts[position]
        end = position
        # The most probable path itself leaves nothing at the first position.
        if rank == 0 and position > 0:
            end = length
        while end < length:
            score = spine[end] + step
            if not score >= least:
                break
            cuda.atomic.add(histogram, bin_of(score, scale), 1)
            end = np.uint32(end + np.uint32(1))
        position = np.uint32(position + np.uint32(cuda.blockDim.x // WARP))


@cuda.jit(device=True)
def score_of(slot, scores):
    """Score of a node of the pool, whose first ones are near, in shared memory."""
    near, far = scores
    if slot < near.size:
        return near[slot]
    return far[slot]


@cuda.jit(device=True)
def parent_of(link):
    """The slot of a node's parent; how a LINK is made up stands at `DEPTH_BITS`."""
    return np.uint32(link >> np.uint32(16))


@cuda.jit(device=True)
def depth_of(link):
    """A node's depth."""
    return np.uint32(np.uint32(link >> np.uint32(10)) & np.uint32(63))


@cuda.jit(device=True)
def rank_of(link):
    """A node's rank among its siblings."""
    return np.uint32(link & np.uint32(MAX_DRAFT_NODES - 1))


@cuda.jit(device=True)
def put_node(slot, score, link, before, pool):
    """Put a node into the pool, if there is room."""
    (near, far), nodes, _ = pool
    if slot < near.size:
        near[slot] = score
    else:
        far[slot] = score
    nodes[LINK, slot] = link
    nodes[BEFORE, slot] = before


@cuda.jit(device=True)
def first_of(lanes):
    """The first lane of a ballot, and the others."""
    others = np.uint32(lanes & np.uint32(lanes - np.uint32(1)))
    return np.uint32(cuda.ffs(np.int32(lanes)) - 1), others


@cuda.jit(device=True)
def take_passing(child, bound, end, siblings, counts, pool):
    """Put those children of a warp's lanes that pass into the pool.

    `siblings` says of a lane's child its link, which of its team's children it is, and,
    if it is the first, the slot of the sibling before. Returns a ballot of those that
    pass, and the child's slot.
    """
    link, part, before = siblings
    lane = np.uint32(cuda.threadIdx.x % WARP)
    passes = child >= bound
    passing = np.uint32(cuda.ballot_sync(FULL_WARP, passes))
    place = np.int32(0)
    if lane == 0 and passing != 0:
        place = cuda.atomic.add(counts, depth_of(link), cuda.popc(passing))
    lanes_before = np.uint32((np.uint32(1) << lane) - np.uint32(1))
    ahead = np.uint32(cuda.popc(np.uint32(passing & lanes_before)))
    slot = np.uint32(end + lane_says(place, 0) + ahead)
    if passes and slot < pool[1].shape[1]:
        before = np.uint32(slot - np.uint32(1)) if part > 0 else before
        put_node(slot, child, link, before, pool)
    return passing, slot


@cuda.jit(device=True)
def take_children(row, ranks, depth, level, bound, counts, pool):
    """Put those children of a level that score no less than the bound behind it.

    `level` is where it starts and ends in the pool. ``counts[depth]``, 0 before, is how
    many children there are, also if there is no room for them.

    A team of lanes looks at a parent's first children; if all pass, the whole warp
    looks at the others. Good parents stand together, so neighbours go to other warps.
    """
    first, end = level
    lane = np.uint32(cuda.threadIdx.x % WARP)
    part = np.uint32(lane % np.uint32(TEAM))
    warps = np.uint32(cuda.blockDim.x // WARP)
    step = np.float64(row[part]) if part < ranks else np.float64(-math.inf)
    start = np.uint32(first + np.uint32(cuda.threadIdx.x // WARP))
    while start < end:  # whole warps
        parent = np.uint32(start + np.uint32(lane // np.uint32(TEAM)) * warps)
        score = np.float64(-math.inf)
        if parent < end:
            score = score_of(parent, pool[0])
        link = np.uint32(parent << np.uint32(16) | depth << np.uint32(10))
        siblings = np.uint32(link | part), part, np.uint32(0)
        passing, slot = take_passing(score + step, bound, end, siblings, counts, pool)
        teams = np.uint32(passing & np.uint32(LAST_OF_TEAMS))
        while teams != 0:
            owner, teams = first_of(teams)
            its_score = cuda.shfl_sync(FULL_WARP, score, owner)
            its_link = lane_says(link, owner)
            before = lane_says(slot, owner)
            rank = np.uint32(lane + np.uint32(TEAM))
            passing = np.uint32(1 << WARP - 1)
            while passing >> np.uint32(WARP - 1) != 0:  # the last of those before
                child = np.float64(-math.inf)
                if rank < ranks:
                    child = its_score + np.float64(row[rank])
                siblings = np.uint32(its_link | rank), lane, before
                passing, its_slot = take_passing(
                    child, bound, end, siblings, counts, pool
                )
                before = lane_says(its_slot, WARP - 1)
                rank = np.uint32(rank + np.uint32(WARP))
        start = np.uint32(start + warps * np.uint32(WARP // TEAM))


@cuda.jit(device=True)
def count_pool(end, bound, scale, histogram, scores):
    """Count the pool's nodes that score no less than the bound, alone."""
    clear_bins(histogram)
    slot = np.uint32(cuda.threadIdx.x + 1)  # the root is no candidate
    while slot < end:
        score = score_of(slot, scores)
        if score >= bound:
            cuda.atomic.add(histogram, bin_of(score, scale), 1)
        slot = np.uint32(slot + np.uint32(cuda.blockDim.x))


@cuda.jit(device=True)
def raise_bound(row, ranks, level, budget, bound, counting, scores):
    """The bound as the pool and all children of its last level give it."""
    histogram = counting[0]
    first, end = level
    scale = spread_over(bound)
    count_pool(end, bound, scale, histogram, scores)
    parent = np.uint32(first + np.uint32(cuda.threadIdx.x))
    while parent < end:
        score = score_of(parent, scores)
        rank = np.uint32(0)
        while rank < ranks:
            child = score + np.float64(row[rank])
            if not child >= bound:
                break
            cuda.atomic.add(histogram, bin_of(child, scale), 1)
            rank = np.uint32(rank + np.uint32(1))
        parent = np.uint32(parent + np.uint32(cuda.blockDim.x))
    return bound_of(find_bin(counting, budget), scale, bound)


@cuda.jit(device=True)
def collect(table, budget, paths, counting, counts, pool):
    """Fill the pool with the best nodes, at least `budget` if there are so many.

    Returns where the pool ends, beyond its size if it is too small, and the bound. The
    root is in slot 0. For all threads; ends with a barrier.
    """
    histogram = counting[0]
    (near, _), nodes, _ = pool
    room = np.uint32(nodes.shape[1])
    # A node of a rank from the budget on has as many siblings before it.
    ranks = np.uint32(min(budget, table.shape[1]))
    if cuda.threadIdx.x == 0:
        near[0] = np.float64(0.0)
        nodes[LINK, 0] = nodes[BEFORE, 0] = nodes[ROW, 0] = 0
    bound = np.float64(NO_BOUND)
    if budget <= table.shape[1]:  # there are as many nodes at depth 1
        least = min(table[0, budget - 1], np.float32(-LEAST_SPAN))
        # Sums round, and what is asked of a child does too.
        bound = max(bound, np.float64(least * np.float32(TO_SPARE)))
    scale = spread_over(bound)
    add_up_spine(table.shape[0], *paths)
    clear_bins(histogram)  # its barrier also orders the spine before it is read
    count_detours(table, ranks, *paths, bound, scale, histogram)
    bound = bound_of(find_bin(counting, budget), scale, bound)
    surplus = np.uint32(MOST_SURPLUS * budget)
    limit = min(room, np.uint32(surplus + np.uint32(1)))
    first, end = np.uint32(0), np.uint32(1)
    depth = np.uint32(1)
    while depth <= table.shape[0] and first < end:
        row = table[np.uint32(depth - np.uint32(1))]
        level = first, end
        while True:
            take_children(row, ranks, depth, level, bound, counts, pool)
            cuda.syncthreads()  # the children are in the pool before they are read
            upto = np.uint32(end + np.uint32(counts[depth]))
            if upto <= limit:
                break
            # There are many more than are wanted: find a bound that is nearer.
            raised = raise_bound(row, ranks, level, budget, bound, counting, pool[0])
            if raised > bound:
                limit = min(room, np.uint32(end + surplus))
            elif limit < room:
                limit = room  # very many of them tie
            else:
                return np.uint32(room + np.uint32(1)), bound
            bound = raised
            if cuda.threadIdx.x == 0:
                counts[depth] = 0
            cuda.syncthreads()  # the children are counted anew
        first, end = end, upto
        depth = np.uint32(depth + np.uint32(1))
    return end, bound


@cuda.jit(device=True)
def put_rank_before(rank, label):
    """A path's label when a rank is put before the path.

    Labels are numbers of 63 bits, so that int64 order them; what is longer is cut off.
    """
    doublings = np.int64(31) - cuda.clz(np.int32(rank + 1))
    length = 2 * doublings + 1
    ones = (np.int64(1) << doublings) - 1
    code = (ones << (doublings + 1)) | (rank + 1 - (np.int64(1) << doublings))
    return code << (LABEL_BITS - length) | label >> length


@cuda.jit(device=True)
def label_of(slot, nodes):
    """Label of a node of the pool, from its last rank to its first."""
    label = np.int64(0)
    while slot > 0:
        link = np.uint32(nodes[LINK, slot])
        label = put_rank_before(np.int64(rank_of(link)), label)
        slot = parent_of(link)
    return label


@cuda.jit(device=True)
def start_bins(budget, counting):
    """Turn a histogram into where its bins start, as if all counted were in order.

    Returns the bin of the `budget`-th, the last if there are fewer, and how many lie in
    it and before. For all threads; begins and ends with a block barrier.
    """
    histogram, of_warps, found = counting
    cuda.syncthreads()  # everything is counted before the bins are read
    first = np.uint32(2 * cuda.threadIdx.x)
    second = np.uint32(first + np.uint32(1))
    count = histogram[first]
    both = count + histogram[second]
    before, total = scan_block(both, of_warps)
    histogram[first] = before
    histogram[second] = before + count
    if before < budget <= before + both:
        in_second = budget > before + count
        found[0] = second if in_second else first
        found[1] = before + (both if in_second else count)
    cuda.syncthreads()  # bin and starts are there before they are read
    if total < budget:
        return last_bin(), total
    return found[0], found[1]


@cuda.jit(device=True)
def order_nodes(end, budget, bound, counting, pool, slots):
    """Gather the best nodes of the pool, bin by bin; return their number and the scale.

    It may be more than there is room for: then none are gathered. Else ``histogram[i]``
    is where bin i ends; within a bin there is no order. For all threads; ends with a
    block barrier.
    """
    histogram = counting[0]
    scores, nodes, labels = pool
    while True:
        scale = spread_over(bound)
        count_pool(end, bound, scale, histogram, scores)
        last, count = start_bins(budget, counting)
        if last >= last_bin() // COARSE or scale >= LARGEST_SCALE:
            break
        # Few bins tell the nodes apart: spread what is within the bound over all.
        bound = bound_of(last, scale, bound)
    if count <= slots.size:
        slot = np.uint32(cuda.threadIdx.x + 1)
        while slot < end:
            score = score_of(slot, scores)
            bin_ = bin_of(score, scale)
            if score >= bound and bin_ <= last:
                slots[cuda.atomic.add(histogram, bin_, 1)] = slot
                labels[slot] = label_of(slot, nodes)
            slot = np.uint32(slot + np.uint32(cuda.blockDim.x))
    cuda.syncthreads()  # all are gathered before they are read
    return count, scale


@cuda.jit(device=True)
def place_in_order(slot, score, scale, histogram, pool, slots):
    """How many nodes come before one of those that `order_nodes` gathered."""
    scores, nodes, labels = pool
    bin_ = np.uint32(bin_of(score, scale))
    label, depth = labels[slot], nodes[LINK, slot] & DEPTH_BITS
    j = np.uint32(0)
    if bin_ > 0:
        j = np.uint32(histogram[np.uint32(bin_ - np.uint32(1))])
    end = np.uint32(histogram[bin_])
    place = j
    while j < end:
        other = np.uint32(slots[j])
        other_score = score_of(other, scores)
        before = other_score > score
        if other_score == score and other != slot:
            other_label = labels[other]
            before = other_label < label
            if other_label == label:  # an ancestor, or cut off: the shorter
                before = nodes[LINK, other] & DEPTH_BITS < depth
        place = np.uint32(place + np.uint32(before))
        j = np.uint32(j + np.uint32(1))
    return place


@cuda.jit(device=True)
def write_rows(count, budget, scale, histogram, pool, slots, rows):
    """Turn the best of the nodes gathered into rows; a block barrier in between."""
    row_scores, row_parents, row_depths, row_ranks, row_before = rows
    scores, nodes, _ = pool
    if cuda.threadIdx.x == 0:
        put_root(rows)
    i = np.uint32(cuda.threadIdx.x)
    while i < count:
        slot = np.uint32(slots[i])
        score = score_of(slot, scores)
        row = place_in_order(slot, score, scale, histogram, pool, slots)
        row = np.uint32(row + np.uint32(1))
        nodes[ROW, slot] = row
        if row <= budget:
            row_scores[row] = score
            row_parents[row] = slot  # the node, until all rows are known
        i = np.uint32(i + np.uint32(cuda.blockDim.x))
    cuda.syncthreads()  # every node's row is known before it is read
    row = np.uint32(cuda.threadIdx.x + 1)
    while row <= min(count, budget):
        slot = np.uint32(row_parents[row])
        link = np.uint32(nodes[LINK, slot])
        row_parents[row] = nodes[ROW, parent_of(link)]
        row_depths[row], row_ranks[row] = depth_of(link), rank_of(link)
        row_before[row] = nodes[ROW, np.uint32(nodes[BEFORE, slot])]
        row = np.uint32(row + np.uint32(cuda.blockDim.x))


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
    nodes,  # workspace [B, 3, P] i32: a node's LINK, BEFORE and ROW
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
    near = cuda.shared.array(NEAR, np.float64)
    slots = cuda.shared.array(SORTED, np.uint16)
    histogram = cuda.shared.array(BINS, np.int32)
    of_warps = cuda.shared.array(WARP, np.int32)
    found = cuda.shared.array(3, np.int32)
    counts = cuda.shared.array(DEPTHS, np.int32)  # nodes of each depth
    firsts = cuda.shared.array(DEPTHS, np.float32)  # the best candidates …
    spine = cuda.shared.array(DEPTHS, np.float32)  # … and their sums
    live = cuda.shared.array(1, np.int32)
    b = np.uint32(cuda.blockIdx.x)
    table = log_probs[b]
    rows = row_scores, row_parents, row_depths, row_ranks, row_before
    links = next_token, next_sibling
    tree = token_ids, parents, depths, links, row_log_probs, visibility, n_rows
    budget = start_request(b, n_draft_nodes, ragged, most, *links, visibility)
    pool = (near, scores[b]), nodes[b], labels[b]
    counting = histogram, of_warps, found
    lane = np.uint32(cuda.threadIdx.x)
    if lane < counts.size:
        counts[lane] = 0
    if lane < min(table.shape[0], firsts.size):
        firsts[lane] = table[lane, 0]
    # Its barrier also orders these before they are read. Odd is what it is for all
    # threads alike, as all that is asked below.
    odd = look_through(table, wide)
    if odd & HOLDS_NAN:
        budget = 0
    # Nodes to put in order; too many if the frontier is to do it.
    count, scale = (0 if budget == 0 else SORTED + 1), np.float32(0.0)
    if budget > 0 and odd == 0 and table.shape[0] <= EXACT_DEPTH:
        paths = firsts, spine
        end, bound = collect(table, budget, paths, counting, counts, pool)
        if end <= scores.shape[1]:
            count, scale = order_nodes(end, budget, bound, counting, pool, slots)
    if count <= SORTED:
        write_rows(count, budget, scale, histogram, pool, slots, rows)
        if cuda.threadIdx.x == 0:
            live[0] = min(count, budget) + 1
    elif cuda.threadIdx.x < WARP:  # very many ties, or nothing that topk gives
        halves = slots[: SORTED // 2], slots[SORTED // 2 :]
        frontier = near, *halves, histogram
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
                at.empty((batch, 3, POOL), np.int32),
                at.empty((batch, POOL), np.int64),
                at.empty((batch, POOL), np.float64),
            )
            at.launch(
                *(tree_build_parallel_kernel, batch, _parallel_threads(most)),
                *(*given, *pool, *outputs),
            )
    return DraftTree(**{name: at.give(x) for name, x in vars(tree).items()})


def _parallel_threads(most: int) -> int:
    """Threads of a block: with fewer an H200 was slower, for one request."""
    return 288 if most <= 128 else 544 if most <= 256 else PARALLEL_THREADS


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
