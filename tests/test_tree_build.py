"""tree_build on every executor: the most probable prefixes, in the contract's order."""

import itertools

import numpy as np
import pytest
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, float32, float64, int32, int64, uint32
from random_trees import CAT, DOG, SAT, THE, worked_example

from ddtree_numba import backend, bf16
from ddtree_numba.backend import place
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels import tree_build as tree_build_module
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_build import (
    EXACT_DEPTH,
    SMALL,
    put_rank_before,
    tree_build,
    tree_build_kernel,
    tree_build_parallel_kernel,
    tree_build_small_kernel,
)
from ddtree_numba.tree import DraftTree

INF, NAN = np.inf, np.nan
EVERY_EXECUTOR = pytest.mark.parametrize("executor", ["numpy", "emulator", GPU])
KERNEL_EXECUTOR = pytest.mark.parametrize("executor", ["emulator", GPU])
VERSIONS = ["simple", "small", "parallel"]
EVERY_VERSION = pytest.mark.parametrize("version", VERSIONS)
FOR_LARGE_TREES = pytest.mark.parametrize("version", ["simple", "parallel"])


def build(logits, n_draft_nodes: int, executor: str, **options) -> DraftTree:
    """Tree of one request from its logits [L, V], all stages on the executor."""
    logits = np.asarray(logits, np.float32)[None]
    candidates = topk(logits, n_draft_nodes, executor=executor)
    return tree_build(*candidates, n_draft_nodes, executor=executor, **options)


def ln(*rows: tuple) -> np.ndarray:
    """Logits [L, V] of a row of probabilities a position."""
    return np.log(np.array(rows))


def row_probs(tree: DraftTree) -> np.ndarray:
    """Path probabilities of request 0's draft nodes."""
    return np.exp(tree.log_probs[0, 1 : tree.n_rows[0]])


def rank_paths(tree: DraftTree, token_ids: np.ndarray, b: int = 0) -> list[tuple]:
    """Every draft node of a request as ranks, if no position repeats a token."""
    rank = [{t: r for r, t in enumerate(row)} for row in token_ids[b].tolist()]
    return [
        tuple(rank[d][tree.token_ids[b, row]] for d, row in enumerate(path[1:]))
        for path in tree.paths(b)[1:]
    ]


def brute_force(log_probs: np.ndarray, n_draft_nodes: int) -> list[tuple]:
    """Score every prefix there is, [L, K]; ``(score, ranks)`` of the best, in order."""
    length, kept = log_probs.shape
    scored = []
    for depth in range(1, length + 1):
        for path in itertools.product(range(kept), repeat=depth):
            score = 0.0
            for position, rank in enumerate(path):
                score += float(log_probs[position, rank])
            if score > -INF:
                scored.append((-score, path))
    return sorted(scored)[:n_draft_nodes]


def random_candidates(
    seed: int, shape: tuple[int, int, int], digits: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs that fall along K, rounded so that paths tie, and distinct tokens."""
    rng = np.random.default_rng(seed)
    log_probs = -np.sort(rng.exponential(2, shape), axis=-1)
    if digits is not None:
        log_probs = np.round(log_probs, digits)
    tokens = rng.permuted(np.broadcast_to(np.arange(shape[2]), shape), axis=-1)
    log_probs = np.ascontiguousarray(log_probs, np.float32)
    return log_probs, np.ascontiguousarray(tokens, np.int32) + 1000


def assert_same(found: DraftTree, expected: DraftTree) -> None:
    for name, want in vars(expected).items():
        have = getattr(found, name)
        assert have.dtype == want.dtype, name
        np.testing.assert_array_equal(have, want, err_msg=name)


# ----------------------------------------------------------------- the cases by name


def test_worked_example(executor):
    log_probs = np.log(np.float32([[[0.6, 0.3, 0.1], [0.8, 0.1, 0.1]]]))
    tokens = [[[CAT, DOG, 15], [SAT, 15, 16]]]
    tree = tree_build(log_probs, tokens, 4, root_tokens=[THE], executor=executor)
    expected = worked_example()
    for name in vars(expected):
        if name != "log_probs":
            have, want = getattr(tree, name), getattr(expected, name)
            np.testing.assert_array_equal(have, want, err_msg=name)
    np.testing.assert_allclose(row_probs(tree), [0.6, 0.48, 0.3, 0.24], rtol=1e-6)
    assert row_probs(tree).sum() == pytest.approx(1.62)
    assert tree.visibility.view(np.uint8)[0, :, 0].tolist() == [1, 3, 7, 9, 0x19]
    assert tree.positions([3]).tolist() == [[3, 4, 5, 4, 5]]


def test_build_zero_mass_is_never_a_node(executor):
    tree = build([[0, -INF, -INF]] * 2, 4, executor)
    assert tree.n_rows.tolist() == [3]
    assert tree.token_ids.tolist() == [[-1, 0, 0, -1, -1]]
    assert tree.parents.tolist() == [[-1, 0, 1, -1, -1]]


@pytest.mark.parametrize("bad", [[0, NAN, 1], [0, INF, 1], [-INF] * 3])
def test_build_nan_row_leaves_the_root_of_that_request_alone(executor, bad):
    logits = np.zeros((3, 2, 3), np.float32)
    logits[1, 1] = bad
    log_probs, tokens = topk(logits, 4, check=False, executor=executor)
    tree = tree_build(log_probs, tokens, 4, check=False, executor=executor)
    assert tree.n_rows.tolist() == [5, 1, 5]
    tree.validate()
    with pytest.raises(ValueError, match="log_probs, request 1, row 1 holds NaN"):
        tree_build(log_probs, tokens, 4, executor=executor)


def test_one_nan_among_the_last_candidates_is_enough(executor):
    log_probs, tokens = random_candidates(0, (2, 3, 70))
    log_probs[0, 2, 69] = NAN
    tree = tree_build(log_probs, tokens, 2, check=False, executor=executor)
    assert tree.n_rows.tolist() == [1, 3]


def test_build_k_over_v_reads_v_candidates(executor):
    tree = build(ln((0.5, 0.3, 0.2)), 4, executor)
    assert tree.token_ids.tolist() == [[-1, 0, 1, 2, -1]]


def test_build_budget_equals_vocab(executor):
    logits = np.random.default_rng(0).standard_normal((3, 16))
    tree = build(logits, 16, executor)
    assert tree.n_rows.tolist() == [17]
    tree.validate()


@pytest.mark.parametrize(("length", "budget", "nodes"), [(1, 4, 2), (3, 100, 14)])
def test_build_small_product_gives_every_prefix(executor, length, budget, nodes):
    tree = build(ln(*[(0.7, 0.3)] * length), budget, executor)
    assert tree.n_rows.tolist() == [nodes + 1]
    assert tree.max_rows == budget + 1
    tree.validate()


@pytest.mark.parametrize(
    ("shape", "budget"),
    [((1, 2, 3), 0), ((1, 0, 3), 0), ((1, 0, 3), 4), ((1, 2, 0), 4)],
)
def test_build_empty_is_the_root_only(executor, shape, budget):
    log_probs, tokens = np.zeros(shape, np.float32), np.zeros(shape, np.int32)
    tree = tree_build(log_probs, tokens, budget, root_tokens=[9], executor=executor)
    assert tree.n_rows.tolist() == [1]
    assert tree.token_ids[0, 0] == 9
    visibility = np.zeros((1, budget + 1, 1))
    visibility[0, 0] = 1
    assert tree.visibility.tolist() == visibility.tolist()
    tree.validate()


def test_build_ties_fall_to_the_lower_rank_path(executor):
    tree = build(np.zeros((2, 2)), 4, executor)
    assert tree.token_ids.tolist() == [[-1, 0, 1, 0, 1]]
    assert tree.depths.tolist() == [[0, 1, 1, 2, 2]]
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1]]


def test_build_no_spine_no_chain_is_forced(executor):
    tree = build(ln((0.5, 0.49, 0.01), (0.1, 0.45, 0.45)), 2, executor)
    assert tree.depths.tolist() == [[0, 1, 1]]
    assert row_probs(tree).sum() == pytest.approx(0.99)


def test_build_no_depth_bonus(executor):
    rows = (0.5, 0.45, 0.05), (0.84, 0.1, 0.06), (0.84, 0.1, 0.06)
    tree = build(ln(*rows), 3, executor)
    assert tree.parents.tolist() == [[-1, 0, 0, 1]]
    assert tree.token_ids.tolist() == [[-1, 0, 1, 0]]
    assert row_probs(tree).sum() == pytest.approx(1.37)


def test_build_wide_beats_chain(executor):
    rows = (0.4, 0.35, 0.25), (0.5, 0.3, 0.2), (0.5, 0.3, 0.2)
    tree = build(ln(*rows), 3, executor)
    assert tree.depths.tolist() == [[0, 1, 1, 1]]
    assert row_probs(tree).sum() == pytest.approx(1)


def test_build_no_cap_on_the_children_of_a_node(executor):
    tree = build(np.zeros((1, 8)), 8, executor)
    assert tree.token_ids.tolist() == [[-1, *range(8)]]
    assert tree.depths.tolist() == [[0, *[1] * 8]]


def test_build_1024(executor):
    log_probs, tokens = random_candidates(1, (1, 15, 40), digits=0)
    tree = tree_build(log_probs, tokens, 1024, executor=executor)
    assert tree.n_rows.tolist() == [1025]
    assert tree.visibility.shape == (1, 1025, 33)
    expected = tree_build(log_probs, tokens, 1024, executor="numpy")
    assert_same(tree, expected)


def test_build_token_zero_counts_as_a_token(executor):
    tokens = np.int32([[[5], [0], [7]]])
    tree = tree_build(np.full((1, 3, 1), -0.1, "f4"), tokens, 3, executor=executor)
    assert tree.n_rows.tolist() == [4]
    assert tree.token_ids.tolist() == [[-1, 5, 0, 7]]


def test_build_idempotent_log_probs_as_logits_give_the_same_tree(executor):
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((4, 12)).astype(np.float32) * 2
    once, tokens = topk(logits[None], 12, executor=executor)
    as_logits = np.empty_like(logits)
    np.put_along_axis(as_logits, tokens[0], once[0], axis=-1)
    first, second = (build(x, 12, executor) for x in (logits, as_logits))
    np.testing.assert_array_equal(second.token_ids, first.token_ids)
    np.testing.assert_array_equal(second.parents, first.parents)
    # Normalised rows sum to 1 up to float32, whose logarithm is added a level.
    np.testing.assert_allclose(second.log_probs, first.log_probs, rtol=0, atol=2e-6)


def test_build_offsets_no_array_grows_with_the_context():
    """64 requests of 1025 rows over 32768 tokens: positions only, no column each."""
    log_probs, tokens = random_candidates(0, (64, 2, 3))
    tree = tree_build(log_probs, tokens, 12, max_draft_nodes=1024)
    assert max(x.size for x in vars(tree).values()) == 64 * 1025 * 33
    positions = tree.positions([32768] * 64)
    assert positions[:, 12].tolist() == (32768 + tree.depths[:, 12]).tolist()


# ------------------------------------------------------------------------ brute force


@EVERY_EXECUTOR
@EVERY_VERSION
@given(
    seed=st.integers(0, 2**32),
    length=st.integers(1, 4),
    kept=st.integers(1, 4),
    digits=st.sampled_from([None, 1, 0]),
    masked=st.integers(0, 3),
    budget=st.integers(0, 40),
)
@settings(max_examples=25, deadline=None)
def test_build_brute_force(
    executor, version, seed, length, kept, digits, masked, budget
):
    log_probs, tokens = random_candidates(seed, (1, length, kept), digits)
    if masked < kept:
        log_probs[0, seed % length, kept - masked :] = -INF
    tree = tree_build(log_probs, tokens, budget, version=version, executor=executor)
    tree.validate()
    expected = brute_force(log_probs[0], budget)
    assert rank_paths(tree, tokens) == [path for _, path in expected]
    scores = np.float32([-negative for negative, _ in expected])
    assert tree.log_probs[0, 1 : len(expected) + 1].tolist() == scores.tolist()


@EVERY_VERSION
@pytest.mark.parametrize("value", [0.0, -0.25, -0.1])
def test_equal_candidates_everywhere_are_taken_by_rank_path(executor, version, value):
    """At 0 depth costs nothing: the order is lexicographic, a chain first."""
    log_probs, tokens = random_candidates(0, (1, 4, 3))
    log_probs[:] = value
    tree = tree_build(log_probs, tokens, 60, version=version, executor=executor)
    expected = [path for _, path in brute_force(log_probs[0], 60)]
    assert rank_paths(tree, tokens) == expected
    if value == 0:
        assert expected[:6] == [
            (0,),
            (0, 0),
            (0, 0, 0),
            (0, 0, 0, 0),
            (0, 0, 0, 1),
            (0, 0, 0, 2),
        ]


@EVERY_VERSION
def test_paths_of_the_same_steps_tie_although_float32_would_order_them(
    executor, version
):
    """0.2, 0.5 and 1.1 in any order: one float64 sum, more than one float32 sum."""
    steps = -np.float32([0.2, 0.5, 1.1])
    log_probs, tokens = random_candidates(0, (1, 3, 3))
    log_probs[:] = steps
    orders = list(itertools.permutations(range(3)))
    assert len({float((steps[i] + steps[j]) + steps[k]) for i, j, k in orders}) > 1
    tree = tree_build(log_probs, tokens, 39, version=version, executor=executor)
    paths = rank_paths(tree, tokens)
    assert [path for path in paths if path in orders] == orders


# ------------------------------------------------------- kernels against the reference


@pytest.fixture
def alone(monkeypatch):
    """In the emulator, the parallel version may not fall back on the simple one."""
    monkeypatch.setattr(tree_build_module, "select_rows", None)


@pytest.mark.parametrize("digits", [None, 2])
@pytest.mark.parametrize("span", [1.0, 64.0, 4000.0])
def test_the_parallel_version_does_it_alone(alone, monkeypatch, span, digits):
    """Also if all nodes are in one bin at first, and if most are behind the bins."""
    monkeypatch.setattr(tree_build_module, "SPAN", span)
    log_probs, tokens = random_candidates(9, (1, 7, 20), digits)
    tree = tree_build(log_probs, tokens, 70, version="parallel", executor="emulator")
    assert_same(tree, tree_build(log_probs, tokens, 70, executor="numpy"))


@pytest.mark.parametrize("digits", [None, 1])
@pytest.mark.parametrize("surplus", [0, 3])
def test_a_pool_that_gets_too_full_raises_the_bound(
    alone, monkeypatch, surplus, digits
):
    """Where 4 candidates are left at a position; and most of the pool lies far."""
    monkeypatch.setattr(tree_build_module, "MOST_SURPLUS", surplus)
    monkeypatch.setattr(tree_build_module, "NEAR", 50)
    log_probs, tokens = random_candidates(9, (1, 9, 30), digits)
    log_probs[..., 4:] = -INF
    tree = tree_build(log_probs, tokens, 100, version="parallel", executor="emulator")
    assert_same(tree, tree_build(log_probs, tokens, 100, executor="numpy"))


@pytest.mark.parametrize(("name", "size"), [("POOL", 41), ("SORTED", 80)])
def test_more_ties_than_there_is_room_for(monkeypatch, name, size):
    """All prefixes tie, so none can be left out before all are in the pool."""
    monkeypatch.setattr(tree_build_module, name, size)
    log_probs, tokens = random_candidates(9, (1, 4, 5))
    log_probs[:] = 0
    found = tree_build(log_probs, tokens, 40, version="parallel", executor="emulator")
    assert_same(found, tree_build(log_probs, tokens, 40, executor="numpy"))


@EVERY_VERSION
def test_more_candidates_that_tie_than_a_tree_has_ranks(executor, version):
    log_probs, tokens = random_candidates(2, (1, 1, 1100))
    log_probs[:] = -0.5
    tree = tree_build(log_probs, tokens, 40, version=version, executor=executor)
    assert tree.token_ids[0, 1:].tolist() == tokens[0, 0, :40].tolist()


@FOR_LARGE_TREES
def test_more_children_than_a_warp_has_lanes(executor, version):
    log_probs, tokens = random_candidates(2, (1, 2, 70))
    log_probs[0, 1] *= 1e-3
    tree = tree_build(log_probs, tokens, 150, version=version, executor=executor)
    assert_same(tree, tree_build(log_probs, tokens, 150, executor="numpy"))
    assert (tree.parents == 1).sum() == 70


@EVERY_VERSION
def test_sums_that_round_to_the_same_tie(executor, version):
    """-10 takes up what told (1, 0) from (0, 1), so that their order turns."""
    log_probs = np.float32([[[0, -1e-20], [0, -3e-20], [-10, -10]]])
    tokens = np.int32([[[5, 6]] * 3])
    tree = tree_build(log_probs, tokens, 14, version=version, executor=executor)
    paths = [path for _, path in brute_force(log_probs[0], 14)]
    assert paths.index((1, 0)) < paths.index((0, 1))
    assert paths.index((0, 1, 0)) < paths.index((1, 0, 0))
    rows = tree.paths(0)[1:]
    found = [
        tuple(int(tree.token_ids[0, row]) - 5 for row in path[1:]) for path in rows
    ]
    assert found == paths


def test_a_child_that_a_sum_takes_up_ties_with_its_parent(kernel_executor):
    """The second node at depth 1 is no better than what stands before it."""
    log_probs, tokens = np.float32([[[-0.1, -0.1], [-1e-30, -1]]]), [[[5, 6]] * 2]
    tree = tree_build(
        log_probs, tokens, 2, version="parallel", executor=kernel_executor
    )
    assert tree.parents.tolist() == [[-1, 0, 1]]


def of_every_version(shapes_and_budgets: list) -> list[tuple]:
    """``(version, shape, budget)``, but for trees too large for the small version."""
    every = itertools.product(VERSIONS, shapes_and_budgets)
    return [(v, *case) for v, case in every if v != "small" or case[1] <= SMALL]


SHAPES = (2, 15, 33), (1, 1, 70), (1, 64, 1), (1, 70, 1), (1, 2, 8), (1, 15, 32)
BUDGETS = 33, 64, 64, 64, 64, 130


@KERNEL_EXECUTOR
@pytest.mark.parametrize("digits", [None, 1, 0])
@pytest.mark.parametrize(
    ("version", "shape", "budget"),
    of_every_version(list(zip(SHAPES, BUDGETS, strict=True))),
    ids=str,
)
def test_the_kernel_equals_the_reference(executor, version, shape, budget, digits):
    log_probs, tokens = random_candidates(7, shape, digits)
    roots = np.arange(shape[0], dtype=np.int32) + 50
    given = {"n_draft_nodes": budget, "root_tokens": roots}
    found = tree_build(log_probs, tokens, **given, version=version, executor=executor)
    expected = tree_build(log_probs, tokens, **given, executor="numpy")
    assert_same(found, expected)


@EVERY_VERSION
def test_ragged_budgets_leave_padding(executor, version):
    log_probs, tokens = random_candidates(3, (4, 5, 8), 1)
    budgets = [7, 0, 40, 1]
    tree = tree_build(log_probs, tokens, budgets, version=version, executor=executor)
    tree.validate()
    assert tree.n_rows.tolist() == [8, 1, 41, 2]
    assert tree.max_rows == 41
    for b, budget in enumerate(budgets):
        alone = tree_build(log_probs[b : b + 1], tokens[b : b + 1], budget)
        live = slice(budget + 1)
        np.testing.assert_array_equal(tree.token_ids[b, live], alone.token_ids[0])
        np.testing.assert_array_equal(tree.parents[b, live], alone.parents[0])


def test_max_draft_nodes_allocates_more_rows(executor):
    log_probs, tokens = random_candidates(3, (2, 3, 8))
    for budgets in (5, [5, 2]):
        arguments = (log_probs, tokens, budgets)
        tree = tree_build(*arguments, max_draft_nodes=70, executor=executor)
        tree.validate()
        assert tree.max_rows == 71
        assert tree.n_rows.tolist() == [6, 6 if budgets == 5 else 3]


def test_an_empty_batch_gives_an_empty_tree(executor):
    empty = np.zeros((0, 3, 4))
    arguments = (empty.astype(np.float32), empty.astype(np.int32), 5)
    tree = tree_build(*arguments, executor=executor)
    assert tree.token_ids.shape == (0, 6)
    assert tree.visibility.shape == (0, 6, 1)


# ---------------------------------------------------------------- full size and device


@pytest.mark.gpu
@pytest.mark.parametrize("digits", [None, 1, 0])
@pytest.mark.parametrize(
    ("version", "shape", "budget"),
    of_every_version([((8, 15, m), m) for m in (1, 8, 32, 64, 256, 1024)]),
    ids=str,
)
def test_full_size_equals_the_reference(shape, budget, digits, version):
    log_probs, tokens = random_candidates(budget, shape, digits)
    expected = tree_build(log_probs, tokens, budget, executor="numpy")
    found = tree_build(log_probs, tokens, budget, version=version, executor="gpu")
    assert_same(found, expected)


@pytest.mark.gpu
@FOR_LARGE_TREES
@pytest.mark.parametrize("value", [0.0, -0.5])
def test_64_positions_of_1024_equal_candidates(value, version):
    log_probs, tokens = random_candidates(0, (1, 64, 1024))
    log_probs[:] = value
    expected = tree_build(log_probs, tokens, 1024, executor="numpy")
    found = tree_build(log_probs, tokens, 1024, version=version, executor="gpu")
    assert_same(found, expected)


@pytest.mark.gpu
def test_full_vocabulary_bf16_from_logits_to_tree():
    logits = np.random.default_rng(2).standard_normal((2, 15, 163840), np.float32) * 4
    logits = bf16.from_float32(logits)
    log_probs, tokens = topk(logits, 64, executor="gpu")
    expected = tree_build(log_probs, tokens, 64, executor="numpy")
    assert_same(tree_build(log_probs, tokens, 64, executor="gpu"), expected)


@pytest.mark.gpu
def test_device_arrays_stay_on_the_device():
    log_probs, tokens = random_candidates(4, (3, 6, 9), 1)
    budgets, roots = np.array([9, 0, 4], np.int32), np.array([1, 2, 3], np.int32)
    on_device = [cuda.to_device(x) for x in (log_probs, tokens, budgets)]
    tree = tree_build(*on_device, root_tokens=cuda.to_device(roots), max_draft_nodes=12)
    assert all(backend.is_device_array(x) for x in vars(tree).values())
    expected = tree_build(
        log_probs, tokens, budgets, root_tokens=roots, max_draft_nodes=12
    )
    assert_same(tree.to_host(), expected)


@pytest.mark.gpu
def test_device_budgets_are_cut_to_the_rows_there_are():
    log_probs, tokens = random_candidates(4, (3, 6, 9))
    on_device = [cuda.to_device(x) for x in (log_probs, tokens, np.int32([-5, 99, 2]))]
    tree = tree_build(*on_device, max_draft_nodes=7).to_host()
    assert tree.n_rows.tolist() == [1, 8, 3]
    tree.validate()


@pytest.mark.gpu
def test_device_budgets_need_max_draft_nodes():
    log_probs, tokens = random_candidates(4, (1, 6, 9))
    on_device = [cuda.to_device(x) for x in (log_probs, tokens, np.int32([3]))]
    with pytest.raises(ValueError, match="max_draft_nodes is None, but n_draft_nodes"):
        tree_build(*on_device)
    with pytest.raises(ValueError, match="check is True, but log_probs lie on the GPU"):
        tree_build(*on_device, max_draft_nodes=3, check=True)
    with pytest.raises(TypeError, match="n_draft_nodes on the host, but log_probs"):
        tree_build(*on_device[:2], [3])


# -------------------------------------------------------------------- the kernel itself


@pytest.mark.parametrize("kernel", [tree_build_kernel, tree_build_small_kernel])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_no_race_in_any_order_of_the_lanes(order, kernel):
    log_probs, tokens = random_candidates(6, (2, 4, 6), 0)
    budgets, roots = np.array([40, 11], np.int32), np.array([8, 9], np.int32)
    expected = tree_build(log_probs, tokens, budgets, root_tokens=roots)
    found = DraftTree(**{name: np.empty_like(x) for name, x in vars(expected).items()})
    report = emulate(
        *(kernel, 2, 64),
        *(log_probs, 0, tokens, budgets, 1, 40, roots, 1),
        *vars(found).values(),
        order=order,
        trace=True,
    )
    assert not report.races
    assert_same(found, expected)


@pytest.mark.parametrize("digits", [2, 0], ids=["in-the-pool", "fallback"])
@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_no_race_in_the_parallel_version(monkeypatch, order, digits):
    monkeypatch.setattr(tree_build_module, "SORTED", 80)
    log_probs, tokens = random_candidates(6, (2, 4, 6), digits)
    budgets, roots = np.array([40, 11], np.int32), np.array([8, 9], np.int32)
    expected = tree_build(log_probs, tokens, budgets, root_tokens=roots)
    found = DraftTree(**{name: np.empty_like(x) for name, x in vars(expected).items()})
    pool = np.empty((2, 3, 500), np.int32), np.empty((2, 500), np.int64)
    report = emulate(
        *(tree_build_parallel_kernel, 2, 64),
        *(log_probs, 0, tokens, budgets, 1, 40, roots, 1),
        *(*pool, np.empty((2, 500))),
        *vars(found).values(),
        order=order,
        trace=True,
    )
    assert not report.races
    assert_same(found, expected)


@pytest.mark.parametrize(
    ("length", "budget", "taken"),
    [
        (EXACT_DEPTH + 1, SMALL, "tree_build_small_kernel"),
        (EXACT_DEPTH, SMALL + 1, "tree_build_parallel_kernel"),
        (EXACT_DEPTH + 1, SMALL + 1, "tree_build_kernel"),
    ],
)
def test_auto_goes_by_budget_and_then_by_how_deep_labels_go(
    monkeypatch, length, budget, taken
):
    candidates = random_candidates(8, (1, length, 2))
    expected = tree_build(*candidates, budget)
    kernels = {f"tree_build{x}_kernel" for x in ("", "_small", "_parallel")}
    for kernel in kernels - {taken}:  # "auto" does without them
        monkeypatch.delattr(tree_build_module, kernel)
    assert_same(tree_build(*candidates, budget, executor="emulator"), expected)


def test_two_candidates_of_one_lane_that_tie(kernel_executor):
    """Rows 1 and 33 have one lane of the small version, and children of one score."""
    table = np.full((1, 3, 30), -INF, np.float32)
    table[0, 0, :2] = 0, -0.25
    table[0, 1, :2] = -0.125, -0.375
    table[0, 2] = -np.arange(1, 31) / 512
    tokens = np.zeros(table.shape, np.int32)
    tree = tree_build(table, tokens, 35, version="small", executor=kernel_executor)
    assert tree.parents[0, 33:].tolist() == [0, 1, 33]
    assert tree.log_probs[0, 34:].tolist() == [-0.375, -0.375]


def test_the_small_version_takes_small_trees_only(executor):
    candidates = random_candidates(8, (1, 2, 3))
    with pytest.raises(ValueError, match="up to 65; version 'small' takes up to 64"):
        tree_build(
            *candidates, 3, max_draft_nodes=65, version="small", executor=executor
        )


@cuda.jit
def label_kernel(
    paths,  # [P, L] i32: ranks, -1 behind a path's end
    labels,  # out [P] i64
):
    p = cuda.threadIdx.x
    label = np.int64(0)
    for depth in range(paths.shape[1] - 1, -1, -1):
        if paths[p, depth] >= 0:
            label = put_rank_before(paths[p, depth], label)
    labels[p] = label


def code(rank: int) -> str:
    """A rank's bits: as many ones as rank + 1 has doublings, a 0, and the rest."""
    binary = f"{rank + 1:b}"
    return "1" * (len(binary) - 1) + "0" + binary[1:]


def test_labels_are_codes_of_ranks_cut_off_after_63_bits(kernel_executor):
    rng = np.random.default_rng(0)
    given = [tuple(rng.geometric(0.4, rng.integers(1, 13)) - 1) for _ in range(29)]
    given += [(1023,), (5, 1023, 1023, 1023), (1023,) * 12]
    paths = np.full((32, 12), -1, np.int32)
    for row, path in zip(paths, given, strict=True):
        row[: len(path)] = path
    at = place(kernel_executor, paths=paths)
    labels = at.empty((32,), np.int64)
    at.launch(label_kernel, 1, 32, at.put(paths), labels)
    labels = at.give(labels).tolist()
    codes = ["".join(code(int(rank)) for rank in path) for path in given]
    assert labels == [int(x[:63].ljust(63, "0"), 2) for x in codes]
    whole = [p for p in range(32) if len(codes[p]) <= 63]
    in_order = sorted(whole, key=lambda p: (labels[p], len(given[p])))
    assert in_order == sorted(whole, key=lambda p: given[p])
    assert len(whole) < 32


@pytest.mark.parametrize(
    ("shape", "budget"), [((1, 3, 12), 150), ((1, 43, 2), 90), ((1, 2, 24), 200)]
)
def test_labels_order_wide_and_deep_paths_that_tie(alone, shape, budget):
    """Nodes of a depth tie here, and those of two depths where a step costs nothing."""
    log_probs, tokens = random_candidates(2, shape)
    log_probs[:] = -0.5
    log_probs[:, 1::3, 0] = 0
    given = log_probs, tokens, budget
    tree = tree_build(*given, version="parallel", executor="emulator")
    assert_same(tree, tree_build(*given, executor="numpy"))


@pytest.mark.ptx
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)])
def test_ptx_adds_scores_in_float64_and_needs_no_local_memory(cc):
    i1, i2 = int32[::1], int32[:, ::1]
    table, candidates = float32[:, :, ::1], int32[:, :, ::1]
    outputs = (i2, i2, i2, i2, i2, float32[:, ::1], uint32[:, :, ::1], i1)
    given = (table, int32, candidates, i1, int32, int32, i1, int32)
    pool = int32[:, :, ::1], int64[:, ::1], float64[:, ::1]
    for kernel, signature in (
        (tree_build_kernel, given + outputs),
        (tree_build_small_kernel, given + outputs),
        (tree_build_parallel_kernel, given + pool + outputs),
    ):
        ptx = backend.compile_ptx(kernel, signature, compute_capability=cc)
        assert "add.f64" in ptx
        assert "mul.f64" not in ptx
        assert ".local" not in ptx


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("budget", [-1, [3, -1]])
def test_a_negative_budget_is_an_error(executor, budget):
    candidates = random_candidates(0, (2, 2, 3))
    with pytest.raises(ValueError, match="n_draft_nodes is .*-1.*; expected 0 … "):
        tree_build(*candidates, budget, executor=executor)


@pytest.mark.parametrize("budget", [6, [3, 6]])
def test_a_budget_above_max_draft_nodes_is_an_error(executor, budget):
    candidates = random_candidates(0, (2, 2, 3))
    with pytest.raises(ValueError, match="n_draft_nodes is .*6.*; expected 0 … 5"):
        tree_build(*candidates, budget, max_draft_nodes=5, executor=executor)


@pytest.mark.parametrize(
    ("budget", "most"), [(1025, None), ([1025], None), (1, 1025)], ids=str
)
def test_more_rows_than_the_kernel_holds_is_an_error(executor, budget, most):
    candidates = random_candidates(0, (1, 2, 3))
    with pytest.raises(ValueError, match="nodes is .*1025.*; expected 0 … 1024"):
        tree_build(*candidates, budget, max_draft_nodes=most, executor=executor)


@pytest.mark.parametrize("name", ["n_draft_nodes", "max_draft_nodes"])
@pytest.mark.parametrize("count", [True, 2.0, "2"], ids=repr)
def test_a_budget_that_is_no_count_is_a_type_error(executor, name, count):
    candidates = random_candidates(0, (1, 2, 3))
    budgets = {"n_draft_nodes": 1, name: count}
    with pytest.raises(TypeError, match=f"{name} is {count!r} .*; expected an int, 0 "):
        tree_build(*candidates, **budgets, executor=executor)


@pytest.mark.parametrize("score", [1e-7, np.inf])
def test_log_probs_above_0_are_an_error_that_names_them(executor, score):
    log_probs, tokens = random_candidates(0, (3, 4, 5))
    log_probs[2, 1, 0] = score
    with pytest.raises(ValueError, match="log_probs, request 2, row 1 holds"):
        tree_build(log_probs, tokens, 4, executor=executor)


def test_a_negative_token_is_an_error_unless_it_is_never_a_node(executor):
    log_probs, tokens = random_candidates(0, (3, 4, 5))
    tokens[2, 1, 4] = -2
    with pytest.raises(ValueError, match="token_ids, request 2, row 1 holds -2"):
        tree_build(log_probs, tokens, 4, executor=executor)
    log_probs[2, 1, 4] = -np.inf
    assert (tree_build(log_probs, tokens, 4, executor=executor).n_rows == 5).all()


@EVERY_VERSION
def test_unchecked_candidates_give_the_same_tree_everywhere(kernel_executor, version):
    log_probs, tokens = random_candidates(0, (1, 3, 4))
    for spoilt in (log_probs[..., ::-1], -log_probs, log_probs + np.inf):
        trees = [
            tree_build(
                spoilt, tokens - 2, 7, check=False, version=version, executor=where
            )
            for where in (kernel_executor, "numpy")
        ]
        for name, x in vars(trees[0]).items():
            np.testing.assert_array_equal(x, getattr(trees[1], name), err_msg=name)


def test_log_probs_below_float32_stay_finite(executor):
    lowest = np.finfo(np.float32).min
    candidates = np.full((1, 3, 1), lowest), np.zeros((1, 3, 1), np.int32)
    tree = tree_build(*candidates, 3, executor=executor)
    tree.validate()
    assert tree.log_probs.tolist() == [[0, lowest, lowest, lowest]]


def test_rows_that_rise_are_an_error_that_names_them(executor):
    log_probs, tokens = random_candidates(0, (3, 4, 5))
    log_probs[2, 1, 3] = 0
    with pytest.raises(ValueError, match="log_probs, request 2, row 1 rises"):
        tree_build(log_probs, tokens, 4, executor=executor)


def test_bad_arguments_are_named(executor):
    log_probs, tokens = random_candidates(0, (2, 3, 4))

    def fails(error, message, *arguments, **options):
        with pytest.raises(error, match=message):
            tree_build(*arguments, executor=executor, **options)

    fails(TypeError, "log_probs has dtype float64", log_probs.astype(float), tokens, 4)
    fails(ValueError, r"log_probs has shape \(3, 4\)", log_probs[0], tokens[0], 4)
    fails(ValueError, r"token_ids has shape \(2, 3, 3\)", log_probs, tokens[..., :3], 4)
    fails(TypeError, "token_ids has dtype float", log_probs, tokens.astype("f4"), 4)
    fails(ValueError, r"n_draft_nodes has shape \(3,\)", log_probs, tokens, [4, 4, 4])
    fails(TypeError, "n_draft_nodes has dtype float", log_probs, tokens, [4.0, 4.0])
    roots = {"root_tokens": [1, 2, 3]}
    fails(ValueError, r"root_tokens has shape \(3,\)", log_probs, tokens, 4, **roots)
