"""Groups of real processes over gloo: equal to one process, and broken quickly when one is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import socket
import threading
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from drafter_cases import CPU, add_packs, random_pack, sum_over, tiny_config, tiny_step

from protocol.errors import GroupBroken
from protocol.messages import BatchId, Group, Member, StepAt, StepTry
from services.drafter import meeting as meeting_module
from services.drafter import reduce
from services.drafter.meeting import Copy, Standing, meet, plan_copies
from services.drafter.reduce import GroupReducer, LocalReducer, TryLeft
from services.drafter.step import LastPack

TRY = StepTry(0, 0, 1, 1)
NOBODY = Standing(None, "", None)
SECONDS = 60.0  # a deadline, not a wait
FORKSERVER = multiprocessing.get_context("forkserver")  # imports torch once, not once a process
FORKSERVER.set_forkserver_preload(["services.drafter.reduce", "drafter_cases", "pytest"])


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def group_of(size: int, generation: int = 1) -> Group:
    members = tuple(Member(rank=rank, incarnation=f"drafter-{rank}") for rank in range(size))
    return Group(generation=generation, members=members, store=f"127.0.0.1:{free_port()}")


class Ranks:
    """Real processes, one a rank, each with a pipe to the test."""

    def __init__(self, run, size: int, *arguments) -> None:
        group = group_of(size)
        self.pipes: list[Connection] = []
        self.processes = []
        for rank in range(size):
            ours, theirs = FORKSERVER.Pipe()
            process = FORKSERVER.Process(target=run, args=(rank, group, theirs, *arguments), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes:
            process.kill()
            process.join()

    def hear(self, rank: int):
        assert self.pipes[rank].poll(SECONDS), f"rank {rank} says nothing"
        return self.pipes[rank].recv()


def form(rank: int, group: Group, wanted=lambda _try: True, standing: Standing = NOBODY):
    torch.set_num_threads(1)
    meeting = meet(group, f"drafter-{rank}", wanted)
    standings = meeting.share(standing)
    return meeting, standings, GroupReducer(meeting, CPU)


# ---- sums -------------------------------------------------------------------------------------


def train_share(rank: int, group: Group, pipe: Connection, shares: list[list[int]], steps: int) -> None:
    _, _, reducer = form(rank, group)
    step = tiny_step(tiny_config())
    for number in range(steps):
        for position in shares[rank]:
            add_packs(step, [10 * number + position], first_position=position)
        outcome = step.seal(reducer, TRY._replace(step=number))
        step.apply(number, outcome)
    pipe.send((step._weights.masters.tolist(), outcome.tally, outcome.gradient_norm))
    reducer.close()


@pytest.mark.process
@pytest.mark.parametrize("shares", [[[0, 2], [1, 3]], [[0, 1, 2], [], [3]], [[], [0, 1, 2, 3]]])
def test_a_group_trains_what_one_process_trains(shares):
    with Ranks(train_share, len(shares), shares, 3) as ranks:
        results = [ranks.hear(rank) for rank in range(len(shares))]
    alone = tiny_step(tiny_config())
    for number in range(3):
        add_packs(alone, [10 * number + position for position in range(4)])
        outcome = alone.seal(LocalReducer(), TRY)
        alone.apply(number, outcome)
    for masters, tally, norm in results:
        assert (masters, tally, norm) == results[0], "ranks differ"
        torch.testing.assert_close(torch.tensor(masters), alone._weights.masters, rtol=1e-4, atol=1e-5)
        assert norm == pytest.approx(outcome.gradient_norm, rel=1e-4)


def train_overlapped(rank: int, group: Group, pipe: Connection, overlaps: bool) -> None:
    """Two packs a rank and two draws a pack; the last pack of rank 1 has no anchor, so its graph differs."""
    _, _, reducer = form(rank, group)
    step = tiny_step(tiny_config(recipe={"anchor_draws": 2}))
    handed = []
    for number in range(3):
        step_try = TRY._replace(step=number)
        add_packs(step, [10 * number + rank], first_position=rank)
        last = random_pack(10 * number + 5 + rank, supervised=rank == 0)
        where = LastPack(reducer, step_try) if overlaps else None
        step.add(2 + rank, BatchId(0, 5), last, last=where)
        handed.append(step._handed)
        step.apply(number, step.seal(reducer, step_try))
    pipe.send((step._weights.masters.tolist(), handed))
    reducer.close()


@pytest.mark.process
def test_sums_during_the_last_backward_pass_are_the_sums_after_it():
    found = []
    for overlaps in (False, True):
        with Ranks(train_overlapped, 2, overlaps) as ranks:
            results = [ranks.hear(rank) for rank in range(2)]
        assert results[0] == results[1]
        found.append(results[0])
    assert found[0][0] == found[1][0]
    early = 2 * 2  # two pieces a layer, two layers
    assert found[0][1] == [0, 0, 0] and found[1][1] == [early] * 3


def poisoned_share(rank: int, group: Group, pipe: Connection, overlaps: bool) -> None:
    _, _, reducer = form(rank, group)
    step = tiny_step(tiny_config())
    add_packs(step, [7 + rank], first_position=rank)
    if rank == 1:
        step._weights.gradient[3] = float("nan")
    where = LastPack(reducer, TRY) if overlaps else None
    step.add(2 + rank, BatchId(0, rank), random_pack(rank), last=where)
    outcome = step.seal(reducer, TRY)
    pipe.send((outcome.own_bad, outcome.any_bad, outcome.gradient_finite, outcome.weight))
    reducer.close()


@pytest.mark.process
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_poisoned_share_is_known_to_all_and_blames_its_own_pack_alone(overlaps):
    with Ranks(poisoned_share, 2, overlaps) as ranks:
        results = [ranks.hear(rank) for rank in range(2)]
    alone = tiny_step(tiny_config())
    add_packs(alone, [7, 0])
    weight = alone.seal(LocalReducer(), TRY).weight
    assert results == [((), True, True, weight), ((3,), True, True, weight)]


# ---- deaths -----------------------------------------------------------------------------------


def killed_in_the_collective(rank: int, group: Group, pipe: Connection, how: int) -> None:
    """The last rank arrives, and is gone when the others start to sum."""
    reduce.COLLECTIVE_S = 1.0
    meeting, _, reducer = form(rank, group)
    tensors = [torch.ones(1 << 20)]
    sum_over(reducer, tensors, TRY)
    pipe.send("summed")
    second = TRY._replace(step=1)
    if rank == len(meeting.names) - 1:
        meeting.gather("try/" + "-".join(map(str, second)), None)
        os.kill(os.getpid(), how)
    start_s = time.monotonic()
    with pytest.raises(GroupBroken):
        sum_over(reducer, tensors, second)
    pipe.send(time.monotonic() - start_s)
    reducer.close()
    pipe.send("left")


@pytest.mark.process
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_rank_breaks_the_group_for_the_survivors_within_two_seconds(how):
    with Ranks(killed_in_the_collective, 3, how) as ranks:
        assert [ranks.hear(rank) for rank in range(3)] == ["summed"] * 3
        for rank in range(2):
            assert ranks.hear(rank) < 2.0
            assert ranks.hear(rank) == "left"


def killed_while_others_wait(rank: int, group: Group, pipe: Connection) -> None:
    _, _, reducer = form(rank, group)
    pipe.send("formed")
    if rank == 0:  # hosts the store, and never arrives
        pipe.recv()
    try:
        sum_over(reducer, [torch.ones(8)], TRY)
    except GroupBroken as error:
        pipe.send(str(error))


@pytest.mark.process
def test_the_death_of_the_stores_host_breaks_the_group():
    with Ranks(killed_while_others_wait, 3) as ranks:
        assert [ranks.hear(rank) for rank in range(3)] == ["formed"] * 3
        ranks.processes[0].kill()
        start_s = time.monotonic()
        for rank in (1, 2):
            assert "member was lost" in ranks.hear(rank)
        assert time.monotonic() - start_s < 2.0


# ---- members that are frozen ------------------------------------------------------------------


def freeze(process) -> None:
    """Stop all its threads, and see that they are."""
    os.kill(process.pid, signal.SIGSTOP)
    stat, deadline_s = Path(f"/proc/{process.pid}/stat"), time.monotonic() + SECONDS
    while stat.read_text().rpartition(") ")[2][0] != "T":
        assert time.monotonic() < deadline_s, "it does not stop"


class Held:
    """Asks the test for its orders once the host is frozen; before, it wants everything."""

    def __init__(self, pipe: Connection) -> None:
        self.pipe, self.frozen, self.saw = pipe, False, []

    def wanted(self, _try) -> bool:
        if not self.frozen:
            return True
        self.pipe.send("held")
        return self.pipe.recv()

    def freeze_here(self) -> None:
        self.pipe.send("here")
        self.pipe.recv()
        self.frozen = True

    def broken(self, call) -> None:
        """`call` ends because of the orders; then what was left behind ends with the host."""
        try:
            call()
        except GroupBroken as error:
            self.pipe.send(str(error))
        self.pipe.recv()
        threads = [thread for thread in threading.enumerate() if thread.name == "group"]
        for thread in threads:
            thread.join(SECONDS)
        self.pipe.send(any(thread.is_alive() for thread in threads))


def held_by_the_host(rank: int, group: Group, pipe: Connection, where: str) -> None:
    """Both go as far as `where`; there the host stays."""
    torch.set_num_threads(1)
    meeting_module.ANSWER_S = 2.0  # also torch's patience with a host that is gone
    held = Held(pipe)

    def here(place: str, call) -> bool:
        if place == where:
            held.freeze_here()
            held.broken(call)
        return place == where

    if rank == 1:
        pipe.recv()  # the host listens
        if here("meet", lambda: meet(group, "drafter-1", held.wanted)):
            return
    meeting = meet(group, f"drafter-{rank}", held.wanted)
    if rank == 0:
        pipe.send("listens")
        if where == "meet":
            pipe.recv()
    if here("share", lambda: meeting.share(NOBODY)):
        return
    meeting.share(NOBODY)
    if here("connect", lambda: GroupReducer(meeting, CPU)):
        return
    reducer = GroupReducer(meeting, CPU)
    sum_over(reducer, [torch.ones(4)], TRY)
    here("arrive", lambda: reducer.arrive(TRY._replace(step=1)))


@pytest.mark.process
@pytest.mark.parametrize("where", ["meet", "share", "connect", "arrive"])
def test_a_frozen_host_holds_nobody_whose_orders_have_changed(where):
    with Ranks(held_by_the_host, 2, where) as ranks:
        assert ranks.hear(0) == "listens"
        ranks.pipes[1].send("the host listens")
        assert ranks.hear(1) == "here" and (where == "meet" or ranks.hear(0) == "here")
        freeze(ranks.processes[0])
        ranks.pipes[1].send("frozen")
        for wanted in (True, False):
            assert ranks.hear(1) == "held"
            ranks.pipes[1].send(wanted)
        changed_s = time.monotonic()
        assert "did not answer" in ranks.hear(1)
        assert time.monotonic() - changed_s < 2.0
        ranks.processes[0].kill()
        ranks.pipes[1].send("killed")
        assert ranks.hear(1) is False, "the thread lives on without a host"


QUESTIONS = {  # `set` waits for no answer
    "get": lambda store: store.get("key"),
    "add": lambda store: store.add("count", 1),
    "check": lambda store: store.check(["key"]),
    "compare_set": lambda store: store.compare_set("key", "", "value"),
    "delete_key": lambda store: store.delete_key("key"),
}


def ask_everything(rank: int, group: Group, pipe: Connection) -> None:
    held = Held(pipe)
    if rank == 0:
        meeting = meet(group, "drafter-0", held.wanted)
        pipe.send("listens")
        pipe.recv()
        assert meeting.rank == 0, "the store lives as long as the meeting"
        return
    pipe.recv()  # the host listens
    meetings = {name: meet(group, "drafter-1", held.wanted) for name in QUESTIONS}
    held.freeze_here()
    for name, meeting in meetings.items():
        with pytest.raises(GroupBroken, match="did not answer"):
            meeting._ask(lambda meeting=meeting, name=name: QUESTIONS[name](meeting.store))
        pipe.send(name)


@pytest.mark.process
def test_no_question_to_a_frozen_store_holds_the_interpreter_or_its_caller():
    with Ranks(ask_everything, 2) as ranks:
        assert ranks.hear(0) == "listens"
        ranks.pipes[1].send("the host listens")
        assert ranks.hear(1) == "here"
        freeze(ranks.processes[0])
        ranks.pipes[1].send("frozen")
        for name in QUESTIONS:
            assert ranks.hear(1) == "held"
            ranks.pipes[1].send(False)
            assert ranks.hear(1) == name


def give_up_on_a_silent_store(rank: int, group: Group, pipe: Connection) -> None:
    """The coordinator hears the host, and only its peers do not: orders will not change."""
    meeting_module.ANSWER_S = 1.0
    pipe.send("listens" if rank == 0 else pipe.recv())
    meeting = meet(group, f"drafter-{rank}", lambda _try: True)
    pipe.send("met")
    pipe.recv()
    with pytest.raises(GroupBroken, match="did not answer for 1 s"):
        meeting.share(NOBODY)
    with pytest.raises(GroupBroken, match="an earlier call"):
        meeting.gather("door", None)
    pipe.send("left")


@pytest.mark.process
def test_a_store_that_is_silent_for_long_breaks_the_group_whatever_the_orders_say():
    with Ranks(give_up_on_a_silent_store, 2) as ranks:
        assert ranks.hear(0) == "listens" and ranks.hear(0) == "met"
        ranks.pipes[1].send("listens")
        assert ranks.hear(1) == "listens" and ranks.hear(1) == "met"
        freeze(ranks.processes[0])
        ranks.pipes[1].send("frozen")
        assert ranks.hear(1) == "left"


def copy_until_frozen(rank: int, group: Group, pipe: Connection) -> None:
    """Rank 0 gives its state, and stops between two buckets of it."""
    reduce.BUCKET_ELEMENTS = 1 << 10
    held = Held(pipe)
    _, _, reducer = form(rank, group, held.wanted)
    state = torch.full((1 << 12,), 1.0 - rank)

    def parts():
        yield state[: 1 << 10]
        if rank == 0:
            pipe.send("here")
            pipe.recv()
        else:
            held.freeze_here()
        yield state[1 << 10 :]

    if rank == 0:
        reducer.send(parts(), 1)
        return
    held.broken(lambda: reducer.receive(parts(), 0))
    pipe.send(state.tolist())


@pytest.mark.process
def test_a_source_that_freezes_is_left_and_writes_no_weights_when_it_goes_on():
    with Ranks(copy_until_frozen, 2) as ranks:
        assert ranks.hear(0) == ranks.hear(1) == "here"
        freeze(ranks.processes[0])
        ranks.pipes[1].send("frozen")
        for wanted in (True, False):
            assert ranks.hear(1) == "held"
            ranks.pipes[1].send(wanted)
        assert "did not answer" in ranks.hear(1)
        os.kill(ranks.processes[0].pid, signal.SIGCONT)
        ranks.pipes[0].send("go on")
        ranks.pipes[1].send("it goes on")
        assert ranks.hear(1) is False, "what it sent has not arrived"
        assert ranks.hear(1) == [1.0] * (1 << 10) + [0.0] * (3 << 10)


# ---- orders that change -----------------------------------------------------------------------


def left_by_orders(rank: int, group: Group, pipe: Connection) -> None:
    """Rank 1's orders abandon the try before rank 0 arrives; the group then does the next try."""
    _, _, reducer = form(rank, group, wanted=lambda step_try: rank == 0 or step_try != TRY)
    tensor = torch.ones(4)
    if rank == 0:
        pipe.recv()
    with pytest.raises(TryLeft):
        sum_over(reducer, [tensor], TRY)
    pipe.send(tensor.tolist())
    sum_over(reducer, [tensor], TRY._replace(counter=2))
    pipe.send(tensor.tolist())
    pipe.recv()


@pytest.mark.process
def test_all_leave_a_try_that_one_has_left():
    with Ranks(left_by_orders, 2) as ranks:
        assert ranks.hear(1) == [1.0] * 4
        ranks.pipes[0].send("arrive")
        assert ranks.hear(0) == [1.0] * 4
        assert ranks.hear(0) == ranks.hear(1) == [2.0] * 4


def test_a_generation_that_is_no_longer_wanted_is_not_waited_for():
    group = group_of(2)
    with pytest.raises(GroupBroken, match="not reached before the orders changed"):
        meet(group, "drafter-1", lambda _try: False)
    answers = iter([True])
    meeting = meet(group, "drafter-0", lambda _try: next(answers, False))
    with pytest.raises(GroupBroken, match="another generation"):
        meeting.share(NOBODY)


def test_a_taken_port_breaks_the_group_and_says_so():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        members = (Member(rank=0, incarnation="drafter-0"), Member(rank=1, incarnation="drafter-1"))
        group = Group(generation=1, members=members, store=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(GroupBroken, match="another port"):
            meet(group, "drafter-0", lambda _try: True)


def test_a_member_that_comes_upon_another_group_meets_nobody_there():
    """Ports are drawn, and another run on the host may have drawn the same one first."""
    group = group_of(2)
    host = meet(group, "drafter-0", lambda _try: True)
    host.store.set("standing/0", NOBODY.encode())
    strangers = tuple(Member(rank=rank, incarnation=f"drafter-of-another-run-{rank}") for rank in range(2))
    answers = iter([True])
    lost = meet(
        group.model_copy(update={"members": strangers}),
        strangers[1].incarnation,
        lambda _try: next(answers, False),
    )
    with pytest.raises(GroupBroken, match="another generation"):
        lost.share(NOBODY)
    assert not host.store.check(["standing/1"])


# ---- newcomers --------------------------------------------------------------------------------


def take_over(rank: int, group: Group, pipe: Connection) -> None:
    """Rank 1 has trained, rank 0 and rank 2 are new."""
    step = tiny_step(tiny_config(), seed=rank)
    weights = step._weights
    if rank == 1:
        add_packs(step, [1, 2])
        step.apply(0, step.seal(LocalReducer(), TRY))
    at = StepAt(0, 1)
    standing = Standing(at, "", None) if rank == 1 else Standing(None, "drafter-1", at)
    meeting, standings, reducer = form(rank, group, standing=standing)
    copies = plan_copies(meeting.names, standings)
    for source, receiver in copies:
        if rank == source:
            reducer.send(weights.state, receiver)
        elif rank == receiver:
            reducer.receive(weights.state, source)
    pipe.send((copies, [tensor.tolist() for tensor in weights.state]))
    pipe.recv()


@pytest.mark.process
def test_newcomers_take_the_whole_state_of_the_member_named():
    with Ranks(take_over, 3) as ranks:
        results = [ranks.hear(rank) for rank in range(3)]
    assert all(copies == [Copy(1, 0), Copy(1, 2)] for copies, _ in results)
    assert results[0][1] == results[1][1] == results[2][1]
    masters, first, second, updates = results[1][1]
    assert updates == 1.0 and any(first) and any(second) and any(masters)


def test_only_a_source_that_is_complete_where_it_is_wanted_is_copied():
    names = ["a", "b", "c"]
    at, other = StepAt(0, 5), StepAt(0, 4)
    whole = Standing(at, "", None)
    assert plan_copies(names, [whole, Standing(None, "a", at), whole]) == [Copy(0, 1)]
    assert plan_copies(names, [Standing(other, "", None), Standing(None, "a", at), whole]) == []
    assert plan_copies(names, [whole, Standing(None, "gone", at), whole]) == []
    assert plan_copies(names, [whole, Standing(at, "a", at), whole]) == [], "it has that state already"


def test_standings_survive_the_store():
    for standing in (NOBODY, Standing(StepAt(1, 2), "drafter-9", StepAt(3, 4))):
        assert Standing.decode(standing.encode().encode()) == standing
        assert json.loads(standing.encode())


def test_the_watcher_of_a_gpus_group_asks_without_reporting_progress(monkeypatch):
    """A main thread that is stuck in a collective must not look alive to its watchdog."""
    monkeypatch.setattr(reduce, "SLICE_S", 0.001)
    asked = []

    class Backend:
        aborted = False

        def abort(self) -> None:
            self.aborted = True

    class Met:
        def wanted(self, _try) -> bool:
            raise AssertionError("this one reports progress")

    def wanted(step_try) -> bool:
        asked.append(step_try)
        return len(asked) < 3

    group = GroupReducer.__new__(GroupReducer)
    group._meeting, group._wanted, group._process_group = Met(), wanted, Backend()
    group._closed, group._aborted = threading.Event(), threading.Event()
    group._watch()
    assert asked == [None] * 3 and group._process_group.aborted
    with pytest.raises(GroupBroken, match="aborted"):
        group.confirm()
