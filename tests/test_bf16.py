"""bfloat16 conversion, over every bit pattern and both sides of every tie."""

import warnings

import numpy as np
import pytest

from ddtree_numba import bf16

EVERY = np.arange(2**16, dtype=np.uint16)
IS_NAN = (EVERY & 0x7FFF) > 0x7F80
BELOW_INF = EVERY[(EVERY & 0x7FFF) < 0x7F80]  # finite, both signs


def float32_of(upper, lower):
    """The float32 whose bits are the two halves."""
    return (upper.astype(np.uint32) << 16 | lower).view(np.float32)


def test_every_pattern_that_is_no_nan_comes_back_as_it_was():
    back = bf16.from_float32(bf16.to_float32(EVERY))
    np.testing.assert_array_equal(back[~IS_NAN], EVERY[~IS_NAN])


def test_every_nan_pattern_comes_back_quiet_with_sign_and_payload():
    back = bf16.from_float32(bf16.to_float32(EVERY[IS_NAN]))
    np.testing.assert_array_equal(back, EVERY[IS_NAN] | 0x0040)


def test_widening_gives_the_value_that_sign_exponent_and_fraction_say():
    exponent, fraction = (BELOW_INF >> 7 & 0xFF).astype(int), BELOW_INF & 0x7F
    normal = exponent > 0
    value = np.ldexp(fraction / 128.0 + normal, np.maximum(exponent, 1) - 127)
    value = np.where(BELOW_INF >> 15, -value, value)
    np.testing.assert_array_equal(bf16.to_float32(BELOW_INF), value)


def test_every_tie_goes_to_the_even_neighbour():
    tied = bf16.from_float32(float32_of(BELOW_INF, 0x8000))
    np.testing.assert_array_equal(tied, BELOW_INF + (BELOW_INF & 1))


def test_one_float32_step_off_every_tie_goes_to_the_nearer_neighbour():
    under = bf16.from_float32(float32_of(BELOW_INF, 0x7FFF))
    over = bf16.from_float32(float32_of(BELOW_INF, 0x8001))
    np.testing.assert_array_equal(under, BELOW_INF)
    np.testing.assert_array_equal(over, BELOW_INF + 1)


def test_rounding_agrees_with_a_search_for_the_nearest_value():
    positive = np.arange(0x7F80, dtype=np.uint16)
    grid = np.append(bf16.to_float32(positive).astype(np.float64), 2.0**128)
    patterns = np.random.default_rng(7).integers(0, 0x7F800000, 200_000, np.uint32)
    x = patterns.view(np.float32)
    above = np.searchsorted(grid, x.astype(np.float64))
    below = np.maximum(above - 1, 0)
    gap_above, gap_below = grid[above] - x, x - grid[below]  # exact in float64
    nearest = np.where(gap_above < gap_below, above, below)
    nearest = np.where((gap_above == gap_below) & (above % 2 == 0), above, nearest)
    np.testing.assert_array_equal(bf16.from_float32(x), nearest)


@pytest.mark.parametrize(
    ("x", "expected"),
    [
        pytest.param(np.finfo(np.float32).max, 0x7F80, id="overflow-to-inf"),
        pytest.param(-np.finfo(np.float32).max, 0xFF80, id="overflow-to-minus-inf"),
        pytest.param(2**128 - 2.0**119 - 2.0**104, 0x7F7F, id="last-that-stays-finite"),
        pytest.param(np.inf, 0x7F80, id="inf"),
        pytest.param(-np.inf, 0xFF80, id="minus-inf"),
        pytest.param(-0.0, 0x8000, id="minus-zero"),
        pytest.param(2.0**-149, 0x0000, id="least-subnormal-to-zero"),
        pytest.param(2.0**-133, 0x0001, id="least-bf16-subnormal"),
        pytest.param(2.0**-126 - 2.0**-149, 0x0080, id="subnormal-up-to-normal"),
    ],
)
def test_edges_of_the_range(x, expected):
    assert bf16.from_float32(np.float32(x)) == expected


@pytest.mark.parametrize("bits", [0x7F800001, 0xFF800001, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_nan_whose_payload_is_cut_off_is_still_a_nan(bits):
    x = np.array([bits], np.uint32).view(np.float32)
    with warnings.catch_warnings(action="error"):
        kept = bf16.from_float32(x)
        as_scalar = bf16.from_float32(x[0])
    assert np.isnan(bf16.to_float32(kept)).all()
    assert kept[0] >> 15 == bits >> 31
    assert as_scalar == kept[0]


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3)])
def test_shapes_are_kept(shape):
    bits = bf16.from_float32(np.ones(shape, np.float32))
    wide = bf16.to_float32(bits)
    assert (bits.shape, bits.dtype) == (shape, np.uint16)
    assert (wide.shape, wide.dtype) == (shape, np.float32)
    assert isinstance(bits, np.ndarray) and isinstance(wide, np.ndarray)


def test_strided_and_big_endian_input_give_the_same_bits():
    x = np.linspace(-3, 3, 24, dtype=np.float32).reshape(4, 6)
    expected = bf16.from_float32(x)
    np.testing.assert_array_equal(bf16.from_float32(x.T), expected.T)
    np.testing.assert_array_equal(bf16.from_float32(x[::2, ::-1]), expected[::2, ::-1])
    np.testing.assert_array_equal(bf16.from_float32(x.astype(">f4")), expected)
    np.testing.assert_array_equal(
        bf16.to_float32(expected.astype(">u2")), bf16.to_float32(expected)
    )


@pytest.mark.parametrize("dtype", ["<u2", ">u2", "f2", "f4", "f8"])
def test_every_kind_of_element_widens_to_float64(dtype):
    x = np.array([[-2.5, 0.0, 3.0]])
    stored = (bf16.from_float32(x.astype("f4")) if "u" in dtype else x).astype(dtype)
    wide = bf16.to_float64(stored)
    assert wide.dtype == np.float64
    assert wide.tolist() == x.tolist()


def test_float64_is_refused_because_it_would_be_rounded_twice():
    with pytest.raises(TypeError, match="x: expected float32 .* got float64"):
        bf16.from_float32(np.ones(3))


def test_bits_of_another_dtype_are_refused():
    with pytest.raises(TypeError, match="bits: expected uint16 .* got int64"):
        bf16.to_float32(np.ones(3, np.int64))
