"""Which target computes what, and which drafter gets it: backpressure by construction. Plain decisions.

Lowest plan position first. A target has credit while it has a free slot and at most `assign_ahead`
batches beyond the one it computes; the run stays under the in-flight cap. When the batch that the
current step waits for finds no room, the ready pack furthest ahead gives way. A suspect (a batch in
whose forward targets died) runs alone on a target.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from protocol.messages import BatchId, Stamp
from services.coordinator.members import TargetMember
from services.coordinator.pool import Flight, Pool

LEASE_PATIENCE_S = 2.0
"""A pack that its drafter has not got for this long is announced again, under a new lease."""


class Moved(NamedTuple):
    """A batch that was late: where, and how long the next target may take."""

    target: str
    patience_s: float


@dataclass(frozen=True)
class Limits:
    """Options of the run that bound what is under way."""

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


def has_room(pool: Pool, target: TargetMember, assign_ahead: int) -> bool:
    """A free slot, and not too much queued before it."""
    name = target.incarnation
    return pool.unfinished(name) <= assign_ahead and pool.slots_used(name) < target.slots


class Room:
    """Targets with room, the least busy first. One look at all targets serves a round of assignments."""

    def __init__(self, pool: Pool, assign_ahead: int, targets: list[TargetMember]) -> None:
        self._pool, self._assign_ahead = pool, assign_ahead
        self.look(targets)

    def look(self, targets: list[TargetMember]) -> None:
        """Again, after room was made."""
        self._heap = [self._entry(t) for t in targets if has_room(self._pool, t, self._assign_ahead)]
        heapq.heapify(self._heap)

    def take(self) -> TargetMember | None:
        """The least busy one; what was taken from it since the last call counts."""
        while self._heap:
            unfinished, _, target = self._heap[0]
            if not has_room(self._pool, target, self._assign_ahead):
                heapq.heappop(self._heap)
            elif unfinished != self._pool.unfinished(target.incarnation):
                heapq.heapreplace(self._heap, self._entry(target))
            else:
                return target
        return None

    def _entry(self, target: TargetMember) -> tuple[int, int, TargetMember]:
        return self._pool.unfinished(target.incarnation), target.index, target


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
        self._moved: dict[BatchId, Moved] = {}
        self._look_for_overdue_s = 0.0

    # ---- assignments --------------------------------------------------------------------------

    def assign(
        self, wanted: Iterator[Wanted], current_step: int, targets: list[TargetMember], now_s: float
    ) -> None:
        """Place pending batches in plan order until no target has credit or the cap is reached."""
        if not self._pool.freed:
            return  # nothing has changed since there was no room, or nothing to place
        self.capped, self._pool.freed = False, False
        room = Room(self._pool, self._limits.assign_ahead, targets)
        for item in wanted:
            flight = self._pool.flights.get(item.batch)
            if flight is None and not self._place(item, current_step, targets, room, now_s):
                return

    def _place(
        self, item: Wanted, current_step: int, targets: list[TargetMember], room: Room, now_s: float
    ) -> bool:
        urgent = self._step_of(item.batch) == current_step
        while not self._under_cap(item.payload_bytes):
            self.capped = True
            if not (urgent and self._evict(current_step, None)):
                return False
        target = self._credit(item.batch, targets, room)
        choices = self._choices(item.batch, targets)
        while target is None and urgent and self._evict_from_full(current_step, choices):
            room.look(targets)
            target = self._credit(item.batch, targets, room)
        if target is None:
            # a suspect waits for an idle target, one that was late for another; those behind it need not
            return item.batch in self.suspects or item.batch in self._moved
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

    def _credit(self, batch: BatchId, targets: list[TargetMember], room: Room) -> TargetMember | None:
        if not self.suspects and batch not in self._moved:
            return room.take()
        choices = [t for t in self._choices(batch, targets) if self._has_credit(t, batch)]
        return min(choices, key=lambda t: (self._pool.unfinished(t.incarnation), t.index), default=None)

    def _choices(self, batch: BatchId, targets: list[TargetMember]) -> list[TargetMember]:
        """All, but for where it was late, unless there is no other: that one may hang."""
        moved = self._moved.get(batch)
        return [t for t in targets if moved is None or t.incarnation != moved.target] or targets

    def _has_credit(self, target: TargetMember, batch: BatchId) -> bool:
        name = target.incarnation
        if batch in self.suspects:
            return self._pool.unfinished(name) == 0 and self._pool.slots_used(name) < target.slots
        alone = any(f.batch in self.suspects and not f.ready for f in self._pool.of_target(name))
        return not alone and has_room(self._pool, target, self._limits.assign_ahead)

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
        """Take the current step's batches that are late away from their target, if there is another.

        Late is what is queued, or computed, for longer than `overdue_s`; twice as long after each move, or
        targets that are all slower than that would hand a batch round for ever. Looks a few times within
        `overdue_s`, not at every call.
        """
        if now_s < self._look_for_overdue_s:
            return []
        self._look_for_overdue_s = now_s + min(1.0, self._limits.overdue_s / 10)
        late = [
            f
            for f in self._pool
            if not f.ready
            and self._step_of(f.batch) == current_step
            and now_s - f.since_s > self.patience_s(f.batch)
        ]
        late = [f for f in late if any(t.incarnation != f.target for t in targets)]
        for flight in late:
            self._moved[flight.batch] = Moved(flight.target or "", 2 * self.patience_s(flight.batch))
            self._pool.revoke(flight)
        return late

    def patience_s(self, batch: BatchId) -> float:
        """How long it may be queued, or computed, while the current step waits for it."""
        moved = self._moved.get(batch)
        return self._limits.overdue_s if moved is None else moved.patience_s

    def settled(self, batch: BatchId) -> None:
        self.suspects.discard(batch)
        self._moved.pop(batch, None)

    # ---- leases -------------------------------------------------------------------------------

    def lease(self, order: Iterable[tuple[BatchId, str]], current_step: int, now_s: float) -> None:
        """Publish ready packs to the drafters named, in this order, up to the prefetch of each."""
        ahead: dict[str, int] = {}
        for batch, drafter in order:
            flight = self._pool.flights.get(batch)
            if flight is None or not flight.ready:
                continue
            if flight.holder != drafter and self._step_of(batch) > current_step:
                if drafter not in ahead:
                    ahead[drafter] = self._held_ahead(drafter, current_step)
                if ahead[drafter] >= self._limits.prefetch_packs:
                    continue
                ahead[drafter] += 1
            self._lease_one(flight, drafter, now_s)

    def _held_ahead(self, drafter: str, current_step: int) -> int:
        return sum(self._step_of(f.batch) > current_step for f in self._pool.of_holder(drafter))

    def _lease_one(self, flight: Flight, drafter: str, now_s: float) -> None:
        if flight.holder != drafter:
            if flight.target is None:
                self._pool.unlease(flight)  # only the wrong drafter has it: compute it again
            else:
                self._pool.lease(flight, drafter, self._stamp(), now_s)
        elif not flight.got and flight.target is not None and now_s - flight.leased_s > LEASE_PATIENCE_S:
            self._pool.lease(flight, drafter, self._stamp(), now_s)
