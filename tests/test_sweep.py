"""The sweep's replay runs the rounds that the loop runs."""

import numpy as np
import pandas as pd
import pytest
from fake_model import VOCAB, random_model, scripted_model

from ddtree_numba._data import data_path
from ddtree_numba.decode import generate
from ddtree_numba.sweep import sweep

PROMPTS = [[1, 2, 3, 4, 5, 6, 7], [9, 9], [5, 4, 3, 2]]


def full_rounds(run):
    """Accept lengths and Σp of a run's rounds, the last ones uncut."""
    lengths, expected = [], []
    for trace in run.rounds:
        lengths += trace.accepted.accept_len[trace.active].tolist()
        probs = np.exp(trace.tree.log_probs[trace.active, 1:])
        expected += probs.sum(axis=1).tolist()
    return lengths, np.mean(expected)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_replayed_rounds_are_the_loops_rounds(temperature):
    model = random_model(11)
    frame = sweep(
        model, PROMPTS, 50, [3, 17], temperatures=[temperature], executor="numpy"
    )
    assert frame["mode"].tolist() == ["tree", "tree", "chain"]
    assert frame["n_draft_nodes"].tolist() == [3, 17, 7]
    for row in frame.itertuples():
        how = {"temperature": temperature, "executor": "numpy", "mode": row.mode}
        run = generate(model, PROMPTS, 50, row.n_draft_nodes, **how)
        lengths, expected = full_rounds(run)
        assert (row.rounds, row.tokens) == (run.n_rounds, sum(lengths))
        assert row.tokens_per_round == pytest.approx(np.mean(lengths))
        assert row.accepted == pytest.approx(np.mean(lengths) - 1)
        # Path probabilities are float32; their sum's order differs by the padding.
        assert row.expected_accepted == pytest.approx(expected, rel=1e-6)


def test_a_perfect_drafter_commits_whole_blocks():
    script = [k * 5 % VOCAB for k in range(100)]
    model = scripted_model(script, lambda _: 8, block=8)
    frame = sweep(model, [script[:2], script[:3]], 40, [7], executor="numpy")
    assert frame["tokens_per_round"].tolist() == [8, 8]
    assert frame["rounds"].tolist() == [10, 10]


def test_the_recorded_sweep_shows_what_the_small_model_promises():
    frame = pd.read_csv(data_path("bench", "sweep.csv"), comment="#")
    assert (frame["prompts"] == 30).all()
    greedy, sampled = (
        frame[frame["temperature"] == t].set_index(["mode", "n_draft_nodes"])
        for t in (0.0, 0.7)
    )
    per_round = greedy["tokens_per_round"]
    assert per_round["tree"].is_monotonic_increasing
    chain = per_round["chain", 15]
    assert per_round["tree", 64] >= max(8.5, 1.2 * chain)
    assert per_round["tree", 512] >= 1.35 * chain
    assert sampled["tokens_per_round"]["tree", 64] >= 5.0
    trees = greedy.loc["tree"]
    # Greedy text is what the drafter learned; there its probabilities are right.
    assert trees["expected_accepted"].to_numpy() == pytest.approx(
        trees["accepted"].to_numpy(), rel=0.1
    )
