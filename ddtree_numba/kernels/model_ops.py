"""model_ops: what the small model needs between the stages, all of it in float64.

Contract
--------
The same network as `ddtree_numba.model.forward`, whose functions are the specification:
matrix products, norms, rope, SwiGLU, the drafter's attention, and the rows that go into
the caches. As there, products and sums run in float64, and only queries, cache rows and
logits are rounded to float32: so both write the same text, near ties included. An
output's terms are added in an order that does not depend on how many rows there are.

Rows stand side by side, R = B·N of them; row r belongs to request ``r // N``. There are
as many as a graph was captured for: padding rows compute something that nobody reads,
and write nothing into a cache.

Kernels
-------
matmul_kernel           one thread an output, tiles of both factors in shared memory
rms_norm_kernel         one warp a row
rope_kernel             one warp a row and head
swiglu_kernel           one thread an element
gather_kernel           one block a row
embed_kernel            one block a row: a tree's tokens and their positions
embed_block_kernel      one block a row: the drafter's block
latent_row_kernel       one warp a row: into the target's cache
draft_row_kernel        one warp a row and layer: into the drafter's caches
draft_attention_kernel  one block a row and head
sample_kernel           one block a row
"""

from __future__ import annotations

import math

import numpy as np
from numba import cuda

from ddtree_numba.kernels.wide import FULL_WARP, WARP, warp_sum

TILE = 16  # rows and columns of a matrix product that a block computes
DEPTH = 32  # products of each that it adds between two barriers
PADDED = DEPTH + 1  # so that two rows lie in different banks
MATMUL_THREADS = TILE * TILE
THREADS = 128
WARPS = THREADS // WARP


@cuda.jit(device=True)
def block_sum(x):
    """Sum of the block's `THREADS` values, for every thread; two barriers."""
    warps = cuda.shared.array(WARPS, np.float64)
    x = warp_sum(x)
    cuda.syncthreads()  # the sums of an earlier call were read
    if cuda.threadIdx.x % WARP == 0:
        warps[cuda.threadIdx.x // WARP] = x
    cuda.syncthreads()  # every warp's sum is there before it is read
    total = np.float64(0.0)
    for warp in range(WARPS):
        total += warps[warp]
    return total


@cuda.jit(device=True)
def block_max(x):
    """Largest of the block's `THREADS` values, for every thread; two barriers."""
    warps = cuda.shared.array(WARPS, np.float64)
    distance = WARP // 2
    while distance > 0:
        x = max(x, cuda.shfl_xor_sync(FULL_WARP, x, distance))
        distance //= 2
    cuda.syncthreads()  # the values of an earlier call were read
    if cuda.threadIdx.x % WARP == 0:
        warps[cuda.threadIdx.x // WARP] = x
    cuda.syncthreads()  # every warp's value is there before it is read
    for warp in range(WARPS):
        x = max(x, warps[warp])
    return x


@cuda.jit
def matmul_kernel(
    x,  # [R, G, K or more] f32 or f64
    w,  # [G, K, C] f32 or f64
    base,  # [R, G, C] f64: is added to the product, if `add`
    add,  # i32
    out,  # out [R, G, C or more] f32 or f64
):
    xs = cuda.shared.array((TILE, PADDED), np.float64)
    ws = cuda.shared.array((TILE, PADDED), np.float64)  # its columns
    group = cuda.blockIdx.z
    i, j = cuda.threadIdx.x // TILE, cuda.threadIdx.x % TILE
    row = cuda.blockIdx.x * TILE + i
    column = cuda.blockIdx.y * TILE + j
    # By these views the loop over k is unrolled; by two indices each it would not be.
    own_row, own_column = xs[i], ws[j]
    total = np.float64(0.0)
    for start in range(0, w.shape[1], DEPTH):
        for k in range(0, DEPTH, TILE):
            xs[i, k + j] = 0.0
            if row < x.shape[0] and start + k + j < w.shape[1]:
                xs[i, k + j] = x[row, group, start + k + j]
            ws[j, k + i] = 0.0
            if start + k + i < w.shape[1] and column < w.shape[2]:
                ws[j, k + i] = w[group, start + k + i, column]
        cuda.syncthreads()  # both tiles are there before they are read
        for k in range(DEPTH):
            total += own_row[k] * own_column[k]
        cuda.syncthreads()  # both were read before the next ones come
    if row < x.shape[0] and column < w.shape[2]:
        if add:
            total += base[row, group, column]
        out[row, group, column] = total


@cuda.jit(device=True)
def normalise(x, weight, eps, out):
    """A warp writes x over its root mean square, times the weight."""
    squares = np.float64(0.0)
    for c in range(cuda.threadIdx.x, weight.size, WARP):
        squares += x[c] * x[c]
    scale = math.sqrt(warp_sum(squares) / weight.size + eps)
    for c in range(cuda.threadIdx.x, weight.size, WARP):
        out[c] = x[c] / scale * weight[c]


@cuda.jit
def rms_norm_kernel(
    x,  # [R, C] f64
    weight,  # [C] f64
    eps,  # f64
    out,  # out [R, C] f64
):
    normalise(x[cuda.blockIdx.x], weight, eps, out[cuda.blockIdx.x])


@cuda.jit(device=True)
def turn(x, first, out, out_first, turns):
    """Rotate pairs (0, 1), (2, 3), ... of x from `first` on, into out."""
    for pair in range(cuda.threadIdx.x, turns.shape[0], cuda.blockDim.x):
        even, odd = x[first + 2 * pair], x[first + 2 * pair + 1]
        cos, sin = turns[pair, 0], turns[pair, 1]
        out[out_first + 2 * pair] = even * cos - odd * sin
        out[out_first + 2 * pair + 1] = even * sin + odd * cos


@cuda.jit
def rope_kernel(
    x,  # [R, G, ...] f64
    first,  # i32: x's column where the roped part begins
    positions,  # [R] i32
    turns,  # [P, W/2, 2] f64: cosine and sine of every position's angles
    out,  # out [R, G, ...] f32 or f64; may be x, if the columns are the same
    out_first,  # i32: out's column of it
):
    row, head = cuda.blockIdx.x, cuda.blockIdx.y
    turn(x[row, head], first, out[row, head], out_first, turns[positions[row]])


@cuda.jit
def swiglu_kernel(
    gates,  # [R, 2F] f64: gates, then what they let through
    out,  # out [R, F] f64
):
    row = cuda.blockIdx.x
    c = cuda.blockIdx.y * cuda.blockDim.x + cuda.threadIdx.x
    if c < out.shape[1]:
        gate = gates[row, c]
        out[row, c] = gate / (1.0 + math.exp(-gate)) * gates[row, out.shape[1] + c]


@cuda.jit
def gather_kernel(
    source,  # [B, S, C] f32 or f64
    rows,  # [B, W] i32
    offset,  # i32: is added to every row
    first,  # i32: out's column where a row begins
    out,  # out [B*W, ...] f64: 0 for a row that is not in source
):
    b, k = cuda.blockIdx.x // rows.shape[1], cuda.blockIdx.x % rows.shape[1]
    row = rows[b, k] + offset
    for c in range(cuda.threadIdx.x, source.shape[2], cuda.blockDim.x):
        x = np.float64(0.0)
        if 0 <= row and row < source.shape[1]:
            x = np.float64(source[b, row, c])
        out[cuda.blockIdx.x, first + c] = x


@cuda.jit
def embed_kernel(
    tokens,  # [B, N] i32: -1 in padding rows
    depths,  # [B, N] i32
    prefix_lens,  # [B] i32
    embedding,  # [V, C] f32 or f64
    x,  # out [B*N, C] f64
    positions,  # out [B*N] i32
):
    b, i = cuda.blockIdx.x // tokens.shape[1], cuda.blockIdx.x % tokens.shape[1]
    token = max(tokens[b, i], 0)
    for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        x[cuda.blockIdx.x, c] = embedding[token, c]
    if cuda.threadIdx.x == 0:
        positions[cuda.blockIdx.x] = prefix_lens[b] + max(depths[b, i], 0)


@cuda.jit
def embed_block_kernel(
    root_tokens,  # [B] i32
    prefix_lens,  # [B] i32
    embedding,  # [V, C] f32 or f64
    mask,  # [C] f64: stands for a token that is to be drafted
    places,  # [K, C] f64: of every row of the block
    last,  # [B, C] f64: what the last settled token says
    x,  # out [B*K, C] f64
    positions,  # out [B*K] i32
):
    size = places.shape[0]
    b, i = cuda.blockIdx.x // size, cuda.blockIdx.x % size
    token = max(root_tokens[b], 0)
    for c in range(cuda.threadIdx.x, x.shape[1], cuda.blockDim.x):
        own = np.float64(embedding[token, c]) if i == 0 else np.float64(mask[c])
        x[cuda.blockIdx.x, c] = own + (places[i, c] + last[b, c])
    if cuda.threadIdx.x == 0:
        positions[cuda.blockIdx.x] = prefix_lens[b] + i


@cuda.jit
def latent_row_kernel(
    x,  # [B*N, Dc + Dr] f64: latent and roped key, neither done yet
    weight,  # [Dc] f64: of the latent's norm
    eps,  # f64
    positions,  # [B*N] i32
    turns,  # [P, Dr/2, 2] f64
    prefix_lens,  # [B] i32
    n_rows,  # [B] i32
    kv_cache,  # out [B, S_max, Dc + Dr] f32
):
    n = x.shape[0] // prefix_lens.size
    b, i = cuda.blockIdx.x // n, cuda.blockIdx.x % n
    if i >= n_rows[b]:  # the whole warp leaves
        return
    row = x[cuda.blockIdx.x]
    out = kv_cache[b, prefix_lens[b] + i]
    normalise(row, weight, eps, out)
    turn(row, weight.size, out, weight.size, turns[positions[cuda.blockIdx.x]])


@cuda.jit
def draft_row_kernel(
    context,  # [B*W, C] f64
    keys_values,  # [B*W, layers, 2, heads, width] f64: keys, then values
    turns,  # [P, width/2, 2] f64
    prefix_lens,  # [B] i32
    counts,  # [B] i32: rows of W that have settled
    contexts,  # out [B, S_max, C] f32
    keys,  # out [layers, B, S_max, heads, width] f32
    values,  # out [layers, B, S_max, heads, width] f32
):
    row, layer = cuda.blockIdx.x, cuda.blockIdx.y
    w = context.shape[0] // prefix_lens.size
    b, k = row // w, row % w
    if k >= counts[b]:
        return
    position = prefix_lens[b] + k
    if layer == 0:
        for c in range(cuda.threadIdx.x, context.shape[1], cuda.blockDim.x):
            contexts[b, position, c] = context[row, c]
    for h in range(keys.shape[3]):
        key = keys[layer, b, position, h]
        turn(keys_values[row, layer, 0, h], 0, key, 0, turns[position])
        for c in range(cuda.threadIdx.x, values.shape[4], cuda.blockDim.x):
            values[layer, b, position, h, c] = keys_values[row, layer, 1, h, c]


@cuda.jit
def draft_attention_kernel(
    qkv,  # [B, K, 3, heads, width] f64: queries, keys and values of the block
    keys,  # [B, S_max, heads, width] f32: of the settled tokens
    values,  # [B, S_max, heads, width] f32
    prefix_lens,  # [B] i32
    scale,  # f64
    out,  # out [B*K, heads, width] f64
):
    weights = cuda.shared.array(0, np.float64)  # dynamic: S_max + K
    sums = cuda.shared.array(THREADS, np.float64)
    size, width = qkv.shape[1], qkv.shape[4]
    b, i, h = cuda.blockIdx.x // size, cuda.blockIdx.x % size, cuda.blockIdx.y
    t, settled = cuda.threadIdx.x, prefix_lens[b]
    query = qkv[b, i, 0, h]
    top = np.float64(-math.inf)
    for key in range(t, settled + size, THREADS):
        score = np.float64(0.0)
        if key < settled:
            for c in range(width):
                score += query[c] * keys[b, key, h, c]
        else:
            for c in range(width):
                score += query[c] * qkv[b, key - settled, 1, h, c]
        weights[key] = score * scale
        top = max(top, score * scale)
    top = block_max(top)
    total = np.float64(0.0)
    for key in range(t, settled + size, THREADS):
        weights[key] = math.exp(weights[key] - top)
        total += weights[key]
    total = block_sum(total)  # its barrier also shows the weights to all

    # A column's keys go to the threads t, t + width, ... of the block.
    threads = THREADS // width * width
    c = t % width
    share = np.float64(0.0)
    if t < threads:
        for key in range(t // width, settled + size, threads // width):
            if key < settled:
                share += weights[key] * values[b, key, h, c]
            else:
                share += weights[key] * qkv[b, key - settled, 2, h, c]
    sums[t] = share
    cuda.syncthreads()  # all shares are there before they are added
    if t < width:
        share = np.float64(0.0)
        for other in range(t, threads, width):
            share += sums[other]
        out[cuda.blockIdx.x, h, t] = share / total


@cuda.jit
def sample_kernel(
    logits,  # [B, N, V] f32
    n_rows,  # [B] i32
    depths,  # [B, N] i32
    prefix_lens,  # [B] i32
    coins,  # [B, P] f64: a number of 0 … 1 for every position
    temperature,  # f64
    tokens,  # out [B, N] i32: -1 for padding rows and bad ones
):
    shares = cuda.shared.array(0, np.float64)  # dynamic: V
    n = logits.shape[1]
    b, i = cuda.blockIdx.x // n, cuda.blockIdx.x % n
    if i >= n_rows[b]:  # the whole block leaves
        if cuda.threadIdx.x == 0:
            tokens[b, i] = -1
        return
    row = logits[b, i]
    top = np.float64(-math.inf)
    for v in range(cuda.threadIdx.x, row.size, THREADS):
        top = max(top, np.float64(row[v]))
    top = block_max(top)
    for v in range(cuda.threadIdx.x, row.size, THREADS):
        # The difference first: a low temperature must not overflow to inf - inf.
        shares[v] = math.exp((np.float64(row[v]) - top) / temperature)
    cuda.syncthreads()  # the shares are there before they are added
    if cuda.threadIdx.x > 0:
        return
    # One after the other, as the reference adds them: a sum decides where a token ends.
    total = np.float64(0.0)
    for v in range(row.size):
        total += shares[v]
        shares[v] = total
    if total != total:  # NaN: the row holds NaN, +inf or only -inf
        tokens[b, i] = -1
        return
    position = min(prefix_lens[b] + depths[b, i], coins.shape[1] - 1)
    coin = coins[b, position] * total
    token = 0
    while token < row.size - 1 and shares[token] <= coin:
        token += 1
    tokens[b, i] = token
