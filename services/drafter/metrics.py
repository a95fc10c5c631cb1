"""What a step's figures are, and where a drafter's seconds go.

A step's sums (loss, weights, hits by position, non-finite flags) are one float64 vector that the
group reduces beside the gradient, so all ranks hold the same figures and agree on what was bad. It
rides to the host with the one wait of the step, the vote's; there is no other synchronisation.

    tally | loss | weight | accepted | blocks | tokens | packs | hits 1..K | rows 1..K | bad 0..P-1 |

K = block_size - 1 predicted positions, P = packs_per_step.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from services.tracer import span

POSITIONS_REPORTED = 48  # a report holds 64 figures a step


@dataclass(frozen=True)
class TallyLayout:
    """Offsets into the tally vector."""

    predicted: int  # K
    packs: int  # P

    LOSS, WEIGHT, ACCEPTED, BLOCKS, TOKENS, PACKS = range(6)
    SUMS = 6

    @property
    def hits(self) -> slice:
        return slice(self.SUMS, self.SUMS + self.predicted)

    @property
    def rows(self) -> slice:
        return slice(self.SUMS + self.predicted, self.SUMS + 2 * self.predicted)

    @property
    def bad(self) -> slice:
        return slice(self.SUMS + 2 * self.predicted, self.size)

    @property
    def size(self) -> int:
        return self.SUMS + 2 * self.predicted + self.packs

    def values(self, tally: Sequence[float]) -> dict[str, float]:
        """Means over the step, all ranks. A step without weight has zeros."""
        hits, rows = tally[self.hits], tally[self.rows]
        by_position = {
            f"accuracy_{k}": _ratio(hit, row)
            for k, (hit, row) in enumerate(zip(hits, rows, strict=True), start=1)
            if k <= POSITIONS_REPORTED
        }
        return {
            "loss": _ratio(tally[self.LOSS], tally[self.WEIGHT]),
            "accuracy": _ratio(sum(hits), sum(rows)),
            "accepted_length": _ratio(tally[self.ACCEPTED], tally[self.BLOCKS]),
            "anchors": tally[self.BLOCKS],
            "tokens": tally[self.TOKENS],
            "packs": tally[self.PACKS],
            **by_position,
        }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


class Phases:
    """Seconds by phase, cumulative: `with phases("forward"): ...`, from one thread.

    On a GPU the phase is timed by a pair of events on the current stream, read by `settle` after a
    wait that was due anyway; waiting for others is host time.
    """

    HOST = frozenset({"wait_orders", "wait_group", "wait_pack", "vote_wait", "checkpoint"})

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._events = device.type == "cuda"
        self._open: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        with span(name), self._timed(name):
            yield

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        if not self._events or name in self.HOST:
            start_s = time.perf_counter()
            try:
                yield
            finally:
                self.seconds[name] += time.perf_counter() - start_s
            return
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        try:
            yield
        finally:
            end.record()
            self._open.append((name, begin, end))

    def settle(self) -> None:
        """Add up the events; all of them lie before something that the host has waited for."""
        for name, begin, end in self._open:
            self.seconds[name] += begin.elapsed_time(end) / 1e3
        self._open.clear()

    def totals(self) -> dict[str, float]:
        """From any thread; of a copy, since the trainer's may begin a phase meanwhile."""
        return {f"phase_{name}_seconds": seconds for name, seconds in self.seconds.copy().items()}
