"""Checkpoints written aside: the step waits for a copy to the CPU, never for the disk.

One at a time, in a thread of its own. A full disk is a line in the report, and training goes on.
"""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from safetensors import SafetensorError

from protocol.errors import CheckpointError
from protocol.messages import Saved, StepAt
from services.dflash.checkpoint import checkpoint_name, write_checkpoint
from services.dflash.drafter_config import DrafterConfig
from services.drafter.weights import Snapshot

log = logging.getLogger(__name__)


class Unsaved(NamedTuple):
    """A checkpoint that could not be written; nothing of it is left."""

    at: StepAt
    why: str


class Saver:
    """Writes `<folder>/<name>`; `done` is called from its thread when there is a result."""

    def __init__(
        self, folder: Path, incarnation: str, drafter: DrafterConfig, done: Callable[[], None]
    ) -> None:
        self._folder, self._incarnation, self._drafter, self._done = folder, incarnation, drafter, done
        self._thread: threading.Thread | None = None
        self._result: Saved | Unsaved | None = None

    def start(self, at: StepAt, snapshot: Snapshot) -> None:
        """Only after the result of the one before has been taken."""
        assert self._thread is None, "two checkpoints at a time"
        self._thread = threading.Thread(
            target=self._write, args=(at, snapshot), name="checkpoint", daemon=True
        )
        self._thread.start()

    def take_result(self) -> Saved | Unsaved | None:
        """What has become of the checkpoint; None while it is written, or if there is none."""
        if self._result is None:
            return None
        assert self._thread is not None, "a result without a thread that made it"
        self._thread.join()  # cleared before, a result could come in between and be dropped
        result, self._result, self._thread = self._result, None, None
        return result

    def close(self, timeout_s: float) -> None:
        """Let an open one end; a partial folder that stays behind is swept by a later start."""
        if self._thread is not None:
            self._thread.join(timeout_s)

    def _write(self, at: StepAt, snapshot: Snapshot) -> None:
        name = checkpoint_name(at.timeline, at.step, self._incarnation)
        try:
            sha256 = write_checkpoint(
                self._folder / name,
                weights=snapshot.weights,
                optimizer=snapshot.optimizer,
                state={"timeline": at.timeline, "step": at.step},
                drafter=self._drafter,
            )
            self._result = Saved(at=at, name=name, sha256=sha256)
        except (OSError, SafetensorError, CheckpointError) as error:
            log.exception("checkpoint not written", extra={"checkpoint": name})
            full = isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)
            remedy = "; free some space" if full or isinstance(error, SafetensorError) else ""
            self._result = Unsaved(at, f"checkpoint {self._folder / name}: {error}{remedy}")
        self._done()
