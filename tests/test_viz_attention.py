"""Pictures of attention kernels: reads of the cache, and the online softmax."""

import dataclasses

import numpy as np
import pandas as pd
import pytest
from numba import cuda

from ddtree_numba import bench
from ddtree_numba.bench.rows import Row
from ddtree_numba.emulator import emulate
from ddtree_numba.lab import attention, recorded
from ddtree_numba.viz import element_reads, online_figure, reads_figure, times_figure


@cuda.jit
def rows_kernel(x, out):  # lane i reads row i, element 1 twice
    i = cuda.threadIdx.x
    out[i] = x[i, 0] + x[i, 1] + x[i, 1]


def traced_rows(n):
    return emulate(rows_kernel, 1, n, np.ones((3, 2)), np.zeros(3), trace=True)


def test_reads_are_counted_element_by_element():
    reads = element_reads(traced_rows(2), "x", (3, 2))
    np.testing.assert_array_equal(reads, [[1, 2], [1, 2], [0, 0]])


def test_an_array_that_is_not_read_is_an_error():
    with pytest.raises(ValueError, match="array is 'y'; expected .* x"):
        element_reads(traced_rows(1), "y", (3, 2))


def test_the_reads_of_the_prefix_are_named():
    reads = {"simple": np.full((4, 3), 8), "split": np.full((4, 3), 2)}
    figure, alt_text = reads_figure(reads, prefix_len=3, d_latent=2)
    assert "simple 8 times" in alt_text and "split 2 times" in alt_text
    lines = figure.axes[0].lines
    assert [line.get_ydata()[0] for line in lines] == [8, 2]
    assert len({line.get_marker() for line in lines}) == 2  # a cue beside colour


def test_bars_of_the_online_softmax_end_at_the_total():
    scores = np.array([0.0, 1.0, -np.inf, 5.0, 2.0, -np.inf])
    figure, alt_text = online_figure(scores, tile=2)
    bars = figure.axes[1].patches
    before, fresh = (
        np.array([b.get_height() for b in part]) for part in (bars[:3], bars[3:])
    )
    np.testing.assert_allclose((before + fresh)[-1], np.exp2(scores - 5).sum())
    assert "maximum is 1, 5, 5" in alt_text


def test_a_row_that_sees_nothing_has_no_total():
    figure, _ = online_figure(np.full(4, -np.inf), tile=2)
    assert all(bar.get_height() == 0 for bar in figure.axes[1].patches)


def test_recorded_times_are_of_one_shape_and_our_versions(
    monkeypatch, tmp_path, capsys
):
    row = Row("verify_attn", "mma", attention.SHAPE, us=40.0, tflops=239.0, card="H200")
    others = [
        {"shape": "(1,1,1,1) bf16"},
        {"version": "FlashInfer fa3"},
        {"status": "wrong"},
        {"regime": "sustained"},
        {"memory": "cold"},
        {"version": "simple", "us": 9000.0},
    ]
    rows = [row, *(dataclasses.replace(row, **other) for other in others)]
    pd.DataFrame(map(dataclasses.asdict, rows)).to_csv(tmp_path / bench.FINISHED)
    monkeypatch.setattr(recorded, "data_path", lambda path: tmp_path / bench.FINISHED)
    times = attention.attention_times("emulator")
    assert times["version"].tolist() == ["mma", "simple"]
    assert "recorded in data/bench/bench.csv: one H200" in capsys.readouterr().out
    _, alt_text = times_figure(times)
    assert "simple 9,000 µs" in alt_text and "mma 40.0 µs, 239 TFLOP/s" in alt_text


def test_without_a_recorded_run_there_are_no_times(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(recorded, "data_path", lambda path: tmp_path / path)
    assert attention.attention_times("emulator") is None
    assert "no recorded run" in capsys.readouterr().out
