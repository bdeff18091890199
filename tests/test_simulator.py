"""An outside check on the emulator: the plain kernels under Numba's own simulator."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import plain_kernels
import pytest

from ddtree_numba.emulator import emulate

SCRIPT = Path(plain_kernels.__file__)


def test_plain_kernels_agree_with_the_golden_cases_under_numbas_simulator():
    done = subprocess.run(
        [sys.executable, str(SCRIPT)],
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "12 golden cases under Numba's simulator\n"


def test_plain_kernels_agree_with_the_golden_cases_in_the_emulator():
    assert plain_kernels.check_all(emulate) == 12


def test_a_kernel_that_does_nothing_is_noticed():
    with pytest.raises(AssertionError, match="tree_accept-worked-example"):
        plain_kernels.check_all(lambda kernel, grid, block, *args: None)


def test_a_kernel_that_is_wrong_in_one_place_is_noticed():
    def off_by_one(kernel, grid, block, *args):
        emulate(kernel, grid, block, *args)
        if kernel is plain_kernels.kv_compact.kv_compact_kernel:
            args[-1][...] += np.int32(1)

    with pytest.raises(AssertionError, match="kv_compact.*prefix_lens"):
        plain_kernels.check_all(off_by_one)
