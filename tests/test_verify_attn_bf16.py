"""Every version of verify_attn on what the fast ones are for: bfloat16, 512 + 64."""

import math

import numpy as np
import pytest
from numba import cuda
from test_verify_attn import (
    CHAIN4,
    FORK4,
    INF,
    KNOWN,
    NAN,
    SCALE,
    STAR4,
    YARN_SCALE,
    _outputs_are_nan_between_canaries,  # noqa: F401
    constant_case,
    dense,
    random_case,
)

from ddtree_numba import bf16
from ddtree_numba.kernels import verify_attn as module
from ddtree_numba.kernels.verify_attn import VERSIONS, verify_attn
from ddtree_numba.tree import DraftTree

BF16_NAN = 0x7FC0
# Of a score: a chain of 36 tensor-core sums that cut off, up to 100, times the scale.
SCORE = 3e-5
# Of a weight: rounding it to bfloat16.
WEIGHT = 2.0**-8
# Equal weights are exact: what float32 rounds when it averages.
AVERAGE = 3e-7

EDGES = [15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 1025]

ON_GPU = [
    pytest.param(("gpu", version), marks=pytest.mark.gpu, id=f"gpu-{version}")
    for version in VERSIONS
    if version != "auto"
]
EMULATED = pytest.param(("emulator", "mma"), id="emulator-mma")
GPU_WAYS = pytest.mark.parametrize("how", ON_GPU)
WAYS = pytest.mark.parametrize("how", [EMULATED, *ON_GPU])


@pytest.fixture(autouse=True)
def _only_where_the_version_runs(request):
    how = request.node.callspec.params.get("how", (None, None))
    if how == ("gpu", "wgmma"):
        if cuda.get_current_device().compute_capability[0] != 9:
            pytest.skip("wgmma needs compute capability 9.0")


def to_bf16(q, cache, *tree):
    return bf16.from_float32(q), bf16.from_float32(cache), *tree


def bf16_case(seed, n, heads, prefix_lens, **options):
    """Unit normals, a tree for each request, NaN in every unused row of the cache."""
    rng = np.random.default_rng(seed)
    return to_bf16(*random_case(rng, n, heads, 512, 64, prefix_lens, **options))


def attend(how, case, **options):
    options = {"sm_scale": SCALE, "d_latent": 512} | options
    return verify_attn(*case, executor=how[0], version=how[1], **options)


def sizes(q, cache, *rest, sm_scale):
    """The weighted sum of the values' magnitudes: what errors of weights multiply."""
    q, cache = bf16.to_float32(q), bf16.to_float32(cache)
    unscored = np.concatenate([np.zeros_like(q[..., :512]), q], axis=-1)
    magnitudes = np.concatenate([np.abs(cache[..., :512]), cache], axis=-1)
    return dense(unscored, magnitudes, *rest, d_latent=512, sm_scale=sm_scale)[0]


def assert_close(found, case, rows=slice(None), sm_scale=SCALE):
    """Within what rounding the weights can do to each single element."""
    expected, expected_lse = dense(*case, d_latent=512, sm_scale=sm_scale)
    score = SCORE * max(1, sm_scale / SCALE)
    allowed = (WEIGHT + score) * sizes(*case, sm_scale=sm_scale)
    assert found[0].dtype == found[1].dtype == np.float32
    assert (np.abs(found[0] - expected) <= allowed)[:, rows].all()
    lse, expected_lse = found[1][:, rows], expected_lse[:, rows]
    np.testing.assert_allclose(lse, expected_lse, rtol=0, atol=score)


def flashmla_case(prefix_lens, **options):
    """A cache drawn as in FlashMLA's tests, whose table is for outputs well below 1."""
    q, cache, *tree = bf16_case(7, 33, 64, prefix_lens, **options)
    tenth = np.clip(bf16.to_float32(cache) / 10, -1, 1)
    return q, bf16.from_float32(tenth), *tree


def assert_flashmla(found, case):
    """Within the tolerances of FlashMLA's tests."""
    expected = dense(*case, d_latent=512)
    np.testing.assert_allclose(found[0], expected[0], rtol=2.01 / 128, atol=8e-4)
    np.testing.assert_allclose(found[1], expected[1], rtol=8.01 / 65536, atol=1e-6)
    a, b = found[0].astype(float), expected[0]
    assert 1 - 2 * (a * b).sum() / (a * a + b * b).sum() < 5e-6


def averages(prefixes, tails, parents):
    """Queries 0, and cache rows of one value each."""
    return to_bf16(*constant_case(prefixes, tails, parents, 512, 64))


# ------------------------------------------------------------------------ known answers


@GPU_WAYS
@pytest.mark.parametrize("name", KNOWN)
def test_equal_scores_average_the_rows_that_are_seen(how, name):
    prefix, tail, parents, expected = KNOWN[name]
    out, lse = attend(how, averages([prefix], [tail], [parents]))
    want = np.broadcast_to(np.reshape(expected, (-1, 1)), out[0, :, 0].shape)
    np.testing.assert_allclose(out[0, :, 0], want, rtol=AVERAGE)
    n_seen = len(prefix) + DraftTree.from_parents(parents).depths[0] + 1
    np.testing.assert_allclose(lse[0, :, 0], np.log(n_seen), rtol=0, atol=2e-6)


@GPU_WAYS
def test_lse_is_the_natural_logarithm(how):
    _, lse = attend(how, averages([[5] * 7], [[5]], [[-1]]))
    assert lse[0, 0, 0] == pytest.approx(2.079442, abs=1e-6)


@GPU_WAYS
def test_requests_keep_to_their_own_prefix_length_and_tree(how):
    case = averages([[1] * 5, [2] * 3], [[10, 20, 30, 40]] * 2, [CHAIN4, STAR4])
    out, _ = attend(how, case)
    expected = [[2.5, 5, 8.125, 35 / 3], [4, 7.2, 9.2, 11.2]]
    np.testing.assert_allclose(out[:, :, 0, 511], expected, rtol=AVERAGE)


@GPU_WAYS
def test_a_request_without_a_prefix_stands_beside_one_with(how):
    out, lse = attend(how, averages([[], [1, 2]], [[3], [3]], [[-1], [-1]]))
    np.testing.assert_array_equal(out[0], 3)
    np.testing.assert_array_equal(lse[0], 0)
    np.testing.assert_allclose(out[1], 2, rtol=AVERAGE)


@WAYS
@pytest.mark.parametrize("prefix", [[], [1, NAN]], ids=["no-prefix", "prefix-with-nan"])
def test_a_padding_row_sees_nothing_not_even_the_prefix(how, prefix):
    q, cache, lens, visibility = averages([prefix], [[3, 4]], [[-1, 0]])
    visibility[0, 1] = 0
    cache[0, len(prefix) + 1] = BF16_NAN
    out, lse = attend(how, (q, cache, lens, visibility))
    np.testing.assert_array_equal(out[0, 1], 0)
    np.testing.assert_array_equal(lse[0, 1], -INF)
    np.testing.assert_array_equal(out[0, 0], np.mean([*prefix, 3]))


@WAYS
@pytest.mark.parametrize("sign", [-1, 1], ids=["negative", "positive"])
def test_scores_of_a_hundred_thousand_keep_their_softmax(how, sign):
    q, cache, *tree = constant_case([[sign * 64] * 3], [[sign * 64]], [[-1]], 512, 64)
    cache[..., 512:] = 0
    q[:] = 64
    out, lse = attend(how, to_bf16(q, cache, *tree))
    np.testing.assert_array_equal(out, sign * 64)
    expected = sign * 512 * 64 * 64 * SCALE + math.log(4)  # -151347.52
    assert lse[0, 0, 0] == pytest.approx(expected, abs=2**-5)  # two ulp


@WAYS
@pytest.mark.parametrize("prefix_len", [-5, 5])
def test_unchecked_lengths_never_lead_outside_the_cache(how, prefix_len, monkeypatch):
    monkeypatch.setattr(module, "_check_fit", lambda *_: None)
    q, cache, _, visibility = constant_case([[]], [[0] * 3], [CHAIN4[:3]], 512, 64, 3)
    cache[0, :6, :] = np.arange(1, 7, dtype=np.float32)[:, None]
    lens = np.array([prefix_len], np.int32)
    out, _ = attend(how, to_bf16(q, cache, lens, visibility))
    # A negative length counts as 0, and of 6 rows there are no more than 6 to see.
    expected = {-5: [1, 1.5, 2], 5: [3.5] * 3}[prefix_len]
    np.testing.assert_allclose(out[0, :, 0, 0], expected, rtol=AVERAGE)


@GPU_WAYS
@pytest.mark.parametrize("sm_scale", [SCALE, YARN_SCALE, 1e-30, 4.0], ids=str)
def test_the_scale_is_the_callers(how, sm_scale):
    case = bf16_case(0, 5, 8, [130])
    assert_close(attend(how, case, sm_scale=sm_scale), case, sm_scale=sm_scale)


@GPU_WAYS
def test_a_new_tree_and_length_in_the_same_buffers_are_seen(how):
    q, cache, lens, visibility = averages([[]], [[1, 10, 100, 1000]], [FORK4])
    on_device = [cuda.to_device(x) for x in (q, cache, lens, visibility)]
    out, _ = attend((None, how[1]), on_device)
    expected = [1, 5.5, 50.5, 337]
    np.testing.assert_allclose(out.copy_to_host()[0, :, 0, 0], expected, rtol=AVERAGE)
    on_device[3].copy_to_device(DraftTree.from_parents([CHAIN4]).visibility)
    out, _ = attend((None, how[1]), on_device)
    expected = [1, 5.5, 37, 277.75]
    np.testing.assert_allclose(out.copy_to_host()[0, :, 0, 0], expected, rtol=AVERAGE)
    on_device[2].copy_to_device(np.ones(1, np.int32))  # row 0 is the prefix now
    out, _ = attend((None, how[1]), on_device)
    expected = [5.5, 37, 277.75]
    np.testing.assert_allclose(out.copy_to_host()[0, :3, 0, 0], expected, rtol=AVERAGE)


# ----------------------------------------------------------------------- not a number


@GPU_WAYS
@pytest.mark.parametrize("element", [0, 511, 575])
@pytest.mark.parametrize("prefix_len", [3, 64 + 3])
def test_a_nan_reaches_only_the_rows_that_see_it(how, prefix_len, element):
    q, cache, lens, visibility = bf16_case(4, 5, 1, [prefix_len])
    visibility[:] = DraftTree.from_parents([[-1, 0, 0, 1, 2]]).visibility
    clean = q, cache.copy(), lens, visibility
    cache[0, prefix_len + 2, element] = BF16_NAN  # row 2's, which row 4 sees too
    out, lse = attend(how, (q, cache, lens, visibility))
    assert_close((out, lse), clean, [0, 1, 3])
    assert np.isnan(out[:, [2, 4]]).all()
    assert np.isnan(lse[:, [2, 4]]).all()


# ----------------------------------------------------------------------------- at size


@GPU_WAYS
def test_two_million_elements_within_flashmla_tolerances(how):
    case = flashmla_case([2048, 1000])
    found = attend(how, case)
    assert found[0].size > 2_000_000
    assert_flashmla(found, case)


@GPU_WAYS
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 16, 64])
def test_head_counts_and_ragged_prefixes(how, heads):
    case = bf16_case(heads, 33, heads, [0, 1, 63, 64, 65, 1000])
    assert_close(attend(how, case), case)


@GPU_WAYS
@pytest.mark.parametrize("n", EDGES)
def test_rows_around_words_and_tiles(how, n):
    case = bf16_case(n, n, 2, [100])
    assert_close(attend(how, case), case)


@GPU_WAYS
@pytest.mark.parametrize("n", [1, 2])
def test_prefixes_around_a_tile_of_keys(how, n):
    case = bf16_case(n, n, 3, EDGES)
    assert_close(attend(how, case), case)


@GPU_WAYS
def test_a_batch_beyond_the_grid_limit(how):
    batch = 65536
    cache = np.zeros((batch, 1, 576), np.float32)
    cache[:] = (np.arange(batch) % 7)[:, None, None]
    q, lens = np.zeros((batch, 1, 1, 576), np.uint16), np.zeros(batch, np.int32)
    case = q, bf16.from_float32(cache), lens, np.ones((batch, 1, 1), np.uint32)
    out, _ = attend(how, case)
    np.testing.assert_array_equal(out[:, 0, 0, 0], np.arange(batch) % 7)


@GPU_WAYS
def test_a_cache_of_more_than_two_to_the_31_elements(how):
    batch, room, d = 3, 1_864_136, 576  # request 2 begins at element 2 147 484 672
    cache = cuda.device_array((batch, room, d), np.uint16)
    for b in range(batch):
        row = np.full(d, b + 1, np.float32)
        cache[b, 0].copy_to_device(bf16.from_float32(row))
    q = cuda.to_device(np.zeros((batch, 1, 1, d), np.uint16))
    lens = cuda.to_device(np.zeros(batch, np.int32))
    bits = cuda.to_device(np.ones((batch, 1, 1), np.uint32))
    out, _ = attend((None, how[1]), (q, cache, lens, bits))
    np.testing.assert_array_equal(out.copy_to_host()[:, 0, 0, 0], [1, 2, 3])
