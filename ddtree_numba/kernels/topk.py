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

A selection knows an interval of codes in which the k-th largest lies. It cuts it into
bins, up to two a lane, counts the codes in each, and goes on with the bin that holds
the k-th. It ends as soon as few enough codes are as large as the interval's lower end;
these are gathered and sorted in shared memory, and the first k of them win.

Chunks
------
Most of a row never comes near the best k, and one maximum tells that of many tokens.
Cut a row into chunks of neighbours, and order them by their maxima, ties by the lower
chunk. Then the k best tokens are in the k best chunks: a token elsewhere has k chunks
before its own, each with a token that is better, or equal and of a lower id. So one
kernel, with the whole GPU, reads the logits once and leaves sums and maxima; a second,
with one block a row, selects chunks by these, and k tokens from the chunks.

It need not be k chunks. Every lane of a block takes some of them, and the k-th of the
lanes' best maxima bounds the k-th of all: k chunks are as good, and if there are many
more lanes than k, few others are. A histogram of how far these lie below the row's best
one gives the bound: its first bin reaches past 1/4, and from there on 64 bins of one
length make a doubling. With too few lanes all maxima are counted. Only if too many
chunks or tokens pass the bound, as where many tie, is the interval cut further.

Versions
--------
topk_kernel        "simple": one block a row; reads the row twice, and once more for
                   every round of the selection (mostly one or two)
topk_scan_kernel   "chunks": a warp a span of 1024 logits: their sum, their maximum,
                   and their chunks'
topk_pick_kernel   one block a row: selects chunks, then tokens; one of its warps merges
                   the sums
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import Place, place, to_float32, whole_number
from ddtree_numba.kernels.wide import (
    FULL_WARP,
    PIECE,
    WARP,
    clear_bins,
    find_bin,
    last_bin,
    load_piece,
    loads_wide,
    redux_max,
    warp_max,
    warp_sum,
)

MAX_K = 1024
CAPACITY = 2048  # codes that are sorted in shared memory
SORTING = 2 * CAPACITY
THREADS = 512

VERSIONS = ("auto", "simple", "chunks")
SIMPLE_UP_TO = 4096  # a vocabulary that "auto" does not cut into chunks
SCAN_THREADS = 128
PICK_THREADS = 768  # at most
BINS = 2 * PICK_THREADS  # of the largest block: two a lane
PIECES = 4  # of eight logits, that a lane of the scan holds
HELD = PIECES * PIECE
SPAN = WARP * HELD  # logits of a warp
MAX_CHUNKS = MAX_K + 64  # more than k, to spare a selection its last rounds
RUN, LANES = 64, 8  # codes that are sorted by counting, lanes that count for each
# Bins of how far a chunk lies below the best one: 64 to a doubling, from 1/4 on.
STEP_BITS = 17  # low bits of a float32 that a bin does not tell apart
FIRST_STEP = int(np.float32(0.25).view(np.int32)) >> STEP_BITS
ONE_CHUNK = 30  # the logarithm of a chunk's pieces, if it is to be the whole row


@cuda.jit(device=True)
def order_of(x):
    """32 bits that order logits: positive floats as their bits, negative reversed."""
    if x == np.float32(0.0):
        x = np.float32(0.0)  # -0.0 ties with 0.0
    bits = np.int64(cuda.libdevice.float_as_int(x))
    return (bits ^ (bits >> 31 | -0x80000000)) & 0xFFFFFFFF


@cuda.jit(device=True)
def code_of(x, i, size, key_shift, id_bits):
    """An integer that orders tokens by logit, then by lower id; larger is better."""
    return order_of(x) >> key_shift << id_bits | (size - 1 - i)


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
def sum_of_row(row, wide):
    """The row's maximum, its sum of ``exp(x - maximum)``, and whether it is bad."""
    tile = cuda.local.array(PIECE, np.float32)
    top = np.float32(-math.inf)
    total = np.float32(0.0)
    # What rounding took from `total` (Kahan). Ties make it necessary: the same term,
    # added over and over, is rounded the same way over and over.
    excess = np.float32(0.0)
    bad = False
    start = cuda.threadIdx.x * PIECE
    while start < row.size:
        load_piece(row, start, wide, tile, 0)
        start += cuda.blockDim.x * PIECE
        for j in range(PIECE):
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
def piece_start(source, p):
    """Where the p-th piece of a source starts in its row."""
    _, _, chunks, chunk_log, _, _, _ = source
    p = np.uint32(p)
    first = np.uint32(chunks[p >> chunk_log]) << chunk_log
    return np.uint32((first + (p & ((1 << chunk_log) - 1))) * PIECE)


@cuda.jit(device=True)
def value_of(code, key_shift, id_bits):
    """A float32 that no logit of this code or a larger one is below."""
    key = code >> id_bits << key_shift
    bits = key ^ (-0x80000000 if key >> 31 else -1)
    value = cuda.libdevice.int_as_float(np.int32(bits))
    return value if value == value else np.float32(-math.inf)


@cuda.jit(device=True)
def passing_of(row, start, wide, least):
    """A bit for each of the eight elements from `start` on that is no less."""
    tile = cuda.local.array(PIECE, np.float32)
    load_piece(row, start, wide, tile, 0)
    passing = np.uint32(0)
    for j in range(PIECE):
        if tile[j] >= least:
            passing = np.uint32(passing | np.uint32(1 << j))
    if start + PIECE > row.size:  # -inf stands behind the row
        inside = max(row.size - np.int64(start), 0)
        passing = np.uint32(passing & np.uint32((1 << inside) - 1))
    return passing


@cuda.jit(device=True)
def first_of(passing):
    """The first that passes, and the others that do."""
    others = np.uint32(passing & np.uint32(passing - np.uint32(1)))
    return np.uint32(cuda.ffs(np.int32(passing)) - 1), others


@cuda.jit(device=True)
def code_at(source, i):
    """The code of a source's i-th element."""
    row, _, _, _, _, key_shift, id_bits = source
    # Read once more: it is near, and a tile of registers knows no j-th element.
    return code_of(to_float32(row[i]), np.int64(i), row.size, key_shift, id_bits)


@cuda.jit(device=True)
def count_codes(source, low, high, shift, histogram):
    """Histogram of ``(code - low) >> shift``, from the last bin on, of low … high."""
    row, wide, _, _, pieces, key_shift, id_bits = source
    least = value_of(low, key_shift, id_bits)
    clear_bins(histogram)
    p = cuda.threadIdx.x
    while p < pieces:
        start = piece_start(source, p)
        passing = passing_of(row, start, wide, least)
        while passing != 0:
            j, passing = first_of(passing)
            code = code_at(source, np.uint32(start + j))
            if low <= code < high:
                cuda.atomic.add(histogram, last_bin() - ((code - low) >> shift), 1)
        p += cuda.blockDim.x


@cuda.jit(device=True)
def gather_codes(source, low, codes, used, which):
    """Collect a source's codes of `low` or more, in no order, and return their number.

    It may be more than there is room for. For all threads; ends with a block barrier.
    The count ``used[which]`` is 0 before.
    """
    row, wide, _, _, pieces, key_shift, id_bits = source
    least = value_of(low, key_shift, id_bits)
    p = cuda.threadIdx.x
    while p < pieces:
        start = piece_start(source, p)
        passing = passing_of(row, start, wide, least)
        while passing != 0:
            j, passing = first_of(passing)
            code = code_at(source, np.uint32(start + j))
            if code >= low:
                at = cuda.atomic.add(used, which, 1)
                if at < CAPACITY:
                    codes[at] = code
        p += cuda.blockDim.x
    cuda.syncthreads()  # all are collected before they are counted and read
    return used[which]


@cuda.jit(device=True)
def narrow(source, kept, most, low, high, count, counting):
    """Raise `low` until no more than `most` of a source's codes are as large.

    `count` codes are that large now; the `kept`-th largest is one of them, and below
    `high`.
    """
    histogram, _, found = counting
    digit_bits = np.int64(31) - cuda.clz(np.int32(2 * cuda.blockDim.x))
    above = 0  # codes of `high` or more
    while count > most:
        shift = max(0, 64 - cuda.clz(np.int64(high - low - 1)) - digit_bits)
        count_codes(source, low, high, shift, histogram)
        bin_ = find_bin(counting, kept - above)
        low += np.int64(last_bin() - bin_) << shift
        high = min(high, low + (np.int64(1) << shift))
        count = above + found[2]
        above += found[1]
    return low


@cuda.jit(device=True)
def sort_falling(codes, count):
    """Sort distinct codes; the second half of `codes` is room to work in.

    Runs first, by counting for every code those that are larger, then merged in pairs:
    a code's place is its place in its own run, and the larger ones in the other, which
    a binary search finds. Returns where the sorted codes start.
    """
    half = np.uint32(codes.size // 2)
    n = np.uint32(count)
    lane = np.uint32(np.uint32(cuda.threadIdx.x) % np.uint32(WARP))
    first_lane = np.uint32(np.uint32(cuda.threadIdx.x) - lane)
    part = np.uint32(np.uint32(cuda.threadIdx.x) % np.uint32(LANES))
    while first_lane < n * np.uint32(LANES):  # whole warps
        i = np.uint32(np.uint32(first_lane + lane) // np.uint32(LANES))
        first = np.uint32(i & ~np.uint32(RUN - 1))
        last = min(np.uint32(first + np.uint32(RUN)), n)
        mine = codes[min(i, np.uint32(n - np.uint32(1)))]
        larger = np.int32(0)
        j = np.uint32(first + part)
        while j < last:
            larger += np.int32(codes[j] > mine)
            j = np.uint32(j + np.uint32(LANES))
        distance = LANES // 2
        while distance > 0:
            larger += cuda.shfl_xor_sync(FULL_WARP, larger, distance)
            distance //= 2
        if part == 0 and i < n:
            codes[half + first + np.uint32(larger)] = mine
        first_lane = np.uint32(first_lane + np.uint32(cuda.blockDim.x))
    cuda.syncthreads()  # the runs are there before they are merged
    start = half
    width = np.uint32(RUN)
    while width < n:
        i = np.uint32(cuda.threadIdx.x)
        while i < n:
            mine = codes[start + i]
            other = min(np.uint32((i ^ width) & ~(width - np.uint32(1))), n)
            low, high = other, min(np.uint32(other + width), n)
            while low < high:
                middle = np.uint32((low + high) >> np.uint32(1))
                if codes[start + middle] > mine:
                    low = np.uint32(middle + np.uint32(1))
                else:
                    high = middle
            # i without the bit that says which run of the two, and what is larger
            place = np.uint32((i & ~width) + (low - other))
            codes[np.uint32((half - start) + place)] = mine
            i = np.uint32(i + np.uint32(cuda.blockDim.x))
        cuda.syncthreads()  # the merged runs are there before they are read
        start = np.uint32(half - start)
        width = np.uint32(width << np.uint32(1))
    return start


@cuda.jit(device=True)
def write_token(k, code, row, id_bits, top, log_total, log_probs, token_ids):
    """Write the k-th best token of a row."""
    token = row.size - 1 - (code & ((np.int64(1) << id_bits) - 1))
    # Not x - (top + log_total): that sum would round away what is wanted.
    log_probs[k] = (to_float32(row[token]) - top) - log_total
    token_ids[k] = token


@cuda.jit(device=True)
def write_best(codes, count, row, id_bits, top, total, log_probs, token_ids):
    """Order the codes gathered and write the best of them."""
    log_total = math.log(total)
    start = sort_falling(codes, count)
    k = cuda.threadIdx.x
    while k < token_ids.size:
        code = codes[start + np.uint32(k)]
        write_token(k, code, row, id_bits, top, log_total, log_probs, token_ids)
        k += cuda.blockDim.x


@cuda.jit(device=True)
def write_bad_row(log_probs, token_ids):
    """Mark a row that is no distribution."""
    k = cuda.threadIdx.x
    while k < token_ids.size:
        log_probs[k] = np.float32(math.nan)
        token_ids[k] = -1
        k += cuda.blockDim.x


# ----------------------------------------------------------------------- simple version


@cuda.jit
def topk_kernel(
    logits,  # [B, L, V] f32, f16 or u16 (bf16 bits)
    wide,  # i32: whether `loads_wide` allows loads of 16 bytes
    key_shift,  # i32: low bits of a float32 that say nothing about such a logit
    id_bits,  # i32: bits that hold V - 1
    log_probs,  # out [B, L, K] f32
    token_ids,  # out [B, L, K] i32
):
    codes = cuda.shared.array(SORTING, np.int64)
    histogram = cuda.shared.array(BINS, np.int32)
    of_warps = cuda.shared.array(WARP, np.int32)
    found = cuda.shared.array(3, np.int32)
    used = cuda.shared.array(1, np.int32)  # codes gathered
    chunks = cuda.shared.array(1, np.int32)
    length, kept = log_probs.shape[1], log_probs.shape[2]
    b, position = cuda.blockIdx.x // length, cuda.blockIdx.x % length
    row, counting = logits[b, position], (histogram, of_warps, found)
    if cuda.threadIdx.x == 0:
        used[0] = 0
        chunks[0] = 0  # the row is one chunk
    # Its barrier also orders these before they are read.
    top, total, bad = sum_of_row(row, wide)
    if bad:  # for all threads of the block alike
        write_bad_row(log_probs[b, position], token_ids[b, position])
        return
    pieces = (row.size + PIECE - 1) // PIECE
    source = (row, wide, chunks, ONE_CHUNK, pieces, key_shift, id_bits)
    high = ((order_of(top) >> key_shift) + 1) << id_bits
    low = narrow(source, kept, CAPACITY, 0, high, row.size, counting)
    count = gather_codes(source, low, codes, used, 0)
    best = log_probs[b, position], token_ids[b, position]
    write_best(codes, count, row, id_bits, top, total, *best)


# ----------------------------------------------------------------------- chunks version


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


@cuda.jit
def topk_scan_kernel(
    logits,  # [B, L, V] f32, f16 or u16 (bf16 bits)
    wide,  # i32: whether `loads_wide` allows loads of 16 bytes
    chunk_log,  # i32: logarithm of a chunk's pieces, 0 … 3
    tops,  # out [B*L, S] f32: every span's maximum
    totals,  # out [B*L, S] f32: its sum of exp(x - maximum), NaN if it is bad
    maxima,  # out [B*L, C] f32: every chunk's maximum, C = S * SPAN / chunk
):
    tile = cuda.local.array(HELD, np.float32)
    lane = np.uint32(cuda.threadIdx.x % WARP)
    r = np.uint32(cuda.blockIdx.x)
    s = np.uint32((cuda.blockIdx.y * SCAN_THREADS + cuda.threadIdx.x) // WARP)
    if s >= tops.shape[1]:  # the whole warp
        return
    length = np.uint32(logits.shape[1])
    b = np.uint32(r // length)
    row = logits[b, np.uint32(r - b * length)]
    lanes = np.uint32(1 << chunk_log)  # whose pieces make a chunk
    first = np.uint32(s * SPAN + lane * PIECE)
    for p in range(PIECES):
        load_piece(row, first + np.uint32(p * WARP * PIECE), wide, tile, p * PIECE)
    top = np.float32(-math.inf)
    for p in range(PIECES):
        x = tile[p * PIECE]
        for j in range(1, PIECE):
            x = cuda.libdevice.fmaxf(x, tile[p * PIECE + j])  # passes over NaN
        for distance in (1, 2, 4):
            y = cuda.shfl_xor_sync(FULL_WARP, x, distance)
            x = cuda.libdevice.fmaxf(x, y) if distance < lanes else x
        if lane & (lanes - np.uint32(1)) == 0:
            maxima[r, np.uint32(((s * PIECES + p) * WARP + lane) >> chunk_log)] = x
        top = cuda.libdevice.fmaxf(top, x)
    top = warp_max(top)
    total = warp_sum(sum_of_tile(tile, top))
    if lane == 0:
        tops[r, s] = top
        totals[r, s] = total


@cuda.jit(device=True)
def merge_spans(tops, totals):
    """A warp sums a row's ``exp(x - maximum)``; it is NaN or 0 if the row is bad."""
    lane_tops = cuda.local.array(PIECE, np.float32)
    lane_totals = cuda.local.array(PIECE, np.float32)
    top, total = np.float32(-math.inf), np.float32(0.0)
    lane = np.uint32(cuda.threadIdx.x % WARP)
    for start in range(0, tops.size, WARP * PIECE):
        highest = top
        for j in range(PIECE):  # the loads overlap
            s = np.uint32(start + j * WARP + lane)
            inside = s < tops.size
            s = s if inside else np.uint32(0)
            lane_tops[j] = tops[s]
            lane_totals[j] = totals[s] if inside else np.float32(0.0)
        for j in range(PIECE):
            highest = cuda.libdevice.fmaxf(highest, lane_tops[j])
        # A masked span's sum is 0, about any maximum.
        about = highest if highest > np.float32(-math.inf) else np.float32(0.0)
        total *= math.exp(top - about)
        for j in range(PIECE):
            total += lane_totals[j] * math.exp(lane_tops[j] - about)
        top = highest
    highest = warp_max(top)
    return warp_sum(total * math.exp(top - highest))


@cuda.jit(device=True)
def signed_order(bits):
    """A float32's bits as an integer that orders as it does; and back again."""
    return np.int32(bits ^ ((bits >> 31) & 0x7FFFFFFF))


@cuda.jit(device=True)
def block_max(x, of_warps):
    """The largest x of the block, for all threads; a block barrier."""
    lane = cuda.threadIdx.x % WARP
    own = redux_max(signed_order(cuda.libdevice.float_as_int(x)))
    if lane == 0:
        of_warps[cuda.threadIdx.x // WARP] = own
    cuda.syncthreads()  # every warp's is there before it is read
    own = of_warps[lane if lane < cuda.blockDim.x // WARP else 0]
    return cuda.libdevice.int_as_float(signed_order(redux_max(own)))


@cuda.jit(device=True)
def lane_maximum(of_chunks):
    """The largest of the maxima that this lane takes."""
    tile = cuda.local.array(PIECE, np.float32)
    best = np.float32(-math.inf)
    start = np.uint32(cuda.threadIdx.x * PIECE)
    while start < of_chunks.size:
        load_piece(of_chunks, start, np.int32(1), tile, 0)
        for j in range(PIECE):
            best = cuda.libdevice.fmaxf(best, tile[j])
        start = np.uint32(start + np.uint32(cuda.blockDim.x * PIECE))
    return best


@cuda.jit(device=True)
def count_below(top, x, histogram):
    """Count a chunk by how far its maximum lies below the best one."""
    step = (cuda.libdevice.float_as_int(top - x) >> STEP_BITS) - FIRST_STEP
    cuda.atomic.add(histogram, np.int32(min(max(step, 0), last_bin())), 1)


@cuda.jit(device=True)
def bound_of_chunks(of_chunks, top, best, kept, counting):
    """A value that `kept` chunks' maxima are not below, or all, and not many more.

    top, best : the best maximum of all, and of those that this lane takes
    The histogram is empty. For all threads; block barriers.
    """
    histogram = counting[0]
    tile = cuda.local.array(PIECE, np.float32)
    if 3 * kept <= 2 * min(of_chunks.size // PIECE, cuda.blockDim.x):
        count_below(top, best, histogram)
    else:  # too few lanes: count all that they take
        start = np.uint32(cuda.threadIdx.x * PIECE)
        while start < of_chunks.size:
            load_piece(of_chunks, start, np.int32(1), tile, 0)
            for j in range(PIECE):
                count_below(top, tile[j], histogram)
            start = np.uint32(start + np.uint32(cuda.blockDim.x * PIECE))
    bin_ = find_bin(counting, kept)
    if bin_ == last_bin():  # which has no end
        return np.float32(-math.inf)
    step = np.int32(bin_ + 1 + FIRST_STEP)  # where the next bin starts
    return top - cuda.libdevice.int_as_float(np.int32(step << STEP_BITS))


@cuda.jit(device=True)
def gather_chunks(of_chunks, least, chunks, used):
    """Collect the chunks of a maximum of `least` or more, and return their number.

    It may be more than there is room for. For all threads; ends with a block barrier.
    """
    start = np.uint32(cuda.threadIdx.x * PIECE)
    while start < of_chunks.size:
        passing = passing_of(of_chunks, start, np.int32(1), least)
        while passing != 0:
            j, passing = first_of(passing)
            at = cuda.atomic.add(used, 0, 1)
            if at < MAX_CHUNKS:
                chunks[at] = np.uint32(start + j)
        start = np.uint32(start + np.uint32(cuda.blockDim.x * PIECE))
    cuda.syncthreads()  # all are collected before they are counted and read
    return used[0]


@cuda.jit
def topk_pick_kernel(
    logits,  # [B, L, V] f32, f16 or u16 (bf16 bits)
    wide,  # i32: whether `loads_wide` allows loads of 16 bytes
    key_shift,  # i32: low bits of a float32 that say nothing about such a logit
    id_bits,  # i32: bits that hold V - 1
    chunk_bits,  # i32: bits that hold C - 1
    chunk_log,  # i32: logarithm of a chunk's pieces
    tops,  # [B*L, S] f32: of `topk_scan_kernel`, as the next two
    totals,  # [B*L, S] f32
    maxima,  # [B*L, C] f32
    log_probs,  # out [B, L, K] f32
    token_ids,  # out [B, L, K] i32
):
    codes = cuda.shared.array(SORTING, np.int64)
    histogram = cuda.shared.array(BINS, np.int32)
    of_warps = cuda.shared.array(WARP, np.int32)
    found = cuda.shared.array(3, np.int32)
    used = cuda.shared.array(4, np.int32)  # what each gathering finds
    chunks = cuda.shared.array(MAX_CHUNKS, np.int32)
    total = cuda.shared.array(1, np.float32)
    length, kept = log_probs.shape[1], log_probs.shape[2]
    r = np.uint32(cuda.blockIdx.x)
    b = np.uint32(r // np.uint32(length))
    position = np.uint32(r - b * np.uint32(length))
    row, of_chunks = logits[b, position], maxima[r]
    counting = (histogram, of_warps, found)
    if cuda.threadIdx.x < used.size:
        used[cuda.threadIdx.x] = 0
    clear_bins(histogram)
    own = lane_maximum(of_chunks)
    top = block_max(own, of_warps)

    # The best chunks: at least K of them, or all.
    least = bound_of_chunks(of_chunks, top, own, kept, counting)
    n_chunks = gather_chunks(of_chunks, least, chunks, used)
    low = order_of(least) >> key_shift
    high = (order_of(top) >> key_shift) + 1
    most = min(2 * kept + WARP, MAX_CHUNKS)
    if n_chunks > most:
        low <<= chunk_bits
        if cuda.threadIdx.x == 0:
            chunks[0] = 0  # the row of maxima is one chunk
        pieces = of_chunks.size // PIECE
        ids = key_shift, chunk_bits
        source = (of_chunks, np.int32(1), chunks, ONE_CHUNK, pieces, *ids)
        # Its first barrier also orders the chunk before it is read.
        low = narrow(source, kept, most, low, high << chunk_bits, n_chunks, counting)
        n_chunks = gather_codes(source, low, codes, used, 1)
        i = cuda.threadIdx.x
        while i < n_chunks:
            code = codes[i] & ((np.int64(1) << chunk_bits) - 1)
            chunks[i] = of_chunks.size - 1 - code
            i += cuda.blockDim.x
        cuda.syncthreads()  # the chunks are there before they are read
        low >>= chunk_bits

    # Meanwhile the last warp, which may have nothing to gather, merges the sums.
    if cuda.threadIdx.x >= cuda.blockDim.x - WARP:
        of_row = merge_spans(tops[r], totals[r])
        if cuda.threadIdx.x % WARP == 0:
            total[0] = of_row

    # Their tokens that are as good as the K-th chunk's best: at least K of them.
    low <<= id_bits
    pieces = n_chunks << chunk_log
    source = (row, wide, chunks, chunk_log, pieces, key_shift, id_bits)
    count = gather_codes(source, low, codes, used, 2)
    best = log_probs[b, position], token_ids[b, position]
    if not total[0] > np.float32(0.0):  # in every lane alike
        write_bad_row(*best)
        return
    if count > CAPACITY:
        low = narrow(source, kept, CAPACITY, low, high << id_bits, count, counting)
        count = gather_codes(source, low, codes, used, 3)
    write_best(codes, count, row, id_bits, top, total[0], *best)


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
    version : {"auto", "simple", "chunks"}
        The kernels; "auto" cuts long rows into chunks. Both versions select the same.
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
        if version == "auto":
            version = "simple" if vocab <= SIMPLE_UP_TO else "chunks"
        launch = _launch_simple if version == "simple" else _launch_chunks
        launch(at, at.put(given), log_probs, token_ids)
    log_probs, token_ids = at.give(log_probs), at.give(token_ids)
    if checked and np.isnan(log_probs).any():
        reference.topk(given, 0)  # raises, and says which row and why
    return log_probs, token_ids


def _warps(threads: int, most: int) -> int:
    """Threads of a block: whole warps."""
    return min(most, -(-threads // WARP) * WARP)


def _codes(logits: Any) -> tuple[np.int32, np.int32]:
    """The key_shift and id_bits of `code_of`."""
    key_shift = {np.uint16: 16, np.float16: 13}.get(logits.dtype.type, 0)
    return np.int32(key_shift), np.int32((logits.shape[2] - 1).bit_length())


def _chunk_log(kept: int) -> int:
    """Logarithm of a chunk's pieces: few chunks, and few tokens in those selected."""
    return 3 if kept <= 64 else 2


def _launch_simple(at: Place, logits: Any, log_probs: Any, token_ids: Any) -> None:
    batch, length, vocab = logits.shape
    wide = np.int32(loads_wide(logits))
    at.launch(
        *(topk_kernel, batch * length, _warps(-(-vocab // PIECE), THREADS)),
        *(logits, wide, *_codes(logits), log_probs, token_ids),
    )


def _launch_chunks(at: Place, logits: Any, log_probs: Any, token_ids: Any) -> None:
    batch, length, vocab = logits.shape
    rows, kept = batch * length, log_probs.shape[2]
    spans = -(-vocab // SPAN)
    chunk_log = _chunk_log(kept)
    chunks = spans * SPAN // (PIECE << chunk_log)
    wide = np.int32(loads_wide(logits))
    tops = at.empty((rows, spans), np.float32)
    totals = at.empty((rows, spans), np.float32)
    maxima = at.empty((rows, chunks), np.float32)
    grid = rows, -(-spans * WARP // SCAN_THREADS)
    at.launch(
        *(topk_scan_kernel, grid, SCAN_THREADS),
        *(logits, wide, np.int32(chunk_log), tops, totals, maxima),
    )
    # A lane takes a piece of maxima, then one of logits: somewhat more than K chunks.
    threads = max((kept + kept // 8 + 8) << chunk_log, chunks // PIECE)
    chunk_bits = np.int32((chunks - 1).bit_length())
    at.launch(
        *(topk_pick_kernel, rows, _warps(threads, PICK_THREADS)),
        *(logits, wide, *_codes(logits), chunk_bits, np.int32(chunk_log)),
        *(tops, totals, maxima, log_probs, token_ids),
    )
