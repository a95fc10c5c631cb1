"""The thread between a launched forward and a ready pack: wait, check, add noise, copy into the slot, tell.

    submit --(semaphore: postprocess_depth)--> `packed`? -> finite? -> noise -> slot -> finish -> slab back

It is the only thread that waits for the GPU, so the forward thread never does. A sample whose hidden states
are not finite is left out with its reason and the pack is put together from the rest; a batch without a rest
is failed. Noise is drawn here, over what is really shipped, as a drafter does that joins split taps.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from queue import SimpleQueue
from typing import NamedTuple

import torch
from torch import Tensor

from protocol.messages import Stamp
from services.config.schema import Config
from services.data.batch import HostBatch
from services.dflash.drafter_config import DrafterConfig
from services.dflash.noise import add_noise_
from services.seeds import noise_seed
from services.target.board import Job, Outcome
from services.target.forward import Slab
from services.target.profile import Mark, Totals
from services.transport.writer import SlotWriter

log = logging.getLogger(__name__)

NOT_FINITE = "the target's hidden states are not finite"


class Launched(NamedTuple):
    """A job whose forward has been issued into `slab`."""

    job: Job
    batch: HostBatch
    slab: Slab


class Blame:
    """Keeps the arena's `computing` at the oldest forward not known to be complete: deaths count against it.

    On a GPU the host is a forward ahead of the device, so the newest launch would be the wrong batch.
    """

    def __init__(self, writer: SlotWriter) -> None:
        self._writer = writer
        self._lock = threading.Lock()
        self._running: deque[Job] = deque()

    def begin(self, job: Job) -> None:
        """Before anything of `job` is launched."""
        with self._lock:
            self._running.append(job)
            self._say()

    def end(self, job: Job) -> None:
        """Its forward is complete, or was left."""
        with self._lock:
            if job in self._running:  # else another was blamed instead
                self._running.remove(job)
                self._say()

    def only(self, job: Job) -> None:
        """The process ends because of it, on the host."""
        with self._lock:
            self._running = deque([job])
            self._say()

    def _say(self) -> None:
        oldest = self._running[0] if self._running else None
        if oldest:
            self._writer.set_computing(oldest.batch, oldest.attempt)
        else:
            self._writer.set_computing(None)


class Slabs:
    """The free slabs. `take` blocks for one, or returns None once closed."""

    def __init__(self, slabs: list[Slab]) -> None:
        self._free = list(slabs)
        self._change = threading.Condition()
        self._closed = False

    def take(self) -> Slab | None:
        with self._change:
            self._change.wait_for(lambda: self._free or self._closed)
            return None if self._closed else self._free.pop()

    def give(self, slab: Slab) -> None:
        with self._change:
            self._free.append(slab)
            self._change.notify()

    def close(self) -> None:
        with self._change:
            self._closed = True
            self._change.notify_all()


class Copier:
    """Turns launched forwards into ready packs, in the order of their launch."""

    def __init__(
        self,
        config: Config,
        *,
        shape: DrafterConfig,
        writer: SlotWriter,
        slabs: Slabs,
        blame: Blame,
        totals: Totals,
        device: torch.device,
        finish: Callable[[Stamp, Outcome], None],
    ) -> None:
        self._noise = (config.recipe.noise, config.recipe.noise_scale, config.run.seed)
        self._joined, self._hidden = not config.target.split_fc_layers, shape.hidden_size
        self._writer, self._slabs, self._blame, self._totals = writer, slabs, blame, totals
        self._finish = finish
        self._room = threading.Semaphore(config.target.postprocess_depth)
        self._queue: SimpleQueue[Launched | None] = SimpleQueue()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._ready = Mark(device)

    def submit(self, launched: Launched) -> None:
        """Hand over a forward; blocks while `postprocess_depth` others are on their way."""
        self._room.acquire()
        self._queue.put(launched)

    def close(self) -> None:
        """Let `run` end after what was submitted, and nobody wait any longer."""
        self._slabs.close()
        self._room.release()
        self._queue.put(None)

    def run(self) -> None:
        """The thread: until `close`. Whatever it raises ends the process (also a sticky CUDA error)."""
        for launched in iter(self._queue.get, None):
            outcome = self._postprocess(launched)
            self._slabs.give(launched.slab)
            self._finish(launched.job.attempt, outcome)
            self._room.release()

    def _postprocess(self, launched: Launched) -> Outcome:
        job, batch, slab = launched
        slab.packed.wait()
        self._blame.end(job)
        self._totals.add(
            phase_forward_seconds=slab.computed.seconds_since(slab.begun),
            phase_pack_seconds=slab.packed.seconds_since(slab.computed),
        )
        sections = slab.taps.sections(batch.tokens)
        bad = _bad_documents(batch.lengths, slab.finite_T[: batch.tokens])
        with torch.no_grad(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            if bad:
                batch, sections = self._leave_out(job, batch, bad, sections)
            if not batch.documents:
                return Outcome.without_rest(batch.skipped)
            if self._joined:
                self._add_noise(job, sections["features"])
            self._ready.record()
        return self._ship(job, batch, sections)

    def _ship(self, job: Job, batch: HostBatch, sections: dict[str, Tensor]) -> Outcome:
        with self._totals.phase("copy"):
            descriptor = self._writer.write(
                job.slot, job.batch, job.attempt, sections | batch.sections(), ready=self._ready.event
            )
        self._totals.add(packs_total=1, tokens_total=batch.tokens, bytes_total=descriptor.payload_bytes)
        return Outcome(descriptor, batch.skipped, "")

    def _add_noise(self, job: Job, features_TF: Tensor) -> None:
        """Tap by tap, which takes a fraction of the temporaries that all columns at once would."""
        kind, scale, run_seed = self._noise
        batch_seed = noise_seed(run_seed, *job.batch)
        for column in range(0, features_TF.shape[1], self._hidden):
            tap_TH = features_TF[:, column : column + self._hidden]
            add_noise_(tap_TH, kind=kind, scale=scale, seed=batch_seed, first_column=column)

    def _leave_out(
        self, job: Job, batch: HostBatch, bad: list[int], sections: dict[str, Tensor]
    ) -> tuple[HostBatch, dict[str, Tensor]]:
        rest, rows_T = batch.without(bad, NOT_FINITE)
        samples = [batch.documents[position].sample for position in bad]
        log.warning(
            "left out samples", extra={"batch": str(job.batch), "samples": samples, "why": NOT_FINITE}
        )
        return rest, {name: x_TF.index_select(0, rows_T.to(x_TF.device)) for name, x_TF in sections.items()}


def _bad_documents(lengths: list[int], finite_T: Tensor) -> list[int]:
    """Positions of the documents that have a row which is not finite."""
    if bool(finite_T.all()):
        return []
    return [position for position, rows_t in enumerate(finite_T.split(lengths)) if not bool(rows_t.all())]
