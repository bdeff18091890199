"""compute-sanitizer over one small round of every kernel."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from one_round import GROUPS
from under_sanitizer import BUGS

FINDINGS = re.compile(r"(?:ERROR SUMMARY|RACECHECK SUMMARY): (\d+)")
AGREES = "every stage agrees"


def watched(tool: str, group: str) -> tuple[int, str]:
    """How many findings a tool counts in a group, and all that was said."""
    sanitizer = shutil.which("compute-sanitizer")
    if sanitizer is None:
        pytest.skip("compute-sanitizer is not on the PATH")
    script = Path(__file__).with_name("under_sanitizer.py")
    # Room for the mbarriers of all blocks.
    options = ["--num-cuda-barriers", "16384"] if tool == "synccheck" else []
    run = subprocess.run(
        [sanitizer, "--tool", tool, *options, sys.executable, script, tool, group],
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


# What is not explained yet. The emulator, which knows named barriers and warpgroups,
# finds nothing in these kernels. Results agree under racecheck, as without a tool;
# synccheck makes the launch that it accuses fail, so there are none.
OPEN = {
    ("racecheck", "wgmma"): "accuses accesses on the two sides of one named barrier",
    ("synccheck", "wgmma"): "accuses products behind a branch that a warp takes alone",
}


@pytest.mark.gpu
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("tool", BUGS)
def test_every_kernel_is_clean_under_compute_sanitizer(tool: str, group: str) -> None:
    found, report = watched(tool, group)
    if (tool, group) in OPEN:
        assert found > 0, "no longer accused: take it out of OPEN"
        end = "CUDA_ERROR_LAUNCH_FAILED" if tool == "synccheck" else AGREES
        assert end in report, report[-4000:]
        pytest.xfail(OPEN[tool, group])
    # What it says first is about the first finding, what it says last about the script.
    assert found == 0, f"{report[:8000]}\n…\n{report[-2000:]}"
    assert AGREES in report, report[-4000:]


@pytest.mark.gpu
@pytest.mark.parametrize("tool", BUGS)
def test_each_tool_finds_the_bug_that_it_is_for(tool: str) -> None:
    found, report = watched(tool, "bug")
    assert found > 0, report
