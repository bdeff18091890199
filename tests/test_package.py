"""What the package offers by name, and what a wheel carries."""

import subprocess
import sys

import pytest

import ddtree_numba


def test_every_public_name_is_there():
    for name in ddtree_numba.__all__:
        assert callable(getattr(ddtree_numba, name)), name
    assert set(ddtree_numba.__all__) < set(dir(ddtree_numba))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="has no attribute 'topkk'"):
        _ = ddtree_numba.topkk


def test_importing_the_package_loads_no_numpy():
    code = "import sys, ddtree_numba; print('numpy' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.stdout == "False\n", run.stderr
