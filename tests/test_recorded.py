"""The notebooks' recorded times, and the picture of splits."""

import pandas as pd
import pytest

from ddtree_numba import viz
from ddtree_numba.lab.recorded import split_times


@pytest.fixture
def frame() -> pd.DataFrame:
    shape = "(1,33,64,2048) bf16"
    rows = [
        ("splits", f"mma, {n} splits", shape, us)
        for n, us in ((1, 200.0), (4, 60.0), (16, 90.0))
    ]
    rows.append(("verify_attn", "mma", shape, 61.0))
    return pd.DataFrame(rows, columns=["stage", "version", "shape", "us"])


def test_times_by_the_number_of_splits_leave_other_stages_out(frame):
    assert split_times(frame) == {(1, 33, 64, 2048): {1: 200.0, 4: 60.0, 16: 90.0}}


def test_the_best_number_of_splits_is_ringed(frame):
    figure, alt_text = viz.splits_figure(frame)
    assert [text.get_text() for text in figure.axes[0].texts] == ["4"]
    assert "200 µs with 1, least with 4 (60 µs), 90 µs with 16" in alt_text


def test_a_run_without_splits_has_no_such_picture(frame):
    with pytest.raises(ValueError, match="no timed row of stage splits"):
        viz.splits_figure(frame[frame["stage"] != "splits"])
