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

Everything asked per message is kept by target, holder and attempt: its cost does not grow with the run.
Only the pool changes a flight, and it remembers what may follow from that: whose orders (`touched`),
whether there may be room for an assignment (`freed`), and which packs may be leased now (`leasable`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from protocol.messages import BatchId, SkippedSample, SlotReport, Stamp

State = Literal["queued", "computing", "ready"]


@dataclass
class Flight:
    """One attempt at one batch."""

    batch: BatchId
    samples: tuple[int, ...]
    tokens: int  # expected real tokens, then the measured ones
    payload_bytes: int  # likewise
    attempt: Stamp
    target: str | None  # None: its target died, a drafter holds the pack
    since_s: float  # in its state
    state: State = "queued"
    skipped: tuple[SkippedSample, ...] = ()
    holder: str | None = None  # the drafter it is leased to
    lease: Stamp | None = None
    leased_s: float = 0.0
    got: bool = False

    @property
    def ready(self) -> bool:
        return self.state == "ready"


Flights = dict[BatchId, Flight]


class Pool:
    """Flights by batch, and what they leave free on each target."""

    def __init__(self) -> None:
        self.flights: Flights = {}
        self.returned: set[BatchId] = set()  # pending again after they were in flight
        self.payload_bytes = 0
        self.touched: set[str] = set()
        self.freed = True
        self.leasable: set[BatchId] = set()
        self._by_target: dict[str, Flights] = {}
        self._by_holder: dict[str, Flights] = {}
        self._by_attempt: dict[Stamp, Flight] = {}
        self._unfinished: Counter[str] = Counter()
        self._leftover: dict[str, int] = {}  # slots of a target still held by attempts without a flight

    def __iter__(self) -> Iterator[Flight]:
        return iter(self.flights.values())

    def of_target(self, target: str) -> list[Flight]:
        """Its flights in plan order: the order of its assignments."""
        return [flight for _, flight in sorted(self._by_target.get(target, {}).items())]

    def of_holder(self, drafter: str) -> list[Flight]:
        """Flights leased to it, in no order."""
        return list(self._by_holder.get(drafter, {}).values())

    def of_attempt(self, attempt: Stamp) -> Flight | None:
        return self._by_attempt.get(attempt)

    def slots_used(self, target: str) -> int:
        return len(self._by_target.get(target, ())) + self._leftover.get(target, 0)

    def unfinished(self, target: str) -> int:
        """Batches a target has yet to make ready: the one it computes and those queued behind it."""
        return self._unfinished[target]

    # ---- life of a flight ---------------------------------------------------------------------

    def add(self, flight: Flight) -> None:
        """A new assignment, or one that a target reports from before this coordinator's start."""
        assert flight.batch not in self.flights, f"{flight.batch} is in flight already"
        assert flight.target is not None and not flight.ready, "a flight begins queued at a target"
        self.flights[flight.batch] = self._by_attempt[flight.attempt] = flight
        self._by_target.setdefault(flight.target, {})[flight.batch] = flight
        self._unfinished[flight.target] += 1
        self.payload_bytes += flight.payload_bytes
        self.returned.discard(flight.batch)
        self.touched.add(flight.target)

    def lease(self, flight: Flight, drafter: str, stamp: Stamp, now_s: float) -> None:
        """Publish to `drafter`; any other holder is told to drop it by no longer being listed."""
        self._hold(flight, drafter)
        flight.lease, flight.leased_s, flight.got = stamp, now_s, False

    def unlease(self, flight: Flight) -> None:
        """Back to ready in its slot; without a slot the batch is pending again."""
        self._hold(flight, None)
        flight.lease, flight.got = None, False
        self.leasable.add(flight.batch)
        if flight.target is None:
            self.revoke(flight)

    def revoke(self, flight: Flight) -> None:
        """Back to pending, the slot is free."""
        self._remove(flight)
        self.returned.add(flight.batch)

    def done(self, batch: BatchId) -> None:
        """Committed or failed."""
        self.returned.discard(batch)
        flight = self.flights.get(batch)
        if flight is not None:
            self._remove(flight)

    def clear(self, keep: Callable[[Flight], bool]) -> None:
        """Revoke every flight that `keep` does not want (after a roll-back)."""
        for flight in [f for f in self if not keep(f)]:
            self.revoke(flight)

    def _hold(self, flight: Flight, drafter: str | None) -> None:
        self._touch(flight)
        if flight.holder is not None:
            del self._by_holder[flight.holder][flight.batch]
        flight.holder = drafter
        if drafter is not None:
            self._by_holder.setdefault(drafter, {})[flight.batch] = flight
            self.touched.add(drafter)

    def _remove(self, flight: Flight) -> None:
        self._hold(flight, None)
        self._leave_target(flight)
        del self.flights[flight.batch], self._by_attempt[flight.attempt]
        self.payload_bytes -= flight.payload_bytes
        self.leasable.discard(flight.batch)
        self.freed = True

    def _leave_target(self, flight: Flight) -> None:
        if flight.target is not None:
            self._unfinished[flight.target] -= not flight.ready
            del self._by_target[flight.target][flight.batch]

    def _touch(self, flight: Flight) -> None:
        self.touched |= {name for name in (flight.target, flight.holder) if name is not None}

    # ---- what reports say ---------------------------------------------------------------------

    def target_reported(
        self, target: str, slots: Iterable[SlotReport], orders: Stamp, now_s: float
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
                self._follow(flight, slot, now_s)
        leftover = sum(s.slot is not None for s in strangers)
        self.freed |= leftover != self._leftover.get(target)
        self._leftover[target] = leftover
        for flight in list(self._by_target.get(target, {}).values()):
            if flight.attempt < orders and flight.attempt not in seen:
                self._lose_slot(flight)  # it acted on the order and does not have it
        return failed, strangers

    def _follow(self, flight: Flight, slot: SlotReport, now_s: float) -> None:
        if flight.ready:
            return  # ready is final for an attempt
        assert slot.state != "failed", "a failed one is no longer followed"
        if flight.state != slot.state:
            flight.since_s = now_s
        flight.state = slot.state
        if flight.ready:
            assert flight.target is not None
            self._unfinished[flight.target] -= 1
            self.payload_bytes += slot.payload_bytes - flight.payload_bytes
            flight.tokens, flight.payload_bytes, flight.skipped = (
                slot.tokens, slot.payload_bytes, slot.skipped,
            )  # fmt: skip
            self.leasable.add(flight.batch)
            self.freed = True

    def drafter_reported(self, drafter: str, held: Iterable[Stamp]) -> None:
        held = set(held)
        for flight in self.of_holder(drafter):
            flight.got = flight.attempt in held
            if not flight.got and flight.target is None:
                self.revoke(flight)

    # ---- deaths -------------------------------------------------------------------------------

    def target_died(self, target: str) -> None:
        """What a drafter has got stays good; the rest is pending again."""
        for flight in self.of_target(target):
            self._lose_slot(flight)
        self.freed = True
        self._leftover.pop(target, None)
        self._unfinished.pop(target, None)
        self._by_target.pop(target, None)

    def _lose_slot(self, flight: Flight) -> None:
        self._touch(flight)
        self._leave_target(flight)
        flight.target = None
        self.freed = True
        if not flight.got:
            self.revoke(flight)

    def drafter_died(self, drafter: str) -> None:
        """Packs it held are ready again where their slot lives, pending elsewhere."""
        for flight in self.of_holder(drafter):
            self.unlease(flight)
        self._by_holder.pop(drafter, None)
