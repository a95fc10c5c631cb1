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
from fsspec import AbstractFileSystem
from fsspec.implementations.local import LocalFileSystem

from protocol.errors import ConfigError

log = logging.getLogger(__name__)

MARK = "uploaded.json"
CHUNK_BYTES = 8 << 20
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 300.0
LAST_TRIES, LAST_STILL_S = 3, 1800.0  # some services get all of a file at its end
"""Failed copies, and seconds without a byte moved, after which who is in a hurry leaves without the rest."""


class Uploader:
    """`offer` it the names of recorded checkpoints as often as you like; `busy` is the one being copied."""

    def __init__(self, url: str, root: Path) -> None:
        """ConfigError: no such protocol, or its package is missing. Connects to nothing yet."""
        check_url(url)
        self._url, self._root = url, root
        self._system: AbstractFileSystem | None = None  # made in the thread: some log in right away
        self._base = ""
        self._change = threading.Condition()
        self._pending: list[str] = []
        self._done: set[str] = set()
        self._leaving = self._hurried = self._still_told = False
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
            self._moved_s = time.monotonic()  # it may have rested
            self._change.notify_all()

    @property
    def arriving(self) -> bool:
        """After `hurry`: whether something is pending that neither fails time and again nor hangs."""
        return self.pending > 0 and self.errors < self._enough_errors and not self._hangs()

    def look(self) -> None:
        """Tell once of a copy that hangs: it is no error yet, and nothing is uploaded behind it."""
        with self._change:
            if not self.busy or self._still_told or not self._hangs():
                return
            self._still_told, name = True, self.busy
            self.errors += 1
        log.warning("checkpoint hangs in its upload", extra={"checkpoint": name, "still_s": LAST_STILL_S})

    def _hangs(self) -> bool:
        return time.monotonic() - self._moved_s >= LAST_STILL_S

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
                with self._change:
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
                    self._still_told = False
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
        if self._system is None:
            self._system, self._base = fsspec.core.url_to_fs(self._url)
        system, target = self._system, f"{self._base}/{name}"
        if system.exists(f"{target}/{MARK}"):
            return
        files = sorted(file for file in (self._root / name).iterdir() if file.is_file())
        if not files:
            raise FileNotFoundError(f"{self._root / name} is empty")
        system.makedirs(target, exist_ok=True)
        for file in files:
            with file.open("rb") as source:
                self._write(system, f"{target}/{file.name}", source)
        sizes = {file.name: file.stat().st_size for file in files}
        self._write(system, f"{target}/{MARK}", io.BytesIO(json.dumps(sizes, indent=1).encode()))
        log.info("checkpoint uploaded", extra={"checkpoint": name, "bytes": sum(sizes.values())})

    def _write(self, system: AbstractFileSystem, path: str, source: BinaryIO) -> None:
        """Until all of it is there, the object does not stand under its name.

        A transaction of fsspec's local files ends in a copy across file systems: there, rename instead.
        """
        if isinstance(system, LocalFileSystem):
            aside = Path(f"{path}.part")
            with aside.open("wb") as sink:
                self._pour(source, sink)
            aside.rename(path)
            return
        with system.transaction, system.open(path, "wb", block_size=CHUNK_BYTES) as sink:
            self._pour(source, sink)

    def _pour(self, source: BinaryIO, sink: BinaryIO) -> None:
        while chunk := source.read(CHUNK_BYTES):
            sink.write(chunk)
            self._moved_s = time.monotonic()


def check_url(url: str) -> None:
    """ConfigError: fsspec knows no such protocol, or its package is missing. Connects to nothing."""
    try:
        for protocol in protocols_of(url):
            fsspec.get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"checkpoint.upload = {url}: {error}; for s3:// install the extra `s3`") from error


def protocols_of(url: str) -> list[str]:
    """Those that fsspec opens a URL by, of a chain (`simplecache::s3://...`) all."""
    *outer, last = url.split("::")
    names = [part.partition("://")[0] for part in outer]
    return [*names, last.partition("://")[0] if "://" in last else "file"]
