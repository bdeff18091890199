"""Random inputs for the benchmark, and what must come out of them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import numpy as np

from ddtree_numba import bf16, reference
from ddtree_numba.bench.rows import Work
from ddtree_numba.tree import DraftTree

PAGE = 64
"""Caches are whole pages of as many rows, as serving engines keep them."""
D, D_LATENT = 576, 512
SM_SCALE = 192**-0.5  # of the models with these sizes; not D ** -0.5
DRAFTED, VOCAB = 15, 163840
EVERY = 16
"""One of as many packed rows is computed in float64: some of every kernel's tile."""
BF16_NAN = 0x7FC0


class WrongResult(RuntimeError):
    """What a kernel computed is wrong; it is not to be timed."""


# -------------------------------------------------------------------------- attention


@dataclass(frozen=True)
class AttentionProblem:
    """Inputs of `verify_attn` in bf16; cache rows past the tree are NaN.

    Attributes
    ----------
    q : uint16 [B, N, H, 576]
    kv_cache : uint16 [B, S_max, 576]
    prefix_len : int
        S, the same for all requests.
    visibility : uint32 [B, N, ceil(N/32)]
    """

    q: np.ndarray
    kv_cache: np.ndarray
    prefix_len: int
    visibility: np.ndarray
    sm_scale: float = SM_SCALE
    d_latent: int = D_LATENT

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """B, N, H, S."""
        return (*self.q.shape[:3], self.prefix_len)

    def sees(self) -> np.ndarray:
        """bool [B, N, N]: whether row i sees tree row j."""
        bits = np.unpackbits(self.visibility.view(np.uint8), axis=2, bitorder="little")
        return bits[:, :, : self.q.shape[1]].astype(bool)

    @functools.cached_property
    def with_chain(self) -> AttentionProblem:
        """The same with a chain for a tree: what a causal kernel computes."""
        batch, n = self.q.shape[:2]
        parents = np.tile(np.arange(-1, n - 1, dtype=np.int32), (batch, 1))
        words = reference.visibility(parents, np.full(batch, n))
        return replace(self, visibility=words)

    @functools.cached_property
    def _expected(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Sampled packed rows [R], and their out [B, R, Dc] and lse [B, R], float64."""
        batch, n, heads, prefix = self.shape
        rng = np.random.default_rng(1)
        starts = np.arange(0, n * heads, EVERY)
        rows = np.minimum(starts + rng.integers(EVERY, size=starts.size), n * heads - 1)
        outs, lses = [], []
        for b, sees in enumerate(self.sees()):
            keys = bf16.to_float64(self.kv_cache[b, : prefix + n])
            queries = bf16.to_float64(self.q[b].reshape(n * heads, -1)[rows])
            scores = queries @ keys.T * self.sm_scale
            tail = scores[:, prefix:]
            tail[~sees[rows // heads]] = -np.inf
            top = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - top)
            total = weights.sum(axis=1, keepdims=True)
            outs.append(weights @ keys[:, : self.d_latent] / total)
            lses.append((top + np.log(total))[:, 0])
        return rows, np.stack(outs), np.stack(lses)

    def check(
        self, out: np.ndarray, lse: np.ndarray | None = None, *, exact: bool = True
    ) -> float:
        """Largest absolute error of `out` in the sampled rows.

        Bounds are on norms. Weights rounded to bf16 are off by up to 2^-9 of
        themselves, and a row of few large ones by as much of its values, up to 4 here:
        no bound on single elements tells that from a wrong one. But no row's error,
        measured by its norm, is much larger than 2^-9, and the mean one is half that; a
        wrong row, column, key or mask bit makes it a hundred times as large.

        Parameters
        ----------
        out : float32 [B, N, H, Dc]
        lse : float32 [B, N, H], optional
        exact : bool
            Whether those bounds hold. A peer that rounds scores to bf16 meets only
            wider ones.

        Raises
        ------
        WrongResult
        """
        rows, want, want_lse = self._expected
        batch, n, heads, _ = self.q.shape
        if not np.isfinite(out).all():
            raise WrongResult(f"{(~np.isfinite(out)).sum()} elements are not finite")
        got = out.reshape(batch, n * heads, -1)[:, rows].astype(np.float64)
        error = got - want
        relative = np.linalg.norm(error) / np.linalg.norm(want)
        by_row = np.linalg.norm(error, axis=-1) / np.linalg.norm(want, axis=-1)
        bound = 2e-3 if exact else 4e-2
        if not (relative <= bound and by_row.max() <= 4 * bound):
            raise WrongResult(
                f"relative error {relative:.2e}, of the worst row {by_row.max():.2e}"
            )
        if lse is not None:
            got_lse = lse.reshape(batch, n * heads)[:, rows]
            lse_error = np.abs(got_lse - want_lse)
            if not (lse_error <= 1e-6 + 8.01 / 65536 * np.abs(want_lse)).all():
                raise WrongResult(f"max absolute error of lse {lse_error.max():.2e}")
        return float(np.abs(error).max())


def attention_work(shape: tuple[int, int, int, int]) -> Work:
    """Both products with nothing skipped; queries, live cache rows, out and lse."""
    batch, n, heads, prefix = shape
    rows, keys = batch * n * heads, prefix + n
    nbytes = 2 * rows * D + 2 * batch * keys * D + 4 * rows * (D_LATENT + 1)
    return Work(2.0 * rows * keys * (D + D_LATENT), nbytes)


@functools.cache
def _normal() -> np.ndarray:
    """Normal bf16 bits to be repeated: drawing all of them would take most of a run.

    No row is a multiple of their number, so rows differ.
    """
    rng = np.random.default_rng(4)
    return bf16.from_float32(rng.standard_normal(3_999_971, np.float32))


@functools.lru_cache(maxsize=1)
def attention_problem(shape: tuple[int, int, int, int]) -> AttentionProblem:
    """Random bf16 inputs for a shape (B, N, H, S), a random tree for each request."""
    batch, n, heads, prefix = shape
    rng = np.random.default_rng(0)
    room = -(-(prefix + n) // PAGE) * PAGE
    q = np.resize(_normal(), (batch, n, heads, D))
    kv = np.resize(_normal()[::-1], (batch, room, D))
    kv[:, prefix + n :] = BF16_NAN
    parents = np.full((batch, n), -1, np.int32)
    for i in range(1, n):
        parents[:, i] = rng.integers(i, size=batch)
    words = reference.visibility(parents, np.full(batch, n))
    return AttentionProblem(q, kv, prefix, words)


# -------------------------------------------------------------------------------- tree


@functools.lru_cache(maxsize=2)
def draft_logits(batch: int, dtype: str) -> np.ndarray:
    """Logits [B, 15, 163840] as a drafter's, float32 or bf16 bits (with ties).

    At each position a few dozen tokens stand out from noise, the best with a
    probability near one half, so that trees of them are deep as well as wide.
    """
    rng = np.random.default_rng(0)
    logits = 3 * rng.standard_normal((batch, DRAFTED, VOCAB), np.float32)
    outstanding = rng.integers(VOCAB, size=(batch, DRAFTED, 64))
    best = 18 - 1.5 * np.log2(1 + np.arange(64, dtype=np.float32))
    best = best + rng.normal(0, 0.3, outstanding.shape).astype(np.float32)
    np.put_along_axis(logits, outstanding, best, axis=2)
    return bf16.from_float32(logits) if dtype == "bf16" else logits


@functools.lru_cache(maxsize=2)
def _candidates(batch: int, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    return reference.topk(draft_logits(batch, dtype), 1024)


def candidates(batch: int, dtype: str, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The k best of `draft_logits`: log_probs and token_ids [B, 15, k]."""
    log_probs, token_ids = _candidates(batch, dtype)
    return log_probs[..., :k].copy(), token_ids[..., :k].copy()


def check_candidates(
    batch: int, dtype: str, log_probs: np.ndarray, token_ids: np.ndarray
) -> float:
    """Largest error of log-probabilities; raises WrongResult, ids must be exact."""
    want, want_ids = candidates(batch, dtype, log_probs.shape[2])
    if not np.array_equal(token_ids, want_ids):
        wrong = np.count_nonzero(token_ids != want_ids)
        raise WrongResult(f"{wrong} of {want_ids.size} candidates are wrong")
    error = np.abs(log_probs - want)
    # Float32 sums of V exponentials, and the rounding of the difference itself.
    if not (error <= 2e-6 + 2.0**-22 * np.abs(want)).all():
        raise WrongResult(f"max absolute error of log_probs {error.max():.2e}")
    return float(error.max())


def check_tree(
    tree: DraftTree, log_probs: np.ndarray, token_ids: np.ndarray, n_draft_nodes: int
) -> None:
    """Raise WrongResult unless every field is the reference's for these candidates."""
    want = reference.tree_build(log_probs, token_ids, n_draft_nodes)
    for name, values in vars(want).items():
        if not np.array_equal(getattr(tree, name), values):
            raise WrongResult(f"the tree's {name} differ from the reference's")


# ------------------------------------------------------------------- after the target


class AcceptProblem:
    """A tree, the target's logits after its rows, and a cache to be compacted.

    The target agrees with the most probable child of every row, so that there is a path
    to walk along, and rows of it to move.
    """

    def __init__(
        self, batch: int, n_draft_nodes: int, layers: int, prefix: int
    ) -> None:
        rng = np.random.default_rng(2)
        n = n_draft_nodes + 1
        log_probs, token_ids = candidates(batch, "bf16", n_draft_nodes)
        self.tree = reference.tree_build(log_probs, token_ids, n_draft_nodes)
        self.choices = rng.integers(VOCAB, size=(batch, n)).astype(np.int32)
        for b in range(batch):
            for row, children in enumerate(self.tree.children(b)):
                if children:
                    self.choices[b, row] = self.tree.token_ids[b, children[0]]
        self.accepted = reference.tree_accept(
            self.tree, self.choices, max_depth=DRAFTED
        )
        self.prefix_lens = np.full(batch, prefix, np.int32)
        room = -(-(prefix + n) // PAGE) * PAGE
        shape = (layers, batch, room, D)
        self.cache = np.resize(_normal(), shape)

    def logits(self) -> np.ndarray:
        """bf16 bits [B, N, V] whose maxima are `choices`."""
        rng = np.random.default_rng(3)
        batch, n = self.choices.shape
        logits = rng.standard_normal((batch, n, VOCAB), np.float32)
        np.put_along_axis(logits, self.choices[:, :, None], 30, axis=2)
        return bf16.from_float32(logits)

    def attention(self, queries: AttentionProblem, layer: int) -> AttentionProblem:
        """What `queries` attend to in a layer's cache, under this problem's tree."""
        cache, words = self.cache[layer], self.tree.visibility
        return replace(queries, kv_cache=cache, visibility=words)

    def compacted(self) -> np.ndarray:
        """The cache as it must be afterwards."""
        cache = self.cache.copy()
        rows, lengths = self.accepted.rows, self.accepted.accept_len
        reference.kv_compact(cache, self.prefix_lens, rows, lengths)
        return cache
