"""Names, folders and locks of a process; how it stops and what it exits with."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from protocol import errors
from protocol.files import is_alive
from services.config.schema import Config
from services.lifecycle import (
    ExitCode,
    arena_folder,
    exit_code,
    hold_lock,
    new_incarnation,
    tidy_end,
    unforeseen,
)


def make(**sections) -> Config:
    return Config.model_validate({"model": {"path": "m"}, "data": {"path": "d"}} | sections)


def python(code: str, **kwargs) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **kwargs
    )


def test_the_arena_folder_depends_on_the_resolved_run_folder_and_makes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    relative = make(run={"dir": "runs/a b"}, arena={"dir": tmp_path / "arena"})
    absolute = make(run={"dir": tmp_path / "runs" / "a b"}, arena={"dir": tmp_path / "arena"})
    assert arena_folder(relative) == arena_folder(absolute)
    assert arena_folder(relative).name.startswith("a_b-")
    assert arena_folder(relative) != arena_folder(
        make(run={"dir": "other/a b"}, arena={"dir": tmp_path / "arena"})
    )
    assert not list(tmp_path.iterdir())


def test_an_incarnation_is_new_each_time_and_its_lock_says_it_lives(tmp_path):
    name = new_incarnation("target")
    assert name != new_incarnation("target")
    lock = hold_lock(tmp_path / "run", name)
    assert is_alive(tmp_path / "run" / f"{name}.lock")
    lock.release()
    assert not is_alive(tmp_path / "run" / f"{name}.lock")


def test_a_role_that_leaves_in_order_removes_its_lock_and_one_that_fails_does_not(tmp_path):
    file = tmp_path / "drafter-1.lock"
    with tidy_end(hold_lock(tmp_path, "drafter-1")):
        assert is_alive(file)
    assert not file.exists()
    with pytest.raises(errors.Fenced), tidy_end(hold_lock(tmp_path, "drafter-1")):
        raise errors.Fenced("sent away")
    assert not file.exists()
    with pytest.raises(errors.CorruptPack), tidy_end(hold_lock(tmp_path, "drafter-1")):
        raise errors.CorruptPack("a slot holds something else")
    assert file.exists()


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.ConfigError, ExitCode.CONFIGURATION),
        (errors.DataError, ExitCode.CONFIGURATION),
        (errors.LedgerError, ExitCode.CONFIGURATION),
        (errors.AlreadyRunning, ExitCode.REFUSED),
        (errors.Fenced, ExitCode.REFUSED),
        (errors.RunStopped, ExitCode.RUN_FAILED),
        (errors.PeerGone, ExitCode.PEER_LOST),
    ],
)
def test_exit_codes_say_what_a_restart_can_do(kind, code):
    assert exit_code(kind("x")) is code


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_asks_and_the_second_ends(number):
    code = """
from services.lifecycle import stop_on_signals
stop = stop_on_signals()
print("ready", flush=True)
stop.wait(60)
print("asked", flush=True)
import threading; threading.Event().wait(60)
"""
    process = python(code)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(number)
    assert process.stdout.readline() == "asked\n"
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode == 128 + number


WATCHED = """
import faulthandler, threading
from services.lifecycle import Watchdog
dog = Watchdog(stuck_s=%s).start()
"""


def test_a_process_without_progress_exits_and_shows_its_stacks():
    process = python(WATCHED % 0.3 + "def waits_for_ever(): threading.Event().wait(60)\nwaits_for_ever()")
    _, err = process.communicate(timeout=30)
    assert process.returncode == ExitCode.STUCK
    assert "waits_for_ever" in err


def test_a_process_that_never_gives_the_gil_back_exits_too():
    process = python(WATCHED % 0.3 + "import ctypes; ctypes.PyDLL(None).sleep(60)")
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "Timeout" in err


def test_beats_keep_a_process_alive_and_stop_ends_the_watch():
    code = """
for _ in range(10):
    threading.Event().wait(0.3)
    dog.beat()
dog.stop()
threading.Event().wait(2.7)
print("done")
"""
    process = python(WATCHED % 2.0 + code)  # on a busy machine a beat may be a second late
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "done\n"), err


def test_a_stopped_process_is_not_stuck_when_it_goes_on():
    code = """
print("ready", flush=True)
import sys
from pathlib import Path
sys.stdin.readline()
dog.stop()
print("done", flush=True)
"""
    process = python(WATCHED % 1.0 + code, stdin=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
    process.send_signal(signal.SIGCONT)
    out, _ = process.communicate("go\n", timeout=30)
    assert (process.returncode, out) == (0, "done\n")


def test_a_thread_that_fails_takes_the_process_with_it():
    code = """
import threading
from protocol.errors import Fenced
from services.lifecycle import exit_on_thread_failure
exit_on_thread_failure()
def fails(): raise Fenced("declared dead")
threading.Thread(target=fails, name="copier").start()
threading.Event().wait(60)
"""
    process = python(code)
    _, err = process.communicate(timeout=30)
    assert process.returncode == ExitCode.REFUSED
    assert "thread failed" in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (OSError(errno.ENOSPC, "No space left"), ExitCode.PEER_LOST), (OSError(errno.EMFILE, "Too many"), 7),
        (OSError(errno.EBADF, "Bad descriptor"), ExitCode.UNEXPECTED), (ValueError("a bug"), 1),
        (errors.ConfigError("an option"), ExitCode.CONFIGURATION), (errors.DiskFull("a disk"), 7),
    ],
)  # fmt: skip
def test_what_nobody_foresaw_may_pass_or_may_not(error, code):
    assert unforeseen(error) == code


def test_a_thread_of_a_dashboards_library_that_fails_does_not():
    code = """
import sys, threading, types
from services.lifecycle import exit_on_thread_failure
exit_on_thread_failure()
library = types.ModuleType("tensorboard.writer")
exec("def fails(): raise OSError(28, 'No space left on device')", vars(library))
thread = threading.Thread(target=library.fails)
thread.start()
thread.join()
print("the run goes on")
"""
    process = python(code)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "the run goes on\n")
    assert "thread failed" in err


def test_the_page_for_operators_has_every_status():
    page = (Path(__file__).parents[3] / "docs" / "operations.md").read_text(encoding="utf-8")
    for code in ExitCode:
        assert f"\n| {code.value} | {code.name.lower().replace('_', ' ')} |" in page, code
