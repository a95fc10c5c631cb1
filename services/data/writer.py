"""Writes a prepared dataset aside and renames it: a reader sees all of it or nothing. Torch-free.

    OUT/                       the finished dataset, see services/data/dataset.py
        validation/            another one: samples held out, there if any were
    .OUT.partial/              what a running (or killed) prepare has done: closed shards of both, and
        skipped.jsonl          one line for each row left out, there if any was
        journal.json           {key, parts, held_out, skipped_bytes, progress}, replaced after each shard

Whoever fails or is interrupted removes the partial folder; whoever is killed leaves it, and the next
writer with the same `key` goes on after the last closed shard: `progress` says where that is in the
input. Another key starts afresh. Memory holds a record batch or two. One writer per output (flock).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import datasets
import numpy as np

from protocol.errors import AlreadyRunning, DataError
from protocol.files import sync_folder
from services.data.dataset import FORMAT, MANIFEST, VALIDATION, Block, Dataset, Sample, Source
from services.data.shards import SCHEMA, Row, ShardWriter

JOURNAL = "journal.json"
SKIPPED = "skipped.jsonl"
Describe = Callable[[Iterator[Block]], dict[str, Any]]


class DatasetWriter:
    """A context: leaving it without `finish` leaves the disk as it was found.

    `progress` is what the last `commit` of a killed writer with the same `key` stored, or None.
    Raises DataError if the output exists, AlreadyRunning if another process is writing it.
    """

    def __init__(self, output: Path, key: str) -> None:
        if output.exists():
            raise DataError(
                f"{output}: exists already; a dataset is never overwritten: remove it or name another"
            )
        self._output = output
        self._partial = output.with_name(f".{output.name}.partial")
        self._key = key
        self.progress: Any = None
        self._skipped: BinaryIO | None = None

    def __enter__(self) -> DatasetWriter:
        self._partial.mkdir(parents=True, exist_ok=True)
        self._lock = os.open(self._partial, os.O_RDONLY | os.O_CLOEXEC)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise AlreadyRunning(
                f"{self._output}: another prepare is writing it; wait for it, or stop it"
            ) from None
        journal = self._resume()
        self._rows = ShardWriter(self._partial, journal.get("parts", []))
        self._held_out = ShardWriter(self._partial / VALIDATION, journal.get("held_out", []))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rows.abandon()
        self._held_out.abandon()
        if self._skipped is not None:
            self._skipped.close()
        if self._partial.exists():
            shutil.rmtree(self._partial)
        os.close(self._lock)

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows, in this order."""
        self._rows.add(rows)

    def hold_out(self, rows: Iterable[Row]) -> None:
        """Append rows to the validation set instead."""
        self._held_out.add(rows)

    def note_skipped(self, entry: dict[str, Any]) -> None:
        """Append a line to `skipped.jsonl`."""
        if self._skipped is None:
            self._skipped = (self._partial / SKIPPED).open("ab")
        self._skipped.write(json.dumps(entry).encode() + b"\n")

    def commit(self, progress: Any, at_least_rows: int) -> None:
        """Close shards once they hold `at_least_rows`; a later writer resumes with `progress` (JSON)."""
        if self._rows.open_rows + self._held_out.open_rows < at_least_rows:
            return
        self._rows.close_shard()
        self._held_out.close_shard()
        journal = {
            "key": self._key, "parts": self._rows.parts, "held_out": self._held_out.parts,
            "skipped_bytes": self._sync_skipped(), "progress": progress,
        }  # fmt: skip
        _write_durably(self._partial / JOURNAL, json.dumps(journal))

    def finish(self, describe: Describe) -> Dataset:
        """Make it visible under its own name, with the `info` that `describe` makes of what was written.

        Raises DataError if no row was added.
        """
        self._rows.close_shard()
        self._held_out.close_shard()
        self._sync_skipped()
        if not self._rows.parts:
            raise DataError(f"{self._output}: no sample is left to write; a dataset needs at least one")
        if self._held_out.parts:
            _complete(self._held_out, describe)
        _complete(self._rows, describe)
        self._partial.rename(self._output)
        sync_folder(self._output.parent)
        (self._output / JOURNAL).unlink(missing_ok=True)  # last: a kill before the rename still resumes
        return Dataset.open(self._output)

    def _resume(self) -> dict[str, Any]:
        """The journal of a killed writer with the same key, and nothing on disk that it does not know."""
        try:
            journal = json.loads((self._partial / JOURNAL).read_text(encoding="utf-8"))
        except FileNotFoundError:
            journal = {}
        keep = set()
        if journal.get("key") == self._key:
            self.progress = journal["progress"]
            keep = {self._partial / JOURNAL, *(self._partial / part["file"] for part in journal["parts"])}
            keep |= {self._partial / VALIDATION / part["file"] for part in journal["held_out"]}
            if journal["skipped_bytes"]:
                keep.add(self._partial / SKIPPED)
                os.truncate(self._partial / SKIPPED, journal["skipped_bytes"])
        for file in self._partial.rglob("*"):
            if file.is_file() and file not in keep:
                file.unlink()
        return journal if keep else {}

    def _sync_skipped(self) -> int:
        """Bytes of `skipped.jsonl` that are durable now."""
        if self._skipped is not None:
            self._skipped.flush()
            os.fsync(self._skipped.fileno())
        file = self._partial / SKIPPED
        return file.stat().st_size if file.exists() else 0


def write_dataset(output: Path, samples: Iterable[Sample], info: dict[str, Any]) -> Dataset:
    """Write samples that are tokenized already, e.g. of a test; `info` is stored as it is (JSON)."""
    with DatasetWriter(output, key="") as writer:
        writer.add(Row(sample, Source(0, number)) for number, sample in enumerate(samples, start=1))
        return writer.finish(lambda blocks: info)


def content_fingerprint(blocks: Iterable[Block]) -> str:
    """sha256 of all lengths, tokens and masks; how rows are cut into shards does not matter."""
    lengths, ids, masks = hashlib.sha256(), hashlib.sha256(), hashlib.sha256()
    for block in blocks:
        lengths.update(np.diff(block.offsets).astype("<i4").tobytes())
        ids.update(block.input_ids.astype("<i4", copy=False).data)
        masks.update(block.loss_mask.data)
    return hashlib.sha256(lengths.digest() + ids.digest() + masks.digest()).hexdigest()


def _complete(shards: ShardWriter, describe: Describe) -> None:
    """Write the JSON files that make the folder a dataset, for us and for `datasets.load_from_disk`."""
    folder, parts = shards.folder, shards.parts
    fingerprint = content_fingerprint(shards.blocks())
    datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(SCHEMA)).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": part["file"]} for part in parts], "_fingerprint": fingerprint[:16],
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None,
        "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    _write_durably(folder / "state.json", json.dumps(state, indent=1))
    manifest = {
        "format": FORMAT, "rows": sum(part["rows"] for part in parts),
        "fingerprint": fingerprint, "shards": parts, "info": describe(shards.blocks()),
    }  # fmt: skip
    _write_durably(folder / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
    sync_folder(folder)


def _write_durably(file: Path, text: str) -> None:
    aside = file.with_name(file.name + ".tmp")
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(file)
