"""Which target computes what, and which drafter gets it: backpressure by construction. Plain decisions.

Lowest plan position first. A target has credit while it has a free slot and at most `assign_ahead`
batches beyond the one it computes; the run stays under the in-flight cap. When the batch that the
current step waits for finds no room, the ready pack furthest ahead gives way. A suspect (a batch in
whose forward targets died) runs alone on a target.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from protocol.messages import BatchId, Stamp
from services.coordinator.members import TargetMember
from services.coordinator.pool import Flight, Pool

LEASE_PATIENCE_S = 2.0
"""A pack that its drafter has not got for this long is announced again, under a new lease."""


@dataclass(frozen=True)
class Limits:
    assign_ahead: int
    cap_packs: int  # 0: none
    cap_bytes: int  # 0: none
    overdue_s: float
    prefetch_packs: int


@dataclass(frozen=True)
class Wanted:
    """A batch without outcome, in plan order."""

    batch: BatchId
    samples: tuple[int, ...]
    tokens: int
    payload_bytes: int


class Placement:
    """Assigns, evicts and leases over a pool.

    `stamp()` makes the ids of attempts and leases; `step_of(batch)` tells which step waits for it.
    """

    def __init__(
        self, pool: Pool, limits: Limits, stamp: Callable[[], Stamp], step_of: Callable[[BatchId], int]
    ) -> None:
        self._pool, self._limits, self._stamp, self._step_of = pool, limits, stamp, step_of
        self.suspects: set[BatchId] = set()
        self.evictions = 0
        self.capped = False  # whether the cap, not the targets, ended the last round of assignments
        self._avoid: dict[BatchId, str] = {}

    # ---- assignments --------------------------------------------------------------------------

    def assign(
        self, wanted: Iterator[Wanted], current_step: int, targets: list[TargetMember], now_s: float
    ) -> None:
        """Place pending batches in plan order until no target has credit or the cap is reached."""
        self.capped = False
        for item in wanted:
            flight = self._pool.flights.get(item.batch)
            if flight is None and not self._place(item, current_step, targets, now_s):
                return

    def _place(self, item: Wanted, current_step: int, targets: list[TargetMember], now_s: float) -> bool:
        urgent = self._step_of(item.batch) == current_step
        while not self._under_cap(item.payload_bytes):
            self.capped = True
            if not (urgent and self._evict(current_step, None)):
                return False
        target = self._credit(item.batch, targets)
        while target is None and urgent and self._evict_from_full(current_step, targets):
            target = self._credit(item.batch, targets)
        if target is None:
            return item.batch in self.suspects  # a suspect waits for an idle target; others need not
        self._pool.add(
            Flight(
                item.batch, item.samples, item.tokens, item.payload_bytes,
                attempt=self._stamp(), target=target.incarnation, since_s=now_s,
            )
        )  # fmt: skip
        return True

    def _under_cap(self, payload_bytes: int) -> bool:
        packs, size = self._limits.cap_packs, self._limits.cap_bytes
        in_flight = len(self._pool.flights)
        return in_flight == 0 or (
            (not packs or in_flight < packs)
            and (not size or self._pool.payload_bytes + payload_bytes <= size)
        )

    def _credit(self, batch: BatchId, targets: list[TargetMember]) -> TargetMember | None:
        open_targets = [t for t in targets if self._has_credit(t, batch)]
        elsewhere = [t for t in open_targets if t.incarnation != self._avoid.get(batch)]
        choices = elsewhere or open_targets
        return min(choices, key=lambda t: (self._pool.unfinished(t.incarnation), t.index), default=None)

    def _has_credit(self, target: TargetMember, batch: BatchId) -> bool:
        name = target.incarnation
        unfinished = self._pool.unfinished(name)
        if batch in self.suspects:
            return unfinished == 0 and self._pool.slots_used(name) < target.slots
        alone = any(f.batch in self.suspects and not f.ready for f in self._pool.of_target(name))
        return (
            not alone
            and unfinished <= self._limits.assign_ahead
            and self._pool.slots_used(name) < target.slots
        )

    # ---- making room --------------------------------------------------------------------------

    def _evict_from_full(self, current_step: int, targets: list[TargetMember]) -> bool:
        """Only when slots are what is missing: a busy target will get to the batch by itself."""
        full = [t for t in targets if self._pool.slots_used(t.incarnation) >= t.slots]
        if not targets or len(full) < len(targets):
            return False
        return self._evict(current_step, {t.incarnation for t in full})

    def _evict(self, current_step: int, at: set[str] | None) -> bool:
        """Return the pack of a later step that is furthest ahead to pending, unpublished ones first."""
        later = [
            f for f in self._pool if self._step_of(f.batch) > current_step and (at is None or f.target in at)
        ]
        victim = max(later, key=lambda f: (f.holder is None, self._step_of(f.batch), f.batch), default=None)
        if victim is None:
            return False
        self._pool.revoke(victim)
        self.evictions += 1
        return True

    def reassign_overdue(self, current_step: int, targets: list[TargetMember], now_s: float) -> list[Flight]:
        """Take the current step's batches that are late away from their target, if there is another."""
        late = [
            f
            for f in self._pool
            if not f.ready
            and self._step_of(f.batch) == current_step
            and now_s - f.since_s > self._limits.overdue_s
        ]
        late = [f for f in late if any(t.incarnation != f.target for t in targets)]
        for flight in late:
            self._avoid[flight.batch] = flight.target or ""
            self._pool.revoke(flight)
        return late

    def settled(self, batch: BatchId) -> None:
        self.suspects.discard(batch)
        self._avoid.pop(batch, None)

    # ---- leases -------------------------------------------------------------------------------

    def lease(self, order: list[tuple[BatchId, str]], current_step: int, now_s: float) -> None:
        """Publish ready packs to the drafters named, in this order, up to the prefetch of each."""
        ahead: dict[str, int] = {}
        for batch, drafter in order:
            flight = self._pool.flights.get(batch)
            if flight is None or not flight.ready:
                continue
            if self._step_of(batch) > current_step:
                ahead[drafter] = ahead.get(drafter, 0) + 1
                if ahead[drafter] > self._limits.prefetch_packs:
                    continue
            self._lease_one(flight, drafter, now_s)

    def _lease_one(self, flight: Flight, drafter: str, now_s: float) -> None:
        if flight.holder != drafter:
            if flight.target is None:
                self._pool.unlease(flight)  # only the wrong drafter has it: compute it again
            else:
                self._pool.lease(flight, drafter, self._stamp(), now_s)
        elif not flight.got and flight.target is not None and now_s - flight.leased_s > LEASE_PATIENCE_S:
            self._pool.lease(flight, drafter, self._stamp(), now_s)
