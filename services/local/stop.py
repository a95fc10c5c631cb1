"""`draftmill stop`: ask for a clean stop, and go on asking until a coordinator has ended by it.

    ask -> wait until its lock is free -> did it leave a result? -> how the run ended
                                          no: it died; one that takes over is asked again

And how a run ended that is over: it needs no stop, and is asked about long after.
"""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

from pydantic import ValidationError

from protocol.errors import PeerGone
from protocol.files import is_alive
from services.local.status import (
    ADDRESS_FILE,
    OVER,
    RESULT,
    Address,
    Status,
    fetch,
    read_address,
    request_stop,
)

LOCK, LEDGER = "coordinator.lock", "ledger.sqlite"
TELL_S = 3.0
POLL_S = 0.1
RESTART_S = 15.0
"""How long a coordinator that died while it stopped may take to be started again."""


def stop(run_dir: Path, tell: Callable[[Status], None], every_s: float = TELL_S) -> Status:
    """Returns how the run ended, once its coordinator has left, or lingers with nothing left to do.

    `tell` is called in between. Raises PeerGone: nobody runs it, or its coordinator died and none came after.
    """
    asked = read_address(run_dir)
    if not is_alive(run_dir / LOCK):
        raise PeerGone(f"{run_dir}: nobody runs it")
    while (last := _await_end(run_dir, asked, tell, every_s)) is None:
        asked = _ask_successor(run_dir, asked)
    return last


def _await_end(
    run_dir: Path, asked: Address, tell: Callable[[Status], None], every_s: float
) -> Status | None:
    """What the coordinator that was asked left behind; None: it left nothing, or another is there already."""
    pause, tell_from_s, heard = threading.Event(), time.monotonic() + every_s, False
    while is_alive(run_dir / LOCK) and read_address(run_dir) == asked:
        if not heard:  # busy; or the address is of its predecessor, and it has not told its own yet
            with suppress(PeerGone):
                request_stop(asked)
                heard = True
        pause.wait(min(POLL_S, every_s))
        if time.monotonic() < tell_from_s:
            continue
        tell_from_s = time.monotonic() + every_s
        try:
            status = fetch(asked)
        except PeerGone:  # busy, or about to be gone
            continue
        if status.lingers and status.state in OVER:
            return status
        tell(status)
    return _left_by_the_last(run_dir)


def _ask_successor(run_dir: Path, dead: Address) -> Address:
    pause, until_s = threading.Event(), time.monotonic() + RESTART_S
    while time.monotonic() < until_s:
        try:
            address = read_address(run_dir)
            if address != dead and is_alive(run_dir / LOCK):
                return address
        except PeerGone:  # it is starting
            pass
        pause.wait(POLL_S)
    raise PeerGone(f"{run_dir}: its coordinator died while it stopped; `draftmill up` resumes the run")


def ended(run_dir: Path) -> Status | None:
    """How the run ended, as its last coordinator left it. None: it lives, or has never been.

    Raises PeerGone if that one left nothing, as one that is killed does: an older one's result is not of now.
    """
    if not (run_dir / ADDRESS_FILE).is_file() or is_alive(run_dir / LOCK):
        return None
    last = _left_by_the_last(run_dir)
    if last is None:
        raise PeerGone(
            f"{run_dir}: nobody runs it, and its last coordinator ended without telling how far it was; "
            "`draftmill up` resumes it"
        )
    return last


def result(run_dir: Path) -> Status | None:
    """How the last coordinator that ended by itself left the run; None: there is none, or no whole one."""
    try:
        return Status.model_validate_json((run_dir / RESULT).read_bytes())
    except (OSError, ValidationError):
        return None


def is_finished(run_dir: Path) -> bool:
    """By its ledger, which `draftmill extend` and a restored backup change. False if it cannot be read."""
    newest = "SELECT 1 FROM finished WHERE timeline = (SELECT max(timeline) FROM timelines)"
    try:
        with closing(sqlite3.connect(f"file:{run_dir / LEDGER}?mode=ro", uri=True)) as ledger:
            return ledger.execute(newest).fetchone() is not None
    except sqlite3.Error:
        return False


def _left_by_the_last(run_dir: Path) -> Status | None:
    """The result, if it is not older than the last coordinator."""
    began, left = run_dir / ADDRESS_FILE, run_dir / RESULT
    try:
        fresh = left.stat().st_mtime_ns >= began.stat().st_mtime_ns
    except FileNotFoundError:
        return None
    return result(run_dir) if fresh else None
