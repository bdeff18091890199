"""tree_accept on every executor: the longest path that agrees with the target."""

from dataclasses import replace

import numpy as np
import pytest
from conftest import GPU
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda, int32
from random_trees import CAT, DOG, RAN, SAT, random_tree, worked_example

from ddtree_numba import backend
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels.tree_accept import (
    THREADS,
    tree_accept,
    tree_accept_kernel,
)
from ddtree_numba.reference import (
    ACCEPT_BACKWARD,
    ACCEPT_OK,
    ACCEPT_OUT_OF_RANGE,
    Accepted,
)
from ddtree_numba.tree import DraftTree

EVERY_EXECUTOR = pytest.mark.parametrize("executor", ["numpy", "emulator", GPU])


def accept_one(tree: DraftTree, targets: list, executor: str, **options) -> tuple:
    """Accepted rows (without padding), bonus and status of a batch of one."""
    found = tree_accept(tree, [targets], executor=executor, **options)
    length = found.accept_len[0]
    assert (found.rows[0, length:] == -1).all()
    assert (found.rows[0, :length] >= 0).all()
    return found.rows[0, :length].tolist(), int(found.bonus[0]), int(found.status[0])


def brute_force(tree: DraftTree, targets: np.ndarray, b: int) -> list[int]:
    """Longest path of which every step is the lowest child with the target's token."""
    children = tree.children(b)

    def agrees(path: list[int]) -> bool:
        return all(
            child
            == min(
                (c for c in children[row] if tree.token_ids[b, c] == targets[b, row]),
                default=None,
            )
            for row, child in zip(path[:-1], path[1:], strict=True)
        )

    return max(filter(agrees, tree.paths(b)), key=len)


def assert_same(found: Accepted, expected: Accepted) -> None:
    for name in Accepted._fields:
        one, other = getattr(found, name), getattr(expected, name)
        assert one.dtype == other.dtype == np.int32, name
        np.testing.assert_array_equal(one, other, err_msg=name)


# ----------------------------------------------------------------- the cases by name


def test_worked_example_follows_the_dog(executor):
    targets = [DOG, 0, 0, SAT, RAN]
    found = accept_one(worked_example(), targets, executor)
    assert found == ([0, 3, 4], RAN, ACCEPT_OK)


def test_accept_cycle_between_siblings_ends_with_a_status(executor):
    tree = DraftTree.from_parents([-1, 0, 0, 0], [9, 1, 2, 3])
    tree.next_sibling[0] = [-1, 2, 1, -1]
    found = accept_one(tree, [8, 8, 8, 8], executor)
    assert found == ([0], 8, ACCEPT_BACKWARD)


def test_accept_cycle_through_a_child_keeps_the_path_so_far(executor):
    tree = DraftTree.from_parents([-1, 0, 1, 0], [9, 1, 2, 3])
    tree.next_token[0, 2] = 1
    found = accept_one(tree, [1, 2, 1, 1], executor)
    assert found == ([0, 1, 2], 1, ACCEPT_BACKWARD)


@pytest.mark.parametrize("pointer", [-7, 3, 4, 2**31 - 1, -(2**31)])
@pytest.mark.parametrize("field", ["next_token", "next_sibling"])
def test_accept_out_of_range_is_a_status_and_reads_nothing(executor, field, pointer):
    tree = DraftTree.from_parents([-1, 0, 1, 0], [9, 1, 2, 3], n_rows=[3])
    row = 0 if field == "next_token" else 1
    getattr(tree, field)[0, row] = pointer  # row 3 is padding, row 4 is beyond
    found = accept_one(tree, [3, 3, 3, 3], executor)
    assert found == ([0], 3, ACCEPT_OUT_OF_RANGE)


def test_more_rows_than_the_arrays_have_reads_nothing_outside(executor):
    tree = DraftTree.from_parents([-1, 0, 1], [9, 1, 2])
    tree.n_rows[0], tree.next_token[0, 1] = 100, 50
    assert accept_one(tree, [1, 2, 3], executor) == ([0, 1], 2, ACCEPT_OUT_OF_RANGE)


def test_accept_pad_token_never_matches_padding(executor):
    tree = DraftTree.from_parents([-1, 0, 0, 0], [9, 5, 0, 0], n_rows=[2])
    assert accept_one(tree, [0, 0, 0, 0], executor) == ([0], 0, ACCEPT_OK)


def test_accept_duplicate_siblings_takes_the_lower_row(executor):
    tree = DraftTree.from_parents([-1, 0, 0], [9, 7, 7])
    assert accept_one(tree, [7, 1, 2], executor) == ([0, 1], 1, ACCEPT_OK)


def test_accept_other_branch_is_not_entered(executor):
    tree = DraftTree.from_parents([-1, 0, 0, 2], [9, 1, 2, 3])
    assert accept_one(tree, [3, 0, 0, 0], executor) == ([0], 3, ACCEPT_OK)


def test_accept_no_target_matches_nothing_not_even_a_negative_token(executor):
    tree = DraftTree.from_parents([-1, 0], [9, 1])
    tree.token_ids[0, 1] = -1
    assert accept_one(tree, [-1, -1], executor) == ([0], -1, ACCEPT_OK)


@pytest.mark.parametrize("length", range(1, 10))
def test_accept_lengths_from_the_root_alone_to_the_whole_path(executor, length):
    tree = DraftTree.from_parents(range(-1, 8), range(9))
    targets = [i + 1 if i + 1 < length else 77 for i in range(9)]
    found = accept_one(tree, targets, executor)
    assert found == (list(range(length)), 77, ACCEPT_OK)


def test_a_path_longer_than_max_depth_stops_there(executor):
    tree = DraftTree.from_parents(range(-1, 8), range(9))
    targets = list(range(1, 10))
    assert accept_one(tree, targets, executor, max_depth=3) == ([0, 1, 2, 3], 4, 0)
    assert accept_one(tree, targets, executor, max_depth=0) == ([0], 1, 0)


def test_rows_have_a_column_a_depth(executor):
    tree = worked_example()
    targets = np.zeros((1, 5), np.int32)
    for max_depth, width in ((None, 5), (2, 3), (15, 16)):
        found = tree_accept(tree, targets, max_depth=max_depth, executor=executor)
        assert found.rows.shape == (1, width)


# ------------------------------------------------------------------- random trees

trees = st.builds(
    lambda seed, batch, n, vocab, bias: random_tree(
        np.random.default_rng(seed), batch, n, vocab=vocab, depth_bias=bias
    ),
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 40),
    st.integers(1, 4),
    st.sampled_from([-0.7, 0, 0.7]),
)


def targets_for(tree: DraftTree, seed: int) -> np.ndarray:
    shape = tree.token_ids.shape
    return np.random.default_rng(seed).integers(-1, 3, shape).astype(np.int32)


@EVERY_EXECUTOR
@given(tree=trees, seed=st.integers(0, 99))
@settings(max_examples=40, deadline=None)
def test_random_trees_accept_what_brute_force_accepts(executor, tree, seed):
    targets = targets_for(tree, seed)
    found = tree_accept(tree, targets, executor=executor)
    assert not found.status.any()
    for b in range(tree.batch):
        expected = brute_force(tree, targets, b)
        assert found.rows[b, : found.accept_len[b]].tolist() == expected
        assert found.bonus[b] == targets[b, expected[-1]]


@pytest.mark.parametrize("executor", ["emulator", GPU])
@given(tree=trees, data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_pointers_at_all_end_as_the_reference_says(executor, tree, data):
    wild = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, tree.max_rows + 1)
    rows = st.lists(wild, min_size=tree.max_rows, max_size=tree.max_rows)
    for pointers in (tree.next_token, tree.next_sibling, tree.token_ids):
        pointers[0] = data.draw(rows)
    tree.n_rows[0] = data.draw(wild)
    targets = targets_for(tree, 0)
    expected = tree_accept(tree, targets, executor="numpy")
    assert_same(tree_accept(tree, targets, executor=executor), expected)


@given(tree=trees, seed=st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_accept_tree_vs_chain_a_tree_accepts_at_least_as_much(tree, seed):
    targets = targets_for(tree, seed)
    in_tree = tree_accept(tree, targets, executor="numpy")
    for b in range(tree.batch):
        path = max(tree.paths(b), key=len)
        chain = DraftTree.from_parents(
            range(-1, len(path) - 1), tree.token_ids[b, path]
        )
        alone = tree_accept(chain, targets[b, path][None], executor="numpy")
        assert in_tree.accept_len[b] >= alone.accept_len[0] or duplicates(tree, b)


def duplicates(tree: DraftTree, b: int) -> bool:
    """Whether siblings of request b repeat a token: the walk may then leave a path."""
    tokens = tree.token_ids[b]
    return any(len({*tokens[c]}) < len(c) for c in tree.children(b))


def test_accept_identities_over_a_run_that_writes_a_text():
    """Σ h = rounds, and the committed tokens, Σ (drafts + 1) h, are the text."""
    rng = np.random.default_rng(0)
    text = rng.integers(3, size=400)
    end = len(text) - 20  # a round never looks past the end
    written, histogram = [int(text[0])], np.zeros(20, int)
    rounds = 0
    while len(written) < end:
        tree = random_tree(rng, 1, 20, depth_bias=0.5)
        tree.token_ids[0, 0] = written[-1]
        targets = text[tree.positions([len(written) - 1]) + 1]
        found = tree_accept(tree, targets.astype(np.int32), executor="numpy")
        path = found.rows[0, 1 : found.accept_len[0]]
        written += [*tree.token_ids[0, path].tolist(), int(found.bonus[0])]
        histogram[len(path)] += 1
        rounds += 1
    assert written == text[: len(written)].tolist()
    assert histogram.sum() == rounds
    assert (histogram * np.arange(1, 21)).sum() == len(written) - 1
    assert (histogram[:4] > 0).all()


# ---------------------------------------------------------------- full size and device


@pytest.mark.gpu
@pytest.mark.parametrize("depth_bias", [-0.9, 0, 0.98])
def test_full_size_b64_n1025_equals_the_reference(depth_bias):
    rng = np.random.default_rng(1)
    tree = random_tree(rng, 64, 1025, vocab=2, depth_bias=depth_bias)
    targets = rng.integers(2, size=(64, 1025)).astype(np.int32)
    expected = tree_accept(tree, targets, executor="numpy")
    assert_same(tree_accept(tree, targets, executor="gpu"), expected)


@pytest.mark.gpu
def test_device_arrays_stay_on_the_device():
    tree = worked_example()
    targets = np.array([[DOG, 0, 0, SAT, RAN]], np.int32)
    expected = tree_accept(tree, targets, executor="numpy")
    fields = ("token_ids", "next_token", "next_sibling", "n_rows")
    on_device = replace(tree, **{f: cuda.to_device(getattr(tree, f)) for f in fields})
    found = tree_accept(on_device, cuda.to_device(targets))
    assert all(backend.is_device_array(x) for x in found)
    assert_same(Accepted(*(x.copy_to_host() for x in found)), expected)


# -------------------------------------------------------------------- the kernel itself


@pytest.mark.parametrize("order", ["forward", "reverse", "shuffled"])
def test_lanes_share_nothing(order):
    rng = np.random.default_rng(2)
    tree = random_tree(rng, 40, 12)  # two blocks, the second part full
    targets = rng.integers(3, size=(40, 12)).astype(np.int32)
    expected = tree_accept(tree, targets, max_depth=5, executor="numpy")
    found = Accepted(*(np.full_like(x, -99) for x in expected))
    report = emulate(
        *(tree_accept_kernel, 2, THREADS),
        *(tree.token_ids, tree.next_token, tree.next_sibling, tree.n_rows),
        *(targets, *found),
        order=order,
        trace=True,
    )
    assert not report.races
    assert_same(found, expected)


@pytest.mark.ptx
@pytest.mark.parametrize("cc", [(8, 0), (9, 0), (12, 0)])
def test_ptx_needs_no_float64_and_no_local_memory(cc):
    i1, i2 = int32[::1], int32[:, ::1]
    signature = (i2, i2, i2, i1, i2, i2, i1, i1, i1)
    ptx = backend.compile_ptx(tree_accept_kernel, signature, compute_capability=cc)
    assert ".f64" not in ptx
    assert ".local" not in ptx


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (np.zeros((1, 4), np.int32), ValueError, r"target_tokens has shape \(1, 4\)"),
        (np.zeros(5, np.int32), ValueError, r"target_tokens has shape \(5,\)"),
        (np.zeros((1, 5), np.float32), TypeError, "target_tokens has dtype float32"),
        (
            np.full((1, 5), 2**40),
            ValueError,
            "target_tokens holds values outside int32",
        ),
    ],
)
def test_bad_targets_are_named(executor, targets, error, message):
    with pytest.raises(error, match=message):
        tree_accept(worked_example(), targets, executor=executor)


def test_negative_max_depth_is_an_error(executor):
    with pytest.raises(ValueError, match="max_depth is -1; expected 0 or more"):
        accept_one(worked_example(), [CAT] * 5, executor, max_depth=-1)


@pytest.mark.parametrize("max_depth", [True, 2.0, "2"], ids=repr)
def test_a_max_depth_that_is_no_count_is_a_type_error(executor, max_depth):
    with pytest.raises(TypeError, match="max_depth is .*; expected an int, 0 or more"):
        accept_one(worked_example(), [CAT] * 5, executor, max_depth=max_depth)


def test_what_is_no_tree_of_arrays_is_an_error(executor):
    targets, tree = np.zeros((1, 5), np.int32), worked_example()
    with pytest.raises(TypeError, match="tree is a NoneType; expected a DraftTree"):
        tree_accept(None, targets, executor=executor)
    lists = replace(tree, token_ids=tree.token_ids.tolist())
    with pytest.raises(TypeError, match="token_ids has dtype int64; expected int32"):
        tree_accept(lists, targets, executor=executor)
    flat = replace(tree, token_ids=tree.token_ids[0])
    with pytest.raises(ValueError, match=r"token_ids has shape \(5,\); expected 2 dim"):
        tree_accept(flat, targets, executor=executor)
    rootless = replace(tree, token_ids=tree.token_ids[:, :0])
    with pytest.raises(ValueError, match="token_ids has no rows"):
        tree_accept(rootless, targets[:, :0], executor=executor)


def test_a_tree_of_another_dtype_is_an_error(executor):
    tree = worked_example()
    wide = replace(tree, next_token=tree.next_token.astype(np.int64))
    with pytest.raises(TypeError, match="next_token has dtype int64; expected int32"):
        accept_one(wide, [CAT] * 5, executor)


def test_an_empty_batch_gives_empty_answers(executor):
    if executor == "gpu":
        pytest.skip("a device array cannot be empty")
    tree = worked_example()
    names = tree.__dataclass_fields__
    empty = DraftTree(**{name: getattr(tree, name)[:0] for name in names})
    found = tree_accept(empty, np.zeros((0, 5), np.int32), executor=executor)
    assert [x.shape for x in found] == [(0, 5), (0,), (0,), (0,)]
