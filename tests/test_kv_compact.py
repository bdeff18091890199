"""kv_compact on every executor: accepted rows to the front, nothing else touched."""

import numpy as np
import pytest
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, int32, uint8, uint16, uint32

from ddtree_numba import backend, reference
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels.kv_compact import THREADS, kv_compact, kv_compact_kernel


def numbered(shape: tuple[int, ...], dtype: str = "float32") -> np.ndarray:
    """A cache in which every element is different (or nearly, in narrow dtypes)."""
    return np.arange(np.prod(shape)).astype(dtype).reshape(shape)


def moved(cache, prefix_lens, rows, accept_len) -> np.ndarray:
    """What must come out, row by row from an untouched copy."""
    expected = cache.copy()
    for b, (start, length) in enumerate(zip(prefix_lens, accept_len, strict=True)):
        for k in range(length):
            source = cache[..., b, start + rows[b][k], :]
            expected[..., b, start + k, :] = source
    return expected


# ----------------------------------------------------------------- the cases by name


def test_kv_compact_a_b_c_d_with_rows_0_2_3_becomes_a_c_d(executor):
    cache = np.array([[[9], [10], [11], [12], [13], [99]]], np.float32)
    lens = kv_compact(cache, [1], [[0, 2, 3]], [3], executor=executor)
    assert cache[0, :, 0].tolist() == [9, 10, 12, 13, 13, 99]
    assert lens.dtype == np.int32
    assert lens.tolist() == [4]


def test_kv_untouched_where_another_request_has_nothing_to_move(executor):
    cache = numbered((3, 8, 2))
    before = cache.copy()
    rows = [[0, -1, -1], [0, 2, 4], [0, 1, -1]]
    lens = kv_compact(cache, [2, 2, 5], rows, [1, 3, 2], executor=executor)
    np.testing.assert_array_equal(cache[[0, 2]], before[[0, 2]])
    np.testing.assert_array_equal(cache[1, 3:5], before[1, [4, 6]])
    assert lens.tolist() == [3, 5, 7]


@pytest.mark.parametrize("length", range(9))
def test_every_accept_length(executor, length):
    cache = numbered((1, 40, 3))
    rows = np.full((1, 8), -1, np.int32)
    rows[0, :length] = np.arange(length) * 4 + np.arange(length) % 2
    expected = moved(cache, [5], rows, [length])
    lens = kv_compact(cache, [5], rows, [length], executor=executor)
    np.testing.assert_array_equal(cache, expected)
    assert lens.tolist() == [5 + length]


@pytest.mark.parametrize(
    "dtype", ["float32", "uint16", "float16", "uint8", "int8", "int32", "float64"]
)
def test_any_element_moves_bit_for_bit(executor, dtype):
    cache = numbered((2, 2, 12, 5), "u1").repeat(np.dtype(dtype).itemsize, axis=-1)
    cache = cache.view(dtype)  # NaN and all: bits, not numbers
    bits = f"u{cache.itemsize}"
    rows = np.array([[0, 3, 7], [1, 2, -1]], np.int32)
    expected = moved(cache, [4, 0], rows, [3, 2])
    kv_compact(cache, [4, 0], rows, [3, 2], executor=executor)
    np.testing.assert_array_equal(cache.view(bits), expected.view(bits))


def test_layers_move_together(executor):
    cache = numbered((3, 2, 10, 4))
    rows = [[0, 2], [0, 5]]
    expected = moved(cache, [1, 3], rows, [2, 2])
    lens = kv_compact(cache, [1, 3], rows, [2, 2], executor=executor)
    np.testing.assert_array_equal(cache, expected)
    assert lens.tolist() == [3, 5]


def test_a_strided_view_is_changed_and_what_lies_between_is_not(executor):
    whole = numbered((2, 12, 8))
    before = whole.copy()
    view = whole[:, ::2, 1::2]
    expected = moved(view, [1, 0], [[0, 3], [0, 2]], [2, 2])
    kv_compact(view, [1, 0], [[0, 3], [0, 2]], [2, 2], executor=executor)
    np.testing.assert_array_equal(view, expected)
    whole[:, ::2, 1::2] = before[:, ::2, 1::2]
    np.testing.assert_array_equal(whole, before)


def test_the_prefix_lengths_given_are_not_changed(executor):
    prefix_lens = np.array([2], np.int32)
    kv_compact(numbered((1, 6, 2)), prefix_lens, [[0, 2]], [2], executor=executor)
    assert prefix_lens.tolist() == [2]


def test_the_last_row_of_the_cache_can_be_accepted(executor):
    cache = numbered((1, 6, 2))
    kv_compact(cache, [2], [[0, 3]], [2], executor=executor)
    assert cache[0, 3].tolist() == [10, 11]


# --------------------------------------------------------------------------- properties


@st.composite
def compactions(draw):
    """A cache, prefix lengths, ascending rows and lengths that fit each other."""
    batch, tail = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    layers, d = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    prefix = draw(st.lists(st.integers(0, 5), min_size=batch, max_size=batch))
    chosen = [
        sorted(draw(st.sets(st.integers(0, tail - 1), max_size=tail)))
        for _ in range(batch)
    ]
    rows = np.full((batch, tail), -1, np.int32)
    for b, accepted in enumerate(chosen):
        rows[b, : len(accepted)] = accepted
    accept_len = [len(accepted) for accepted in chosen]
    return numbered((layers, batch, 5 + tail, d)), prefix, rows, accept_len


@pytest.mark.parametrize("executor", ["numpy", "emulator", GPU])
@given(case=compactions())
@settings(max_examples=30, deadline=None)
def test_accepted_rows_arrive_and_nothing_else_changes(executor, case):
    cache, prefix, rows, accept_len = case
    expected = moved(cache, prefix, rows, accept_len)
    lens = kv_compact(cache, prefix, rows, accept_len, executor=executor)
    np.testing.assert_array_equal(cache, expected)
    assert lens.tolist() == np.add(prefix, accept_len).tolist()


# ---------------------------------------------------------------- full size and device


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "uint16"])
def test_full_size_4_layers_b8_s4096_d576(dtype):
    rng = np.random.default_rng(3)
    cache = rng.integers(2**16, size=(4, 8, 4096, 576), dtype=np.uint16).astype(dtype)
    prefix = rng.integers(0, 3000, 8).astype(np.int32)
    rows = np.sort([rng.choice(1025, 16, replace=False) for _ in range(8)]).astype("i4")
    accept_len = rng.integers(0, 17, 8).astype(np.int32)
    expected = moved(cache, prefix, rows, accept_len)
    on_device = [cuda.to_device(x) for x in (cache, prefix, rows, accept_len)]
    lens = kv_compact(*on_device)
    assert backend.is_device_array(lens)
    np.testing.assert_array_equal(lens.copy_to_host(), prefix + accept_len)
    np.testing.assert_array_equal(on_device[0].copy_to_host(), expected)


@pytest.mark.gpu
def test_a_strided_device_view_is_changed_in_place():
    cache = numbered((2, 12, 8))
    whole = cuda.to_device(cache)
    small = [np.array(x, np.int32) for x in ([1, 0], [[0, 3], [0, 2]], [2, 2])]
    kv_compact(whole[:, ::2, 1:5], *map(cuda.to_device, small))
    cache[:, ::2, 1:5] = moved(cache[:, ::2, 1:5], *small)
    np.testing.assert_array_equal(whole.copy_to_host(), cache)


# -------------------------------------------------------------------- the kernel itself

UNSAFE = {
    "rows that fall": ([1], [[0, 3, 2]], [3], 2),
    "a row twice": ([1], [[0, 2, 2]], [3], 2),
    "a negative row": ([1], [[-5, 1, 2]], [3], 0),
    "negative accept_len": ([1], [[0, 1, 2]], [-2], 0),
    "accept_len beyond the rows": ([1], [[0, 1, 2]], [9], 3),
    "a row beyond the cache": ([1], [[0, 2, 5]], [3], 2),
    "a row far beyond the cache": ([1], [[0, 2, 2**31 - 1]], [3], 2),
    "a prefix beyond the cache": ([100], [[0, 1, 2]], [3], 0),
    "a negative prefix": ([-2], [[0, 2, 3]], [3], 0),
}


@pytest.mark.parametrize("why", UNSAFE)
def test_unchecked_input_stops_at_its_first_bad_row(kernel_executor, why):
    """Device arrays are not looked at; the emulator would report any access outside."""
    prefix, rows, accept_len, good = UNSAFE[why]
    prefix, rows, accept_len = (
        np.array(x, np.int32) for x in (prefix, rows, accept_len)
    )
    cache = numbered((1, 1, 6, 2))
    expected = moved(cache[0], prefix, rows, [good])[None] if good else cache.copy()
    guarded = numbered((1, 3, 6, 2))  # the request stands between two others
    before = guarded.copy()
    guarded[:, 1] = cache[:, 0]
    lens = np.full(1, -99, np.int32)
    words = guarded[:, 1:2].view(np.uint32)
    if kernel_executor == "gpu":
        whole = cuda.to_device(guarded.view(np.uint32))
        out = cuda.to_device(lens)
        args = map(cuda.to_device, (prefix, rows, accept_len))
        kv_compact_kernel[(1, 1, 1), THREADS](*args, whole[:, 1:2], out)
        guarded, lens = whole.copy_to_host().view(np.float32), out.copy_to_host()
    else:
        args = (prefix, rows, accept_len, words, lens)
        emulate(kv_compact_kernel, (1, 1, 1), THREADS, *args)
    np.testing.assert_array_equal(guarded[:, 1], expected[:, 0])
    np.testing.assert_array_equal(guarded[:, [0, 2]], before[:, [0, 2]])
    assert lens.tolist() == [prefix[0] + good]


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_no_row_is_overwritten_before_it_is_read_in_any_lane_order(order):
    cache = numbered((2, 2, 9, THREADS + 3))  # two blocks a row
    rows = np.array([[0, 1, 3, 4, 6], [0, 2, 3, -1, -1]], np.int32)
    prefix, accept_len = np.array([2, 4], np.int32), np.array([5, 3], np.int32)
    expected = moved(cache, prefix, rows, accept_len)
    lens = np.full(2, -99, np.int32)
    args = (prefix, rows, accept_len, cache.view(np.uint32), lens)
    report = emulate(
        kv_compact_kernel, (2, 2, 2), THREADS, *args, order=order, trace=True
    )
    assert not report.races
    np.testing.assert_array_equal(cache, expected)
    assert lens.tolist() == [7, 7]


@pytest.mark.ptx
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)])
@pytest.mark.parametrize("element", [uint8, uint16, uint32], ids=str)
def test_ptx_needs_no_float64_and_no_local_memory(cc, element):
    signature = (int32[::1], int32[:, ::1], int32[::1], element[:, :, :, ::1])
    signature += (int32[::1],)
    ptx = backend.compile_ptx(kv_compact_kernel, signature, compute_capability=cc)
    assert ".f64" not in ptx
    assert ".local" not in ptx


# ---------------------------------------------------------------------------- bad input

BAD = {
    "rows that fall": (dict(rows=[[0, 2, 1]]), "rows, request 0 is [0, 2, 1]"),
    "a row twice": (dict(rows=[[0, 1, 1]]), "rows, request 0 is [0, 1, 1]"),
    "a negative row": (dict(rows=[[-1, 1, 2]]), "rows, request 0 is [-1, 1, 2]"),
    "negative accept_len": (
        dict(accept_len=[-1]),
        "accept_len, request 0 is -1; expected 0 … 3",
    ),
    "accept_len beyond the rows": (
        dict(accept_len=[4]),
        "accept_len, request 0 is 4; expected 0 … 3",
    ),
    "a row beyond the cache": (
        dict(rows=[[0, 1, 4]]),
        "rows, request 0 reaches cache row 6; expected less than 6",
    ),
    "a row that overflows int32": (
        dict(rows=[[0, 1, 2**31 - 1]]),
        "rows, request 0 reaches cache row 2147483649; expected less than 6",
    ),
    "a prefix beyond the cache": (
        dict(prefix_lens=[7]),
        "prefix_lens, request 0 is 7; expected 0 … 6",
    ),
    "a negative prefix": (dict(prefix_lens=[-1]), "prefix_lens, request 0 is -1"),
    "another batch": (dict(accept_len=[1, 1]), "accept_len has shape (2,)"),
    "rows of rank 1": (dict(rows=[0, 1, 2]), "rows has shape (3,)"),
}


@pytest.mark.parametrize("why", BAD)
def test_bad_host_input_is_named_and_nothing_moves(executor, why):
    change, message = BAD[why]
    cache = numbered((1, 6, 2))
    good = dict(prefix_lens=[2], rows=[[0, 1, 3]], accept_len=[3])
    with pytest.raises(ValueError) as caught:
        kv_compact(cache, **{**good, **change}, executor=executor)
    assert message in str(caught.value)
    np.testing.assert_array_equal(cache, numbered((1, 6, 2)))


def test_a_read_only_cache_is_an_error(executor):
    cache = numbered((1, 6, 2))
    cache.flags.writeable = False
    with pytest.raises(ValueError, match="kv_cache is read-only"):
        kv_compact(cache, [2], [[0, 1]], [2], executor=executor)


@pytest.mark.parametrize("shape", [(0, 6, 2), (3, 0, 6, 2)])
def test_a_batch_may_be_empty(executor, shape):
    rows = np.zeros((0, 2), np.int32)
    assert kv_compact(np.zeros(shape), [], rows, [], executor=executor).shape == (0,)


def test_a_list_is_no_cache_because_it_cannot_change_in_place(executor):
    with pytest.raises(TypeError, match="kv_cache is a list; expected an array"):
        kv_compact([[[1.0]]], [0], [[0]], [1], executor=executor)


@pytest.mark.parametrize("shape", [(6, 2), (1, 1, 1, 6, 2), (0, 1, 6, 2), (1, 6, 0)])
def test_a_cache_of_another_shape_is_an_error(executor, shape):
    with pytest.raises(ValueError, match="kv_cache has shape .* expected .*B, S_max"):
        kv_compact(np.zeros(shape), [2], [[0, 1]], [2], executor=executor)


@pytest.mark.parametrize("dtype", ["complex128", "object", "i2,i1"])
def test_a_cache_of_other_elements_is_an_error(executor, dtype):
    with pytest.raises(TypeError, match="kv_cache has dtype .* 1, 2, 4 or 8 bytes"):
        kv_compact(np.zeros((1, 6, 2), dtype), [2], [[0, 1]], [2], executor=executor)


def test_float_rows_are_an_error(executor):
    cache = numbered((1, 6, 2))
    with pytest.raises(TypeError, match="rows has dtype float64; expected int32"):
        kv_compact(cache, [2], [[0.0, 1.0]], [2], executor=executor)


def test_the_reference_itself_checks():
    with pytest.raises(ValueError, match="rows, request 0"):
        reference.kv_compact(
            numbered((1, 6, 2)), np.array([2]), np.array([[0, 9]]), np.array([2])
        )
