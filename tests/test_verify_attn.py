"""verify_attn on every executor, in both versions: what a row must and must not see."""

import math
import re

import numpy as np
import pytest
from numba import boolean, cuda, float32, int32, uint16, uint32
from test_sass import assembled

from ddtree_numba import backend, bf16, reference
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels import verify_attn as module
from ddtree_numba.kernels.verify_attn import choose_splits, merge_kernel, verify_attn
from ddtree_numba.tree import DraftTree

INF, NAN = np.inf, np.nan
SCALE = 192**-0.5
YARN_SCALE = SCALE * (0.1 * math.log(64) + 1) ** 2  # Kimi's, 0.144680
CHAIN4, STAR4, FORK4 = [-1, 0, 1, 2], [-1, 0, 0, 0], [-1, 0, 0, 1]

# What float32 allows. Small cases: a few ulp of |out| up to 4 and of lse up to 16.
OUT, LSE = 1e-6, 2e-6
# 576 columns and 2081 keys, by the factor on unit normal queries: with 1 a key can have
# half of a row's weight, and |out| is up to 2 (5e-7 is 2 ulp; rounding it is 1.2e-7);
# with 1/4 every output is an average of hundreds of keys, |out| below 0.2.
FULL_SIZE = {1.0: 1.5e-6, 0.25: 5e-8}
# Elements of 4 bytes before and after every output, and their bits: a NaN.
GUARD, CANARY = 64, 0x7FC0BEEF

# With a few keys of unit normals |out| is up to 5, and an error of 3e-7 in a score
# moves it by as much as two values differ, up to 8.
FEW_KEYS = 3e-6


def way(executor, version):
    marks = [pytest.mark.gpu] if executor == "gpu" else []
    return pytest.param((executor, version), marks=marks, id=f"{executor}-{version}")


VERSIONS = ("simple", "split")
ON_GPU = [way("gpu", version) for version in VERSIONS]
IN_EMULATOR = [way("emulator", version) for version in VERSIONS]
EVERY_WAY = pytest.mark.parametrize(
    "how", [way("numpy", "auto"), *IN_EMULATOR, *ON_GPU]
)
KERNELS = pytest.mark.parametrize("how", [*IN_EMULATOR, *ON_GPU])
GPU_KERNELS = pytest.mark.parametrize("how", ON_GPU)


@pytest.fixture(autouse=True)
def _outputs_are_nan_between_canaries(monkeypatch):
    """What is left unwritten is no answer, and nothing beside an output is written."""
    buffers = []

    def empty(at, shape, dtype):
        size = math.prod(shape) * np.dtype(dtype).itemsize // 4
        x = np.full(size + 2 * GUARD, CANARY, np.uint32)
        x = cuda.to_device(x) if at.executor == "gpu" else x
        buffers.append(x)
        return x[GUARD : GUARD + size].view(dtype).reshape(tuple(shape))

    monkeypatch.setattr(backend.Place, "empty", empty)
    yield
    for x in buffers:
        x = x if isinstance(x, np.ndarray) else x.copy_to_host()
        np.testing.assert_array_equal([x[:GUARD], x[-GUARD:]], CANARY)


def attend(how, q, cache, prefix_lens, visibility, d_latent, **options):
    options = {"sm_scale": SCALE, "executor": how[0], "version": how[1]} | options
    return verify_attn(q, cache, prefix_lens, visibility, d_latent=d_latent, **options)


def dense(q, cache, prefix_lens, visibility, d_latent, sm_scale=SCALE):
    """Attention by matrix products over all keys and a mask of -inf, in float64."""
    if q.dtype == np.uint16:
        q, cache = bf16.to_float32(q), bf16.to_float32(cache)
    n = q.shape[1]
    out = np.zeros((*q.shape[:3], d_latent))
    lse = np.full(q.shape[:3], -INF)
    for b, prefix_len in enumerate(prefix_lens):
        words = np.ascontiguousarray(visibility[b]).view(np.uint8)
        tail = np.unpackbits(words, axis=1, bitorder="little")[:, :n] > 0
        prefix = np.repeat(tail.any(axis=1, keepdims=True), prefix_len, axis=1)
        keys = cache[b, : prefix_len + n].astype(float)
        mask = np.hstack([prefix, tail])[:, : len(keys)]
        keys[~mask.any(axis=0)] = 0  # nobody sees them: they may be NaN
        for i in np.flatnonzero(mask.any(axis=1)):
            scores = np.where(mask[i], q[b, i].astype(float) @ keys.T * sm_scale, -INF)
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            total = weights.sum(axis=1)
            out[b, i] = weights @ keys[:, :d_latent] / total[:, None]
            lse[b, i] = scores.max(axis=1) + np.log(total)
    return out, lse


def random_parents(rng, n, shape="random"):
    """Parents of n rows: a chain, a star, a deep tree or any tree."""
    steps = {"chain": 1, "deep": 3, "wide": n, "random": n}[shape]
    if shape == "wide":  # nearly every row hangs on the first few
        return [-1, *(int(rng.integers(0, min(i, 4))) for i in range(1, n))]
    return [-1, *(int(rng.integers(max(0, i - steps), i)) for i in range(1, n))]


def random_case(rng, n, heads, d_latent, d_rope, prefix_lens, spare=3, shape="random"):
    """Unit normal q and cache, a tree for each request, NaN in every unused row."""
    batch, d = len(prefix_lens), d_latent + d_rope
    q = rng.standard_normal((batch, n, heads, d), dtype=np.float32)
    room = max(prefix_lens) + n + spare
    cache = np.full((batch, room, d), NAN, np.float32)
    for b, prefix_len in enumerate(prefix_lens):
        live = prefix_len + n
        cache[b, :live] = rng.standard_normal((live, d), dtype=np.float32)
    parents = [random_parents(rng, n, shape) for _ in range(batch)]
    visibility = DraftTree.from_parents(parents).visibility
    return q, cache, np.array(prefix_lens, np.int32), visibility


def constant_case(prefixes, tails, parents, d_latent=4, d_rope=2, spare=2):
    """Queries 0 and cache rows filled with one value each: out averages the values."""
    batch, n = len(tails), len(tails[0])
    room = max(map(len, prefixes)) + n + spare
    cache = np.full((batch, room, d_latent + d_rope), NAN, np.float32)
    for b, (prefix, tail) in enumerate(zip(prefixes, tails, strict=True)):
        values = np.array([*prefix, *tail], np.float32)
        cache[b, : len(values)] = values[:, None]
    q = np.zeros((batch, n, 1, d_latent + d_rope), np.float32)
    lens = np.array([len(prefix) for prefix in prefixes], np.int32)
    return q, cache, lens, DraftTree.from_parents(parents).visibility


def assert_close(found, expected, out_tolerance=OUT, lse_tolerance=LSE):
    assert found[0].dtype == found[1].dtype == np.float32
    np.testing.assert_allclose(found[0], expected[0], rtol=0, atol=out_tolerance)
    np.testing.assert_allclose(found[1], expected[1], rtol=0, atol=lse_tolerance)


# ------------------------------------------------------------------------ known answers

KNOWN = {
    "chain": ([1, 2], [4, 8, 16], CHAIN4[:3], [2.333333, 3.75, 6.2]),
    "tree-not-triangle": ([], [1, 10, 100, 1000], FORK4, [1, 5.5, 50.5, 337]),
    "siblings": ([], [1, 10, 100], [-1, 0, 0], [1, 5.5, 50.5]),
    "nan-past-end": ([1, 2, 3], [6], [-1], [3]),
    "33-rows": ([], range(33), [-1] + [0] * 32, np.arange(33) / 2),
}


@EVERY_WAY
@pytest.mark.parametrize("name", KNOWN)
def test_equal_scores_average_the_rows_that_are_seen(how, name):
    prefix, tail, parents, expected = KNOWN[name]
    case = constant_case([prefix], [tail], [parents])
    out, lse = attend(how, *case, d_latent=4)
    want = np.broadcast_to(np.reshape(expected, (-1, 1)), out[0, :, 0].shape)
    np.testing.assert_allclose(out[0, :, 0], want, rtol=2e-7)
    n_seen = len(prefix) + DraftTree.from_parents(parents).depths[0] + 1
    np.testing.assert_allclose(lse[0, :, 0], np.log(n_seen), rtol=0, atol=LSE)


@EVERY_WAY
def test_lse_is_the_natural_logarithm(how):
    _, lse = attend(how, *constant_case([[5] * 7], [[5]], [[-1]]), d_latent=4)
    assert lse[0, 0, 0] == pytest.approx(2.079442, abs=1e-6)


@EVERY_WAY
def test_requests_keep_to_their_own_prefix_length_and_tree(how):
    case = constant_case([[1] * 5, [2] * 3], [[10, 20, 30, 40]] * 2, [CHAIN4, STAR4])
    out, _ = attend(how, *case, d_latent=4)
    np.testing.assert_allclose(out[0, :, 0, 0], [2.5, 5, 8.125, 35 / 3], rtol=2e-7)
    np.testing.assert_allclose(out[1, :, 0, 0], [4, 7.2, 9.2, 11.2], rtol=2e-7)


@EVERY_WAY
def test_a_request_without_a_prefix_stands_beside_one_with(how):
    case = constant_case([[], [1, 2]], [[3], [3]], [[-1], [-1]])
    out, lse = attend(how, *case, d_latent=4)
    np.testing.assert_array_equal(out[0], 3)
    np.testing.assert_array_equal(lse[0], 0)
    np.testing.assert_allclose(out[1], 2, rtol=2e-7)


@EVERY_WAY
@pytest.mark.parametrize("prefix", [[], [1, 2]], ids=["no-prefix", "prefix"])
def test_a_padding_row_sees_nothing_not_even_the_prefix(how, prefix):
    q, cache, lens, visibility = constant_case([prefix], [[3, 4]], [[-1, 0]])
    visibility[0, 1] = 0
    cache[0, len(prefix) + 1] = NAN
    out, lse = attend(how, q, cache, lens, visibility, d_latent=4)
    np.testing.assert_array_equal(out[0, 1], 0)
    np.testing.assert_array_equal(lse[0, 1], -INF)
    assert out[0, 0, 0, 0] == np.float32(np.mean([*prefix, 3]))


@EVERY_WAY
@pytest.mark.parametrize("sign", [-1, 1], ids=["negative", "positive"])
def test_scores_of_a_hundred_thousand_keep_their_softmax(how, sign):
    # 512 columns of 64 · 64; the emulator gets 8 of 512 · 512.
    d_latent, size = (512, 64) if how[0] == "gpu" else (8, 512)
    q, cache, lens, visibility = constant_case(
        [[sign * size] * 3], [[sign * size]], [[-1]], d_latent
    )
    cache[..., d_latent:] = 0
    q[:] = size
    out, lse = attend(how, q, cache, lens, visibility, d_latent=d_latent)
    np.testing.assert_array_equal(out, sign * size)
    expected = sign * 512 * 64 * 64 * SCALE + math.log(4)  # 151347.52 if negative
    assert lse[0, 0, 0] == pytest.approx(expected, abs=2**-6)  # an ulp


@EVERY_WAY
@pytest.mark.parametrize(
    ("sm_scale", "weight", "log_sum"),
    [(SCALE, 0.731059, 1.313262), (YARN_SCALE, 0.881294, 2.131104)],
    ids=["192", "yarn"],
)
def test_the_scale_is_the_callers(how, sm_scale, weight, log_sum):
    q, cache, lens, visibility = constant_case([[0]], [[0]], [[-1]])
    q[..., 0] = math.sqrt(192)
    cache[0, 1, 0] = 1
    found = attend(how, q, cache, lens, visibility, d_latent=4, sm_scale=sm_scale)
    assert found[0][0, 0, 0, 0] == pytest.approx(weight, abs=1e-6)
    assert found[1][0, 0, 0] == pytest.approx(log_sum, abs=1e-6)


@EVERY_WAY
@pytest.mark.parametrize("sm_scale", [0.0, -0.3])
def test_any_finite_scale_will_do(how, sm_scale):
    case = random_case(np.random.default_rng(1), 3, 2, 4, 2, [5])
    found = attend(how, *case, d_latent=4, sm_scale=sm_scale)
    assert_close(found, dense(*case, d_latent=4, sm_scale=sm_scale))


@EVERY_WAY
def test_a_new_tree_in_the_same_buffers_is_seen(how):
    case = constant_case([[]], [[1, 10, 100, 1000]], [FORK4])
    attend(how, *case, d_latent=4)
    case[3][:] = DraftTree.from_parents([CHAIN4]).visibility
    out, _ = attend(how, *case, d_latent=4)
    np.testing.assert_allclose(out[0, :, 0, 0], [1, 5.5, 37, 277.75], rtol=2e-7)


# ------------------------------------------------------------------------------ merging


def merge(executor, outs, lses):
    """`merge_kernel` on partials that are given as out and lse, [P, B, R, Dc]."""
    if executor == "numpy":
        return reference.merge_partials(outs, lses)
    at = backend.place(executor)
    out, lse = at.empty(outs.shape[1:], np.float32), at.empty(lses.shape[1:], "f4")
    tops = (lses / np.log(2)).astype(np.float32)
    totals = (lses > -INF).astype(np.float32)
    grid = math.prod(lses.shape[1:])
    whole = np.pad(outs, [(0, 0)] * 3 + [(0, -outs.shape[3] % 4)])
    inputs = [at.put(x) for x in (whole, tops, totals)]
    at.launch(merge_kernel, grid, module.MERGE_THREADS, *inputs, out, lse)
    return at.give(out), at.give(lse)


MERGES = {
    "all-empty": ([(1, -INF), (NAN, -INF)], 0, -INF),
    "one-empty": ([(1, -INF), (5, 0.5)], 5, 0.5),
    "empty-holds-nan": ([(5, 0.5), (NAN, -INF)], 5, 0.5),
    "equal": ([(1, 3), (1.0078125, 3)], 1.00390625, 3 + math.log(2)),
    "close-lse": ([(0, 10.0), (1000, 10.03)], 507.4994, 10.708260),
}


@pytest.mark.parametrize("name", MERGES)
def test_partials_merge_by_their_lse(executor, name):
    parts, out, lse = MERGES[name]
    outs = np.array([[[[o] * 3]] for o, _ in parts], np.float32)
    lses = np.array([[[x]] for _, x in parts], np.float32)
    found = merge(executor, outs, lses)
    np.testing.assert_allclose(found[0], np.full((1, 1, 3), out), rtol=1e-6)
    np.testing.assert_allclose(found[1], [[lse]], rtol=1e-6)


def test_a_pair_keeps_what_float32_rounds_away():
    terms = np.random.default_rng(0).standard_normal(300, dtype=np.float32)
    hi = lo = np.float32(0)
    for x in terms:
        hi, lo = module.two_sum.py_func(hi, lo, x)
    exact = math.fsum(terms.tolist())
    assert abs(float(hi) - exact) > 1e-7  # float32 alone is not enough
    assert abs(float(hi) + float(lo) - exact) < 1e-11


@EVERY_WAY
def test_a_score_of_minus_infinity_is_as_good_as_no_key(how):
    q, visibility = np.float32([[[[1, 0]]]]), np.ones((1, 1, 1), np.uint32)
    cache = np.float32([[[-INF, 0], [3, 0]], [[-INF, 0], [-INF, 0]]])
    case = np.repeat(q, 2, 0), cache, [1, 1], np.repeat(visibility, 2, 0)
    out, lse = attend(how, *case, d_latent=1, sm_scale=0.5)
    assert out[:, 0, 0, 0].tolist() == [3, 0]
    np.testing.assert_allclose(lse[:, 0, 0], [1.5, -INF], rtol=1e-6)


@KERNELS
@pytest.mark.parametrize("n_splits", [1, 2, 5])
def test_splits_do_not_change_the_result(how, n_splits):
    if how[1] == "simple" and n_splits > 1:
        pytest.skip("only the split version has splits")
    # Two parts of up to 32 keys; the others of five are empty.
    case = random_case(np.random.default_rng(2), 3, 2, 8, 4, [40])
    found = attend(how, *case, d_latent=8, n_splits=n_splits)
    assert_close(found, dense(*case, d_latent=8))


def test_splits_by_the_milliard_are_as_many_as_there_are_keys(kernel_executor):
    case = random_case(np.random.default_rng(2), 1, 1, 8, 4, [2])
    found = attend((kernel_executor, "split"), *case, d_latent=8, n_splits=10**9)
    assert_close(found, dense(*case, d_latent=8))


@pytest.mark.parametrize("version", ["simple", "split", "mma", "wgmma"])
def test_every_version_has_an_answer_where_there_is_no_request_row_or_key(
    kernel_executor, version
):
    for batch, n, heads, room in (
        (0, 2, 1, 4),
        (2, 0, 1, 4),
        (2, 2, 0, 4),
        (2, 2, 1, 0),
    ):
        q = np.ones((batch, n, heads, 576), np.uint16)
        cache = np.ones((batch, room, 576), np.uint16)
        nothing = np.zeros(batch, np.int32), np.zeros((batch, n, (n + 31) // 32), "u4")
        out, lse = attend((kernel_executor, version), q, cache, *nothing, d_latent=512)
        np.testing.assert_array_equal(out, np.zeros((batch, n, heads, 512)))
        np.testing.assert_array_equal(lse, np.full((batch, n, heads), -INF))


def test_the_number_of_splits_fills_the_card_in_whole_rounds():
    assert choose_splits(blocks=33, room=2081, processors=132) == 4
    assert choose_splits(blocks=264, room=8225, processors=132) == 1
    assert choose_splits(blocks=1, room=0, processors=132) == 1
    assert choose_splits(blocks=1, room=193, processors=132) == 3  # one a tile of keys


# ------------------------------------------------------------------- against references


@EVERY_WAY
@pytest.mark.parametrize(
    ("n", "heads", "d_latent", "d_rope", "prefix_lens"),
    [
        (1, 1, 1, 1, [0]),
        (3, 2, 5, 2, [3, 0, 17]),
        (2, 12, 8, 4, [9]),
        (2, 1, 130, 3, [4]),
        (23, 3, 4, 1, [7]),
        (33, 1, 4, 4, [40]),
    ],
    ids="one ragged heads12 columns133 two-row-tiles rows33".split(),
)
def test_random_cases_agree_with_dense_attention(
    how, n, heads, d_latent, d_rope, prefix_lens
):
    rng = np.random.default_rng(n)
    case = random_case(rng, n, heads, d_latent, d_rope, prefix_lens)
    assert_close(attend(how, *case, d_latent), dense(*case, d_latent))


@EVERY_WAY
@pytest.mark.parametrize("prefix_len", [1, 31, 94, 95, 96, 97])
def test_prefixes_around_a_tile_of_keys(how, prefix_len):
    case = random_case(np.random.default_rng(prefix_len), 2, 1, 4, 4, [prefix_len])
    assert_close(attend(how, *case, d_latent=4), dense(*case, d_latent=4))


@KERNELS
def test_a_latent_wider_than_a_block_holds(how, monkeypatch):
    d_latent = 516
    if how[0] == "emulator":  # which reads constants anew at every launch
        d_latent = 132
        narrow = {"WIDTH": 128, "GROUPS": 1, "PASS": 1, "MERGE_THREADS": 32}
        narrow |= {"SUMS": 4 * module.WARP_ROWS, "WEIGHTS": 128 * module.STEP}
        for name, value in narrow.items():
            monkeypatch.setattr(module, name, value)
    case = random_case(np.random.default_rng(3), 2, 1, d_latent, 4, [1])
    assert_close(attend(how, *case, d_latent), dense(*case, d_latent))


@EVERY_WAY
def test_a_cache_without_rope_columns(how):
    case = random_case(np.random.default_rng(4), 3, 2, 8, 0, [5])
    assert_close(attend(how, *case, d_latent=8), dense(*case, d_latent=8))


@KERNELS
def test_prefixes_longer_than_the_scores_in_shared_memory(how, monkeypatch):
    if how[0] == "emulator":  # which reads constants anew at every launch
        monkeypatch.setattr(module, "SIMPLE_KEYS", 16)
    prefix_len = 40 if how[0] == "emulator" else 2100
    case = random_case(np.random.default_rng(5), 2, 1, 4, 4, [prefix_len])
    assert_close(attend(how, *case, d_latent=4), dense(*case, d_latent=4))


@EVERY_WAY
def test_bf16_bits_are_read_as_bf16(how):
    q, cache, *rest = random_case(np.random.default_rng(6), 4, 2, 8, 4, [9])
    case = (bf16.from_float32(q), bf16.from_float32(cache), *rest)
    assert_close(attend(how, *case, d_latent=8), dense(*case, d_latent=8))


@EVERY_WAY
def test_a_branch_equals_plain_attention_along_its_path(how):
    rng = np.random.default_rng(7)
    q, cache, lens, visibility = random_case(rng, 6, 1, 8, 4, [5])
    out, _ = attend(how, q, cache, lens, visibility, d_latent=8)
    for row in range(6):
        path = [j for j in range(6) if visibility[0, row, 0] >> j & 1]
        keys = cache[0, [*range(5), *(5 + j for j in path)]].astype(float)
        weights = np.exp(keys @ q[0, row, 0] * SCALE)
        expected = weights @ keys[:, :8] / weights.sum()
        np.testing.assert_allclose(out[0, row, 0], expected, rtol=0, atol=OUT)


@EVERY_WAY
def test_absorbed_and_unabsorbed_attention_agree(how):
    rng = np.random.default_rng(8)
    n, heads, d_latent, d_rope, d_nope, d_value = 4, 2, 8, 4, 6, 5
    _, cache, lens, visibility = random_case(rng, n, heads, d_latent, d_rope, [7])
    q_nope = rng.standard_normal((1, n, heads, d_nope), dtype=np.float32)
    q_rope = rng.standard_normal((1, n, heads, d_rope), dtype=np.float32)
    w_uk, w_uv = (
        rng.standard_normal((heads, d, d_latent), dtype=np.float32) / 3
        for d in (d_nope, d_value)
    )
    q = reference.absorb_query(q_nope, q_rope, w_uk).astype(np.float32)
    latent, _ = attend(how, q, cache, lens, visibility, d_latent)
    expected = reference.verify_attn_unabsorbed(
        q_nope, q_rope, cache, lens, visibility, w_uk, w_uv, sm_scale=SCALE
    )
    found = np.einsum("bnhc,hvc->bnhv", latent, w_uv)
    np.testing.assert_allclose(found, expected, rtol=0, atol=OUT)


# ------------------------------------------------------------------- what must not leak


@EVERY_WAY
def test_a_nan_reaches_only_the_rows_that_see_it(how):
    q, cache, lens, visibility = random_case(np.random.default_rng(9), 5, 2, 4, 2, [3])
    visibility[:] = DraftTree.from_parents([[-1, 0, 0, 1, 2]]).visibility
    clean = dense(q, cache, lens, visibility, d_latent=4)
    cache[0, 3 + 2] = NAN  # row 2, which row 4 sees too
    out, lse = attend(how, q, cache, lens, visibility, d_latent=4)
    assert_close(
        (out[:, [0, 1, 3]], lse[:, [0, 1, 3]]), [x[:, [0, 1, 3]] for x in clean]
    )
    assert np.isnan(out[:, [2, 4]]).all()
    assert np.isnan(lse[:, [2, 4]]).all()


@EVERY_WAY
def test_a_nan_query_spoils_its_own_row_and_head_alone(how):
    q, cache, lens, visibility = random_case(np.random.default_rng(10), 3, 2, 4, 2, [3])
    clean = dense(q, cache, lens, visibility, d_latent=4)
    q[0, 1, 0, 2] = NAN
    out, lse = attend(how, q, cache, lens, visibility, d_latent=4)
    assert np.isnan(out[0, 1, 0]).all()
    assert np.isnan(lse[0, 1, 0])
    out[0, 1, 0], lse[0, 1, 0] = clean[0][0, 1, 0], clean[1][0, 1, 0]
    assert_close((out, lse), clean)


@KERNELS
@pytest.mark.parametrize("prefix_len", [-5, 5, 400])
def test_unchecked_lengths_never_lead_outside_the_cache(how, prefix_len, monkeypatch):
    # The cache is a slice: on a GPU, reading past it would find the other rows.
    monkeypatch.setattr(module, "_check_fit", lambda *_: None)
    q, cache, _, visibility = constant_case([[]], [[4, 8, 16]], [CHAIN4[:3]], spare=3)
    cache[0, :6, :] = np.arange(1, 7, dtype=np.float32)[:, None]
    lens = np.array([prefix_len], np.int32)
    out, _ = attend(how, q, cache, lens, visibility, d_latent=4)
    # A negative length counts as 0, and of 6 rows there are no more than 6 to see.
    expected = {-5: [1, 1.5, 2], 5: [3.5] * 3, 400: [3.5] * 3}[prefix_len]
    np.testing.assert_allclose(out[0, :, 0, 0], expected, rtol=2e-7)


@KERNELS
@pytest.mark.parametrize("order", ["reverse", "shuffled"])
def test_lanes_may_run_in_any_order_and_never_race(how, order, monkeypatch):
    if how[0] == "gpu":
        pytest.skip("only the emulator chooses an order and watches every access")
    case = random_case(np.random.default_rng(11), 2, 5, 4, 4, [62])
    expected = attend(how, *case, d_latent=4)
    races = []

    def launch(at, *given, dynamic_shared=0):
        options = {"dynamic_shared": dynamic_shared, "order": order}
        report = emulate(*given, trace=True, **options)
        races.extend(report.races)

    monkeypatch.setattr(backend.Place, "launch", launch)
    found = attend(how, *case, d_latent=4)
    assert races == []
    np.testing.assert_array_equal(found[0], expected[0])
    np.testing.assert_array_equal(found[1], expected[1])


# ---------------------------------------------------------------------- kinds of arrays


@EVERY_WAY
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_strided_arrays_equal_contiguous_ones(how, dtype):
    case = random_case(np.random.default_rng(12), 3, 2, 8, 4, [5, 2])
    q, cache, lens, visibility = case
    expected = dense(*case, d_latent=8)
    wide_q = np.full((2, 3, 2, 576), NAN, np.float32)
    wide_q[..., 3:15] = q
    swapped = np.ascontiguousarray(cache.transpose(1, 0, 2))
    cast = bf16.from_float32 if dtype == "bf16" else np.asarray
    views = cast(wide_q)[..., 3:15], cast(swapped).transpose(1, 0, 2)
    if dtype == "bf16":
        expected = dense(cast(q), cast(cache), lens, visibility, d_latent=8)
    assert_close(attend(how, *views, lens, visibility, d_latent=8), expected)


@GPU_KERNELS
def test_device_arrays_are_read_in_place_and_answered_in_kind(how):
    case = constant_case([[]], [[1, 10, 100, 1000]], [FORK4])
    on_device = [cuda.to_device(x) for x in case]
    out, lse = attend((None, how[1]), *on_device, d_latent=4)
    assert cuda.is_cuda_array(out) and cuda.is_cuda_array(lse)
    expected = [1, 5.5, 50.5, 337]
    np.testing.assert_allclose(out.copy_to_host()[0, :, 0, 0], expected, rtol=2e-7)
    # attn-stale-mask: the same buffers, another tree
    on_device[3].copy_to_device(DraftTree.from_parents([CHAIN4]).visibility)
    out, _ = attend((None, how[1]), *on_device, d_latent=4)
    expected = [1, 5.5, 37, 277.75]
    np.testing.assert_allclose(out.copy_to_host()[0, :, 0, 0], expected, rtol=2e-7)


@pytest.mark.gpu
def test_a_strided_query_on_the_device_is_refused_by_split_alone():
    q, *rest = (cuda.to_device(x) for x in constant_case([[1]], [[3]], [[-1]]))
    wide = cuda.to_device(np.zeros((1, 1, 1, 12), np.float32))
    for given in (wide[:, :, :, ::2], q):
        out, _ = attend((None, "simple"), given, *rest, d_latent=4)
        np.testing.assert_array_equal(out.copy_to_host(), 2)
    with pytest.raises(ValueError, match="q has strides .* expected C-contiguous"):
        attend((None, "split"), wide[:, :, :, ::2], *rest, d_latent=4)


# -------------------------------------------------------------------- full size, on GPU


@GPU_KERNELS
@pytest.mark.parametrize("factor", FULL_SIZE, ids=["unit-normals", "averages"])
@pytest.mark.parametrize("shape", ["chain", "wide", "deep"])
def test_float32_at_full_size(how, factor, shape):
    q, *rest = random_case(
        np.random.default_rng(13), 33, 64, 512, 64, [2048], shape=shape
    )
    case = (q * np.float32(factor), *rest)
    found, expected = attend(how, *case, 512), dense(*case, 512)
    error = np.abs(found[0] - expected[0]).max()
    print(f"\n{how[1]} {shape} queries × {factor}: max abs error {error:.2e}")
    assert_close(found, expected, FULL_SIZE[factor])


@GPU_KERNELS
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 16])
@pytest.mark.parametrize("prefix_lens", [[0], [1, 63], [64, 65, 1000]], ids=str)
def test_head_counts_and_ragged_prefixes_at_full_width(how, heads, prefix_lens):
    case = random_case(np.random.default_rng(heads), 33, heads, 512, 64, prefix_lens)
    assert_close(attend(how, *case, 512), dense(*case, 512), FEW_KEYS)


@GPU_KERNELS
@pytest.mark.parametrize("n", [31, 32, 33, 63, 64, 65, 127, 128, 129, 1025])
def test_rows_around_words_and_tiles(how, n):
    case = random_case(np.random.default_rng(n), n, 2, 512, 64, [100])
    assert_close(attend(how, *case, 512), dense(*case, 512), FULL_SIZE[1.0])


@GPU_KERNELS
def test_a_batch_beyond_the_grid_limit(how):
    batch = 65536
    cache = np.zeros((batch, 1, 2), np.float32)
    cache[:] = (np.arange(batch) % 7)[:, None, None]
    q, lens = np.zeros((batch, 1, 1, 2), np.float32), np.zeros(batch, np.int32)
    out, _ = attend(how, q, cache, lens, np.ones((batch, 1, 1), np.uint32), d_latent=1)
    np.testing.assert_array_equal(out[:, 0, 0, 0], np.arange(batch) % 7)


# ---------------------------------------------------------------------------- bad input

GOOD = constant_case([[1, 2]], [[3, 4]], [[-1, 0]])


def refuse(error, match, *, replace=None, **options):
    arguments = dict(
        zip(("q", "kv_cache", "prefix_lens", "visibility"), GOOD, strict=True),
        sm_scale=SCALE, d_latent=4, executor="numpy",
    ) | (replace or {}) | options  # fmt: skip
    with pytest.raises(error, match=match):
        verify_attn(**arguments)


@pytest.mark.parametrize("executor", ["numpy", "emulator"])
def test_one_tree_may_be_broadcast_to_a_batch(executor):
    q, cache, lens, visibility = random_case(np.random.default_rng(0), 33, 1, 4, 4, [0])
    shared = [np.broadcast_to(x, (2, *x.shape[1:])) for x in (q, cache, visibility)]
    across = np.repeat(visibility, 2, axis=2)[..., ::2]  # words apart
    options = {"sm_scale": SCALE, "d_latent": 4, "version": "simple"}
    options["executor"] = executor
    expected, _ = verify_attn(q, cache, lens, visibility, **options)
    swapped = np.concatenate([across, across]).swapaxes(1, 2).copy().swapaxes(1, 2)
    for x in (shared[2], np.concatenate([across, across]), swapped):
        out, _ = verify_attn(*shared[:2], np.repeat(lens, 2), x, **options)
        np.testing.assert_array_equal(out, np.concatenate([expected, expected]))
    out, _ = verify_attn(q, cache, lens, across, **options)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.float16, np.float64])
def test_other_dtypes_are_refused(dtype):
    with np.errstate(invalid="ignore"):
        bad = np.nan_to_num(GOOD[1]).astype(dtype)
    expected = r"kv_cache has dtype .*; expected float32 or uint16 \(bf16 bits\)"
    refuse(TypeError, expected, kv_cache=bad)


def test_query_and_cache_share_a_dtype():
    bits = bf16.from_float32(GOOD[1])
    refuse(
        TypeError, r"kv_cache has dtype uint16.*; expected q's, float32", kv_cache=bits
    )


def test_shapes_must_agree():
    q, cache, lens, visibility = GOOD
    refuse(ValueError, r"q has shape .*; expected 4", q=q[0])
    refuse(ValueError, r"kv_cache has shape .*\(1, \*, 6\)", kv_cache=cache[..., :5])
    refuse(ValueError, r"prefix_lens has shape .*\(1\)", prefix_lens=np.repeat(lens, 2))
    more = np.repeat(visibility, 2, axis=2)
    refuse(ValueError, r"visibility has shape .*\(1, 2, 1\)", visibility=more)
    signed = visibility.view(np.int32)
    refuse(TypeError, r"visibility has dtype int32; expected uint32", visibility=signed)


def test_a_prefix_longer_than_the_cache_is_refused():
    message = r"prefix_lens\[0\] is 5; expected 0 … 4"
    refuse(ValueError, message, prefix_lens=[5])  # 6 rows, 2 of them for the tree
    refuse(ValueError, r"prefix_lens\[0\] is -1; expected 0 … 4", prefix_lens=[-1])
    padding = GOOD[3].copy()
    padding[0, 1] = 0
    refuse(ValueError, "is 6; expected 0 … 5", prefix_lens=[6], visibility=padding)


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("sm_scale", NAN, r"a finite number up to 1e\+30"),
        ("sm_scale", INF, r"a finite number up to 1e\+30"),
        ("sm_scale", -1e300, r"a finite number up to 1e\+30"),
        ("sm_scale", 10**400, r"a finite number up to 1e\+30"),
        ("d_latent", 0, "1 … 6"),
        ("d_latent", 7, "1 … 6"),
        ("version", "fast", "auto, simple, split, mma"),
        ("n_splits", 0, "1 or more"),
    ],
)
def test_bad_options_are_named(name, value, expected):
    refuse(ValueError, f"{name} is .*; expected {expected}", **{name: value})


# ---------------------------------------------------------------------------------- PTX

F3, F4 = float32[:, :, ::1], float32[:, :, :, ::1]


@pytest.mark.ptx
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (12, 0)], ids=str)
@pytest.mark.parametrize("x", [float32, uint16], ids=["f32", "bf16"])
def test_kernels_compile_without_doubles_or_unmeant_stack(capability, x):
    tree = (x[:, :, ::1], int32[::1], uint32[:, :, ::1], float32, float32)
    signatures = {
        module.simple_kernel: (x[:, :, :, ::1], *tree, F4, F3),
        module.split_kernel: (x[:, :, ::1], *tree, boolean, F4, F3, F3),
        module.merge_kernel: (F4, F3, F3, F3, float32[:, ::1]),
    }
    for kernel, signature in signatures.items():
        ptx = backend.compile_ptx(kernel, signature, compute_capability=capability)
        assert ".f64" not in ptx
        # split_kernel parks its sums in local memory, and nothing else is there.
        parked = 4 * module.SUMS if kernel is module.split_kernel else 0
        stack = re.findall(r"\.local .*?\[(\d+)\]", ptx)
        assert sum(map(int, stack)) == parked
        assert "fma.rn.f32" in ptx
        if kernel is module.split_kernel:
            loads = re.findall(r"ld\.shared(?:\.v4)?\.[fb]32", ptx)
            assert len(loads) >= 16
            assert all(".v4." in load for load in loads)


@pytest.mark.ptx
def test_the_largest_merge_has_its_registers():
    threads = module.MERGE_GROUPS * module.MERGE_THREADS
    signature = (F4, F3, F3, F3, float32[:, ::1])
    kernel = assembled(merge_kernel, threads, signature, (8, 0))
    assert kernel.registers * threads <= 65536 and kernel.spilled == 0


@pytest.mark.parametrize(
    ("first", "second", "row", "bit"),
    [(1, 2 | 1 << 2, 1, 2), (1 | 2, 2, 0, 1)],
    ids=["beyond-the-tree", "behind-the-row"],
)
def test_visibility_names_a_row_and_those_before_it_alone(first, second, row, bit):
    refuse(
        ValueError,
        f"visibility, request 0, row {row} has bit {bit}; expected bits of rows "
        f"0 … {row}: a node comes after its ancestors",
        visibility=np.array([[[first], [second]]], np.uint32),
    )


@pytest.mark.parametrize(
    ("name", "bad"),
    [
        *(("sm_scale", x) for x in ("1", None, 1j, True)),
        *(("d_latent", x) for x in ("4", None, 4.0, True)),
        *(("n_splits", x) for x in ("2", 2.5, True)),
        *(("exact_max", x) for x in ("no", None, 1)),
    ],
)
def test_scalars_of_another_type_are_named(name, bad):
    refuse(TypeError, f"{name} is ", **{name: bad})
