"""verify_attn: tree-masked attention of every draft row over a latent (MLA) cache.

Contract
--------
Row i of a request attends to the whole prefix and to the tail rows that its visibility
bits name; tail row j is cache row ``prefix_lens[b] + j``. All heads share one cache row:
its D columns are the key, its first Dc columns the value. A row without a bit is
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

A float32 chain of 576 products is off by 1e-5 of a large score, and large scores decide
the output. So every `DEPTH` products are summed from zero and then go into a pair
hi + lo that keeps what rounding takes from hi (Knuth's two-sum); the pair is carried
into the exponent. Values are summed in short runs too. No float64 anywhere.

Versions
--------
simple_kernel  one block a request, row and head: a thread a key, then a thread a column
split_kernel   one block a tile of `ROWS` packed rows (row and head) and a split of the
               keys: a tile of keys in shared memory serves all of them; register tiles
merge_kernel   brings the splits together
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numba import cuda

from ddtree_numba import reference
from ddtree_numba.backend import _overload_for_cuda, place, to_float32
from ddtree_numba.tree import n_words

VERSIONS = ("auto", "simple", "split")
WARP = 32
FULL_WARP = 0xFFFFFFFF
LN_2 = np.float32(math.log(2))
MINUS_INF = np.float32(-math.inf)
ZERO = np.float32(0.0)

KEYS_AT_ONCE = 1024  # of the simple version: scores held in shared memory
RUN = 32  # of the simple version: values summed before they go into the total
SIMPLE_THREADS = 256

ROWS = 64  # packed rows of a block
KEYS = 64  # keys of a tile
DEPTH = 32  # columns of q and k that are in shared memory at a time
STEP = 8  # rows of values that are in shared memory at a time
WIDTH = 512  # columns of the output that a block holds in registers
PITCH = DEPTH + 4  # a staged row's length: reads of 16 bytes then meet no bank twice
WARP_ROWS = 8  # a warp's packed rows: it scores them and holds their output
WARPS = ROWS // WARP_ROWS
THREADS = WARPS * WARP
KEYS_STAGE = ROWS * PITCH  # where the keys' stage begins, after that of the queries
STAGE = max((ROWS + KEYS) * PITCH, STEP * WIDTH)
WEIGHTS = ROWS * KEYS
KEY_LOADS = KEYS // WARPS
GROUP = 4 * WARP  # columns that a warp covers with four to a lane
GROUPS = WIDTH // GROUP
VALUE_LOADS = STEP * GROUP // THREADS  # a thread's elements of one group
PASS = 2  # groups that are summed together


def load4(array: Any, i: Any) -> Any:
    """Four elements from ``array[i]`` on; i is a multiple of 4 (one 16-byte load)."""
    return array[i], array[i + 1], array[i + 2], array[i + 3]


@_overload_for_cuda(load4)
def _load4_overload(array, i):
    from llvmlite import ir
    from numba import types
    from numba.cuda.cgutils import pack_array
    from numba.cuda.extending import intrinsic

    @intrinsic
    def load_vector(typingctx, array, i):
        def codegen(context, builder, signature, args):
            of_array = context.make_array(signature.args[0])(context, builder, args[0])
            vector = ir.VectorType(ir.FloatType(), 4)
            element = builder.gep(of_array.data, [args[1]])
            address = builder.bitcast(element, vector.as_pointer())
            loaded = builder.load(address, align=16)
            lanes = [ir.Constant(ir.IntType(32), lane) for lane in range(4)]
            return pack_array(
                builder, [builder.extract_element(loaded, lane) for lane in lanes]
            )

        return types.UniTuple(array.dtype, 4)(array, types.int64), codegen

    def load(array, i):
        return load_vector(array, np.int64(i))

    return load


# ------------------------------------------------------------- pieces of both versions


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
    for distance in (16, 8, 4, 2, 1):
        x = cuda.libdevice.fmaxf(x, cuda.shfl_xor_sync(FULL_WARP, x, distance))
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
    for distance in (16, 8, 4, 2, 1):
        x += cuda.shfl_xor_sync(FULL_WARP, x, distance)
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
    acc = ZERO
    for start in range(0, count, RUN):
        run = ZERO
        for k in range(start, min(start + RUN, count)):
            # Not 0 · v: v may be a NaN that this row does not see.
            if weights[k] != ZERO:
                run += weights[k] * to_float32(kv_cache[b, first_key + k, c])
        acc += run
    return acc


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
    scores = cuda.shared.array(KEYS_AT_ONCE, np.float32)
    rests = cuda.shared.array(KEYS_AT_ONCE, np.float32)
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

    for first_key in range(0, n_keys, KEYS_AT_ONCE):
        count = min(n_keys - first_key, KEYS_AT_ONCE)
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

    seen = total != ZERO
    for c in range(thread, out.shape[3], threads):
        out[b, i, h, c] = out[b, i, h, c] / total if seen else ZERO
    if thread == 0:
        lse[b, i, h] = cuda.fma(top, LN_2, math.log(total)) if seen else MINUS_INF


# ------------------------------------------------------------------------ split version
# A warp owns WARP_ROWS packed rows. To score, its lanes form 2 × 16: lane 16·g + k scores
# rows 4·g … 4·g+3 against keys k, k+16, k+32, k+48, a register tile of 4 × 4. To sum
# values, every lane takes all the warp's rows and four columns of each group.


@cuda.jit(device=True, forceinline=True)
def fetch_depth(q, kv_cache, b, row, key, last_key, d, ahead_q, ahead_k):
    """Read this thread's share of the next DEPTH columns into registers.

    A warp reads whole rows, a lane a column. Rows and keys past the end repeat the last
    (nobody uses them); columns past the end are 0.
    """
    inside = d < q.shape[2]
    d = min(d, q.shape[2] - 1)
    for n in range(WARP_ROWS):
        x = to_float32(q[b, min(row + n, q.shape[1] - 1), d])
        ahead_q[n] = x if inside else ZERO
    for n in range(KEY_LOADS):
        x = to_float32(kv_cache[b, min(key + n, last_key), d])
        ahead_k[n] = x if inside else ZERO


@cuda.jit(device=True, forceinline=True)
def score_tile(stage, q, kv_cache, b, row0, key0, last_key, warp, lane, hi, lo):
    """q · k of ROWS × KEYS as pairs, this lane's 4 × 4 of them in hi and lo."""
    ahead_q = cuda.local.array(WARP_ROWS, np.float32)
    ahead_k = cuda.local.array(KEY_LOADS, np.float32)
    run = cuda.local.array((4, 4), np.float32)
    qs = cuda.local.array(4, np.float32)
    ks = cuda.local.array((4, 4), np.float32)
    row = row0 + warp * WARP_ROWS
    key = key0 + warp * KEY_LOADS
    q_at = (warp * WARP_ROWS + (lane >> 4) * 4) * PITCH
    k_at = KEYS_STAGE + (lane & 15) * PITCH
    for r in range(4):
        for k in range(4):
            hi[r, k] = ZERO
            lo[r, k] = ZERO
    fetch_depth(q, kv_cache, b, row, key, last_key, lane, ahead_q, ahead_k)
    for start in range(0, q.shape[2], DEPTH):
        cuda.syncthreads()  # everyone is done with what the stage held
        for n in range(WARP_ROWS):
            stage[(warp * WARP_ROWS + n) * PITCH + lane] = ahead_q[n]
        for n in range(KEY_LOADS):
            stage[KEYS_STAGE + (warp * KEY_LOADS + n) * PITCH + lane] = ahead_k[n]
        cuda.syncthreads()  # the columns are in the stage
        if start + DEPTH < q.shape[2]:  # on their way while the others are used
            d = start + DEPTH + lane
            fetch_depth(q, kv_cache, b, row, key, last_key, d, ahead_q, ahead_k)
        if row >= q.shape[1]:
            continue  # this warp has no rows, it only helps to load
        for r in range(4):
            for k in range(4):
                run[r, k] = ZERO
        for d in range(0, min(q.shape[2] - start, DEPTH), 4):
            for k in range(4):
                a = load4(stage, k_at + 16 * k * PITCH + d)
                ks[k, 0], ks[k, 1], ks[k, 2], ks[k, 3] = a
            for r in range(4):
                a = load4(stage, q_at + r * PITCH + d)
                qs[0], qs[1], qs[2], qs[3] = a
                for k in range(4):
                    for e in range(4):
                        run[r, k] += qs[e] * ks[k, e]
        for r in range(4):
            for k in range(4):
                hi[r, k], lo[r, k] = two_sum(hi[r, k], lo[r, k], run[r, k])


@cuda.jit(device=True, forceinline=True)
def fetch_values(kv_cache, b, key, last_key, column, columns, thread, ahead):
    """Read this thread's share of the next STEP rows of values into registers."""
    for g in range(GROUPS):
        if g // PASS * PASS * GROUP < columns:
            for n in range(VALUE_LOADS):
                at = thread + n * THREADS
                c = column + min(g * GROUP + at % GROUP, columns - 1)
                row = min(key + at // GROUP, last_key)
                ahead[g, n] = to_float32(kv_cache[b, row, c])


@cuda.jit(device=True, forceinline=True)
def add_values(
    stage,
    weights,
    kv_cache,
    b,
    key0,
    last_key,
    column,
    columns,
    thread,
    has_rows,
    acc,
    masked,
):
    """Add a tile's weighted values to this lane's rows and columns."""
    ahead = cuda.local.array((GROUPS, VALUE_LOADS), np.float32)
    run = cuda.local.array((WARP_ROWS, PASS, 4), np.float32)
    w = cuda.local.array(WARP_ROWS, np.float32)
    v = cuda.local.array((PASS, 4), np.float32)
    warp, lane = thread >> 5, thread & 31
    fetch_values(kv_cache, b, key0, last_key, column, columns, thread, ahead)
    for start in range(0, KEYS, STEP):
        cuda.syncthreads()  # everyone is done with what the stage held
        for g in range(GROUPS):
            if g // PASS * PASS * GROUP < columns:
                for n in range(VALUE_LOADS):
                    at = thread + n * THREADS
                    stage[(at // GROUP) * WIDTH + g * GROUP + at % GROUP] = ahead[g, n]
        cuda.syncthreads()  # the values are in the stage, and the warp's weights too
        if start + STEP < KEYS:  # on their way while the others are used
            key = key0 + start + STEP
            fetch_values(kv_cache, b, key, last_key, column, columns, thread, ahead)
        for g0 in range(0, GROUPS, PASS):
            if has_rows and g0 * GROUP + 4 * lane < columns:
                for r in range(WARP_ROWS):
                    for g in range(PASS):
                        for c in range(4):
                            run[r, g, c] = ZERO
                for k in range(STEP):
                    at = (warp * KEYS + start + k) * WARP_ROWS
                    a = load4(weights, at)
                    w[0], w[1], w[2], w[3] = a
                    a = load4(weights, at + 4)
                    w[4], w[5], w[6], w[7] = a
                    for g in range(PASS):
                        a = load4(stage, k * WIDTH + (g0 + g) * GROUP + 4 * lane)
                        v[g, 0], v[g, 1], v[g, 2], v[g, 3] = a
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


@cuda.jit
def split_kernel(
    q,  # [B, R, D] f32 or u16 (bf16 bits): packed rows, R = N·H, row i·H + h
    kv_cache,  # [B, S_max, D] like q
    prefix_lens,  # [B] i32
    visibility,  # [B, N, ceil(N/32)] u32
    scale_hi,  # f32: sm_scale · log2(e) …
    scale_lo,  # f32: … and what float32 rounds away of it
    accs,  # out [P, B, R, Dc] f32: partials of the P splits; unset where top is -inf
    tops,  # out [P, B, R] f32, base 2
    totals,  # out [P, B, R] f32
):
    stage = cuda.shared.array(STAGE, np.float32, alignment=16)
    weights = cuda.shared.array(WEIGHTS, np.float32, alignment=16)
    acc = cuda.local.array((WARP_ROWS, GROUPS, 4), np.float32)
    hi = cuda.local.array((4, 4), np.float32)
    lo = cuda.local.array((4, 4), np.float32)
    top = cuda.local.array(4, np.float32)
    total = cuda.local.array(4, np.float32)
    shrink = cuda.local.array(4, np.float32)

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
    key_tiles = (n_keys + KEYS - 1) // KEYS
    share = (key_tiles + splits - 1) // splits
    has_rows = row0 + warp * WARP_ROWS < q.shape[1]
    my_row = row0 + warp * WARP_ROWS + (lane >> 4) * 4  # the first of four, to score

    for r in range(4):
        top[r] = MINUS_INF
        total[r] = ZERO
    for r in range(WARP_ROWS):
        for g in range(GROUPS):
            for c in range(4):
                acc[r, g, c] = ZERO

    for tile in range(split * share, min((split + 1) * share, key_tiles)):
        key0 = tile * KEYS
        masked = key0 + KEYS > prefix_len
        score_tile(stage, q, kv_cache, b, row0, key0, n_keys - 1, warp, lane, hi, lo)
        for r in range(4):
            highest = top[r]
            for k in range(4):
                score, rest = to_base2(hi[r, k], lo[r, k], scale_hi, scale_lo)
                if masked:
                    key = key0 + (lane & 15) + 16 * k
                    row = min(my_row + r, q.shape[1] - 1) // heads
                    if key >= n_keys or not sees(visibility, b, row, key, prefix_len):
                        score = MINUS_INF
                hi[r, k] = score
                lo[r, k] = rest
                highest = cuda.libdevice.fmaxf(highest, score)
            for distance in (8, 4, 2, 1):
                other = cuda.shfl_xor_sync(FULL_WARP, highest, distance)
                highest = cuda.libdevice.fmaxf(highest, other)
            shrink[r] = weigh(top[r], ZERO, highest)
            top[r] = highest
            total[r] *= shrink[r]
            for k in range(4):
                hi[r, k] = weigh(hi[r, k], lo[r, k], highest)
                total[r] += hi[r, k]
        for k in range(4):
            at = (warp * KEYS + (lane & 15) + 16 * k) * WARP_ROWS + (lane >> 4) * 4
            for r in range(4):
                weights[at + r] = hi[r, k]
        for r in range(WARP_ROWS):
            factor = cuda.shfl_sync(FULL_WARP, shrink[r % 4], r // 4 * 16)
            for g in range(GROUPS):
                for c in range(4):
                    acc[r, g, c] *= factor
        if masked:
            add_values(
                stage,
                weights,
                kv_cache,
                b,
                key0,
                n_keys - 1,
                column,
                columns,
                thread,
                has_rows,
                acc,
                True,
            )
        else:
            add_values(
                stage,
                weights,
                kv_cache,
                b,
                key0,
                n_keys - 1,
                column,
                columns,
                thread,
                has_rows,
                acc,
                False,
            )

    for r in range(4):
        for distance in (8, 4, 2, 1):
            total[r] += cuda.shfl_xor_sync(FULL_WARP, total[r], distance)
        if lane & 15 == 0 and panel == 0 and my_row + r < q.shape[1]:
            padding = is_padding(visibility, b, (my_row + r) // heads)
            tops[split, b, my_row + r] = MINUS_INF if padding else top[r]
            totals[split, b, my_row + r] = total[r]
    for r in range(WARP_ROWS):
        row = row0 + warp * WARP_ROWS + r
        if row < q.shape[1]:
            for g in range(GROUPS):
                for c in range(4):
                    at = g * GROUP + 4 * lane + c
                    if at < columns:
                        accs[split, b, row, column + at] = acc[r, g, c]


@cuda.jit
def merge_kernel(
    accs,  # [P, B, R, Dc] f32; unset where top is -inf
    tops,  # [P, B, R] f32, base 2; -inf where a split saw nothing
    totals,  # [P, B, R] f32
    out,  # out [B, R, Dc] f32
    lse,  # out [B, R] f32
):
    b = cuda.blockIdx.x // out.shape[1]
    row = cuda.blockIdx.x % out.shape[1]
    top, total = MINUS_INF, ZERO
    for p in range(accs.shape[0]):
        top = cuda.libdevice.fmaxf(top, tops[p, b, row])
    for p in range(accs.shape[0]):
        if tops[p, b, row] != MINUS_INF:
            total += totals[p, b, row] * weigh(tops[p, b, row], ZERO, top)
    for c in range(cuda.threadIdx.x, out.shape[2], cuda.blockDim.x):
        acc = ZERO
        for p in range(accs.shape[0]):
            if tops[p, b, row] != MINUS_INF:
                acc += accs[p, b, row, c] * weigh(tops[p, b, row], ZERO, top)
        out[b, row, c] = ZERO if top == MINUS_INF else acc / total
    if cuda.threadIdx.x == 0:
        seen = top != MINUS_INF
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
    executor: str | None = None,
) -> tuple[Any, Any]:
    """Tree-masked MLA attention in absorbed form.

    Parameters
    ----------
    q : float32 or bfloat16 (uint16 bits in NumPy) [B, N, H, D]
        Absorbed queries: ``W_UKᵀ q_nope ‖ q_rope``. On a GPU the split version wants
        them C-contiguous.
    kv_cache : same dtype [B, S_max, D]
        ``c_kv ‖ k_rope``; tree row i's own row is ``prefix_lens[b] + i``. Any strides.
    prefix_lens : int32 [B]
    visibility : uint32 [B, N, ceil(N/32)]
        A row without any bit is padding and sees nothing, not even the prefix.
    sm_scale : float
        The model's softmax scale; not ``D ** -0.5``.
    d_latent : int
        Dc, at most D; the first Dc columns of a cache row are its value.
    version : {"auto", "simple", "split"}
        Which kernel; "auto" is "split".
    n_splits : int, optional
        Parts of the keys that blocks of the split version work on side by side; if
        omitted, as many as keep the card busy at a prefix that fills the cache.
    executor : {"gpu", "emulator", "numpy"}, optional

    Returns
    -------
    out : float32 [B, N, H, Dc]
    lse : float32 [B, N, H]
        Natural logarithm. Rows that see nothing: out 0, lse -inf.

    Raises
    ------
    TypeError, ValueError
        For wrong dtypes, shapes or values. That prefix and tree fit into the cache is
        checked where the arrays are on the host; device arrays are not looked at, and
        keys past the cache's end then count as unseen.
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
    _check_scalars(sm_scale, d_latent, d, version, n_splits)
    if not at.on_device:
        _check_fit(prefix_lens, visibility, kv_cache.shape[1])
    if at.executor == "numpy":
        return reference.verify_attn(
            q, kv_cache, prefix_lens, visibility, sm_scale=sm_scale, d_latent=d_latent
        )
    arrays = [at.put(x) for x in (q, kv_cache, prefix_lens, visibility)]
    out = at.empty((batch, n, heads, d_latent), np.float32)
    lse = at.empty((batch, n, heads), np.float32)
    run = _run_simple if version == "simple" else _run_split
    run(at, *arrays, sm_scale, n_splits, out, lse)
    return at.give(out), at.give(lse)


def _check_scalars(
    sm_scale: float, d_latent: int, d: int, version: str, n_splits: int | None
) -> None:
    if not math.isfinite(sm_scale):
        raise ValueError(f"sm_scale is {sm_scale}; expected a finite number")
    if not 1 <= d_latent <= d:
        raise ValueError(f"d_latent is {d_latent}; expected 1 … {d} (q's last axis)")
    if version not in VERSIONS:
        raise ValueError(f"version is {version!r}; expected {', '.join(VERSIONS)}")
    if n_splits is not None and n_splits < 1:
        raise ValueError(f"n_splits is {n_splits}; expected 1 or more")


def _check_fit(prefix_lens: np.ndarray, visibility: np.ndarray, room: int) -> None:
    """Raise ValueError unless prefix and visible tail rows of every request fit."""
    for b, prefix_len in enumerate(prefix_lens):
        if prefix_len < 0:
            raise ValueError(f"prefix_lens[{b}] is {prefix_len}; expected 0 or more")
        seen = np.bitwise_or.reduce(visibility[b], axis=0, initial=0)
        bits = np.unpackbits(seen.astype("<u4").view(np.uint8), bitorder="little")
        tail = int(np.flatnonzero(bits).max(initial=-1)) + 1
        if prefix_len + tail > room:
            raise ValueError(
                f"prefix_lens[{b}] is {prefix_len}, and the tree's visible rows reach "
                f"{tail} further; expected no more than the cache's {room} rows"
            )


def _scale_pair(sm_scale: float) -> tuple[np.float32, np.float32]:
    """``sm_scale · log2(e)`` as float32 and what float32 rounds away of it."""
    scale = sm_scale / math.log(2)
    return np.float32(scale), np.float32(scale - float(np.float32(scale)))


def _run_simple(
    at: Any,
    q: Any,
    kv_cache: Any,
    prefix_lens: Any,
    visibility: Any,
    sm_scale: float,
    n_splits: int | None,
    out: Any,
    lse: Any,
) -> None:
    batch, n, heads, _ = q.shape
    at.launch(
        simple_kernel,
        batch * n * heads,
        SIMPLE_THREADS if at.executor == "gpu" else 2 * WARP,
        q,
        kv_cache,
        prefix_lens,
        visibility,
        *_scale_pair(sm_scale),
        out,
        lse,
    )


def _run_split(
    at: Any,
    q: Any,
    kv_cache: Any,
    prefix_lens: Any,
    visibility: Any,
    sm_scale: float,
    n_splits: int | None,
    out: Any,
    lse: Any,
) -> None:
    batch, n, heads, d = q.shape
    d_latent = out.shape[3]
    packed = n * heads
    blocks = batch * -(-packed // ROWS) * -(-d_latent // WIDTH)
    processors = 1
    if at.executor == "gpu":
        processors = cuda.get_current_device().MULTIPROCESSOR_COUNT
    if n_splits is None:
        n_splits = choose_splits(blocks, -(-kv_cache.shape[1] // KEYS), processors)
    accs = at.empty((n_splits, batch, packed, d_latent), np.float32)
    tops = at.empty((n_splits, batch, packed), np.float32)
    totals = at.empty((n_splits, batch, packed), np.float32)
    at.launch(
        split_kernel,
        blocks * n_splits,
        THREADS,
        q.reshape(batch, packed, d),
        kv_cache,
        prefix_lens,
        visibility,
        *_scale_pair(sm_scale),
        accs,
        tops,
        totals,
    )
    at.launch(
        merge_kernel,
        batch * packed,
        WARP if at.executor == "emulator" else 4 * WARP,
        accs,
        tops,
        totals,
        out.reshape(batch, packed, d_latent),
        lse.reshape(batch, packed),
    )


def choose_splits(blocks: int, tiles: int, processors: int) -> int:
    """How many splits of the keys end soonest, if a multiprocessor holds one block.

    Time is counted in tiles: rounds of blocks × (tiles of a split, and one for a
    block's start and end), and what merging costs a split.
    """

    def cost(splits: int) -> float:
        rounds = -(-blocks * splits // processors)
        return rounds * (-(-tiles // splits) + 1) + 0.02 * splits

    return min(range(1, max(tiles, 1) + 1), key=cost)
