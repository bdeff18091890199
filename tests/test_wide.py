"""Wide loads and warp reductions: what they give, and where they may be used."""

import numpy as np
import pytest
from logit_rows import EVERY_DTYPE
from numba import cuda, float32, int32, uint16
from numba.core.types import float16

from ddtree_numba import backend, bf16
from ddtree_numba.backend import place
from ddtree_numba.emulator import MisalignedError, emulate
from ddtree_numba.kernels.wide import (
    PIECE,
    find_bin,
    load_8,
    load_piece,
    loads_wide,
    redux_max,
    redux_min,
    scan_block,
    warp_sum,
)


@cuda.jit
def pieces_kernel(
    rows,  # [R, V] f32, f16 or u16
    wide,  # i32
    out,  # out [R, 32 * 8] f32
):
    tile = cuda.local.array(PIECE, np.float32)
    start = cuda.threadIdx.x * PIECE
    load_piece(rows[cuda.blockIdx.x], start, wide, tile, 0)
    for j in range(PIECE):
        out[cuda.blockIdx.x, start + j] = tile[j]


@cuda.jit
def redux_kernel(
    x,  # [32] i32
    out,  # out [2, 32] i32
):
    i = cuda.threadIdx.x
    out[0, i] = redux_max(x[i])
    out[1, i] = redux_min(np.uint32(x[i]))


@cuda.jit
def load_8_kernel(x, first, out):  # x [V] f32, first i32, out [8] f32
    values = load_8(x, first)
    for j in range(PIECE):
        out[j] = values[j]


@cuda.jit
def sum_kernel(x, out):  # x [32] f32, out [32] f32
    i = cuda.threadIdx.x
    out[i] = warp_sum(x[i])


@cuda.jit
def scan_kernel(
    x,  # [T] i32
    out,  # out [T, 2] i32
):
    totals = cuda.shared.array(32, int32)
    i = cuda.threadIdx.x
    out[i, 0], out[i, 1] = scan_block(x[i], totals)


BINS = 128


@cuda.jit
def find_bin_kernel(
    counts,  # [BINS] i32
    wanted,  # i32
    out,  # out [BINS / 2, 4] i32: the bin, and what is found beside it
):
    histogram = cuda.shared.array(BINS, int32)
    of_warps = cuda.shared.array(32, int32)
    found = cuda.shared.array(3, int32)
    i = cuda.threadIdx.x
    for n in range(2 * i, 2 * i + 2):
        histogram[n] = counts[n]
    if i < 3:
        found[i] = -1
    out[i, 0] = find_bin((histogram, of_warps, found), wanted)
    for n in range(3):
        out[i, 1 + n] = found[n]


def load(logits: np.ndarray, wide: bool, executor: str) -> np.ndarray:
    at = place(executor, logits=logits)
    out = at.empty((len(logits), 32 * PIECE), np.float32)
    at.launch(pieces_kernel, len(logits), 32, at.put(logits), np.int32(wide), out)
    return at.give(out)


@EVERY_DTYPE
@pytest.mark.parametrize(("vocab", "wide"), [(120, True), (120, False), (117, False)])
def test_pieces_are_the_row_and_minus_infinity_behind(
    kernel_executor, cast, vocab, wide
):
    logits = cast(np.random.default_rng(vocab).standard_normal((2, vocab)))
    exact = bf16.to_float32(logits) if logits.dtype == np.uint16 else logits
    found = load(logits, wide, kernel_executor)
    assert (found[:, :vocab] == exact).all()
    assert (found[:, vocab:] == -np.inf).all()


@pytest.mark.parametrize("seed", range(3))
def test_the_warp_finds_its_largest_and_smallest(kernel_executor, seed):
    x = np.random.default_rng(seed).integers(-(2**31), 2**31, 32).astype(np.int32)
    at = place(kernel_executor, x=x)
    out = at.empty((2, 32), np.int32)
    at.launch(redux_kernel, 1, 32, at.put(x), out)
    out = at.give(out)
    assert (out[0] == x.max()).all()
    assert (out[1].view(np.uint32) == x.view(np.uint32).min()).all()


def test_every_lane_has_the_sum_of_the_warp(kernel_executor):
    x = np.random.default_rng(0).integers(-99, 99, 32).astype(np.float32)
    at = place(kernel_executor, x=x)
    out = at.empty((32,), np.float32)
    at.launch(sum_kernel, 1, 32, at.put(x), out)
    assert (at.give(out) == x.sum()).all()


@pytest.mark.parametrize("lanes", [32, 96, 1024])
def test_every_lane_has_the_sum_of_those_before_it(kernel_executor, lanes):
    x = np.random.default_rng(lanes).integers(-99, 99, lanes, np.int32)
    at = place(kernel_executor, x=x)
    out = at.empty((lanes, 2), np.int32)
    at.launch(scan_kernel, 1, lanes, at.put(x), out)
    out = at.give(out)
    assert (out[:, 0] == np.cumsum(x) - x).all()
    assert (out[:, 1] == x.sum()).all()


def find(counts: np.ndarray, wanted: int, executor: str) -> np.ndarray:
    at = place(executor, counts=counts)
    out = at.empty((BINS // 2, 4), np.int32)
    at.launch(find_bin_kernel, 1, BINS // 2, at.put(counts), np.int32(wanted), out)
    return at.give(out)


@pytest.mark.parametrize("bin_", [2, 3, 70, 127])
def test_the_bin_of_the_first_and_of_the_last_counted_in_it(kernel_executor, bin_):
    """A lane's first bin and its second, in both warps; the first two are empty."""
    counts = np.random.default_rng(0).integers(0, 4, BINS, np.int32)
    counts[:2], counts[bin_] = 0, 3
    upto = counts[: bin_ + 1].sum()
    for wanted in (upto - 2, upto):
        found = find(counts, wanted, kernel_executor)
        assert (found == [bin_, bin_, upto - 3, upto]).all()


def test_it_is_the_last_bin_if_too_few_are_counted(kernel_executor):
    counts = np.zeros(BINS, np.int32)
    counts[[5, 90]] = 2, 1
    found = find(counts, 4, kernel_executor)
    assert (found == [BINS - 1, -1, -1, -1]).all()


def test_the_emulator_sees_a_misaligned_wide_load():
    x, out = np.zeros(64, np.float32), np.empty(8, np.float32)
    with pytest.raises(MisalignedError, match="load_8 needs an address that is a mult"):
        emulate(load_8_kernel, 1, 1, x, 2, out)


@EVERY_DTYPE
def test_only_rows_of_whole_aligned_pieces_are_loaded_wide(cast):
    logits = cast(np.zeros((2, 4, 64)))
    assert loads_wide(logits)
    assert loads_wide(logits[:, ::2])
    assert not loads_wide(logits[..., 1:])  # one element past a multiple
    assert not loads_wide(logits[..., ::2])
    assert not loads_wide(cast(np.zeros((2, 4, 60))))
    # One row alone may stand at any distance from those that are not there.
    step = 16 // logits.itemsize
    row = logits.reshape(1, 1, -1)[..., step : step + 40]
    assert loads_wide(row)


@pytest.mark.gpu
def test_device_arrays_are_asked_for_their_address():
    x = cuda.to_device(np.zeros((2, 64), np.float32))
    assert loads_wide(x)
    assert not loads_wide(x[:, 4 : 4 + 2])
    assert not loads_wide(x[:, 1:9])


@pytest.mark.ptx
@pytest.mark.parametrize(
    ("cc", "dtype", "n"),
    [((8, 0), float32, 2), ((9, 0), float16, 1), ((12, 0), uint16, 1)],
    ids=str,
)
def test_ptx_loads_16_bytes_at_a_time(cc, dtype, n):
    signature = (dtype[:, ::1], int32, float32[:, ::1])
    ptx = backend.compile_ptx(pieces_kernel, signature, compute_capability=cc)
    assert ptx.count("ld.global.v4") == n
    assert ".local" not in ptx
    signature = (int32[::1], int32[:, ::1])
    ptx = backend.compile_ptx(redux_kernel, signature, compute_capability=cc)
    assert ptx.count("redux.sync.max.s32") == ptx.count("redux.sync.min.u32") == 1
