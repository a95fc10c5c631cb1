"""Batches that take long: one that hangs finds another target, but slow targets do not hand them round."""

from __future__ import annotations

import itertools

import pytest

from protocol.messages import PROTOCOL_VERSION, BatchId, SlotReport, Stamp, TargetHello
from services.coordinator.members import TargetMember
from services.coordinator.placement import Limits, Placement, Wanted
from services.coordinator.pool import Flight, Pool

OVERDUE_S = 120.0
PACKS = 4  # of a step
BATCHES = 12


class SlowTargets:
    """Two targets, a second at a time. What one computes cannot be cancelled, only ignored."""

    def __init__(self, batch_s: float) -> None:
        self.batch_s, self.now_s, self.step, self.moves = batch_s, 0.0, 0, 0
        self.pool, self.done = Pool(), set()
        counter = itertools.count(1)
        limits = Limits(assign_ahead=2, cap_packs=0, cap_bytes=0, overdue_s=OVERDUE_S, prefetch_packs=2)
        self.placement = Placement(
            self.pool, limits, lambda: Stamp(1, next(counter)), lambda batch: batch.index // PACKS
        )
        self.targets = [member(index) for index in range(2)]
        self.computing: dict[str, tuple[Flight, float]] = {}  # by target: what, and until when

    def run(self, limit_s: float) -> None:
        while self.step * PACKS < BATCHES and self.now_s < limit_s:
            self.now_s += 1.0
            self.moves += len(self.placement.reassign_overdue(self.step, self.targets, self.now_s))
            self.placement.assign(self.wanted(), self.step, self.targets, self.now_s)
            for target in self.targets:
                self.turn(target.incarnation)
            self.commit()

    def wanted(self):
        for index in range(BATCHES):
            batch = BatchId(0, index)
            if batch not in self.pool.flights and batch not in self.done:
                yield Wanted(batch, (index,), 1, 1)

    def turn(self, name: str) -> None:
        flight, until_s = self.computing.get(name, (None, 0.0))
        if flight is not None and self.now_s >= until_s:
            del self.computing[name]
            self.say(name, flight, "ready")
        queue = [flight for flight in self.pool.of_target(name) if not flight.ready]
        if name not in self.computing and queue:
            self.computing[name] = (queue[0], self.now_s + self.batch_s)
            self.say(name, queue[0], "computing")

    def say(self, name: str, flight: Flight, state: str) -> None:
        slot = SlotReport(
            batch=flight.batch, attempt=flight.attempt, state=state, slot=0, tokens=1, payload_bytes=1,
            skipped=(), reason="", published=None,
        )  # fmt: skip
        self.pool.target_reported(name, [slot], Stamp(0, 0), self.now_s)

    def commit(self) -> None:
        batches = [BatchId(0, self.step * PACKS + place) for place in range(PACKS)]
        if all(batch in self.pool.flights and self.pool.flights[batch].ready for batch in batches):
            for batch in batches:
                self.pool.done(batch)
                self.placement.settled(batch)
            self.done |= set(batches)
            self.step += 1


def member(index: int) -> TargetMember:
    name = f"target-{index}"
    hello = TargetHello(
        incarnation=name, seq=0, protocol=PROTOCOL_VERSION, fingerprint="0" * 64, host="h", index=None,
        arena=f"{name}.arena", slots=8, slot_bytes=1,
    )  # fmt: skip
    return TargetMember(name, "target", index, "cpu", 0.0, 0.0, 0, hello=hello)


@pytest.mark.parametrize(
    ("batch_s", "most"),
    [(40.0, 1.1), (61.0, 1.6), (90.0, 1.6), (125.0, 2.6), (500.0, 3.5)],
)
def test_targets_that_are_all_slow_get_through(batch_s, most):
    """`most`: of the time that it would take if nothing were ever moved."""
    slow = SlowTargets(batch_s)
    slow.run(limit_s=3600.0 * 8)
    assert slow.step * PACKS == BATCHES
    assert slow.now_s <= most * batch_s * BATCHES / 2, f"{slow.now_s:.0f} s, moved {slow.moves}"


def test_a_batch_that_hangs_is_computed_elsewhere():
    slow = SlowTargets(10.0)
    slow.run(limit_s=1.0)
    hanging, _ = slow.computing["target-0"]
    slow.computing["target-0"] = (hanging, float("inf"))
    slow.run(limit_s=600.0)
    assert slow.step * PACKS == BATCHES and slow.moves > 0
