"""verify_attn on tensor cores: small in every form; at full size on a GPU."""

import re
from types import SimpleNamespace

import numpy as np
import pytest
from numba import cuda, float32, int32, uint16, uint32
from test_sass import assembled
from test_verify_attn import (
    SCALE,
    _outputs_are_nan_between_canaries,  # noqa: F401
    dense,
)
from test_verify_attn_bf16 import assert_close, bf16_case

from ddtree_numba import backend, bf16
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels import verify_attn_mma as module
from ddtree_numba.kernels.verify_attn import choose_splits, verify_attn
from ddtree_numba.kernels.verify_attn_mma import FORMS, Form, make_kernel
from ddtree_numba.tree import DraftTree

# Tiles so small that the emulator gets through several, and a stage is used twice.
SMALL = Form(keys=16, stages=3)


@pytest.fixture
def use_form(monkeypatch):
    """A function that has the wrapper take one form, whatever the card."""
    return lambda form: monkeypatch.setattr(module, "form_for", lambda at: form)


def attend(executor, case, **options):
    options = {"version": "mma", "executor": executor, "d_latent": 512} | options
    return verify_attn(*case, sm_scale=SCALE, **options)


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


@pytest.mark.parametrize("row", [0, 63], ids=["first", "last"])
def test_sums_shrink_where_the_scores_of_a_single_row_rise(
    kernel_executor, row, use_form
):
    use_form(SMALL)
    q, cache, lens, visibility = bf16_case(14, 4, 16, [32])  # one row tile
    rows = q.reshape(64, 576)
    rows[np.arange(64) != row] = 0  # their scores are all the same
    for n in range(3):  # tiles
        cache[0, 16 * n :] = bf16.from_float32(bf16.to_float32(cache[0, 16 * n :]) * 2)
    case = q, cache, lens, visibility
    assert_close(attend(kernel_executor, case), case)


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


@pytest.mark.parametrize("order", ["reverse", "shuffled"])
def test_lanes_may_run_in_any_order_and_never_race(order, use_form, monkeypatch):
    use_form({"reverse": FORMS[2]}.get(order, SMALL))
    case = bf16_case(6, 2, 2, [31])  # the second tile has prefix and tail
    races = []

    def launch(at, *given, dynamic_shared=0):
        options = {"dynamic_shared": dynamic_shared, "order": order}
        races.extend(emulate(*given, trace=True, **options).races)

    monkeypatch.setattr(backend.Place, "launch", launch)
    found = attend("emulator", case)
    assert races == []
    assert_close(found, case)


# -------------------------------------------------------------------- full size, on GPU


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("form", "shape"), list(zip(FORMS, ["chain", "wide", "deep"], strict=True)), ids=str
)
def test_full_size_within_flashmla_tolerances(form, shape, use_form):
    use_form(form)
    case = bf16_case(7, 33, 64, [2048], shape=shape)
    found, expected = attend("gpu", case), dense(*case, d_latent=512)
    np.testing.assert_allclose(found[0], expected[0], rtol=2.01 / 128, atol=8e-4)
    np.testing.assert_allclose(found[1], expected[1], rtol=8.01 / 65536, atol=1e-6)
    a, b = found[0].astype(float), expected[0]
    assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 5e-6


@pytest.mark.gpu
@pytest.mark.parametrize("n_splits", [1, 2, 3, 7, 40])
def test_splits_at_full_width(n_splits):
    case = bf16_case(8, 5, 64, [1000, 64])
    assert_close(attend("gpu", case, n_splits=n_splits), case)


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


@pytest.mark.gpu
def test_auto_takes_it_where_wgmma_cannot_run():
    case = bf16_case(13, 3, 4, [70])
    found, auto = (
        verify_attn(
            *case, sm_scale=-SCALE, d_latent=512, executor="gpu", version=version
        )
        for version in ("mma", "auto")
    )
    np.testing.assert_array_equal(found[0], auto[0])


def test_splits_are_worth_their_merge():
    tiles = {"keys": 32, "start": module.START, "merge_start": module.MERGE_START}
    for blocks, room, expected in ((33, 2113, 4), (264, 8228, 1), (544, 4164, 1)):
        cost = module.MERGE_COST * blocks
        assert choose_splits(blocks, room, 132, merge_cost=cost, **tiles) == expected


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


def test_a_card_without_the_instructions_is_refused(monkeypatch):
    q, cache, *_ = bf16_case(10, 1, 1, [3])

    def problem_on_a_card_of(*capability):
        card = SimpleNamespace(compute_capability=capability)
        monkeypatch.setattr(module.cuda, "get_current_device", lambda: card)
        return module.problem(backend.Place("gpu", "numba"), q, cache, 512)

    message = "version 'mma' and the card has compute capability 7.5; expected 8.0"
    assert message in str(problem_on_a_card_of(7, 5))
    assert problem_on_a_card_of(8, 0) is None


# ---------------------------------------------------------------------------------- PTX

F3, F4 = float32[:, :, ::1], float32[:, :, :, ::1]
TREE = int32[::1], uint32[:, :, ::1]
SIGNATURE = (uint16[:, :, ::1], uint16[:, :, ::1], *TREE, float32, F4, F3, F3)
# A card for each.
CARDS = dict(zip(FORMS, [(9, 0), (8, 0), (12, 0)], strict=True))


@pytest.mark.ptx
@pytest.mark.parametrize(("form", "card"), CARDS.items(), ids=str)
def test_the_kernel_is_made_of_the_instructions_meant(form, card):
    ptx = backend.compile_ptx(make_kernel(form), SIGNATURE, compute_capability=card)
    # No stack: 128 sums, and the scores, are in registers.
    assert ".f64" not in ptx and ".local" not in ptx
    assert f".maxntid {module.THREADS}" in ptx
    # Copies and swizzle count from the start of a line of all banks.
    assert re.findall(r"extern \.shared \.align (\d+)", ptx) == ["128", "128"]
    found = re.findall(r"begin inline asm\n\s*([\w.:]+)", ptx)
    count = {name: found.count(name) for name in set(found)}
    products = count["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"]
    plain = count["ldmatrix.sync.aligned.m8n8.x4.shared.b16"]
    transposed = count["ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16"]
    # Scores, for every 64 columns that the compiler unrolls: 2 row parts and 2 column
    # parts of 16 for each 8 keys. Values: 32 products of 16 keys' weights.
    parts, values = form.keys // 8, form.keys // 16
    groups = (products - 32 * values) // (4 * parts)
    assert groups >= 1 and products == 32 * values + groups * 4 * parts
    assert plain == 4 * values + groups * (4 + parts)
    assert transposed == 4 * values
    assert count["ex2.approx.ftz.f32"] == 2 + 4 * parts  # shrinks and weights
    assert count["cvt.rn.bf16x2.f32"] == 2 * parts
    assert count["cp.async.commit_group"] == (3 if form.stages > 1 else 2)


@pytest.mark.ptx
@pytest.mark.parametrize(("form", "card"), CARDS.items(), ids=str)
def test_a_lane_has_its_registers(form, card):
    kernel = assembled(make_kernel(form), module.THREADS, SIGNATURE, card)
    assert kernel.registers <= 168  # of which 12 warps have room
    # What is kept aside lies outside the loops.
    assert kernel.spilled <= 32 and kernel.stack <= 16
