"""The desk under a coordinator whose messages are lost, late, doubled and reordered.

`weights` stands for the drafter's weights: the tries whose gradients were applied since step 0. The
ledger's history says what they must be for every StepAt, so one comparison after each rule covers
all of: nothing applied twice, nothing uncommitted, nothing skipped, nothing left by an abort.
"""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.messages import (
    Adopt,
    BatchId,
    DrafterOrders,
    Group,
    Member,
    Saved,
    Stamp,
    StepAt,
    StepMetrics,
    StepTry,
    Train,
    TrainPack,
    Vote,
)
from services.drafter.desk import Commit, Desk, Discard, Form, Learn, Leave, Load, Reduce, Save, Wait

ME = "drafter-1"


class LossyRun(RuleBasedStateMachine):
    """A coordinator's ledger, two lossy channels, and a drafter that carries out what its desk says."""

    def __init__(self) -> None:
        super().__init__()
        self.desk = Desk(ME)
        # the coordinator
        self.epoch, self.counter = 1, 0
        self.here = StepAt(0, 0)
        self.history: dict[StepAt, tuple[StepTry, ...]] = {self.here: ()}
        self.last_try: StepTry | None = None
        self.current: StepTry | None = None
        self.share: list[TrainPack] = []
        self.leased: dict[Stamp, Stamp] = {}
        self.saving: StepAt | None = None
        self.recorded: list[Saved] = []
        self.generation = 1
        self.report = self.desk.level()
        # the channels
        self.orders_sent: list[DrafterOrders] = []
        self.packs_sent: list[tuple[Stamp, Stamp]] = []
        self.reports_sent: list[dict] = []
        # the drafter
        self.weights: tuple[StepTry, ...] = ()
        self.gradient: list[TrainPack] = []
        self.owner: StepTry | None = None
        self.reduced: Vote | None = None
        self.held: dict[Stamp, Stamp] = {}
        self.refuse_loads = False

    def stamp(self) -> Stamp:
        self.counter += 1
        return Stamp(self.epoch, self.counter)

    # ---- the coordinator decides ----------------------------------------------------------------

    def open_try(self, packs):
        self.current = StepTry(*self.here, *self.stamp())
        self.share = [TrainPack(position=p, batch=BatchId(0, p), attempt=None) for p in range(packs)]

    def lease_a_pack(self):
        at = next(i for i, pack in enumerate(self.share) if pack.attempt is None)
        attempt = self.stamp()
        self.share[at] = self.share[at].model_copy(update={"attempt": attempt})
        self.leased[attempt] = self.stamp()
        self.packs_sent.append((attempt, self.leased[attempt]))

    @precondition(lambda self: self.leased)
    @rule(data=st.data())
    def lease_it_again(self, data):
        attempt = data.draw(st.sampled_from(sorted(self.leased)))
        self.leased[attempt] = self.stamp()
        self.packs_sent.append((attempt, self.leased[attempt]))

    @precondition(lambda self: any(pack.attempt for pack in self.share))
    @rule(data=st.data())
    def revoke_a_pack(self, data):
        at = data.draw(st.sampled_from([i for i, pack in enumerate(self.share) if pack.attempt]))
        self.leased.pop(self.share[at].attempt, None)
        self.share[at] = self.share[at].model_copy(update={"attempt": None})

    def abort(self):
        self.current, self.share = None, []

    def commit(self):
        before = self.here
        self.here = StepAt(before.timeline, before.step + 1)
        self.history[self.here] = (*self.history[before], self.current)
        self.last_try, self.current = self.current, None
        for pack in self.share:
            self.leased.pop(pack.attempt, None)
        self.share = []

    def vote_is_in(self) -> bool:
        vote = self.report["vote"]
        return (
            self.current is not None
            and vote is not None
            and vote.step_try == self.current
            and vote.packs == tuple(pack.attempt for pack in self.share)
        )

    def decide(self, packs: int) -> None:
        if self.vote_is_in():
            self.commit()
        elif any(pack.attempt is None for pack in self.share):
            self.lease_a_pack()
        elif self.current is None and self.report["complete"] == self.here:
            self.open_try(packs)

    @rule(packs=st.integers(0, 2), rounds=st.integers(1, 6))
    def calm(self, packs, rounds):
        for _ in range(rounds):
            self.decide(packs)
            self.exchange()

    @rule(
        packs=st.integers(0, 3), orders_arrive=st.booleans(), packs_arrive=st.booleans(),
        report_arrives=st.booleans(), actions=st.integers(0, 8),
    )  # fmt: skip
    def round(self, packs, orders_arrive, packs_arrive, report_arrives, actions):
        """What usually happens, in the order in which it usually does."""
        self.decide(packs)
        self.send_orders()
        if orders_arrive:
            self.deliver(self.orders_sent[-1])
        if packs_arrive and self.packs_sent:
            self.hand_over(*self.packs_sent[-1])
        for _ in range(actions):
            self.act(fails=False)
        self.say()
        if report_arrives:
            self.hear()

    def new_generation(self):
        self.generation += 1
        self.abort()

    def coordinator_restarts(self):
        self.epoch, self.counter = self.epoch + 1, 0
        self.current, self.share, self.saving = None, [], None
        self.generation += 1

    @rule(what=st.sampled_from(["abort", "new_generation", "coordinator_restarts", "lose_everything_sent"]))
    def disturb(self, what):
        getattr(self, what)()

    @rule()
    def order_checkpoint(self):
        self.saving = self.here

    @precondition(lambda self: self.recorded)
    @rule(data=st.data())
    def roll_back(self, data):
        saved = data.draw(st.sampled_from(self.recorded))
        timeline = max(at.timeline for at in self.history) + 1
        self.here = StepAt(timeline, saved.at.step)
        self.history[self.here] = self.history[saved.at]
        self.current, self.share, self.last_try, self.saving = None, [], None, None

    @rule()
    def send_orders(self):
        adopt = None
        if self.report["complete"] != self.here:
            saved = [s for s in self.recorded if self.history[s.at] == self.history[self.here]]
            if self.here.step == 0:
                adopt = Adopt(at=self.here, source="seed", name="", sha256="")
            elif saved and not (self.report["vote"] and self.report["vote"].step_try == self.last_try):
                adopt = Adopt(at=self.here, source="checkpoint", name=saved[0].name, sha256="")
        train = Train(step_try=self.current, packs=tuple(self.share)) if self.current else None
        member = Member(rank=0, incarnation=ME)
        self.orders_sent.append(
            DrafterOrders(
                incarnation=ME, stamp=self.stamp(), held=tuple(sorted(self.leased)), arenas=(),
                group=Group(generation=self.generation, members=(member,), store=""), adopt=adopt,
                committed=self.last_try, train=train, save=self.saving,
                recorded=tuple(saved.at for saved in self.recorded),
            )
        )  # fmt: skip

    # ---- the channels ---------------------------------------------------------------------------

    @precondition(lambda self: self.orders_sent)
    @rule(data=st.data(), keep=st.booleans())
    def deliver_orders(self, data, keep):
        at = data.draw(st.integers(0, len(self.orders_sent) - 1))
        orders = self.orders_sent[at] if keep else self.orders_sent.pop(at)
        self.deliver(orders)

    def deliver(self, orders: DrafterOrders) -> None:
        newest = self.desk.orders
        dropped = self.desk.take_orders(orders)
        if newest is not None and orders.stamp <= newest.stamp:
            assert not dropped and self.desk.orders is newest
        for attempt in dropped:
            assert orders.stamp > self.held.pop(attempt), "dropped by orders older than its lease"
            assert attempt not in orders.held

    @precondition(lambda self: self.packs_sent)
    @rule(data=st.data(), keep=st.booleans())
    def deliver_pack(self, data, keep):
        at = data.draw(st.integers(0, len(self.packs_sent) - 1))
        attempt, lease = self.packs_sent[at] if keep else self.packs_sent.pop(at)
        self.hand_over(attempt, lease)

    def hand_over(self, attempt: Stamp, lease: Stamp) -> None:
        if self.desk.take_pack(attempt, lease):
            self.held[attempt] = max(lease, self.held.get(attempt, lease))
        else:
            assert self.desk.orders.stamp >= lease and attempt not in self.desk.orders.held

    def lose_everything_sent(self):
        self.orders_sent.clear()
        self.packs_sent.clear()
        self.reports_sent.clear()

    @rule()
    def say(self):
        self.reports_sent.append(self.desk.level())

    @precondition(lambda self: self.reports_sent)
    @rule()
    def hear(self):
        """Reports carry sequence numbers: an older one is ignored by the coordinator."""
        self.report = self.reports_sent[-1]
        self.reports_sent.clear()
        if self.saving is not None and any(s.at == self.saving for s in self.report["saved"]):
            self.saving = None
        known = {saved.name for saved in self.recorded}
        self.recorded += [s for s in self.report["saved"] if s.name not in known and s.at in self.history]

    # ---- the drafter acts -----------------------------------------------------------------------

    @rule(fails=st.booleans())
    def act(self, fails):
        action = self.desk.next_action()
        match action:
            case Load(adopt):
                assert not self.gradient, "state taken over in the middle of a try"
                if fails:
                    self.desk.unloaded(adopt, "cannot be read")
                else:
                    self.weights = self.history[adopt.at]
                    self.desk.loaded(adopt.at)
            case Form(group):
                if fails and group is not None:
                    self.desk.ungrouped(group.generation, "a member died")
                else:
                    self.desk.formed(group.generation if group else None)
            case Leave(generation, why):
                self.desk.ungrouped(generation, why)
            case Learn(pack, step_try, _):
                assert pack.attempt in self.held
                assert self.owner in (None, step_try), "a gradient of two tries"
                assert not self.gradient or self.gradient[-1].position < pack.position
                self.owner = step_try
                self.gradient.append(pack)
                self.desk.learned(pack)
            case Reduce(step_try, packs):
                assert self.owner in (None, step_try)
                assert packs == tuple(pack.attempt for pack in self.gradient)
                self.owner = step_try
                self.reduce(step_try, packs, fails)
            case Commit(step_try):
                assert self.reduced is not None and self.reduced.step_try == step_try
                self.weights = (*self.weights, step_try)
                self.forget_gradient()
                at = StepAt(step_try.timeline, step_try.step + 1)
                self.desk.committed(StepMetrics(at=at, values={}))
            case Discard(step_try):
                assert self.owner in (None, step_try)
                self.forget_gradient()
                self.desk.discarded()
            case Save(at):
                assert at == self.desk.complete
                self.desk.saving(at)
                if fails:
                    self.desk.unsaved(at, "disk full")
                else:
                    self.desk.saved(Saved(at=at, name=f"c{at.timeline}-{at.step}", sha256="0" * 64))

    def reduce(self, step_try: StepTry, packs: tuple[Stamp, ...], fails: bool) -> None:
        if fails:
            self.forget_gradient()
            self.desk.unreduced(step_try)
            self.desk.ungrouped(self.desk.generation, "a member died")
            return
        self.reduced = Vote(step_try=step_try, packs=packs, bad_positions=(), gradient_finite=True)
        self.desk.voted(self.reduced)

    def forget_gradient(self) -> None:
        self.gradient, self.owner, self.reduced = [], None, None

    @rule()
    def retry(self):
        self.desk.retry()

    # ---- what always holds ----------------------------------------------------------------------

    @invariant()
    def weights_are_what_the_ledger_says(self):
        if self.desk.complete is not None:
            assert self.weights == self.history[self.desk.complete]

    @invariant()
    def held_packs_are_those_at_hand(self):
        assert self.desk.level()["held"] == tuple(sorted(self.held))

    def teardown(self):
        """Whatever happened, with a coordinator that is heard again an undisturbed try ends in a commit."""
        if self.here.step > 0 and not any(s.at == self.here for s in self.recorded):
            return  # nobody else has this state: the real coordinator rolls back
        self.generation += 1
        self.current, self.share, self.saving = None, [], None
        self.exchange()
        goal = self.here.step + 1
        for _ in range(40):
            if self.here.step == goal:
                break
            self.decide(2)
            self.exchange()
        assert self.here.step == goal, f"stuck at {self.desk.level()}"
        self.exchange()
        assert self.desk.complete == self.here
        self.weights_are_what_the_ledger_says()

    def exchange(self) -> None:
        self.desk.retry()
        self.send_orders()
        self.deliver(self.orders_sent[-1])
        for attempt, lease in self.leased.items():
            self.hand_over(attempt, lease)
        for _ in range(20):
            self.act(fails=False)
        assert isinstance(self.desk.next_action(), Wait)
        self.say()
        self.hear()


TestLossyRun = LossyRun.TestCase
TestLossyRun.settings = settings(
    max_examples=150, stateful_step_count=60, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


# ---- what a sane coordinator hardly ever asks, one by one ---------------------------------------

STEP_0, STEP_1 = StepAt(0, 0), StepAt(0, 1)
TRY = StepTry(0, 0, 1, 10)


def orders_of(counter: int, **changes) -> DrafterOrders:
    level = {
        "incarnation": ME, "stamp": Stamp(1, counter), "held": (), "arenas": (), "adopt": None,
        "group": Group(generation=1, members=(Member(rank=0, incarnation=ME),), store=""),
        "committed": None, "train": None, "save": None, "recorded": (),
    }  # fmt: skip
    return DrafterOrders(**(level | changes))


def train_of(*attempts: int, step_try: StepTry = TRY) -> Train:
    packs = [TrainPack(position=p, batch=BatchId(0, p), attempt=Stamp(1, a)) for p, a in enumerate(attempts)]
    return Train(step_try=step_try, packs=tuple(packs))


def failures(desk: Desk) -> list[str]:
    return [str(failure) for failure in desk.level()["failures"]]


def ready_desk(*held: int) -> Desk:
    desk = Desk(ME)
    desk.take_orders(orders_of(1))
    desk.loaded(STEP_0)
    desk.formed(1)
    for attempt in held:
        assert desk.take_pack(Stamp(1, attempt), Stamp(1, 1000))
    return desk


def test_a_replaced_pack_that_was_trained_already_restarts_the_try():
    desk = ready_desk(5, 6, 7)
    desk.take_orders(orders_of(2, train=train_of(5, 6), held=(Stamp(1, 5), Stamp(1, 6))))
    desk.learned(desk.next_action().pack)
    desk.take_orders(orders_of(3, train=train_of(7, 6), held=(Stamp(1, 6), Stamp(1, 7))))
    assert desk.next_action() == Discard(TRY)
    desk.discarded()
    assert desk.next_action().pack.attempt == Stamp(1, 7)


def test_a_replaced_pack_that_was_not_trained_yet_does_not():
    desk = ready_desk(5, 6, 7)
    desk.take_orders(orders_of(2, train=train_of(5, 6)))
    desk.learned(desk.next_action().pack)
    desk.take_orders(orders_of(3, train=train_of(5, 7)))
    assert desk.next_action().pack.attempt == Stamp(1, 7)


def test_a_voted_share_is_not_trained_again_when_it_changes():
    desk = ready_desk(5)
    desk.take_orders(orders_of(2, train=train_of(5)))
    desk.learned(desk.next_action().pack)
    assert desk.next_action() == Reduce(TRY, (Stamp(1, 5),))
    desk.voted(Vote(step_try=TRY, packs=(Stamp(1, 5),), bad_positions=(), gradient_finite=True))
    desk.take_orders(orders_of(3, train=train_of(6)))
    assert desk.next_action() == Wait("vote")


def test_a_try_whose_reduction_failed_is_not_tried_again():
    desk = ready_desk()
    desk.take_orders(orders_of(2, train=train_of()))
    assert desk.next_action() == Reduce(TRY, ())
    desk.unreduced(TRY)
    assert desk.next_action() == Wait("orders")
    second = TRY._replace(counter=11)
    desk.take_orders(orders_of(3, train=train_of(step_try=second)))
    assert desk.next_action() == Reduce(second, ())


def test_a_try_of_another_step_is_not_trained():
    desk = ready_desk(5)
    desk.take_orders(orders_of(2, train=train_of(5, step_try=StepTry(0, 1, 1, 10))))
    assert desk.next_action() == Wait("orders")
    desk.take_orders(orders_of(3, train=train_of(5, step_try=StepTry(1, 0, 1, 11))))
    assert desk.next_action() == Wait("orders")


def test_an_older_lease_that_comes_late_does_not_shorten_a_newer_one():
    desk = Desk(ME)
    desk.take_pack(Stamp(1, 3), Stamp(1, 9))
    desk.take_pack(Stamp(1, 3), Stamp(1, 4))
    assert desk.take_orders(orders_of(6)) == []
    assert desk.take_orders(orders_of(10)) == [Stamp(1, 3)]


def test_orders_of_another_incarnation_are_not_followed():
    desk = Desk(ME)
    desk.take_orders(orders_of(1, incarnation="drafter-2"))
    assert desk.next_action() == Wait("orders")


def test_a_broken_generation_is_reported_until_another_one_is_ordered():
    desk = ready_desk()
    desk.ungrouped(1, "a member died")
    assert desk.level()["generation"] is None
    assert failures(desk) == ["group: a member died"]
    assert desk.next_action() == Wait("orders")
    two = Group(generation=2, members=(Member(rank=0, incarnation=ME),), store="")
    desk.take_orders(orders_of(2, group=two))
    assert failures(desk) == []
    assert desk.next_action() == Form(two)


def test_a_member_that_is_told_to_copy_a_peer_after_forming_asks_for_a_new_generation():
    desk = ready_desk()
    peer = Adopt(at=STEP_1, source="peer", name="drafter-2", sha256="")
    desk.take_orders(orders_of(2, adopt=peer))
    assert isinstance(desk.next_action(), Leave)


def test_an_order_that_failed_rests_until_retry_and_its_error_ends_with_the_order():
    desk = ready_desk()
    desk.take_orders(orders_of(2, save=STEP_0))
    assert desk.next_action() == Save(STEP_0)
    desk.saving(STEP_0)
    assert desk.next_action() == Wait("orders")
    desk.unsaved(STEP_0, "disk full")
    assert failures(desk) == ["save: disk full"]
    assert desk.next_action() == Wait("orders")
    desk.take_orders(orders_of(3))
    assert failures(desk) == []
    desk.take_orders(orders_of(4, save=STEP_0))
    assert desk.next_action() == Wait("orders")
    desk.retry()
    assert desk.next_action() == Save(STEP_0)


def test_a_save_that_rests_is_given_up_once_its_state_has_passed():
    """Or the coordinator waits for this one, orders no other, and the run never ends."""
    desk = ready_desk(5)
    desk.saving(STEP_0)
    desk.unsaved(STEP_0, "disk full")
    desk.take_orders(orders_of(2))
    desk.take_orders(orders_of(3, save=STEP_0, train=train_of(5)))
    assert failures(desk) == [], "it may be tried again while the step lasts"
    desk.learned(desk.next_action().pack)
    desk.voted(Vote(step_try=TRY, packs=(Stamp(1, 5),), bad_positions=(), gradient_finite=True))
    desk.take_orders(orders_of(4, save=STEP_0, committed=TRY))
    assert desk.next_action() == Commit(TRY)
    desk.committed(StepMetrics(at=STEP_1, values={}))
    assert failures(desk) == ["save: step 0 was not saved before step 1 came"]
    desk.take_orders(orders_of(5, save=STEP_1))
    assert failures(desk) == [] and desk.next_action() == Save(STEP_1)
    desk.take_orders(orders_of(6, save=StepAt(0, 2)))
    assert failures(desk) == [], "it has yet to come there"


def test_training_goes_on_while_a_checkpoint_is_written():
    desk = ready_desk(5)
    desk.take_orders(orders_of(2, save=STEP_0, train=train_of(5)))
    assert desk.next_action() == Save(STEP_0)
    desk.saving(STEP_0)
    assert isinstance(desk.next_action(), Learn)
    desk.saved(Saved(at=STEP_0, name="c", sha256="0" * 64))
    assert [saved.at for saved in desk.level()["saved"]] == [STEP_0]
    desk.take_orders(orders_of(3, train=train_of(5), recorded=(STEP_0,)))
    assert desk.level()["saved"] == ()


def test_commit_and_next_try_in_one_message():
    desk = ready_desk(5, 6)
    desk.take_orders(orders_of(2, train=train_of(5)))
    desk.learned(desk.next_action().pack)
    desk.voted(Vote(step_try=TRY, packs=(Stamp(1, 5),), bad_positions=(), gradient_finite=True))
    after = StepTry(0, 1, 1, 12)
    desk.take_orders(orders_of(3, committed=TRY, train=train_of(6, step_try=after)))
    assert desk.next_action() == Commit(TRY)
    desk.committed(StepMetrics(at=STEP_1, values={"loss": 1.0}))
    assert desk.complete == STEP_1
    assert desk.next_action() == Learn(train_of(6).packs[0], after, last=True)
