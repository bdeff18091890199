"""Notebook 07: what Numba types, what PTX says, and the picture of both."""

import numpy as np
import pytest
from numba import cuda, float32

from ddtree_numba import backend
from ddtree_numba.lab import gpu_types, sums
from ddtree_numba.viz import sums_figure

ONE = (float32[::1], float32[::1])


@cuda.jit
def half_kernel(x, out):
    half = np.float32(0.5)  # a literal that is cast makes no float64
    out[0] = x[0] * half
    out[1] = x[1] * 0.1


def test_variables_have_the_types_that_numba_gives_them():
    types = gpu_types.types_of(sums.literal_kernel, sums.SIGNATURE)
    assert (types["total"], types["n"]) == ("float64", "int64")
    assert gpu_types.types_of(sums.float32_kernel, sums.SIGNATURE)["total"] == "float32"


def test_lines_in_float64_are_counted_from_the_kernels_def():
    assert gpu_types.float64_lines(half_kernel, ONE) == [(4, "out[1] = x[1] * 0.1")]
    lines = gpu_types.float64_lines(sums.literal_kernel, sums.SIGNATURE)
    assert [n for n, _ in lines] == [2, 6]
    assert not gpu_types.float64_lines(sums.pair_kernel, sums.SIGNATURE)


def test_numpy_and_numba_type_a_literal_differently():
    table = gpu_types.expression_types({"x": np.float32(1)}, "x * 0.5", "x + x")
    assert table.loc["x * 0.5"].tolist() == ["float32", "float64"]
    assert table.loc["x + x"].tolist() == ["float32", "float32"]


def test_the_emulator_adds_a_bare_zero_in_float32_and_the_picture_rings_it():
    errors = sums.sum_errors("emulator", most=1000)
    last = errors.groupby("kernel")["error"].last()
    assert last["0.0"] == last["float32"] > 1e-6 > last["float64"]
    assert last["float32 pair"] < 1e-7
    counts, _ = sums.instructions()
    figure, alt_text = sums_figure(errors, counts, "emulator")
    labels = [line.get_label() for line in figure.axes[0].lines]
    assert "a bare 0.0, on the emulator" in labels
    assert "float32 pair: 7 f32" in alt_text


def test_without_a_compiler_the_recorded_counts_are_named_as_such(monkeypatch):
    def refuse(*args):
        raise ImportError("no nvvm")

    monkeypatch.setattr(backend, "compile_ptx", refuse)
    counts, source = sums.instructions()
    assert counts.T.to_dict() == sums.RECORDED
    assert "recorded" in source
    assert "no CUDA compiler" in sums.ptx_lines(sums.literal_kernel, (), ".f64")[0]


@pytest.mark.ptx
def test_the_recorded_counts_are_what_is_compiled():
    counts, source = sums.instructions()
    assert "compiled" in source
    assert counts.T.to_dict() == sums.RECORDED


@pytest.mark.ptx
def test_a_literal_that_float32_cannot_hold_stays_float64():
    assert sums.ptx_lines(half_kernel, ONE, "mul.f64") != ["(no mul.f64)"]
