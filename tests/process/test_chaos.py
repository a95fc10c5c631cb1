"""Two minutes of chaos: with one drafter, with three that wait for each other, with three that do not."""

import subprocess
import sys
from pathlib import Path

import pytest
from harness import environment

pytestmark = [pytest.mark.process, pytest.mark.slow]

TOOL = Path(__file__).with_name("chaos.py")


@pytest.mark.parametrize(
    ("drafters", "elastic", "weights"),
    [
        (1, "wait", "identical"),
        pytest.param(3, "wait", "identical", marks=pytest.mark.long),
        (3, "shrink", ""),
    ],
)
def test_whatever_is_killed_every_sample_counts_once(drafters, elastic, weights):
    words = ["--duration", "40", "--seed", "7", "--drafters", str(drafters), "--elastic", elastic]
    done = subprocess.run(
        [sys.executable, str(TOOL), *words], capture_output=True, text=True, env=environment(), check=False
    )  # its deadlines are the tool's own, which knows what progress is
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    last = done.stdout.splitlines()[-1]
    assert "lost=0 duplicated=0 failed=0 leaked_bytes=0" in last
    assert f"weights={weights}" in last
