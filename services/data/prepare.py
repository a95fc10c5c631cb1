"""`draftmill prepare`: chats and tokenized completions become one dataset, or nothing changes on disk.

    read -> chunk -> convert (here, or in `data.workers` processes) -> write aside -> describe -> rename

Every row of every input is in the dataset, or in `skipped.jsonl` beside it with its reason, or the
whole is refused by the name of the first bad row. Killed and started again with the same inputs and
options it goes on where the last closed shard ended, with no row lost or doubled. Memory: a few
chunks of 256 rows, whatever the input's size. One core converts 2,500 chats of 70 tokens a second.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from protocol.errors import ConfigError, DataError, ModelError
from services.config.schema import Data
from services.data.convert import (
    TOO_LONG,
    Accepted,
    Converter,
    Outcome,
    Recipe,
    Rejected,
    convert_chunk,
    drawn_below,
    read_template,
    start_worker,
)
from services.data.dataset import Source
from services.data.shards import Row
from services.data.sources import LINES, RawRow, check_source, read_rows, source_size
from services.data.statistics import describe
from services.data.writer import DatasetWriter

CHUNK_ROWS = 256
CHUNK_BYTES = 4 * 2**20
SHARD_ROWS = 20_000


class Chunk(NamedTuple):
    """Rows of one input, and where reading goes on behind them."""

    file: int
    rows: list[RawRow]

    @property
    def line(self) -> int:
        return self.rows[-1].line

    @property
    def position(self) -> int:
        return self.rows[-1].position


class Progress(NamedTuple):
    """For a progress bar: how much of the input is behind us, from 0 to 1, and rows written and skipped."""

    share: float
    written: int
    skipped: int


def prepare(
    inputs: Sequence[Path], output: Path, model: str, options: Data,
    on_progress: Callable[[Progress], None] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Write the dataset `output` from `inputs`, in this order; returns its `info` (JSON-able).

    Raises DataError for a bad row that `options` do not skip, for an output that exists and for inputs
    that leave no sample; ModelError if tokenizer, template and embedding do not fit each other.
    """
    if not inputs:
        raise DataError("no input to prepare; name at least one file or folder")
    if options.weights and len(options.weights) != len(inputs):
        raise ConfigError(f"data.weights = {options.weights}: must be one for each of {len(inputs)} inputs")
    for path in inputs:
        check_source(path)
    recipe = Recipe(
        tokenizer=model, template=read_template(options.chat_template), thinking=options.thinking,
        embedding_rows=embedding_rows(model), max_length=options.max_length,
        truncate=options.on_too_long == "truncate", validation_ratio=options.validation_ratio,
    )  # fmt: skip
    converter = Converter(recipe)
    with DatasetWriter(output, key=_resume_key(inputs, recipe, options)) as writer:
        counts = Counts.resumed(writer.progress)
        sizes = [source_size(path) for path in inputs]
        chunks = _chunks(inputs, counts.file, counts.line, counts.position)
        for chunk, outcomes in _converted(chunks, converter, options.workers):
            _keep(writer, counts, chunk, outcomes, inputs[chunk.file], options)
            writer.commit(counts.as_json(), SHARD_ROWS)
            if on_progress is not None:
                done = sum(sizes[: chunk.file]) + chunk.position
                on_progress(Progress(done / max(1, sum(sizes)), counts.written, counts.skipped.total()))
        info = _info(inputs, converter, options, counts)
        dataset = writer.finish(lambda blocks: {**info, "statistics": describe(blocks)})
        return dataset.info


class Counts:
    """How far the input is read, and what became of it so far."""

    def __init__(self) -> None:
        self.file, self.line, self.position = 0, 0, 0
        self.written, self.held_out, self.templated, self.copies = 0, 0, 0, 0
        self.skipped: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()

    @classmethod
    def resumed(cls, stored: dict[str, Any] | None) -> Counts:
        counts = cls()
        if stored is not None:
            counts.file, counts.line, counts.position = stored["file"], stored["line"], stored["position"]
            for name in ("written", "held_out", "templated", "copies"):
                setattr(counts, name, stored[name])
            counts.skipped.update(stored["skipped"])
            counts.notes.update(stored["notes"])
        return counts

    def as_json(self) -> dict[str, Any]:
        return {**vars(self), "skipped": dict(self.skipped), "notes": dict(self.notes)}


def _keep(
    writer: DatasetWriter, counts: Counts, chunk: Chunk, outcomes: list[Outcome], path: Path, options: Data
) -> None:
    """Write what was accepted; skip what was rejected, or refuse all by its name."""
    rows, held_out = [], []
    for outcome in outcomes:
        if isinstance(outcome, Rejected):
            _refuse_or_skip(writer, counts, outcome, path, options)
            continue
        counts.notes.update(outcome.notes)
        if isinstance(outcome, Accepted):
            counts.templated += outcome.templated
            row = Row(outcome.sample, Source(chunk.file, outcome.line))
            if outcome.held_out:
                held_out.append(row)
            else:
                rows += [row] * _copies(row, options.weights[chunk.file] if options.weights else 1.0, counts)
    writer.add(rows)
    writer.hold_out(held_out)
    counts.written += len(rows)
    counts.held_out += len(held_out)
    counts.file, counts.line, counts.position = chunk.file, chunk.line, chunk.position


def _copies(row: Row, weight: float, counts: Counts) -> int:
    """`weight` times on average: its whole part always, the rest for a share of the samples."""
    copies = int(weight) + drawn_below(weight % 1.0, "weight", row.sample.input_ids)
    if copies != 1:
        counts.notes["left out by its weight" if copies == 0 else "repeated by its weight"] += 1
    counts.copies += max(0, copies - 1)
    return copies


def _refuse_or_skip(writer: DatasetWriter, counts: Counts, bad: Rejected, path: Path, options: Data) -> None:
    option, choice = "data.on_bad_line", options.on_bad_line
    if bad.kind == TOO_LONG:
        option, choice = "data.on_too_long", "skip" if options.on_too_long == "skip" else "refuse"
    if choice == "refuse":
        unit = "line" if path.suffix in LINES and path.is_file() else "row"
        raise DataError(f"{path}, {unit} {bad.line}: {bad.reason} (correct it, or set {option} = skip)")
    counts.skipped[bad.kind] += 1
    writer.note_skipped({"input": str(path), "line": bad.line, "kind": bad.kind, "reason": bad.reason})


def _chunks(inputs: Sequence[Path], file: int, line: int, position: int) -> Iterator[Chunk]:
    for number in range(file, len(inputs)):
        rows: list[RawRow] = []
        size = 0
        for row in read_rows(inputs[number], line, position):
            rows.append(row)
            size += len(row.payload) if isinstance(row.payload, bytes) else 0
            if len(rows) == CHUNK_ROWS or size > CHUNK_BYTES:
                yield Chunk(number, rows)
                rows, size = [], 0
        if rows:
            yield Chunk(number, rows)
        line, position = 0, 0


def _converted(
    chunks: Iterator[Chunk], converter: Converter, workers: int
) -> Iterator[tuple[Chunk, list[Outcome]]]:
    """Chunks with their outcomes, in order; at most two chunks a worker are under way."""
    if workers == 0:
        for chunk in chunks:
            yield chunk, [converter.convert(row) for row in chunk.rows]
        return
    spawn = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, spawn, initializer=start_worker, initargs=(converter.recipe,))
    waiting: deque[tuple[Chunk, Future[list[Outcome]]]] = deque()
    try:
        for chunk in chunks:
            waiting.append((chunk, pool.submit(convert_chunk, chunk.rows)))
            if len(waiting) == 2 * workers:
                done, future = waiting.popleft()
                yield done, future.result()
        while waiting:
            done, future = waiting.popleft()
            yield done, future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def embedding_rows(model: str) -> int:
    """Rows of the target's embedding, from its configuration alone. Raises ModelError."""
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(model)
    except (OSError, ValueError) as error:
        raise ModelError(f"model.path = {model}: no configuration can be loaded: {error}") from None
    rows = getattr(config.get_text_config(), "vocab_size", None)
    if not isinstance(rows, int):
        raise ModelError(f"model.path = {model}: its configuration has no vocab_size")
    return rows


def tokenizer_fingerprint(tokenizer: Any) -> str:
    """sha256 of the tokenizer's own serialization."""
    text = tokenizer.backend_tokenizer.to_str() if tokenizer.is_fast else json.dumps(tokenizer.get_vocab())
    return hashlib.sha256(text.encode()).hexdigest()


def _resume_key(inputs: Sequence[Path], recipe: Recipe, options: Data) -> str:
    files = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in inputs]
    parts = [files, recipe, options.on_bad_line, options.on_too_long, options.weights, CHUNK_ROWS, SHARD_ROWS]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _info(inputs: Sequence[Path], converter: Converter, options: Data, counts: Counts) -> dict[str, Any]:
    template = converter.encoder.template.fingerprint if counts.templated else None
    tokenizer = converter.tokenizer
    return {
        "inputs": [str(path) for path in inputs],
        "model": converter.recipe.tokenizer,
        "embedding_rows": converter.recipe.embedding_rows,
        "tokenizer_sha256": None if tokenizer is None else tokenizer_fingerprint(tokenizer),
        "template_sha256": template,
        "thinking": options.thinking,
        "max_length": options.max_length,
        "on_bad_line": options.on_bad_line,
        "on_too_long": options.on_too_long,
        "weights": list(options.weights),
        "copies_by_weight": counts.copies,
        "validation_rows": counts.held_out,
        "skipped": dict(sorted(counts.skipped.items())),
        "notes": dict(sorted(counts.notes.items())),
    }
