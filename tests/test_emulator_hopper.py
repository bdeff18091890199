"""Hopper's asynchronous instructions in the emulator: values, and what goes wrong.

The kernels here call the emulation's own functions, without a compiler's view of them;
tests/test_ptx.py holds the instructions that a GPU executes to the same.
"""

import numpy as np
import pytest
from numba import cuda, float32, int32, uint16, uint64
from test_emulator_bugs import marked_line

from ddtree_numba.bf16 import from_float32
from ddtree_numba.emulator import (
    BarrierDivergenceError,
    BarrierUseError,
    DeadlockError,
    InFlightError,
    KernelError,
    LaunchError,
    MisalignedError,
    OutOfBoundsError,
    UnfencedError,
    UninitialisedReadError,
    UnsupportedError,
    WarpgroupError,
    emulate,
    emulation,
    hopper,
    traced,
    wgmma,
)
from ddtree_numba.emulator.bulk import Box, TensorMap
from ddtree_numba.emulator.hopper import tensor_map
from ddtree_numba.kernels import verify_attn as general
from ddtree_numba.kernels import verify_attn_wgmma as attention
from ddtree_numba.tree import DraftTree

ORDERS = ("forward", "reverse", "shuffled")
every_order = pytest.mark.parametrize("order", ORDERS)


def instruction(executed):
    """A name for kernels below that stands for one of the emulation's functions."""

    def only_emulated(*args):
        raise NotImplementedError

    emulation(only_emulated)(executed)
    return only_emulated


@instruction
def multiply_64(lane, sums, a, b, accumulate):
    hopper.multiply(lane, sums, a, b, n=64, accumulate=accumulate)


@instruction
def multiply_rows_of_b(lane, sums, a, b, accumulate):
    """B as [16, 64], stored transposed."""
    hopper.multiply(lane, sums, a, b, n=64, accumulate=accumulate, b_rows=True)


@instruction
def multiply_columns_of_a(lane, sums, a, b, accumulate):
    hopper.multiply(lane, sums, a, b, n=64, accumulate=accumulate, a_columns=True)


@instruction
def multiply_256(lane, sums, a, b, accumulate):
    hopper.multiply(lane, sums, a, b, n=256, accumulate=accumulate, b_rows=True)


barrier_sync = instruction(hopper.barrier_sync)
barrier_arrive = instruction(hopper.barrier_arrive)
mbarrier_init = instruction(hopper.mbarrier_init)
mbarrier_arrive = instruction(hopper.mbarrier_arrive)
mbarrier_wait = instruction(hopper.mbarrier_wait)
fence_mbarriers = instruction(hopper.fence_mbarriers)
fence_proxy = instruction(hopper.fence_proxy)
fence_proxy_global = instruction(hopper.fence_proxy_global)
fence_products = instruction(hopper.fence_products)
commit_products = instruction(hopper.commit_products)
wait_for_products = instruction(hopper.wait_for_products)
bulk_copy = instruction(hopper.bulk_copy)
bulk_load = instruction(hopper.bulk_load)
shared_address = instruction(hopper.shared_address)
wait_for_at_least = instruction(hopper.wait_for_at_least)
set_max_registers = instruction(hopper.set_max_registers)

# The descriptor of a tile of 128-byte lines: swizzle 128, groups of 8 lines 1024 bytes
# apart, and groups of 64 columns 8192 bytes apart where the operand is transposed.
TILE = 1 << 62 | 1024 >> 4 << 32 | 8192 >> 4 << 16


def small_integers(seed, *shape):
    """Integers that bfloat16 holds and whose products float32 sums exactly."""
    rng = np.random.default_rng(seed)
    return rng.integers(-8, 9, shape).astype(np.float32)


def fault(error, kernel, *args, block=128, trace=False, order="forward", **options):
    """The error that a kernel with one marked line must raise there."""
    with pytest.raises(error) as caught:
        emulate(kernel, 1, block, *args, trace=trace, order=order, **options)
    assert type(caught.value) is error
    assert caught.value.lineno == marked_line(kernel)
    return str(caught.value)


# -- layouts --------------------------------------------------------------------------


def test_sums_lie_in_registers_as_the_table_says():
    sums = np.arange(64 * 24).reshape(64, 24)
    registers = wgmma.registers_of_sums(sums)
    for lane in (0, 5, 38, 127):
        w, g, t = lane // 32, lane % 32 // 4, lane % 4
        for n in range(12):
            j, h, e = n // 4, n // 2 % 2, n % 2
            row, column = 16 * w + 8 * h + g, 8 * j + 2 * t + e
            assert registers[lane, n] == sums[row, column]
    assert (wgmma.sums_of_registers(registers) == sums).all()


def test_a_lies_in_registers_as_the_table_says():
    a = np.arange(64 * 16, dtype=np.uint16).reshape(64, 16)
    registers = wgmma.registers_of_a(a)
    for lane in (0, 5, 38, 127):
        w, g, t = lane // 32, lane % 32 // 4, lane % 4
        for n in range(4):
            row, column = 16 * w + 8 * (n % 2) + g, 8 * (n // 2) + 2 * t
            assert registers[lane, n] & 0xFFFF == a[row, column]
            assert registers[lane, n] >> 16 == a[row, column + 1]
    assert (wgmma.tile_of_registers(registers) == a).all()


@pytest.mark.parametrize("address", [0, 1024, 384])
def test_an_operand_is_found_where_a_copy_in_bulk_put_it(address):
    x = np.arange(64 * 64, dtype=np.uint16).reshape(64, 64)
    box = TensorMap.read("test", tensor_map(x, (64, 64)))
    tile = Box(box, (0, 0), address).bytes().view(np.uint16)
    for k in range(0, 64, 16):
        start = 2 * k
        at = wgmma.operand_places(64, 0, 1024, False, address + start)
        assert (tile[at + start // 2] == x[:, k : k + 16]).all()
        start = 128 * k
        at = wgmma.operand_places(64, 0, 1024, True, address + start)
        assert (tile[at + start // 2] == x[k : k + 16].T).all()


def test_a_line_is_swizzled_by_its_address():
    # PTX ISA: of every 128-byte line, 16-byte chunk c stands at c ^ (line % 8).
    at = wgmma.operand_places(64, 0, 1024, False, 0)
    assert at[0, :2].tolist() == [0, 1]
    assert at[3, 0] == 3 * 64 + 3 * 8
    assert at[9, 8] == 9 * 64 + (1 ^ 1) * 8


# -- products -------------------------------------------------------------------------


@cuda.jit
def product_kernel(map_a, map_b, out):
    # a [1, 64, 64], b [1, 64, 64], bf16; out [3, 64, 64] f32: a bᵀ, a b and 2 aᵀ bᵀ
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    full = cuda.shared.array(1, uint64)
    sums = cuda.local.array((3, 32), float32)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
    cuda.syncthreads()  # the barrier is there
    if i == 0:
        mbarrier_arrive(full, 0, 16384)
        bulk_load(tiles, 0, map_a, 0, (0, 0, 0), full, 0)
        bulk_load(tiles, 4096, map_b, 0, (0, 0, 0), full, 0)
    mbarrier_wait(full, 0, 0)
    a = TILE | shared_address(tiles, 0) >> 4
    b = TILE | shared_address(tiles, 4096) >> 4
    fence_products()
    for k in range(4):
        multiply_64(sums[0], a + 2 * k, b + 2 * k, k > 0)
    for k in range(4):
        multiply_rows_of_b(sums[1], a + 2 * k, b + 128 * k, k > 0)
    commit_products()
    for n in range(2):
        for k in range(4):
            multiply_columns_of_a(sums[2], a + 128 * k, b + 2 * k, n + k > 0)
    commit_products()
    w, g, t = i // 32, i % 32 // 4, i % 4
    for m in range(3):
        if m == 0:
            wait_for_products(1)
        if m == 2:
            wait_for_products(0)
        for n in range(32):
            row, column = 16 * w + 8 * (n // 2 % 2) + g, 8 * (n // 4) + 2 * t + n % 2
            out[m, row, column] = sums[m, n]


@every_order
@pytest.mark.parametrize("trace", [False, True])
def test_products_of_tiles_in_shared_memory(order, trace):
    a, b = small_integers(0, 1, 64, 64), small_integers(1, 1, 64, 64)
    bits = from_float32(a), from_float32(b)
    maps = [tensor_map(x, (1, 64, 64)) for x in bits]
    out = np.zeros((3, 64, 64), np.float32)
    options = dict(dynamic_shared=0, order=order, trace=trace)
    report = emulate(product_kernel, 1, 128, *maps, out, **options)
    a, b = a[0], b[0]
    assert (out == np.stack([a @ b.T, a @ b, 2 * (a.T @ b.T)])).all()
    if trace:
        assert report.races == []


@cuda.jit
def registers_kernel(a, b, c, out):
    # a [128, 4] u32 in lanes' order; b [16, 256] u16; c, out [128, 128] f32
    tile = cuda.shared.array((4, 16, 64), uint16, alignment=1024)
    sums = cuda.local.array(128, float32)
    i = cuda.threadIdx.x
    for n in range(32):
        k, column = n // 2, n % 2 * 128 + i
        inside = (column % 64) ^ (k % 8) * 8
        tile[column // 64, k, inside] = b[k, column]
    for n in range(128):
        sums[n] = c[i, n]
    fence_proxy()
    cuda.syncthreads()  # all of b is there
    fence_products()
    b_tile = 1 << 62 | 64 << 32 | 2048 >> 4 << 16 | shared_address(tile, (0, 0, 0)) >> 4
    part = (a[i, 0], a[i, 1], a[i, 2], a[i, 3])
    multiply_256(sums, part, b_tile, True)
    commit_products()
    wait_for_products(0)
    for n in range(128):
        out[i, n] = sums[n]


def registers_case():
    a, b = small_integers(0, 64, 16), small_integers(1, 16, 256)
    c = small_integers(2, 64, 256)
    given = wgmma.registers_of_a(from_float32(a)), from_float32(b)
    return (*given, wgmma.registers_of_sums(c)), a @ b + c


@every_order
def test_a_product_of_registers_adds_to_what_is_there(order):
    inputs, expected = registers_case()
    out = np.zeros((128, 128), np.float32)
    report = emulate(registers_kernel, 1, 128, *inputs, out, trace=True, order=order)
    assert report.races == []
    assert (wgmma.sums_of_registers(out) == expected).all()


# -- copies in bulk -------------------------------------------------------------------


@cuda.jit
def box_kernel(tensor, column, row, batch, out):
    # a box of [1, 8, 16] u16, not swizzled; out [8, 16] u16
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    full = cuda.shared.array(1, uint64)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
        mbarrier_arrive(full, 0, 256)
        bulk_load(tile, (0, 0), tensor, 0, (column, row, batch), full, 0)
    cuda.syncthreads()  # the barrier is there
    mbarrier_wait(full, 0, 0)
    for n in range(8):
        out[n, i] = tile[n, i]


@pytest.mark.parametrize(
    ("column", "row", "batch"), [(8, 2, 1), (-4, 7, 0), (24, -3, 1), (0, 0, 2)]
)
def test_a_box_has_zeros_outside_the_tensor(column, row, batch):
    x = np.arange(1, 2 * 10 * 32 + 1, dtype=np.uint16).reshape(2, 10, 32)
    out = np.full((8, 16), 7, np.uint16)
    boxes = tensor_map(x, (1, 8, 16), swizzle=0)
    emulate(box_kernel, 1, 16, boxes, column, row, batch, out)
    padded = np.pad(x, ((0, 1), (8, 8), (16, 16)))
    there = padded[batch, row + 8 : row + 16, column + 16 : column + 32]
    assert (out == there).all()


def test_a_tensor_that_tma_cannot_take_is_refused():
    x = np.zeros((4, 8, 72), np.uint16)
    with pytest.raises(ValueError, match="expected 3"):
        tensor_map(x, (8, 64))
    with pytest.raises(ValueError, match="from 1 to 256, got"):
        tensor_map(x, (1, 257, 64))
    with pytest.raises(ValueError, match="rows of 144 bytes; expected 128"):
        tensor_map(x, (1, 8, 72))
    with pytest.raises(ValueError, match="swizzle: expected 0 or 128"):
        tensor_map(x, (1, 8, 32), swizzle=64)
    with pytest.raises(ValueError, match="positive multiples of 16 bytes"):
        tensor_map(x[:, :, 4:], (1, 8, 64))
    with pytest.raises(ValueError, match="positive multiples of 16 bytes"):
        tensor_map(x[:, ::-1], (1, 8, 64))


def test_a_map_whose_tensor_is_gone_is_refused():
    out = np.zeros((8, 16), np.uint16)
    gone = tensor_map(np.zeros((2, 10, 32), np.uint16), (1, 8, 16), swizzle=0)
    with pytest.raises(LaunchError, match="is gone"):
        emulate(box_kernel, 1, 16, gone, 0, 0, 0, out)
    with pytest.raises(LaunchError, match="expected a map from"):
        emulate(box_kernel, 1, 16, np.zeros(16, np.uint64), 0, 0, 0, out)


# -- a ring of stages -----------------------------------------------------------------


@cuda.jit
def ring_kernel(boxes, out):
    # boxes of [8, 16] of x [32, 16] u16; out [4, 16] u16: column sums of every box
    ring = cuda.shared.array((2, 8, 16), uint16, alignment=128)
    full = cuda.shared.array(2, uint64)
    empty = cuda.shared.array(2, uint64)
    i = cuda.threadIdx.x
    if i == 0:
        for stage in range(2):
            mbarrier_init(full, stage, 1)
            mbarrier_init(empty, stage, 32)
        fence_mbarriers()
    cuda.syncthreads()  # the barriers are there
    if i >= 32:
        if i == 32:
            for n in range(4):
                stage = n % 2
                # A fresh barrier lets the wait for its phase "before" through.
                mbarrier_wait(empty, stage, n // 2 + 1 & 1)
                mbarrier_arrive(full, stage, 256)
                bulk_load(ring, (stage, 0, 0), boxes, 0, (0, 8 * n), full, stage)
        return
    for n in range(4):
        stage = n % 2
        mbarrier_wait(full, stage, n // 2 & 1)
        if i < 16:
            total = int32(0)
            for row in range(8):
                total += ring[stage, row, i]
            out[n, i] = total
        mbarrier_arrive(empty, stage)


def ring_case():
    x = np.arange(32 * 16, dtype=np.uint16).reshape(32, 16)
    return x, x.reshape(4, 8, 16).sum(1)


@every_order
@pytest.mark.parametrize("trace", [False, True])
def test_a_ring_of_two_stages(order, trace):
    x, expected = ring_case()
    out = np.zeros((4, 16), np.uint16)
    boxes = tensor_map(x, (8, 16), swizzle=0)
    report = emulate(ring_kernel, 1, 64, boxes, out, order=order, trace=trace)
    assert (out == expected).all()
    if trace:
        assert report.races == []
        # What the copies write is no lane's access.
        assert set(report.accesses.query("array == 'ring'")["kind"]) == {"read"}


# -- named barriers -------------------------------------------------------------------


@cuda.jit
def two_halves_kernel(out):
    # out [4, 32] i32: both halves write in turn what the other has written, plus one
    box = cuda.shared.array(32, int32)
    i = cuda.threadIdx.x
    lane = i % 32
    if i < 32:
        box[lane] = lane
        barrier_arrive(1, 64)
        barrier_sync(2, 64)
        out[1, lane] = box[31 - lane]
        barrier_sync(3, 32)  # this half has read
        box[lane] = 7
    else:
        barrier_sync(1, 64)
        out[0, lane] = box[31 - lane]
        barrier_sync(4, 32)  # this half has read
        box[lane] = lane + 1
        barrier_arrive(2, 64)


@every_order
def test_named_barriers_order_two_halves_of_a_block(order):
    out = np.zeros((2, 32), np.int32)
    report = emulate(two_halves_kernel, 1, 64, out, order=order, trace=True)
    assert report.races == []
    assert out.tolist() == [list(range(31, -1, -1)), list(range(32, 0, -1))]


# -- blocks that wait for one another -------------------------------------------------


@cuda.jit
def meeting_kernel(parts, count, n, fenced, out):
    # parts [blocks] i32, count [1] i32, out [blocks] i32
    block, i = cuda.blockIdx.x, cuda.threadIdx.x
    box = cuda.shared.array(1, int32)
    if i == 0:
        parts[block] = 10 + block  # <- 1
        box[0] = block
        if fenced:
            cuda.threadfence()
        cuda.atomic.add(count, 0, 1)
        wait_for_at_least(count, 0, n)
    cuda.syncthreads()  # all blocks have posted their parts
    if i < cuda.gridDim.x:
        cuda.atomic.add(out, box[0], parts[i])  # <- 2


@every_order
@pytest.mark.parametrize("trace", [False, True])
def test_blocks_wait_for_one_another(order, trace):
    parts, count = np.zeros(5, np.int32), np.zeros(1, np.int32)
    out = np.zeros(5, np.int32)
    arguments = parts, count, 5, True, out
    report = emulate(meeting_kernel, 5, 32, *arguments, order=order, trace=trace)
    assert out.tolist() == [10 + 11 + 12 + 13 + 14] * 5
    if trace:
        assert report.races == []
        assert len(report.accesses.query("array == 'box' and kind == 'read'")) == 25


@pytest.mark.parametrize(("n", "fenced"), [(0, True), (5, False)])
def test_blocks_race_without_the_wait_and_without_the_fence(n, fenced):
    parts, count = np.zeros(5, np.int32), np.zeros(1, np.int32)
    arguments = parts, count, n, fenced, parts.copy()
    (race,) = emulate(meeting_kernel, 5, 32, *arguments, trace=True).races
    assert race.between_blocks and race.array == "parts"
    marks = [marked_line(meeting_kernel, f"# <- {side}") for side in (1, 2)]
    assert list(race.linenos) == marks


def test_blocks_that_wait_for_more_than_there_are():
    parts, count = np.zeros(5, np.int32), np.zeros(1, np.int32)
    with pytest.raises(DeadlockError, match="no other block raises") as caught:
        emulate(meeting_kernel, 3, 32, parts, count, 4, True, parts.copy())
    assert "count[0] is 3, for 4" in str(caught.value)
    # The first to be stuck; its other lanes wait at the barrier.
    assert "block (0, 0, 0)" in str(caught.value)
    assert list(range(1, 32)) in caught.value.waiting.values()


# -- misuse of barriers ---------------------------------------------------------------


@cuda.jit
def nobody_arrives_kernel(boxes, out):
    ready = cuda.shared.array(3, uint64)
    if cuda.threadIdx.x == 0:
        for n in range(3):
            mbarrier_init(ready, n, 2)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        mbarrier_arrive(ready, 1)
    mbarrier_wait(ready, 1, 0)  # <-


@cuda.jit
def wrong_parity_kernel(boxes, out):
    ready = cuda.shared.array(3, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(ready, 1, 1)
        mbarrier_arrive(ready, 1)
    cuda.syncthreads()
    mbarrier_wait(ready, 1, 1)  # <-


@cuda.jit
def too_many_bytes_kernel(boxes, out):
    ready = cuda.shared.array(3, uint64)
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    if cuda.threadIdx.x == 0:
        mbarrier_init(ready, 1, 1)
        fence_mbarriers()
        mbarrier_arrive(ready, 1, 512)
        bulk_load(tile, (0, 0), boxes, 0, (0, 0), ready, 1)
    cuda.syncthreads()
    mbarrier_wait(ready, 1, 0)  # <-


@pytest.mark.parametrize(
    ("kernel", "state"),
    [
        (nobody_arrives_kernel, "parity 0; phase 0: 1 of 2 arrivals"),
        (wrong_parity_kernel, "parity 1; phase 1: 0 of 1 arrivals"),
        (too_many_bytes_kernel, "phase 0: 1 of 1 arrivals, 256 bytes missing"),
    ],
)
def test_a_phase_that_is_never_over(kernel, state):
    x = np.zeros((8, 16), np.uint16)
    with pytest.raises(DeadlockError, match="phase is never over") as caught:
        emulate(kernel, 1, 64, tensor_map(x, (8, 16), swizzle=0), None)
    assert "ready[1:2]" in str(caught.value) and state in str(caught.value)
    assert caught.value.waiting == {
        ("mbarrier.try_wait", __file__, marked_line(kernel)): list(range(64))
    }


@cuda.jit
def missing_warp_kernel(out):
    if cuda.threadIdx.x < 64:
        barrier_sync(3, 96)  # <-


def test_a_named_barrier_that_a_warp_misses():
    with pytest.raises(BarrierDivergenceError) as caught:
        emulate(missing_warp_kernel, 1, 128, None)
    assert "barrier 3: 64 of 96 lanes" in str(caught.value)
    key = "bar.sync", __file__, marked_line(missing_warp_kernel)
    assert caught.value.waiting == {key: list(range(64))}
    assert caught.value.left == list(range(64, 128))


@cuda.jit
def other_count_kernel(x, out):
    barrier_arrive(3, 64 if cuda.threadIdx.x < 32 else 128)  # <-


@cuda.jit
def odd_count_kernel(x, out):
    barrier_sync(3, 100)  # <-


@cuda.jit
def barrier_16_kernel(x, out):
    barrier_sync(16, 128)  # <-


@cuda.jit
def before_init_kernel(x, out):
    ready = cuda.shared.array(3, uint64)
    mbarrier_wait(ready, 1, 0)  # <-


@cuda.jit
def made_twice_kernel(x, out):
    ready = cuda.shared.array(3, uint64)
    mbarrier_init(ready, 1, 1)  # <-


@cuda.jit
def no_count_kernel(x, out):
    ready = cuda.shared.array(3, uint64)
    mbarrier_init(ready, 1, 0)  # <-


@cuda.jit
def invisible_barrier_kernel(boxes, out):
    ready = cuda.shared.array(3, uint64)
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    if cuda.threadIdx.x == 0:
        mbarrier_init(ready, 1, 1)
        mbarrier_arrive(ready, 1, 256)
        bulk_load(tile, (0, 0), boxes, 0, (0, 0), ready, 1)  # <-


@cuda.jit
def too_many_arrive_kernel(boxes, out):
    ready = cuda.shared.array(3, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(ready, 1, 2)
    cuda.syncthreads()
    if cuda.threadIdx.x < 3:
        mbarrier_arrive(ready, 1, 16)  # <-


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (other_count_kernel, "comes for 128 lanes, others came for 64"),
        (odd_count_kernel, "100 lanes; expected a multiple of 32"),
        (barrier_16_kernel, "there are barriers 0 to 15"),
        (before_init_kernel, "ready[1:2]: mbarrier.try_wait before mbarrier.init"),
        (made_twice_kernel, "ready[1:2]: mbarrier.init of what is a barrier already"),
        (no_count_kernel, "a count of 0"),
        (invisible_barrier_kernel, "no fence.mbarrier_init"),
        (too_many_arrive_kernel, "more arrivals than the 2"),
    ],
)
def test_a_barrier_that_is_used_wrongly(kernel, what):
    x = np.zeros((8, 16), np.uint16)
    boxes = tensor_map(x, (8, 16), swizzle=0)
    assert what in fault(BarrierUseError, kernel, boxes, None)


@cuda.jit
def registers_count_kernel(n):
    set_max_registers(n)  # <-


def test_setmaxnreg_takes_multiples_of_8():
    emulate(registers_count_kernel, 1, 128, 240)
    for n in (100, 16, 264):
        assert f"setmaxnreg {n}" in fault(KernelError, registers_count_kernel, n)


# -- copies in bulk that are not waited for -------------------------------------------


@cuda.jit
def read_too_early_kernel(boxes, out):
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    full = cuda.shared.array(1, uint64)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
        mbarrier_arrive(full, 0, 256)
        bulk_load(tile, (0, 0), boxes, 0, (0, 0), full, 0)
    cuda.syncthreads()  # no substitute for the wait
    out[0, i] = tile[3, i]  # <-


@cuda.jit
def second_copy_kernel(boxes, out):
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    full = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
        for n in range(2):
            bulk_load(tile, (0, 0), boxes, 0, (0, n), full, 0)  # <-


@cuda.jit
def written_on_the_way_kernel(boxes, out):
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    full = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
        mbarrier_arrive(full, 0, 256)
        bulk_load(tile, (0, 0), boxes, 0, (0, 0), full, 0)  # <-
    cuda.syncthreads()
    tile[7, cuda.threadIdx.x] = 0
    mbarrier_wait(full, 0, 0)


@cuda.jit
def ends_too_early_kernel(boxes, out):
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    full = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
        bulk_load(tile, (0, 0), boxes, 0, (0, 0), full, 0)  # <-


@cuda.jit
def tensor_written_kernel(boxes, x):
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    full = cuda.shared.array(1, uint64)
    if cuda.threadIdx.x == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
        mbarrier_arrive(full, 0, 256)
        bulk_load(tile, (0, 0), boxes, 0, (0, 0), full, 0)  # <-
    x[0, cuda.threadIdx.x] = 1
    cuda.syncthreads()
    mbarrier_wait(full, 0, 0)


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (tensor_written_kernel, "the source was written while"),
        (read_too_early_kernel, "tile[3, 0]: read while"),
        (second_copy_kernel, "tile[0, 0:128]: cp.async.bulk.tensor to it while"),
        (written_on_the_way_kernel, "tile[0, 0:128]: written"),
        (ends_too_early_kernel, "the block ends while"),
    ],
)
@pytest.mark.parametrize("trace", [False, True])
def test_a_copy_in_bulk_that_is_not_there_yet(kernel, what, trace):
    x = np.zeros((8, 16), np.uint16)
    boxes = tensor_map(x, (8, 16), swizzle=0)
    with pytest.raises(InFlightError) as caught:
        emulate(kernel, 1, 16, boxes, x, trace=trace)
    text = str(caught.value)
    assert what in text and "the cp.async.bulk.tensor of lane 0" in text
    assert f"{__file__}:{marked_line(kernel)}" in text


@cuda.jit
def one_lane_waits_kernel(boxes, out):
    tile = cuda.shared.array((8, 16), uint16, alignment=128)
    full = cuda.shared.array(1, uint64)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
        mbarrier_arrive(full, 0, 256)
        bulk_load(tile, (0, 0), boxes, 0, (0, 0), full, 0)  # <- 1
        mbarrier_wait(full, 0, 0)
    if i < 16:
        cuda.syncwarp(0xFFFF)  # these know of the wait, the others do not
    else:
        cuda.nanosleep(100)
        cuda.nanosleep(100)
    out[0, i] = tile[3, i % 16]  # <- 2


def only_race(kernel, block, *args):
    (race,) = emulate(kernel, 1, block, *args, trace=True).races
    marks = {marked_line(kernel, f"# <- {n}") for n in (1, 2)}
    assert set(race.linenos) == marks
    return race


def test_a_lane_that_waits_for_nobody_races_with_the_copy():
    x, out = np.zeros((8, 16), np.uint16), np.zeros((1, 32), np.uint16)
    boxes = tensor_map(x, (8, 16), swizzle=0)
    race = only_race(one_lane_waits_kernel, 32, boxes, out)
    assert race.kinds == ("write", "read") and race.lanes[1] >= 16
    assert race.names[0] == "copy in bulk" and "copy in bulk" in str(race)


@cuda.jit
def hasty_refill_kernel(boxes, out):
    ring = cuda.shared.array((8, 16), uint16, alignment=128)
    full = cuda.shared.array(1, uint64)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
    cuda.syncthreads()
    if i == 32:
        for n in range(2):
            mbarrier_wait(full, 0, n + 1 & 1)  # it has come, but was it read?
            mbarrier_arrive(full, 0, 256)
            bulk_load(ring, (0, 0), boxes, 0, (0, 8 * n), full, 0)  # <- 1
        mbarrier_wait(full, 0, 1)
    elif i < 16:
        mbarrier_wait(full, 0, 0)
        out[0, i] = ring[0, i]  # <- 2


def test_a_refill_of_what_nobody_has_released_races_with_the_reader():
    x, _ = ring_case()
    out = np.zeros((1, 16), np.uint16)
    boxes = tensor_map(x, (8, 16), swizzle=0)
    race = only_race(hasty_refill_kernel, 64, boxes, out)
    assert race.kinds == ("write", "read")
    # In this order the reader comes first; in the other it finds a copy on its way.
    with pytest.raises(InFlightError):
        emulate(hasty_refill_kernel, 1, 64, boxes, out, order="reverse")


@cuda.jit
def run_kernel(x, first, n_bytes, out):
    # x [64] i32, out [32] i32
    run = cuda.shared.array(32, int32, alignment=16)
    full = cuda.shared.array(1, uint64)
    i = cuda.threadIdx.x
    run[i] = 0
    fence_proxy()
    if i == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
    cuda.syncthreads()
    if i == 0:
        mbarrier_arrive(full, 0, n_bytes)
        bulk_copy(run, 4, x, first, n_bytes, full, 0)  # <-
    mbarrier_wait(full, 0, 0)
    out[i] = run[i]


def test_a_run_of_bytes_comes_as_it_is():
    x, out = np.arange(1, 65, dtype=np.int32), np.zeros(32, np.int32)
    emulate(run_kernel, 1, 32, x, 40, 64, out)
    assert out.tolist() == [0] * 4 + x[40:56].tolist() + [0] * 12


@pytest.mark.parametrize(
    ("error", "first", "n_bytes", "what"),
    [
        (UnsupportedError, 0, 24, "cp.async.bulk of 24 bytes: expected a multiple"),
        (UnsupportedError, 0, 0, "cp.async.bulk of 0 bytes: expected a multiple"),
        (MisalignedError, 2, 16, "x[2:6]: cp.async.bulk needs an address"),
        (OutOfBoundsError, 56, 48, "x[56:68]: the 48 bytes of cp.async.bulk pass"),
        (OutOfBoundsError, 0, 128, "run[4:36]: the 128 bytes of cp.async.bulk pass"),
    ],
)
def test_a_run_of_bytes_that_cannot_be_copied(error, first, n_bytes, what):
    x, out = np.arange(64, dtype=np.int32), np.zeros(32, np.int32)
    assert what in fault(error, run_kernel, x, first, n_bytes, out, block=32)


@cuda.jit
def fetching_kernel(parts, counts, waits, fenced):
    # parts [blocks, 4] i32, counts [blocks] i32: a block copies the other's part
    fetched = cuda.shared.array(4, int32, alignment=16)
    full = cuda.shared.array(1, uint64)
    block, other = cuda.blockIdx.x, 1 - cuda.blockIdx.x
    for n in range(4):
        parts[block, n] = block  # <- 1
    cuda.threadfence()
    cuda.atomic.add(counts, block, 1)
    mbarrier_init(full, 0, 1)
    fence_mbarriers()
    mbarrier_arrive(full, 0, 16)
    if waits:
        wait_for_at_least(counts, other, 1)
    if fenced:
        fence_proxy_global()
    bulk_copy(fetched, 0, parts, (other, 0), 16, full, 0)  # <- 2
    mbarrier_wait(full, 0, 0)


def fetch(waits, fenced):
    parts, counts = np.zeros((2, 4), np.int32), np.zeros(2, np.int32)
    return emulate(fetching_kernel, 2, 1, parts, counts, waits, fenced, trace=True)


def test_a_copy_of_what_another_block_has_posted_waits_and_is_fenced():
    assert fetch(True, True).races == []
    (race,) = fetch(False, True).races
    assert race.between_blocks and race.array == "parts"
    assert set(race.linenos) == {
        marked_line(fetching_kernel, f"# <- {n}") for n in (1, 2)
    }
    with pytest.raises(UnfencedError, match=r"without a fence\.proxy\.async\.global"):
        fetch(True, False)


# -- misuse of products ---------------------------------------------------------------
#
# All kernels here fill two [64, 64] tiles with ones by ordinary stores.


@cuda.jit(device=True)
def fill(tiles):
    for n in range(64):
        tiles[n * 128 + cuda.threadIdx.x] = 0x3F80


@cuda.jit(device=True)
def ones(tiles):
    """Fill the tiles, make them visible, and give the descriptor of the first."""
    fill(tiles)
    fence_proxy()
    cuda.syncthreads()
    return TILE | shared_address(tiles, 0) >> 4


@cuda.jit
def unfenced_store_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    fill(tiles)
    cuda.syncthreads()
    fence_products()
    a = TILE | shared_address(tiles, 0) >> 4
    multiply_64(sums, a, a + 512, False)  # <-


@cuda.jit
def late_store_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    tiles[4096 + cuda.threadIdx.x] = 0x4000  # after the fence
    cuda.syncthreads()
    fence_products()
    multiply_64(sums, a, a + 512, False)  # <-


@cuda.jit
def unfenced_registers_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    multiply_64(sums, a, a + 512, False)  # <-


@cuda.jit
def unfenced_after_the_wait_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    for n in range(2):
        multiply_64(sums, a, a + 512, n > 0)  # <-
        commit_products()
        wait_for_products(0)
        sums[0] = sums[0] * 2


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (unfenced_store_kernel, "tiles[0]: stored, and then read"),
        (late_store_kernel, "tiles[4096]: stored, and then read"),
        (unfenced_registers_kernel, "without a wgmma.fence"),
        (unfenced_after_the_wait_kernel, "without a wgmma.fence"),
    ],
)
@every_order
def test_what_no_fence_has_made_visible(kernel, what, order):
    assert what in fault(UnfencedError, kernel, None, order=order)


@cuda.jit
def sums_too_early_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 512, False)  # <- product
    commit_products()
    out[cuda.threadIdx.x] = sums[0]  # <-


@cuda.jit
def uncommitted_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 512, False)  # <- product
    wait_for_products(0)
    out[cuda.threadIdx.x] = sums[0]  # <-


@cuda.jit
def all_groups_but_it_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array((2, 32), float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums[0], a, a + 512, False)
    commit_products()
    multiply_64(sums[1], a, a + 512, False)  # <- product
    commit_products()
    wait_for_products(1)
    out[cuda.threadIdx.x] = sums[0, 0]
    out[cuda.threadIdx.x] = sums[1, 0]  # <-


@cuda.jit
def sums_written_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 512, False)  # <- product
    commit_products()
    sums[5] = 0
    wait_for_products(0)  # <-


@cuda.jit
def operand_written_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 512, False)  # <- product
    commit_products()
    cuda.syncthreads()  # all lanes have asked, nobody has waited
    tiles[4096 + cuda.threadIdx.x] = 0x4000
    wait_for_products(0)  # <-


@cuda.jit
def overlapping_sums_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(64, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums[8:40], a, a + 512, False)  # <- product
    multiply_64(sums[:32], a, a + 512, False)  # <-


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (sums_too_early_kernel, "sums[0]: read while"),
        (uncommitted_kernel, "not even committed"),
        (all_groups_but_it_kernel, "sums[1, 0]: read while"),
        (sums_written_kernel, "sums: written while"),
        (operand_written_kernel, "tiles[4096]: written while"),
        (overlapping_sums_kernel, "overlap with those of"),
    ],
)
@pytest.mark.parametrize("trace", [False, True])
def test_a_product_that_is_not_done_yet(kernel, what, trace):
    out = np.zeros(128, np.float32)
    text = fault(InFlightError, kernel, out, trace=trace)
    assert what in text
    assert f"wgmma.mma_async of warpgroup 0 ({__file__}" in text
    assert f":{marked_line(kernel, '# <- product')} " in text


@cuda.jit
def never_waited_for_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 512, False)
    commit_products()


def test_products_that_the_block_does_not_wait_for():
    with pytest.raises(InFlightError, match="the block ends before the wgmma"):
        emulate(never_waited_for_kernel, 1, 128, None)


@cuda.jit
def other_descriptor_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + cuda.threadIdx.x // 64, False)  # <-


@cuda.jit
def two_places_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    if cuda.threadIdx.x < 96:
        multiply_64(sums, a, a + 512, False)
    else:
        multiply_64(sums, a, a + 512, False)  # <-


@pytest.mark.parametrize(
    ("kernel", "what"),
    [
        (other_descriptor_kernel, "in lane 64"),
        (two_places_kernel, "lane 96 comes to a wgmma.mma_async here"),
    ],
)
def test_a_warpgroup_executes_an_instruction_together(kernel, what):
    assert what in fault(WarpgroupError, kernel, None)


@cuda.jit
def a_warp_is_missing_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    if cuda.threadIdx.x < 96:
        multiply_64(sums, a, a + 512, False)
        commit_products()
        wait_for_products(0)  # <-


def test_a_warp_that_its_warpgroup_waits_for():
    with pytest.raises(DeadlockError, match="96 of 128 lanes have come") as caught:
        emulate(a_warp_is_missing_kernel, 1, 128, None)
    key = "wgmma.wait_group", __file__, marked_line(a_warp_is_missing_kernel)
    assert caught.value.waiting == {key: list(range(96))}


@cuda.jit
def one_warp_waits_kernel(out):
    # out [128] f32: 64, doubled by the first warp, and 64 more
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    for n in range(2):
        fence_products()
        for k in range(4):
            multiply_64(sums, a + 2 * k, a + 512 + 2 * k, n + k > 0)
        commit_products()
        if n == 0 and cuda.threadIdx.x < 32:
            wait_for_products(0)
            for m in range(32):
                sums[m] *= 2
    wait_for_products(0)
    out[cuda.threadIdx.x] = sums[7]


@every_order
def test_a_warp_may_wait_alone_and_change_its_sums(order):
    out = np.zeros(128, np.float32)
    emulate(one_warp_waits_kernel, 1, 128, out, order=order)
    assert out.tolist() == [192] * 32 + [128] * 96


def test_a_warpgroup_has_128_lanes():
    with pytest.raises(LaunchError, match="the block's last one has 64"):
        emulate(a_warp_is_missing_kernel, 1, 64, None)


@cuda.jit
def other_swizzle_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a ^ 3 << 62, a, False)  # <-


@cuda.jit
def past_the_end_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 600, False)  # <-


@cuda.jit
def elsewhere_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 5000, False)  # <-


@cuda.jit
def sums_of_another_size_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(64, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 512, False)  # <-


@cuda.jit
def sums_from_nowhere_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    a = ones(tiles)
    fence_products()
    multiply_64(sums, a, a + 512, True)  # <-


@cuda.jit
def half_a_tile_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    tiles[cuda.threadIdx.x] = 0
    fence_proxy()
    fence_products()
    a = TILE | shared_address(tiles, 0) >> 4
    multiply_64(sums, a, a, True)  # <-


@pytest.mark.parametrize(
    ("error", "kernel", "what"),
    [
        (UnsupportedError, other_swizzle_kernel, "128-byte swizzle"),
        (OutOfBoundsError, past_the_end_kernel, "passes the array's end"),
        (OutOfBoundsError, elsewhere_kernel, "lies in no shared array"),
        (OutOfBoundsError, sums_of_another_size_kernel, "array of 32 float32"),
        (UninitialisedReadError, sums_from_nowhere_kernel, "sums: local memory"),
        (UninitialisedReadError, half_a_tile_kernel, "local memory"),
    ],
)
def test_operands_that_do_not_fit_or_are_not_there(error, kernel, what):
    assert what in fault(error, kernel, None)


@cuda.jit
def release_kernel(boxes, too_early):
    # too_early: the second box may be loaded before the product is done
    tile = cuda.shared.array(4096, uint16, alignment=1024)
    full = cuda.shared.array(2, uint64)
    sums = cuda.local.array(32, float32)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 0, 1)
        mbarrier_init(full, 1, 128)
        fence_mbarriers()
    cuda.syncthreads()
    if i == 128:
        mbarrier_arrive(full, 0, 8192)
        bulk_load(tile, 0, boxes, 0, (0, 0), full, 0)
        mbarrier_wait(full, 1, 0)
        mbarrier_arrive(full, 0, 8192)
        bulk_load(tile, 0, boxes, 0, (0, 0), full, 0)  # <- 1
        mbarrier_wait(full, 0, 1)
    if i < 128:
        mbarrier_wait(full, 0, 0)
        fence_products()
        a = TILE | shared_address(tile, 0) >> 4
        multiply_64(sums, a, a, False)  # <- 2
        commit_products()
        if too_early:
            mbarrier_arrive(full, 1)
        wait_for_products(0)
        if not too_early:
            mbarrier_arrive(full, 1)


def test_a_tile_that_is_released_before_its_product_is_done_races():
    x = np.zeros((64, 64), np.uint16)
    boxes = tensor_map(x, (64, 64))
    race = only_race(release_kernel, 256, boxes, True)
    assert sorted(race.names) == ["copy in bulk", "wgmma of warpgroup 0"]
    assert emulate(release_kernel, 1, 256, boxes, False, trace=True).races == []


@cuda.jit
def one_warp_knows_kernel(boxes, out):
    tile = cuda.shared.array(4096, uint16, alignment=1024)
    full = cuda.shared.array(1, uint64)
    sums = cuda.local.array(32, float32)
    i = cuda.threadIdx.x
    if i == 0:
        mbarrier_init(full, 0, 1)
        fence_mbarriers()
        mbarrier_arrive(full, 0, 8192)
        bulk_load(tile, 0, boxes, 0, (0, 0), full, 0)  # <- 1
        mbarrier_wait(full, 0, 0)
    cuda.syncwarp()  # the first warp knows that the tile is there; the others do not
    fence_products()
    b = TILE | shared_address(tile, 0) >> 4
    multiply_64(sums, (0, 0, 0, 0), b, False)  # <- 2
    commit_products()
    wait_for_products(0)


def test_every_warp_of_a_product_must_know_of_its_operand():
    x = np.zeros((64, 64), np.uint16)
    race = only_race(one_warp_knows_kernel, 128, tensor_map(x, (64, 64)), None)
    assert race.names == ("copy in bulk", "wgmma of warpgroup 0")


@cuda.jit
def own_rows_kernel(out):
    # A's rows of a warp are written by that warp; B by all
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    i = cuda.threadIdx.x
    for n in range(32):
        tiles[4096 + n * 128 + i] = 0x3F80
    cuda.syncthreads()  # all of B is there
    for n in range(32):
        tiles[i // 32 * 1024 + n * 32 + i % 32] = 0x3F80
    fence_proxy()
    cuda.syncwarp()
    fence_products()
    a = TILE | shared_address(tiles, 0) >> 4
    multiply_64(sums, a, a + 512, False)
    commit_products()
    wait_for_products(0)


@cuda.jit
def others_columns_kernel(out):
    tiles = cuda.shared.array(8192, uint16, alignment=1024)
    sums = cuda.local.array(32, float32)
    fill(tiles)
    fence_proxy()
    cuda.syncwarp()  # other warps have written parts of B
    fence_products()
    b = TILE | shared_address(tiles, 4096) >> 4
    multiply_64(sums, (0, 0, 0, 0), b, False)  # <- 2
    commit_products()
    wait_for_products(0)


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_warp_reads_its_own_rows_of_a_and_all_of_b(order):
    options = dict(trace=True, order=order)
    assert emulate(own_rows_kernel, 1, 128, None, **options).races == []
    races = emulate(others_columns_kernel, 1, 128, None, **options).races
    assert {race.names[1] for race in races} == {"wgmma of warpgroup 0"}
    assert {race.linenos[1] for race in races} == {
        marked_line(others_columns_kernel, "# <- 2")
    }


@cuda.jit
def early_arrival_kernel(out):
    box = cuda.shared.array(32, int32)
    i = cuda.threadIdx.x
    if i < 32:
        barrier_arrive(1, 64)  # should stand below the store
        box[i] = i  # <- 1
    else:
        barrier_sync(1, 64)
        out[0, i - 32] = box[63 - i]  # <- 2


def test_what_is_done_after_an_arrival_is_not_ordered_by_it():
    race = only_race(early_arrival_kernel, 64, np.zeros((1, 32), np.int32))
    assert race.kinds == ("write", "read")


# -- verify attention, all of it together ---------------------------------------------


def verify(prefix_lens, executor="emulator", **options):
    """Attention over prefixes and a tree of five rows, four heads each."""
    rng = np.random.default_rng(0)
    tree = DraftTree.from_parents([[-1, 0, 0, 1, 1]] * len(prefix_lens))
    shape = len(prefix_lens), max(prefix_lens) + 8, 576
    q = from_float32(rng.standard_normal((shape[0], 5, 4, 576), np.float32))
    cache = from_float32(rng.standard_normal(shape, np.float32))
    for b, prefix_len in enumerate(prefix_lens):
        cache[b, prefix_len + 5 :] = 0x7FC0  # NaN, behind the tail
    inputs = q, cache, np.array(prefix_lens, np.int32), tree.visibility
    form = {"sm_scale": 192**-0.5, "d_latent": 512}
    return general.verify_attn(*inputs, **form, executor=executor, **options)


def wgmma_fault(error, prefix_lens, n_splits):
    """The error that the wgmma kernel must raise, in a line of its own."""
    with pytest.raises(error) as caught:
        verify(prefix_lens, version="wgmma", n_splits=n_splits)
    assert type(caught.value) is error
    assert "verify_attn_wgmma.py" in str(caught.value)
    return str(caught.value)


def close_to_reference(prefix_lens, found):
    out, lse = verify(prefix_lens, "numpy")
    # Weights are bfloat16, and the largest value is near 4.
    np.testing.assert_allclose(found[0], out, atol=4 * 2.0**-9, rtol=0)
    np.testing.assert_allclose(found[1], lse, atol=1e-5, rtol=0)


def test_verify_attention_runs_as_it_is_and_without_a_race():
    with traced() as reports:
        found = verify([130], version="wgmma", n_splits=1)
    assert [report.races for report in reports] == [[]]
    close_to_reference([130], found)


def test_verify_attention_in_parts_whose_blocks_wait_for_one_another(monkeypatch):
    monkeypatch.setattr(general, "_multiprocessors", lambda at: 2)
    with traced() as reports:
        found = verify([100], version="wgmma", n_splits=2)
    assert reports[0].grid == (2, 1, 1)
    close_to_reference([100], found)
    assert [report.races for report in reports] == [[]]


@instruction
def nothing(lane, *operands):
    """In place of an instruction that somebody forgot."""


def but_for(executed, at, *left_out):
    """An instruction, left out where its operand `at` is one of `left_out`."""

    @instruction
    def sometimes(lane, *operands):
        if operands[at] not in left_out:
            executed(lane, *operands)

    return sometimes


EVEN_ARRIVED = range(attention.EVEN_ARRIVED, attention.ODD_ARRIVED)


@instruction
def expect_twice(lane, barriers, index, n_bytes):
    hopper.mbarrier_arrive(lane, barriers, index, 2 * n_bytes)


@pytest.mark.parametrize(
    ("name", "instead", "error", "what"),
    [
        ("fence_proxy_async", nothing, UnfencedError, "without a fence.proxy.async"),
        ("fence_mbarrier_init", nothing, BarrierUseError, "no fence.mbarrier_init"),
        ("wgmma_fence", nothing, UnfencedError, "without a wgmma.fence"),
        ("wgmma_wait_group", nothing, InFlightError, "not waited for"),
        ("wgmma_commit_group", nothing, InFlightError, "not even committed"),
        (
            "mbarrier_wait",
            but_for(hopper.mbarrier_wait, 1, *EVEN_ARRIVED),
            InFlightError,
            "read while the cp.async.bulk.tensor of lane 256",
        ),
        (
            "mbarrier_wait",
            but_for(hopper.mbarrier_wait, 1, attention.EVEN_RIGHT_FREE),
            InFlightError,
            "the cp.async.bulk.tensor of lane 256",
        ),
        (
            "mbarrier_arrive",
            but_for(hopper.mbarrier_arrive, 1, attention.EVEN_LEFT_FREE),
            DeadlockError,
            "phase is never over",
        ),
        (
            "mbarrier_arrive_expect_tx",
            expect_twice,
            DeadlockError,
            "8192 bytes missing",
        ),
        (
            "bar_sync",
            but_for(hopper.barrier_sync, 0, attention.ODD_READY),
            UninitialisedReadError,
            "shared memory is read before anything was written",
        ),
        (
            "bar_arrive",
            but_for(hopper.barrier_arrive, 0, attention.EVEN_READY),
            BarrierDivergenceError,
            "128 of 256 lanes have come",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_verify_attention_with_an_instruction_left_out(
    monkeypatch, name, instead, error, what
):
    monkeypatch.setattr(attention, name, instead)
    assert what in wgmma_fault(error, [130], n_splits=1)


@pytest.mark.parametrize(
    ("name", "instead", "error", "what"),
    [
        (
            "fence_proxy_async_global",
            nothing,
            UnfencedError,
            "cp.async.bulk without a fence.proxy.async.global",
        ),
        (
            "mbarrier_wait",
            but_for(hopper.mbarrier_wait, 1, attention.MERGING),
            InFlightError,
            "read while the cp.async.bulk of lane",
        ),
        (
            "mbarrier_wait",
            but_for(hopper.mbarrier_wait, 1, attention.MERGING + 1),
            InFlightError,
            "read while the cp.async.bulk of lane",
        ),
    ],
    ids=["fence", "marks", "sums"],
)
def test_a_merge_with_an_instruction_left_out(monkeypatch, name, instead, error, what):
    monkeypatch.setattr(general, "_multiprocessors", lambda at: 2)
    monkeypatch.setattr(attention, name, instead)
    assert what in wgmma_fault(error, [100], n_splits=2)


def test_a_part_that_is_counted_before_others_can_see_it_races(monkeypatch):
    monkeypatch.setattr(general, "_multiprocessors", lambda at: 2)
    monkeypatch.setattr(attention, "fence_acq_rel_gpu", nothing)
    with traced() as reports:
        verify([100], version="wgmma", n_splits=2)
    races = reports[0].races
    assert {race.array for race in races} == {"posted", "marks"}
    assert all(race.between_blocks for race in races)
