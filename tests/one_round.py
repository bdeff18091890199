"""One small round of every kernel, in groups, each stage held to its reference.

For compute-sanitizer (`under_sanitizer.py`). Inputs are as small as every branch of the
kernels allows. Unlike in other tests, outputs are not filled before a kernel runs:
initcheck is to see what stays unwritten.
"""

import itertools
from unittest import mock

import numpy as np
import test_model_device
import test_step
import test_verify_attn_wgmma
from numba import cuda
from random_trees import random_tree
from test_verify_attn import SCALE, random_case
from test_verify_attn_bf16 import assert_close, bf16_case

from ddtree_numba import bf16, reference
from ddtree_numba.kernels import verify_attn as attention_module
from ddtree_numba.kernels import verify_attn_mma
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import SMALL, tree_build
from ddtree_numba.kernels.verify_attn import verify_attn

INF, NAN = np.inf, np.nan
FLOATS = {
    "float32": lambda x: x,
    "bfloat16": bf16.from_float32,
    "float16": lambda x: x.astype(np.float16),
}


def same(what: str, found: object, expected: object, tolerance: float = 0.0) -> None:
    np.testing.assert_allclose(found, expected, atol=tolerance, rtol=0, err_msg=what)


# -------------------------------------------------------------------- before the target


def rows_of_logits(vocab: int) -> np.ndarray:
    """Plain rows, rows full of ties, and rows that are no distribution: [2, 5, V]."""
    logits = np.random.default_rng(vocab).standard_normal((2, 5, vocab), np.float32)
    logits[0, 1] = 1  # more ties than are sorted at a time
    logits[0, 2, 5:] = -INF
    logits[0, 3] = np.arange(vocab) % 3
    logits[0, 4, vocab // 2] = NAN
    logits[1, 3, -1] = INF
    logits[1, 4] = -INF
    return logits


def select(executor: str) -> None:
    """`topk` and `argmax`."""
    # Loads of 16 bytes, and one by one.
    for (name, cast), vocab in itertools.product(FLOATS.items(), (5000, 301)):
        logits = cast(rows_of_logits(vocab))
        how = {"executor": executor, "check": False}
        for k, version in itertools.product((3, 38, 290), ("simple", "chunks")):
            found = topk(logits, k, version=version, **how)
            expected = reference.topk(logits, k, check=False)
            what = f"topk {version}, {name}, V {vocab}, k {k}:"
            same(f"{what} log_probs", found[0], expected[0], 2e-6)
            same(f"{what} token_ids", found[1], expected[1])
        for n_rows in (None, np.array([5, 2], np.int32)):
            expected = reference.argmax(logits, n_rows, check=False)
            same(f"argmax {name}", argmax(logits, n_rows, **how), expected)


def tables() -> dict[str, tuple[np.ndarray, list[int]]]:
    """Log-probs [2, L, K] and budgets of both requests."""
    rng = np.random.default_rng(1)
    falling = -np.sort(rng.exponential(size=(2, 5, 40)).astype(np.float32))
    few = falling.copy()
    few[:, 2, 3:] = few[0, 3:] = -INF
    odd = falling.copy()
    odd[0, 1, 7], odd[1] = NAN, odd[1, :, ::-1]  # NaN; what no topk gives
    deep = -np.sort(rng.exponential(size=(2, 50, 8)).astype(np.float32))
    flat = deep[:, :43] * np.float32(0.01)  # as deep as levels go
    return {
        "plain": (falling, [37, 20]),
        "unaligned": (np.ascontiguousarray(falling[:, :, :39]), [64, 1]),
        "ties": (np.zeros_like(falling), [64, 9]),
        "rounded": (np.round(falling * 4) / 4, [64, 37]),
        "few": (few, [50, 50]),
        "scarce": (np.ascontiguousarray(few[:, 2:4, :4]), [64, 20]),
        "odd": (odd, [40, 40]),
        "none": (falling, [0, 12]),
        "deep": (deep * np.float32(0.1), [60, 60]),
        "flat": (flat, [64, 130]),
        "large": (few, [300, 130]),
        "largest": (falling, [600, 513]),
    }


def build(executor: str) -> None:
    """`tree_build`, `tree_accept` and `kv_compact`."""
    roots = np.array([7, 9], np.int32)
    for name, (log_probs, budgets) in tables().items():
        ids = np.random.default_rng(2).integers(0, 99, log_probs.shape, np.int32)
        most = max(budgets)
        # All rows, padding rows too, and one budget for both requests.
        for n_draft_nodes, room, root_tokens in (
            (np.array(budgets, np.int32), most + 3, roots),
            (most, most, None),
        ):
            how = {"max_draft_nodes": room, "check": False, "root_tokens": root_tokens}
            given = log_probs, ids, n_draft_nodes
            expected = reference.tree_build(*given, **how)
            for version in ("simple", "small", "parallel"):
                if version != "small" or room <= SMALL:
                    tree = tree_build(*given, version=version, executor=executor, **how)
                    for field, x in vars(tree).items():
                        what = f"tree_build {version}, {name}: {field}"
                        same(what, x, getattr(expected, field))
    for seed in range(4):
        accept(executor, np.random.default_rng(seed), broken=seed > 1)


def accept(executor: str, rng: np.random.Generator, broken: bool) -> None:
    """Accept random trees' paths, and move their rows in caches of random numbers."""
    tree = random_tree(rng, 40, 20, depth_bias=0.5)
    if broken:
        tree.next_sibling[:, 3], tree.next_token[::2, 2] = 1, 20
    choices = rng.integers(-1, 3, (40, 20), np.int32)
    for max_depth in (None, 3):
        accepted = tree_accept(tree, choices, max_depth=max_depth, executor=executor)
        expected = reference.tree_accept(tree, choices, max_depth=max_depth)
        for field, x in accepted._asdict().items():
            same(f"tree_accept {field}", x, getattr(expected, field))
    lens = rng.integers(0, 30, 40, np.int32)
    moves = lens, accepted.rows, accepted.accept_len
    for shape, dtype in (((40, 52, 9), np.float32), ((2, 40, 52, 130), np.uint16)):
        cache = rng.integers(0, 99, shape).astype(dtype)
        moved, expected = cache.copy(), cache.copy()
        found = kv_compact(moved, *moves, executor=executor)
        same("kv_compact lengths", found, kv_compact(expected, *moves))
        same("kv_compact rows", moved, expected)


# ---------------------------------------------------------------------------- attention


def attend(case: tuple, d_latent: int, **how: object) -> None:
    """`verify_attn` of a case in float32's tolerances."""
    form = {"sm_scale": SCALE, "d_latent": d_latent}
    found = verify_attn(*case, **form, **how)
    for x, expected in zip(found, reference.verify_attn(*case, **form), strict=True):
        same(f"verify_attn, {how}", x, expected, 3e-6)


def attention(executor: str) -> None:
    """`verify_attn` in float32 sums: "simple", "split", and what merges splits."""
    rng = np.random.default_rng(3)
    # Columns of values and in all; the second rows are not aligned, and the third have
    # values of two panels. The last has more keys than are scored at a time.
    for d_latent, d_rope, n, heads, prefix_lens in (
        (48, 16, 37, 3, [70, 0]),
        (47, 20, 5, 2, [110, 3]),
        (516, 8, 3, 1, [5]),
        (16, 8, 2, 1, [1030]),
    ):
        case = random_case(rng, n, heads, d_latent, d_rope, prefix_lens)
        q, cache, lens, visibility = case
        visibility[0, -1] = 0  # padding
        cache[0, lens[0] + 1] = NAN  # of a row that some see
        for cast in (FLOATS["float32"], FLOATS["bfloat16"]):
            given = cast(q), cast(cache), lens, visibility
            how = {"executor": executor}
            attend(given, d_latent, version="simple", **how)
            for n_splits in (None, 1, 3, 30):
                how |= {"version": "split", "n_splits": n_splits}
                attend(given, d_latent, **how)


def attend_bf16(case: tuple, version: str, executor: str, **how: object) -> None:
    """`verify_attn` on tensor cores, and again with a NaN that some rows see."""
    form = {"sm_scale": SCALE, "d_latent": 512, "version": version} | how
    assert_close(verify_attn(*case, executor=executor, **form), case)
    q, cache, lens, visibility = case
    cache, visibility = cache.copy(), visibility.copy()
    cache[0, lens[0] + 1, 511] = bf16.from_float32(np.float32([NAN]))[0]
    visibility[0, 2:3] = 0
    found = verify_attn(q, cache, lens, visibility, executor=executor, **form)
    expected = reference.verify_attn(
        q, cache, lens, visibility, sm_scale=SCALE, d_latent=512
    )
    same(f"verify_attn {version} with NaN, {how}: lse", found[1], expected[1], 1e-4)
    np.testing.assert_array_equal(np.isnan(found[0]), np.isnan(expected[0]))


def mma(executor: str) -> None:
    """`verify_attn` with `mma.sync`, in every form; on NumPy, which has none, once."""
    ways = [*itertools.product(verify_attn_mma.FORMS, (1, 3))]
    for form, n_splits in ways if executor != "numpy" else ways[:1]:
        with mock.patch.object(verify_attn_mma, "form_for", lambda at, form=form: form):
            for n, heads, prefix_lens in ((5, 13, [70]), (3, 2, [45, 0])):
                case = bf16_case(n, n, heads, prefix_lens)
                attend_bf16(case, "mma", executor, n_splits=n_splits)


def wgmma(executor: str) -> None:
    """`verify_attn` with `wgmma`, on many blocks and few, sharing work in every way."""
    for processors, n, heads, prefix_lens, n_splits in (
        (132, 5, 13, [70, 0], None),
        (132, 3, 2, [300], 3),
        (3, 3, 64, [1200], None),  # a row tile in parts that stay in registers
        (6, 1, 64, [2500], None),  # … and in more parts
        (3, 5, 64, [2000], None),  # a round of whole row tiles, and a rest that is cut
        (3, 2, 64, [0, 200, 700, 900], None),  # all of the line is cut
        (3, 2, 64, [100] * 4, None),  # whole row tiles, the last round not full
        (40, 1, 1, [65] * 34, None),  # more requests than lanes
    ):
        case = bf16_case(n, n, heads, prefix_lens)
        for exact_max in (False, True):
            with mock.patch.object(
                attention_module, "_multiprocessors", lambda at, n=processors: n
            ):
                how = {"n_splits": n_splits, "exact_max": exact_max}
                attend_bf16(case, "wgmma", executor, **how)
    test_verify_attn_wgmma.test_references_follow_scores_that_grow_from_tile_to_tile(
        executor, False
    )


# ----------------------------------------------------------------- models, whole rounds


def model(executor: str) -> None:
    """The small model's kernels, by a round of its passes."""
    tests = test_model_device
    with mock.patch.object(tests, "SMALL", tests.TINY):
        tests.test_a_round_of_passes_computes_what_the_numpy_model_does(executor)
    tests.test_a_sample_is_the_references(executor, 0.7)
    tests.test_a_sample_of_what_is_no_distribution_is_none(executor)


def graph(executor: str) -> None:
    """A round as plain calls, and captured."""
    assert executor == "gpu"
    test_step.test_replayed_rounds_are_plain_rounds(cuda.to_device, 3)


GROUPS = {f.__name__: f for f in (wgmma, select, build, mma, attention, model, graph)}
