"""Where the figures of each step go: always a line of JSON, and what people watch their runs with.

    run.dir/metrics.jsonl          {"timeline": 0, "step": 17, "loss": 2.31, ...}, written at once
    log.sinks = tensorboard,...    from a thread of their own: a slow or dead service delays nobody

A sink is an object with `write(at, values)` and `close()`. One that fails is dropped with one line in the
log: training does not depend on a web service. Steps before a roll-back appear again on a new timeline,
so every sink gets the timeline as a figure and none is asked to keep steps in order.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import logging
import os
import queue
import threading
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol, TextIO

from protocol.errors import ConfigError
from protocol.messages import StepAt
from services.config.schema import Config

log = logging.getLogger(__name__)

LINES = "metrics.jsonl"
_TAIL_BYTES = 1 << 16
FLUSH_S = 10.0
"""What a closing run grants its sinks."""


class Sink(Protocol):
    def write(self, at: StepAt, values: Mapping[str, float]) -> None: ...

    def close(self) -> None: ...


class TensorBoard:
    """Event files in `run.dir/tensorboard`, one sub-folder a timeline, without torch or TensorFlow."""

    def __init__(self, config: Config) -> None:
        self._folder = config.run.dir / "tensorboard"
        self._writers: dict[int, Any] = {}

    def write(self, at: StepAt, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._writer(at.timeline).add_event(Event(step=at.step, summary=Summary(value=scalars)))

    def _writer(self, timeline: int) -> Any:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if timeline not in self._writers:
            self._writers[timeline] = EventFileWriter(str(self._folder / f"timeline-{timeline}"))
        return self._writers[timeline]

    def close(self) -> None:
        for writer in self._writers.values():
            writer.close()


class Logged:
    """Weights & Biases, or trackio, which has the same interface: `init`, `log`, `finish`.

    The run's folder name is the run's name; a coordinator that returns goes on in the same W&B run.
    """

    def __init__(self, module: str, config: Config) -> None:
        self._api = importlib.import_module(module)
        name, project = config.run.dir.name, config.log.project
        if module == "wandb":
            self._api.init(project=project, name=name, id=name, resume="allow", dir=str(config.run.dir))
        else:
            self._api.init(project=project, name=name, resume="allow")

    def write(self, at: StepAt, values: Mapping[str, float]) -> None:
        self._api.log({**values, "step": at.step, "timeline": at.timeline})

    def close(self) -> None:
        self._api.finish()


SINKS: dict[str, Callable[[Config], Sink]] = {
    "tensorboard": TensorBoard,
    "wandb": lambda config: Logged("wandb", config),
    "trackio": lambda config: Logged("trackio", config),
}


def check_sinks(names: Iterable[str]) -> None:
    """ConfigError for one whose package is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise ConfigError(
                f"log.sinks = {name}: the package {name} is missing; pip install draftmill[{name}]"
            )


class StepLog:
    """All sinks of a run. ConfigError: a wanted one is not installed."""

    def __init__(
        self,
        config: Config,
        known: Mapping[str, Callable[[Config], Sink]] = SINKS,
        here: StepAt | None = None,
    ) -> None:
        """`here` is the ledger's last step, if known: what an older ledger repeats is written again."""
        if known is SINKS:
            check_sinks(config.log.sinks)
        newest = _newest(config.run.dir / LINES)
        self._newest = min(newest, here) if newest is not None and here is not None else newest
        self._lines = _lines(config.run.dir / LINES)
        self._queue: queue.SimpleQueue[tuple[StepAt, dict[str, float]] | None] = queue.SimpleQueue()
        self._wanted: list[tuple[str, Callable[[Config], Sink]]] = [(n, known[n]) for n in config.log.sinks]
        self._config = config
        self._thread = threading.Thread(target=self._run, name="sinks", daemon=True)
        if self._wanted:
            self._thread.start()

    def write(self, at: StepAt, values: Mapping[str, float]) -> None:
        """At once into the JSONL; the others hear of it when they have time. 20 us.

        Once: drafters tell a coordinator that is new the last few steps again.
        """
        if self._newest is not None and at <= self._newest:
            return
        self._newest = at
        self._lines.write(json.dumps({"timeline": at.timeline, "step": at.step, **values}) + "\n")
        if self._wanted:
            self._queue.put((at, dict(values)))

    def close(self) -> None:
        """Flush; sinks that take longer than FLUSH_S lose their last figures, the JSONL does not."""
        self._lines.close()
        self._queue.put(None)
        if self._wanted:
            self._thread.join(FLUSH_S)

    def _run(self) -> None:
        sinks: dict[str, Sink] = {}
        for name, make in self._wanted:
            self._try(name, sinks, partial(_open, sinks, name, make, self._config))
        while (item := self._queue.get()) is not None:
            for name, sink in list(sinks.items()):
                self._try(name, sinks, partial(sink.write, *item))
        for name, sink in list(sinks.items()):
            self._try(name, sinks, sink.close)

    def _try(self, name: str, sinks: dict[str, Sink], act: Callable[[], None]) -> None:
        try:
            act()
        except Exception:  # whatever a foreign service raises, the run goes on without it
            log.exception("a sink failed and is dropped", extra={"sink": name})
            sinks.pop(name, None)


def _open(sinks: dict[str, Sink], name: str, make: Callable[[Config], Sink], config: Config) -> None:
    sinks[name] = make(config)


def _newest(file: Path) -> StepAt | None:
    """Of the last whole line; None: there is none near the end, or no file."""
    try:
        with file.open("rb") as stream:
            stream.seek(max(0, file.stat().st_size - _TAIL_BYTES))
            lines = stream.read().splitlines()
    except FileNotFoundError:
        return None
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError, OverflowError):
            told = json.loads(line)
            return StepAt(int(told["timeline"]), int(told["step"]))
    return None


def _lines(file: Path) -> TextIO:
    """To be appended to, after the whole lines; what a power cut left of a line gets an end."""
    stream = file.open("a", buffering=1, encoding="utf-8")
    if stream.tell():
        with file.open("rb") as last:
            last.seek(-1, os.SEEK_END)
            if last.read() != b"\n":
                stream.write("\n")
    return stream
