"""Notebook 05: scores over a latent cache, W_UK on the query's side."""

from __future__ import annotations

from typing import Any

import numpy as np

from ddtree_numba.lab import compare
from ddtree_numba.lab.exercise import Case, Exercise, Wrong
from ddtree_numba.lab.metered import Meter


def latent_scores(q_nope, q_rope, cache, w_uk, sm_scale):
    absorbed = np.einsum("nhe,hec->nhc", q_nope, w_uk)
    q = np.concatenate([absorbed, q_rope], axis=-1)
    return q @ cache.T * sm_scale


# ---------------------------------------------------------------------- wrong answers


def expanded(q_nope, q_rope, cache, w_uk, sm_scale):
    d_latent = w_uk.shape[2]
    keys = np.einsum("tc,hec->the", cache[:, :d_latent], w_uk)
    scores = np.einsum("nhe,the->nht", q_nope, keys)
    return (scores + q_rope @ cache[:, d_latent:].T) * sm_scale


def expanded_by_head(q_nope, q_rope, cache, w_uk, sm_scale):
    d_latent = w_uk.shape[2]
    rows = []
    for h in range(w_uk.shape[0]):
        keys = cache[:, :d_latent] @ w_uk[h].T
        scores = q_nope[:, h] @ keys.T + q_rope[:, h] @ cache[:, d_latent:].T
        rows.append(scores * sm_scale)
    return np.stack(rows, axis=1)


def without_rope(q_nope, q_rope, cache, w_uk, sm_scale):
    absorbed = np.einsum("nhe,hec->nhc", q_nope, w_uk)
    return absorbed @ cache[:, : w_uk.shape[2]].T * sm_scale


def one_head_for_all(q_nope, q_rope, cache, w_uk, sm_scale):
    q = np.concatenate([q_nope @ w_uk[0], q_rope], axis=-1)
    return q @ cache.T * sm_scale


def own_scale(q_nope, q_rope, cache, w_uk, sm_scale):
    q = np.concatenate([np.einsum("nhe,hec->nhc", q_nope, w_uk), q_rope], axis=-1)
    return q @ cache.T * q.shape[-1] ** -0.5


def not_transposed(q_nope, q_rope, cache, w_uk, sm_scale):
    absorbed = np.einsum("nhe,hce->nhc", q_nope, w_uk)
    return np.concatenate([absorbed, q_rope], axis=-1) @ cache.T * sm_scale


# ------------------------------------------------------------------------------ cases

SIZES = {"N": 3, "H": 8, "T": 384, "Dn": 32, "Dc": 64, "Dr": 16}
MOST_BYTES = 250_000
"""About six arrays of the scores' size; the keys of all heads take 393 216."""


def _problem() -> tuple[Any, ...]:
    s, rng = SIZES, np.random.default_rng(5)

    def normals(*shape: int) -> np.ndarray:
        return rng.standard_normal(shape, np.float32)

    return (
        normals(s["N"], s["H"], s["Dn"]),
        normals(s["N"], s["H"], s["Dr"]),
        normals(s["T"], s["Dc"] + s["Dr"]),
        normals(s["H"], s["Dn"], s["Dc"]) * np.float32(s["Dc"] ** -0.5),
        0.1,
    )


def _by_hand(answer: Any) -> str | None:
    q_nope, q_rope = np.array([[[1.0, 10.0]]]), np.array([[[2.0]]])
    w_uk = np.array([[[1.0, 2.0], [3.0, 4.0]]])
    cache = np.array([[5.0, 7.0, 11.0]])
    # W_UK c = (19, 43), so 19 + 430 = 449; with the rope part 449 + 22 = 471.
    got = answer(q_nope, q_rope, cache, w_uk, 0.5)
    problem = compare.arrays(got, [[[235.5]]], "The score", rtol=1e-12)
    if problem is None or np.shape(got) != (1, 1, 1):
        return problem
    if np.isclose(got, 224.5):
        return f"{problem} The rope columns of query and cache are missing."
    if np.isclose(got, 0.5 * (5 * 21 + 7 * 43 + 22)):
        return f"{problem} That is W_UK q, not its transpose: sum over Dn, W_UK's rows."
    if np.isclose(got, 471 * 3**-0.5):
        return f"{problem} Is that another scale than sm_scale?"
    return problem


def _equal(answer: Any) -> str | None:
    arguments = _problem()
    want = latent_scores(*(np.asarray(x, np.float64) for x in arguments))
    got = answer(*(x.copy() if isinstance(x, np.ndarray) else x for x in arguments))
    problem = compare.arrays(got, want, "scores", atol=1e-5, rtol=1e-5)
    if problem and np.shape(got) == want.shape:
        heads = [
            h
            for h in range(SIZES["H"])
            if np.allclose(got[:, h], want[:, h], 1e-4, 1e-4)
        ]
        if heads == [0]:
            return f"{problem} Only head 0 is right: every head has a W_UK of its own."
    return problem


def _bytes(answer: Any) -> str | None:
    meter = Meter()
    arguments = [meter.wrap(x) if isinstance(x, np.ndarray) else x for x in _problem()]
    got = answer(*arguments)
    if not isinstance(got, type(arguments[0])):
        return (
            f"A {type(got).__name__} came back, and what was made for it cannot be "
            "counted. Use NumPy's functions and operators on the arguments as they are."
        )
    if meter.bytes > MOST_BYTES:
        return (
            f"{meter.bytes:,} bytes of new arrays; at most {MOST_BYTES:,}. The largest "
            f"has shape {meter.largest}: is W_UK still multiplied with the cache?"
        )
    return None


EXERCISE = Exercise(
    notebook="05",
    title="move W_UK to the query",
    name="latent_scores",
    hints=(
        "q · (W c) = (Wᵀ q) · c. Multiply each head's query with its W_UK first, and "
        "never the cache: np.einsum('nhe,hec->nhc', q_nope, w_uk).",
        "Append q_rope to that (np.concatenate, axis=-1): now the query has the "
        "cache's columns, and all scores are one product with cache.T, times sm_scale.",
    ),
    solution=latent_scores,
    cases=(
        Case("one query, one key, by hand", _by_hand),
        Case("8 heads, 384 keys: equal to 1e-5", _equal),
        Case(f"at most {MOST_BYTES:,} bytes of new arrays", _bytes),
    ),
    wrong=(
        Wrong("keys expanded", expanded, "is W_UK still multiplied with the cache"),
        Wrong("keys expanded head by head", expanded_by_head, "bytes of new arrays"),
        Wrong("no rope", without_rope, "rope columns"),
        Wrong("one head's W_UK for all", one_head_for_all, "Only head 0 is right"),
        Wrong("a scale of its own", own_scale, "another scale"),
        Wrong("not transposed", not_transposed, "not its transpose"),
    ),
)
