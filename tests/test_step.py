"""A round on the device: the stages' own results, replayed as a graph too."""

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
    result = a_round.result.map(to_numpy)
    states = a_round.prefix_lens, a_round.root_tokens, *a_round.kv_cache
    return [
        *vars(result.tree).values(),
        result.target_tokens,
        *result.accepted,
        *map(to_numpy, states),
    ]


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
    assert second.tree.token_ids is first.tree.token_ids
    assert kept.tree.token_ids is not first.tree.token_ids
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
        of_the_copy = [*vars(read.tree).values(), read.target_tokens, *read.accepted]
        assert_same(of_the_copy, everything(plain)[: len(of_the_copy)])
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


def cpu_round(**change):
    arguments = {
        "draft": np.zeros((2, 2, 5), np.float32),
        "target": None,
        "kv_cache": np.zeros((2, 9, 1)),
        "prefix_lens": PREFIX[:2],
        "root_tokens": ROOTS[:2],
        "n_draft_nodes": 2,
    }
    return Round(**(arguments | change))


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"prefix_lens": PREFIX.astype(float)}, TypeError, "prefix_lens has dtype"),
        ({"root_tokens": ROOTS}, ValueError, r"root_tokens has shape \(3,\); .*\(2\)"),
        ({"active": [1, 1]}, TypeError, "active has dtype int64; expected int32"),
        ({"n_draft_nodes": ROOTS[:2]}, TypeError, "max_draft_nodes is array"),
        ({"kv_cache": []}, ValueError, "kv_cache is empty"),
        ({"executor": "tpu"}, ValueError, "executor='tpu' is not one of"),
    ],
    ids=str,
)
def test_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=message):
        cpu_round(**change)


def test_a_list_is_no_state_that_a_round_could_change():
    with pytest.raises(TypeError, match="prefix_lens is a list; expected an array"):
        cpu_round(prefix_lens=[np.int32(1), np.int32(2)])


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
