"""The run as an evaluator sees it: over HTTP while the coordinator lives, from its result afterwards."""

import json
import os
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from protocol.files import FileLock
from services.evaluator.agenda import Recorded
from services.evaluator.run_state import Run, RunState, parse

ROWS = [
    {"timeline": 0, "step": 0, "name": "ckpt-0-0-d", "epoch": 0},
    {"timeline": 0, "step": 4, "name": "ckpt-0-4-d"},
]
CHECKPOINTS = (Recorded("ckpt-0-0-d", 0, 0, 0), Recorded("ckpt-0-4-d", 0, 4, None))


@pytest.fixture
def coordinator(tmp_path):
    """Serves `status` and has written its address; `close` is its death."""

    class Coordinator:
        status: dict | None = {"state": "running", "checkpoints": ROWS}

        def __init__(self) -> None:
            outer = self

            class Handler(BaseHTTPRequestHandler):
                def do_GET(self):
                    body = json.dumps(outer.status).encode()
                    self.send_response(503 if outer.status is None else 200)
                    self.send_header("Content-Length", str(len(body)))
                    self.end_headers()
                    self.wfile.write(body)

                def log_message(self, *_):
                    pass

            self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
            self.port = self._server.server_address[1]
            threading.Thread(target=self._server.serve_forever, daemon=True).start()
            self.write_address("127.0.0.1")

        def write_address(self, host: str) -> None:
            address = {"http": f"http://{host}:{self.port}", "host": os.uname().nodename}
            (tmp_path / "coordinator.json").write_text(json.dumps(address))

        def close(self) -> None:
            self._server.shutdown()
            self._server.server_close()

    made = Coordinator()
    yield made
    made.close()


def test_nothing_is_known_before_the_coordinator_has_started(tmp_path):
    assert Run(tmp_path).look() is None


def test_a_living_coordinator_tells(tmp_path, coordinator):
    assert Run(tmp_path).look() == RunState(CHECKPOINTS, over=False, failed=False)
    coordinator.status = None  # starting
    assert Run(tmp_path).look() is None
    coordinator.status = {"state": "stopped", "checkpoints": ROWS[:1]}
    assert Run(tmp_path).look() == RunState(CHECKPOINTS[:1], over=True, failed=False)


def test_one_that_listens_on_all_addresses_is_reached_by_name(tmp_path, coordinator):
    coordinator.write_address("0.0.0.0")
    assert Run(tmp_path).look() == RunState(CHECKPOINTS, over=False, failed=False)


def test_the_result_counts_only_from_the_coordinator_that_was_last(tmp_path, coordinator):
    coordinator.close()
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"state": "finished", "checkpoints": ROWS}))
    after_ns = (tmp_path / "coordinator.json").stat().st_mtime_ns
    os.utime(result, ns=(after_ns - 1, after_ns - 1))
    assert Run(tmp_path).look() is None  # of an earlier one: this one died and will be back
    os.utime(result, ns=(after_ns + 1, after_ns + 1))
    assert Run(tmp_path).look() == RunState(CHECKPOINTS, over=True, failed=False)


def test_a_run_that_was_stopped_before_may_go_on_and_one_that_stops_now_is_over(tmp_path, coordinator):
    coordinator.close()
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"state": "stopped", "checkpoints": ROWS}))
    assert Run(tmp_path).look() == RunState(CHECKPOINTS, over=False, failed=False)
    run, now_ns = Run(tmp_path), time.time_ns()
    os.utime(result, ns=(now_ns, now_ns))
    assert run.look() == RunState(CHECKPOINTS, over=True, failed=False)


def test_the_result_of_a_former_coordinator_does_not_count_while_another_starts(tmp_path, coordinator):
    coordinator.close()
    (tmp_path / "result.json").write_text(json.dumps({"state": "finished", "checkpoints": ROWS}))
    with FileLock(tmp_path / "coordinator.lock"):
        assert Run(tmp_path).look() is None
    assert Run(tmp_path).look() == RunState(CHECKPOINTS, over=True, failed=False)


def test_a_run_that_failed_is_over():
    assert parse({"state": "failed", "reason": "poison"}) == RunState((), over=True, failed=True)
