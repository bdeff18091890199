"""A round on the device: the stages' own results, replayed as a graph too."""

import operator

import numpy as np
import pytest
from device_model import DeviceModel
from numba import cuda, int32
from numpy.testing import assert_allclose, assert_array_equal
from test_backend import LIBRARIES

from ddtree_numba import backend, bf16, reference, step
from ddtree_numba.backend import Workspace, place
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_build import tree_build
from ddtree_numba.kernels.verify_attn import VERSIONS, verify_attn
from ddtree_numba.step import Round
from ddtree_numba.tree import DraftTree

PREFIX = np.array([7, 0, 30], np.int32)
ROOTS = np.array([3, 1, 4], np.int32)


def make_round(at, to_device, batch, n_draft_nodes, *, rounds=9, layers=2, **how):
    """A round over a synthetic model."""
    room = int(PREFIX.max()) + 6 * rounds + n_draft_nodes
    model = DeviceModel.make(at, to_device, batch, room, layers)
    states = map(to_device, (PREFIX[:batch].copy(), ROOTS[:batch].copy()))
    return Round(
        model.draft, model.target, model.kv_cache, *states, n_draft_nodes, **how
    )


def to_numpy(x):
    for how in ("copy_to_host", "cpu", "get"):
        if hasattr(x, how):
            x = getattr(x, how)()
    return np.array(x.numpy() if hasattr(x, "numpy") else x)


def everything(a_round):
    """Host copies of a round's result and of what it left for the next."""
    states = a_round.prefix_lens, a_round.root_tokens, *a_round.kv_cache
    return [to_numpy(x) for x in (*a_round.result.arrays(), *states)]


def assert_same(found, expected):
    for x, y in zip(found, expected, strict=True):
        assert_array_equal(x, y)


# ---------------------------------------------------------------------- by plain calls


@pytest.mark.parametrize("executor", ["numpy", "emulator"])
def test_rounds_are_the_references_stages_one_after_the_other(executor):
    rounds, layers, batch, most = (6, 2, 3, 12) if executor == "numpy" else (2, 1, 2, 5)
    budgets = np.array([2, most, most - 1], np.int32)[:batch]
    active = np.array([0, 1, 1], np.int32)[:batch]
    how = {"max_draft_nodes": most, "active": active, "executor": executor}
    mine = make_round(place(executor), np.copy, batch, most, layers=layers, **how)
    mine.n_draft_nodes = budgets
    room = mine.kv_cache[0].shape[2]
    model = DeviceModel.make(place("numpy"), np.copy, batch, room, layers)
    lens, roots = PREFIX[:batch].copy(), ROOTS[:batch].copy()
    lengths = set()
    for _ in range(rounds):
        found = mine.run()
        candidates = reference.topk(model.draft(lens, roots), most)
        tree = reference.tree_build(
            *candidates, budgets, root_tokens=roots, max_draft_nodes=most
        )
        tokens = reference.argmax(model.target(tree, lens), tree.n_rows)
        accepted = reference.tree_accept(tree, tokens, max_depth=4)
        kept = np.where(active, accepted.accept_len, 0).astype(np.int32)
        lens = reference.kv_compact(model.kv_cache, lens, accepted.rows, kept)
        roots = accepted.bonus
        expected = [*vars(tree).values(), tokens, *accepted, lens, roots]
        for x, y in zip(everything(mine), [*expected, model.kv_cache], strict=True):
            assert_allclose(x, y, rtol=1e-6)  # float32 log-probs; the rest is exact
        assert found is mine.result
        lengths |= set(kept.tolist())
    assert 0 in lengths and max(lengths) > 1, "one is finished, others accept drafts"


def test_the_next_round_writes_into_the_same_arrays():
    def target(tree, prefix_lens):
        return np.eye(5, dtype=np.float32)[None, tree.token_ids[0]]

    mine = cpu_round(
        draft=np.zeros((1, 2, 5), np.float32),
        target=target,
        kv_cache=np.zeros((1, 20, 1)),
        prefix_lens=PREFIX[:1].copy(),
        root_tokens=ROOTS[:1].copy(),
        executor="emulator",
    )
    first = mine.run()
    kept = mine.read()
    second = mine.run()
    assert all(map(operator.is_, second.arrays(), first.arrays()))
    assert all(map(operator.is_not, kept.arrays(), first.arrays()))
    assert kept.accepted.bonus.tolist() == second.tree.token_ids[:, 0].tolist()


def test_logits_that_the_caller_writes_and_a_choice_of_its_own():
    logits = np.zeros((1, 2, 5), np.float32)
    logits[0, [0, 1], [2, 3]] = 9
    cache, lens, roots = np.zeros((1, 20, 1)), PREFIX[1:2].copy(), ROOTS[:1].copy()
    settled = []

    def target(tree, prefix_lens):
        cache[0, prefix_lens[0] : prefix_lens[0] + 3, 0] = tree.token_ids[0]
        return "logits"

    def choose(given, tree, prefix_lens):
        assert given == "logits"
        return np.array([[2, 4, 0]])  # the drafted 2, and not the 3 after it

    def settle(rows, kept, prefix_lens):
        settled.append((rows.tolist(), kept.tolist(), prefix_lens.tolist()))

    mine = Round(
        logits, target, cache, lens, roots, 2, choose=choose, settle=settle, k=1
    )
    mine.run()
    assert settled == [([[0, 1, -1]], [2], [0])]
    assert (mine.prefix_lens.tolist(), mine.root_tokens.tolist()) == ([2], [4])
    logits[0, 0] = [0, 9, 0, 0, 0]
    mine.run()
    assert cache[0, :5, 0].tolist() == [3, 2, 4, 1, 3]


# -------------------------------------------------------------------------- as a graph


@pytest.mark.gpu
@LIBRARIES
@pytest.mark.parametrize("batch", [1, 3])
def test_replayed_rounds_are_plain_rounds(to_device, batch):
    rounds, most = 12, 37
    at = place(x=to_device(PREFIX))
    budgets = np.array([most, 5, 20], np.int32)[:batch]
    plain, captured = (
        make_round(
            at,
            to_device,
            batch,
            most,
            rounds=rounds,
            active=to_device(np.ones(batch, np.int32)),
            read_back=True,
        )
        for _ in range(2)
    )
    for each in (plain, captured):
        each.n_draft_nodes = to_device(budgets)
    plain.run(), captured.run()
    before = everything(captured)
    captured.capture()
    assert_same(everything(captured), before)
    shapes, starts = set(), set()
    for _ in range(rounds):
        plain.run(), captured.replay()
        read = captured.read()
        assert_same(everything(captured), everything(plain))
        assert_same(read.arrays(), map(to_numpy, plain.result.arrays()))
        shapes.add(read.tree.parents.tobytes())
        starts.add(to_numpy(captured.prefix_lens)[0])
    assert len(shapes) > rounds / 2 and len(starts) == rounds
    # Budgets and who is active are read anew: the graph stays.
    for each in (plain, captured):
        for x, value in ((each.n_draft_nodes, 3), (each.active, 0)):
            backend.place(x=x).launch(
                backend.fill_kernel, 1, 32, np.int32(value), cuda.as_cuda_array(x)
            )
    plain.run(), captured.replay()
    assert_same(everything(captured), everything(plain))
    assert to_numpy(captured.result.tree.n_rows).tolist() == [4] * batch
    assert to_numpy(captured.prefix_lens)[0] in starts, "nothing was kept"


def big_stages():
    """Stages at sizes that take their larger kernels, as calls on device arrays."""
    rng = np.random.default_rng(0)
    logits = cuda.to_device(rng.normal(size=(2, 15, 70_000)).astype(np.float32))
    candidates = reference.topk(rng.normal(size=(2, 15, 300)).astype(np.float32), 300)
    candidates = [cuda.to_device(x) for x in candidates]
    nothing = [cuda.device_array((2, 0, 1), x.dtype) for x in candidates]
    bits = bf16.from_float32(rng.normal(size=(2, 400, 576)).astype(np.float32))
    q = cuda.to_device(bits[:, : 33 * 8].reshape(2, 33, 8, 576).copy())
    chain = DraftTree.from_parents([list(range(-1, 32))] * 2)
    attended = q, *map(cuda.to_device, (bits, PREFIX[:2], chain.visibility))
    form = {"sm_scale": 0.1, "d_latent": 512}
    stages = {
        "topk-split": lambda: topk(logits, 300),
        "tree_build-small": lambda: vars(
            tree_build(*candidates, 30, version="small")
        ).values(),
        "tree_build-parallel": lambda: vars(tree_build(*candidates, 300)).values(),
        "tree_build-nothing": lambda: vars(tree_build(*nothing, 3)).values(),
    }
    for version in VERSIONS:
        stages[f"verify_attn-{version}"] = lambda version=version: verify_attn(
            *attended, version=version, **form
        )
    return stages


@pytest.mark.gpu
def test_every_large_stage_can_be_captured():
    at = place(x=cuda.to_device(PREFIX))
    for name, stage in big_stages().items():
        workspace = Workspace()

        def work(workspace=workspace, stage=stage):
            with workspace:
                return list(stage())

        expected = [to_numpy(x) for x in work()]
        replay = step._capture(work, at, workspace)
        outputs = work()
        for x in outputs:
            cuda.to_device(np.ones(x.shape, x.dtype), to=x)
        replay()
        for x, y in zip(outputs, expected, strict=True):
            assert_array_equal(to_numpy(x), y, err_msg=name)


@pytest.mark.gpu
def test_a_round_of_numba_arrays_runs_on_the_callers_stream():
    stream = cuda.stream()
    at = place(x=cuda.to_device(PREFIX))
    plain = make_round(at, cuda.to_device, 2, 9)
    mine = make_round(at, cuda.to_device, 2, 9, stream=int(stream))
    for k in range(3):
        plain.run()
        mine.run() if k == 0 else mine.replay()
        stream.synchronize()
        assert_same(everything(mine), everything(plain))
        if k == 0:
            mine.capture()


@pytest.mark.gpu
def test_a_model_that_waits_for_the_device_cannot_be_captured():
    at = place(x=cuda.to_device(PREFIX))
    mine = make_round(at, cuda.to_device, 1, 3)
    mine.run()
    target = mine.target

    def waits(tree, prefix_lens):
        cuda.synchronize()
        return target(tree, prefix_lens)

    mine.target = waits
    with pytest.raises(Exception, match="CAPTURE"):
        mine.capture()
    mine.target = target
    mine.capture()
    mine.replay()
    cuda.synchronize()


# ------------------------------------------------------------------------- bad input


def zeros_after(tree, prefix_lens):
    """Logits of a target that always likes token 0 best."""
    return np.zeros((*tree.token_ids.shape, 5), np.float32)


def cpu_round(**change):
    arguments = {
        "draft": np.zeros((2, 2, 5), np.float32),
        "target": zeros_after,
        "kv_cache": np.zeros((2, 9, 1)),
        "prefix_lens": np.array([4, 0], np.int32),
        "root_tokens": ROOTS[:2].copy(),
        "n_draft_nodes": 2,
    }
    return Round(**(arguments | change))


def read_only(x):
    x.flags.writeable = False
    return x


CACHE = np.zeros((2, 9, 1))
BAD_ROUNDS = [
    ({"prefix_lens": PREFIX.astype(float)}, TypeError, "prefix_lens has dtype"),
    ({"prefix_lens": None}, TypeError, "prefix_lens is a NoneType; expected an array"),
    ({"prefix_lens": [np.int32(1)] * 2}, TypeError, "prefix_lens is a list; expected"),
    ({"prefix_lens": np.zeros(0, np.int32)}, ValueError, "prefix_lens is empty"),
    ({"root_tokens": ROOTS}, ValueError, r"root_tokens has shape \(3,\); .*\(2\)"),
    ({"root_tokens": None}, TypeError, "root_tokens is a NoneType; expected an array"),
    ({"root_tokens": read_only(ROOTS[:2].copy())}, ValueError, "root_tokens is read-"),
    ({"active": [1, 1]}, TypeError, "active has dtype int64; expected int32"),
    ({"active": ROOTS}, ValueError, r"active has shape \(3,\); expected \(2\)"),
    ({"n_draft_nodes": -1}, ValueError, "n_draft_nodes is -1; expected 0 … 1024"),
    ({"n_draft_nodes": 1025}, ValueError, "n_draft_nodes is 1025; expected 0 … 1024"),
    ({"n_draft_nodes": None}, TypeError, "n_draft_nodes is None .*expected an int"),
    ({"n_draft_nodes": ROOTS[:2]}, ValueError, "max_draft_nodes is None, but n_draft"),
    (
        {"n_draft_nodes": ROOTS, "max_draft_nodes": 9},
        ValueError,
        r"n_draft_nodes has shape \(3,\); expected \(2\)",
    ),
    ({"max_draft_nodes": 1}, ValueError, "max_draft_nodes is 1; expected 2 … 1024"),
    ({"max_draft_nodes": 1025}, ValueError, "max_draft_nodes is 1025; expected 2 … 10"),
    ({"k": -1}, ValueError, "k is -1; expected 0 or more"),
    ({"kv_cache": []}, ValueError, "kv_cache is empty"),
    ({"kv_cache": None}, TypeError, "kv_cache is a NoneType; expected an array"),
    ({"kv_cache": [CACHE, CACHE[:1]]}, ValueError, r"kv_cache\[1\] .* \(2, S_max, D\)"),
    ({"kv_cache": CACHE[0]}, ValueError, r"kv_cache has shape \(9, 1\); expected"),
    ({"kv_cache": read_only(CACHE.copy())}, ValueError, "kv_cache is read-only"),
    ({"target": None}, TypeError, "target is a NoneType; expected a callable"),
    ({"choose": 3}, TypeError, "choose is a int; expected a callable"),
    ({"settle": 3}, TypeError, "settle is a int; expected a callable"),
    ({"stream": None}, TypeError, "stream is None .*expected an int"),
    ({"executor": "tpu"}, ValueError, "executor='tpu' is not one of"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD_ROUNDS)
def test_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=message):
        cpu_round(**change)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"draft": CACHE[:1].astype("f4")}, ValueError, "draft's logits has shape"),
        ({"draft": lambda *_: None}, TypeError, "draft's logits is a NoneType"),
        ({"target": lambda *_: None}, TypeError, "target's logits is a NoneType"),
        ({"target": lambda *_: CACHE[:, :3]}, TypeError, "target's logits has dtype f"),
        (
            {"target": lambda *_: np.zeros((2, 2, 5), np.float32)},
            ValueError,
            r"target's logits has shape \(2, 2, 5\); expected \(2, 3, \*\)",
        ),
        ({"choose": lambda *_: ROOTS[:, None]}, ValueError, "target_tokens has shape"),
        (
            {
                "prefix_lens": np.array([0, 7], np.int32),
                "kv_cache": [CACHE, CACHE.repeat(2, axis=1)],
            },
            ValueError,
            "prefix_lens, request 1 is 7 and its tree has 3 rows; .* up to 9",
        ),
        (
            {"prefix_lens": np.array([0, 2**31 - 1], np.int32)},
            ValueError,
            "prefix_lens, request 1 is 2147483647",
        ),
        (
            {"prefix_lens": np.array([-1, 0], np.int32)},
            ValueError,
            "prefix_lens, request 0 is -1 and its tree has 3 rows",
        ),
    ],
)
@pytest.mark.parametrize("executor", ["numpy", "emulator"])
def test_what_a_round_meets_on_its_way_is_named(executor, change, error, message):
    mine = cpu_round(executor=executor, **change)
    with pytest.raises(error, match=message):
        mine.run()


@pytest.mark.parametrize("executor", ["numpy", "emulator"])
def test_rows_move_in_every_cache_but_not_of_a_finished_request(executor):
    caches = [np.arange(36.0).reshape(2, 9, 2), np.arange(18).reshape(2, 9, 1)]
    expected, settled = [x.copy() for x in caches], []
    mine = cpu_round(
        executor=executor,
        kv_cache=caches,
        active=np.array([0, 1], np.int32),
        choose=lambda *_: np.full((2, 3), 1, np.int32),
        settle=lambda rows, kept, _: settled.append((rows.tolist(), kept.tolist())),
    )
    result = mine.run()
    assert settled == [([[0, 2, -1]] * 2, [0, 2])]
    assert result.accepted.accept_len.tolist() == [2, 2]
    for found, cache in zip(caches, expected, strict=True):
        cache[1, 1] = cache[1, 2]
        assert_array_equal(found, cache)
    assert (mine.prefix_lens.tolist(), mine.root_tokens.tolist()) == ([4, 2], [1, 1])


@pytest.mark.parametrize("after_a_good_round", [False, True])
def test_a_round_that_failed_can_be_run_again(after_a_good_round):
    mine, whole = (cpu_round(executor="emulator") for _ in range(2))

    def breaks(tree, prefix_lens):
        if not after_a_good_round:  # later, other arrays would be an error
            place("emulator").empty((7, 7), np.float32)
        raise ZeroDivisionError

    rounds = 1 + after_a_good_round
    for k in range(rounds):
        whole.run()
        if k == rounds - 1:
            before = mine.prefix_lens.tolist(), mine.root_tokens.tolist()
            mine.target = breaks
            with pytest.raises(ZeroDivisionError):
                mine.run()
            assert (mine.prefix_lens.tolist(), mine.root_tokens.tolist()) == before
            mine.target = zeros_after
        mine.run()
    assert_same(everything(mine), everything(whole))


def test_a_stream_is_for_numba_arrays(monkeypatch):
    class Tensor:
        __cuda_array_interface__ = {}

    Tensor.__module__ = "torch"
    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    states = dict.fromkeys(("kv_cache", "prefix_lens", "root_tokens"), Tensor())
    with pytest.raises(ValueError, match="stream is 7, but the arrays are torch's"):
        cpu_round(stream=7, **states)


def test_rounds_of_host_arrays_do_not_run_on_a_gpu(monkeypatch):
    monkeypatch.setattr(backend, "gpu_problem", lambda: None)
    with pytest.raises(ValueError, match="arrays are on the host; expected GPU arrays"):
        cpu_round(executor="gpu")


def test_what_needs_a_round_or_a_gpu_says_so():
    mine = cpu_round()
    with pytest.raises(ValueError, match="host arrays; expected GPU arrays"):
        mine.capture()
    with pytest.raises(RuntimeError, match="replay before capture"):
        mine.replay()
    with pytest.raises(RuntimeError, match="read before a round"):
        mine.read()


# --------------------------------------------------------------------------------- PTX


@pytest.mark.ptx
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)])
def test_the_kernels_compile(cc):
    array = int32[::1]
    for kernel, n in ((step.keep_kernel, 3), (step.advance_kernel, 4)):
        ptx = backend.compile_ptx(kernel, (array,) * n, compute_capability=cc)
        assert ".entry" in ptx and ".local" not in ptx and ".f64" not in ptx
