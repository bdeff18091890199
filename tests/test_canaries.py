"""What surrounds every array of a stage: it is not read, and it is not written.

Each output (and, on a GPU, each input that is copied there) is a part of a larger
buffer. The bytes around it say NaN where floats are, and nonsense where integers are,
so a result shows if they are read; afterwards they must still be there. On a GPU the
sizes are real ones. The emulator would raise for an index outside its array; here its
runs show that the checks themselves hold.
"""

import numpy as np
import pytest
from numba import cuda
from random_trees import random_tree

from ddtree_numba import bf16, reference
from ddtree_numba.backend import Place
from ddtree_numba.kernels.argmax import argmax
from ddtree_numba.kernels.kv_compact import kv_compact
from ddtree_numba.kernels.topk import topk
from ddtree_numba.kernels.tree_accept import tree_accept
from ddtree_numba.kernels.tree_build import tree_build

GUARD = 512  # bytes on either side: as far as the widest access reaches, and aligned


class Guards:
    """Arrays inside larger buffers."""

    def __init__(self):
        self.buffers = []

    def around(self, x, on_gpu):
        """A copy of a NumPy array in the middle of a buffer of its own."""
        # 0xFF is NaN in every float, bfloat16 in uint16 among them.
        canary = 0xFF if x.dtype.kind == "f" or x.dtype == np.uint16 else 0xA5
        whole = np.full(x.nbytes + 2 * GUARD, canary, np.uint8)
        whole[GUARD : GUARD + x.nbytes] = x.reshape(-1).view(np.uint8)
        if on_gpu:
            whole = cuda.to_device(whole)
        self.buffers.append((whole, canary))
        return whole[GUARD : GUARD + x.nbytes].view(x.dtype).reshape(x.shape)

    def assert_intact(self):
        assert self.buffers
        for whole, canary in self.buffers:
            whole = whole if isinstance(whole, np.ndarray) else whole.copy_to_host()
            assert (whole[:GUARD] == canary).all()
            assert (whole[-GUARD:] == canary).all()


@pytest.fixture
def guards(monkeypatch):
    """Every array that a stage allocates or copies to a GPU gets guards."""
    guards = Guards()

    def empty(place, shape, dtype):
        # Filled with what no result is, so that what a kernel leaves out shows.
        nonsense = np.full(int(np.prod(shape)) * np.dtype(dtype).itemsize, 0xA5, "u1")
        x = nonsense.view(dtype).reshape(shape)
        return guards.around(x, place.executor == "gpu")

    def put(place, x):
        if place.executor == "gpu" and isinstance(x, np.ndarray):
            return guards.around(np.ascontiguousarray(x), True)
        return x

    monkeypatch.setattr(Place, "empty", empty)
    monkeypatch.setattr(Place, "put", put)
    return guards


def test_a_canary_that_is_overwritten_is_told(guards):
    x = guards.around(np.zeros((3, 5), np.float32), False)
    x[...] = 1
    guards.assert_intact()
    whole, _ = guards.buffers[0]
    whole[GUARD + x.nbytes] = 0
    with pytest.raises(AssertionError):
        guards.assert_intact()


def assert_equal(found, expected):
    for name, value in vars(expected).items():
        np.testing.assert_array_equal(getattr(found, name), value, err_msg=name)


# -- stages ---------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["simple", "chunks"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_topk(kernel_executor, guards, version, dtype):
    # An odd vocabulary: rows then end, and begin, between two wide loads.
    shape, k = ((1, 3, 163839), 64) if kernel_executor == "gpu" else ((2, 2, 333), 20)
    logits = np.random.default_rng(0).standard_normal(shape, np.float32) * 4
    logits = bf16.from_float32(logits) if dtype == "bf16" else logits
    log_probs, ids = topk(logits, k, version=version, executor=kernel_executor)
    guards.assert_intact()
    expected = reference.topk(logits, k)
    np.testing.assert_array_equal(ids, expected[1])
    # The sum and its logarithm, and one rounding of the answer (as in test_topk).
    np.testing.assert_allclose(log_probs, expected[0], rtol=2.0**-23, atol=1e-6)


@pytest.mark.parametrize("version", ["simple", "small", "parallel"])
def test_tree_build(kernel_executor, guards, version):
    on_gpu = kernel_executor == "gpu"
    n_draft_nodes = [1024, 700] if on_gpu else [21, 0]
    if version == "small" and on_gpu:
        n_draft_nodes = [64, 33]
    length, k = (15, 1024) if on_gpu else (3, 7)
    rng = np.random.default_rng(1)
    log_probs = -np.sort(rng.exponential(size=(2, length, k)) * 6).astype(np.float32)
    ids = rng.integers(0, 163840, log_probs.shape, np.int32)
    arguments = log_probs, ids, n_draft_nodes
    tree = tree_build(*arguments, version=version, executor=kernel_executor)
    guards.assert_intact()
    assert_equal(tree, reference.tree_build(*arguments))


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_argmax(kernel_executor, guards, dtype):
    shape = (2, 17, 163839) if kernel_executor == "gpu" else (2, 3, 333)
    logits = np.random.default_rng(2).standard_normal(shape, np.float32)
    logits[:, -1] = np.nan  # of a padding row
    logits = bf16.from_float32(logits) if dtype == "bf16" else logits
    n_rows = [shape[1] - 1, 1]
    tokens = argmax(logits, n_rows, executor=kernel_executor)
    guards.assert_intact()
    np.testing.assert_array_equal(tokens, reference.argmax(logits, n_rows))


@pytest.mark.parametrize("max_depth", [None, 15])
def test_tree_accept(kernel_executor, guards, max_depth):
    batch, n = (64, 257) if kernel_executor == "gpu" else (5, 9)
    rng = np.random.default_rng(3)
    tree = random_tree(rng, batch, n, depth_bias=0.3)
    targets = rng.integers(3, size=(batch, n)).astype(np.int32)
    options = dict(max_depth=max_depth)
    found = tree_accept(tree, targets, executor=kernel_executor, **options)
    guards.assert_intact()
    expected = reference.tree_accept(tree, targets, **options)
    for name in expected._fields:
        got, value = getattr(found, name), getattr(expected, name)
        np.testing.assert_array_equal(got, value, err_msg=name)


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_kv_compact(kernel_executor, guards, dtype):
    on_gpu = kernel_executor == "gpu"
    shape = (2, 3, 4096, 576) if on_gpu else (2, 3, 40, 18)
    rng = np.random.default_rng(4)
    cache = rng.integers(1, 1000, shape).astype(dtype)
    prefix_lens = np.array([0, 5, shape[2] - 30], np.int32)
    # The last request's tail ends with the cache.
    rows = np.array([[0, 2, 3, 9], [0, 1, 2, 3], [0, 7, 12, 29]], np.int32)
    accept_len = np.array([4, 0, 4], np.int32)
    moved = guards.around(cache, on_gpu)
    at = Place(kernel_executor, "numba" if on_gpu else "numpy")
    given = [at.put(x) for x in (prefix_lens, rows, accept_len)]
    found = kv_compact(moved, *given, executor=kernel_executor)
    guards.assert_intact()
    expected = cache.copy()
    lens = reference.kv_compact(expected, prefix_lens, rows, accept_len)
    if on_gpu:
        moved, found = moved.copy_to_host(), found.copy_to_host()
    np.testing.assert_array_equal(found, lens)
    # What no accepted row moved to is as it was, too.
    np.testing.assert_array_equal(moved, expected)


# -- what lies beside a strided view --------------------------------------------------


@pytest.mark.parametrize("version", ["simple", "chunks"])
def test_topk_of_a_view_does_not_see_the_padding_beside_it(kernel_executor, version):
    """As of a vocabulary that is padded to a multiple of something."""
    full = kernel_executor == "gpu"
    padded = np.full((2, 4, 163904 if full else 320), np.nan, np.float32)
    vocab = 163840 if full else 301
    rng = np.random.default_rng(5)
    padded[:, :3, :vocab] = rng.standard_normal((2, 3, vocab), np.float32)
    logits = padded[:, :3, :vocab]
    expected = reference.topk(logits, 32)
    if full:
        logits = cuda.to_device(padded)[:, :3, :vocab]
    log_probs, ids = topk(logits, 32, version=version, executor=kernel_executor)
    if full:
        log_probs, ids = log_probs.copy_to_host(), ids.copy_to_host()
    np.testing.assert_array_equal(ids, expected[1])
    np.testing.assert_allclose(log_probs, expected[0], rtol=2.0**-23, atol=1e-6)


def test_argmax_of_a_view_does_not_see_the_padding_beside_it(kernel_executor):
    full = kernel_executor == "gpu"
    vocab = 163840 if full else 301
    padded = np.full((2, 4, vocab + 64), np.inf, np.float32)
    rng = np.random.default_rng(6)
    padded[:, :3, :vocab] = rng.standard_normal((2, 3, vocab), np.float32)
    logits = padded[:, :3, :vocab]
    expected = reference.argmax(logits)
    if full:
        logits = cuda.to_device(padded)[:, :3, :vocab]
    tokens = argmax(logits, executor=kernel_executor)
    tokens = tokens.copy_to_host() if full else tokens
    np.testing.assert_array_equal(tokens, expected)


# -- millions -------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["simple", "chunks"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("spread", [1, 8])
def test_log_probs_of_two_million_logits_agree_with_float64(version, dtype, spread):
    logits = np.random.default_rng(spread).standard_normal((1, 13, 163840), np.float32)
    logits *= spread
    logits = bf16.from_float32(logits) if dtype == "bf16" else logits
    log_probs, ids = topk(logits, 1024, version=version, executor="gpu")
    wide = bf16.to_float32(logits) if dtype == "bf16" else logits
    wide = wide[0].astype(np.float64)
    top = wide.max(1, keepdims=True)
    lse = top + np.log(np.exp(wide - top).sum(1, keepdims=True))
    order = np.argsort(-wide, axis=1, kind="stable")[:, :1024]
    np.testing.assert_array_equal(ids[0], order)
    exact = np.take_along_axis(wide, order, 1) - lse
    # 1e-6 for the sum and its logarithm, and one rounding of the answer.
    np.testing.assert_allclose(log_probs[0], exact, rtol=2.0**-23, atol=1e-6)


@pytest.mark.gpu
def test_choices_of_five_million_logits():
    logits = np.random.default_rng(7).standard_normal((1, 33, 163840), np.float32)
    logits[0, :, 1::7] = np.round(logits[0, :, 1::7] * 2)  # many ties
    logits[0, ::2] = np.round(logits[0, ::2])
    np.testing.assert_array_equal(argmax(logits, executor="gpu"), logits.argmax(2))
