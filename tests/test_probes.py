"""Emulator and GPU agree on Numba's kernel API, and both with what is known of it."""

import numpy as np
import pytest
from numba import cuda
from probes import PROBES, difference, types_of

from ddtree_numba import backend
from ddtree_numba.emulator import emulate

every_probe = pytest.mark.parametrize("probe", PROBES.values(), ids=PROBES)


def emulated(probe, **options):
    arguments = probe.arguments()
    report = emulate(
        probe.kernel, probe.grid, probe.block, *arguments,
        dynamic_shared=probe.dynamic_shared, **options,
    )  # fmt: skip
    return probe.outputs(arguments), report


def test_there_are_at_least_thirty():
    assert len(PROBES) >= 30


@every_probe
def test_the_emulator_gives_what_is_known(probe):
    outputs, report = emulated(probe, trace=True)
    for got, expected in zip(outputs, probe.expected, strict=True):
        assert difference(got, expected, probe.rtol) == ""
    # The lock orders its blocks by a flag, which the trace does not see.
    if "lock" not in probe.name:
        assert [str(race) for race in report.races] == []


@every_probe
@pytest.mark.parametrize("order", ["reverse", "shuffled"])
def test_the_order_of_lanes_does_not_matter(probe, order):
    forward, _ = emulated(probe)
    other, _ = emulated(probe, order=order)
    for got, expected in zip(other, forward, strict=True):
        assert difference(got, expected, 0) == ""


@every_probe
@pytest.mark.ptx
def test_numba_compiles_it(probe):
    assert backend.compile_ptx(probe.kernel, types_of(probe.arguments()))


@every_probe
@pytest.mark.gpu
def test_a_gpu_gives_what_the_emulator_gives(probe):
    arguments = [
        cuda.to_device(x) if isinstance(x, np.ndarray) else x for x in probe.arguments()
    ]
    probe.kernel[probe.grid, probe.block, 0, probe.dynamic_shared](*arguments)
    outputs, _ = emulated(probe)
    for got, expected in zip(probe.outputs(arguments), outputs, strict=True):
        assert difference(got.copy_to_host(), expected, probe.rtol) == ""


def test_a_difference_is_told():
    a = np.array([[1, 2], [0, np.nan]], np.float32)
    assert difference(a, a.copy(), 0) == ""
    assert "(1, 0)" in difference(a, np.where(a == 0, np.float32(-0.0), a), 0)
    assert "; 2 so" in difference(a, a * np.float32(1 + 1e-6), 1e-7)
    assert difference(a, a * np.float32(1 + 1e-6), 1e-5) == ""
    assert "expected float64" in difference(a, a.astype(float), 0)
