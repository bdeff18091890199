"""verify_attn on tensor cores: small in every form; at full size on a GPU."""

import re

import numpy as np
import pytest
from numba import cuda, float32, int32, uint16, uint32
from test_verify_attn import NAN, SCALE, dense, random_case

from ddtree_numba import backend, bf16
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels import verify_attn_mma as module
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.kernels.verify_attn_mma import FORMS, Form, make_kernel
from ddtree_numba.tree import DraftTree

# Tiles so small that the emulator gets through several, and both stages are used twice.
SMALL = Form(keys=16, stages=2)
# A chain of 36 tensor-core sums that cut off, of scores up to 100, times the scale.
LSE = 3e-5
# A weight's rounding to bfloat16, and what the score's error adds to it.
WEIGHT = 2.0**-8 + LSE


@pytest.fixture(autouse=True)
def _outputs_start_as_nan(monkeypatch):
    """What a kernel leaves unwritten must not look like an answer."""
    monkeypatch.setattr(
        backend.Place, "empty", lambda at, shape, dtype: at.full(shape, NAN, dtype)
    )


@pytest.fixture
def use_form(monkeypatch):
    """A function that has the wrapper take one form, whatever the card."""
    return lambda form: monkeypatch.setattr(module, "form_for", lambda at: form)


def bf16_case(seed, n, heads, prefix_lens, **options):
    case = random_case(
        np.random.default_rng(seed), n, heads, 512, 64, prefix_lens, **options
    )
    return bf16.from_float32(case[0]), bf16.from_float32(case[1]), *case[2:]


def attend(executor, case, **options):
    options = {"version": "mma", "executor": executor, "d_latent": 512} | options
    return verify_attn(*case, sm_scale=SCALE, **options)


def sizes(q, cache, *rest):
    """The weighted sum of the values' magnitudes: what errors of weights multiply."""
    q, cache = bf16.to_float32(q), bf16.to_float32(cache)
    unscored = np.concatenate([np.zeros_like(q[..., :512]), q], axis=-1)
    magnitudes = np.concatenate([np.abs(cache[..., :512]), cache], axis=-1)
    return dense(unscored, magnitudes, *rest, d_latent=512)[0]


def assert_close(found, case, rows=slice(None)):
    """Within what rounding the weights can do to each single element."""
    expected, expected_lse = dense(*case, d_latent=512)
    error = np.abs(found[0] - expected)
    assert found[0].dtype == found[1].dtype == np.float32
    assert (error <= WEIGHT * sizes(*case))[:, rows].all()
    np.testing.assert_allclose(
        found[1][:, rows], expected_lse[:, rows], rtol=0, atol=LSE
    )


# ------------------------------------------------------------------ small, and on a GPU


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_every_form_agrees_with_dense_attention(kernel_executor, form, use_form):
    use_form(form)
    # Keys 14 … 17 are the tail: it begins in one tile of 16 and ends in the next.
    case = bf16_case(0, 4, 1, [14])
    assert_close(attend(kernel_executor, case), case)


@pytest.mark.parametrize(
    ("n", "heads", "prefix_lens"),
    [(1, 1, [0]), (5, 13, [1]), (3, 2, [45]), (2, 3, [15, 0])],
    ids=["one", "two-row-tiles", "three-tiles", "ragged"],
)
def test_random_cases_agree_with_dense_attention(
    kernel_executor, n, heads, prefix_lens, use_form
):
    use_form(SMALL)
    case = bf16_case(n, n, heads, prefix_lens)
    assert_close(attend(kernel_executor, case), case)


def test_splits_do_not_change_the_result(kernel_executor, use_form):
    use_form(SMALL)
    case = bf16_case(2, 2, 2, [50])  # four tiles: two, two and none
    assert_close(attend(kernel_executor, case, n_splits=3), case)


def test_a_padding_row_sees_nothing_not_even_the_prefix(kernel_executor, use_form):
    use_form(SMALL)
    q, cache, lens, visibility = bf16_case(3, 3, 2, [2])
    visibility[0, 2] = 0
    cache[0, 4] = 0x7FC0  # NaN, in the padding's own row
    out, lse = attend(kernel_executor, (q, cache, lens, visibility))
    np.testing.assert_array_equal(out[0, 2], 0)
    np.testing.assert_array_equal(lse[0, 2], -np.inf)
    assert_close((out, lse), (q, cache, lens, visibility), slice(2))


@pytest.mark.parametrize("element", [510, 511, 575])
def test_a_nan_reaches_only_the_rows_that_see_it(kernel_executor, element, use_form):
    use_form(SMALL)
    q, cache, lens, visibility = bf16_case(4, 5, 1, [3])
    visibility[:] = DraftTree.from_parents([[-1, 0, 0, 1, 2]]).visibility
    clean = q, cache.copy(), lens, visibility
    cache[0, 3 + 2, element] = 0x7FC0  # row 2's, which row 4 sees too
    out, lse = attend(kernel_executor, (q, cache, lens, visibility))
    assert_close((out, lse), clean, [0, 1, 3])
    assert np.isnan(out[:, [2, 4]]).all()
    assert np.isnan(lse[:, [2, 4]]).all()


def test_a_nan_query_spoils_its_own_row_and_head_alone(kernel_executor, use_form):
    use_form(SMALL)
    q, *rest = bf16_case(5, 3, 2, [3])
    clean = q.copy(), *rest
    q[0, 1, 0, 2] = 0x7FC0
    out, lse = attend(kernel_executor, (q, *rest))
    assert np.isnan(out[0, 1, 0]).all()
    assert np.isnan(lse[0, 1, 0])
    expected, expected_lse = dense(*clean, d_latent=512)
    out[0, 1, 0], lse[0, 1, 0] = expected[0, 1, 0], expected_lse[0, 1, 0]
    assert_close((out, lse), clean)


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_lanes_may_run_in_any_order_and_never_race(order, use_form, monkeypatch):
    use_form({"reverse": FORMS[2]}.get(order, SMALL))
    case = bf16_case(6, 2, 2, [31])  # the second tile has prefix and tail
    races = []

    def launch(at, kernel, grid, block, *args, dynamic_shared=0):
        report = emulate(
            kernel,
            grid,
            block,
            *args,
            dynamic_shared=dynamic_shared,
            order=order,
            trace=True,
        )
        races.extend(report.races)

    monkeypatch.setattr(backend.Place, "launch", launch)
    found = attend("emulator", case)
    assert races == []
    assert_close(found, case)


# -------------------------------------------------------------------- full size, on GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", ["chain", "wide", "deep"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_full_size_within_flashmla_tolerances(form, shape, use_form):
    use_form(form)
    case = bf16_case(7, 33, 64, [2048], shape=shape)
    found, expected = attend("gpu", case), dense(*case, d_latent=512)
    np.testing.assert_allclose(found[0], expected[0], rtol=2.01 / 128, atol=8e-4)
    np.testing.assert_allclose(found[1], expected[1], rtol=8.01 / 65536, atol=1e-6)
    a, b = found[0].astype(float), expected[0]
    assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 5e-6


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 16])
@pytest.mark.parametrize("prefix_lens", [[0], [1, 63], [64, 65, 1000]], ids=str)
def test_head_counts_and_ragged_prefixes(heads, prefix_lens):
    case = bf16_case(heads, 33, heads, prefix_lens)
    assert_close(attend("gpu", case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [31, 32, 33, 63, 64, 65, 127, 128, 129, 1025])
def test_rows_around_words_and_tiles(n):
    case = bf16_case(n, n, 2, [100])
    assert_close(attend("gpu", case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix_len", [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 129])
@pytest.mark.parametrize("n", [1, 2])
def test_prefixes_around_a_tile_of_keys(n, prefix_len):
    case = bf16_case(n, n, 3, [prefix_len])
    assert_close(attend("gpu", case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("n_splits", [1, 2, 3, 7, 40])
def test_splits_at_full_width(n_splits):
    case = bf16_case(8, 5, 64, [1000, 64])
    assert_close(attend("gpu", case, n_splits=n_splits), case)


@pytest.mark.gpu
def test_a_batch_beyond_the_grid_limit():
    batch = 65536
    cache = np.zeros((batch, 1, 576), np.float32)
    cache[:] = (np.arange(batch) % 7)[:, None, None]
    q, lens = np.zeros((batch, 1, 1, 576), np.uint16), np.zeros(batch, np.int32)
    case = q, bf16.from_float32(cache), lens, np.ones((batch, 1, 1), np.uint32)
    out, _ = attend("gpu", case)
    np.testing.assert_array_equal(out[:, 0, 0, 0], np.arange(batch) % 7)


@pytest.mark.gpu
def test_a_strided_cache_is_read_in_place():
    q, cache, lens, visibility = bf16_case(9, 3, 4, [70, 20])
    wide = np.full((*cache.shape[:2], 640), 0x7FC0, np.uint16)
    wide[..., 8:584] = cache
    view = cuda.to_device(wide)[:, :, 8:584]
    on_device = (cuda.to_device(x) for x in (q, lens, visibility))
    q_there, lens_there, visibility_there = on_device
    out, lse = attend(None, (q_there, view, lens_there, visibility_there))
    found = out.copy_to_host(), lse.copy_to_host()
    assert_close(found, (q, cache, lens, visibility))


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("executor", ["numpy", "emulator"])
def test_what_this_version_does_not_compute_is_refused_by_name(executor):
    q, cache, *tree = bf16_case(10, 1, 1, [3])
    floats = bf16.to_float32(q), bf16.to_float32(cache), *tree
    message = r"version 'mma' and q has dtype float32; expected uint16 \(bf16 bits\)"
    with pytest.raises(TypeError, match=message):
        attend(executor, floats)
    narrow = q[..., :520].copy(), cache[..., :520].copy(), *tree
    message = "version 'mma' and D is 520, d_latent is 512; expected 576 and 512"
    with pytest.raises(ValueError, match=message):
        attend(executor, narrow)
    with pytest.raises(ValueError, match="D is 576, d_latent is 256"):
        attend(executor, (q, cache, *tree), d_latent=256)
    # auto takes them all.
    attend(executor, (q, cache, *tree), d_latent=256, version="auto")


def test_rows_that_cannot_be_copied_in_pieces_are_refused():
    q, cache, *tree = bf16_case(10, 1, 1, [3])
    wide = np.zeros((*cache.shape[:2], 577), np.uint16)
    doubled = np.repeat(cache, 2, axis=2)
    for view in (wide[..., 1:], doubled[..., ::2]):
        message = "version 'mma' and kv_cache has strides .*; expected contiguous rows"
        with pytest.raises(ValueError, match=message):
            attend("emulator", (q, view, *tree))


# ---------------------------------------------------------------------------------- PTX


@pytest.mark.ptx
@pytest.mark.parametrize("card", [(8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_kernel_is_made_of_the_instructions_meant(form, card):
    f3, f4 = float32[:, :, ::1], float32[:, :, :, ::1]
    tree = int32[::1], uint32[:, :, ::1]
    signature = (uint16[:, :, ::1], uint16[:, :, ::1], *tree, float32, f4, f3, f3)
    ptx = backend.compile_ptx(make_kernel(form), signature, compute_capability=card)
    # No stack: 128 sums, and the scores, are in registers.
    assert ".f64" not in ptx and ".local" not in ptx
    # Copies and swizzle count from the start of a line of all banks.
    assert re.findall(r"extern \.shared \.align (\d+)", ptx) == ["128", "128"]
    found = re.findall(r"begin inline asm\n\s*([\w.:]+)", ptx)
    count = {name: found.count(name) for name in set(found)}
    parts = form.keys // 16
    # In every loop's body: 32 products of 16 keys' weights, and 2 · parts a 32 columns.
    products = count["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]
    plain = count["ldmatrix.sync.aligned.m8n8.x4.shared.b16"]
    transposed = count["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"]
    values = transposed // 4
    scores = products - 32 * values
    assert values >= 1 and scores >= 4 * parts
    assert scores % (4 * parts) == 0
    assert plain == 4 * values + scores // (2 * parts) * (2 + parts)
    assert count["ex2.approx.ftz.f32"] == 2 + 4 * parts  # shrinks and weights
    assert count["cvt.rn.bf16x2.f32"] == 2 * parts
    assert count["cp.async.cg.shared.global"] <= 3 * 18
    assert count["cp.async.commit_group"] == 2
    assert ptx.count("bar.sync") + ptx.count("barrier.sync") >= 3
