"""topk on every executor: the k best tokens of a row, ties by lower id."""

import math

import numpy as np
import pytest
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_rows import BAD_ROWS, CASTS, EVERY_DTYPE
from numba import cuda, float32, int32, uint16
from numba.core.types import float16

from ddtree_numba import backend, bf16
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels import topk as topk_module
from ddtree_numba.kernels.topk import (
    topk,
    topk_kernel,
    topk_pick_kernel,
    topk_scan_kernel,
)

INF, NAN = np.inf, np.nan
EVERY_VERSION = pytest.mark.parametrize("version", ["simple", "chunks"])

# What float32 allows: 1e-6 for the sum and its logarithm, and one rounding of the
# answer itself, which is as large as 30.
ATOL, RTOL = 1e-6, 2.0**-23


def brute_force(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    """The same by sorting (value, id) pairs, and by an exactly rounded sum."""
    wide = bf16.to_float32(logits) if logits.dtype == np.uint16 else logits
    ids = np.empty((*logits.shape[:2], min(k, logits.shape[2])), np.int32)
    log_probs = np.empty(ids.shape)
    for at in np.ndindex(logits.shape[:2]):
        row = wide[at].astype(float).tolist()
        ids[at] = sorted(range(len(row)), key=lambda i: (-row[i], i))[:k]
        top = max(row)
        # Apart from the top, beside which it may be lost.
        total = math.log(math.fsum(math.exp(x - top) for x in row))
        log_probs[at] = [(row[i] - top) - total for i in ids[at]]
    return log_probs, ids


def assert_topk(found: tuple, expected: tuple) -> None:
    log_probs, ids = found
    assert (log_probs.dtype, ids.dtype) == (np.float32, np.int32)
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_allclose(log_probs, expected[0], rtol=RTOL, atol=ATOL)


def shrink(patch: pytest.MonkeyPatch) -> None:
    """In the emulator, let small rows be narrowed and merged, in chunks of 8.

    The emulator reads the kernel's constants at every launch; on a GPU they are
    compiled in, and full-size rows get there anyway.
    """
    small = {"CAPACITY": 16, "SORTING": 32, "RUN": 4, "MAX_CHUNKS": 16}
    for name, value in small.items():
        patch.setattr(topk_module, name, value)
    patch.setattr(topk_module, "_chunk_log", lambda kept: 0)


@pytest.fixture
def small_constants(monkeypatch):
    shrink(monkeypatch)


# ------------------------------------------------------------------------------ values


@EVERY_DTYPE
@EVERY_VERSION
@pytest.mark.parametrize(
    ("vocab", "k"), [(1, 1), (3, 4), (31, 2), (33, 33), (150, 16), (150, 40)], ids=str
)
def test_small_rows_equal_brute_force(executor, version, cast, vocab, k):
    rng = np.random.default_rng(vocab)
    logits = cast(rng.standard_normal((2, 3, vocab)) * 4)
    found = topk(logits, k, version=version, executor=executor)
    assert_topk(found, brute_force(logits, k))


def test_k_over_v_keeps_every_token(executor):
    log_probs, ids = topk(
        np.log([[[0.2, 0.5, 0.3]]]).astype("f4"), 4, executor=executor
    )
    assert ids.tolist() == [[[1, 2, 0]]]
    np.testing.assert_allclose(np.exp(log_probs), [[[0.5, 0.3, 0.2]]], rtol=1e-6)


@EVERY_VERSION
def test_equal_logits_stand_in_the_order_of_their_ids(executor, version):
    logits = np.full((1, 1, 70), -3.5, np.float32)
    _, ids = topk(logits, 9, version=version, executor=executor)
    assert ids.tolist() == [[[*range(9)]]]


@EVERY_VERSION
def test_zero_and_minus_zero_tie(executor, version):
    row = np.float32([-0.0, 0.0, -1, -0.0, 0.0, -2])
    _, ids = topk(row[None, None], 5, version=version, executor=executor)
    assert ids.tolist() == [[[0, 1, 3, 4, 2]]]


@EVERY_VERSION
def test_masked_tokens_come_last_with_log_prob_minus_infinity(executor, version):
    row = np.float32([-INF, 5, -INF, 5, -INF])
    log_probs, ids = topk(row[None, None], 4, version=version, executor=executor)
    assert ids.tolist() == [[[1, 3, 0, 2]]]
    np.testing.assert_allclose(log_probs[0, 0, :2], np.log(0.5), rtol=1e-6)
    assert (log_probs[0, 0, 2:] == -INF).all()


@EVERY_DTYPE
@EVERY_VERSION
def test_both_ends_of_the_number_range(executor, version, cast):
    # Half of the largest: the difference of the two ends is a number still.
    high = 65504 / 2 if cast([0]).dtype == np.float16 else 1.6e38
    logits = cast([[[-high, 0, high, -1e-7, 1e-7, high]]])
    found = topk(logits, 6, version=version, executor=executor)
    assert found[1].tolist() == [[[2, 5, 4, 1, 3, 0]]]
    assert_topk(found, brute_force(logits, 6))


@EVERY_VERSION
@pytest.mark.parametrize("k", [1, 7, 16])
@pytest.mark.parametrize("levels", [1, 3, 300])
def test_ties_across_the_bound_are_cut_at_the_right_id(
    small_constants, levels, k, version
):
    """The selection must go on into the ids when logits alone do not decide."""
    rng = np.random.default_rng(levels)
    logits = CASTS["bf16"](rng.integers(-levels, levels, (1, 1, 290)) / 2)
    found = topk(logits, k, version=version, executor="emulator")
    assert_topk(found, brute_force(logits, k))


def test_a_chunk_may_hold_nothing_or_all_that_is_kept(small_constants):
    """Chunks of 8: all candidates are in two of them, others are masked."""
    row = np.full(300, -INF, np.float32)
    row[128:144] = np.arange(16) % 7
    row[256:] = -40
    logits = row[None, None]
    found = topk(logits, 16, version="chunks", executor="emulator")
    assert_topk(found, brute_force(logits, 16))


def test_a_chunk_of_the_best_maximum_is_not_enough_alone(small_constants):
    """Every chunk's maximum ties: the lower chunks' win, with all that ties there."""
    row = np.zeros(280, np.float32)
    row[7::8] = 1
    row[41] = row[200:208] = 1
    logits = row[None, None]
    for k in (1, 5, 6, 7, 16):
        found = topk(logits, k, version="chunks", executor="emulator")
        assert_topk(found, brute_force(logits, k))


def test_chunks_that_only_fill_a_span_are_none(small_constants):
    """A masked chunk, one more, and 126 to fill the span: no room for all."""
    logits = np.full((1, 1, 9), -INF, np.float32)
    logits[..., 8] = -3
    found = topk(logits, 2, version="chunks", executor="emulator")
    assert found[1].tolist() == [[[8, 0]]]


@pytest.mark.parametrize("k", [1, 4])
@pytest.mark.parametrize(
    "kind", ["spread", "negative", "in one lane", "masked", "tied", "close"]
)
def test_the_best_of_the_lanes_bound_the_chunks(small_constants, monkeypatch, kind, k):
    """96 lanes of 64 logits. Where the best are spread, nothing need be narrowed."""
    row = np.random.default_rng(k).standard_normal(6000) * 4
    if kind in ("spread", "negative"):
        monkeypatch.setattr(topk_module, "narrow", None)
        row -= 100 * (kind == "negative")
    elif kind == "in one lane":
        row[1024:1088] += 50
    elif kind == "masked":
        row[70:] = -INF
    elif kind == "tied":
        row = np.round(row / 8)
    else:  # all within the first bin
        row = 1.25 + row / 2**20
    logits = CASTS["f32"](row[None, None])
    found = topk(logits, k, version="chunks", executor="emulator")
    assert_topk(found, brute_force(logits, k))


def test_the_real_constants_select_from_chunks():
    """As on a GPU. Of 140, all maxima are counted, and there are codes for two runs."""
    rng = np.random.default_rng(0)
    logits = CASTS["bf16"](rng.standard_normal((1, 1, 40000)) * 3)
    logits[..., ::300] = CASTS["bf16"](9.0)
    for k in (32, 140):
        found = topk(logits, k, version="chunks", executor="emulator")
        assert_topk(found, brute_force(logits, k))


@pytest.mark.parametrize("bad", [NAN, INF])
@pytest.mark.parametrize("at", [0, 900, 1199])
def test_one_bad_element_of_any_span_spoils_the_row(small_constants, at, bad):
    """Also where its span, of 1024, is otherwise masked, as the first is here."""
    logits = np.full((1, 2, 1200), -INF, np.float32)
    logits[..., 1190:] = 1
    logits[0, 1, at] = bad
    options = {"check": False, "executor": "emulator"}
    log_probs, ids = topk(logits, 3, version="chunks", **options)
    assert ids.tolist() == [[[1190, 1191, 1192], [-1] * 3]]
    assert np.isnan(log_probs[0]).all(axis=-1).tolist() == [False, True]


rows = st.lists(
    st.sampled_from([-INF, -3.0, -0.0, 0.0, 0.5, 8.0]) | st.floats(-9, 9, width=16),
    min_size=1,
    max_size=140,
).filter(lambda row: max(row) > -INF)


@pytest.mark.parametrize("executor", ["emulator", GPU])
@EVERY_VERSION
@given(row=rows, k=st.integers(1, 16), name=st.sampled_from(sorted(CASTS)))
@settings(max_examples=30, deadline=None)
def test_any_row_equals_brute_force(executor, version, row, k, name):
    logits = CASTS[name](row)[None, None]
    with pytest.MonkeyPatch.context() as patch:
        if executor == "emulator":
            shrink(patch)
        found = topk(logits, k, version=version, executor=executor)
    assert_topk(found, brute_force(logits, k))


@pytest.mark.parametrize("vocab", [63, 65, 127, 129, 200, 257, 500])
def test_runs_are_merged_in_order(executor, vocab):
    """A short row is sorted whole, by runs of 64 (`RUN`): one, two, a last few."""
    logits = np.random.default_rng(vocab).standard_normal((1, 1, vocab), np.float32)
    found = topk(logits, vocab, version="simple", executor=executor)
    assert_topk(found, brute_force(logits, vocab))


def test_the_real_capacity_selects_from_longer_rows():
    rng = np.random.default_rng(0)
    logits = CASTS["bf16"](rng.standard_normal((1, 1, topk_module.CAPACITY + 50)) * 3)
    found = topk(logits, 40, version="simple", executor="emulator")
    assert_topk(found, brute_force(logits, 40))


@pytest.mark.parametrize(
    ("longer", "unused"), [(0, "topk_scan_kernel"), (1, "topk_kernel")]
)
def test_long_rows_are_cut_into_chunks(monkeypatch, longer, unused):
    logits = np.zeros((1, 1, topk_module.SIMPLE_UP_TO + longer), np.float32)
    logits[0, 0, -1] = 1
    monkeypatch.delattr(topk_module, unused)  # "auto" does without it
    _, ids = topk(logits, 2, executor="emulator")
    assert ids.tolist() == [[[logits.shape[2] - 1, 0]]]


def test_many_equal_terms_do_not_add_up_their_rounding():
    """A lane adds the same term 320 times, as at full size; naively, 5e-6 are lost."""
    logits = np.full((1, 1, 10240), -0.9783806, np.float32)
    logits[0, 0, :32] = 0  # every lane's maximum, so that its terms are not 1
    log_probs, ids = np.empty((1, 1, 1), np.float32), np.empty((1, 1, 1), np.int32)
    emulate(topk_kernel, 1, 32, logits, 1, 0, 14, log_probs, ids)
    exact = brute_force(logits, 1)[0]
    np.testing.assert_allclose(log_probs, exact, rtol=0, atol=ATOL)
    log_probs, _ = topk(logits, 1, version="chunks", executor="emulator")
    np.testing.assert_allclose(log_probs, exact, rtol=0, atol=ATOL)


@EVERY_VERSION
def test_a_strided_view_equals_its_copy(executor, version):
    logits = np.random.default_rng(0).standard_normal((2, 2, 80)).astype(np.float32)
    view = logits[:, :, ::2]
    found = topk(view, 5, version=version, executor=executor)
    assert_topk(found, brute_force(view.copy(), 5))


# ---------------------------------------------------------------------------- full size


def random_logits(cast, batch: int = 1, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return cast(rng.standard_normal((batch, 2, 163840), np.float32) * 3)


@pytest.mark.gpu
@EVERY_DTYPE
@EVERY_VERSION
@pytest.mark.parametrize("k", [1, 8, 32, 64, 256, 1024])
def test_full_vocabulary_equals_the_reference(cast, version, k):
    logits = random_logits(cast)
    expected = topk(logits, k, executor="numpy")
    assert_topk(topk(logits, k, version=version, executor="gpu"), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("vocab", [5119, 5120, 5121, 151936, 151940, 1 << 20])
@EVERY_DTYPE
def test_vocabularies_at_the_edges_of_spans_and_of_16_bytes(vocab, cast):
    logits = np.random.default_rng(vocab).standard_normal((1, 2, vocab), np.float32)
    logits = cast(logits * 3)
    expected = topk(logits, 64, executor="numpy")
    assert_topk(topk(logits, 64, version="chunks", executor="gpu"), expected)


@pytest.mark.gpu
@EVERY_VERSION
@pytest.mark.parametrize("levels", [0, 1, 20])
def test_full_vocabulary_with_massive_ties(version, levels):
    logits = np.random.default_rng(1).integers(-levels, levels + 1, (8, 2, 163840))
    logits = CASTS["bf16"](logits / 4)
    for k in (64, 1024):
        expected = topk(logits, k, executor="numpy")
        assert_topk(topk(logits, k, version=version, executor="gpu"), expected)


@pytest.mark.gpu
def test_device_arrays_stay_on_the_device():
    logits = random_logits(CASTS["bf16"])
    found = topk(cuda.to_device(logits), 64)
    assert all(backend.is_device_array(x) for x in found)
    expected = topk(logits, 64, executor="numpy")
    assert_topk(tuple(x.copy_to_host() for x in found), expected)


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements():
    """The last row starts at element 2 182 021 120: offsets need 64 bits."""
    row = random_logits(CASTS["bf16"])[0, 0]
    try:
        logits = cuda.device_array((13, 1025, 163840), np.uint16)
    except Exception as error:
        pytest.skip(f"4.4 GB of GPU memory are not free: {error}")
    logits[12, 1024].copy_to_device(row)
    _, ids = topk(logits, 8)
    expected = topk(row[None, None], 8, executor="numpy")[1]
    assert ids[12, 1024].copy_to_host().tolist() == expected[0, 0].tolist()


# -------------------------------------------------------------------- the kernel itself


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_no_race_in_any_order_of_the_lanes(small_constants, order):
    rng = np.random.default_rng(3)
    logits = CASTS["bf16"](rng.integers(-2, 3, (1, 1, 300)))
    found = np.empty((1, 1, 11), np.float32), np.empty((1, 1, 11), np.int32)
    report = emulate(
        *(topk_kernel, 1, 64, logits, 0, 16, 9, *found), order=order, trace=True
    )
    assert not report.races
    assert_topk(found, brute_force(logits, 11))


@pytest.mark.parametrize("k", [1, 11])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_no_race_in_the_chunks_version(small_constants, order, k):
    """Two spans, with ties, so that chunks and tokens are narrowed down and sorted."""
    logits = CASTS["bf16"](np.random.default_rng(3).integers(-2, 3, (1, 1, 1100)))
    tops, totals = np.empty((2, 1, 2), np.float32)
    maxima = np.empty((1, 256), np.float32)
    found = np.empty((1, 1, k), np.float32), np.empty((1, 1, k), np.int32)
    options = {"order": order, "trace": True}
    arguments = (logits, 0, 0, tops, totals, maxima)
    report = emulate(topk_scan_kernel, 1, 64, *arguments, **options)
    assert not report.races
    arguments = (logits, 0, 16, 11, 8, 0, tops, totals, maxima, *found)
    report = emulate(topk_pick_kernel, 1, 64, *arguments, **options)
    assert not report.races
    assert_topk(found, brute_force(logits, k))


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("cc", "dtype"),
    [
        ((8, 0), float16),
        ((9, 0), uint16),
        ((12, 0), float32),
    ],
    ids=str,
)
def test_ptx_needs_no_float64_and_no_local_memory(cc, dtype):
    logits, log_probs, ids = (t[:, :, ::1] for t in (dtype, float32, int32))
    sums = float32[:, ::1]
    for kernel, *signature in (
        (topk_kernel, logits, *[int32] * 3, log_probs, ids),
        (topk_scan_kernel, logits, *[int32] * 2, *[sums] * 3),
        (topk_pick_kernel, logits, *[int32] * 5, *[sums] * 3, log_probs, ids),
    ):
        ptx = backend.compile_ptx(kernel, tuple(signature), compute_capability=cc)
        assert ".f64" not in ptx
        assert ".local" not in ptx


@EVERY_VERSION
def test_logits_as_large_as_float32_holds(executor, version):
    """Masks are often the lowest float32, and a huge logit swallows a small log."""
    most = np.finfo(np.float32).max
    logits = np.array([[[most] * 4, [most, -most, 0, 0], [-most] * 4]], np.float32)
    log_probs, ids = topk(logits, 4, version=version, executor=executor)
    quarter = np.log(0.25)
    np.testing.assert_allclose(log_probs[0, [0, 2]], quarter, rtol=1e-6)
    assert log_probs[0, 1].tolist() == [0, -most, -most, -INF]
    assert ids[0].tolist() == [[0, 1, 2, 3], [0, 2, 3, 1], [0, 1, 2, 3]]


# ---------------------------------------------------------------------------- bad input


@EVERY_DTYPE
@BAD_ROWS
def test_build_nan_row_is_an_error_that_names_it(executor, cast, row, why):
    logits = cast(np.zeros((2, 3, 3)))
    logits[1, 2] = cast(row)
    with pytest.raises(ValueError, match=f"logits, request 1, row 2 {why}"):
        topk(logits, 2, executor=executor)
    with pytest.raises(ValueError, match=f"logits, request 1, row 2 {why}"):
        topk(logits, 0, executor=executor)


@EVERY_DTYPE
@EVERY_VERSION
@BAD_ROWS
def test_build_nan_row_unchecked_is_marked_and_alone(executor, version, cast, row, why):
    logits = cast(np.zeros((2, 3, 3)))
    logits[1, 2] = cast(row)
    options = {"check": False, "version": version, "executor": executor}
    log_probs, ids = topk(logits, 2, **options)
    marked = np.zeros((2, 3), bool)
    marked[1, 2] = True
    assert (np.isnan(log_probs) == marked[..., None]).all()
    assert (ids[marked] == -1).all()
    assert (ids[~marked] == [0, 1]).all()


@pytest.mark.parametrize(
    ("shape", "k"), [((2, 3, 5), 0), ((2, 3, 0), 4), ((2, 0, 5), 4), ((0, 3, 5), 4)]
)
def test_nothing_to_keep_gives_empty_answers(executor, shape, k):
    log_probs, ids = topk(np.zeros(shape, np.float32), k, executor=executor)
    assert log_probs.shape == ids.shape == (*shape[:2], min(k, shape[2]))
    assert (log_probs.dtype, ids.dtype) == (np.float32, np.int32)


def test_bad_arguments_are_named(executor):
    logits = np.zeros((1, 1, 4), np.float32)
    with pytest.raises(ValueError, match="version is 'fast'; expected auto, simple"):
        topk(logits, 2, version="fast", executor=executor)
    with pytest.raises(ValueError, match="k is -1; expected 0 or more"):
        topk(logits, -1, executor=executor)
    with pytest.raises(ValueError, match=r"logits has shape \(1, 4\)"):
        topk(logits[0], 2, executor=executor)
    with pytest.raises(TypeError, match="logits has dtype float64; expected float32"):
        topk(logits.astype(float), 2, executor=executor)


@pytest.mark.parametrize("k", [2.0, True, "2", None, np.array([2])], ids=repr)
def test_a_k_that_is_no_count_is_a_type_error(executor, k):
    logits = np.zeros((1, 1, 4), np.float32)
    with pytest.raises(TypeError, match=r"k is .*; expected an int, 0 or more"):
        topk(logits, k, executor=executor)


def test_rows_of_different_length_are_named(executor):
    with pytest.raises(ValueError, match="logits is no array: .*inhomogeneous"):
        topk([[[1.0], [1.0, 2.0]]], 1, executor=executor)


def test_more_candidates_than_the_kernel_sorts_is_an_error(executor):
    logits = np.zeros((1, 1, 1025), np.float32)
    with pytest.raises(ValueError, match="k is 1025 and V 1025; expected K up to 1024"):
        topk(logits, 1025, executor=executor)


@pytest.mark.gpu
def test_a_check_of_device_arrays_is_an_error():
    logits = cuda.to_device(np.zeros((1, 1, 4), np.float32))
    with pytest.raises(ValueError, match="check is True, but logits lie on the GPU"):
        topk(logits, 2, check=True)
