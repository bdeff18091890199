"""The specification itself, held to brute force: dense masks, dense softmax, counting.

`topk`, `tree_build`, `tree_accept` and `kv_compact` have their brute force beside their
kernels' tests.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from random_trees import random_tree

from ddtree_numba import bf16, reference
from ddtree_numba.tree import DraftTree

# The reference rounds a float64 result to float32 once: half an ulp is 6e-8.
ROUNDED_ONCE = dict(rtol=6e-8, atol=1e-12)
# 99.9 % points of the chi-square distribution, by degrees of freedom.
CHI_SQUARE = {3: 16.27, 15: 37.70}

trees = st.builds(
    lambda seed, n, bias: random_tree(
        np.random.default_rng(seed), 2, n, depth_bias=bias
    ),
    st.integers(0, 2**32),
    st.integers(1, 40),
    st.sampled_from([-0.9, 0, 0.9]),
)


# -------------------------------------------------------------------------- visibility


@given(tree=trees)
@settings(max_examples=60, deadline=None)
def test_visibility_is_the_path_of_every_live_row(tree):
    words = reference.visibility(tree.parents, tree.n_rows)
    assert words.dtype == np.uint32
    for b in range(tree.batch):
        expected = np.zeros((tree.max_rows, words.shape[2] * 32), np.uint8)
        for row, path in enumerate(tree.paths(b)):
            expected[row, path] = 1
        packed = np.packbits(expected, axis=1, bitorder="little").view(np.uint32)
        np.testing.assert_array_equal(words[b], packed)
    np.testing.assert_array_equal(words, tree.visibility)


# ------------------------------------------------------------------------- verify_attn


def dense_attention(q, cache, prefix_lens, tree, sm_scale, d_latent):
    """Softmax over all columns of the dense mask, in float64."""
    out = np.zeros((*q.shape[:3], d_latent))
    lse = np.full(q.shape[:3], -np.inf)
    for b, prefix in enumerate(prefix_lens):
        mask = tree.mask(b, prefix)
        keys = cache[b, : mask.shape[1]].astype(np.float64)
        scores = np.einsum("nhd,sd->nhs", q[b].astype(np.float64), keys) * sm_scale
        weights = np.exp(scores) * mask[:, None]
        total = weights.sum(axis=-1)
        live = np.arange(len(mask)) < tree.n_rows[b]
        lse[b, live] = np.log(total[live])
        out[b, live] = (weights @ keys[:, :d_latent] / total[..., None])[live]
    return out, lse


@given(tree=trees, prefix=st.tuples(st.integers(0, 9), st.integers(0, 9)))
@settings(max_examples=25, deadline=None)
def test_verify_attn_is_dense_attention_under_the_mask(tree, prefix):
    rng = np.random.default_rng(tree.max_rows)
    q = rng.standard_normal((2, tree.max_rows, 2, 6), np.float32)
    cache = rng.standard_normal((2, 9 + tree.max_rows, 6), np.float32)
    prefix_lens = np.array(prefix, np.int32)
    with np.errstate(divide="ignore", invalid="ignore"):  # 0 / 0 of padding rows
        expected = dense_attention(q, cache, prefix_lens, tree, 0.3, 4)
    for b, start in enumerate(prefix_lens):
        cache[b, start + tree.n_rows[b] :] = np.nan  # never read
    out, lse = reference.verify_attn(
        q, cache, prefix_lens, tree.visibility, sm_scale=0.3, d_latent=4
    )
    np.testing.assert_allclose(out, expected[0], **ROUNDED_ONCE)
    np.testing.assert_allclose(lse, expected[1], **ROUNDED_ONCE)


def test_mask_padding_row_gives_zero_and_minus_infinity():
    tree = DraftTree.from_parents([-1, 0, 0], n_rows=[2])
    ones = np.ones((1, 3, 1, 2), np.float32)
    out, lse = reference.verify_attn(
        ones, ones[:, :, 0], [0], tree.visibility, sm_scale=1.0, d_latent=1
    )
    assert out[0, 2, 0].tolist() == [0]
    assert lse[0, :, 0].tolist() == pytest.approx([2, 2 + np.log(2), -np.inf])


def test_mask_ragged_reads_no_column_of_the_longer_request():
    tree = DraftTree.from_parents([[-1, 0, 0]] * 2)
    cache = np.zeros((2, 8, 2), np.float32)
    cache[0, 5:] = np.nan  # columns 5 … 7 are hidden from request 0
    cache[:, :5, 0] = 1
    q = np.zeros((2, 3, 1, 2), np.float32)
    _, lse = reference.verify_attn(
        q, cache, [2, 5], tree.visibility, sm_scale=1.0, d_latent=1
    )
    keys_seen = np.exp(lse[..., 0]).round(4)
    assert keys_seen.tolist() == [[3, 4, 4], [6, 7, 7]]


@given(tree=trees)
@settings(max_examples=25, deadline=None)
def test_branch_equals_path_a_row_is_causal_attention_over_its_path(tree):
    rng = np.random.default_rng(tree.max_rows)
    prefix, n = 3, tree.max_rows
    q = rng.standard_normal((2, n, 1, 5), np.float32)
    cache = rng.standard_normal((2, prefix + n, 5), np.float32)
    options = dict(sm_scale=0.4, d_latent=3)
    in_tree = reference.verify_attn(q, cache, [prefix] * 2, tree.visibility, **options)
    for row, path in enumerate(tree.paths(0)):
        taken = [*range(prefix), *(prefix + i for i in path)]
        chain = DraftTree.from_parents(range(-1, len(path) - 1))
        alone = reference.verify_attn(
            q[:1, path], cache[:1, taken], [prefix], chain.visibility, **options
        )
        np.testing.assert_array_equal(in_tree[0][0, row], alone[0][0, -1])
        np.testing.assert_array_equal(in_tree[1][0, row], alone[1][0, -1])


def test_absorbed_and_unabsorbed_forms_agree():
    rng = np.random.default_rng(5)
    tree = random_tree(rng, 2, 9)
    heads, d_nope, d_rope, d_latent, d_value = 3, 6, 4, 8, 5
    q_nope = rng.standard_normal((2, 9, heads, d_nope))
    q_rope = rng.standard_normal((2, 9, heads, d_rope))
    w_uk = rng.standard_normal((heads, d_nope, d_latent))
    w_uv = rng.standard_normal((heads, d_value, d_latent))
    cache = rng.standard_normal((2, 20, d_latent + d_rope), np.float32)
    place = (cache, [4, 11], tree.visibility)
    q = reference.absorb_query(q_nope, q_rope, w_uk)
    latent, _ = reference.verify_attn(q, *place, sm_scale=0.2, d_latent=d_latent)
    expanded = reference.verify_attn_unabsorbed(
        q_nope, q_rope, *place, w_uk, w_uv, sm_scale=0.2
    )
    values = np.einsum("bnhc,hvc->bnhv", latent, w_uv)
    # `latent` was rounded to float32 before W_UV sums eight of it.
    np.testing.assert_allclose(values, expanded, rtol=1e-5, atol=1e-5)
    assert np.abs(expanded).max() > 0.5


def test_bf16_bits_are_read_as_the_numbers_that_they_are():
    rng = np.random.default_rng(6)
    tree = random_tree(rng, 1, 5)
    q, cache = (
        bf16.from_float32(rng.standard_normal(shape, np.float32))
        for shape in ((1, 5, 2, 6), (1, 8, 6))
    )
    options = dict(sm_scale=0.3, d_latent=4)
    found = reference.verify_attn(q, cache, [3], tree.visibility, **options)
    wide = (bf16.to_float32(q), bf16.to_float32(cache))
    expected = reference.verify_attn(*wide, [3], tree.visibility, **options)
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(one, other)


# ---------------------------------------------------------------------- merge_partials


@pytest.mark.parametrize("parts", [1, 2, 5])
def test_merged_parts_are_attention_over_all_keys(parts):
    rng = np.random.default_rng(parts)
    keys, query = rng.standard_normal((30, 6)), rng.standard_normal(6)
    owner = rng.integers(parts, size=30)
    split = [
        reference.attend(query, keys[owner == p], keys[owner == p, :4], 0.7)
        for p in range(parts)
    ]
    out, lse = reference.merge_partials(*map(np.array, zip(*split, strict=True)))
    expected = reference.attend(query, keys, keys[:, :4], 0.7)
    assert out.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out, expected[0], **ROUNDED_ONCE)
    np.testing.assert_allclose(lse, expected[1], **ROUNDED_ONCE)


def merge(*parts: tuple[float, float]) -> tuple[float, float]:
    """Merge scalar (out, lse) parts."""
    outs, lses = np.array(parts, np.float32).T
    out, lse = reference.merge_partials(outs[:, None], lses)
    return float(out[0]), float(lse)


def test_attn_merge_empty_parts_give_zero_and_minus_infinity():
    assert merge((1, -np.inf), (2, -np.inf)) == (0, -np.inf)


def test_attn_merge_one_empty_part_counts_for_nothing_even_if_it_is_nan():
    assert merge((1, -np.inf), (5, 0.5)) == (5, 0.5)
    assert merge((np.nan, -np.inf), (5, 0.5)) == (5, 0.5)


def test_attn_partials_f32_are_not_rounded_to_bf16():
    assert merge((1.0, 0.0), (1.0078125, 0.0))[0] == 1.00390625


def test_attn_lse_f32_keeps_the_small_difference():
    assert merge((0, 10.0), (1000, 10.03))[0] == pytest.approx(507.4994, abs=1e-4)


def test_merging_big_lses_does_not_overflow():
    out, lse = merge((1, 1e4), (3, 1e4))
    assert (out, lse) == (2, pytest.approx(1e4 + np.log(2), rel=1e-7))


# ------------------------------------------------------------------------------ argmax


def test_argmax_takes_the_highest_and_the_lowest_id_on_a_tie():
    logits = np.array([[[1, 3, 3, 2], [-np.inf, -5, -np.inf, -5]]], np.float32)
    found = reference.argmax(logits)
    assert found.dtype == np.int32
    assert found.tolist() == [[1, 1]]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bf16"])
def test_argmax_of_every_kind_of_logits(dtype):
    logits = np.random.default_rng(0).integers(-8, 8, (2, 3, 40)).astype(np.float32)
    stored = bf16.from_float32(logits) if dtype == "bf16" else logits.astype(dtype)
    np.testing.assert_array_equal(reference.argmax(stored), logits.argmax(axis=-1))


BAD_ROWS = {
    "holds NaN": [0, np.nan],
    "holds +inf": [0, np.inf],
    "is -inf everywhere": [-np.inf, -np.inf],
}


@pytest.mark.parametrize("why", BAD_ROWS)
def test_argmax_names_a_bad_row_or_answers_minus_one(why):
    logits = np.zeros((2, 2, 2), np.float32)
    logits[1, 0] = BAD_ROWS[why]
    with pytest.raises(ValueError) as caught:
        reference.argmax(logits)
    assert str(caught.value) == f"logits, request 1, row 0 {why}"
    assert reference.argmax(logits, check=False).tolist() == [[0, 0], [-1, 0]]


def test_argmax_does_not_look_at_padding_rows():
    logits = np.full((2, 2, 3), np.nan, np.float32)
    logits[0, 0] = logits[1] = [1, 2, 0]
    n_rows = np.array([1, 2], np.int32)
    assert reference.argmax(logits, n_rows).tolist() == [[1, -1], [1, 1]]


# ------------------------------------------------------------------------------ sample

N_DRAWS = 2000
P = np.array([0.6, 0.2, 0.1, 0.1])
LOG_P = np.log(P).astype(np.float32)


def chi_square(counts: np.ndarray, expected: np.ndarray) -> float:
    return float(((counts - expected) ** 2 / expected).sum())


def emitted_by(
    children: list[int], batch: int = N_DRAWS
) -> tuple[np.ndarray, np.ndarray]:
    """First two tokens that each of many requests emits, and what it accepted.

    Every row of the target says `P`. Below the root stand `children`; below each of
    them again a node with token 0.
    """
    c = len(children)
    parents = [-1] + [0] * c + list(range(1, c + 1))
    tokens = [9, *children] + [0] * c
    tree = DraftTree.from_parents([parents] * batch, tokens)
    logits = np.broadcast_to(LOG_P, (batch, tree.max_rows, 4))
    positions = tree.positions(np.full(batch, 7))
    targets = reference.sample(logits, 1.0, positions, seed=1)
    found = reference.tree_accept(tree, targets)
    # A rejected child leaves one token; the next round's root draws the second.
    again = DraftTree.from_parents([[-1]] * batch, found.bonus[:, None])
    later = reference.sample(logits[:, :1], 1.0, again.positions([8] * batch), seed=1)
    second = np.where(
        found.accept_len > 1, targets[np.arange(batch), found.rows[:, 1]], later[:, 0]
    )
    return np.stack([targets[:, 0], second], axis=1), found.accept_len


def test_sample_lossless_whatever_children_are_drafted():
    emitted, accept_len = emitted_by([0, 1])
    accepted = (accept_len > 1).sum()
    # Four standard deviations of that binomial.
    assert abs(accepted - 0.8 * N_DRAWS) < 4 * np.sqrt(N_DRAWS * 0.8 * 0.2)
    for column in emitted.T:
        counts = np.bincount(column, minlength=4)
        assert chi_square(counts, N_DRAWS * P) < CHI_SQUARE[3]


def test_sample_no_coin_reuse_after_a_rejected_child():
    emitted, accept_len = emitted_by([1])
    counts = np.bincount(emitted[:, 0], minlength=4)
    assert chi_square(counts, N_DRAWS * P) < CHI_SQUARE[3]
    # A coin used twice would give these frequencies instead, which the test sees.
    reused = N_DRAWS * np.array([0.6, 0.0, 0.15, 0.25])
    assert chi_square(reused, N_DRAWS * P) > 10 * CHI_SQUARE[3]
    # The next token has a coin of its own: pairs are independent.
    pairs = np.bincount(emitted @ [4, 1], minlength=16)
    assert chi_square(pairs, N_DRAWS * np.outer(P, P).ravel()) < CHI_SQUARE[15]


def test_sample_zero_t_is_bit_equal_to_greedy():
    logits = np.random.default_rng(0).standard_normal((2, 3, 50), np.float32)
    logits[0, 0, 10:20] = logits[0, 0].max()  # a tie
    positions = np.zeros((2, 3), np.int32)
    greedy = reference.argmax(logits)
    found = reference.sample(logits, 0.0, positions, seed=3)
    np.testing.assert_array_equal(found, greedy)
    assert found.dtype == np.int32


def test_sample_at_a_low_temperature_is_greedy_without_overflow():
    logits = np.array([[[100.0, -100.0, 99.0]]], np.float32)
    assert reference.sample(logits, 1e-300, np.zeros((1, 1)), 0).tolist() == [[0]]


@pytest.mark.parametrize("temperature", [0.5, 2.0])
def test_sample_divides_logits_by_the_temperature(temperature):
    logits = np.broadcast_to(LOG_P, (N_DRAWS, 1, 4))
    found = reference.sample(logits, temperature, np.zeros((N_DRAWS, 1)), seed=2)
    expected = P ** (1 / temperature)
    expected *= N_DRAWS / expected.sum()
    counts = np.bincount(found[:, 0], minlength=4)
    assert chi_square(counts, expected) < CHI_SQUARE[3]


def test_a_masked_token_is_never_sampled():
    logits = np.full((500, 1, 5), -np.inf, np.float32)
    logits[:, :, [1, 3]] = 2.5
    found = reference.sample(logits, 1.0, np.zeros((500, 1)), seed=4)
    assert set(found[:, 0].tolist()) == {1, 3}


def write(seed: int, n_rows: int, depth_bias: float, length: int = 60) -> list[int]:
    """Sample a text from a small Markov target through trees of some shape."""
    rng = np.random.default_rng(seed)
    table = np.random.default_rng(9).standard_normal((3, 3)).astype(np.float32)
    text = [0]
    while len(text) < length:
        tree = random_tree(rng, 1, n_rows, depth_bias=depth_bias)
        tree.token_ids[0, 0] = text[-1]
        logits = table[tree.token_ids]
        positions = tree.positions([len(text) - 1])
        targets = reference.sample(logits, 1.0, positions, 7, tree.n_rows)
        found = reference.tree_accept(tree, targets)
        path = found.rows[0, 1 : found.accept_len[0]]
        text += [*tree.token_ids[0, path].tolist(), int(found.bonus[0])]
    return text[:length]


def test_sample_seeded_text_does_not_depend_on_the_trees():
    plain = write(0, 1, 0)
    assert len(set(plain)) == 3
    for seed, n_rows, depth_bias in ((1, 6, -0.5), (2, 20, 0), (3, 12, 0.9)):
        assert write(seed, n_rows, depth_bias) == plain


def test_sample_differs_between_seeds_requests_and_positions():
    logits = np.zeros((8, 8, 1000), np.float32)
    positions = np.broadcast_to(np.arange(8), (8, 8))
    one = reference.sample(logits, 1.0, positions, seed=0)
    assert len(set(one.ravel().tolist())) > 50
    assert (one != reference.sample(logits, 1.0, positions, seed=1)).any()
    same = reference.sample(logits, 1.0, np.zeros((8, 8)), seed=0)
    np.testing.assert_array_equal(same, same[:, :1].repeat(8, axis=1))


def test_sample_leaves_padding_rows_at_minus_one():
    logits = np.zeros((1, 3, 4), np.float32)
    found = reference.sample(logits, 1.0, np.array([[0, 1, -1]]), 0, np.array([2]))
    assert (found[0, :2] >= 0).all()
    assert found[0, 2] == -1


@pytest.mark.parametrize("temperature", [-0.1, np.nan])
def test_sample_wants_a_temperature_of_0_or_more(temperature):
    logits = np.zeros((1, 1, 2), np.float32)
    with pytest.raises(ValueError, match="temperature is .*; expected 0 or more"):
        reference.sample(logits, temperature, np.zeros((1, 1)), 0)
