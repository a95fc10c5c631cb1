"""`up` with real child processes: restarts, give-up, stop, and nobody left behind.

The children are small programs that behave as roles do towards their supervisor: they exit with a
code, write a log, answer /status and leave on SIGTERM.
"""

import io
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
from pathlib import Path

import pytest
from rich.console import Console

from services.config.schema import Config
from services.lifecycle import ExitCode
from services.local.display import Lines
from services.local.processes import Processes
from services.local.status import read_address, request_stop
from services.local.supervisor import COORDINATOR, RoleId
from services.local.up import Up
from services.local.wakeups import wakeups

pytestmark = pytest.mark.process

COORDINATOR_PROGRAM = """
import http.server, json, os, pathlib, signal, sys, threading
run = pathlib.Path(sys.argv[2])
stop = threading.Event()
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps({"state": "running", "samples_committed": 3, "samples_total": 9}).encode()
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        self.send_response(202); self.send_header("Content-Length", "0"); self.end_headers(); stop.set()
    def log_message(self, *args): pass
signal.signal(signal.SIGTERM, lambda *_: stop.set())
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
address = {"http": f"http://127.0.0.1:{server.server_address[1]}", "incarnation": "coordinator-1"}
aside = run / "aside.json"
aside.write_text(json.dumps(address))
aside.rename(run / "coordinator.json")
alive = open(run / "alive", "wb")  # the roles read its end when this process ends
"""
WAITS_TO_BE_STOPPED = "stop.wait(); print('stopped', flush=True); raise SystemExit(8)"
ROLE_THAT_STAYS = "open(sys.argv[2] + '/alive', 'rb').read(); raise SystemExit(8)"


class Quiet(Lines):
    """Lines in memory."""

    def __init__(self) -> None:
        self.out = io.StringIO()
        super().__init__(Console(file=self.out, width=200))


def make(folder: Path, **sections) -> Config:
    base = {
        "model": {"path": "m"},
        "data": {"path": "d"},
        "run": {"dir": folder},
        "arena": {"dir": folder / "shm"},
    }
    watch = {"restart_delay_s": 0.05, "give_up_after": 3, "stop_s": 20.0}
    return Config.model_validate(base | {"watch": watch} | sections)


def program(folder: Path, **bodies: str) -> list[str]:
    """A program that runs the body of the role that it is called with."""
    cases = "\n".join(
        f"if sys.argv[1] == {role!r}:\n{textwrap.indent(textwrap.dedent(body), '    ')}"
        for role, body in bodies.items()
    )
    (folder / "roles.py").write_text(f"import sys\n{cases}\n")
    return [sys.executable, str(folder / "roles.py")]


@pytest.fixture
def run_dir(tmp_path):
    """The run's folder, with a pipe whose end tells roles that the coordinator is gone."""
    os.mkfifo(tmp_path / "alive")
    return tmp_path


@pytest.fixture
def signals_as_before():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def run_up(folder: Path, **bodies: str):
    shown = Quiet()
    with wakeups() as waits:
        up = Up(make(folder), [str(folder)], shown, waits, program(folder, **bodies))
        verdict = up.run()
    console = Console(file=shown.out, width=200)
    up.conclude(console, verdict)
    return verdict, shown.out.getvalue()


def test_a_run_is_finished_when_the_coordinator_says_so(run_dir, signals_as_before):
    finished = COORDINATOR_PROGRAM + "raise SystemExit(0)"
    verdict, text = run_up(
        run_dir, coordinator=finished, target=ROLE_THAT_STAYS, drafter="raise SystemExit(0)"
    )
    assert verdict.code is ExitCode.FINISHED
    assert "finished:" in text


def test_a_role_that_dies_at_start_again_and_again_is_given_up_with_its_last_words(
    run_dir, signals_as_before
):
    dies = "print('no such device: cuda:9', flush=True); raise SystemExit(1)"
    waits = COORDINATOR_PROGRAM + WAITS_TO_BE_STOPPED
    verdict, text = run_up(run_dir, coordinator=waits, target=dies, drafter=ROLE_THAT_STAYS)
    assert verdict.code is ExitCode.RUN_FAILED
    assert "target-0 died 3 times in a row without progress" in text
    assert text.count("  no such device: cuda:9") == 1
    assert (run_dir / "logs" / "target-0.log").read_text().count("no such device") == 3
    assert "stopped" in (run_dir / "logs" / "coordinator-0.log").read_text()


def test_a_configuration_error_is_not_tried_again(run_dir, signals_as_before):
    verdict, text = run_up(
        run_dir,
        coordinator="print('bad option'); raise SystemExit(3)",
        target=ROLE_THAT_STAYS,
        drafter=ROLE_THAT_STAYS,
    )
    assert verdict.code is ExitCode.CONFIGURATION
    assert "bad option" in text


def test_a_request_over_http_stops_the_run(run_dir, signals_as_before):
    def ask() -> None:
        with (run_dir / "alive").open("rb"):  # opens once the coordinator listens
            request_stop(read_address(run_dir))

    asker = threading.Thread(target=ask)
    asker.start()
    waits = COORDINATOR_PROGRAM + WAITS_TO_BE_STOPPED
    verdict, text = run_up(run_dir, coordinator=waits, target=ROLE_THAT_STAYS, drafter=ROLE_THAT_STAYS)
    asker.join()
    assert verdict.code is ExitCode.STOPPED
    assert "stopped:" in text


UP_PROGRAM = """
import sys
from pathlib import Path
from rich.console import Console
from services.config.schema import Config
from services.local.display import Lines
from services.local.up import Up
from services.local.wakeups import wakeups
folder = Path(sys.argv[1])
config = Config.model_validate({"model": {"path": "m"}, "data": {"path": "d"}, "run": {"dir": folder},
                                "arena": {"dir": folder / "shm"}})
with wakeups() as waits:
    verdict = Up(config, [str(folder)], Lines(Console()), waits, sys.argv[2:]).run()
sys.exit(verdict.code)
"""


def started_up(folder: Path, **bodies: str) -> tuple[subprocess.Popen[str], list[int]]:
    """`up` in a process of its own, and the pids of its three children once they run."""
    command = [sys.executable, "-c", UP_PROGRAM, str(folder), *program(folder, **bodies)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pids = []
    while len(pids) < 3:
        line = process.stdout.readline()
        assert line, "up ended early"
        if "started (pid" in line:
            pids.append(int(line.rsplit(" ", 1)[1].rstrip(")\n")))
    return process, pids


def ends(pidfd: int, within_s: float) -> bool:
    return bool(select.select([pidfd], [], [], within_s)[0])


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_through_the_coordinator(run_dir, number):
    waits = COORDINATOR_PROGRAM + WAITS_TO_BE_STOPPED
    process, pids = started_up(run_dir, coordinator=waits, target=ROLE_THAT_STAYS, drafter=ROLE_THAT_STAYS)
    assert process.stdout is not None
    assert any("state=running" in line for line in iter(process.stdout.readline, ""))
    watched = [os.pidfd_open(pid) for pid in pids]
    process.send_signal(number)
    process.communicate(timeout=60)
    assert process.returncode == ExitCode.STOPPED
    assert all(ends(pidfd, 0.0) for pidfd in watched)
    assert "stopped" in (run_dir / "logs" / "coordinator-0.log").read_text()


def test_children_do_not_outlive_a_killed_up(run_dir):
    stays = "import signal; signal.pause()"
    process, pids = started_up(run_dir, coordinator=stays, target=stays, drafter=stays)
    watched = [os.pidfd_open(pid) for pid in pids]
    process.kill()
    process.communicate(timeout=30)
    assert all(ends(pidfd, 10.0) for pidfd in watched)


def test_children_get_their_thread_counts_and_their_place(run_dir):
    body = "import os; print(sys.argv[1:], os.environ['OMP_NUM_THREADS'], os.getpgid(0) == os.getpid())"
    processes = Processes(
        run_dir, ["--x", "1"], {"target": 3}, program(run_dir, target=body, coordinator="pass")
    )
    role = RoleId("target", 2)
    pidfd = os.pidfd_open(processes.start(role))
    assert ends(pidfd, 30.0)
    assert processes.reap() == [(role, 0)]
    assert processes.last_lines(role, 5) == ["['target', '--x', '1', '--index', '2'] 3 True"]
    assert role not in processes
    assert COORDINATOR not in processes
