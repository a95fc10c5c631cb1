"""Targets and drafters that obey at once when asked to, as inventories: what they say, and nothing else."""

from dataclasses import dataclass, field

from protocol.messages import (
    PROTOCOL_VERSION,
    Assignment,
    BatchId,
    DrafterHello,
    DrafterOrders,
    DrafterReport,
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


@dataclass
class Target:
    """`told` are the newest orders that the coordinator made, `heard` those that have arrived."""

    name: str
    slots: int
    seq: int = 0
    told: TargetOrders | None = None
    heard: TargetOrders | None = None
    work: dict[Stamp, SlotReport] = field(default_factory=dict)

    def hello(self, fingerprint: str) -> TargetHello:
        self.seq += 1
        return TargetHello(
            incarnation=self.name, seq=self.seq, protocol=PROTOCOL_VERSION, fingerprint=fingerprint,
            host="h", index=None, arena=f"{self.name}.arena", slots=self.slots, slot_bytes=10**6,
        )  # fmt: skip

    @property
    def computing(self) -> BatchId | None:
        return next((slot.batch for slot in self.work.values() if slot.state == "computing"), None)

    def obey(self) -> None:
        self.heard = self.told
        wanted = {a.attempt: a.batch for a in self.assignments()}
        self.work = {a: self.work.get(a) or queued(a, batch) for a, batch in wanted.items()}

    def assignments(self) -> tuple[Assignment, ...]:
        return self.told.assignments if self.told else ()

    def compute(self, *, fails: bool) -> None:
        """End the forward that goes on, or begin the next."""
        for state, after in (("computing", "failed" if fails else "ready"), ("queued", "computing")):
            for attempt, slot in self.work.items():
                if slot.state == state:
                    end = {"tokens": 9, "payload_bytes": 90} if after == "ready" else {}
                    end |= {"reason": "out of luck"} if after == "failed" else {"slot": 0}
                    self.work[attempt] = slot.model_copy(update={"state": after, **end})
                    return

    def report(self) -> TargetReport:
        self.seq += 1
        return TargetReport(
            incarnation=self.name, seq=self.seq, orders=self.heard.stamp if self.heard else NEVER,
            totals={}, slots=tuple(self.work.values()),
        )  # fmt: skip


@dataclass
class Drafter:
    name: str
    seq: int = 0
    told: DrafterOrders | None = None
    heard: DrafterOrders | None = None
    complete: StepAt | None = None
    vote: Vote | None = None
    generation: int | None = None
    held: set[Stamp] = field(default_factory=set)
    said_held: set[Stamp] = field(default_factory=set)
    saved: dict[StepAt, Saved] = field(default_factory=dict)

    def hello(self, fingerprint: str) -> DrafterHello:
        self.seq += 1
        return DrafterHello(
            incarnation=self.name, seq=self.seq, protocol=PROTOCOL_VERSION, fingerprint=fingerprint,
            host="h", index=None, inbox=self.name,
        )  # fmt: skip

    def obey(self, published: set[Stamp], bad: set[BatchId]) -> None:
        """`published`: ready packs that a target announces to it. All that is ordered succeeds at once."""
        orders = self.heard = self.told
        if orders is None:
            return
        if self.vote is not None and self.vote.step_try == orders.committed:
            self.complete = StepAt(self.vote.step_try.timeline, self.vote.step_try.step + 1)
            self.vote = None
        elif self.vote is not None and (orders.train is None or orders.train.step_try != self.vote.step_try):
            self.vote = None
        if orders.adopt is not None:
            self.complete, self.vote = orders.adopt.at, None
        self.generation = orders.group.generation if orders.group else None
        self.held = (self.held | published) & set(orders.held)
        self.saved = {at: saved for at, saved in self.saved.items() if at not in orders.recorded}
        if orders.save is not None and orders.save == self.complete:
            name = f"ckpt-{orders.save.timeline}-{orders.save.step}-{self.name}"
            self.saved[orders.save] = Saved(at=orders.save, name=name, sha256="0" * 64)
        self._train(orders, bad)

    def _train(self, orders: DrafterOrders, bad: set[BatchId]) -> None:
        train = orders.train
        if train is None or self.complete is None or train.step_try[:2] != tuple(self.complete):
            return
        attempts = [pack.attempt for pack in train.packs if pack.attempt in self.held]
        if len(attempts) < len(train.packs):
            return
        flags = tuple(pack.position for pack in train.packs if pack.batch in bad)
        self.vote = Vote(
            step_try=train.step_try, packs=tuple(attempts), bad_positions=flags, gradient_finite=not flags
        )

    def report(self) -> DrafterReport:
        self.seq, self.said_held = self.seq + 1, set(self.held)
        return DrafterReport(
            incarnation=self.name, seq=self.seq, orders=self.heard.stamp if self.heard else NEVER, totals={},
            complete=self.complete, generation=self.generation, held=tuple(self.held), training=None,
            trained=0, vote=self.vote, saved=tuple(self.saved.values()), metrics=(), failures=(),
        )  # fmt: skip


def queued(attempt: Stamp, batch: BatchId) -> SlotReport:
    return SlotReport(
        batch=batch, attempt=attempt, state="queued", slot=None, tokens=0, payload_bytes=0, skipped=(),
        reason="", published=None,
    )  # fmt: skip
