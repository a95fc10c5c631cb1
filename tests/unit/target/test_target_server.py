"""The real loop, threads, arena and sockets against a scripted coordinator and drafter."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from protocol.arena import Computing, read_computing
from protocol.codec import decode, encode
from protocol.errors import DataError, Fenced, RetryError
from protocol.messages import (
    Assignment,
    BatchId,
    Bye,
    Exit,
    Message,
    Pack,
    Publication,
    SlotReport,
    Stamp,
    TargetHello,
    TargetOrders,
    TargetReport,
    Welcome,
)
from protocol.sockets import new_context, router
from services.config.schema import Config
from services.data.batch import gather
from services.data.dataset import Dataset
from services.dflash.noise import join_taps
from services.lifecycle import ExitCode, arena_folder, hold_lock
from services.link import Link
from services.seeds import seed
from services.target.server import TargetServer
from services.target.start import Started, hello, open_slots, run_fingerprint, start
from services.transport.reader import SlotReader

CPU = torch.device("cpu")
NAME = "target-test"
DEADLINE_S = 20.0


class Script:
    """A coordinator and one drafter inbox, driven step by step by a test."""

    def __init__(self, folder: Path) -> None:
        self._context = new_context()
        self._control = router(self._context, f"ipc://{folder / 'control'}")
        self._inbox = router(self._context, f"ipc://{folder / 'drafter.inbox'}")
        self.inbox = self._inbox.endpoint
        self.seen: list[Message] = []
        self._peer = b""
        self._stamp = 0

    def close(self) -> None:
        self._control.close()
        self._inbox.close()
        self._context.term()

    def receive(self) -> Message:
        """The next message of the target; Hello is answered."""
        assert self._control.socket.poll(DEADLINE_S * 1000), "the target says nothing"
        self._peer, *frames = self._control.socket.recv_multipart()
        message = decode(frames)
        self.seen.append(message)
        if isinstance(message, TargetHello):
            self.say(Welcome(incarnation=NAME, index=0))
        return message

    def say(self, message: Message) -> None:
        self._control.socket.send_multipart([self._peer, *encode(message)])

    def order(self, *assignments: Assignment) -> Stamp:
        self._stamp += 1
        stamp = Stamp(1, self._stamp)
        self.say(TargetOrders(incarnation=NAME, stamp=stamp, assignments=assignments))
        return stamp

    def until(self, wanted: Callable[[TargetReport], bool]) -> TargetReport:
        """The first report that is as wanted."""
        deadline_s = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline_s:
            message = self.receive()
            if isinstance(message, TargetReport) and wanted(message):
                return message
        raise AssertionError(f"no such report; the last was {self.seen[-1]}")

    def take_pack(self) -> Pack:
        assert self._inbox.socket.poll(DEADLINE_S * 1000), "no pack arrived"
        _, *frames = self._inbox.socket.recv_multipart()
        message = decode(frames)
        assert isinstance(message, Pack)
        return message


class Running:
    """A served target, its script and the outcome of its loop."""

    def __init__(self, config: Config, started: Started) -> None:
        self.config, self.started = config, started
        self.folder = arena_folder(config)
        self._lock = hold_lock(self.folder, NAME)
        self.script = Script(self.folder)
        writer = open_slots(config, started, self.folder, NAME)
        link = Link(
            f"ipc://{self.folder / 'control'}",
            hello(writer, NAME, 0, run_fingerprint(config, started)),
            heartbeat_s=config.coordinator.heartbeat_s,
        )
        self.stop = threading.Event()
        self.server = TargetServer(config, NAME, started, writer, link, self.stop)
        self._pool = ThreadPoolExecutor(1)
        self.outcome: Future[ExitCode] = self._pool.submit(self.server.serve)
        while not isinstance(self.script.receive(), TargetHello):
            pass

    def leave(self) -> None:
        """Whatever the test left running ends here."""
        self.stop.set()
        self.server.link.wake()
        if isinstance(self.outcome.exception(DEADLINE_S), DataError | RuntimeError | RetryError):
            self.server.copier.close()  # a process would just end
            self.server.watchdog.stop()
            self.server.link.close("the test is over")
            self.server.writer.close()
        self._pool.shutdown()
        self.script.close()
        self._lock.release()


@contextmanager
def serving(config: Config, prepare: Callable[[Started], None] | None = None) -> Iterator[Running]:
    started = start(config, CPU)
    if prepare is not None:
        prepare(started)
    running = Running(config, started)
    try:
        yield running
    finally:
        running.leave()


def assignment(number: int, *samples: int, publish: Publication | None = None) -> Assignment:
    return Assignment(
        batch=BatchId(0, number), attempt=Stamp(1, 100 + number), samples=samples, publish=publish
    )


def line(report: TargetReport, number: int) -> SlotReport | None:
    return next((slot for slot in report.slots if slot.batch.index == number), None)


def is_state(number: int, state: str) -> Callable[[TargetReport], bool]:
    return lambda report: any(s.batch.index == number and s.state == state for s in report.slots)


def read(running: Running, pack: Pack) -> dict[str, Tensor]:
    reader = SlotReader(running.folder, CPU)
    tensors = reader.open(pack.descriptor)
    found = {name: tensors[name].clone() for name in tensors}
    tensors.verify()
    del tensors
    reader.close()
    return found


def alone(config: Config, dataset: Dataset, samples: tuple[int, ...]) -> Tensor:
    """Features [T, F] by a target of its own that does nothing else."""
    started = start(
        config.model_copy(update={"target": config.target.model_copy(update={"self_check": False})}), CPU
    )
    batch = gather(dataset, samples, edges=config.plan.bucket_edges, vocabulary=started.shape.vocab_size)
    started.forward.run(batch, started.slabs[0])
    return torch.cat(list(started.slabs[0].taps.sections(batch.tokens).values()), dim=-1)


def serve_one(
    config: Config, *samples: int, prepare: Callable[[Started], None] | None = None
) -> dict[str, Tensor]:
    with serving(config, prepare) as running:
        publication = Publication(lease=Stamp(1, 50), inbox=running.script.inbox)
        running.script.order(assignment(0, *samples, publish=publication))
        return read(running, running.script.take_pack())


def test_a_batch_lives_from_its_assignment_to_its_release(
    make_config: Callable[..., Config], dataset: Dataset
) -> None:
    config = make_config()
    with serving(config) as running:
        script = running.script
        stamp = script.order(assignment(0, 0, 1), assignment(1, 4))
        report = script.until(lambda r: is_state(0, "ready")(r) and is_state(1, "ready")(r))
        assert report.orders == stamp and {s.slot for s in report.slots} == {0, 1}
        assert [(s.tokens, s.published) for s in report.slots] == [(21, None), (30, None)]

        publication = Publication(lease=Stamp(1, 50), inbox=script.inbox)
        script.order(assignment(0, 0, 1, publish=publication), assignment(1, 4))
        pack = script.take_pack()
        assert (pack.target, pack.lease, pack.descriptor.batch) == (NAME, Stamp(1, 50), BatchId(0, 0))
        tensors = read(running, pack)
        assert torch.equal(tensors["features"], alone(config, dataset, (0, 1)))
        assert tensors["sample_ids"].tolist() == [0, 1] and tensors["document_offsets"].tolist() == [0, 5, 21]
        published = script.until(lambda r: line(r, 0) is not None and line(r, 0).published == Stamp(1, 50))  # type: ignore[union-attr]
        assert published.totals["packs_total"] == 2 and published.totals["tokens_total"] == 51
        assert published.totals["bytes_total"] > 0 and published.totals["phase_forward_seconds"] > 0

        script.order(assignment(1, 4))
        assert [s.batch.index for s in script.until(lambda r: line(r, 0) is None).slots] == [1]
        script.say(Exit(incarnation=NAME, finished=True, reason="finished"))
        assert running.outcome.result(DEADLINE_S) == ExitCode.FINISHED
        assert list(running.folder.glob("*.arena")) == []


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_packs_are_the_synchronous_ones_at_any_depth(
    make_config: Callable[..., Config], dataset: Dataset, depth: int
) -> None:
    config = make_config(target={"postprocess_depth": depth, "slots": 3, "self_check": False})
    batches = [(0, 1), (2, 3, 7), (4,), (5,), (6, 0), (1, 2), (3,), (7, 0, 3)]
    expected = {number: alone(config, dataset, samples) for number, samples in enumerate(batches)}
    found: dict[int, Tensor] = {}
    with serving(config) as running:
        script = running.script
        waiting = list(enumerate(batches))
        while len(found) < len(batches):
            now = [
                assignment(n, *samples, publish=Publication(lease=Stamp(1, 500 + n), inbox=script.inbox))
                for n, samples in waiting[:3]
            ]
            script.order(*now)
            pack = script.take_pack()
            number = pack.descriptor.batch.index
            found[number] = read(running, pack)["features"]
            waiting = [(n, samples) for n, samples in waiting if n != number]
    assert all(torch.equal(found[number], expected[number]) for number in expected)


@pytest.mark.parametrize("noise", ["none", "uniform", "normal"])
def test_a_drafter_trains_on_the_same_bits_whether_taps_are_split_or_not(
    make_config: Callable[..., Config], noise: str
) -> None:
    recipe = {"noise": noise, "noise_scale": 0.1}
    joined = serve_one(make_config(recipe=recipe), 0, 3)["features"]
    split = serve_one(make_config(recipe=recipe, target={"split_fc_layers": True}), 0, 3)
    own_seed = seed(11, "noise", 0, 0)
    taps = [split[f"features.{tap}"] for tap in range(2)]
    assert torch.equal(join_taps(taps, kind=noise, scale=0.1, seed=own_seed), joined)  # type: ignore[arg-type]
    if noise != "none":
        assert not torch.equal(torch.cat(taps, dim=-1), joined)


def poison(sample: int, others: tuple[int, ...]) -> Callable[[Started], None]:
    """Make the embedding of a token infinite that only `sample` has."""

    def prepare(started: Started) -> None:
        kept = {int(token) for other in others for token in started.data.of(0).sample(other).input_ids}
        bad = next(int(t) for t in started.data.of(0).sample(sample).input_ids if int(t) not in kept)
        with torch.no_grad():
            started.target.embed_weight_VH[bad] = torch.inf

    return prepare


@pytest.mark.parametrize("split", [False, True])
def test_a_sample_that_is_not_finite_is_left_out_and_the_rest_is_what_it_was(
    make_config: Callable[..., Config], dataset: Dataset, split: bool
) -> None:
    config = make_config(target={"split_fc_layers": split}, recipe={"noise": "uniform", "noise_scale": 0.1})
    publication_lease = Stamp(1, 50)
    with serving(config, poison(3, (0, 7))) as running:
        publication = Publication(lease=publication_lease, inbox=running.script.inbox)
        running.script.order(assignment(0, 0, 3, 7, 8, publish=publication))
        tensors = read(running, running.script.take_pack())
        report = running.script.until(is_state(0, "ready"))
    slot = line(report, 0)
    assert slot is not None and slot.tokens == 12 and report.totals["skipped_total"] == 2
    assert {s.sample: s.reason for s in slot.skipped} == {
        8: "token id 64: the target's embedding has rows 0 to 63",
        3: "the target's hidden states are not finite",
    }
    assert tensors["sample_ids"].tolist() == [0, 7] and tensors["document_offsets"].tolist() == [0, 5, 12]
    whole = alone(config, dataset, (0, 3, 7))
    rows = torch.cat([whole[:5], whole[17:]])
    drawn = {"kind": "uniform", "scale": 0.1, "seed": seed(11, "noise", 0, 0)}
    if split:
        assert torch.equal(torch.cat([tensors["features.0"], tensors["features.1"]], dim=-1), rows)
    else:
        assert torch.equal(tensors["features"], join_taps([rows], **drawn))  # type: ignore[arg-type]


@pytest.mark.parametrize(("samples", "reason"), [((3,), "not finite"), ((8,), "token id 64")])
def test_a_batch_without_a_good_sample_fails_with_its_reason(
    make_config: Callable[..., Config], samples: tuple[int, ...], reason: str
) -> None:
    with serving(make_config(target={"slots": 1}), poison(3, (0,))) as running:
        running.script.order(assignment(0, *samples))
        report = running.script.until(is_state(0, "failed"))
        (slot,) = report.slots
        assert reason in slot.reason and slot.slot is None
        running.script.order(assignment(1, 0))
        assert running.script.until(is_state(1, "ready")).slots[0].slot == 0


def test_a_stop_says_bye_and_leaves_nothing_behind(make_config: Callable[..., Config]) -> None:
    with serving(make_config()) as running:
        running.script.order(*(assignment(n, 4, 5) for n in range(6)))
        running.script.until(is_state(0, "ready"))
        running.stop.set()
        running.server.link.wake()
        while not isinstance(said := running.script.receive(), Bye):
            pass
        assert said.incarnation == NAME and "signal" in said.reason
        assert running.outcome.result(DEADLINE_S) == ExitCode.STOPPED
        assert list(running.folder.glob("*.arena")) == []


def test_a_target_that_is_sent_away_says_so(make_config: Callable[..., Config]) -> None:
    with serving(make_config()) as running:
        running.script.say(Exit(incarnation=NAME, finished=False, reason="fenced: declared dead"))
        with pytest.raises(Fenced, match="declared dead"):
            running.outcome.result(DEADLINE_S)
        assert list(running.folder.glob("*.arena")) == []


def test_a_death_in_a_forward_names_its_batch_and_keeps_the_arena_for_the_coordinator(
    make_config: Callable[..., Config],
) -> None:
    def break_layer(started: Started) -> None:
        def fail(*_: object) -> None:
            raise RuntimeError("the GPU fell off the bus")

        started.target.layers[2].register_forward_pre_hook(fail)

    with serving(make_config(), break_layer) as running:
        running.script.order(assignment(7, 0), assignment(8, 1))
        with pytest.raises(RuntimeError, match="fell off the bus"):
            running.outcome.result(DEADLINE_S)
        assert read_computing(running.folder, NAME) == Computing(BatchId(0, 7), Stamp(1, 107))


def test_a_sample_that_does_not_exist_ends_the_target_without_blaming_a_forward(
    make_config: Callable[..., Config],
) -> None:
    with serving(make_config()) as running:
        running.script.order(assignment(0, 999))
        with pytest.raises(DataError, match="999"):
            running.outcome.result(DEADLINE_S)
        assert read_computing(running.folder, NAME) is None


def test_a_target_whose_arena_was_removed_ends_so_that_another_can_serve(
    make_config: Callable[..., Config],
) -> None:
    with serving(make_config()) as running:
        running.script.order(assignment(0, 0))
        running.script.until(is_state(0, "ready"))
        running.server.writer.check_file()
        (running.folder / f"{NAME}.arena").unlink()
        running.script.order()
        with pytest.raises(RetryError, match="was removed by another process"):
            running.outcome.result(DEADLINE_S)
