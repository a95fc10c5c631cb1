"""Recorded checkpoints copied to `checkpoint.upload` (any fsspec URL), in a thread, one at a time.

    URL/ckpt-0-400-drafter-3f9c/model.safetensors ...     each object whole or absent
    URL/ckpt-0-400-drafter-3f9c/uploaded.json             last: names and sizes; the whole checkpoint is there

Training never waits for it. A checkpoint that is being copied is not deleted here (`busy`); what could not
be copied is tried again, after 1 s at first and 5 minutes at most, until it is too old to be kept at all.
What the URL already holds is not sent twice, so a coordinator that returns goes on where it was.
"""

from __future__ import annotations

import io
import json
import logging
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import BinaryIO

import fsspec
from fsspec.implementations.local import LocalFileSystem

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

MARK = "uploaded.json"
CHUNK_BYTES = 8 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
LAST_TRIES, LAST_STILL_S = 3, 300.0
"""Failed copies, and seconds without a byte moved, after which who is in a hurry leaves without the rest."""


class Uploader:
    """`offer` it the names of recorded checkpoints as often as you like; `busy` is the one being copied."""

    def __init__(self, url: str, root: Path) -> None:
        """ConfigError: no such protocol, or its package is missing."""
        try:
            self._system, self._base = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"checkpoint.upload = {url}: {error}; for s3:// install the extra `s3`"
            ) from error
        self._root = root
        self._change = threading.Condition()
        self._pending: list[str] = []
        self._done: set[str] = set()
        self._leaving = self._hurried = False
        self._enough_errors, self._moved_s = 0, time.monotonic()
        self.busy = ""
        self.errors = 0
        self._thread = threading.Thread(target=self._run, name="upload", daemon=True)
        self._thread.start()

    @property
    def pending(self) -> int:
        """Checkpoints not yet at the URL."""
        with self._change:
            return len(self._pending) + bool(self.busy)

    def offer(self, names: Iterable[str]) -> None:
        """Replace the wish list; the newest goes first. 10 us."""
        with self._change:
            wanted = [name for name in names if name not in self._done and name != self.busy]
            if wanted != self._pending:
                self._pending = wanted
                self._change.notify_all()

    def hurry(self) -> None:
        """Try again now, and from now on after short pauses: who waits while `arriving` is about to leave."""
        with self._change:
            self._hurried, self._enough_errors = True, self.errors + LAST_TRIES
            self._change.notify_all()

    @property
    def arriving(self) -> bool:
        """After `hurry`: whether something is pending that neither fails time and again nor hangs."""
        still_s = time.monotonic() - self._moved_s
        return self.pending > 0 and self.errors < self._enough_errors and still_s < LAST_STILL_S

    def close(self) -> None:
        """Ends after the copy under way has ended or failed; does not wait for it."""
        with self._change:
            self._leaving = True
            self._change.notify_all()

    def _run(self) -> None:
        pause_s = FIRST_PAUSE_S
        while (name := self._take()) is not None:
            try:
                self._copy(name)
            except Exception as error:  # noqa: BLE001 - each file system raises its own; tried again later
                self.errors += 1
                log.warning("checkpoint not uploaded", extra={"checkpoint": name, "error": repr(error)})
                self._finish(name, done=False)
                if self._pause(pause_s):
                    return
                pause_s = FIRST_PAUSE_S if self._hurried else min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                self._finish(name, done=True)
                pause_s = FIRST_PAUSE_S

    def _take(self) -> str | None:
        with self._change:
            while not self._leaving:
                if self._pending:
                    self.busy, self._moved_s = self._pending.pop(), time.monotonic()
                    return self.busy
                self._change.wait()
        return None

    def _finish(self, name: str, *, done: bool) -> None:
        with self._change:
            self.busy = ""
            if done:
                self._done.add(name)
            elif name not in self._pending:  # a coordinator that leaves waits for what is pending
                self._pending.insert(0, name)

    def _pause(self, seconds: float) -> bool:
        """True when it is time to leave. Who is in a hurry cuts a long one short."""
        with self._change:
            short = self._hurried
            self._change.wait_for(lambda: self._leaving or self._hurried is not short, seconds)
            return self._leaving

    def _copy(self, name: str) -> None:
        target = f"{self._base}/{name}"
        if self._system.exists(f"{target}/{MARK}"):
            return
        files = sorted(file for file in (self._root / name).iterdir() if file.is_file())
        if not files:
            raise FileNotFoundError(f"{self._root / name} is empty")
        self._system.makedirs(target, exist_ok=True)
        for file in files:
            with file.open("rb") as source:
                self._write(f"{target}/{file.name}", source)
        sizes = {file.name: file.stat().st_size for file in files}
        self._write(f"{target}/{MARK}", io.BytesIO(json.dumps(sizes, indent=1).encode()))
        log.info("checkpoint uploaded", extra={"checkpoint": name, "bytes": sum(sizes.values())})

    def _write(self, path: str, source: BinaryIO) -> None:
        """Until all of it is there, the object does not stand under its name.

        A transaction of fsspec's local files ends in a copy across file systems: there, rename instead.
        """
        if isinstance(self._system, LocalFileSystem):
            aside = Path(f"{path}.part")
            with aside.open("wb") as sink:
                self._pour(source, sink)
            aside.rename(path)
            return
        with self._system.transaction, self._system.open(path, "wb", block_size=CHUNK_BYTES) as sink:
            self._pour(source, sink)

    def _pour(self, source: BinaryIO, sink: BinaryIO) -> None:
        while chunk := source.read(CHUNK_BYTES):
            sink.write(chunk)
            self._moved_s = time.monotonic()
