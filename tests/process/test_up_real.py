"""`draftmill up` as people run it: real roles on a tiny model, killed, stopped and resumed."""

import os
import signal
import subprocess
import sys

import pytest
from harness import DEADLINE_S, environment, slowness

from services.lifecycle import ExitCode

pytestmark = pytest.mark.process


class Up:
    """`draftmill up` of a harness run, and the pids of its children from what it prints."""

    def __init__(self, run, *words: str) -> None:
        self.run = run
        self.output = run.dir / "up.log"
        with self.output.open("ab") as log:
            self._start = log.tell()
            command = [sys.executable, "-m", "services.cli", "up", "--config", str(run.file), *words]
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environment())

    def text(self) -> str:
        return self.output.read_text()[self._start :]

    def pid(self, role: str) -> int:
        started = [line for line in self.text().splitlines() if f"{role} started (pid " in line]
        return int(started[-1].rsplit(" ", 1)[1].rstrip(")"))

    def wait(self) -> int:
        try:
            return self.process.wait(DEADLINE_S * slowness())
        finally:
            self.process.kill()


@pytest.fixture
def start_up():
    started = []

    def start(run, *words: str) -> Up:
        started.append(Up(run, *words))
        return started[-1]

    yield start
    for up in started:
        up.process.kill()
        up.process.wait(DEADLINE_S)


def test_a_run_goes_on_over_killed_roles_to_the_end(make_run, start_up, undisturbed):
    run = make_run(targets=2)
    up = start_up(run)
    run.wait_step(2)
    os.kill(up.pid("target-0"), signal.SIGKILL)
    os.kill(up.pid("coordinator"), signal.SIGKILL)
    assert up.wait() == ExitCode.FINISHED, up.text()
    run.assert_exactly_once()
    run.assert_nothing_left()
    assert run.final_weights() == undisturbed
    total = run.result()["samples_total"]
    assert f"finished: {total} samples committed, 0 failed, of {total}" in up.text()
    assert up.text().count("target-0 started") == 2


@pytest.mark.long
def test_stopped_by_ctrl_c_and_started_again_it_gives_the_same_weights(make_run, start_up, undisturbed):
    run = make_run(targets=2)
    first = start_up(run)
    run.wait_step(3)
    first.process.send_signal(signal.SIGINT)
    assert first.wait() == ExitCode.STOPPED, first.text()
    run.assert_nothing_left()
    assert not run.finished()
    second = start_up(run)
    assert second.wait() == ExitCode.FINISHED, second.text()
    run.assert_exactly_once()
    assert run.final_weights() == undisturbed


def test_what_check_finds_keeps_the_run_from_starting(make_run, start_up):
    run = make_run()
    up = start_up(run, "--model.path", "nowhere", "--plan.token-budget=40")
    assert up.wait() == ExitCode.CONFIGURATION
    assert "model.path = nowhere (--model.path): is no folder" in up.text()
    assert sorted(file.name for file in run.dir.iterdir()) == ["up.log"]
