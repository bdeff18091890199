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
topk_kernel        "simple": one block a row; reads the row twice, and once more for
                   every ten bits that the selection needs (mostly one or two)
topk_slice_kernel  "split": a row is cut into slices, one block each, which keeps its
                   slice in registers and so reads it once. It leaves the slice's sum
                   and its best codes, at least k of them, to
topk_merge_kernel  one block a row: merges the sums, and selects again from the codes
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import Place, place, to_float32, whole_number

MAX_K = 1024
CAPACITY = 2048  # codes that are sorted in shared memory, a power of two
THREADS = 512
UNROLL = 8  # elements that a thread loads before it looks at the first
DIGIT_BITS = 10
BINS = 1 << DIGIT_BITS
WARP = 32
FULL_WARP = 0xFFFFFFFF
GROUPS = BINS // WARP  # of bins, a lane a bin

VERSIONS = ("auto", "simple", "split")
SLICE_THREADS = 256  # a constant, which spares a thread registers for indices
TILE = 20  # elements of a slice that a thread holds, a multiple of four
SLICE = SLICE_THREADS * TILE
ROOM = 64  # codes beyond k that a selection may leave, to spare it the last bits


@cuda.jit(device=True)
def load_tile(row, start, tile):
    """Load a thread's elements of a tile, -inf past the end: the loads overlap."""
    # Without a branch, nor the test for a negative index that a signed one costs Numba.
    for j in range(tile.size):
        i = np.uint32(start + j * cuda.blockDim.x)
        x = to_float32(row[i if i < row.size else np.uint32(0)])
        tile[j] = x if i < row.size else np.float32(-math.inf)


@cuda.jit(device=True)
def order_of(x):
    """32 bits that order logits: positive floats as their bits, negative reversed."""
    if x == np.float32(0.0):
        x = np.float32(0.0)  # -0.0 ties with 0.0
    bits = np.int64(cuda.libdevice.float_as_int(x))
    return (bits ^ (bits >> 31 | -0x80000000)) & 0xFFFFFFFF


@cuda.jit(device=True)
def code_of(x, i, vocab, key_shift, id_bits):
    """An integer that orders tokens by logit, then by lower id; larger is better."""
    return order_of(x) >> key_shift << id_bits | (vocab - 1 - i)


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
def warp_sum(x):
    """The sum of the warp's x, for every lane."""
    for distance in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(FULL_WARP, x, distance)
    return x


@cuda.jit(device=True)
def find_lane(mine, above, kept):
    """The lane that holds the `kept`-th code, if every lane holds `mine` of them.

    `above` codes stand before lane 0. Returns the lane and how many stand before it.
    """
    lane = cuda.threadIdx.x % WARP
    upto = mine  # becomes the sum over this lane and those before it
    distance = 1
    while distance < WARP:
        before = cuda.shfl_up_sync(FULL_WARP, upto, distance)
        if lane >= distance:
            upto += before
        distance *= 2
    here = above + upto - mine < kept <= above + upto
    lane = cuda.ffs(cuda.ballot_sync(FULL_WARP, here)) - 1
    return lane, above + cuda.shfl_sync(FULL_WARP, upto - mine, lane)


@cuda.jit(device=True)
def find_digit(histogram, above, kept, found):
    """Find the bin that holds the `kept`-th code, counting from the top bin.

    `above` codes are larger than any in the histogram. ``found`` gets the bin, the
    codes above it, and these together with those in it. Ends with a block barrier.
    """
    # By groups of bins first, a lane a bin: a group is read without bank conflicts.
    groups = cuda.shared.array(GROUPS, np.int32)
    warp, lane = cuda.threadIdx.x // WARP, cuda.threadIdx.x % WARP
    for group in range(warp, GROUPS, cuda.blockDim.x // WARP):
        count = warp_sum(histogram[group * WARP + lane])
        if lane == 0:
            groups[group] = count
    cuda.syncthreads()  # every group is summed before the sums are read
    if warp == 0:
        lanes, above = find_lane(groups[GROUPS - 1 - lane], above, kept)
        highest = BINS - 1 - lanes * WARP  # the group's top bin
        lanes, above = find_lane(histogram[highest - lane], above, kept)
        if lane == lanes:
            found[0] = highest - lane
            found[1] = above
            found[2] = above + histogram[highest - lane]
    cuda.syncthreads()  # the bin is found before it is read


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
        find_digit(histogram, above, kept, found)
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


# ----------------------------------------------------------------------- simple version


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


# ------------------------------------------------------------------------ split version


@cuda.jit(device=True)
def block_max(x):
    """The largest x of the block, for every thread; a block barrier."""
    warps = cuda.shared.array(WARP, np.float32)
    for distance in (16, 8, 4, 2, 1):
        x = cuda.libdevice.fmaxf(x, cuda.shfl_xor_sync(FULL_WARP, x, distance))
    if cuda.threadIdx.x % WARP == 0:
        warps[cuda.threadIdx.x // WARP] = x
    cuda.syncthreads()  # every warp's value is written before it is read
    for warp in range(cuda.blockDim.x // WARP):
        x = cuda.libdevice.fmaxf(x, warps[warp])
    return x


@cuda.jit(device=True)
def block_sum(x):
    """The sum of the block's x, for every thread; a block barrier."""
    warps = cuda.shared.array(WARP, np.float32)
    x = warp_sum(x)
    if cuda.threadIdx.x % WARP == 0:
        warps[cuda.threadIdx.x // WARP] = x
    cuda.syncthreads()  # every warp's sum is written before it is read
    lane = cuda.threadIdx.x % WARP
    return warp_sum(warps[lane] if lane < cuda.blockDim.x // WARP else np.float32(0.0))


@cuda.jit(device=True)
def sum_of_tile(tile, top):
    """Sum of ``exp(x - top)``, in a tree: its terms may all be rounded the same way.

    NaN for a tile with NaN or +inf; a masked one, of nothing but -inf, sums to 0.
    """
    if top == np.float32(-math.inf):
        top = np.float32(0.0)
    total = np.float32(0.0)
    for j in range(0, tile.size, 4):
        total += (math.exp(tile[j] - top) + math.exp(tile[j + 1] - top)) + (
            math.exp(tile[j + 2] - top) + math.exp(tile[j + 3] - top)
        )
    return total


@cuda.jit(device=True)
def count_top_digits(tile, size, histogram):
    """Count a thread's elements of a slice by the top bits of their codes."""
    for j in range(tile.size):
        if np.uint32(cuda.threadIdx.x + j * SLICE_THREADS) < size:
            digit = (order_of(tile[j]) >> (32 - DIGIT_BITS)) & (BINS - 1)
            cuda.atomic.add(histogram, digit, 1)


@cuda.jit(device=True)
def gather_tile(tile, size, first, vocab, key_shift, id_bits, digit, used, codes):
    """Collect a thread's codes of a slice whose top bits are `digit` or more."""
    for j in range(tile.size):
        i = np.uint32(cuda.threadIdx.x + j * SLICE_THREADS)
        own = (order_of(tile[j]) >> (32 - DIGIT_BITS)) & (BINS - 1)
        if i < size and own >= digit:
            token = first + np.int64(i)
            code = code_of(tile[j], token, vocab, key_shift, id_bits)
            codes[cuda.atomic.add(used, 0, 1)] = code


@cuda.jit(device=True)
def load_codes(codes, size, start, tile):
    """Load a thread's codes of a tile, -1 past the end: the loads overlap."""
    for j in range(tile.size):
        i = np.uint32(start + j * cuda.blockDim.x)
        code = codes[i if i < size else np.uint32(0)]
        tile[j] = code if i < size else np.int64(-1)


@cuda.jit(device=True)
def narrow(codes, size, kept, most, known, shift, above, count, histogram, found):
    """Go on with a radix select until no more than `most` codes are left.

    `known` holds the `kept`-th largest code's bits from `shift` up; `above` of
    ``codes[:size]`` are larger than that in these bits, `count` larger or equal. Codes
    of -1 are none. Returns the final `known` and `shift`.
    """
    tile = cuda.local.array(UNROLL, np.int64)
    while count > most:
        low = max(shift - DIGIT_BITS, 0)
        for bin_ in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
            histogram[bin_] = 0
        cuda.syncthreads()  # the bins are empty before anything is counted
        for start in range(cuda.threadIdx.x, size, UNROLL * cuda.blockDim.x):
            load_codes(codes, size, start, tile)
            for j in range(UNROLL):
                if tile[j] >> shift == known:
                    digit = (tile[j] >> low) & ((1 << (shift - low)) - 1)
                    cuda.atomic.add(histogram, digit, 1)
        cuda.syncthreads()  # everything is counted before the bins are read
        find_digit(histogram, above, kept, found)
        known = known << (shift - low) | found[0]
        above = found[1]
        count = found[2]
        shift = low
    return known, shift


@cuda.jit(device=True)
def gather_codes(codes, size, bound, shift, used, best):
    """Collect the codes at or above the bound, in no order; ends with a barrier."""
    tile = cuda.local.array(UNROLL, np.int64)
    if cuda.threadIdx.x == 0:
        used[0] = 0
    cuda.syncthreads()  # the count starts before anyone adds to it
    for start in range(cuda.threadIdx.x, size, UNROLL * cuda.blockDim.x):
        load_codes(codes, size, start, tile)
        for j in range(UNROLL):
            if tile[j] >> shift >= bound:
                best[cuda.atomic.add(used, 0, 1)] = tile[j]
    cuda.syncthreads()  # all are collected before they are counted and read


@cuda.jit
def topk_slice_kernel(
    logits,  # [B, L, V] f32, f16 or u16 (bf16 bits)
    kept,  # i32: K
    key_shift,  # i32: low bits of a float32 that say nothing about such a logit
    id_bits,  # i32: bits that hold V - 1
    tops,  # out [B*L, S] f32: every slice's maximum
    totals,  # out [B*L, S] f32: its sum of exp(x - maximum), NaN if it is bad
    codes,  # out [B*L, S*C] i64: C of its best codes, at least K; -1 if it has fewer
):
    tile = cuda.local.array(TILE, np.float32)
    best = cuda.shared.array(SLICE, np.int64)
    histogram = cuda.shared.array(BINS, np.int32)
    found = cuda.shared.array(3, np.int32)
    used = cuda.shared.array(1, np.int32)
    slices = tops.shape[1]
    r, s = cuda.blockIdx.x // slices, cuda.blockIdx.x % slices
    row = logits[r // logits.shape[1], r % logits.shape[1]]
    first = s * SLICE
    size = min(SLICE, row.size - first)

    load_tile(row[first : first + size], cuda.threadIdx.x, tile)
    for bin_ in range(cuda.threadIdx.x, BINS, cuda.blockDim.x):
        histogram[bin_] = 0
    if cuda.threadIdx.x == 0:
        used[0] = 0
    top = tile[0]
    for j in range(1, TILE):
        top = cuda.libdevice.fmaxf(top, tile[j])  # passes over NaN
    # Its barrier also orders the empty bins before anything is counted.
    top = block_max(top)
    count_top_digits(tile, np.uint32(size), histogram)
    # Its barrier also orders the counts before they are read.
    total = block_sum(sum_of_tile(tile, top))
    if cuda.threadIdx.x == 0:
        tops[r, s] = top
        totals[r, s] = total

    kept = min(kept, size)
    find_digit(histogram, 0, kept, found)
    digit, above, count = found[0], found[1], found[2]
    gather_tile(
        tile,
        np.uint32(size),
        first,
        row.size,
        key_shift,
        id_bits,
        digit,
        used,
        best,
    )
    cuda.syncthreads()  # the codes are there before they are read; `found` was read
    room = codes.shape[1] // slices
    out = codes[r, s * room : (s + 1) * room]
    shift = 32 - DIGIT_BITS - key_shift + id_bits
    bound, shift = narrow(
        best, count, kept, room, digit, shift, above, count, histogram, found
    )
    gather_codes(best, count, bound, shift, used, out)
    for i in range(used[0] + cuda.threadIdx.x, room, cuda.blockDim.x):
        out[i] = -1


@cuda.jit(device=True)
def sum_of_slices(tops, totals):
    """A row's maximum and sum of ``exp(x - maximum)``; NaN or 0 if it is bad."""
    top = np.float32(-math.inf)
    for s in range(cuda.threadIdx.x % WARP, tops.size, WARP):
        top = cuda.libdevice.fmaxf(top, tops[s])
    for distance in (16, 8, 4, 2, 1):
        top = cuda.libdevice.fmaxf(top, cuda.shfl_xor_sync(FULL_WARP, top, distance))
    total = np.float32(0.0)
    for s in range(cuda.threadIdx.x % WARP, tops.size, WARP):
        if totals[s] != np.float32(0.0):  # a masked slice's maximum is -inf
            total += totals[s] * math.exp(tops[s] - top)
    return top, warp_sum(total)


@cuda.jit
def topk_merge_kernel(
    logits,  # [B, L, V] f32, f16 or u16 (bf16 bits)
    tops,  # [B*L, S] f32
    totals,  # [B*L, S] f32
    codes,  # [B*L, S*C] i64
    code_bits,  # i32: bits of a code …
    id_bits,  # i32: … and of the id in it
    log_probs,  # out [B, L, K] f32
    token_ids,  # out [B, L, K] i32
):
    best = cuda.shared.array(CAPACITY, np.int64)
    histogram = cuda.shared.array(BINS, np.int32)
    found = cuda.shared.array(3, np.int32)
    used = cuda.shared.array(1, np.int32)
    length, kept = log_probs.shape[1], log_probs.shape[2]
    r = cuda.blockIdx.x
    b, position = r // length, r % length
    row = logits[b, position]
    top, total = sum_of_slices(tops[r], totals[r])  # the same in every warp
    if not total > np.float32(0.0):
        for k in range(cuda.threadIdx.x, kept, cuda.blockDim.x):
            log_probs[b, position, k] = np.float32(math.nan)
            token_ids[b, position, k] = -1
        return
    size = codes.shape[1]
    most = min(kept + ROOM, CAPACITY)
    bound, shift = narrow(
        codes[r], size, kept, most, 0, code_bits, 0, size, histogram, found
    )
    gather_codes(codes[r], size, bound, shift, used, best)
    sort_falling(best, used[0])
    log_total = math.log(total)
    for k in range(cuda.threadIdx.x, kept, cuda.blockDim.x):
        token = row.size - 1 - (best[k] & ((np.int64(1) << id_bits) - 1))
        # Not x - (top + log_total): that sum would round away what is wanted.
        log_probs[b, position, k] = (to_float32(row[token]) - top) - log_total
        token_ids[b, position, k] = token


def topk(
    logits: Any,
    k: int,
    *,
    check: bool | None = None,
    version: str = "auto",
    executor: str | None = None,
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
    version : {"auto", "simple", "split"}
        The kernels; "auto" splits rows that are longer than a slice. Both versions
        select the same.
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
        For logits of the wrong dtype or rank, a k that is no count or too large, an
        unknown version, ``check=True`` with device arrays, and (checked) a bad row,
        naming request and row.
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
    if version not in VERSIONS:
        raise ValueError(f"version is {version!r}; expected {', '.join(VERSIONS)}")
    # Without a candidate the kernel has nowhere to say that a row is bad.
    if at.executor == "numpy" or (kept == 0 and not at.on_device):
        return reference.topk(given, k, check=checked)
    log_probs = at.empty((batch, length, kept), np.float32)
    token_ids = at.empty((batch, length, kept), np.int32)
    if batch * length * kept:
        key_shift = {np.uint16: 16, np.float16: 13}.get(given.dtype.type, 0)
        id_bits = (vocab - 1).bit_length()
        split = version == "split" or (version == "auto" and vocab > SLICE)
        launch = _launch_split if split else _launch_simple
        launch(at, at.put(given), key_shift, id_bits, log_probs, token_ids)
    log_probs, token_ids = at.give(log_probs), at.give(token_ids)
    if checked and np.isnan(log_probs).any():
        reference.topk(given, 0)  # raises, and says which row and why
    return log_probs, token_ids


def _warps(threads: int, most: int) -> int:
    """Threads of a block: whole warps."""
    return min(most, -(-threads // WARP) * WARP)


def _launch_simple(
    at: Place, logits: Any, key_shift: int, id_bits: int, log_probs: Any, token_ids: Any
) -> None:
    batch, length, vocab = logits.shape
    at.launch(
        topk_kernel,
        batch * length,
        _warps(vocab, THREADS),
        logits,
        np.int32(key_shift),
        np.int32(id_bits),
        log_probs,
        token_ids,
    )


def _launch_split(
    at: Place, logits: Any, key_shift: int, id_bits: int, log_probs: Any, token_ids: Any
) -> None:
    batch, length, vocab = logits.shape
    rows, kept = batch * length, log_probs.shape[2]
    slices = -(-vocab // SLICE)
    room = min(kept + ROOM, SLICE)
    tops = at.empty((rows, slices), np.float32)
    totals = at.empty((rows, slices), np.float32)
    codes = at.empty((rows, slices * room), np.int64)
    at.launch(
        topk_slice_kernel,
        rows * slices,
        SLICE_THREADS,
        logits,
        np.int32(kept),
        np.int32(key_shift),
        np.int32(id_bits),
        tops,
        totals,
        codes,
    )
    at.launch(
        topk_merge_kernel,
        rows,
        _warps(slices * room, THREADS),
        logits,
        tops,
        totals,
        codes,
        np.int32(32 - key_shift + id_bits),
        np.int32(id_bits),
        log_probs,
        token_ids,
    )
