"""A tiled bfloat16 matrix product on tensor cores: every instruction of `ptx` at work.

A block computes 64 x 64 sums, four warps 32 x 32 each. While it multiplies one pair of
tiles, the next pair is on its way into the other half of shared memory::

    step      0            1            2
    wait      tiles 0      tiles 1      tiles 2      arrived, for this lane
    barrier   ---------------------------------      … for all; and all are done with
    request   tiles 1      tiles 2      -              the tiles of the step before
    multiply  tiles 0      tiles 1      tiles 2

Swizzle: a row of a tile is cut in chunks of 16 bytes, and chunk c of row r stands at
place ``c ^ f(r)``, with f such that 8 rows of the same chunk (what `ldmatrix` reads at
once) lie in 8 different groups of 4 banks.
"""

import numpy as np
from numba import cuda, float32, uint16

from ddtree_numba.kernels.ptx import (
    cp_async_16_zfill,
    cp_async_commit_group,
    cp_async_wait_group,
    ldmatrix_x4,
    ldmatrix_x4_trans,
    mma_m16n8k16_bf16,
)

TILE_M, TILE_N, TILE_K = 64, 64, 32
THREADS = 128


@cuda.jit(device=True, inline="always")
def a_place(row, column):
    """Column of a 64-byte row (4 chunks); two rows fill the 32 banks once."""
    return column ^ (row >> 1 & 3) << 3


@cuda.jit(device=True, inline="always")
def b_place(row, column):
    """Column of a 128-byte row (8 chunks)."""
    return column ^ (row & 7) << 3


@cuda.jit(device=True, inline="always")
def request_tiles(a, b, a_tile, b_tile, first_row, first_column, first_k):
    """Ask for a [64, 32] tile of `a` and a [32, 64] of `b`, zero past the edges."""
    for n in range(TILE_M * TILE_K // 8 // THREADS):
        chunk = n * THREADS + cuda.threadIdx.x
        row, k = chunk // (TILE_K // 8), chunk % (TILE_K // 8) * 8
        inside = first_row + row < a.shape[0] and first_k + k < a.shape[1]
        to = (row, a_place(row, k))
        n_bytes = 16 if inside else 0
        cp_async_16_zfill(a_tile, to, a, (first_row + row, first_k + k), n_bytes)
    for n in range(TILE_K * TILE_N // 8 // THREADS):
        chunk = n * THREADS + cuda.threadIdx.x
        k, column = chunk // (TILE_N // 8), chunk % (TILE_N // 8) * 8
        inside = first_k + k < b.shape[0] and first_column + column < b.shape[1]
        to = (k, b_place(k, column))
        n_bytes = 16 if inside else 0
        cp_async_16_zfill(b_tile, to, b, (first_k + k, first_column + column), n_bytes)
    cp_async_commit_group()


@cuda.jit
def mma_matmul_kernel(
    a,  # [M, K] u16, bf16 bits; K a multiple of 8, rows start at multiples of 16 bytes
    b,  # [K, N] u16, bf16 bits; N a multiple of 8
    out,  # out [M, N] f32
):
    a_tiles = cuda.shared.array((2, TILE_M, TILE_K), uint16, alignment=16)
    b_tiles = cuda.shared.array((2, TILE_K, TILE_N), uint16, alignment=16)
    sums = cuda.local.array((2, 4, 4), float32)  # 16-row, 8-column part; fragment
    lane, warp = cuda.threadIdx.x % 32, cuda.threadIdx.x // 32
    first_row, first_column = cuda.blockIdx.x * TILE_M, cuda.blockIdx.y * TILE_N
    warp_row, warp_column = warp // 2 * 32, warp % 2 * 32  # in the block's 64 x 64
    for i in range(2):
        for j in range(4):
            for n in range(4):
                sums[i, j, n] = float32(0)

    request_tiles(a, b, a_tiles[0], b_tiles[0], first_row, first_column, 0)
    for step in range((a.shape[1] + TILE_K - 1) // TILE_K):
        cp_async_wait_group(0)
        # This step's tiles are there for all lanes; and nobody reads the others now.
        cuda.syncthreads()
        a_tile, b_tile = a_tiles[step & 1], b_tiles[step & 1]
        next_k = (step + 1) * TILE_K
        if next_k < a.shape[1]:
            other = step + 1 & 1
            request_tiles(
                a, b, a_tiles[other], b_tiles[other], first_row, first_column, next_k
            )
        for k in range(0, TILE_K, 16):
            # Lane l names row l % 16 of a 16 x 16 part, its left or its right half.
            b_row, half = k + lane % 16, lane // 16 * 8
            left_column = b_place(b_row, warp_column + half)
            right_column = b_place(b_row, warp_column + 16 + half)
            left = ldmatrix_x4_trans(b_tile, (b_row, left_column))
            right = ldmatrix_x4_trans(b_tile, (b_row, right_column))
            for i in range(2):
                row = warp_row + i * 16 + lane % 16
                part = ldmatrix_x4(a_tile, (row, a_place(row, k + half)))
                mma_m16n8k16_bf16(sums[i, 0], part, left[:2])
                mma_m16n8k16_bf16(sums[i, 1], part, left[2:])
                mma_m16n8k16_bf16(sums[i, 2], part, right[:2])
                mma_m16n8k16_bf16(sums[i, 3], part, right[2:])

    for i in range(2):
        for j in range(4):
            for n in range(4):
                row = first_row + warp_row + i * 16 + n // 2 * 8 + lane // 4
                column = first_column + warp_column + j * 8 + lane % 4 * 2 + n % 2
                if row < out.shape[0] and column < out.shape[1]:
                    out[row, column] = sums[i, j, n]


def grid(m: int, n: int) -> tuple[int, int]:
    """Blocks of 64 x 64 that cover an [m, n] product."""
    return -(-m // TILE_M), -(-n // TILE_N)


def expected(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The product in float64, of bf16 bits."""
    wide = [(x.astype(np.uint32) << 16).view(np.float32) for x in (a, b)]
    return wide[0].astype(np.float64) @ wide[1].astype(np.float64)
