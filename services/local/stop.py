"""`draftmill stop`: ask for a clean stop, then wait until the coordinator is gone, not a moment longer.

And what it left behind: a run that is over needs no stop, and its end is asked for long after.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from protocol.errors import PeerGone
from protocol.files import is_alive
from services.local.status import ADDRESS_FILE, RESULT, Address, Status, fetch, read_address, request_stop

LOCK = "coordinator.lock"
TELL_S = 3.0


def stop(run_dir: Path, tell: Callable[[Status], None], every_s: float = TELL_S) -> None:
    """Returns once the step is finished, a checkpoint recorded and the coordinator has left.

    `tell` is called in between, from another thread. Raises PeerGone when no coordinator answers.
    """
    address = read_address(run_dir)
    request_stop(address)
    file = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        with _telling(address, tell, every_s):
            fcntl.flock(file, fcntl.LOCK_SH)  # the kernel grants it when the owner ends
    finally:
        os.close(file)


@contextmanager
def _telling(address: Address, tell: Callable[[Status], None], every_s: float) -> Iterator[None]:
    over = threading.Event()

    def watch() -> None:
        while not over.wait(every_s):
            try:
                tell(fetch(address))
            except PeerGone:
                continue  # it is busy, or about to be gone

    thread = threading.Thread(target=watch, name="tell", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def result(run_dir: Path) -> Status | None:
    """How the last coordinator of the run left it; None: it has not left one."""
    file = run_dir / RESULT
    return Status.model_validate_json(file.read_bytes()) if file.is_file() else None


def ended(run_dir: Path) -> Status | None:
    """How the run ended, as its last coordinator left it. None: it lives, or has never been.

    Raises PeerGone if that one left nothing, as one that is killed does: an older one's result is not of now.
    """
    began, left = run_dir / ADDRESS_FILE, run_dir / RESULT
    if not began.is_file() or is_alive(run_dir / LOCK):
        return None
    if not left.is_file() or left.stat().st_mtime < began.stat().st_mtime:
        raise PeerGone(
            f"{run_dir}: nobody runs it, and its last coordinator ended without telling how far it was; "
            "`draftmill up` resumes it"
        )
    return result(run_dir)
