"""The metrics of a whole simulated run, and the page that lists them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from cluster import Cluster
from prometheus_client import generate_latest
from test_coordinator import config, dataset  # noqa: F401 - a fixture

from services.coordinator.metrics import FAMILIES, metrics_markdown, registry
from services.coordinator.status import ArenaSpace, snapshot

PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


@pytest.fixture
def cluster(tmp_path, dataset):  # noqa: F811
    """Half-way, after a target's death."""
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    for turn in range(30):
        cluster.respawn()
        if turn == 10:
            cluster.kill(next(name for name in cluster.roles if name.startswith("target")))
        cluster.turn()
    return cluster


def taken(cluster, **more):
    return snapshot(cluster.core, name="run", now_s=cluster.now_s, started_s=0.0, **more)


def samples(status) -> dict[str, float]:
    """`name{labels}` -> value, as scraped."""
    text = generate_latest(registry(lambda: status)).decode()
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_figures_agree_with_the_status(cluster):
    status = taken(cluster, arena=ArenaSpace(10, 20, 30))
    found = samples(status)
    assert found["draftmill_samples_committed"] == status["samples_committed"] > 0
    assert found["draftmill_slots_used"] <= found["draftmill_slots"]
    assert 0 <= found["draftmill_credits"] <= found["draftmill_slots"]
    assert found["draftmill_arena_free_bytes"] == 20
    assert found['draftmill_role_deaths_total{role="target"}'] == 1
    assert sum(v for n, v in found.items() if n.startswith("draftmill_role_restarts_total")) == 1
    assert found['draftmill_batches_failed{cause="non_finite"}'] == 0


def test_a_restarted_place_tells_how_long_it_was_vacant(cluster):
    assert 0 < samples(taken(cluster))['draftmill_role_recovery_seconds{role="target"}'] < 5


def test_a_figure_that_is_not_known_has_no_series(cluster):
    found = samples(taken(cluster))
    assert "draftmill_batches_without_outcome" not in found and "draftmill_arena_bytes" not in found
    assert samples(taken(cluster, audit=(0, 0)))["draftmill_batches_without_outcome"] == 0


def test_failures_are_told_apart_by_cause(tmp_path, dataset):  # noqa: F811
    from protocol.messages import BatchId

    cluster = Cluster(tmp_path, config(), dataset, seed=1, bad=[BatchId(0, 2)], poison=[BatchId(0, 4)])
    cluster.run()
    found = samples(taken(cluster))
    assert found['draftmill_batches_failed{cause="non_finite"}'] == 1
    assert found['draftmill_batches_failed{cause="poison"}'] == 1


def test_the_page_is_current():
    assert PAGE.read_text() == metrics_markdown(), "run `make docs`"


def test_names_are_unique_and_prefixed():
    names = [family.name for family in FAMILIES]
    assert len(set(names)) == len(names) and all(name.startswith("draftmill_") for name in names)


@pytest.mark.skipif(not shutil.which("promtool"), reason="needs promtool (Debian: prometheus)")
def test_promtool_finds_nothing_to_complain_of(cluster):
    text = generate_latest(registry(lambda: taken(cluster, arena=ArenaSpace(1, 2, 3), audit=(0, 0))))
    checked = subprocess.run(["promtool", "check", "metrics"], input=text, capture_output=True)
    assert checked.returncode == 0, checked.stdout + checked.stderr
