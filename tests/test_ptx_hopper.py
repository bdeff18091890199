"""Hopper's PTX instructions: values on a GPU and in the emulator, and compiled.

What the emulator reports of their misuse is in tests/test_emulator_hopper.py.
"""

import numpy as np
import pytest
from numba import cuda, float32, int32, types, uint16, uint32, uint64
from numba.core import config
from tensor_maps import tensor_map_on

from ddtree_numba.backend import compile_ptx, place
from ddtree_numba.bf16 import from_float32
from ddtree_numba.emulator import emulate, wgmma
from ddtree_numba.kernels.ptx import (
    bar_arrive,
    bar_red_or,
    bar_sync,
    cp_async_bulk,
    cp_async_bulk_tensor_3d,
    fence_acq_rel_gpu,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_async_global,
    fence_proxy_tensormap,
    has_reached,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    setmaxnreg_dec,
    setmaxnreg_inc,
    st_global_v2_f32,
    st_shared_v2_f32,
    stmatrix_x4,
    wgmma_4_m64n256k16_bf16_from_registers,
    wgmma_commit_group,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_m64n64k16_bf16,
    wgmma_m64n256k16_bf16,
    wgmma_m64n256k16_bf16_from_registers,
    wgmma_wait_group,
)

SM_90A = (9, 0, "a")
BOX = (1, 64, 64)
PIECE = 64 * 64  # elements of a box


@pytest.fixture
def machine(kernel_executor, monkeypatch):
    """Where a kernel runs; on a GPU compiled for sm_90a."""
    if kernel_executor == "gpu":
        if cuda.get_current_device().compute_capability != (9, 0):
            pytest.skip("needs compute capability 9.0")
        monkeypatch.setattr(config, "FORCE_CUDA_CC", SM_90A)
    return place(kernel_executor)


def numbered(*shape):
    """uint16 elements that are all different, and none is 0."""
    return np.arange(1, np.prod(shape) + 1, dtype=np.uint16).reshape(shape)


def small_integers(seed, *shape):
    """Integers that bfloat16 holds and whose products float32 sums exactly."""
    rng = np.random.default_rng(seed)
    return rng.integers(-8, 9, shape).astype(np.float32)


# -- copies by tensor map -------------------------------------------------------------


@cuda.jit
def box_kernel(boxes, x, y, z, out):
    # boxes [16] u64; x, y, z i32; out [64, 64] u16: the box as it lies in memory
    tile = cuda.shared.array(PIECE, uint16, alignment=1024)
    arrived = cuda.shared.array(1, uint64)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(arrived, 0, 1)
        fence_mbarrier_init()
        fence_proxy_tensormap(boxes, 0)
        mbarrier_arrive_expect_tx(arrived, 0, 2 * PIECE)
        cp_async_bulk_tensor_3d(tile, 0, boxes, 0, x, y, z, arrived, 0)
    cuda.syncthreads()  # the mbarrier is there
    mbarrier_wait(arrived, 0, 0)
    for row in range(64):
        out[row, i] = tile[64 * row + i]


@pytest.mark.parametrize(
    ("x", "y", "z"),
    [(64, 3, 1), (0, 40, 0), (128, 0, 1), (-8, -2, 1), (0, 0, 2)],
    ids=["inside", "last-rows", "last-columns", "before-the-first", "no-such-request"],
)
def test_a_box_arrives_swizzled_and_with_zeros_outside(machine, x, y, z):
    tensor = numbered(2, 80, 160)
    out = machine.put(np.full((64, 64), 7, np.uint16))
    there = machine.put(tensor)
    boxes = tensor_map_on(machine.executor, there, BOX)
    machine.launch(box_kernel, 1, 64, boxes, np.int32(x), np.int32(y), np.int32(z), out)
    padded = np.pad(tensor, ((0, 1), (64, 64), (64, 64)))
    plain = padded[z, y + 64 : y + 128, x + 64 : x + 128]
    row, column = np.indices((64, 64))
    assert (machine.give(out)[row, column ^ (row & 7) << 3] == plain).all()


@cuda.jit
def ring_kernel(boxes, out):
    # boxes of x [1, 256, 64] u16; out [4, 64] u32: sums of the columns of every box
    ring = cuda.shared.array((2, PIECE), uint16, alignment=1024)
    full = cuda.shared.array(2, uint64)
    free = cuda.shared.array(2, uint64)
    i = cuda.threadIdx.x
    if i == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
            mbarrier_init(free, stage, 64)
        fence_mbarrier_init()
    cuda.syncthreads()  # the mbarriers are there
    if i >= 64:
        if i == 64:
            for n in range(4):
                stage, turn = n & 1, n >> 1
                mbarrier_wait(free, stage, turn + 1 & 1)
                mbarrier_arrive_expect_tx(full, stage, 2 * PIECE)
                cp_async_bulk_tensor_3d(
                    ring, (stage, 0), boxes, 0, 0, 64 * n, 0, full, stage
                )
        return
    for n in range(4):
        stage, turn = n & 1, n >> 1
        mbarrier_wait(full, stage, turn & 1)
        total = uint32(0)
        for row in range(64):
            total += uint32(ring[stage, 64 * row + (i ^ (row & 7) << 3)])
        out[n, i] = total
        mbarrier_arrive(free, stage)


def test_two_stages_are_filled_and_freed_in_turns(machine):
    tensor = numbered(1, 256, 64)
    out = machine.put(np.zeros((4, 64), np.uint32))
    there = machine.put(tensor)
    boxes = tensor_map_on(machine.executor, there, BOX)
    machine.launch(ring_kernel, 1, 96, boxes, out)
    assert (machine.give(out) == tensor.reshape(4, 64, 64).sum(1)).all()


# -- barriers, stores, registers ------------------------------------------------------


@cuda.jit
def barriers_kernel(x, out):
    # x [96] i32; out [3, 96] u32
    box = cuda.shared.array(32, uint32)
    i = cuda.threadIdx.x
    if i < 64:
        out[0, i] = bar_red_or(1, 64, x[i])
        out[1, i] = bar_red_or(1, 64, x[i] - x[i])
        bar_sync(2, 96)  # the third warp has written
        out[2, i] = box[31 - i % 32]
    else:
        box[i - 64] = i
        bar_arrive(2, 96)


@pytest.mark.parametrize("where", [None, 0, 37, 70])
def test_named_barriers_bring_a_part_of_a_block_together(machine, where):
    x = np.zeros(96, np.int32)
    if where is not None:
        x[where] = -5
    out = machine.put(np.full((3, 96), 7, np.uint32))
    machine.launch(barriers_kernel, 1, 96, machine.put(x), out)
    found = machine.give(out)
    assert (found[0, :64] == (where in (0, 37))).all()
    assert (found[1, :64] == 0).all()
    assert (found[2, :64] == np.tile(np.arange(95, 63, -1), 2)).all()


@cuda.jit
def stmatrix_kernel(x, out):
    # x [32, 4] u32; out [32, 8] u16
    rows = cuda.shared.array((32, 8), uint16, alignment=16)
    i = cuda.threadIdx.x
    stmatrix_x4(rows, (i, 0), x[i, 0], x[i, 1], x[i, 2], x[i, 3])
    cuda.syncwarp()
    for n in range(8):
        out[i, n] = rows[i, n]


def test_stmatrix_puts_registers_into_rows(machine):
    x = numbered(32, 8).view(np.uint32)  # [lane, matrix]
    out = machine.put(np.zeros((32, 8), np.uint16))
    machine.launch(stmatrix_kernel, 1, 32, machine.put(x), out)
    halves = x.view(np.uint16).reshape(32, 4, 2)
    found = machine.give(out).reshape(4, 8, 8)
    for lane in range(32):
        g, t = lane // 4, lane % 4
        assert (found[:, g, 2 * t : 2 * t + 2] == halves[lane]).all()


@cuda.jit(launch_bounds=(384, 1))
def pairs_kernel(out):
    # out [384, 2] f32
    i = cuda.threadIdx.x
    if i >= 256:
        setmaxnreg_dec(40)
    else:
        setmaxnreg_inc(232)
    pairs = cuda.shared.array((384, 2), float32, alignment=8)
    st_shared_v2_f32(pairs, (i, 0), float32(i), float32(-i))
    st_global_v2_f32(out, (i, 0), pairs[i, 0], pairs[i, 1])


def test_pairs_are_stored_whatever_registers_a_warpgroup_has(machine):
    out = machine.put(np.zeros((384, 2), np.float32))
    machine.launch(pairs_kernel, 1, 384, out)
    i = np.arange(384, dtype=np.float32)
    assert (machine.give(out) == np.stack([i, -i], axis=1)).all()


# -- blocks that wait for one another -------------------------------------------------


@cuda.jit
def meeting_kernel(parts, count, out):
    # parts [blocks], count [1] i32, all 0; out [blocks, blocks] i32: what each reads
    block, i = cuda.blockIdx.x, cuda.threadIdx.x
    if i == 0:
        parts[block] = 10 + block
        fence_acq_rel_gpu()  # what the block posts comes before its count
        cuda.atomic.add(count, 0, 1)
        while True:
            if has_reached(count, 0, cuda.gridDim.x) != 0:
                break
    cuda.syncthreads()  # all blocks have posted their parts
    if i < cuda.gridDim.x:
        out[block, i] = parts[i]


def meeting_case():
    return np.zeros(2, np.int32), np.zeros(1, np.int32), np.zeros((2, 2), np.int32)


def test_blocks_see_what_was_posted_before_the_counts_they_wait_for(machine):
    arguments = [machine.put(x) for x in meeting_case()]
    machine.launch(meeting_kernel, 2, 32, *arguments, cooperative=True)
    assert machine.give(arguments[2]).tolist() == [[10, 11]] * 2


@cuda.jit
def trade_kernel(parts, counts, first, out):
    # parts [blocks, 64] i32; counts [blocks] i32, all first; out [blocks, blocks, 32]
    # i32: of every part the second half, copied as soon as it is posted
    block, i, blocks = cuda.blockIdx.x, cuda.threadIdx.x, cuda.gridDim.x
    halves = cuda.shared.array((4, 32), int32, alignment=16)
    arrived = cuda.shared.array(1, uint64)
    if i == 0:
        mbarrier_init(arrived, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(arrived, 0, 128 * blocks)
    for n in range(i, 64, 32):
        parts[block, n] = 100 * block + n
    cuda.syncthreads()  # the part is posted, the mbarrier is there
    if i == 0:
        fence_acq_rel_gpu()
        cuda.atomic.add(counts, block, 1)
    waits = i < blocks
    while cuda.any_sync(0xFFFFFFFF, waits):
        if waits and has_reached(counts, i, first + 1) != 0:
            fence_proxy_async_global()
            cp_async_bulk(halves, (i, 0), parts, (i, 32), 128, arrived, 0)
            waits = False
    mbarrier_wait(arrived, 0, 0)
    for n in range(blocks):
        out[block, n, i] = halves[n, i]


def trade_case(first=0):
    parts, counts = np.zeros((3, 64), np.int32), np.full(3, first, np.int32)
    return parts, counts, np.int32(first), np.zeros((3, 3, 32), np.int32)


@pytest.mark.parametrize("first", [0, 7])
def test_lanes_copy_what_each_has_waited_for(machine, first):
    arguments = [x if np.ndim(x) == 0 else machine.put(x) for x in trade_case(first)]
    machine.launch(trade_kernel, 3, 32, *arguments, cooperative=True)
    expected = 100 * np.arange(3)[:, None] + np.arange(32, 64)
    assert (machine.give(arguments[3]) == expected).all()
    assert machine.give(arguments[1]).tolist() == [first + 1] * 3


# -- products -------------------------------------------------------------------------


@cuda.jit
def scores_kernel(a_map, b_map, out):
    # a, b [1, 64, 64] bf16; out [64, 64] f32: a · bᵀ
    tiles = cuda.shared.array((2, PIECE), uint16, alignment=1024)
    arrived = cuda.shared.array(1, uint64)
    acc = cuda.local.array(32, float32)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(arrived, 0, 1)
        fence_mbarrier_init()
        mbarrier_arrive_expect_tx(arrived, 0, 4 * PIECE)
        cp_async_bulk_tensor_3d(tiles, (0, 0), a_map, 0, 0, 0, 0, arrived, 0)
        cp_async_bulk_tensor_3d(tiles, (1, 0), b_map, 0, 0, 0, 0, arrived, 0)
    cuda.syncthreads()  # the mbarrier is there
    mbarrier_wait(arrived, 0, 0)
    for n in range(32):
        acc[n] = float32(1e9)  # is not added to
    a = wgmma_descriptor(tiles, (0, 0))
    b = wgmma_descriptor(tiles, (1, 0))
    wgmma_fence(acc, 32)
    wgmma_m64n64k16_bf16(acc, a, 0, b, 0, 0)
    wgmma_m64n64k16_bf16(acc, a, 2, b, 2, 1)
    wgmma_m64n64k16_bf16(acc, a, 4, b, 4, 1)
    wgmma_m64n64k16_bf16(acc, a, 6, b, 6, 1)
    wgmma_commit_group()
    wgmma_wait_group(0, acc, 32)
    row, column = i // 32 * 16 + i % 32 // 4, i % 4 * 2
    for j in range(8):
        st_global_v2_f32(out, (row, 8 * j + column), acc[4 * j], acc[4 * j + 1])
        st_global_v2_f32(out, (row + 8, 8 * j + column), acc[4 * j + 2], acc[4 * j + 3])


def test_scores_of_two_pieces(machine):
    a, b = small_integers(0, 1, 64, 64), small_integers(1, 1, 64, 64)
    there = [machine.put(from_float32(x)) for x in (a, b)]
    maps = [tensor_map_on(machine.executor, x, BOX) for x in there]
    out = machine.put(np.zeros((64, 64), np.float32))
    machine.launch(scores_kernel, 1, 128, *maps, out)
    assert (machine.give(out) == a[0] @ b[0].T).all()


@cuda.jit
def values_kernel(p, v, adds, then_adds, out):
    # p [128, 16] u32: bf16 pairs of [64, 64] as in registers; v [64, 256] bf16
    # adds, then_adds: i32, 0 if what was summed up to there is forgotten
    # out [128, 128] f32: 3 p · v + 1 if both add, as in registers
    tiles = cuda.shared.array((5, PIECE), uint16, alignment=1024)
    sums = cuda.local.array(128, float32)
    weights = cuda.local.array(16, uint32)
    i = cuda.threadIdx.x
    for n in range(16):
        weights[n] = p[i, n]
    for n in range(128):
        sums[n] = float32(1)
    for n in range(128):
        k, column = n // 2, n % 2 * 128 + i
        here = 64 * k + (column & 63 ^ (k & 7) << 3)
        tiles[column >> 6, here] = v[k, column]
    row, half = i // 32 * 16 + i % 16, i % 32 // 16
    for k in range(4):
        stmatrix_x4(
            tiles[4], 64 * row + ((2 * k + half) ^ (row & 7)) * 8,
            weights[4 * k], weights[4 * k + 1], weights[4 * k + 2], weights[4 * k + 3],
        )  # fmt: skip
    fence_proxy_async()
    cuda.syncthreads()  # values and weights are there, for wgmma too
    shared_weights = wgmma_descriptor(tiles, (4, 0))
    values = wgmma_descriptor(tiles, (0, 0))
    wgmma_fence(sums, 128)
    wgmma_m64n256k16_bf16(sums, shared_weights, 0, values, 0, adds)
    wgmma_m64n256k16_bf16(sums, shared_weights, 2, values, 128, 1)
    wgmma_m64n256k16_bf16(sums, shared_weights, 4, values, 256, 1)
    wgmma_m64n256k16_bf16(sums, shared_weights, 6, values, 384, 1)
    wgmma_commit_group()
    wgmma_m64n256k16_bf16_from_registers(sums, weights, 0, values, 0, then_adds)
    wgmma_m64n256k16_bf16_from_registers(sums, weights, 4, values, 128, 1)
    wgmma_m64n256k16_bf16_from_registers(sums, weights, 8, values, 256, 1)
    wgmma_m64n256k16_bf16_from_registers(sums, weights, 12, values, 384, 1)
    wgmma_commit_group()
    wgmma_4_m64n256k16_bf16_from_registers(sums, weights, values)
    wgmma_commit_group()
    wgmma_wait_group(0, sums, 128)
    for n in range(128):
        out[i, n] = sums[n]


def values_case():
    p, v = small_integers(2, 64, 64), small_integers(3, 64, 256)
    parts = [
        wgmma.registers_of_a(from_float32(p[:, k : k + 16])) for k in (0, 16, 32, 48)
    ]
    return np.concatenate(parts, axis=1), from_float32(v), p @ v


@pytest.mark.parametrize(
    ("adds", "times", "more"),
    [((1, 1), 3, 1), ((0, 1), 3, 0), ((1, 0), 2, 0)],
    ids=["to-all", "to-nothing", "to-nothing-later"],
)
def test_values_times_weights_from_memory_and_from_registers(
    machine, adds, times, more
):
    p, v, product = values_case()
    out = machine.put(np.zeros((128, 128), np.float32))
    given = machine.put(p), machine.put(v), *np.int32(adds)
    machine.launch(values_kernel, 1, 128, *given, out)
    expected = times * product + more
    assert (wgmma.sums_of_registers(machine.give(out)) == expected).all()


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_nothing_is_wrong_with_these_kernels_in_any_order(order):
    p, v, _ = values_case()
    out = np.zeros((128, 128), np.float32)
    report = emulate(values_kernel, 1, 128, p, v, 1, 1, out, order=order, trace=True)
    assert report.races == []

    tensor = numbered(1, 256, 64)
    boxes = tensor_map_on("emulator", tensor, BOX)
    out = np.zeros((4, 64), np.uint32)
    report = emulate(ring_kernel, 1, 96, boxes, out, order=order, trace=True)
    assert report.races == []

    report = emulate(meeting_kernel, 2, 32, *meeting_case(), order=order, trace=True)
    assert report.races == []

    report = emulate(trade_kernel, 3, 32, *trade_case(), order=order, trace=True)
    assert report.races == []


# -- compiled -------------------------------------------------------------------------

U16, U32, U64, F32 = types.uint16, types.uint32, types.uint64, types.float32
MAP, I32 = U64[::1], types.int32


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("kernel", "signature", "expected"),
    [
        (
            box_kernel,
            (MAP, I32, I32, I32, U16[:, ::1]),
            {
                "mbarrier.init.shared::cta.b64": 1,
                "fence.mbarrier_init.release.cluster": 1,
                "fence.proxy.tensormap::generic.acquire.sys": 1,
                "mbarrier.arrive.expect_tx.shared::cta.b64": 1,
                "cp.async.bulk.tensor.3d.shared::cluster.global.tile": 1,
                "mbarrier.try_wait.parity.shared::cta.b64": 1,
            },
        ),
        (
            barriers_kernel,
            (I32[::1], U32[:, ::1]),
            {"bar.red.or.pred": 2, "bar.sync 2, 96": 1, "bar.arrive 2, 96": 1},
        ),
        (
            stmatrix_kernel,
            (U32[:, ::1], U16[:, ::1]),
            {"stmatrix.sync.aligned.m8n8.x4.shared.b16": 1},
        ),
        (
            pairs_kernel,
            (F32[:, ::1],),
            {
                "setmaxnreg.dec.sync.aligned.u32 40": 1,
                "setmaxnreg.inc.sync.aligned.u32 232": 1,
                "st.shared.v2.f32": 1,
                "st.global.v2.f32": 1,
            },
        ),
        (
            meeting_kernel,
            (I32[::1], I32[::1], I32[:, ::1]),
            {"fence.acq_rel.gpu": 1, "ld.acquire.gpu.global.s32": 1},
        ),
        (
            trade_kernel,
            (I32[:, ::1], I32[::1], I32, I32[:, :, ::1]),
            {
                "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes": 1,
                "fence.proxy.async.global": 1,
                "ld.acquire.gpu.global.s32": 1,
            },
        ),
        (
            scores_kernel,
            (MAP, MAP, F32[:, ::1]),
            {
                "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16": 4,
                "wgmma.commit_group.sync.aligned": 1,
                "wgmma.wait_group.sync.aligned 0": 1,
                "st.global.v2.f32": 16,
            },
        ),
        (
            values_kernel,
            (U32[:, ::1], U16[:, ::1], int32, int32, F32[:, ::1]),
            {
                "wgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16": 12,
                "fence.proxy.async.shared::cta": 1,
            },
        ),
    ],
    ids=[
        "copy",
        "barriers",
        "stmatrix",
        "registers",
        "meeting",
        "trade",
        "scores",
        "values",
    ],
)
def test_a_call_is_one_instruction(kernel, signature, expected):
    text = compile_ptx(kernel, signature, compute_capability=SM_90A)
    assert ".local" not in text and ".f64" not in text
    assert {name: text.count(name) for name in expected} == expected
