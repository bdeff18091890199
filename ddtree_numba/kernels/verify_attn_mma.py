"""verify_attn on tensor cores with `mma.sync`: bfloat16, 512 + 64 columns, sm_80 on.

Contract and maths are those of `ddtree_numba.kernels.verify_attn`, whose `merge_kernel`
also brings the splits together here. What differs: products are bfloat16 with float32
sums, and weights are rounded to bfloat16 before they meet the values.

A block has 64 packed rows (tree row and head) of a request and a split of the keys, and
goes through these in tiles. Its 12 warps have two trades:

- 4 score. Warps 2i and 2i + 1 take rows ``32 · i …`` of all keys of a tile, one the
  even, the other the odd 16 columns, so that what is read from shared memory serves 32
  rows and 32 keys. Each gives away its part of 16 rows and finishes the other 16: a
  row's scores are then in the 4 lanes of one warp, which weighs them.
- 8 add values. Warp w has columns ``64 · w …`` of every row: 128 float32 in a lane, and
  a value is read from shared memory by one warp only. The weights of all rows come
  through shared memory.

While the ones score tile j + 1 the others add tile j. Who does what when::

            A                               B                           A
    copies  | ask for tile j + 2 ....................................... |
    score   | products of tile j + 1        | scores, weights of j + 1  |
    add     | first half of the keys of j   | second half               |

    A  tile j + 1 has arrived; weights of j are there; all are done with tile j - 1
    B  the products of both warps of a pair are there; what sums shrink by has been read

Only where keys of the tail are in a tile, scores are hidden by the visibility bits,
and values that are no numbers are cleared by the warp that reads them
(`clear_non_finite`).

Shared memory, in elements of 16 bits (`Form` says how many keys and stages fit)::

    0                   64 · 576                                  (+ keys · 576 a stage)
    | queries [64, 576] | stage 0 [keys, 576] | stage 1 | stage 2 |
    beside it, static: weights [2, 64, keys] bf16, products that warps give away [4,
    16 · keys] f32, shrinks [64] f32

Swizzle: rows are not padded. Chunk c (16 bytes) of row r of a tile stands at place
``c ^ (r & 7)``, so that 8 rows of one chunk, which `ldmatrix` reads at once, lie in 8
different groups of 4 banks.

For 32 keys a block reads 147 KB of shared memory to score and 64 KB to add, and 37 KB
arrive: 1940 cycles at 128 bytes. Its 1088 products take 1740 at the 62 % of the peak
rate that `mma.sync` reaches on compute capability 9.0. An H200 needs about 3000: to
leave out the softmax saves a fifth of the time, the values a fifth, the scores a third.

A card that cannot hold three stages gets one: then tile j + 1 takes the place of tile j
in between, and the trades take turns.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ddtree_numba.backend import Place
from ddtree_numba.kernels.ptx import (
    bar_arrive,
    bar_sync,
    cp_async_16_zfill,
    cp_async_commit_group,
    cp_async_wait_group,
    cvt_rn_bf16x2,
    ex2_approx,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_bf16,
)
from ddtree_numba.kernels.verify_attn import (
    LN_2,
    MINUS_INF,
    ZERO,
    bf16_problem,
    bounds,
    is_padding,
    load4,
    rows_start_at,
    store4,
)
from ddtree_numba.kernels.wide import FULL_WARP

D, D_LATENT = 576, 512  # columns of a cache row, and those that are its value
ROWS = 64  # packed rows of a block
SCORING, ADDING = 4, 8  # warps
THREADS = 32 * (SCORING + ADDING)
GROUP = 64  # columns of a tile: the length of a swizzle, and a warp's share of values
GROUPS = D // GROUP
ROW_PARTS, COLUMN_PARTS = ROWS // 16, GROUP // 8  # fragments of a warp's sums
TILES_AT = ROWS * D  # in shared memory
# Named barriers (0 is that of the whole block): two for a meeting, one a trade.
A, B = 1, 3
SCORERS, ADDERS = 0, 1
ONE = np.float32(1.0)
ALL = 0xFFFFFFFF  # bits of a word
# For `choose_splits`, in tiles: what a block, a merge, and a block's part of it cost.
START, MERGE_START, MERGE_COST = 4.0, 3.0, 0.04


class Form(NamedTuple):
    """How much of the cache is in shared memory at a time."""

    keys: int  # of a tile: 16 or 32
    stages: int  # tiles: 3; or 1, of 16 keys, that is not refilled until it is used up

    @property
    def dynamic_shared(self) -> int:
        """Bytes for the queries and the stages."""
        return 2 * (TILES_AT + self.stages * self.keys * D)

    @property
    def shared(self) -> int:
        """Bytes in all."""
        weights, given = 2 * 2 * ROWS * self.keys, 4 * ROWS * self.keys
        return self.dynamic_shared + weights + given + 4 * ROWS


# Largest first: 196.3, 134.3 and 98.3 KB, for cards that give a block 227 KB (sm_90,
# sm_100), 163 KB (sm_80) and 99 KB (sm_86, sm_89, sm_120). From sm_80 on no card gives
# less.
FORMS = (Form(32, 3), Form(16, 3), Form(16, 1))


# ------------------------------------------------------------------------------- places


@cuda.jit(device=True)
def place(row, group, column):
    """Where an element of a tile [·, D] stands, from the tile's start on.

    Its column is split in a group of 64, the length of a swizzle, and the column there:
    groups and tiles are then a plain distance apart, and the rest is worked out once.
    """
    return row * D + group * GROUP + (column ^ (row & 7) << 3)


@cuda.jit(device=True)
def weight_place(row, key, keys):
    """Where a key's weight stands among the weights [ROWS, keys], in words of two.

    Of these shorter rows 64 / keys fill the 32 banks once, and share a swizzle.
    """
    return (row * keys + (key ^ ((row & 7) * keys >> 6) << 3)) // 2


# --------------------------------------------------------------------------------- load


@cuda.jit(device=True)
def request_rows(shared, at, source, first, end, count):
    """Ask for `count` rows of `source` [·, D] from row `first` on, zeros from `end` on.

    By the adding warps. 8 lanes ask for 128 bytes of a row, so that whole lines are
    read; 32 rows at a time, or 16 and twice as many columns.
    """
    thread = np.uint32(cuda.threadIdx.x)
    together = min(count, 4 * ADDING)
    beside = 4 * ADDING // together
    chunk, row = (thread & 7) * 8, (thread >> 3) & (together - 1)
    own_group = ((thread >> 3) & (4 * ADDING - 1)) // together
    for above in range(0, count, together):
        n_bytes = 16 if first + above + row < end else 0
        for left in range(0, GROUPS, beside):
            group = left + own_group
            if group < GROUPS:
                here = at + place(above + row, group, chunk)
                origin = (first + above + row, group * GROUP + chunk)
                cp_async_16_zfill(shared, here, source, origin, n_bytes)
    cp_async_commit_group()


@cuda.jit(device=True, forceinline=True)
def meet(pair, trade):
    """Wait for the whole block, as a warp of a trade, at one of two pairs of barriers.

    Each trade waits at a barrier of its own, at which the other only arrives: all who
    wait at one are then at the same place in the code. Meetings take A and B in turn,
    since warps may still be on their way to wait for the one before.
    """
    bar_arrive(pair + 1 - trade, THREADS)
    bar_sync(pair + trade, THREADS)


# -------------------------------------------------------------------------------- q · k


@cuda.jit(device=True)
def query_place(row, odd, lane):
    """Where a lane reads the fragment of 16 rows and the first even or odd columns."""
    return place(row + (lane & 15), 0, 16 * odd + (lane >> 4) * 8)


@cuda.jit(device=True)
def key_place(odd, lane):
    """The same for the first 16 keys of a tile, as the other factor."""
    row = (lane & 7) + (lane >> 4) * 8
    return place(row, 0, 16 * odd + (lane >> 3 & 1) * 8)


@cuda.jit(device=True)
def multiply(shared, own_at, other_at, keys_at, parts, products):
    """q · k of 2 × 16 rows and `parts` × 8 keys by a warp, over half of the columns.

    The even or the odd 16. Of part n a lane has rows g and g + 8 and keys 2t and
    2t + 1, as `mma_m16n8k16_bf16` tells.
    """
    for m in range(2):
        for n in range(parts):
            for e in range(4):
                products[m, n, e] = ZERO
    for group in range(GROUPS):
        at = group * GROUP
        own_left = ldmatrix_x4(shared, own_at + at)
        other_left = ldmatrix_x4(shared, other_at + at)
        own_right = ldmatrix_x4(shared, (own_at ^ 32) + at)
        other_right = ldmatrix_x4(shared, (other_at ^ 32) + at)
        for n in range(0, parts, 2):  # 16 keys
            left = ldmatrix_x4(shared, keys_at + at + 8 * n * D)
            right = ldmatrix_x4(shared, (keys_at ^ 32) + at + 8 * n * D)
            mma_m16n8k16_bf16(products[0, n], own_left, left[:2])
            mma_m16n8k16_bf16(products[0, n + 1], own_left, left[2:])
            mma_m16n8k16_bf16(products[1, n], other_left, left[:2])
            mma_m16n8k16_bf16(products[1, n + 1], other_left, left[2:])
            mma_m16n8k16_bf16(products[0, n], own_right, right[:2])
            mma_m16n8k16_bf16(products[0, n + 1], own_right, right[2:])
            mma_m16n8k16_bf16(products[1, n], other_right, right[:2])
            mma_m16n8k16_bf16(products[1, n + 1], other_right, right[2:])


@cuda.jit(device=True)
def give(products, warp, lane, parts, given):
    """Write the products of the other warp's rows, for it to read."""
    for n in range(parts):
        store4(
            given[warp, n],
            4 * lane,
            products[1, n, 0],
            products[1, n, 1],
            products[1, n, 2],
            products[1, n, 3],
        )


@cuda.jit(device=True)
def take(products, warp, lane, parts, scale, given, scores):
    """Scores of the warp's own rows in base 2: its products and its partner's."""
    for n in range(parts):
        w, x, y, z = load4(given[warp ^ 1, n], 4 * lane)
        scores[n, 0] = (products[0, n, 0] + w) * scale
        scores[n, 1] = (products[0, n, 1] + x) * scale
        scores[n, 2] = (products[0, n, 2] + y) * scale
        scores[n, 3] = (products[0, n, 3] + z) * scale


@cuda.jit(device=True)
def seen_keys(visibility, b, row, first, count):
    """A bit for each of 32 tail rows from `first` on: whether a tree row sees it.

    Negative ones are keys of the prefix: seen. `count` keys are there.
    """
    word = first >> 5  # rounds down
    shift = np.uint32(first & 31)
    low = visibility[b, row, word] if word >= 0 else np.uint32(ALL)
    high = np.uint32(0)
    if word + 1 < visibility.shape[2]:
        high = visibility[b, row, word + 1]
    seen = (low >> shift) | ((high << np.uint32(31 - shift)) << np.uint32(1))
    return seen & np.uint32(ALL if count >= 32 else (1 << count) - 1)


@cuda.jit(device=True)
def hide(visibility, b, packed, heads, key, prefix_len, n_keys, lane, parts, scores):
    """Set this lane's scores of keys that a row does not see to -inf.

    packed : the lane's upper packed row (the other is 8 further)
    key : the tile's first
    """
    for r in range(2):
        # Rows past the request's last repeat it: nobody stores them.
        row = min((packed + 8 * r) // heads, visibility.shape[1] - 1)
        seen = seen_keys(visibility, b, row, key - prefix_len, n_keys - key)
        for n in range(parts):
            for e in range(2):
                bit = np.uint32(8 * n + (lane & 3) * 2 + e)
                if (seen >> bit) & np.uint32(1) == 0:
                    scores[n, 2 * r + e] = MINUS_INF


# ------------------------------------------------------------------------------ softmax


@cuda.jit(device=True)
def weigh_tile(
    scores, parts, keys, row, lane, top, total, shrinks, weights_at, weights
):
    """Turn scores into weights, for all warps to read.

    Also what older sums shrink by: 1 where a finite top has not moved.
    """
    highest = cuda.local.array(2, np.float32)
    for r in range(2):
        highest[r] = top[r]
        for n in range(parts):
            for e in range(2):
                highest[r] = cuda.libdevice.fmaxf(highest[r], scores[n, 2 * r + e])
    for distance in (1, 2):  # the 4 lanes of a row
        for r in range(2):
            other = cuda.shfl_xor_sync(FULL_WARP, highest[r], distance)
            highest[r] = cuda.libdevice.fmaxf(highest[r], other)
    for r in range(2):
        # What an unseen key weighs is 2^-inf, also where none was seen: never a NaN.
        base = ZERO if highest[r] == MINUS_INF else highest[r]
        shrink = ex2_approx(top[r] - base)
        top[r] = highest[r]
        total[r] *= shrink
        at = row + (lane >> 2) + 8 * r
        for n in range(parts):
            low = ex2_approx(scores[n, 2 * r] - base)
            high = ex2_approx(scores[n, 2 * r + 1] - base)
            total[r] += low + high
            here = weight_place(at, 8 * n + (lane & 3) * 2, keys)
            weights[weights_at + here] = cvt_rn_bf16x2(low, high)
        if lane & 3 == 0:
            shrinks[at] = shrink


# ----------------------------------------------------------------------- weight · value


@cuda.jit(device=True)
def clear_non_finite(words, at, group, lane, count):
    """Set NaN and inf in a warp's `count` values to 0; words of two elements.

    A row that does not see a key weighs its value with 0, and 0 · NaN is NaN. A row
    that does see it loses nothing: the key's NaN made its score NaN, so its total is
    NaN too.
    """
    for key in range(count):
        here = at + key * (D // 2) + group * (GROUP // 2) + lane  # swizzled inside
        pair = words[here]
        low, high = pair & np.uint32(0x7F80), pair & np.uint32(0x7F800000)
        if low == np.uint32(0x7F80) or high == np.uint32(0x7F800000):
            if low == np.uint32(0x7F80):
                pair &= np.uint32(0xFFFF0000)
            if high == np.uint32(0x7F800000):
                pair &= np.uint32(0x0000FFFF)
            words[here] = pair
    cuda.syncwarp()  # other lanes read them


@cuda.jit(device=True)
def any_shrinks(shrinks, lane):
    """Whether the sums of any row are to be scaled."""
    upper, lower = shrinks[lane], shrinks[lane + 32]
    return cuda.any_sync(FULL_WARP, (upper != ONE) | (lower != ONE))


@cuda.jit(device=True)
def shrink_sums(shrinks, lane, sums):
    """Scale the sums of every row to its new maximum."""
    for m in range(ROW_PARTS):
        upper, lower = shrinks[16 * m + (lane >> 2)], shrinks[16 * m + (lane >> 2) + 8]
        for n in range(COLUMN_PARTS):
            sums[m, n, 0] *= upper
            sums[m, n, 1] *= upper
            sums[m, n, 2] *= lower
            sums[m, n, 3] *= lower


@cuda.jit(device=True)
def value_place(group, lane):
    """Where a lane reads the fragment of the first 16 keys and columns of a group."""
    return place(lane & 15, group, (lane >> 4) * 8)


@cuda.jit(device=True)
def add_values(shared, values_at, weights, weights_at, keys, sums):
    """Add weights · values of 16 keys, for every row and 64 columns, by a warp."""
    rows0 = ldmatrix_x4(weights, weights_at)
    rows1 = ldmatrix_x4(weights, weights_at + 8 * keys)
    rows2 = ldmatrix_x4(weights, weights_at + 16 * keys)
    rows3 = ldmatrix_x4(weights, weights_at + 24 * keys)
    for n in range(0, COLUMN_PARTS, 2):
        both = ldmatrix_x4_trans(shared, values_at ^ 8 * n)  # 16 keys, 16 columns
        mma_m16n8k16_bf16(sums[0, n], rows0, both[:2])
        mma_m16n8k16_bf16(sums[1, n], rows1, both[:2])
        mma_m16n8k16_bf16(sums[2, n], rows2, both[:2])
        mma_m16n8k16_bf16(sums[3, n], rows3, both[:2])
        mma_m16n8k16_bf16(sums[0, n + 1], rows0, both[2:])
        mma_m16n8k16_bf16(sums[1, n + 1], rows1, both[2:])
        mma_m16n8k16_bf16(sums[2, n + 1], rows2, both[2:])
        mma_m16n8k16_bf16(sums[3, n + 1], rows3, both[2:])


# ------------------------------------------------------------------------------- output


@cuda.jit(device=True)
def finish_rows(
    visibility,
    b,
    heads,
    row0,
    row,
    lane,
    whole,
    top,
    total,
    factors,
    tops,
    totals,
):
    """Write top and total of the warp's 16 rows; tops [R].

    Where no splits are to be merged (`whole`) the logarithm of the sum instead. And for
    the adding warps what every row's sums are to be multiplied by.
    """
    for r in range(2):
        for distance in (1, 2):  # the 4 lanes of a row
            total[r] += cuda.shfl_xor_sync(FULL_WARP, total[r], distance)
        at = row + (lane >> 2) + 8 * r
        packed = row0 + at
        if lane & 3 == 0:
            # Rows past the request's last repeat it: nobody stores them.
            tree_row = min(packed, tops.size - 1) // heads
            seen = total[r] != ZERO  # NaN counts as seen
            if is_padding(visibility, b, tree_row):
                seen = False
            factors[at] = ONE
            if whole:
                factors[at] = ONE / total[r] if seen else ZERO
            if packed < tops.size:
                if whole:
                    lse = cuda.fma(top[r], LN_2, math.log(total[r]))
                    tops[packed] = lse if seen else MINUS_INF
                else:
                    tops[packed] = top[r] if seen else MINUS_INF
                    totals[packed] = total[r] if seen else ZERO


@cuda.jit(device=True)
def store_sums(sums, row0, group, lane, factors, accs):
    """Write this warp's sums of the packed rows that there are; accs [R, Dc].

    Of 16 columns a lane has 2 and 2. Neighbours swap, so that each has 4 in a row.
    """
    odd = lane & 1
    column = np.uint32(group * GROUP + odd * 8 + (lane & 2) * 2)
    for m in range(ROW_PARTS):
        for r in range(2):
            at = 16 * m + (lane >> 2) + 8 * r
            factor = factors[at]
            # Select: a row that sees nothing may have met a NaN.
            keep = factor != ZERO
            for n in range(0, COLUMN_PARTS, 2):
                w, x = sums[m, n, 2 * r], sums[m, n, 2 * r + 1]
                y, z = sums[m, n + 1, 2 * r], sums[m, n + 1, 2 * r + 1]
                first = cuda.shfl_xor_sync(FULL_WARP, w if odd else y, 1)
                second = cuda.shfl_xor_sync(FULL_WARP, x if odd else z, 1)
                if odd:
                    w, x = first, second
                else:
                    y, z = first, second
                if row0 + at < accs.shape[0]:
                    store4(
                        accs[row0 + at],
                        column + 8 * n,
                        w * factor if keep else ZERO,
                        x * factor if keep else ZERO,
                        y * factor if keep else ZERO,
                        z * factor if keep else ZERO,
                    )


# ----------------------------------------------------------------------------- schedule


@functools.cache
def make_kernel(form: Form) -> Any:
    """The kernel for one form."""
    keys, stages = form
    parts = keys // 8
    pairs = ROWS * keys // 2  # of weights, of a tile
    both_pairs = 2 * pairs
    stage = keys * D
    overlapped = stages > 1

    @cuda.jit(launch_bounds=THREADS)
    def mma_kernel(
        q,  # [B, R, 576] u16 (bf16 bits): packed rows, R = N·H, row i·H + h
        kv_cache,  # [B, S_max, 576] u16; rows start at multiples of 16 bytes
        prefix_lens,  # [B] i32
        visibility,  # [B, N, ceil(N/32)] u32
        scale,  # f32: sm_scale · log2(e)
        accs,  # out [P, B, R, 512] f32; with P = 1 the output itself
        tops,  # out [P, B, R] f32, base 2; with P = 1 the lse
        totals,  # out [P, B, R] f32; with P = 1 left alone
    ):
        shared = cuda.shared.array(0, np.uint16, alignment=128)  # queries and tiles
        words = cuda.shared.array(0, np.uint32, alignment=128)  # the same bytes
        weights = cuda.shared.array(both_pairs, np.uint32, alignment=16)
        given = cuda.shared.array((SCORING, parts, 128), np.float32, alignment=16)
        shrinks = cuda.shared.array(ROWS, np.float32)

        thread = np.uint32(cuda.threadIdx.x)  # unsigned: no care for negative indices
        warp, lane = thread >> 5, thread & 31
        # 32-bit numbers, to save registers.
        heads = np.uint32(q.shape[1] // visibility.shape[1])
        splits = np.uint32(accs.shape[0])
        blocks = np.uint32((q.shape[1] + ROWS - 1) // ROWS)
        block = np.uint32(cuda.blockIdx.x)
        split = np.uint32(block % splits)
        row0 = np.uint32(block // splits % blocks * np.uint32(ROWS))
        b = np.uint32(block // splits // blocks)
        lengths = bounds(prefix_lens, b, kv_cache, visibility.shape[1])
        prefix_len, n_keys = np.int32(lengths[0]), np.int32(lengths[1])
        n_tiles = (n_keys + keys - 1) // keys
        share = (n_tiles + accs.shape[0] - 1) // accs.shape[0]
        first = np.int32(min(split * share, n_tiles))
        end = np.int32(min(first + share, n_tiles))

        if warp < SCORING:
            products = cuda.local.array((2, parts, 4), np.float32)
            scores = cuda.local.array((parts, 4), np.float32)
            top = cuda.local.array(2, np.float32)  # of rows g and g + 8 …
            total = cuda.local.array(2, np.float32)  # … and of the lane's own keys
            for r in range(2):
                top[r] = MINUS_INF
                total[r] = ZERO
            odd = warp & 1
            row = (warp >> 1) * 32 + odd * 16  # of the warp's own 16
            own_at = query_place(row, odd, lane)
            other_at = query_place(row + 16 - 32 * odd, odd, lane)
            here = key_place(odd, lane) + TILES_AT
            for tile in range(first, end):
                at = here + np.uint32(tile - first) % np.uint32(stages) * stage
                meet(A, SCORERS)
                if not overlapped:
                    meet(B, SCORERS)  # all are done with the values
                    meet(A, SCORERS)  # the keys are there
                multiply(shared, own_at, other_at, at, parts, products)
                give(products, warp, lane, parts, given)
                meet(B, SCORERS)
                take(products, warp, lane, parts, scale, given, scores)
                if (tile + 1) * keys > prefix_len:
                    hide(
                        visibility,
                        b,
                        row0 + row + (lane >> 2),
                        heads,
                        tile * keys,
                        prefix_len,
                        n_keys,
                        lane,
                        parts,
                        scores,
                    )
                weights_at = (tile + 1 & 1) * pairs
                weigh_tile(
                    scores,
                    parts,
                    keys,
                    row,
                    lane,
                    top,
                    total,
                    shrinks,
                    weights_at,
                    weights,
                )
            meet(A, SCORERS)  # the weights of the last tile are there
            if not overlapped:  # where the adders refill the tile, with nothing now
                meet(B, SCORERS)
                meet(A, SCORERS)
            meet(B, SCORERS)  # the last shrinks have been read
            finish_rows(
                visibility,
                b,
                heads,
                row0,
                row,
                lane,
                splits == 1,
                top,
                total,
                shrinks,
                tops[split, b],
                totals[split, b],
            )
            meet(A, SCORERS)  # the factors are there
        else:
            # Its tile is one behind: first none, then `first` … `end - 1`.
            sums = cuda.local.array((ROW_PARTS, COLUMN_PARTS, 4), np.float32)
            for m in range(ROW_PARTS):
                for n in range(COLUMN_PARTS):
                    for e in range(4):
                        sums[m, n, e] = ZERO
            group = warp - np.uint32(SCORING)
            out = accs[split, b]
            end_key = np.int32(min(end * keys, n_keys))
            cache = kv_cache[b]
            request_rows(shared, 0, q[b], row0, q.shape[1], ROWS)
            if overlapped:
                request_rows(shared, TILES_AT, cache, first * keys, end_key, keys)
            last = TILES_AT + (stages - 1) * stage
            at = np.uint32(last)  # of the tile
            for step in range(first, np.int32(end + 1)):
                cp_async_wait_group(0)
                meet(A, ADDERS)
                if overlapped:
                    # The place of the tile before this one, which is done with.
                    later = at - stage if at > TILES_AT else at + 2 * stage
                    next_key = (step + 1) * keys
                    request_rows(shared, later, cache, next_key, end_key, keys)
                weights_at = (step & 1) * pairs
                if step > first:
                    if step * keys > prefix_len:
                        count = min(end_key - (step - 1) * keys, keys)
                        clear_non_finite(words, at // 2, group, lane, count)
                    if any_shrinks(shrinks, lane):
                        shrink_sums(shrinks, lane, sums)
                    here = weights_at + weight_place(lane & 15, (lane >> 4) * 8, keys)
                    values_at = at + value_place(group, lane)
                    add_values(shared, values_at, weights, here, keys, sums)
                if not overlapped:
                    meet(B, ADDERS)  # all are done with the values
                    request_rows(shared, TILES_AT, cache, step * keys, end_key, keys)
                    cp_async_wait_group(0)
                    meet(A, ADDERS)  # the keys are there
                meet(B, ADDERS)
                if keys == 32 and step > first:
                    key = 16 + (lane >> 4) * 8
                    here = weights_at + weight_place(lane & 15, key, keys)
                    values_at = at + 16 * D + value_place(group, lane)
                    add_values(shared, values_at, weights, here, keys, sums)
                at = np.uint32(at + stage if at < last else TILES_AT)
            cp_async_wait_group(0)
            meet(A, ADDERS)  # the factors are there
            store_sums(sums, row0, group, lane, shrinks, out)

    return mma_kernel


# --------------------------------------------------------------------------------- host


def problem(at: Place, q: Any, kv_cache: Any, d_latent: int) -> Exception | None:
    """What keeps this version from a call, as the error to raise; None if nothing."""
    if found := bf16_problem("mma", q, d_latent, (D, D_LATENT)):
        return found
    for name, x in (("q", q), ("kv_cache", kv_cache)):
        if not rows_start_at(8, x):
            return ValueError(
                f"version 'mma' and {name} has strides {x.strides}; expected "
                "contiguous rows that start at multiples of 16 bytes"
            )
    if at.executor == "gpu":
        major, minor = cuda.get_current_device().compute_capability
        if major < 8:
            return ValueError(
                f"version 'mma' and the card has compute capability {major}.{minor}; "
                "expected 8.0 or later"
            )
    return None


def form_for(at: Place) -> Form:
    """The largest form that the GPU can hold; in the emulator the largest."""
    if at.executor != "gpu":
        return FORMS[0]
    room = cuda.get_current_device().MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return next(form for form in FORMS if form.shared <= room)
