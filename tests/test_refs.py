"""The golden cases: what is committed is what is written, and every executor agrees."""

import shutil

import numpy as np
import pytest

from ddtree_numba import kdtr, refs, vectorised
from ddtree_numba._data import data_path

COMMITTED = list(data_path("refs").glob("*.kdtr"))
NAMES = sorted(path.stem for path in COMMITTED)

# Stages whose floats pass through exp and log, of which a CPU may round the last bit
# otherwise, or sum in another order (BLAS).
TRANSCENDENTAL = ("topk", "verify_attn", "merge_partials")

# Kernels sum in float32: an output of attention is an average of up to 2081 numbers
# with a standard deviation of 1.15, a log-prob or an lse a sum of as many exponentials.
TOLERANCE = 1e-6

# Tensor cores take weights that are rounded to bfloat16: an output moves by as much of
# the weighted sum of its values' magnitudes, which is below 1 + |output| here.
BF16_TOLERANCE = 2.0**-8

ATTENTION = [name for name in NAMES if name.startswith("verify_attn")]
WITH_A_KERNEL = {n: r for n, r in refs.RECIPES.items() if r.stage in refs.KERNELS}

# Too many steps for the emulator, beside the large ones.
SLOW = ("tree_build-m1024", "verify_attn-big-negative")


def case(name: str) -> refs.Case:
    return refs.load(data_path("refs", f"{name}.kdtr"))


def within_an_ulp(x: np.ndarray, y: np.ndarray) -> bool:
    """Equal, or one float32 step apart (below 1e-6: of 1e-6)."""
    step = np.spacing(np.maximum(np.abs(y), np.float32(1e-6)))
    with np.errstate(invalid="ignore"):  # inf - inf
        near = np.abs(x - y) <= step
    return bool((near | (x == y) | (np.isnan(x) & np.isnan(y))).all())


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> dict:
    """The cases, written again."""
    paths = refs.write_refs(tmp_path_factory.mktemp("refs"))
    return {path.stem: path for path in paths}


# ------------------------------------------------------------- committed and written


def test_every_case_is_committed_and_no_other(written):
    assert NAMES == sorted(written)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_committed_is_what_is_written(written, name):
    path = data_path("refs", f"{name}.kdtr")
    if path.read_bytes() == written[name].read_bytes():
        return
    was, now = kdtr.load(path), kdtr.load(written[name])
    assert list(was) == list(now)
    for key in was:
        assert (was[key].dtype, was[key].shape) == (now[key].dtype, now[key].shape)
        if (
            key.startswith("out.")
            and was[key].dtype == np.float32
            and name.startswith(TRANSCENDENTAL)
        ):
            assert within_an_ulp(now[key], was[key]), key
        else:
            np.testing.assert_array_equal(now[key], was[key], err_msg=key)


def test_an_ulp_is_all_that_may_differ():
    x = np.array([1.5, 1e-9, -np.inf, np.nan], np.float32)
    ulp = np.array([2**-23, 0, 0, 0], np.float32)
    assert within_an_ulp(x + ulp, x)
    assert not within_an_ulp(x + 2 * ulp, x)
    assert not within_an_ulp(np.float32([1.5, 1e-9, np.inf, np.nan]), x)
    assert not within_an_ulp(np.float32([1.5, 1e-9, -np.inf, 0]), x)


def test_the_files_are_whole_and_small_together():
    for path in COMMITTED:
        kdtr.verify(path)
    assert sum(path.stat().st_size for path in COMMITTED) <= 8 * 2**20


def test_the_cases_cover_the_stages_heads_prefixes_trees_and_lengths():
    assert len(NAMES) >= 30
    cases = [case(name) for name in NAMES if "v163840" not in name]
    assert {c.stage for c in cases} >= {*refs.KERNELS, "merge_partials", "sample"}
    attention = [c.arguments for c in cases if c.stage == "verify_attn"]
    assert {a["q"].shape[2] for a in attention} >= {8, 16, 64}
    prefixes = {int(s) for a in attention for s in a["prefix_lens"]}
    assert {0, 2048} <= prefixes
    assert {a["q"].dtype.name for a in attention} == {"float32", "uint16"}
    assert sum(a["q"].shape[1] == 33 for a in attention) >= 8
    assert any(len(set(a["prefix_lens"].tolist())) > 1 for a in attention)
    for stage in ("tree_accept", "kv_compact"):
        source = "expected" if stage == "tree_accept" else "arguments"
        lengths = {
            int(n)
            for c in cases
            if c.stage == stage
            for n in getattr(c, source)["accept_len"]
        }
        assert lengths >= set(range(1, 9)), stage


def test_bf16_is_marked_as_such_in_the_files():
    path = data_path("refs", "verify_attn-tiny-ragged-n33-bf16.kdtr")
    assert kdtr.info(path)["in.q"].dtype == "bf16"


def test_numbers_are_the_same_on_every_machine():
    numbers = refs.Numbers(1)
    assert numbers.integers(-5, 5, (2, 3)).tolist() == [[2, 1, 0], [3, 4, -1]]
    assert (numbers.normals((4,)) * 128).tolist() == [196, 59, 15, 187]
    spread = refs.Numbers(2).normals((100, 100))
    assert (abs(spread.mean()) < 0.05, 1.1 < spread.std() < 1.2) == (True, True)


# ------------------------------------------------------------------ executors agree


@pytest.mark.parametrize(
    "name",
    [
        "verify_attn-h8-s17-n33-deep-f32",
        "verify_attn-h8-s1024-n65-wide-bf16",
        "verify_attn-h16-ragged-n33-f32",
        "verify_attn-big-negative",
    ],
)
def test_attention_by_matrix_products_reproduces_the_samples(name):
    golden = case(name)
    out, lse = vectorised.verify_attn(**golden.arguments)
    found = {"out": out, "lse": lse}
    if golden.large:
        found = {k: x[:, golden.rows][:, :, golden.heads] for k, x in found.items()}
    for key, x in found.items():
        assert within_an_ulp(x, golden.expected[key])


@pytest.mark.parametrize(
    "name",
    [n for n, r in WITH_A_KERNEL.items() if not (r.large or n.startswith(SLOW))],
)
def test_the_emulator_reproduces(name):
    golden = case(name)
    found = refs.run(golden, "emulator")
    assert not refs.differences(golden, found, tolerance=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in WITH_A_KERNEL if n not in ATTENTION])
def test_the_gpu_reproduces(name):
    golden = case(name)
    found = refs.run(golden, "gpu")
    assert not refs.differences(golden, found, tolerance=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("version", ["simple", "split"])
@pytest.mark.parametrize("name", ATTENTION)
def test_the_gpu_reproduces_attention(name, version):
    golden = case(name)
    found = refs.run(golden, "gpu", version=version)
    assert not refs.differences(golden, found, tolerance=TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in ATTENTION if n.endswith("bf16")])
def test_the_gpu_comes_near_attention_with_the_version_that_it_takes(name):
    golden = case(name)
    found = refs.run(golden, "gpu")
    assert not refs.differences(golden, found, tolerance=BF16_TOLERANCE)


def test_a_stage_without_a_kernel_runs_as_its_reference_only():
    golden = case("merge_partials-some-empty")
    assert not refs.differences(golden, refs.run(golden, "numpy"), tolerance=1e-7)
    with pytest.raises(ValueError, match="stage merge_partials has no kernel"):
        refs.run(golden, "emulator")


# --------------------------------------------------------------- what must be noticed


def test_differences_are_named_with_their_place():
    golden = case("verify_attn-tiny-chain")
    right = {name: x.copy() for name, x in golden.expected.items()}
    assert refs.differences(golden, right) == []
    wrong = {**right, "out": right["out"].copy()}
    wrong["out"][0, 4, 1, 5] += 1e-3
    (line,) = refs.differences(golden, wrong, tolerance=1e-6)
    assert line.startswith("out[0, 4, 1, 5] is ")
    assert line.endswith("(1 of 90 differ)")
    assert refs.differences(golden, wrong, tolerance=1e-2) == []
    for value in (np.nan, np.inf):
        wrong["out"][0, 4, 1, 5] = value
        assert refs.differences(golden, wrong, tolerance=1e-2)
    wide = {**right, "lse": right["lse"].astype(np.float64)}
    (line,) = refs.differences(golden, wide)
    assert line == "lse is float64 (1, 5, 3); expected float32 (1, 5, 3)"


def test_integers_get_no_tolerance():
    golden = case("tree_accept-worked-example")
    wrong = {name: x.copy() for name, x in golden.expected.items()}
    wrong["rows"][0, 2] += 1
    (line,) = refs.differences(golden, wrong, tolerance=9)
    assert line == "rows[0, 2] is 5; expected 4 (1 of 5 differ)"


def test_an_output_kept_as_its_crc_is_compared():
    golden = case("kv_compact-4-layers-b8-s512-d576-bf16")
    found = refs.run(golden, "numpy")
    assert refs.differences(golden, found) == []
    found["kv_cache"][3, 7, 511, 575] ^= 1
    (line,) = refs.differences(golden, found)
    assert line.startswith("kv_cache has CRC-32 ")


def test_a_case_whose_inputs_cannot_be_made_again_is_an_error(tmp_path):
    name = "verify_attn-h8-s0-n33-wide-f32"
    tensors = dict(kdtr.load(data_path("refs", f"{name}.kdtr")))
    tensors["seed"] = np.array(1, np.int64)
    kdtr.save(tmp_path / f"{name}.kdtr", tensors)
    with pytest.raises(kdtr.KdtrError, match="'q': made again, it has another CRC-32"):
        refs.load(tmp_path / f"{name}.kdtr")


def test_a_damaged_file_is_an_error(tmp_path):
    path = tmp_path / "argmax-f32-v1000.kdtr"
    shutil.copy(data_path("refs", path.name), path)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    with pytest.raises(kdtr.KdtrError, match="CRC-32"):
        list(refs.iter_cases(tmp_path))


def test_iterating_gives_every_case_by_name(tmp_path):
    for name in ("tree_accept-cycle", "argmax-f16-ragged"):
        shutil.copy(data_path("refs", f"{name}.kdtr"), tmp_path)
    cases = list(refs.iter_cases(tmp_path))
    assert [c.name for c in cases] == ["argmax-f16-ragged", "tree_accept-cycle"]
    assert [c.stage for c in cases] == ["argmax", "tree_accept"]
