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
depth: a pool takes the children of its nodes of the depth before. Scores are counted in
a histogram, and whatever lies in a bin behind that of the M-th best is out: its
children are not looked at, and since ranks fall, a node's other children behind one
that is out are out too. Nothing within the bins is decided before the end, when what is
left, little more than M nodes, is sorted by score and, where scores are equal, by rank
path. With very many ties too much is left; then the frontier does it.

Versions
--------
tree_build_kernel           "simple": one block a request: one warp selects the rows, M
                            steps one after the other, then all threads write them out
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
from ddtree_numba.tree import WORD_BITS, DraftTree, n_words

MAX_DRAFT_NODES = 1024
MAX_ROWS = MAX_DRAFT_NODES + 1
THREADS = 256
WARP = 32
LOWEST, HIGHEST = map(float, reference.FLOAT32_RANGE)
FULL_WARP = 0xFFFFFFFF
SIBLING, CHILD = 0, 1  # the lanes that put a taken row's two candidates in its place
NO_ORDER = NO_SLOT = 0xFFFF  # behind every candidate, none of them

VERSIONS = ("auto", "simple", "parallel")
PARALLEL_THREADS = 512
# Measured on an H200, L = 15: 45 µs at 64 nodes, whatever the table; parallel 29 to 42,
# but 170 with many ties. At 256 nodes 200 against 113, with many ties 220 against 600.
SIMPLE_UP_TO = 64
POOL = 8192  # nodes in the workspace
SORTED = 2048  # nodes that are sorted in shared memory, a power of two
BINS = 1024
SPAN = 64.0  # the bins go down to this log-probability at most
COARSE = 128  # bins to which the limit falls before they are spread again
PARENT, DEPTH, RANK, BEFORE, ROW = range(5)  # what the pool knows of a node: slots


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
def put_root(rows):
    """Row 0."""
    row_scores, row_parents, row_depths, row_ranks, _ = rows
    row_scores[0] = np.float64(0.0)
    row_parents[0] = 0
    row_depths[0] = 0
    row_ranks[0] = 0


@cuda.jit(device=True)
def select_rows(table, budget, frontier, rows):
    """One warp takes the best candidate as the next row until `budget` are taken.

    Fills the rows' arrays from row 1 on and returns how many rows there are. A slot of
    the frontier holds one candidate after the other, each the next sibling of the one
    before; row r's first child starts slot r.

    A lone warp is slow in proportion to its instructions, so rows, slots and ranks are
    unsigned: a signed index costs Numba a test for a negative one.
    """
    scores, orders, parents, ranks, before = frontier
    row_scores, row_parents, row_depths, row_ranks, row_before = rows
    lane = cuda.threadIdx.x
    if lane == 0:
        put_root(rows)
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


@cuda.jit(device=True)
def start_request(b, n_draft_nodes, ragged, most, next_token, next_sibling, visibility):
    """Clear what is only set in places, and return the budget."""
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    for i in range(warp, visibility.shape[1], cuda.blockDim.x // WARP):
        for word in range(lane, visibility.shape[2], WARP):
            visibility[b, i, word] = 0
        if lane == 0:
            next_token[b, i] = -1
            next_sibling[b, i] = -1
    budget = most
    if ragged:
        budget = max(0, min(most, n_draft_nodes[b]))
    return budget


@cuda.jit(device=True)
def write_row(b, i, live, candidates, root_tokens, rooted, rows, tree):
    """Write row i of a request with `live` rows, padding behind them."""
    row_scores, row_parents, row_depths, row_ranks, row_before = rows
    token_ids, parents, depths, next_token, next_sibling, log_probs, visibility = tree
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


# ----------------------------------------------------------------------- simple version


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
    scores = cuda.shared.array(MAX_DRAFT_NODES, np.float64)
    orders = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)  # place by rank path
    slot_parents = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    ranks = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    before = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    live = cuda.shared.array(1, np.int32)
    b = cuda.blockIdx.x
    table = log_probs[b]
    rows = row_scores, row_parents, row_depths, row_ranks, row_before
    links = next_token, next_sibling
    tree = (token_ids, parents, depths, *links, row_log_probs, visibility)
    budget = start_request(b, n_draft_nodes, ragged, most, *links, visibility)
    if has_nan(table):
        budget = 0
    if cuda.threadIdx.x < WARP:
        frontier = scores, orders, slot_parents, ranks, before
        count = select_rows(table, np.uint32(budget), frontier, rows)
        if cuda.threadIdx.x == 0:
            live[0] = count
    # Orders the rows before they are read, and what was cleared before it is set.
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        n_rows[b] = live[0]
    for i in range(cuda.threadIdx.x, parents.shape[1], cuda.blockDim.x):
        write_row(b, i, live[0], candidates, root_tokens, rooted, rows, tree)


# --------------------------------------------------------------------- parallel version


@cuda.jit(device=True)
def falls(table):
    """Whether a request's log-probs are 0 or less and fall along K; a block barrier."""
    found = 1
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    for position in range(warp, table.shape[0], cuda.blockDim.x // WARP):
        for rank in range(lane, table.shape[1], WARP):
            above = table[position, rank - 1] if rank > 0 else np.float32(0.0)
            if not table[position, rank] <= above:  # NaN does not
                found = 0
    return cuda.syncthreads_and(found) != 0


@cuda.jit(device=True)
def bin_of(score, scale):
    """Bin of a score of 0 or less, 0 for the best; never falls as scores fall."""
    return np.int32(min(np.float32(-score) * scale, np.float32(BINS - 1)))


@cuda.jit(device=True)
def find_lane(mine, above, kept):
    """The lane that holds the `kept`-th node, if every lane holds `mine` of them.

    `above` nodes stand before lane 0. Returns the lane, -1 if there are fewer nodes,
    and how many stand before it.
    """
    lane = cuda.threadIdx.x % WARP
    upto = mine  # becomes the sum over this lane and those before it
    distance = 1
    while distance < WARP:
        earlier = cuda.shfl_up_sync(FULL_WARP, upto, distance)
        if lane >= distance:
            upto += earlier
        distance *= 2
    here = above + upto - mine < kept <= above + upto
    lane = cuda.ffs(cuda.ballot_sync(FULL_WARP, here)) - 1
    return lane, above + cuda.shfl_sync(FULL_WARP, upto - mine, max(lane, 0))


@cuda.jit(device=True)
def find_limit(histogram, budget):
    """One warp finds the bin of the `budget`-th best node, or the last bin."""
    lane = cuda.threadIdx.x
    count = 0
    for j in range(BINS // WARP):  # a lane starts at its own bank
        count += histogram[lane * (BINS // WARP) + (j + lane) % (BINS // WARP)]
    group, above = find_lane(count, 0, budget)
    if group < 0:  # in every lane alike
        return BINS - 1
    first = group * (BINS // WARP)
    lane, above = find_lane(histogram[first + lane], above, budget)
    return first + lane


@cuda.jit(device=True)
def tighten(histogram, budget, limit):
    """The limit of the nodes counted, for all threads; between block barriers."""
    cuda.syncthreads()  # everything is counted before the bins are read
    if cuda.threadIdx.x < WARP:
        found = find_limit(histogram, budget)
        if cuda.threadIdx.x == 0:
            limit[0] = found
    cuda.syncthreads()  # the limit is found before it is read
    return limit[0]


@cuda.jit(device=True)
def clear_bins(histogram):
    """Empty the histogram; ends with a block barrier."""
    for i in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        histogram[i] = 0
    cuda.syncthreads()  # the bins are empty before anything is counted


@cuda.jit(device=True)
def put_node(nodes, slot, parent, depth, rank, before):
    """Describe a node of the pool."""
    nodes[PARENT, slot] = parent
    nodes[DEPTH, slot] = depth
    nodes[RANK, slot] = rank
    nodes[BEFORE, slot] = before
    nodes[ROW, slot] = 0


@cuda.jit(device=True)
def count_children(row, score, widest, scale, limit, histogram):
    """A warp counts a node's children within the limit, among the first `widest`."""
    for start in range(0, widest, WARP):
        rank = start + cuda.threadIdx.x % WARP
        passes = False
        if rank < widest:
            child = score + np.float64(row[rank])
            passes = child > -math.inf and bin_of(child, scale) <= limit
            if passes:
                cuda.atomic.add(histogram, bin_of(child, scale), 1)
        if not cuda.all_sync(FULL_WARP, passes):
            break  # none behind passes


@cuda.jit(device=True)
def add_children(row, slot, score, depth, scale, limit, used, nodes, scores):
    """A warp adds a node's children within the limit to the pool."""
    lane = cuda.threadIdx.x % WARP
    before = -1
    for start in range(0, row.size, WARP):
        rank = start + lane
        child = np.float64(-math.inf)
        if rank < row.size:
            child = score + np.float64(row[rank])
        passes = child > -math.inf and bin_of(child, scale) <= limit
        passing = cuda.ballot_sync(FULL_WARP, passes)
        base = 0
        if lane == 0:
            base = cuda.atomic.add(used, 0, cuda.popc(passing))
        base = cuda.shfl_sync(FULL_WARP, base, 0)
        at = base + lane  # those that pass are the lowest lanes
        if passes and at < scores.size:
            scores[at] = child
            put_node(nodes, at, slot, depth, rank, at - 1 if lane > 0 else before)
        before = base + WARP - 1
        if not cuda.all_sync(FULL_WARP, passes):
            break  # none behind passes


@cuda.jit(device=True)
def collect(table, budget, histogram, cells, nodes, scores):
    """Fill the pool with the best nodes, at least `budget` if there are so many.

    Returns how many nodes it holds, or would if it were larger, and the scale and limit
    that say which of them still count. For all threads; ends with a barrier.
    """
    used, limit_cell = cells[:1], cells[1:]
    first, end = 0, min(budget, table.shape[1])
    span = np.float32(SPAN)
    if end == budget:
        span = min(span, max(-table[0, end - 1], np.float32(1e-3)))
    scale = np.float32(BINS - 2) / span
    clear_bins(histogram)
    for rank in range(cuda.threadIdx.x, end, cuda.blockDim.x):
        scores[rank] = table[0, rank]
        put_node(nodes, rank, -1, 1, rank, rank - 1)
        if scores[rank] > -math.inf:
            cuda.atomic.add(histogram, bin_of(scores[rank], scale), 1)
    if cuda.threadIdx.x == 0:
        used[0] = end
    limit = tighten(histogram, budget, limit_cell)
    warp, warps = cuda.threadIdx.x // WARP, cuda.blockDim.x // WARP
    depth = 2
    while depth <= table.shape[0] and first < end <= scores.size:
        row = table[depth - 1]
        for slot in range(first + warp, end, warps):
            widest = row.size
            if depth == 2:
                # Depth 1 stands in order: (i + 1)(r + 1) nodes are as good as rank r
                # under the i-th. Those beyond the budget need not be counted.
                widest = min(widest, budget // (slot + 1))
            if bin_of(scores[slot], scale) <= limit:
                count_children(row, scores[slot], widest, scale, limit, histogram)
        limit = tighten(histogram, budget, limit_cell)
        for slot in range(first + warp, end, warps):
            if bin_of(scores[slot], scale) <= limit:
                score = scores[slot]
                add_children(row, slot, score, depth, scale, limit, used, nodes, scores)
        cuda.syncthreads()  # the nodes are in the pool before they are read
        first, end = end, used[0]
        if limit < COARSE and end <= scores.size:
            # Few bins tell the nodes apart: spread what is within the limit over all.
            coarse, scale = (
                scale,
                np.float32(BINS - 2) / (np.float32(limit + 1) / scale),
            )
            clear_bins(histogram)
            for slot in range(cuda.threadIdx.x, end, cuda.blockDim.x):
                if bin_of(scores[slot], coarse) <= limit:
                    cuda.atomic.add(histogram, bin_of(scores[slot], scale), 1)
            limit = BINS - 2
        cuda.syncthreads()  # all have read `used`; the bins are counted
        depth += 1
    return end, scale, limit


@cuda.jit(device=True)
def gather_nodes(end, scale, limit, used, scores, keys, slots):
    """Collect the pool's nodes within the limit, in no order, and return their number.

    It may be more than there is room for. For all threads; a block barrier.
    """
    if cuda.threadIdx.x == 0:
        used[0] = 0
    cuda.syncthreads()  # the count starts before anyone adds to it
    for slot in range(cuda.threadIdx.x, end, cuda.blockDim.x):
        if scores[slot] > -math.inf and bin_of(scores[slot], scale) <= limit:
            at = cuda.atomic.add(used, 0, 1)
            if at < keys.size:
                keys[at] = scores[slot]
                slots[at] = slot
    cuda.syncthreads()  # all are collected before they are counted and read
    return used[0]


@cuda.jit(device=True)
def path_is_lower(a, b, nodes):
    """Whether node a's rank path stands before node b's."""
    x, y = np.int32(a), np.int32(b)
    while nodes[DEPTH, x] > nodes[DEPTH, y]:
        x = nodes[PARENT, x]
    while nodes[DEPTH, y] > nodes[DEPTH, x]:
        y = nodes[PARENT, y]
    if x == y:
        return nodes[DEPTH, a] < nodes[DEPTH, b]
    while nodes[PARENT, x] != nodes[PARENT, y]:
        x = nodes[PARENT, x]
        y = nodes[PARENT, y]
    return nodes[RANK, x] < nodes[RANK, y]


@cuda.jit(device=True)
def sort_nodes(keys, slots, count, nodes):
    """Bitonic sort: score falling, ties by rank path."""
    size = 1
    while size < count:
        size *= 2
    for i in range(count + cuda.threadIdx.x, size, cuda.blockDim.x):
        keys[i] = -math.inf
        slots[i] = NO_SLOT
    width = 2
    while width <= size:
        distance = width // 2
        while distance > 0:
            cuda.syncthreads()  # the exchange before this one is done
            for pair in range(cuda.threadIdx.x, size // 2, cuda.blockDim.x):
                i = 2 * pair - pair % distance
                other = i + distance
                mine, its = keys[i], keys[other]
                swap = mine < its
                if mine == its and mine > -math.inf:
                    swap = path_is_lower(slots[other], slots[i], nodes)
                if swap == (i & width == 0) and (mine != its or mine > -math.inf):
                    keys[i], keys[other] = its, mine
                    slots[i], slots[other] = slots[other], slots[i]
            distance //= 2
        width *= 2
    cuda.syncthreads()  # the last exchange is done


@cuda.jit(device=True)
def write_rows(keys, slots, count, nodes, rows):
    """Turn the best `count` nodes into rows; a block barrier between."""
    row_scores, row_parents, row_depths, row_ranks, row_before = rows
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        nodes[ROW, slots[i]] = i + 1
    cuda.syncthreads()  # every node's row is known before it is read
    if cuda.threadIdx.x == 0:
        put_root(rows)
    for i in range(cuda.threadIdx.x, count, cuda.blockDim.x):
        slot = slots[i]
        row_scores[i + 1] = keys[i]
        row_depths[i + 1] = nodes[DEPTH, slot]
        row_ranks[i + 1] = nodes[RANK, slot]
        parent, previous = nodes[PARENT, slot], nodes[BEFORE, slot]
        row_parents[i + 1] = nodes[ROW, parent] if parent >= 0 else 0
        row_before[i + 1] = nodes[ROW, previous] if previous >= 0 else 0


@cuda.jit
def tree_build_parallel_kernel(
    log_probs,  # [B, L, K] f32
    candidates,  # [B, L, K] i32: their tokens
    n_draft_nodes,  # [B] i32: budgets, cut to 0 … most, if `ragged`
    ragged,  # i32: 0 if n_draft_nodes is not to be read, because all are `most`
    most,  # i32: the largest budget, N - 1 or less
    root_tokens,  # [B] i32, if `rooted`
    rooted,  # i32: 0 if root_tokens is not to be read, because they are unknown
    pool,  # workspace [B, 5, P] i32: a node's PARENT, DEPTH, RANK, BEFORE and ROW
    pool_scores,  # workspace [B, P] f64
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
    cells = cuda.shared.array(2, np.int32)
    slot_parents = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    ranks = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    before = cuda.shared.array(MAX_DRAFT_NODES, np.uint16)
    live = cuda.shared.array(1, np.int32)
    b = cuda.blockIdx.x
    table = log_probs[b]
    rows = row_scores, row_parents, row_depths, row_ranks, row_before
    links = next_token, next_sibling
    tree = (token_ids, parents, depths, *links, row_log_probs, visibility)
    budget = start_request(b, n_draft_nodes, ragged, most, *links, visibility)
    nodes, scores = pool[b], pool_scores[b]
    end, count = 0, 0
    regular = falls(table)  # for all threads alike, as all that is asked below
    if not regular and has_nan(table):
        budget = 0
    if regular and budget > 0:
        end, scale, limit = collect(table, budget, histogram, cells, nodes, scores)
        if end <= scores.size:
            count = gather_nodes(end, scale, limit, cells, scores, keys, slots)
    if regular and end <= scores.size and count <= keys.size:
        sort_nodes(keys, slots, count, nodes)
        count = min(count, budget)
        write_rows(keys, slots, count, nodes, rows)
        if cuda.threadIdx.x == 0:
            live[0] = count + 1
    elif cuda.threadIdx.x < WARP:  # too many ties, or nothing that topk gives
        frontier = keys, slots, slot_parents, ranks, before
        count = select_rows(table, np.uint32(budget), frontier, rows)
        if cuda.threadIdx.x == 0:
            live[0] = count
    # Orders the rows before they are read, and what was cleared before it is set.
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        n_rows[b] = live[0]
    for i in range(cuda.threadIdx.x, parents.shape[1], cuda.blockDim.x):
        write_row(b, i, live[0], candidates, root_tokens, rooted, rows, tree)


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
    version : {"auto", "simple", "parallel"}
        The kernel; "auto" is simple up to 64 draft nodes. Both build the same tree.
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
        version = "simple" if most <= SIMPLE_UP_TO else "parallel"
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
        given = (
            at.put(log_probs),
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
        else:
            pool = at.empty((batch, 5, POOL), np.int32)
            pool_scores = at.empty((batch, POOL), np.float64)
            at.launch(
                *(tree_build_parallel_kernel, batch, PARALLEL_THREADS),
                *(*given, pool, pool_scores, *outputs),
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
