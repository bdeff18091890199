"""The vectorised NumPy twins equal the references that are plain loops."""

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal

from ddtree_numba import bf16, reference, vectorised

D_LATENT, D = 24, 32


def inputs(prefix_lens, n_rows, *, n=40, heads=3, seed=0):
    rng = np.random.default_rng(seed)
    batch = len(n_rows)
    parents = np.full((batch, n), -1, np.int32)
    for b, live in enumerate(n_rows):
        parents[b, 1:live] = [rng.integers(i) for i in range(1, live)]
    prefix_lens = np.array(prefix_lens, np.int32)
    kv_cache = rng.normal(size=(batch, prefix_lens.max() + n, D)).astype(np.float32)
    for b, live in enumerate(n_rows):
        kv_cache[b, prefix_lens[b] + live :] = np.nan  # nobody sees these
    q = rng.normal(size=(batch, n, heads, D)).astype(np.float32)
    visibility = reference.visibility(parents, np.array(n_rows))
    return q, kv_cache, prefix_lens, visibility


@pytest.mark.parametrize("bits", [False, True], ids=["float32", "bf16"])
@pytest.mark.parametrize(
    ("prefix_lens", "n_rows"),
    [([50, 7], [33, 40]), ([0, 3], [1, 5]), ([0, 2], [0, 1])],
    ids=["ragged", "no-prefix", "a-request-without-rows"],
)
def test_attention_equals_the_loops(prefix_lens, n_rows, bits):
    q, kv_cache, lens, visibility = inputs(prefix_lens, n_rows)
    if bits:
        q, kv_cache = bf16.from_float32(q), bf16.from_float32(kv_cache)
    sizes = {"sm_scale": 0.2, "d_latent": D_LATENT}
    expected = reference.verify_attn(q, kv_cache, lens, visibility, **sizes)
    found = vectorised.verify_attn(q, kv_cache, lens, visibility, **sizes)
    for a, b in zip(found, expected, strict=True):
        # Both sum in float64 and round once: at most the last bit of a float32.
        assert_allclose(a, b, rtol=2e-7, atol=1e-9)


def test_padding_rows_see_nothing():
    q, kv_cache, lens, visibility = inputs([4], [2], n=5)
    q[:, 2:] = np.nan
    out, lse = vectorised.verify_attn(
        q, kv_cache, lens, visibility, sm_scale=1.0, d_latent=D_LATENT
    )
    assert_array_equal(out[0, 2:], 0)
    assert_array_equal(lse[0, 2:], -np.inf)
    assert np.isfinite(out[0, :2]).all()


def test_nan_reaches_only_rows_that_see_it():
    q, kv_cache, lens, visibility = inputs([4], [6], n=6)
    kv_cache[0, 4 + 5, 3] = np.nan  # a leaf's row
    q[0, 3, 1, 0] = np.nan
    sizes = {"sm_scale": 1.0, "d_latent": D_LATENT}
    found = vectorised.verify_attn(q, kv_cache, lens, visibility, **sizes)
    expected = reference.verify_attn(q, kv_cache, lens, visibility, **sizes)
    for a, b in zip(found, expected, strict=True):
        assert_array_equal(a, b)
    assert np.isfinite(found[0][0, :3]).all() and np.isnan(found[0][0, 5]).any()
