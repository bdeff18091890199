"""What speculation brings: shares, means and best budgets are those of the numbers."""

import numpy as np
import pytest
from test_viz import SWEEP, png

from ddtree_numba import viz
from ddtree_numba.sweep import recorded

ACCEPTED = {"chain": [0, 0, 3, 3], "tree": [1, 2, 3, 2, 2]}


def test_bars_are_shares_of_rounds_and_modes_differ_in_their_hatch():
    figure, alt_text = viz.accepted_figure(ACCEPTED, n_positions=3)
    bars = figure.axes[0].patches
    chain, tree = bars[:4], bars[4:]
    assert [bar.get_height() for bar in chain] == [0.5, 0, 0, 0.5]
    assert [bar.get_height() for bar in tree] == pytest.approx([0, 0.2, 0.6, 0.2])
    assert {bool(bar.get_hatch()) for bar in chain} == {False}
    assert {bar.get_hatch() for bar in tree} == {"///"}
    centres = [bar.get_x() + bar.get_width() / 2 for bar in tree]
    assert np.allclose(centres, np.arange(4) + 0.2)
    assert "chain: 4 rounds accept 1.50 drafts on average; 50% accept none" in alt_text


def test_means_stand_above_the_bars():
    figure, _ = viz.accepted_figure(ACCEPTED, n_positions=3)
    marks = figure.axes[0].lines
    assert [float(mark.get_xdata()[0]) for mark in marks] == [1.5, 2.0]
    assert len({mark.get_marker() for mark in marks}) == 2
    texts = [text.get_text().strip() for text in figure.axes[0].texts]
    assert texts == ["chain: mean 1.50", "tree: mean 2.00"]


def test_the_speed_up_is_tokens_over_cost_and_the_best_budget_is_starred():
    rows = SWEEP[SWEEP["temperature"] == 0]
    figure, alt_text = viz.speedup_figure(rows, (0.0, 0.1), draft_cost=0.5)
    lines = figure.axes[0].lines
    assert np.allclose(lines[0].get_ydata(), [1.9 / 1.5, 9.3 / 1.5])
    assert np.allclose(lines[2].get_ydata(), [1.9 / 1.6, 9.3 / 7.9])
    assert [line.get_marker() for line in lines[1:4:2]] == ["*", "*"]
    assert [float(line.get_xdata()[0]) for line in lines[1:4:2]] == [64, 1]
    assert "With r = 0 the best budget is 64, 6.2 times plain" in alt_text
    assert lines[0].get_linestyle() != lines[2].get_linestyle()


def test_they_render():
    greedy = recorded()[recorded()["temperature"] == 0]
    for pair in (
        viz.accepted_figure(ACCEPTED, 15),
        viz.speedup_figure(greedy, (0.001, 0.02, 0.2), 0.2),
    ):
        assert png(pair[0]).startswith(b"\x89PNG")
