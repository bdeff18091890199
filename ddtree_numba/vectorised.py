"""NumPy twins fit for a whole model: the references' results by matrix products.

`reference.verify_attn` walks over every row and head, which is the way to read it; a
model's round would wait seconds for it. Still float64, and held to it by a test.
"""

from __future__ import annotations

import numpy as np

from ddtree_numba import bf16, reference


def verify_attn(
    q: np.ndarray,
    kv_cache: np.ndarray,
    prefix_lens: np.ndarray,
    visibility: np.ndarray,
    *,
    sm_scale: float,
    d_latent: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Tree-masked MLA attention; arguments and results of `reference.verify_attn`."""
    batch, n, heads, _ = q.shape
    out = np.zeros((batch, n, heads, d_latent), np.float32)
    lse = np.full((batch, n, heads), -np.inf, np.float32)
    for b in range(batch):
        octets = np.ascontiguousarray(visibility[b]).view(np.uint8)
        bits = np.unpackbits(octets, axis=1, bitorder="little")
        bits = bits[:, :n].astype(bool)
        live = np.flatnonzero(bits.any(axis=1))
        if not live.size:
            continue
        # Rows that nobody sees are left out: they may hold NaN, and 0 · NaN is NaN.
        tail = np.flatnonzero(bits.any(axis=0))
        prefix = np.arange(prefix_lens[b])
        seen_rows = np.concatenate([prefix, prefix_lens[b] + tail])
        keys = bf16.to_float64(kv_cache[b, seen_rows])
        queries = bf16.to_float64(q[b, live]).reshape(-1, q.shape[3])
        if not (np.isfinite(keys).all() and np.isfinite(queries).all()):
            # 0 · NaN is NaN: here it would reach rows that do not see it.
            one = slice(b, b + 1)
            out[one], lse[one] = reference.verify_attn(
                *(x[one] for x in (q, kv_cache, prefix_lens, visibility)),
                sm_scale=sm_scale,
                d_latent=d_latent,
            )
            continue
        scores = (queries @ keys.T * sm_scale).reshape(live.size, heads, -1)
        tail_scores = scores[:, :, len(prefix) :]  # a view
        seen = bits[np.ix_(live, tail)][:, None]
        tail_scores[...] = np.where(seen, tail_scores, -np.inf)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        sums = weights.reshape(-1, len(keys)) @ keys[:, :d_latent]
        out[b, live] = sums.reshape(live.size, heads, d_latent) / total
        lse[b, live] = (top + np.log(total))[..., 0]
    return out, lse
