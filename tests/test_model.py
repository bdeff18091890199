"""The small model: two forms of one network, caches that agree, weights that load."""

import dataclasses

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from random_trees import random_parents

from ddtree_numba import kdtr
from ddtree_numba._data import data_path
from ddtree_numba.kdtr import KdtrError
from ddtree_numba.kernels.verify_attn import verify_attn
from ddtree_numba.model import BOS, Model, ModelConfig, forward, load_model, text
from ddtree_numba.model.weights import load_weights, save_weights
from ddtree_numba.tree import DraftTree

SMALL = ModelConfig(
    n_layers=4,
    d_model=32,
    n_heads=2,
    d_ffn=48,
    d_latent=24,
    d_rope=8,
    d_nope=8,
    d_value=12,
    draft_layers=2,
    draft_heads=4,
    block=6,
)

# Queries, cache rows and logits are float32, the rest float64: rounding alone, 6e-8 of
# the logits' size (up to 25), a few times over.
CLOSE = {"rtol": 1e-5, "atol": 2e-5}


@pytest.fixture(scope="module")
def model():
    return Model.random(1, SMALL)


@pytest.fixture(scope="module")
def trained():
    return load_model()


def random_text(seed, length):
    tokens = np.random.default_rng(seed).integers(0, 256, length)
    return [BOS, *tokens[1:].tolist()]


def random_batch(lengths, n_rows, *, seed=0):
    """Prompts of these lengths, and a random tree of so many rows after each."""
    rng = np.random.default_rng(seed)
    prompts = [random_text([seed, b], length) for b, length in enumerate(lengths)]
    n = max(n_rows)
    parents = [random_parents(rng, n, 0.3) for _ in lengths]
    tokens = rng.integers(0, 256, (len(lengths), n))
    return prompts, DraftTree.from_parents(parents, tokens, n_rows=n_rows)


def verify(model, cache, tree):
    """The model's logits, without a GPU's float32 sums where there is one."""
    return model.verify(cache, tree, executor="numpy")


def settled(cache, b):
    """Everything that a request's settled tokens left in the cache."""
    length = cache.prefix_lens[b]
    return (
        cache.kv[:, b, :length],
        cache.context[b, :length],
        cache.keys[:, b, :length],
        cache.values[:, b, :length],
    )


def assert_same_prefix(cache, b, other, other_b):
    assert cache.prefix_lens[b] == other.prefix_lens[other_b]
    for found, expected in zip(settled(cache, b), settled(other, other_b), strict=True):
        assert_allclose(found, expected, **CLOSE)


# ------------------------------------------------------------- one network, two forms


def test_every_row_of_a_tree_scores_as_the_text_of_its_path_unabsorbed(model):
    prompts, tree = random_batch([23, 9], [40, 33])
    cache = model.prefill(prompts, 64)
    logits = verify(model, cache, tree)
    for b, prompt in enumerate(prompts):
        for row, path in enumerate(tree.paths(b)):
            text_of_path = prompt + tree.token_ids[b, path].tolist()
            expected, features = model.unabsorbed(text_of_path)
            assert_allclose(logits[b, row], expected[-1], **CLOSE)
            assert_allclose(cache.features[b, row], features[-1], **CLOSE)


def test_padding_rows_have_no_logits_and_leave_the_cache_alone(model):
    prompts, tree = random_batch([9, 9], [2, 5])
    cache = model.prefill(prompts, 14)
    cache.kv[:, 0, 11:] = np.nan
    logits = verify(model, cache, tree)
    assert np.isnan(logits[0, 2:]).all() and not np.isnan(logits[0, :2]).any()
    assert np.isnan(cache.kv[:, 0, 11:]).all()


def test_any_executor_serves_attention(model, executor, monkeypatch):
    asked = []

    def watched(*args, executor, **sizes):
        asked.append(executor)
        return verify_attn(*args, executor=executor, **sizes)

    prompts, tree = random_batch([5, 3], [4, 2])
    expected = model.verify(model.prefill(prompts, 9), tree, executor="numpy")
    monkeypatch.setattr(forward, "verify_attn", watched)
    found = model.verify(model.prefill(prompts, 9), tree, executor=executor)
    assert asked == ([] if executor == "numpy" else [executor] * SMALL.n_layers)
    # A kernel adds in float32: a few times CLOSE.
    assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["heapq", "json.decoder", "textwrap"])
def test_logits_are_those_of_the_framework_that_trained_the_weights(trained, name):
    golden = kdtr.load(data_path("model", "golden.kdtr"))
    tokens, anchors = golden[f"{name}.tokens"], golden[f"{name}.anchors"]
    logits, _ = trained.unabsorbed(tokens)
    assert_allclose(logits, golden[f"{name}.logits"], **CLOSE)
    cache = trained.prefill([tokens[:anchor].tolist() for anchor in anchors])
    drafts = trained.draft(cache, tokens[anchors])
    assert_allclose(drafts, golden[f"{name}.draft_logits"], **CLOSE)


def test_the_trained_target_is_the_same_absorbed(trained):
    tokens = text.encode(text.held_out_text()["textwrap"][2000:2150]).tolist()
    expected, _ = trained.unabsorbed(tokens)
    chain = DraftTree.from_parents(np.arange(-1, 39), tokens[-40:])
    cache = trained.prefill([tokens[:-40]], len(tokens))
    assert_allclose(verify(trained, cache, chain)[0], expected[-40:], **CLOSE)


# --------------------------------------------------------------------------- caches


def test_a_prompt_in_chunks_is_the_prompt_at_once(model, monkeypatch):
    prompts = [random_text(b, length) for b, length in enumerate([40, 1, 21])]
    whole = model.prefill(prompts)
    monkeypatch.setattr(forward, "PREFILL_ROWS", 7)
    parts = model.prefill(prompts)
    for b in range(3):
        assert_same_prefix(parts, b, whole, b)


def test_a_ragged_batch_computes_what_each_request_does_alone(model):
    prompts, tree = random_batch([30, 4, 17], [9, 1, 20])
    cache = model.prefill(prompts, 50)
    roots = tree.token_ids[:, 0]
    drafts, logits = model.draft(cache, roots), verify(model, cache, tree)
    for b, prompt in enumerate(prompts):
        live = tree.n_rows[b]
        lone = DraftTree.from_parents(tree.parents[b, :live], tree.token_ids[b, :live])
        alone = model.prefill([prompt], 50)
        assert_allclose(model.draft(alone, roots[b : b + 1])[0], drafts[b], **CLOSE)
        assert_allclose(verify(model, alone, lone)[0], logits[b, :live], **CLOSE)


def test_committed_rows_leave_what_their_text_would_have_left(model):
    prompts, tree = random_batch([12, 20, 7], [25, 25, 25], seed=3)
    cache = model.prefill(prompts, 50)
    verify(model, cache, tree)
    deepest = [tree.paths(b)[tree.depths[b].argmax()] for b in range(3)]
    deepest[1] = []  # this request takes no part
    assert max(deepest[0]) > len(deepest[0])  # rows really move
    rows = np.full((3, 25), -1, np.int32)
    for b, path in enumerate(deepest):
        rows[b, : len(path)] = path
    model.commit(cache, rows, np.array([len(path) for path in deepest], np.int32))
    for b, path in enumerate(deepest):
        grown = prompts[b] + tree.token_ids[b, path].tolist()
        assert_same_prefix(cache, b, model.prefill([grown]), 0)


def test_a_cache_cut_back_drafts_as_the_shorter_prompt(model):
    prompt = random_text(5, 30)
    cut = model.prefill([prompt])
    cut.prefix_lens[:] = 11
    shorter = model.prefill([prompt[:11]])
    assert_allclose(model.draft(cut, [65]), model.draft(shorter, [65]), **CLOSE)


def test_a_draft_depends_on_its_root_and_its_context(model):
    prompt = random_text(6, 20)
    cache = model.prefill([prompt])
    drafts = model.draft(cache, [65])
    assert drafts.shape == (1, SMALL.block - 1, 256)
    assert abs(model.draft(cache, [66]) - drafts).max() > 0.1
    other = model.prefill([[*prompt[:3], (prompt[3] + 1) % 256, *prompt[4:]]])
    assert abs(model.draft(other, [65]) - drafts).max() > 0.1


# ------------------------------------------------------------------------ bad input


def test_a_tree_longer_than_the_cache_is_refused(model):
    prompts, tree = random_batch([8, 12], [5, 5])
    cache = model.prefill(prompts, 16)
    with pytest.raises(ValueError, match="request 1 has 5 rows after a prefix of 12"):
        verify(model, cache, tree)


def test_prompts_longer_than_the_cache_are_refused(model):
    with pytest.raises(ValueError, match="capacity is 7; the longest prompt has 8"):
        model.prefill([random_text(0, 8)], 7)


def test_a_draft_without_context_is_refused(model):
    cache = model.prefill([[BOS], []], 4)
    with pytest.raises(ValueError, match=r"prefix_lens is \[1, 0\]"):
        model.draft(cache, [65, 65])


# --------------------------------------------------------------------------- weights


@pytest.fixture
def weight_folder(tmp_path, model):
    save_weights(tmp_path / "target.kdtr", SMALL, model.target)
    save_weights(tmp_path / "drafter.kdtr", SMALL, model.drafter)
    return tmp_path


def test_weights_come_back_as_they_were_stored(weight_folder, model):
    loaded = load_model(weight_folder)
    assert loaded.config == SMALL
    for name, weight in model.target.items():
        assert_array_equal(loaded.target[name], weight.astype(np.float16))
    for name, weight in model.drafter.items():
        assert_array_equal(loaded.drafter[name], weight.astype(np.float16))


@pytest.mark.parametrize("part", ["target", "drafter"])
def test_a_missing_weight_file_is_named(weight_folder, part):
    path = weight_folder / f"{part}.kdtr"
    path.unlink()
    with pytest.raises(KdtrError, match=rf"{part}\.kdtr: no such weight file; restore"):
        load_model(weight_folder)


@pytest.mark.parametrize("part", ["target", "drafter"])
@pytest.mark.parametrize("damage", ["a flipped bit", "a lost end"])
def test_a_damaged_weight_file_is_named(weight_folder, part, damage):
    path = weight_folder / f"{part}.kdtr"
    data = bytearray(path.read_bytes())
    if damage == "a flipped bit":
        data[-100] ^= 1
    else:
        del data[-100:]
    path.write_bytes(data)
    with pytest.raises(KdtrError, match=rf"{part}\.kdtr.*restore data/model/"):
        load_model(weight_folder)


def test_a_file_of_the_other_network_is_refused(weight_folder):
    with pytest.raises(ValueError, match="drafter weight 'w_fuse' must have shape"):
        load_weights(weight_folder / "target.kdtr", "drafter")


def test_the_drafters_file_says_its_temperature(weight_folder, model):
    calibrated = dataclasses.replace(SMALL, draft_temperature=0.8)
    save_weights(weight_folder / "drafter.kdtr", calibrated, model.drafter)
    assert load_model(weight_folder).config == calibrated


def test_weights_of_two_models_are_refused(weight_folder):
    wider = dataclasses.replace(SMALL, n_heads=4)
    save_weights(weight_folder / "drafter.kdtr", wider, Model.random(0, wider).drafter)
    with pytest.raises(ValueError, match="are of two models"):
        load_model(weight_folder)


def test_a_file_without_a_configuration_is_refused(tmp_path):
    kdtr.save(tmp_path / "target.kdtr", {"embed": np.zeros(3)})
    with pytest.raises(ValueError, match="no tensor 'config'"):
        load_model(tmp_path)


def with_tensors(path, **changed):
    tensors = {name: np.array(x) for name, x in kdtr.load(path).items()}
    kdtr.save(path, tensors | changed)


@pytest.mark.parametrize("settings", [b"", b"{", b"\xff", b"[1]", b'{"n_heads": 0}'])
def test_a_damaged_configuration_is_named_with_its_file(weight_folder, settings):
    path = weight_folder / "target.kdtr"
    with_tensors(path, config=np.frombuffer(settings, np.uint8))
    with pytest.raises(ValueError, match=r"target\.kdtr: tensor 'config': .*; restore"):
        load_model(weight_folder)


@pytest.mark.parametrize("x", [np.nan, np.inf, 1, True], ids=str)
def test_weights_that_are_no_finite_floats_are_named(weight_folder, model, x):
    path = weight_folder / "drafter.kdtr"
    with_tensors(path, mask=np.full(model.drafter["mask"].shape, x))
    with pytest.raises(ValueError, match=r"drafter\.kdtr: drafter weight 'mask'"):
        load_model(weight_folder)


def test_a_configuration_survives_json():
    assert ModelConfig.from_json(SMALL.to_json()) == SMALL


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ('{"max_len": -5}', "max_len is -5; expected a value like 1024"),
        ('{"block": 2.5}', "block is 2.5; expected a value like 16"),
        ('{"n_heads": true}', "n_heads is True; expected a value like 8"),
        ('{"draft_temperature": 0}', "draft_temperature is 0; expected"),
        ('{"rope_base": NaN}', "rope_base is nan; expected a value like 10000"),
        ('{"feature_layers": 3}', "feature_layers is 3; expected a value like"),
        ('{"feature_layers": [1, 5]}', "expected layers 1 … 4"),
        ('{"draft_heads": 7}', "draft_heads is 7; expected a divisor of d_model, 256"),
    ],
)
def test_a_configuration_that_no_model_has_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ModelConfig.from_json(settings)


@pytest.mark.parametrize("settings", ['{"n_layer": 4}', "[1]"])
def test_an_unknown_configuration_is_refused(settings):
    with pytest.raises(ValueError, match="not a model configuration"):
        ModelConfig.from_json(settings)


def test_the_stored_weights_fit_in_16_mib():
    files = [data_path("model", f"{part}.kdtr") for part in ("target", "drafter")]
    assert sum(path.stat().st_size for path in files) <= 16 * 2**20


# ------------------------------------------------------------------------------ text


def test_the_trained_target_knows_held_out_code(trained):
    tokens = text.encode(text.held_out_text()["json.decoder"][2000:2700])
    logits, _ = trained.unabsorbed(tokens[:-1])
    shifted = logits - logits.max(axis=1, keepdims=True)
    log_probs = shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    taken = log_probs[np.arange(len(log_probs)), tokens[1:]]
    # Measured 1.10; uniform guesses give 8, byte frequencies about 4.5.
    assert -taken.mean() / np.log(2) < 1.2


def test_text_becomes_bytes_after_bos_and_comes_back():
    tokens = text.encode("naïve")
    assert tokens.tolist() == [BOS, 110, 97, 195, 175, 118, 101]
    assert text.decode(tokens) == "naïve"


def test_prompts_have_their_lengths_and_start_lines_of_held_out_modules():
    prompts = text.held_out_prompts(34, (100, 200))
    assert [len(prompt) for prompt in prompts] == [100, 200] * 17
    assert prompts == text.held_out_prompts(34, (100, 200))
    assert prompts != text.held_out_prompts(34, (100, 200), seed=1)
    modules = list(text.held_out_text().values())
    for i, prompt in enumerate(prompts):
        module = modules[i % len(modules)]
        assert b"\n" + prompt in b"\n" + module


def test_training_text_leaves_out_tests_tables_and_held_out_modules(tmp_path):
    kept = ["ast.py", "json/scanner.py"]
    dropped = ["heapq.py", "json/decoder.py", "test/test_ast.py", "encodings/cp437.py"]
    dropped += ["_sysconfigdata_x.py", "config-3.11/python-config.py"]
    for name in kept + dropped:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("pass\n")
    assert sorted(text.training_text(tmp_path)) == ["ast", "json.scanner"]
    with pytest.raises(ValueError, match="no Python modules"):
        text.training_text(tmp_path / "nowhere")
