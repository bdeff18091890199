"""The meter of notebook 05 sees every new array, and nothing else."""

import numpy as np

from ddtree_numba.lab.metered import Meter


def test_results_of_operators_and_functions_are_counted_and_views_are_not():
    meter = Meter()
    x = meter.wrap(np.ones((4, 8), np.float32))
    assert meter.bytes == 0
    _ = x.T, x[1:], x.reshape(32)
    assert meter.bytes == 0
    y = x @ x.T  # 4 × 4
    assert meter.bytes == 64
    z = np.concatenate([y, y])  # 8 × 4
    assert meter.bytes == 64 + 128
    np.einsum("ij,jk->ik", z, x)  # 8 × 8
    assert (meter.bytes, meter.largest) == (64 + 128 + 256, (8, 8))


def test_work_in_place_makes_no_array():
    meter = Meter()
    x = meter.wrap(np.ones(4))
    x *= 2
    np.add(x, 1, out=x)
    assert meter.bytes == 0
    np.testing.assert_array_equal(np.asarray(x), 3)
