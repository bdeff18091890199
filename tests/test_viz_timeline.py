"""Pictures of a run: what they draw, read back from the figure."""

import numpy as np
import pytest

from ddtree_numba import DraftTree, viz
from ddtree_numba.decode import Generation, RoundTrace
from ddtree_numba.reference import Accepted


def _round(committed: list[int], drafts: int) -> RoundTrace:
    tree = DraftTree.from_parents([-1, *range(drafts)])
    rows = np.arange(drafts + 1, dtype=np.int32)[None]
    one = np.ones(1, np.int32)
    accepted = Accepted(rows, one * (drafts + 1), one * committed[-1], one * 0)
    seconds = {"draft": 0.001, "verify": 0.003}
    return RoundTrace(np.ones(1, bool), one, tree, rows, accepted, [committed], seconds)


@pytest.fixture
def run() -> Generation:
    rounds = [_round([5, 6, 7], 2), _round([8], 0), _round([9, 4], 1)]
    tokens = [[token for trace in rounds for token in trace.committed[0]]]
    return Generation("tree", "numpy", 2, [[0]], tokens, rounds)


def test_a_column_is_a_round_and_the_line_below_is_the_same_text(run):
    figure, alt_text = viz.timeline_figure(run)
    cells = [(t.get_position()[0], t.get_text()) for t in figure.axes[0].texts]
    above = [text for _, text in cells[:3]]
    assert above == ["5", "6", "7"] and cells[3] == (0, "5")
    below = [t.get_text() for t in figure.axes[0].texts if t.get_position()[1] < 0]
    assert below == ["5", "6", "7"]
    assert "3, 1, 2 tokens: 6 in all" in alt_text


def test_the_bonus_is_the_one_that_no_draft_gave(run):
    figure, _ = viz.timeline_figure(run)
    bold = [t.get_text() for t in figure.axes[0].texts if t.get_fontweight() == "bold"]
    assert bold == ["7", "8", "4"]


def test_stages_are_cut_in_their_order_and_named(run):
    figure, alt_text = viz.stages_figure({"a run": run})
    widths = [bar.get_width() for bar in figure.axes[0].patches]
    assert widths == pytest.approx([1, 3])
    assert "a run 4 ms, most of it verify (75%)" in alt_text


def test_a_round_that_is_timed_as_a_whole_is_one_bar(run):
    for trace in run.rounds:
        trace.seconds.clear()
        trace.seconds["round"] = 0.002
    figure, alt_text = viz.stages_figure({"on a GPU": run})
    assert [bar.get_width() for bar in figure.axes[0].patches] == pytest.approx([2])
    assert "most of it round (100%)" in alt_text


def test_gains_are_told_by_budget():
    _, alt_text = viz.gain_figure([2.0, 3.0], [2.5, 3.5], [4, 8])
    assert "4: 2.00 and 2.50; 8: 3.00 and 3.50" in alt_text
