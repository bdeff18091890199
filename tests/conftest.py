"""Markers and executors that every test file shares."""

import functools
import os

# As the command does, before NumPy is loaded: ddtree_numba/__main__.py tells why.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest  # noqa: E402
from numba import cuda, types  # noqa: E402

from ddtree_numba import backend  # noqa: E402


@functools.cache
def _ptx_problem() -> str | None:
    if backend.config.ENABLE_CUDASIM:
        return "Numba's simulator is on"
    try:
        backend.compile_ptx(cuda.jit(lambda out: None), (types.int32[::1],))
    except Exception as error:
        return f"no CUDA compiler libraries ({type(error).__name__}); install '.[gpu]'"
    return None


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (why := backend.gpu_problem()):
        pytest.skip(f"gpu: {why}")
    if item.get_closest_marker("ptx") and (why := _ptx_problem()):
        # The gate sets this: there PTX tests must run, not skip.
        if os.environ.get("DDTREE_REQUIRE_PTX"):
            pytest.fail(f"ptx: {why}")
        pytest.skip(f"ptx: {why}")


def pytest_report_header() -> str:
    try:
        return backend.banner()
    except RuntimeError as error:
        return f"ddtree_numba: {error}"


SLOW_CELL = 1.0  # seconds


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Seconds of the notebooks' cells, the slowest first."""
    stats = terminalreporter.stats
    cells: dict[str, list[float]] = {}
    for report in (*stats.get("passed", ()), *stats.get("failed", ())):
        for name, value in report.user_properties if report.when == "call" else ():
            if name == "cell":
                cells.setdefault(value[1], []).append(value[0])
    if cells:
        terminalreporter.section(f"slowest of the notebooks' {len(cells)} cells")
    for name, seconds in sorted(cells.items(), key=lambda cell: -max(cell[1])):
        if max(seconds) >= SLOW_CELL:
            terminalreporter.line(f"{max(seconds):6.2f} s  {name}")


GPU = pytest.param("gpu", marks=pytest.mark.gpu)


@pytest.fixture(params=["emulator", GPU])
def kernel_executor(request: pytest.FixtureRequest) -> str:
    """Where a kernel itself runs: the emulator, and a GPU where there is one."""
    return request.param


@pytest.fixture(params=["numpy", "emulator", GPU])
def executor(request: pytest.FixtureRequest) -> str:
    """Every executor: what a wrapper does must not depend on it."""
    return request.param


@pytest.fixture(autouse=True)
def _no_executor_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDTREE_EXECUTOR", raising=False)
