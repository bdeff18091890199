"""verify_attn with Hopper's `wgmma`, TMA and mbarriers: bfloat16, 512 + 64 columns.

Contract and maths are those of `ddtree_numba.kernels.verify_attn`; as in its `mma`
version, products are bfloat16 with float32 sums, and weights are rounded to bfloat16
before they meet the values. Needs compute capability 9.0 (target sm_90a). The schedule
inside a block is that of FlashMLA (deepseek-ai/FlashMLA, "seesaw"), with a warpgroup
that loads.

A block has 64 packed rows (tree row and head) of a request, the *row tile*, and goes
through tiles of 64 keys. 384 threads are three warpgroups:

    0      scores of the even tiles; sums of output columns   0 … 255
    1      scores of the odd tiles;  sums of output columns 256 … 511
    2      a thread loads (TMA), a warp plans and finds what is to be merged;
           its registers go to the first two groups

A warpgroup's sums are 64 x 256 float32, 128 in a thread. Of a pair of tiles, with P0
and P1 the weights of the even and the odd one, V0 and V1 their values, left | right::

    group 0 | weigh P0, + P0·V0 left -> share P0 | wait P1 | + P1·V1 left  | next q·k
                                         |           ^
                                 EVEN_READY      ODD_READY
                                         v           |
    group 1 | weigh P1 ............ wait P0 | + P0·V0 right -> share P1 | + P1·V1 right
            | wait for its TURN: half a softmax behind group 0 | next q·k
    loads   | a half of a tile again, as soon as its group says that it is free

so that the tensor cores always have one group's products while the other weighs.

Both groups weigh against one reference a row, 2^(score - reference). It starts as the
first tile's maximum, and moves only when a score passes it by `MARGIN` powers of 2
(`exact_max`: at once, with smaller errors, mostly a tenth slower). So group 1 need not
wait for P0's maximum: it weighs against the old reference, and again in the rare case
that group 0 moved it.

Shared memory, 231,136 of 232,448 bytes. A *piece* is 64 rows of 64 columns, swizzled by
TMA (chunk c of row r at place ``c ^ (r & 7)``). As rows of keys it is an operand of
q·k, and as columns of values of P·V, so nothing is transposed or copied::

      0 KB  queries, 9 pieces      while parts are merged: a share of their sums
     72     even tile, 9 pieces    … and their marks
    144     odd tile, 8 pieces of values
    208     its rope columns; once it is scored: P1
    216     P0                     while sums are written: 1 KB a warp
    224     references and totals of rows, who moved them, which are padding;
            mbarriers; plan and merges

Sharing out. All tiles of keys, row tile by row tile and request by request, are one
line. Blocks are no more than run at the same time, one a multiprocessor: they wait for
one another, so the launch is cooperative. Each takes whole row tiles, in rounds of one
for every block, and in the end an even part of what is left, which may begin and end
inside a row tile. Row tiles a … e of 30 tiles of keys each, a letter for every 5 of
them, for three blocks::

    line       aaaaaabbbbbbccccccddddddeeeeee
    block 0    aaaaaa            dddd           part 0 of d
    block 1          bbbbbb          ddee       part 1 of d, part 0 of e
    block 2                cccccc        eeee   part 1 of e

Where there is one request, and all its row tiles are cut into equally many parts, two
blocks beside each other have the same part of two row tiles: they ask for the same keys
together. So a block has two numbers: its own, and that of its part along the line, the
*worker*.

Merging. Whole row tiles are written at once. Of others a block posts its part (sums,
references, totals, scales) in global memory and counts that; then it merges a share of
the row tile, a range of its chunks. For each part one lane waits until it is counted,
and asks for the share of it by a few copies in bulk: what is posted early is fetched
early. When all references have come, sums are weighed and added piece by piece, as they
come. Where up to `KEEPERS` blocks share a row tile and all end in it, a block keeps its
share of its own part in shared memory, and posts only the rest.

Sums travel in float16, because the exchange takes as long as its bytes. They do so as
multiples of a power of 2, the *scale* of a row's 256 columns, so that the largest of
them is between 2^14 and 2^15: a part's sum is off by 2^-11 of itself at most (or 2^-39
of the largest), an eighth of what rounding the weights to bfloat16 may do. Beside a sum
that is too large for float32, and so inf, the others of these columns are 0.

What runs once costs more here than it seems, since its instructions come from memory:
plan and merge are short loops rather than wide ones.

Measured on one H200 against cuBLAS and FlashInfer: data/bench/.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numba import config, cuda

from ddtree_numba.backend import Place
from ddtree_numba.kernels.ptx import (
    bar_arrive,
    bar_red_or,
    bar_sync,
    cp_async_bulk,
    cp_async_bulk_tensor_3d,
    cvt_f32_f16x2,
    cvt_rn_bf16x2,
    cvt_rn_f16x2,
    div_u32,
    ex2_approx,
    fence_acq_rel_gpu,
    fence_mbarrier_init,
    fence_proxy_async,
    fence_proxy_async_global,
    fence_proxy_tensormap,
    has_reached,
    max_bf16x2,
    mbarrier_arrive,
    mbarrier_arrive_expect_tx,
    mbarrier_init,
    mbarrier_wait,
    min_bf16x2,
    setmaxnreg_dec,
    setmaxnreg_inc,
    st_global_v2_f32,
    st_shared_v2_f32,
    stmatrix_x4,
    uncounted,
    wgmma_4_m64n256k16_bf16_from_registers,
    wgmma_commit_group,
    wgmma_descriptor,
    wgmma_fence,
    wgmma_m64n64k16_bf16,
    wgmma_m64n256k16_bf16,
    wgmma_m64n256k16_bf16_from_registers,
    wgmma_wait_group,
)
from ddtree_numba.kernels.verify_attn import (
    LN_2,
    MINUS_INF,
    ZERO,
    bf16_problem,
    is_padding,
    load4,
    rows_start_at,
    store4,
)
from ddtree_numba.kernels.wide import FULL_WARP, WARP

D, D_LATENT = 576, 512  # columns of a cache row, and those that are its value
ROWS = 64  # packed rows of a block
KEYS = 64  # keys of a tile
GROUP = 128  # threads of a warpgroup
THREADS = 3 * GROUP  # two that compute, one that loads
CONSUMERS = 2 * GROUP

# Shared memory: places in elements of 16 bits, …
PIECE = 64 * 64  # 64 rows of 64 columns
PIECES = D // 64
TILE = PIECES * PIECE
QUERIES = 0
EVEN, ODD = TILE, 2 * TILE  # the even and the odd tile of a pair
EVEN_WEIGHTS = 3 * TILE
ODD_WEIGHTS = ODD + 8 * PIECE  # over the rope columns, which no value needs
# … in float32 …
EVEN_TOPS = (EVEN_WEIGHTS + PIECE) // 2
ODD_TOPS = EVEN_TOPS + ROWS
TOTALS = ODD_TOPS + ROWS  # of both warpgroups
SEEING = TOTALS + 2 * ROWS  # 0 for padding rows, 1 for others
MOVED = SEEING + ROWS  # of each warp, in 16 bits: whether its tile moved a reference
# … and in mbarriers. "Arrived" has one for every piece of a tile; "free" says that a
# warpgroup is done with its half of the values of a tile.
BARRIERS = (MOVED + 4) // 2
EVEN_ARRIVED = BARRIERS
ODD_ARRIVED = EVEN_ARRIVED + PIECES
QUERIES_ARRIVED = ODD_ARRIVED + PIECES
EVEN_LEFT_FREE = QUERIES_ARRIVED + PIECES
EVEN_RIGHT_FREE = EVEN_LEFT_FREE + 1
ODD_LEFT_FREE = EVEN_LEFT_FREE + 2
ODD_RIGHT_FREE = EVEN_LEFT_FREE + 3
QUERIES_FREE = EVEN_LEFT_FREE + 4
MERGES_KNOWN = QUERIES_FREE + 1
MERGING = MERGES_KNOWN + 1  # of two row tiles: marks, and four pieces of a share
ARRIVALS = 5
BARRIERS_END = MERGING + 2 * ARRIVALS
# Behind them what `write_plan` and `write_merges` write, in int32.
ROUNDS = 2 * BARRIERS_END
WORKERS, REST_AT, REST, PART_LENGTH, PART_AT = range(ROUNDS + 1, ROUNDS + 6)
WORKER = PART_AT + 3  # the block's number along the line
LAUNCHES = WORKER + 1  # that have posted the block's parts before
MERGES = LAUNCHES + 1  # of two row tiles: a `Share` each
# When all tiles of keys are done with, in 32 bits over the queries and the even tile: a
# block's share of the parts of a row tile, and the parts' *marks*.
MOST_BLOCKS = 144  # blocks at most: as many as GH100 has multiprocessors
CHUNKS = 4096  # of eight sums, 16 bytes, in a part …
UNIT_BITS = 9
UNIT = 1 << UNIT_BITS  # … and in what a warp has of it, a *unit*: 16 rows, 256 columns
UNITS = CHUNKS // UNIT  # two of them beside each other are a *band*
MARKS = 48  # of a unit: its 16 rows' references, g beside g + 8, then in the same order
TOTAL_MARKS, SCALE_MARKS = 16, 32  # … totals, and scales of posted sums
# Behind a part's marks, so that the lanes of a row, which read those of several parts,
# read other banks; four, because copies in bulk need multiples of 16 bytes.
GAP = 4
FETCHED = 0
PART_MARKS = FETCHED + 4 * 9 * UNIT  # kept shares are whole units: 3 of 3 parts

# Named barriers (0 is that of the whole block).
EVEN_READY, ODD_READY, TURN, BOTH, EVEN_ALONE, ODD_ALONE = 1, 2, 3, 4, 5, 6
WRITTEN, PLANNED = 7, 8

NOTHING = (ZERO,) * 8  # the sums of a chunk, before any part of it
NO_TOP = np.float32(-1e30)  # finite, so that -inf - NO_TOP is no NaN
ALL_SEEN = np.uint32(0xFFFFFFFF)
MARGIN = np.float32(8.0)  # in powers of 2; see `raise_top`
LOADER_REGISTERS, CONSUMER_REGISTERS = 56, 224  # 56 · 128 + 224 · 256 < 65536
ONE = np.float32(1.0)
LARGEST_PAIR, LOWEST_PAIR = np.uint32(0x7F7F7F7F), np.uint32(0xFF7FFF7F)  # bfloat16

MAX_STEP = 1 << 40  # of a tensor map, in bytes
MAX_TILES = (1 << 31) - 1  # of rows and keys
ALIKE = np.float32(0.875)  # rounds pay if the mean length is this much of the longest
SPLIT_COST = np.float32(5.0)  # what it costs to split and merge, in tiles of keys
LEAST = 4  # tiles of keys that are worth a block of their own
PAYS = 16  # tiles of rows and keys; see `pays`
KEEPERS = 4  # blocks that may share a row tile and keep what each merges of its part
# What a part takes where it is posted: its sums, in words of two float16, and marks. A
# chunk is four words: columns 2t and 2t + 1 of row g and of row g + 8, then the same 8
# columns further. Chunks lie unit by unit, there as registers are.
POSTED, POSTED_MARKS = 4 * CHUNKS, UNITS * MARKS
# Exponents: of a row's largest sum as it is posted; and of scales, which bring the
# largest float32 there, and are no subnormal ones, nor are their inverses.
POSTED_EXPONENT = np.float32(14)
LOWEST_EXPONENT, HIGHEST_EXPONENT = np.float32(-126), np.float32(113)


class Memory(NamedTuple):
    """Shared memory, under the types that it is used as."""

    shared: Any  # u16
    words: Any  # u32
    ints: Any  # i32
    floats: Any  # f32
    barriers: Any  # u64


class Thread(NamedTuple):
    """A thread of a warpgroup that computes."""

    number: Any  # in the warpgroup
    lane: Any
    row: Any  # of the row tile; its other one is 8 further
    t: Any  # lane % 4: of every 8 columns it has 2t and 2t + 1
    matrix_row: Any  # that it names to `stmatrix`


class Request(NamedTuple):
    """What a thread needs to know of its two rows and their keys."""

    b: Any
    node0: Any  # tree row of the upper row …
    node1: Any  # … and of the lower
    prefix_len: Any
    n_keys: Any


class Share(NamedTuple):
    """What a block merges of a row tile; 0 parts if it has none to merge."""

    parts: Any
    first: Any  # worker of the first part
    request: Any
    row_tile: Any
    begin: Any  # first chunk …
    chunks: Any  # … and how many
    kept: Any  # the part whose chunks are there already; -1 if none is
    units: Any  # how many units the chunks are of
    bits: Any  # a warp sums 2^bits of them at a time
    piece: Any  # how many arrive at a time


MERGE = len(Share._fields)
KEPT = MERGES + Share._fields.index("kept")  # of the block's last part
DYNAMIC_SHARED = 4 * (MERGES + 2 * MERGE)


def device(function: Any) -> Any:
    """Part of the kernel; its arrays are in registers, so it must not be a call."""
    return cuda.jit(device=True, forceinline=True)(function)


# Loops are written out where an index into registers (`scores`, `weights`, `sums`) or
# an offset of `wgmma` must be a constant: the compiler unrolls short ones only.


# ----------------------------------------------------------------------------- schedule
# How blocks share the line of all tiles of keys. Rounds of whole row tiles come first:
# few requests are under way at a time then, and the L2 cache holds them. There are none
# where requests differ much in length or `n_splits` is given: all of the line is cut in
# even parts. Nothing is cut where more rounds end no later than even parts, which cost
# `SPLIT_COST` to bring together.


@device
def extent(prefix_lens, b, room, n_rows):
    """Prefix length and number of keys, inside the cache whatever was passed."""
    prefix_len = np.int32(min(max(prefix_lens[np.uint32(b)], np.int32(0)), room))
    return prefix_len, np.int32(min(prefix_len + n_rows, room))


@device
def key_tiles(prefix_lens, b, room, n_rows):
    """How many tiles of keys a request has."""
    _, n_keys = extent(prefix_lens, b, room, n_rows)
    return np.int32((n_keys + (KEYS - 1)) >> 6)


@device
def seen_from(tile, count, prefix_len, room, n_rows, row_tile, heads):
    """How many of `count` tiles of keys from `tile` on a row tile sees; at least 1.

    Rows see no node behind their own (a tree's nodes come after their parents).
    """
    last = div_u32(row_tile * ROWS + ROWS - 1, heads)
    keys = np.int32(min(prefix_len + min(last + 1, n_rows), room))
    seen = np.int32(np.int32((keys + (KEYS - 1)) >> 6) - tile)
    return np.int32(max(min(count, seen), np.int32(1)))


@device
def warp_total(x):
    """The sum of the warp's counts, for every lane."""
    for distance in (16, 8, 4, 2, 1):
        x = np.int32(x + cuda.shfl_xor_sync(FULL_WARP, x, distance))
    return x


@device
def tiles_of_lane(prefix_lens, b, end, room, n_rows):
    """`key_tiles` of a request before `end`, 0 for others."""
    return key_tiles(prefix_lens, b, room, n_rows) if b < end else np.int32(0)


@device
def survey(prefix_lens, room, n_rows, lane):
    """Tiles of keys of all requests together, and of the longest; by a warp."""
    batch = np.int32(prefix_lens.size)
    if batch == 1:
        tiles = key_tiles(prefix_lens, np.int32(0), room, n_rows)
        return tiles, tiles
    total, longest = np.int32(0), np.int32(0)
    for first in range(0, batch, WARP):
        tiles = tiles_of_lane(prefix_lens, np.int32(first + lane), batch, room, n_rows)
        total = np.int32(total + tiles)
        longest = np.int32(max(longest, tiles))
    for distance in (16, 8, 4, 2, 1):
        other = cuda.shfl_xor_sync(FULL_WARP, longest, distance)
        longest = np.int32(max(longest, other))
    return warp_total(total), longest


@device
def line_offset(row_tile, prefix_lens, room, n_rows, row_tiles, lane):
    """How many tiles of keys are before a row tile, over all requests; by a warp."""
    end = div_u32(row_tile, row_tiles)
    before = np.int32(0)
    for first in range(0, end, WARP):
        tiles = tiles_of_lane(prefix_lens, np.int32(first + lane), end, room, n_rows)
        before = np.int32(before + tiles)
    offset = np.int32(warp_total(before) * row_tiles)
    rest = np.int32(row_tile - end * row_tiles)
    if rest > 0:
        offset = np.int32(offset + rest * key_tiles(prefix_lens, end, room, n_rows))
    return offset


@device
def is_most(workers, blocks):
    """Whether so many workers leave at most a tenth of the blocks without work."""
    return 10 * workers >= 9 * blocks


@device
def plan(prefix_lens, room, n_rows, row_tiles, n_splits, blocks, lane):
    """How the line is shared out; by a warp.

    Returns (rounds of whole row tiles, workers: blocks that get a part of the rest,
    where the rest begins, its length).
    """
    total, longest = survey(prefix_lens, room, n_rows, lane)
    tiles = np.int32(np.int32(prefix_lens.size) * row_tiles)
    units = np.int32(total * row_tiles)
    if n_splits > 0:
        return np.int32(0), np.int32(min(blocks, units)), np.int32(0), units
    most = np.float32(longest)  # a choice, so float32 will do for products
    rounds, begin = np.int32(0), np.int32(0)
    if tiles >= blocks and np.float32(units) >= ALIKE * most * np.float32(tiles):
        rounds = div_u32(tiles, blocks)
        begin = line_offset(
            np.int32(rounds * blocks), prefix_lens, room, n_rows, row_tiles, lane
        )
    rest_tiles, rest = np.int32(tiles - rounds * blocks), np.int32(units - begin)
    if rest_tiles == 0:
        return rounds, np.int32(0), begin, rest
    more = div_u32(rest_tiles + blocks - 1, blocks)
    if (np.float32(more) * most - SPLIT_COST) * np.float32(blocks) <= np.float32(rest):
        return np.int32(rounds + more), np.int32(0), begin, rest
    parts = np.int32(max(div_u32(rest, LEAST * rest_tiles), np.int32(1)))
    # A multiple of the row tiles if most blocks get work then: of equal ones, no part
    # is of two.
    whole = np.int32(rest_tiles * div_u32(blocks, rest_tiles))
    workers = whole if is_most(whole, blocks) else blocks
    return rounds, np.int32(min(workers, rest_tiles * parts)), begin, rest


@device
def cut(length, workers, worker):
    """Where a worker's part begins, if so many workers share a length evenly.

    Of four that share 4n + 1 tiles the first has one more: the last has the tail to
    look at, and tiles come in pairs.
    """
    each = div_u32(length, workers)
    rest = np.int32(length - each * workers)
    return np.int32(each * worker + div_u32(rest * worker + workers - 1, workers))


@device
def owner(length, workers, place):
    """The worker to whose part a place belongs: `cut` backwards."""
    return np.int32(np.uint64(place) * np.uint64(workers) // np.uint64(length))


@device
def locate(place, prefix_lens, room, n_rows, row_tiles, lane):
    """Request, row tile and tile of keys of a place in the line; by a warp."""
    batch = np.int32(prefix_lens.size)
    if batch == 1:
        tiles = key_tiles(prefix_lens, np.int32(0), room, n_rows)
        row_tile = div_u32(place, tiles)
        return np.int32(0), row_tile, np.int32(place - row_tile * tiles)
    for first in range(0, batch, WARP):
        b = np.int32(first + lane)
        own = tiles_of_lane(prefix_lens, b, batch, room, n_rows)
        until = np.int32(own * row_tiles)  # of this request and those before it
        for distance in (1, 2, 4, 8, 16):
            before = cuda.shfl_up_sync(FULL_WARP, until, distance)
            if lane >= distance:
                until = np.int32(until + before)
        behind = cuda.ballot_sync(FULL_WARP, until > place)
        if behind != 0:
            found = np.int32(cuda.ffs(behind) - 1)
            tiles = cuda.shfl_sync(FULL_WARP, own, found)
            end = cuda.shfl_sync(FULL_WARP, until, found)
            place = np.int32(place - (end - tiles * row_tiles))
            row_tile = div_u32(place, tiles)
            return np.int32(first + found), row_tile, np.int32(place - row_tile * tiles)
        place = np.int32(place - cuda.shfl_sync(FULL_WARP, until, WARP - 1))
    return np.int32(0), np.int32(0), np.int32(0)  # never: the place is in the line


@device
def part_of_one(prefix_lens, room, n_rows, row_tiles, block, blocks):
    """What `plan` comes to for one request, its row tiles cut in equally many parts.

    Most small launches are such, and are 0.5 to 1 µs shorter by this: the instructions
    of `plan` come from memory, and many of its divisions wait for others.

    Two blocks beside each other begin together, and are near each other. They get the
    same part of two row tiles: so they ask for the same keys at the same time.

    Returns (parts, or 0 if `plan` has to be asked; the request's tiles of keys; the
    block's worker, row tile, first tile of keys, and how many of them).
    """
    tiles = key_tiles(prefix_lens, np.int32(0), room, n_rows)
    each = div_u32(blocks, row_tiles)  # blocks that a row tile can have for its own
    parts = np.int32(max(min(each, tiles // LEAST), 1))
    pair = div_u32(block >> 1, parts)
    row_tile = np.int32(2 * pair + (block & 1))
    part = np.int32((block >> 1) - pair * parts)
    # Behind the pairs: blocks of the last of an odd number, and those that get nothing,
    # whose part does not exist.
    if row_tile >= row_tiles & -2:
        row_tile = np.int32(row_tiles - 1)
        part = np.int32(block - row_tile * parts)
    begin, end = cut(tiles, parts, part), cut(tiles, parts, part + 1)
    length, worker = np.int32(0), block
    if part < parts:
        length, worker = np.int32(end - begin), np.int32(row_tile * parts + part)
    cuts = (np.float32(tiles) - SPLIT_COST) * np.float32(blocks) > np.float32(
        tiles * row_tiles
    )
    # If more parts would pay, and these leave too many blocks without work, `plan` cuts
    # the line evenly, wherever row tiles end.
    if not cuts or (each < tiles // LEAST and not is_most(row_tiles * each, blocks)):
        parts = np.int32(0)
    return parts, tiles, worker, row_tile, begin, length


@device
def write_plan(
    ints, prefix_lens, room, n_rows, row_tiles, n_splits, block, blocks, lane
):
    """Write down for the block what it has to do, from `ROUNDS` on; by a warp.

    ints : shared memory as int32
    """
    b, parts, rounds, begin = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
    if prefix_lens.size == 1 and row_tiles < blocks and n_splits == 0:
        parts, tiles, worker, row_tile, tile, length = part_of_one(
            prefix_lens, room, n_rows, row_tiles, block, blocks
        )
        workers, rest = np.int32(row_tiles * parts), np.int32(row_tiles * tiles)
    if parts == 0:
        rounds, workers, begin, rest = plan(
            prefix_lens, room, n_rows, row_tiles, n_splits, blocks, lane
        )
        worker = block
        row_tile, tile, length = np.int32(0), np.int32(0), np.int32(0)
        if worker < workers:
            first = cut(rest, workers, worker)
            length = np.int32(cut(rest, workers, worker + 1) - first)
            b, row_tile, tile = locate(
                np.int32(begin + first), prefix_lens, room, n_rows, row_tiles, lane
            )
    if lane == 0:
        ints[ROUNDS], ints[WORKERS] = rounds, workers
        ints[REST_AT], ints[REST], ints[PART_LENGTH] = begin, rest, length
        ints[PART_AT], ints[PART_AT + 1], ints[PART_AT + 2] = b, row_tile, tile
        ints[WORKER] = worker


@device
def begin_step(ints, prefix_lens, room, n_rows, row_tiles, step):
    """What the block does in a step: a whole row tile each, then its part of the rest.

    Returns request, row tile, tile of keys, and how many tiles of keys; 0 at the end.
    """
    rounds = ints[ROUNDS]
    if step < rounds:
        number = np.int32(step * cuda.gridDim.x + cuda.blockIdx.x)
        b = div_u32(number, row_tiles)
        if b < prefix_lens.size:
            count = key_tiles(prefix_lens, b, room, n_rows)
            return b, np.int32(number - b * row_tiles), np.int32(0), count
    elif step == rounds:
        return (
            np.int32(ints[PART_AT]),
            np.int32(ints[PART_AT + 1]),
            np.int32(ints[PART_AT + 2]),
            np.int32(ints[PART_LENGTH]),
        )
    return np.int32(0), np.int32(0), np.int32(0), np.int32(0)


@device
def advance(
    ints, prefix_lens, room, n_rows, row_tiles, b, row_tile, tile, left, count, step
):
    """What comes after `count` tiles of keys: as `begin_step`, and the step."""
    left = np.int32(left - count)
    if left > 0:  # the next row tile of the same part
        if row_tile + 1 == row_tiles:
            return np.int32(b + 1), np.int32(0), np.int32(0), left, step
        return b, np.int32(row_tile + 1), np.int32(0), left, step
    step = np.int32(step + 1)
    b, row_tile, tile, left = begin_step(
        ints, prefix_lens, room, n_rows, row_tiles, step
    )
    return b, row_tile, tile, left, step


# --------------------------------------------------------------------------------- load


@device
def load_piece(memory, at, arrived, piece, tensor_map, row, request):
    """Ask for 64 rows of a piece's 64 columns; zeros where the tensor has no rows."""
    barrier = arrived + piece
    mbarrier_arrive_expect_tx(memory.barriers, barrier, 2 * PIECE)
    cp_async_bulk_tensor_3d(
        memory.shared,
        at + piece * PIECE,
        tensor_map,
        0,
        64 * piece,
        row,
        request,
        memory.barriers,
        barrier,
    )


@device
def load_first(memory, piece, query_map, cache_map, row, key, request):
    """Ask for a piece of the queries, and of the first tile that they meet."""
    load_piece(memory, QUERIES, QUERIES_ARRIVED, piece, query_map, row, request)
    load_piece(memory, EVEN, EVEN_ARRIVED, piece, cache_map, key, request)


@device
def load_left(memory, at, arrived, tensor_map, row, request):
    """Ask for the left half of the values, and the rope columns."""
    load_piece(memory, at, arrived, 0, tensor_map, row, request)
    load_piece(memory, at, arrived, 1, tensor_map, row, request)
    load_piece(memory, at, arrived, 2, tensor_map, row, request)
    load_piece(memory, at, arrived, 3, tensor_map, row, request)
    load_piece(memory, at, arrived, 8, tensor_map, row, request)


@device
def load_right(memory, at, arrived, tensor_map, row, request):
    """Ask for the right half of the values."""
    load_piece(memory, at, arrived, 4, tensor_map, row, request)
    load_piece(memory, at, arrived, 5, tensor_map, row, request)
    load_piece(memory, at, arrived, 6, tensor_map, row, request)
    load_piece(memory, at, arrived, 7, tensor_map, row, request)


@device
def load(memory, query_map, cache_map, prefix_lens, room, heads, n_rows, row_tiles):
    """Ask for all that the block goes through, as the places for it get free."""
    step = queries_parity = np.int32(0)
    parity = odd_parity = np.int32(0)  # of the next even tile, and odd tile
    b, row_tile, tile, left = begin_step(
        memory.ints, prefix_lens, room, n_rows, row_tiles, step
    )
    while left > 0:
        # What the groups wait for first; then how much more there is.
        row, key = np.int32(row_tile * ROWS), np.int32(tile * KEYS)
        mbarrier_wait(memory.barriers, QUERIES_FREE, queries_parity ^ 1)
        queries_parity = np.int32(queries_parity ^ 1)
        mbarrier_wait(memory.barriers, EVEN_LEFT_FREE, parity ^ 1)
        load_first(memory, 0, query_map, cache_map, row, key, b)
        load_first(memory, 1, query_map, cache_map, row, key, b)
        load_first(memory, 2, query_map, cache_map, row, key, b)
        load_first(memory, 3, query_map, cache_map, row, key, b)
        load_first(memory, 8, query_map, cache_map, row, key, b)
        mbarrier_wait(memory.barriers, EVEN_RIGHT_FREE, parity ^ 1)
        load_first(memory, 4, query_map, cache_map, row, key, b)
        load_first(memory, 5, query_map, cache_map, row, key, b)
        load_first(memory, 6, query_map, cache_map, row, key, b)
        load_first(memory, 7, query_map, cache_map, row, key, b)
        parity = np.int32(parity ^ 1)
        tiles = key_tiles(prefix_lens, b, room, n_rows)
        count = np.int32(min(np.int32(tiles - tile), left))
        prefix_len, _ = extent(prefix_lens, b, room, n_rows)
        ahead = seen_from(tile, count, prefix_len, room, n_rows, row_tile, heads)
        while ahead > 1:
            key = np.int32(key + KEYS)
            mbarrier_wait(memory.barriers, ODD_RIGHT_FREE, odd_parity ^ 1)
            load_right(memory, ODD, ODD_ARRIVED, cache_map, key, b)
            mbarrier_wait(memory.barriers, ODD_LEFT_FREE, odd_parity ^ 1)
            load_left(memory, ODD, ODD_ARRIVED, cache_map, key, b)
            odd_parity = np.int32(odd_parity ^ 1)
            if ahead > 2:
                key = np.int32(key + KEYS)
                mbarrier_wait(memory.barriers, EVEN_LEFT_FREE, parity ^ 1)
                load_left(memory, EVEN, EVEN_ARRIVED, cache_map, key, b)
                mbarrier_wait(memory.barriers, EVEN_RIGHT_FREE, parity ^ 1)
                load_right(memory, EVEN, EVEN_ARRIVED, cache_map, key, b)
                parity = np.int32(parity ^ 1)
            ahead = uncounted(ahead - 2)
        b, row_tile, tile, left, step = advance(
            memory.ints, prefix_lens, room, n_rows, row_tiles, b, row_tile, tile, left,
            count, step,
        )  # fmt: skip


# -------------------------------------------------------------------------------- q · k


@device
def score_piece(
    memory, scores, at, arrived, parity, piece, adds, first, queries_parity
):
    """Add the products of 64 columns, as soon as they have arrived.

    first : whether the queries may be on the way too
    """
    if first:
        mbarrier_wait(memory.barriers, QUERIES_ARRIVED + piece, queries_parity)
    mbarrier_wait(memory.barriers, arrived + piece, parity)
    queries = wgmma_descriptor(memory.shared, QUERIES)
    keys = wgmma_descriptor(memory.shared, at)
    wgmma_fence(scores, 32)
    wgmma_m64n64k16_bf16(scores, queries, 512 * piece, keys, 512 * piece, adds)
    wgmma_m64n64k16_bf16(scores, queries, 512 * piece + 2, keys, 512 * piece + 2, 1)
    wgmma_m64n64k16_bf16(scores, queries, 512 * piece + 4, keys, 512 * piece + 4, 1)
    wgmma_m64n64k16_bf16(scores, queries, 512 * piece + 6, keys, 512 * piece + 6, 1)


@device
def score_even_left(memory, scores, parity, *queries):
    """Begin the scores of an even tile with the columns on the left."""
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 0, 0, *queries)
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 1, 1, *queries)
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 2, 1, *queries)
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 3, 1, *queries)
    wgmma_commit_group()


@device
def score_even_rest(memory, scores, parity, *queries):
    """Complete them with the rope columns and those on the right."""
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 8, 1, *queries)
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 4, 1, *queries)
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 5, 1, *queries)
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 6, 1, *queries)
    score_piece(memory, scores, EVEN, EVEN_ARRIVED, parity, 7, 1, *queries)
    wgmma_commit_group()


@device
def score_odd(memory, scores, parity, *queries):
    """The scores of an odd tile, whose right half is free, and loaded, first."""
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 4, 0, *queries)
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 5, 1, *queries)
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 6, 1, *queries)
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 7, 1, *queries)
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 0, 1, *queries)
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 1, 1, *queries)
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 2, 1, *queries)
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 3, 1, *queries)
    score_piece(memory, scores, ODD, ODD_ARRIVED, parity, 8, 1, *queries)
    wgmma_commit_group()


# --------------------------------------------------------------------------------- mask


@device
def visibility_word(visibility, b, row, n):
    """Word n of a row's bits: before them all are seen, behind them nothing is."""
    words = np.int32(visibility.shape[2])
    inside = np.int32(min(max(n, np.int32(0)), np.int32(words - 1)))
    # Unsigned: no code for indices from the end.
    word = visibility[np.uint32(b), np.uint32(row), np.uint32(inside)]
    if n < 0:
        word = ALL_SEEN
    if n >= words:
        word = np.uint32(0)
    return word


@device
def window(visibility, b, row, start, count):
    """64 bits of a row from tail column `start` (maybe negative) on; 0 from `count` on.

    Returned as two uint32.
    """
    n, shift = np.int32(start >> 5), np.uint64(start & 31)
    w0 = visibility_word(visibility, b, row, n)
    w1 = visibility_word(visibility, b, row, n + 1)
    w2 = visibility_word(visibility, b, row, n + 2)
    low = np.uint32((np.uint64(w1) << np.uint64(32) | np.uint64(w0)) >> shift)
    high = np.uint32((np.uint64(w2) << np.uint64(32) | np.uint64(w1)) >> shift)
    if count < 32:
        high = np.uint32(0)
        low &= (np.uint32(1) << np.uint32(max(count, 0))) - np.uint32(1)
    elif count < 64:
        high &= (np.uint32(1) << np.uint32(count - 32)) - np.uint32(1)
    return low, high


@device
def look(visibility, request, key0):
    """Which of a tile's keys the thread's two rows see: two uint32 each.

    Of a tile of the prefix nobody asks, so nothing is looked up.
    """
    low0, high0, low1, high1 = ALL_SEEN, ALL_SEEN, ALL_SEEN, ALL_SEEN
    start = np.int32(key0 - request.prefix_len)
    if start + KEYS > 0:
        count = np.int32(request.n_keys - key0)
        low0, high0 = window(visibility, request.b, request.node0, start, count)
        low1, high1 = window(visibility, request.b, request.node1, start, count)
    return low0, high0, low1, high1


@device
def hide(scores, r, t, low, high):
    """Set scores of row g + 8r to -inf where its bits say that it does not see."""
    low, high = low >> np.uint32(2 * t), high >> np.uint32(2 * t)
    for j in range(4):
        for e in range(2):
            bit = np.uint32(1 << 8 * j + e)
            if low & bit == 0:
                scores[4 * j + 2 * r + e] = MINUS_INF
            if high & bit == 0:
                scores[16 + 4 * j + 2 * r + e] = MINUS_INF


@device
def any_not_finite(scores):
    """1 if any of this thread's scores is inf or NaN: times 0, that is NaN."""
    w, x, y, z = ZERO, ZERO, ZERO, ZERO  # four sums, none of which waits for another
    for n in range(0, 32, 4):
        w = cuda.fma(scores[n], ZERO, w)
        x = cuda.fma(scores[n + 1], ZERO, x)
        y = cuda.fma(scores[n + 2], ZERO, y)
        z = cuda.fma(scores[n + 3], ZERO, z)
    return np.uint32(0) if (w + x) + (y + z) == ZERO else np.uint32(1)


@device
def make_finite(words, at, thread):
    """Set NaN and inf among a tile's values to finite ones; words of two, from `at` on.

    A row that does not see a key weighs its value with 0, and 0 · NaN is NaN. A row
    that does see it loses nothing: the key's NaN made its score NaN, so its total is
    NaN too.
    """
    step = 4 * GROUP
    for n in range(0, 8 * PIECE // 2, 4 * step):  # loads of four are under way together
        here = at + n + 4 * thread
        a, b = load4(words, here), load4(words, here + step)
        c, d = load4(words, here + 2 * step), load4(words, here + 3 * step)
        store_finite(words, here, a)
        store_finite(words, here + step, b)
        store_finite(words, here + 2 * step, c)
        store_finite(words, here + 3 * step, d)


@device
def store_finite(words, at, pairs):
    """Write four pairs of bfloat16 with their non-finite ones made finite."""
    w, x, y, z = pairs
    store4(words, at, finite_pair(w), finite_pair(x), finite_pair(y), finite_pair(z))


@device
def finite_pair(pair):
    """Two bfloat16 inside the finite numbers; what is NaN becomes the lowest."""
    return min_bf16x2(max_bf16x2(pair, LOWEST_PAIR), LARGEST_PAIR)


@device
def mask(memory, thread, request, seen, scores, at, key0, alone):
    """Hide what the rows do not see, and clear values that they must not meet.

    Only tiles with keys of the tail have any. A value that is no number makes the
    scores of its key inf or NaN in every row: only then are the values looked at.

    seen : what `look` returned; alone : the barrier of this warpgroup alone
    """
    if key0 + KEYS <= request.prefix_len:
        return
    if bar_red_or(alone, GROUP, any_not_finite(scores)) != 0:
        make_finite(memory.words, at // 2, thread.number)
        fence_proxy_async()
        bar_sync(alone, GROUP)  # the values are finite for all
    hide(scores, 0, thread.t, seen[0], seen[1])
    hide(scores, 1, thread.t, seen[2], seen[3])


# ------------------------------------------------------------------------------ softmax


@device
def lane_max(scores, r):
    """The largest of this thread's scores of row g + 8r."""
    fmax = cuda.libdevice.fmaxf
    x = fmax(scores[2 * r], scores[2 * r + 1])
    y = fmax(scores[4 + 2 * r], scores[5 + 2 * r])
    for j in range(2, 8, 2):
        x = fmax(x, fmax(scores[4 * j + 2 * r], scores[4 * j + 2 * r + 1]))
        y = fmax(y, fmax(scores[4 * j + 4 + 2 * r], scores[4 * j + 5 + 2 * r]))
    return fmax(x, y)


@device
def raise_top(top, highest, scale, margin):
    """The reference of a row: raised to its largest score if that passes it by margin.

    Weights are 2^(score - reference). With margin 0 that is the running maximum. With
    more, weights may reach 2^margin, and the reference seldom moves.
    """
    for distance in (1, 2):  # the 4 lanes of a row
        other = cuda.shfl_xor_sync(FULL_WARP, highest, distance)
        highest = cuda.libdevice.fmaxf(highest, other)
    return highest * scale if highest * scale > top + margin else top


@device
def weigh16(scores, k, scale, top0, top1, weights, fresh):
    """Weights of 16 keys, as `wgmma` takes them; adds their sums to fresh [2]."""
    a = ex2_approx(cuda.fma(scores[8 * k], scale, -top0))
    b = ex2_approx(cuda.fma(scores[8 * k + 1], scale, -top0))
    c = ex2_approx(cuda.fma(scores[8 * k + 2], scale, -top1))
    d = ex2_approx(cuda.fma(scores[8 * k + 3], scale, -top1))
    e = ex2_approx(cuda.fma(scores[8 * k + 4], scale, -top0))
    f = ex2_approx(cuda.fma(scores[8 * k + 5], scale, -top0))
    g = ex2_approx(cuda.fma(scores[8 * k + 6], scale, -top1))
    h = ex2_approx(cuda.fma(scores[8 * k + 7], scale, -top1))
    weights[4 * k] = cvt_rn_bf16x2(a, b)
    weights[4 * k + 1] = cvt_rn_bf16x2(c, d)
    weights[4 * k + 2] = cvt_rn_bf16x2(e, f)
    weights[4 * k + 3] = cvt_rn_bf16x2(g, h)
    fresh[0] += (a + b) + (e + f)
    fresh[1] += (c + d) + (g + h)


@device
def weigh64(scores, scale, top0, top1, weights, fresh):
    """Weights of a tile's 64 keys, and their sums in fresh [2]."""
    fresh[0], fresh[1] = ZERO, ZERO
    weigh16(scores, 0, scale, top0, top1, weights, fresh)
    weigh16(scores, 1, scale, top0, top1, weights, fresh)
    weigh16(scores, 2, scale, top0, top1, weights, fresh)
    weigh16(scores, 3, scale, top0, top1, weights, fresh)


@device
def share(memory, thread, weights, at, top0, top1, tops_at):
    """Write this warp's 16 rows of weights, as a swizzled piece, and references."""
    for k in range(4):
        stmatrix_x4(
            memory.shared,
            at
            + thread.matrix_row * 64
            + ((2 * k + (thread.lane >> 4)) ^ (thread.matrix_row & 7)) * 8,
            weights[4 * k],
            weights[4 * k + 1],
            weights[4 * k + 2],
            weights[4 * k + 3],
        )
    if thread.t == 0:
        memory.floats[tops_at + thread.row] = top0
        memory.floats[tops_at + thread.row + 8] = top1
    fence_proxy_async()


@device
def scale_quarter(sums, first, factor0, factor1):
    """Scale the sums of 64 columns, by a factor for each of the thread's two rows."""
    for n in range(first, first + 32, 4):
        sums[n] *= factor0
        sums[n + 1] *= factor0
        sums[n + 2] *= factor1
        sums[n + 3] *= factor1


@device
def move_top(top, total, sums, adds, new0, new1):
    """Move the references of rows g and g + 8, and scale what was summed up to them.

    adds : 0 if nothing was
    """
    if adds != 0:
        factor0, factor1 = ex2_approx(top[0] - new0), ex2_approx(top[1] - new1)
        scale_quarter(sums, 0, factor0, factor1)
        scale_quarter(sums, 32, factor0, factor1)
        scale_quarter(sums, 64, factor0, factor1)
        scale_quarter(sums, 96, factor0, factor1)
        total[0] *= factor0
        total[1] *= factor1
    top[0], top[1] = new0, new1


@device
def note_move(memory, thread, first, moves):
    """Write down for all whether this warp raises a reference.

    first : number of the group's first warp
    """
    if thread.lane == 0:
        at = 2 * MOVED + first + (thread.number >> 5)
        memory.shared[at] = np.uint16(1) if moves else np.uint16(0)


@device
def differ(x0, y0, x1, y1):
    """Whether, for any thread of the warp, x0 is not y0 or x1 is not y1."""
    return cuda.any_sync(FULL_WARP, (x0 != y0) | (x1 != y1))


@device
def passed(x0, y0, x1, y1):
    """Whether, for any thread of the warp, x0 is above y0 or x1 above y1."""
    return cuda.any_sync(FULL_WARP, (x0 > y0) | (x1 > y1))


# ----------------------------------------------------------------------- weight · value


@device
def add_own(sums, weights, values):
    """Add weights · values for the 64 keys whose weights this warpgroup has."""
    wgmma_4_m64n256k16_bf16_from_registers(sums, weights, values)
    wgmma_commit_group()


@device
def add_other(sums, weights, values, adds):
    """Add weights · values for 64 keys whose weights are in shared memory.

    adds : 0 if these are the first, whatever the sums were
    """
    wgmma_fence(sums, 128)
    wgmma_m64n256k16_bf16(sums, weights, 0, values, 0, adds)
    wgmma_m64n256k16_bf16(sums, weights, 2, values, 128, 1)
    wgmma_m64n256k16_bf16(sums, weights, 4, values, 256, 1)
    wgmma_m64n256k16_bf16(sums, weights, 6, values, 384, 1)
    wgmma_commit_group()


# --------------------------------------------------------- warpgroup 0: the even tiles
# Its sums are output columns 0 … 255.


@device
def weigh_even(
    memory, thread, request, seen, scores, weights, sums, top, total, fresh, key0,
    adds, scale, margin,
):  # fmt: skip
    """Weights of an even tile, and the left half of its values, at the same time."""
    mask(memory, thread, request, seen, scores, EVEN, key0, EVEN_ALONE)
    x0, x1 = lane_max(scores, 0), lane_max(scores, 1)
    moves = passed(x0 * scale, top[0] + margin, x1 * scale, top[1] + margin)
    note_move(memory, thread, 0, moves)
    if moves:
        new0 = raise_top(top[0], x0, scale, margin)
        new1 = raise_top(top[1], x1, scale, margin)
        move_top(top, total, sums, adds, new0, new1)
    values = wgmma_descriptor(memory.shared, EVEN)
    fresh[0], fresh[1] = ZERO, ZERO
    weigh16(scores, 0, scale, top[0], top[1], weights, fresh)
    wgmma_fence(sums, 128)
    wgmma_m64n256k16_bf16_from_registers(sums, weights, 0, values, 0, adds)
    weigh16(scores, 1, scale, top[0], top[1], weights, fresh)
    wgmma_fence(sums, 128)
    wgmma_m64n256k16_bf16_from_registers(sums, weights, 4, values, 128, 1)
    weigh16(scores, 2, scale, top[0], top[1], weights, fresh)
    wgmma_fence(sums, 128)
    wgmma_m64n256k16_bf16_from_registers(sums, weights, 8, values, 256, 1)
    weigh16(scores, 3, scale, top[0], top[1], weights, fresh)
    wgmma_fence(sums, 128)
    wgmma_m64n256k16_bf16_from_registers(sums, weights, 12, values, 384, 1)
    wgmma_commit_group()
    share(memory, thread, weights, EVEN_WEIGHTS, top[0], top[1], EVEN_TOPS)
    bar_arrive(EVEN_READY, CONSUMERS)  # what was shared comes before group 1 reads it
    wgmma_wait_group(0, sums, 128)
    total[0] += fresh[0]
    total[1] += fresh[1]
    if thread.number == 0:
        mbarrier_arrive(memory.barriers, EVEN_LEFT_FREE)


@device
def take_odd(memory, thread, sums, top, total):
    """Begin to add the left half of an odd tile's values, once it is weighed."""
    bar_sync(ODD_READY, CONSUMERS)  # weights and references of the odd tile are there
    new0 = memory.floats[ODD_TOPS + thread.row]
    new1 = memory.floats[ODD_TOPS + thread.row + 8]
    if differ(top[0], new0, top[1], new1):
        move_top(top, total, sums, 1, new0, new1)
    weights = wgmma_descriptor(memory.shared, ODD_WEIGHTS)
    add_other(sums, weights, wgmma_descriptor(memory.shared, ODD), 1)


@device
def note_padding(memory, thread, request, visibility):
    """Write down for both warpgroups which rows are padding."""
    if thread.t == 0:
        b, at = request.b, SEEING + thread.row
        see0 = not is_padding(visibility, b, request.node0)
        see1 = not is_padding(visibility, b, request.node1)
        memory.floats[at] = ONE if see0 else ZERO
        memory.floats[at + 8] = ONE if see1 else ZERO


@device
def compute_even(
    memory, thread, request, visibility, scores, weights, sums, top, total, fresh,
    key0, count, parity, queries_parity, scale, margin,
):  # fmt: skip
    """Warpgroup 0's share of `count` tiles of keys; returns the next tile's parity."""
    note_padding(memory, thread, request, visibility)
    left, adds = np.int32(count), np.int32(0)
    score_even_left(memory, scores, parity, True, queries_parity)
    if count > 1:
        bar_arrive(TURN, CONSUMERS)  # group 1 may begin with the odd tile
    while True:
        score_even_rest(memory, scores, parity, left == count, queries_parity)
        seen = look(visibility, request, key0)
        wgmma_wait_group(0, scores, 32)
        parity = np.int32(parity ^ 1)
        if left == count:
            # Group 1 has written what was before, by way of the weights' place.
            bar_sync(WRITTEN, CONSUMERS)
        if thread.number == 0 and left <= 2:
            mbarrier_arrive(memory.barriers, QUERIES_FREE)
        weigh_even(
            memory, thread, request, seen, scores, weights, sums, top, total, fresh,
            key0, adds, scale, margin,
        )  # fmt: skip
        adds = np.int32(1)
        if left == 1:  # the last even tile, with no odd one beside it
            break
        take_odd(memory, thread, sums, top, total)
        if left == 2:
            wgmma_wait_group(0, sums, 128)
            if thread.number == 0:
                mbarrier_arrive(memory.barriers, ODD_LEFT_FREE)
            break
        key0 = np.int32(key0 + 2 * KEYS)
        left = np.int32(left - 2)
        score_even_left(memory, scores, parity, False, queries_parity)
        if left > 1:  # the last even tile may have no odd one beside it
            bar_arrive(TURN, CONSUMERS)  # group 1 may begin with that
        wgmma_wait_group(1, sums, 128)
        if thread.number == 0:
            mbarrier_arrive(memory.barriers, ODD_LEFT_FREE)
    return parity


# ---------------------------------------------------------- warpgroup 1: the odd tiles
# Its sums are output columns 256 … 511.


@device
def add_even(memory, sums, adds):
    """Begin to add the right half of an even tile's values."""
    weights = wgmma_descriptor(memory.shared, EVEN_WEIGHTS)
    add_other(sums, weights, wgmma_descriptor(memory.shared, EVEN + 4 * PIECE), adds)


@device
def take_even(memory, thread, sums, top, total, adds):
    """Begin to add the right half of an even tile's values, whose weights are there."""
    new0 = memory.floats[EVEN_TOPS + thread.row]
    new1 = memory.floats[EVEN_TOPS + thread.row + 8]
    if differ(top[0], new0, top[1], new1):
        move_top(top, total, sums, adds, new0, new1)
    add_even(memory, sums, adds)


@device
def weigh_odd(
    memory, thread, request, seen, scores, weights, sums, top, total, fresh, key0,
    adds, scale, margin,
):  # fmt: skip
    """Weights of an odd tile, and the right halves of both tiles' values."""
    mask(memory, thread, request, seen, scores, ODD, key0, ODD_ALONE)
    x0, x1 = lane_max(scores, 0), lane_max(scores, 1)
    new0, new1 = top[0], top[1]
    moves = passed(x0 * scale, new0 + margin, x1 * scale, new1 + margin)
    note_move(memory, thread, 4, moves)
    if moves:
        new0 = raise_top(new0, x0, scale, margin)
        new1 = raise_top(new1, x1, scale, margin)
    weigh64(scores, scale, new0, new1, weights, fresh)
    # Weights and references of the even tile are there, and all of this group are done
    # with the rope columns, where the weights of this tile go.
    bar_sync(EVEN_READY, CONSUMERS)
    even0 = memory.floats[EVEN_TOPS + thread.row]
    even1 = memory.floats[EVEN_TOPS + thread.row + 8]
    a, b, c, d = load4(memory.words, MOVED)
    moved = a | b | c | d
    if differ(top[0], even0, top[1], even1):
        # The even tile moved the references: weigh again from there.
        move_top(top, total, sums, adds, even0, even1)
        new0 = raise_top(even0, x0, scale, margin)
        new1 = raise_top(even1, x1, scale, margin)
        weigh64(scores, scale, new0, new1, weights, fresh)
    add_even(memory, sums, adds)
    share(memory, thread, weights, ODD_WEIGHTS, new0, new1, ODD_TOPS)
    bar_arrive(ODD_READY, CONSUMERS)  # what was shared comes before group 0 reads it
    if moved != 0:  # by any warp of either group: all warps wait, or none
        wgmma_wait_group(0, sums, 128)
        move_top(top, total, sums, 1, new0, new1)
    add_own(sums, weights, wgmma_descriptor(memory.shared, ODD + 4 * PIECE))
    wgmma_wait_group(1, sums, 128)
    if thread.number == 0:
        mbarrier_arrive(memory.barriers, EVEN_RIGHT_FREE)
    wgmma_wait_group(0, sums, 128)
    total[0] += fresh[0]
    total[1] += fresh[1]
    if thread.number == 0:
        mbarrier_arrive(memory.barriers, ODD_RIGHT_FREE)


@device
def compute_odd(
    memory, thread, request, visibility, scores, weights, sums, top, total, fresh,
    key0, count, parity, queries_parity, scale, margin,
):  # fmt: skip
    """Warpgroup 1's share of `count` tiles of keys; returns the next tile's parity."""
    pairs, adds = count >> 1, np.int32(0)
    bar_arrive(WRITTEN, CONSUMERS)  # what was before, so its place is free
    key0 = np.int32(key0 + KEYS)
    for pair in range(pairs):
        bar_sync(TURN, CONSUMERS)  # keeps this group half a softmax behind
        score_odd(memory, scores, parity, pair == 0, queries_parity)
        seen = look(visibility, request, key0)
        wgmma_wait_group(0, scores, 32)
        parity = np.int32(parity ^ 1)
        if thread.number == 0 and pair == pairs - 1:
            mbarrier_arrive(memory.barriers, QUERIES_FREE)
        weigh_odd(
            memory, thread, request, seen, scores, weights, sums, top, total, fresh,
            key0, adds, scale, margin,
        )  # fmt: skip
        adds = np.int32(1)
        key0 = np.int32(key0 + 2 * KEYS)
    if thread.number == 0 and pairs == 0:
        mbarrier_arrive(memory.barriers, QUERIES_FREE)
    if count & 1 != 0:
        bar_sync(EVEN_READY, CONSUMERS)  # weights of the last even tile are there
        take_even(memory, thread, sums, top, total, adds)
        wgmma_wait_group(0, sums, 128)
        if thread.number == 0:
            mbarrier_arrive(memory.barriers, EVEN_RIGHT_FREE)
    return parity


# ------------------------------------------------------------------------------- output


@device
def combine_totals(memory, thread, top, total, group):
    """Sum a row's totals over its four lanes and both warpgroups; 0 for padding."""
    for distance in (1, 2):  # the 4 lanes of a row
        total[0] += cuda.shfl_xor_sync(FULL_WARP, total[0], distance)
        total[1] += cuda.shfl_xor_sync(FULL_WARP, total[1], distance)
    at = TOTALS + thread.row
    for r in range(2):
        if memory.floats[SEEING + thread.row + 8 * r] == ZERO:
            top[r], total[r] = ZERO, ZERO  # its queries may be inf, so its top too
    if thread.t == 0:
        memory.floats[at + group * ROWS] = total[0]
        memory.floats[at + group * ROWS + 8] = total[1]
    bar_sync(BOTH, CONSUMERS)  # the totals of both warpgroups are there
    total[0] = memory.floats[at] + memory.floats[at + ROWS]
    total[1] = memory.floats[at + 8] + memory.floats[at + ROWS + 8]


@device
def write_pair(x, y, out, at, factor):
    """Write two sums times a factor, 0 for a row that saw nothing."""
    x *= factor
    y *= factor
    if factor == ZERO:
        x, y = ZERO, ZERO
    st_global_v2_f32(out, at, x, y)


@device
def write_rows(floats, stage, lane, sums, first, out, at, rows, factor):
    """Write 32 columns of a warp's 8 rows g: sums[first + 4j : + 2] for j in 0 … 3.

    Through shared memory, 8 rows of 32 float32 from `stage` on, so that 8 lanes write
    128 bytes of a row. Chunk c (16 bytes) of row g stands at place ``c ^ g``.
    at : of the first row's first element; rows : how many there are from there on
    """
    g, t = lane >> 2, lane & 3
    for j in range(4):
        here = stage + 32 * g + (((2 * j + (t >> 1)) ^ g) << 2) + 2 * (t & 1)
        x, y = sums[first + 4 * j] * factor, sums[first + 4 * j + 1] * factor
        # 0 means a row that saw nothing, whatever its sums are.
        x, y = (x, y) if factor != ZERO else (ZERO, ZERO)
        st_shared_v2_f32(floats, here, x, y)
    cuda.syncwarp()  # 8 rows are there
    for n in range(2):
        row, c = 4 * n + (lane >> 3), lane & 7
        w, x, y, z = load4(floats, stage + 32 * row + ((c ^ row) << 2))
        if row < rows:
            store4(out, at + row * D_LATENT + 4 * c, w, x, y, z)
    cuda.syncwarp()  # they have been read


@device
def write_half(floats, number, sums, first, out, at, rows, factor0, factor1):
    """Write a warp's 16 rows of 32 columns."""
    lane = np.int32(number & 31)
    stage = np.int32(EVEN_WEIGHTS // 2 + 256 * (number >> 5))
    below, rest = at + 8 * D_LATENT, rows - 8
    write_rows(floats, stage, lane, sums, first, out, at, rows, factor0)
    write_rows(floats, stage, lane, sums, first + 2, out, below, rest, factor1)


@device
def write_quarter(floats, number, sums, first, out, at, rows, factor0, factor1):
    """Write a warp's 16 rows of 64 columns."""
    write_half(floats, number, sums, first, out, at, rows, factor0, factor1)
    write_half(floats, number, sums, first + 16, out, at + 32, rows, factor0, factor1)


@device
def output_at(lse, b, row, column):
    """Where an element of the output is, all of it taken as one row."""
    return (np.int64(b) * lse.shape[1] + row) * D_LATENT + column


@device
def inverse(total):
    """What sums are multiplied by in the end; 0 where nothing was seen."""
    return ZERO if total == ZERO else cuda.libdevice.fast_fdividef(ONE, total)


@device
def log_sum(top, total):
    """The natural logarithm of a row's sum; -inf where nothing was seen."""
    return cuda.fma(top, LN_2, LN_2 * cuda.libdevice.fast_log2f(total))


@device
def write_lse(lse, b, row, top0, top1, total0, total1):
    """Write the lse of a thread's two rows, where there are such."""
    if row < lse.shape[1]:
        lse[b, row] = log_sum(top0, total0)
    if row + 8 < lse.shape[1]:
        lse[b, row + 8] = log_sum(top1, total1)


@device
def write(floats, number, sums, top, total, out, lse, b, row, t):
    """Write a whole row tile's outputs, lse by those who have its first columns."""
    factor0, factor1 = inverse(total[0]), inverse(total[1])
    at, rows = warp_output(lse, b, row, number)
    write_quarter(floats, number, sums, 0, out, at, rows, factor0, factor1)
    write_quarter(floats, number, sums, 32, out, at + 64, rows, factor0, factor1)
    write_quarter(floats, number, sums, 64, out, at + 128, rows, factor0, factor1)
    write_quarter(floats, number, sums, 96, out, at + 192, rows, factor0, factor1)
    if number < GROUP and t == 0:
        write_lse(lse, b, row, top[0], top[1], total[0], total[1])


@device
def warp_output(lse, b, row, number):
    """Where a warp's output begins, and how many rows there are from there on."""
    first = np.int32(row - ((number & 31) >> 2))
    column = 256 * (number >> 7)
    return output_at(lse, b, first, column), np.int32(lse.shape[1] - first)


@device
def highest_quarter(sums, first, highest0, highest1):
    """The largest absolute sums in the thread's two rows, with those of 64 columns."""
    fmax, fabs = cuda.libdevice.fmaxf, cuda.libdevice.fabsf
    for n in range(first, first + 32, 4):
        highest0 = fmax(highest0, fmax(fabs(sums[n]), fabs(sums[n + 1])))
        highest1 = fmax(highest1, fmax(fabs(sums[n + 2]), fabs(sums[n + 3])))
    return highest0, highest1


@device
def scale_exponent(highest):
    """The exponent of the scale that a row's sums are posted in multiples of.

    highest : the largest of the thread's sums of the row, but for NaN
    """
    for distance in (1, 2):  # the 4 lanes of a row
        other = cuda.shfl_xor_sync(FULL_WARP, highest, distance)
        highest = cuda.libdevice.fmaxf(highest, other)
    power = cuda.libdevice.floorf(cuda.libdevice.fast_log2f(highest))
    exponent = cuda.libdevice.fmaxf(power - POSTED_EXPONENT, LOWEST_EXPONENT)
    return cuda.libdevice.fminf(exponent, HIGHEST_EXPONENT)


@device
def post_quarter(sums, first, factor0, factor1, to, at):
    """Write the sums of 64 columns, times their rows' factors: four chunks, 32 apart.

    to : u32, shared or global memory; at : of the first chunk
    """
    for n in range(first, first + 32, 8):
        w = cvt_rn_f16x2(sums[n] * factor0, sums[n + 1] * factor0)
        x = cvt_rn_f16x2(sums[n + 2] * factor1, sums[n + 3] * factor1)
        y = cvt_rn_f16x2(sums[n + 4] * factor0, sums[n + 5] * factor0)
        z = cvt_rn_f16x2(sums[n + 6] * factor1, sums[n + 7] * factor1)
        store4(to, at + WARP // 2 * n, w, x, y, z)


@device
def post(memory, sums, top, total, posted, marks, place, number, rows, keeps):
    """Write a part of a row tile for the others.

    posted, marks : [2·blocks · POSTED] u32, [2·blocks · POSTED_MARKS] f32
    place : which of the 2·blocks; see `place_of`
    rows : how many the row tile has, from its first on
    keeps : whether the block leaves out the sums that it will merge itself: they go to
    where the others' will be, over the queries, which are done with
    """
    # So that nothing of it takes registers all the time.
    number = np.int32(uncounted(number) & (CONSUMERS - 1))
    lane, band = number & 31, number >> 5 & 3
    unit = np.int32(2 * band + (number >> 7))
    high0, high1 = highest_quarter(sums, 0, ZERO, ZERO)
    high0, high1 = highest_quarter(sums, 32, high0, high1)
    high0, high1 = highest_quarter(sums, 64, high0, high1)
    high0, high1 = highest_quarter(sums, 96, high0, high1)
    exponent0, exponent1 = scale_exponent(high0), scale_exponent(high1)
    # Not before the shuffles: the compiler cannot tell that all of a warp go on.
    if 16 * band >= rows:
        return
    factor0, factor1 = ex2_approx(-exponent0), ex2_approx(-exponent1)
    to, at = posted, np.int32(place * POSTED + 4 * (UNIT * unit + lane))
    if keeps:
        share = read_share(memory.ints, MERGES)
        here = np.int32(UNIT * unit - share.begin)
        if 0 <= here and here < share.chunks:
            to = memory.words
            at = np.int32(FETCHED + 4 * (share.kept * share.chunks + here + lane))
    post_quarter(sums, 0, factor0, factor1, to, at)
    post_quarter(sums, 32, factor0, factor1, to, at)
    post_quarter(sums, 64, factor0, factor1, to, at)
    post_quarter(sums, 96, factor0, factor1, to, at)
    if lane & 3 == 0:
        at = np.int32(place * POSTED_MARKS + MARKS * unit + (lane >> 1))
        st_global_v2_f32(marks, at, top[0], top[1])
        st_global_v2_f32(marks, at + TOTAL_MARKS, total[0], total[1])
        scale0, scale1 = ex2_approx(exponent0), ex2_approx(exponent1)
        st_global_v2_f32(marks, at + SCALE_MARKS, scale0, scale1)


# ------------------------------------------------------------------------------- merge
# The blocks that have parts of a row tile bring them together: each posts its part and
# counts that, fetches its share of every part as soon as that is counted, and sums it.


@device
def word(ints, at):
    """The int32 at a place that is not negative."""
    return np.int32(ints[np.uint32(at)])


@device
def write_share(ints, at, share):
    """Write a share down, for `read_share`."""
    ints[at], ints[at + 1], ints[at + 2] = share.parts, share.first, share.request
    ints[at + 3], ints[at + 4] = share.row_tile, share.begin
    ints[at + 5], ints[at + 6] = share.chunks, share.kept
    ints[at + 7], ints[at + 8], ints[at + 9] = share.units, share.bits, share.piece


@device
def read_share(ints, at):
    """The share that `write_share` wrote down there."""
    return Share(
        word(ints, at),
        word(ints, at + 1),
        word(ints, at + 2),
        word(ints, at + 3),
        word(ints, at + 4),
        word(ints, at + 5),
        word(ints, at + 6),
        word(ints, at + 7),
        word(ints, at + 8),
        word(ints, at + 9),
    )


@device
def place_of(part, first):
    """A part's place: its worker's second one if it begins the row tile, else first."""
    return np.int32(2 * (first + part) + (1 if part == 0 else 0))


@device
def marks_apart(share):
    """From a fetched part's marks to the next part's, in float32."""
    return np.int32(MARKS * share.units + GAP)


@device
def fetch_part(memory, share, part, barrier, posted, marks):
    """Ask for a part's marks, and its chunks of the share."""
    place = place_of(part, share.first)
    fence_proxy_async()  # what was read and written where they go …
    fence_proxy_async_global()  # … and posted
    cp_async_bulk(
        memory.floats, PART_MARKS + marks_apart(share) * part, marks,
        place * POSTED_MARKS + MARKS * (share.begin >> UNIT_BITS),
        4 * MARKS * share.units, memory.barriers, barrier,
    )  # fmt: skip
    source = np.int32(place * POSTED + 4 * share.begin)
    to = np.int32(part * share.chunks)
    end = np.int32(to if part == share.kept else to + share.chunks)
    while to < end:
        barrier = np.int32(barrier + 1)
        count = np.int32(min(share.piece, np.int32(end - to)))
        cp_async_bulk(
            memory.words, FETCHED + 4 * to, posted, source, 16 * count,
            memory.barriers, barrier,
        )  # fmt: skip
        source = np.int32(source + 4 * share.piece)
        to = uncounted(to + share.piece)


# A *pair* is two float32, of a chunk's two rows. Places of pairs are in 64 bits.


@device
def load_pair(memory, at):
    """A pair by one load."""
    both = memory.barriers[np.uint32(at)]
    first = cuda.libdevice.int_as_float(np.int32(both))
    return first, cuda.libdevice.int_as_float(np.int32(both >> np.uint64(32)))


@device
def add_pairs(x, y):
    """The sum of two pairs."""
    return x[0] + y[0], x[1] + y[1]


@device
def max_pairs(x, y):
    """The larger one of two pairs, row by row."""
    fmax = cuda.libdevice.fmaxf
    return fmax(x[0], y[0]), fmax(x[1], y[1])


@device
def pair_across(pair, distance):
    """The pair of the lane so far away."""
    first = cuda.shfl_xor_sync(FULL_WARP, pair[0], distance)
    return first, cuda.shfl_xor_sync(FULL_WARP, pair[1], distance)


@device
def pair_of(pair, lane):
    """The pair of a lane."""
    first = cuda.shfl_sync(FULL_WARP, pair[0], lane)
    return first, cuda.shfl_sync(FULL_WARP, pair[1], lane)


@device
def weigh_part(memory, mark, tops, totals):
    """What a part's posted sums are multiplied by, and the totals with the part's.

    mark : of the part's references in the two rows
    """
    own0, own1 = load_pair(memory, mark)
    total0, total1 = load_pair(memory, mark + TOTAL_MARKS // 2)
    scale0, scale1 = load_pair(memory, mark + SCALE_MARKS // 2)
    factor0, factor1 = ex2_approx(own0 - tops[0]), ex2_approx(own1 - tops[1])
    totals = totals[0] + factor0 * total0, totals[1] + factor1 * total1
    return (factor0 * scale0, factor1 * scale1), totals


@device
def add_chunk(words, at, factors, sums):
    """Eight sums, with a part's chunk times its factors in the two rows."""
    w, x, y, z = load4(words, np.uint32(at))
    w, x, y, z = cvt_f32_f16x2(w), cvt_f32_f16x2(x), cvt_f32_f16x2(y), cvt_f32_f16x2(z)
    return (
        sums[0] + factors[0] * w[0],
        sums[1] + factors[0] * w[1],
        sums[2] + factors[1] * x[0],
        sums[3] + factors[1] * x[1],
        sums[4] + factors[0] * y[0],
        sums[5] + factors[0] * y[1],
        sums[6] + factors[1] * z[0],
        sums[7] + factors[1] * z[1],
    )


@device
def write_chunk(out, lse, request, row, column, sums, tops, totals):
    """Write a chunk of the output, and lse beside the first column.

    row : the upper of its two; column : the first of its four, two and two 8 apart
    """
    at = output_at(lse, request, row, column)
    if row < lse.shape[1]:
        factor = inverse(totals[0])
        write_pair(sums[0], sums[1], out, at, factor)
        write_pair(sums[4], sums[5], out, at + 8, factor)
    if row + 8 < lse.shape[1]:
        factor = inverse(totals[1])
        at += 8 * D_LATENT
        write_pair(sums[2], sums[3], out, at, factor)
        write_pair(sums[6], sums[7], out, at + 8, factor)
    if column == 0:
        write_lse(lse, request, row, tops[0], tops[1], totals[0], totals[1])


@device
def merge_units(memory, number, share, barrier, out, lse):
    """Sum a kept share and write it, unit by unit.

    A lane has two chunks of a unit, 128 columns apart in the same two rows, so it
    weighs a part once.
    """
    here = np.int32(FETCHED + 4 * number)
    unit = np.int32(share.begin >> UNIT_BITS)
    end = np.int32((share.begin + share.chunks) >> UNIT_BITS)
    first_mark = np.int32((PART_MARKS >> 1) + (number >> 2 & 7))
    apart = np.int32(marks_apart(share) >> 1)
    while unit < end:
        barrier = np.int32(barrier + 1)
        mbarrier_wait(memory.barriers, barrier, 0)
        tops, totals = (NO_TOP, NO_TOP), (ZERO, ZERO)
        part, mark = np.int32(0), first_mark
        # A loop that nobody can count is written once.
        while cuda.any_sync(FULL_WARP, part < share.parts):
            tops = max_pairs(tops, load_pair(memory, mark))
            part, mark = np.int32(part + 1), np.int32(mark + apart)
        a, b = NOTHING, NOTHING
        part, source, mark = np.int32(0), here, first_mark
        while cuda.any_sync(FULL_WARP, part < share.parts):
            factors, totals = weigh_part(memory, mark, tops, totals)
            a = add_chunk(memory.words, source, factors, a)
            b = add_chunk(memory.words, source + 2 * UNIT, factors, b)
            source = np.int32(source + 4 * share.chunks)
            part, mark = np.int32(part + 1), np.int32(mark + apart)
        row = np.int32(ROWS * share.row_tile + 16 * (unit >> 1) + (number >> 2 & 7))
        column = np.int32(256 * (unit & 1) + 16 * (number >> 5) + 2 * (number & 3))
        request = share.request
        write_chunk(out, lse, request, row, column, a, tops, totals)
        write_chunk(out, lse, request, row, column + 128, b, tops, totals)
        first_mark = np.int32(first_mark + MARKS // 2)
        here = np.int32(here + 4 * UNIT)
        unit = uncounted(unit + 1)


@device
def find_tops(memory, share, mark, apart, lane):
    """The largest references of any part in a chunk's rows.

    Each lane that has these rows looks at other parts: four lanes beside each other, a
    *quad*, have them, and those that share the chunks of these four.

    mark : of part 0 in these rows; apart : from a part's marks to the next one's
    """
    step = np.int32(4 * WARP >> share.bits)
    part = np.int32((lane >> share.bits << 2) + (lane & 3))
    tops = NO_TOP, NO_TOP
    while part < share.parts:
        tops = max_pairs(tops, load_pair(memory, np.int32(mark + apart * part)))
        part = uncounted(part + step)
    for beside in (1, 2):  # lanes of a quad
        tops = max_pairs(tops, pair_across(tops, beside))
    distance = np.int32(1 << share.bits)
    while distance < WARP:
        tops = max_pairs(tops, pair_across(tops, distance))
        distance = uncounted(2 * distance)
    return tops


@device
def add_lanes(totals, sums, distance):
    """Totals and sums, with those of the lane so far away."""
    a, b, c, d, e, f, g, h = sums
    return add_pairs(totals, pair_across(totals, distance)), (
        a + cuda.shfl_xor_sync(FULL_WARP, a, distance),
        b + cuda.shfl_xor_sync(FULL_WARP, b, distance),
        c + cuda.shfl_xor_sync(FULL_WARP, c, distance),
        d + cuda.shfl_xor_sync(FULL_WARP, d, distance),
        e + cuda.shfl_xor_sync(FULL_WARP, e, distance),
        f + cuda.shfl_xor_sync(FULL_WARP, f, distance),
        g + cuda.shfl_xor_sync(FULL_WARP, g, distance),
        h + cuda.shfl_xor_sync(FULL_WARP, h, distance),
    )


@device
def sum_parts(memory, share, at, mark, apart, lane, tops):
    """Totals and sums of all parts of a chunk, in its rows.

    A lane has every 32 / 2^bits-th part, and takes four of them in a step. The lanes of
    a quad have the same rows and so need the same factors: each weighs one of the four
    parts, for all.

    at : of the chunk in part 0; mark, apart : as for `find_tops`
    """
    parts, sharing = share.parts, np.int32(WARP >> share.bits)
    part, quad = np.int32(lane >> share.bits), lane & 28
    at = np.int32(at + 4 * share.chunks * part)
    # From a part of the lane to its next one: chunks, and marks.
    far, ahead = np.int32(4 * share.chunks * sharing), np.int32(apart * sharing)
    own = np.int32(mark + apart * part + ahead * (lane & 3))
    # Totals: the lane's quarter of its quad's, and those of parts after the loop.
    quarters, totals, sums = (ZERO, ZERO), (ZERO, ZERO), NOTHING
    end = np.int32(4 * sharing)
    while cuda.any_sync(FULL_WARP, end <= parts):
        factors, quarters = weigh_part(memory, own, tops, quarters)
        sums = add_chunk(memory.words, at, pair_of(factors, quad), sums)
        sums = add_chunk(memory.words, at + far, pair_of(factors, quad + 1), sums)
        sums = add_chunk(memory.words, at + 2 * far, pair_of(factors, quad + 2), sums)
        sums = add_chunk(memory.words, at + 3 * far, pair_of(factors, quad + 3), sums)
        at, own = np.int32(at + 4 * far), np.int32(own + 4 * ahead)
        part, end = np.int32(part + 4 * sharing), uncounted(end + 4 * sharing)
    mark = np.int32(mark + apart * part)
    while part < parts:  # up to four more, but not four for every lane
        factors, totals = weigh_part(memory, mark, tops, totals)
        sums = add_chunk(memory.words, at, factors, sums)
        at, mark = np.int32(at + far), np.int32(mark + ahead)
        part = uncounted(part + sharing)
    for beside in (1, 2):  # lanes of the quad
        quarters = add_pairs(quarters, pair_across(quarters, beside))
    totals = add_pairs(totals, quarters)
    distance = np.int32(1 << share.bits)
    while distance < WARP:
        totals, sums = add_lanes(totals, sums, distance)
        distance = uncounted(2 * distance)
    return totals, sums


@device
def merge_chunks(memory, number, share, barrier, out, lse):
    """Sum any share and write it, piece by piece.

    A lane has a chunk; where there are few, as of many parts, two to eight lanes share
    it, each with every second to eighth part.
    """
    lane = np.int32(number & 31)
    apart = np.int32(marks_apart(share) >> 1)
    # The warp's first chunk, and how many chunks of the share have come.
    warp_n, arrived = np.int32(number >> 5 << share.bits), np.int32(0)
    while warp_n < share.chunks:
        if warp_n >= arrived:
            arrived, barrier = np.int32(arrived + share.piece), np.int32(barrier + 1)
            mbarrier_wait(memory.barriers, barrier, 0)
        # The lane's chunk of the share, which others may have too. Lanes beyond the end
        # do what the last quad does, so that all can shuffle.
        n = np.int32(warp_n + (lane & ((1 << share.bits) - 1)))
        inside = np.int32(min(n, np.int32(share.chunks - 4 + (lane & 3))))
        chunk = np.int32(share.begin + inside)
        unit, g = np.int32(chunk >> UNIT_BITS), np.int32(chunk >> 2 & 7)
        before = np.int32(unit - (share.begin >> UNIT_BITS))  # units of the share
        mark = np.int32(((PART_MARKS + MARKS * before) >> 1) + g)
        tops = find_tops(memory, share, mark, apart, lane)
        at = np.int32(FETCHED + 4 * inside)
        totals, sums = sum_parts(memory, share, at, mark, apart, lane, tops)
        if n < share.chunks and lane >> share.bits == 0:
            row = np.int32(ROWS * share.row_tile + 16 * (unit >> 1) + g)
            t = lane & 3
            column = np.int32(256 * (unit & 1) + 16 * (chunk >> 5 & 15) + 2 * t)
            write_chunk(out, lse, share.request, row, column, sums, tops, totals)
        warp_n = uncounted(warp_n + (CONSUMERS // WARP << share.bits))


@device
def merge(memory, number, share, barrier, posted, marks, counters, out, lse):
    """Merge a share of a row tile; barrier : the first of the mbarriers for it."""
    # A lane a part, evenly over all warps, which are enough for 256; each part is
    # fetched as soon as it is posted.
    lane, lanes = number & 31, np.int32(share.parts + 7) >> 3
    part = np.int32((number >> 5) * lanes + lane)
    worker = np.int32(share.first + part)
    count = np.int32(memory.ints[LAUNCHES] + 1)
    waits = lane < lanes and part < share.parts
    while cuda.any_sync(FULL_WARP, waits):
        if waits and has_reached(counters, worker, count) != 0:
            fetch_part(memory, share, part, barrier, posted, marks)
            waits = False
    mbarrier_wait(memory.barriers, barrier, 0)
    if share.kept >= 0:
        merge_units(memory, number, share, barrier, out, lse)
    else:
        merge_chunks(memory, number, share, barrier, out, lse)
    bar_sync(BOTH, CONSUMERS)  # what was fetched has been read


@device
def chunks_at_a_time(chunks, parts):
    """The `Share.bits` that take the fewest steps.

    A lane's steps are each of four parts, or of adding another lane's sums.
    """
    best, fewest, bits = np.int32(5), np.int32(1 << 30), np.int32(5)
    while bits >= 2:
        rounds = np.int32(chunks + (8 << bits) - 1) >> (bits + 3)
        fours = np.int32(parts + (128 >> bits) - 1) >> (7 - bits)
        steps = np.int32(rounds * (fours + 5 - bits))
        if steps < fewest:
            best, fewest = bits, steps
        bits = uncounted(bits - 1)
    return best


@device
def expect(memory, n, lane, parts, chunks, kept, units, piece):
    """Tell the mbarriers of share n how much they have to wait for; by a lane each.

    parts, chunks, kept, units, piece : as in `Share`; parts above 0
    """
    count = np.int32(min(piece, np.int32(chunks - piece * (lane - 1))))
    n_bytes = np.int32(16 * count * (parts - 1 if kept >= 0 else parts))
    if lane == 0:
        n_bytes = np.int32(4 * MARKS * units * parts)
    if n_bytes > 0:
        barrier = MERGING + ARRIVALS * n + lane
        mbarrier_arrive_expect_tx(memory.barriers, barrier, n_bytes)


@device
def write_merges(memory, counters, prefix_lens, room, lse, n_rows, row_tiles, lane):
    """Write down which row tiles the block has a part of, but not all; by a warp.

    At most two: first the one where its part of the rest ends, then where it begins.

    A block keeps what it will merge of its own last part if few blocks share the row
    tile, and all of them end in it; its share is whole units then.
    """
    ints = memory.ints
    workers, rest, length = ints[WORKERS], ints[REST], ints[PART_LENGTH]
    worker = word(ints, WORKER)
    begin = ints[REST_AT] + cut(rest, workers, worker)
    tile_begin = np.int32(begin + length)
    n = np.int32(0)
    while n < 2:
        parts, first, b, row_tile = np.int32(0), np.int32(0), np.int32(0), np.int32(0)
        at, chunks, kept = np.int32(0), np.int32(0), np.int32(-1)
        place = np.int32(begin + length - 1 if n == 0 else begin)
        if place < tile_begin:
            b, row_tile, tile = locate(
                place, prefix_lens, room, n_rows, row_tiles, lane
            )
            tiles = key_tiles(prefix_lens, b, room, n_rows)
            tile_begin = np.int32(place - tile)
            if begin > tile_begin or tile_begin + tiles > begin + length:
                tile_at = tile_begin - ints[REST_AT]
                first = owner(rest, workers, tile_at)
                parts = np.int32(owner(rest, workers, tile_at + tiles - 1) - first + 1)
                mine = np.int32(worker - first)
                end = cut(rest, workers, np.int32(first + parts))
                # Shares are whole multiples of so many chunks; four are a quad's.
                grain = np.int32(4)
                if n == 0 and parts <= KEEPERS and end == tile_at + tiles:
                    kept, grain = mine, np.int32(UNIT)
                # Bands without rows are nobody's.
                rows = np.int32(lse.shape[1] - ROWS * row_tile)
                all_bands = min(np.int32(np.int32(rows + 15) >> 4), np.int32(4))
                grains = div_u32(2 * UNIT * all_bands, grain)
                at = np.int32(grain * div_u32(grains * mine, parts))
                chunks = np.int32(grain * div_u32(grains * (mine + 1), parts) - at)
        if chunks == 0:
            parts, kept = np.int32(0), np.int32(-1)
        units = np.int32(((at + chunks - 1) >> UNIT_BITS) - (at >> UNIT_BITS) + 1)
        bits = chunks_at_a_time(chunks, parts)
        # What all warps sum at a time, so often that there are four pieces or fewer.
        four = np.int32(4 * (CONSUMERS // WARP) << bits)
        piece = np.int32(np.int32(chunks + four - 1) >> (bits + 5) << (bits + 3))
        if kept >= 0:
            piece = np.int32(UNIT)
        if lane == 0:
            share = Share(
                parts, first, b, row_tile, at, chunks, kept, units, bits, piece
            )
            write_share(ints, np.int32(MERGES + MERGE * n), share)
        if lane < ARRIVALS and parts > 0:
            expect(memory, n, lane, parts, chunks, kept, units, piece)
        n = uncounted(n + 1)
    if lane == 0:
        # Atomic, because others look at it at the same time.
        ints[LAUNCHES] = cuda.atomic.add(counters, worker, 0)
    cuda.syncwarp()  # all of it is written down


@device
def merge_parts(memory, number, posted, marks, counters, out, lse):
    """Count that the block has posted; merge the shares that `write_merges` found."""
    number = np.int32(uncounted(number) & (CONSUMERS - 1))  # as in `post`
    shares = memory.ints[PART_LENGTH] > 0
    if shares:
        mbarrier_wait(memory.barriers, MERGES_KNOWN, 0)
    bar_sync(BOTH, CONSUMERS)  # all threads have posted
    if number == 0:
        fence_acq_rel_gpu()  # what the block posted comes before its count
        cuda.atomic.add(counters, word(memory.ints, WORKER), 1)
    at, barrier = np.int32(MERGES), np.int32(MERGING)
    while shares and at < MERGES + 2 * MERGE:
        share = read_share(memory.ints, at)
        if share.parts > 0:
            merge(memory, number, share, barrier, posted, marks, counters, out, lse)
        at, barrier = uncounted(at + MERGE), np.int32(barrier + ARRIVALS)


# ------------------------------------------------------------------------------- kernel


@device
def thread_of(number):
    """What a thread has of the sums, as `wgmma` shares them out."""
    lane = number & 31
    row = (number >> 5) * 16
    return Thread(
        np.int32(number),
        np.int32(lane),
        np.int32(row + (lane >> 2)),
        np.int32(lane & 3),
        np.int32(row + (lane & 15)),
    )


@cuda.jit(launch_bounds=(THREADS, 1))
def wgmma_kernel(
    query_map,  # [16] u64: tensor map of q as [B, R, 576], packed rows R = N·H
    cache_map,  # [16] u64: tensor map of kv_cache
    room,  # i32: S_max
    heads,  # i32: H
    prefix_lens,  # [B] i32
    visibility,  # [B, N, ceil(N/32)] u32
    scale,  # f32: sm_scale · log2(e), above 0
    n_splits,  # i32: into how many parts a row tile is cut; 0 to choose
    margin,  # f32: by how much a score may pass a row's reference
    out,  # out [B · R · 512] f32
    lse,  # out [B, R] f32
    posted,  # out [2·blocks · POSTED] u32: parts of row tiles that were cut …
    marks,  # out [2·blocks · POSTED_MARKS] f32: … their references, totals, scales
    counters,  # [blocks] i32: a worker each, all equal; one more each afterwards
):
    memory = Memory(
        cuda.shared.array(0, np.uint16, alignment=1024),
        cuda.shared.array(0, np.uint32, alignment=1024),
        cuda.shared.array(0, np.int32, alignment=1024),
        cuda.shared.array(0, np.float32, alignment=1024),
        cuda.shared.array(0, np.uint64, alignment=1024),
    )
    number = np.int32(cuda.threadIdx.x)
    group = np.int32(number >> 7)
    n_rows = np.int32(visibility.shape[1])
    row_tiles = np.int32((lse.shape[1] + ROWS - 1) // ROWS)
    block, blocks = np.int32(cuda.blockIdx.x), np.int32(cuda.gridDim.x)
    lane = np.int32(number & 31)
    if group == 2:
        setmaxnreg_dec(LOADER_REGISTERS)
        warp = np.int32((number - CONSUMERS) >> 5)
        if warp == 0:
            fence_proxy_tensormap(query_map, 0)
            fence_proxy_tensormap(cache_map, 0)
        if warp == 1:
            write_plan(
                memory.ints, prefix_lens, room, n_rows, row_tiles, n_splits, block,
                blocks, lane,
            )  # fmt: skip
        bar_sync(PLANNED, THREADS)  # the mbarriers are ready, and the plan
        if warp == 1 and memory.ints[PART_LENGTH] > 0:
            write_merges(
                memory, counters, prefix_lens, room, lse, n_rows, row_tiles, lane
            )
            if lane == 0:
                mbarrier_arrive(memory.barriers, MERGES_KNOWN)
        if number == CONSUMERS:
            load(
                memory, query_map, cache_map, prefix_lens, room, heads, n_rows,
                row_tiles,
            )  # fmt: skip
        return

    setmaxnreg_inc(CONSUMER_REGISTERS)
    # A warp makes its mbarriers one by one, so each of the eight makes some.
    barrier = EVEN_ARRIVED + CONSUMERS // WARP * lane + (number >> 5)
    if barrier < BARRIERS_END:
        mbarrier_init(memory.barriers, barrier, 2 if barrier == QUERIES_FREE else 1)
        fence_mbarrier_init()
    scores = cuda.local.array(32, np.float32)
    weights = cuda.local.array(16, np.uint32)
    sums = cuda.local.array(128, np.float32)
    top = cuda.local.array(2, np.float32)  # of rows g and g + 8 …
    total = cuda.local.array(2, np.float32)  # … and of the thread's own keys
    fresh = cuda.local.array(2, np.float32)
    thread = thread_of(number & GROUP - 1)
    bar_sync(PLANNED, THREADS)  # the mbarriers are ready, and the plan
    step = queries_parity = np.int32(0)
    parity = np.int32(0)  # of the group's next tile
    b, row_tile, tile, left = begin_step(
        memory.ints, prefix_lens, room, n_rows, row_tiles, step
    )
    prefix_len, n_keys = extent(prefix_lens, b, room, n_rows)
    while left > 0:
        tiles = np.int32((n_keys + (KEYS - 1)) >> 6)
        count = np.int32(min(np.int32(tiles - tile), left))
        ahead = seen_from(tile, count, prefix_len, room, n_rows, row_tile, heads)
        row = np.int32(row_tile * ROWS + thread.row)
        node0 = np.int32(min(div_u32(row, heads), n_rows - 1))
        node1 = np.int32(min(div_u32(row + 8, heads), n_rows - 1))
        request = Request(b, node0, node1, prefix_len, n_keys)
        top[0], top[1], total[0], total[1] = NO_TOP, NO_TOP, ZERO, ZERO
        if group == 0:
            parity = compute_even(
                memory, thread, request, visibility, scores, weights, sums, top, total,
                fresh, np.int32(tile * KEYS), ahead, parity, queries_parity, scale,
                margin,
            )  # fmt: skip
        else:
            parity = compute_odd(
                memory, thread, request, visibility, scores, weights, sums, top, total,
                fresh, np.int32(tile * KEYS), ahead, parity, queries_parity, scale,
                margin,
            )  # fmt: skip
        queries_parity = np.int32(queries_parity ^ 1)
        combine_totals(memory, thread, top, total, group)
        this_b, whole, begins = b, count == tiles, tile == 0
        # Before stores are under way, which loads would wait behind.
        b, row_tile, tile, left, step = advance(
            memory.ints, prefix_lens, room, n_rows, row_tiles, b, row_tile, tile, left,
            count, step,
        )  # fmt: skip
        prefix_len, n_keys = extent(prefix_lens, b, room, n_rows)
        if whole:
            write(
                memory.floats, number, sums, top, total, out, lse, this_b, row, thread.t
            )
        else:
            # What continues a row tile goes into the first of a worker's two places.
            keeps = False
            if left == 0:  # its last part
                mbarrier_wait(memory.barriers, MERGES_KNOWN, 0)
                keeps = memory.ints[KEPT] >= 0
            place = np.int32(2 * word(memory.ints, WORKER) + (1 if begins else 0))
            rows = np.int32(lse.shape[1] - row + thread.row)
            post(memory, sums, top, total, posted, marks, place, number, rows, keeps)
    merge_parts(memory, number, posted, marks, counters, out, lse)


# --------------------------------------------------------------------------------- host

_COMPILING = threading.Lock()
_MAPS: dict[tuple, Any] = {}
_COUNTERS: dict[tuple, Any] = {}


@contextlib.contextmanager
def hopper_target() -> Iterator[None]:
    """Compile for sm_90a, which alone has `wgmma`, whatever is compiled meanwhile."""
    with _COMPILING:
        before = config.FORCE_CUDA_CC
        config.FORCE_CUDA_CC = (9, 0, "a")
        try:
            yield
        finally:
            config.FORCE_CUDA_CC = before


def problem(
    at: Place, q: Any, kv_cache: Any, sm_scale: float, d_latent: int
) -> Exception | None:
    """What keeps this version from a call, as the error to raise; None if nothing."""
    if found := bf16_problem("wgmma", q, d_latent, (D, D_LATENT)):
        return found
    if not sm_scale > 0:
        return ValueError(
            f"version 'wgmma' and sm_scale is {sm_scale}; expected one above 0"
        )
    for name, x in (("q", q), ("kv_cache", kv_cache)):
        steps = [
            step for step, size in zip(x.strides, x.shape, strict=True) if size > 1
        ]
        if not rows_start_at(8, x) or not all(0 < step < MAX_STEP for step in steps):
            return ValueError(
                f"version 'wgmma' and {name} has strides {x.strides}; expected "
                "contiguous rows that start at multiples of 16 bytes"
            )
    if kv_cache.shape[1] == 0:
        return ValueError("version 'wgmma' and kv_cache has no rows; expected one")
    batch, n, heads, _ = q.shape
    tiles = batch * -(-n * heads // ROWS) * -(-kv_cache.shape[1] // KEYS)
    if tiles > MAX_TILES:
        return ValueError(
            f"version 'wgmma' and q has shape {q.shape}, kv_cache {kv_cache.shape}: "
            f"{tiles} tiles of {ROWS} rows and {KEYS} keys; expected up to {MAX_TILES}"
        )
    if at.executor == "gpu" and (why := card_problem()):
        return ValueError(why)
    return None


def card_problem() -> str | None:
    """What keeps this version from the current GPU, as text; None if nothing."""
    major, minor = cuda.get_current_device().compute_capability
    if (major, minor) == (9, 0):
        return None
    return (
        f"version 'wgmma' and the card has compute capability {major}.{minor}; "
        "expected 9.0"
    )


def pays(q: Any, kv_cache: Any) -> bool:
    """Whether this version is the fastest for queries that it can take.

    Little work is mostly beginning and bringing parts together here: on an H200
    (1,1,64,256) takes 16 µs, and 14 in the `mma` version; (1,1,64,1024) 15 and 17.
    """
    batch, n, heads, _ = q.shape
    return batch * -(-n * heads // ROWS) * -(-kv_cache.shape[1] // KEYS) >= PAYS


def tensor_map(at: Place, x: Any) -> Any:
    """The tensor map of x [B, rows, 576], uint64 [16], for boxes of one piece.

    On a GPU a map is made and uploaded once for a pointer, shape and strides, and kept:
    a captured graph holds its address. So the first call for an array may not be under
    capture.
    """
    if at.executor != "gpu":
        from ddtree_numba.emulator.bulk import tensor_map as emulated

        return emulated(x, (1, 64, 64))
    address = x.__cuda_array_interface__["data"][0]
    key = cuda.get_current_device().id, address, x.shape, x.strides
    if key not in _MAPS:
        _MAPS[key] = cuda.to_device(encode_map(address, x.shape, x.strides))
    return _MAPS[key]


def encode_map(
    address: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> np.ndarray:
    """The 128 bytes by which TMA finds 64 rows of 64 bfloat16, and swizzles them."""
    from cuda.bindings import driver

    batch, rows, columns = shape
    row_step = strides[1] if rows > 1 else 2 * columns
    batch_step = strides[0] if batch > 1 else row_step * rows
    status, encoded = driver.cuTensorMapEncodeTiled(
        driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        3,
        address,
        [driver.cuuint64_t(n) for n in (columns, rows, batch)],
        [driver.cuuint64_t(n) for n in (row_step, batch_step)],
        [driver.cuuint32_t(n) for n in (64, 64, 1)],
        [driver.cuuint32_t(1)] * 3,
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != driver.CUresult.CUDA_SUCCESS:
        raise ValueError(
            f"no tensor map for shape {shape} and strides {strides} ({status.name})"
        )
    return np.array([int(word) for word in encoded.opaque], np.uint64)


def counters_of(at: Place, out: Any, blocks: int) -> Any:
    """Counters by which the blocks that write `out` wait for one another.

    They need not be 0, but all the same: every launch adds 1 to each. So on a GPU they
    are made once for an output: two launches that write the same one cannot run at the
    same time.
    """
    if at.executor != "gpu":
        return np.zeros(blocks, np.int32)
    address = out.__cuda_array_interface__["data"][0]
    key = cuda.get_current_device().id, address, blocks
    if key not in _COUNTERS:
        _COUNTERS[key] = cuda.to_device(np.zeros(blocks, np.int32))
    return _COUNTERS[key]


def grid_size(tiles: int, key_tiles: int, processors: int, n_splits: int | None) -> int:
    """How many blocks: one a multiprocessor, unless there is less work.

    They wait for one another, so there may be no more than run at the same time.
    """
    most = min(processors, MOST_BLOCKS)
    return min(tiles * min(n_splits or key_tiles, key_tiles), most)


def run(
    at: Place,
    inputs: list,
    scale: np.float32,
    n_splits: int | None,
    exact_max: bool,
    processors: int,
    out: Any,
    lse: Any,
) -> None:
    """Launch the kernel on what `problem` has nothing against.

    inputs : q [B, N, H, 576], kv_cache, prefix_lens and visibility, where they run
    scale : sm_scale · log2(e)
    n_splits, exact_max : as for `verify_attn`
    processors : multiprocessors of the card
    out, lse : [B, N, H, 512] and [B, N, H] f32, written
    """
    q, kv_cache, prefix_lens, visibility = inputs
    batch, n, heads, _ = q.shape
    packed = n * heads
    room = kv_cache.shape[1]
    if 0 in (batch, packed):
        return
    q = q.reshape(batch, packed, D)
    out, lse = out.reshape(batch * packed * D_LATENT), lse.reshape(batch, packed)
    tiles = batch * -(-packed // ROWS)
    blocks = grid_size(tiles, -(-room // KEYS), processors, n_splits)
    posted = at.empty((2 * blocks * POSTED,), np.uint32)
    marks = at.empty((2 * blocks * POSTED_MARKS,), np.float32)
    counters = counters_of(at, out, blocks)
    maps = tensor_map(at, q), tensor_map(at, kv_cache)
    with hopper_target():
        at.launch(
            wgmma_kernel,
            blocks,
            THREADS,
            *maps,
            np.int32(room),
            np.int32(heads),
            prefix_lens,
            visibility,
            scale,
            np.int32(n_splits or 0),
            ZERO if exact_max else MARGIN,
            out,
            lse,
            posted,
            marks,
            counters,
            dynamic_shared=DYNAMIC_SHARED,
            cooperative=True,
        )
