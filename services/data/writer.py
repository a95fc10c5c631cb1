"""Writes a prepared dataset aside and renames it: a reader sees all of it or nothing. Torch-free.

    OUT/                       the finished dataset, see services/data/dataset.py
    .OUT.partial/              what a running (or killed) prepare has done
        data-00000.arrow       a closed shard, fsynced
        skipped.jsonl          one line for each row left out, there if any was
        journal.json           {key, parts, skipped_bytes, progress}, replaced after each shard

Whoever fails or is interrupted removes the partial folder; whoever is killed leaves it, and the next
writer with the same `key` goes on after the last closed shard: `progress` says where that is in the
input. Another key starts afresh. Memory holds one record batch. One writer per output (flock).
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
from typing import Any, NamedTuple

import datasets
import numpy as np
import pyarrow as pa

from protocol.errors import AlreadyRunning, DataError
from services.data.dataset import FORMAT, MANIFEST, Block, Dataset, Sample, Source, open_shard

BATCH_ROWS = 1024
JOURNAL = "journal.json"
SKIPPED = "skipped.jsonl"
SCHEMA = pa.schema(
    [
        pa.field("input_ids", pa.list_(pa.int32())),
        pa.field("loss_mask", pa.list_(pa.uint8())),
        pa.field("supervised", pa.int32()),
        pa.field("source_file", pa.int32()),
        pa.field("source_line", pa.int64()),
    ]
)


class Row(NamedTuple):
    """A sample and where it came from."""

    sample: Sample
    source: Source


class DatasetWriter:
    """A context: leaving it without `finish` leaves the disk as it was found.

    `progress` is what the last `commit` of an interrupted writer with the same `key` stored, or None.
    """

    def __init__(self, output: Path, key: str) -> None:
        if output.exists():
            raise DataError(
                f"{output}: exists already; a dataset is never overwritten: remove it or name another"
            )
        self._output = output
        self._partial = output.with_name(f".{output.name}.partial")
        self._key = key
        self._parts: list[dict[str, Any]] = []
        self.progress: Any = None
        self._pending: list[Row] = []
        self._stream: pa.RecordBatchStreamWriter | None = None
        self._file: Any = None
        self._skipped: Any = None
        self._rows_in_part = 0

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
        self._resume()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in (self._file, self._skipped):
            if file is not None:
                file.close()
        if self._partial.exists():
            shutil.rmtree(self._partial)
        os.close(self._lock)

    def add(self, rows: Iterable[Row]) -> None:
        """Append rows, in this order."""
        for row in rows:
            self._pending.append(row)
            if len(self._pending) == BATCH_ROWS:
                self._write_batch()

    def note_skipped(self, entry: dict[str, Any]) -> None:
        """Append a line to `skipped.jsonl`."""
        if self._skipped is None:
            self._skipped = (self._partial / SKIPPED).open("ab")
        self._skipped.write(json.dumps(entry).encode() + b"\n")

    def commit(self, progress: Any, at_least_rows: int) -> None:
        """Close the shard if it holds `at_least_rows`; a later writer resumes with `progress` (JSON)."""
        if self._rows_in_part + len(self._pending) >= at_least_rows:
            self._close_part()
            journal = {"key": self._key, "parts": self._parts, "progress": progress}
            journal["skipped_bytes"] = self._sync_skipped()
            _write_durably(self._partial / JOURNAL, json.dumps(journal))

    def finish(self, describe: Callable[[Iterator[Block]], dict[str, Any]]) -> Dataset:
        """Make it visible under its own name, with the `info` that `describe` makes of what was written.

        Raises DataError if no row was added.
        """
        self._close_part()
        self._sync_skipped()
        if not self._parts:
            raise DataError(f"{self._output}: no sample is left to write; a dataset needs at least one")
        info = describe(self._blocks())
        fingerprint = content_fingerprint(self._blocks())
        _write_datasets_files(self._partial, [part["file"] for part in self._parts], fingerprint)
        manifest = {
            "format": FORMAT, "rows": sum(part["rows"] for part in self._parts),
            "fingerprint": fingerprint, "shards": self._parts, "info": info,
        }  # fmt: skip
        _write_durably(self._partial / MANIFEST, json.dumps(manifest, indent=1, sort_keys=True))
        os.fsync(self._lock)
        self._partial.rename(self._output)
        _fsync_folder(self._output.parent)
        (self._output / JOURNAL).unlink(missing_ok=True)  # last: a kill before the rename still resumes
        return Dataset.open(self._output)

    def _resume(self) -> None:
        journal = self._partial / JOURNAL
        try:
            found = json.loads(journal.read_text(encoding="utf-8"))
        except FileNotFoundError:
            found = {"key": None, "parts": []}
        keep = set()
        if found["key"] == self._key:
            self._parts, self.progress = found["parts"], found["progress"]
            keep = {JOURNAL, *(part["file"] for part in self._parts)}
            if found["skipped_bytes"]:
                keep.add(SKIPPED)
                os.truncate(self._partial / SKIPPED, found["skipped_bytes"])
        for file in self._partial.iterdir():
            if file.name not in keep:
                file.unlink()

    def _blocks(self) -> Iterator[Block]:
        """Everything written, one shard mapped at a time."""
        for part in self._parts:
            yield from open_shard(self._partial, part)

    def _sync_skipped(self) -> int:
        """Bytes of `skipped.jsonl` that are durable now."""
        if self._skipped is not None:
            self._skipped.flush()
            os.fsync(self._skipped.fileno())
        file = self._partial / SKIPPED
        return file.stat().st_size if file.exists() else 0

    def _write_batch(self) -> None:
        if not self._pending:
            return
        if self._stream is None:
            self._file = (self._partial / f"data-{len(self._parts):05d}.arrow").open("wb")
            self._stream = pa.ipc.new_stream(self._file, SCHEMA)
        self._stream.write_batch(_record_batch(self._pending))
        self._rows_in_part += len(self._pending)
        self._pending = []

    def _close_part(self) -> None:
        self._write_batch()
        if self._stream is None:
            return
        self._stream.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        size = self._file.tell()
        self._file.close()
        self._parts.append({"file": Path(self._file.name).name, "rows": self._rows_in_part, "bytes": size})
        self._stream, self._file, self._rows_in_part = None, None, 0


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


def _record_batch(rows: list[Row]) -> pa.RecordBatch:
    samples = [row.sample for row in rows]
    offsets = np.cumsum([0, *(len(sample.input_ids) for sample in samples)], dtype=np.int32)
    ids = np.concatenate([sample.input_ids for sample in samples]).astype(np.int32, copy=False)
    mask = np.concatenate([sample.loss_mask for sample in samples]).astype(np.uint8, copy=False)
    columns = [
        pa.ListArray.from_arrays(offsets, pa.array(ids)),
        pa.ListArray.from_arrays(offsets, pa.array(mask)),
        pa.array([int(sample.loss_mask.sum()) for sample in samples], pa.int32()),
        pa.array([row.source.file for row in rows], pa.int32()),
        pa.array([row.source.line for row in rows], pa.int64()),
    ]
    return pa.RecordBatch.from_arrays(columns, schema=SCHEMA)


def _write_datasets_files(folder: Path, files: list[str], fingerprint: str) -> None:
    """The two JSON files that `datasets.load_from_disk` wants beside the shards."""
    datasets.DatasetInfo(features=datasets.Features.from_arrow_schema(SCHEMA)).write_to_directory(str(folder))
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in files], "_fingerprint": fingerprint[:16],
        "_format_columns": None, "_format_kwargs": {}, "_format_type": None,
        "_output_all_columns": False, "_split": None,
    }  # fmt: skip
    _write_durably(folder / "state.json", json.dumps(state, indent=1))


def _write_durably(file: Path, text: str) -> None:
    aside = file.with_name(file.name + ".tmp")
    with aside.open("w", encoding="utf-8") as stream:
        stream.write(text)
        stream.flush()
        os.fsync(stream.fileno())
    aside.replace(file)


def _fsync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
