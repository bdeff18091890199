"""Probes of Numba's kernel API: tiny kernels whose results are known by hand.

A probe is one kernel and one launch. `expected` was worked out without the emulator:
from the CUDA and PTX documents, or by NumPy in float64 where a function has no simple
values. The emulator must give it, and a GPU must give what the emulator gives: the same
bits, unless the probe states a tolerance.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numba
import numpy as np
from numba import cuda, float32, float64, int32, int64, uint8, uint32
from numba.cuda import fp16, libdevice

FULL = 0xFFFFFFFF
LANES = np.arange(32)


@dataclass(frozen=True)
class Probe:
    """One launch.

    Attributes
    ----------
    inputs : list
        Arrays and numbers before the outputs.
    expected : list of array
        The outputs' shapes, dtypes and values; they start as `start`, or as zeros.
    rtol : float
        Relative tolerance; 0 asks for the same bits.
    """

    name: str
    kernel: Any
    expected: list[np.ndarray]
    inputs: list[Any] = field(default_factory=list)
    start: list[np.ndarray] | None = None
    grid: Any = 1
    block: Any = 32
    dynamic_shared: int = 0
    rtol: float = 0.0

    def arguments(self) -> list[Any]:
        """Fresh arguments of a launch."""
        start = self.start or [np.zeros_like(x) for x in self.expected]
        given = [*self.inputs, *start]
        return [x.copy() if isinstance(x, np.ndarray) else x for x in given]

    def outputs(self, arguments: list[Any]) -> list[Any]:
        return arguments[len(self.inputs) :]


PROBES: dict[str, Probe] = {}


def probe(make: Callable[[], dict[str, Any]]) -> Callable[[], dict[str, Any]]:
    """Add what `make` describes to `PROBES`, under its name."""
    PROBES[make.__name__] = Probe(make.__name__, **make())
    return make


def difference(got: np.ndarray, expected: np.ndarray, rtol: float) -> str:
    """What is wrong with `got`, or an empty string."""
    if got.dtype != expected.dtype or got.shape != expected.shape:
        return f"{got.dtype}{got.shape}, expected {expected.dtype}{expected.shape}"
    if rtol:
        # Results near zero (sin of pi) are held to the function's scale of 1.
        same = np.isclose(got, expected, rtol=rtol, atol=rtol, equal_nan=True)
    else:
        bits = f"u{got.itemsize}"
        same = got.view(bits) == expected.view(bits)
        if got.dtype.kind == "f":
            same |= np.isnan(got) & np.isnan(expected)
    if same.all():
        return ""
    first = tuple(int(axis[0]) for axis in np.nonzero(~same))
    return f"[{first}] is {got[first]}, expected {expected[first]}; {(~same).sum()} so"


# -- indices --------------------------------------------------------------------------


@cuda.jit
def indices_kernel(out):  # out [grid size, 8] i64
    i = cuda.grid(1)
    out[i, 0] = cuda.threadIdx.x
    out[i, 1] = cuda.blockIdx.x
    out[i, 2] = cuda.blockDim.x
    out[i, 3] = cuda.gridDim.x
    out[i, 4] = cuda.gridsize(1)
    out[i, 5] = cuda.laneid
    out[i, 6] = cuda.warpsize
    out[i, 7] = i


@probe
def indices():
    i = np.arange(80)
    columns = [i % 40, i // 40, 40, 2, 80, i % 40 % 32, 32, i]
    expected = np.stack(np.broadcast_arrays(*columns), axis=1)
    return dict(kernel=indices_kernel, grid=2, block=40, expected=[expected])


@cuda.jit
def grid3_kernel(out):  # out [z, y, x] i32
    x, y, z = cuda.grid(3)
    gx, gy, gz = cuda.gridsize(3)
    out[z, y, x] = x + gx * (y + gy * z) + 1000 * gz


@probe
def three_dimensions():
    expected = np.arange(4000, 4144, dtype=np.int32).reshape(4, 6, 6)
    shape = {"grid": (3, 2, 1), "block": (2, 3, 4)}
    return dict(kernel=grid3_kernel, **shape, expected=[expected])


# -- memory ---------------------------------------------------------------------------


@cuda.jit
def static_shared_kernel(out):  # out [blocks, 64] i32
    box = cuda.shared.array((2, 32), int32)
    i = cuda.threadIdx.x
    box[i // 32, i % 32] = i + 100 * cuda.blockIdx.x
    cuda.syncthreads()
    out[cuda.blockIdx.x, i] = box[1 - i // 32, 31 - i % 32]


@probe
def static_shared_memory():
    expected = np.array([range(63, -1, -1), range(163, 99, -1)], np.int32)
    return dict(kernel=static_shared_kernel, grid=2, block=64, expected=[expected])


@cuda.jit
def dynamic_shared_kernel(words, halves):  # words [4] u32, halves [4] u16
    floats = cuda.shared.array(0, float32)
    as_words = cuda.shared.array(0, uint32)
    as_halves = cuda.shared.array(0, np.uint16)[8:]
    i = cuda.threadIdx.x
    floats[i] = float32(1 << i)
    as_halves[i] = 7 * i
    cuda.syncthreads()
    words[i] = as_words[3 - i]
    halves[i] = as_halves[3 - i]


@probe
def dynamic_shared_memory_in_typed_views():
    words = np.array([0x41000000, 0x40800000, 0x40000000, 0x3F800000], np.uint32)
    halves = np.array([21, 14, 7, 0], np.uint16)
    return dict(
        kernel=dynamic_shared_kernel, block=4, dynamic_shared=24,
        expected=[words, halves],
    )  # fmt: skip


TABLE = np.array([5, 7, 11], np.int32)


@cuda.jit
def local_and_const_kernel(out):  # out [3] i64
    own = cuda.local.array((2, 3), int64)
    table = cuda.const.array_like(TABLE)
    i = cuda.threadIdx.x
    for j in range(3):
        own[0, j] = table[j] * (i + 1)
    out[i] = own[0, 0] + own[0, 2] + TABLE[i]


@probe
def local_const_and_global_arrays():
    expected = np.array([16 + 5, 32 + 7, 48 + 11])
    return dict(kernel=local_and_const_kernel, block=3, expected=[expected])


@cuda.jit
def views_kernel(x, out):  # x [3, 4] i32, out [3, 4] i32
    row = x[1]
    out[0, 0] = row[2]
    out[0, 1] = x[:, 1][2]
    out[0, 2] = x[1:, 2:][1, 0]
    out[0, 3] = x.T[3, 0]
    tail = out[2, 1:]
    tail[0] = x.shape[0] + x.ndim + x.size
    out[1][3] = x[2, ::2][1]


@probe
def slices_rows_and_views():
    x = np.arange(12, dtype=np.int32).reshape(3, 4)
    expected = np.zeros((3, 4), np.int32)
    expected[0] = [6, 9, 10, 3]
    expected[2, 1] = 3 + 2 + 12
    expected[1, 3] = 10
    return dict(kernel=views_kernel, block=1, inputs=[x], expected=[expected])


@cuda.jit
def cache_hints_kernel(x, y, out):  # x [4] f32, y [2, 2] f32, out [2, 4] f32
    i = cuda.threadIdx.x
    at = (i // 2, i % 2)
    cuda.stcg(out[0], i, cuda.ldcg(x, i) + cuda.ldca(y, at))
    cuda.stwt(out[1], i, cuda.ldcs(x, i) - cuda.ldcv(y, at))


@probe
def loads_and_stores_with_cache_hints():
    x = np.arange(4, dtype=np.float32)
    y = x.reshape(2, 2) * np.float32(10)
    expected = np.stack([x + y.ravel(), x - y.ravel()])
    return dict(kernel=cache_hints_kernel, block=4, inputs=[x, y], expected=[expected])


# -- barriers and warps ---------------------------------------------------------------


@cuda.jit
def barriers_kernel(out):  # out [40, 5] i32
    i = cuda.threadIdx.x
    out[i, 0] = cuda.syncthreads_count(int32(i < 3))
    out[i, 1] = cuda.syncthreads_and(int32(i < 3))
    out[i, 2] = cuda.syncthreads_or(int32(i < 3))
    out[i, 3] = cuda.syncthreads_and(int32(i < 40))
    out[i, 4] = cuda.syncthreads_or(int32(i < 0))


@probe
def barriers_that_count_and_and_or():
    expected = np.tile(np.array([3, 0, 1, 1, 0], np.int32), (40, 1))
    return dict(kernel=barriers_kernel, block=40, expected=[expected])


@cuda.jit
def syncwarp_kernel(out):  # out [64] i32
    box = cuda.shared.array(64, int32)
    i = cuda.threadIdx.x
    half = 0xFFFF if i % 32 < 16 else 0x7FFF0000 + 0x80000000
    box[i] = i
    cuda.syncwarp(int32(half))
    value = box[i ^ 15]
    cuda.syncwarp()
    box[i] = value
    cuda.syncwarp()
    out[i] = box[i ^ 16]


@probe
def syncwarp_with_and_without_a_mask():
    expected = np.arange(64, dtype=np.int32) ^ np.int32(15 ^ 16)
    return dict(kernel=syncwarp_kernel, block=64, expected=[expected])


@cuda.jit
def shuffle_kernel(out):  # out [32, 8] i32
    i = int32(cuda.laneid)
    out[i, 0] = cuda.shfl_sync(FULL, i, 3)
    out[i, 1] = cuda.shfl_sync(FULL, i, i + 33)
    out[i, 2] = cuda.shfl_up_sync(FULL, i, 2)
    out[i, 3] = cuda.shfl_down_sync(FULL, i, 4)
    out[i, 4] = cuda.shfl_xor_sync(FULL, i, 5)
    out[i, 5] = cuda.shfl_up_sync(FULL, i, 33)
    out[i, 6] = cuda.shfl_down_sync(FULL, i, 32)
    out[i, 7] = cuda.shfl_xor_sync(FULL, i, 34)


@probe
def shuffles():
    columns = [
        3, (LANES + 1) % 32, np.where(LANES < 2, LANES, LANES - 2),
        np.where(LANES > 27, LANES, LANES + 4), LANES ^ 5,
        np.where(LANES < 1, LANES, LANES - 1), LANES, LANES ^ 2,
    ]  # fmt: skip
    expected = np.stack(np.broadcast_arrays(*columns), axis=1).astype(np.int32)
    return dict(kernel=shuffle_kernel, expected=[expected])


@cuda.jit
def typed_shuffle_kernel(x, y, z, xs, ys, zs):  # i64, f32, f64; each [32]
    i = cuda.laneid
    xs[i] = cuda.shfl_xor_sync(FULL, x[i], 1)
    ys[i] = cuda.shfl_down_sync(FULL, y[i], 8)
    zs[i] = cuda.shfl_sync(FULL, z[i], 31 - i)


@probe
def shuffles_of_64_bits_and_of_floats():
    x = LANES * ((1 << 40) + 1)
    y = (LANES * 0.75).astype(np.float32)
    z = LANES / 3
    expected = [x[LANES ^ 1], y[np.where(LANES > 23, LANES, LANES + 8)], z[::-1].copy()]
    return dict(kernel=typed_shuffle_kernel, inputs=[x, y, z], expected=expected)


@cuda.jit
def vote_kernel(out, ballots):  # out [32, 4] i32, ballots [32, 2] i64
    i = cuda.laneid
    out[i, 0] = cuda.any_sync(FULL, i == 9)
    out[i, 1] = cuda.all_sync(FULL, i == 9)
    out[i, 2] = cuda.all_sync(FULL, i < 32)
    out[i, 3] = cuda.eq_sync(FULL, i < 16)
    ballots[i, 0] = cuda.ballot_sync(FULL, i % 2 == 1)
    if i % 4 == 0:
        ballots[i, 1] = cuda.ballot_sync(0x11111111, i < 9)


@probe
def votes():
    ballots = np.zeros((32, 2), np.int64)
    ballots[:, 0] = -0x55555556  # an int32 with lane 31 in it
    ballots[::4, 1] = 0x111
    expected = [np.tile(np.array([1, 0, 1, 0], np.int32), (32, 1)), ballots]
    return dict(kernel=vote_kernel, expected=expected)


@cuda.jit
def match_kernel(out):  # out [32, 4] i64
    i = int32(cuda.laneid)
    out[i, 0] = cuda.match_any_sync(int32(-1), i // int32(16))
    mask, same = cuda.match_all_sync(int32(-1), i // int32(32))
    out[i, 1] = mask
    mask, different = cuda.match_all_sync(int32(-1), float32(i))
    out[i, 2] = mask
    out[i, 3] = 2 * same + different


@probe
def matches():
    expected = np.zeros((32, 4), np.int64)
    expected[:, 0] = np.where(LANES < 16, 0xFFFF, -0x10000)
    expected[:, 1:] = [-1, 0, 2]
    return dict(kernel=match_kernel, expected=[expected])


@cuda.jit
def active_lanes_kernel(out):  # out [32, 2] i64
    i = cuda.laneid
    if i < 5:
        out[i, 0] = cuda.activemask()
    out[i, 1] = cuda.lanemask_lt()


@probe
def masks_of_active_and_lower_lanes():
    expected = np.zeros((32, 2), np.int64)
    expected[:5, 0] = 0x1F
    expected[:, 1] = 2**LANES - 1
    return dict(kernel=active_lanes_kernel, expected=[expected])


@cuda.jit
def compact_kernel(x, kept, n_kept):  # x [32] i32, kept [32] i32, n_kept [1] i32
    lane = cuda.laneid
    keep = x[lane] > 0
    ballot = cuda.ballot_sync(FULL, keep)
    if keep:
        kept[cuda.popc(ballot & cuda.lanemask_lt())] = x[lane]
    if lane == 0:
        n_kept[0] = cuda.popc(ballot)


@probe
def compaction_by_ballot():
    x = np.where(LANES % 3, -LANES, LANES).astype(np.int32)
    expected = np.zeros(32, np.int32)
    expected[:10] = range(3, 33, 3)
    return dict(
        kernel=compact_kernel, inputs=[x], expected=[expected, np.array([10], np.int32)]
    )


@cuda.jit(device=True)
def sum_of_warp(value):
    for delta in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(FULL, value, delta)
    return value


@cuda.jit(device=True, inline="always")
def doubled(value):
    return value + value


@cuda.jit
def device_functions_kernel(x, out):  # x [64] f32, out [64] f32
    i = cuda.threadIdx.x
    out[i] = doubled(sum_of_warp(x[i]))


@probe
def device_functions():
    x = np.arange(64, dtype=np.float32)
    expected = np.repeat(x.reshape(2, 32).sum(axis=1) * 2, 32)
    return dict(
        kernel=device_functions_kernel, block=64, inputs=[x], expected=[expected]
    )


# -- atomics --------------------------------------------------------------------------


@cuda.jit
def atomic_sums_kernel(ints, floats, doubles):  # [4] i32, [2, 2] f32, [1] f64
    box = cuda.shared.array(4, int32)
    i = cuda.threadIdx.x
    if i < 4:
        box[i] = 0
    cuda.syncthreads()
    cuda.atomic.add(box, i % 4, i)
    cuda.atomic.add(floats, (1, i % 2), float32(0.5))
    cuda.atomic.sub(floats, (0, 1), float32(1))
    cuda.atomic.add(doubles, 0, float64(i))
    cuda.syncthreads()
    if i < 4:
        cuda.atomic.sub(ints, i, box[i])


@probe
def atomic_sums_in_shared_and_global_memory():
    ints = -2 * np.array([480, 496, 512, 528], np.int32)
    floats = np.array([[0, -128], [32, 32]], np.float32)
    return dict(
        kernel=atomic_sums_kernel, grid=2, block=64,
        expected=[ints, floats, np.array([4032.0])],
    )  # fmt: skip


@cuda.jit
def atomic_extremes_kernel(x, ints, floats, old):
    # x [32] i32, ints [2] i32, floats [8] f32, old [2] f32
    i = cuda.threadIdx.x
    cuda.atomic.max(ints, 0, x[i])
    cuda.atomic.min(ints, 1, x[i])
    if i == 0:
        nan, three = floats[2], float32(3)
        old[0] = cuda.atomic.max(floats, 0, three)
        cuda.atomic.max(floats, 1, nan)
        cuda.atomic.max(floats, 3, three)
        cuda.atomic.nanmax(floats, 4, three)
        cuda.atomic.nanmin(floats, 5, nan)
        cuda.atomic.nanmin(floats, 6, three)
        old[1] = cuda.atomic.min(floats, 7, three)


@probe
def atomic_extremes_and_nan():
    x = ((LANES * 7) % 32 - 16).astype(np.int32)
    nan = np.nan
    start = np.array([1, 1, nan, nan, nan, 1, nan, 1], np.float32)
    expected = np.array([3, 1, nan, nan, 3, 1, 3, 1], np.float32)
    ints = np.array([15, -16], np.int32)
    return dict(
        kernel=atomic_extremes_kernel, inputs=[x],
        start=[np.zeros(2, np.int32), start, np.zeros(2, np.float32)],
        expected=[ints, expected, np.ones(2, np.float32)],
    )  # fmt: skip


@cuda.jit
def atomic_bits_kernel(x, old):  # x [9] u32, old [9] u32
    old[0] = cuda.atomic.and_(x, 0, 6)
    old[1] = cuda.atomic.or_(x, 1, 6)
    old[2] = cuda.atomic.xor(x, 2, 6)
    old[3] = cuda.atomic.exch(x, 3, 6)
    old[4] = cuda.atomic.inc(x, 4, 6)
    old[5] = cuda.atomic.inc(x, 5, 6)
    old[6] = cuda.atomic.dec(x, 6, 6)
    old[7] = cuda.atomic.dec(x, 7, 6)
    old[8] = cuda.atomic.dec(x, 8, 6)


@probe
def atomic_bits_and_counters():
    start = np.array([3, 3, 3, 3, 5, 6, 5, 0, 9], np.uint32)
    expected = np.array([2, 7, 5, 6, 6, 0, 4, 6, 6], np.uint32)
    return dict(
        kernel=atomic_bits_kernel, block=1, start=[start, np.zeros_like(start)],
        expected=[expected, start],
    )  # fmt: skip


@cuda.jit
def lock_kernel(lock, total, seen):  # lock [1], total [1], seen [2] i32
    if cuda.threadIdx.x == 0:
        while cuda.atomic.cas(lock, 0, 0, 1) != 0:
            cuda.nanosleep(uint32(100))
        cuda.threadfence()
        # Past the first-level cache, which another block's store does not reach.
        cuda.stcg(total, 0, cuda.ldcg(total, 0) + 1)
        cuda.threadfence()
        cuda.atomic.exch(lock, 0, 0)
        if cuda.blockIdx.x == 0:
            seen[0] = cuda.atomic.compare_and_swap(seen[1:], 5, 6)


@probe
def compare_and_swap_as_a_lock_between_blocks():
    one = np.zeros(1, np.int32)
    return dict(
        kernel=lock_kernel, grid=8,
        start=[one, one, np.array([0, 5], np.int32)],
        expected=[one, one + np.int32(8), np.array([5, 6], np.int32)],
    )  # fmt: skip


# -- integers -------------------------------------------------------------------------


@cuda.jit
def bits_kernel(a, b, c, out):  # a [1] u32, b [1] u64, c [1] i8, out [12] i64
    out[0] = cuda.popc(a[0])
    out[1] = cuda.clz(a[0])
    out[2] = cuda.ffs(a[0])
    out[3] = cuda.brev(a[0])
    out[4] = cuda.popc(b[0])
    out[5] = cuda.clz(b[0])
    out[6] = cuda.ffs(b[0])
    out[7] = cuda.brev(b[0])
    out[8] = cuda.popc(np.int8(c[0]))
    out[9] = cuda.ffs(a[0] - a[0])
    out[10] = cuda.clz(np.int64(1))
    out[11] = cuda.selp(a[0] > 5, 2, 3)


@probe
def bit_functions():
    inputs = [
        np.array([0xF0], np.uint32), np.array([1 << 40], np.uint64),
        np.array([-1], np.int8),
    ]  # fmt: skip
    expected = np.array([4, 24, 5, 0x0F000000, 1, 23, 41, 1 << 23, 8, 0, 63, 2])
    return dict(kernel=bits_kernel, block=1, inputs=inputs, expected=[expected])


@cuda.jit
def integer_kernel(a, b, out, narrow):  # a, b [n] i32, out [8, n] i64, narrow [4, n] u8
    i = cuda.threadIdx.x
    out[0, i] = a[i] // b[i]
    out[1, i] = a[i] % b[i]
    out[2, i] = a[i] * b[i]
    out[3, i] = a[i] >> 3
    out[4, i] = a[i] << 35
    out[5, i] = ~a[i] ^ b[i]
    out[6, i] = abs(b[i]) + max(a[i], b[i]) - min(a[i], b[i])
    out[7, i] = int32(a[i] * b[i])
    narrow[0, i] = a[i] + b[i]
    narrow[1, i] = uint8(a[i]) + uint8(250)
    narrow[2, i] = -a[i]
    narrow[3, i] = (a[i] & 3) | (b[i] << 2)


@probe
def integers_divide_shift_and_wrap():
    a = np.array([7, -7, 2**31 - 1, -(2**31), 1000, 0], np.int32)
    b = np.array([3, 3, 100, -7, -13, 5], np.int32)
    x, y = a.astype(np.int64), b.astype(np.int64)
    out = [
        x // y, x % y, x * y, x >> 3, x << 35, ~x ^ y,
        abs(y) + np.maximum(x, y) - np.minimum(x, y), (x * y).astype(np.int32),
    ]  # fmt: skip
    narrow = [x + y, x % 256 + 250, -x, (x & 3) | (y << 2)]
    expected = [np.stack(out), np.stack(narrow).astype(np.uint8)]
    return dict(kernel=integer_kernel, block=6, inputs=[a, b], expected=expected)


@cuda.jit
def hash_kernel(x, out):  # x [32] u64, out [32] u64
    i = cuda.threadIdx.x
    h = x[i]
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    out[i] = h ^ (h >> np.uint64(31))


@probe
def unsigned_64_bits_wrap():
    x = np.array([n * 0x9E3779B97F4A7C15 % 2**64 for n in range(1, 33)], np.uint64)
    expected = []
    for h in x.tolist():
        h = (h ^ h >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        h = (h ^ h >> 27) * 0x94D049BB133111EB % 2**64
        expected.append(h ^ h >> 31)
    return dict(
        kernel=hash_kernel, inputs=[x], expected=[np.array(expected, np.uint64)]
    )


# -- floats ---------------------------------------------------------------------------


@cuda.jit
def conversion_kernel(x, i32, u32, i64, u64, i16, u8, double):
    # x [n] f32; i32 u32 i64 u64 i16 u8 [n]; double [3, n] i64
    i = cuda.threadIdx.x
    i32[i] = x[i]
    u32[i] = x[i]
    i64[i] = int(x[i])
    u64[i] = x[i]
    i16[i] = x[i]
    u8[i] = x[i]
    # Not NaN: the compiler may fold the widening away, and PTX's answer with it.
    double[0, i] = int32(float64(x[i])) if x[i] == x[i] else 0
    double[1, i] = int64(float64(x[i]))
    double[2, i] = round(x[i])


@probe
def floats_become_integers():
    """PTX `cvt.rzi` saturates; NaN is 0 from f32 to at most 32 bits."""
    x = [2.5, -1.5, 3e9, -3e9, np.inf, -np.inf, np.nan, 300]
    top, low, big, small = 2**31 - 1, -(2**31), 2**63 - 1, -(2**63)
    e9 = 3 * 10**9
    return dict(
        kernel=conversion_kernel, block=8, inputs=[np.array(x, np.float32)],
        expected=[
            np.array([2, -1, top, low, top, low, 0, 300], np.int32),
            np.array([2, 0, e9, 0, 2**32 - 1, 0, 0, 300], np.uint32),
            np.array([2, -1, e9, -e9, big, small, small, 300], np.int64),
            np.array([2, 0, e9, 0, 2**64 - 1, 0, 2**63, 300], np.uint64),
            np.array([2, -1, 32767, -32768, 32767, -32768, 0, 300], np.int16),
            np.array([2, 0, 255, 0, 255, 0, 0, 44], np.uint8),
            np.array([
                [2, -1, top, low, top, low, 0, 300],
                [2, -1, e9, -e9, big, small, small, 300],
                [2, -2, e9, -e9, big, small, small, 300],
            ]),
        ],
    )  # fmt: skip


@cuda.jit
def special_kernel(x, out):  # x [6] f32: 3e38, 1, 0, nan, inf, 1e-45; out [14] f32
    huge, one, zero, nan, inf, tiny = x[0], x[1], x[2], x[3], x[4], x[5]
    out[0] = huge * huge
    out[1] = one / zero
    out[2] = zero / zero
    out[3] = -one / zero
    out[4] = inf - inf
    out[5] = tiny * float32(0.5)
    out[6] = tiny + tiny
    out[7] = max(nan, one)
    out[8] = max(one, nan)
    out[9] = min(nan, one)
    out[10] = min(zero, -zero)
    out[11] = max(-zero, zero)
    out[12] = math.sqrt(-one)
    out[13] = float32(1) if nan != nan and not nan > one else float32(0)


@probe
def infinities_nan_and_denormals():
    x = np.array([3e38, 1, 0, np.nan, np.inf, 1e-45], np.float32)
    inf, nan = np.inf, np.nan
    expected = [inf, inf, nan, -inf, nan, 0, 2 * x[5], 1, 1, 1, -0.0, 0.0, nan, 1]
    expected = np.array(expected, np.float32)
    return dict(kernel=special_kernel, block=1, inputs=[x], expected=[expected])


@cuda.jit
def rounding_kernel(a, x, y):  # a [5] f32, x [5] f32, y [2] f64 (y[1] is read)
    x[0] = cuda.fma(a[0], a[0], -a[1])
    x[1] = cuda.fma(a[2], a[3], a[4])
    x[2] = a[0] / a[2]
    x[3] = math.sqrt(a[2])
    x[4] = float32(y[1])
    y[0] = cuda.fma(y[1], y[1], float64(-1))


@probe
def fused_multiply_add_division_and_root_round_once():
    e = np.float32(2.0**-12)
    # a[2] * a[3] is 1 + 2**-24, a tie in float32, which 2**-60 breaks upwards.
    a = np.array([1 + e, 1 + 2 * e, 24929, 673 / 2**24, 2.0**-60], np.float32)
    y = 1 + 2.0**-52
    x = [
        2.0**-24, 1 + 2.0**-23, a[0] / a[2], np.sqrt(a[2]), 1,
    ]  # fmt: skip
    return dict(
        kernel=rounding_kernel, block=1, inputs=[a],
        start=[np.zeros(5, np.float32), np.array([0, y])],
        expected=[np.array(x, np.float32), np.array([2.0**-51 + 2.0**-104, y])],
    )  # fmt: skip


@cuda.jit
def whole_kernel(x, out, exponents):  # x [n] f32, out [7, n] f32, exponents [n] i32
    i = cuda.threadIdx.x
    out[0, i] = math.floor(x[i])
    out[1, i] = math.ceil(x[i])
    out[2, i] = math.trunc(x[i])
    fraction, whole = math.modf(x[i])
    out[3, i] = fraction
    out[4, i] = whole
    mantissa, exponent = math.frexp(x[i])
    out[5, i] = math.ldexp(mantissa, int32(3))
    out[6, i] = math.copysign(math.fabs(x[i]), -x[i])
    exponents[i] = exponent


@probe
def parts_of_floats():
    x = np.array([2.75, -2.75, 0.5, -0.25, 1e10, 3], np.float32)
    fraction, whole = np.modf(x)
    mantissa, exponents = np.frexp(x)
    out = [np.floor(x), np.ceil(x), np.trunc(x), fraction, whole, mantissa * 8, -x]
    expected = [np.stack(out).astype(np.float32), exponents.astype(np.int32)]
    return dict(kernel=whole_kernel, block=6, inputs=[x], expected=expected)


UNARY = (
    "exp exp2 expm1 log log2 log10 log1p sqrt sin cos tan asin acos atan sinh cosh "
    "tanh asinh acosh atanh erf erfc gamma lgamma degrees radians"
).split()


@cuda.jit
def unary_kernel(x, out):  # x [n] f32 or f64, out [26, n]
    i = cuda.threadIdx.x
    a = x[i]
    out[0, i] = math.exp(a)
    out[1, i] = math.exp2(a)
    out[2, i] = math.expm1(a)
    out[3, i] = math.log(a)
    out[4, i] = math.log2(a)
    out[5, i] = math.log10(a)
    out[6, i] = math.log1p(a)
    out[7, i] = math.sqrt(a)
    out[8, i] = math.sin(a)
    out[9, i] = math.cos(a)
    out[10, i] = math.tan(a)
    out[11, i] = math.asin(a)
    out[12, i] = math.acos(a)
    out[13, i] = math.atan(a)
    out[14, i] = math.sinh(a)
    out[15, i] = math.cosh(a)
    out[16, i] = math.tanh(a)
    out[17, i] = math.asinh(a)
    out[18, i] = math.acosh(a + 1)
    out[19, i] = math.atanh(a)
    out[20, i] = math.erf(a)
    out[21, i] = math.erfc(a)
    out[22, i] = math.gamma(a)
    out[23, i] = math.lgamma(a)
    out[24, i] = math.degrees(a)
    out[25, i] = math.radians(a)


def unary_results(x):
    rows = []
    for name in UNARY:
        given = [v + (name == "acosh") for v in x.astype(float).tolist()]
        rows.append([getattr(math, name)(v) for v in given])
    return np.array(rows).astype(x.dtype)


@probe
def functions_of_math_in_float32():
    x = np.array([0.125, 0.3, 0.5, 0.77, 0.95], np.float32)
    expected = [unary_results(x)]
    # libdevice errs by up to 6 ulp (erfc, lgamma), an ulp being 1.2e-7 at most.
    return dict(kernel=unary_kernel, block=5, inputs=[x], expected=expected, rtol=1e-6)


@probe
def functions_of_math_in_float64():
    x = np.array([0.125, 0.3, 0.5, 0.77, 0.95])
    expected = [unary_results(x)]
    # Up to 10 ulp (gamma), an ulp being 2.2e-16 at most.
    return dict(kernel=unary_kernel, block=5, inputs=[x], expected=expected, rtol=4e-15)


@cuda.jit
def binary_kernel(a, b, out):  # a, b [n] f32, out [8, n] f32
    i = cuda.threadIdx.x
    out[0, i] = math.atan2(a[i], b[i])
    out[1, i] = math.pow(a[i], b[i])
    out[2, i] = math.hypot(a[i], b[i])
    out[3, i] = math.fmod(a[i], b[i])
    out[4, i] = math.remainder(a[i], b[i])
    out[5, i] = a[i] ** b[i]
    out[6, i] = cuda.cbrt(a[i])
    out[7, i] = a[i] % b[i]


@probe
def functions_of_two_floats():
    a = np.array([0.5, 3.25, 7.75, 100], np.float32)
    b = np.array([2, -0.75, 1.5, 0.25], np.float32)
    x, y = a.astype(float), b.astype(float)
    out = [
        np.arctan2(x, y), x**y, np.hypot(x, y), np.fmod(x, y),
        [math.remainder(p, q) for p, q in zip(x, y, strict=True)],
        x**y, np.cbrt(x), x % y,
    ]  # fmt: skip
    expected = np.array(out).astype(np.float32)
    inputs = [a, b]
    # powf errs by up to 4 ulp.
    return dict(
        kernel=binary_kernel, block=4, inputs=inputs, expected=[expected], rtol=1e-6
    )


@cuda.jit
def libdevice_kernel(x, out):  # x [n] f32, out [9, n] f32
    i = cuda.threadIdx.x
    out[0, i] = libdevice.exp2f(x[i])
    out[1, i] = libdevice.fast_expf(x[i])
    out[2, i] = libdevice.fast_log2f(x[i])
    out[3, i] = libdevice.fast_logf(x[i])
    out[4, i] = libdevice.rsqrtf(x[i])
    out[5, i] = libdevice.fmaxf(x[i], float32(1.5))
    out[6, i] = libdevice.rintf(x[i])
    out[7, i] = libdevice.fast_fdividef(float32(1), x[i])
    out[8, i] = cuda.libdevice.erff(x[i])


@probe
def functions_of_libdevice():
    x = np.array([0.3, 1.25, 2.5, 7], np.float32)
    y = x.astype(float)
    out = [
        np.exp2(y), np.exp(y), np.log2(y), np.log(y), 1 / np.sqrt(y),
        np.maximum(y, 1.5), np.rint(y), 1 / y, [math.erf(v) for v in y],
    ]  # fmt: skip
    # fast_expf errs by 2 + 1.2 |x| ulp of 1.2e-7, fast logarithms by 2**-21.4 near 1.
    return dict(
        kernel=libdevice_kernel, block=4, inputs=[x],
        expected=[np.array(out).astype(np.float32)], rtol=2e-6,
    )  # fmt: skip


@cuda.jit
def reinterpret_kernel(x, floats, ints):  # x [n] i32, floats [n] f32, ints [2, n] i64
    i = cuda.threadIdx.x
    floats[i] = libdevice.int_as_float(x[i])
    ints[0, i] = libdevice.float_as_int(-floats[i])
    ints[1, i] = libdevice.double_as_longlong(float64(floats[i]))


@probe
def bits_read_as_another_type():
    x = np.array([0x40490FDB, 0x3F800000, 0, -(2**31)], np.int32)
    floats = x.view(np.float32)
    ints = [(-floats).view(np.int32), floats.astype(float).view(np.int64)]
    return dict(
        kernel=reinterpret_kernel, block=4, inputs=[x],
        expected=[floats, np.stack(ints).astype(np.int64)],
    )  # fmt: skip


@cuda.jit
def half_kernel(x, out, flags):  # x [4] f16, out [10] f16, flags [3] i32
    a, b, c, nan = x[0], x[1], x[2], x[3]
    out[0] = fp16.hadd(a, b)
    out[1] = fp16.hsub(a, b)
    out[2] = fp16.hmul(b, c)
    out[3] = fp16.hdiv(a, b)
    out[4] = fp16.hfma(a, a, fp16.hneg(fp16.hmul(a, a)))
    out[5] = fp16.hmax(a, nan)
    out[6] = fp16.habs(fp16.hneg(b))
    out[7] = fp16.hfloor(c)
    out[8] = fp16.hrint(c)
    out[9] = b * c + a  # the product is exact: fused or not, it is the same
    flags[0] = fp16.hgt(b, a)
    flags[1] = fp16.heq(nan, nan)
    flags[2] = a < b


@probe
def half_precision():
    a, b, c = (np.float16(v) for v in (1 + 2.0**-10, 3, 2.5))
    out = [a + b, a - b, b * c, a / b, 2.0**-20, a, b, 2, 2, b * c + a]
    return dict(
        kernel=half_kernel, block=1, inputs=[np.array([a, b, c, np.nan], np.float16)],
        expected=[np.array(out, np.float16), np.array([1, 0, 1], np.int32)],
    )  # fmt: skip


@cuda.jit
def half_functions_kernel(x, out):  # x [n] f16, out [8, n] f16
    i = cuda.threadIdx.x
    out[0, i] = fp16.hsqrt(x[i])
    out[1, i] = fp16.hexp(x[i])
    out[2, i] = fp16.hlog2(x[i])
    out[3, i] = fp16.hsin(x[i])
    out[4, i] = fp16.hcos(x[i])
    out[5, i] = fp16.hrcp(x[i])
    out[6, i] = fp16.htanh(x[i])
    out[7, i] = math.exp2(x[i])


@probe
def functions_of_halves():
    x = np.array([0.25, 1, 1.75, 3], np.float16)
    y = x.astype(float)
    out = [
        np.sqrt(y), np.exp(y), np.log2(y), np.sin(y), np.cos(y), 1 / y, np.tanh(y),
        np.exp2(y),
    ]  # fmt: skip
    # Two ulp of 2**-11.
    return dict(
        kernel=half_functions_kernel, block=4, inputs=[x],
        expected=[np.array(out).astype(np.float16)], rtol=1e-3,
    )  # fmt: skip


@cuda.jit
def vector_kernel(x, out):  # x [4] f32, out [4] f64
    v = cuda.float32x4(x[0], x[1], x[2], x[3])
    w = cuda.float3(cuda.float2(v.w, v.z), v.y)
    n = cuda.int2(7, -8)
    out[0] = v.x + v.w
    out[1] = w.x - w.z
    out[2] = n.x * n.y
    out[3] = cuda.double2(v.x, 0.1).y


@probe
def vector_types():
    x = np.array([1, 2, 3, 5], np.float32)
    expected = np.array([6, 3, -56, 0.1])
    return dict(kernel=vector_kernel, block=1, inputs=[x], expected=[expected])


THRESHOLD = np.int32(3)


@cuda.jit
def language_kernel(x, out):  # x [32] i32, out [32, 4] i32
    i = cuda.threadIdx.x
    total, steps = 0, 0
    for j in range(i, -1, -3):
        if j == 7:
            continue
        total += x[j]
    n = i
    while n > THRESHOLD:
        n = n // 2 if n % 2 == 0 else 3 * n + 1
        steps += 1
        if steps == 9:
            break
    out[i, 0], out[i, 1] = (total, steps)
    out[i, 2] = n if 1 < n <= 3 or n == 0 else -n
    out[i, 3] = len(x) + sum((1, 2, 3)) - (not steps)


@probe
def loops_branches_and_tuples():
    x = (LANES * 5 + 1).astype(np.int32)
    rows = []
    for i in range(32):
        total = sum(5 * j + 1 for j in range(i, -1, -3) if j != 7)
        n, steps = i, 0
        while n > 3 and steps < 9:
            n, steps = (n // 2 if n % 2 == 0 else 3 * n + 1), steps + 1
        rows.append([total, steps, n if n in (0, 2, 3) else -n, 38 - (steps == 0)])
    expected = np.array(rows, np.int32)
    return dict(kernel=language_kernel, inputs=[x], expected=[expected])


def types_of(arguments: list[Any]) -> tuple:
    """Numba's types of a launch's arguments."""
    return tuple(numba.typeof(x) for x in arguments)
