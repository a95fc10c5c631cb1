"""Who may look and who may stop a run over HTTP, against the real server."""

from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request

import pytest

from protocol.errors import AlreadyRunning
from services.config.schema import Coordinator
from services.coordinator.http import CONNECTIONS, Board, StatusServer
from services.lifecycle import FOR


@pytest.fixture
def served():
    asked = threading.Event()
    board = Board(on_stop=asked.set)
    options = Coordinator(http_port=0)
    server = StatusServer(board, options.http_host, options.http_port)
    yield board, server.url, asked
    server.close()


def post(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, method="POST", headers=headers), timeout=10
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def get(url: str, **headers: str) -> int:
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=10) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_it_listens_on_loopback_unless_told_otherwise(served):
    assert served[1].startswith("http://127.0.0.1:")


def test_a_run_is_stopped_by_a_command_and_not_by_a_page_of_another_site(served):
    _, url, asked = served
    assert post(url + "/stop", Origin="http://elsewhere.example") == 403
    assert post(url + "/") == 404 and post(url + "/metrics") == 404
    assert get(url + "/stop") == 404
    assert not asked.is_set()
    assert post(url + "/stop") == 202
    assert asked.is_set()


def test_a_request_for_another_coordinator_is_not_taken_for_this_one(served):
    board, url, asked = served
    board.incarnation, board.snapshot = "coordinator-1", {"state": "running"}
    assert post(url + "/stop", **{FOR: "coordinator-0"}) == 409 and not asked.is_set()
    assert get(url + "/status", **{FOR: "coordinator-0"}) == 409
    assert get(url + "/status") == get(url + "/status", **{FOR: "coordinator-1"}) == 200
    assert post(url + "/stop", **{FOR: "coordinator-1"}) == 202 and asked.is_set()


def test_clients_that_never_end_their_request_keep_nobody_out(served):
    _, url, _ = served
    port = int(url.rpartition(":")[2])
    slow = [socket.create_connection(("127.0.0.1", port), timeout=10) for _ in range(2 * CONNECTIONS)]
    for one in slow:
        one.sendall(b"GET /sta")
    assert get(url + "/healthz") == 503
    for one in slow[:CONNECTIONS]:
        assert one.recv(1) == b"", "the oldest give way"
    for one in slow:
        one.close()


def test_health_and_status_say_when_there_is_nothing_to_tell_yet(served):
    board, url, _ = served
    assert (get(url + "/healthz"), get(url + "/status")) == (503, 503)
    board.unhealthy, board.snapshot = "", {"state": "running"}
    assert (get(url + "/healthz"), get(url + "/status")) == (200, 200)


def test_a_second_server_on_the_port_is_refused_with_the_option_that_helps(served):
    host, _, port = served[1].removeprefix("http://").partition(":")
    with pytest.raises(AlreadyRunning, match=r"coordinator\.http_port"):
        StatusServer(Board(on_stop=lambda: None), host, int(port))
