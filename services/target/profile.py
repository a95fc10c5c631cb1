"""Where a target's time goes: monotone counters, and marks that never stop a GPU.

    wait_lease   nothing was ordered                             forward   the layers up to the last tap
    wait_slot    something was ordered, but no slot was free     pack      finite check behind it
    ahead        as many packs under way as may be: on a GPU     copy      pack buffer -> slot
                 the host's normal state, the copier's fault
                 only on a CPU

Forward and copy overlap, so the phases do not add up to the clock's time. On a GPU, forward and pack are the
stream's own seconds, read when the copier has waited for them anyway.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.tracer import span

PHASES = ("wait_lease", "wait_slot", "ahead", "forward", "pack", "copy")


class Totals:
    """Counters of this incarnation; any thread may add."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._values = {f"phase_{name}_seconds": 0.0 for name in PHASES}
        self._values |= {"tokens_total": 0.0, "packs_total": 0.0, "bytes_total": 0.0, "skipped_total": 0.0}

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._values[name] += amount

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the seconds spent inside towards `name`."""
        begun_s = time.perf_counter()
        try:
            with span(name):
                yield
        finally:
            self.add(**{f"phase_{name}_seconds": time.perf_counter() - begun_s})

    def snapshot(self) -> dict[str, float]:
        with self._lock:
            return dict(self._values)


class Mark:
    """A point on a stream, or on a CPU a moment; may be recorded again once it has been waited for."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        # blocking: the waiting thread sleeps instead of spinning on the GIL's core
        self.event = torch.cuda.Event(enable_timing=True, blocking=True) if cuda else None
        self._at_s = 0.0

    def record(self) -> None:
        """Here, on the current stream."""
        self._at_s = time.perf_counter()
        if self.event is not None:
            self.event.record()

    def wait(self) -> None:
        """Block the host until the stream has passed this point."""
        if self.event is not None:
            self.event.synchronize()

    def seconds_since(self, earlier: Mark) -> float:
        """Both must have been waited for."""
        if self.event is not None and earlier.event is not None:
            return earlier.event.elapsed_time(self.event) / 1e3
        return self._at_s - earlier._at_s
