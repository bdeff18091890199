"""Trees for tests: random shapes, and the worked example of `ddtree_numba.tree`."""

import numpy as np

from ddtree_numba.tree import DraftTree

THE, CAT, SAT, DOG, RAN = 10, 11, 12, 13, 14
WORDS = {THE: "The", CAT: "cat", SAT: "sat", DOG: "dog", RAN: "ran"}


def worked_example() -> DraftTree:
    """``cat .6, dog .3`` after "The"; ``sat .8`` after either."""
    return DraftTree.from_parents(
        [-1, 0, 1, 0, 3], [THE, CAT, SAT, DOG, SAT], np.log([1, 0.6, 0.48, 0.3, 0.24])
    )


def random_parents(rng: np.random.Generator, n: int, depth_bias: float = 0) -> list:
    """Parent rows of a random tree of n rows.

    `depth_bias` 0 draws any earlier row; towards 1 the tree becomes a chain, towards -1
    a star.
    """
    parents = [-1]
    for i in range(1, n):
        if rng.random() < abs(depth_bias):
            parents.append(i - 1 if depth_bias > 0 else 0)
        else:
            parents.append(int(rng.integers(i)))
    return parents


def random_tree(
    rng: np.random.Generator,
    batch: int,
    n: int,
    *,
    vocab: int = 3,
    depth_bias: float = 0,
    ragged: bool = True,
) -> DraftTree:
    """Random trees with tokens below `vocab` (siblings may repeat one)."""
    parents = [random_parents(rng, n, depth_bias) for _ in range(batch)]
    scores = -np.sort(rng.random((batch, n)), axis=1)
    scores[:, 0] = 0
    n_rows = rng.integers(1, n + 1, batch) if ragged else np.full(batch, n)
    tokens = rng.integers(vocab, size=(batch, n))
    return DraftTree.from_parents(parents, tokens, scores, n_rows)
