"""What a container's health check says, over a real server."""

from __future__ import annotations

import socket

import pytest

from services.coordinator.http import Board, StatusServer
from services.local.health import main, problem


def member(**changes):
    fields = {"role": "target", "index": 1, "host": "here", "state": "ready", "silent_s": 0.2}
    return fields | changes


@pytest.fixture
def board():
    board = Board(on_stop=lambda: None)
    board.snapshot, board.unhealthy = {"state": "running", "roles": [member()]}, ""
    return board


@pytest.fixture
def url(board):
    server = StatusServer(board, "127.0.0.1", 0)
    yield server.url
    server.close()


def test_a_run_that_progresses_is_well(url, board):
    assert problem(url, None) == "" and main([url]) == 0
    board.unhealthy = "no commit for 301 s"
    assert problem(url, None) == "no commit for 301 s" and main([url]) == 1


def test_a_member_that_reports_is_well(url, board):
    assert problem(url, "here") == ""
    assert problem(url, "there") == "no member of the run is on there"
    board.snapshot["roles"] = [member(silent_s=40.0)]
    assert problem(url, "here") == "target 1 is ready, silent 40 s"
    board.snapshot["roles"] = [member(state="starting")]
    assert "starting" in problem(url, "here")


def test_a_role_at_rest_is_well(url, board):
    board.snapshot = {"state": "finished", "roles": []}
    assert problem(url, socket.gethostname()) == ""


def test_no_coordinator_is_a_problem(url, board):
    board.snapshot = None
    assert problem(url, "here")
    assert "refused" in problem("http://127.0.0.1:1", None)
