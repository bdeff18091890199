"""verify_attn: tree-masked attention of every draft row over a latent (MLA) cache.

Contract
--------
Row i of a request attends to the whole prefix and to the tail rows that its visibility
bits name; tail row j is cache row ``prefix_lens[b] + j``. All heads share one cache
row: its D columns are the key, its first Dc columns the value. A row without a bit is
padding: out 0, lse -inf. What a row does not see cannot reach its output, NaN neither.
`ddtree_numba.reference.verify_attn` is the specification.

Maths
-----
Scores are kept in base 2, ``s = (q · k) · sm_scale · log2(e)``. A set of keys is summed
up by a *partial*::

    top = max s        total = sum 2^(s - top)        acc = sum 2^(s - top) · v

and two partials merge once both are scaled to the larger top: by that the keys may come
in tiles (online softmax) and in splits. In the end out = acc / total, and lse is the
natural logarithm, ``ln 2 · top + ln(total)``.

A float32 chain of 576 products is off by up to 1e-5 in a large score, and large scores
decide the output. So every `RUN` products are summed from zero and then go into a pair
hi + lo that keeps what rounding takes from hi (Knuth's two-sum), and the pair goes into
the exponent. Values are summed in short runs too, and the runs tile by tile. No float64
anywhere. On unit normals (576 columns, 2081 keys) out is then off by 2.6e-8 rms and
7e-7 at most; to round it to float32 alone costs 6e-8 at most, and plain chains would
cost 1.8e-7 rms and 4e-6.

Versions
--------
simple_kernel  one block a request, row and head: a thread a key, then a thread a column
split_kernel   one block a tile of `ROWS` packed rows (row and head) and a split of the
               keys: a tile of keys in shared memory serves all of them; register tiles
merge_kernel   brings the splits together
mma            `ddtree_numba.kernels.verify_attn_mma`: bfloat16 on tensor cores, with
               weights rounded to bfloat16; for 512 + 64 columns, sm_80 or later
wgmma          `ddtree_numba.kernels.verify_attn_wgmma`: the same with what compute
               capability 9.0 has for it; shares out and merges the keys by itself, in
               parts of float16
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import (
    Place,
    overload_for_cuda,
    place,
    to_float32,
    whole_number,
)
from ddtree_numba.kernels.wide import FULL_WARP, WARP, warp_max, warp_sum
from ddtree_numba.tree import n_words

MAX_SCALE = 1e30  # its product with a score must not leave float32's range
VERSIONS = ("auto", "simple", "split", "mma", "wgmma")
LN_2 = np.float32(math.log(2))
MINUS_INF = np.float32(-math.inf)
ZERO = np.float32(0.0)

RUN = 32  # terms that are summed in plain float32 before they go into a longer sum

SIMPLE_THREADS = 128
SIMPLE_KEYS = 1024  # keys whose scores are in shared memory at a time

ROWS = 64  # packed rows of a block
KEYS = 96  # keys of a tile
DEPTH = 64  # columns of q and k that are in shared memory at a time
STEP = 8  # values that are in shared memory at a time, and summed in a run
WIDTH = 512  # columns of the output that a block computes
WARP_ROWS = 8  # packed rows of a warp
WARPS = ROWS // WARP_ROWS
THREADS = WARPS * WARP
LANE_KEYS = KEYS // WARP  # keys that a lane scores: lane, lane + 32, …
GROUP = 4 * WARP  # columns that a warp covers with four to a lane
GROUPS = WIDTH // GROUP
PASS = 2  # groups that are summed together
SUMS = WARP_ROWS * GROUPS * 4  # of a lane
# Shared memory, in float32: columns of q and k; later, in the same place, values, and
# behind them the weights.
PITCH = DEPTH + 4  # of a row of q or k: reads of 16 bytes then meet no bank twice
WEIGHTS = STEP * WIDTH
SHARED = max(WEIGHTS + ROWS * KEYS, (ROWS + KEYS) * PITCH)
MERGE_THREADS = WIDTH // 4  # that a row has, or as many times `MERGE_BATCH` …
MERGE_BATCH = 4  # splits that a thread reads at once
MERGE_GROUPS = 6  # … but not more: 768 threads have 80 registers each


def load4(row: Any, i: Any) -> Any:
    """``row[i : i+4]`` by one load; the address is a multiple of four elements."""
    return row[i], row[i + 1], row[i + 2], row[i + 3]


@overload_for_cuda(load4)
def _load4_overload(row, i):
    from llvmlite import ir  # type: ignore[import-untyped]
    from numba import types
    from numba.cuda.cgutils import pack_array
    from numba.cuda.extending import intrinsic

    @intrinsic
    def load_vector(typingctx, row, i):
        def codegen(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            element = builder.gep(array.data, [args[1]])
            vector = ir.VectorType(element.type.pointee, 4)
            address = builder.bitcast(element, vector.as_pointer())
            loaded = builder.load(address, align=row.dtype.bitwidth // 2)
            lanes = [ir.Constant(ir.IntType(32), lane) for lane in range(4)]
            return pack_array(
                builder, [builder.extract_element(loaded, lane) for lane in lanes]
            )

        return types.UniTuple(row.dtype, 4)(row, types.int64), codegen

    def load(row, i):
        return load_vector(row, np.int64(i))

    return load


def store4(row: Any, i: Any, w: Any, x: Any, y: Any, z: Any) -> None:
    """``row[i : i+4] = w, x, y, z`` by one store, at an address as for `load4`."""
    row[i], row[i + 1], row[i + 2], row[i + 3] = w, x, y, z


@overload_for_cuda(store4)
def _store4_overload(row, i, w, x, y, z):
    from llvmlite import ir
    from numba import types
    from numba.cuda.extending import intrinsic

    @intrinsic
    def store_vector(typingctx, row, i, w, x, y, z):
        def codegen(context, builder, signature, args):
            array = context.make_array(signature.args[0])(context, builder, args[0])
            element = builder.gep(array.data, [args[1]])
            vector = ir.VectorType(element.type.pointee, 4)
            value = ir.Constant(vector, ir.Undefined)
            for lane in range(4):
                at = ir.Constant(ir.IntType(32), lane)
                value = builder.insert_element(value, args[2 + lane], at)
            address = builder.bitcast(element, vector.as_pointer())
            builder.store(value, address, align=row.dtype.bitwidth // 2)
            return context.get_dummy_value()

        given = (row.dtype,) * 4
        return types.void(row, types.int64, *given), codegen

    def store(row, i, w, x, y, z):
        store_vector(row, np.int64(i), w, x, y, z)

    return store


# -------------------------------------------------------------- pieces of all versions


@cuda.jit(device=True)
def two_sum(hi, lo, x):
    """Add x to the pair hi + lo; what rounding takes from hi goes to lo."""
    total = hi + x
    came = total - hi
    return total, lo + ((hi - (total - came)) + (x - came))


@cuda.jit(device=True)
def to_base2(hi, lo, scale_hi, scale_lo):
    """The pair (hi + lo) · (scale_hi + scale_lo)."""
    score = hi * scale_hi
    rest = cuda.fma(hi, scale_hi, -score)
    return score, rest + cuda.fma(hi, scale_lo, lo * scale_hi)


@cuda.jit(device=True)
def weigh(score, rest, top):
    """2^(score + rest - top); 0 for an unseen key, also where none was seen yet."""
    if score == MINUS_INF:
        return ZERO
    return cuda.libdevice.exp2f((score - top) + rest)


@cuda.jit(device=True)
def sees(visibility, b, row, key, prefix_len):
    """Whether a row (that is no padding) attends to a cache row."""
    j = key - prefix_len
    if j < 0:
        return True
    return (visibility[b, row, j >> 5] >> np.uint32(j & 31)) & np.uint32(1) != 0


@cuda.jit(device=True)
def is_padding(visibility, b, row):
    """Whether a row sees nothing at all, not even the prefix."""
    for word in range(visibility.shape[2]):
        if visibility[b, row, word] != 0:
            return False
    return True


@cuda.jit(device=True)
def bounds(prefix_lens, b, kv_cache, n_rows):
    """Prefix length and number of keys, inside the cache whatever was passed."""
    room = kv_cache.shape[1]
    prefix_len = min(max(prefix_lens[b], 0), room)
    return prefix_len, min(prefix_len + n_rows, room)


# ----------------------------------------------------------------------- simple version


@cuda.jit(device=True)
def score_key(q, b, i, h, kv_cache, key):
    """q · k as a pair, a thread alone."""
    hi, lo = ZERO, ZERO
    for start in range(0, q.shape[3], DEPTH):
        run = ZERO
        for d in range(start, min(start + DEPTH, q.shape[3])):
            run += to_float32(q[b, i, h, d]) * to_float32(kv_cache[b, key, d])
        hi, lo = two_sum(hi, lo, run)
    return hi, lo


@cuda.jit(device=True)
def block_max(x):
    """The largest x of the block, for every thread."""
    warps = cuda.shared.array(WARP, np.float32)
    x = warp_max(x)
    cuda.syncthreads()  # the warps' values of the call before have been read
    if cuda.threadIdx.x % WARP == 0:
        warps[cuda.threadIdx.x // WARP] = x
    cuda.syncthreads()  # every warp's value is written
    for warp in range(cuda.blockDim.x // WARP):
        x = cuda.libdevice.fmaxf(x, warps[warp])
    return x


@cuda.jit(device=True)
def block_sum(x):
    """The sum of the block's x, the same for every thread."""
    warps = cuda.shared.array(WARP, np.float32)
    x = warp_sum(x)
    cuda.syncthreads()  # the warps' values of the call before have been read
    if cuda.threadIdx.x % WARP == 0:
        warps[cuda.threadIdx.x // WARP] = x
    cuda.syncthreads()  # every warp's value is written
    x = ZERO
    for warp in range(cuda.blockDim.x // WARP):
        x += warps[warp]
    return x


@cuda.jit(device=True)
def weighted_value(weights, count, kv_cache, b, first_key, c):
    """Column c of the weighted sum of `count` values, a thread alone."""
    hi, lo = ZERO, ZERO
    for start in range(0, count, RUN):
        run = ZERO
        for k in range(start, min(start + RUN, count)):
            # Not 0 · v: v may be a NaN that this row does not see.
            if weights[k] != ZERO:
                run += weights[k] * to_float32(kv_cache[b, first_key + k, c])
        hi, lo = two_sum(hi, lo, run)
    return hi + lo


@cuda.jit
def simple_kernel(
    q,  # [B, N, H, D] f32 or u16 (bf16 bits)
    kv_cache,  # [B, S_max, D] like q
    prefix_lens,  # [B] i32
    visibility,  # [B, N, ceil(N/32)] u32
    scale_hi,  # f32: sm_scale · log2(e) …
    scale_lo,  # f32: … and what float32 rounds away of it
    out,  # out [B, N, H, Dc] f32
    lse,  # out [B, N, H] f32
):
    scores = cuda.shared.array(SIMPLE_KEYS, np.float32)
    rests = cuda.shared.array(SIMPLE_KEYS, np.float32)
    thread, threads = cuda.threadIdx.x, cuda.blockDim.x
    h = cuda.blockIdx.x % q.shape[2]
    i = cuda.blockIdx.x // q.shape[2] % q.shape[1]
    b = cuda.blockIdx.x // (q.shape[1] * q.shape[2])
    prefix_len, n_keys = bounds(prefix_lens, b, kv_cache, q.shape[1])
    if is_padding(visibility, b, i):
        n_keys = 0
    top, total = MINUS_INF, ZERO
    for c in range(thread, out.shape[3], threads):
        out[b, i, h, c] = ZERO

    for first_key in range(0, n_keys, SIMPLE_KEYS):
        count = min(n_keys - first_key, SIMPLE_KEYS)
        highest = top
        for k in range(thread, count, threads):
            scores[k] = MINUS_INF
            if sees(visibility, b, i, first_key + k, prefix_len):
                hi, lo = score_key(q, b, i, h, kv_cache, first_key + k)
                scores[k], rests[k] = to_base2(hi, lo, scale_hi, scale_lo)
            highest = cuda.libdevice.fmaxf(highest, scores[k])
        highest = block_max(highest)
        shrink = weigh(top, ZERO, highest)
        top = highest
        mine = ZERO
        for k in range(thread, count, threads):
            # A thread's own scores still: no barrier is needed before this.
            if scores[k] == MINUS_INF:
                scores[k] = ZERO
            else:
                scores[k] = weigh(scores[k], rests[k], top)
            mine += scores[k]
        # Its barriers also order the weights before they are read.
        total = total * shrink + block_sum(mine)
        for c in range(thread, out.shape[3], threads):
            fresh = weighted_value(scores, count, kv_cache, b, first_key, c)
            out[b, i, h, c] = out[b, i, h, c] * shrink + fresh
        cuda.syncthreads()  # all have read the weights: the next scores may come

    seen = total != ZERO  # NaN counts as seen
    for c in range(thread, out.shape[3], threads):
        out[b, i, h, c] = out[b, i, h, c] / total if seen else ZERO
    if thread == 0:
        lse[b, i, h] = cuda.fma(top, LN_2, math.log(total)) if seen else MINUS_INF


# ------------------------------------------------------------------------ split version
# A warp owns WARP_ROWS packed rows. A lane scores all of them against LANE_KEYS keys of
# its own, and then sums four columns of every group for all of them: 8 × 3 scores and
# 8 × 16 sums in registers, so that what is read from shared memory is used often.
#
# Both together would not leave enough registers to read ahead, so the sums are parked
# in local memory (which the L1 cache holds) while scores are computed. `nothing`, an
# offset that is always 0, keeps the compiler from seeing through that: it would hold
# the sums in registers all the time.


@cuda.jit(device=True)
def stage_rows(
    rows,
    b,
    first,
    last,
    count,
    column,
    needed,
    width,
    pitch,
    aligned,
    thread,
    shared,
    at,
):
    """Put `count` rows × `width` columns into shared memory as float32, from `at` on.

    Rows past the last repeat it, and columns past the row's end are 0 or repeat others:
    nobody uses them. Columns that nobody needs are left out.
    """
    c = thread % (width // 4) * 4
    n = thread // (width // 4)
    together = 4 * THREADS // width  # rows that the block reads at the same time
    if c < needed:
        for i in range(count // together):
            row = rows[b, min(first + n + i * together, last)]
            to = at + (n + i * together) * pitch + c
            if aligned:
                w, x, y, z = load4(row, min(column + c, row.size - 4))
                store4(
                    shared,
                    to,
                    to_float32(w),
                    to_float32(x),
                    to_float32(y),
                    to_float32(z),
                )
            else:
                for e in range(4):
                    d = column + c + e
                    shared[to + e] = to_float32(row[d]) if d < row.size else ZERO


@cuda.jit(device=True)
def stage_columns(q, kv_cache, b, row0, key0, last_key, start, aligned, thread, shared):
    """Stage DEPTH columns of the block's queries and of a tile's keys."""
    needed = q.shape[2] - start
    last_row = q.shape[1] - 1
    keys_at = ROWS * PITCH
    stage_rows(
        q,
        b,
        row0,
        last_row,
        ROWS,
        start,
        needed,
        DEPTH,
        PITCH,
        aligned,
        thread,
        shared,
        0,
    )
    stage_rows(
        kv_cache,
        b,
        key0,
        last_key,
        KEYS,
        start,
        needed,
        DEPTH,
        PITCH,
        aligned,
        thread,
        shared,
        keys_at,
    )


@cuda.jit(device=True)
def score_tile(shared, q, kv_cache, b, row0, key0, last_key, aligned, thread, hi, lo):
    """q · k of ROWS × KEYS as pairs, this lane's share of them in hi and lo."""
    run = cuda.local.array((WARP_ROWS, LANE_KEYS), np.float32)
    x = cuda.local.array((WARP_ROWS, 4), np.float32)
    y = cuda.local.array((LANE_KEYS, 4), np.float32)
    last_row = q.shape[1] - 1
    lane = thread & 31
    row = (thread >> 5) * WARP_ROWS
    for r in range(WARP_ROWS):
        for k in range(LANE_KEYS):
            hi[r, k] = ZERO
            lo[r, k] = ZERO
    args = (q, kv_cache, b, row0, key0, last_key)
    for start in range(0, q.shape[2], DEPTH):
        cuda.syncthreads()  # everyone is done with what the stage held
        if aligned:
            stage_columns(*args, start, True, thread, shared)
        else:
            stage_columns(*args, start, False, thread, shared)
        cuda.syncthreads()  # the columns are in the stage
        if row0 + row > last_row:
            continue  # this warp has no rows, it only helps to load
        end = min(q.shape[2] - start, DEPTH)
        for begin in range(0, end, RUN):
            for r in range(WARP_ROWS):
                for k in range(LANE_KEYS):
                    run[r, k] = ZERO
            for d in range(begin, min(begin + RUN, end), 4):
                for k in range(LANE_KEYS):
                    at = (ROWS + lane + WARP * k) * PITCH + d
                    y[k, 0], y[k, 1], y[k, 2], y[k, 3] = load4(shared, at)
                for r in range(WARP_ROWS):
                    at = (row + r) * PITCH + d
                    x[r, 0], x[r, 1], x[r, 2], x[r, 3] = load4(shared, at)
                for e in range(4):
                    for r in range(WARP_ROWS):
                        for k in range(LANE_KEYS):
                            run[r, k] += x[r, e] * y[k, e]
            for r in range(WARP_ROWS):
                for k in range(LANE_KEYS):
                    hi[r, k], lo[r, k] = two_sum(hi[r, k], lo[r, k], run[r, k])


@cuda.jit(device=True)
def add_values(
    shared,
    kv_cache,
    b,
    key0,
    last_key,
    aligned,
    column,
    columns,
    thread,
    has_rows,
    masked,
    shrink,
    parked,
    nothing,
):
    """Shrink this lane's parked sums and add a tile's weighted values to them."""
    acc = cuda.local.array((WARP_ROWS, GROUPS, 4), np.float32)
    run = cuda.local.array((WARP_ROWS, PASS, 4), np.float32)
    w = cuda.local.array(WARP_ROWS, np.float32)
    v = cuda.local.array((PASS, 4), np.float32)
    warp, lane = thread >> 5, thread & 31
    needed = (columns + PASS * GROUP - 1) // (PASS * GROUP) * (PASS * GROUP)
    for r in range(WARP_ROWS):
        for g in range(GROUPS):
            for c in range(4):
                acc[r, g, c] = ZERO
    for start in range(0, min(last_key + 1 - key0, KEYS), STEP):
        cuda.syncthreads()  # everyone is done with what the stage held
        args = (kv_cache, b, key0 + start, last_key, STEP, column, needed, WIDTH, WIDTH)
        if aligned:
            stage_rows(*args, True, thread, shared, 0)
        else:
            stage_rows(*args, False, thread, shared, 0)
        cuda.syncthreads()  # the values are in the stage, and the warp's weights too
        for g0 in range(0, GROUPS, PASS):
            if has_rows and g0 * GROUP + 4 * lane < columns:
                for r in range(WARP_ROWS):
                    for g in range(PASS):
                        for c in range(4):
                            run[r, g, c] = ZERO
                for k in range(STEP):
                    at = WEIGHTS + (warp * KEYS + start + k) * WARP_ROWS
                    w[0], w[1], w[2], w[3] = load4(shared, at)
                    w[4], w[5], w[6], w[7] = load4(shared, at + 4)
                    for g in range(PASS):
                        at = k * WIDTH + (g0 + g) * GROUP + 4 * lane
                        v[g, 0], v[g, 1], v[g, 2], v[g, 3] = load4(shared, at)
                    for r in range(WARP_ROWS):
                        for g in range(PASS):
                            for c in range(4):
                                x = v[g, c]
                                if masked and w[r] == ZERO:
                                    x = ZERO  # not 0 · NaN
                                run[r, g, c] += w[r] * x
                for r in range(WARP_ROWS):
                    for g in range(PASS):
                        for c in range(4):
                            acc[r, g0 + g, c] += run[r, g, c]
    for r in range(WARP_ROWS):
        for g in range(GROUPS):
            for c in range(4):
                at = nothing + (r * GROUPS + g) * 4 + c
                parked[at] = parked[at] * shrink[r] + acc[r, g, c]


@cuda.jit(device=True)
def hide(visibility, b, first_row, heads, key, prefix_len, n_keys, scores):
    """Set a lane's scores of keys that a row does not see to -inf."""
    row = min(first_row // heads, visibility.shape[1] - 1)
    head = first_row % heads
    for r in range(WARP_ROWS):
        for k in range(LANE_KEYS):
            at = key + WARP * k
            if at >= n_keys or not sees(visibility, b, row, at, prefix_len):
                scores[r, k] = MINUS_INF
        head += 1
        if head == heads:  # the next packed row is the next tree row's first head
            head = 0
            row = min(row + 1, visibility.shape[1] - 1)


@cuda.jit
def split_kernel(
    q,  # [B, R, D] f32 or u16 (bf16 bits): packed rows, R = N·H, row i·H + h
    kv_cache,  # [B, S_max, D] like q
    prefix_lens,  # [B] i32
    visibility,  # [B, N, ceil(N/32)] u32
    scale_hi,  # f32: sm_scale · log2(e) …
    scale_lo,  # f32: … and what float32 rounds away of it
    aligned,  # bool: rows of q and kv_cache can be read four elements at a time
    accs,  # out [P, B, R, Dc up to a multiple of 4] f32; unset where a split is empty
    tops,  # out [P, B, R] f32, base 2
    totals,  # out [P, B, R] f32
):
    shared = cuda.shared.array(SHARED, np.float32, alignment=16)
    parked = cuda.local.array(SUMS, np.float32)
    hi = cuda.local.array((WARP_ROWS, LANE_KEYS), np.float32)
    lo = cuda.local.array((WARP_ROWS, LANE_KEYS), np.float32)
    top = cuda.local.array(WARP_ROWS, np.float32)
    total = cuda.local.array(WARP_ROWS, np.float32)
    shrink = cuda.local.array(WARP_ROWS, np.float32)

    thread = np.uint32(cuda.threadIdx.x)  # unsigned: no care for negative indices
    warp, lane = thread >> 5, thread & 31
    n_rows = visibility.shape[1]
    heads = q.shape[1] // n_rows
    splits = accs.shape[0]
    panels = (accs.shape[3] + WIDTH - 1) // WIDTH
    tiles = (q.shape[1] + ROWS - 1) // ROWS
    block = cuda.blockIdx.x
    panel = block % panels
    split = block // panels % splits
    row0 = block // (panels * splits) % tiles * ROWS
    b = block // (panels * splits * tiles)
    column = panel * WIDTH
    columns = min(accs.shape[3] - column, WIDTH)
    prefix_len, n_keys = bounds(prefix_lens, b, kv_cache, n_rows)
    # A split's keys, in whole warps of them.
    share = (n_keys + splits * WARP - 1) // (splits * WARP) * WARP
    n_keys = min(n_keys, (split + 1) * share)
    first_row = row0 + warp * WARP_ROWS
    has_rows = first_row < q.shape[1]
    nothing = np.uint32(cuda.blockIdx.y)  # the grid has one dimension

    for r in range(WARP_ROWS):
        top[r] = MINUS_INF
        total[r] = ZERO
    for n in range(SUMS):
        parked[n] = ZERO

    for key0 in range(split * share, n_keys, KEYS):
        masked = key0 + KEYS > min(prefix_len, n_keys)
        args = (shared, q, kv_cache, b, row0, key0, n_keys - 1, aligned, thread)
        score_tile(*args, hi, lo)
        cuda.syncthreads()  # the columns have been read: weights may overwrite them
        for r in range(WARP_ROWS):
            for k in range(LANE_KEYS):
                hi[r, k], lo[r, k] = to_base2(hi[r, k], lo[r, k], scale_hi, scale_lo)
        if masked:
            hide(visibility, b, first_row, heads, key0 + lane, prefix_len, n_keys, hi)
        for r in range(WARP_ROWS):
            highest = top[r]
            for k in range(LANE_KEYS):
                highest = cuda.libdevice.fmaxf(highest, hi[r, k])
            highest = warp_max(highest)
            shrink[r] = weigh(top[r], ZERO, highest)
            top[r] = highest
        for r in range(WARP_ROWS):
            total[r] *= shrink[r]
            for k in range(LANE_KEYS):
                hi[r, k] = weigh(hi[r, k], lo[r, k], top[r])
                total[r] += hi[r, k]
        for k in range(LANE_KEYS):
            at = WEIGHTS + (warp * KEYS + lane + WARP * k) * WARP_ROWS
            for r in range(WARP_ROWS):
                shared[at + r] = hi[r, k]
        # Two calls, so that only tiles of the tail pay for the care for NaN.
        args = (shared, kv_cache, b, key0, n_keys - 1, aligned, column, columns, thread)
        if masked:
            add_values(*args, has_rows, True, shrink, parked, nothing)
        else:
            add_values(*args, has_rows, False, shrink, parked, nothing)

    for distance in (16, 8, 4, 2, 1):
        for r in range(WARP_ROWS):
            total[r] += cuda.shfl_xor_sync(FULL_WARP, total[r], distance)
    if lane == 0 and panel == 0:
        for r in range(WARP_ROWS):
            if first_row + r < q.shape[1]:
                tops[split, b, first_row + r] = top[r]
                totals[split, b, first_row + r] = total[r]
    cuda.syncwarp()  # lane 0 writes before others correct it
    row = first_row + lane
    if lane < WARP_ROWS and row < q.shape[1] and panel == 0:
        if is_padding(visibility, b, row // heads):
            tops[split, b, row] = MINUS_INF
            totals[split, b, row] = ZERO
    for r in range(min(WARP_ROWS, q.shape[1] - first_row)):
        for g in range(GROUPS):
            at = g * GROUP + 4 * lane
            if at < columns:
                n = (r * GROUPS + g) * 4
                store4(
                    accs[split, b, first_row + r],
                    column + at,
                    parked[n],
                    parked[n + 1],
                    parked[n + 2],
                    parked[n + 3],
                )


# A block has a packed row: a thread four of its columns, and one of `groups` groups of
# threads every so many batches of splits.
@cuda.jit
def merge_kernel(
    accs,  # [P, B, R, Dc up to a multiple of 4] f32; unset where a split is empty
    tops,  # [P, B, R] f32, base 2; -inf where a split saw nothing
    totals,  # [P, B, R] f32
    out,  # out [B, R, Dc] f32
    lse,  # out [B, R] f32
):
    parts = cuda.shared.array(0, np.float32, alignment=16)  # of the groups
    acc = cuda.local.array(4, np.float32)
    factors = cuda.local.array(MERGE_BATCH, np.float32)
    values = cuda.local.array((MERGE_BATCH, 4), np.float32)
    lane = cuda.threadIdx.x % WARP
    column = cuda.threadIdx.x % MERGE_THREADS * 4
    group = cuda.threadIdx.x // MERGE_THREADS
    groups = cuda.blockDim.x // MERGE_THREADS
    splits = accs.shape[0]
    panels = (out.shape[2] + WIDTH - 1) // WIDTH
    first = cuda.blockIdx.x % panels * WIDTH
    row = cuda.blockIdx.x // panels % out.shape[1]
    b = cuda.blockIdx.x // panels // out.shape[1]

    top, total = MINUS_INF, ZERO
    for p in range(lane, splits, WARP):
        top = cuda.libdevice.fmaxf(top, tops[p, b, row])
    top = warp_max(top)
    for p in range(lane, splits, WARP):
        total += weigh(tops[p, b, row], ZERO, top) * totals[p, b, row]
    total = warp_sum(total)
    seen = total != ZERO  # NaN counts as seen

    for e in range(4):
        acc[e] = ZERO
    here = min(first + column, accs.shape[3] - 4)
    for batch in range(group * MERGE_BATCH, splits, groups * MERGE_BATCH):
        for k in range(MERGE_BATCH):
            p = min(batch + k, splits - 1)
            factor = weigh(tops[p, b, row], ZERO, top)
            factors[k] = factor if batch + k < splits else ZERO
            v = values[k]
            v[0], v[1], v[2], v[3] = load4(accs[p, b, row], here)
        for k in range(MERGE_BATCH):
            for e in range(4):
                # A split that saw nothing left its acc unset, perhaps NaN: select.
                x = values[k, e] if factors[k] != ZERO else ZERO
                acc[e] += factors[k] * x
    if group > 0:
        store4(parts, group * WIDTH + column, acc[0], acc[1], acc[2], acc[3])
    cuda.syncthreads()  # the other groups' parts are there
    if group == 0:
        for g in range(1, groups):
            w, x, y, z = load4(parts, g * WIDTH + column)
            acc[0] += w
            acc[1] += x
            acc[2] += y
            acc[3] += z
        for e in range(4):
            acc[e] = acc[e] / total if seen else ZERO
        at = first + column
        if out.shape[2] % 4 == 0:
            if at < out.shape[2]:
                store4(out[b, row], at, acc[0], acc[1], acc[2], acc[3])
        else:
            for e in range(4):
                if at + e < out.shape[2]:
                    out[b, row, at + e] = acc[e]
        if cuda.threadIdx.x == 0 and first == 0:
            lse[b, row] = cuda.fma(top, LN_2, math.log(total)) if seen else MINUS_INF


# ------------------------------------------------------------------------- host wrapper


def verify_attn(
    q: Any,
    kv_cache: Any,
    prefix_lens: Any,
    visibility: Any,
    *,
    sm_scale: float,
    d_latent: int,
    version: str = "auto",
    n_splits: int | None = None,
    exact_max: bool = False,
    executor: str | None = None,
) -> tuple[Any, Any]:
    """Tree-masked MLA attention in absorbed form.

    Parameters
    ----------
    q : float32 or bfloat16 (uint16 bits in NumPy) [B, N, H, D]
        Absorbed queries: ``W_UKᵀ q_nope ‖ q_rope``. On a GPU all versions but
        "simple" want them C-contiguous.
    kv_cache : same dtype [B, S_max, D]
        ``c_kv ‖ k_rope``; tree row i's own row is ``prefix_lens[b] + i``. Any strides;
        for "mma" and "wgmma" rows that start at multiples of 16 bytes.
    prefix_lens : int32 [B]
    visibility : uint32 [B, N, ceil(N/32)]
        A row without any bit is padding and sees nothing, not even the prefix. No row
        has a bit above its own index: "wgmma" does not look there.
    sm_scale : float
        The model's softmax scale; not ``D ** -0.5``.
    d_latent : int
        Dc, at most D; the first Dc columns of a cache row are its value.
    version : {"auto", "simple", "split", "mma", "wgmma"}
        Which kernel; NumPy has no versions. "mma" and "wgmma" take bfloat16 (the bits,
        as of `ddtree_numba.bf16.from_float32`) with D = 576 and Dc = 512, "wgmma" with
        `sm_scale` above 0, and of GPUs only compute capability 9.0; its first call for
        an array may not be captured in a graph. In the emulator "auto" is "split". On a
        GPU it is "wgmma" where that can run and the work is at least 16 tiles of 64
        packed rows (of N · H, request by request) by 64 keys (of S_max), else "mma"
        where it can run, and "split" for all the rest.
    n_splits : int, optional
        Parts of the keys that blocks of one row tile work on side by side, cut to
        S_max ("simple" has none); if omitted, as many as keep the card busy at a prefix
        that fills the cache ("wgmma": at the prefixes that there are). Parts of "wgmma"
        travel in float16, off by 2^-11 of themselves at most, an eighth of what
        rounding the weights to bfloat16 may do.
    exact_max : bool
        Whether "wgmma" keeps every row's running maximum as the reference of its
        weights. By default the reference moves only when a score passes it by a factor
        of 2^8, which is faster; weights then round to bfloat16 relative to another
        power of 2, and the largest errors grow two- to fourfold, within the same
        bounds. Other versions are always exact.
    executor : {"gpu", "emulator", "numpy"}, optional
        If omitted, what DDTREE_EXECUTOR says, else the GPU for device arrays and NumPy
        for others.

    Returns
    -------
    out : float32 [B, N, H, Dc]
    lse : float32 [B, N, H]
        Natural logarithm. Rows that see nothing: out 0, lse -inf.

    Raises
    ------
    TypeError, ValueError
        For wrong dtypes, shapes or values. That prefix and tree fit into the cache, and
        that no row sees one above its index, is checked where the arrays are on the
        host; device arrays are not looked at, and keys past the cache's end then count
        as unseen.
    RuntimeError
        If a GPU is asked for and there is none.
    """
    at = place(
        executor,
        default="numpy",
        q=q,
        kv_cache=kv_cache,
        prefix_lens=prefix_lens,
        visibility=visibility,
    )
    floats = (np.float32, np.uint16)
    q = at.check(q, "q", dtypes=floats, ndim=4)
    batch, n, heads, d = q.shape
    kv_cache = at.check(kv_cache, "kv_cache", dtypes=floats, shape=(batch, None, d))
    if kv_cache.dtype != q.dtype:
        raise TypeError(f"kv_cache has dtype {kv_cache.dtype}; expected q's, {q.dtype}")
    prefix_lens = at.check(
        prefix_lens, "prefix_lens", dtypes=(np.int32,), shape=(batch,), convert=True
    )
    visibility = at.check(
        visibility, "visibility", dtypes=(np.uint32,), shape=(batch, n, n_words(n))
    )
    _check_scalars(sm_scale, d_latent, d, version, n_splits, exact_max)
    if n_splits is not None:  # a part has a key at least
        n_splits = min(n_splits, max(kv_cache.shape[1], 1))
    if at.on_device and version != "simple" and not q.is_c_contiguous():
        raise ValueError(
            f"q has strides {q.strides}; expected C-contiguous (or version='simple')"
        )
    if 0 in (q.size, kv_cache.size):  # no row, or no key: no tile for tensor cores
        version = "simple"
    if not at.on_device:
        _check_fit(prefix_lens, visibility, kv_cache.shape[1])
    inputs = [at.put(x) for x in (q, kv_cache, prefix_lens, visibility)]
    version = _choose_version(at, version, inputs, sm_scale, d_latent)
    if at.executor == "numpy":
        return reference.verify_attn(
            q, kv_cache, prefix_lens, visibility, sm_scale=sm_scale, d_latent=d_latent
        )
    out = at.empty((batch, n, heads, d_latent), np.float32)
    lse = at.empty((batch, n, heads), np.float32)
    if version == "simple":
        _run_simple(at, inputs, sm_scale, out, lse)
    elif version == "mma":
        _run_mma(at, inputs, sm_scale, n_splits, out, lse)
    elif version == "wgmma":
        scale, processors = _scale_pair(sm_scale)[0], _multiprocessors(at)
        verify_attn_wgmma.run(
            at, inputs, scale, n_splits, exact_max, processors, out, lse
        )
    else:
        _run_split(at, inputs, sm_scale, n_splits, out, lse)
    return at.give(out), at.give(lse)


def _check_scalars(
    sm_scale: float,
    d_latent: int,
    d: int,
    version: str,
    n_splits: int | None,
    exact_max: bool,
) -> None:
    if isinstance(sm_scale, bool) or not isinstance(sm_scale, Real):
        raise TypeError(f"sm_scale is {sm_scale!r}; expected a number")
    if not abs(sm_scale) <= MAX_SCALE:  # NaN is not either
        raise ValueError(
            f"sm_scale is {sm_scale}; expected a finite number up to {MAX_SCALE}"
        )
    whole_number(d_latent, "d_latent", least=1, most=d)
    if version not in VERSIONS:
        raise ValueError(f"version is {version!r}; expected {', '.join(VERSIONS)}")
    if n_splits is not None:
        whole_number(n_splits, "n_splits", least=1)
    if not isinstance(exact_max, bool | np.bool_):
        raise TypeError(f"exact_max is {exact_max!r}; expected a bool")


def _check_fit(prefix_lens: np.ndarray, visibility: np.ndarray, room: int) -> None:
    """Raise ValueError unless prefix and visible tail rows of every request fit."""
    n, words = visibility.shape[1:]
    upper = np.packbits(~np.tri(n, 32 * words, dtype=bool), axis=1, bitorder="little")
    behind = visibility & upper.view("<u4")
    for b, i, word in np.argwhere(behind):
        found = int(behind[b, i, word])
        j = 32 * word + (found & -found).bit_length() - 1
        raise ValueError(
            f"visibility, request {b}, row {i} has bit {j}; expected bits of rows "
            f"0 … {i}: a node comes after its ancestors"
        )
    seen = np.ascontiguousarray(np.bitwise_or.reduce(visibility, axis=1), "<u4")
    bits = np.unpackbits(seen.view(np.uint8), axis=1, bitorder="little")
    tails = np.where(bits, np.arange(1, bits.shape[1] + 1), 0).max(axis=1, initial=0)
    for b in np.flatnonzero((prefix_lens < 0) | (prefix_lens + tails > room)):
        raise ValueError(
            f"prefix_lens[{b}] is {prefix_lens[b]}; expected 0 … {room - tails[b]} "
            f"(the cache has {room} rows, the tree's visible rows take {tails[b]})"
        )


def _choose_version(
    at: Place, version: str, inputs: list, sm_scale: float, d_latent: int
) -> str:
    """What "auto" stands for here; raises what keeps a version from the inputs."""
    q, kv_cache, *_ = inputs

    def problem(version: str) -> Exception | None:
        if version == "wgmma":
            return verify_attn_wgmma.problem(at, q, kv_cache, sm_scale, d_latent)
        if version == "mma":
            return verify_attn_mma.problem(at, q, kv_cache, d_latent)
        return None

    if version == "auto":
        if at.executor != "gpu":
            return "split"
        if verify_attn_wgmma.pays(q, kv_cache) and not problem("wgmma"):
            return "wgmma"
        return "split" if problem("mma") else "mma"
    if found := problem(version):
        raise found
    return version


def _scale_pair(sm_scale: float) -> tuple[np.float32, np.float32]:
    """``sm_scale · log2(e)`` as float32 and what float32 rounds away of it."""
    scale = sm_scale / math.log(2)
    return np.float32(scale), np.float32(scale - float(np.float32(scale)))


def _run_simple(at: Place, inputs: list, sm_scale: float, out: Any, lse: Any) -> None:
    batch, n, heads, _ = inputs[0].shape
    threads = SIMPLE_THREADS if at.executor == "gpu" else 2 * WARP
    scale = _scale_pair(sm_scale)
    at.launch(simple_kernel, batch * n * heads, threads, *inputs, *scale, out, lse)


def _run_split(
    at: Place,
    inputs: list,
    sm_scale: float,
    n_splits: int | None,
    out: Any,
    lse: Any,
) -> None:
    q, kv_cache, prefix_lens, visibility = inputs
    batch, n, heads, d = q.shape
    packed, d_latent = n * heads, out.shape[3]
    panels = -(-d_latent // WIDTH)
    blocks = batch * -(-packed // ROWS) * panels
    if n_splits is None:
        n_splits = choose_splits(blocks, kv_cache.shape[1], _multiprocessors(at))
    whole = -(-d_latent // 4) * 4  # sums are stored four at a time
    partials = _partials(at, n_splits, batch, packed, whole)
    at.launch(
        split_kernel,
        blocks * n_splits,
        THREADS,
        q.reshape(batch, packed, d),
        kv_cache,
        prefix_lens,
        visibility,
        *_scale_pair(sm_scale),
        rows_start_at(4, q) and rows_start_at(4, kv_cache),
        *partials,
    )
    _merge(at, partials, out, lse)


def _run_mma(
    at: Place,
    inputs: list,
    sm_scale: float,
    n_splits: int | None,
    out: Any,
    lse: Any,
) -> None:
    q, kv_cache, prefix_lens, visibility = inputs
    batch, n, heads, d = q.shape
    packed = n * heads
    q = q.reshape(batch, packed, d)
    form = verify_attn_mma.form_for(at)
    blocks = batch * -(-packed // verify_attn_mma.ROWS)
    if n_splits is None:
        n_splits = choose_splits(
            blocks,
            kv_cache.shape[1],
            _multiprocessors(at),
            keys=form.keys,
            start=verify_attn_mma.START,
            merge_start=verify_attn_mma.MERGE_START,
            merge_cost=verify_attn_mma.MERGE_COST * blocks,
        )
    if n_splits == 1:  # the kernel's own outputs are the whole
        whole = lse.reshape(1, batch, packed)
        partials = out.reshape(1, batch, packed, out.shape[3]), whole, whole
    else:
        partials = _partials(at, n_splits, batch, packed, out.shape[3])
    at.launch(
        verify_attn_mma.make_kernel(form),
        blocks * n_splits,
        verify_attn_mma.THREADS,
        q,
        kv_cache,
        prefix_lens,
        visibility,
        _scale_pair(sm_scale)[0],
        *partials,
        dynamic_shared=form.dynamic_shared,
    )
    if n_splits > 1:
        _merge(at, partials, out, lse)


def _partials(at: Place, splits: int, batch: int, packed: int, columns: int) -> tuple:
    """Room for accs, tops and totals of every split."""
    shape = (splits, batch, packed)
    return tuple(at.empty(s, np.float32) for s in ((*shape, columns), shape, shape))


def _merge(at: Place, partials: tuple, out: Any, lse: Any) -> None:
    batch, n, heads, d_latent = out.shape
    packed = n * heads
    groups = min(-(-partials[0].shape[0] // MERGE_BATCH), MERGE_GROUPS)
    at.launch(
        merge_kernel,
        batch * packed * -(-d_latent // WIDTH),
        groups * MERGE_THREADS,
        *partials,
        out.reshape(batch, packed, d_latent),
        lse.reshape(batch, packed),
        dynamic_shared=4 * WIDTH * groups if groups > 1 else 0,
    )


def _multiprocessors(at: Place) -> int:
    """Multiprocessors of the GPU, each of which runs a block at a time; else 1."""
    if at.executor != "gpu":
        return 1
    return cuda.get_current_device().MULTIPROCESSOR_COUNT


def bf16_problem(
    version: str, q: Any, d_latent: int, expected: tuple[int, int]
) -> Exception | None:
    """The error for what is no bfloat16 of D and d_latent as expected, or None."""
    if q.dtype != np.uint16:
        return TypeError(
            f"version '{version}' and q has dtype {q.dtype}; expected uint16 (bf16 "
            "bits)"
        )
    if (q.shape[3], d_latent) != expected:
        return ValueError(
            f"version '{version}' and D is {q.shape[3]}, d_latent is {d_latent}; "
            f"expected {expected[0]} and {expected[1]}"
        )
    return None


def rows_start_at(n: int, x: Any) -> bool:
    """Whether rows of x are contiguous and start at multiples of n elements."""
    if isinstance(x, np.ndarray):
        address = x.ctypes.data
    else:
        address = x.__cuda_array_interface__["data"][0]
    size = x.dtype.itemsize
    steps = (address, *x.strides[:-1], x.shape[-1] * size)
    return x.strides[-1] == size and not any(step % (n * size) for step in steps)


def choose_splits(
    blocks: int,
    room: int,
    processors: int,
    *,
    keys: int = KEYS,
    start: float = 1.0,
    merge_start: float = 0.0,
    merge_cost: float = 0.02,
) -> int:
    """How many splits of up to `room` keys end soonest, with a block a multiprocessor.

    Time is counted in tiles of `keys`: rounds of blocks, each as long as a split and
    `start` for a block's start and end; where there are splits, `merge_start` and for
    each of them `merge_cost` to merge them.
    """
    tiles = -(-room // keys)

    def cost(splits: int) -> float:
        rounds = -(-blocks * splits // processors)
        merge = merge_start + merge_cost * splits if splits > 1 else 0
        return rounds * (-(-tiles // splits) + start) + merge

    return min(range(1, max(tiles, 1) + 1), key=cost)


# They take their pieces from this module.
from ddtree_numba.kernels import verify_attn_mma, verify_attn_wgmma  # noqa: E402
