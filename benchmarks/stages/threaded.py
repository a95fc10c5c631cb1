"""One process, three threads, three queues: what benchmarks/threads.py measures and describes."""

from __future__ import annotations

import itertools
import queue
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor

from protocol.messages import BatchId, StepTry
from services.config.schema import Config
from services.data.batch import HostBatch, gather
from services.data.plan import Schedule
from services.data.training_data import TrainingData
from services.dflash.taps import packed_rows
from services.drafter.reduce import LocalReducer
from services.drafter.start import device_of as drafter_device
from services.target.forward import compile_layers
from services.target.start import device_of as target_device
from stages.alone import random_drafter, wait
from stages.shapes import random_target

PATIENCE_S = 0.5  # between two looks whether another thread has failed
SETTLING = 4  # steps before the window
WARM_STEPS = 2


class Stopped(Exception):
    """The measurement is over, or another thread has failed."""


class Computed(NamedTuple):
    """A pack on the target's GPU, complete once `event` is."""

    batch: HostBatch
    features_TF: Tensor
    event: torch.cuda.Event | None


class Copied(NamedTuple):
    """A pack in a pinned buffer, which goes back to the copier."""

    batch: HostBatch
    buffer: Tensor


class Threads:
    """The whole pipeline; `commits` grows by (when, tokens) with each step."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.target_device, self.drafter_device = target_device(config, 0), drafter_device(config, 0)
        if config.target.threads:
            torch.set_num_threads(config.target.threads)
        self.data = TrainingData.open(config.data)
        self.batches = Schedule(config, self.data).epoch(0).batches
        self.target = random_target(config.model, self.target_device)
        self.drafter = random_drafter(config, self.drafter_device)
        wait(self.target_device)
        wait(self.drafter_device)
        if config.target.compile:
            compile_layers(self.target)
        self.computed: queue.Queue[Computed] = queue.Queue(1)
        self.copied: queue.Queue[Copied] = queue.Queue(config.target.slots)
        self.buffers: queue.Queue[Tensor] = queue.Queue()
        for _ in range(config.target.slots):
            self.buffers.put(self._buffer())
        self.drafter_warm = threading.Event()
        self.commits: list[tuple[float, int]] = []
        self.waited_s: defaultdict[str, float] = defaultdict(float)
        self.failure = ""
        self._stop = threading.Event()
        loops = {"target": self._compute, "copier": self._copy, "drafter": self._train}
        self._threads = [
            threading.Thread(target=self._guarded, args=(name, loop), name=name, daemon=True)
            for name, loop in loops.items()
        ]

    def observe(self, window_s: float, until_s: float) -> None:
        """Run, at the latest until `until_s` (perf_counter)."""
        for thread in self._threads:
            thread.start()
        while time.perf_counter() < until_s and not self._stop.wait(0.05):
            settled = self.commits[SETTLING:]
            if settled and time.perf_counter() > settled[0][0] + window_s:
                break
        self._stop.set()
        for thread in self._threads:
            thread.join(20.0)

    def _buffer(self) -> Tensor:
        shape = self.drafter.shape
        return torch.zeros(
            self.config.plan.token_budget, shape.feature_size, dtype=self.target.dtype,
            pin_memory=self.target_device.type == "cuda",
        )  # fmt: skip

    # ---- threads ------------------------------------------------------------------------------

    def _compute(self) -> None:
        taps, edges = self.drafter.shape.target_layer_ids, self.config.plan.bucket_edges
        self._until(self.drafter_warm)  # one compiles at a time
        for samples in itertools.cycle(self.batches):
            batch = gather(self.data.of(0), samples, edges=edges, vocabulary=self.target.config.vocab_size)
            ids_BS = torch.zeros(len(batch.documents), batch.padded_length, dtype=torch.int64)
            batch.fill(ids_BS)
            rows_T = packed_rows(batch.lengths, batch.padded_length).to(self.target_device)
            with torch.inference_mode():
                output = self.target.base(
                    input_ids=ids_BS.to(self.target_device), use_cache=False, output_hidden_states=True
                )
                joined = torch.cat([output.hidden_states[tap + 1] for tap in taps], dim=-1)
                features_TF = joined.flatten(0, 1)[rows_T]
            computed = Computed(batch, features_TF, _event(self.target_device))
            del output, joined, features_TF
            self._put("target waits for the copier", self.computed, computed)
            del computed

    def _copy(self) -> None:
        stream = torch.cuda.Stream(self.target_device) if self.target_device.type == "cuda" else None
        while True:
            batch, features_TF, event = self._take("copier waits for the target", self.computed)
            buffer = self._take("copier waits for a buffer", self.buffers)
            with torch.inference_mode(), _on(stream):
                if stream is not None and event is not None:
                    stream.wait_event(event)
                buffer[: batch.tokens].copy_(features_TF, non_blocking=True)
            if stream is not None:
                stream.synchronize()
            del features_TF
            self._put("copier waits for the drafter", self.copied, Copied(batch, buffer))

    def _train(self) -> None:
        stream = torch.cuda.Stream(self.drafter_device) if self.drafter_device.type == "cuda" else None
        for step in range(WARM_STEPS):
            self._step(step, self._made_up)
        wait(self.drafter_device)
        self.drafter_warm.set()
        for step in itertools.count(WARM_STEPS):
            tokens = self._step(step, lambda: self._fetch(stream))
            self.commits.append((time.perf_counter(), tokens))

    def _step(self, step: int, fetch: Callable[[], dict[str, Tensor]]) -> int:
        """Forward and backward of a step's packs, then the update; returns its tokens."""
        gradient, count, tokens = self.drafter.step, self.config.plan.packs_per_step, 0
        for position in range(count):
            sections = fetch()
            gradient.add(position, BatchId(0, count * step + position), sections)
            tokens += sections["input_ids"].shape[0]
        gradient.apply(step, gradient.seal(LocalReducer(), StepTry(0, step, 1, step + 1)))
        return tokens

    def _made_up(self) -> dict[str, Tensor]:
        batch = gather(
            self.data.of(0), self.batches[0],
            edges=self.config.plan.bucket_edges, vocabulary=self.target.config.vocab_size,
        )  # fmt: skip
        features_TF = torch.randn(batch.tokens, self.drafter.shape.feature_size, device=self.drafter_device)
        return self._uploaded(batch, features_TF.to(self.target.dtype))

    def _fetch(self, stream: torch.cuda.Stream | None) -> dict[str, Tensor]:
        batch, buffer = self._take("drafter waits for a pack", self.copied)
        features_TF = buffer[: batch.tokens]
        if stream is None:
            sections = self._uploaded(batch, features_TF.clone())
        else:
            with torch.cuda.stream(stream):
                sections = self._uploaded(batch, features_TF)
            stream.synchronize()
            for tensor in sections.values():
                tensor.record_stream(torch.cuda.current_stream(self.drafter_device))
        self.buffers.put(buffer)
        return sections

    def _uploaded(self, batch: HostBatch, features_TF: Tensor) -> dict[str, Tensor]:
        sections = {"features": features_TF} | batch.sections()
        return {name: x.to(self.drafter_device, non_blocking=True) for name, x in sections.items()}

    # ---- between them -------------------------------------------------------------------------

    def _put(self, why: str, into: queue.Queue[Any], item: Any) -> None:
        with self._waiting(why):
            while not self._stop.is_set():
                try:
                    return into.put(item, timeout=PATIENCE_S)
                except queue.Full:
                    continue
        raise Stopped

    def _take(self, why: str, source: queue.Queue[Any]) -> Any:
        with self._waiting(why):
            while not self._stop.is_set():
                try:
                    return source.get(timeout=PATIENCE_S)
                except queue.Empty:
                    continue
        raise Stopped

    def _until(self, event: threading.Event) -> None:
        while not event.wait(PATIENCE_S):
            if self._stop.is_set():
                raise Stopped

    @contextmanager
    def _waiting(self, why: str) -> Iterator[None]:
        """Seconds count only within the window: after the steps that settle it."""
        begun_s = time.perf_counter()
        try:
            yield
        finally:
            if len(self.commits) > SETTLING:
                self.waited_s[why] += time.perf_counter() - max(begun_s, self.commits[SETTLING][0])

    def _guarded(self, name: str, loop: Callable[[], None]) -> None:
        try:
            device = self.drafter_device if name == "drafter" else self.target_device
            if device.type == "cuda":
                torch.cuda.set_device(device)  # threads begin on device 0
            loop()
        except Stopped:
            pass
        except Exception as error:  # noqa: BLE001 - the other threads end, and the failure is reported
            traceback.print_exc()
            self.failure = f"{name}: {type(error).__name__}: {error}"
        finally:
            self._stop.set()


def _event(device: torch.device) -> torch.cuda.Event | None:
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None


def _on(stream: torch.cuda.Stream | None) -> Any:
    return torch.cuda.stream(stream) if stream is not None else nullcontext()
