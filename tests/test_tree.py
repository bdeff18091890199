"""DraftTree: invariants, masks, positions, and its views as table and text."""

from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numba import cuda
from random_trees import WORDS, random_tree, worked_example

from ddtree_numba.tree import DraftTree, n_words, quoted

FIELDS = [field.name for field in fields(DraftTree)]

trees = st.builds(
    lambda seed, batch, n, bias: random_tree(
        np.random.default_rng(seed), batch, n, depth_bias=bias
    ),
    st.integers(0, 2**32),
    st.integers(1, 3),
    st.integers(1, 70),
    st.sampled_from([-0.9, 0, 0.9]),
)


def padded_batch() -> DraftTree:
    """The worked example as request 0, the same without its last two rows as 1."""
    parents = [[-1, 0, 1, 0, 3]] * 2
    scores = np.log([1, 0.6, 0.48, 0.3, 0.24])
    return DraftTree.from_parents(parents, [10, 11, 12, 13, 12], scores, [5, 3])


def bits(rows: np.ndarray) -> list[str]:
    return ["".join(map(str, row.astype(int))) for row in rows]


# ------------------------------------------------------------------------ from parents


def test_worked_example_has_the_pointers_of_the_page():
    tree = worked_example()
    assert tree.depths.tolist() == [[0, 1, 2, 1, 2]]
    assert tree.next_token.tolist() == [[1, 2, -1, 4, -1]]
    assert tree.next_sibling.tolist() == [[-1, 3, -1, -1, -1]]
    assert tree.visibility[0, :, 0].tolist() == [0x01, 0x03, 0x07, 0x09, 0x19]
    np.testing.assert_allclose(np.exp(tree.log_probs[0, 1:]).sum(), 1.62, rtol=1e-6)


def test_padding_is_filled_as_the_contract_says():
    tree = padded_batch()
    for name in ("token_ids", "parents", "depths", "next_token", "next_sibling"):
        assert getattr(tree, name)[1, 3:].tolist() == [-1, -1], name
    assert tree.log_probs[1, 3:].tolist() == [-np.inf, -np.inf]
    assert not tree.visibility[1, 3:].any()
    assert tree.next_sibling[1].tolist() == [-1, -1, -1, -1, -1]


def test_every_array_has_the_dtype_of_the_contract():
    dtypes = {name: getattr(worked_example(), name).dtype.name for name in FIELDS}
    assert dtypes.pop("log_probs") == "float32"
    assert dtypes.pop("visibility") == "uint32"
    assert set(dtypes.values()) == {"int32"}


def test_one_list_of_parents_is_a_batch_of_one_with_row_numbers_as_tokens():
    tree = DraftTree.from_parents([-1, 0, 0])
    assert (tree.batch, tree.max_rows) == (1, 3)
    assert tree.token_ids.tolist() == [[0, 1, 2]]
    assert tree.log_probs.tolist() == [[0, 0, 0]]


def test_the_arrays_given_are_not_changed():
    parents = np.array([[-1, 0, 1]], np.int32)
    tokens = np.array([[5, 6, 7]], np.int32)
    DraftTree.from_parents(parents, tokens, n_rows=[2])
    assert parents.tolist() == [[-1, 0, 1]]
    assert tokens.tolist() == [[5, 6, 7]]


@pytest.mark.parametrize("parent", [-1, 2, 3, -5])
def test_a_parent_that_does_not_stand_before_its_child_is_an_error(parent):
    with pytest.raises(
        ValueError, match=rf"request 0, row 2: parent {parent}; .*0 … 1"
    ):
        DraftTree.from_parents([-1, 0, parent])


@pytest.mark.parametrize("live", [0, 4, -1])
def test_live_rows_out_of_range_are_an_error(live):
    with pytest.raises(ValueError, match=rf"request 1: n_rows {live}; expected 1 … 3"):
        DraftTree.from_parents([[-1, 0, 0]] * 2, n_rows=[3, live])


@pytest.mark.parametrize(
    ("field", "x", "error", "message"),
    [
        ("parents", [-1, 0.5], TypeError, "dtype float64; expected int32"),
        ("token_ids", [1.5, 2.0], TypeError, "dtype float64; expected int32"),
        ("token_ids", [1, 2, 3], ValueError, r"shape \(3,\); expected \(1, 2\)"),
        ("log_probs", [[0.0], [0.0]], ValueError, r"shape \(2, 1\); expected \(1, 2\)"),
        ("n_rows", [2, 2], ValueError, r"shape \(2,\); expected \(1,\)"),
        ("n_rows", [2.0], TypeError, "dtype float64; expected int32"),
    ],
)
def test_arrays_that_do_not_fit_are_named(field, x, error, message):
    with pytest.raises(error, match=f"{field} has {message}"):
        DraftTree.from_parents(**{"parents": [-1, 0], field: x})


def test_parents_of_rank_3_are_an_error():
    with pytest.raises(ValueError, match=r"parents has shape \(1, 1, 1\)"):
        DraftTree.from_parents([[[-1]]])


@given(tree=trees)
@settings(max_examples=60, deadline=None)
def test_random_trees_are_valid_and_pointers_list_the_children(tree):
    tree.validate()
    for b in range(tree.batch):
        for row, expected in enumerate(tree.children(b)):
            listed, child = [], tree.next_token[b, row]
            while child != -1:
                listed.append(int(child))
                child = tree.next_sibling[b, child]
            assert listed == expected


# -------------------------------------------------------------------------- validation

BROKEN = {  # field: (index, value, message)
    "a draft token below 0": ("token_ids", (0, 2), -1, "request 0, row 2: token_ids"),
    "the root has a parent": ("parents", (1, 0), 0, "request 1, row 0: parents 0"),
    "a parent after its child": ("parents", (0, 2), 3, "request 0, row 2: parents 3"),
    "a row its own parent": ("parents", (0, 3), 3, "request 0, row 3: parents 3"),
    "a parent below 0": ("parents", (0, 3), -1, "request 0, row 3: parents -1"),
    "another parent": ("parents", (0, 4), 1, "request 0, row 2: next_sibling"),
    "the root's depth": ("depths", (1, 0), 1, "request 1, row 0: depths 1"),
    "a depth": ("depths", (0, 4), 1, "request 0, row 4: depths 1; expected 2"),
    "a first child": ("next_token", (0, 0), 3, "row 0: next_token 3; expected 1"),
    "a leaf with a child": ("next_token", (0, 4), 2, "row 4: next_token 2"),
    "the root's sibling": ("next_sibling", (0, 0), 1, "row 0: next_sibling 1"),
    "a lost sibling": (
        "next_sibling",
        (0, 1),
        -1,
        "row 1: next_sibling -1; expected 3",
    ),
    "a cousin": ("next_sibling", (0, 2), 4, "row 2: next_sibling 4; expected -1"),
    "the root's log-prob": ("log_probs", (0, 0), -0.1, "row 0: log_probs"),
    "a rising log-prob": ("log_probs", (0, 3), -0.1, "request 0, row 3: log_probs"),
    "a NaN log-prob": ("log_probs", (0, 4), np.nan, "row 4: log_probs nan"),
    "an impossible node": ("log_probs", (0, 4), -np.inf, "row 4: log_probs -inf"),
    "a row blind to itself": (
        "visibility",
        (0, 2, 0),
        3,
        "request 0, row 2: visibility",
    ),
    "a row that sees a cousin": ("visibility", (0, 4, 0), 0x1D, "row 4: visibility"),
    "a row that sees padding": ("visibility", (1, 2, 0), 0x0F, "row 2: visibility"),
    "no live rows": ("n_rows", (1,), 0, "request 1: n_rows 0; expected 1 … 5"),
    "too many rows": ("n_rows", (1,), 6, "request 1: n_rows 6; expected 1 … 5"),
    "a lost row": ("n_rows", (0,), 4, "request 0, row 3: next_token 4; expected -1"),
    "padding with a token": ("token_ids", (1, 3), 0, "request 1, row 3: token_ids 0"),
    "padding with a parent": ("parents", (1, 4), 0, "request 1, row 4: parents 0"),
    "padding with a depth": ("depths", (1, 3), 1, "request 1, row 3: depths 1"),
    "padding with a child": ("next_token", (1, 3), 4, "request 1, row 3: next_token"),
    "padding with a sibling": ("next_sibling", (1, 4), 4, "row 4: next_sibling 4"),
    "padding with a log-prob": ("log_probs", (1, 4), 0, "request 1, row 4: log_probs"),
    "padding that sees": ("visibility", (1, 4, 0), 1, "request 1, row 4: visibility"),
}


def test_the_broken_trees_below_break_every_field():
    assert {field for field, *_ in BROKEN.values()} == set(FIELDS)


@pytest.mark.parametrize("what", BROKEN)
def test_validate_names_the_field_the_request_and_the_row(what):
    field, index, value, message = BROKEN[what]
    tree = padded_batch()
    tree.validate()
    getattr(tree, field)[index] = value
    with pytest.raises(ValueError) as caught:
        tree.validate()
    assert message in str(caught.value)


@pytest.mark.parametrize("field", FIELDS)
def test_validate_names_an_array_of_another_dtype(field):
    tree = padded_batch()
    wrong = replace(tree, **{field: np.zeros_like(getattr(tree, field), np.int64)})
    with pytest.raises(TypeError, match=f"{field} has dtype int64; expected"):
        wrong.validate()


@pytest.mark.parametrize("field", [name for name in FIELDS if name != "token_ids"])
def test_validate_names_an_array_of_another_shape(field):
    tree = padded_batch()
    wrong = replace(tree, **{field: getattr(tree, field)[..., :0]})
    with pytest.raises(ValueError, match=f"{field} has shape .*; expected"):
        wrong.validate()


def test_validate_wants_tokens_of_rank_2():
    tree = padded_batch()
    with pytest.raises(
        ValueError, match=r"token_ids has shape \(5,\); expected \[B, N\]"
    ):
        replace(tree, token_ids=tree.token_ids[0]).validate()


def test_siblings_may_repeat_a_token_and_the_root_may_have_none():
    DraftTree.from_parents([-1, 0, 0], [-1, 7, 7]).validate()


# ------------------------------------------------------------------- positions and mask


def test_positions_depth_siblings_share_a_position():
    tree = DraftTree.from_parents([-1, 0, 1, 0, 3])
    assert tree.positions([3]).tolist() == [[3, 4, 5, 4, 5]]
    assert tree.positions([3]).dtype == np.int32


def test_positions_of_padding_are_minus_one():
    assert padded_batch().positions([3, 9]).tolist() == [
        [3, 4, 5, 4, 5],
        [9, 10, 11, -1, -1],
    ]


def test_positions_want_a_prefix_length_a_request():
    with pytest.raises(
        ValueError, match=r"prefix_lens has shape \(3,\); expected \(2,\)"
    ):
        padded_batch().positions([1, 2, 3])


def test_mask_siblings_do_not_see_each_other():
    assert bits(DraftTree.from_parents([-1, 0, 0]).mask(0, 0)) == ["100", "110", "101"]


def test_mask_ragged_each_request_has_its_own_prefix():
    tree = DraftTree.from_parents([[-1, 0, 0]] * 2)
    assert bits(tree.mask(0, 2)) == ["11100", "11110", "11101"]
    assert bits(tree.mask(1, 5)) == ["11111100", "11111110", "11111101"]
    # In a cache 8 columns wide, request 0's columns 5 … 7 do not exist for it.
    assert tree.mask(0, 2).shape == (3, 5)


def test_mask_padding_row_sees_nothing_not_even_the_prefix():
    mask = padded_batch().mask(1, 2)
    assert mask.dtype == bool
    assert bits(mask) == ["1110000", "1111000", "1111100", "0000000", "0000000"]


def test_mask_33_rows_need_a_second_word():
    chain = DraftTree.from_parents(range(-1, 32))
    assert chain.visibility.shape == (1, 33, 2)
    assert chain.visibility[0, 31].tolist() == [0xFFFFFFFF, 0]
    assert chain.visibility[0, 32].tolist() == [0xFFFFFFFF, 1]
    star = DraftTree.from_parents([-1] + [0] * 32)
    assert star.visibility[0, 32].tolist() == [1, 1]
    assert star.mask(0, 0).shape == (33, 33)
    assert np.flatnonzero(star.mask(0, 0)[32]).tolist() == [0, 32]


@pytest.mark.parametrize(("rows", "words"), [(1, 1), (32, 1), (33, 2), (1025, 33)])
def test_words_that_hold_a_bit_a_row(rows, words):
    assert n_words(rows) == words


@given(tree=trees, prefix_len=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_a_row_sees_the_prefix_and_its_path(tree, prefix_len):
    for b in range(tree.batch):
        mask, paths = tree.mask(b, prefix_len), tree.paths(b)
        assert len(paths) == tree.n_rows[b]
        for row, path in enumerate(paths):
            expected = [*range(prefix_len), *(prefix_len + i for i in path)]
            assert np.flatnonzero(mask[row]).tolist() == expected
            assert (path[0], path[-1]) == (0, row)
            assert len(path) == tree.depths[b, row] + 1
        assert not mask[len(paths) :].any()


# -------------------------------------------------------------------------------- views


def test_paths_run_from_the_root_to_each_live_row():
    assert worked_example().paths(0) == [[0], [0, 1], [0, 1, 2], [0, 3], [0, 3, 4]]
    assert padded_batch().paths(1) == [[0], [0, 1], [0, 1, 2]]


def test_children_stand_in_selection_order():
    assert worked_example().children(0) == [[1, 3], [2], [], [4], []]


def test_to_frame_has_one_row_a_live_node():
    frame = padded_batch().to_frame(1)
    assert frame.index.tolist() == [0, 1, 2]
    assert frame.index.name == "row"
    assert frame["parents"].tolist() == [-1, 0, 1]
    np.testing.assert_allclose(frame["prob"], [1, 0.6, 0.48], rtol=1e-6)
    assert list(frame.columns) == [
        *("token_ids", "parents", "depths", "next_token", "next_sibling"),
        *("log_probs", "prob"),
    ]


def words(ids) -> str:
    return " ".join(WORDS[i] for i in ids)


def test_to_text_draws_the_worked_example():
    assert worked_example().to_text(0, words) == (
        "○ The  1.000\n├─ ○ cat·sat  0.480\n└─ ○ dog·sat  0.240"
    )


def test_to_text_marks_the_accepted_path():
    tree = worked_example()
    assert tree.to_text(0, words, accepted=[0, 3, 4]) == (
        "● The  1.000\n├─ ○ cat·sat  0.480\n└─ ● dog·sat  0.240"
    )
    # A run breaks where the path leaves it; -1 is the padding of `Accepted.rows`.
    assert tree.to_text(0, words, accepted=[0, 1, -1, -1]) == (
        "● The  1.000\n├─ ● cat  0.600\n│  └─ ○ sat  0.480\n└─ ○ dog·sat  0.240"
    )


def test_to_text_shows_token_ids_without_a_decoder():
    assert worked_example().to_text() == (
        "○ 10  1.000\n├─ ○ 11 12  0.480\n└─ ○ 13 12  0.240"
    )


def test_to_text_draws_no_padding():
    assert padded_batch().to_text(1) == "○ 10  1.000\n└─ ○ 11 12  0.480"


def test_to_text_indents_below_a_branch_that_goes_on():
    tree = DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 2])
    assert tree.to_text() == (
        "○ 0  1.000\n"
        "├─ ○ 1  1.000\n"
        "│  ├─ ○ 3  1.000\n"
        "│  └─ ○ 4  1.000\n"
        "└─ ○ 2  1.000\n"
        "   ├─ ○ 5  1.000\n"
        "   └─ ○ 6  1.000"
    )


def test_to_text_keeps_newlines_and_what_cannot_be_seen_visible():
    tree = DraftTree.from_parents([-1, 0, 1, 2], [*b"x\n\t\x00"])
    text = tree.to_text(decode=lambda ids: bytes(ids).decode())
    assert text == "○ x  1.000\n└─ ○ ⏎⇥�  1.000"
    assert quoted(lambda ids: "a b\r\u200b")([]) == "a·b��"


def test_to_text_of_a_chain_of_1025_rows_does_not_recurse():
    text = DraftTree.from_parents(range(-1, 1024)).to_text()
    assert len(text.splitlines()) == 2


def test_a_host_tree_is_its_own_host_copy():
    tree = worked_example()
    assert tree.to_host().token_ids is tree.token_ids


@pytest.mark.gpu
def test_a_device_tree_is_looked_at_through_its_host_copy():
    tree = padded_batch()
    there = DraftTree(**{f: cuda.to_device(getattr(tree, f)) for f in FIELDS})
    there.validate()
    assert there.to_text(1) == tree.to_text(1)
    assert there.positions([3, 9]).tolist() == tree.positions([3, 9]).tolist()
    np.testing.assert_array_equal(there.mask(0, 2), tree.mask(0, 2))
    assert there.to_frame().equals(tree.to_frame())
