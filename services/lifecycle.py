"""How a role process lives: its name and lock, its run's folder in memory, how it stops, how it exits.

Exit codes, which restart policies and `draftmill up` act on:

    0  finished      the run's finished record is in the ledger; of a role: the run is over, it was sent away
    1  unexpected    an exception nobody foresaw (traceback in the log), or a watchdog in frozen C code
    2  usage         the command line itself is wrong
    3  configuration an option, model, dataset, checkpoint or ledger is wrong: a restart cannot help
    4  refused       fenced, or another live process has this run, port or place
    5  stuck         no progress for watch.stuck_s; stacks of all threads in the log
    6  run failed    the run ended early, for the reason given
    7  peer lost     no coordinator answered, a peer died, a disk is full: a restart may help
    8  stopped       a clean stop on request; the run can be resumed
    130, 143         a second SIGINT or SIGTERM: ended at once, in the middle of whatever it did
"""

from __future__ import annotations

import errno
import faulthandler
import hashlib
import logging
import os
import re
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from pathlib import Path
from typing import NoReturn

from protocol.errors import AlreadyRunning, DraftmillError, Fenced, PeerGone, RetryError, RunStopped
from protocol.files import FileLock, private_lock
from services.config.schema import Config

log = logging.getLogger(__name__)

_STDERR = 2  # the descriptor, which stays open whatever becomes of sys.stderr
_PASSING = {
    errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EMFILE, errno.ENFILE, errno.ENOMEM,
}  # fmt: skip
_SHOWING = {"tensorboard", "wandb", "trackio"}
_NAME_CHARACTERS = 24  # of the run's name in a path that must fit into a socket address (107 bytes)


FOR = "Draftmill-Coordinator"
"""HTTP header of a request that is meant for one coordinator: its incarnation."""


class ExitCode(IntEnum):
    """See the table above."""

    FINISHED = 0
    UNEXPECTED = 1
    USAGE = 2
    CONFIGURATION = 3
    REFUSED = 4
    STUCK = 5
    RUN_FAILED = 6
    PEER_LOST = 7
    STOPPED = 8


def exit_code(error: DraftmillError) -> ExitCode:
    """What a process exits with when `error` ends it."""
    if isinstance(error, AlreadyRunning | Fenced):
        return ExitCode.REFUSED
    if isinstance(error, RunStopped):
        return ExitCode.RUN_FAILED
    return ExitCode.PEER_LOST if isinstance(error, RetryError) else ExitCode.CONFIGURATION


def unforeseen(error: BaseException) -> ExitCode:
    """The same of any error: a disk that is full now, or a limit reached, may not be at the next start."""
    if isinstance(error, DraftmillError):
        return exit_code(error)
    passing = isinstance(error, OSError) and error.errno in _PASSING
    return ExitCode.PEER_LOST if passing else ExitCode.UNEXPECTED


def arena_folder(config: Config) -> Path:
    """This run's folder in memory: `<arena.dir>/<name>-<8 hex of sha256(resolved run.dir)>`. Makes nothing.

    It holds the control socket and each incarnation's lock, arena and inbox.
    """
    run = config.run.dir.resolve()
    name = re.sub(r"[^A-Za-z0-9_.-]", "_", run.name)[:_NAME_CHARACTERS] or "run"
    return config.arena.dir / f"{name}-{hashlib.sha256(str(run).encode()).hexdigest()[:8]}"


def control_endpoint(config: Config) -> str:
    """`coordinator.endpoint`, or the socket in the run's folder in memory."""
    return config.coordinator.endpoint or f"ipc://{arena_folder(config).resolve() / 'control'}"


def new_incarnation(role: str) -> str:
    """A name that no process had before: `target-3f9c51e0a7b2`."""
    return f"{role}-{secrets.token_hex(6)}"


def hold_lock(folder: Path, incarnation: str) -> FileLock:
    """Own `<incarnation>.lock` in the run's arena folder (made if missing) until the process ends.

    Free means dead to everybody else. Raises ConfigError when the folder is open to others.
    """
    return private_lock(folder, f"{incarnation}.lock")


@contextmanager
def tidy_end(lock: FileLock) -> Iterator[None]:
    """Remove the lock once the role has left in order: by itself, or sent away with all else released.

    Any other exception leaves the file where it is, and the lock with the process: its death is the message.
    """
    try:
        yield
    except (Fenced, PeerGone):
        lock.release(unlink=True)
        raise
    lock.release(unlink=True)


def stop_on_signals(wake: Callable[[], None] | None = None) -> threading.Event:
    """An event that SIGTERM or SIGINT sets (then calls `wake`); a second signal ends the process at once.

    Call from the main thread. `wake` runs inside the signal handler: it must not take a plain Lock.
    """
    stop = threading.Event()

    def on_signal(number: int, _frame: object) -> None:
        if stop.is_set():
            os._exit(128 + number)
        stop.set()
        if wake is not None:
            wake()

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    return stop


def exit_on_thread_failure() -> None:
    """A thread that dies takes the process with it: a role with half its threads would hang unnoticed.

    Not one of a library that only shows the run (`log.sinks`): no run depends on that.
    """

    def on_failure(failure: threading.ExceptHookArgs) -> None:
        if failure.exc_type is SystemExit:
            return
        name = failure.thread.name if failure.thread else "unknown"
        error = failure.exc_value or failure.exc_type()
        trace = (failure.exc_type, error, failure.exc_traceback)
        packages = {
            str(frame.f_globals.get("__name__")).partition(".")[0]
            for frame, _line in traceback.walk_tb(failure.exc_traceback)
        }
        log.critical("thread failed", exc_info=trace, extra={"failed_thread": name})
        if packages & _SHOWING:
            return
        leave(unforeseen(error))

    threading.excepthook = on_failure


def leave(code: ExitCode) -> NoReturn:
    """End the process now, from any thread, without waiting for the others.

    Also the end of a role that has released everything: taking a process with torch down takes seconds.
    """
    for flush in (logging.shutdown, sys.stdout.flush, sys.stderr.flush):
        with suppress(OSError, ValueError):  # a full disk or a closed pipe shall not change the code
            flush()
    os._exit(code)


def leave_or_rest(code: ExitCode, *, linger: bool) -> NoReturn:
    """`leave`, but a role whose run is over stays as an idle process if `linger`, until a signal ends it.

    For containers that are restarted whenever they exit: without it each would load its model again and
    again to be told that there is nothing to do. The program is replaced, so memory, locks and GPU are free.
    """
    if not linger or code != ExitCode.FINISHED:
        leave(code)
    log.info("the run is over: resting until stopped", extra={"option": "watch.linger"})
    logging.shutdown()
    os.execvp("sleep", ["sleep", "infinity"])  # noqa: S606 - it shall replace this process


class Watchdog:
    """Ends the process when nobody calls `beat` for `stuck_s` seconds; dumps the stacks of all threads first.

    Waiting for a peer is progress: who waits, beats. A process that was stopped as a whole (SIGSTOP, a
    suspended machine) starts a new count when it goes on, up to 1.3 times `stuck_s`: after that it was fenced
    long ago, and ends. That is the work of a timer in C, with status 1, which also ends C code that never
    gives the GIL back. Costs a wake-up every tenth of `stuck_s`.
    """

    def __init__(self, stuck_s: float) -> None:
        self._stuck_s = stuck_s
        self._period_s = stuck_s / 10
        self._last_beat_s = time.monotonic()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> Watchdog:
        self.beat()
        self._thread.start()
        return self

    def beat(self) -> None:
        """Something was done, or is rightly waited for. 0.1 us."""
        self._last_beat_s = time.monotonic()

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join()

    def _watch(self) -> None:
        woken_s = time.monotonic()
        while True:
            faulthandler.dump_traceback_later(self._stuck_s + 3 * self._period_s, exit=True, file=_STDERR)
            if self._stopped.wait(self._period_s):
                return faulthandler.cancel_dump_traceback_later()
            slept_s, woken_s = time.monotonic() - woken_s, time.monotonic()
            if slept_s > 5 * self._period_s:
                self.beat()
            silent_s = woken_s - self._last_beat_s
            if silent_s > self._stuck_s:
                self._give_up(silent_s)

    def _give_up(self, silent_s: float) -> None:
        log.critical(
            "stuck", extra={"silent_s": silent_s, "limit_s": self._stuck_s, "option": "watch.stuck_s"}
        )
        faulthandler.dump_traceback(file=_STDERR, all_threads=True)
        leave(ExitCode.STUCK)
