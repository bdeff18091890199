"""Variants of the wgmma kernel leave out what they say."""

import re

import numpy as np
import pytest
from test_verify_attn import SCALE, dense
from test_verify_attn_bf16 import bf16_case
from test_verify_attn_wgmma import _ptx

from ddtree_numba import backend
from ddtree_numba.bench import left_out
from ddtree_numba.emulator import emulate
from ddtree_numba.emulator.bulk import Box, Bulk
from ddtree_numba.kernels import verify_attn as verify_attn_module
from ddtree_numba.kernels import verify_attn_wgmma
from ddtree_numba.kernels.verify_attn import verify_attn

UNWRITTEN = np.iinfo(np.uint32).max

# -------------------------------------------------------------------------------- edits


@pytest.mark.parametrize("variant", left_out.VARIANTS)
def test_every_edit_fits_the_kernel_once(variant):
    changed = left_out.edited(variant) != left_out.edited("whole")
    assert changed == (variant != "whole")
    assert left_out.kernel(variant).py_func.__name__ == "wgmma_kernel"


@pytest.mark.parametrize(
    ("old", "count"), [("not_there(", 0), ("bar_sync(PLANNED, THREADS)", 2)]
)
def test_an_edit_that_no_longer_fits_is_named(monkeypatch, old, count):
    monkeypatch.setitem(left_out.VARIANTS, "no merge", ((old, ""),))
    why = rf"variant 'no merge': '{re.escape(old)}' stands {count} times in .*wgmma"
    with pytest.raises(ValueError, match=why):
        left_out.edited("no merge")


def test_the_kernel_is_itself_again_whatever_happens():
    whole = verify_attn_wgmma.wgmma_kernel
    with pytest.raises(KeyError), left_out.in_place("no merge"):
        assert verify_attn_wgmma.wgmma_kernel is left_out.kernel("no merge")
        raise KeyError
    assert verify_attn_wgmma.wgmma_kernel is whole


# ------------------------------------------------------------------------- what is done

KEPT = bf16_case(2, 2, 2, [140]), 3  # parts: few enough for blocks to keep their own
MANY = bf16_case(2, 2, 2, [300]), 5


def done_by(variant, case, n_splits):
    """Run a variant in the emulator; its results, and what was done for them.

    queries, keys, fetches : copies in bulk; posted : elements
    counts : by how much each block's counter was raised
    """
    done = {"queries": 0, "keys": 0, "fetches": 0}
    request = Bulk.request

    def noted(bulk, name, lane, to, read, barrier):
        source = getattr(read, "__self__", None)
        if not isinstance(source, Box):
            done["fetches"] += 1
        elif source.tensor.tensor.shape[1] == case[1].shape[1]:
            done["keys"] += 1
        else:
            done["queries"] += 1
        request(bulk, name, lane, to, read, barrier)

    def launch(at, *given, dynamic_shared, cooperative):
        out, lse, posted, _, counters = given[-5:]
        out[:], lse[:], posted[:] = np.nan, np.nan, UNWRITTEN
        emulate(*given, dynamic_shared=dynamic_shared)
        done["posted"] = int((posted != UNWRITTEN).sum())
        done["counts"] = counters.tolist()

    options = {"n_splits": n_splits, "sm_scale": SCALE, "d_latent": 512}
    with pytest.MonkeyPatch.context() as patch, left_out.in_place(variant):
        # Enough blocks to cut a row tile; the emulator's one cuts nothing.
        patch.setattr(verify_attn_module, "_multiprocessors", lambda at: 6)
        patch.setattr(Bulk, "request", noted)
        patch.setattr(backend.Place, "launch", launch)
        found = verify_attn(*case, version="wgmma", executor="emulator", **options)
    return found, done


@pytest.mark.parametrize(("case", "blocks"), [KEPT, MANY], ids=["kept", "many"])
def test_each_variant_does_less_than_the_one_before(case, blocks):
    found, whole = done_by("whole", case, blocks)
    expected = dense(*case, d_latent=512)
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=0.02)
    assert whole["counts"] == [1] * blocks
    assert all(whole[what] > 0 for what in ("queries", "keys", "fetches", "posted"))
    less = dict(whole)
    for variant, changed in [
        ("no sums", {}),
        ("no merge", {"fetches": 0}),
        ("no post", {"posted": 0, "counts": [0] * blocks}),
        ("plan only", {"queries": 0, "keys": 0}),
    ]:
        less |= changed
        (out, _), done = done_by(variant, case, blocks)
        assert (variant, done) == (variant, less)
        assert np.isnan(out).all(), variant


def test_without_queries_they_are_zero():
    (q, *rest), blocks = KEPT
    whole = done_by("whole", (q, *rest), blocks)[1]
    (out, lse), done = done_by("no queries", (q, *rest), blocks)
    assert done == whole | {"queries": 0}
    expected = dense(np.zeros_like(q), *rest, d_latent=512)
    np.testing.assert_allclose(out, expected[0], rtol=0, atol=2e-3)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-6)


@pytest.mark.ptx
def test_what_is_left_out_remains_in_the_kernel():
    # For the variants whose edits are more than a condition.
    what = ("wgmma.mma_async", "st.global", "ld.shared", "cp.async.bulk", "shfl")
    counts = {}
    for variant in ("whole", "no sums", "no queries"):
        with left_out.in_place(variant):
            ptx = _ptx()
        assert ".local" not in ptx and ".f64" not in ptx
        counts[variant] = [ptx.count(name) for name in what]
    assert counts["no sums"] == counts["no queries"] == counts["whole"]
