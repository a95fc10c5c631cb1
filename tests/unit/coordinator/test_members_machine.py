"""Who is in the run, against a table of who was sent away: joins, silence, zombies, restarts, rivals.

The model knows processes by what they said and what became of them; it never looks at what the
coordinator keeps, but for the places that it gives out. About 3 s.
"""

import random
import tempfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from lease_roles import Drafter, Target

from protocol.messages import Bye, DrafterOrders, Exit, Failure, TargetOrders, Welcome, Who
from services.config.schema import Config
from services.coordinator.coordinator import Coordinator, PackSize
from services.coordinator.ledger import Ledger
from services.coordinator.orders import OrderBook
from services.data.dataset import Sample
from services.data.training_data import TrainingData
from services.data.writer import write_dataset

IDENTITY = {"options": {}, "dataset": "d", "model": "m"}
PLACES = {"target": 2, "drafter": 3}
SILENCE_S, REJOIN_S = 5.0, 20.0


@pytest.fixture(scope="module", autouse=True)
def dataset(tmp_path_factory):
    lengths = random.Random(7)
    sizes = (lengths.randint(4, 16) for _ in range(10))
    samples = [Sample(np.ones(n, np.int32), np.ones(n, np.uint8)) for n in sizes]
    Membership.data = TrainingData(write_dataset(tmp_path_factory.mktemp("data") / "data", samples, {}))


@dataclass
class Process:
    """`place` is the one it was welcomed to; None before, and for whoever was refused."""

    role: Target | Drafter
    kind: str
    place: int | None = None
    heard_s: float = 0.0
    fenced: bool = False
    reported: bool = False  # to this coordinator


class Membership(RuleBasedStateMachine):
    data: TrainingData

    @initialize(elastic=st.sampled_from(["shrink", "wait"]))
    def begin(self, elastic: str) -> None:
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.config = Config(
            model={"path": "m"},
            data={"path": "d"},
            run={"epochs": 1},
            plan={"token_budget": 32, "bucket_edges": (8, 16)},
            target={"count": PLACES["target"]},
            drafter={"count": PLACES["drafter"], "elastic": elastic},
            coordinator={"silence_s": SILENCE_S, "rejoin_s": REJOIN_S},
        )
        self.elastic, self.now_s, self.born = elastic, 0.0, 0
        self.everybody: dict[str, Process] = {}
        self.awaited: set[str] = set()  # lived when the coordinator started, and have not reported since
        self.generations: dict[int, tuple[str, ...]] = {}
        self._start()

    def teardown(self) -> None:
        if hasattr(self, "core"):
            self.ledger.close()
            self.folder.cleanup()

    def _start(self) -> None:
        self.ledger = Ledger(Path(self.folder.name) / "ledger.sqlite", IDENTITY)
        self.core = Coordinator(
            self.config, self.data, self.ledger, self.ledger.fingerprint, PackSize(10, 1000),
            target_devices=("a", "b"), drafter_devices=("c", "d", "e"),
        )  # fmt: skip
        self.book = OrderBook(self.core, repeat_s=1.0)
        self.reply_by_s: float | None = None  # counts from the first decision: before it nobody is heard

    def living(self, kind: str | None = None) -> dict[str, Process]:
        """Those who hold a place."""
        return {
            name: process
            for name, process in self.everybody.items()
            if process.place is not None and not process.fenced and kind in (None, process.kind)
        }

    def answer(self) -> Exit | Who | Welcome | None:
        answers, self.core.outbox[:] = list(self.core.outbox), []
        assert len(answers) <= 1
        return answers[0][1] if answers else None  # type: ignore[return-value]

    # ---- processes ------------------------------------------------------------------------------

    @rule(kind=st.sampled_from(["target", "drafter"]), wish=st.none() | st.integers(0, 3), fits=st.booleans())
    def start(self, kind: str, wish: int | None, fits: bool) -> None:
        """A new process asks for a place, perhaps for one that is taken, or with other options."""
        self.born += 1
        name = f"{kind}-{self.born}"
        self.everybody[name] = Process(Target(name, 3) if kind == "target" else Drafter(name), kind)
        self._hello(name, wish, fits)

    @precondition(lambda self: self.everybody)
    @rule(data=st.data(), wish=st.none() | st.integers(0, 3))
    def say_hello_again(self, data: st.DataObject, wish: int | None) -> None:
        name = data.draw(st.sampled_from(sorted(self.everybody)))
        process = self.everybody[name]
        self._hello(name, wish if process.place is None else process.place, True)

    def _hello(self, name: str, wish: int | None, fits: bool) -> None:
        process = self.everybody[name]
        fingerprint = self.core.ledger.fingerprint if fits else "f" * 64
        hello = process.role.hello(fingerprint).model_copy(update={"index": wish})
        was_member = self.core.members.get(name) is not None
        welcome = self.core.hello(hello, self.now_s)
        answer = self.answer()
        taken = {p.place for n, p in self.living(process.kind).items() if n != name}
        vacant = set(range(PLACES[process.kind])) - taken
        wanted = vacant if wish is None else vacant & {wish}
        if process.fenced:
            assert not welcome and isinstance(answer, Exit) and "declared dead" in answer.reason
        elif self.awaited and name not in self.awaited and not was_member:
            assert not welcome and answer is None, "a place was given away while its holder may return"
        elif was_member or (wanted and fits):
            assert welcome and isinstance(answer, Welcome)
            assert process.place in (None, answer.index), "a living process was given another place"
            assert was_member or answer.index == min(wanted), "not the lowest vacant place"
            device = self.core.members.get(name).device
            assert device == ("ab" if process.kind == "target" else "cde")[answer.index]
            process.place, process.heard_s = answer.index, self.now_s
        else:
            assert not welcome and isinstance(answer, Exit) and not answer.finished
            assert ("taken by a living process" if fits else "fingerprint") in answer.reason

    @rule(vacant=st.booleans())
    def everybody_speaks(self, vacant: bool) -> None:
        """What usually happens: places are taken, all report and obey."""
        for kind, places in PLACES.items():
            while vacant and not self.awaited and len(self.living(kind)) < places:
                self.start(kind, None, True)
        for name in sorted(self.living()):
            if self.core.members.get(name) is None:
                self._hello(name, self.everybody[name].place, True)
            self._report(name, stale=False, group="stands")
        self.decide()

    @precondition(lambda self: self.everybody)
    @rule(data=st.data(), stale=st.booleans(), group=st.sampled_from(["stands", "stands", "none", "broken"]))
    def report(self, data: st.DataObject, stale: bool, group: str) -> None:
        self._report(data.draw(st.sampled_from(sorted(self.everybody))), stale=stale, group=group)

    def _report(self, name: str, *, stale: bool, group: str) -> None:
        process, role = self.everybody[name], self.everybody[name].role
        if isinstance(role, Drafter):
            role.obey(set(), set())
            role.generation = role.generation if group == "stands" else None
        else:
            role.obey()
        report = role.report()
        if isinstance(role, Drafter) and group == "broken":
            report = report.model_copy(update={"failures": (Failure(order="group", reason="a member left"),)})
        if stale:
            report = report.model_copy(update={"seq": 0})
        member = self.core.members.get(name) is not None
        accepted = self.core.report(report, self.now_s)
        answer = self.answer()
        if process.fenced:
            assert isinstance(answer, Exit) and "declared dead" in answer.reason
        elif not member:
            assert isinstance(answer, Who)
        else:
            assert answer is None and accepted != stale
            if not stale:
                process.heard_s, process.reported = self.now_s, True
                self.awaited.discard(name)

    @precondition(lambda self: self.everybody)
    @rule(data=st.data(), stale=st.booleans())
    def leave(self, data: st.DataObject, stale: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.everybody)))
        process = self.everybody[name]
        process.role.seq += 1
        self.core.bye(Bye(incarnation=name, seq=0 if stale else process.role.seq, reason="asked"), self.now_s)
        if self.core.members.get(name) is None and not stale and name in self.living():
            self._fenced_unless_unknown(name)

    def _fenced_unless_unknown(self, name: str) -> None:
        """A coordinator that has not met it yet cannot take its word for it."""
        if name in self.ledger.buried():
            self._fence(name)

    def _fence(self, name: str) -> None:
        self.everybody[name].fenced = True
        self.awaited.discard(name)

    @precondition(lambda self: self.living())
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.living())))
        self.core.lost(name, "its process died", self.now_s)
        self._fence(name)

    # ---- time and the coordinator ---------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.5, 3.0, 8.0, 25.0]), stalled=st.booleans())
    def pass_time(self, seconds: float, stalled: bool) -> None:
        """As the server does it: a stall of its own is forgiven, then the silent are fenced."""
        self.now_s += seconds
        members = {name for name in self.living() if self.core.members.get(name) is not None}
        if stalled:
            self.core.forgive(seconds)
            if self.reply_by_s is not None:
                self.reply_by_s += seconds
            for name in members:
                self.everybody[name].heard_s += seconds
        late = {name for name in members if self.now_s - self.everybody[name].heard_s > SILENCE_S}
        assert set(self.core.members.silent(self.now_s, SILENCE_S)) == late
        for name in late:
            self.core.lost(name, "silent", self.now_s)
            self._fence(name)

    @rule()
    def decide(self) -> None:
        self.core.decide(self.now_s)
        if self.reply_by_s is None:
            self.reply_by_s = self.now_s + REJOIN_S
        if self.now_s > self.reply_by_s:
            for name in set(self.awaited):
                self._fence(name)
        assert self.core.recovering == bool(self.awaited)
        for orders in () if self.core.recovering else self.book.pending(self.now_s):
            assert orders.incarnation in self.living(), "orders to one who is no member"
            self._told(orders)

    def _told(self, orders: TargetOrders | DrafterOrders) -> None:
        self.everybody[orders.incarnation].role.told = orders  # type: ignore[assignment]
        if not isinstance(orders, DrafterOrders) or orders.group is None:
            return
        group, names = orders.group, tuple(member.incarnation for member in orders.group.members)
        if group.generation not in self.generations:
            assert group.generation > max(self.generations, default=0), "generations go backwards"
            drafters = {n: p for n, p in self.living("drafter").items() if p.reported}
            assert set(names) <= drafters.keys()
            assert list(names) == sorted(names, key=lambda n: drafters[n].place or 0), "not by place"
            assert self.elastic == "shrink" or len(names) == PLACES["drafter"]
        assert self.generations.setdefault(group.generation, names) == names, "one number, two groups"
        assert [member.rank for member in group.members] == list(range(len(names)))

    @rule()
    def restart_the_coordinator(self) -> None:
        self.ledger.close()
        self._start()
        self.awaited = set(self.living())
        for process in self.everybody.values():
            process.reported = False

    # ---- always ---------------------------------------------------------------------------------

    @invariant()
    def a_place_has_one_living_holder_at_most(self) -> None:
        if not hasattr(self, "core"):
            return
        holders = [(p.kind, p.place) for p in self.living().values()]
        assert len(set(holders)) == len(holders)
        assert {i.name: (i.role, i.place) for i in self.ledger.living()} == {
            name: (p.kind, p.place) for name, p in self.living().items()
        }
        assert self.ledger.buried() == {name for name, p in self.everybody.items() if p.fenced}
        for member in self.core.members:
            assert self.everybody[member.incarnation].place == member.index
        assert set(self.core.world.ranks) <= {*self.living(), *self.ledger.buried()}


TestMembership = Membership.TestCase
TestMembership.settings = settings(max_examples=100, stateful_step_count=30, deadline=None)
