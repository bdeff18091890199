"""PTX instructions: alone, together in a matrix product, wrongly used, and compiled.

The probes hold every instruction to values worked out here from its table, in the
emulator and on a GPU; so the two also agree with each other, bit for bit.
"""

import re

import mma_matmul
import numpy as np
import pytest
from llvmlite import ir
from mma_matmul import mma_matmul_kernel
from numba import cuda, float32, int32, types, uint16, uint32
from numba.core.errors import TypingError
from numba.cuda.extending import intrinsic
from test_emulator_bugs import marked_line

from ddtree_numba.backend import compile_ptx, place
from ddtree_numba.bf16 import from_float32
from ddtree_numba.emulator import (
    BarrierDivergenceError,
    DeadlockError,
    InFlightError,
    KernelError,
    MisalignedError,
    OutOfBoundsError,
    UninitialisedReadError,
    UnsupportedError,
    emulate,
    emulation,
)
from ddtree_numba.kernels import ptx
from ddtree_numba.kernels.ptx import (
    cp_async_16,
    cp_async_16_zfill,
    cp_async_commit_group,
    cp_async_wait_group,
    cvt_f32_f16x2,
    cvt_rn_bf16x2,
    cvt_rn_f16x2,
    div_u32,
    ex2_approx,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    max_bf16x2,
    min_bf16x2,
    mma_m16n8k16_bf16,
    uncounted,
)

LANES = np.arange(32)
G, T = LANES // 4, LANES % 4


def launch(executor, kernel, grid, block, *inputs, out):
    """Run a kernel on copies of its inputs; returns its output."""
    at = place(executor)
    out = at.put(out.copy())
    at.launch(kernel, grid, block, *(at.put(x) for x in inputs), out)
    return at.give(out)


def numbered(*shape):
    """uint16 elements that are all different."""
    return np.arange(np.prod(shape), dtype=np.uint16).reshape(shape)


# -- each instruction alone -----------------------------------------------------------


@cuda.jit
def ldmatrix_kernel(x, out):
    # x [32, 8] u16; out [2, 32, 4] u32
    rows = cuda.shared.array((32, 8), uint16, alignment=16)
    lane = cuda.threadIdx.x
    for column in range(8):
        rows[lane, column] = x[lane, column]
    cuda.syncthreads()  # all rows are there
    plain = ldmatrix_x4(rows, (lane, 0))
    transposed = ptx.ldmatrix_x4_trans(rows, (lane, 0))
    for n in range(4):
        out[0, lane, n] = plain[n]
        out[1, lane, n] = transposed[n]


def test_ldmatrix_gives_every_lane_two_neighbours_of_each_matrix(kernel_executor):
    x = numbered(32, 8)
    out = np.zeros((2, 32, 4), np.uint32)
    plain, transposed = launch(kernel_executor, ldmatrix_kernel, 1, 32, x, out=out)
    for n in range(4):
        matrix = x[8 * n : 8 * n + 8].astype(np.uint32)
        assert (plain[:, n] == matrix[G, 2 * T] | matrix[G, 2 * T + 1] << 16).all()
        down = matrix[2 * T, G] | matrix[2 * T + 1, G] << 16
        assert (transposed[:, n] == down).all()


@cuda.jit
def mma_kernel(a, b, c, out):
    # a [16, 16], b [16, 8] u16 (bf16 bits); c, out [16, 8] f32. By the tables of `ptx`.
    acc = cuda.local.array(4, float32)
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    acc[0], acc[1] = c[g, 2 * t], c[g, 2 * t + 1]
    acc[2], acc[3] = c[g + 8, 2 * t], c[g + 8, 2 * t + 1]
    part_a = (
        uint32(a[g, 2 * t] | a[g, 2 * t + 1] << 16),
        uint32(a[g + 8, 2 * t] | a[g + 8, 2 * t + 1] << 16),
        uint32(a[g, 8 + 2 * t] | a[g, 9 + 2 * t] << 16),
        uint32(a[g + 8, 8 + 2 * t] | a[g + 8, 9 + 2 * t] << 16),
    )
    part_b = (
        uint32(b[2 * t, g] | b[2 * t + 1, g] << 16),
        uint32(b[8 + 2 * t, g] | b[9 + 2 * t, g] << 16),
    )
    mma_m16n8k16_bf16(acc, part_a, part_b)
    out[g, 2 * t], out[g, 2 * t + 1] = acc[0], acc[1]
    out[g + 8, 2 * t], out[g + 8, 2 * t + 1] = acc[2], acc[3]


def small_integers(rng, *shape):
    """Integers that bfloat16 holds and whose products float32 sums exactly."""
    return rng.integers(-8, 9, shape).astype(np.float32)


def test_mma_is_a_matrix_product_in_the_layout_of_its_table(kernel_executor):
    rng = np.random.default_rng(1)
    a, b = small_integers(rng, 16, 16), small_integers(rng, 16, 8)
    c = small_integers(rng, 16, 8)
    inputs = from_float32(a), from_float32(b), c
    out = launch(kernel_executor, mma_kernel, 1, 32, *inputs, out=np.zeros_like(c))
    assert (out == a @ b + c).all()


@cuda.jit
def quotients_kernel(x, y, out):
    # x, y, out [n] i32
    i = cuda.threadIdx.x
    out[i] = div_u32(x[i], y[i])


def test_counts_are_divided(kernel_executor):
    x = np.array([0, 6, 7, 8, 2**31 - 1, 2**31 - 1, 100, 3], np.int32)
    y = np.array([1, 7, 7, 7, 1, 2**31 - 1, 3, 2**31 - 1], np.int32)
    empty = np.zeros_like(x)
    out = launch(kernel_executor, quotients_kernel, 1, 8, x, y, out=empty)
    assert (out == x // y).all()


@cuda.jit
def once_kernel(n, x, out):
    # n i32; x [n] i32; out [n] i32
    i = int32(0)
    while i < n:
        cuda.atomic.add(out, i, x[i])
        i = uncounted(i + 1)


@cuda.jit
def as_it_likes_kernel(n, x, out):
    # as `once_kernel`, but for what may be known of i
    i = int32(0)
    while i < n:
        cuda.atomic.add(out, i, x[i])
        i = int32(i + 1)


def test_what_nobody_counts_is_counted_rightly(kernel_executor):
    x = np.arange(7, dtype=np.int32)
    at = place(kernel_executor)
    out = at.put(np.ones_like(x))
    at.launch(once_kernel, 1, 1, np.int32(x.size), at.put(x), out)
    assert (at.give(out) == x + 1).all()


@pytest.mark.ptx
def test_a_loop_that_nobody_counts_is_written_once():
    signature = int32, int32[::1], int32[::1]
    additions = [
        len(re.findall(r"(?:atom|red)\.", compile_ptx(kernel, signature)))
        for kernel in (once_kernel, as_it_likes_kernel)
    ]
    assert additions[0] == 1 < additions[1]


@pytest.mark.parametrize("special", [np.inf, np.nan])
def test_mma_carries_inf_and_nan_to_one_row(kernel_executor, special):
    a, b, c = np.ones((16, 16)), np.ones((16, 8)), np.zeros((16, 8), np.float32)
    a[5, 9] = special
    bits = [from_float32(x.astype(np.float32)) for x in (a, b)]
    out = launch(kernel_executor, mma_kernel, 1, 32, *bits, c, out=c)
    expected = np.full((16, 8), 16, np.float32)
    expected[5] = special
    np.testing.assert_array_equal(out, expected)


@cuda.jit
def copy_kernel(x, sizes, out):
    # x [32, 8] u16; sizes [32] i32; out [2, 32, 8] u16
    tile = cuda.shared.array((2, 32, 8), uint16, alignment=16)
    lane = cuda.threadIdx.x
    cp_async_16(tile, (0, lane, 0), x, (lane, 0))
    cp_async_commit_group()
    # Row 32 does not exist; with 0 bytes it is not read.
    cp_async_16_zfill(tile[1], (lane, 0), x, (lane + 1, 0), sizes[lane])
    cp_async_commit_group()
    cp_async_wait_group(1)
    for n in range(8):
        out[0, lane, n] = tile[0, lane, n]
    cp_async_wait_group(0)
    cuda.syncthreads()  # all lanes' copies are there
    for n in range(8):
        out[1, lane, n] = tile[1, 31 - lane, n]


def test_cp_async_copies_16_bytes_and_fills_with_zeros(kernel_executor):
    x = numbered(32, 8) + np.uint16(1)
    sizes = (2 * LANES % 18).astype(np.int32)
    sizes[31] = 0  # its row is the first that is not there
    out = np.full((2, 32, 8), 7, np.uint16)
    out = launch(kernel_executor, copy_kernel, 1, 32, x, sizes, out=out)
    assert (out[0] == x).all()
    shifted = np.where(np.arange(8) < sizes[:, None] // 2, np.roll(x, -1, axis=0), 0)
    assert (out[1] == shifted[::-1]).all()


@cuda.jit
def clamp_kernel(x, low, high, out):
    # x, low, high [n] u32: pairs of bfloat16; out [n] u32
    i = cuda.grid(1)
    if i < out.size:
        out[i] = min_bf16x2(max_bf16x2(x[i], low[i]), high[i])


def test_max_and_min_of_pairs_take_the_number_where_one_is_nan(kernel_executor):
    values = np.float32([1, -3, 0.5, np.nan, np.inf, -np.inf, 2, -2])
    low, high = np.float32([-2] * 7 + [np.nan]), np.float32([0.75] * 6 + [np.nan, 8])
    expected = np.float32([0.75, -2, 0.5, -2, 0.75, -2, 2, -2])

    def pairs(x):  # each beside the one at the other end
        bits = from_float32(x).astype(np.uint32)
        return bits | bits[::-1] << np.uint32(16)

    given = [pairs(x) for x in (values, low, high)]
    out = np.zeros(8, np.uint32)
    out = launch(kernel_executor, clamp_kernel, 1, 32, *given, out=out)
    np.testing.assert_array_equal(out, pairs(expected))


@cuda.jit
def cvt_kernel(low, high, out):
    # low, high [n] f32; out [n] u32
    i = cuda.grid(1)
    if i < out.size:
        out[i] = cvt_rn_bf16x2(low[i], high[i])


def test_cvt_rounds_two_floats_to_nearest_even(kernel_executor):
    step = np.float32(2.0**-7)  # of bfloat16 from 1 to 2
    values = [1, 1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-20, -2.5, 0, -0.0]
    values += [np.inf, -np.inf, 3.4e38, np.nan]
    upper = [0x3F80, 0x3F80, 0x3F82, 0x3F81, 0xC020, 0, 0x8000]
    upper += [0x7F80, 0xFF80, 0x7F80, 0x7FFF]
    low = np.array(values, np.float32)
    out = np.zeros(low.size, np.uint32)
    out = launch(kernel_executor, cvt_kernel, 1, 32, low, low[::-1].copy(), out=out)
    assert [f"{x:04x}" for x in out & 0xFFFF] == [f"{x:04x}" for x in upper]
    assert [f"{x:04x}" for x in out >> 16] == [f"{x:04x}" for x in upper[::-1]]


@cuda.jit
def to_halves_kernel(low, high, out):
    # low, high [n] f32; out [n] u32
    i = cuda.grid(1)
    if i < out.size:
        out[i] = cvt_rn_f16x2(low[i], high[i])


@cuda.jit
def to_floats_kernel(pairs, out):
    # pairs [n] u32; out [n, 2] f32
    i = cuda.grid(1)
    if i < pairs.size:
        out[i, 0], out[i, 1] = cvt_f32_f16x2(pairs[i])


def test_two_floats_become_halves_and_floats_again(kernel_executor):
    step = 2.0**-10  # of float16 from 1 to 2
    values = [1, 1 + step / 2, 1 + 3 * step / 2, 1 + step / 2 + 2.0**-20, -2.5, -0.0]
    upper = [0x3C00, 0x3C00, 0x3C02, 0x3C01, 0xC100, 0x8000]
    values += [65519, 65520, -np.inf, 2.0**-24, 2.0**-25, 3 * 2.0**-26, np.nan]
    upper += [0x7BFF, 0x7C00, 0xFC00, 1, 0, 1, 0x7FFF]
    low, upper = np.array(values, np.float32), np.array(upper, np.uint16)
    given, out = (low, low[::-1].copy()), np.zeros(low.size, np.uint32)
    out = launch(kernel_executor, to_halves_kernel, 1, 32, *given, out=out)
    assert [f"{x:04x}" for x in out & 0xFFFF] == [f"{x:04x}" for x in upper]
    assert [f"{x:04x}" for x in out >> 16] == [f"{x:04x}" for x in upper[::-1]]
    back = np.zeros((low.size, 2), np.float32)
    back = launch(kernel_executor, to_floats_kernel, 1, 32, out, out=back)
    floats = upper.view(np.float16).astype(np.float32)
    np.testing.assert_array_equal(back, np.stack([floats, floats[::-1]], axis=1))


@cuda.jit
def ex2_kernel(x, out):
    # x, out [n] f32
    i = cuda.grid(1)
    if i < out.size:
        out[i] = ex2_approx(x[i])


def test_ex2_is_a_power_of_two(kernel_executor):
    special = {
        0: 1,
        -np.inf: 0,
        np.inf: np.inf,
        1e-40: 1,
        -140: 0,
        129: np.inf,
    }
    x = np.array([*special, np.nan], np.float32)
    out = launch(kernel_executor, ex2_kernel, 1, 32, x, out=np.ones_like(x))
    np.testing.assert_array_equal(out, [*special.values(), np.nan])

    x = np.random.default_rng(0).uniform(-126, 127, 200).astype(np.float32)
    out = launch(kernel_executor, ex2_kernel, 7, 32, x, out=np.ones_like(x))
    # PTX ISA: a relative error of at most 2**-22.
    np.testing.assert_allclose(out, np.exp2(x.astype(np.float64)), rtol=2.0**-22)


# -- together: a matrix product -------------------------------------------------------

SIZES = {
    "one-block": (64, 64, 64),
    "ragged": (70, 72, 40),
    "thin": (3, 8, 8),
}


def product(executor, a, b):
    """a @ b of float32 matrices that bfloat16 holds, by the tensor-core kernel."""
    out = np.full((a.shape[0], b.shape[1]), np.nan, np.float32)
    blocks = mma_matmul.grid(*out.shape)
    inputs = from_float32(a), from_float32(b)
    return launch(
        executor, mma_matmul_kernel, blocks, mma_matmul.THREADS, *inputs, out=out
    )


def integers(m, n, k):
    rng = np.random.default_rng(m)
    return small_integers(rng, m, k), small_integers(rng, k, n)


def normal(m, n, k):
    """Normal numbers, rounded to bfloat16."""
    rng = np.random.default_rng(m)
    both = rng.normal(size=(m, k)), rng.normal(size=(k, n))
    bits = [from_float32(x.astype(np.float32)).astype(np.uint32) << 16 for x in both]
    return bits[0].view(np.float32), bits[1].view(np.float32)


def assert_close(out, a, b):
    """Within one unit of float32, rounded down, for each of the k additions.

    The hardware cuts off where it adds; no sum on the way exceeds |a| @ |b|.
    """
    a, b = a.astype(np.float64), b.astype(np.float64)
    bound = a.shape[1] * 2.0**-23 * (np.abs(a) @ np.abs(b))
    assert (np.abs(out - a @ b) <= bound).all()


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_the_matrix_product_of_integers_is_exact(kernel_executor, size):
    a, b = integers(*size)
    assert (product(kernel_executor, a, b) == a @ b).all()


@pytest.mark.parametrize("size", [SIZES["ragged"]], ids=["ragged"])
def test_the_matrix_product_of_random_numbers(kernel_executor, size):
    a, b = normal(*size)
    assert_close(product(kernel_executor, a, b), a, b)


@pytest.mark.gpu
def test_the_matrix_product_of_512_by_512():
    a, b = integers(512, 512, 512)
    # 512 products of at most 64 in magnitude: exact in float32, in any order.
    assert (product("gpu", a, b) == a @ b).all()
    a, b = normal(512, 512, 512)
    assert_close(product("gpu", a, b), a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
def test_gpu_and_emulator_agree_bit_for_bit_where_sums_are_exact(size):
    a, b = integers(*size)
    on_gpu, emulated = product("gpu", a, b), product("emulator", a, b)
    assert (on_gpu.view(np.uint32) == emulated.view(np.uint32)).all()


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_nothing_is_wrong_with_the_matrix_product_in_any_order(order):
    a, b = integers(64, 64, 96)
    out = np.zeros((64, 64), np.float32)
    bits = from_float32(a), from_float32(b)
    report = emulate(
        mma_matmul_kernel, 1, mma_matmul.THREADS, *bits, out, order=order, trace=True
    )
    assert report.races == []
    assert (out == a @ b).all()


def test_swizzled_tiles_have_no_bank_conflicts():
    a, b = integers(64, 64, 64)
    out = np.zeros((64, 64), np.float32)
    bits = from_float32(a), from_float32(b)
    report = emulate(mma_matmul_kernel, 1, mma_matmul.THREADS, *bits, out, trace=True)
    shared = report.memory.query("space == 'shared'")
    # A warp's 512 bytes need four passes over the banks, and take no more.
    assert set(shared["passes"]) == {4}
    assert set(shared["array"]) == {"a_tiles", "b_tiles"}


# -- misuse, each reported at its line ------------------------------------------------


def fault(error, kernel, *args, block=32, grid=1, order="forward", trace=False):
    """The error that a kernel with one marked line must raise there."""
    with pytest.raises(error) as caught:
        emulate(kernel, grid, block, *args, order=order, trace=trace)
    assert type(caught.value) is error
    assert caught.value.lineno == marked_line(kernel)
    assert caught.value.place.filename == __file__
    return str(caught.value)


def copy_and_its_line(kernel, text):
    """Whether a message names the line marked as the copy."""
    return f"{__file__}:{marked_line(kernel, '# <- copy')} `cp_async_16(" in text


X = numbered(32, 8)
OUT = np.zeros((32, 8), np.uint16)


@cuda.jit
def missing_wait_kernel(x, out):
    # x, out [32, 8] u16, as in all kernels below
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <- copy
    cp_async_commit_group()
    cuda.syncthreads()
    out[i, 0] = tile[i, 0]  # <-


@cuda.jit
def missing_commit_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <- copy
    cp_async_wait_group(0)
    cuda.syncthreads()
    out[i, 0] = tile[i, 0]  # <-


@cuda.jit
def waits_for_all_but_it_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <- copy
    cp_async_commit_group()
    cp_async_wait_group(1)
    cuda.syncthreads()
    out[i, 0] = tile[i].view(uint32)[0]  # <-


@cuda.jit
def ldmatrix_before_the_wait_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    for n in range(8):
        tile[i, n] = 0  # old values are no excuse
    cuda.syncthreads()
    cp_async_16(tile, (i, 0), x, (i, 0))  # <- copy
    cp_async_commit_group()
    out[i, 0] = ldmatrix_x4(tile, (i, 0))[0]  # <-


@cuda.jit
def two_copies_to_one_place_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <- copy
    cp_async_commit_group()
    cp_async_16(tile, (i, 0), x, (31 - i, 0))  # <-


@pytest.mark.parametrize(
    ("kernel", "state"),
    [
        (missing_wait_kernel, "not waited for"),
        (missing_commit_kernel, "not even committed"),
        (waits_for_all_but_it_kernel, "not waited for"),
        (ldmatrix_before_the_wait_kernel, "not waited for"),
        (two_copies_to_one_place_kernel, "not waited for"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.parametrize("trace", [False, True])
def test_a_copy_in_flight_is_not_there_yet(kernel, state, trace):
    text = fault(InFlightError, kernel, X, OUT.copy(), trace=trace)
    assert "tile[0" in text and state in text and "lane 0" in text
    assert copy_and_its_line(kernel, text)


@cuda.jit
def overwritten_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <- copy
    cp_async_commit_group()
    tile[i, 3] = 1  # <- writer
    cp_async_wait_group(0)  # <-


@cuda.jit
def source_changes_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <- copy
    cp_async_commit_group()
    x[i, 3] = 1  # <- writer
    cp_async_wait_group(0)  # <-


@pytest.mark.parametrize("kernel", [overwritten_kernel, source_changes_kernel])
def test_neither_end_of_a_copy_may_be_written_before_it_arrives(kernel):
    text = fault(InFlightError, kernel, X.copy(), OUT)
    assert copy_and_its_line(kernel, text)
    text = fault(InFlightError, kernel, X.copy(), OUT, trace=True)
    assert copy_and_its_line(kernel, text)
    assert f"written by {__file__}:{marked_line(kernel, '# <- writer')} `" in text


@cuda.jit
def no_barrier_after_the_wait_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <- copy
    cp_async_commit_group()
    cuda.syncthreads()  # at the wrong place
    cp_async_wait_group(0)  # <- 1
    if i >= 16:
        out[i, 0] = tile[i - 16, 0]  # <- 2


def only_race(kernel, *args):
    (race,) = emulate(kernel, 1, 32, *args, trace=True).races
    return race


def test_a_missing_barrier_after_the_wait_is_a_race():
    race = only_race(no_barrier_after_the_wait_kernel, X, OUT.copy())
    marks = [marked_line(no_barrier_after_the_wait_kernel, f"# <- {n}") for n in "12"]
    assert list(race.linenos) == marks
    assert (race.array, race.kinds) == ("tile", ("write", "read"))
    assert race.index == (0, 0)
    # In the other order the reading lane comes before the wait of the other.
    with pytest.raises(InFlightError) as caught:
        emulate(no_barrier_after_the_wait_kernel, 1, 32, X, OUT.copy(), order="reverse")
    assert caught.value.lineno == marks[1]
    assert copy_and_its_line(no_barrier_after_the_wait_kernel, str(caught.value))


@cuda.jit
def refill_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))
    cp_async_commit_group()
    cp_async_wait_group(0)
    cuda.syncthreads()
    if i < 16:
        out[i, 0] = tile[i, 0]  # <- 1
    else:
        cp_async_16(tile, (i - 16, 0), x, (i, 0))  # <- 2


def test_a_refill_without_a_barrier_is_a_race_with_the_last_reader():
    race = only_race(refill_kernel, X, OUT.copy())
    assert list(race.linenos) == [marked_line(refill_kernel, f"# <- {n}") for n in "12"]
    with pytest.raises(InFlightError) as caught:
        emulate(refill_kernel, 1, 32, X, OUT.copy(), order="reverse")
    assert caught.value.lineno == marked_line(refill_kernel, "# <- 1")


# -- addresses


@cuda.jit
def declared_without_alignment_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <-


@cuda.jit
def misaligned_target_kernel(x, out):
    tile = cuda.shared.array(512, uint16, alignment=16)
    cp_async_16(tile, cuda.threadIdx.x * 8 + 4, x, (cuda.threadIdx.x, 0))  # <-


@cuda.jit
def misaligned_source_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    cp_async_16_zfill(tile, (0, 0), x, (0, 4), 8)  # <-


@cuda.jit
def rows_of_72_bytes_kernel(x, out):
    tile = cuda.shared.array((32, 36), uint16, alignment=16)
    i = cuda.threadIdx.x
    for n in range(36):
        tile[i, n] = 0
    cuda.syncthreads()
    out[i, 0] = ldmatrix_x4(tile, (i, 0))[0]  # <-


@cuda.jit
def row_of_the_second_tile_kernel(x, out):
    tiles = cuda.shared.array((2, 4, 8), uint16)
    cp_async_16(tiles[1], (3, 0), x, (0, 0))  # <-


@pytest.mark.parametrize(
    ("kernel", "element"),
    [
        (declared_without_alignment_kernel, "tile[0, 0:8]"),
        (row_of_the_second_tile_kernel, "tiles[1, 3, 0:8]"),
        (misaligned_target_kernel, "tile[4:12]"),
        (misaligned_source_kernel, "x[0, 4:8]"),
        (rows_of_72_bytes_kernel, "tile[1, 0:8]"),
    ],
)
def test_16_bytes_start_at_a_multiple_of_16(kernel, element):
    text = fault(MisalignedError, kernel, X, OUT.copy())
    assert element in text and "16 bytes" in text
    assert ("alignment=16" in text) == ("tile" in element)


@cuda.jit
def past_the_tile_kernel(x, out):
    tile = cuda.shared.array((16, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16(tile, (i, 0), x, (i, 0))  # <-


@cuda.jit
def past_the_source_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    cp_async_16_zfill(tile, (i, 0), x, (i + 16, 0), 2)  # <-


@cuda.jit
def past_the_row_kernel(x, out):
    tile = cuda.shared.array((32, 12), uint16, alignment=16)
    cp_async_16(tile, (0, 8), x, (0, 0))  # <-


@cuda.jit
def more_than_16_bytes_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    cp_async_16_zfill(tile, (0, 0), x, (0, 0), 18)  # <-


@cuda.jit
def ldmatrix_past_the_tile_kernel(x, out):
    tile = cuda.shared.array((16, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    tile[i // 2, i % 2 * 4] = 0
    out[i, 0] = ldmatrix_x4_trans(tile, (i + 16, 0))[0]  # <-


@cuda.jit
def wrong_sum_kernel(x, out):
    sums = cuda.local.array((2, 4), float32)
    for i in range(2):
        for n in range(4):
            sums[i, n] = 0
    part = (uint32(0), uint32(0), uint32(0), uint32(0))
    for i in range(3):
        mma_m16n8k16_bf16(sums[i], part, part[:2])  # <-


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (past_the_tile_kernel, "tile[16, 0] is outside shape (16, 8)"),
        (past_the_source_kernel, "x[32, 0] is outside shape (32, 8)"),
        (past_the_row_kernel, "tile[0, 8:16]: the 16 bytes of cp.async pass the end"),
        (more_than_16_bytes_kernel, "18 bytes"),
        (ldmatrix_past_the_tile_kernel, "tile[16, 0] is outside shape (16, 8)"),
        (wrong_sum_kernel, "sums[2] is outside shape (2, 4)"),
    ],
)
def test_an_address_outside_its_array(kernel, what):
    assert what in fault(OutOfBoundsError, kernel, X, OUT.copy())


@cuda.jit
def wrong_register_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    for n in range(8):
        tile[i, n] = x[i, n]
    cuda.syncthreads()
    part = ldmatrix_x4(tile, (i, 0))
    out[i, 0] = part[4]  # <-


def test_a_register_that_a_fragment_does_not_have():
    assert "IndexError" in fault(KernelError, wrong_register_kernel, X, OUT.copy())


@cuda.jit
def wrong_columns_kernel(out):
    # out [8, 8] f32: a lane's two sums stand in columns 2t and 2t + 1
    sums = cuda.local.array(4, float32)
    for n in range(4):
        sums[n] = cuda.threadIdx.x
    part = (uint32(0), uint32(0), uint32(0), uint32(0))
    mma_m16n8k16_bf16(sums, part, part[:2])
    g, t = cuda.threadIdx.x // 4, cuda.threadIdx.x % 4
    out[g, t] = sums[0]  # <- 1
    out[g, t + 1] = sums[1]  # <- 2


def test_two_lanes_that_store_one_sum_race():
    race = only_race(wrong_columns_kernel, np.zeros((8, 8), np.float32))
    marks = [marked_line(wrong_columns_kernel, f"# <- {n}") for n in "12"]
    assert list(race.linenos) == marks
    assert race.kinds == ("write", "write")


# -- what is not there, not all there, or not shared


@cuda.jit
def unwritten_row_kernel(x, out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    for n in range(7):
        tile[i, n] = x[i, n]
    cuda.syncthreads()
    out[i, 0] = ldmatrix_x4(tile, (i, 0))[0]  # <-


@cuda.jit
def sums_from_nowhere_kernel(x, out):
    sums = cuda.local.array(4, float32)
    part = (uint32(0), uint32(0), uint32(0), uint32(0))
    mma_m16n8k16_bf16(sums, part, part[:2])  # <-


@pytest.mark.parametrize("kernel", [unwritten_row_kernel, sums_from_nowhere_kernel])
def test_operands_that_nobody_wrote(kernel):
    fault(UninitialisedReadError, kernel, X, OUT.copy())


@cuda.jit
def ldmatrix_of_global_kernel(x, out):
    out[0, 0] = ldmatrix_x4(x, (cuda.threadIdx.x, 0))[0]  # <-


@cuda.jit
def copy_from_shared_kernel(x, out):
    tile = cuda.shared.array((2, 8), uint16, alignment=16)
    cp_async_16(tile, (0, 0), tile, (1, 0))  # <-


@cuda.jit
def copy_to_a_row_kernel(x, out):
    tile = cuda.shared.array((2, 8), uint16, alignment=16)
    cp_async_16(tile, 0, x, (1, 0))  # <-


@cuda.jit
def strided_kernel(x, out):
    tile = cuda.shared.array((8, 8), uint16, alignment=16)
    cp_async_16(tile.T, (0, 0), x, (1, 0))  # <-


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (ldmatrix_of_global_kernel, "ldmatrix works on shared memory; x is global"),
        (copy_from_shared_kernel, "cp.async works on global memory; tile is shared"),
        (copy_to_a_row_kernel, "names no element"),
        (strided_kernel, "not contiguous"),
    ],
)
def test_operands_of_the_wrong_kind(kernel, what):
    assert what in fault(UnsupportedError, kernel, X, OUT.copy())


@cuda.jit
def half_a_warp_kernel(out):
    sums = cuda.local.array(4, float32)
    for n in range(4):
        sums[n] = 0
    part = (uint32(0), uint32(0), uint32(0), uint32(0))
    if cuda.threadIdx.x < 16:
        mma_m16n8k16_bf16(sums, part, part[:2])  # <-
    cuda.syncthreads()


@cuda.jit
def two_lines_kernel(out):
    tile = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    for n in range(8):
        tile[i, n] = 0
    cuda.syncthreads()
    if i < 16:
        out[i] = ldmatrix_x4(tile, (i, 0))[0]  # <- 1
    else:
        out[i] = ldmatrix_x4(tile, (i, 0))[1]  # <- 2


def test_a_warp_executes_an_instruction_together():
    out = np.zeros(32, np.uint32)
    with pytest.raises(BarrierDivergenceError) as caught:
        emulate(half_a_warp_kernel, 1, 32, out)
    key = "mma.sync", __file__, marked_line(half_a_warp_kernel)
    assert caught.value.waiting[key] == list(range(16))

    with pytest.raises(DeadlockError) as caught:
        emulate(two_lines_kernel, 1, 32, out)
    first, second = (marked_line(two_lines_kernel, f"# <- {n}") for n in "12")
    assert caught.value.waiting == {
        ("ldmatrix", __file__, first): list(range(16)),
        ("ldmatrix", __file__, second): list(range(16, 32)),
    }


def test_a_warp_has_32_lanes():
    with pytest.raises(DeadlockError, match="lanes 0-15 wait at ldmatrix"):
        emulate(two_lines_kernel, 1, 16, np.zeros(32, np.uint32))


# -- the trace, and intrinsics of one's own -------------------------------------------


def test_the_trace_holds_one_access_an_instruction():
    sizes = np.where(LANES < 31, 16, 0).astype(np.int32)
    out = np.zeros((2, 32, 8), np.uint16)
    report = emulate(copy_kernel, 1, 32, X, sizes, out, trace=True)
    assert report.races == []
    of_lane = report.accesses.query("lane == 5 and array in ('x', 'tile')")
    rows = zip(of_lane["array"], of_lane["kind"], of_lane["index"], strict=True)
    # Two copies, each a read, a write at the request and a write at the wait.
    first, second = (0, 5, 0), (1, 5, 0)
    assert [row for row in rows if row[:2] != ("tile", "read")] == [
        ("x", "read", (5, 0)),
        ("tile", "write", first),
        ("x", "read", (6, 0)),
        ("tile", "write", second),
        ("tile", "write", first),
        ("tile", "write", second),
    ]


@intrinsic
def lane_sum(typingctx, x):
    def codegen(context, builder, signature, args):
        return args[0]

    return x(x), codegen


@emulation(lane_sum)
def _(lane, x):
    return lane.together("lane_sum", x, lambda given: [sum(given)] * 32)


@intrinsic
def unknown(typingctx, x):
    def codegen(context, builder, signature, args):
        return ir.Constant(args[0].type, 0)

    return x(x), codegen


@cuda.jit
def own_intrinsic_kernel(out):
    out[cuda.threadIdx.x] = lane_sum(cuda.threadIdx.x)


@cuda.jit
def unknown_intrinsic_kernel(x, out):
    out[0, 0] = unknown(1)  # <-


def test_an_intrinsic_brings_its_own_emulation():
    out = np.zeros(64, np.int32)
    emulate(own_intrinsic_kernel, 1, 64, out)
    assert out.tolist() == [sum(range(32))] * 32 + [sum(range(32, 64))] * 32


def test_an_intrinsic_without_one_says_so():
    text = fault(UnsupportedError, unknown_intrinsic_kernel, X, OUT.copy())
    assert "unknown" in text and "emulation" in text


# -- compiled -------------------------------------------------------------------------

U16, U32, F32 = types.uint16, types.uint32, types.float32
CARDS = pytest.mark.parametrize("card", [(8, 0), (9, 0), (12, 0)], ids=str)


def instructions(kernel, signature, card):
    """The inline instructions of a kernel, without their operands."""
    text = compile_ptx(kernel, signature, compute_capability=card)
    assert ".local" not in text and ".f64" not in text
    return re.findall(r"begin inline asm\n\s*([\w.:]+)", text)


@pytest.mark.ptx
@CARDS
@pytest.mark.parametrize(
    ("kernel", "signature", "expected"),
    [
        (
            ldmatrix_kernel,
            (U16[:, ::1], U32[:, :, ::1]),
            [
                "ldmatrix.sync.aligned.m8n8.x4.shared.b16",
                "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16",
            ],
        ),
        (
            mma_kernel,
            (U16[:, ::1], U16[:, ::1], F32[:, ::1], F32[:, ::1]),
            ["mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32"],
        ),
        (
            copy_kernel,
            (U16[:, ::1], types.int32[::1], U16[:, :, ::1]),
            [
                "cp.async.cg.shared.global",
                "cp.async.commit_group",
                "cp.async.cg.shared.global",
                "cp.async.commit_group",
                "cp.async.wait_group",
                "cp.async.wait_group",
            ],
        ),
        (cvt_kernel, (F32[::1], F32[::1], U32[::1]), ["cvt.rn.bf16x2.f32"]),
        (ex2_kernel, (F32[::1], F32[::1]), ["ex2.approx.ftz.f32"]),
    ],
    ids=["ldmatrix", "mma", "cp-async", "cvt", "ex2"],
)
def test_a_call_is_one_instruction(kernel, signature, expected, card):
    assert instructions(kernel, signature, card) == expected


@pytest.mark.ptx
@CARDS
def test_the_matrix_product_is_made_of_the_instructions_meant(card):
    signature = (U16[:, ::1], U16[:, ::1], F32[:, ::1])
    found = instructions(mma_matmul_kernel, signature, card)
    assert sum(name.startswith("mma.sync") for name in found) == 16
    assert sum(name.startswith("ldmatrix") for name in found) == 8
    assert sum(".trans" in name for name in found) == 4
    assert found.count("cp.async.commit_group") == 2
    assert found.count("cp.async.wait_group") == 1
    # Four a lane before the loop and four in it, some of them in a loop of their own.
    assert 4 <= found.count("cp.async.cg.shared.global") <= 8


@cuda.jit
def wait_of_a_variable_kernel(out):
    cp_async_wait_group(out[0])


@cuda.jit
def index_of_a_row_kernel(out):
    tile = cuda.shared.array((8, 8), uint16, alignment=16)
    out[0] = ldmatrix_x4(tile, 0)[0]


@cuda.jit
def float_sums_kernel(out):
    sums = cuda.local.array(4, int32)
    part = (uint32(0), uint32(0), uint32(0), uint32(0))
    mma_m16n8k16_bf16(sums, part, part[:2])


@cuda.jit
def too_many_registers_kernel(out):
    sums = cuda.local.array(4, float32)
    part = (uint32(0), uint32(0), uint32(0), uint32(0))
    mma_m16n8k16_bf16(sums, part, part)


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("kernel", "message"),
    [
        (wait_of_a_variable_kernel, "n: expected a constant >= 0"),
        (index_of_a_row_kernel, "expected the index of an element"),
        (float_sums_kernel, "acc: expected float32, got int32"),
        (too_many_registers_kernel, "b: expected 2 uint32"),
    ],
)
def test_operands_that_do_not_fit_are_told_when_it_is_compiled(kernel, message):
    with pytest.raises(TypingError, match=message):
        compile_ptx(kernel, (types.int32[::1],))
