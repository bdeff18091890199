"""tree_build in small, to be taken apart in notebook 03: one warp, a slot a lane.

Every lane holds one candidate in its slot of shared memory. A step takes the best one
as the next row; its next sibling takes its slot, its first child a new one. Up to 31
draft nodes, float32 sums, ties to the lower slot: `ddtree_numba.kernels.tree_build` is
the real one.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import cuda, float32, int32

from ddtree_numba import reference
from ddtree_numba.emulator import emulate

WARP = 32
PARENT, DEPTH, RANK = range(3)
NOTHING = np.float32(-np.inf)


@cuda.jit(device=True)
def start(table, waiting, node, parents, scores):
    """Row 0 is the root, slot 0 holds the first candidate; ends with a barrier."""
    lane = cuda.threadIdx.x
    waiting[lane] = NOTHING
    if lane == 0:
        parents[0] = -1
        scores[0] = np.float32(0.0)
        node[0, PARENT] = 0
        node[0, DEPTH] = 1
        node[0, RANK] = 0
        waiting[0] = table[0, 0]
    cuda.syncthreads()


@cuda.jit(device=True)
def best_slot(waiting):
    """All lanes: each reads its slot; shuffles find the best score and whose it is."""
    score = waiting[cuda.threadIdx.x]
    slot = np.int32(cuda.threadIdx.x)
    for distance in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(0xFFFFFFFF, score, distance)
        whose = cuda.shfl_xor_sync(0xFFFFFFFF, slot, distance)
        if other > score or (other == score and whose < slot):
            score, slot = other, whose
    return slot, score


@cuda.jit(device=True)
def read_node(node, slot):
    """All lanes read what the best candidate is: parent row, depth, rank."""
    return node[slot, PARENT], node[slot, DEPTH], node[slot, RANK]


@cuda.jit(device=True)
def write_step(table, waiting, node, parents, scores, row, slot, score, taken):
    """Lane 0 writes the row and puts its sibling in its slot, lane 1 its child."""
    parent, depth, rank = taken
    if cuda.threadIdx.x == 0:
        parents[row] = parent
        scores[row] = score
        node[slot, RANK] = rank + 1
        waiting[slot] = NOTHING
        if rank + 1 < table.shape[1]:
            waiting[slot] = scores[parent] + table[depth - 1, rank + 1]
    elif cuda.threadIdx.x == 1:
        node[row, PARENT] = row
        node[row, DEPTH] = depth + 1
        node[row, RANK] = 0
        if depth < table.shape[0]:
            waiting[row] = score + table[depth, 0]


@cuda.jit
def grow_kernel(table, parents, scores):  # [L, K] f32; out [M + 1] i32 and f32
    waiting = cuda.shared.array(32, float32)
    node = cuda.shared.array((32, 3), int32)
    start(table, waiting, node, parents, scores)
    for row in range(1, parents.shape[0]):
        slot, score = best_slot(waiting)
        taken = read_node(node, slot)
        cuda.syncthreads()  # all have read the slot before lane 0 writes it
        write_step(table, waiting, node, parents, scores, row, slot, score, taken)
        cuda.syncthreads()  # both candidates are there before all read them


@cuda.jit
def hasty_kernel(table, parents, scores):
    """`grow_kernel` without its first barrier."""
    waiting = cuda.shared.array(32, float32)
    node = cuda.shared.array((32, 3), int32)
    start(table, waiting, node, parents, scores)
    for row in range(1, parents.shape[0]):
        slot, score = best_slot(waiting)
        taken = read_node(node, slot)
        write_step(table, waiting, node, parents, scores, row, slot, score, taken)
        cuda.syncthreads()


def outputs(n_draft_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """Empty `parents` and `scores` for a tree."""
    rows = n_draft_nodes + 1
    return np.full(rows, -9, np.int32), np.full(rows, np.nan, np.float32)


def random_table(length: int, kept: int, seed: int = 0) -> Any:
    """Log-probabilities [L, K] without ties, falling along K; float32."""
    probs = np.random.default_rng(seed).dirichlet(np.ones(kept), length)
    return np.log(np.sort(probs, axis=1)[:, ::-1]).astype(np.float32)


def parity(kernel: Any, order: str, tables: int) -> int:
    """For how many random tables a kernel builds the reference's tree of 8 nodes."""
    right = 0
    ids = np.zeros((1, 4, 4), np.int32)
    for seed in range(tables):
        table, (parents, scores) = random_table(4, 4, seed), outputs(8)
        emulate(kernel, 1, WARP, table, parents, scores, order=order)
        want = reference.tree_build(table[None], ids, 8).parents[0]
        right += np.array_equal(parents, want)
    return right
