"""One folder's Arrow shards, written row by row and closed when the caller says. Torch-free.

A shard is a stream of record batches of 1,024 rows; it is fsynced when it is closed, and only closed
shards count. Memory holds one record batch.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import pyarrow as pa

from services.data.dataset import Block, Sample, Source, open_shard

BATCH_ROWS = 1024
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


class ShardWriter:
    """Appends to `folder`, behind the closed shards `parts` ([{file, rows, bytes}])."""

    def __init__(self, folder: Path, parts: list[dict[str, Any]]) -> None:
        self.folder = folder
        self.parts = parts
        self._pending: list[Row] = []
        self._file: BinaryIO | None = None
        self._stream: Any = None
        self._written = 0

    @property
    def open_rows(self) -> int:
        """Rows that no closed shard holds yet."""
        return self._written + len(self._pending)

    def add(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self._pending.append(row)
            if len(self._pending) == BATCH_ROWS:
                self._write_batch()

    def close_shard(self) -> None:
        """Make everything added durable. An empty shard is not written."""
        self._write_batch()
        if self._file is None:
            return
        self._stream.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        name, size = Path(self._file.name).name, self._file.tell()
        self._file.close()
        self.parts.append({"file": name, "rows": self._written, "bytes": size})
        self._file, self._stream, self._written = None, None, 0

    def abandon(self) -> None:
        """Close the file as it is."""
        if self._file is not None:
            self._file.close()

    def blocks(self) -> Iterator[Block]:
        """Everything in closed shards, one shard mapped at a time."""
        for part in self.parts:
            yield from open_shard(self.folder, part)

    def _write_batch(self) -> None:
        if not self._pending:
            return
        if self._file is None:
            self.folder.mkdir(exist_ok=True)
            self._file = (self.folder / f"data-{len(self.parts):05d}.arrow").open("wb")
            self._stream = pa.ipc.new_stream(self._file, SCHEMA)
        self._stream.write_batch(_record_batch(self._pending))
        self._written += len(self._pending)
        self._pending = []


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
