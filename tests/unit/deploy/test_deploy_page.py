"""The coordinator's page in a real browser, over a real server and a simulated run half-way."""

from __future__ import annotations

import re
import sys
import urllib.request
from pathlib import Path

import pytest

from services.coordinator.http import Board, StatusServer
from services.coordinator.status import ArenaSpace, snapshot

HERE = Path(__file__).parent
sys.path += [str(HERE), str(HERE.parent / "coordinator")]
from browser import BROWSER, screenshot, shown, visit  # noqa: E402
from cluster import Cluster  # noqa: E402
from test_coordinator import config, dataset  # noqa: E402, F401 - a fixture

PAGE = HERE.parents[2] / "services" / "coordinator" / "page.html"


@pytest.fixture
def board(tmp_path, dataset):  # noqa: F811
    cluster = Cluster(tmp_path, config(coordinator={"in_flight_cap_packs": 7}), dataset, seed=1)
    for turn in range(30):
        cluster.respawn()
        if turn == 10:
            cluster.kill(next(name for name in cluster.roles if name.startswith("target")))
        cluster.turn()
    board = Board(on_stop=lambda: None)
    arena = ArenaSpace(3 << 20, 61 << 20, 64 << 20)
    board.snapshot = snapshot(
        cluster.core, name="a <b>run", now_s=cluster.now_s, started_s=0.0, arena=arena,
        evaluation={"step": 4, "acceptance_length": 2.5},
    )  # fmt: skip
    board.unhealthy = ""
    return board


@pytest.fixture
def url(board):
    server = StatusServer(board, "127.0.0.1", 0)
    yield server.url
    server.close()


def scraped(url: str) -> dict[str, float]:
    with urllib.request.urlopen(f"{url}/metrics", timeout=10) as answer:
        lines = (line.rpartition(" ") for line in answer.read().decode().splitlines())
        return {name: float(value) for name, _, value in lines if not name.startswith("#")}


def test_the_page_loads_nothing_from_elsewhere(url):
    text = PAGE.read_text()
    assert not re.search(r"""(src|href)=["']?(https?:)?//|@import|url\(""", text)
    with urllib.request.urlopen(url + "/", timeout=10) as answer:
        assert answer.headers["Content-Type"].startswith("text/html")
        assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
        assert answer.read() == PAGE.read_bytes()


@pytest.mark.skipif(BROWSER is None, reason="needs a browser (Debian: chromium)")
def test_it_shows_the_figures_of_metrics_without_a_word_on_the_console(url, board, tmp_path):
    visited = visit(url + "/", tmp_path / "profile")
    assert visited.console == []
    seen, served = shown(visited.dom), scraped(url)
    assert {"draftmill_step", "draftmill_in_flight_packs", "draftmill_slots_used"} <= seen.keys()
    assert seen["draftmill_evaluated_acceptance_tokens"] == 2.5
    assert seen == {name: served[name] for name in seen}
    assert "a &lt;b&gt;run" in visited.dom and "target 0" in visited.dom
    for event in board.snapshot["events"]:
        assert event["text"].replace("&", "&amp;") in visited.dom


@pytest.mark.skipif(BROWSER is None, reason="needs a browser (Debian: chromium)")
def test_it_waits_for_the_first_status(board, tmp_path):
    server = StatusServer(board, "127.0.0.1", 0)
    board.snapshot = None
    visited = visit(server.url + "/", tmp_path / "profile", seconds=2.0)
    assert "connecting" in visited.dom
    server.close()


@pytest.mark.skipif(BROWSER is None, reason="needs a browser (Debian: chromium)")
def test_a_screenshot_can_be_taken(url, tmp_path):
    file = tmp_path / "page.png"
    screenshot(url + "/", tmp_path / "profile", file)
    assert file.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and file.stat().st_size > 20_000
