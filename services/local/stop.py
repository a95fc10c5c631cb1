"""`draftmill stop`: ask for a clean stop, then wait until the coordinator is gone, not a moment longer."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from services.local.status import RESULT, Status, read_address, request_stop

LOCK = "coordinator.lock"


def stop(run_dir: Path) -> None:
    """Returns once the step is finished, a checkpoint recorded and the coordinator has left.

    Raises PeerGone when no coordinator answers.
    """
    request_stop(read_address(run_dir))
    file = os.open(run_dir / LOCK, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(file, fcntl.LOCK_SH)  # the kernel grants it when the owner ends
    finally:
        os.close(file)


def result(run_dir: Path) -> Status | None:
    """How the last coordinator of the run left it; None: it has not left one."""
    file = run_dir / RESULT
    return Status.model_validate_json(file.read_bytes()) if file.is_file() else None
