"""A prepared dataset, mapped read-only: what roles look samples up in, by id. Torch-free.

A folder in the layout of `datasets` (so `datasets.load_from_disk` opens it as well) and one JSON:

    data-00000.arrow ...   input_ids list<int32>, loss_mask list<uint8>, supervised int32,
                           source_file int32, source_line int64
    draftmill.json         {format, rows, fingerprint, shards: [{file, rows, bytes}], info}
    validation/            held-out samples in the same layout, there if any were held out

Opening a million samples takes 0.1 s and reads only the lengths; a sample costs 3 us and no copy:
its arrays are views of the mapped file, so they are read-only and must be copied to be changed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa

from protocol.errors import DataError

FORMAT = 1
MANIFEST = "draftmill.json"
VALIDATION = "validation"
"""The folder inside a dataset that holds its held-out samples, a dataset too."""


class Sample(NamedTuple):
    """One sample of T tokens; `loss_mask` is 1 where the drafter is supervised."""

    input_ids: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]


class Source(NamedTuple):
    """Where a sample came from: position in `info["inputs"]`, and line or row there, from 1."""

    file: int
    line: int


class Block(NamedTuple):
    """One record batch: flat columns and where each of its rows begins."""

    offsets: np.ndarray  # int32 [rows + 1], into input_ids and loss_mask
    input_ids: np.ndarray  # int32 [tokens]
    loss_mask: np.ndarray  # uint8 [tokens]
    supervised: np.ndarray  # int32 [rows]
    source_file: np.ndarray  # int32 [rows]
    source_line: np.ndarray  # int64 [rows]


class Dataset:
    """A prepared dataset of `len(self)` samples; ids are rows, from 0."""

    def __init__(self, path: Path, manifest: dict[str, Any], blocks: list[Block]) -> None:
        self.path = path
        self.fingerprint: str = manifest["fingerprint"]
        self.info: dict[str, Any] = manifest["info"]
        self._blocks = blocks
        rows = [len(block.supervised) for block in blocks]
        self._first_row = np.concatenate(([0], np.cumsum(rows, dtype=np.int64)))
        self.lengths: np.ndarray = _joined([np.diff(block.offsets) for block in blocks])
        self.supervised: np.ndarray = _joined([block.supervised for block in blocks])

    @classmethod
    def open(cls, path: Path) -> Dataset:
        """Map the dataset that `draftmill prepare` wrote to `path`.

        Raises DataError if it is missing, of another format, truncated or empty.
        """
        manifest = read_manifest(path)
        blocks = [block for shard in manifest["shards"] for block in open_shard(path, shard)]
        dataset = cls(path, manifest, blocks)
        if len(dataset) != manifest["rows"]:
            raise DataError(
                f"{path}: {len(dataset)} rows, but {MANIFEST} says {manifest['rows']}; prepare it again"
            )
        if len(dataset) == 0:
            raise DataError(f"{path}: the dataset is empty; a run needs at least one sample")
        return dataset

    def __len__(self) -> int:
        return len(self.lengths)

    def sample(self, row: int) -> Sample:
        """The tokens and mask of one row, as read-only views. Raises DataError for an unknown row."""
        block, at = self._locate(row)
        where = slice(block.offsets[at], block.offsets[at + 1])
        return Sample(block.input_ids[where], block.loss_mask[where])

    def source(self, row: int) -> Source:
        """Which input file and line the row came from."""
        block, at = self._locate(row)
        return Source(int(block.source_file[at]), int(block.source_line[at]))

    def blocks(self) -> Iterator[Block]:
        """All record batches, in row order, for one pass over everything."""
        return iter(self._blocks)

    def _locate(self, row: int) -> tuple[Block, int]:
        if not 0 <= row < len(self):
            raise DataError(f"{self.path}: sample {row} does not exist; samples are 0 to {len(self) - 1}")
        number = int(np.searchsorted(self._first_row, row, side="right")) - 1
        return self._blocks[number], row - int(self._first_row[number])


def read_manifest(path: Path) -> dict[str, Any]:
    """The JSON of a prepared dataset. Raises DataError if it is missing, broken or of another format."""
    file = path / MANIFEST
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise DataError(
            f"{path}: no prepared dataset there ({MANIFEST} is missing); run `draftmill prepare`"
        ) from None
    except NotADirectoryError:
        raise DataError(
            f"{path}: is a file; `draftmill prepare` makes a dataset of it, whose folder belongs here"
        ) from None
    except ValueError as error:
        raise DataError(f"{file}: not readable as JSON ({error}); prepare the dataset again") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT or "shards" not in manifest:
        found = manifest.get("format") if isinstance(manifest, dict) else None
        raise DataError(f"{file}: format {found!r}, this version reads {FORMAT}; prepare the dataset again")
    return manifest


def open_shard(path: Path, shard: dict[str, Any]) -> list[Block]:
    """Map one shard of the folder `path`; `shard` is its entry in the manifest."""
    file = path / shard["file"]
    found = file.stat().st_size if file.is_file() else -1
    if found != shard["bytes"]:
        state = "missing" if found < 0 else f"{found} bytes long"
        raise DataError(f"{file}: {state}, must be {shard['bytes']} bytes; prepare the dataset again")
    try:
        with pa.memory_map(str(file)) as mapped, pa.ipc.open_stream(mapped) as stream:
            return [_block(batch) for batch in stream]
    except (pa.ArrowInvalid, KeyError) as error:
        raise DataError(f"{file}: no shard of ours ({error}); prepare the dataset again") from error


def _block(batch: pa.RecordBatch) -> Block:
    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    return Block(
        ids.offsets.to_numpy(), ids.values.to_numpy(), mask.values.to_numpy(),
        batch.column("supervised").to_numpy(), batch.column("source_file").to_numpy(),
        batch.column("source_line").to_numpy(),
    )  # fmt: skip


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    whole = np.concatenate([np.empty(0, np.int32), *parts]).astype(np.int32, copy=False)
    whole.flags.writeable = False
    return whole
