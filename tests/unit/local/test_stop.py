"""Stopping asks the coordinator of this run, waits for its end, and asks the next one where it died of it."""

import json
import threading

import pytest

from protocol.errors import PeerGone
from protocol.files import FileLock
from protocol.messages import StepAt
from services.coordinator.http import Board, StatusServer
from services.coordinator.ledger import Ledger
from services.local.status import Status, fetch, read_address
from services.local.stop import ended, is_finished, stop


class Coordinator:
    """Its lock, its address, its page; what it leaves behind when it ends."""

    def __init__(self, run_dir, name: str, *, port: int = 0, lingers: bool = False) -> None:
        self.run_dir, self.lingers, self.asked = run_dir, lingers, threading.Event()
        self.lock = FileLock(run_dir / "coordinator.lock").acquire()
        self.board = Board(on_stop=self.asked.set, incarnation=name)
        self.say("running")
        self.server = StatusServer(self.board, "127.0.0.1", port)
        (run_dir / "coordinator.json").write_text(json.dumps({"http": self.server.url, "incarnation": name}))

    def say(self, state: str, step: int = 3) -> None:
        self.board.snapshot = {"state": state, "step": step, "total_steps": 9, "lingers": self.lingers}

    def leave(self, result: bool = True) -> None:
        if result:
            self.say("stopped", step=4)
            (self.run_dir / "result.json").write_text(json.dumps(self.board.snapshot))
        self.lock.release()
        self.server.close()


def nobody_is_told(_status: Status) -> None:
    pass


def test_it_tells_what_it_waits_for_until_the_coordinator_is_gone(tmp_path):
    coordinator = Coordinator(tmp_path, "coordinator-1")
    told: list[Status] = []

    def tell(status: Status) -> None:
        told.append(status)
        if len(told) == 2:
            coordinator.leave()

    last = stop(tmp_path, tell, every_s=0.01)
    assert coordinator.asked.is_set() and len(told) == 2 and told[0].step == 3
    assert (last.state, last.step) == ("stopped", 4)


def test_a_run_that_is_over_stops_no_other_that_listens_on_its_port(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    for folder in folders:
        folder.mkdir()
    over = Coordinator(folders[0], "coordinator-a")
    over.leave()
    other = Coordinator(folders[1], "coordinator-b", port=int(over.server.url.rpartition(":")[2]))
    with pytest.raises(PeerGone, match="nobody runs it"):
        stop(folders[0], nobody_is_told)
    with pytest.raises(PeerGone, match="another run's coordinator listens there"):
        fetch(read_address(folders[0]))
    assert not other.asked.is_set() and fetch(read_address(folders[1])).state == "running"
    last = ended(folders[0])
    assert last is not None and last.state == "stopped"
    other.leave()


def test_a_coordinator_that_has_not_told_its_address_yet_is_asked_when_it_has(tmp_path):
    """It holds the lock and plans; what lies there is the address of its dead predecessor."""
    Coordinator(tmp_path, "coordinator-1").leave(result=False)
    planning = FileLock(tmp_path / "coordinator.lock").acquire()
    second: list[Coordinator] = []

    def get_ready() -> None:
        planning.release()
        second.append(Coordinator(tmp_path, "coordinator-2"))
        assert second[0].asked.wait(10)
        second[0].leave()

    starting = threading.Timer(0.5, get_ready)
    starting.start()
    last = stop(tmp_path, nobody_is_told, every_s=0.01)
    starting.join()
    assert second[0].asked.is_set() and last.state == "stopped"


def test_a_run_is_finished_when_its_ledger_says_so(tmp_path):
    assert not is_finished(tmp_path)
    ledger = Ledger(tmp_path / "ledger.sqlite", {"options": {}, "dataset": "d", "model": "m"})
    ledger.record_checkpoint("ckpt-0-0-drafter-1", StepAt(0, 0), "0" * 64)
    assert not is_finished(tmp_path)
    ledger.finish()
    assert is_finished(tmp_path)
    ledger.open_timeline(StepAt(0, 0))  # rolled back
    assert not is_finished(tmp_path)
    ledger.close()


def test_who_takes_over_from_a_coordinator_that_died_while_it_stopped_is_asked_too(tmp_path):
    (tmp_path / "result.json").write_text('{"state": "stopped", "step": 1}')  # of an earlier stop
    first = Coordinator(tmp_path, "coordinator-1")
    second: list[Coordinator] = []

    def tell(_status: Status) -> None:
        if not second:
            first.leave(result=False)
            second.append(Coordinator(tmp_path, "coordinator-2"))
        elif second[0].asked.is_set():
            second[0].leave()

    last = stop(tmp_path, tell, every_s=0.01)
    assert first.asked.is_set() and second[0].asked.is_set() and last.step == 4


def test_a_coordinator_that_died_while_it_stopped_has_not_stopped_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr("services.local.stop.RESTART_S", 0.3)
    (tmp_path / "result.json").write_text('{"state": "stopped", "step": 1}')
    coordinator = Coordinator(tmp_path, "coordinator-1")
    with pytest.raises(PeerGone, match="died while it stopped"):
        stop(tmp_path, lambda _status: coordinator.leave(result=False), every_s=0.01)


def test_one_that_lingers_is_not_waited_for(tmp_path):
    coordinator = Coordinator(tmp_path, "coordinator-1", lingers=True)
    last = stop(tmp_path, lambda _status: coordinator.say("stopped", step=4), every_s=0.01)
    assert (last.state, last.step) == ("stopped", 4) and coordinator.lock.held
    coordinator.leave()


def test_a_result_that_is_not_whole_is_none(tmp_path):
    coordinator = Coordinator(tmp_path, "coordinator-1")
    coordinator.leave()
    (tmp_path / "result.json").write_text("")
    with pytest.raises(PeerGone, match="without telling"):
        ended(tmp_path)
    (tmp_path / "coordinator.json").write_text('{"http": "http://127.0.0.1:abc"}')
    with pytest.raises(PeerGone, match="no answer"):
        fetch(read_address(tmp_path))
