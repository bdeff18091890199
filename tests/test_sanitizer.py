"""compute-sanitizer over one small round of every kernel."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "initcheck", "synccheck"])
def test_every_kernel_is_clean_under_compute_sanitizer(tool: str) -> None:
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    script = Path(__file__).with_name("one_round.py")
    run = subprocess.run(
        [sanitizer, "--tool", tool, "--error-exitcode", "9", sys.executable, script],
        capture_output=True,
        text=True,
        timeout=300,
    )
    report = run.stdout + run.stderr
    assert run.returncode == 0, report[-4000:]
    assert "every stage agrees" in report
    assert "ERROR SUMMARY: 0 errors" in report or "RACECHECK SUMMARY: 0" in report
