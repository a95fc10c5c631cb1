"""A role's side of a trace, with a real profiler: what it records, bounds, and leaves behind."""

import gzip
import json
import stat
import threading
from contextlib import contextmanager

import pytest
import torch

from protocol.errors import PeerGone
from protocol.traces import FOLDER, ask
from services import tracer as tracing
from services.coordinator.http import Board, StatusServer
from services.local import trace as asking
from services.local.status import ADDRESS_FILE
from services.tracer import Tracer, span

CPU = torch.device("cpu")


@contextmanager
def working_role(folder, place="target-0", device=CPU):
    """A thread that multiplies, in a span, and one more that does so unseen."""
    tracer, stop = Tracer(folder, lambda: place, device), threading.Event()

    def work(turns: bool) -> None:
        a = torch.ones(8, 8)
        while not stop.is_set():
            if turns:
                tracer.turn()
            with span("product" if turns else "unseen"):
                a @ a

    def compute() -> None:
        with tracer.working():
            work(turns=True)

    threads = [threading.Thread(target=compute), threading.Thread(target=work, args=(False,))]
    for thread in threads:
        thread.start()
    tracer.start()
    try:
        yield stop
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        tracer.close()


def events_of(file) -> list[dict]:
    return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]


def test_a_trace_has_the_work_of_the_thread_that_turns(tmp_path):
    with working_role(tmp_path):
        file = asking.trace(tmp_path, "target-0", 1.0)
    events = events_of(file)
    names = {event["name"] for event in events}
    assert {"product", "aten::mm"} <= names and "unseen" not in names
    times = [event["ts"] for event in events if event["name"] == "product"]
    assert 0.5e6 < max(times) - min(times) < 10e6
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert list((tmp_path / FOLDER).iterdir()) == [file]


def test_a_trace_ends_before_it_grows_too_large(tmp_path, monkeypatch):
    monkeypatch.setattr(tracing, "MOST_BYTES", 300e3)
    with working_role(tmp_path):
        file = asking.trace(tmp_path, "target-0", 30.0)
    assert 0 < len(gzip.decompress(file.read_bytes())) < 10e6


def test_what_a_dead_process_left_half_written_goes_with_the_next_trace(tmp_path):
    folder = tmp_path / FOLDER
    folder.mkdir(mode=0o700)
    (folder / ".target-0-20200101T000000-000000.json.gz.raw").touch()
    (folder / ".target-01-mine").touch()
    with working_role(tmp_path):
        file = asking.trace(tmp_path, "target-0", 1.0)
    assert {left.name for left in folder.iterdir()} == {file.name, ".target-01-mine"}


def test_a_role_that_leaves_says_so_and_one_that_waits_at_the_end_does_not_hang(tmp_path):
    tracer = Tracer(tmp_path, lambda: "drafter-0", CPU)
    with tracer.working():
        pass
    tracer.start()
    with pytest.raises(PeerGone, match="drafter-0 could not be traced: the role is leaving"):
        asking.trace(tmp_path, "drafter-0", 1.0)
    tracer.close()
    assert list((tmp_path / FOLDER).iterdir()) == []


@pytest.mark.parametrize("call", ["prepare_trace", "start_trace"])  # in the trace's thread, in the role's own
def test_whatever_a_profiler_raises_is_told_and_does_no_harm(tmp_path, monkeypatch, call):
    def refuse(_: object) -> None:
        raise UserWarning("not on this chip")

    with working_role(tmp_path):
        with monkeypatch.context() as change:
            change.setattr(tracing.profile, call, refuse)
            with pytest.raises(PeerGone, match="target-0 could not be traced: not on this chip"):
                asking.trace(tmp_path, "target-0", 1.0)
        file = asking.trace(tmp_path, "target-0", 1.0)
    assert {"product", "aten::mm"} <= {event["name"] for event in events_of(file)}


def test_what_is_recorded_when_the_work_ends_is_still_written(tmp_path):
    with working_role(tmp_path) as stop:
        asked = ask(tmp_path, "target-0", 30.0)
        second = wait_for(lambda: next((tmp_path / FOLDER).glob(".*.raw"), None))
        stop.set()
        wait_for(lambda: asked.trace.exists() or asked.error.exists())
    assert second is not None
    assert asked.trace.exists() or asked.error.read_text() == "the role is leaving"


def test_a_role_that_is_not_there_is_reported_and_leaves_no_request(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "TAKEN_S", 0.2)
    with pytest.raises(PeerGone, match=r"target-7 has not taken the request within 0\.2 s; is it running"):
        asking.trace(tmp_path, "target-7", 1.0)
    assert list((tmp_path / FOLDER).iterdir()) == []
    board = Board(on_stop=lambda: None)
    board.snapshot = {"roles": [{"role": "target", "index": 0}, {"role": "drafter", "index": 0}]}
    server = StatusServer(board, "127.0.0.1", 0)
    (tmp_path / ADDRESS_FILE).write_text(json.dumps({"http": server.url}))
    with pytest.raises(PeerGone, match="the run has target-0, drafter-0; is it still loading"):
        asking.trace(tmp_path, "target-7", 1.0)
    server.close()


def test_a_role_that_does_not_answer_is_reported(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "WRITTEN_S", -0.8)
    tracer = Tracer(tmp_path, lambda: "target-0", CPU)  # nobody turns
    tracer.start()
    with pytest.raises(PeerGone, match=r"target-0 took the request and has written no trace within 0\.2 s"):
        asking.trace(tmp_path, "target-0", 1.0)
    with tracer.working():
        pass
    tracer.close()


def test_a_role_without_a_place_takes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(asking, "TAKEN_S", 1.5)
    with working_role(tmp_path, place=""), pytest.raises(PeerGone, match="is it running"):
        asking.trace(tmp_path, "target-0", 1.0)


def wait_for(find, limit_s=60.0):
    pause = threading.Event()
    for _ in range(int(limit_s / 0.02)):
        if found := find():
            return found
        pause.wait(0.02)
    raise AssertionError("not in time")
