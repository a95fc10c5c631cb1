"""Input files row by row, each with its line, in memory that a huge line or file does not grow.

    FILE.jsonl, .json, .ndjson   one object a line; lines over 8 MiB are refused unread
    FILE.parquet                 one object a row
    FOLDER                       what `datasets.save_to_disk` or `draftmill prepare` wrote

A position is where reading goes on: bytes in a JSONL file, rows elsewhere. Lines count from 1.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import datasets
import pyarrow as pa
import pyarrow.parquet as pq

from protocol.errors import DataError
from services.data.records import BadSample

MAX_LINE_BYTES = 8 * 2**20
READ_ROWS = 256
LINES = (".jsonl", ".json", ".ndjson")


class RawRow(NamedTuple):
    """One row as it was read; `payload` is a line's bytes, an object, or None for a line too long to read."""

    line: int
    payload: bytes | dict[str, Any] | None
    position: int  # of the row after it


def check_source(path: Path) -> None:
    """Raise DataError if the file or folder cannot be an input."""
    if not path.exists():
        raise DataError(f"{path}: no such input")
    if path.is_dir():
        if (path / "dataset_dict.json").exists():
            splits = json.loads((path / "dataset_dict.json").read_text(encoding="utf-8"))["splits"]
            raise DataError(
                f"{path}: holds the splits {', '.join(splits)}; name one, e.g. {path / splits[0]}"
            )
        if not (path / "state.json").exists():
            raise DataError(f"{path}: no folder of `datasets` (state.json is missing); name files instead")
    elif path.suffix not in (*LINES, ".parquet"):
        raise DataError(f"{path}: must be {', '.join(LINES)}, .parquet or a folder of `datasets`")


def source_size(path: Path) -> int:
    """What positions run up to."""
    if path.is_dir():
        return len(_open_folder(path))
    if path.suffix == ".parquet":
        return _open_parquet(path).metadata.num_rows
    return path.stat().st_size


def read_rows(path: Path, line: int, position: int) -> Iterator[RawRow]:
    """Rows behind `position`, of which `line` were read before. Raises DataError for a damaged file."""
    if path.is_dir():
        yield from _read_folder(path, position)
    elif path.suffix == ".parquet":
        yield from _read_parquet(path, position)
    else:
        with path.open("rb") as stream:
            stream.seek(position)
            yield from _read_lines(stream, line)


def parse_line(raw: bytes, first: bool) -> tuple[Any, tuple[str, ...]]:
    """(the row, notes) of a line of JSON; (None, notes) for a blank one. Raises BadSample."""
    notes = []
    if first and raw.startswith(codecs.BOM_UTF8):
        raw = raw[len(codecs.BOM_UTF8) :]
        notes.append("byte order mark left out")
    if raw.endswith(b"\r\n"):
        notes.append("line ended by CRLF")
    if not raw.strip():
        return None, (*notes, "blank line left out")
    if b"\0" in raw:
        raise BadSample("characters", f"a NUL byte at byte {raw.index(0)} of the line; remove it")
    try:
        return json.loads(raw.decode("utf-8")), tuple(notes)
    except UnicodeDecodeError as error:
        raise BadSample(
            "encoding", f"byte {error.start} of the line is not UTF-8; convert the file"
        ) from None
    except json.JSONDecodeError as error:
        raise BadSample("json", f"not JSON: {error.msg} at character {error.pos}") from None
    except (ValueError, RecursionError) as error:
        raise BadSample("json", f"not readable as JSON: {error}") from None


def _read_lines(stream: BinaryIO, line: int) -> Iterator[RawRow]:
    while raw := stream.readline(MAX_LINE_BYTES + 1):
        line += 1
        whole = len(raw) <= MAX_LINE_BYTES
        while not whole and raw and not raw.endswith(b"\n"):
            raw = stream.readline(MAX_LINE_BYTES)
        yield RawRow(line, raw if whole else None, stream.tell())


def _read_parquet(path: Path, position: int) -> Iterator[RawRow]:
    row = 0
    try:
        for batch in _open_parquet(path).iter_batches(batch_size=READ_ROWS):
            if row + len(batch) > position:
                for payload in batch.slice(max(0, position - row)).to_pylist():
                    position += 1
                    yield RawRow(position, payload, position)
            row += len(batch)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: row {position + 1} cannot be read: {error}") from None


def _read_folder(path: Path, position: int) -> Iterator[RawRow]:
    dataset = _open_folder(path)
    for start in range(position, len(dataset), READ_ROWS):
        columns = dataset[start : start + READ_ROWS]
        for at in range(len(next(iter(columns.values())))):
            position += 1
            yield RawRow(position, {name: values[at] for name, values in columns.items()}, position)


def _open_parquet(path: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: not readable as Parquet: {error}") from None


def _open_folder(path: Path) -> datasets.Dataset:
    try:
        loaded = datasets.load_from_disk(str(path))
    except (pa.ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{path}: `datasets` cannot load it: {error}") from None
    assert isinstance(loaded, datasets.Dataset)
    return loaded.with_format(None)
