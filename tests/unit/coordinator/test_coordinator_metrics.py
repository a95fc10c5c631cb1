"""The metrics of a whole simulated run, and the page that lists them."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from cluster import Cluster
from prometheus_client import generate_latest
from test_coordinator import config, dataset  # noqa: F401 - a fixture

from services.coordinator.evaluation import HISTORY, Evaluation
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
    stopped = samples(taken(cluster, audit=(None, 0)))  # what is still to come is not lost
    assert "draftmill_batches_without_outcome" not in stopped and stopped["draftmill_batches_duplicated"] == 0


def test_an_evaluators_figures_are_served_and_what_it_did_not_measure_is_not(cluster, tmp_path):
    evaluation = Evaluation(tmp_path)
    assert evaluation.newest() is None
    assert "draftmill_evaluated_step" not in samples(taken(cluster, evaluation=evaluation.newest()))
    file = tmp_path / HISTORY
    file.write_text(json.dumps({"step": 4, "acceptance_length": 2.0, "held_out_loss": 3.5}) + "\n")
    assert samples(taken(cluster, evaluation=evaluation.newest()))["draftmill_evaluated_loss"] == 3.5
    with file.open("a") as lines:
        lines.write(json.dumps({"step": 8, "acceptance_length": 2.5, "lossless": True, "by_position": [1]}))
    assert evaluation.newest()["step"] == 4  # half a line is none
    with file.open("a") as lines:
        lines.write("\n")
    found = samples(taken(cluster, evaluation=evaluation.newest()))
    assert found["draftmill_evaluated_step"] == 8
    assert found["draftmill_evaluated_acceptance_tokens"] == 2.5
    assert "draftmill_evaluated_loss" not in found


@pytest.mark.parametrize(
    "line",
    ["", "no JSON", "[1]", '{"step": "8"}', '{"step": NaN}', "[" * 60_000, f'{{"step": 1{"0" * 400}}}'],
    ids=["empty", "text", "list", "string", "NaN", "deep", "large"],
)
def test_nothing_in_an_evaluators_file_hurts_the_run(tmp_path, line):
    evaluation = Evaluation(tmp_path)
    (tmp_path / HISTORY).write_text('{"step": 4}\n')
    assert evaluation.newest() == {"step": 4}
    with (tmp_path / HISTORY).open("a") as lines:
        lines.write(line + "\n")
    assert evaluation.newest() == {"step": 4}


def test_a_folder_in_place_of_an_evaluators_file_hurts_nothing(tmp_path):
    (tmp_path / HISTORY).mkdir()
    evaluation = Evaluation(tmp_path)
    assert evaluation.newest() is None and evaluation.newest() is None


def test_checkpoints_are_told_with_the_epoch_of_their_last_step(tmp_path, dataset):  # noqa: F811
    cluster = Cluster(tmp_path, config(), dataset, seed=1)
    cluster.run()
    told, schedule = taken(cluster)["checkpoints"], cluster.core.schedule
    assert len(told) > 1 and told[0]["epoch"] == 0
    assert [row["epoch"] for row in told[1:]] == [schedule.locate(row["step"] - 1)[0] for row in told[1:]]


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
