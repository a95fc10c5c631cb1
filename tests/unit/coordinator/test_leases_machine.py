"""Every batch from pending to its one outcome, against sets: targets and drafters die, fail, return, restart.

    PENDING -> ASSIGNED -> READY -> LEASED -> COMMITTED | FAILED

The model looks at orders and ledger only: what the coordinator told, never what it remembers. Every life
ends in peace, in which the run must finish with one outcome per batch. About 6 s.
"""

import random
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lease_roles import Drafter, Target

from protocol.messages import BatchId, Exit, Stamp, StepTry
from services.config.schema import Config
from services.coordinator.coordinator import Coordinator, PackSize
from services.coordinator.ledger import Ledger
from services.coordinator.orders import OrderBook
from services.data.dataset import Sample
from services.data.training_data import TrainingData
from services.data.writer import write_dataset

IDENTITY = {"options": {}, "dataset": "d", "model": "m"}
PACKS, AHEAD, SLOTS, TARGETS = 2, 1, 3, 3


@pytest.fixture(scope="module", autouse=True)
def dataset(tmp_path_factory):
    sizes = random.Random(7).choices(range(4, 17), k=15)
    samples = [Sample(np.ones(n, np.int32), np.ones(n, np.uint8)) for n in sizes]
    Leases.data = TrainingData(write_dataset(tmp_path_factory.mktemp("data") / "data", samples, {}))


def config(drafters: int, cap: int) -> Config:
    return Config(
        model={"path": "m"},
        data={"path": "d"},
        run={"epochs": 2, "max_failed_ratio": 1.0},
        plan={"token_budget": 32, "bucket_edges": (8, 16), "packs_per_step": PACKS, "min_ready": 0},
        target={"count": TARGETS, "slots": SLOTS, "assign_ahead": AHEAD},
        drafter={"count": drafters, "elastic": "shrink"},
        coordinator={"in_flight_cap_packs": cap, "overdue_s": 5.0},
        checkpoint={"every_steps": 2},
    )


class Leases(RuleBasedStateMachine):
    data: TrainingData

    @initialize(drafters=st.integers(1, 2), cap=st.sampled_from([0, 4]), poison=st.integers(0, 5),
                bad=st.integers(0, 5), slots=st.integers(2, SLOTS))  # fmt: skip
    def begin(self, drafters: int, cap: int, poison: int, bad: int, slots: int) -> None:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.config, self.cap, self.slots = config(drafters, cap), cap, slots
        self.targets: dict[str, Target] = {}
        self.drafters: dict[str, Drafter] = {}
        self.now_s, self.born = 0.0, 0
        self.poison = {BatchId(0, poison)} if poison < 4 else set()
        self.bad = {BatchId(0, bad)} if bad < 4 else set()
        # the model
        self.outcomes: dict[BatchId, str] = {}
        self.step_of_outcome: dict[BatchId, int] = {}
        self.batch_of: dict[Stamp, BatchId] = {}
        self.ready: set[Stamp] = set()  # attempts that a report said are ready
        self.deaths: dict[BatchId, int] = {}
        self.due: set[BatchId] = set()  # a target failed it, or three died of it
        self.votes: dict[StepTry, dict[str, tuple[Stamp, ...]]] = {}
        self.flagged: set[BatchId] = set()
        self.assigned: dict[Stamp, str] = {}  # attempt -> target, at the end of the last rule
        self.held: set[BatchId | None] = set()  # leased, whether or not their target lives
        self.timeline = 0
        self._start()
        steps, composer = self.core.schedule.total_steps, self.core.work.composer
        self.all = [batch for step in range(steps) for _, batch in composer.planned(step)]
        self.join()

    def teardown(self) -> None:
        if hasattr(self, "core"):
            try:
                self.peace()
            finally:
                self.ledger.close()
                self.folder.cleanup()

    def _start(self) -> None:
        self.ledger = Ledger(Path(self.folder.name) / "ledger.sqlite", IDENTITY)
        self.core = Coordinator(
            self.config, self.data, self.ledger, self.ledger.fingerprint, PackSize(10, 1000),
            target_devices=("cpu",) * TARGETS,
            drafter_devices=("cpu",) * self.config.drafter.count,
        )  # fmt: skip
        self.book = OrderBook(self.core, repeat_s=1.0)

    # ---- roles ----------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return sorted([*self.targets, *self.drafters])

    @precondition(lambda self: not self.core.done)
    @rule()
    def join(self) -> None:
        """Every vacant place is taken."""
        while len(self.targets) < TARGETS:
            self.born += 1
            name = f"target-{self.born}"
            self.targets[name] = Target(name, self.slots)
            self._hello(self.targets[name])
        while len(self.drafters) < self.config.drafter.count:
            self.born += 1
            name = f"drafter-{self.born}"
            self.drafters[name] = Drafter(name)
            self._hello(self.drafters[name])
        self.settle()

    def _hello(self, role: Target | Drafter) -> None:
        assert self.core.hello(role.hello(self.core.ledger.fingerprint), self.now_s)
        self._say(role)

    def _say(self, role: Target | Drafter) -> None:
        if isinstance(role, Target):
            known = role.told and role.told.stamp.coordinator_epoch == self.core.epoch_number
            given = {a.attempt for a in role.assignments()} if known else set()
            self.ready |= {a for a, slot in role.work.items() if slot.state == "ready"}
            failed = [slot.batch for a, slot in role.work.items() if slot.state == "failed" and a in given]
            self.due |= set(failed) - self.outcomes.keys()
        elif role.vote is not None:
            self.votes.setdefault(role.vote.step_try, {})[role.name] = role.vote.packs
            self.flagged |= {self.batch_of[a] for a in role.vote.packs} & self.bad
        self.core.report(role.report(), self.now_s)

    @precondition(lambda self: not self.core.done)
    @rule(data=st.data(), hears=st.booleans(), says=st.booleans(), fails=st.sampled_from([0, 0, 0, 0, 1]))
    def act(self, data: st.DataObject, hears: bool, says: bool, fails: int) -> None:
        if self.names():
            self._act(data.draw(st.sampled_from(self.names())), hears=hears, says=says, fails=bool(fails))
            self.settle()

    def _act(self, name: str, *, hears: bool = True, says: bool = True, fails: bool = False) -> None:
        role = self.targets.get(name) or self.drafters[name]
        if isinstance(role, Target):
            if hears:
                role.obey()
            if role.computing in self.poison:
                self._die(name)
                return
            role.compute(fails=fails)
        elif hears:
            announced = {
                a.attempt
                for target in self.targets.values()
                for a in (target.heard.assignments if target.heard else ())
                if a.publish and a.publish.inbox == name and a.attempt in target.work
                and target.work[a.attempt].state == "ready"
            }  # fmt: skip
            role.obey(announced, self.bad)
        if says:
            self._say(role)

    @precondition(lambda self: not self.core.done)
    @rule(rounds=st.integers(1, 8))
    def calm(self, rounds: int) -> None:
        for _ in range(rounds):
            for name in self.names():
                self._act(name)
            self.settle()

    @precondition(lambda self: not self.core.done and self.names())
    @rule(data=st.data(), in_forward=st.booleans())
    def die(self, data: st.DataObject, in_forward: bool) -> None:
        busy = [name for name, target in self.targets.items() if target.computing]
        name = data.draw(st.sampled_from(busy if in_forward and busy else self.names()))
        got = {a for d in self.drafters.values() if d.told for a in d.said_held & set(d.told.held)}
        evictions = self.core.placement.evictions
        self._die(name)
        self.settle()
        right = self.config.drafter.count == 1  # of two, the wrong one may have it
        if name.startswith("target") and right and self.core.placement.evictions == evictions:
            assert {self.batch_of[a] for a in got} <= self.held | self.outcomes.keys(), "held, and lost"

    def _die(self, name: str) -> None:
        target = self.targets.pop(name, None)
        self.drafters.pop(name, None)
        computing = target.computing if target else None
        if computing is not None and computing not in self.outcomes:
            self.deaths[computing] = self.deaths.get(computing, 0) + 1
            if self.deaths[computing] == 3:
                self.due.add(computing)
        self.core.lost(name, "its process died", self.now_s, computing=computing)

    @rule()
    def too_late(self) -> None:
        first, step = self.core.schedule.first_step, self.core.step
        waited_for = {
            a for a in self.assigned.keys() - self.ready
            if first(self.batch_of[a].epoch) + self.batch_of[a].index // PACKS == step
        }  # fmt: skip
        patience = (self.core.placement.patience_s(self.batch_of[a]) for a in waited_for)
        self.now_s += 2 * max(patience, default=5.0)
        self.settle()
        assert len(self.targets) < 2 or self.core.done or not waited_for & self.assigned.keys(), "not moved"

    @precondition(lambda self: not self.core.done)
    @rule(data=st.data(), dead=st.integers(0, 7))
    def restart_the_coordinator(self, data: st.DataObject, dead: int) -> None:
        """Roles go on without it; some are dead when it comes back, the others return in any order."""
        self.ledger.close()
        self._start()
        names = data.draw(st.permutations(self.names()))
        for name in names[:dead] if dead < 3 else ():
            self._die(name)
        for name in names:
            if role := self.targets.get(name) or self.drafters.get(name):
                self._hello(role)
        for drafter in self.drafters.values():
            drafter.said_held = set()  # it may have said so before the packs' targets were back
        self.settle()

    # ---- what the coordinator makes of it ---------------------------------------------------------

    def settle(self) -> None:
        self.now_s += 0.4
        self.core.decide(self.now_s)
        assert self.core.done or not [m for _, m in self.core.outbox if isinstance(m, Exit)]
        self.core.outbox.clear()
        for orders in () if self.core.recovering else self.book.pending(self.now_s):
            (self.targets.get(orders.incarnation) or self.drafters[orders.incarnation]).told = orders
        self._follow_outcomes()
        self._follow_assignments()

    def _follow_outcomes(self) -> None:
        said = {BatchId(e, i): o for e in range(2) for i, o in self.ledger.outcomes(e).items()}
        if self.ledger.timeline != self.timeline:
            self.timeline, step = self.ledger.timeline, self.ledger.committed_steps
            poisoned = {b for b, n in self.deaths.items() if n > 2}
            self.outcomes = {
                b: o for b, o in self.outcomes.items() if self.step_of_outcome[b] < step or b in poisoned
            }
        assert self.outcomes.items() <= said.items(), "an outcome changed, or was lost"
        fresh = {b: o for b, o in said.items() if b not in self.outcomes}
        committed = {b for b, outcome in fresh.items() if outcome == "committed"}
        if committed:
            ranks = self.votes[self.ledger.last_try].values()
            trained = [self.batch_of[attempt] for attempts in ranks for attempt in attempts]
            assert sorted(trained) == sorted(committed), "not what its ranks trained, once"
            assert not committed & self.bad
        assert fresh.keys() - committed <= self.due | self.flagged, "failed without a reason"
        assert self.due <= said.keys() and all(said[b] == "failed" for b in self.due & fresh.keys())
        now = self.ledger.committed_steps - bool(committed)
        first = self.core.schedule.first_step
        self.step_of_outcome |= {b: max(first(b.epoch) + b.index // PACKS, now) for b in fresh}
        self.outcomes, self.due = said, set()

    def _follow_assignments(self) -> None:
        if self.core.recovering:
            return
        given = [(a.attempt, a.batch, name) for name, t in self.targets.items() for a in t.assignments()]
        batches = [batch for _, batch, _ in given]
        assert len(set(batches)) == len(batches), "two targets have one batch"
        assert not self.outcomes.keys() & set(batches), "a batch with an outcome is computed again"
        fresh = {attempt: batch for attempt, batch, _ in given if attempt not in self.batch_of}
        pending_before = set(self.all) - {self.batch_of[a] for a in self.assigned} - self.outcomes.keys()
        held_before = self.held
        self.held = {self.batch_of.get(a) for d in self.drafters.values() if d.told for a in d.told.held}
        waiting = pending_before - set(batches) - held_before - self.held
        waiting -= {b for b, n in self.deaths.items() if n >= 2}
        waiting -= self.core.placement._moved.keys()  # for another target than the one where it was late
        assert not [(w, b) for w in waiting for b in fresh.values() if w < b], "not in plan order"
        assert not fresh or not self.cap or len(given) <= self.cap
        for attempt, batch, _ in given:
            assert self.batch_of.setdefault(attempt, batch) == batch, "an attempt was used again"
        self.assigned = {attempt: name for attempt, _, name in given}

    @invariant()
    def targets_have_what_they_can_hold(self) -> None:
        for target in self.targets.values():
            unfinished = [a.batch for a in target.assignments() if a.attempt not in self.ready]
            assert len(target.assignments()) <= target.slots and len(unfinished) <= AHEAD + 1
            assert not [a for a in target.assignments() if a.publish and a.attempt not in self.ready]
            suspects = [batch for batch in unfinished if self.deaths.get(batch, 0) >= 2]
            assert not suspects or len(unfinished) == 1, "a suspect does not run alone"

    def peace(self) -> None:
        """Nobody is killed any more but by poison: every batch gets its outcome."""
        for _ in range(200):
            if self.core.done:
                break
            self.join()
            self.calm(1)
        assert self.ledger.finished, self.core.record.events
        assert self.ledger.audit(self.core.work.batches_per_epoch) == (0, 0)
        assert self.outcomes.keys() == set(self.all)


TestLeases = Leases.TestCase
TestLeases.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
