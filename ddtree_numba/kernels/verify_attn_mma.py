"""verify_attn on tensor cores with `mma.sync`: bfloat16, 512 + 64 columns, sm_80 on.

Contract and maths are those of `ddtree_numba.kernels.verify_attn`, whose `merge_kernel`
also brings the splits together here. What differs: products are bfloat16 with float32
sums, and weights are rounded to bfloat16 before they meet the values.

A block has 64 packed rows (tree row and head) of a request and a split of the keys, and
goes through these in tiles. 8 warps share a tile in two ways:

- scores [64 rows, keys]: warp w has rows ``16 · (w % 4) …`` and half ``w // 4`` of the
  keys. Both warps of a row group need the larger maximum, so they exchange theirs.
- sums [64 rows, 512 columns]: warp w has columns ``64 · w …`` of every row: 128 float32
  in a lane, and a value is read from shared memory by one warp only. The weights of all
  rows go through shared memory.

Who does what when, with two stages::

            tile j in stage 0                        tile j + 1 in stage 1
    copy    | ask for tile j + 1 ................... | ask for tile j + 2 ......
    warps   | scores, maxima | weights | add values  | scores, maxima | weights
    barrier A                B         C             A                B

    A  tile j has arrived; everyone is done with tile j - 1 and with its weights
    B  the maxima are there; everyone is done with the keys of tile j
    C  the weights are there

Only where keys of the tail are in a tile, scores are hidden by the visibility bits
before B, and values that are no numbers are cleared after it (`clear_non_finite`).

Shared memory, in elements of 16 bits (`Form` says how many keys and stages fit)::

    0                   64 · 576                                  (+ keys · 576 a stage)
    | queries [64, 576] | stage 0 [keys, 576] | stage 1 [keys, 576] |
    beside it, static: weights [64, keys] bf16, maxima [2, 64] f32, shrinks [64] f32

Swizzle: rows are not padded. Chunk c (16 bytes) of row r of a tile stands at place
``c ^ (r & 7)``, so that 8 rows of one chunk, which `ldmatrix` reads at once, lie in 8
different groups of 4 banks.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np
from numba import cuda

from ddtree_numba.backend import Place
from ddtree_numba.kernels.ptx import (
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
    FULL_WARP,
    MINUS_INF,
    ZERO,
    bounds,
    is_padding,
    rows_start_at,
    sees,
)

D, D_LATENT = 576, 512  # columns of a cache row, and those that are its value
ROWS = 64  # packed rows of a block
THREADS = 256
GROUP = 64  # columns of a tile: the length of a swizzle, and a warp's share of values
GROUPS = D // GROUP
ROW_PARTS, COLUMN_PARTS = ROWS // 16, GROUP // 8  # fragments of a warp's sums
TILES_AT = ROWS * D  # in shared memory
ONE = np.float32(1.0)
MERGE_COST = 0.1  # of a split, in tiles


class Form(NamedTuple):
    """How much of the cache is in shared memory at a time."""

    keys: int  # of a tile
    stages: int  # tiles: 2, or 1 that is not refilled before it is used up

    @property
    def dynamic_shared(self) -> int:
        """Bytes for the queries and the stages."""
        return 2 * (TILES_AT + self.stages * self.keys * D)

    @property
    def shared(self) -> int:
        """Bytes in all."""
        return self.dynamic_shared + 2 * ROWS * self.keys + 4 * 3 * ROWS


# Largest first: 224.8, 148.8 and 92.8 KB, for cards that give a block 227 KB (sm_90,
# sm_100), 163 KB (sm_80) and 99 KB (sm_86, sm_89, sm_120: two stages do not fit). From
# sm_80 on no card gives less.
FORMS = (Form(64, 2), Form(32, 2), Form(16, 1))


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
    """Where in its row of the weights [ROWS, keys] a key's weight stands.

    Of these shorter rows 64 / keys fill the 32 banks once, and share a swizzle.
    """
    return key ^ ((row & 7) * keys >> 6) << 3


# --------------------------------------------------------------------------------- load


@cuda.jit(device=True)
def request_rows(shared, at, source, first, end, count):
    """Ask for `count` rows of `source` [·, D] from row `first` on, zeros from `end` on.

    8 lanes ask for 128 bytes of a row, so that whole lines are read.
    """
    thread = np.uint32(cuda.threadIdx.x)
    together = min(count, THREADS // 8)  # rows that the block asks for at a time …
    beside = THREADS // 8 // together  # … and groups of columns of each
    chunk = (thread & 7) * 8
    row = (thread >> 3) % together
    own_group = thread // (8 * together) % beside
    for above in range(0, count, together):
        to = above + row
        n_bytes = 16 if first + to < end else 0
        for left in range(0, GROUPS, beside):
            group = left + own_group
            if group < GROUPS:
                here = at + place(to, group, chunk)
                origin = (first + to, group * GROUP + chunk)
                cp_async_16_zfill(shared, here, source, origin, n_bytes)


# -------------------------------------------------------------------------------- q · k


@cuda.jit(device=True)
def score_tile(shared, keys_at, row, first_key, lane, parts, sums):
    """q · k of 16 rows and `parts` × 8 keys by a warp, in two sums.

    ``sums[0]`` takes the even and ``sums[1]`` the odd 16 columns, so that twice as many
    products run side by side. Of part n a lane has rows g and g + 8 and keys 2t and
    2t + 1, as `mma_m16n8k16_bf16` tells.
    """
    for odd_columns in range(2):
        for n in range(parts):
            for e in range(4):
                sums[odd_columns, n, e] = ZERO
    query_row, query_half = row + (lane & 15), (lane >> 4) * 8
    key_row, key_quarter = first_key + (lane & 7), (lane >> 3) * 8
    for group in range(GROUPS):
        for column in range(0, GROUP, 32):
            even = ldmatrix_x4(shared, place(query_row, group, column + query_half))
            odd = ldmatrix_x4(shared, place(query_row, group, column + 16 + query_half))
            for n in range(parts):
                at = keys_at + place(key_row + 8 * n, group, column + key_quarter)
                both = ldmatrix_x4(shared, at)  # 8 keys, 32 columns
                mma_m16n8k16_bf16(sums[0, n], even, both[:2])
                mma_m16n8k16_bf16(sums[1, n], odd, both[2:])


@cuda.jit(device=True)
def scale_scores(sums, parts, scale, scores):
    """Bring both sums of a score together, in base 2."""
    for n in range(parts):
        for e in range(4):
            scores[n, e] = (sums[0, n, e] + sums[1, n, e]) * scale


@cuda.jit(device=True)
def hide(visibility, b, packed, heads, first_key, prefix_len, n_keys, parts, scores):
    """Set this lane's scores of keys that a row does not see to -inf.

    packed : the lane's upper packed row (the other is 8 further)
    first_key : its first key
    """
    for r in range(2):
        # Rows past the request's last repeat it: nobody stores them.
        row = min((packed + 8 * r) // heads, visibility.shape[1] - 1)
        for n in range(parts):
            for e in range(2):
                key = first_key + 8 * n + e
                if key >= n_keys or not sees(visibility, b, row, key, prefix_len):
                    scores[n, 2 * r + e] = MINUS_INF


# ------------------------------------------------------------------------------ softmax


@cuda.jit(device=True)
def weigh(score, top):
    """2^(score - top); 0 for an unseen key, also where none was seen yet."""
    return ZERO if score == MINUS_INF else ex2_approx(score - top)


@cuda.jit(device=True)
def find_maxima(scores, parts, half, row, lane, maxima):
    """Write the largest score of every row, in this warp's half of the keys."""
    for r in range(2):
        highest = MINUS_INF
        for n in range(parts):
            for e in range(2):
                highest = cuda.libdevice.fmaxf(highest, scores[n, 2 * r + e])
        for distance in (1, 2):  # the 4 lanes of a row
            other = cuda.shfl_xor_sync(FULL_WARP, highest, distance)
            highest = cuda.libdevice.fmaxf(highest, other)
        if lane & 3 == 0:
            maxima[half, row + (lane >> 2) + 8 * r] = highest


@cuda.jit(device=True)
def weigh_tile(
    scores, parts, keys, half, row, lane, maxima, top, total, shrinks, weights
):
    """Turn scores into weights, for all warps to read; returns whether a top moved.

    Also what older sums shrink by, where the tile has a new maximum.
    """
    moved = np.int32(0)
    for r in range(2):
        at = row + (lane >> 2) + 8 * r
        highest = cuda.libdevice.fmaxf(maxima[0, at], maxima[1, at])
        highest = cuda.libdevice.fmaxf(highest, top[r])
        shrink = weigh(top[r], highest)
        top[r] = highest
        total[r] *= shrink
        for n in range(parts):
            low = weigh(scores[n, 2 * r], highest)
            high = weigh(scores[n, 2 * r + 1], highest)
            total[r] += low + high
            key = half * (keys // 2) + 8 * n + (lane & 3) * 2
            weights[at, weight_place(at, key, keys) // 2] = cvt_rn_bf16x2(low, high)
        if half == 0 and lane & 3 == 0:
            shrinks[at] = shrink
        if shrink != ONE:
            moved = np.int32(1)
    return moved


# ----------------------------------------------------------------------- weight · value


@cuda.jit(device=True)
def clear_non_finite(words, at, keys):
    """Set NaN and inf among a tile's values to 0; words of two elements, from `at` on.

    A row that does not see a key weighs its value with 0, and 0 · NaN is NaN. A row
    that does see it loses nothing: the key's NaN made its score NaN, so its total is
    NaN too.
    """
    column = cuda.threadIdx.x  # the swizzle keeps the 512 columns of values together
    for key in range(keys):
        here = at + key * (D // 2) + column
        pair = words[here]
        low, high = pair & np.uint32(0x7F80), pair & np.uint32(0x7F800000)
        if low == np.uint32(0x7F80) or high == np.uint32(0x7F800000):
            if low == np.uint32(0x7F80):
                pair &= np.uint32(0xFFFF0000)
            if high == np.uint32(0x7F800000):
                pair &= np.uint32(0x0000FFFF)
            words[here] = pair


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
def load_weights(weights, row, key, keys, lane):
    """The fragment of 16 rows' weights of 16 keys."""
    row += lane & 15
    return ldmatrix_x4(
        weights, (row, weight_place(row, key + (lane >> 4) * 8, keys) // 2)
    )


@cuda.jit(device=True)
def add_values(shared, values_at, weights, keys, group, lane, sums):
    """Add weights · values, for every row and a group of 64 columns, by a warp."""
    for key in range(0, keys, 16):
        rows0 = load_weights(weights, 0, key, keys, lane)
        rows1 = load_weights(weights, 16, key, keys, lane)
        rows2 = load_weights(weights, 32, key, keys, lane)
        rows3 = load_weights(weights, 48, key, keys, lane)
        for n in range(0, COLUMN_PARTS, 2):
            column = 8 * n + (lane >> 4) * 8
            at = values_at + place(key + (lane & 15), group, column)
            both = ldmatrix_x4_trans(shared, at)  # 16 keys, 16 columns
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
def store_sums(sums, row0, group, lane, accs):
    """Write this warp's sums of the packed rows that there are; accs [R, Dc]."""
    for m in range(ROW_PARTS):
        for r in range(2):
            row = row0 + 16 * m + (lane >> 2) + 8 * r
            if row < accs.shape[0]:
                for n in range(COLUMN_PARTS):
                    column = group * GROUP + 8 * n + (lane & 3) * 2
                    accs[row, column] = sums[m, n, 2 * r]
                    accs[row, column + 1] = sums[m, n, 2 * r + 1]


@cuda.jit(device=True)
def store_tops(
    visibility, b, heads, row0, row, half, lane, maxima, top, total, tops, totals
):
    """Write top and total of every row, padding as a row that saw nothing; tops [R]."""
    for r in range(2):
        for distance in (1, 2):  # the 4 lanes of a row
            total[r] += cuda.shfl_xor_sync(FULL_WARP, total[r], distance)
    at = row + (lane >> 2)
    if lane & 3 == 0 and half == 1:
        maxima[1, at], maxima[1, at + 8] = total[0], total[1]
    cuda.syncthreads()  # the totals of the second half of the keys are there
    if lane & 3 == 0 and half == 0:
        for r in range(2):
            packed = row0 + at + 8 * r
            if packed < tops.size:
                nothing = is_padding(visibility, b, packed // heads)
                tops[packed] = MINUS_INF if nothing else top[r]
                totals[packed] = ZERO if nothing else total[r] + maxima[1, at + 8 * r]


# ----------------------------------------------------------------------------- schedule


@functools.cache
def make_kernel(form: Form) -> Any:
    """The kernel for one form."""
    keys, stages = form
    pairs = keys // 2
    parts = keys // 16  # of 8 keys, for a warp

    @cuda.jit
    def mma_kernel(
        q,  # [B, R, 576] u16 (bf16 bits): packed rows, R = N·H, row i·H + h
        kv_cache,  # [B, S_max, 576] u16; rows start at multiples of 16 bytes
        prefix_lens,  # [B] i32
        visibility,  # [B, N, ceil(N/32)] u32
        scale,  # f32: sm_scale · log2(e)
        accs,  # out [P, B, R, 512] f32
        tops,  # out [P, B, R] f32, base 2
        totals,  # out [P, B, R] f32
    ):
        shared = cuda.shared.array(0, np.uint16, alignment=128)  # queries and tiles
        words = cuda.shared.array(0, np.uint32, alignment=128)  # the same bytes
        weights = cuda.shared.array((ROWS, pairs), np.uint32, alignment=16)  # bf16
        maxima = cuda.shared.array((2, ROWS), np.float32)
        shrinks = cuda.shared.array(ROWS, np.float32)
        products = cuda.local.array((2, parts, 4), np.float32)
        scores = cuda.local.array((parts, 4), np.float32)
        sums = cuda.local.array((ROW_PARTS, COLUMN_PARTS, 4), np.float32)
        top = cuda.local.array(2, np.float32)  # of rows g and g + 8 …
        total = cuda.local.array(2, np.float32)  # … and of the lane's own keys

        thread = np.uint32(cuda.threadIdx.x)  # unsigned: no care for negative indices
        warp, lane = thread >> 5, thread & 31
        row, half = (warp & 3) * 16, warp >> 2
        heads = q.shape[1] // visibility.shape[1]
        splits = accs.shape[0]
        blocks = (q.shape[1] + ROWS - 1) // ROWS
        split = cuda.blockIdx.x % splits
        row0 = cuda.blockIdx.x // splits % blocks * ROWS
        b = cuda.blockIdx.x // (splits * blocks)
        prefix_len, n_keys = bounds(prefix_lens, b, kv_cache, visibility.shape[1])
        n_tiles = (n_keys + keys - 1) // keys
        share = (n_tiles + splits - 1) // splits
        first_tile = split * share
        end_tile = min(first_tile + share, n_tiles)

        for r in range(2):
            top[r] = MINUS_INF
            total[r] = ZERO
        for m in range(ROW_PARTS):
            for n in range(COLUMN_PARTS):
                for e in range(4):
                    sums[m, n, e] = ZERO

        request_rows(shared, 0, q[b], row0, q.shape[1], ROWS)
        if first_tile < end_tile:
            request_rows(shared, TILES_AT, kv_cache[b], first_tile * keys, n_keys, keys)
        cp_async_commit_group()
        for tile in range(first_tile, end_tile):
            key0 = tile * keys
            at = TILES_AT + (tile - first_tile) % stages * keys * D
            cp_async_wait_group(0)
            # A: the tile is there for all, and all are done with the tile before it.
            cuda.syncthreads()
            if stages > 1 and tile + 1 < end_tile:
                next_at = TILES_AT + (tile + 1 - first_tile) % stages * keys * D
                request_rows(shared, next_at, kv_cache[b], key0 + keys, n_keys, keys)
                cp_async_commit_group()

            score_tile(shared, at, row, half * pairs, lane, parts, products)
            scale_scores(products, parts, scale, scores)
            in_tail = key0 + keys > prefix_len
            if in_tail:
                key = key0 + half * pairs + (lane & 3) * 2
                packed = row0 + row + (lane >> 2)
                hide(
                    visibility,
                    b,
                    packed,
                    heads,
                    key,
                    prefix_len,
                    n_keys,
                    parts,
                    scores,
                )
            find_maxima(scores, parts, half, row, lane, maxima)
            # B: the maxima are there, and all are done with the keys.
            cuda.syncthreads()
            if in_tail:
                clear_non_finite(words, at // 2, keys)
            moved = weigh_tile(
                scores,
                parts,
                keys,
                half,
                row,
                lane,
                maxima,
                top,
                total,
                shrinks,
                weights,
            )
            # C: weights, shrinks and the cleared values are there.
            if cuda.syncthreads_or(moved):
                shrink_sums(shrinks, lane, sums)
            add_values(shared, at, weights, keys, warp, lane, sums)
            if stages == 1 and tile + 1 < end_tile:
                cuda.syncthreads()  # all are done with the values
                request_rows(shared, at, kv_cache[b], key0 + keys, n_keys, keys)
                cp_async_commit_group()

        cp_async_wait_group(0)  # a split without keys still has its queries on the way
        store_sums(sums, row0, warp, lane, accs[split, b])
        store_tops(
            visibility,
            b,
            heads,
            row0,
            row,
            half,
            lane,
            maxima,
            top,
            total,
            tops[split, b],
            totals[split, b],
        )

    return mma_kernel


# --------------------------------------------------------------------------------- host


def check_kind(q: Any, d_latent: int) -> None:
    """Raise TypeError or ValueError for what this version does not compute."""
    if q.dtype != np.uint16:
        raise TypeError(
            f"version 'mma' and q has dtype {q.dtype}; expected uint16 (bf16 bits)"
        )
    if (q.shape[3], d_latent) != (D, D_LATENT):
        raise ValueError(
            f"version 'mma' and D is {q.shape[3]}, d_latent is {d_latent}; expected "
            f"{D} and {D_LATENT}"
        )


def check_rows(**arrays: Any) -> None:
    """Raise ValueError for arrays whose rows cannot be copied in pieces of 16 bytes."""
    for name, x in arrays.items():
        if not rows_start_at(8, x):
            raise ValueError(
                f"version 'mma' and {name} has strides {x.strides}; expected "
                "contiguous rows that start at multiples of 16 bytes"
            )


def form_for(at: Place) -> Form:
    """The largest form that the GPU can hold; in the emulator the middle one.

    Raises
    ------
    ValueError
        If the GPU lacks the instructions.
    """
    if at.executor != "gpu":
        return FORMS[1]
    device = cuda.get_current_device()
    major, minor = device.compute_capability
    if major < 8:
        raise ValueError(
            "version 'mma' needs compute capability 8.0 or later; this GPU has "
            f"{major}.{minor}"
        )
    room = device.MAX_SHARED_MEMORY_PER_BLOCK_OPTIN
    return next(form for form in FORMS if form.shared <= room)
