"""Raw rows become samples, or are rejected by name: the part of `prepare` that runs in workers.

A chunk of rows goes in, its outcomes come out in the same order, so the result does not depend on the
number of workers. A sample that leaves here has ids inside the embedding, at most `max_length` tokens,
and two supervised tokens in a row, which is what an anchor needs.
"""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import signal
import threading
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from protocol.errors import ModelError
from services.data.chat import ChatEncoder, Encoded
from services.data.dataset import Sample
from services.data.records import BadSample, Conversation, Tokenized, parse
from services.data.sources import MAX_LINE_BYTES, RawRow, parse_line
from services.data.turns import ChatTemplate
from services.models.hub import check_tokenizer, has_tokenizer

TOO_LONG = "too long"


class Recipe(NamedTuple):
    """What a worker needs to build its own converter; equal recipes give equal samples."""

    tokenizer: str
    template: str | None
    thinking: Literal["train", "strip"]
    embedding_rows: int
    max_length: int
    truncate: bool
    validation_ratio: float


class Accepted(NamedTuple):
    line: int
    sample: Sample
    templated: bool  # a chat, not a tokenized row
    held_out: bool  # belongs to the validation set
    notes: tuple[str, ...]


class Rejected(NamedTuple):
    line: int
    kind: str
    reason: str


class Passed(NamedTuple):
    """A line that holds no row."""

    line: int
    notes: tuple[str, ...]


Outcome = Accepted | Rejected | Passed


class Converter:
    """Tokenizer, template and limits together. Raises ModelError if they do not fit."""

    def __init__(self, recipe: Recipe) -> None:
        from transformers import AutoTokenizer

        self.recipe = recipe
        self.tokenizer: Any | None = None  # None: the folder has none, and tokenized rows need none
        self._encoder: ChatEncoder | None = None
        if not has_tokenizer(recipe.tokenizer):
            return
        try:
            self.tokenizer = AutoTokenizer.from_pretrained(recipe.tokenizer)
        except (OSError, ValueError) as error:
            raise ModelError(
                f"model.path = {recipe.tokenizer}: no tokenizer can be loaded: {error}"
            ) from None
        check_vocabulary(self.tokenizer, recipe.embedding_rows, recipe.tokenizer)

    @property
    def encoder(self) -> ChatEncoder:
        """Made at the first conversation: tokenized rows need no chat template."""
        if self._encoder is None:
            check_tokenizer(self.recipe.tokenizer, "copy the model's own there, or give tokenized rows")
            assert self.tokenizer is not None
            template = ChatTemplate(self.tokenizer, self.recipe.thinking, self.recipe.template)
            self._encoder = ChatEncoder(self.tokenizer, template)
        return self._encoder

    def convert(self, row: RawRow) -> Outcome:
        """Never raises for what is wrong with the row itself."""
        try:
            if row.payload is None:
                raise BadSample("line too long", f"more than {MAX_LINE_BYTES} bytes; split it or drop it")
            payload: Any = row.payload
            notes: tuple[str, ...] = ()
            if isinstance(payload, bytes):
                payload, notes = parse_line(payload, first=row.line == 1)
                if payload is None:
                    return Passed(row.line, notes)
            parsed = parse(payload)
            sample, more = self.encode(parsed)
            held_out = is_held_out(sample, self.recipe.validation_ratio)
            return Accepted(row.line, sample, isinstance(parsed, Conversation), held_out, notes + more)
        except BadSample as error:
            return Rejected(row.line, error.kind, str(error))

    def encode(self, parsed: Conversation | Tokenized) -> tuple[Sample, tuple[str, ...]]:
        """(sample, notes). Raises BadSample."""
        ids, mask, turns, notes = (
            Encoded(*parsed, (), ()) if isinstance(parsed, Tokenized) else self.encoder.encode(parsed)
        )
        keep, more = self._length(len(ids), turns)
        ids, mask = ids[:keep], mask[:keep]
        check_sample(ids, mask, self.recipe.embedding_rows)
        return Sample(ids.astype(np.int32), mask), notes + more

    def _length(self, length: int, turns: tuple[range, ...]) -> tuple[int, tuple[str, ...]]:
        """How many tokens are kept: all, up to the last answer that fits, or up to the limit."""
        limit = self.recipe.max_length
        if length <= limit:
            return length, ()
        if not self.recipe.truncate:
            raise BadSample(TOO_LONG, f"{length} tokens, more than data.max_length = {limit}")
        whole = [turn.stop for turn in turns if turn.stop <= limit]
        if whole:
            return whole[-1], ("turns past the limit cut off",)
        return limit, ("cut off at the limit",)


def convert_chunk(rows: list[RawRow]) -> list[Outcome]:
    """In a worker process, after `start_worker`."""
    return [_converter.convert(row) for row in rows]


def start_worker(recipe: Recipe) -> None:
    """Build the worker's converter, and end the worker when its parent dies."""
    global _converter
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    _converter = Converter(recipe)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_die_after, args=(parent,), name="parent-watch", daemon=True).start()


def _die_after(parent: Any) -> None:
    parent.join()
    os._exit(1)


_converter: Converter


def is_held_out(sample: Sample, ratio: float) -> bool:
    """A `ratio` of all prompts, whatever their answers, order and neighbours: no prompt is on both sides."""
    prompt = sample.input_ids[: int(np.argmax(sample.loss_mask))]
    return ratio > 0 and drawn_below(ratio, "validation", prompt)


def drawn_below(ratio: float, purpose: str, ids: np.ndarray) -> bool:
    """True for a `ratio` of all token rows, always the same ones."""
    digest = hashlib.blake2b(ids.astype("<i4").tobytes(), digest_size=8, person=purpose.encode()[:16])
    return int.from_bytes(digest.digest(), "big") < ratio * 2**64


def check_sample(ids: np.ndarray, mask: np.ndarray, embedding_rows: int) -> None:
    """Raise BadSample for ids outside the embedding, or a mask that no anchor can be drawn from."""
    outside = np.flatnonzero((ids < 0) | (ids >= embedding_rows))
    if len(outside):
        at = int(outside[0])
        raise BadSample(
            "ids", f"input_ids[{at}] is {ids[at]}; the target's embedding has {embedding_rows} rows"
        )
    if not mask.any():
        raise BadSample("loss mask", f"all-zero loss mask: none of {len(ids)} tokens is supervised")
    if not (mask[1:] & mask[:-1]).any():
        raise BadSample(
            "loss mask", "no two supervised tokens in a row, and an anchor needs itself and the next"
        )


def check_vocabulary(tokenizer: Any, embedding_rows: int, name: str) -> None:
    """Raise ModelError if the tokenizer has ids that the embedding has no row for."""
    token, highest = max(tokenizer.get_vocab().items(), key=lambda item: item[1])
    if highest >= embedding_rows:
        raise ModelError(
            f"{name}: the tokenizer's {token!r} has id {highest}, the embedding {embedding_rows} rows; "
            f"use the tokenizer that belongs to the model"
        )


def read_template(path: str) -> str | None:
    """The chat template in a file, None for no path. Raises ModelError if it cannot be read."""
    if not path:
        return None
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"data.chat_template = {path}: cannot be read: {error}") from None
