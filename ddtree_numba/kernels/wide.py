"""Wide loads, and what the lanes of a warp or block do together.

=================  ================================================================
`load_8`           ``ld.global.v4``: eight elements as float32
`load_piece`       eight logits of a row, by such loads if they may be
`redux_max`        ``redux.sync.max.s32``: the largest of the warp's 32
`redux_min`        ``redux.sync.min.u32``: the smallest, unsigned
`warp_max`         the largest of the warp's 32, for every lane
`warp_sum`         the sum of the warp's 32, for every lane
`loads_wide`       whether rows may be loaded so
`scan_block`       every lane's sum over the lanes before it, and the sum of all
`clear_bins`       empty a block's histogram of two bins a lane
`last_bin`         its last bin
`find_bin`         where in a block's histogram the n-th counted lies
=================  ================================================================

A warp that loads 2 bytes a lane asks memory for 64 bytes at a time and needs eight
times the instructions; what reads all logits once is as fast as its loads are wide.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from llvmlite import ir  # type: ignore[import-untyped]
from numba import cuda, types
from numba.core import cgutils
from numba.core.errors import TypingError
from numba.cuda.extending import intrinsic

from ddtree_numba.backend import is_device_array, to_float32
from ddtree_numba.emulator.intrinsics import Executing, emulation
from ddtree_numba.kernels.ptx import (
    _F32,
    _GLOBAL,
    _I32,
    _I64,
    _address,
    _assembly,
    _check_index,
)

PIECE = 8  # elements that are loaded together
WARP = 32
FULL_WARP = 0xFFFFFFFF


@intrinsic
def load_8(typingctx, array, index):
    """Eight neighbouring elements as float32, by loads of 16 bytes (ld.global.v4).

    array : float32, float16 or uint16 (bf16 bits), in global memory
    index
        Of the first element, whose address is a multiple of 16.
    """
    _check_index(array, index)
    if array.dtype not in (types.float32, types.float16, types.uint16):
        raise TypingError(f"array: expected f32, f16 or u16 elements, got {array}")

    def codegen(context, builder, signature, args):
        kind = signature.args[0].dtype
        address = _address(context, builder, signature.args, args, _GLOBAL)
        if kind == types.float32:
            words = _load(builder, address, _F32, 4)
            words += _load(builder, builder.add(address, _I64(16)), _F32, 4)
        elif kind == types.uint16:
            words = []
            for word in _load(builder, address, _I32, 4):
                low = builder.shl(word, _I32(16))
                high = builder.and_(word, _I32(0xFFFF0000))
                words += [builder.bitcast(half, _F32) for half in (low, high)]
        else:
            halves = _load(builder, address, ir.HalfType(), 8)
            words = [builder.fpext(half, _F32) for half in halves]
        return cgutils.pack_array(builder, words)

    return types.UniTuple(types.float32, PIECE)(array, index), codegen


def _load(builder: Any, address: Any, kind: ir.Type, count: int) -> list[Any]:
    """`count` elements that are 16 bytes together."""
    vector = ir.VectorType(kind, count)
    pointer = builder.inttoptr(address, vector.as_pointer(_GLOBAL))
    loaded = builder.load(pointer, align=16)
    return [builder.extract_element(loaded, _I32(n)) for n in range(count)]


@emulation(load_8)
def _(lane: Executing, array: Any, index: Any) -> tuple[np.float32, ...]:
    step = 16 // array.itemsize
    starts = range(index, index + PIECE, step)
    words = [lane.read("load_8", array, i, 16, "global") for i in starts]
    values = np.concatenate(words).view(array.dtype)
    return tuple(map(to_float32, values))


@intrinsic
def redux_max(typingctx, x):
    """``redux.sync.max.s32``: the largest x of the warp, all of whose lanes come."""

    def codegen(context, builder, signature, args):
        text = "redux.sync.max.s32 $0, $1, 0xffffffff;"
        return _assembly(
            builder, _I32, text, "=r,r", list(args), memory=False, warp=True
        )

    return types.int32(types.int32), codegen


@intrinsic
def redux_min(typingctx, x):
    """``redux.sync.min.u32``: the smallest x of the warp, all of whose lanes come."""

    def codegen(context, builder, signature, args):
        text = "redux.sync.min.u32 $0, $1, 0xffffffff;"
        return _assembly(
            builder, _I32, text, "=r,r", list(args), memory=False, warp=True
        )

    return types.uint32(types.uint32), codegen


@emulation(redux_max)
def _(lane: Executing, x: Any) -> int:
    return lane.together("redux.max", int(x), lambda given: [max(given)] * len(given))


@emulation(redux_min)
def _(lane: Executing, x: Any) -> int:
    return lane.together("redux.min", int(x), lambda given: [min(given)] * len(given))


@cuda.jit(device=True)
def warp_max(x):
    """The largest of the warp's x that is a number, for every lane."""
    for step in range(5):
        y = cuda.shfl_xor_sync(FULL_WARP, x, 16 >> step)
        x = cuda.libdevice.fmaxf(x, y)
    return x


@cuda.jit(device=True)
def warp_sum(x):
    """The sum of the warp's x, the same for every lane."""
    for step in range(5):  # a loop over a tuple is not always unrolled
        x += cuda.shfl_xor_sync(FULL_WARP, x, 16 >> step)
    return x


@cuda.jit(device=True)
def scan_warp(x):
    """The sum of x over this lane and those of its warp before it, int32."""
    lane = cuda.threadIdx.x % WARP
    for distance in (1, 2, 4, 8, 16):
        before = cuda.shfl_up_sync(FULL_WARP, x, distance)
        if lane >= distance:
            x += before
    return x


@cuda.jit(device=True)
def scan_block(x, totals):
    """The sum of x over the lanes of the block before this one, and that of all.

    x : int32
    totals : shared int32 [32], which nobody reads any more; a block barrier follows
    """
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    upto = scan_warp(np.int32(x))
    if lane == WARP - 1:
        totals[warp] = upto
    cuda.syncthreads()  # every warp's sum is written before it is read
    warps = cuda.blockDim.x // WARP
    sums = scan_warp(totals[lane] if lane < warps else np.int32(0))
    of_all = cuda.shfl_sync(FULL_WARP, sums, WARP - 1)
    of_warps = cuda.shfl_sync(FULL_WARP, sums, max(warp - 1, 0))
    return upto - x + (of_warps if warp > 0 else np.int32(0)), of_all


@cuda.jit(device=True)
def last_bin():
    """The last bin of a block's histogram, which has two a lane."""
    return np.int32(2 * cuda.blockDim.x - 1)


@cuda.jit(device=True)
def clear_bins(histogram):
    """Empty the histogram; ends with a block barrier."""
    histogram[cuda.threadIdx.x] = 0
    histogram[cuda.threadIdx.x + cuda.blockDim.x] = 0
    cuda.syncthreads()  # the bins are empty before anything is counted


@cuda.jit(device=True)
def find_bin(counting, wanted):
    """The bin of the `wanted`-th counted, from bin 0 on; the last if there are fewer.

    counting : shared arrays of int32: the histogram, of two bins a lane; 32, for
        `scan_block`; and 3, for the bin, how many are before it, and up to its end
    For all threads; begins and ends with a block barrier.
    """
    histogram, of_warps, found = counting
    cuda.syncthreads()  # everything is counted before the bins are read
    bin_ = np.uint32(2 * cuda.threadIdx.x)
    count = histogram[bin_]
    both = count + histogram[bin_ + np.uint32(1)]
    before, total = scan_block(both, of_warps)
    if before < wanted <= before + both:
        if wanted > before + count:
            bin_ = np.uint32(bin_ + np.uint32(1))
            before += count
            count = both - count
        found[0] = bin_
        found[1] = before
        found[2] = before + count
    cuda.syncthreads()  # the bin is found before it is read
    return found[0] if total >= wanted else last_bin()


# ------------------------------------------------------------------ rows of logits


def loads_wide(x: Any) -> bool:
    """Whether `load_8` may load 16 bytes at a time from every row of `x`.

    Parameters
    ----------
    x : float32, float16 or uint16 (bf16 bits) [..., V], NumPy or Numba device array
        Rows must start at multiples of 16 bytes and hold whole pieces.
    """
    if is_device_array(x):
        address = x.__cuda_array_interface__["data"][0]
    else:
        address = x.ctypes.data
    steps = [s for s, n in zip(x.strides[:-1], x.shape[:-1], strict=True) if n > 1]
    return (
        x.strides[-1] == x.dtype.itemsize
        and x.shape[-1] % PIECE == 0
        and not any(step % 16 for step in (address, *steps))
    )


@cuda.jit(device=True)
def load_piece(row, start, wide, tile, at):
    """Load ``row[start : start + 8]`` to ``tile[at : at + 8]``, -inf past the end.

    row : float32, float16 or uint16 (bf16 bits) [V]
    wide : whether `loads_wide` allows it; then `start` is a multiple of 8
    """
    first = np.uint32(start)  # beside a uint64 the size would become float64
    if wide:
        inside = first < row.size
        values = load_8(row, first if inside else np.uint32(0))
        for j in range(PIECE):
            tile[at + j] = values[j] if inside else np.float32(-math.inf)
    else:
        for j in range(PIECE):
            i = np.uint32(first + np.uint32(j))
            x = to_float32(row[i if i < row.size else np.uint32(0)])
            tile[at + j] = x if i < row.size else np.float32(-math.inf)
