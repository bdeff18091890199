"""argmax on every executor: the target's choice, the lowest id on a tie."""

import numpy as np
import pytest
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from logit_rows import BAD_ROWS, EVERY_DTYPE
from numba import cuda, float32, int32, uint16

from ddtree_numba import backend
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels.argmax import (
    argmax,
    argmax_pick_kernel,
    argmax_scan_kernel,
)

INF, NAN = np.inf, np.nan


def choice(row: list[float]) -> int:
    """The first of the highest."""
    return row.index(max(row))


# ------------------------------------------------------------------------------ values


@EVERY_DTYPE
@pytest.mark.parametrize("vocab", [1, 2, 31, 33, 250])
def test_the_highest_of_every_row_is_chosen(executor, cast, vocab):
    rng = np.random.default_rng(vocab)
    logits = np.stack([[rng.permutation(vocab) for _ in range(3)] for _ in range(2)])
    tokens = argmax(cast(logits - vocab / 2), executor=executor)
    assert tokens.dtype == np.int32
    assert tokens.tolist() == logits.argmax(-1).tolist()


@EVERY_DTYPE
def test_a_tie_goes_to_the_lowest_id(executor, cast):
    """Within a lane, across lanes, across warps."""
    logits = np.full((1, 4, 9000), -1.0)
    logits[0, 0, [8999, 8000, 3]] = 2
    logits[0, 1, [8999, 8000, 777]] = 2
    logits[0, 2, [4096 + 5, 5]] = 2  # a lane's two elements, a tile apart
    tokens = argmax(cast(logits), executor=executor)
    assert tokens.tolist() == [[3, 777, 5, 0]]


def test_zero_and_minus_zero_tie(executor):
    logits = np.float32([[[-1, -0.0, 0.0], [-1, 0.0, -0.0]]])
    assert argmax(logits, executor=executor).tolist() == [[1, 1]]


def test_masked_tokens_are_never_chosen(executor):
    logits = np.float32([[[-INF, -1e30, -INF]]])
    assert argmax(logits, executor=executor).tolist() == [[1]]


rows = st.lists(
    st.sampled_from([-INF, -2.0, -0.0, 0.0, 3.0]) | st.floats(-9, 9, width=16),
    min_size=1,
    max_size=80,
).filter(lambda row: max(row) > -INF)


@pytest.mark.parametrize("executor", ["numpy", "emulator", GPU])
@given(row=rows)
@settings(max_examples=40, deadline=None)
def test_any_row_gives_the_first_of_its_highest(executor, row):
    tokens = argmax(np.float32(row)[None, None], executor=executor)
    assert tokens.tolist() == [[choice(row)]]


def test_padding_rows_answer_minus_one_and_are_not_read(executor):
    logits = np.full((3, 4, 5), NAN, np.float32)
    n_rows = [2, 4, 0]
    for b, live in enumerate(n_rows):
        logits[b, :live] = np.arange(5)
    tokens = argmax(logits, n_rows, executor=executor)
    assert tokens.tolist() == [[4, 4, -1, -1], [4] * 4, [-1] * 4]


# ---------------------------------------------------------------------------- full size


@pytest.mark.gpu
@EVERY_DTYPE
@pytest.mark.parametrize("batch", [1, 8])
def test_full_vocabulary_equals_the_reference(cast, batch):
    rng = np.random.default_rng(batch)
    logits = cast(rng.integers(-30, 31, (batch, 33, 163840)) / 4)
    n_rows = rng.integers(1, 34, batch)
    expected = argmax(logits, n_rows, executor="numpy")
    np.testing.assert_array_equal(argmax(logits, n_rows, executor="gpu"), expected)


@pytest.mark.gpu
def test_device_arrays_stay_on_the_device():
    logits = np.random.default_rng(0).standard_normal((2, 5, 1000), np.float32)
    n_rows = np.array([5, 2], np.int32)
    tokens = argmax(cuda.to_device(logits), cuda.to_device(n_rows))
    assert backend.is_device_array(tokens)
    expected = argmax(logits, n_rows, executor="numpy")
    np.testing.assert_array_equal(tokens.copy_to_host(), expected)


@pytest.mark.gpu
def test_rows_beyond_two_billion_elements():
    """The last row starts at element 2 182 865 920: offsets need 64 bits."""
    try:
        logits = cuda.device_array((13, 1025, 163840), np.uint16)
    except Exception as error:
        pytest.skip(f"4.4 GB of GPU memory are not free: {error}")
    row = np.zeros(163840, np.uint16)
    row[777] = 1
    logits[12, 1024].copy_to_device(row)
    assert argmax(logits)[12, 1024] == 777


# -------------------------------------------------------------------- the kernel itself


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_no_race_in_any_order_of_the_lanes(order):
    rng = np.random.default_rng(1)
    logits = rng.integers(0, 9, (2, 2, 1500)).astype(np.float32)
    n_rows, tokens = np.array([2, 1], np.int32), np.empty((2, 2), np.int32)
    spans = np.empty((4, 2), np.float32), np.empty((4, 2), np.int32)
    options = {"order": order, "trace": True}
    arguments = (logits, 0, n_rows, 1, *spans)
    report = emulate(argmax_scan_kernel, (4, 1), 64, *arguments, **options)
    assert not report.races
    arguments = (logits, n_rows, 1, *spans, tokens)
    report = emulate(argmax_pick_kernel, 1, 128, *arguments, **options)
    assert not report.races
    expected = logits.argmax(-1)
    expected[1, 1] = -1
    assert tokens.tolist() == expected.tolist()


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("cc", "dtype"), [((8, 0), uint16), ((9, 0), float32), ((12, 0), uint16)], ids=str
)
def test_ptx_needs_no_float64_and_no_local_memory(cc, dtype):
    logits, spans = dtype[:, :, ::1], (float32[:, ::1], int32[:, ::1])
    live = int32[::1], int32
    for kernel, *signature in (
        (argmax_scan_kernel, logits, int32, *live, *spans),
        (argmax_pick_kernel, logits, *live, *spans, int32[:, ::1]),
    ):
        ptx = backend.compile_ptx(kernel, tuple(signature), compute_capability=cc)
        assert ".f64" not in ptx
        assert ".local" not in ptx


# ---------------------------------------------------------------------------- bad input


@EVERY_DTYPE
@BAD_ROWS
def test_a_bad_row_is_an_error_that_names_it(executor, cast, row, why):
    logits = cast(np.zeros((2, 3, 3)))
    logits[1, 2] = cast(row)
    with pytest.raises(ValueError, match=f"logits, request 1, row 2 {why}"):
        argmax(logits, executor=executor)
    with pytest.raises(ValueError, match=f"logits, request 1, row 2 {why}"):
        argmax(logits, [0, 3], executor=executor)
    assert argmax(logits, [3, 2], executor=executor).tolist() == [[0] * 3, [0, 0, -1]]


@EVERY_DTYPE
@BAD_ROWS
def test_a_bad_row_unchecked_answers_minus_one(executor, cast, row, why):
    logits = cast(np.zeros((2, 3, 3)))
    logits[1, 1] = cast(row)
    tokens = argmax(logits, check=False, executor=executor)
    assert tokens.tolist() == [[0, 0, 0], [0, -1, 0]]


def test_bad_arguments_are_named(executor):
    logits = np.zeros((2, 3, 4), np.float32)
    with pytest.raises(ValueError, match=r"logits has shape \(3, 4\); expected 3 dim"):
        argmax(logits[0], executor=executor)
    with pytest.raises(ValueError, match=r"logits has shape \(2, 3, 0\); expected V"):
        argmax(logits[..., :0], executor=executor)
    with pytest.raises(TypeError, match="logits has dtype float64; expected float32"):
        argmax(logits.astype(float), executor=executor)
    with pytest.raises(ValueError, match=r"n_rows has shape \(3,\); expected \(2\)"):
        argmax(logits, [1, 1, 1], executor=executor)
    for n_rows in ([4, 0], [0, -1]):
        with pytest.raises(ValueError, match=rf"n_rows is \[{n_rows[0]}, .*expected 0"):
            argmax(logits, n_rows, executor=executor)


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4)])
def test_no_rows_give_no_answers(executor, shape):
    tokens = argmax(np.zeros(shape, np.float32), executor=executor)
    assert (tokens.shape, tokens.dtype) == (shape[:2], np.int32)


@pytest.mark.gpu
def test_a_check_of_device_arrays_is_an_error():
    logits = cuda.to_device(np.zeros((1, 1, 4), np.float32))
    with pytest.raises(ValueError, match="check is True, but logits lie on the GPU"):
        argmax(logits, check=True)
