"""Every kernel of the package in the emulator: no race, and one result in any order.

A barrier that some lanes miss, an index outside its array and memory that nothing was
written to would raise.
"""

import importlib
import pkgutil

import numpy as np
import pytest

import ddtree_numba.emulator
from ddtree_numba import kernels
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.tree import DraftTree

ORDERS = ("forward", "reverse", "shuffled")
PARENTS = [[-1, 0, 0, 1, 1, 4, -1], [-1, 0, 1, 2, 0, 4, 5]]
N_ROWS = [6, 7]


def small_tree():
    return DraftTree.from_parents(PARENTS, n_rows=N_ROWS)


def run_topk(rng, executor="emulator", **options):
    logits = rng.integers(-40, 40, (2, 2, 300)).astype(np.float16)  # with ties
    logits[0, 1, ::3] = -np.inf
    return topk(logits, 20, executor=executor, **options)


def run_chunks_topk(rng, executor="emulator"):
    return run_topk(rng, executor, version="chunks")


def run_argmax(rng, executor="emulator"):
    logits = rng.integers(-40, 40, (2, 3, 200)).astype(np.float32)
    return [argmax(logits, [3, 2], executor=executor)]


def run_tree_build(rng, executor="emulator", version="simple"):
    log_probs = -np.sort(rng.integers(1, 9, (2, 4, 8)), axis=2).astype(np.float32)
    tokens = rng.integers(0, 99, log_probs.shape).astype(np.int32)
    budgets = [40, 11]
    tree = tree_build(log_probs, tokens, budgets, version=version, executor=executor)
    return vars(tree).values()


def run_small_tree_build(rng, executor="emulator"):
    return run_tree_build(rng, executor, version="small")


def run_parallel_tree_build(rng, executor="emulator"):
    return run_tree_build(rng, executor, version="parallel")


def run_tree_accept(rng, executor="emulator"):
    tokens = rng.integers(0, 3, (2, 7)).astype(np.int32)
    return tree_accept(small_tree(), tokens, executor=executor)


def run_kv_compact(rng, executor="emulator"):
    cache = rng.standard_normal((2, 2, 20, 40)).astype(np.float32)
    rows = np.array([[0, 2, 4, 5], [0, 1, 2, -1]], np.int32)
    lens = kv_compact(cache, [9, 12], rows, [4, 3], executor=executor)
    return cache, lens


def attention(rng, executor, **options):
    visibility = small_tree().visibility[:1]  # with a padding row
    q = rng.standard_normal((1, 7, 2, 24)).astype(np.float32)
    cache = rng.standard_normal((1, 45, 24)).astype(np.float32)
    cache[0, 36:] = np.nan  # never read
    return verify_attn(
        q, cache, [30], visibility, sm_scale=0.2, d_latent=20,
        executor=executor, **options,
    )  # fmt: skip


def run_simple_verify_attn(rng, executor="emulator"):
    return attention(rng, executor, version="simple")


def run_split_verify_attn(rng, executor="emulator"):
    return attention(rng, executor, version="split", n_splits=2)


STAGES = {
    run_topk: {"topk_kernel"},
    run_chunks_topk: {"topk_scan_kernel", "topk_pick_kernel"},
    run_argmax: {"argmax_scan_kernel", "argmax_pick_kernel"},
    run_tree_build: {"tree_build_kernel"},
    run_small_tree_build: {"tree_build_small_kernel"},
    run_parallel_tree_build: {"tree_build_parallel_kernel"},
    run_tree_accept: {"tree_accept_kernel"},
    run_kv_compact: {"kv_compact_kernel"},
    run_simple_verify_attn: {"simple_kernel"},
    run_split_verify_attn: {"split_kernel", "merge_kernel"},
}


# Files of kernels that have tests of their own for races and lane orders.
ELSEWHERE = {"model_ops", "verify_attn_wgmma"}


def kernels_of_the_package():
    """The names of all kernels in ddtree_numba.kernels, but for those elsewhere."""
    found = set()
    for module in pkgutil.iter_modules(kernels.__path__, kernels.__name__ + "."):
        if module.name.rpartition(".")[2] in ELSEWHERE:
            continue
        for value in vars(importlib.import_module(module.name)).values():
            options = getattr(value, "targetoptions", {"device": True})
            if hasattr(value, "py_func") and not options.get("device"):
                found.add(value.py_func.__name__)
    return found


def test_no_kernel_is_left_out():
    assert kernels_of_the_package() == set().union(*STAGES.values())


@pytest.fixture
def run(monkeypatch):
    """A stage's outputs in a lane order, and the reports of its launches."""
    reports = []
    options = {"trace": True}

    def traced(*args, **given):
        reports.append(emulate(*args, **given, **options))

    def run_stage(stage, order):
        reports.clear()
        options["order"] = order
        outputs = [np.array(x) for x in stage(np.random.default_rng(0))]
        return outputs, list(reports)

    monkeypatch.setattr(ddtree_numba.emulator, "emulate", traced)
    return run_stage


@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__[4:])
def test_no_race_and_the_same_result_in_any_order(stage, run):
    results = {}
    for order in ORDERS:
        results[order], reports = run(stage, order)
        assert {report.kernel for report in reports} == STAGES[stage]
        assert [str(race) for report in reports for race in report.races] == []
    for order in ORDERS[1:]:
        for got, forward in zip(results[order], results["forward"], strict=True):
            assert np.array_equal(got, forward, equal_nan=got.dtype.kind == "f")


@pytest.mark.gpu
@pytest.mark.parametrize("stage", STAGES, ids=lambda stage: stage.__name__[4:])
def test_a_gpu_gives_the_same_result(stage):
    emulated = stage(np.random.default_rng(0))
    for got, expected in zip(
        stage(np.random.default_rng(0), "gpu"), emulated, strict=True
    ):
        if np.issubdtype(expected.dtype, np.floating):
            # A GPU fuses products into sums and has an exp2 and a log of its own: a
            # few roundings of 6e-8.
            np.testing.assert_allclose(got, expected, rtol=2e-6, atol=2e-6)
        else:
            np.testing.assert_array_equal(got, expected)
