"""topk: the k most probable tokens of every drafted position, with log-probabilities.

Contract
--------
``log_probs[k] = logits[token_ids[k]] - logsumexp(logits)`` over the full row; logits
fall, ties by lower token id (0.0 and -0.0 tie). A row with NaN or +inf, or with nothing
but -inf, is no distribution: its log_probs are NaN and its token_ids -1.
`ddtree_numba.reference.topk` is the specification.

Selection
---------
A token's *code* is an integer whose upper bits order the logits and whose lower bits
order the ids, falling, so that no two codes are equal and "better" is "larger"::

    code = order(logit) << id_bits | (V - 1 - id)

A radix select looks at ten bits of the codes at a time, from the top: a histogram of
those that still can be the k-th tells which ten bits the k-th has. It ends as soon as
no more than `CAPACITY` codes are as large as what is known of the k-th; these are
gathered and sorted in shared memory, and the first k of them win.

Versions
--------
topk_kernel    one block a row; reads the row twice, and once more for every ten bits
               that the selection needs (mostly one or two)
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import place, to_float32, whole_number

MAX_K = 1024
CAPACITY = 2048  # codes that are sorted in shared memory, a power of two
THREADS = 512
UNROLL = 8  # elements that a thread loads before it looks at the first
DIGIT_BITS = 10
BINS = 1 << DIGIT_BITS
WARP = 32
FULL_WARP = 0xFFFFFFFF


@cuda.jit(device=True)
def load_tile(row, start, tile):
    """Load a thread's elements of a tile, -inf past the end: the loads overlap."""
    for j in range(UNROLL):
        i = start + j * cuda.blockDim.x
        tile[j] = np.float32(-math.inf)
        if i < row.size:
            tile[j] = to_float32(row[i])


@cuda.jit(device=True)
def code_of(x, i, vocab, key_shift, id_bits):
    """An integer that orders tokens by logit, then by lower id; the larger is better.

    Positive floats order as their bits, negative ones the other way round.
    """
    if x == np.float32(0.0):
        x = np.float32(0.0)  # -0.0 ties with 0.0
    bits = np.int64(cuda.libdevice.float_as_int(x))
    order = (bits ^ ((bits >> 31) & 0x7FFFFFFF)) + 0x80000000
    return order >> key_shift << id_bits | (vocab - 1 - i)


@cuda.jit(device=True)
def merge_sums(top, total, other_top, other_total):
    """Merge two sums of ``exp(x - top)``, each about its own maximum."""
    highest = max(top, other_top)
    if highest == np.float32(-math.inf):
        return highest, np.float32(0.0)
    return highest, (
        total * math.exp(top - highest) + other_total * math.exp(other_top - highest)
    )


@cuda.jit(device=True)
def sum_of_row(row):
    """The row's maximum, its sum of ``exp(x - maximum)``, and whether it is bad."""
    tile = cuda.local.array(UNROLL, np.float32)
    top = np.float32(-math.inf)
    total = np.float32(0.0)
    # What rounding took from `total` (Kahan). Ties make it necessary: the same term,
    # added over and over, is rounded the same way over and over.
    excess = np.float32(0.0)
    bad = False
    for start in range(cuda.threadIdx.x, row.size, UNROLL * cuda.blockDim.x):
        load_tile(row, start, tile)
        for j in range(UNROLL):
            x = tile[j]
            if x != x or x == np.float32(math.inf):
                bad = True
            elif x > np.float32(-math.inf):
                if x > top:
                    scale = math.exp(top - x)
                    total *= scale
                    excess *= scale
                    top = x
                term = math.exp(x - top) - excess
                longer = total + term
                excess = (longer - total) - term
                total = longer
    tops = cuda.shared.array(WARP, np.float32)
    totals = cuda.shared.array(WARP, np.float32)
    top, total = merge_warp(top, total)
    if cuda.threadIdx.x % WARP == 0:
        tops[cuda.threadIdx.x // WARP] = top
        totals[cuda.threadIdx.x // WARP] = total
    # Orders every warp's sum before it is read; and one bad element spoils the row.
    bad = cuda.syncthreads_or(np.int32(bad)) != 0
    lane = cuda.threadIdx.x % WARP
    top = np.float32(-math.inf)
    total = np.float32(0.0)
    if lane < cuda.blockDim.x // WARP:
        top = tops[lane]
        total = totals[lane]
    top, total = merge_warp(top, total)
    # Two lanes may round the same sum in another order (one of its products is fused),
    # and equal logits must not differ by the lane that writes them.
    total = cuda.shfl_sync(FULL_WARP, total, 0)
    return top, total, bad or top == np.float32(-math.inf)


@cuda.jit(device=True)
def merge_warp(top, total):
    """`merge_sums` over a warp, for every lane of it."""
    distance = WARP // 2
    while distance > 0:
        other_top = cuda.shfl_xor_sync(FULL_WARP, top, distance)
        other_total = cuda.shfl_xor_sync(FULL_WARP, total, distance)
        top, total = merge_sums(top, total, other_top, other_total)
        distance //= 2
    return top, total


@cuda.jit(device=True)
def count_digits(row, key_shift, id_bits, known, shift, low, histogram):
    """Histogram of bits low … shift of the codes that agree with `known` above."""
    tile = cuda.local.array(UNROLL, np.float32)
    for bin_ in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        histogram[bin_] = 0
    cuda.syncthreads()  # the bins are empty before anything is counted
    for start in range(cuda.threadIdx.x, row.size, UNROLL * cuda.blockDim.x):
        load_tile(row, start, tile)
        for j in range(UNROLL):
            i = start + j * cuda.blockDim.x
            code = code_of(tile[j], i, row.size, key_shift, id_bits)
            if i < row.size and code >> shift == known:
                digit = (code >> low) & ((1 << (shift - low)) - 1)
                cuda.atomic.add(histogram, digit, 1)
    cuda.syncthreads()  # everything is counted before the bins are read


@cuda.jit(device=True)
def find_digit(histogram, above, kept, found):
    """One warp finds the bin that holds the `kept`-th code, counting from the top bin.

    `above` codes are larger than any in the histogram. ``found`` gets the bin, the
    codes above it, and these together with those in it.
    """
    lane = cuda.threadIdx.x
    highest = BINS - 1 - lane * (BINS // WARP)  # a lane's bins, falling from here
    mine = 0
    for j in range(BINS // WARP):
        mine += histogram[highest - j]
    upto = mine  # becomes the sum over this lane and those before it
    distance = 1
    while distance < WARP:
        before = cuda.shfl_up_sync(FULL_WARP, upto, distance)
        if lane >= distance:
            upto += before
        distance *= 2
    count = above + upto - mine
    if count < kept <= count + mine:
        bin_ = highest
        while count + histogram[bin_] < kept:
            count += histogram[bin_]
            bin_ -= 1
        found[0] = bin_
        found[1] = count
        found[2] = count + histogram[bin_]


@cuda.jit(device=True)
def select(row, kept, key_shift, id_bits):
    """Find a bound with ``kept … CAPACITY`` codes at or above it.

    Returns ``bound, shift, count``: `count` codes have ``code >> shift >= bound``.
    """
    histogram = cuda.shared.array(BINS, np.int32)
    found = cuda.shared.array(3, np.int32)
    known = 0  # the kept-th largest code's bits from `shift` up
    shift = 32 - key_shift + id_bits
    above = 0  # codes larger than `known` in these bits
    count = row.size
    while count > CAPACITY:
        low = max(shift - DIGIT_BITS, 0)
        count_digits(row, key_shift, id_bits, known, shift, low, histogram)
        if cuda.threadIdx.x < WARP:
            find_digit(histogram, above, kept, found)
        cuda.syncthreads()  # the digit is found before it is read
        known = known << (shift - low) | found[0]
        above = found[1]
        count = found[2]
        shift = low
    return known, shift, count


@cuda.jit(device=True)
def gather(row, key_shift, id_bits, bound, shift, codes):
    """Collect the codes at or above the bound, in no order."""
    tile = cuda.local.array(UNROLL, np.float32)
    used = cuda.shared.array(1, np.int32)
    if cuda.threadIdx.x == 0:
        used[0] = 0
    cuda.syncthreads()  # the count starts before anyone adds to it
    for start in range(cuda.threadIdx.x, row.size, UNROLL * cuda.blockDim.x):
        load_tile(row, start, tile)
        for j in range(UNROLL):
            i = start + j * cuda.blockDim.x
            code = code_of(tile[j], i, row.size, key_shift, id_bits)
            if i < row.size and code >> shift >= bound:
                codes[cuda.atomic.add(used, 0, 1)] = code


@cuda.jit(device=True)
def sort_falling(codes, count):
    """Bitonic sort of ``codes[:count]`` in shared memory; the rest is room to pad."""
    size = 1
    while size < count:
        size *= 2
    for i in range(count + cuda.threadIdx.x, size, cuda.blockDim.x):
        codes[i] = -1  # below every code
    width = 2
    while width <= size:
        distance = width // 2
        while distance > 0:
            cuda.syncthreads()  # the exchange before this one is done
            for i in range(cuda.threadIdx.x, size, cuda.blockDim.x):
                other = i ^ distance
                if other > i:
                    falling = i & width == 0
                    if (codes[i] < codes[other]) == falling:
                        smaller = codes[i]
                        codes[i] = codes[other]
                        codes[other] = smaller
            distance //= 2
        width *= 2
    cuda.syncthreads()  # the last exchange is done


@cuda.jit
def topk_kernel(
    logits,  # [B, L, V] f32, f16 or u16 (bf16 bits)
    key_shift,  # i32: low bits of a float32 that say nothing about such a logit
    id_bits,  # i32: bits that hold V - 1
    log_probs,  # out [B, L, K] f32
    token_ids,  # out [B, L, K] i32
):
    length, kept = log_probs.shape[1], log_probs.shape[2]
    b = cuda.blockIdx.x // length
    position = cuda.blockIdx.x % length
    row = logits[b, position]
    codes = cuda.shared.array(CAPACITY, np.int64)
    top, total, bad = sum_of_row(row)
    if bad:  # for all threads of the block alike
        for k in range(cuda.threadIdx.x, kept, cuda.blockDim.x):
            log_probs[b, position, k] = np.float32(math.nan)
            token_ids[b, position, k] = -1
        return
    bound, shift, count = select(row, kept, key_shift, id_bits)
    gather(row, key_shift, id_bits, bound, shift, codes)
    sort_falling(codes, count)
    log_total = math.log(total)
    for k in range(cuda.threadIdx.x, kept, cuda.blockDim.x):
        token = row.size - 1 - (codes[k] & ((np.int64(1) << id_bits) - 1))
        # Not x - (top + log_total): that sum would round away what is wanted.
        log_probs[b, position, k] = (to_float32(row[token]) - top) - log_total
        token_ids[b, position, k] = token


def topk(
    logits: Any, k: int, *, check: bool | None = None, executor: str | None = None
) -> tuple[Any, Any]:
    """Log-probabilities and ids of the k most probable tokens of every position.

    Parameters
    ----------
    logits : float32, float16 or bfloat16 (uint16 bits in NumPy) [B, L, V]
        -inf is legal (a masked token).
    k : int
        Candidates to keep, ``K = min(k, V)``, up to 1024.
    check : bool, optional
        Raise for a row with NaN, +inf or only -inf; otherwise its candidates are NaN
        and -1. If omitted, host arrays are checked; device arrays cannot be.
    executor : {"gpu", "emulator", "numpy"}, optional
        If omitted: ``DDTREE_EXECUTOR``, else NumPy for host arrays, the GPU for device
        arrays.

    Returns
    -------
    log_probs : float32 [B, L, K]
        Natural logarithms, falling along K; ties by lower token id.
    token_ids : int32 [B, L, K]

    Raises
    ------
    TypeError, ValueError
        For logits of the wrong dtype or rank, a k that is no count or too large,
        ``check=True`` with device arrays, and (checked) a bad row, naming request and
        row.
    """
    at = place(executor, default="numpy", logits=logits)
    checked = at.checks(check, "logits")
    given = at.check(
        logits, "logits", dtypes=(np.float32, np.float16, np.uint16), ndim=3
    )
    batch, length, vocab = given.shape
    kept = min(whole_number(k, "k"), vocab)
    if kept > MAX_K:  # the kernel's limit: what is legal must not depend on where
        raise ValueError(f"k is {k} and V {vocab}; expected K up to {MAX_K}")
    # Without a candidate the kernel has nowhere to say that a row is bad.
    if at.executor == "numpy" or (kept == 0 and not at.on_device):
        return reference.topk(given, k, check=checked)
    log_probs = at.empty((batch, length, kept), np.float32)
    token_ids = at.empty((batch, length, kept), np.int32)
    if batch * length * kept:
        key_shift = {np.uint16: 16, np.float16: 13}.get(given.dtype.type, 0)
        at.launch(
            topk_kernel,
            batch * length,
            min(THREADS, -(-vocab // WARP) * WARP),
            at.put(given),
            np.int32(key_shift),
            np.int32((vocab - 1).bit_length()),
            log_probs,
            token_ids,
        )
    log_probs, token_ids = at.give(log_probs), at.give(token_ids)
    if checked and np.isnan(log_probs).any():
        reference.topk(given, 0)  # raises, and says which row and why
    return log_probs, token_ids
