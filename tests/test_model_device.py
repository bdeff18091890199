"""The small model's kernels compute what its NumPy text does, and so do its passes."""

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from numba import float32, float64, int32
from numpy.testing import assert_allclose, assert_array_equal
from test_model import SMALL, random_batch

from ddtree_numba import backend, decode, reference, vectorised
from ddtree_numba.backend import place
from ddtree_numba.decode import MODES, Generation, generate
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels import model_ops as ops
from ddtree_numba.model import Model, ModelConfig, device, forward, load_model
from ddtree_numba.model.device import DeviceModel, draw_coins
from ddtree_numba.model.text import held_out_prompts
from ddtree_numba.tree import DraftTree

TINY = ModelConfig(
    n_layers=2,
    d_model=16,
    n_heads=2,
    d_ffn=20,
    d_latent=16,
    d_rope=4,
    d_nope=6,
    d_value=5,
    feature_layers=(1, 2),
    draft_layers=1,
    draft_heads=2,
    block=4,
    draft_temperature=1.25,
)
# Sums of float64 in another order.
SAME = {"rtol": 1e-12, "atol": 1e-12}
# Cache rows and logits are float32, and attention sums in float32: a few roundings of
# numbers up to 10, and what the layers behind make of them.
CLOSE = {"rtol": 1e-5, "atol": 6e-5}


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).normal(size=shape)


def run(executor, kernel, grid, block, *args, out=None, **how):
    """Launch with NumPy arrays; the argument at index `out` as the kernel left it."""
    at = place(executor)
    placed = [at.put(x) if isinstance(x, np.ndarray) else x for x in args]
    at.launch(kernel, grid, block, *placed, **how)
    return at.give(placed[out])


# --------------------------------------------------------------------------- kernels


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("add", [0, 1])
def test_a_matrix_product_of_every_group(kernel_executor, add, dtype):
    x, w = normal(17, 2, 23).astype(dtype), normal(2, 19, 18).astype(np.float32)
    base, out = normal(17, 2, 18), np.full((17, 2, 21), 7.0)
    found = run(
        *(kernel_executor, ops.matmul_kernel, (2, 2, 2), ops.MATMUL_THREADS),
        *(x, w, base, np.int32(add), out),
        out=4,
    )
    x, w = x.astype(np.float64), w.astype(np.float64)
    expected = np.einsum("rgk,gkc->rgc", x[:, :, :19], w) + add * base
    assert_allclose(found[:, :, :18], expected, **SAME)
    assert (found[:, :, 18:] == 7).all(), "columns that the product does not have"


def test_a_product_does_not_depend_on_how_many_rows_there_are(kernel_executor):
    x, w = normal(20, 1, 40), normal(1, 40, 16)

    def product(rows):
        args = x[:rows], w, x, np.int32(0), np.empty((rows, 1, 16))
        tiles = (-(-rows // ops.TILE), 1, 1)
        kernel = ops.matmul_kernel
        return run(kernel_executor, kernel, tiles, ops.MATMUL_THREADS, *args, out=4)

    assert_array_equal(product(20)[:3], product(3))


def test_the_norm_of_rows(kernel_executor):
    x, weight = normal(3, 150), normal(130)
    out = np.empty((3, 130))
    found = run(
        *(kernel_executor, ops.rms_norm_kernel, 3, ops.WARP),
        *(x, weight, np.float64(1e-6), out),
        out=3,
    )
    expected = forward._rms_norm(x[:, :130], weight, 1e-6)
    assert_allclose(found, expected, **SAME)


def test_rope_in_place_and_into_other_columns(kernel_executor):
    x, positions = normal(5, 3, 10), np.array([0, 9, 1, 40, 7], np.int32)
    turns = forward.rope_turns(np.arange(41), 6, 100.0)
    expected = forward._rotate(x[:, :, 2:8], positions[:, None], 100.0)
    columns = [(2, x.copy(), 2), (2, normal(5, 3, 8).astype(np.float32), 1)]
    for first, out, out_first in columns:
        source = out if out.dtype == x.dtype else x
        at = place(kernel_executor)
        placed = at.put(source)
        target = placed if out is source else at.put(out)
        at.launch(
            *(ops.rope_kernel, (5, 3), ops.WARP, placed, np.int32(first)),
            *(at.put(positions), at.put(turns), target, np.int32(out_first)),
        )
        found = at.give(target)
        roped = found[:, :, out_first : out_first + 6]
        assert_allclose(roped, expected, rtol=1e-6 if out is not source else 1e-14)
        outside = np.delete(found, range(out_first, out_first + 6), axis=2)
        kept = np.delete(out, range(out_first, out_first + 6), axis=2)
        assert_array_equal(outside, kept)


def test_no_barrier_of_the_matrix_product_is_missing():
    depth = ops.DEPTH + 5  # two tiles
    x, w, out = normal(4, 1, depth), normal(1, depth, 5), np.empty((4, 1, 5))
    report = emulate(
        *(ops.matmul_kernel, (1, 1, 1), ops.MATMUL_THREADS, x, w, x, np.int32(0), out),
        order="shuffled",
        trace=True,
    )
    assert report.races == []


def test_a_sample_of_what_is_no_distribution_is_none(kernel_executor):
    rows = np.full((4, 40), -np.inf, np.float32)
    rows[:3, 7] = 0, np.nan, np.inf
    args = (
        *(rows[None], np.array([4], np.int32), np.zeros((1, 4), np.int32)),
        *(np.zeros(1, np.int32), np.full((1, 1), 0.5), np.float64(0.7)),
    )
    found = run(
        *(kernel_executor, ops.sample_kernel, 4, ops.THREADS),
        *(*args, np.empty((1, 4), np.int32)),
        out=6,
        dynamic_shared=8 * 40,
    )
    assert found.tolist() == [[7, -1, -1, -1]]


@pytest.mark.parametrize("temperature", [0.7, 1e-9, 5e-324])
def test_a_sample_is_the_references(kernel_executor, temperature):
    logits = (normal(2, 5, 40) * 3).astype(np.float32)
    tree = DraftTree.from_parents([[-1, 0, 0, 1, 3]] * 2, n_rows=[5, 3])
    prefix_lens = np.array([6, 2], np.int32)
    args = (
        *(logits, tree.n_rows, tree.depths, prefix_lens),
        *(
            draw_coins([7, 3], 4, 5),
            np.float64(temperature),
            np.empty((2, 5), np.int32),
        ),
    )
    found = run(
        *(kernel_executor, ops.sample_kernel, 10, ops.THREADS, *args),
        out=6,
        dynamic_shared=8 * 40,
    )
    positions = tree.positions(prefix_lens)
    expected = reference.sample(logits, temperature, positions, 5, tree.n_rows)
    assert_array_equal(found, expected)


# ------------------------------------------------------------------------- the model


@pytest.fixture(params=["emulator", pytest.param("gpu", marks=pytest.mark.gpu)])
def executor(request, monkeypatch):
    """Where the model runs; in the emulator without attention, which is tested."""

    def numpy_attention(*args, executor, **form):
        assert executor == request.param
        return vectorised.verify_attn(*args, **form)

    if request.param == "emulator":
        monkeypatch.setattr(device, "verify_attn", numpy_attention)
        monkeypatch.setattr(ops, "DEPTH", ops.TILE)  # the tiny model fills no more
    return request.param


def to_host(x):
    return x if isinstance(x, np.ndarray) else x.copy_to_host()


def assert_same_caches(found, expected):
    assert_array_equal(to_host(found.prefix_lens), expected.prefix_lens)
    for name in ("kv", "context", "keys", "values"):
        x, y = to_host(getattr(found, name)), getattr(expected, name)
        assert_allclose(x.reshape(y.shape), y, **CLOSE)


def test_a_round_of_passes_computes_what_the_numpy_model_does(executor):
    config, lengths = (TINY, [6, 3]) if executor == "emulator" else (SMALL, [300, 90])
    model = Model.random(1, config)
    mine = DeviceModel(model, executor)
    prompts, tree = random_batch(lengths, [5, 3])
    cache, expected = (m.prefill(prompts, max(lengths) + 6) for m in (mine, model))
    assert_same_caches(cache, expected)

    roots = tree.token_ids[:, 0]
    drafted = to_host(mine.draft(cache, mine.at.put(roots)))
    assert_allclose(drafted, decode.draft_logits(model, expected, roots), **CLOSE)

    names = vars(tree)
    placed = DraftTree(**{name: mine.at.put(x) for name, x in names.items()})
    logits = to_host(mine.verify(cache, placed))
    scored = model.verify(expected, tree, executor="numpy")
    live = np.arange(5) < tree.n_rows[:, None]
    assert_allclose(logits[live], scored[live], **CLOSE)

    rows = np.array([[0, 1, -1], [0, -1, -1]], np.int32)
    kept = np.array([2, 1], np.int32)
    mine.settle(cache, mine.at.put(rows), mine.at.put(kept))
    model._extend_context(expected, rows, kept)
    assert_same_caches(cache, expected)


def test_the_loop_on_the_device_leaves_the_trace_of_the_loop_in_numpy(executor):
    model = Model.random(1, TINY)
    prompts, left = random_batch([6, 3], [1, 1])[0], np.array([4, 9])
    settled, roots = [p[:-1] for p in prompts], np.array([p[-1] for p in prompts])
    roots = roots.astype(np.int32)
    mine = DeviceModel(model, executor)
    traces = []
    for where in (executor, "numpy"):
        run = Generation("tree", where, 5, prompts, [[], []])
        how = run, 0.9, 3
        if where == "numpy":
            loop = decode._Loop(model, model.prefill(settled, 40), *how)
        else:
            cache = mine.prefill(settled, 40)
            loop = decode._DeviceLoop(mine, cache, *how, roots, left)
        at, remaining = roots, left.copy()
        for _ in range(2 if executor == "emulator" else 5):
            trace = loop.round(at, remaining)
            run.rounds.append(trace)
            at = trace.accepted.bonus
            remaining = np.maximum(remaining - [len(p) for p in trace.committed], 0)
            remaining[0] = 0  # the first request is finished early
        traces.append(run.rounds)
        if where == executor:
            on_device = to_host(loop.step.prefix_lens)
            assert_array_equal(on_device, loop.prefix_lens)
    for found, expected in zip(*traces, strict=True):
        for name in vars(expected.tree):
            x, y = getattr(found.tree, name), getattr(expected.tree, name)
            assert_allclose(x, y, rtol=1e-5, atol=1e-5)  # log-probs; the rest exact
        for name in ("active", "prefix_lens", "target_tokens"):
            assert_array_equal(getattr(found, name), getattr(expected, name))
        assert found.committed == expected.committed
        for name in ("accept_len", "bonus", "status"):
            x, y = getattr(found.accepted, name), getattr(expected.accepted, name)
            assert_array_equal(x, y)
        assert [found.path(b) for b in (0, 1)] == [expected.path(b) for b in (0, 1)]
    assert not traces[0][1].active[0]


class BrokenModel:
    """What `_DeviceLoop` asks of a model; no token is the target's choice."""

    at, config = place("emulator"), TINY

    def draft(self, cache, roots):
        return np.zeros((2, 3, 5), np.float32)

    def verify(self, cache, tree):
        return np.zeros((*tree.token_ids.shape, 5), np.float32)

    def settle(self, cache, rows, kept):
        pass

    def sample(self, logits, tree, prefix_lens, *, temperature, coins):
        return np.full(tree.token_ids.shape, -1, np.int32)


def test_a_target_that_chooses_nothing_is_an_error_of_an_unfinished_request():
    run = Generation("tree", "emulator", 1, [[1, 2], [3, 4]], [[], []])
    roots = np.array([2, 4], np.int32)
    for left, request in ((np.array([0, 1]), 1), (np.array([1, 1]), 0)):
        cache = SimpleNamespace(kv=np.zeros((2, 9, 1)), prefix_lens=np.ones(2, "i4"))
        loop = decode._DeviceLoop(BrokenModel(), cache, run, 0.5, 0, roots, left)
        with pytest.raises(ValueError, match=f"logits, request {request}, row 0 holds"):
            loop.round(roots, left)


@pytest.mark.parametrize("executor", ["numpy", "tpu"])
def test_the_model_runs_as_kernels_or_not_at_all(executor):
    with pytest.raises(ValueError, match=f"executor.*{executor}"):
        DeviceModel(Model.random(1, TINY), executor)


def test_a_cache_that_is_shorter_than_a_prompt_is_an_error():
    mine = DeviceModel(Model.random(1, TINY), "emulator")
    with pytest.raises(ValueError, match="capacity is 2; the longest prompt has 3"):
        mine.prefill([[1], [1, 2, 3]], 2)


def test_heads_wider_than_a_block_are_an_error():
    config = dataclasses.replace(TINY, d_model=136, draft_heads=1)
    with pytest.raises(ValueError, match="heads are 136 wide; expected up to 128"):
        DeviceModel(Model.random(1, config), "emulator")


@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_the_gpu_writes_the_cpus_text_on_20_held_out_prompts(temperature):
    prompts = held_out_prompts(20, (96, 128, 160))
    how = {"temperature": temperature, "seed": 5, "stop_tokens": [10]}
    # Every mode writes the same text, and a chain is soonest done.
    expected = generate(
        load_model(), prompts, 40, mode="chain", executor="numpy", **how
    ).tokens
    for mode in MODES:
        run = generate(load_model(), prompts, 40, mode=mode, executor="gpu", **how)
        assert run.tokens == expected, mode


@pytest.mark.gpu
def test_the_gpus_rounds_are_the_cpus():
    prompts = held_out_prompts(2, (96, 128))
    on_gpu, on_cpu = (
        generate(load_model(), prompts, 30, executor=where)
        for where in ("gpu", "numpy")
    )
    for found, expected in zip(on_gpu.rounds, on_cpu.rounds, strict=True):
        assert_array_equal(found.accepted.rows, expected.accepted.rows)
        assert_array_equal(found.prefix_lens, expected.prefix_lens)
        assert_array_equal(found.tree.n_rows, expected.tree.n_rows)
        assert found.committed == expected.committed


# --------------------------------------------------------------------------------- PTX

F32, F64, I32 = float32, float64, int32
SIGNATURES = {
    ops.matmul_kernel: (F64[:, :, ::1], F32[:, :, ::1], F64[:, :, ::1], I32)
    + (F64[:, :, ::1],),
    ops.rms_norm_kernel: (F64[:, ::1], F32[::1], F64, F64[:, ::1]),
    ops.rope_kernel: (F64[:, :, ::1], I32, I32[::1], F64[:, :, ::1])
    + (F32[:, :, ::1], I32),
    ops.swiglu_kernel: (F64[:, ::1], F64[:, ::1]),
    ops.gather_kernel: (F64[:, :, ::1], I32[:, ::1], I32, I32, F64[:, ::1]),
    ops.embed_kernel: (I32[:, ::1], I32[:, ::1], I32[::1], F32[:, ::1])
    + (F64[:, ::1], I32[::1]),
    ops.embed_block_kernel: (I32[::1], I32[::1], F32[:, ::1], F32[::1], F32[:, ::1])
    + (F64[:, ::1], F64[:, ::1], I32[::1]),
    ops.latent_row_kernel: (F64[:, ::1], F32[::1], F64, I32[::1], F64[:, :, ::1])
    + (I32[::1], I32[::1], F32[:, :, ::1]),
    ops.draft_row_kernel: (F64[:, ::1], F64[:, :, :, :, ::1], F64[:, :, ::1])
    + (I32[::1], I32[::1], F32[:, :, ::1])
    + (F32[:, :, :, :, ::1],) * 2,
    ops.draft_attention_kernel: (F64[:, :, :, :, ::1],)
    + (F32[:, :, :, ::1],) * 2
    + (I32[::1], F64, F64[:, :, ::1]),
    ops.sample_kernel: (F32[:, :, ::1], I32[::1], I32[:, ::1], I32[::1])
    + (F64[:, ::1], F64, I32[:, ::1]),
}


@pytest.mark.ptx
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)])
def test_the_kernels_compile(cc):
    for kernel, signature in SIGNATURES.items():
        ptx = backend.compile_ptx(kernel, signature, compute_capability=cc)
        assert ".entry" in ptx
        assert ".local" not in ptx, kernel
