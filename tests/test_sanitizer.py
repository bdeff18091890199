"""compute-sanitizer over one small round of every kernel."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from one_round import GROUPS
from under_sanitizer import BUGS, relay_kernel

from ddtree_numba.emulator import emulate

FINDINGS = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")
AGREES = "every stage agrees"


def watched(tool: str, *what: str) -> tuple[int, str]:
    """How many findings a tool counts, and all that was said.

    what : as `under_sanitizer.py` takes it
    """
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    script = Path(__file__).with_name("under_sanitizer.py")
    # Room for the mbarriers of all blocks.
    options = ["--num-cuda-barriers", "16384"] if tool == "synccheck" else []
    run = subprocess.run(
        [sanitizer, "--tool", tool, *options, sys.executable, script, tool, *what],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    count = FINDINGS.search(run.stdout)
    assert count, run.stdout[-8000:]
    return int(count[1]), run.stdout


@pytest.mark.parametrize("group", ["select", "build", "attention", "mma"])
def test_stages_accept_the_inputs_of_a_round(group: str) -> None:
    """Here stages are mostly the references themselves: only a refusal can fail."""
    GROUPS[group]("numpy")


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tool", BUGS)
def test_every_kernel_is_clean_under_compute_sanitizer(tool: str, group: str) -> None:
    found, report = watched(tool, group)
    # What it says first is about the first finding, what it says last about the script.
    assert found == 0, f"{report[:8000]}\n…\n{report[-2000:]}"
    assert AGREES in report, report[-4000:]


@pytest.mark.gpu
@pytest.mark.parametrize("tool", BUGS)
def test_each_tool_finds_the_bug_that_it_is_for(tool: str) -> None:
    found, report = watched(tool, "bug")
    assert found > 0, report


@pytest.mark.gpu
def test_racecheck_finds_what_a_missing_barrier_leads_to() -> None:
    found, report = watched("racecheck", "wgmma", "BOTH")
    assert found > 0, report


def test_the_relay_has_no_race() -> None:
    out = np.full(256, np.nan, np.float32)
    report = emulate(relay_kernel, 1, 256, 8, out, trace=True)
    assert not report.races
    assert (out == sum(range(8))).all()


@pytest.mark.gpu
def test_racecheck_accuses_a_relay_that_is_right() -> None:
    found, report = watched("racecheck", "relay")
    assert found > 0, "arrivals count now: watch wgmma as it is"
    assert "the relay's sums are right" in report, report[-4000:]
