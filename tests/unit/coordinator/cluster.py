"""A whole run in one thread: a real Coordinator and ledger, roles that only follow orders, a bad network.

Weights are the tries they consist of, so "trained exactly once" is plain to see. Messages are lost,
doubled and reordered, processes die and return, the coordinator too; nothing depends on time.
"""

from __future__ import annotations

import random
from pathlib import Path

from protocol.messages import (
    PROTOCOL_VERSION,
    DrafterHello,
    DrafterOrders,
    DrafterReport,
    Exit,
    Failure,
    Saved,
    SlotReport,
    Stamp,
    StepAt,
    StepTry,
    TargetHello,
    TargetOrders,
    TargetReport,
    Vote,
    Welcome,
    Who,
)
from services.config.schema import Config
from services.coordinator.coordinator import Coordinator, PackSize
from services.coordinator.ledger import Ledger
from services.coordinator.orders import OrderBook
from services.coordinator.sizing import devices

NEVER = Stamp(0, 0)
SHA = "0" * 64
IDENTITY = {"options": {}, "dataset": "d", "model": "m"}


class Role:
    def __init__(self, name: str) -> None:
        self.name, self.seq, self.orders, self.welcomed = name, 0, None, False
        self.alive = True

    def next_seq(self) -> int:
        self.seq += 1
        return self.seq

    @property
    def acted(self) -> Stamp:
        return self.orders.stamp if self.orders else NEVER

    def receive(self, message) -> None:
        if isinstance(message, Exit):
            self.alive = False
        elif isinstance(message, Welcome):
            self.welcomed = True
        elif isinstance(message, Who):
            self.welcomed = False
        elif self.orders is None or message.stamp > self.orders.stamp:
            self.orders = message


class SimTarget(Role):
    def __init__(self, name: str, slots: int, poison: set) -> None:
        super().__init__(name)
        self.slots, self.poison = slots, poison
        self.work: dict[Stamp, SlotReport] = {}
        self.computing = None

    def hello(self, fingerprint: str) -> TargetHello:
        return TargetHello(
            incarnation=self.name, seq=self.next_seq(), protocol=PROTOCOL_VERSION, fingerprint=fingerprint,
            host="h", index=None, arena=f"{self.name}.arena", slots=self.slots, slot_bytes=10**6,
        )  # fmt: skip

    def act(self, cluster: Cluster) -> None:
        orders: TargetOrders | None = self.orders
        if orders is None:
            return
        wanted = {a.attempt: a for a in orders.assignments}
        self.work = {k: v for k, v in self.work.items() if k in wanted}
        for attempt, assignment in wanted.items():
            self.work.setdefault(
                attempt,
                SlotReport(
                    batch=assignment.batch, attempt=attempt, state="queued", slot=None, tokens=0,
                    payload_bytes=0, skipped=(), reason="", published=None,
                ),
            )  # fmt: skip
            done = self.work[attempt]
            if assignment.publish and done.state == "ready" and done.published != assignment.publish.lease:
                self.work[attempt] = done.model_copy(update={"published": assignment.publish.lease})
                cluster.post_pack(assignment.publish, assignment.batch, attempt)
        self._compute(cluster)

    def _compute(self, cluster: Cluster) -> None:
        for attempt, slot in self.work.items():
            if slot.state == "computing":
                if slot.batch in self.poison:
                    cluster.kill(self.name)
                    return
                self.computing = None
                self.work[attempt] = slot.model_copy(
                    update={"state": "ready", "slot": 0, "tokens": 9, "payload_bytes": 90}
                )
                return
        for attempt, slot in self.work.items():
            if slot.state == "queued":
                self.computing = slot.batch
                self.work[attempt] = slot.model_copy(update={"state": "computing"})
                return

    def report(self) -> TargetReport:
        slots = tuple(self.work.values())
        return TargetReport(
            incarnation=self.name, seq=self.next_seq(), orders=self.acted, totals={}, slots=slots
        )


class SimDrafter(Role):
    def __init__(self, name: str, bad: set) -> None:
        super().__init__(name)
        self.bad = bad
        self.complete: StepAt | None = None
        self.weights: tuple = ()
        self.held: dict[Stamp, tuple] = {}  # attempt -> (lease, batch)
        self.vote: Vote | None = None
        self.saved: dict[StepAt, Saved] = {}
        self.generation: int | None = None
        self.unformed: int | None = None  # a generation that did not come about, or broke
        self.spoiled: StepTry | None = None
        self.unsaved = False
        self.unreadable = False  # its disk: checkpoints cannot be loaded
        self.unloaded: Failure | None = None

    def hello(self, fingerprint: str) -> DrafterHello:
        return DrafterHello(
            incarnation=self.name, seq=self.next_seq(), protocol=PROTOCOL_VERSION, fingerprint=fingerprint,
            host="h", index=None, inbox=self.name,
        )  # fmt: skip

    def act(self, cluster: Cluster) -> None:
        orders: DrafterOrders | None = self.orders
        if orders is None:
            return
        allowed = set(orders.held)
        self.held = {
            a: (lease, b) for a, (lease, b) in self.held.items() if a in allowed or lease > orders.stamp
        }
        self._apply(orders)
        adopt = orders.adopt if orders.adopt and self.complete != orders.adopt.at else None
        if adopt and adopt.source != "peer":
            self._adopt(adopt, cluster)
        if not self._form(orders, adopt, cluster):
            return
        if adopt and adopt.source == "peer" and self.complete != adopt.at and self.generation is not None:
            self._ungroup(self.generation)
        self._save(orders, cluster)
        self._train(orders, cluster)

    def _form(self, orders: DrafterOrders, adopt, cluster: Cluster) -> bool:
        """Stand in the ordered generation; False while the others have not come. They may never."""
        group = orders.group
        wanted = None if group is None or group.generation == self.unformed else group.generation
        if wanted == self.generation:
            return True
        self.generation = None
        if group is None or wanted is None or len(group.members) == 1:
            self.generation = wanted
            return True
        assert group.store
        names = [member.incarnation for member in group.members]
        standing = cluster.standing.setdefault(wanted, {})
        if self.name not in standing and cluster.random.random() < cluster.flaky:
            self._ungroup(wanted)
            return True
        standing.setdefault(self.name, self.complete)
        if not all(name in standing for name in names):
            return False
        if adopt and adopt.source == "peer" and standing.get(adopt.name) == adopt.at:
            self.complete = None
            if adopt.name not in cluster.roles:  # it died while it sent its state
                self._ungroup(wanted)
                return True
            self._adopt(adopt, cluster)
        self.generation = wanted
        return True

    def _ungroup(self, generation: int) -> None:
        self.generation, self.unformed = None, generation

    def _broken(self, orders: DrafterOrders, cluster: Cluster) -> bool:
        """A reduction meets a member that died, or left the group."""
        names = [member.incarnation for member in orders.group.members] if orders.group else []
        peers = [cluster.roles.get(name) for name in names]
        return any(peer is None or peer.generation != self.generation for peer in peers)

    def _apply(self, orders: DrafterOrders) -> None:
        if self.vote is None:
            return
        if self.vote.step_try == orders.committed:
            at = self.complete
            assert at is not None and at.step == self.vote.step_try.step
            self.weights += (self.vote.step_try[1:],)
            self.complete, self.vote = StepAt(at.timeline, at.step + 1), None
        elif orders.train is None or orders.train.step_try != self.vote.step_try:
            self.vote = None

    def _adopt(self, adopt, cluster: Cluster) -> None:
        self.vote, self.unloaded = None, None
        if adopt.source == "seed":
            self.weights, self.complete = (), adopt.at
        elif adopt.source == "checkpoint" and self.unreadable:
            self.unloaded = Failure(order="adopt", reason="OSError: Input/output error")
        elif adopt.source == "checkpoint":
            self.weights, self.complete = cluster.disk[adopt.name], adopt.at
        else:
            peer = cluster.roles.get(adopt.name)
            if peer is not None and peer.alive and peer.complete == adopt.at:
                self.weights, self.complete = peer.weights, adopt.at

    def _save(self, orders: DrafterOrders, cluster: Cluster) -> None:
        self.saved = {at: saved for at, saved in self.saved.items() if at not in orders.recorded}
        self.unsaved = cluster.disk_full and orders.save is not None and orders.save == self.complete
        if cluster.disk_full:
            return
        if orders.save is not None and orders.save == self.complete and orders.save not in self.saved:
            name = f"ckpt-{self.complete.timeline}-{self.complete.step}-{self.name}"
            cluster.disk[name] = self.weights
            self.saved[self.complete] = Saved(at=self.complete, name=name, sha256=SHA)

    def _train(self, orders: DrafterOrders, cluster: Cluster) -> None:
        train = orders.train
        if train is None or self.vote is not None or self.complete is None:
            return
        if train.step_try == self.spoiled or self.generation is None:
            return
        if (train.step_try.timeline, train.step_try.step) != tuple(self.complete):
            return
        if any(pack.attempt not in self.held for pack in train.packs):
            return
        if self._broken(orders, cluster):
            self.spoiled = train.step_try
            if cluster.random.random() < 0.5:  # the others wait until their orders change
                self._ungroup(self.generation)
            return
        assert all(self.held[pack.attempt][1] == pack.batch for pack in train.packs)
        bad = tuple(pack.position for pack in train.packs if pack.batch in self.bad)
        self.vote = Vote(
            step_try=train.step_try, packs=tuple(p.attempt for p in train.packs), bad_positions=bad,
            gradient_finite=not bad,
        )  # fmt: skip
        cluster.trained[(train.step_try, self.name)] = tuple(pack.batch for pack in train.packs)

    def report(self) -> DrafterReport:
        return DrafterReport(
            incarnation=self.name, seq=self.next_seq(), orders=self.acted, totals={}, complete=self.complete,
            generation=self.generation, held=tuple(self.held), training=None, trained=0, vote=self.vote,
            saved=tuple(self.saved.values()), metrics=(), failures=self._failures(),
        )  # fmt: skip

    def _failures(self) -> tuple[Failure, ...]:
        adopt = self.orders.adopt if self.orders else None
        if self.unloaded is not None and adopt is not None and adopt.source == "checkpoint":
            return (self.unloaded,)
        if self.unsaved:
            return (Failure(order="save", reason="disk full"),)
        save, group = (self.orders.save, self.orders.group) if self.orders else (None, None)
        outrun = save is not None and save not in self.saved and self.complete is not None
        if outrun and self.complete.timeline == save.timeline and self.complete.step > save.step:
            return (Failure(order="save", reason="its state has passed"),)
        broken = group is not None and group.generation == self.unformed
        if not broken:
            return ()
        return (Failure(order="save", reason="disk full"), Failure(order="group", reason="a member was lost"))


class Cluster:
    """`loss` is the share of messages that vanish, `flaky` the share of groups that a member leaves."""

    identity = IDENTITY

    def __init__(
        self, folder: Path, config: Config, dataset, *, seed: int, loss: float = 0.0, poison=(), bad=(),
        flaky: float = 0.0,
    ) -> None:  # fmt: skip
        self.folder, self.config, self.dataset = folder, config, dataset
        self.random, self.loss = random.Random(seed), loss
        self.poison, self.bad, self.flaky = set(poison), set(bad), flaky
        self.standing: dict[int, dict[str, StepAt | None]] = {}  # who stood before a generation's store
        self.roles: dict[str, Role] = {}
        self.dead: dict[str, object] = {}
        self.disk: dict[str, tuple] = {}
        self.disk_full = False
        self.trained: dict[tuple, tuple] = {}
        self.network: list[tuple[str, object]] = []
        self.now_s, self.born = 0.0, 0
        self.start_coordinator()

    def start_coordinator(self) -> None:
        self.ledger = Ledger(self.folder / "ledger.sqlite", self.identity)
        self.core = Coordinator(
            self.config, self.dataset, self.ledger, self.ledger.fingerprint, PackSize(10, 1000),
            target_devices=devices(self.config)[0], drafter_devices=devices(self.config)[1],
        )  # fmt: skip
        self.book = OrderBook(self.core, repeat_s=1.0)

    def restart_coordinator(self) -> None:
        self.ledger.close()
        self.network = [m for m in self.network if m[0] != "coordinator"]
        self.start_coordinator()

    def kill(self, name: str) -> None:
        role = self.roles.pop(name)
        role.alive = False
        self.dead[name] = getattr(role, "computing", None)

    def post(self, to: str, message) -> None:
        if self.random.random() >= self.loss:
            self.network.append((to, message))
            if self.random.random() < self.loss:
                self.network.append((to, message))

    def post_pack(self, publish, batch, attempt) -> None:
        self.post("pack " + publish.inbox, (publish.lease, batch, attempt))

    def respawn(self) -> None:
        for role, count in (("target", self.config.target.count), ("drafter", self.config.drafter.count)):
            if sum(name.startswith(role) for name in self.roles) < count and not self.core.done:
                self.born += 1
                name = f"{role}-{self.born}"
                slots = self.config.target.slots
                self.roles[name] = (
                    SimTarget(name, slots, self.poison) if role == "target" else SimDrafter(name, self.bad)
                )

    def turn(self) -> None:
        """Deaths are noticed, everyone acts and reports, messages arrive, the coordinator decides."""
        self.now_s += 0.4
        for name, computing in list(self.dead.items()):
            if self.core.members.get(name) or name in self.core.awaited:
                self.core.lost(name, "its process died", self.now_s, computing=computing)
        for role in list(self.roles.values()):
            self._act(role)
        if self.loss:
            self.random.shuffle(self.network)
        late = len(self.network) // 3 if self.loss else 0
        arriving, self.network = self.network[late:], self.network[:late]
        for to, message in arriving:
            self._deliver(to, message)
        self.core.decide(self.now_s)
        if not self.core.recovering:
            for orders in self.book.pending(self.now_s):
                self.post(orders.incarnation, orders)
            self._check_what_is_kept()
        self._flush()

    def _check_what_is_kept(self) -> None:
        """Orders not built anew would be the same, and the pool's indexes say what its flights do."""
        pool = self.core.pool
        for member in self.core.members:
            name, last = member.incarnation, self.book._last[member.incarnation]
            assert self.book._build(member, last.stamp) == last, name
            mine = [f for f in pool if name in (f.target, f.holder)]
            assert sorted(pool.of_target(name) + pool.of_holder(name), key=id) == sorted(mine, key=id)
            assert pool.unfinished(name) == sum(f.target == name and not f.ready for f in pool)
        assert pool.payload_bytes == sum(f.payload_bytes for f in pool)
        assert all(pool.of_attempt(f.attempt) is f for f in pool)

    def _act(self, role: Role) -> None:
        if not role.alive:
            self.kill(role.name)
        elif not role.welcomed:
            self.post("coordinator", role.hello(self.core.ledger.fingerprint))
        else:
            role.act(self)
            if role.alive:
                self.post("coordinator", role.report())

    def _deliver(self, to: str, message) -> None:
        if to == "coordinator":
            is_hello = isinstance(message, TargetHello | DrafterHello)
            if is_hello and message.incarnation in self.dead:
                return  # its lock is free
            (self.core.hello if is_hello else self.core.report)(message, self.now_s)
            self._flush()
        elif to.startswith("pack "):
            drafter = self.roles.get(to.removeprefix("pack "))
            if drafter is not None:
                lease, batch, attempt = message
                known = drafter.orders and drafter.orders.stamp > lease and attempt not in drafter.orders.held
                if not known:
                    drafter.held[attempt] = (lease, batch)
        elif to in self.roles:
            self.roles[to].receive(message)

    def _flush(self) -> None:
        for name, message in self.core.outbox:
            self.post(name, message)
        self.core.outbox.clear()

    def run(self, turns: int = 3000) -> None:
        for _ in range(turns):
            if self.core.done:
                return
            self.respawn()
            self.turn()
        raise AssertionError(f"not done after {turns} turns: {self.describe()}")

    def describe(self) -> str:
        core = self.core
        return (
            f"step {core.step}/{core.schedule.total_steps} current={core.current} "
            f"saving={core.saves.pending} "
            f"world={core.world.ranks} awaited={core.awaited} flights={list(core.pool)} "
            f"events={[e.text for e in core.record.events][-8:]}"
        )

    def check(self) -> None:
        """Every batch has one outcome, every committed step is what its ranks trained, and nothing else."""
        core, ledger = self.core, self.ledger
        assert ledger.audit(core.work.batches_per_epoch) == (0, 0)
        rows = ledger._db.execute(
            "SELECT step, coordinator_epoch, counter FROM steps WHERE timeline = ? ORDER BY step",
            (ledger.timeline,),
        ).fetchall()
        assert [row[0] for row in rows] == list(range(core.schedule.total_steps))
        by_try: dict[tuple, list] = {}
        for (step_try, _), batches in self.trained.items():
            by_try.setdefault(tuple(step_try[1:]), []).extend(batches)
        for row in rows:
            outcomes = ledger._db.execute(
                "SELECT epoch, batch FROM outcomes WHERE timeline = ? AND step = ? AND failed IS NULL",
                (ledger.timeline, row[0]),
            ).fetchall()
            assert sorted(map(tuple, by_try.get(row, []))) == sorted(outcomes), row
        final = ledger.checkpoints()[-1]
        assert final.at.step == core.schedule.total_steps
        assert list(self.disk[final.name]) == rows
