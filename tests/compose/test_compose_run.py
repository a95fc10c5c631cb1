"""The compose file as users have it: stopped, resumed, each role's container killed, to the end, and away."""

from __future__ import annotations

import os
import signal
import socket

import pytest
from engine import IMAGE, Project, run, wait
from harness import write_data, write_model

pytestmark = pytest.mark.compose

ROWS = 24_000  # a run of half a minute on the fastest of machines: it must outlive what it is put through
RUN = """
[run]
epochs = 1
seed = 3
[model]
dtype = "float32"
[plan]
token_budget = 96
bucket_edges = [16, 32]
packs_per_step = 3
[target]
slots = 6
threads = 1
self_check = false
[drafter]
threads = 1
layers = 1
taps = 2
block_size = 4
mask_token_id = 60
dtype = "float32"
[recipe]
anchors_per_pack = 16
lr = 0.003
[arena]
checksum = "always"
[checkpoint]
every_steps = 10
"""


@pytest.fixture
def project(docker, tmp_path):
    model, data = write_model(tmp_path / "models" / "tiny"), write_data(tmp_path / "data" / "tiny", rows=ROWS)
    for folder in (model.parent, data.parent):
        for file in (folder, *folder.rglob("*")):  # containers read them as another user
            file.chmod(0o755 if file.is_dir() else 0o644)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    (tmp_path / "checkout").mkdir()
    (tmp_path / "checkout" / "run.toml").write_text(RUN)
    project = Project(
        tmp_path / "checkout", f"draftmill{os.getpid()}", port,
        {
            "CONFIG_FILE": "./run.toml", "MODELS": str(model.parent), "DATA": str(data.parent),
            "DFLASH_MODEL_PATH": "/models/tiny", "DFLASH_DATA_PATH": "/data/tiny",
            "DFLASH_RUN_DIR": "/runs/tiny", "DFLASH_TARGETS": "2", "DFLASH_DRAFTERS": "1",
            "ARENA_SIZE": "64m",
        },
    )  # fmt: skip
    yield project
    project.compose("down", "-v", "--timeout", "1", check=False)


def progress(project: Project, steps: int) -> None:
    """Until `steps` more steps are committed than at the first answer."""
    wait(lambda: project.step() >= 0, "an answer", tell=project.logs)
    goal = project.step() + steps
    wait(lambda: project.step() >= goal, f"step {goal}", tell=project.logs)


def in_volume(project: Project, *words: str) -> str:
    return run("docker", "run", "--rm", "-v", f"{project.name}_runs:/runs:ro", IMAGE, *words)


def test_a_run_survives_the_death_of_each_container_and_leaves_nothing(project):
    project.compose("up", "-d", "--no-build")
    progress(project, 3)
    roles = {(role["role"], role["index"]) for role in project.status()["roles"]}
    assert ("drafter", 0) in roles and roles & {("target", 0), ("target", 1)}

    stop_and_start(project)

    victims = [project.container("target", 1), project.container("drafter"), project.container("coordinator")]
    for victim in victims:  # what the kernel or a crash does: the restart policy brings it back
        os.kill(project.state(victim)["Pid"], signal.SIGKILL)
        wait(lambda victim=victim: restarts(victim) > 0, "the policy's restart", tell=project.logs)
        progress(project, 2)
    for victim in victims:  # what a person does: the policy stands back, the person starts it again
        run("docker", "kill", victim)
        run("docker", "start", victim)
        progress(project, 2)

    wait(lambda: (project.status() or {}).get("state") == "finished", "the end", tell=project.logs)
    check_the_end(project)
    project.compose("stop")
    assert project.state(project.container("coordinator"))["ExitCode"] == 0
    kept = in_volume(project, "ls", "/runs/tiny", "/runs/tiny/checkpoints")
    assert {"ledger.sqlite", "metrics.jsonl", "result.json"} <= set(kept.split())
    assert f"ckpt-{project_timeline(kept)}" in kept
    project.compose("down", "-v")
    assert project.left() == {"containers": "", "volumes": "", "networks": "", "mounts": ""}


def stop_and_start(project: Project) -> None:
    """A clean stop ends on a recorded checkpoint, and the run goes on from there."""
    project.compose("stop")
    coordinator = project.container("coordinator")
    assert project.state(coordinator)["ExitCode"] == 8, project.logs()
    result = in_volume(project, "cat", "/runs/tiny/result.json")
    assert '"state": "stopped"' in result
    project.compose("start")
    progress(project, 2)
    status = project.status()
    assert status["counters"]["roll_backs"] == 0 and status["timeline"] == 0


def restarts(container: str) -> int:
    return int(run("docker", "inspect", "-f", "{{.RestartCount}}", container))


def check_the_end(project: Project) -> None:
    """Each sample committed once; roles at rest, well, and with nothing in memory."""
    wait(lambda: project.status()["batches_without_outcome"] is not None, "the audit", tell=project.logs)
    status = project.status()
    assert (status["batches_without_outcome"], status["batches_duplicated"]) == (0, 0)
    assert status["samples_committed"] == status["samples_total"] == ROWS and status["samples_failed"] == 0
    names = [("target", 1), ("target", 2), ("drafter", 1)]
    containers = [project.container(*name) for name in names]
    wait(
        lambda: all("sleep infinity" in run("docker", "top", c, "-o", "pid,args") for c in containers),
        "roles at rest", tell=project.logs,
    )  # fmt: skip
    for container in (*containers, project.container("coordinator")):
        wait(
            lambda c=container: project.state(c).get("Health", {}).get("Status") == "healthy",
            "a healthy container", limit_s=60, tell=lambda c=container: str(project.state(c)),
        )  # fmt: skip
    assert "draftmill_batches_without_outcome 0.0" in project.get("/metrics")


def project_timeline(kept: str) -> int:
    """Of the newest checkpoint, ckpt-TIMELINE-STEP-NAME."""
    return max(int(name.split("-")[1]) for name in kept.split() if name.startswith("ckpt-"))
