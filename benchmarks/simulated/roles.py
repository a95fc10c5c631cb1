"""Roles that work in no time: they follow orders and say their level, without a model or a socket."""

from __future__ import annotations

from collections.abc import Mapping

from protocol.messages import (
    PROTOCOL_VERSION,
    DrafterHello,
    DrafterOrders,
    DrafterReport,
    Publication,
    Saved,
    SlotReport,
    Stamp,
    StepAt,
    TargetHello,
    TargetOrders,
    TargetReport,
    Vote,
)

NEVER = Stamp(0, 0)


class Role:
    def __init__(self, name: str, fingerprint: str) -> None:
        self.name, self.fingerprint, self.seq, self.acted = name, fingerprint, 0, NEVER
        self.busy = False  # it has more news than its last report told

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq


class Target(Role):
    """Makes one batch ready per report."""

    def __init__(self, name: str, fingerprint: str) -> None:
        super().__init__(name, fingerprint)
        self.work: dict[Stamp, SlotReport] = {}

    def hello(self) -> TargetHello:
        return TargetHello(
            incarnation=self.name, seq=self.next_seq(), protocol=PROTOCOL_VERSION,
            fingerprint=self.fingerprint, host="h", index=int(self.name.rpartition("-")[2]),
            arena=f"{self.name}.arena", slots=6,
            slot_bytes=10**6,
        )  # fmt: skip

    def act(self, orders: TargetOrders, drafters: Mapping[str, Drafter]) -> list[str]:
        """Follow `orders`, hand packs over; returns who has news."""
        self.acted, told, before = orders.stamp, [], self.work
        self.work = {}
        for a in orders.assignments:
            slot = before.get(a.attempt)
            if slot is None:
                slot = SlotReport(
                    batch=a.batch, attempt=a.attempt, state="queued", slot=None, tokens=0, payload_bytes=0,
                    skipped=(), reason="", published=None,
                )  # fmt: skip
            elif slot.state == "ready" and a.publish is not None and slot.published != a.publish.lease:
                slot = slot.model_copy(update={"published": a.publish.lease})
                told += self.publish(a.publish, a.attempt, drafters)
            self.work[a.attempt] = slot
        self.busy = any(slot.state == "queued" for slot in self.work.values())
        return [*told, self.name] if self.busy else told

    def publish(self, to: Publication, attempt: Stamp, drafters: Mapping[str, Drafter]) -> list[str]:
        drafters[to.inbox].held[attempt] = to.lease
        return [to.inbox]

    def report(self) -> TargetReport:
        queued = [attempt for attempt, slot in self.work.items() if slot.state == "queued"]
        if queued:
            done = {"state": "ready", "slot": 0, "tokens": 16, "payload_bytes": 160}
            self.work[queued[0]] = self.work[queued[0]].model_copy(update=done)
        self.busy = len(queued) > 1
        return TargetReport(
            incarnation=self.name, seq=self.next_seq(), orders=self.acted, totals={},
            slots=tuple(self.work.values()),
        )  # fmt: skip


class Drafter(Role):
    """Votes as soon as it has its packs, stands in every group at once."""

    def __init__(self, name: str, fingerprint: str) -> None:
        super().__init__(name, fingerprint)
        self.held: dict[Stamp, Stamp] = {}  # attempt -> lease
        self.complete: StepAt | None = None
        self.vote: Vote | None = None
        self.saved: tuple[Saved, ...] = ()
        self.generation: int | None = None
        self.orders: DrafterOrders | None = None

    def hello(self) -> DrafterHello:
        return DrafterHello(
            incarnation=self.name, seq=self.next_seq(), protocol=PROTOCOL_VERSION,
            fingerprint=self.fingerprint, host="h", index=int(self.name.rpartition("-")[2]), inbox=self.name,
        )  # fmt: skip

    def act(self, orders: DrafterOrders, drafters: Mapping[str, Drafter]) -> list[str]:
        """Follow `orders`; returns who has news."""
        before = (self.complete, self.generation, self.vote, self.saved)
        self.acted, self.orders = orders.stamp, orders
        if self.vote is not None and self.vote.step_try == orders.committed:
            assert self.complete is not None
            self.complete, self.vote = StepAt(self.complete.timeline, self.complete.step + 1), None
        elif self.vote is not None and (orders.train is None or orders.train.step_try != self.vote.step_try):
            self.vote = None
        if orders.adopt is not None:
            self.complete = orders.adopt.at
        self.generation = orders.group.generation if orders.group else None
        self.saved = tuple(saved for saved in self.saved if saved.at not in orders.recorded)
        if orders.save is not None and orders.save == self.complete and not self.saved:
            name = f"ckpt-{self.complete.timeline}-{self.complete.step}-{self.name}"
            self.saved = (Saved(at=self.complete, name=name, sha256="0" * 64),)
        allowed, stamp = set(orders.held), orders.stamp
        self.held = {a: lease for a, lease in self.held.items() if a in allowed or lease > stamp}
        self._train()
        return [self.name] if before != (self.complete, self.generation, self.vote, self.saved) else []

    def _train(self) -> None:
        train = self.orders.train if self.orders else None
        if train is None or self.vote is not None or self.complete != StepAt(*train.step_try[:2]):
            return
        if all(pack.attempt in self.held for pack in train.packs):
            packs = tuple(pack.attempt for pack in train.packs if pack.attempt is not None)
            self.vote = Vote(step_try=train.step_try, packs=packs, bad_positions=(), gradient_finite=True)

    def report(self) -> DrafterReport:
        self._train()
        return DrafterReport(
            incarnation=self.name, seq=self.next_seq(), orders=self.acted, totals={}, complete=self.complete,
            generation=self.generation, held=tuple(sorted(self.held)), training=None, trained=0,
            vote=self.vote, saved=self.saved, metrics=(), failures=(),
        )  # fmt: skip
