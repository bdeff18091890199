"""Correct textbook kernels: right results, nothing reported, in every lane order.

All values are small integers, so that float32 sums are exact in any order.
"""

import math

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32

from ddtree_numba.emulator import emulate

ORDERS = ("forward", "reverse", "shuffled")
RNG = np.random.default_rng(0)


def small(*shape, dtype=np.float32):
    return RNG.integers(-8, 8, shape).astype(dtype)


# -- reductions -----------------------------------------------------------------------


@cuda.jit
def block_sum_kernel(x, out):
    # x [n] f32; out [1] f32
    partial = cuda.shared.array(64, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    partial[t] = x[i] if i < x.size else float32(0)
    cuda.syncthreads()  # every lane's element is there
    width = cuda.blockDim.x // 2
    while width > 0:
        if t < width:
            partial[t] += partial[t + width]
        cuda.syncthreads()  # this level is done before the next reads it
        width //= 2
    if t == 0:
        cuda.atomic.add(out, 0, partial[0])


def block_sum(launch):
    x, out = small(300), np.zeros(1, np.float32)
    launch(block_sum_kernel, 5, 64, x, out)
    return out, [x.sum()]


@cuda.jit(device=True, inline="always")
def warp_sum(value):
    for delta in (16, 8, 4, 2, 1):
        value += cuda.shfl_down_sync(0xFFFFFFFF, value, delta)
    return value


@cuda.jit
def shuffle_sum_kernel(x, out):
    # x [n] f32; out [blocks] f32; a block of up to 1024 lanes
    of_warp = cuda.shared.array(32, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    value = warp_sum(x[i])
    if cuda.laneid == 0:
        of_warp[t // 32] = value
    cuda.syncthreads()  # one sum of every warp
    if t < 32:
        n_warps = cuda.blockDim.x // 32
        total = warp_sum(of_warp[t] if t < n_warps else float32(0))
        if t == 0:
            out[cuda.blockIdx.x] = total


def shuffle_sum(launch):
    x, out = small(2, 96), np.zeros(2, np.float32)
    launch(shuffle_sum_kernel, 2, 96, x.ravel(), out)
    return out, x.sum(axis=1)


@cuda.jit
def syncwarp_sum_kernel(x, out):
    partial = cuda.shared.array(64, float32)
    t, lane = cuda.threadIdx.x, cuda.laneid
    partial[t] = x[t]
    cuda.syncwarp()
    for width in (16, 8, 4, 2, 1):
        if lane < width:
            partial[t] += partial[t + width]
        cuda.syncwarp()  # within the warp, as far as this array goes
    if lane == 0:
        out[t // 32] = partial[t]


def syncwarp_sum(launch):
    x, out = small(2, 32), np.zeros(2, np.float32)
    launch(syncwarp_sum_kernel, 1, 64, x.ravel(), out)
    return out, x.sum(axis=1)


@cuda.jit
def half_warp_max_kernel(x, out):
    i = cuda.threadIdx.x
    mask = 0xFFFF if i < 16 else 0xFFFF0000
    value = x[i]
    for lane_mask in (8, 4, 2, 1):
        value = max(value, cuda.shfl_xor_sync(mask, value, lane_mask))
    out[i] = value


def half_warp_max(launch):
    x, out = small(32, dtype=np.int64), np.zeros(32, np.int64)
    launch(half_warp_max_kernel, 1, 32, x, out)
    return out, np.repeat(x.reshape(2, 16).max(axis=1), 16)


@cuda.jit
def argmax_kernel(x, out):
    # x [rows, n] f32; out [rows] i32: the lowest index of the largest value
    row = cuda.blockIdx.x
    best = cuda.shared.array(1, np.uint64)
    if cuda.threadIdx.x == 0:
        best[0] = np.uint64(0)
    cuda.syncthreads()
    for i in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        rank = np.uint64(int32(x[row, i]) + 1000) << np.uint64(32)
        cuda.atomic.max(best, 0, rank | np.uint64(0xFFFFFFFF - i))
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        out[row] = 0xFFFFFFFF - int(best[0] & np.uint64(0xFFFFFFFF))


def argmax(launch):
    x, out = small(3, 50), np.zeros(3, np.int32)
    launch(argmax_kernel, 3, 32, x, out)
    return out, x.argmax(axis=1)


@cuda.jit
def count_kernel(x, out):
    i = cuda.grid(1)
    found = cuda.syncthreads_count(x[i] > 0)
    if cuda.threadIdx.x == 0:
        out[cuda.blockIdx.x] = found


def count_positive(launch):
    x, out = small(4, 40), np.zeros(4, np.int32)
    launch(count_kernel, 4, 40, x.ravel(), out)
    return out, (x > 0).sum(axis=1)


# -- scans and sorting ----------------------------------------------------------------


@cuda.jit
def scan_kernel(x, out):
    # inclusive sum of one block, two buffers in turn
    buffers = cuda.shared.array((2, 64), int32)
    t = cuda.threadIdx.x
    buffers[0, t] = x[t]
    cuda.syncthreads()
    here, step = 0, 1
    while step < cuda.blockDim.x:
        before = buffers[here, t - step] if t >= step else 0
        buffers[1 - here, t] = buffers[here, t] + before
        here = 1 - here
        step *= 2
        cuda.syncthreads()  # the other buffer is full
    out[t] = buffers[here, t]


def scan(launch):
    x, out = small(64, dtype=np.int32), np.zeros(64, np.int32)
    launch(scan_kernel, 1, 64, x, out)
    return out, np.cumsum(x)


@cuda.jit
def warp_scan_kernel(x, out):
    lane = cuda.laneid
    value = x[lane]
    for delta in (1, 2, 4, 8, 16):
        other = cuda.shfl_up_sync(0xFFFFFFFF, value, delta)
        if lane >= delta:
            value += other
    out[lane] = value


def warp_scan(launch):
    x, out = small(32, dtype=np.int32), np.zeros(32, np.int32)
    launch(warp_scan_kernel, 1, 32, x, out)
    return out, np.cumsum(x)


@cuda.jit
def compact_kernel(x, out, n_kept):
    # keeps the positive elements of one warp, in order
    lane = cuda.laneid
    keep = x[lane] > 0
    kept = cuda.ballot_sync(0xFFFFFFFF, keep)
    if keep:
        out[cuda.popc(kept & cuda.lanemask_lt())] = x[lane]
    if lane == 0:
        n_kept[0] = cuda.popc(kept)


def compact(launch):
    x, out, n_kept = small(32), np.zeros(32, np.float32), np.zeros(1, np.int32)
    launch(compact_kernel, 1, 32, x, out, n_kept)
    return out[: n_kept[0]], x[x > 0]


@cuda.jit
def bitonic_sort_kernel(x):
    # x [64] i32, in place
    keys = cuda.shared.array(64, int32)
    t = cuda.threadIdx.x
    keys[t] = x[t]
    cuda.syncthreads()
    size = 2
    while size <= 64:
        stride = size // 2
        while stride > 0:
            partner = t ^ stride
            if partner > t and (keys[t] > keys[partner]) == ((t & size) == 0):
                keys[t], keys[partner] = keys[partner], keys[t]
            cuda.syncthreads()
            stride //= 2
        size *= 2
    x[t] = keys[t]


def bitonic_sort(launch):
    x = small(64, dtype=np.int32)
    expected = np.sort(x)
    launch(bitonic_sort_kernel, 1, 64, x)
    return x, expected


# -- tiles ----------------------------------------------------------------------------

TILE = 8


@cuda.jit
def transpose_kernel(x, out):
    tile = cuda.shared.array((TILE, TILE + 1), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.grid(2)
    if row < x.shape[0] and column < x.shape[1]:
        tile[ty, tx] = x[row, column]
    cuda.syncthreads()
    column = cuda.blockIdx.y * TILE + tx
    row = cuda.blockIdx.x * TILE + ty
    if row < out.shape[0] and column < out.shape[1]:
        out[row, column] = tile[tx, ty]


def transpose(launch):
    x, out = small(20, 11), np.zeros((11, 20), np.float32)
    launch(transpose_kernel, (2, 3), (TILE, TILE), x, out)
    return out, x.T


@cuda.jit
def matmul_kernel(a, b, c):
    # a [n, k], b [k, m], c [n, m] f32
    tile_a = cuda.shared.array((TILE, TILE), float32)
    tile_b = cuda.shared.array((TILE, TILE), float32)
    tx, ty = cuda.threadIdx.x, cuda.threadIdx.y
    column, row = cuda.grid(2)
    total = float32(0)
    for start in range(0, a.shape[1], TILE):
        inside = row < a.shape[0] and start + tx < a.shape[1]
        tile_a[ty, tx] = a[row, start + tx] if inside else float32(0)
        inside = start + ty < b.shape[0] and column < b.shape[1]
        tile_b[ty, tx] = b[start + ty, column] if inside else float32(0)
        cuda.syncthreads()  # both tiles are full
        for k in range(TILE):
            total += tile_a[ty, k] * tile_b[k, tx]
        cuda.syncthreads()  # both tiles are used up
    if row < c.shape[0] and column < c.shape[1]:
        c[row, column] = total


def matmul(launch):
    a, b, c = small(10, 13), small(13, 9), np.zeros((10, 9), np.float32)
    launch(matmul_kernel, (2, 2), (TILE, TILE), a, b, c)
    return c, a @ b


@cuda.jit
def stencil_kernel(x, out):
    # sums of three neighbours; a halo of one on either side
    near = cuda.shared.array(34, float32)
    t, i = cuda.threadIdx.x, cuda.grid(1)
    n = x.size
    near[t + 1] = x[i] if i < n else float32(0)
    if t == 0:
        near[0] = x[i - 1] if i > 0 else float32(0)
    if t == 31:
        near[33] = x[i + 1] if i + 1 < n else float32(0)
    cuda.syncthreads()
    if i < n:
        out[i] = near[t] + near[t + 1] + near[t + 2]


def stencil(launch):
    x, out = small(70), np.zeros(70, np.float32)
    launch(stencil_kernel, 3, 32, x, out)
    padded = np.pad(x, 1)
    return out, padded[:-2] + padded[1:-1] + padded[2:]


@cuda.jit
def reverse_rows_kernel(x, out):
    # two typed arrays in one dynamic buffer: n floats, then n indices
    n = x.shape[1]
    values = cuda.shared.array(0, float32)
    where = cuda.shared.array(0, int32)[n:]
    t, row = cuda.threadIdx.x, cuda.blockIdx.x
    values[t] = x[row, t]
    where[t] = n - 1 - t
    cuda.syncthreads()
    out[row, t] = values[where[t]]


def reverse_rows(launch):
    x, out = small(2, 20), np.zeros((2, 20), np.float32)
    launch(reverse_rows_kernel, 2, 20, x, out, dynamic_shared=160)
    return out, x[:, ::-1]


# -- histograms -----------------------------------------------------------------------


@cuda.jit
def histogram_kernel(x, counts):
    # x [n] i32 in 0 … 15; counts [16] i32
    of_block = cuda.shared.array(16, int32)
    t = cuda.threadIdx.x
    if t < 16:
        of_block[t] = 0
    cuda.syncthreads()
    for i in range(cuda.grid(1), x.size, cuda.gridsize(1)):
        cuda.atomic.add(of_block, x[i], 1)
    cuda.syncthreads()
    if t < 16:
        cuda.atomic.add(counts, t, of_block[t])


def histogram(launch):
    x, counts = small(200, dtype=np.int32) + 8, np.zeros(16, np.int32)
    launch(histogram_kernel, 3, 32, x, counts)
    return counts, np.bincount(x, minlength=16)


@cuda.jit
def gather_in_place_kernel(rows, indices):
    # rows [n, d]: row i becomes row indices[i]; read everything, then write
    t, d = cuda.threadIdx.x, rows.shape[1]
    held = cuda.local.array(4, float32)
    for j in range(d):
        held[j] = rows[indices[t], j]
    cuda.syncthreads()  # every row is read before the first is overwritten
    for j in range(d):
        rows[t, j] = held[j]


def gather_in_place(launch):
    rows, indices = small(12, 4), RNG.permutation(12)[:6]
    expected = rows.copy()
    expected[:6] = rows[indices]
    launch(gather_in_place_kernel, 1, 6, rows, indices)
    return rows, expected


@cuda.jit
def sum_and_count_kernel(x, sums, counts):
    # x [n] f32; sums [blocks] f32; counts [blocks] i32: of the positive elements
    values = cuda.shared.array(0, float32)  # both in one dynamic buffer
    flags = cuda.shared.array(0, int32)[cuda.blockDim.x :]
    t = cuda.threadIdx.x
    value = x[cuda.grid(1)]
    values[t] = max(value, float32(0))
    flags[t] = 1 if value > float32(0) else 0
    cuda.syncthreads()  # both halves are written before one lane adds them up
    if t == 0:
        for other in range(1, cuda.blockDim.x):
            values[0] += values[other]
            flags[0] += flags[other]
        sums[cuda.blockIdx.x] = values[0]
        counts[cuda.blockIdx.x] = flags[0]


def sum_and_count(launch):
    x = small(2, 32)
    sums, counts = np.zeros(2, np.float32), np.zeros(2, np.int32)
    args = (x.ravel(), sums, counts)
    launch(sum_and_count_kernel, 2, 32, *args, dynamic_shared=32 * 8)
    positive = np.maximum(x, 0)
    return np.stack([sums, counts]), [positive.sum(axis=1), (x > 0).sum(axis=1)]


@cuda.jit
def layer_sums_kernel(volume, out):
    # volume [Z, Y, X] f32; out [Z] f32
    x, y, z = cuda.grid(3)
    if z < volume.shape[0] and y < volume.shape[1] and x < volume.shape[2]:
        cuda.atomic.add(out, z, volume[z, y, x])


def layer_sums(launch):
    volume, out = small(3, 5, 6), np.zeros(3, np.float32)
    launch(layer_sums_kernel, (2, 2, 2), (4, 3, 2), volume, out)
    return out, volume.sum(axis=(1, 2))


@cuda.jit
def early_return_kernel(x, out):
    i = cuda.grid(1)
    if i >= x.size:
        return  # no barrier follows
    out[i] = x[i] * float32(2)


def early_return(launch):
    x, out = small(70), np.zeros(70, np.float32)
    launch(early_return_kernel, 3, 32, x, out)
    return out, x * 2


@cuda.jit
def divergent_collectives_kernel(out):
    i = cuda.laneid
    if i % 2 == 0:
        out[i] = cuda.ballot_sync(0x55555555, i < 8)
    else:
        out[i] = cuda.ballot_sync(0xAAAAAAAA, i < 8)
    cuda.syncthreads()


def divergent_collectives(launch):
    out = np.zeros(32, np.uint32)
    launch(divergent_collectives_kernel, 1, 32, out)
    return out, [0x55, 0xAA] * 16


@cuda.jit
def tree_attention_kernel(q, keys, visible, out, scale):
    # q [rows, heads, d], keys [n, d] f32, visible [rows] bits, out [rows, heads, d]
    row, head, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
    n = keys.shape[0]
    scores = cuda.shared.array(64, float32)
    for j in range(t, n, cuda.blockDim.x):
        score = float32(-math.inf)
        if (visible[row] >> uint32(j)) & uint32(1):
            score = float32(0)
            for k in range(q.shape[2]):
                score += q[row, head, k] * keys[j, k]
            score *= scale
        scores[j] = score
    cuda.syncthreads()
    top = float32(-math.inf)
    for j in range(n):
        top = max(top, scores[j])
    total, weighted = float32(0), float32(0)
    for j in range(n):
        p = math.exp(scores[j] - top)
        total += p
        weighted += p * keys[j, t]
    out[row, head, t] = weighted / total


def tree_attention_case(n_rows=8, n_heads=2, n_keys=24, d=32):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((n_rows, n_heads, d)).astype(np.float32)
    keys = rng.standard_normal((n_keys, d)).astype(np.float32)
    prefix = n_keys - n_rows
    bits = np.tril(np.ones((n_rows, n_rows), int))  # a chain
    bits[3, 1] = 0
    mask = np.hstack([np.ones((n_rows, prefix), int), bits])
    visible = (mask << np.arange(n_keys)).sum(axis=1).astype(np.uint32)
    scores = np.einsum("rhd,jd->rhj", q.astype(float), keys) * 0.2
    scores[np.repeat(mask[:, None], n_heads, axis=1) == 0] = -np.inf
    p = np.exp(scores - scores.max(axis=-1, keepdims=True))
    expected = p / p.sum(axis=-1, keepdims=True) @ keys
    out = np.zeros_like(q)
    return (q, keys, visible, out, np.float32(0.2)), expected


CASES = [
    block_sum, shuffle_sum, syncwarp_sum, half_warp_max, argmax, count_positive, scan,
    warp_scan, compact, bitonic_sort, transpose, matmul, stencil, reverse_rows,
    histogram, gather_in_place, sum_and_count, layer_sums, early_return,
    divergent_collectives,
]  # fmt: skip


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_a_correct_kernel_is_right_and_has_no_race(case, order):
    reports = []

    def launch(kernel, grid, block, *args, **options):
        reports.append(
            emulate(kernel, grid, block, *args, order=order, trace=True, **options)
        )

    got, expected = case(launch)
    assert np.array_equal(got, expected)
    assert [str(race) for report in reports for race in report.races] == []


@pytest.mark.parametrize("trace", [False, True])
def test_tree_attention_agrees_with_numpy(trace):
    args, expected = tree_attention_case()
    results = []
    for order in ORDERS:
        report = emulate(
            tree_attention_kernel, (8, 2), 32, *args, order=order, trace=trace
        )
        assert not trace or report.races == []
        results.append(args[3].copy())
    # Weighted means of unit normals in float32: a few roundings of 6e-8 each.
    assert np.allclose(results[0], expected, rtol=0, atol=1e-6)
    assert np.array_equal(results[0], results[1])
    assert np.array_equal(results[0], results[2])
