"""Every primitive of the emulator against values worked out by hand."""

import math
import sys
import warnings
from typing import NamedTuple

import numba
import numpy as np
import pytest
from numba import cuda, float32, int32, types, uint8, uint32
from numba.cuda import fp16, laneid, libdevice, shared, syncthreads, threadIdx
from numba.cuda.libdevice import float_as_int

from ddtree_numba.emulator import (
    EmulatorError,
    KernelError,
    LaunchError,
    UnsupportedError,
    emulate,
)
from ddtree_numba.emulator.api import Cuda
from ddtree_numba.emulator.lanes import Hub

LANES = np.arange(32)


# -- indices --------------------------------------------------------------------------


@cuda.jit
def write_indices_kernel(out):
    # out [grid size, 8] i64
    i = cuda.grid(1)
    out[i, 0] = cuda.threadIdx.x
    out[i, 1] = cuda.blockIdx.x
    out[i, 2] = cuda.blockDim.x
    out[i, 3] = cuda.gridDim.x
    out[i, 4] = cuda.gridsize(1)
    out[i, 5] = cuda.laneid
    out[i, 6] = cuda.warpsize
    out[i, 7] = cuda.lanemask_lt()


def test_indices_of_one_dimension():
    out = np.zeros((80, 8), np.int64)
    emulate(write_indices_kernel, 2, 40, out)
    i = np.arange(80)
    lane = i % 40 % 32
    expected = [i % 40, i // 40, 40, 2, 80, lane, 32, 2**lane - 1]
    assert np.array_equal(out, np.stack(np.broadcast_arrays(*expected), axis=1))


@cuda.jit
def write_grid3_kernel(out):
    # out [z, y, x] i32
    x, y, z = cuda.grid(3)
    gx, gy, gz = cuda.gridsize(3)
    out[z, y, x] = x + gx * (y + gy * z) + 1000 * gz


def test_grid_of_three_dimensions():
    out = np.zeros((4, 6, 6), np.int32)
    emulate(write_grid3_kernel, (3, 2, 1), (2, 3, 4), out)
    assert np.array_equal(out.ravel(), np.arange(144) + 4000)


def test_lanes_count_x_fastest():
    @cuda.jit
    def kernel(out):
        out[cuda.threadIdx.y, cuda.threadIdx.x] = cuda.laneid

    out = np.zeros((4, 8), np.int32)
    emulate(kernel, 1, (8, 4), out)
    assert np.array_equal(out.ravel(), LANES)


# -- memory ---------------------------------------------------------------------------


def test_two_shared_arrays_on_one_line_are_two_arrays():
    @cuda.jit
    def kernel(out):
        # fmt: off
        a = cuda.shared.array(4, int32); b = cuda.shared.array(4, int32)  # noqa: E702
        # fmt: on
        i = cuda.threadIdx.x
        a[i] = i
        b[i] = 10 * i
        cuda.syncthreads()
        out[i] = a[3 - i] + b[i]

    out = np.zeros(4, np.int32)
    emulate(kernel, 1, 4, out)
    assert out.tolist() == [3, 12, 21, 30]


def test_typed_views_of_dynamic_shared_memory_see_each_others_bytes():
    @cuda.jit
    def kernel(words, floats):
        as_words = cuda.shared.array(0, uint32)
        as_floats = cuda.shared.array(shape=(0,), dtype=np.float32)
        as_bytes = cuda.shared.array(0, uint8)
        i = cuda.threadIdx.x
        as_floats[i] = np.float32(1 << i)
        cuda.syncthreads()
        words[i] = as_words[3 - i]
        floats[i] = as_bytes[8:16].view(np.float32)[i % 2] + as_bytes.size

    words, floats = np.zeros(4, np.uint32), np.zeros(4, np.float32)
    emulate(kernel, 1, 4, words, floats, dynamic_shared=18)
    assert words.tolist() == [0x41000000, 0x40800000, 0x40000000, 0x3F800000]
    assert floats.tolist() == [22, 26, 22, 26]


@cuda.jit(device=True)
def exchange(value, i):
    box = cuda.shared.array(2, int32)
    box[i] = value
    cuda.syncthreads()
    return box


@cuda.jit(device=True, inline="always")
def exchange_inline(value, i):
    box = cuda.shared.array(2, int32)
    box[i] = value
    cuda.syncthreads()
    return box


def test_a_device_function_has_one_shared_array_but_an_inlined_one_has_one_a_call():
    """As the PTX shows: one `_cudapy_smem` for the function, two when it is inlined."""

    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        first = exchange(1, i)
        cuda.syncthreads()
        second = exchange(2, i)
        third = exchange_inline(3, i)
        fourth = exchange_inline(4, i)
        out[i, 0] = first[i]
        out[i, 1] = second[i]
        out[i, 2] = third[i]
        out[i, 3] = fourth[i]

    out = np.zeros((2, 4), np.int32)
    emulate(kernel, 1, 2, out)
    assert out.tolist() == [[2, 2, 3, 4]] * 2


def test_local_arrays_belong_to_one_lane():
    @cuda.jit
    def kernel(out):
        own = cuda.local.array((2, 2), types.int64)
        i = cuda.threadIdx.x
        own[1, 1] = i
        cuda.syncthreads()
        out[i] = own[1, 1]

    out = np.zeros(5, np.int64)
    emulate(kernel, 1, 5, out)
    assert out.tolist() == [0, 1, 2, 3, 4]


TABLE = np.array([5, 7, 11], np.int32)


def test_const_arrays_hold_a_copy_and_module_arrays_can_be_read():
    @cuda.jit
    def kernel(out):
        table = cuda.const.array_like(TABLE)
        i = cuda.threadIdx.x
        out[i] = table[i] + TABLE[2 - i]

    out = np.zeros(3, np.int32)
    emulate(kernel, 1, 3, out)
    assert out.tolist() == [16, 14, 16]


def test_rows_slices_and_views_write_through():
    @cuda.jit
    def kernel(x):
        row = x[1]
        row[2] = 6
        x[0, 1:3][1] = 2
        x[..., 0][1] = 5
        x[2, :] = 9
        x.T[1, 0] = 1
        x[0].view(np.uint32)[0] = 3

    x = np.zeros((3, 3), np.int32)
    emulate(kernel, 1, 1, x)
    assert x.tolist() == [[3, 1, 2], [5, 0, 6], [9, 9, 9]]


def test_arguments_may_be_strided_or_overlap():
    @cuda.jit
    def kernel(backward, columns, whole):
        for i in range(3):
            backward[i] = i
        columns[1, 0] = whole[0, 2] + 40
        total = 0
        for value in whole[0]:
            total += value
        whole[2, 2] = total

    whole = np.zeros((3, 4), np.int32)
    emulate(kernel, 1, 1, whole[0, 2::-1], whole[:, ::2], whole)
    assert whole.tolist() == [[2, 1, 0, 0], [40, 0, 0, 0], [0, 0, 3, 0]]


def test_tuples_of_arrays_are_arguments():
    @cuda.jit
    def kernel(pair, out):
        out[0] = pair[0][1] + pair[1][0] + len(pair)

    out = np.zeros(1, np.int32)
    emulate(kernel, 1, 1, (np.array([1, 2]), np.array([30])), out)
    assert out.tolist() == [34]


def test_loads_and_stores_with_cache_hints():
    @cuda.jit
    def kernel(x):
        cuda.stcg(x, (0, 1), cuda.ldcs(x, (0, 0)) + 1)

    x = np.array([[5, 0]], np.int32)
    table = emulate(kernel, 1, 1, x, trace=True).accesses
    assert x.tolist() == [[5, 6]]
    assert table["kind"].tolist() == ["read", "write"]


@pytest.mark.parametrize("ndim", [1, 2, 3])
def test_array_attributes_are_numpys(ndim):
    @cuda.jit
    def kernel(x, out):
        out[0] = x.ndim
        out[1] = x.size
        out[2] = x.shape[x.ndim - 1]
        out[3] = len(x)
        out[4] = x.itemsize
        out[5] = x.strides[0]

    x, out = np.zeros((2, 3, 5)[:ndim], np.float32), np.zeros(6, np.int64)
    emulate(kernel, 1, 1, x, out)
    assert out.tolist() == [ndim, x.size, x.shape[-1], 2, 4, x.strides[0]]


# -- barriers and warps ---------------------------------------------------------------


def test_syncthreads_counts_ands_and_ors():
    @cuda.jit
    def kernel(out):
        i = cuda.threadIdx.x
        out[i, 0] = cuda.syncthreads_count(i < 3)
        out[i, 1] = cuda.syncthreads_and(i < 3)
        out[i, 2] = cuda.syncthreads_or(i < 3)
        out[i, 3] = cuda.syncthreads_and(i < 40)
        out[i, 4] = cuda.syncthreads_or(i < 0)

    out = np.zeros((40, 5), np.int32)
    emulate(kernel, 1, 40, out)
    assert out.tolist() == [[3, 0, 1, 1, 0]] * 40


@cuda.jit
def shuffle_kernel(x, out):
    # x [32], out [32, 5]
    i = cuda.laneid
    out[i, 0] = cuda.shfl_sync(-1, x[i], 3)
    out[i, 1] = cuda.shfl_sync(0xFFFFFFFF, x[i], i + 33)
    out[i, 2] = cuda.shfl_up_sync(0xFFFFFFFF, x[i], 2)
    out[i, 3] = cuda.shfl_down_sync(0xFFFFFFFF, x[i], 4)
    out[i, 4] = cuda.shfl_xor_sync(0xFFFFFFFF, x[i], 1)


@pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "float64"])
def test_shuffles_move_values_between_lanes(dtype):
    scale = 3 if dtype in ("int32", "float32") else 1 << 33
    x = (LANES * scale).astype(dtype)
    out = np.zeros((32, 5), dtype)
    emulate(shuffle_kernel, 1, 32, x, out)
    assert (out[:, 0] == x[3]).all()
    assert np.array_equal(out[:, 1], x[(LANES + 1) % 32])
    assert np.array_equal(out[:, 2], x[np.where(LANES < 2, LANES, LANES - 2)])
    assert np.array_equal(out[:, 3], x[np.where(LANES > 27, LANES, LANES + 4)])
    assert np.array_equal(out[:, 4], x[LANES ^ 1])


def test_a_shuffle_from_a_lane_that_takes_no_part_is_undefined():
    @cuda.jit
    def kernel(floats, ints):
        i = cuda.laneid
        if i < 16:
            floats[i] = cuda.shfl_down_sync(0xFFFF, float32(i), 8)
            ints[i] = cuda.shfl_down_sync(0xFFFF, i, 8)

    floats, ints = np.zeros(16, np.float32), np.zeros(16, np.int32)
    emulate(kernel, 1, 32, floats, ints)
    assert floats[:8].tolist() == ints[:8].tolist() == list(range(8, 16))
    assert np.isnan(floats[8:]).all()
    assert (ints[8:] == 0x7FFD7FFD).all()


def test_votes():
    @cuda.jit
    def kernel(out):
        i = cuda.laneid
        out[i, 0] = cuda.ballot_sync(0xFFFFFFFF, i % 2)
        out[i, 1] = cuda.any_sync(0xFFFFFFFF, i == 9)
        out[i, 2] = cuda.all_sync(0xFFFFFFFF, i == 9)
        out[i, 3] = cuda.all_sync(0xFFFFFFFF, i < 32)
        out[i, 4] = cuda.eq_sync(0xFFFFFFFF, i < 16)
        out[i, 5] = cuda.match_any_sync(0xFFFFFFFF, i // 16)
        mask, same = cuda.match_all_sync(0xFFFFFFFF, i // 32)
        out[i, 6] = mask + same

    out = np.zeros((32, 7), np.int64)
    emulate(kernel, 1, 32, out)
    # Ballots and matches are int32: with lane 31 in them they are negative.
    assert (out[:, :5] == [-0x55555556, 1, 0, 1, 0]).all()
    assert out[:, 5].tolist() == [0xFFFF] * 16 + [-0x10000] * 16
    assert (out[:, 6] == -1 + 1).all()


def test_a_vote_of_some_lanes_counts_only_those():
    @cuda.jit
    def kernel(out):
        i = cuda.laneid
        if i % 4 == 0:
            out[i] = cuda.ballot_sync(0x11111111, i < 9)
        cuda.syncwarp()

    out = np.zeros(32, np.int64)
    emulate(kernel, 1, 32, out)
    assert (out[::4] == 0x111).all()


def test_activemask_is_the_lanes_in_the_branch():
    @cuda.jit
    def kernel(out):
        i = cuda.laneid
        if i < 5:
            out[i] = cuda.activemask()
        else:
            out[i] = cuda.activemask()

    out = np.zeros(32, np.int64)
    emulate(kernel, 1, 32, out)
    assert out.tolist() == [0x1F] * 5 + [0xFFFFFFE0] * 27


def test_a_short_last_warp_meets_a_full_mask():
    @cuda.jit
    def kernel(out):
        i = cuda.grid(1)
        out[i] = cuda.ballot_sync(0xFFFFFFFF, True)

    out = np.zeros(40, np.int64)
    emulate(kernel, 1, 40, out)
    assert out.tolist() == [-1] * 32 + [0xFF] * 8


# -- atomics --------------------------------------------------------------------------


ATOMICS = {  # name: (start, operands, end, old values)
    "add": (5, [1, 2], 8, [5, 6]),
    "sub": (5, [1, 2], 2, [5, 4]),
    "max": (5, [9, 7], 9, [5, 9]),
    "min": (5, [7, 3], 3, [5, 5]),
    "and_": (7, [6, 3], 2, [7, 6]),
    "or_": (8, [1, 2], 11, [8, 9]),
    "xor": (7, [1, 3], 5, [7, 6]),
    "exch": (5, [1, 2], 2, [5, 1]),
    "inc": (4, [4, 4], 1, [4, 0]),
    "dec": (0, [4, 4], 3, [0, 4]),
    "dec of too much": (9, [4, 4], 3, [9, 4]),
}


@pytest.mark.parametrize("name", ATOMICS)
def test_integer_atomics_return_the_old_value(name):
    operation = getattr(cuda.atomic, name.split()[0])

    def kernel(x, operands, old):
        i = cuda.threadIdx.x
        old[i] = operation(x, (1, 2), operands[i])

    start, operands, end, old = ATOMICS[name]
    x, got = np.full((2, 3), start, np.uint32), np.zeros(2, np.uint32)
    emulate(kernel, 1, 2, x, np.array(operands, np.uint32), got)
    assert x[1, 2] == end
    assert got.tolist() == old
    assert x[0, 0] == start


def test_compare_and_swap():
    @cuda.jit
    def kernel(x, old):
        old[0] = cuda.atomic.cas(x, 1, 5, 6)
        old[1] = cuda.atomic.cas(x, 1, 5, 7)
        old[2] = cuda.atomic.compare_and_swap(x, 4, 8)

    x, old = np.array([4, 5], np.int32), np.zeros(3, np.int32)
    emulate(kernel, 1, 1, x, old)
    assert x.tolist() == [8, 6]
    assert old.tolist() == [5, 6, 4]


def test_float_atomics_round_to_float32_and_nan_never_wins():
    @cuda.jit
    def kernel(x, nan):
        cuda.atomic.add(x, 0, float32(1))
        cuda.atomic.max(x, 1, nan)
        cuda.atomic.max(x, 2, float32(3))
        cuda.atomic.nanmax(x, 3, float32(3))
        cuda.atomic.nanmin(x, 4, nan)

    x = np.array([2**24, 1, np.nan, np.nan, 1], np.float32)
    emulate(kernel, 1, 1, x, np.float32(np.nan))
    assert x[[0, 1, 3, 4]].tolist() == [2**24, 1, 3, 1]
    assert np.isnan(x[2])


LOCKS = {
    "cas": lambda lock: cuda.atomic.cas(lock, 0, 0, 1),
    "compare_and_swap": lambda lock: cuda.atomic.compare_and_swap(lock, 0, 1),
    "exch": lambda lock: cuda.atomic.exch(lock, 0, 1),
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_held_by_another_lane_is_waited_for(name):
    take = LOCKS[name]

    @cuda.jit
    def kernel(lock, total):
        while take(lock) != 0:
            pass
        value = total[0]
        cuda.nanosleep(100)
        total[0] = value + 1
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)

    lock, total = np.zeros(1, np.int32), np.zeros(1, np.int32)
    emulate(kernel, 2, 4, lock, total)
    assert total[0] == 8


# -- scalars --------------------------------------------------------------------------


def test_uint64_meets_cast_integers_as_in_numba():
    @cuda.jit
    def kernel(x, out):
        big = x[0]
        out[0] = big + uint32(3)
        out[1] = uint32(3) * big
        out[2] = big ^ int32(-1)
        out[3] = big << uint8(4)

    x, out = np.array([2**64 - 2], np.uint64), np.zeros(4, np.uint64)
    emulate(kernel, 1, 1, x, out)
    assert out.tolist() == [1, 2**64 - 6, 1, 2**64 - 32]


def test_bit_functions():
    @cuda.jit
    def kernel(x, out):
        out[0] = cuda.popc(x[0])
        out[1] = cuda.clz(x[0])
        out[2] = cuda.ffs(x[0])
        out[3] = cuda.brev(x[0])
        out[4] = cuda.ffs(0)
        out[5] = cuda.popc(np.int32(-1))
        out[6] = cuda.clz(np.uint64(1))
        out[7] = cuda.selp(x[0] > 0, 2, 3)

    out = np.zeros(8, np.uint32)
    emulate(kernel, 1, 1, np.array([0x00F0], np.uint32), out)
    assert out.tolist() == [4, 24, 5, 0x0F000000, 0, 32, 63, 2]


def test_fma_rounds_once():
    @cuda.jit
    def kernel(a, x, y):
        x[0] = cuda.fma(a[0], a[0], -a[1])
        x[1] = a[0] * a[0] - a[1]
        x[2] = cuda.fma(a[2], a[3], a[4])
        y[0] = cuda.fma(y[1], y[1], y[2])

    e = np.float32(2.0**-12)
    # The last product is 1 + 2**-24, a tie in float32, and 2**-60 breaks it; a sum in
    # float64 drops the 2**-60 and then rounds the tie to 1.
    a = np.array([1 + e, 1 + 2 * e, 24929, 673 / 2**24, 2.0**-60], np.float32)
    x = np.zeros(3, np.float32)
    y = np.array([0, 1 + 2.0**-52, -1 - 2.0**-51], np.float64)
    emulate(kernel, 1, 1, a, x, y)
    assert x[0] == 2.0**-24
    assert x[1] == 0
    assert x[2] == 1 + 2.0**-23
    assert y[0] == 2.0**-104


def test_float32_overflow_and_division_by_zero_do_not_warn():
    @cuda.jit
    def kernel(x, out):
        out[0] = x[0] * x[0]
        out[1] = x[1] / x[2]
        out[2] = x[2] / x[2]
        out[3] = -x[1] / x[2]
        out[4] = math.exp(x[0])
        out[5] = math.log(x[2])
        out[6] = math.sqrt(-x[1])
        out[7] = 1.0 / float(0)

    out = np.zeros(8, np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        emulate(kernel, 1, 2, np.array([3e38, 1, 0], np.float32), out)
    inf, nan = np.inf, np.nan
    expected = [inf, inf, nan, -inf, inf, -inf, nan, inf]
    assert np.array_equal(out, np.array(expected, np.float32), equal_nan=True)


def test_floats_become_integers_as_ptx_converts_them():
    """Saturated, not wrapped; NaN is 0 from float32 to at most 32 bits."""

    @cuda.jit
    def kernel(x, stored32, stored_u32, stored_u64, stored8, cast):
        i = cuda.threadIdx.x
        stored32[i] = x[i]
        stored_u32[i] = x[i]
        stored_u64[i] = x[i]
        stored8[i] = x[i]
        cast[0, i] = int(x[i])
        cast[1, i] = np.int32(np.float64(x[i]))
        cast[2, i] = round(x[i])

    x = np.array([2.5, -1.5, 3e9, -3e9, np.inf, -np.inf, np.nan, 300], np.float32)
    outs = [np.zeros(8, t) for t in (np.int32, np.uint32, np.uint64, np.uint8)]
    cast = np.zeros((3, 8), np.int64)
    emulate(kernel, 1, 8, x, *outs, cast)
    top, low, big, small = 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)
    assert outs[0].tolist() == [2, -1, top, low, top, low, 0, 300]
    assert outs[1].tolist() == [2, 0, 3 * 10**9, 0, 2**32 - 1, 0, 0, 300]
    assert outs[2].tolist() == [2, 0, 3 * 10**9, 0, 2**64 - 1, 0, 2**63, 300]
    assert outs[3].tolist() == [2, 0, 255, 0, 255, 0, 0, 44]  # 16 bits, cut off
    assert cast[0].tolist() == [2, -1, 3 * 10**9, -3 * 10**9, big, small, small, 300]
    assert cast[1].tolist() == [2, -1, top, low, top, low, low, 300]
    assert cast[2].tolist() == [2, -2, 3 * 10**9, -3 * 10**9, big, small, small, 300]


def test_max_and_min_of_two_floats_pass_over_nan_and_tell_zeros_apart():
    @cuda.jit
    def kernel(x, out):
        nan, one, zero = x[0], x[1], x[2]
        out[0] = max(nan, one)
        out[1] = max(one, nan)
        out[2] = min(nan, one)
        out[3] = min(one, nan)
        out[4] = math.copysign(one, max(-zero, zero))
        out[5] = math.copysign(one, min(zero, -zero))
        out[6] = max(nan, one, one)  # three: as Python compares them
        out[7] = max(one, x[3]) + min(x[3], one) + max(3, 2) + min(2, 3) + max(4, 4)

    out = np.zeros(8, np.float32)
    emulate(kernel, 1, 1, np.array([np.nan, 1, 0, 7], np.float32), out)
    assert out[[0, 1, 2, 3, 4, 5, 7]].tolist() == [1, 1, 1, 1, 1, -1, 17]
    assert np.isnan(out[6])


def test_functions_of_math_beyond_their_domain_and_with_two_results():
    @cuda.jit
    def kernel(x, out):
        inf, small = x[0], x[1]
        out[0] = math.floor(inf)
        out[1] = math.ceil(-small)
        out[2] = math.trunc(-small * 5)
        out[3], exponent = math.frexp(small * 20)
        out[4] = exponent
        out[5], out[6] = math.modf(-x[2])
        out[7] = math.ldexp(small, 4)
        out[8] = math.ldexp(small, 200)
        out[9] = math.gamma(x[3])
        out[10] = math.gamma(-small * 4)
        out[11] = math.lgamma(x[3])
        out[12] = math.gamma(x[4])

    out = np.zeros(13, np.float32)
    x = np.array([np.inf, 0.25, 2.75, 0, 99], np.float32)
    emulate(kernel, 1, 1, x, out)
    inf, nan = np.inf, np.nan
    expected = [inf, 0, -1, 0.625, 3, -0.75, -2, 4, inf, inf, nan, inf, inf]
    assert np.array_equal(out, np.array(expected, np.float32), equal_nan=True)
    assert np.signbit(out[1])  # ceil(-0.25) is a float: -0.0


def test_half_precision_functions_round_once_and_stay_half():
    @cuda.jit
    def kernel(x, out, flags):
        a, b = x[0], x[1]
        out[0] = fp16.hadd(a, b)
        out[1] = fp16.hfma(a, a, fp16.hneg(fp16.hmul(a, a)))
        out[2] = numba.cuda.fp16.hmax(a, x[2])
        out[3] = fp16.hrcp(b)
        out[4] = math.exp(b)
        flags[0] = fp16.hgt(a, b)
        flags[1] = fp16.heq(x[2], x[2])

    x = np.array([1 + 2.0**-10, 3, np.nan], np.float16)
    out, flags = np.zeros(5, np.float16), np.zeros(2, np.int32)
    emulate(kernel, 1, 1, x, out, flags)
    expected = [4, 2.0**-20, 1 + 2.0**-10, 1 / 3, math.exp(3)]
    assert out.tolist() == np.array(expected, np.float16).tolist()
    assert flags.tolist() == [0, 0]


def test_vectors_have_parts_of_their_type():
    @cuda.jit
    def kernel(out):
        v = cuda.float32x4(cuda.float2(1, 2), cuda.threadIdx.x, 0.1)
        out[0] = v.x + v.y + v.z
        out[1] = v.w
        out[2] = cuda.uchar2(257, -1).x + numba.cuda.int32x3(1, 2, 3.9).z

    out = np.zeros(3)
    emulate(kernel, 1, 1, out)
    assert out.tolist() == [3, np.float32(0.1), 4]
    for wrong in (lambda: cuda.int2(1), lambda: cuda.int2(1, 2).z):
        with pytest.raises(UnsupportedError, match="of 2 has no .z|expected 2 numbers"):
            emulate(wrong, 1, 1)


def test_bits_are_counted_in_the_width_of_a_cast():
    @cuda.jit
    def kernel(out):
        out[0] = cuda.popc(np.int8(-1))
        out[1] = cuda.clz(np.int64(1))
        out[2] = cuda.clz(np.uint16(1))
        out[3] = cuda.brev(np.uint64(1)) >> np.uint64(60)

    out = np.zeros(4, np.int64)
    emulate(kernel, 1, 1, out)
    assert out.tolist() == [8, 63, 15, 8]


def test_shuffles_take_five_bits_of_their_distance():
    @cuda.jit
    def kernel(out):
        i = cuda.laneid
        out[i, 0] = cuda.shfl_up_sync(-1, i, 33)
        out[i, 1] = cuda.shfl_down_sync(-1, i, 32)
        out[i, 2] = cuda.shfl_xor_sync(-1, i, 34)

    out = np.zeros((32, 3), np.int32)
    emulate(kernel, 1, 32, out)
    assert np.array_equal(out[:, 0], np.maximum(LANES - 1, 0))
    assert np.array_equal(out[:, 1], LANES)
    assert np.array_equal(out[:, 2], LANES ^ 2)


def test_float32_stays_float32():
    @cuda.jit
    def kernel(x, out):
        total = float32(0)
        for i in range(x.size):
            total += x[i] * x[i]
        out[0] = math.exp(-total)
        out[1] = total

    x = np.random.default_rng(0).standard_normal(50).astype(np.float32)
    out = np.zeros(2, np.float64)
    emulate(kernel, 1, 1, x, out)
    total = np.float32(0)
    for value in x:
        total += value * value
    assert out[1] == total
    assert out[0] == np.float32(math.exp(-float(total)))


def test_a_python_float_argument_is_float64():
    @cuda.jit
    def kernel(x, half, typed_half, out):
        out[0] = (x[0] + half) - x[0]
        out[1] = (x[0] + typed_half) - x[0]

    out = np.zeros(2)
    x = np.array([2**24], np.float32)
    emulate(kernel, 1, 1, x, 0.5, np.float32(0.5), out)
    assert out.tolist() == [0.5, 0]


def test_wrapped_values_count_as_written():
    @cuda.jit
    def kernel(out):
        box = cuda.shared.array(1, uint32)
        box[0] = -1
        out[0] = box[0]

    out = np.zeros(1, np.int64)
    emulate(kernel, 1, 1, out)
    assert out[0] == 2**32 - 1


def test_integers_wrap_when_they_are_stored_or_cast():
    @cuda.jit
    def kernel(x, y, z, hashes):
        x[0] = x[0] + x[0]
        x[1] = -1
        y[0] = 300
        y[1] = -1
        y[2] = 3.9
        z[0] = np.int32(x[1] * 3) + int32(2**31)
        z[1] = np.uint32(-1) >> 4
        z[2] = types.uint8(260) + numba.int8(200)
        hashes[0] = (hashes[0] ^ (hashes[0] >> 30)) * np.uint64(0xBF58476D1CE4E5B9)

    x, y = np.array([2**30 + 7, 0], np.int32), np.zeros(3, np.uint8)
    z, hashes = np.zeros(3, np.int64), np.array([0x9E3779B97F4A7C15], np.uint64)
    emulate(kernel, 1, 1, x, y, z, hashes)
    assert x.tolist() == [14 - 2**31, -1]
    assert y.tolist() == [44, 255, 3]
    assert z.tolist() == [-3 - 2**31, 0x0FFFFFFF, 4 - 56]
    h = 0x9E3779B97F4A7C15
    assert int(hashes[0]) == (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64


def test_sums_of_int32_do_not_wrap_before_they_are_stored():
    """numba adds two int32 as int64; NumPy would wrap."""

    @cuda.jit
    def kernel(x, n, out):
        out[0] = x[0] + x[0] + n * n

    out = np.zeros(1, np.int64)
    emulate(kernel, 1, 1, np.array([2**31 - 1], np.int32), np.int32(2**30), out)
    assert out[0] == 2**32 - 2 + 2**60


def test_scalars_reinterpret_their_bits():
    @cuda.jit
    def kernel(x, floats, ints):
        floats[0] = libdevice.int_as_float(ints[0])
        floats[1] = np.uint32(ints[0]).view(np.float32)
        ints[1] = cuda.libdevice.float_as_int(x)
        ints[2] = x.view(np.int32)
        floats[2] = libdevice.int_as_float(libdevice.float_as_int(np.float32(math.nan)))

    floats, ints = np.zeros(3, np.float32), np.array([0x40490FDB, 0, 0], np.int32)
    emulate(kernel, 1, 1, np.float32(-2), floats, ints)
    assert floats[:2].tolist() == [np.float32(np.pi)] * 2
    assert np.isnan(floats[2])
    assert ints[1:].tolist() == [-0x40000000] * 2


LIBDEVICE = {
    "expf": (1.0, math.e),
    "exp2f": (3.0, 8.0),
    "logf": (math.e, 1.0),
    "log2f": (8.0, 3.0),
    "fast_expf": (1.0, math.e),
    "fast_logf": (math.e, 1.0),
    "fast_log2f": (0.5, -1.0),
    "rsqrtf": (4.0, 0.5),
    "erff": (0.5, math.erf(0.5)),
    "float2int_rn": (2.5, 2),
    "float2int_rz": (-2.9, -2),
    "exp": (1.0, math.e),
}


@pytest.mark.parametrize("name", LIBDEVICE)
def test_libdevice(name):
    x, expected = LIBDEVICE[name]

    def kernel(out):
        out[0] = getattr(libdevice, name)(float32(x))

    out = np.zeros(1, np.float32)
    emulate(kernel, 1, 1, out)
    # Rounded from float64 to float32 once, the argument once.
    assert out[0] == pytest.approx(expected, rel=2e-7)


def test_numpy_and_math_constants_and_limits():
    @cuda.jit
    def kernel(out):
        out[0] = math.pi
        out[1] = -np.inf
        out[2] = np.finfo(np.float32).max
        out[3] = np.exp(np.float32(0))
        out[4] = max(min(np.float32(3), np.float32(4)), math.floor(2.5))
        out[5] = math.atan2(np.float32(1), np.float32(1))

    out = np.zeros(6, np.float32)
    emulate(kernel, 1, 1, out)
    limit = np.finfo(np.float32).max
    assert (
        out.tolist()
        == np.float32([math.pi, -np.inf, limit, 1, 3, math.pi / 4]).tolist()
    )


# -- names ----------------------------------------------------------------------------


@cuda.jit(device=True)
def factorial(n):
    return 1 if n < 2 else n * factorial(n - 1)


@cuda.jit(device=True)
def thread_times(n):
    return scaled(numba.cuda.threadIdx.x, n)


def scaled(a, b):
    return cuda.blockDim.x * a * b


this_module = sys.modules[__name__]


def test_device_functions_closures_and_plain_functions():
    offset = np.int32(2**31 - 1)  # must not wrap as NumPy's would
    nested = cuda.jit(device=True)(lambda n: n + offset)

    @cuda.jit
    def kernel(out):
        i = cuda.grid(1)

        def inner(n):
            return n + cuda.threadIdx.x

        out[i] = nested(thread_times(10)) + this_module.factorial(4) + inner(100)

    out = np.zeros(3, np.int64)
    emulate(kernel, 1, 3, out)
    assert out.tolist() == [2**31 - 1 + 124 + 31 * i for i in range(3)]


def test_names_imported_from_cuda():
    @cuda.jit
    def kernel(out):
        box = shared.array(3, types.int16)
        i = threadIdx.x
        box[i] = i + numba.cuda.blockDim.x
        syncthreads()
        out[i] = box[2 - i]

    out = np.zeros(3, np.int32)
    emulate(kernel, 1, 3, out)
    assert out.tolist() == [5, 4, 3]


def test_functions_imported_from_libdevice_and_fp16_have_a_body_here():
    hadd = fp16.hadd

    @cuda.jit
    def kernel(out):
        out[0] = float_as_int(float32(1)) + hadd(np.float16(1), np.float16(2))

    out = np.zeros(1, np.int32)
    emulate(kernel, 1, 1, out)
    assert out[0] == 0x3F800000 + 3


def test_a_bare_laneid_is_refused_as_numba_does():
    def kernel(out):
        out[0] = laneid

    with pytest.raises(UnsupportedError, match="cuda.laneid"):
        emulate(kernel, 1, 1, np.zeros(1))


def test_the_kernels_module_is_left_alone():
    before = dict(globals())
    emulate(write_indices_kernel, 1, 1, np.zeros((1, 8), np.int64))
    assert globals() == before
    assert write_indices_kernel.py_func.__globals__["cuda"] is numba.cuda


@pytest.mark.parametrize(
    ("body", "name"),
    [
        (lambda x: cuda.grid_barrier(), "cuda.grid_barrier"),
        (lambda x: cuda.atomic.nand(x, 0, 1), "cuda.atomic.nand"),
        (lambda x: cuda.libdevice.nosuchf(1), "cuda.libdevice.nosuchf"),
        (lambda x: x.sort(), "x.sort"),
    ],
)
def test_an_unknown_name_is_named(body, name):
    with pytest.raises(UnsupportedError, match=name) as caught:
        emulate(body, 1, 1, np.zeros(1))
    assert isinstance(caught.value, EmulatorError | NotImplementedError)


def test_every_stub_of_numba_has_a_meaning_here():
    stubs = pytest.importorskip("numba.cuda.stubs")
    hub = Hub("", (1, 1, 1), (1, 1, 1), "forward", 0, None, lambda: None)
    known = Cuda(hub)
    names = [v for v in vars(stubs).values() if isinstance(v, type)]
    found = 0
    for stub in {*names, *stubs._vector_type_stubs} - {stubs.Stub, stubs.Dim3}:
        if not issubclass(stub, stubs.Stub) or stub is stubs.laneid:
            continue  # laneid is the running lane's, and here none runs
        for name in (stub.__name__, *getattr(stub, "aliases", ())):
            assert getattr(known, name) is not None
            found += 1
        for inner, value in vars(stub).items():
            if isinstance(value, type):
                assert getattr(getattr(known, stub.__name__), inner)
                found += 1
    assert found > 100


def test_an_exception_in_the_kernel_names_its_place():
    @cuda.jit
    def kernel(x):
        if cuda.threadIdx.x == 3:
            x[0] = 1 // x[0]

    with pytest.raises(KernelError, match="ZeroDivisionError") as caught:
        emulate(kernel, 1, 8, np.zeros(1, np.int32))
    place = caught.value.place
    assert (place.kernel, place.lane, place.thread) == ("kernel", 3, (3, 0, 0))
    assert place.lineno == kernel.py_func.__code__.co_firstlineno + 3
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@cuda.jit
def arrival_kernel(n_arrived, arrivals):
    at = cuda.atomic.add(n_arrived, 0, 1)
    arrivals[at] = cuda.grid(1)


def arrivals(order, seed=0):
    found = np.zeros(12, np.int32)
    emulate(arrival_kernel, 3, 4, np.zeros(1, np.int32), found, order=order, seed=seed)
    return found.tolist()


def test_lanes_and_blocks_run_in_the_order_asked_for():
    assert arrivals("forward") == list(range(12))
    assert arrivals("reverse") == list(range(12))[::-1]
    shuffled = arrivals("shuffled")
    assert sorted(shuffled) == list(range(12)) != shuffled
    assert shuffled == arrivals("shuffled") != arrivals("shuffled", seed=1)


# -- launching ------------------------------------------------------------------------


def nothing(x):
    pass


@pytest.mark.parametrize(
    ("arguments", "options", "complaint"),
    [
        ((1, 1025, np.zeros(1)), {}, "block"),
        ((1, (32, 33), np.zeros(1)), {}, "nothing, block: .* 1056 threads"),
        ((0, 1, np.zeros(1)), {}, "grid"),
        ((1.5, 1, np.zeros(1)), {}, "grid"),
        (((1, 70000), 1, np.zeros(1)), {}, "grid"),
        ((1, 1), {}, "missing a required argument: 'x'"),
        ((1, 1, [1, 2]), {}, "x: expected a NumPy array"),
        ((1, 1, np.zeros(1, ">f4")), {}, "byte order"),
        ((1, 1, np.zeros(1)), {"order": "random"}, "order"),
        ((1, 1, np.zeros(1)), {"dynamic_shared": -1}, "dynamic_shared"),
    ],
)
def test_an_impossible_launch_is_refused(arguments, options, complaint):
    with pytest.raises(LaunchError, match=complaint):
        emulate(nothing, *arguments, **options)


def test_too_much_shared_memory_is_refused():
    @cuda.jit
    def kernel():
        box = cuda.shared.array(50_000, uint8)
        box[0] = 1

    with pytest.raises(LaunchError, match="box: .* 50000 bytes"):
        emulate(kernel, 1, 1)


def test_something_that_is_no_kernel_is_refused():
    with pytest.raises(TypeError, match="kernel: expected a function"):
        emulate(3, 1, 1)


# -- report ---------------------------------------------------------------------------


@cuda.jit
def add_neighbours_kernel(x, out):
    box = cuda.shared.array(4, float32)
    i = cuda.threadIdx.x
    box[i] = x[cuda.blockIdx.x, i]
    cuda.syncthreads()
    if i < 3:
        cuda.atomic.add(out, cuda.blockIdx.x, box[i] + box[i + 1])


def test_a_trace_lists_every_access():
    x = np.arange(8, dtype=np.float32).reshape(2, 4)
    out = np.zeros(2, np.float32)
    report = emulate(add_neighbours_kernel, 2, 4, x, out, trace=True)
    assert out.tolist() == [9, 33]
    assert report.races == []
    assert report.counts == {
        "global atomic": 1, "global read": 1, "shared read": 2, "shared write": 1,
    }  # fmt: skip
    table = report.accesses
    assert len(table) == 2 * (4 + 4 + 6 + 3)
    first = add_neighbours_kernel.py_func.__code__.co_firstlineno
    lane2 = table[(table.lane == 2) & (table.block == (1, 0, 0))]
    assert lane2.drop(columns=["block", "lane"]).values.tolist() == [
        [0, "x", "global", (1, 2), 1, "read", first + 4],
        [0, "box", "shared", (2,), 1, "write", first + 4],
        [1, "box", "shared", (2,), 1, "read", first + 7],
        [1, "box", "shared", (3,), 1, "read", first + 7],
        [1, "out", "global", (1,), 1, "atomic", first + 7],
    ]


def test_the_trace_of_strided_views_names_the_elements_of_the_whole_array():
    @cuda.jit
    def kernel(x):
        x[2][::2][1] = 5
        x.T[1, 0] = 6

    whole = np.zeros((3, 8), np.int16)
    table = emulate(kernel, 1, 1, whole[::-1, ::2], trace=True).accesses
    assert table["index"].tolist() == [(2, 2), (0, 1)]
    assert whole[0].tolist() == [0, 0, 0, 0, 5, 0, 0, 0]
    assert whole[2].tolist() == [0, 0, 6, 0, 0, 0, 0, 0]


def test_an_untraced_report_does_not_claim_that_there_are_no_races():
    report = emulate(nothing, 1, 1, np.zeros(1))
    for name in ("races", "counts", "accesses"):
        with pytest.raises(EmulatorError, match="trace=True"):
            getattr(report, name)


def test_records_are_refused_and_their_fields_taken():
    @cuda.jit
    def kernel(x):
        x[cuda.threadIdx.x] += 1

    points = np.zeros(3, [("x", np.float32), ("n", np.int32)])
    with pytest.raises(UnsupportedError, match=r"records.*x\['x'\]"):
        emulate(kernel, 1, 3, points)
    emulate(kernel, 1, 3, points["n"])
    assert points["n"].tolist() == [1, 1, 1]
    assert points["x"].tolist() == [0, 0, 0]


def test_arrays_of_anything_but_numbers_are_refused():
    with pytest.raises(UnsupportedError, match="x: expected an array of numbers"):
        emulate(lambda x: None, 1, 1, np.array(["a"]))


def test_a_named_tuple_keeps_its_names():
    class Layer(NamedTuple):
        scale: float
        x: np.ndarray

    @cuda.jit
    def kernel(layer, out):
        i = cuda.grid(1)
        out[i] = layer.x[i] * layer.scale + layer[0]

    x, out = np.arange(4.0), np.zeros(4)
    emulate(kernel, 1, 4, Layer(2.0, x), out)
    assert out.tolist() == [2, 4, 6, 8]


def test_a_fault_in_a_named_tuple_names_its_field():
    class Layer(NamedTuple):
        x: np.ndarray

    with pytest.raises(EmulatorError, match=r"layer\.x\[3\]"):
        emulate(lambda layer: layer.x[3], 1, 1, Layer(np.zeros(3)))
