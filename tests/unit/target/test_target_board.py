"""The board against a model of what a target may hold: slots are never shared, and freed exactly once."""

from collections import Counter

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from protocol.messages import (
    Assignment,
    BatchId,
    Descriptor,
    Publication,
    SkippedSample,
    Stamp,
    TargetOrders,
    TargetReport,
)
from services.target.board import NO_ORDERS, Board, Outcome

SLOTS = 3
NAME = "target-1"


def assignment(number: int, *, lease: int | None = None) -> Assignment:
    publish = Publication(lease=Stamp(1, lease), inbox=f"ipc:///x/{lease}") if lease else None
    return Assignment(batch=BatchId(0, number), attempt=Stamp(1, number), samples=(number,), publish=publish)


def orders(stamp: int, *assignments: Assignment) -> TargetOrders:
    return TargetOrders(incarnation=NAME, stamp=Stamp(1, stamp), assignments=assignments)


def shipped(slot: int, attempt: Stamp, *, skipped: tuple[SkippedSample, ...] = ()) -> Outcome:
    descriptor = Descriptor(
        arena="a.arena", slot=slot, batch=BatchId(0, attempt.counter), attempt=attempt, tokens=10,
        payload_bytes=100, checksum=None, sections=(),
    )  # fmt: skip
    return Outcome(descriptor, skipped, "")


def states(board: Board) -> dict[int, str]:
    return {line.attempt.counter: line.state for line in board.report()}


def test_batches_are_started_in_the_order_of_the_newest_orders() -> None:
    board = Board(NAME, SLOTS)
    board.obey(orders(1, assignment(5), assignment(6)))
    board.obey(orders(2, assignment(7), assignment(6), assignment(5)))
    started = [board.start() for _ in range(3)]
    assert [job.attempt.counter for job in started if job] == [7, 6, 5]
    assert len({job.slot for job in started if job}) == 3


def test_older_and_repeated_orders_do_nothing() -> None:
    board = Board(NAME, SLOTS)
    board.obey(orders(5, assignment(1)))
    board.obey(orders(4, assignment(2)))
    board.obey(orders(5))
    assert states(board) == {1: "queued"}
    assert board.orders == Stamp(1, 5)
    assert board.stale_orders == 1


def test_a_revoked_computing_batch_keeps_its_slot_until_it_is_done() -> None:
    board = Board(NAME, 1)
    board.obey(orders(1, assignment(1), assignment(2)))
    job = board.start()
    assert job is not None
    assert board.obey(orders(2, assignment(2))) == ()
    assert states(board) == {2: "queued", 1: "computing"} and board.starved and board.start() is None
    assert board.finish(job.attempt, shipped(job.slot, job.attempt)) == (job.slot,)
    assert states(board) == {2: "queued"} and not board.starved
    following = board.start()
    assert following is not None and following.slot == job.slot


def test_a_pack_is_announced_once_a_lease() -> None:
    board = Board(NAME, SLOTS)
    board.obey(orders(1, assignment(1, lease=8)))
    assert board.announcements() == ()
    job = board.start()
    assert job is not None
    board.finish(job.attempt, shipped(job.slot, job.attempt))
    (first,) = board.announcements()
    assert first.pack.lease == Stamp(1, 8) and first.inbox == "ipc:///x/8" and first.pack.target == NAME
    board.announced(first.attempt, first.pack.lease)
    assert board.announcements() == ()
    board.obey(orders(2, assignment(1, lease=9)))
    assert [a.inbox for a in board.announcements()] == ["ipc:///x/9"]
    assert board.report()[0].published == Stamp(1, 8)


def test_a_failed_batch_gives_its_slot_back_and_stays_reported_until_it_is_unassigned() -> None:
    board = Board(NAME, 1)
    board.obey(orders(1, assignment(1)))
    job = board.start()
    assert job is not None
    skipped = (SkippedSample(sample=1, reason="not finite"),)
    assert board.finish(job.attempt, Outcome.without_rest(skipped)) == (0,)
    (line,) = board.report()
    assert (line.state, line.slot, line.skipped) == ("failed", None, skipped)
    assert "sample 1" in line.reason and "not finite" in line.reason
    assert board.obey(orders(2)) == ()
    assert board.report() == ()


class Life(RuleBasedStateMachine):
    """Random orders, starts and finishes; `freed` counts what the board gave back against what it took."""

    def __init__(self) -> None:
        super().__init__()
        self.board = Board(NAME, SLOTS)
        self.stamp = 1
        self.next_number = 1
        self.wanted: list[Assignment] = []
        self.computing: dict[Stamp, int] = {}  # attempt -> slot
        self.ready: dict[Stamp, int] = {}
        self.taken: Counter[int] = Counter()
        self.freed: Counter[int] = Counter()
        self.announced: list[tuple[Stamp, Stamp]] = []

    def _obey(self, wanted: list[Assignment], stamp: int) -> None:
        for slot in self.board.obey(orders(stamp, *wanted)):
            self.freed[slot] += 1

    @rule(keep=st.integers(0, 2**8 - 1), new=st.integers(0, 3), lease=st.booleans(), backwards=st.booleans())
    def order(self, keep: int, new: int, lease: bool, backwards: bool) -> None:
        kept = [a for i, a in enumerate(self.wanted) if keep >> (i % 8) & 1]
        if lease and kept:
            kept[0] = assignment(kept[0].attempt.counter, lease=1000 + self.stamp)
        fresh = [assignment(self.next_number + i) for i in range(new)]
        self.next_number += new
        self.wanted = (fresh + kept) if backwards else (kept + fresh)
        self.stamp += 1
        self._obey(self.wanted, self.stamp)
        names = {a.attempt for a in self.wanted}
        self.ready = {attempt: slot for attempt, slot in self.ready.items() if attempt in names}

    @rule(back=st.integers(0, 3), other=st.integers(1, 50))
    def stale_order(self, back: int, other: int) -> None:
        if self.board.orders != NO_ORDERS:
            before = self.board.report()
            self._obey([assignment(10_000 + other)], max(0, self.stamp - back))
            assert self.board.report() == before

    @rule()
    def start(self) -> None:
        job = self.board.start()
        if job is None:
            return
        assert job.slot not in self.computing.values() and job.slot not in self.ready.values()
        assert job.attempt in {a.attempt for a in self.wanted}
        self.computing[job.attempt] = job.slot
        self.taken[job.slot] += 1

    @precondition(lambda self: self.computing)
    @rule(data=st.data(), good=st.booleans())
    def finish(self, data: st.DataObject, good: bool) -> None:
        attempt = data.draw(st.sampled_from(sorted(self.computing)))
        slot = self.computing.pop(attempt)
        outcome = shipped(slot, attempt) if good else Outcome(None, (), "bad")
        freed = self.board.finish(attempt, outcome)
        wanted = attempt in {a.attempt for a in self.wanted}
        assert freed == (() if wanted and good else (slot,))
        self.freed.update(freed)
        if wanted and good:
            self.ready[attempt] = slot

    @rule()
    def announce(self) -> None:
        for announcement in self.board.announcements():
            assert announcement.attempt in self.ready
            assert announcement.pack.descriptor.slot == self.ready[announcement.attempt]
            self.board.announced(announcement.attempt, announcement.pack.lease)
            self.announced.append((announcement.attempt, announcement.pack.lease))
        assert self.board.announcements() == ()
        assert len(set(self.announced)) == len(self.announced)

    @invariant()
    def slots_add_up(self) -> None:
        held = list(self.computing.values()) + list(self.ready.values())
        assert len(set(held)) == len(held)
        for slot in range(SLOTS):
            assert self.taken[slot] - self.freed[slot] == held.count(slot)

    @invariant()
    def the_report_is_the_inventory(self) -> None:
        lines = {line.attempt: line for line in self.board.report()}
        assert {a: line.slot for a, line in lines.items() if line.state == "computing"} == self.computing
        assert {a: line.slot for a, line in lines.items() if line.state == "ready"} == self.ready
        wanted = {a.attempt for a in self.wanted}
        assert set(lines) == wanted | set(self.computing)
        for line in lines.values():
            assert (line.slot is None) == (line.state in ("queued", "failed"))
        queued = any(line.state == "queued" for line in lines.values())
        full = len(self.computing) + len(self.ready) == SLOTS
        assert (self.board.startable, self.board.starved) == (queued and not full, queued and full)
        assert self.board.idle == (not self.computing and not self.board.startable)
        TargetReport(incarnation=NAME, seq=1, orders=self.board.orders, totals={}, slots=self.board.report())


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=200, stateful_step_count=30, deadline=None)
