"""verify_attn with wgmma: small in the emulator; at full size on a GPU."""

import re
import shutil
import subprocess
from itertools import pairwise

import numpy as np
import pytest
from numba import cuda, float32, int32, uint32, uint64
from test_verify_attn import (
    INF,
    KNOWN,
    NAN,
    SCALE,
    YARN_SCALE,
    constant_case,
    dense,
)
from test_verify_attn_bf16 import (
    BF16_NAN,
    assert_flashmla,
    bf16_case,
    flashmla_case,
    sizes,
)

from ddtree_numba import backend, bf16
from ddtree_numba.emulator import emulate
from ddtree_numba.kernels import verify_attn as verify_attn_module
from ddtree_numba.kernels import verify_attn_wgmma as module
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.tree import DraftTree

# A chain of 36 tensor-core sums that cut off, of scores up to 100, times the scale.
LSE, LSE_OF_LARGE = 3e-5, 4e-6
# What nobody has written of unsigned integers: as two float16, NaN.
UNWRITTEN = np.iinfo(np.uint32).max
# A weight's rounding to bfloat16, and what the score's error adds to it.
WEIGHT = 2.0**-8 + LSE


@pytest.fixture(autouse=True)
def _outputs_start_as_nan(monkeypatch):
    """What a kernel leaves unwritten must not look like an answer."""
    empty = backend.Place.empty

    def poisoned(at, shape, dtype):
        x = empty(at, shape, dtype)
        kind = np.dtype(dtype)
        nothing = NAN if kind.kind == "f" else UNWRITTEN
        at.write(x, np.full(shape, nothing, kind))
        return x

    monkeypatch.setattr(backend.Place, "empty", poisoned)


@pytest.fixture
def _six_blocks(monkeypatch):
    """Enough for two row tiles in three parts; the emulator's one cuts nothing."""
    monkeypatch.setattr(verify_attn_module, "_multiprocessors", lambda at: 6)


def attend(executor, case, **options):
    options = {"version": "wgmma", "executor": executor, "d_latent": 512} | options
    return verify_attn(*case, **{"sm_scale": SCALE} | options)


def assert_close(found, case, rows=slice(None), sm_scale=SCALE):
    """Within what rounding the weights can do to each single element."""
    expected, expected_lse = dense(*case, d_latent=512, sm_scale=sm_scale)
    error = np.abs(found[0] - expected)
    assert found[0].dtype == found[1].dtype == np.float32
    assert (error <= WEIGHT * sizes(*case, sm_scale=sm_scale))[:, rows].all()
    np.testing.assert_allclose(
        found[1][:, rows], expected_lse[:, rows], rtol=LSE_OF_LARGE, atol=LSE
    )


# ------------------------------------------------------------------ small, and on a GPU


@pytest.mark.parametrize("exact_max", [False, True], ids=["lazy", "exact"])
@pytest.mark.parametrize(
    ("n", "heads", "prefix_lens"),
    [(1, 1, [0]), (5, 13, [70]), (3, 2, [130, 0])],
    ids=["one", "two-row-tiles", "three-tiles-and-one"],
)
def test_random_cases_agree_with_dense_attention(
    kernel_executor, n, heads, prefix_lens, exact_max
):
    case = bf16_case(n, n, heads, prefix_lens)
    assert_close(attend(kernel_executor, case, exact_max=exact_max), case)


@pytest.mark.parametrize("name", KNOWN)
def test_equal_scores_average_the_rows_that_are_seen(kernel_executor, name):
    prefix, tail, parents, expected = KNOWN[name]
    q, cache, *tree = constant_case([prefix], [tail], [parents], 512, 64)
    case = bf16.from_float32(q), bf16.from_float32(cache), *tree
    out, lse = attend(kernel_executor, case)
    want = np.broadcast_to(np.reshape(expected, (-1, 1)), out[0, :, 0].shape)
    np.testing.assert_allclose(out[0, :, 0], want, rtol=3e-7)
    n_seen = len(prefix) + DraftTree.from_parents(parents).depths[0] + 1
    np.testing.assert_allclose(lse[0, :, 0], np.log(n_seen), rtol=0, atol=2e-6)


@pytest.mark.parametrize("exact_max", [False, True], ids=["lazy", "exact"])
def test_references_follow_scores_that_grow_from_tile_to_tile(
    kernel_executor, exact_max
):
    q, cache, *tree = bf16_case(1, 2, 2, [190])
    growth = np.linspace(0.1, 6, cache.shape[1], dtype=np.float32)[:, None]
    cache = bf16.from_float32(bf16.to_float32(cache) * growth)
    case = bf16.from_float32(4 * bf16.to_float32(q)), cache, *tree
    assert_close(attend(kernel_executor, case, exact_max=exact_max), case)


def test_scores_of_a_hundred_thousand_keep_their_softmax(kernel_executor):
    q, cache, *tree = constant_case([[-64] * 3], [[-64]], [[-1]], 512, 64)
    cache[..., 512:] = 0
    q[:] = 64
    case = bf16.from_float32(q), bf16.from_float32(cache), *tree
    out, lse = attend(kernel_executor, case)
    np.testing.assert_array_equal(out, -64)
    assert lse[0, 0, 0] == pytest.approx(-151347.52, abs=2**-5)


@pytest.mark.usefixtures("_six_blocks")
@pytest.mark.parametrize("n_splits", [2, 3])
def test_splits_do_not_change_the_result(kernel_executor, n_splits):
    # Two requests of three tiles of keys, in parts of one and a half, or of one.
    case = bf16_case(2, 2, 2, [140, 160])
    assert_close(attend(kernel_executor, case, n_splits=n_splits), case)


def scored_by_rope(case, factors):
    """The case with values times factors [keys, columns], of which no score knows."""
    q, cache, *tree = case
    q[..., :512] = 0
    values = bf16.to_float32(cache[..., :512]) * np.float32(factors)
    cache[..., :512] = bf16.from_float32(values)
    return q, cache, *tree


@pytest.mark.usefixtures("_six_blocks")
@pytest.mark.parametrize(
    "powers", [(-120, -120), (110, 110), (-100, 100), (100, -100)], ids=str
)
def test_parts_have_values_of_any_size(kernel_executor, powers):
    case = bf16_case(2, 2, 2, [140])
    keys = np.arange(case[1].shape[1])[:, None]  # the first part has 128
    factors = np.where(keys < 128, 2.0 ** powers[0], 2.0 ** powers[1])
    case = scored_by_rope(case, factors)
    assert_close(attend(kernel_executor, case, n_splits=2), case)


@pytest.mark.usefixtures("_six_blocks")
def test_parts_have_columns_of_different_sizes(kernel_executor):
    powers = np.tile(np.linspace(-12, 12, 256).round(), 2)  # in what has one scale
    case = scored_by_rope(bf16_case(2, 2, 2, [140]), 2.0**powers)
    assert_close(attend(kernel_executor, case, n_splits=2), case)


@pytest.mark.usefixtures("_six_blocks")
def test_a_part_may_have_no_key_that_its_rows_see(kernel_executor):
    # The first 64 rows do not see what is in the last tile of keys, a part.
    case = bf16_case(2, 66, 1, [128], shape="chain")
    assert_close(attend(kernel_executor, case, n_splits=3), case)


@pytest.mark.usefixtures("_six_blocks")
def test_what_lies_behind_the_marks_of_parts_is_no_reference(kernel_executor):
    # Large values do, of the block's tile of keys.
    case = scored_by_rope(bf16_case(2, 2, 2, [300]), 2.0**100)
    assert_close(attend(kernel_executor, case, n_splits=5), case)


@pytest.mark.usefixtures("_six_blocks")
def test_a_lane_with_six_parts_weighs_four_and_two(monkeypatch):
    # Not eight: as above, no more are there.
    given = module.device(lambda chunks, parts: np.int32(5))
    monkeypatch.setattr(module, "chunks_at_a_time", given)
    case = scored_by_rope(bf16_case(2, 2, 2, [380]), 2.0**100)
    assert_close(attend("emulator", case, n_splits=6), case)


@pytest.mark.usefixtures("_six_blocks")
def test_a_sum_that_overflows_is_infinite(kernel_executor):
    # Beside it the row's other sums of the same scale are nothing.
    q, cache, *tree = bf16_case(2, 2, 10, [140])
    q[:] = 0
    cache[:, :142, 5] = module.LARGEST_PAIR & 0xFFFF
    out, _ = attend(kernel_executor, (q, cache, *tree), n_splits=2)
    np.testing.assert_array_equal(out[..., 5], INF)
    assert np.isfinite(np.delete(out, 5, axis=-1)).all()


@pytest.mark.usefixtures("_six_blocks")
def test_any_of_a_rows_sums_may_be_its_largest(kernel_executor):
    # Of the second part a node sees the root's key and its own, which has a large value
    # among the first 256 columns and one among the others. Together with the root's
    # they are just below a power of 2: in float16 as near its largest as can be.
    q, cache, lens, _ = bf16_case(2, 64, 1, [128])
    visibility = DraftTree.from_parents([[-1] + 63 * [0]]).visibility
    nodes = np.arange(1, 64)
    values = bf16.to_float32(cache)
    values[0, 128:192, :512] = 0
    values[0, 128, :512] = -255 * 2.0**-3
    for first in (0, 256):
        values[0, 128 + nodes, first + 37 * nodes % 256] = -255 * 2.0**5
    case = np.zeros_like(q), bf16.from_float32(values), lens, visibility
    assert_close(attend(kernel_executor, case, n_splits=2), case)


def launch_watched(monkeypatch):
    """Have launches run in any order, and watched; returns the list of their races."""
    races = []

    def launch(at, *given, dynamic_shared, cooperative):
        options = {"dynamic_shared": dynamic_shared, "order": "shuffled"}
        races.extend(emulate(*given, trace=True, **options).races)

    monkeypatch.setattr(backend.Place, "launch", launch)
    return races


@pytest.mark.parametrize(
    ("n_splits", "blocks", "heads", "prefix_len"),
    [(3, 5, 64, 300), (4, 8, 33, 230), (3, 6, 33, 230), (5, 9, 33, 300)],
    ids=["a-block-in-both", "all-kept", "kept-in-thirds", "more-than-keepers"],
)
def test_parts_of_row_tiles_are_merged_whoever_has_them(
    n_splits, blocks, heads, prefix_len, monkeypatch
):
    # Two row tiles of four or five tiles of keys; of 33 heads the second has two rows.
    # Over an odd number of blocks the one in the middle has a part of both, beside
    # blocks that end with the first.
    monkeypatch.setattr(verify_attn_module, "_multiprocessors", lambda at: blocks)
    races = launch_watched(monkeypatch)
    case = bf16_case(2, 2, heads, [prefix_len])
    assert_close(attend("emulator", case, n_splits=n_splits), case)
    assert races == []


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_lanes_may_share_a_chunk(bits, monkeypatch):
    # Nine parts of a row tile: of a chunk, each of 32 / 2^bits lanes sums one to five.
    monkeypatch.setattr(verify_attn_module, "_multiprocessors", lambda at: 9)
    given = module.device(lambda chunks, parts: np.int32(bits))
    monkeypatch.setattr(module, "chunks_at_a_time", given)
    races = launch_watched(monkeypatch)
    case = bf16_case(1, 1, 20, [520])
    assert_close(attend("emulator", case, n_splits=9), case)
    assert races == []


@pytest.mark.parametrize(
    ("parts", "bits"), [(7, 2), (7, 3), (7, 4), (9, 5), (3, None)], ids=str
)
def test_any_part_may_have_a_rows_highest_scores(parts, bits, monkeypatch):
    # By hundreds of powers of 2: each head has nearly all its weight in one part, and
    # a reference that misses this part's makes its weight infinite. A lane that has all
    # of nine parts goes twice through four of them, and through one.
    monkeypatch.setattr(verify_attn_module, "_multiprocessors", lambda at: parts)
    if bits:
        given = module.device(lambda chunks, parts: np.int32(bits))
        monkeypatch.setattr(module, "chunks_at_a_time", given)
    q, cache, *tree = bf16_case(2, 1, 16, [64 * parts - 1])
    keys, heads = np.arange(64 * parts), np.arange(16)
    q[:] = 0
    large = bf16.from_float32(np.float32([64, 128]))[heads // 8]  # as a thread's two
    q[0, 0, heads, 512 + heads % parts] = large
    cache[0, keys, 512 + keys // 64] = bf16.from_float32(np.float32(64))
    case = q, cache, *tree
    assert_close(attend("emulator", case, n_splits=parts), case)


@pytest.mark.parametrize(
    ("n", "heads", "tiles", "blocks"),
    [(3, 43, 2, 9), (2, 33, 5, 12)],
    ids=["kept", "more-than-keepers"],
)
def test_a_block_merges_what_it_has_along_the_line(
    n, heads, tiles, blocks, monkeypatch
):
    # Row tiles of one request, each in as many parts as it has tiles of keys: blocks
    # are not in the order of their parts, and two or more have none.
    monkeypatch.setattr(verify_attn_module, "_multiprocessors", lambda at: blocks)
    monkeypatch.setattr(module, "LEAST", 1)
    monkeypatch.setattr(module, "SPLIT_COST", np.float32(0))
    counters = np.full(blocks, 7, np.int32)
    monkeypatch.setattr(module, "counters_of", lambda *given: counters)
    races = launch_watched(monkeypatch)
    case = bf16_case(n, n, heads, [64 * tiles - n])
    assert_close(attend("emulator", case), case)
    assert races == []
    assert (counters == 8).all()


@cuda.jit
def chunks_kernel(chunks, parts, bits):
    # chunks, parts, bits [n] i32
    for i in range(bits.size):
        bits[i] = module.chunks_at_a_time(chunks[i], parts[i])


def test_a_warp_sums_at_a_time_what_takes_the_fewest_steps():
    chunks, parts = np.mgrid[1:4097:91, 2:145:11].astype(np.int32).reshape(2, -1)
    bits = np.zeros(chunks.size, np.int32)
    emulate(chunks_kernel, 1, 1, chunks, parts, bits)

    def steps(chunks, parts, bits):
        lanes = 32 >> bits  # of a chunk
        rounds = -(-chunks // (8 << bits))
        return rounds * (-(-parts // (4 * lanes)) + 5 - bits)

    for given in zip(chunks.tolist(), parts.tolist(), bits.tolist(), strict=True):
        assert steps(*given) == min(steps(*given[:2], n) for n in (2, 3, 4, 5))


def test_bands_without_rows_are_neither_posted_nor_merged(monkeypatch):
    # The second row tile has 2 of 64 rows: a band of 16. Blocks 4 … 7 have its parts.
    monkeypatch.setattr(verify_attn_module, "_multiprocessors", lambda at: 8)
    posted = []

    def launch(at, *given, **options):
        emulate(*given, dynamic_shared=options["dynamic_shared"])
        posted.extend(given[-3].reshape(2 * 8, module.POSTED)[[9, 10, 12, 14]])

    monkeypatch.setattr(backend.Place, "launch", launch)
    case = bf16_case(2, 2, 33, [230])
    assert_close(attend("emulator", case, n_splits=4), case)
    sums = np.stack(posted).reshape(4, 4, -1)
    written = (sums != UNWRITTEN).sum(axis=2)
    assert (written[:, 1:] == 0).all()
    # One that has a unit to merge keeps it: the second and the fourth.
    unit = 4 * module.UNIT
    assert written[:, 0].tolist() == [2 * unit, unit, 2 * unit, unit]


@pytest.mark.parametrize("before", [7, 2**31 - 3], ids=["early", "going-round"])
def test_launches_with_the_same_counters_follow_one_another(monkeypatch, before):
    monkeypatch.setattr(verify_attn_module, "_multiprocessors", lambda at: 5)
    counters = np.full(5, before, np.int32)
    monkeypatch.setattr(module, "counters_of", lambda *given: counters)
    q, cache, lens, visibility = bf16_case(2, 2, 33, [300])
    for launches, prefix_len in enumerate([300, 10, 300], 1):
        # Of so short a prefix most blocks have no part.
        lens[0] = prefix_len
        case = q, cache, lens, visibility
        assert_close(attend("emulator", case, n_splits=3), case)
        assert (counters == np.int32([before]) + np.int32(launches)).all()


def test_a_row_tile_ends_with_its_last_nodes_own_key(kernel_executor):
    # A row tile for each node of a chain: the second one's key begins a tile.
    case = bf16_case(3, 2, 64, [63], shape="chain")
    assert_close(attend(kernel_executor, case), case)


def test_a_padding_row_sees_nothing_not_even_the_prefix(kernel_executor):
    q, cache, lens, visibility = bf16_case(3, 3, 2, [2])
    visibility[0, 2] = 0
    cache[0, 4] = BF16_NAN  # in the padding's own row
    q[0, 2, :, 0] = bf16.from_float32(np.float32([INF, -INF]))  # one scores +inf
    out, lse = attend(kernel_executor, (q, cache, lens, visibility))
    np.testing.assert_array_equal(out[0, 2], 0)
    np.testing.assert_array_equal(lse[0, 2], -INF)
    assert_close((out, lse), (q, cache, lens, visibility), slice(2))


@pytest.mark.parametrize("element", [0, 511, 575])
@pytest.mark.parametrize("prefix_len", [3, 64 + 3], ids=["even-tile", "odd-tile"])
def test_a_nan_reaches_only_the_rows_that_see_it(kernel_executor, prefix_len, element):
    q, cache, lens, visibility = bf16_case(4, 5, 1, [prefix_len])
    visibility[:] = DraftTree.from_parents([[-1, 0, 0, 1, 2]]).visibility
    clean = q, cache.copy(), lens, visibility
    cache[0, prefix_len + 2, element] = BF16_NAN  # row 2's, which row 4 sees too
    out, lse = attend(kernel_executor, (q, cache, lens, visibility))
    assert_close((out, lse), clean, [0, 1, 3])
    assert np.isnan(out[:, [2, 4]]).all()
    assert np.isnan(lse[:, [2, 4]]).all()


def test_a_nan_query_spoils_its_own_row_and_head_alone(kernel_executor):
    q, *rest = bf16_case(5, 3, 2, [3])
    clean = q.copy(), *rest
    q[0, 1, 0, 2] = BF16_NAN
    out, lse = attend(kernel_executor, (q, *rest))
    assert np.isnan(out[0, 1, 0]).all()
    assert np.isnan(lse[0, 1, 0])
    expected, expected_lse = dense(*clean, d_latent=512)
    out[0, 1, 0], lse[0, 1, 0] = expected[0, 1, 0], expected_lse[0, 1, 0]
    assert_close((out, lse), clean)


def test_lanes_may_run_in_any_order_and_never_race(monkeypatch):
    case = bf16_case(6, 2, 2, [126])  # the second tile has prefix and tail
    races = launch_watched(monkeypatch)
    found = attend("emulator", case)
    assert races == []
    assert_close(found, case)


# -------------------------------------------------------------------- full size, on GPU


@pytest.mark.gpu
@pytest.mark.parametrize("exact_max", [False, True], ids=["lazy", "exact"])
@pytest.mark.parametrize("shape", ["chain", "wide", "deep"])
def test_full_size_within_flashmla_tolerances(shape, exact_max):
    case = flashmla_case([2048], shape=shape)
    assert_flashmla(attend("gpu", case, exact_max=exact_max), case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("exact_max", "norm"), [(False, 2e-3), (True, 1.2e-3)], ids=["lazy", "exact"]
)
def test_unit_normals_at_full_size(exact_max, norm):
    # With a few keys that have most of a row's weight, elements are off by what
    # rounding one weight does; so the error's norm, which is 2^-9 or less a weight.
    case = bf16_case(7, 33, 64, [2048])
    found = attend("gpu", case, exact_max=exact_max)
    expected = dense(*case, d_latent=512)[0]
    error = np.linalg.norm(found[0] - expected) / np.linalg.norm(expected)
    print(f"\nexact_max={exact_max}: |error| / |out| {error:.2e}")
    assert error < norm
    assert_close(found, case)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [1, 3, 8, 12, 16, 64])
@pytest.mark.parametrize("prefix_lens", [[0], [1, 63], [64, 65, 1000]], ids=str)
def test_head_counts_and_ragged_prefixes(heads, prefix_lens):
    case = bf16_case(heads, 33, heads, prefix_lens)
    assert_close(attend("gpu", case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [31, 32, 33, 63, 64, 65, 127, 128, 129, 1025])
def test_rows_around_words_and_tiles(n):
    case = bf16_case(n, n, 2, [100])
    assert_close(attend("gpu", case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("prefix_len", [31, 61, 62, 63, 64, 65, 126, 127, 128, 191])
@pytest.mark.parametrize("n", [1, 2])
def test_prefixes_around_a_tile_of_keys(n, prefix_len):
    case = bf16_case(n, n, 3, [prefix_len])
    assert_close(attend("gpu", case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("n_splits", [1, 2, 3, 7, 40])
def test_splits_at_full_width(n_splits):
    case = bf16_case(8, 5, 64, [1000, 64])
    assert_close(attend("gpu", case, n_splits=n_splits), case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("n", "heads", "prefix_lens"),
    [
        (1, 64, [12000]),  # one row tile in as many parts as are worth it
        (70, 64, [1500] * 2),  # a round of whole row tiles, and a rest that is cut
        (9, 64, list(range(0, 4000, 200))),  # all of the line is cut
        (2, 64, [700] * 70),  # whole row tiles alone, the last round not full
    ],
    ids=["one-tile", "round-and-rest", "ragged", "rounds"],
)
def test_every_way_of_sharing_the_work_out(n, heads, prefix_lens):
    case = bf16_case(9, n, heads, prefix_lens)
    first, second = attend("gpu", case), attend("gpu", case)
    assert_close(first, case)
    # Nothing depends on who was first, and what blocks wait by is ready again.
    np.testing.assert_array_equal(first[0], second[0])
    np.testing.assert_array_equal(first[1], second[1])


@pytest.mark.gpu
def test_any_positive_scale_will_do():
    case = bf16_case(10, 3, 16, [300])
    for scale in (YARN_SCALE, 1e-30, 4.0):
        assert_close(attend("gpu", case, sm_scale=scale), case, sm_scale=scale)


@pytest.mark.gpu
def test_a_batch_beyond_the_grid_limit():
    batch = 65536
    cache = np.zeros((batch, 1, 576), np.float32)
    cache[:] = (np.arange(batch) % 7)[:, None, None]
    q, lens = np.zeros((batch, 1, 1, 576), np.uint16), np.zeros(batch, np.int32)
    case = q, bf16.from_float32(cache), lens, np.ones((batch, 1, 1), np.uint32)
    out, _ = attend("gpu", case)
    np.testing.assert_array_equal(out[:, 0, 0, 0], np.arange(batch) % 7)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["request-by-request", "row-by-row"])
def test_a_strided_cache_is_read_in_place(order):
    q, cache, lens, visibility = bf16_case(11, 3, 4, [70, 20])
    batch, room, d = cache.shape
    outer = (batch, room) if order == "request-by-request" else (room, batch)
    wide = np.full((*outer, 640), BF16_NAN, np.uint16)
    axes = (0, 1, 2) if order == "request-by-request" else (1, 0, 2)
    wide.transpose(axes)[..., 8:584] = cache
    inside = cuda.to_device(wide)[:, :, 8:584]
    # Numba does not transpose device arrays of three axes.
    steps = [inside.strides[axis] for axis in axes]
    view = backend._Reinterpreted(inside, shape=(batch, room, d), strides=tuple(steps))
    on_device = [cuda.to_device(x) for x in (q, lens, visibility)]
    out, lse = attend(None, (on_device[0], view, *on_device[1:]))
    found = out.copy_to_host(), lse.copy_to_host()
    assert_close(found, (q, cache, lens, visibility))


@pytest.mark.gpu
def test_a_new_tree_and_length_in_the_same_buffers_are_seen():
    q, cache, lens, visibility = bf16_case(12, 5, 16, [100])
    on_device = [cuda.to_device(x) for x in (q, cache, lens, visibility)]
    attend(None, on_device)
    visibility[:] = DraftTree.from_parents([[-1, 0, 1, 2, 3]]).visibility
    lens[:] = 80
    for there, here in zip(on_device[2:], (lens, visibility), strict=True):
        there.copy_to_device(here)
    out, lse = attend(None, on_device)
    assert_close((out.copy_to_host(), lse.copy_to_host()), (q, cache, lens, visibility))


@pytest.mark.gpu
def test_auto_takes_it_where_it_can_run_and_pays():
    case = bf16_case(13, 33, 16, [500])
    found, auto = attend("gpu", case), attend("gpu", case, version="auto")
    np.testing.assert_array_equal(found[0], auto[0])
    negative = attend("gpu", case, version="auto", sm_scale=-SCALE)
    assert_close(negative, case, sm_scale=-SCALE)


@pytest.mark.parametrize(
    ("batch", "n", "heads", "room", "expected"),
    [
        (1, 1, 64, 64 * 15, False),  # a row tile of 15 tiles of keys
        (1, 1, 64, 64 * 15 + 1, True),
        (1, 15, 64, 64, False),  # 15 row tiles
        (2, 15, 64, 64, True),
    ],
)
def test_it_pays_for_16_tiles_of_rows_and_keys(batch, n, heads, room, expected):
    q = np.empty((batch, n, heads, 576), np.uint16)
    assert module.pays(q, np.empty((batch, room, 576), np.uint16)) == expected


@cuda.jit
def plans_kernel(prefix_lens, room, n_rows, row_tiles, n_splits, ints):
    # ints [blocks, …] i32: what each block's warp would write down
    for block in range(int32(ints.shape[0])):
        module.write_plan(
            ints[block], prefix_lens, room, n_rows, row_tiles, n_splits,
            int32(block), int32(ints.shape[0]), cuda.laneid,
        )  # fmt: skip


def plan_of_alike(tiles, row_tiles, blocks):
    """Parts of requests of one length along the line: (row tile, first tile, how many).

    row_tiles : of all requests, fewer than blocks
    """
    rest = tiles * row_tiles
    if (tiles - 5) * blocks <= rest:  # nothing is cut
        return [(0, 0, 0)] * blocks
    parts = max(tiles // module.LEAST, 1)
    whole = row_tiles * (blocks // row_tiles)
    workers = whole if 10 * whole >= 9 * blocks else blocks
    workers = min(workers, row_tiles * parts)
    cuts = [-(-rest * n // workers) for n in range(workers + 1)]
    found = [
        (begin // tiles, begin % tiles, end - begin) for begin, end in pairwise(cuts)
    ]
    return found + [(0, 0, 0)] * (blocks - workers)


@pytest.mark.parametrize("row_tiles", [1, 2, 3, 5, 7])
@pytest.mark.parametrize("tiles", [1, 9, 16, 29, 129])
def test_requests_are_cut_evenly_into_what_pays(tiles, row_tiles):
    # Of ten blocks three row tiles leave a tenth without work.
    for requests, blocks in ((1, 8), (1, 10), (1, 11), (1, 26), (2, 26)):
        ints = np.full((blocks, module.WORKER + 1), -1, np.int32)
        lens = np.full(requests, 64 * tiles - 3, np.int32)
        room = np.int32(64 * tiles)
        given = lens, room, np.int32(3), np.int32(row_tiles), np.int32(0)
        emulate(plans_kernel, 1, 32, *given, ints)
        workers = ints[:, module.WORKER].tolist()
        assert sorted(workers) == list(range(blocks))  # nobody does another's part
        ints[:, module.PART_AT + 1] += row_tiles * ints[:, module.PART_AT]
        told = ints[:, [module.PART_AT + 1, module.PART_AT + 2, module.PART_LENGTH]]
        told = told[np.argsort(workers)].tolist()
        found = [tuple(part) if part[2] else (0, 0, 0) for part in told]
        assert found == plan_of_alike(tiles, requests * row_tiles, blocks)


@pytest.mark.parametrize(
    ("row_tiles", "parts", "tiles"),
    [(9, 14, 150), (4, 33, 150), (50, 2, 9)],  # of nine tiles no more than two parts
)
def test_neighbours_have_the_same_keys_of_two_row_tiles(row_tiles, parts, tiles):
    blocks, room = 132, np.int32(64 * tiles)
    ints = np.full((blocks, module.WORKER + 1), -1, np.int32)
    given = np.int32([room - 3]), room, np.int32(3), np.int32(row_tiles), np.int32(0)
    emulate(plans_kernel, 1, 32, *given, ints)
    assert (ints[:, module.WORKERS] == row_tiles * parts).all()
    told = ints[:, [module.PART_AT + 1, module.PART_AT + 2, module.PART_LENGTH]]
    pairs = told[: row_tiles // 2 * 2 * parts].reshape(-1, 2, 3)
    assert (pairs[:, 0] + (1, 0, 0) == pairs[:, 1]).all()


# ---------------------------------------------------------------------------- bad input


@pytest.mark.parametrize("executor", ["numpy", "emulator"])
def test_what_this_version_does_not_compute_is_refused_by_name(executor):
    q, cache, *tree = bf16_case(14, 1, 1, [3])
    floats = bf16.to_float32(q), bf16.to_float32(cache), *tree
    message = r"version 'wgmma' and q has dtype float32; expected uint16 \(bf16 bits\)"
    with pytest.raises(TypeError, match=message):
        attend(executor, floats)
    narrow = q[..., :520].copy(), cache[..., :520].copy(), *tree
    message = "version 'wgmma' and D is 520, d_latent is 512; expected 576 and 512"
    with pytest.raises(ValueError, match=message):
        attend(executor, narrow)
    message = "version 'wgmma' and sm_scale is -1; expected one above 0"
    with pytest.raises(ValueError, match=message):
        attend(executor, (q, cache, *tree), sm_scale=-1)


def test_rows_that_tma_cannot_load_are_refused():
    q, cache, *tree = bf16_case(14, 1, 1, [3])
    wide = np.zeros((*cache.shape[:2], 577), np.uint16)
    doubled = np.repeat(cache, 2, axis=2)
    for view in (wide[..., 1:], doubled[..., ::2], cache[:, ::-1]):
        message = "version 'wgmma' and kv_cache has strides .*; expected contiguous"
        with pytest.raises(ValueError, match=message):
            attend("emulator", (q, view, *tree))


# ---------------------------------------------------------------------------------- PTX


def test_other_kernels_are_not_compiled_for_its_target():
    before = backend.config.FORCE_CUDA_CC
    with pytest.raises(KeyError), module.hopper_target():
        assert backend.config.FORCE_CUDA_CC == (9, 0, "a")
        raise KeyError
    assert backend.config.FORCE_CUDA_CC == before


def _ptx():
    maps, f2 = uint64[::1], float32[:, ::1]
    tree = int32[::1], uint32[:, :, ::1]
    signature = (maps, maps, int32, int32, *tree, float32, int32, float32)
    f1 = float32[::1]
    signature += (f1, f2, uint32[::1], f1, int32[::1])
    with module.hopper_target():
        return backend.compile_ptx(module.wgmma_kernel, signature)


@pytest.mark.ptx
def test_the_kernel_is_made_of_the_instructions_meant(tmp_path):
    ptx = _ptx()
    assert ".target sm_90a" in ptx and ".maxntid 384" in ptx
    # No stack: 128 sums, and the scores, are in registers.
    assert ".f64" not in ptx and ".local" not in ptx
    assert set(re.findall(r"extern \.shared \.align (\d+)", ptx)) == {"1024"}
    count = {
        name: len(re.findall(rf"{name}\.sync\.aligned\.\S+ {{", ptx))
        for name in ("wgmma.mma_async", "stmatrix")
    }
    # Scores: an even and an odd tile of 36 products, and of the first even one the 16
    # on the left, ahead of the loop. Values: of either group 4 own and 4 of the
    # other's; and a last even tile that has no odd one beside it.
    assert count["wgmma.mma_async"] == 2 * 36 + 16 + 2 * (4 + 4) + 4
    assert ptx.count("setmaxnreg") == 2
    # Merges are one loop: a copy of marks and one of sums, a look at a counter.
    assert len(re.findall(r"cp\.async\.bulk\.shared", ptx)) == 2
    assert ptx.count("ld.acquire.gpu") == ptx.count("fence.acq_rel.gpu") == 1
    ptxas = shutil.which("ptxas")
    if ptxas is None:
        return
    # An older assembler than the compiler's own takes all that is in here.
    source = tmp_path / "kernel.ptx"
    source.write_text(re.sub(r"(?m)^\.version .*", ".version 8.3", ptx))
    command = [ptxas, "-arch=sm_90a", "-v", str(source), "-o", str(tmp_path / "cubin")]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    assert "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads" in said
    assert "serialized" not in said  # products that would wait for one another
