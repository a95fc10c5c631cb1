"""`draftmill status --trace ROLE`: leave a request in the run's folder, wait for the file that answers it.

No coordinator is needed, so a run can be looked at whose coordinator is stuck. It is asked only for the names
of roles, when nobody takes the request.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from protocol.errors import PeerGone
from protocol.traces import Request, ask
from services.local.status import fetch, read_address

TAKEN_S = 10.0
WRITTEN_S = 90.0
"""Beyond the seconds recorded: the profiler's start, the end of the work under way, writing."""

POLL_S = 0.1


def trace(run_dir: Path, role: str, seconds: float) -> Path:
    """The file, once it is whole.

    Raises:
        ConfigError: `role` or `seconds` cannot be.
        AlreadyRunning: a request for the role waits.
        PeerGone: nobody took it, or did not answer in time.
    """
    request = ask(run_dir, role, seconds)
    try:
        if not _wait(lambda: not request.waits(), TAKEN_S):
            raise PeerGone(f"{role} has not taken the request within {TAKEN_S:g} s; {_who(request)}")
    finally:
        request.withdraw()
    limit_s = request.seconds + WRITTEN_S
    if not _wait(lambda: request.trace.exists() or request.error.exists(), limit_s):
        raise PeerGone(f"{role} took the request and has written no trace within {limit_s:g} s; see its log")
    if not request.trace.exists():
        why = request.error.read_text()
        request.error.unlink()
        raise PeerGone(f"{role} could not be traced: {why}")
    return request.trace


def _who(request: Request) -> str:
    try:
        status = fetch(read_address(request.run_dir))
    except PeerGone:
        return "is it running?"
    names = ", ".join(f"{role.role}-{role.index}" for role in status.roles) or "no roles"
    return f"the run has {names}; is it still loading, or of another user?"


def _wait(until: Callable[[], bool], limit_s: float) -> bool:
    deadline_s, pause = time.monotonic() + limit_s, threading.Event()
    while not until():
        if time.monotonic() > deadline_s:
            return False
        pause.wait(POLL_S)
    return True
