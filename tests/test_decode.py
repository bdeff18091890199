"""The loop writes what the target would have written alone, and tells how."""

import numpy as np
import pytest
from fake_model import VOCAB, FakeModel, random_model, scripted_model
from numpy.testing import assert_array_equal

from ddtree_numba import backend, reference
from ddtree_numba.decode import MODES, generate
from ddtree_numba.model import load_model
from ddtree_numba.model.text import held_out_prompts

PROMPT = [3, 1, 4, 1, 5]
STAGES = ["draft", "topk", "tree_build", "verify", "choose", "accept", "compact"]


def by_hand(model, prompt, n):
    """Greedy decoding without any of the loop's parts."""
    text = list(prompt)
    for _ in range(n):
        text.append(int(np.argmax(model.target(text))))
    return text[len(prompt) :]


# ---------------------------------------------------------------------- lossless


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("n_draft_nodes", [1, 7, 64])
def test_tree_chain_and_plain_write_the_targets_own_text(seed, n_draft_nodes):
    model = random_model(seed)
    expected = by_hand(model, PROMPT, 40)
    for mode in MODES:
        run = generate(model, PROMPT, 40, n_draft_nodes, mode=mode, executor="numpy")
        assert run.tokens == [expected], mode


@pytest.mark.parametrize("seed", range(5))
def test_sampled_text_does_not_depend_on_the_drafts(seed):
    model = random_model(seed)

    def sampled(n_draft_nodes=9, **how):
        how = {"temperature": 0.8, "seed": seed, "executor": "numpy"} | how
        return generate(model, PROMPT, 40, n_draft_nodes, **how).tokens

    plain = sampled(mode="plain")
    assert sampled() == sampled(64) == sampled(mode="chain") == plain
    assert sampled(seed=seed + 100) != plain
    assert sampled(temperature=0) != plain


def test_every_executor_writes_the_same_text(executor):
    model = random_model(1, block=4)
    run = generate(model, PROMPT, 8, 6, executor=executor)
    assert run.executor == executor
    assert run.tokens == [by_hand(model, PROMPT, 8)]


@pytest.mark.parametrize("n_rows", [31, 32, 33, 63, 64, 65, 127, 128, 129, 1025])
def test_the_text_does_not_depend_on_the_words_that_rows_fill(n_rows):
    model = random_model(2)
    run = generate(model, PROMPT, 10, n_rows - 1, executor="numpy")
    assert run.rounds[0].tree.n_rows[0] == n_rows
    assert run.tokens == [by_hand(model, PROMPT, 10)]


def test_a_small_tree_after_a_big_one_does_not_see_its_rows():
    wide = random_model(3)

    def drafter(tokens):
        # In every other place only one candidate a position is left.
        logits = wide.drafter(tokens)
        if len(tokens) % 2:
            logits[logits < logits.max(axis=1, keepdims=True)] = -np.inf
        return logits

    model = FakeModel(wide.target, drafter)
    run = generate(model, PROMPT, 40, 50, executor="numpy")
    sizes = {int(trace.tree.n_rows[0]) for trace in run.rounds}
    assert sizes == {8, 51}
    assert run.tokens == [by_hand(model, PROMPT, 40)]


# ---------------------------------------------------------------- the small model

GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(scope="module")
def small_model():
    return load_model()


@pytest.mark.parametrize("where", ["numpy", GPU])
def test_the_small_model_is_lossless_on_20_held_out_prompts(small_model, where):
    prompts = held_out_prompts(20, (96, 128, 160))
    tree, chain, plain = (
        generate(small_model, prompts, 48, mode=mode, executor=where) for mode in MODES
    )
    assert tree.tokens == chain.tokens == plain.tokens
    assert tree.n_rounds < chain.n_rounds < plain.n_rounds == 20 * 48


@pytest.mark.parametrize("where", ["numpy", GPU])
def test_the_small_model_is_lossless_when_sampled(small_model, where):
    prompts = held_out_prompts(4, (64, 100))
    how = {"temperature": 0.9, "seed": 5, "executor": where}
    tree, chain, plain = (
        generate(small_model, prompts, 40, mode=mode, **how) for mode in MODES
    )
    assert tree.tokens == chain.tokens == plain.tokens


def test_the_small_model_writes_the_argmax_of_its_unabsorbed_form(small_model):
    (prompt,) = held_out_prompts(1, (100,))
    run = generate(small_model, prompt, 40, executor="numpy")
    logits, _ = small_model.unabsorbed(run.prompts[0] + run.tokens[0])
    assert run.tokens[0] == logits[-41:-1].argmax(axis=1).tolist()


def test_the_small_models_requests_are_decoded_as_if_alone(small_model):
    prompts = held_out_prompts(3, (40, 90, 70), seed=1)
    batch = generate(small_model, prompts, 30, stop_tokens=[10], executor="numpy")
    for b, prompt in enumerate(prompts):
        alone = generate(small_model, prompt, 30, stop_tokens=[10], executor="numpy")
        assert batch.tokens[b] == alone.tokens[0]
    assert len(set(map(len, batch.tokens))) > 1, "some stop at a newline, some go on"


# ------------------------------------------------------------------------ the end


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("max_new_tokens", [0, 1, 2, 7, 8, 9, 30])
def test_exactly_max_new_tokens_are_generated(mode, max_new_tokens):
    run = generate(random_model(), PROMPT, max_new_tokens, mode=mode, executor="numpy")
    assert run.n_tokens == len(run.tokens[0]) == max_new_tokens


def test_one_token_left_and_eight_deep_emits_one():
    script = [k % VOCAB for k in range(40)]
    model = scripted_model(script, lambda _: 8, block=9)
    run = generate(model, script[:5], 10, 8, executor="numpy")
    assert run.rounds[1].tree.depths.max() == 8
    assert [len(trace.committed[0]) for trace in run.rounds] == [9, 1]
    assert run.tokens == [script[5:15]]


EOS = 7


@pytest.mark.parametrize(
    ("path", "emitted"),
    [
        ([EOS, 2, 3], [EOS]),
        ([2, EOS, 3], [2, EOS]),
        ([2, 3, EOS], [2, 3, EOS]),
        ([2, 3, 4], [2, 3, 4]),
    ],
    ids=["first-draft", "second-draft", "bonus", "none"],
)
@pytest.mark.parametrize("mode", MODES)
def test_a_stop_token_is_kept_and_nothing_after_it(path, emitted, mode):
    model = scripted_model([1, 1, *path, 5, 5, 5], lambda _: 2)
    run = generate(model, [1, 1], 3, mode=mode, stop_tokens=[EOS, 11], executor="numpy")
    assert run.tokens == [emitted]
    if mode != "plain":
        assert [trace.committed[0] for trace in run.rounds] == [emitted]


# ------------------------------------------------------------------------- counts


def test_two_accepted_drafts_and_the_bonus_are_three_tokens():
    script = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    model = scripted_model(script, lambda _: 2)
    run = generate(model, script[:2], 6, mode="chain", executor="numpy")
    first, second = run.rounds
    assert first.accepted.accept_len[0] == 3
    assert first.committed == [[3, 4, 5]]
    assert first.path(0) == [0, 1, 2]
    assert (first.prefix_lens[0], second.prefix_lens[0]) == (1, 4)
    assert second.tree.token_ids[0, 0] == first.accepted.bonus[0] == 5


def test_tokens_are_accepted_drafts_and_a_bonus_a_round():
    model = random_model(4)
    run = generate(model, PROMPT, 60, 12, stop_tokens=(), executor="numpy")
    accepted = np.array([trace.accepted.accept_len[0] for trace in run.rounds])
    cut = accepted.sum() - 60  # what the last round had no room for
    histogram = np.bincount(accepted - 1, minlength=8)
    assert histogram.sum() == run.n_rounds == len(run.rounds)
    assert sum((d + 1) * h for d, h in enumerate(histogram)) - cut == run.n_tokens
    assert run.tokens_per_round == 60 / len(run.rounds)


def test_every_accept_length_occurs():
    script = [k * 5 % VOCAB for k in range(200)]
    model = scripted_model(script, lambda at: at % 8, block=8)
    run = generate(model, script[:2], 150, mode="chain", executor="numpy")
    lengths = {int(trace.accepted.accept_len[0]) for trace in run.rounds}
    starts = {int(trace.prefix_lens[0]) for trace in run.rounds}
    assert lengths == {min(at % 8, 7) + 1 for at in starts}
    assert run.tokens == [script[2:152]]


def test_plain_decoding_commits_one_token_a_round():
    run = generate(random_model(), PROMPT, 12, mode="plain", executor="numpy")
    assert (run.n_draft_nodes, run.n_rounds, run.tokens_per_round) == (0, 12, 1.0)


def test_the_chain_is_the_most_probable_token_at_every_position():
    model = random_model(5)
    run = generate(model, PROMPT, 20, mode="chain", executor="numpy")
    for trace in run.rounds:
        text = (PROMPT + run.tokens[0])[: int(trace.prefix_lens[0]) + 1]
        assert_array_equal(trace.tree.parents[0], np.arange(-1, 7))
        best = model.drafter(text).argmax(axis=1)
        assert_array_equal(trace.tree.token_ids[0, 1:], best)


def test_a_tree_that_holds_the_chain_accepts_at_least_as_much():
    held = 0
    for seed in range(30):
        model = random_model(seed, skill=4.0)
        tree, chain = (
            generate(model, PROMPT, 8, 40, mode=mode, executor="numpy").rounds[0]
            for mode in ("tree", "chain")
        )
        path = chain.tree.token_ids[0].tolist()
        if path in [tree.tree.token_ids[0, p].tolist() for p in tree.tree.paths(0)]:
            held += 1
            assert tree.accepted.accept_len[0] >= chain.accepted.accept_len[0]
    assert held >= 10


def test_the_drafters_temperature_divides_its_logits():
    model = random_model(6, draft_temperature=0.5)
    trace = generate(model, PROMPT, 1, 3, executor="numpy").rounds[0]
    logits = model.drafter(PROMPT)[None].astype(np.float32) / 0.5
    expected = reference.tree_build(*reference.topk(logits, 3), 3)
    assert_array_equal(trace.tree.log_probs, expected.log_probs)


def test_a_round_tells_the_seconds_of_its_stages():
    run = generate(random_model(), PROMPT, 12, executor="numpy")
    assert list(run.rounds[0].seconds) == list(run.stage_seconds) == STAGES
    assert 0 < sum(run.stage_seconds.values()) + run.prefill_seconds <= run.seconds


def test_generated_tokens_are_bytes_of_text():
    run = generate(random_model(), PROMPT, 3, executor="numpy")
    run.tokens = [list("né".encode())]
    assert run.text(0) == "né"


# ------------------------------------------------------------------------ batches

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 9], [5, 4, 3, 2], [8, 1, 8]]


@pytest.mark.parametrize("mode", MODES)
def test_requests_of_a_batch_are_decoded_as_if_alone(mode):
    model = random_model(7)
    how = {"mode": mode, "stop_tokens": [0], "executor": "numpy"}
    batch = generate(model, PROMPTS, 30, 20, **how)
    lengths = []
    for b, prompt in enumerate(PROMPTS):
        alone = generate(model, prompt, 30, 20, **how)
        assert batch.tokens[b] == alone.tokens[0]
        mine = [trace for trace in batch.rounds if trace.active[b]]
        assert [t.path(b) for t in mine] == [t.path(0) for t in alone.rounds]
        lengths.append(len(alone.rounds))
    assert len(set(lengths)) > 1, "the requests finish at different rounds"
    assert batch.n_rounds == sum(lengths)


def test_a_finished_request_rides_along_and_commits_nothing():
    script = [1, 1, EOS, *[2] * 40]
    model = scripted_model(script, lambda at: 0 if at < 3 else 3)
    prompts = [script[:2], script[:5]]
    run = generate(model, prompts, 12, 9, stop_tokens=[EOS], executor="numpy")
    assert run.tokens == [[EOS], [2] * 12]
    for trace in run.rounds[1:]:
        assert_array_equal(trace.active, [False, True])
        assert (trace.tree.n_rows[0], trace.committed[0]) == (1, [])
        assert trace.prefix_lens[0] == run.rounds[1].prefix_lens[0]
        assert trace.path(0) == []


# ---------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"n_draft_nodes": -2}, "n_draft_nodes is -2"),
        ({"temperature": -0.5}, "temperature is -0.5"),
        ({"n_draft_nodes": 1025}, "n_draft_nodes is 1025; expected 0 … 1024"),
        ({"temperature": float("nan")}, "temperature is nan"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"seed": 2**128}, "seed is .*; expected 0 … 3402"),
        ({"seed": -1}, "seed is -1"),
        ({"mode": "beam"}, "mode is 'beam'; expected one of tree, chain, plain"),
        ({"executor": "tpu"}, "executor='tpu' is not one of gpu, emulator, numpy"),
        ({"prompts": ""}, "prompt 0 is empty"),
        ({"prompts": []}, "prompt 0 is empty"),
        ({"prompts": [[1, 2], []]}, "prompt 1 is empty"),
        ({"prompts": [5]}, "prompt 0 is empty; expected .* or two tokens"),
        ({"prompts": [1, VOCAB]}, "prompt 0 holds tokens 1 … 12; expected 0 … 11"),
        ({"prompts": [[1, 2], [-1, 2]]}, "prompt 1 holds tokens -1 … 2"),
        ({"prompts": [1, 2**40]}, "prompt 0 holds tokens"),
        ({"prompts": "\ud800"}, "prompt 0 is no text: .*surrogates not allowed"),
        ({"prompts": [1] * 391}, "391 tokens and 10 are to come.* limit is 400"),
    ],
    ids=str,
)
def test_bad_input_is_named(change, message):
    arguments = {"prompts": PROMPT, "max_new_tokens": 10} | change
    with pytest.raises(ValueError, match=message):
        generate(random_model(), **arguments)


@pytest.mark.parametrize(
    ("prompts", "which"),
    [
        ([1.5, 2.5], "prompt 0 is a float of float64"),
        ([[1, 2], [1.5, 2.0]], "prompt 1 is a list of float64"),
        ([[[1], [2]]], r"prompt 0 is a list of int64, shape \(2, 1\)"),
        ([[1, 2], 3], "prompt 1 is a int of int64"),
        ([[1, 2], None], "prompt 1 is a NoneType of object"),
        ([3, [1, 2]], "prompt 0 holds lists beside numbers"),
    ],
    ids=str,
)
def test_a_prompt_that_is_no_list_of_tokens_is_a_type_error(prompts, which):
    expected = f"{which}.*; expected text, bytes or a list of token ids"
    with pytest.raises(TypeError, match=expected):
        generate(random_model(), prompts, 3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"max_new_tokens": 2.0}, "max_new_tokens is 2.0 .*; expected an int"),
        ({"n_draft_nodes": "3"}, "n_draft_nodes is '3' .*; expected an int"),
        ({"n_draft_nodes": True}, "n_draft_nodes is True .*; expected an int"),
        ({"seed": 1.5}, "seed is 1.5 .*; expected an int"),
        ({"temperature": "1"}, "temperature is '1'; expected a number"),
        ({"temperature": None}, "temperature is None; expected a number"),
        ({"stop_tokens": 10}, "stop_tokens is 10; expected a sequence of token ids"),
        ({"stop_tokens": "a"}, "stop_tokens is 'a'; expected a sequence of token ids"),
        ({"stop_tokens": [2.5]}, r"stop_tokens is \[2.5\]; expected a sequence"),
        ({"stop_tokens": np.array(1)}, r"stop_tokens is array\(1\); expected a seq"),
        ({"model": "small"}, "model is a str; expected one as from load_model"),
        ({"prompts": None}, "prompts is a NoneType; expected text"),
        ({"prompts": {"a": 1}}, "prompts is a dict; expected text"),
        ({"prompts": np.array(3)}, "prompts is a ndarray; expected text"),
    ],
    ids=str,
)
def test_input_of_another_type_is_named(change, message):
    arguments = {"model": random_model(), "prompts": PROMPT, "max_new_tokens": 10}
    with pytest.raises(TypeError, match=message):
        generate(**(arguments | change))


def test_a_gpu_that_is_not_there_is_an_error(monkeypatch):
    monkeypatch.setattr(backend, "gpu_problem", lambda: "there is none")
    with pytest.raises(RuntimeError, match="executor='gpu' was asked .* there is none"):
        generate(random_model(), PROMPT, 3, executor="gpu")


def test_stop_tokens_may_be_an_iterator():
    how = {"executor": "numpy", "mode": "plain"}
    text = generate(random_model(), PROMPT, 20, **how).tokens[0]
    run = generate(random_model(), PROMPT, 20, stop_tokens=iter([text[9]]), **how)
    assert run.tokens == [text[: text.index(text[9]) + 1]]


@pytest.mark.parametrize("temperature", [5e-324, 1e-9])
def test_the_lowest_temperatures_are_greedy(temperature):
    how = {"temperature": temperature, "executor": "numpy"}
    run = generate(random_model(), PROMPT, 20, **how)
    assert run.tokens == [by_hand(random_model(), PROMPT, 20)]


def test_a_prompt_that_just_fits_is_decoded():
    run = generate(random_model(), [1] * 390, 10, mode="plain", executor="numpy")
    assert run.n_tokens == 10


def test_logits_that_are_no_distribution_are_an_error():
    good = random_model()
    bad = FakeModel(good.target, lambda tokens: good.drafter(tokens) * np.nan)
    with pytest.raises(ValueError, match="logits, request 0, row 0 holds NaN"):
        generate(bad, PROMPT, 3, executor="numpy")
    bad = FakeModel(lambda tokens: good.target(tokens) + np.inf, good.drafter)
    with pytest.raises(ValueError, match="logits, request 0, row 0 holds .inf"):
        generate(bad, PROMPT, 3, executor="numpy")


def test_progress_goes_to_standard_error(capsys):
    generate(random_model(), PROMPT, 5, executor="numpy", progress=True)
    out, err = capsys.readouterr()
    assert (out, "5/5" in err) == ("", True)
