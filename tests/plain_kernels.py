"""The plain kernels, launched by whatever `launch` is given: no warp operations here.

A script of its own, so that Numba's simulator can run it: that has to be switched on
before Numba is imported (`test_simulator.py`).
"""

from collections.abc import Callable

import numpy as np
from numba import cuda, float32

from ddtree_numba import refs
from ddtree_numba.backend import to_float32
from ddtree_numba.kernels import kv_compact, tree_accept

BLOCK = 8


@cuda.jit
def block_sums_kernel(
    x,  # [n] f32 or u16 (bf16 bits), n a multiple of BLOCK
    sums,  # out [n / BLOCK] f32
    total,  # in and out [1] f32
):
    halves = cuda.shared.array(BLOCK, float32)
    t = cuda.threadIdx.x
    halves[t] = to_float32(x[cuda.grid(1)])
    width = BLOCK // 2
    while width > 0:
        cuda.syncthreads()  # the wider sums are written
        if t < width:
            halves[t] += halves[t + width]
        width //= 2
    if t == 0:
        sums[cuda.blockIdx.x] = halves[0]
        cuda.atomic.add(total, 0, halves[0])


def accept(case: refs.Case, launch: Callable) -> dict:
    """tree_accept's outputs for a golden case."""
    a = case.arguments
    found = {name: np.full_like(x, -99) for name, x in case.expected.items()}
    batch = len(a["n_rows"])
    names = ("token_ids", "next_token", "next_sibling", "n_rows", "target_tokens")
    inputs = [np.array(a[name]) for name in names]
    outputs = [found[name] for name in ("rows", "accept_len", "bonus", "status")]
    threads = tree_accept.THREADS
    grid = -(-batch // threads)
    launch(tree_accept.tree_accept_kernel, grid, threads, *inputs, *outputs)
    return found


def compact(case: refs.Case, launch: Callable) -> dict:
    """kv_compact's outputs for a golden case."""
    a = case.arguments
    cache = np.array(a["kv_cache"])
    layers = cache if cache.ndim == 4 else cache[None]
    words = layers.view(f"u{cache.itemsize}")
    inputs = [np.array(a[name]) for name in ("prefix_lens", "rows", "accept_len")]
    lens = np.full_like(inputs[0], -99)
    grid = (layers.shape[1], layers.shape[0], 1)
    launch(kv_compact.kv_compact_kernel, grid, 8, *inputs, words, lens)
    return {"prefix_lens": lens, "kv_cache": cache}


def check_all(launch: Callable) -> int:
    """Hold every plain kernel to the golden cases; return how many there were."""
    runs = {"tree_accept": accept, "kv_compact": compact}
    names = [
        name
        for name, recipe in refs.RECIPES.items()
        if recipe.stage in runs and not recipe.large
    ]
    for name in names:
        case = refs.load(refs.data_path("refs", f"{name}.kdtr"))
        found = runs[case.stage](case, launch)
        wrong = refs.differences(case, found)
        assert not wrong, (name, wrong)

    x = np.arange(4 * BLOCK, dtype=np.float32)
    for stored in (x, (x.view(np.uint32) >> 16).astype(np.uint16)):
        sums, total = np.zeros(4, np.float32), np.zeros(1, np.float32)
        launch(block_sums_kernel, 4, BLOCK, stored, sums, total)
        assert sums.tolist() == x.reshape(4, BLOCK).sum(axis=1).tolist()
        assert total.tolist() == [x.sum()]
    return len(names)


if __name__ == "__main__":
    from numba import config

    assert config.ENABLE_CUDASIM
    count = check_all(lambda kernel, grid, block, *args: kernel[grid, block](*args))
    print(f"{count} golden cases under Numba's simulator")
