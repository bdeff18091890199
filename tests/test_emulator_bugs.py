"""Planted bugs: each tiny kernel has one, and the emulator reports it at its line.

A comment ``# <-`` (or ``# <- 1``, ``# <- 2`` for the two sides of a race) marks the
line that the report must name.
"""

import inspect
import math

import numpy as np
import pytest
from numba import cuda, float32, int32

from ddtree_numba.emulator import (
    BarrierDivergenceError,
    DeadlockError,
    MaskError,
    OutOfBoundsError,
    UninitialisedReadError,
    UnsupportedError,
    emulate,
)


def marked_line(kernel, mark="# <-"):
    """The number of the line of the kernel's source that carries the mark."""
    lines, first = inspect.getsourcelines(kernel.py_func)
    found = [first + n for n, line in enumerate(lines) if line.rstrip().endswith(mark)]
    assert len(found) == 1, f"{mark!r} must stand once"
    return found[0]


def one_race(kernel, grid, block, *args, **options):
    """The race of a kernel that has one, on the marked lines."""
    races = emulate(kernel, grid, block, *args, trace=True, **options).races
    assert len(races) == 1, "\n".join(map(str, races))
    lines = {marked_line(kernel, "# <- 1"), marked_line(kernel, "# <- 2")}
    assert set(races[0].linenos) == lines
    assert races[0].filenames[0] == races[0].filenames[1] == __file__
    return races[0]


# -- bounds ---------------------------------------------------------------------------


@cuda.jit
def off_by_one_kernel(x, y):
    # x, y [64] f32
    i = cuda.grid(1)
    y[i] = x[i + 1]  # <-


@cuda.jit
def negative_index_kernel(x, y):
    i = cuda.grid(1)
    y[i] = x[i - 1]  # <-


@cuda.jit
def write_past_the_end_kernel(x, y):
    i = cuda.grid(1)
    y[i + 32] = x[i]  # <-


@pytest.mark.parametrize(
    ("kernel", "element", "lane", "block"),
    [
        (off_by_one_kernel, "x[64]", 31, 1),
        (negative_index_kernel, "x[-1]", 0, 0),
        (write_past_the_end_kernel, "y[64]", 0, 1),
    ],
)
@pytest.mark.parametrize("trace", [False, True])
def test_an_index_outside_its_array(kernel, element, lane, block, trace):
    x, y = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(OutOfBoundsError) as caught:
        emulate(kernel, 2, 32, x, y, trace=trace)
    place = caught.value.place
    assert (place.lineno, place.filename) == (marked_line(kernel), __file__)
    assert (place.lane, place.block) == (lane, (block, 0, 0))
    message = str(caught.value)
    for part in (element, "(64,)", kernel.py_func.__name__, f"lane {lane}"):
        assert part in message
    assert "# <-" in message  # the source line itself


@pytest.mark.parametrize("index", [(2, 0), (0, 3), (-1, 0), (0, -1)])
@pytest.mark.parametrize("ndim", [2, 3])
def test_every_axis_has_bounds(ndim, index):
    @cuda.jit
    def read_kernel(x, index, out):
        out[0] = x[index]

    @cuda.jit
    def write_kernel(x, index, out):
        x[index] = out[0]

    x = np.zeros((2, 3, 4)[:ndim])
    index = index + (0,) * (ndim - 2)
    for kernel in (read_kernel, write_kernel):
        with pytest.raises(OutOfBoundsError, match=r"x\[.*outside shape"):
            emulate(kernel, 1, 1, x, index, np.zeros(1))


@cuda.jit
def past_a_row_kernel(x, out):
    row = x[0]
    out[0] = row[4]  # <-


def test_the_end_of_a_row_is_not_the_start_of_the_next():
    with pytest.raises(OutOfBoundsError) as caught:
        emulate(past_a_row_kernel, 1, 1, np.zeros((2, 4)), np.zeros(1))
    assert caught.value.lineno == marked_line(past_a_row_kernel)


@cuda.jit(device=True)
def first_of(x, i):
    return x[i]  # <-


@cuda.jit
def calls_out_of_bounds_kernel(x, out):
    out[0] = first_of(x, 7)


def test_a_fault_in_a_device_function_is_placed_there():
    with pytest.raises(OutOfBoundsError) as caught:
        emulate(calls_out_of_bounds_kernel, 1, 1, np.zeros(7), np.zeros(1))
    assert caught.value.lineno == marked_line(first_of)
    assert caught.value.place.kernel == "calls_out_of_bounds_kernel"


def test_an_atomic_has_bounds():
    @cuda.jit
    def kernel(x):
        cuda.atomic.add(x, 2, 1)

    with pytest.raises(OutOfBoundsError, match=r"x\[2\]"):
        emulate(kernel, 1, 1, np.zeros(2))


def test_a_float_is_no_index():
    @cuda.jit
    def kernel(x):
        x[len(x) / 2] = 1

    with pytest.raises(UnsupportedError, match=r"x\[1.0\]"):
        emulate(kernel, 1, 1, np.zeros(2))


def test_an_index_outside_a_view_is_not_taken_for_one_of_its_array():
    @cuda.jit
    def kernel(x):
        part = x[4:8]
        part[4] = 1

    with pytest.raises(OutOfBoundsError, match=r"\(view of x\)\[4\].* shape \(4,\)"):
        emulate(kernel, 1, 1, np.zeros(12))


USES_OF_A_ROW = {
    "sum": lambda row: row + 1,
    "product with a NumPy scalar": lambda row: np.float32(2) * row,
    "comparison": lambda row: 1 if row > 0 else 0,
    "equality": lambda row: 1 if row == 0 else 0,
    "condition": lambda row: 1 if row else 0,
    "cast": lambda row: float32(row),
    "function": lambda row: math.exp(row),
    "element": lambda row: row,
}


@pytest.mark.parametrize("use", USES_OF_A_ROW.values(), ids=USES_OF_A_ROW)
def test_a_forgotten_index_is_named_as_such(use):
    @cuda.jit
    def kernel(x, out):
        out[0] = use(x[0])

    with pytest.raises(UnsupportedError, match=r"x: an array of shape \(3,\) where"):
        emulate(kernel, 1, 1, np.ones((2, 3), np.float32), np.zeros(1))


def test_an_atomic_with_too_few_indices():
    @cuda.jit
    def kernel(x):
        cuda.atomic.add(x, 0, 1)

    with pytest.raises(UnsupportedError, match=r"x: an array of shape \(3,\) where"):
        emulate(kernel, 1, 1, np.ones((2, 3), np.float32))


def test_dynamic_shared_memory_that_the_launch_does_not_give():
    @cuda.jit
    def kernel():
        s = cuda.shared.array(0, float32)
        s[0] = 1

    with pytest.raises(OutOfBoundsError, match="gives no dynamic shared memory"):
        emulate(kernel, 1, 1)


# -- memory that nothing was written to -----------------------------------------------


@cuda.jit
def unwritten_shared_kernel(x, out):
    box = cuda.shared.array(33, float32)
    i = cuda.threadIdx.x
    box[i] = x[i]
    cuda.syncthreads()
    out[i] = box[i] + box[i + 1]  # <-


@cuda.jit
def unwritten_local_kernel(x, out):
    own = cuda.local.array((2, 2), int32)
    own[0, 0] = 1
    out[cuda.threadIdx.x] = own[0, 0] + own[1, 0]  # <-


@cuda.jit
def unwritten_dynamic_kernel(x, out):
    halves = cuda.shared.array(0, np.uint16)
    words = cuda.shared.array(0, np.uint32)
    i = cuda.threadIdx.x
    halves[2 * i] = 1
    cuda.syncthreads()
    out[i] = words[i]  # <-


@cuda.jit
def one_byte_of_a_word_kernel(x, out):
    byte = cuda.shared.array(0, np.uint8)
    words = cuda.shared.array(0, np.uint32)
    i = cuda.threadIdx.x
    byte[4 * i] = 1
    cuda.syncthreads()
    out[i] = words[i]  # <-


@cuda.jit
def unwritten_half_kernel(x, out):
    byte = cuda.shared.array(0, np.uint8)
    i = cuda.threadIdx.x
    byte[64 + i] = i
    cuda.syncthreads()
    out[i] = byte[64:].view(np.uint32)[i % 8]
    out[i] += byte[:64].view(np.uint32)[i % 8]  # <-


@cuda.jit
def accumulate_into_unwritten_kernel(x, out):
    box = cuda.shared.array((1, 1, 1), float32)
    if cuda.threadIdx.x == 5:
        box[0, 0, 0] += x[5]  # <-


@cuda.jit
def shared_of_the_last_block_kernel(x, out):
    box = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    if cuda.blockIdx.x == 0:
        box[i] = x[i]
    cuda.syncthreads()
    out[i] = box[i]  # <-


@cuda.jit
def unwritten_row_kernel(x, out):
    box = cuda.shared.array((2, 4), float32)
    row = box[1]
    out[0] = row[3]  # <-


@pytest.mark.parametrize(
    ("kernel", "element", "lane"),
    [
        (unwritten_row_kernel, "box[1, 3]", 0),
        (unwritten_shared_kernel, "box[32]", 31),
        (unwritten_local_kernel, "own[1, 0]", 0),
        (unwritten_dynamic_kernel, "words[0]", 0),
        (one_byte_of_a_word_kernel, "words[0]", 0),
        (unwritten_half_kernel, "byte[0]", 0),
        (accumulate_into_unwritten_kernel, "box[0, 0, 0]", 5),
        (shared_of_the_last_block_kernel, "box[0]", 0),
    ],
)
@pytest.mark.parametrize("trace", [False, True])
def test_memory_read_before_it_is_written(kernel, element, lane, trace):
    x, out = np.zeros(32, np.float32), np.zeros(32, np.float32)
    with pytest.raises(UninitialisedReadError) as caught:
        emulate(kernel, 2, 32, x, out, dynamic_shared=128, trace=trace)
    assert caught.value.what.startswith(element)
    assert caught.value.lineno == marked_line(kernel)
    assert caught.value.place.lane == lane


# -- barriers -------------------------------------------------------------------------


@cuda.jit
def barrier_in_a_branch_kernel(x):
    i = cuda.threadIdx.x
    if i < 16:
        cuda.syncthreads()  # <-
    x[i] = i


@cuda.jit
def early_return_kernel(x):
    i = cuda.threadIdx.x
    if i >= 16:
        return
    cuda.syncthreads()  # <-
    x[i] = i


@pytest.mark.parametrize("kernel", [barrier_in_a_branch_kernel, early_return_kernel])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_a_barrier_that_some_lanes_miss(kernel, order):
    with pytest.raises(BarrierDivergenceError) as caught:
        emulate(kernel, 1, 32, np.zeros(32), order=order)
    key = ("syncthreads", __file__, marked_line(kernel))
    assert caught.value.waiting == {key: list(range(16))}
    assert caught.value.left == list(range(16, 32))
    assert "lanes 0-15 wait at syncthreads" in str(caught.value)
    assert "lanes 16-31 left the kernel" in str(caught.value)


@cuda.jit
def two_barriers_kernel(x):
    if cuda.threadIdx.x % 2:
        cuda.syncthreads()  # <- 1
    else:
        cuda.syncthreads()  # <- 2


def test_lanes_at_two_different_barriers():
    with pytest.raises(BarrierDivergenceError) as caught:
        emulate(two_barriers_kernel, 1, 4, np.zeros(1))
    lines = [marked_line(two_barriers_kernel, f"# <- {n}") for n in (1, 2)]
    assert caught.value.waiting == {
        ("syncthreads", __file__, lines[0]): [1, 3],
        ("syncthreads", __file__, lines[1]): [0, 2],
    }
    assert caught.value.left == []


@cuda.jit
def uneven_loop_kernel(x):
    for _ in range(cuda.threadIdx.x // 3):
        cuda.syncthreads()  # <-


def test_a_barrier_in_a_loop_of_different_length():
    with pytest.raises(BarrierDivergenceError) as caught:
        emulate(uneven_loop_kernel, 1, 6, np.zeros(1))
    assert list(caught.value.waiting.values()) == [[3, 4, 5]]


@cuda.jit
def barrier_against_collective_kernel(x):
    if cuda.threadIdx.x < 32:
        x[0] = cuda.ballot_sync(0xFFFFFFFF, True)
    if cuda.threadIdx.x != 3:
        cuda.syncthreads()  # <- 1
    else:
        cuda.any_sync(0xFFFFFFFF, True)  # <- 2


def test_a_lane_at_a_collective_while_the_others_are_at_a_barrier():
    kernel = barrier_against_collective_kernel
    with pytest.raises(BarrierDivergenceError) as caught:
        emulate(kernel, 1, 64, np.zeros(1))
    at_vote = ("any_sync", __file__, marked_line(kernel, "# <- 2"))
    at_barrier = ("syncthreads", __file__, marked_line(kernel, "# <- 1"))
    assert caught.value.waiting[at_vote] == [3]
    assert caught.value.waiting[at_barrier] == [n for n in range(64) if n != 3]


# -- warp collectives -----------------------------------------------------------------


@cuda.jit
def wrong_mask_kernel(x):
    i = cuda.threadIdx.x
    if i < 16:
        x[i] = cuda.shfl_down_sync(0xFFFFFFFF, i, 1)  # <-


def test_a_mask_that_names_lanes_that_never_come():
    with pytest.raises(DeadlockError) as caught:
        emulate(wrong_mask_kernel, 1, 32, np.zeros(32))
    key = ("shfl_down_sync", __file__, marked_line(wrong_mask_kernel))
    assert caught.value.waiting == {key: list(range(16))}
    assert caught.value.left == list(range(16, 32))
    assert "mask 0xffffffff" in str(caught.value)


@cuda.jit
def different_masks_kernel(x):
    i = cuda.threadIdx.x
    mask = 0xFFFFFFFF if i < 16 else 0xFFFF0000
    cuda.syncwarp(mask)  # <-


def test_lanes_that_give_different_masks():
    with pytest.raises(DeadlockError) as caught:
        emulate(different_masks_kernel, 1, 32, np.zeros(32))
    key = ("syncwarp", __file__, marked_line(different_masks_kernel))
    assert caught.value.waiting == {key: list(range(16))}


@cuda.jit
def mask_without_me_kernel(x):
    x[0] = cuda.ballot_sync(0x0000FFFF, True)  # <-


def test_a_mask_that_does_not_name_its_caller():
    with pytest.raises(MaskError, match="0x0000ffff") as caught:
        emulate(mask_without_me_kernel, 1, 32, np.zeros(1))
    assert caught.value.lineno == marked_line(mask_without_me_kernel)
    assert caught.value.place.lane == 16


LOCKS = {
    "cas": lambda lock: cuda.atomic.cas(lock, 0, 0, 1),
    "compare_and_swap": lambda lock: cuda.atomic.compare_and_swap(lock, 0, 1),
    "exch": lambda lock: cuda.atomic.exch(lock, 0, 1),
}


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_that_nobody_frees(name):
    take = LOCKS[name]

    @cuda.jit
    def kernel(lock):
        while take(lock) != 0:
            pass

    with pytest.raises(DeadlockError, match=f"spin(.|\n)*wait at atomic.{name}"):
        emulate(kernel, 1, 2, np.zeros(1, np.int32))


# -- races ----------------------------------------------------------------------------


@cuda.jit
def missing_barrier_kernel(x, out):
    box = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    box[i] = x[i]  # <- 1
    out[i] = box[i ^ 1]  # <- 2


@pytest.mark.parametrize("order", ["forward", "reverse"])
def test_a_missing_barrier(order):
    """Every lane must have written in some order: lane 0 writes both of its pair."""

    @cuda.jit
    def kernel(x, out):
        box = cuda.shared.array(64, float32)
        i = cuda.threadIdx.x
        box[i] = 0
        cuda.syncthreads()
        box[i] = x[i]  # <- 1
        out[i] = box[i ^ 1]  # <- 2

    x, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
    race = one_race(kernel, 1, 64, x, out, order=order)
    assert (race.array, race.space, race.phases) == ("box", "shared", (1, 1))
    assert race.kinds == ("write", "read")
    assert race.lanes[0] ^ 1 == race.lanes[1]
    assert race.index[0] in race.lanes
    assert race.count == 64
    for part in ("box[", "lane", "phase 1", "# <- 1", "# <- 2"):
        assert part in str(race)


def test_an_unordered_read_of_what_is_not_written_yet_is_uninitialised():
    x, out = np.zeros(64, np.float32), np.zeros(64, np.float32)
    with pytest.raises(UninitialisedReadError) as caught:
        emulate(missing_barrier_kernel, 1, 64, x, out)
    assert caught.value.lineno == marked_line(missing_barrier_kernel, "# <- 2")


@cuda.jit
def missing_barrier_in_a_loop_kernel(x, out):
    box = cuda.shared.array(32, float32)
    i = cuda.threadIdx.x
    total = float32(0)
    for tile in range(x.shape[0]):
        box[i] = x[tile, i]  # <- 1
        cuda.syncthreads()
        for j in range(32):
            total += box[j]  # <- 2
    out[i] = total


def test_a_missing_second_barrier_of_a_tiled_loop():
    x, out = np.ones((3, 32), np.float32), np.zeros(32, np.float32)
    race = one_race(missing_barrier_in_a_loop_kernel, 1, 32, x, out)
    assert race.kinds == ("write", "read")
    assert race.phases[0] == race.phases[1]


@cuda.jit
def missing_syncwarp_kernel(x, out):
    box = cuda.shared.array(64, float32)
    i = cuda.threadIdx.x
    box[i] = x[i]
    box[i + 32] = 0
    cuda.syncwarp()
    box[i] += box[i + 16]  # <- 1
    cuda.shfl_sync(0xFFFFFFFF, i, 0)
    box[i] += box[i + 8]  # <- 2


def test_a_shuffle_does_not_order_memory():
    x, out = np.ones(32, np.float32), np.zeros(32, np.float32)
    races = emulate(missing_syncwarp_kernel, 1, 32, x, out, trace=True).races
    first = marked_line(missing_syncwarp_kernel, "# <- 1")
    second = marked_line(missing_syncwarp_kernel, "# <- 2")
    assert {race.linenos for race in races} >= {(first, second)}
    assert {line for race in races for line in race.linenos} == {first, second}


@cuda.jit
def non_atomic_sum_kernel(x, total):
    i = cuda.threadIdx.x
    total[0] += x[i]  # <-


def test_a_sum_that_is_not_atomic():
    x, total = np.ones(32, np.float32), np.zeros(1, np.float32)
    races = emulate(non_atomic_sum_kernel, 1, 32, x, total, trace=True).races
    line = marked_line(non_atomic_sum_kernel)
    assert {race.linenos for race in races} == {(line, line)}
    assert {race.kinds for race in races} == {("read", "write"), ("write", "write")}
    assert {race.index for race in races} == {(0,)}


@cuda.jit
def atomic_and_plain_kernel(counts, out):
    i = cuda.threadIdx.x
    cuda.atomic.add(counts, i % 2, 1)  # <- 1
    out[i] = counts[1]  # <- 2


def test_an_atomic_races_with_a_plain_read():
    counts, out = np.zeros(2, np.int32), np.zeros(4, np.int32)
    race = one_race(atomic_and_plain_kernel, 1, 4, counts, out)
    assert race.kinds == ("atomic", "read")
    assert race.index == (1,)


@cuda.jit
def same_place_kernel(x):
    x[0, 2] = cuda.threadIdx.x  # <-


def test_two_lanes_write_the_same_place():
    report = emulate(same_place_kernel, 1, 3, np.zeros((1, 3)), trace=True)
    (race,) = report.races
    assert race.count == 1
    assert race.linenos == (marked_line(same_place_kernel),) * 2
    assert (race.index, race.lanes) == ((0, 2), (0, 1))


@cuda.jit
def block_to_block_kernel(x):
    b, i = cuda.blockIdx.x, cuda.threadIdx.x
    x[b, i] = 1  # <- 1
    cuda.syncthreads()
    if b > 0:
        x[b, i] += x[b - 1, i]  # <- 2


def test_blocks_do_not_wait_for_each_other():
    races = emulate(block_to_block_kernel, 3, 4, np.zeros((3, 4)), trace=True).races
    first = marked_line(block_to_block_kernel, "# <- 1")
    second = marked_line(block_to_block_kernel, "# <- 2")
    assert all(race.between_blocks for race in races)
    assert (first, second) in {race.linenos for race in races}
    assert {line for race in races for line in race.linenos} == {first, second}
    race = races[0]
    assert race.blocks[0][0] + 1 == race.blocks[1][0]
    assert f"block {race.blocks[1]}" in str(race)


@cuda.jit
def overlapping_arguments_kernel(source, target):
    i = cuda.threadIdx.x
    target[i] = source[i]  # <-


def test_an_in_place_move_through_two_arguments():
    """A compaction in parallel overwrites rows that another lane has yet to read."""
    cache = np.arange(10, dtype=np.float32)
    races = emulate(
        overlapping_arguments_kernel, 1, 8, cache[2:], cache[:8], trace=True
    ).races
    line = marked_line(overlapping_arguments_kernel)
    assert [race.linenos for race in races] == [(line, line)]
    assert races[0].array == "source/target"


@cuda.jit
def overlapping_bytes_kernel(out):
    halves = cuda.shared.array(0, np.uint16)
    words = cuda.shared.array(0, np.uint32)
    i = cuda.threadIdx.x
    if i == 0:
        words[1] = 7  # <- 1
    else:
        halves[3] = 7  # <- 2


def test_typed_views_race_on_their_common_bytes():
    race = one_race(overlapping_bytes_kernel, 1, 2, np.zeros(1), dynamic_shared=16)
    assert race.array == "words/halves"
    assert race.index == (1,)


@cuda.jit
def syncwarp_between_warps_kernel(x):
    i = cuda.threadIdx.x
    x[i] = i  # <- 1
    cuda.syncwarp()
    x[i ^ 32] = i  # <- 2


def test_a_syncwarp_orders_no_other_warp():
    kernel = syncwarp_between_warps_kernel
    races = emulate(kernel, 1, 64, np.zeros(64), trace=True).races
    first, second = marked_line(kernel, "# <- 1"), marked_line(kernel, "# <- 2")
    between_warps = [race for race in races if race.linenos == (first, second)]
    assert len(between_warps) == 1
    assert between_warps[0].lanes[0] ^ between_warps[0].lanes[1] == 32


def test_a_read_only_argument_is_not_written():
    @cuda.jit
    def kernel(x):
        x[0] = 1

    x = np.zeros(1, np.int32)
    x.flags.writeable = False
    with pytest.raises(UnsupportedError, match="x is read-only"):
        emulate(kernel, 1, 1, x)


@cuda.jit
def late_write_kernel(x, out):
    box = cuda.shared.array(2, int32)
    i = cuda.threadIdx.x
    if i == 0:
        box[0] = 1
    cuda.syncthreads()
    out[i] = box[0]  # <- 1
    if i == 40:
        box[0] = 2  # <- 2


def test_a_write_after_a_read_by_another_warp():
    race = one_race(late_write_kernel, 1, 64, np.zeros(1), np.zeros(64))
    assert race.lanes == (0, 40)
    assert race.kinds == ("read", "write")
