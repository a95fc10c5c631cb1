"""The trainer over real sockets and slots, ordered about by the test in the coordinator's place."""

from __future__ import annotations

import os
import socket
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
import zmq
from drafter_cases import CPU, random_pack, tiny_config, tiny_shape, tiny_step

from protocol.codec import decode, encode
from protocol.errors import CorruptPack, Fenced, StalePack
from protocol.messages import (
    PROTOCOL_VERSION,
    Adopt,
    BatchId,
    Bye,
    DrafterHello,
    DrafterOrders,
    DrafterReport,
    Exit,
    Group,
    Member,
    Pack,
    Stamp,
    StepAt,
    StepTry,
    Train,
    TrainPack,
    Welcome,
)
from protocol.sockets import dealer, new_context, router
from services.dflash.checkpoint import read_checkpoint
from services.drafter import trainer as trainer_module
from services.drafter.reduce import GroupReducer, LocalReducer
from services.drafter.start import Started, initial_weights
from services.drafter.trainer import DrafterTrainer
from services.lifecycle import ExitCode
from services.link import Link
from services.transport.writer import SlotWriter

SECONDS = 30.0
SEED = Adopt(at=StepAt(0, 0), source="seed", name="", sha256="")


class Station:
    """The coordinator's socket and a target's arena, moved by the test alone."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.context = folder, new_context()
        self.endpoint = f"ipc://{folder}/control"
        self.control = router(self.context, self.endpoint)
        self.writer = SlotWriter.create(
            folder, "target-1", slots=8, slot_bytes=8192, kind="shm", checksum="always", device=CPU
        )
        self.counter = 0
        self.routes: dict[str, bytes] = {}
        self.hellos: dict[str, DrafterHello] = {}
        self.reports: dict[str, DrafterReport] = {}
        self.byes: dict[str, Bye] = {}
        self.levels: dict[str, dict] = {}
        self.inboxes: dict[str, zmq.Socket] = {}
        self.slots = 0

    def close(self) -> None:
        for inbox in self.inboxes.values():
            inbox.close(0)
        self.control.close()
        self.writer.close()
        self.context.term()

    def stamp(self) -> Stamp:
        self.counter += 1
        return Stamp(1, self.counter)

    def until(self, condition) -> None:
        """Listen until `condition` holds of what was heard."""
        deadline_s = time.monotonic() + SECONDS
        while not condition():
            assert time.monotonic() < deadline_s, f"not heard in time; last: {self.reports}"
            assert self.control.socket.poll(SECONDS * 1000), f"nothing heard; last: {self.reports}"
            route, *frames = self.control.socket.recv_multipart()
            message = decode(frames)
            name = message.incarnation
            self.routes[name] = route
            if isinstance(message, DrafterHello):
                self.hellos[name] = message
                self.send(name, Welcome(incarnation=name, index=0))
            elif isinstance(message, DrafterReport):
                self.reports[name] = message
            elif isinstance(message, Bye):
                self.byes[name] = message

    def reported(self, name: str, condition) -> None:
        self.until(lambda: name in self.reports and condition(self.reports[name]))

    def send(self, name: str, message) -> None:
        self.control.socket.send_multipart([self.routes[name], *encode(message)])

    def order(self, name: str, **changes) -> Stamp:
        """Change the level of one drafter and send all of it."""
        level = {
            "held": (), "arenas": (self.writer.arena_name,), "group": group_of(name), "adopt": None,
            "committed": None, "train": None, "save": None, "recorded": (),
        }  # fmt: skip
        self.levels[name] = level = self.levels.get(name, level) | changes
        stamp = self.stamp()
        self.send(name, DrafterOrders(incarnation=name, stamp=stamp, **level))
        return stamp

    def publish(self, name: str, batch: BatchId, pack: dict[str, torch.Tensor]) -> Stamp:
        """Write a pack and announce it to a drafter."""
        attempt = self.stamp()
        self.send_pack(name, self.writer.write(self.slots % 8, batch, attempt, pack))
        self.slots += 1
        return attempt

    def send_pack(self, name: str, descriptor) -> None:
        if name not in self.inboxes:
            self.inboxes[name] = dealer(self.context, self.hellos[name].inbox)
            self.inboxes[name].poll(SECONDS * 1000, zmq.POLLOUT)
        pack = Pack(target="target-1", lease=self.stamp(), descriptor=descriptor)
        self.inboxes[name].send_multipart(encode(pack))

    def train(
        self, name: str, step_try: StepTry, packs: dict[int, tuple[BatchId, Stamp | None]], **more
    ) -> None:
        listed = [TrainPack(position=p, batch=b, attempt=a) for p, (b, a) in sorted(packs.items())]
        held = tuple(attempt for _, attempt in packs.values() if attempt)
        train = Train(step_try=step_try, packs=tuple(listed))
        self.order(name, train=train, held=held, **more)


def group_of(*names: str, generation: int = 1, store: str = "") -> Group:
    members = tuple(Member(rank=rank, incarnation=name) for rank, name in enumerate(names))
    return Group(generation=generation, members=members, store=store)


class Drafter:
    """A trainer in a thread."""

    def __init__(self, config, station: Station, name: str) -> None:
        torch.set_num_threads(1)
        step = tiny_step(config, seed=50)
        started = Started("0" * 64, tiny_shape(), step._weights, step, step._phases, CPU)
        inbox = f"ipc://{station.folder}/{name}.inbox"
        link = Link(
            station.endpoint,
            DrafterHello(
                incarnation=name,
                seq=0,
                protocol=PROTOCOL_VERSION,
                fingerprint="0" * 64,
                host="h",
                index=None,
                inbox=inbox,
            ),
            heartbeat_s=0.2,
            inbox=inbox,
        )
        self.stop, self.link = threading.Event(), link
        self.trainer = DrafterTrainer(config, name, started, link, station.folder, self.stop)
        self.ended: Future[ExitCode] = Future()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        try:
            self.ended.set_result(self.trainer.train())
        except BaseException as error:  # noqa: BLE001 - raised by the test
            self.trainer.watchdog.stop()  # a process would just end; the tests' own must not be ended by it
            self.ended.set_exception(error)


@pytest.fixture
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("d")
    folder.chmod(0o700)
    return folder


@pytest.fixture
def config(folder):
    return tiny_config(
        run={"dir": folder / "run"},
        plan={"packs_per_step": 2},
        coordinator={"heartbeat_s": 0.2},
        profile={"interval_s": 0.0},
    )


@pytest.fixture
def station(folder):
    station = Station(folder)
    yield station
    station.close()


@pytest.fixture
def drafter(config, station):
    drafter = Drafter(config, station, "drafter-1")
    station.until(lambda: "drafter-1" in station.hellos)
    yield drafter
    drafter.stop.set()
    drafter.link.wake()
    drafter.thread.join(SECONDS)
    assert not drafter.thread.is_alive()


NAME = "drafter-1"


@pytest.fixture(params=[False, True], ids=["summed after", "summed during"])
def overlaps(request, monkeypatch) -> bool:
    """Whether sums begin in the last pack's backward pass, as they do on GPUs."""

    class Overlapping(GroupReducer):
        def __init__(self, *given) -> None:
            super().__init__(*given)
            self.overlaps = request.param

    monkeypatch.setattr(LocalReducer, "overlaps", request.param)
    monkeypatch.setattr(trainer_module, "GroupReducer", Overlapping)
    return request.param


def expected_step(config, steps: list[list[int]]):
    """What a drafter that trained these packs (seeds, in order) from the seed must be."""
    step = tiny_step(config)
    step._weights.start(initial_weights(config, tiny_shape()))
    for number, seeds in enumerate(steps):
        for position, seed in enumerate(seeds):
            step.add(position, BatchId(0, seed), random_pack(seed))
        step.apply(number, step.seal(LocalReducer(), StepTry(0, number, 1, 1)))
    return step._weights


def adopt_seed(station: Station, name: str = NAME) -> None:
    station.order(name, adopt=SEED)
    station.reported(name, lambda r: r.complete == StepAt(0, 0) and r.generation == 1)


def one_step(station: Station, number: int, seeds: list[int], name: str = NAME) -> StepTry:
    """Train, vote and commit; the commit travels with the next order."""
    step_try = StepTry(0, number, *station.stamp())
    packs = {
        position: (BatchId(0, seed), station.publish(name, BatchId(0, seed), random_pack(seed)))
        for position, seed in enumerate(seeds)
    }
    station.train(name, step_try, packs, adopt=None)
    station.reported(name, lambda r: r.vote is not None and r.vote.step_try == step_try)
    vote = station.reports[name].vote
    assert vote.packs == tuple(attempt for _, attempt in packs.values())
    assert vote.bad_positions == () and vote.gradient_finite
    station.order(name, committed=step_try, train=None, held=())
    station.reported(name, lambda r: r.complete == StepAt(0, number + 1))
    return step_try


def checkpoint_of(station: Station, config, at: StepAt, name: str = NAME):
    station.order(name, save=at)
    station.reported(name, lambda r: any(saved.at == at for saved in r.saved))
    saved = next(saved for saved in station.reports[name].saved if saved.at == at)
    return saved, read_checkpoint(config.run.dir / "checkpoints" / saved.name, saved.sha256)


def assert_weights(checkpoint, weights) -> None:
    for place in weights.places:
        assert torch.equal(checkpoint.weights[place.name], place.of(weights.masters)), place.name
        assert torch.equal(checkpoint.optimizer[f"second.{place.name}"], place.of(weights.second))


def test_two_steps_are_those_of_the_plain_loop_and_the_run_ends_with_status_0(
    overlaps, config, station, drafter
):
    adopt_seed(station)
    saved, checkpoint = checkpoint_of(station, config, StepAt(0, 0))
    assert_weights(checkpoint, expected_step(config, []))
    station.order(NAME, recorded=(saved.at,), save=None)
    station.reported(NAME, lambda r: r.saved == ())
    one_step(station, 0, [1, 2])
    one_step(station, 1, [3])
    _, checkpoint = checkpoint_of(station, config, StepAt(0, 2))
    assert_weights(checkpoint, expected_step(config, [[1, 2], [3]]))
    assert checkpoint.state == {"timeline": 0, "step": 2}
    report = station.reports[NAME]
    assert [metrics.at.step for metrics in report.metrics] == [1, 2]
    assert {"loss", "accuracy", "accuracy_1", "grad_norm", "lr", "tokens", "anchors"} <= report.metrics[
        0
    ].values.keys()
    assert report.totals["tokens_total"] == 3 * 21 and report.totals["packs_total"] == 3
    assert {
        "phase_forward_seconds",
        "phase_backward_seconds",
        "phase_vote_wait_seconds",
    } <= report.totals.keys()
    station.send(NAME, Exit(incarnation=NAME, finished=True, reason="finished"))
    assert drafter.ended.result(SECONDS) == ExitCode.FINISHED
    station.until(lambda: NAME in station.byes)


def test_an_aborted_try_leaves_no_trace_and_its_packs_are_trained_again(overlaps, config, station, drafter):
    adopt_seed(station)
    first = station.publish(NAME, BatchId(0, 1), random_pack(1))
    lost = StepTry(0, 0, *station.stamp())
    station.train(NAME, lost, {0: (BatchId(0, 1), first), 1: (BatchId(0, 2), None)}, adopt=None)
    station.reported(NAME, lambda r: r.trained == 1 and r.training == lost)
    second = station.publish(NAME, BatchId(0, 2), random_pack(2))
    packs = {0: (BatchId(0, 1), first), 1: (BatchId(0, 2), second)}
    station.train(NAME, lost, packs)
    station.reported(NAME, lambda r: r.vote is not None)
    again = StepTry(0, 0, *station.stamp())
    station.train(NAME, again, packs)
    station.reported(NAME, lambda r: r.vote is not None and r.vote.step_try == again)
    station.order(NAME, committed=again, train=None, held=())
    station.reported(NAME, lambda r: r.complete == StepAt(0, 1))
    _, checkpoint = checkpoint_of(station, config, StepAt(0, 1))
    assert_weights(checkpoint, expected_step(config, [[1, 2]]))


def test_a_poisoned_pack_is_named_in_the_vote(overlaps, config, station, drafter):
    adopt_seed(station)
    bad = random_pack(2)
    bad["features"][5, 3] = float("nan")
    packs = {
        0: (BatchId(0, 1), station.publish(NAME, BatchId(0, 1), random_pack(1))),
        1: (BatchId(0, 2), station.publish(NAME, BatchId(0, 2), bad)),
    }
    step_try = StepTry(0, 0, *station.stamp())
    station.train(NAME, step_try, packs, adopt=None)
    station.reported(NAME, lambda r: r.vote is not None)
    assert station.reports[NAME].vote.bad_positions == (1,)
    station.order(NAME, train=None, held=())
    station.reported(NAME, lambda r: r.training is None)
    _, checkpoint = checkpoint_of(station, config, StepAt(0, 0))
    assert_weights(checkpoint, expected_step(config, []))


def test_packs_are_held_until_newer_orders_leave_them_out(station, drafter):
    adopt_seed(station)
    attempt = station.publish(NAME, BatchId(0, 1), random_pack(1))
    station.reported(NAME, lambda r: r.held == (attempt,))
    station.order(NAME, held=(attempt,))
    stamp = station.order(NAME, held=())
    station.reported(NAME, lambda r: r.orders == stamp)
    assert station.reports[NAME].held == ()


def test_a_slot_that_moved_on_is_not_held(station, drafter):
    adopt_seed(station)
    attempt = station.stamp()
    descriptor = station.writer.write(7, BatchId(0, 9), attempt, random_pack(9))
    station.writer.invalidate(7)
    station.send_pack(NAME, descriptor)
    good = station.publish(NAME, BatchId(0, 1), random_pack(1))
    station.reported(NAME, lambda r: good in r.held)
    assert station.reports[NAME].held == (good,)
    station.reported(NAME, lambda r: r.totals["stale_packs_total"] == 1.0)


def test_a_slot_whose_contents_are_not_what_was_sealed_ends_the_drafter(station, drafter):
    adopt_seed(station)
    descriptor = station.writer.write(7, BatchId(0, 9), station.stamp(), random_pack(9))
    station.writer._arena.payload(7)[64] ^= 1
    station.send_pack(NAME, descriptor)
    with pytest.raises(CorruptPack, match="slot 7"):
        drafter.ended.result(SECONDS)


def test_a_pack_in_a_file_that_is_cut_already_is_not_taken(station, drafter):
    """It may be there again at once, from the target's next incarnation: no reason to end the drafter."""
    adopt_seed(station)
    descriptor = station.writer.write(7, BatchId(0, 9), station.stamp(), random_pack(9))
    os.truncate(station.writer._arena.path, 10_000)
    station.send_pack(NAME, descriptor)
    station.reported(NAME, lambda r: r.totals["stale_packs_total"] == 1.0)
    assert station.reports[NAME].held == ()


def test_a_slot_that_is_cut_once_it_was_taken_ends_the_drafter_before_it_votes(station, drafter):
    adopt_seed(station)
    taken = station.publish(NAME, BatchId(0, 1), random_pack(1))
    station.reported(NAME, lambda r: taken in r.held)
    arena = station.writer._arena
    os.truncate(arena.path, len(arena.memory) - len(arena.payloads()) + 1000)  # its features end at 2688
    station.train(NAME, StepTry(0, 0, *station.stamp()), {0: (BatchId(0, 1), taken)}, adopt=None)
    with pytest.raises(StalePack, match=r"slot 0 .* cut"):
        drafter.ended.result(SECONDS)


def test_a_checkpoint_is_verified_before_it_is_adopted(config, station, drafter):
    adopt_seed(station)
    one_step(station, 0, [1, 2])
    saved, _ = checkpoint_of(station, config, StepAt(0, 1))
    one_step(station, 1, [3])
    wrong = Adopt(at=StepAt(1, 1), source="checkpoint", name=saved.name, sha256="f" * 64)
    station.order(NAME, save=None, adopt=wrong, recorded=(saved.at,))
    station.reported(NAME, lambda r: any(f.order == "adopt" and "SHA-256" in f.reason for f in r.failures))
    assert station.reports[NAME].complete == StepAt(0, 2)
    right = wrong.model_copy(update={"sha256": saved.sha256})
    station.order(NAME, adopt=right)
    station.reported(NAME, lambda r: r.complete == StepAt(1, 1) and not r.failures)
    _, checkpoint = checkpoint_of(station, config, StepAt(1, 1))
    assert_weights(checkpoint, expected_step(config, [[1, 2]]))


def test_a_disk_that_takes_no_checkpoint_is_reported_and_training_goes_on(
    config, station, drafter, monkeypatch
):
    monkeypatch.setattr(trainer_module, "RETRY_S", 0.0)
    adopt_seed(station)
    config.run.dir.mkdir()
    blocker = config.run.dir / "checkpoints"
    blocker.write_text("a file where the folder should be")
    station.order(NAME, save=StepAt(0, 0))
    station.reported(NAME, lambda r: any(str(f).startswith("save: checkpoint") for f in r.failures))
    one_step(station, 0, [1])
    assert station.reports[NAME].complete == StepAt(0, 1)
    blocker.unlink()
    _, checkpoint = checkpoint_of(station, config, StepAt(0, 1))
    assert_weights(checkpoint, expected_step(config, [[1]]))


def test_a_fenced_drafter_leaves_with_an_error(station, drafter):
    adopt_seed(station)
    station.send(NAME, Exit(incarnation=NAME, finished=False, reason="fenced"))
    with pytest.raises(Fenced, match="fenced"):
        drafter.ended.result(SECONDS)


def test_a_stop_says_bye(station, drafter):
    adopt_seed(station)
    drafter.stop.set()
    drafter.link.wake()
    station.until(lambda: NAME in station.byes)
    assert drafter.ended.result(SECONDS) == ExitCode.STOPPED


# ---- several drafters -------------------------------------------------------------------------


def free_store() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def test_a_newcomer_takes_a_peers_state_and_both_train_what_one_would(overlaps, config, station, drafter):
    adopt_seed(station)
    one_step(station, 0, [1, 2])
    other = Drafter(config, station, "drafter-2")
    station.reported("drafter-2", lambda r: r.complete is None)
    pair = group_of("drafter-2", NAME, generation=2, store=free_store())
    station.order(NAME, group=pair)
    station.order("drafter-2", group=pair, adopt=Adopt(at=StepAt(0, 1), source="peer", name=NAME, sha256=""))
    for name in (NAME, "drafter-2"):
        station.reported(name, lambda r: r.complete == StepAt(0, 1) and r.generation == 2)
    step_try = StepTry(0, 1, *station.stamp())
    for position, (name, seed) in enumerate([("drafter-2", 3), (NAME, 4)]):
        attempt = station.publish(name, BatchId(0, seed), random_pack(seed))
        station.train(name, step_try, {position: (BatchId(0, seed), attempt)}, adopt=None)
    for name in (NAME, "drafter-2"):
        station.reported(name, lambda r: r.vote is not None and r.vote.step_try == step_try)
        station.order(name, committed=step_try, train=None, held=())
        station.reported(name, lambda r: r.complete == StepAt(0, 2))
    expected = expected_step(config, [[1, 2], [3, 4]])
    checkpoints = [checkpoint_of(station, config, StepAt(0, 2), name)[1] for name in (NAME, "drafter-2")]
    for name, tensor in checkpoints[0].weights.items():
        assert torch.equal(tensor, checkpoints[1].weights[name])
        place = next(place for place in expected.places if place.name == name)
        torch.testing.assert_close(tensor, place.of(expected.masters), rtol=1e-4, atol=1e-6)
    other.stop.set()
    other.link.wake()
    assert other.ended.result(SECONDS) == ExitCode.STOPPED


def test_a_peer_that_left_mid_try_costs_the_try_and_nothing_else(overlaps, config, station, drafter):
    adopt_seed(station)
    other = Drafter(config, station, "drafter-2")
    station.until(lambda: "drafter-2" in station.hellos)
    station.order("drafter-2", adopt=SEED)
    station.reported("drafter-2", lambda r: r.complete == StepAt(0, 0))
    pair = group_of(NAME, "drafter-2", generation=2, store=free_store())
    for name in (NAME, "drafter-2"):
        station.order(name, group=pair, adopt=None)
    for name in (NAME, "drafter-2"):
        station.reported(name, lambda r: r.generation == 2)
    step_try = StepTry(0, 0, *station.stamp())
    attempt = station.publish(NAME, BatchId(0, 1), random_pack(1))
    station.train(NAME, step_try, {0: (BatchId(0, 1), attempt)})
    station.reported(NAME, lambda r: attempt in r.held if overlaps else r.trained == 1)
    other.stop.set()
    other.link.wake()
    assert other.ended.result(SECONDS) == ExitCode.STOPPED
    alone = StepTry(0, 0, *station.stamp())
    second = station.publish(NAME, BatchId(0, 2), random_pack(2))
    packs = {0: (BatchId(0, 1), attempt), 1: (BatchId(0, 2), second)}
    station.train(NAME, alone, packs, group=group_of(NAME, generation=3))
    station.reported(NAME, lambda r: r.vote is not None and r.vote.step_try == alone)
    station.order(NAME, committed=alone, train=None, held=())
    station.reported(NAME, lambda r: r.complete == StepAt(0, 1))
    _, checkpoint = checkpoint_of(station, config, StepAt(0, 1))
    assert_weights(checkpoint, expected_step(config, [[1, 2]]))
