"""Every batch between order and outcome: who computes it, where it lies, who trains on it.

Plain decisions: no socket, no clock, no ledger. A batch without a flight and without an outcome is
pending. One flight is one attempt at one batch.

    pending -> queued(target) -> computing -> ready(slot) -> leased to a drafter -> got by it -> done
       ^          |                  |           |                  |
       +----------+------ target lost, overdue, evicted, world changed -----+

`done` means committed or failed. A slot is free as soon as no flight names it, even if a drafter
still maps it: what such a drafter reads can only end in a step try that was aborted, because a try
whose flights change is aborted in the same decision. Attempts are never reused, so a pack that is
late for its flight meets no flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from protocol.messages import BatchId, SkippedSample, SlotReport, Stamp


@dataclass
class Flight:
    """One attempt at one batch."""

    batch: BatchId
    samples: tuple[int, ...]
    tokens: int  # expected real tokens, then the measured ones
    payload_bytes: int  # likewise
    attempt: Stamp
    target: str | None  # None: its target died, a drafter holds the pack
    since_s: float
    state: str = "queued"
    skipped: tuple[SkippedSample, ...] = ()
    holder: str | None = None  # the drafter it is leased to
    lease: Stamp | None = None
    leased_s: float = 0.0
    got: bool = False

    @property
    def ready(self) -> bool:
        return self.state == "ready"


class Pool:
    """Flights by batch, and what they leave free on each target."""

    def __init__(self) -> None:
        self.flights: dict[BatchId, Flight] = {}
        self._leftover: dict[str, int] = {}  # slots of a target still held by attempts without a flight

    def __iter__(self) -> Iterator[Flight]:
        return iter(self.flights.values())

    def of_target(self, target: str) -> list[Flight]:
        """Its flights in plan order: the order of its assignments."""
        return sorted((f for f in self if f.target == target), key=lambda f: f.batch)

    @property
    def payload_bytes(self) -> int:
        return sum(flight.payload_bytes for flight in self)

    def slots_used(self, target: str) -> int:
        return sum(f.target == target for f in self) + self._leftover.get(target, 0)

    def unfinished(self, target: str) -> int:
        """Batches a target has yet to make ready: the one it computes and those queued behind it."""
        return sum(f.target == target and not f.ready for f in self)

    # ---- life of a flight ---------------------------------------------------------------------

    def add(self, flight: Flight) -> None:
        """A new assignment, or one that a target reports from before this coordinator's start."""
        assert flight.batch not in self.flights, f"{flight.batch} is in flight already"
        self.flights[flight.batch] = flight

    def lease(self, flight: Flight, drafter: str, stamp: Stamp, now_s: float) -> None:
        """Publish to `drafter`; any other holder is told to drop it by no longer being listed."""
        flight.holder, flight.lease, flight.leased_s, flight.got = drafter, stamp, now_s, False

    def unlease(self, flight: Flight) -> None:
        """Back to ready in its slot; without a slot the batch is pending again."""
        flight.holder = flight.lease = None
        flight.got = False
        if flight.target is None:
            del self.flights[flight.batch]

    def revoke(self, flight: Flight) -> None:
        """Back to pending, the slot is free."""
        del self.flights[flight.batch]

    def done(self, batch: BatchId) -> Flight | None:
        """Committed or failed."""
        return self.flights.pop(batch, None)

    def clear(self, keep: Callable[[Flight], bool]) -> None:
        """Revoke every flight that `keep` does not want (after a roll-back)."""
        for flight in [f for f in self if not keep(f)]:
            self.revoke(flight)

    # ---- what reports say ---------------------------------------------------------------------

    def target_reported(
        self, target: str, slots: Iterable[SlotReport], orders: Stamp
    ) -> tuple[list[tuple[Flight, str]], list[SlotReport]]:
        """Follow a target's level. Returns (failed flights with reason, slots without a flight)."""
        failed: list[tuple[Flight, str]] = []
        strangers: list[SlotReport] = []
        seen: set[Stamp] = set()
        for slot in slots:
            seen.add(slot.attempt)
            flight = self.flights.get(slot.batch)
            if flight is None or flight.attempt != slot.attempt or flight.target != target:
                strangers.append(slot)
            elif slot.state == "failed":
                failed.append((flight, slot.reason))
            else:
                _follow(flight, slot)
        self._leftover[target] = sum(s.slot is not None for s in strangers)
        for flight in [f for f in self if f.target == target and f.attempt < orders]:
            if flight.attempt not in seen:  # it acted on the order and does not have it
                self._lose_slot(flight)
        return failed, strangers

    def drafter_reported(self, drafter: str, held: Iterable[Stamp]) -> None:
        held = set(held)
        for flight in [f for f in self if f.holder == drafter]:
            flight.got = flight.attempt in held
            if not flight.got and flight.target is None:
                del self.flights[flight.batch]

    # ---- deaths -------------------------------------------------------------------------------

    def target_died(self, target: str) -> None:
        """What a drafter has got stays good; the rest is pending again."""
        for flight in [f for f in self if f.target == target]:
            self._lose_slot(flight)
        self._leftover.pop(target, None)

    def _lose_slot(self, flight: Flight) -> None:
        flight.target = None
        if not flight.got:
            del self.flights[flight.batch]

    def drafter_died(self, drafter: str) -> None:
        """Packs it held are ready again where their slot lives, pending elsewhere."""
        for flight in [f for f in self if f.holder == drafter]:
            self.unlease(flight)


def _follow(flight: Flight, slot: SlotReport) -> None:
    if flight.ready:
        return  # ready is final for an attempt
    flight.state = slot.state
    if slot.state == "ready":
        flight.tokens, flight.payload_bytes, flight.skipped = slot.tokens, slot.payload_bytes, slot.skipped
