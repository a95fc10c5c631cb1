"""`draftmill regenerate`: prompts become the target's own answers, exactly as many as were asked for.

    read and check all prompts -> ask what is missing (our own generation, or a server) -> append to OUT

A drafter learns what the target says, not what a dataset's author would have liked it to say. OUT is
JSON lines in order of completion, an answer a line:

    {"source": [input, line], "answer": number, "ask": hash, "finish": "stop" | "length",
     "messages": [...], "tools": [...], "input_ids": [...], "prompt_length": n}

Our own generation writes the tokens as they were generated, so `prepare` needs no template to find the
answer again. Stopped at any time and started again it asks only what OUT lacks; OUT made with other
options or of other prompts is refused. Torch-free: who answers is handed in.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple, Protocol

from protocol.errors import AlreadyRunning, DataError
from services.data.records import BadSample, parse_prompt
from services.data.sources import RawRow, check_source, parse_line, read_rows

WINDOW_ANSWERS = 1024


@dataclass(frozen=True)
class Ask:
    """What is asked of the target; other values give other answers, so OUT remembers them."""

    model: str
    answers: int = 1  # of each prompt
    max_new_tokens: int = 2048
    temperature: float = 0.0  # 0: greedy
    top_p: float = 1.0
    seed: int = 0
    thinking: bool = True

    def __post_init__(self) -> None:
        if self.answers < 1 or self.max_new_tokens < 1:
            raise DataError(
                f"answers {self.answers}, max_new_tokens {self.max_new_tokens}: must be 1 or more"
            )
        if self.answers > 1 and self.temperature == 0.0:
            raise DataError(
                f"answers {self.answers} at temperature 0 are all the same; raise the temperature"
            )

    def sha256(self) -> str:
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:16]


class Asked(NamedTuple):
    """One answer that is wanted: the `number`-th of a prompt."""

    source: tuple[int, int]  # input, line
    number: int
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None


class Answer(NamedTuple):
    """What the target said. `tokens` is (input ids with the prompt's, prompt length), if they are known."""

    asked: Asked
    message: dict[str, Any]
    finish: Literal["stop", "length"]
    tokens: tuple[list[int], int] | None


class Done(NamedTuple):
    """Of an answer that is there already."""

    finish: str
    prompt: bytes


class Refused(NamedTuple):
    """A prompt that cannot be answered, whoever is asked again."""

    asked: Asked
    reason: str


class Answerer(Protocol):
    def answers(self, asked: Sequence[Asked]) -> Iterator[Answer | Refused]:
        """One for each of `asked`, in any order."""


class Summary(NamedTuple):
    """Of OUT as it is now; `skipped` counts prompts by the reason they were left out for."""

    prompts: int
    answers: int
    stopped: int
    cut: int  # at max_new_tokens
    skipped: dict[str, int]


def regenerate(
    inputs: Sequence[Path], output: Path, answerer: Answerer, ask: Ask, *,
    on_bad_line: Literal["refuse", "skip"] = "refuse", on_progress: Callable[[int, int], None] | None = None,
) -> Summary:  # fmt: skip
    """Append to `output` whatever is missing; `on_progress` gets (answers there, answers wanted).

    Raises DataError for a bad prompt that is not skipped, before anything is asked, and for an output
    of other options.
    """
    for path in inputs:
        check_source(path)
    if not output.absolute().parent.is_dir():
        raise DataError(f"{output}: there is no folder {output.parent}; make it first")
    skipped: Counter[str] = Counter()
    prompts = sum(1 for _ in _read_prompts(inputs, on_bad_line, skipped))
    finishes: Counter[str] = Counter()
    with output.open("a+b") as stream:
        done = _resume(stream, output, ask)
        finishes.update(answer.finish for answer in done.values())
        missing = _missing(_read_prompts(inputs, on_bad_line, Counter()), ask, done, output)
        refused = 0
        while window := list(islice(missing, WINDOW_ANSWERS)):
            for answer in answerer.answers(window):
                if isinstance(answer, Refused):
                    _refuse_or_skip(answer, inputs, on_bad_line, skipped)
                    refused += 1
                    continue
                stream.write(json.dumps(_line(answer, ask), ensure_ascii=False).encode() + b"\n")
                stream.flush()  # a kill of this process loses nothing that is written
                finishes[answer.finish] += 1
                if on_progress is not None:
                    on_progress(finishes.total() + refused, prompts * ask.answers)
            os.fsync(stream.fileno())
    if finishes.total() + refused != prompts * ask.answers:
        raise DataError(
            f"{output}: {finishes.total()} answers to {prompts} prompts; it was changed meanwhile"
        )
    return Summary(prompts, finishes.total(), finishes["stop"], finishes["length"], dict(skipped))


class WhenAsked:
    """An answerer that is made by the first question: wrong inputs are found before a model is loaded."""

    def __init__(self, make: Callable[[], Answerer]) -> None:
        self._make = make
        self._made: Answerer | None = None

    def answers(self, asked: Sequence[Asked]) -> Iterator[Answer | Refused]:
        if self._made is None:
            self._made = self._make()
        return self._made.answers(asked)


def _read_prompts(inputs: Sequence[Path], on_bad_line: str, skipped: Counter[str]) -> Iterator[Asked]:
    """The first answer of every prompt."""
    for number, path in enumerate(inputs):
        for row in read_rows(path, 0, 0):
            try:
                payload = _payload(row)
                if payload is not None:
                    parsed = parse_prompt(payload)
                    yield Asked((number, row.line), 0, parsed.messages, parsed.tools)
            except BadSample as error:
                if on_bad_line == "refuse":
                    raise DataError(
                        f"{path}, line {row.line}: {error} (correct it, or set data.on_bad_line = skip)"
                    ) from None
                skipped[error.kind] += 1


def _payload(row: RawRow) -> Any:
    if row.payload is None:
        raise BadSample("line too long", "more bytes than a line may have; split it or drop it")
    return parse_line(row.payload, row.line == 1)[0] if isinstance(row.payload, bytes) else row.payload


def _missing(
    prompts: Iterator[Asked], ask: Ask, done: dict[tuple[int, int, int], Done], output: Path
) -> Iterator[Asked]:
    for first in prompts:
        for number in range(ask.answers):
            there = done.get((*first.source, number))
            if there is None:
                yield first._replace(number=number)
            elif there.prompt != _prompt_digest(first.messages, first.tools):
                raise DataError(
                    f"{output}: has an answer to another prompt than input {first.source[0]}, line "
                    f"{first.source[1]}; give the inputs that it was made from, or name another output"
                )


def _prompt_digest(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> bytes:
    text = json.dumps([messages, tools or None], sort_keys=True)
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _resume(stream: BinaryIO, output: Path, ask: Ask) -> dict[tuple[int, int, int], Done]:
    """By (input, line, number) every answer that is there; a line cut by a kill is removed."""
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise AlreadyRunning(f"{output}: another process is writing it; wait for it, or stop it") from None
    done: dict[tuple[int, int, int], Done] = {}
    whole = 0
    stream.seek(0)
    for number, raw in enumerate(stream, start=1):
        if not raw.endswith(b"\n"):
            break
        whole += len(raw)
        try:
            row = json.loads(raw)
            key, made_with = (*row["source"], row["answer"]), row["ask"]
            answer = Done(row["finish"], _prompt_digest(row["messages"][:-1], row.get("tools")))
        except (ValueError, KeyError, TypeError):
            raise DataError(
                f"{output}, line {number}: no answer of `draftmill regenerate`; name another"
            ) from None
        if made_with != ask.sha256():
            raise DataError(f"{output}: made for another model or with other options; name another output")
        if key in done:
            raise DataError(f"{output}, line {number}: an answer that is there already; remove the line")
        done[key] = answer
    stream.truncate(whole)
    stream.seek(0, os.SEEK_END)
    return done


def _refuse_or_skip(
    refused: Refused, inputs: Sequence[Path], on_bad_line: str, skipped: Counter[str]
) -> None:
    file, line = refused.asked.source
    if on_bad_line == "refuse":
        raise DataError(
            f"{inputs[file]}, line {line}: {refused.reason} (correct it, or set data.on_bad_line = skip)"
        )
    skipped["refused"] += 1


def _line(answer: Answer, ask: Ask) -> dict[str, Any]:
    asked = answer.asked
    line: dict[str, Any] = {
        "source": asked.source, "answer": asked.number, "ask": ask.sha256(), "finish": answer.finish,
        "messages": [*asked.messages, answer.message],
    }  # fmt: skip
    if asked.tools:
        line["tools"] = asked.tools
    if answer.tokens is not None:
        line["input_ids"], line["prompt_length"] = answer.tokens
    return line
