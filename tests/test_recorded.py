"""The notebooks' recorded times, and the picture of splits."""

import re
from pathlib import Path

import pandas as pd
import pytest

from ddtree_numba import viz
from ddtree_numba.lab.recorded import recorded, split_times

README = Path(__file__).parent.parent / "README.md"


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


def _burst(stage: str, version: str, shape: str) -> float:
    rows = recorded().query("regime == 'burst' and memory == 'warm'")
    rows = rows[(rows["stage"] == stage) & (rows["version"] == version)]
    return float(rows.set_index("shape")["us"][shape])


def _as_precise(us: float, told: str) -> str:
    return f"{us:.{len(told.partition('.')[2])}f}"


def test_the_readmes_times_of_attention_are_the_recorded_ones():
    lines = re.findall(
        r"^\| (\d+(?:, \d+){3}) \| (.*) \|$", README.read_text("utf-8"), re.M
    )
    assert len(lines) == 8
    for shape, cells in lines:
        for cell, version in zip(
            cells.split(" | "), ("wgmma", "mma", "FlashInfer fa3"), strict=True
        ):
            told, rate = re.fullmatch(r"([\d.]+) \((\d+)\)", cell.strip("*")).groups()
            name = f"({shape.replace(' ', '')}) bf16"
            us = _burst("verify_attn", version, name)
            assert told == _as_precise(us, told), (shape, version)
            b, n, h, s = map(int, shape.split(", "))
            flop = 2176 * b * n * h * (s + n)
            assert rate == f"{flop / us / 1e6:.0f}", (shape, version)


@pytest.mark.parametrize(
    ("line", "version"),
    [("`topk` + `tree_build`", "auto"), ("torch.topk", "torch + heapq")],
)
def test_the_readmes_times_of_trees_are_the_recorded_ones(line, version):
    text = README.read_text("utf-8")
    (cells,) = re.findall(rf"^\| {re.escape(line)}.*?((?: \| [\d.]+)+) \|$", text, re.M)
    for m, told in zip((32, 64, 256, 1024), cells.split(" | ")[1:], strict=True):
        us = _burst("logits_to_tree", version, f"(1,15,163840) bf16, M={m}")
        assert told == _as_precise(us, told)
