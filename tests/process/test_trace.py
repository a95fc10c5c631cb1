"""Traces of a run that goes on: what they show, and that the weights do not change."""

import gzip
import json
import signal
import subprocess
import sys

import pytest
from harness import environment

from protocol.traces import FOLDER

pytestmark = pytest.mark.process


def ask(run, role: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "services.cli", "status", str(run.dir), "--trace", role]
    return subprocess.Popen(
        [*command, "--trace-seconds", "2"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=environment(),
    )  # fmt: skip


def test_both_roles_are_traced_amid_a_run_whose_weights_stay_the_same(make_run, undisturbed):
    """The coordinator is stopped until both record: roles are traced without it, and there is work left."""
    run = make_run(targets=1)
    run.start()
    run.wait_step(2)
    run.processes["coordinator"].send_signal(signal.SIGSTOP)
    asked = {role: ask(run, role) for role in ("target-0", "drafter-0")}
    folder = run.dir / FOLDER
    run.wait(lambda: len(list(folder.glob(".*.raw"))) == 2, "both to record")
    run.processes["coordinator"].send_signal(signal.SIGCONT)
    names = {role: names_in(process) for role, process in asked.items()}
    assert {"forward", "wait_lease", "aten::mm"} <= names["target-0"]
    assert {"forward", "backward", "reduce", "step", "vote_wait", "aten::mm"} <= names["drafter-0"]
    run.wait_finished()
    run.assert_exactly_once()
    run.assert_nothing_left()
    assert run.final_weights() == undisturbed
    assert sorted(file.name.rsplit("-", 2)[0] for file in folder.iterdir()) == ["drafter-0", "target-0"]


def names_in(process: subprocess.Popen[str]) -> set[str]:
    """Of the events in the trace that the command names."""
    printed, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    with gzip.open(printed.strip()) as file:
        return {event["name"] for event in json.load(file)["traceEvents"]}
