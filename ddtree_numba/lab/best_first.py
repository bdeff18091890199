"""Best-first search over prefixes, one step at a time: what notebook 02 is about.

`ddtree_numba.reference.tree_build` does the same in a batch; here every step is kept,
and the rule that fills the heap can be exchanged.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

RankPath = tuple[int, ...]
Pushes = Callable[[RankPath, int, int], Iterable[RankPath]]


@dataclass(frozen=True)
class Step:
    """One prefix taken off the heap.

    Attributes
    ----------
    taken : tuple of int
        Its rank path.
    score : float
        Its log-probability.
    offered : tuple of tuple of int
        What was put on the heap in its place.
    heap : tuple of (float, tuple of int)
        Scores and rank paths on the heap after that, the next one first.
    """

    taken: RankPath
    score: float
    offered: tuple[RankPath, ...]
    heap: tuple[tuple[float, RankPath], ...]


def pushes(path, n_positions, n_candidates):
    """The prefixes that go on the heap when `path` has been taken off."""
    offers = []
    if path[-1] + 1 < n_candidates:
        offers.append(path[:-1] + (path[-1] + 1,))  # its next sibling
    if len(path) < n_positions:
        offers.append(path + (0,))  # its first child
    return offers


def score_of(log_probs: np.ndarray, path: RankPath) -> float:
    """Log-probability of a prefix: the sum of its candidates', left to right."""
    score = 0.0
    for position, rank in enumerate(path):
        score += float(log_probs[position, rank])
    return score


def best_first(
    log_probs: np.ndarray, n_draft_nodes: int, pushes: Pushes = pushes
) -> list[Step]:
    """Take the `n_draft_nodes` best prefixes, one after the other.

    Parameters
    ----------
    log_probs : [L, K]
        Falling along K.
    n_draft_nodes : int
    pushes : callable
        ``pushes(path, L, K)`` gives the prefixes that follow a taken one.

    Returns
    -------
    list of Step
        Fewer if the heap runs empty.
    """
    table = np.asarray(log_probs, np.float64)
    heap: list[tuple[float, RankPath]] = []
    if table.size:
        heap.append((-score_of(table, (0,)), (0,)))
    steps: list[Step] = []
    while heap and len(steps) < n_draft_nodes:
        # Tuples compare in order: the best score, then the first rank path.
        negative, path = heapq.heappop(heap)
        offered = tuple(pushes(path, *table.shape))
        for offer in offered:
            heapq.heappush(heap, (-score_of(table, offer), offer))
        left = tuple((-negative, path) for negative, path in sorted(heap))
        steps.append(Step(path, -negative, offered, left))
    return steps


def brute_force(log_probs: np.ndarray, n_draft_nodes: int) -> list[RankPath]:
    """The same without a heap: score all prefixes, sort, cut."""
    table = np.asarray(log_probs, np.float64)
    length, kept = table.shape
    prefixes = itertools.chain.from_iterable(
        itertools.product(range(kept), repeat=depth) for depth in range(1, length + 1)
    )
    ranked = sorted((-score_of(table, path), path) for path in prefixes)
    return [path for _, path in ranked[:n_draft_nodes]]
